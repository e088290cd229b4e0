"""The data sets of reasoning-gym: their configurations, the levels of their curricula, and their entries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any

from ..task import nearest

STREAM = 2_000  # indices per seed; some data sets make them all at once
# Data sets whose entries do not depend on their seed alone: most iterate over sets of text, whose order depends on the
# hash seed of the interpreter, and list_functions draws from Python's global generator. See _stable_entries.
UNSTABLE = (
    "isomorphic_strings",
    "knight_swap",
    "list_functions",
    "polynomial_multiplication",
    "ransom_note",
    "word_ladder",
)
# Levels of curricula that can be used, where the library fails on most questions of the next level (countdown,
# knight_swap, letter_jumble, spell_backward), has one or two (game_of_life_halting, puzzle24), or did not end within
# 25 seconds on some (jugs, number_sequence).
USABLE_LEVELS = {
    "countdown": 2,
    "game_of_life_halting": 2,
    "jugs": 3,
    "knight_swap": 0,
    "letter_jumble": 2,
    "number_sequence": 2,
    "puzzle24": 2,
    "spell_backward": 4,
}
BATCH = 16  # entries of these that are made at once
PROGRAM = """
import json, random, sys
from trl_grpo_tasks.adapters.reasoning_gym_data import BATCH, create
first, *key = json.loads(sys.argv[1])
made = create(*key)
print(json.dumps([random.seed(index) or made[index] for index in range(first, first + BATCH)]))
"""


class GymData:
    """Entries of data sets by their index, name, level and seed; a level of None is the ordinary configuration.

    The completions of a group share an entry, which takes some data sets a second to make; hence the caches.
    """

    def __init__(self, configs: Mapping[str, dict[str, Any]]):
        self.data_set = lru_cache(64)(lambda name, level, seed: create(name, level, seed, configs[name]))
        self._made = lru_cache(256)(lambda index, *key: self.data_set(*key)[index])
        self._batch = lru_cache(64)(lambda first, *key: _stable_entries(first, *key, configs[key[0]]))

    def entry(self, index: int, *key: Any) -> dict[str, Any]:
        if key[0] in UNSTABLE:
            return self._batch(index - index % BATCH, *key)[index % BATCH]
        return self._made(index, *key)


def read_config(text: str | None, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The configuration of each data set; ValueError for one that is not JSON or has unknown fields."""
    from reasoning_gym.factory import DATASETS

    try:
        given = json.loads(text or "{}")
    except ValueError as error:
        raise ValueError(f"--gym_config {text!r} is not JSON: {error}") from error
    by_name = {names[0]: given} if len(names) == 1 else given
    if not isinstance(by_name, dict) or not all(isinstance(one, dict) for one in by_name.values()):
        raise ValueError(f"--gym_config {text!r} must be a JSON object" + (
            f" with one object per data set: {', '.join(names)}" if len(names) > 1 else ""))  # fmt: skip
    for name, config in by_name.items():
        if name not in names:
            raise ValueError(f"--gym_config: {name!r} is not in the mixture; data sets are: {', '.join(names)}")
        known = [one.name for one in fields(DATASETS[name][1]) if one.name not in ("seed", "size")]
        if unknown := [field for field in config if field not in known]:
            raise ValueError(f"--gym_config: {name} has no field {unknown[0]!r}{nearest(unknown[0], known)}; "
                             f"fields are: {', '.join(known)}")  # fmt: skip
    return {name: by_name.get(name, {}) for name in names}


def answer_of(entry: Mapping[str, Any]) -> str | None:
    """A right answer: the entry's, or the example that data sets with many right answers give; None without one."""
    given = entry["metadata"]
    examples = (given.get(name) for name in ("example_answer", "example_correct_answer", "possible_answer"))
    answer = entry["answer"] if entry["answer"] is not None else next(filter(None, examples), None)
    return answer if answer is None or isinstance(answer, str) else json.dumps(answer)


@lru_cache
def levels_of(name: str) -> list[dict[str, Any]]:
    """The configurations of a data set's curriculum, from easy to hard, without those that cannot be used."""
    from reasoning_gym.coaching.base_curriculum import DefaultCurriculumContext, RangeAttributeMode
    from reasoning_gym.factory import create_curriculum, has_curriculum

    configs: list[dict[str, Any]] = []
    if not has_curriculum(name):
        return configs
    curriculum = create_curriculum(name)
    for level in range(max(len(attribute.levels) for attribute in curriculum.attributes.values())):
        curriculum.set_global_level(level)
        config = curriculum.generate_configuration(context=DefaultCurriculumContext(RangeAttributeMode.UPPER_BOUND))
        try:
            getattr(config, "validate", lambda: None)()
        except (AssertionError, ValueError):
            continue
        configs.append({field.name: getattr(config, field.name) for field in fields(config)})
    return configs[: USABLE_LEVELS.get(name)]


def create(name: str, level: str | None, seed: int, given: dict[str, Any]) -> Any:
    """The data set with the given configuration, on top of that of a level where one is named."""
    from reasoning_gym.factory import create_dataset

    config = (levels_of(name)[int(level)] if level is not None else {}) | given | {"seed": seed, "size": STREAM}
    try:
        return create_dataset(name, **config)
    except (AssertionError, ValueError, TypeError) as error:
        at = f" at level {level}" if level is not None else ""
        raise ValueError(f"--gym_config: reasoning-gym refuses this configuration of {name}{at}: {error}") from error


def _stable_entries(first: int, *key: Any) -> list[dict[str, Any]]:
    """The entries of an unstable data set from index `first` on, made in an interpreter with a fixed hash seed and a
    seeded global generator, so that they are the same in every process."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([first, *key])],
        env=os.environ | {"PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    if ran.returncode:
        raise ValueError(f"reasoning-gym could not make questions of {key[0]}: {ran.stderr.strip()[-300:]}")
    return json.loads(ran.stdout.splitlines()[-1])
