"""The words of a command line before a parser reads them: the task or the models, full names of options, values."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..report.run_folder import settings_of
from .help_screens import HELP_ALL, PROGRAM

# Values of --resume_from_checkpoint besides a path.
NEWEST = "newest"  # the newest complete checkpoint, which must exist; the flag without a value
AUTO = "auto"  # the newest complete checkpoint, or the beginning if there is none
# Short names of options, on the command line only.
ALIASES = {
    "--model": "--model_name_or_path",
    "--out": "--output_dir",
    "--lr": "--learning_rate",
    "--batch_size": "--per_device_train_batch_size",
    "--steps": "--max_steps",
}


def with_task_option(argv: Sequence[str]) -> list[str]:
    """The words with a task that is given as the first word written as --task TASK."""
    words = list(argv)
    if not words or words[0].startswith("-"):
        return words
    task, *rest = words
    named = flags_of(with_full_names(rest)).get("task", task)
    if named != task:
        raise ValueError(f"the task is given twice, as {task!r} and as --task {named!r}; give it once")
    return rest if "task" in flags_of(rest) else ["--task", task, *rest]


def with_models_option(argv: Sequence[str]) -> list[str]:
    """The words of eval with models that are given as the first words written as --models MODEL ..."""
    models = list(itertools.takewhile(lambda word: not word.startswith("-"), argv))
    rest = list(argv[len(models) :])
    if models and "models" in flags_of(rest):
        raise ValueError(
            f"eval takes models as its first words and the task as an option: {PROGRAM} eval NAME=MODEL ... --task "
            f"{models[0]}"
        )
    return [*(["--models", *models] if models else []), *rest]


def first_run(words: Sequence[str]) -> str | None:
    """The first of the models that eval compares, or the value of --model, that is the folder of a run."""
    start = next((words.index(name) + 1 for name in ("--models", "--model_name_or_path") if name in words), len(words))
    given = itertools.takewhile(lambda word: not word.startswith("--"), words[start:])
    folders = (word if Path(word).is_dir() else word.partition("=")[2] for word in given)
    return next((folder for folder in folders if folder and settings_of(folder)), None)


def numbers_among(given: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among the values of options. Of other values, the parser says what is wrong."""
    numbers: dict[str, float] = {}
    for name, value in given.items():
        for kind in (float, int):  # text without a decimal point is shown as a whole number
            with suppress(TypeError, ValueError):
                numbers[name] = kind(str(value))
    return numbers


def with_full_names(argv: Sequence[str]) -> list[str]:
    """The words with every option under its full name, with underscores. TRL's parser looks for `--config FILE` in two
    words. `--resume_from_checkpoint` alone means the newest complete checkpoint."""
    words: list[str] = []
    typed: dict[str, str] = {}
    for text, after in zip(argv, [*argv[1:], "--"], strict=False):
        match = re.fullmatch(r"(--[a-zA-Z][\w-]*)(?:=(.*))?", text, re.DOTALL)
        if match is None or text == HELP_ALL:
            words.append(text)
            continue
        name = f"--{match[1][2:].replace('-', '_')}"
        name = ALIASES.get(name, name)
        if typed.setdefault(name, match[1]) != match[1]:
            raise ValueError(f"{typed[name]} and {match[1]} are the same option; give one of them")
        needs_value = match[2] is None and after.startswith("--")
        if name in ("--task", "--config"):
            if needs_value:
                raise ValueError(f"{name} needs a value")
            if name in words:
                raise ValueError(f"{name} is given twice; give it once")
            words += [name] if match[2] is None else [name, match[2]]
        elif name == "--resume_from_checkpoint" and needs_value:
            words += [name, NEWEST]
        else:
            words.append(name if match[2] is None else f"{name}={match[2]}")
    return words


def flags_of(words: Sequence[str]) -> dict[str, str]:
    """Option -> value, of words with full names; a flag alone is true, and the last of several values counts."""
    flags: dict[str, str] = {}
    for word, after in zip(words, [*words[1:], "--"], strict=False):
        if word.startswith("--"):
            name, is_joined, value = word[2:].partition("=")
            flags[name] = value if is_joined else "true" if after.startswith("--") else after
    return flags
