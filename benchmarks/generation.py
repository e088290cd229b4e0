"""Cost of a constraint during transformers' `generate`: milliseconds per token step with and without it.

    python benchmarks/generation.py [--model FOLDER] [--batch 64] [--length 128]

Without --model, the model is a 135M-parameter Llama with random weights over a synthetic vocabulary of 49,152 tokens.
There are two constraints: a regular expression of brick-like lines (xgrammar) and a choice tree of the same texts.
Every completion has the full length, so that steps are comparable. Prints a table and writes
benchmarks/results/generation.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from trl_grpo_tasks.constraints import ChoiceTreeConstraint, Grammar, GrammarConstraint
from trl_grpo_tasks.constraints.filters import SamplingFilters
from trl_grpo_tasks.constraints.recording import RecordingProcessor
from trl_grpo_tasks.constraints.table import MaskTable

LINES = r"([12468]x[12468] \([0-9]{1,2},[0-9]{1,2},[0-9]{1,2}\)\n){400}"


def choices(node: Any) -> list[tuple[str, Any]]:
    """The choices of a tree for the same lines; a node is the position within a line and the number of lines."""
    kind, count = node
    if count == 400:
        return [("", None)]
    if kind == "size":
        return [(f"{a}x{b} (", ("x", count)) for a in "12468" for b in "12468"]
    after = {"x": ",", "y": ",", "z": ")\n"}[kind]
    following = {"x": ("y", count), "y": ("z", count), "z": ("size", count + 1)}[kind]
    return [(f"{value}{after}", following) for value in range(20)]


def synthetic_tokenizer(size: int) -> Any:
    """A tokenizer over single characters and longer strings of them, up to the vocabulary size."""
    import itertools

    from trl_grpo_tasks.models.tiny import make_tokenizer

    characters = [chr(c) for c in range(32, 127)]
    longer = ("".join(t) for n in (2, 3) for t in itertools.product(characters, repeat=n))
    tokens = characters + list(itertools.islice(longer, size - len(characters) - 4))
    return make_tokenizer(tokens, 2048)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model folder (default: a 135M Llama with random weights)")
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--batch", type=int, default=64 if on_gpu else 8)
    parser.add_argument("--length", type=int, default=128 if on_gpu else 16)
    parser.add_argument("--repeats", type=int, default=5 if on_gpu else 2)
    options = parser.parse_args()
    device = torch.device("cuda" if on_gpu else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if options.model:
        tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype, trust_remote_code=False).to(device)
    else:
        tokenizer = synthetic_tokenizer(49152)
        config = LlamaConfig(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
                             num_attention_heads=9, num_key_value_heads=3)  # fmt: skip
        model = LlamaForCausalLM(config).to(device, dtype)
    prompt = tokenizer("build a table", return_tensors="pt")["input_ids"].repeat(options.batch, 1).to(device)
    constraints: dict[str, Any] = {
        "none": None,
        "regex": GrammarConstraint(tokenizer, Grammar.regex(LINES)),
        "choice tree": ChoiceTreeConstraint(tokenizer, lambda row: ("size", 0), choices, look_ahead=False),
    }

    def step_ms(constraint: Any) -> float:
        processors = []
        if constraint is not None:
            table = MaskTable(model.config.vocab_size)
            processors = [RecordingProcessor([{}] * options.batch, 1.0, SamplingFilters(), constraint, table)]
        start = time.perf_counter()
        with torch.no_grad():
            model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), do_sample=True, top_k=0,
                           max_new_tokens=options.length, min_new_tokens=options.length,
                           logits_processor=processors, pad_token_id=0)  # fmt: skip
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / options.length * 1e3

    # Constraints alternate, so that a slowdown of the machine affects all of them; the first round is a warm-up.
    rounds = [{name: step_ms(c) for name, c in constraints.items()} for _ in range(options.repeats + 1)][1:]
    print(f"batch {options.batch}, {options.length} tokens, {dtype} on {device}, median of {options.repeats}")
    results = {name: statistics.median(one[name] for one in rounds) for name in constraints}
    for name, value in results.items():
        print(f"{name:<12} {value:8.2f} ms per step   {value / results['none'] - 1:+.1%}")
    path = Path(__file__).parent / "results" / "generation.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"device": str(device), "batch": options.batch, "ms_per_step": results}, indent=1))


if __name__ == "__main__":
    main()
