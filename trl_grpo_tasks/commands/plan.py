"""The plan of a run: everything that can be prepared or refused before anything slow starts."""

from __future__ import annotations

import copy
import importlib.util
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import check_local_path, model_file_in
from ..models.checkpoints import belongs_to, damage, is_checkpoint, newest_complete, newest_intact
from ..report.run_folder import settings_of
from ..task import NoAnswerError, Row, Task, check_editor, rows_of
from .arguments import RunArguments
from .command_words import AUTO, NEWEST
from .defaults import take_adapter_defaults
from .hub import create_repository, must_be_merged

if TYPE_CHECKING:
    from ..models.ready import ReadyModel


@dataclass
class Plan:
    """Rows, model and adapter of a run."""

    rows: list[dict[str, Any]]
    test_rows: list[dict[str, Any]]  # held-out rows of the evaluations
    choosing_rows: list[dict[str, Any]] | None  # held-out rows of --best_by, none of them reported
    model: ReadyModel
    peft_config: Any
    quantization: Any


def prepare(task: Task, run: RunArguments, args: Any, model_args: Any) -> Plan:
    """Prepare a run; ValueError now for what would otherwise fail after the cold start."""
    from accelerate import PartialState

    from ..models.loading import TINY, is_adapter, prepare_model
    from ..models.quantised import quantization_config
    from ..models.ready import ready_model
    from ..training.dataset import split_held_out
    from ..training.extras import EXTRAS

    _check_folder(args)
    _check_fixed_options(task, args)
    _check_options(task, run, args, model_args)
    name, state = model_args.model_name_or_path or TINY, PartialState()
    if name == TINY and not model_args.use_peft:
        _check_full_weights(model_args)
    if name != TINY:
        with state.main_process_first():  # making rows may take minutes
            prepare_model(name, task, args.output_dir, args.seed, model_args.model_revision)
    say = print if state.is_main_process else lambda *_: None
    rows = rows_of(task, "train", args.train_rows, args.seed, say=say)
    _check_gold(task, run, rows)
    if args.push_to_hub and state.is_main_process:
        repository = args.hub_model_id or Path(args.output_dir).absolute().name
        create_repository(repository, args.hub_private_repo, "--push_to_hub", ", or train without --push_to_hub")
    test_rows: list[dict[str, Any]] = []
    choosing_rows: list[dict[str, Any]] | None = None
    if args.load_best_model_at_end:
        test_rows, choosing_rows = split_held_out(task, args.eval_rows, args.seed, say)
    elif run.eval_before_and_after:
        test_rows = rows_of(task, "test", args.eval_rows, args.seed, say=say)
    if not run.eval_before_and_after:
        test_rows = []
    with state.main_process_first():
        task.prepare(args.seed, say)
        model = ready_model(
            name,
            task,
            rows + test_rows + (choosing_rows or []),
            args.output_dir,
            seed=args.seed,
            constrain=args.samples_under_constraint,
            most_tokens=args.max_completion_length,
            revision=model_args.model_revision,
            chat_template_kwargs=args.chat_template_kwargs,
        )
    if run.kind == "full" and is_adapter(model.path):  # known only now: it was given by its Hub id
        take_adapter_defaults(task, run, args)
    check_turns(model, rows + test_rows, args.max_completion_length)
    for extra in EXTRAS:
        extra.check_constraint(args, model.constraint)
    trains_adapter = model_args.use_peft or is_adapter(model.path)
    if run.save_merged and not trains_adapter:
        raise ValueError(
            "--save_merged: there is no adapter to merge; train one with --use_peft, or leave --save_merged out"
        )
    if args.push_to_hub and trains_adapter and not run.save_merged:
        must_be_merged(model.path, "--save_merged")
    quantization = quantization_config(model_args, args)
    is_stored_quantised = getattr(model.config, "quantization_config", None) is not None
    if not trains_adapter:
        _check_full_weights(model_args, is_stored_quantised)
    if is_stored_quantised and run.save_merged:
        raise ValueError(
            f"--save_merged: the weights of {model_args.model_name_or_path} are stored quantised, so that an "
            "adapter cannot be merged into them; leave --save_merged out, or start from the original model"
        )
    peft_config = None if is_adapter(model.path) else _adapter(model_args, model, task.policy)
    return Plan(rows, test_rows, choosing_rows, model, peft_config, quantization)


def _check_gold(task: Task, run: RunArguments, rows: Sequence[Row]) -> None:
    """A cold start needs gold answers: raise ValueError if rows have none. One that nobody asked for is left out."""
    if not run.cold_start_steps or run.eval_only:
        return
    try:
        task.gold(rows[0])
    except NoAnswerError as error:
        if "cold_start_steps" in run.given:
            raise ValueError(
                f"--cold_start_steps {run.cold_start_steps}: {error}; or leave the cold start out"
            ) from None
        run.cold_start_steps = 0
        run.defaults.append(f"no cold start: {error}")


def _check_full_weights(model_args: Any, is_stored_quantised: bool = False) -> None:
    """Raise ValueError for weights that only an adapter can be trained on."""
    is_quantised = model_args.load_in_4bit or model_args.load_in_8bit
    if is_quantised or is_stored_quantised:
        raise ValueError("quantised weights cannot be trained, only an adapter on them; give --use_peft")
    if model_args.dtype == "float16":
        raise ValueError(
            "--dtype float16: float16 weights lose most updates; train float32 weights in half precision (--dtype "
            "float32 --fp16 true), or an adapter (--use_peft)"
        )


def check_turns(model: ReadyModel, rows: Sequence[Row], max_completion_length: int) -> None:
    """Raise ValueError if completions have several turns and the maximum length has no room for them."""
    from ..constraints.turns import TurnsConstraint
    from ..rewards.environment import check_length

    if isinstance(model.constraint, TurnsConstraint):
        check_length(model.constraint, rows, max_completion_length)


def _adapter(model_args: Any, ready: ReadyModel, policy: str) -> Any:
    """The adapter configuration of --use_peft, after a trial on a copy of the model without weights."""
    from trl import get_peft_config

    from ..models.loading import empty_model

    config = get_peft_config(model_args)
    if config is None:
        return None
    import torch
    from peft import get_peft_model

    if isinstance(config.target_modules, str) and config.target_modules.isidentifier():
        config.target_modules = {config.target_modules}  # TRL would read a single name as a pattern
    if policy == "masked":
        config.task_type = None  # the PEFT class for causal models requires generation methods
    if model_args.model_revision != "main":
        config.revision = model_args.model_revision  # others would load another base model
    model = empty_model(ready.config, policy)
    names = {name.rsplit(".", 1)[-1] for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)}
    try:
        get_peft_model(model, copy.deepcopy(config), low_cpu_mem_usage=True)
    except ValueError as error:
        raise ValueError(f"--use_peft: {error} (modules of this model: {', '.join(sorted(names))})") from error
    return config


def _check_options(task: Task, run: RunArguments, args: Any, model_args: Any) -> None:
    """Check the options for which neither rows nor a model are needed."""
    from ..models.masked_policy import check_settings
    from ..report.trackers import check_trackers
    from ..rewards.components import component_weights
    from ..training.exact_sampling import check_endings, check_temperature
    from ..training.extras import EXTRAS
    from ..training.sharding import check_model, shards_weights

    check_local_path(model_args.model_name_or_path or "tiny", "--model")
    check_trackers(args.report_to)
    components = list(component_weights(task, args.component_weights))
    for extra in EXTRAS:
        extra.check_task(args, task)
        extra.check_components(args, task, components)
    check_temperature(args)
    check_endings(args)
    for name, package in (("use_vllm", "vllm"), ("use_liger_kernel", "liger_kernel")):
        if getattr(args, name) and importlib.util.find_spec(package) is None:
            raise ValueError(f"--{name}: {package} is not installed; install it, or leave --{name} out")
    check_settings(args, task.policy == "masked")
    check_model(args, task.policy == "masked", model_args.load_in_4bit or model_args.load_in_8bit)
    check_editor(task, run.editor, args.constrain)
    if run.editor is not None and shards_weights(args):
        raise ValueError(
            f"--editor {run.editor} needs whole weights, which FSDP and ZeRO-3 shard; leave --editor out, and use "
            "trl-grpo-tasks eval with it after the training"
        )


def check_writable(folder: str | Path, option: str = "--out") -> None:
    """Raise ValueError if `folder`, the value of `option`, cannot be created or written to."""
    if not str(folder):
        raise ValueError(f"{option} is empty; give a folder for the results")
    path = Path(folder).absolute()
    there = next(one for one in (path, *path.parents) if os.path.exists(one))
    try:
        tempfile.TemporaryFile(dir=there).close()  # os.access lets root write anywhere, even into /proc
    except OSError as error:
        raise ValueError(f"{option} {folder}: {there} is not a writable folder; choose another") from error


def _check_folder(args: Any) -> None:
    """Decide what the run resumes from, and refuse to overwrite an earlier run or a model."""
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list

    check_writable(args.output_dir)
    asked = args.resume_from_checkpoint
    is_path = asked not in (None, NEWEST, AUTO)
    if is_path and not Path(asked).is_dir():
        raise ValueError(f"--resume_from_checkpoint {asked}: this folder does not exist")
    if is_path and not is_checkpoint(asked):
        raise ValueError(
            f"--resume_from_checkpoint {asked} is not a checkpoint: give a folder checkpoint-N of a run, auto, or no "
            "value for the newest in --out"
        )
    # The main process looks for all: files are read once, and a shared file system may show others a new file later.
    is_main = PartialState().is_main_process
    found = _find_checkpoints(args.output_dir, asked) if is_main else None
    earlier, problem = broadcast_object_list([found])[0]
    if problem:
        raise ValueError(
            f"--resume_from_checkpoint: {problem}; restore the files, resume another checkpoint, or start again with "
            "another --out"
        )
    if asked == AUTO:
        args.resume_from_checkpoint = NEWEST if earlier else None
        if not earlier and is_main:
            print(f"no complete checkpoint in {args.output_dir} to resume from: this run starts from the beginning")
    if earlier and not _resumes_output_dir(args):
        raise ValueError(
            f"{args.output_dir} holds an earlier run ({earlier.name}): resume it with --resume_from_checkpoint, "
            "choose another --out, or delete the folder"
        )
    model = model_file_in(args.output_dir)
    if model and not _resumes_output_dir(args):  # the user's own model, or that of a run without checkpoints
        raise ValueError(
            f"{args.output_dir} holds a model ({model}), which the trained one would overwrite; choose another "
            "--out, or move it away"
        )
    if not earlier and args.resume_from_checkpoint == NEWEST:
        raise ValueError(
            f"--resume_from_checkpoint: there is no complete checkpoint in {args.output_dir}; leave the option out, "
            "or give it the value auto, which starts a new run then (a finished cold start is not repeated)"
        )


def _find_checkpoints(output_dir: str, asked: str | None) -> tuple[Path | None, str]:
    """The newest complete checkpoint in `output_dir`, and why the run cannot resume as asked; "" if it can."""
    earlier, problem = newest_complete(output_dir), ""
    if asked in (NEWEST, AUTO):
        intact, skipped = newest_intact(output_dir)
        if earlier is not None and intact is None:
            reasons = "; ".join(f"{path.name}: {reason}" for path, reason in skipped.items())
            problem = f"no checkpoint in {output_dir} is intact ({reasons})"
    elif asked and (reason := damage(asked)) is not None:
        problem = f"{asked} cannot be resumed: {reason}"
    return earlier, problem


def _check_fixed_options(task: Task, args: Any) -> None:
    """Raise ValueError if a run is resumed with another value of one of the task's `fixed_options`."""
    if not task.fixed_options or not _resumes_output_dir(args):
        return
    before = settings_of(args.output_dir).get("task", {}).get("options", {})
    for name in task.fixed_options:
        given = getattr(task.options, name)
        if name in before and before[name] != given:
            raise ValueError(
                f"the run in {args.output_dir} was started with another --{name} ({before[name]!s:.60}, not "
                f"{given!s:.60}); resume with the original value, or choose another --out"
            )


def _resumes_output_dir(args: Any) -> bool:
    """Whether the run in the output folder is resumed, rather than one in another folder."""
    asked = args.resume_from_checkpoint
    return asked == NEWEST or (bool(asked) and belongs_to(asked, args.output_dir))
