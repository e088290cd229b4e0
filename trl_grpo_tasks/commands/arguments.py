"""Options of a run: TRL's parser over our options, TRL's and those of the task, from flags and a recipe file."""

from __future__ import annotations

import argparse
import copy
import difflib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..redact import redacted_words, remember
from ..task import Task, find_task_class, get_task
from .hub import take_token
from .recipes import find_recipe

MOST_VALUES = 10_000  # of a recipe
# Values of --resume_from_checkpoint beside a path.
NEWEST = "newest"  # the newest complete checkpoint, which there must be; the flag without a value
AUTO = "auto"  # the newest complete checkpoint, or the beginning where there is none


@dataclass
class RunArguments:
    """What a run does around GRPO: which task, a warm-up before, an evaluation before and after."""

    task: str = field(
        default="prompts", metadata={"help": "A task's name, a path to a .py file with one, or a module."}
    )
    cold_start_steps: int = field(
        default=0, metadata={"help": "Supervised steps on the task's gold answers before GRPO. 0: none."}
    )
    cold_start_rows: int | None = field(
        default=None, metadata={"help": "Rows whose gold answers the cold start sees; all training rows if not given."}
    )
    cold_start_learning_rate: float = field(default=1e-3, metadata={"help": "Learning rate of the cold start."})
    cold_start_batch_size: int = field(default=32, metadata={"help": "Rows a step (and device) of the cold start."})
    eval_only: bool = field(
        default=False, metadata={"help": "Evaluate on held-out rows and stop; as the command eval."}
    )
    eval_before_and_after: bool = field(
        default=True, metadata={"help": "Evaluate on held-out rows before and after GRPO."}
    )
    models: list[str] | None = field(
        default=None,
        metadata={
            "help": "For eval: what is compared, as NAME=MODEL or MODEL: whatever --model_name_or_path takes, or a "
            '.jsonl file with a line {"row": {...}, "completion": "..."} for each completion.'
        },
    )
    eval_samples: int = field(
        default=4,
        metadata={"aliases": ["--num_samples"], "help": "Completions of each held-out row in an evaluation."},
    )
    k: list[int] | None = field(
        default=None,
        metadata={"help": "For which k evaluations estimate pass@k and max@k; 1, 2, 4, ... if not given."},
    )
    save_merged: bool = field(
        default=False,
        metadata={"help": "Save an adapter also merged into its model, in the folder merged, which is pushed too."},
    )
    verbose: bool = field(
        default=False, metadata={"help": "Print every metric at every log step and the bars of TRL and transformers."}
    )
    decoding: str | None = field(
        default=None,
        metadata={
            "help": "How evaluations write: a name of the task's decodings, such as free or constrained. Not given: "
            "as --constrain says."
        },
    )

    def __post_init__(self) -> None:
        for name, least in (
            ("cold_start_steps", 0),
            ("cold_start_rows", 1),
            ("cold_start_batch_size", 1),
            ("eval_samples", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"--{name} {value} must be at least {least}")
        if not self.cold_start_learning_rate > 0:
            raise ValueError(f"--cold_start_learning_rate {self.cold_start_learning_rate} must be above 0")
        for k in self.k or ():
            if not 1 <= k <= self.eval_samples:
                raise ValueError(
                    f"--k {k} must be between 1 and the number of samples of a row, {self.eval_samples} "
                    "(--num_samples): the best of k is estimated from at least k"
                )
        if self.models and not self.eval_only:
            raise ValueError("--models goes with eval (--eval_only); training takes one, --model_name_or_path")


def parse(argv: Sequence[str] | None = None) -> tuple[Task, RunArguments, Any, Any]:
    """(task, run, TaskGRPOConfig, ModelConfig) from the command line. Raises ValueError in words for a person."""
    import torch
    from trl import ModelConfig

    from ..models.loading import init_kwargs
    from ..models.precision import is_bf16_fast
    from ..report.trackers import DEFAULT_PROJECT, default_tracker
    from ..training.config import TaskGRPOConfig

    argv = _with_resume_value(
        _with_separate_values(list(sys.argv[1:] if argv is None else argv), "--task", "--config")
    )
    if "--config" in argv:
        at = argv.index("--config") + 1
        argv[at] = str(find_recipe(argv[at]))
    recipe = _read_recipe(_value_of(argv, "--config"))
    task_class = find_task_class(_value_of(argv, "--task") or str(recipe.get("task", RunArguments.task)))
    parser = make_parser(RunArguments, TaskGRPOConfig, ModelConfig, task_class.Options)
    _arrange_help(
        parser,
        {
            "the run": RunArguments,
            f"task {task_class.name}": task_class.Options,
            "what this toolkit adds to GRPO": TaskGRPOConfig,
            "the model (TRL's ModelConfig)": ModelConfig,
        },
    )
    on_accelerator = is_bf16_fast() or torch.cuda.is_available()
    # Below the task's defaults, which are below the recipe, which is below the flags.
    defaults = {
        "bf16": is_bf16_fast(),
        "gradient_checkpointing": on_accelerator,
        "dataloader_pin_memory": on_accelerator,
        "output_dir": f"outputs/{task_class.name}",
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
    unknown = parser.set_defaults_with_config(**(defaults | dict(task_class.defaults)))
    if unknown:
        raise ValueError(f"task {task_class.name!r}: its defaults name options that do not exist: {unknown}")
    for action in parser._actions:
        _check_recipe_value(action, recipe.get(action.dest))
        if action.dest == "resume_from_checkpoint":
            action.help = (
                "Continue a run: auto, from the newest complete checkpoint in --output_dir, or from the beginning if "
                "there is none; no value, from the newest, which there must be; or the path of a checkpoint."
            )
    *parsed, from_file, from_flags = parser.parse_args_and_config(
        argv, return_remaining_strings=True, separate_remaining_strings=True
    )
    refuse_unknown([*from_file, *from_flags], parser)
    run, args, model, options = parsed
    if args.resume_from_checkpoint in ("true", "True", True):
        args.resume_from_checkpoint = NEWEST
    args.run_name = args.run_name or Path(args.output_dir).absolute().name
    args.model_init_kwargs = init_kwargs(model) | dict(args.model_init_kwargs or {})
    for given in (run, args, model, options):
        remember(vars(given))
    take_token(args)
    sys.argv[1:] = redacted_words(sys.argv[1:])  # which trackers copy into their files
    return get_task(run.task, options), run, args, model


def make_parser(*option_classes: type) -> Any:
    """TRL's parser, with mistakes as one line rather than after the usage of several hundred options."""
    from trl import TrlParser

    def refuse(message: str) -> None:
        raise ValueError(message.removeprefix("argument "))

    parser = TrlParser(option_classes, allow_abbrev=False, formatter_class=ShortHelp)
    parser.error = refuse
    return parser


class ShortHelp(argparse.ArgumentDefaultsHelpFormatter):
    """An option in a line: without its other spelling (--max-steps), and with a letter for its value."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = copy.copy(action)
        shown.option_strings = [name for name in action.option_strings if "-" not in name.lstrip("-")]
        return super()._format_action_invocation(shown)

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return {"int": "N", "float": "X", "string_to_bool": "BOOL"}.get(getattr(action.type, "__name__", ""), "VALUE")

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if isinstance(action, argparse._StoreFalseAction):  # its text is that of the option which it turns off
            return f"Turn --{action.dest} off."
        return action.help if action.default is None else super()._get_help_string(action)


def _arrange_help(parser: Any, titles: dict[str, type]) -> None:
    """Let --help begin with what is ours; the few hundred options of TRL and transformers come last."""
    parser.usage = "train.py --task NAME [--config RECIPE.yaml] [--option value ...]"
    parser.description = (
        "Also: trl-grpo-tasks train, and eval. --task NAME --help lists the options of that task; recipes/NAME/ holds "
        "settings for machines of several sizes."
    )
    theirs = parser._optionals
    theirs.title = "training (TRL's GRPOConfig and transformers' TrainingArguments)"
    for title, option_class in titles.items():
        group = parser.add_argument_group(title)
        own = set(vars(option_class).get("__annotations__", {}))
        group._group_actions = [action for action in theirs._group_actions if action.dest in own]
        theirs._group_actions = [action for action in theirs._group_actions if action.dest not in own]
    parser._action_groups.sort(key=lambda group: group is theirs)


def refuse_unknown(left_over: Sequence[str], parser: Any) -> None:
    """ValueError for the first of the words that no option took, with the nearest option there is."""
    for text in left_over:
        if not text.startswith("--"):
            raise ValueError(f"{text!r} does not belong to any option")
        name = text.split("=")[0]
        known = [option for action in parser._actions for option in action.option_strings]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        raise ValueError(
            f"unknown option {name}" + (f"; did you mean {near[0]}?" if near else "; --help lists all of them")
        )


def _with_separate_values(argv: list[str], *names: str) -> list[str]:
    """`--name=value` as two words, which is how TRL's parser looks for a recipe."""
    words = [part for text in argv for part in (text.split("=", 1) if text.split("=")[0] in names else [text])]
    for name in names:
        if words and words[-1] == name:
            raise ValueError(f"{name} needs a value")
        if words.count(name) > 1:
            raise ValueError(f"{name} is given {words.count(name)} times; leave one")
    return words


def _value_of(argv: Sequence[str], name: str) -> str | None:
    return argv[argv.index(name) + 1] if name in argv else None


def _read_recipe(path: str | None) -> dict[str, Any]:
    """The options in the recipe file, before the parser exists that will read it again: the task may be in it."""
    if path is None:
        return {}
    import yaml

    class OnlyOnce(yaml.SafeLoader):
        """YAML takes the last of two values of an option; here that is a mistake."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            names = [name.value for name, _ in node.value if isinstance(name, yaml.ScalarNode)]
            for name in names:
                if names.count(name) > 1:
                    raise ValueError(f"--config {path}: {name} is there {names.count(name)} times; leave one")
            return super().construct_mapping(node, deep)

    try:
        with open(path, encoding="utf-8") as file:
            values = yaml.load(file, OnlyOnce)
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path} is not YAML: {error}") from error
    except RecursionError as error:
        raise ValueError(f"--config {path} is nested too deeply to be a recipe") from error
    _check_size(path, values)
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise ValueError(f"--config {path} must hold options as 'name: value' lines")
    return values


def _check_size(path: str, values: Any) -> None:
    """ValueError for a recipe that is far too large once its aliases are written out, which a few lines can be."""
    count, left = 0, [values]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list):
            left += value
        count += 1
        if count + len(left) > MOST_VALUES:
            raise ValueError(f"--config {path} holds more than {MOST_VALUES:,} values, so it cannot be a recipe")


def _check_recipe_value(action: Any, value: Any) -> None:
    """argparse converts and checks text only; numbers, lists and truth values from YAML would pass as they are."""
    if value is None or (isinstance(value, str) and action.nargs != "+"):
        return
    kinds = {"int": (int, "a whole number"), "float": ((int, float), "a number"), "string_to_bool": (bool, "a bool")}
    kind: Any
    kind, words = kinds.get(getattr(action.type, "__name__", ""), (object, "anything"))
    if action.nargs == "+":
        fits, words = isinstance(value, list), "a list"
    else:
        fits = isinstance(value, kind) and (kind in (bool, object) or not isinstance(value, bool))
    if not fits:
        raise ValueError(f"--config: {action.dest}: {value!r:.200} must be {words}")


def _with_resume_value(argv: list[str]) -> list[str]:
    """`--resume_from_checkpoint` without a value means the newest complete checkpoint."""
    flag = "--resume_from_checkpoint"
    if flag in argv:
        after = argv.index(flag) + 1
        if after == len(argv) or argv[after].startswith("--"):
            argv.insert(after, NEWEST)
    return argv
