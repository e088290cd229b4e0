"""Speed of the theory task compared with naive implementations of the same rules, in CPU time.

    python benchmarks/theory.py

The naive anomaly check sums fractions over every single state. The naive mask tries each word of the vocabulary and
parses the text from the beginning. The benchmark checks that both implementations agree. Prints a table.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from fractions import Fraction
from itertools import combinations_with_replacement, product
from typing import Any

import numpy as np

from trl_grpo_tasks.tasks.theory.anomalies import anomalies
from trl_grpo_tasks.tasks.theory.constraint import after_prompt, choices, theory_constraint
from trl_grpo_tasks.tasks.theory.data import extension
from trl_grpo_tasks.tasks.theory.groups import U1, has_cubic, weights
from trl_grpo_tasks.tasks.theory.language import parse, write
from trl_grpo_tasks.tasks.theory.reward import judge
from trl_grpo_tasks.tasks.theory.task import TheoryTask
from trl_grpo_tasks.tasks.theory.theory import Theory
from trl_grpo_tasks.tasks.theory.words import VOCABULARY


def naive_is_anomaly_free(theory: Theory) -> bool:
    """Check the traces of all triples of diagonal generators over all states, and the number of SU(2) doublets."""
    states: list[tuple[Fraction, ...]] = []
    for fermion in theory.fermions:
        parts: list[list[tuple[Fraction, ...]]] = []
        for group, number in zip(theory.groups, fermion.numbers, strict=True):
            if isinstance(number, tuple):
                spread = weights.__wrapped__(group.group, number)
                parts.append([tuple(map(Fraction, w)) for w, count in spread.items() for _ in range(count)])
            else:
                parts.append([(number,)])
        for chosen in product(*parts):
            states += [tuple(value for part in chosen for value in part)] * fermion.generations
    columns = list(zip(*states, strict=True))
    for column in columns:
        if sum(column):
            return False
    for a, b, c in combinations_with_replacement(columns, 3):
        if sum(x * y * z for x, y, z in zip(a, b, c, strict=True)):
            return False
    doublets = [
        sum(x * x for x in columns[_column(theory, i)]) / 2
        for i, group in enumerate(theory.groups)
        if group.group != U1 and not has_cubic(group.group)
    ]
    return not any(count % 2 for count in doublets)


def naive_next_words(text: str) -> set[str]:
    """Return the words that may follow, by trying each word and parsing the text from the beginning."""
    return {word for word in VOCABULARY if after_prompt.__wrapped__(f"{text} {word}") or _ends(f"{text} {word}")}


def main() -> None:
    rng = random.Random(0)
    theories = [extension(rng, 4)[0] for _ in range(50)]
    assert all(naive_is_anomaly_free(theory) for theory in theories[:10])
    ours = _microseconds(lambda: [anomalies(theory) for theory in theories], 20) / len(theories)
    naive = _microseconds(lambda: [naive_is_anomaly_free(theory) for theory in theories[:10]], 1) / 10
    _line("anomalies of a Standard Model extension", ours, naive)

    prompt = TheoryTask().dataset("test", 1, 0)[0]["prompt"]
    masks, tries = _mask_times(prompt, rng)
    _line("mask and accept, per token", masks, tries)

    texts = [write(theory) for theory in theories]
    words = [len(text.split()) for text in texts]
    pairs = list(zip(texts, words, strict=True))
    read = _microseconds(lambda: [parse(text) for text in texts], 3) / len(texts)
    judged = _microseconds(lambda: [judge(parse(text), n, 400) for text, n in pairs], 3) / len(texts)
    print(f"{'parsing a theory':50}{read:10.1f} us")
    print(f"{'parsing and judging a theory':50}{judged:10.1f} us")


def _mask_times(prompt: str, rng: random.Random) -> tuple[float, float]:
    """Return microseconds per token after a warm-up: ours (mask and accept) and naive (on some of the positions)."""
    from trl_grpo_tasks.constraints import unpack
    from trl_grpo_tasks.models.tiny import make_tokenizer

    spec = TheoryTask().tiny()
    tokenizer = make_tokenizer(spec.tokens, spec.context)
    constraint = theory_constraint(tokenizer)
    for _ in range(100):
        _accept_all(constraint, tokenizer, prompt, random_walk(prompt, rng))
    texts = [random_walk(prompt, rng) for _ in range(100)]
    spent = sum(_accept_all(constraint, tokenizer, prompt, text) for text in texts)
    tokens = sum(len(text.split()) + 1 for text in texts)
    naive: list[float] = []
    for text in texts[:4]:
        words = text.split()
        for cut in range(0, len(words), 6):
            state = constraint.start({"prompt": prompt})
            assert state is not None
            before = "".join(f" {word}" for word in words[:cut])
            for token in tokenizer.encode(before, add_special_tokens=False):
                state.accept(token)
            allowed = np.flatnonzero(unpack(state.mask(), constraint.vocab_size))
            began = time.thread_time()
            expected = naive_next_words(prompt + before)
            naive.append(time.thread_time() - began)
            assert {tokenizer.convert_ids_to_tokens(int(i)).strip() for i in allowed} == expected
    return 1e6 * spent / tokens, 1e6 * sum(naive) / len(naive)


def random_walk(prompt: str, rng: random.Random) -> str:
    """Return a completion in which every choice is uniformly random."""
    written, options = "", after_prompt(prompt)
    while True:
        text, node = rng.choice(options)
        written += text
        if node is None:
            return written
        options = list(choices(node))


def _accept_all(constraint: Any, tokenizer: Any, prompt: str, text: str) -> float:
    """Return the CPU seconds of computing all masks of a text and accepting its tokens."""
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    state = constraint.start({"prompt": prompt})
    began = time.thread_time()
    for token in ids:
        state.mask()
        state.accept(token)
    return time.thread_time() - began


def _ends(text: str) -> bool:
    """Whether a text is a complete theory."""
    if not text.endswith(" END"):
        return False
    return any(
        left.strip() == "END" or (not left.strip() and node and choices(node) == [("END", None)])
        for left, node in after_prompt.__wrapped__(text.removesuffix(" END"))
    )


def _column(theory: Theory, index: int) -> int:
    """Return the index of the first weight of a group within a state."""
    return sum(1 if g.group == U1 else int(g.group[3:-1]) - 1 for g in theory.groups[:index])


def _microseconds(run: Callable[[], Any], repeats: int) -> float:
    """Return the mean CPU time of a call in microseconds, after a warm-up call."""
    run()
    began = time.thread_time()
    for _ in range(repeats):
        run()
    return 1e6 * (time.thread_time() - began) / repeats


def _line(name: str, ours: float, naive: float) -> None:
    print(f"{name:50}{ours:10.1f} us{naive:12.0f} us naive{naive / ours:8.0f}x")


if __name__ == "__main__":
    main()
