"""Rows of the theory task: prompts are truncated texts of theories that are known to succeed."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

from ...files import check_local_path
from .constraint import check_prompt
from .examples import NAMES, named
from .language import write
from .reward import judge
from .tensors import reps_of
from .terms import with_all_terms
from .theory import Fermion, Theory, conjugate_number
from .words import CHARGES, MASSES, MAX_GENERATIONS, MAX_MULTIPLETS

TEST_SHARE = 5  # one of this many prompts belongs to the test split
DEFAULT_ROWS = {"train": 512, "test": 64}
_TRIES = 300  # stop after this many attempts without a new prompt
_HEAVY = [mass for mass in MASSES if mass >= 300]
_SMALL = (0.0, 1e-6, 1e-3, 0.01, 0.1)


def generate(start: str, split: str, size: int | None, seed: int, most_new: int) -> list[dict[str, Any]]:
    """Generate rows of one kind of prompt.

    The split of a prompt depends only on its text, not on the seed. The test split has no duplicates, so it may have
    fewer than `size` rows.
    """
    wanted = DEFAULT_ROWS[split] if size is None else size
    makers = list(STARTS.values()) if start == "mixed" else [STARTS[start]]
    rows: list[dict[str, Any]] = []
    seen: set[str] = set()
    index = useless = 0
    while len(rows) < wanted and useless < _TRIES:
        rng = random.Random(f"{seed}-{split}-{start}-{index}")
        prompt, gold = makers[index % len(makers)](rng, most_new)
        index, useless = index + 1, useless + 1
        if is_test(prompt) == (split == "test") and (split == "train" or prompt not in seen):
            seen.add(prompt)
            rows.append({"prompt": prompt, "gold": gold})
            useless = 0
    return rows


def read_prompts(path: str) -> dict[str, list[dict[str, Any]]]:
    """Read the rows of both splits from a file: each line is a prompt, or a JSON object with `prompt` and `gold`."""
    file = Path(path).expanduser()
    check_local_path(path, "--prompts_file")
    if not file.is_file():
        raise ValueError(f"--prompts_file {path}: this file does not exist")
    prompts = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line) if line.lstrip().startswith("{") else {"prompt": line.strip()}
            if not isinstance(row.get("prompt"), str):
                raise ValueError("a JSON line needs a string under 'prompt'")
            check_prompt(row["prompt"])
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        prompts.append(row)
    if not prompts:
        raise ValueError(f"--prompts_file {path} contains no prompt")
    splits = {split: [row for row in prompts if is_test(row["prompt"]) == (split == "test")] for split in DEFAULT_ROWS}
    # With few prompts one split may be empty; it then uses all prompts.
    return {split: rows or prompts for split, rows in splits.items()} if len(prompts) < TEST_SHARE else splits


def is_test(prompt: str) -> bool:
    return int(hashlib.sha256(prompt.encode()).hexdigest(), 16) % TEST_SHARE == 0


# ---- kinds of prompt


def _standard_model(rng: random.Random, most_new: int) -> tuple[str, str]:
    """Give the Standard Model and the number of multiplets; the new ones are missing."""
    theory, new = extension(rng, most_new)
    return cut(theory, len(theory.fermions) - new)


def _one_given(rng: random.Random, most_new: int) -> tuple[str, str]:
    """Give the Standard Model and the first new multiplet."""
    theory, new = extension(rng, most_new, least_new=2)
    return cut(theory, len(theory.fermions) - new + 1)


def _groups(rng: random.Random, most_new: int) -> tuple[str, str]:
    """Give groups, vevs and the number of multiplets; all fermions are missing."""
    theory = named(rng.choice(NAMES)) if rng.random() < 0.2 else extension(rng, most_new)[0]
    return cut(_shuffled(theory, rng), 0)


def _scratch(rng: random.Random, most_new: int) -> tuple[str, str]:
    """Give the first few words: the number of groups, and sometimes the groups."""
    theory = named(rng.choice(NAMES)) if rng.random() < 0.5 else extension(rng, most_new)[0]
    words = write(theory).split()
    end = rng.randrange(4, words.index("SYMMETRY_BREAKING") + 3)
    return " ".join(words[:end]), " " + " ".join(words[end:])


STARTS: dict[str, Callable[[random.Random, int], tuple[str, str]]] = {
    "standard_model": _standard_model,
    "one_given": _one_given,
    "groups": _groups,
    "scratch": _scratch,
}


def cut(theory: Theory, given: int) -> tuple[str, str]:
    """Split the text of a theory after its first `given` fermions."""
    words = write(theory).split()
    starts = [place for place, word in enumerate(words) if word == "FERMION"] + [words.index("INTERACTIONS")]
    return " ".join(words[: starts[given]]), " " + " ".join(words[starts[given] :])


# ---- theories that succeed


def extension(rng: random.Random, most_new: int, least_new: int = 1) -> tuple[Theory, int]:
    """Return a successful extension of the Standard Model, and the number of new multiplets, which come last."""
    model = _shuffled(named("standard_model"), rng)
    most = min(most_new, MAX_MULTIPLETS - len(model.fermions))
    while True:
        count = rng.randint(min(least_new, most), most)
        if count == len(model.fermions) and rng.random() < 0.3:
            new = [Fermion(f"new{n}", f.numbers, 1) for n, f in enumerate(model.fermions)]  # a fourth generation
        else:
            new = list(_vectorlike(rng, model, count))
        rng.shuffle(new)
        if {(f.numbers, f.generations) for f in new} & {(f.numbers, f.generations) for f in model.fermions}:
            continue
        theory = _with_values(Theory(model.groups, (*model.fermions, *new), model.scalars, model.terms), rng)
        if not judge(theory, 0, 1).problems and len({(f.numbers, f.generations) for f in new}) == count:
            return theory, count


def _vectorlike(rng: random.Random, theory: Theory, count: int) -> Iterator[Fermion]:
    """Generate pairs of conjugate fields and, for an odd number, one that is its own conjugate."""
    reps = [list(reps_of(group.group).values()) for group in theory.groups[:2]]
    real = [pair for pair in product(*reps) if pair[0] in (reps[0][0], reps[0][3]) and pair[1] != reps[1][1]]
    if count % 2:
        yield Fermion("real", (*rng.choice(real), Fraction(0)), rng.randint(1, MAX_GENERATIONS))
    for n in range(count // 2):
        generations = rng.randint(1, MAX_GENERATIONS)
        numbers = (rng.choice(reps[0]), rng.choice(reps[1]), rng.choice(CHARGES))
        yield Fermion(f"new{n}", numbers, generations)
        opposite = tuple(conjugate_number(group.group, q) for group, q in zip(theory.groups, numbers, strict=True))
        yield Fermion(f"mirror{n}", opposite, generations)


def _with_values(theory: Theory, rng: random.Random) -> Theory:
    """Set heavy masses and small couplings for terms that have no value yet."""
    terms = []
    for term in with_all_terms(theory).terms:
        if not any(term.values):
            first, second = theory.fermion(term.first).generations, theory.fermion(term.second).generations
            if term.scalar is None:
                value = rng.choice(_HEAVY) if first == second else 0.0
            else:
                chiral = first == second == 1 and rng.random() < 0.5
                value = rng.choice((1.0, 2.0, 3.0)) if chiral else rng.choice(_SMALL)
            term = replace(term, values=(value,) * len(term.values))
        terms.append(term)
    return replace(theory, terms=tuple(terms))


def _shuffled(theory: Theory, rng: random.Random) -> Theory:
    """Return the same theory with its fermions in random order."""
    return with_all_terms(replace(theory, fermions=tuple(rng.sample(theory.fermions, len(theory.fermions)))))
