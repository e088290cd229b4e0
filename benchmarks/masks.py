"""What a mask costs: microseconds per token (mask and accept together) for grammars and choice trees, on one core.

    python benchmarks/masks.py                              # a 49k vocabulary trained on made-up words on the spot
    python benchmarks/masks.py --tokenizer FOLDER_OR_GGUF   # the tokenizer of a model

Each row writes random texts, choosing uniformly among the allowed tokens, and times only the constraint.
Prints a table and writes benchmarks/results/masks.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from trl_grpo_tasks.constraints import ChoiceTreeConstraint, Constraint, Grammar, GrammarConstraint, Vocabulary, unpack

SIZES = [
    (1, 1),
    (1, 2),
    (2, 1),
    (1, 4),
    (4, 1),
    (1, 6),
    (6, 1),
    (1, 8),
    (8, 1),
    (2, 2),
    (2, 4),
    (4, 2),
    (2, 6),
    (6, 2),
]
LINES = r"([12468]x[12468] \((1?[0-9]),(1?[0-9]),(1?[0-9])\)\n)+"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["table", "chair", "bridge"]},
        "parts": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 19}, "fixed": {"type": "boolean"}},
                "required": ["x", "fixed"],
            },
        },
    },
    "required": ["name", "kind", "parts"],
}
BOUNDED = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}}, "required": ["name"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", help="a folder with a tokenizer, or a .gguf file")
    parser.add_argument("--tokens", type=int, default=4000, help="tokens timed in each row")
    parser.add_argument("--vocab-size", type=int, default=49152, help="of the made-up vocabulary")
    parser.add_argument("--output", default=str(Path(__file__).parent / "results" / "masks.json"))
    arguments = parser.parse_args()

    tokenizer = load_tokenizer(arguments.tokenizer) if arguments.tokenizer else made_up(arguments.vocab_size)
    began = time.perf_counter()
    vocabulary = Vocabulary.of(tokenizer)
    print(f"{vocabulary.size} tokens, read and sorted in {time.perf_counter() - began:.2f} s\n")
    makers: dict[str, Callable[[], Constraint]] = {
        "regular expression, brick lines": lambda: GrammarConstraint(tokenizer, Grammar.regex(LINES)),
        "JSON schema": lambda: GrammarConstraint(tokenizer, Grammar.json_schema(SCHEMA)),
        "JSON string with a maxLength": lambda: GrammarConstraint(tokenizer, Grammar.json_schema(BOUNDED)),
        "choice tree, bricks do not collide": lambda: brick_tree(tokenizer, look_ahead=False),
        "the same, looking ahead": lambda: brick_tree(tokenizer, look_ahead=True),
    }
    print(f"{'constraint':36}{'median us':>10}{'p90 us':>9}{'mean us':>9}{'start ms':>10}")
    rows = []
    for name, make in makers.items():
        row = {"constraint": name, "vocabulary": vocabulary.size, **measure(make, arguments.tokens)}
        rows.append(row)
        print(
            f"{name:36}{row['median_us']:10.1f}{row['p90_us']:9.1f}{row['mean_us']:9.1f}{row['first_start_ms']:10.1f}"
        )
    machine = {"machine": platform.machine(), "processors": os.cpu_count(), "python": platform.python_version()}
    output = Path(arguments.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({"tokenizer": arguments.tokenizer or "made up", **machine, "rows": rows}, indent=2))


def measure(make: Callable[[], Constraint], tokens: int, longest: int = 400) -> dict[str, float]:
    """Times of mask and accept over random texts, which end early only where they must."""
    began = time.perf_counter()
    constraint = make()
    constraint.start({})
    first_start = time.perf_counter() - began
    gc.collect()
    gc.freeze()  # or now and then a token waits for the collector to go through all objects of the libraries
    chance = random.Random(0)
    times: list[float] = []
    while len(times) < tokens:
        state = constraint.start({})
        assert state is not None
        for _ in range(longest):
            t0 = time.perf_counter()
            mask = state.mask()
            t1 = time.perf_counter()
            allowed = np.flatnonzero(unpack(mask, constraint.vocab_size))
            token = int(allowed[chance.randrange(len(allowed))])
            t2 = time.perf_counter()
            state.accept(token)
            times.append(time.perf_counter() - t2 + t1 - t0)
            if state.finished:
                break
    microseconds = np.array(times) * 1e6
    return {
        "median_us": float(np.median(microseconds)),
        "p90_us": float(np.percentile(microseconds, 90)),
        "mean_us": float(microseconds.mean()),
        "first_start_ms": first_start * 1e3,
        "tokens": len(times),
    }


def brick_tree(tokenizer: Any, look_ahead: bool) -> ChoiceTreeConstraint:
    """Lines `2x4 (3,0,1)` in a 20x20x20 world where no two bricks overlap. A node holds all bricks placed before, so
    every node is new; after 60 bricks the text must end."""

    def choices(node: tuple) -> list[tuple[str, tuple | None]]:
        step, bricks, *chosen = node
        if step == "size":
            if len(bricks) == 60:
                return [("", None)]
            return [(f"{h}x{w} (", ("x", bricks, h, w)) for h, w in SIZES]
        if step == "x":
            h, w = chosen
            return [(f"{x},", ("y", bricks, h, w, x)) for x in range(21 - h)]
        if step == "y":
            h, w, x = chosen
            return [(f"{y},", ("z", bricks, h, w, x, y)) for y in range(21 - w)]
        h, w, x, y = chosen
        taken = {c for (a, b, i, j, c) in bricks if i < x + h and x < i + a and j < y + w and y < j + b}
        free = [z for z in range(20) if z not in taken]
        return [(f"{z})\n", ("size", (*bricks, (h, w, x, y, z)))) for z in free]

    return ChoiceTreeConstraint(tokenizer, lambda row: ("size", ()), choices, look_ahead=look_ahead)


def load_tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer

    if path.endswith(".gguf"):
        return AutoTokenizer.from_pretrained(str(Path(path).parent), gguf_file=Path(path).name)
    return AutoTokenizer.from_pretrained(path)


def made_up(vocab_size: int) -> Any:
    """A byte-level BPE tokenizer trained on random words, numbers and brick lines."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    chance = random.Random(0)
    syllables = [a + b + c for a in "bcdfghklmnprst" for b in "aeiou" for c in ("", "n", "r", "st")]
    words = ["".join(chance.choices(syllables, k=chance.randint(1, 4))) for _ in range(vocab_size)]
    numbers = [
        f"{chance.randint(1, 8)}x{chance.randint(1, 8)} ({chance.randint(0, 19)},{n % 20},1)\n" for n in range(999)
    ]
    lines = [" ".join(words[start : start + 8]) + ", " for start in range(0, len(words), 8)] * 2 + numbers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


if __name__ == "__main__":
    main()
