"""Options of a run: TRL's parser over our options, TRL's and those of the task, from flags and a recipe."""

from __future__ import annotations

import difflib
import itertools
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..redact import redacted_words, remember
from ..registry import TASKS, check_task_name, find_task_class, get_task
from ..report.page import option_words, task_of
from ..task import Task, option
from ..training.ranges import check_ranges
from .command_words import (
    ALIASES,
    NEWEST,
    first_run,
    flags_of,
    numbers_among,
    with_full_names,
    with_models_option,
    with_task_option,
)
from .defaults import describe, kind_of, layers
from .help_screens import (
    HELP_ALL,
    PROGRAM,
    RUN_OPTIONS,
    FullHelp,
    asks_for_help,
    command_screen,
    group_options,
    help_word,
    mentions,
)
from .hub import take_token
from .old_names import OLD_NAMES, refuse_old_options
from .recipes import check_recipe_value, find_recipe, read_recipe

OUR_BONUS = 0.1  # how much less alike one of our options may be than one of TRL's to be suggested instead of it


@dataclass
class RunArguments:
    """Options of what a run does around GRPO: its task, the cold start, and the evaluations."""

    # Not options: the kind of weights, the defaults that were taken, as text, and the names of the options given.
    kind: str = field(default="full", init=False)
    defaults: list[str] = field(default_factory=list, init=False)
    given: list[str] = field(default_factory=list, init=False)
    task: str | None = option(None, "A built-in task, a .py file with a task, or a module. Also the first word.")
    cold_start_steps: int = option(0, "Supervised steps on the task's gold answers before GRPO. 0: no cold start.")
    cold_start_rows: int | None = option(
        None, "Rows whose gold answers the cold start sees. Not given: all training rows."
    )
    cold_start_learning_rate: float = option(1e-3, "Learning rate of the cold start.")
    cold_start_batch_size: int = option(32, "Rows per step and device in the cold start.")
    eval_only: bool = option(False, "Evaluate on held-out rows and stop, like the command eval.")
    eval_before_and_after: bool = option(True, "Evaluate on held-out rows before and after GRPO.")
    models: list[str] | None = option(
        None,
        "For eval: what to compare, each as NAME=MODEL or MODEL. Also the first words of eval. MODEL is anything "
        '--model takes, or a .jsonl file with one line {"row": {...}, "completion": "..."} per completion.',
    )
    samples: int = option(4, "Completions per held-out row in evaluations, which report k = 1, 2, 4, ... up to this.")
    save_merged: bool = option(
        False, "Also save the adapter merged into its model, in the folder merged; --push_to_hub pushes this."
    )
    verbose: bool = option(False, "Print every metric at every log step, and TRL's progress bars.")
    editor: str | None = option(
        None,
        "For evaluations: an editor of the task, which may delete generated text. Task brick has rejection, rollback "
        "and rejection+rollback.",
    )

    def __post_init__(self) -> None:
        check_ranges(vars(self), as_flags=True)
        if self.models and not self.eval_only:
            raise ValueError("--models is an option of eval; train takes one model, --model")


@dataclass
class CommandLine:
    """The words of a command, with the task and the recipe that they name."""

    words: list[str]  # options under their full names; the task, if it is given, as --task TASK
    task: str
    recipe: dict[str, Any]
    given: dict[str, Any]  # option -> value, of the recipe and the flags, which override it


def read_command_line(argv: Sequence[str], command: str = "train") -> CommandLine:
    """Find the task and the recipe. For -h this prints a help screen and exits. ValueError where neither is given, or
    where a number is out of its range. Nothing slow is imported."""
    words = with_full_names(with_models_option(argv) if command == "eval" else with_task_option(argv))
    refuse_old_options(command, words)
    flags = flags_of(words)
    if asks_for_help(words) and HELP_ALL not in words:
        print(command_screen(command, flags.get("task")))
        raise SystemExit(0)
    recipe_name = flags.get("config")
    recipe: dict[str, Any] = {}
    if recipe_name is not None:
        path = str(find_recipe(recipe_name))
        words[words.index("--config") + 1] = path
        recipe = read_recipe(path)
        for alias, name in ALIASES.items():
            if alias[2:] in recipe:
                raise ValueError(f"--config {recipe_name}: write {name[2:]}; {alias[2:]} is for the command line only")
        refuse_old_options(command, [f"--{name}" for name in recipe])
    task = flags.get("task") or recipe.get("task")
    if task is None and HELP_ALL not in words:
        run_dir = first_run(words) if command == "eval" and recipe_name is None else None
        if run_dir is None:
            raise ValueError(_what_to_pass(command, recipe_name))
        own = task_of(run_dir, [PROGRAM, command, *argv])
        task, of_run = own.spec, {n: v for n, v in asdict(own.options).items() if not {n, f"no_{n}"} & flags.keys()}
        words += ["--task", str(task), *option_words(of_run)]
    if task is not None:
        check_task_name(str(task))
    line = CommandLine(words, str(task or ""), recipe, recipe | flags)
    check_ranges(numbers_among(line.given), as_flags=True)
    return line


def _what_to_pass(command: str, recipe: str | None) -> str:
    if recipe is not None:
        return f"--config {recipe} names no task; give one: {PROGRAM} {command} TASK --config {recipe}"
    first = "eval NAME=MODEL --task" if command == "eval" else command
    ways = {
        f"{first} brick": f"a built-in task: {', '.join(sorted(TASKS))}",
        f"{first} my_task.py": f"your own task ('{PROGRAM} new my_task' writes one)",
        f"{first.removesuffix('--task').strip()} --config brick/single_gpu": "a recipe, which names its task",
    }
    width = max(map(len, ways))
    lines = [f"  {PROGRAM} {way:{width}}  {meaning}" for way, meaning in ways.items()]
    end = f"'{PROGRAM} list' shows tasks and recipes, '{PROGRAM} {command} -h' the options."
    return "\n".join(["name a task or a recipe:", "", *lines, "", end])


def parse(argv: Sequence[str] | None = None, command: str = "train") -> tuple[Task, RunArguments, Any, Any]:
    """(task, run, TaskGRPOConfig, ModelConfig) of a command line. ValueError for mistakes, with a readable message."""
    line = read_command_line(sys.argv[1:] if argv is None else argv, command)
    import torch
    from trl import ModelConfig

    from ..models.loading import init_kwargs
    from ..models.precision import fast_half_precision
    from ..report.trackers import DEFAULT_PROJECT, default_tracker
    from ..rewards.repair import refuse_editor, with_repair
    from ..training.config import TaskGRPOConfig

    task_class = find_task_class(line.task) if line.task else Task
    parser = make_parser(RunArguments, TaskGRPOConfig, ModelConfig, task_class.Options)
    for alias, name in ALIASES.items():
        action = parser._option_string_actions[name]
        for spelling in dict.fromkeys([alias, f"--{alias[2:].replace('_', '-')}"]):
            action.option_strings = [*action.option_strings, spelling]
            parser._option_string_actions[spelling] = action
    on_cpu = _is_true(line, "use_cpu")
    half = None if on_cpu else fast_half_precision()
    on_accelerator = half is not None or (torch.cuda.is_available() and not on_cpu)
    kind = kind_of(line.given)
    # Precedence, from low to high: these, those of the kind of weights, the task's, the recipe, flags.
    defaults = {
        "bf16": half == "bf16",
        "fp16": half == "fp16" and _is_true(line, "bf16") is None and "bf16" not in task_class.defaults,
        "lora_dropout": 0.0,  # with dropout, rollouts and training would compute different log-probs
        "gradient_checkpointing": on_accelerator or kind != "tiny",
        "dataloader_pin_memory": on_accelerator,
        "output_dir": f"outputs/{task_class.name if line.task else 'TASK'}",
        "logging_steps": 5,
        "save_steps": 50,
        "save_total_limit": 2,
        "eval_rows": 64,
        "hub_strategy": "end",
        "rollout": "auto",
        "share_prompts": True,
        "report_to": default_tracker(),
        "project": DEFAULT_PROJECT,
    }
    chosen = layers(task_class, kind, line.given, half)
    for layer in chosen:
        if unknown := parser.set_defaults_with_config(**(defaults := defaults | layer.values)):
            raise ValueError(f"the {layer.origin} name options that do not exist: {unknown}")
    for action in parser._actions:
        check_recipe_value(action, line.recipe.get(action.dest))
        if action.dest == "resume_from_checkpoint":
            action.help = (
                "Resume a run: without a value from the newest complete checkpoint in --out, which must "
                "exist; with auto from the newest, or from the beginning if there is none; or give a checkpoint."
            )
    if HELP_ALL in line.words:
        _print_all_options(parser, task_class, command, help_word(line.words))
        raise SystemExit(0)
    words = [*line.words, *(["--eval_only", "true"] if command == "eval" else [])]
    *parsed, from_file, from_flags = parser.parse_args_and_config(
        words, return_remaining_strings=True, separate_remaining_strings=True
    )
    refuse_unknown([*from_file, *from_flags], parser, *_our_options(task_class, TaskGRPOConfig))
    run, args, model, options = parsed
    run.task, run.kind, run.defaults = line.task, kind, describe(chosen, line.given)
    run.given = sorted(line.given)
    if (resume := args.resume_from_checkpoint) is not None:  # a recipe can hold a bool
        args.resume_from_checkpoint = {"true": NEWEST, "false": None}.get(str(resume).lower(), resume)
    args.run_name = args.run_name or Path(args.output_dir).absolute().name
    args.model_init_kwargs = init_kwargs(model) | dict(args.model_init_kwargs or {})
    for given in (run, args, model, options):
        remember(vars(given))
    take_token(args)
    sys.argv[1:] = redacted_words(sys.argv[1:])  # trackers copy sys.argv into their files
    refuse_editor(run.editor, args.repair_turns)
    return with_repair(get_task(line.task, options), args), run, args, model


def make_parser(*option_classes: type) -> Any:
    """TRL's parser, whose errors are one line instead of the usage of several hundred options."""
    from trl import TrlParser

    parser = TrlParser(option_classes, allow_abbrev=False, formatter_class=FullHelp)
    parser.error = refuse_value
    return parser


def refuse_value(message: str) -> None:
    """Raise ValueError for what argparse says of an option, in plain words."""
    message = re.sub(r"^argument (--\w+)\S*:", r"argument \1:", message)
    match = re.fullmatch(r"argument (--\w+): invalid (\w+) value: (.*)", message, re.DOTALL)
    if match is None:
        message = re.sub(r"^argument (--\w+): expected (one|at least one) argument$", r"\1 needs a value", message)
        raise ValueError(message.removeprefix("argument "))
    kinds = {"int": "a whole number", "float": "a number"}
    raise ValueError(f"{match[1]} {match[3]} must be {kinds.get(match[2], f'a {match[2]}')}")


def option_names(parser: Any) -> list[str]:
    return [option for action in parser._actions for option in action.option_strings]


def refuse_unknown(
    left_over: Sequence[str], parser: Any, *ours: str, also: Sequence[str] = (), way_out: str = ""
) -> None:
    """Raise ValueError for the first of the words that no option took; suggest the nearest option of the parser or of
    `also`, preferably one of `ours`, or the option that a name of another script stands for, or `way_out`."""
    for text in left_over:
        if not text.startswith("--"):
            raise ValueError(f"{text!r} does not belong to any option; a task is the first word of the command")
        name = text.split("=")[0]
        known = [*option_names(parser), *also]
        new = f"--{OLD_NAMES.get(name[2:].replace('-', '_').lower())}"
        if new in known:
            short = next((alias for alias, option in ALIASES.items() if option == new and alias in known), new)
            raise ValueError(f"unknown option {name}; here it is {short}")
        near = _nearest_option(name, known, ours)
        way_out = f"did you mean {near}?" if near else way_out or f"{HELP_ALL} lists all"
        raise ValueError(f"unknown option {name}; {way_out}")


def _nearest_option(name: str, known: Sequence[str], ours: Sequence[str]) -> str | None:
    wanted = name[2:].replace("-", "_")
    likeness = {
        option: difflib.SequenceMatcher(None, wanted, option[2:]).ratio()
        for option in known
        if "-" not in option.lstrip("-")
    }
    near = {option: value + OUR_BONUS * (option in ours) for option, value in likeness.items() if value >= 0.6}
    return max(near, key=lambda option: near[option], default=None)


def _names_of(options: type) -> list[str]:
    """The names of the options that a class itself adds."""
    return list(vars(options).get("__annotations__", {}))


def _our_options(task_class: type[Task], config_class: Any) -> list[str]:
    """The options that suggestions prefer: ours, the task's, and TRL's that most runs need."""
    names = [*_names_of(RunArguments), *itertools.chain(*config_class.own_options().values())]
    names += _names_of(task_class.Options)
    return [*(f"--{name}" for name in names), *ALIASES, *ALIASES.values(), *(one.split()[0] for one in RUN_OPTIONS)]


def _print_all_options(parser: Any, task_class: type[Task], command: str, word: str | None) -> None:
    """Print every option under a heading, or those whose name or text contains the word."""
    from trl import GRPOConfig, ModelConfig

    from ..training.config import TaskGRPOConfig

    titles = {"the run": _names_of(RunArguments)}
    if task_class is not Task:
        titles[f"task {task_class.name}"] = _names_of(task_class.Options)
    for heading, names in TaskGRPOConfig.own_options().items():
        titles[f"GRPO, added by this package{heading and ': '}{heading.lower()}"] = names
    titles["the model (TRL's ModelConfig)"] = _names_of(ModelConfig)
    titles["GRPO (TRL's GRPOConfig)"] = _names_of(GRPOConfig)
    group_options(parser, titles, "training (transformers' TrainingArguments)")
    for group in parser._action_groups:
        group._group_actions = [one for one in group._group_actions if mentions(word, *one.option_strings, one.help)]
    parser.usage = f"{PROGRAM} {command} [TASK] [--config RECIPE] [--option value ...]"
    parser.description = (
        "--config takes a recipe's name, such as brick/single_gpu, or a YAML file with options. "
        f"'{PROGRAM} {command} TASK {HELP_ALL}' also lists the options of that task."
    )
    parser.print_help()


def _is_true(line: CommandLine, option: str) -> bool | None:
    """The value that a flag or the recipe gives to a yes-no option; None if neither does."""
    if f"no_{option}" in line.given:
        return False
    value = line.given.get(option)
    return None if value is None else str(value).lower() not in ("false", "no", "0", "f", "n")
