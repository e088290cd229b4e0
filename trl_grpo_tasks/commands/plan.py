"""The plan of a run: everything that can be found out, or found wrong, before anything slow starts."""

from __future__ import annotations

import copy
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files import check_local_path, model_file_in
from ..models.checkpoints import is_checkpoint, is_of, newest_complete
from ..task import Row, Task, check_editor, rows_of
from .arguments import AUTO, NEWEST, RunArguments
from .hub import check_hub


@dataclass
class Plan:
    """What a run needs before anything slow starts."""

    rows: list[dict[str, Any]]
    test_rows: list[dict[str, Any]]  # where the run is evaluated
    model: ReadyModel
    peft_config: Any
    quantization: Any


@dataclass
class ReadyModel:
    """A model that a task can use: where it is, and what goes with it."""

    path: str
    config: Any
    tokenizer: Any
    constraint: Any


def ready_model(
    name: str | None,
    task: Task,
    rows: Sequence[Row],
    folder: str | Path,
    *,
    seed: int,
    constrain: bool | None = False,
    revision: str = "main",
) -> ReadyModel:
    """Find the model, or make it in `folder`. `constrain` None: under the task's constraint, if it has one.

    ValueError if the model is of another kind than the task needs, cannot read the prompts of `rows`, or is to be
    constrained and the task has no constraint.
    """
    from ..models.loading import check_policy, load_tokenizer, prepare_model
    from ..models.masked_policy import MaskedPolicy

    path = prepare_model(name, task, folder, seed, revision)
    tokenizer = load_tokenizer(path, revision)
    config = check_policy(path, task.policy, revision)
    if task.policy == "masked":
        MaskedPolicy(tokenizer, config).prompt_ids([row["prompt"] for row in rows])
    constraint = task.constraint(tokenizer) if constrain in (True, None) else None
    if constrain and constraint is None:
        raise ValueError(f"task {task.name!r} has no constraint with these options; leave --constrain out")
    return ReadyModel(path, config, tokenizer, constraint)


def prepare(task: Task, run: RunArguments, args: Any, model_args: Any) -> Plan:
    """Find out now what would otherwise fail after a cold start. Raises ValueError in words for a person."""
    from accelerate import PartialState
    from trl import get_quantization_config

    from ..models.loading import is_adapter

    _check_folder(args)
    _check_options(task, run, args, model_args)
    rows = rows_of(task, "train", args.train_rows, args.seed)
    state = PartialState()
    if args.push_to_hub and state.is_main_process:
        check_hub(args)
    test_rows = rows_of(task, "test", args.eval_rows, args.seed) if run.eval_before_and_after else []
    with state.main_process_first():
        task.prepare(args.seed, print if state.is_main_process else lambda *_: None)
        model = ready_model(
            model_args.model_name_or_path,
            task,
            rows + test_rows,
            args.output_dir,
            seed=args.seed,
            constrain=args.constrain,
            revision=model_args.model_revision,
        )
    if run.cold_start_steps and is_adapter(model.path):
        raise ValueError(
            f"a cold start needs a whole model, and {model.path} is an adapter: give --cold_start_steps 0"
        )
    if run.save_merged and not (model_args.use_peft or is_adapter(model.path)):
        raise ValueError("--save_merged: there is no adapter to merge; train one with --use_peft, or leave it out")
    peft_config = _adapter(model_args, model, task.policy)
    return Plan(rows, test_rows, model, peft_config, get_quantization_config(model_args))


def _adapter(model_args: Any, ready: ReadyModel, policy: str) -> Any:
    """The adapter that --use_peft asks for, once it was put on the model without its weights."""
    from trl import get_peft_config

    from ..models.loading import is_adapter, without_weights

    config = get_peft_config(model_args)
    if config is None or is_adapter(ready.path):
        return config
    import torch
    from peft import get_peft_model

    if isinstance(config.target_modules, str) and config.target_modules.isidentifier():
        config.target_modules = {config.target_modules}  # TRL takes a single name for a pattern of whole paths
    model = without_weights(ready.config, policy)
    names = {name.rsplit(".", 1)[-1] for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)}
    try:
        get_peft_model(model, copy.deepcopy(config), low_cpu_mem_usage=True)
    except ValueError as error:
        raise ValueError(f"--use_peft: {error} (modules of this model: {', '.join(sorted(names))})") from error
    return config


def _check_options(task: Task, run: RunArguments, args: Any, model_args: Any) -> None:
    """What can be seen without a row or a model."""
    from ..models.masked_policy import check_settings
    from ..report.trackers import check_trackers
    from ..rewards.components import component_weights

    check_local_path(model_args.model_name_or_path or "tiny", "--model")
    check_trackers(args.report_to)
    component_weights(task, args.component_weights)
    if args.temperature == 0:
        raise ValueError("--temperature 0 always samples the same: GRPO learns from differences; eval takes it")
    for name, package in (("use_vllm", "vllm"), ("use_liger_kernel", "liger_kernel")):
        if getattr(args, name) and importlib.util.find_spec(package) is None:
            raise ValueError(f"--{name}: {package} is not installed; pip install it, or train without")
    if task.policy == "masked":
        check_settings(args)
    check_editor(task, run.editor, args.constrain)
    if run.cold_start_steps and (model_args.load_in_4bit or model_args.load_in_8bit):
        raise ValueError(
            "a cold start merges its adapter, which quantised weights cannot take; do it without --load_in_*bit, and "
            "then train from its folder, cold_start, with --cold_start_steps 0"
        )


def check_writable(folder: str | Path) -> None:
    """ValueError where `folder` cannot be made or written to, before there is anything to write."""
    if not str(folder):
        raise ValueError("--output_dir is empty; give the folder that results go to")
    path = Path(folder).absolute()
    there = next(one for one in (path, *path.parents) if os.path.exists(one))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"--output_dir {folder}: {there} is not a folder that can be written to; choose another")


def _check_folder(args: Any) -> None:
    """Settle what the run resumes: with --resume_from_checkpoint auto, the newest checkpoint or nothing."""
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list

    check_writable(args.output_dir)
    # All processes must agree, also where a file system shows them a new file at different moments.
    earlier = broadcast_object_list([newest_complete(args.output_dir)[0]])[0]
    if args.resume_from_checkpoint == AUTO:
        args.resume_from_checkpoint = NEWEST if earlier else None
        if not earlier and PartialState().is_main_process:
            print(f"no complete checkpoint in {args.output_dir} to resume from: this run starts from the beginning")
    if args.resume_from_checkpoint not in (None, NEWEST) and not Path(args.resume_from_checkpoint).is_dir():
        raise ValueError(f"--resume_from_checkpoint {args.resume_from_checkpoint}: there is no such folder")
    if args.resume_from_checkpoint not in (None, NEWEST) and not is_checkpoint(args.resume_from_checkpoint):
        raise ValueError(
            f"--resume_from_checkpoint {args.resume_from_checkpoint} is not a checkpoint: give a folder checkpoint-N "
            "of a run, auto, or no value for the newest in --output_dir"
        )
    if earlier and not _goes_on_there(args):
        raise ValueError(
            f"{args.output_dir} holds an earlier run ({earlier.name}): continue it with --resume_from_checkpoint, "
            "choose another --output_dir, or delete it"
        )
    model = model_file_in(args.output_dir)
    if model and not _goes_on_there(args):  # a model of the user's, or of a run that kept no checkpoints
        raise ValueError(
            f"{args.output_dir} holds a model ({model}), which the trained one would replace: choose another "
            "--output_dir, or move it away"
        )
    if not earlier and args.resume_from_checkpoint == NEWEST:
        raise ValueError(
            f"--resume_from_checkpoint: no complete checkpoint in {args.output_dir}; start without it, or give it the "
            "value auto, which starts where there is none (a cold start that was finished there is not repeated)"
        )


def _goes_on_there(args: Any) -> bool:
    """Whether what is resumed is the run in the output folder, not one that lies elsewhere."""
    asked = args.resume_from_checkpoint
    return asked == NEWEST or (bool(asked) and is_of(asked, args.output_dir))
