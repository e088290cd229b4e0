"""The plan of a run: everything that can be found out, or found wrong, before anything slow starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .arguments import NEWEST, RunArguments
from .checkpoints import newest_complete
from .hub import check_hub, take_token
from .task import Task, check_decoding


@dataclass
class Plan:
    """What a run needs before anything slow starts."""

    rows: list[dict[str, Any]]
    model: str
    tokenizer: Any
    constraint: Any
    peft_config: Any
    quantization: Any


def prepare(task: Task, run: RunArguments, args: Any, model_args: Any) -> Plan:
    """Find out now what would otherwise fail after a cold start. Raises ValueError in words for a person."""
    from accelerate import PartialState
    from trl import get_peft_config, get_quantization_config

    from .masked import MaskedPolicy, check_settings
    from .models import check_policy, is_adapter, load_tokenizer, prepare_model
    from .rewards.components import component_weights
    from .trackers import check_trackers

    _check_folder(args)
    check_trackers(args.report_to)
    component_weights(task, args.component_weights)
    if task.policy == "masked":
        check_settings(args)
    if run.decoding is not None:
        check_decoding(task, run.decoding)
    if run.cold_start_steps and (model_args.load_in_4bit or model_args.load_in_8bit):
        raise ValueError(
            "a cold start merges its adapter, which quantised weights cannot take; do it without --load_in_*bit, and "
            "then train from its folder, cold_start, with --cold_start_steps 0"
        )
    rows = task.dataset("train", args.train_rows, args.seed)
    if not rows:
        raise ValueError(f"task {task.name!r} has no rows in its 'train' split")
    state = PartialState()
    take_token(args)
    if args.push_to_hub and state.is_main_process:
        check_hub(args)
    with state.main_process_first():
        task.prepare(args.seed, print if state.is_main_process else lambda *_: None)
        model = prepare_model(model_args.model_name_or_path, task, args.output_dir, args.seed)
    if run.cold_start_steps and is_adapter(model):
        raise ValueError(f"a cold start needs a whole model, and {model} is an adapter: give --cold_start_steps 0")
    if run.save_merged and not (model_args.use_peft or is_adapter(model)):
        raise ValueError("--save_merged: there is no adapter to merge; train one with --use_peft, or leave it out")
    tokenizer = load_tokenizer(model, model_args.model_revision)
    config = check_policy(model, task.policy, model_args.model_revision)
    if task.policy == "masked":
        test = task.dataset("test", args.eval_rows, args.seed) if run.eval_before_and_after or run.eval_only else []
        MaskedPolicy(tokenizer, config).prompt_ids([row["prompt"] for row in rows + test])
    constraint = task.constraint(tokenizer) if args.constrain else None
    if args.constrain and constraint is None:
        raise ValueError(f"--constrain: task {task.name!r} has no constraint with these options")
    return Plan(rows, model, tokenizer, constraint, get_peft_config(model_args), get_quantization_config(model_args))


def _check_folder(args: Any) -> None:
    if args.resume_from_checkpoint not in (None, NEWEST) and not Path(args.resume_from_checkpoint).is_dir():
        raise ValueError(f"--resume_from_checkpoint {args.resume_from_checkpoint}: there is no such folder")
    earlier, _ = newest_complete(args.output_dir)
    if earlier and not args.resume_from_checkpoint:
        raise ValueError(
            f"{args.output_dir} holds an earlier run ({earlier.name}): continue it with --resume_from_checkpoint, "
            "or choose another --output_dir"
        )
    if not earlier and args.resume_from_checkpoint == NEWEST:
        raise ValueError(
            f"--resume_from_checkpoint: no complete checkpoint in {args.output_dir}; start without it "
            "(a cold start that was finished there is not repeated)"
        )
