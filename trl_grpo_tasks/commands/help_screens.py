"""Help: one screen for `-h`, every option for `--help-all`."""

from __future__ import annotations

import argparse
import copy
import os
import re
import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

from ..registry import TASKS, find_task_class

PROGRAM = "trl-grpo-tasks"
WIDTH = 100  # columns
LINES = 40  # of a screen
HELP_FLAGS = ("-h", "--help")
HELP_ALL = "--help-all"
FIRST_SENTENCE = re.compile(r"(?<=[.;:]) (?=[A-Z0-9'])")  # what ends it

# The options that most runs need. Their defaults are the task's or TRL's; --help-all shows them.
RUN_OPTIONS = {
    "--config RECIPE": "a recipe's name such as brick/single_gpu, or a YAML file with options",
    "--model MODEL": "a Hub id, a folder, a .gguf file, or tiny: the task's own (default)",
    "--out DIR": "the folder of the run (default: outputs/TASK)",
    "--steps N": "optimizer steps",
    "--lr X": "learning rate",
    "--batch_size N": "completions per device and forward pass",
    "--num_generations N": "completions per prompt: the group size of GRPO",
    "--max_completion_length N": "maximum number of tokens in a completion",
    "--temperature X": "sampling temperature",
    "--beta X": "weight of the KL penalty against the reference model",
    "--constrain BOOL": "sample under the task's constraint",
    "--repair_turns N": "answers per completion: after a failure, its reason is fed back",
    "--use_peft BOOL": "train a LoRA adapter instead of all weights",
    "--cold_start_steps N": "supervised steps on the task's gold answers before GRPO",
    "--eval_rows N": "held-out rows in evaluations; --samples N completions for each",
    "--resume_from_checkpoint": "resume the run in --out; add auto to start if there is none",
}
EVAL_OPTIONS = {
    "RUN_OR_MODEL ...": "what to compare, also as NAME=MODEL: runs, models, .jsonl files of completions",
    "--task TASK": "the task, if the first model is not a run of a built-in task; its options may follow",
    "--config RECIPE": "a recipe, whose options of the task and of sampling are used",
    "--out DIR": "where evaluation.json and evaluation.md go (default: outputs/TASK)",
    "--eval_rows N": "held-out rows (default: 64)",
    "--samples N": "completions per row (default: 4), and the largest k of pass@k",
    "--temperature X": "sampling temperature; 0 takes the likeliest token",
    "--top_p X": "nucleus sampling; --top_k N and --min_p X are the other filters",
    "--max_completion_length N": "maximum number of tokens in a completion",
    "--constrain BOOL": "sample under the task's constraint",
    "--editor NAME": "an editor of the task, which may delete generated text",
    "--seed N": "seed of the rows and of sampling (default: 42)",
}
SCREENS: dict[str, dict[str, Any]] = {
    "train": {
        "usage": "[TASK] [--config RECIPE] [--option value ...]",
        "description": "Train a model on a task with GRPO, first on gold answers if there is a cold start. Evaluate "
        "it before and after, and write a report.",
        "options": RUN_OPTIONS,
        "examples": [
            "trl-grpo-tasks train brick --out outputs/demo",
            "trl-grpo-tasks train theory --model HuggingFaceTB/SmolLM2-135M --use_peft --lr 1e-4",
            "accelerate launch train.py --config brick/multi_gpu",
        ],
    },
    "eval": {
        "usage": "RUN_OR_MODEL ... [--task TASK] [--option value ...]",
        "description": "Evaluate models, adapters, checkpoints and files of completions on the same held-out rows, "
        "and print their metrics side by side with 95% intervals. An evaluation that was stopped resumes.",
        "options": EVAL_OPTIONS,
        "examples": [
            "trl-grpo-tasks eval outputs/demo --editor rollback",
            "trl-grpo-tasks eval base=tiny trained=outputs/demo --samples 8",
            "accelerate launch -m trl_grpo_tasks.commands.main eval outputs/my_run --task my_task.py",
        ],
    },
}


def asks_for_help(arguments: Sequence[str]) -> bool:
    return any(word in (*HELP_FLAGS, HELP_ALL) for word in arguments)


def command_screen(command: str, task: str | None = None) -> str:
    """The screen of train or eval; with the options of a task, if one is named."""
    parts = SCREENS[command]
    program = f"{PROGRAM} {command}"
    if command == "train" and os.path.basename(sys.argv[0]) == "train.py":
        program = "accelerate launch train.py"
    described = (
        f"TASK is a built-in task ({', '.join(sorted(TASKS))}), a .py file, a module, or trl:module:function; a "
        "recipe names its own task."
    )
    more = f"'{PROGRAM} {command} {HELP_ALL} [WORD]' lists every option, or those about WORD."
    sections = {"options": parts["options"]}
    usage, description = f"{program} {parts['usage']}", f"{parts['description']} {described}"
    return screen(usage, description, sections, parts["examples"], more, task=task)


def screen(
    usage: str, description: str, sections: Mapping[str, dict[str, str]], examples: Sequence[str], more: str = "",
    *, task: str | None = None, lines: int = LINES, word: str | None = None,
) -> str:  # fmt: skip
    """A help screen of at most this many lines: usage, what the command does, its options under headings, those of a
    task (only the ones that contain the word, if one is given), examples, and where there is more help."""
    wrapped = textwrap.wrap(f"usage: {usage}", WIDTH, subsequent_indent="         ", break_on_hyphens=False)
    start = [*wrapped, "", *textwrap.wrap(description, WIDTH)]
    for title, options in sections.items():
        start += ["", f"{title}:", *columns(options)] if options else []
    end = ["", "examples:", *(f"  {command}" for command in examples)] if examples else []
    end += ["", more] if more else []
    own = [] if task is None else task_options(task, lines - len(start) - len(end), word)
    return "\n".join([*start, *own, *end])


def help_word(arguments: Sequence[str]) -> str | None:
    """The word after --help-all, by which options are chosen."""
    place = list(arguments).index(HELP_ALL) + 1 if HELP_ALL in arguments else len(arguments)
    return None if place >= len(arguments) or arguments[place].startswith("-") else arguments[place]


def mentions(word: str | None, *texts: str | None) -> bool:
    """Whether one of the texts contains the word; True without a word."""
    return (word or "").lower() in " ".join(map(str, texts)).lower()


def columns(entries: dict[str, str], most: int = 28) -> list[str]:
    """Names and what they mean, side by side."""
    width = 2 + max((len(name) for name in entries if len(name) <= most), default=0)
    lines = []
    for name, meaning in entries.items():
        indent = " " * (2 + width)
        wrapped = textwrap.wrap(meaning, WIDTH, initial_indent=indent, subsequent_indent=indent) or [""]
        if len(name) <= most:
            wrapped[0] = f"  {name:{width}}{wrapped[0].lstrip()}".rstrip()
        else:
            wrapped.insert(0, f"  {name}")
        lines += wrapped
    return lines


def task_options(task: str, room: int, word: str | None = None) -> list[str]:
    """The options of a task: with their meaning if that takes at most `room` lines, else their names. With a word,
    those that contain it."""
    task_class = find_task_class(task)
    meanings = {f"--{one.name}": one.metadata.get("help", "") for one in fields(task_class.Options)}
    meanings = {name: text for name, text in meanings.items() if mentions(word, name, text)}
    if not meanings:
        return []
    title = ["", f"options of task {task_class.name}:"]
    first_sentences = {name: FIRST_SENTENCE.split(text, 1)[0].rstrip(".:;") for name, text in meanings.items()}
    described = columns(first_sentences)
    if len(title) + len(described) <= room:
        return title + described
    names = textwrap.wrap(" ".join(meanings), WIDTH, initial_indent="  ", subsequent_indent="  ",
                          break_on_hyphens=False, break_long_words=False)  # fmt: skip
    return title + names


class FullHelp(argparse.ArgumentDefaultsHelpFormatter):
    """Each option in as few lines as possible: without its hyphenated spelling, with a short name for its value."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=32, width=WIDTH)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = copy.copy(action)
        shown.option_strings = [name for name in action.option_strings if "-" not in name.lstrip("-")]
        if len(", ".join(map(str, action.choices or ()))) > WIDTH // 3:
            shown.choices, shown.metavar = None, "NAME"
        *aliases, last = shown.option_strings or [""]
        shown.option_strings = [last]
        return ", ".join([*aliases, super()._format_action_invocation(shown)])

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return {"int": "N", "float": "X", "string_to_bool": "BOOL"}.get(getattr(action.type, "__name__", ""), "VALUE")

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if isinstance(action, argparse._StoreFalseAction):  # its text describes the option that it turns off
            return f"Turn --{action.dest} off."
        text = action.help if action.default is None else super()._get_help_string(action)
        choices = ", ".join(map(str, action.choices or ()))
        return f"{text} Choices: {choices}." if len(choices) > WIDTH // 3 else text


def group_options(parser: Any, titles: Mapping[str, Collection[str]], others: str) -> None:
    """Put these options under headings of their own; the rest come last, under the heading `others`."""
    theirs = parser._optionals
    theirs.title = others
    for title, own in titles.items():
        group = parser.add_argument_group(title)
        group._group_actions = [action for action in theirs._group_actions if action.dest in own]
        theirs._group_actions = [action for action in theirs._group_actions if action.dest not in own]
    parser._action_groups.sort(key=lambda group: group is theirs)
