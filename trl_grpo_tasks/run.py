"""A whole run: model, cold start, evaluation, GRPO, evaluation, report, Hub. What train.py and the command do."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .arguments import RunArguments, parse
from .task import Task

RESULTS_FILE = "results.json"
CONSOLE_METRICS = ("reward", "rewards/success/mean", "rewards/valid/mean", "kl", "entropy", "completions/mean_length",
                   "constraint/allowed_mass", "curriculum/level")  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Parse and run; what the user can mend is said in one line, without a traceback."""
    _calm_down()
    try:
        task, run, args, model_args = parse(argv)
        check(run, args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    train(task, run, args, model_args)
    return 0


def check(run: RunArguments, args: Any) -> None:
    """What can be known to fail before anything slow starts."""
    from .checkpoints import checkpoint_folders

    earlier = checkpoint_folders(args.output_dir)
    if earlier and not args.resume_from_checkpoint and not run.eval_only:
        raise ValueError(
            f"{args.output_dir} holds an earlier run ({earlier[0].name}): continue it with --resume_from_checkpoint, "
            "or choose another --output_dir"
        )
    if args.resume_from_checkpoint not in (None, "newest") and not Path(args.resume_from_checkpoint).is_dir():
        raise ValueError(f"--resume_from_checkpoint {args.resume_from_checkpoint}: there is no such folder")


def train(task: Task, run: RunArguments, args: Any, model_args: Any) -> dict[str, Any]:
    """Run everything that was asked for; returns what results.json holds."""
    from accelerate import PartialState
    from transformers.trainer_callback import PrinterCallback, ProgressCallback
    from trl import get_peft_config, get_quantization_config

    from .callbacks import StepLine
    from .models import prepare_model
    from .report import write_report
    from .trainer import TaskGRPOTrainer

    state = PartialState()
    say = print if state.is_main_process else _say_nothing
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    name = model_args.model_name_or_path or "tiny"
    rows = task.dataset("train", args.train_rows, args.seed)
    say(f"task {task.name} {task.version}, model {name}, {_precision(args)} on {args.device.type}, output in {folder}")

    with state.main_process_first():
        model = prepare_model(model_args.model_name_or_path, task, folder, args.seed)
    args.model_init_kwargs = model_init_kwargs(model_args) | dict(args.model_init_kwargs or {})
    peft_config, quantization = get_peft_config(model_args), get_quantization_config(model_args)
    evaluations = _Evaluations(task, run, args, state, quantization)
    if run.eval_only:
        evaluations.add("model", evaluations.load(model))
        evaluations.save()
        return evaluations.as_dict()
    if run.cold_start_steps:
        model = _cold_start(task, run, args, model_args, model, rows, peft_config)
    before = "cold start" if run.cold_start_steps else "before"
    if run.eval_before_and_after and not evaluations.has(before):
        evaluations.add(before, evaluations.load(model))
        evaluations.save()

    trainer = TaskGRPOTrainer(
        _trainable(model, args),
        args=args,
        train_dataset=rows,
        task=task,
        peft_config=None if _is_adapter(model) else peft_config,
        quantization_config=quantization,
    )
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    trainer.add_callback(StepLine("step", CONSOLE_METRICS))
    _write_settings(folder, task, run, args, model_args)
    resume: Any = args.resume_from_checkpoint
    trainer.train(resume_from_checkpoint=True if resume == "newest" else resume)
    trainer.save_model(args.output_dir)
    if run.eval_before_and_after:
        evaluations.add("GRPO", trainer.accelerator.unwrap_model(trainer.model))
        evaluations.save()
    if state.is_main_process:
        say(f"report: {write_report(folder, task)}")
    if args.push_to_hub:
        _push(trainer, say)
    return evaluations.as_dict()


def model_init_kwargs(model_args: Any) -> dict[str, Any]:
    """TRL's model flags as keyword arguments of from_pretrained."""
    kwargs: dict[str, Any] = {"revision": model_args.model_revision, "dtype": model_args.dtype or "float32"}
    if model_args.attn_implementation:
        kwargs["attn_implementation"] = model_args.attn_implementation
    return kwargs


class _Evaluations:
    """The evaluations of a run so far; kept in results.json, so that a resumed run does not repeat them."""

    def __init__(self, task: Task, run: RunArguments, args: Any, state: Any, quantization: Any):
        self._task, self._run, self._args, self._state = task, run, args, state
        self._quantization = quantization
        self._path = Path(args.output_dir) / RESULTS_FILE
        self._done: list[Any] = []
        if args.resume_from_checkpoint and self._path.is_file():
            from .evaluate import Evaluation

            saved = json.loads(self._path.read_text())["evaluations"]
            self._done = [Evaluation.from_dict(one) for one in saved if one["name"] != "GRPO"]

    def has(self, name: str) -> bool:
        return any(evaluation.name == name for evaluation in self._done)

    def load(self, path: str) -> Any:
        """The model at `path`, ready to generate; only the main process evaluates."""
        if not self._state.is_main_process:
            return None
        kwargs = dict(self._args.model_init_kwargs)
        if self._quantization is not None:
            return _load(path, kwargs | {"quantization_config": self._quantization}, trainable=False)
        return _load(path, kwargs, trainable=False).to(self._args.device)

    def add(self, name: str, model: Any) -> None:
        if self._state.is_main_process:
            from transformers import AutoTokenizer

            from .evaluate import evaluate, table
            from .models import PLAIN_CHAT_TEMPLATE
            from .rewards.components import worker_count
            from .rewards.executor import RewardExecutor

            args, task = self._args, self._task
            tokenizer = AutoTokenizer.from_pretrained(
                model.config._name_or_path or args.output_dir, padding_side="left"
            )
            tokenizer.chat_template = tokenizer.chat_template or PLAIN_CHAT_TEMPLATE
            workers = worker_count(args.reward_workers, 1)
            with RewardExecutor(task, workers, args.reward_timeout, args.reward_memory_mb) as executor:
                evaluation = evaluate(
                    name,
                    model,
                    tokenizer,
                    task,
                    task.dataset("test", args.eval_rows, args.seed),
                    executor=executor,
                    num_samples=self._run.eval_samples,
                    temperature=args.temperature,
                    max_completion_length=args.max_completion_length,
                    batch_size=max(args.per_device_eval_batch_size, 64),
                    constraint=task.constraint(tokenizer) if args.constrain else None,
                    seed=args.seed,
                )
            self._done = [one for one in self._done if one.name != name] + [evaluation]
            print(f"\nheld-out rows, {self._run.eval_samples} samples each:\n{table(self._done)}\n", flush=True)
        self._state.wait_for_everyone()

    def as_dict(self) -> dict[str, Any]:
        return {
            "task": self._task.name,
            "version": self._task.version,
            "evaluations": [e.as_dict() for e in self._done],
        }

    def save(self) -> None:
        if self._state.is_main_process:
            self._path.write_text(json.dumps(self.as_dict(), ensure_ascii=False, indent=1))


def _cold_start(
    task: Task, run: RunArguments, args: Any, model_args: Any, model: str, rows: list[dict[str, Any]], peft_config: Any
) -> str:
    from .coldstart import cold_start

    if model_args.load_in_4bit or model_args.load_in_8bit:
        raise ValueError(
            "a cold start merges its adapter, which quantised weights cannot take; do it without load_in_*bit"
        )
    return cold_start(
        model,
        task,
        rows,
        Path(args.output_dir) / "cold_start",
        steps=run.cold_start_steps,
        learning_rate=run.cold_start_learning_rate,
        batch_size=run.cold_start_batch_size,
        peft_config=peft_config,
        bf16=args.bf16,
        fp16=args.fp16,
        gradient_checkpointing=args.gradient_checkpointing,
        seed=args.seed,
        use_cpu=args.use_cpu,
        model_init_kwargs=args.model_init_kwargs,
    )


def _is_adapter(path: str) -> bool:
    return (Path(path) / "adapter_config.json").is_file()


def _load(path: str, kwargs: dict[str, Any], trainable: bool) -> Any:
    if _is_adapter(path):
        from peft import AutoPeftModelForCausalLM

        return AutoPeftModelForCausalLM.from_pretrained(path, is_trainable=trainable, **kwargs)
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, **kwargs)


def _trainable(path: str, args: Any) -> Any:
    """What TRL is given: a path, or, to go on training an adapter, the loaded model."""
    return _load(path, dict(args.model_init_kwargs), trainable=True) if _is_adapter(path) else path


def _write_settings(folder: Path, task: Task, run: RunArguments, args: Any, model_args: Any) -> None:
    from dataclasses import asdict, fields

    if not args.should_save:
        return
    settings = {
        "command": " ".join([os.path.basename(sys.argv[0]), *sys.argv[1:]]),
        "task": {"name": task.name, "version": task.version, "options": asdict(task.options)},
        "run": asdict(run),
        "model": {"name": model_args.model_name_or_path or "tiny", "use_peft": model_args.use_peft},
        "training": {f.name: getattr(args, f.name) for f in fields(args) if getattr(args, f.name) != f.default},
    }
    (folder / "settings.json").write_text(json.dumps(settings, indent=1, default=str))


def _push(trainer: Any, say: Any) -> None:
    """Upload what was saved. A push that fails loses nothing: the run is on disk, and the line says how to retry."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        trainer.push_to_hub()
    except (HfHubHTTPError, OSError) as error:
        say(f"push failed ({error}); the run is in {trainer.args.output_dir}; retry with: "
            f"hf upload {trainer.hub_model_id} {trainer.args.output_dir}")  # fmt: skip


def _precision(args: Any) -> str:
    return "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"


def _say_nothing(*_: Any) -> None:
    pass


def _calm_down() -> None:
    """Leave the console to what matters: no bar for loading each small file, no word of kernels that are optional."""
    import logging

    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
