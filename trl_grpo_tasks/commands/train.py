"""`trl-grpo-tasks train` and train.py: model, cold start, evaluation, GRPO, evaluation, report, Hub."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..failures import known_failure
from ..files import write_atomically
from ..models.checkpoints import CheckpointError, DifferentStartError, newest_complete
from ..report.page import write_report
from ..report.run_folder import COLD_START_FOLDER, JUDGE_FILE, RESULTS_FILE, SETTINGS_FILE, duration
from ..serving import ServerError
from ..task import EditorError, Task, describe_rows, one_per_request
from .arguments import RunArguments, parse, read_command_line
from .command_words import NEWEST
from .defaults import rate_hints
from .errors import failed, takes_debug
from .eval import Candidate, Comparison, evaluate_model, evaluation_settings, judge_usage, load_for_evaluation
from .hub import PushError
from .lock import locked
from .plan import Plan, check_writable, prepare
from .push import push_run
from .quiet import quiet_third_party_logging
from .run_settings import precision, typed_command, write_settings

CONSOLE_METRICS = ("reward", "rewards/success/mean", "rewards/valid/mean", "loss", "pg_loss", "kl", "entropy",
                   "completions/mean_length", "constraint/allowed_mass", "curriculum/level")  # fmt: skip


class FolderLostError(RuntimeError):
    """The output folder was deleted or emptied while the run was writing to it."""


@takes_debug
def main(argv: Sequence[str], command: str = "train") -> int:
    """Run `train` or `eval`. Errors that the user can fix are one line without a traceback. Returns the exit status: 0
    if the run succeeded, 2 for wrong options, 1 for other errors, 130 after Ctrl-C and 143 after SIGTERM."""
    with ExitStack() as held:
        try:
            return _main(argv, command, held)
        except Exception as error:
            if (failure := known_failure(error)) is None:
                raise
            return failed(error, 1, failure)


def _main(argv: Sequence[str], command: str, held: ExitStack) -> int:
    try:
        read_command_line(argv, command)  # mistakes here need no slow imports
    except (ValueError, ImportError) as error:
        return failed(error, 2)
    from accelerate import PartialState

    from .interrupt import StoppedError, exit_status, sigterm_as_ctrl_c

    quiet_third_party_logging()
    try:
        task, run, args, model_args = parse(argv, command)
        check_writable(args.output_dir)
        if args.process_index == 0:
            held.enter_context(locked(args.output_dir, "eval" if run.eval_only else "train"))
        act: Callable[[], Any]
        if run.eval_only:
            act = Comparison.prepare(task, run, args, model_args).evaluate
        else:
            act = partial(run_training, task, run, args, model_args, prepare(task, run, args, model_args))
    except (ValueError, ImportError) as error:
        return failed(error, 2)
    try:
        with sigterm_as_ctrl_c():
            act()
    except (DifferentStartError, CheckpointError, ServerError) as error:  # before the cold start or the training
        return failed(error, 2)
    except (PushError, EditorError, FolderLostError) as error:
        return failed(error, 1)
    except KeyboardInterrupt as interruption:
        if args.process_index == 0:
            print(_how_to_resume(run, args, interruption), file=sys.stderr, flush=True)
        sys.stdout.flush()
        if isinstance(interruption, StoppedError):  # in all processes; a launcher ends all as soon as one has ended
            PartialState().wait_for_everyone()
        return exit_status(interruption)
    return 0


@dataclass
class TrainingResult:
    """What a run made: its folder, its trainer, and its evaluations in order."""

    folder: Path
    trainer: Any
    evaluations: list[Any]


def run_training(
    task: Task,
    run: RunArguments,
    args: Any,
    model_args: Any,
    plan: Plan,
    *,
    callbacks: Sequence[Any] = (),
    command: str | None = None,
) -> TrainingResult:
    """Train, evaluate and report as the options say. `callbacks` are added to the trainer. `command` is recorded as
    the command line that repeats the run, instead of the one that was typed."""
    from accelerate import PartialState

    from ..models.loading import TINY, merged_folder
    from ..models.precision import is_bf16_fast
    from .interrupt import saved_when_interrupted
    from .run_hints import before_training_hints, outcome

    state = PartialState()
    say: Callable[..., None] = print if state.is_main_process else lambda *_: None
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    name = model_args.model_name_or_path or TINY
    slow = " (this GPU has no fast bf16)" if args.fp16 and not is_bf16_fast() else ""
    how = f"{precision(args)} on {args.device.type}{slow}"
    say(f"task {task.name} {task.version}, model {name}, {how}, output in {folder}")
    say(_outline(run, args, len(plan.test_rows)))
    for line in run.defaults:
        say(line)
    is_chosen = name == TINY and args.learning_rate == task.tiny_defaults.get("learning_rate")  # by the task
    for hint in () if is_chosen else rate_hints(run.kind, args.learning_rate):
        say(f"hint: {hint}")

    model = plan.model.path
    evaluations = _Evaluations(task, run, args, state, plan)
    if run.cold_start_steps:
        model = _cold_start(task, run, args, plan)
    before = "cold start" if run.cold_start_steps else "before"
    if run.eval_before_and_after and before not in [one.name for one in evaluations.done]:
        evaluations.add(before, model)
        for hint in before_training_hints(evaluations.done[-1], run):
            say(f"hint: {hint}")

    trainer = _make_trainer(model, task, run, args, plan)
    for callback in callbacks:
        trainer.add_callback(callback)
    write_settings(folder, task, run, args, model_args, trainer.model, command or typed_command(args))
    with saved_when_interrupted(trainer):
        resume = args.resume_from_checkpoint
        trainer.train(resume_from_checkpoint=True if resume == NEWEST else resume)
    trainer.save_model(args.output_dir, _internal_call=True)  # otherwise it would push the model now
    if run.eval_before_and_after:
        with trainer.generation.policy_for_evaluation() as policy:
            evaluations.add("GRPO", policy)
        evaluations.show()
        for line in outcome(evaluations.done[-2], evaluations.done[-1], run, args, name):
            say(line)
    usage = judge_usage(task)
    if state.is_main_process:
        if usage is not None:
            say(usage)
            write_atomically(folder / JUDGE_FILE, json.dumps({"summary": str(usage), **asdict(usage)}))
        if run.save_merged:
            merged_folder(folder, task.policy)
        say(f"report: {write_report(folder, task, pictures=trainer.pictures)}")
        trainer.create_model_card()
        if not (folder / SETTINGS_FILE).is_file():
            raise FolderLostError(
                f"{folder} was deleted or emptied during the run; the model, the evaluation and the report were "
                "saved, but earlier checkpoints, metrics and settings are lost"
            )
    if args.push_to_hub and state.is_main_process:
        push_run(folder, task, trainer.hub_model_id, merged=run.save_merged)
    trainer.metrics_file.write()  # what could not be written during the run
    return TrainingResult(folder, trainer, evaluations.done)


def _make_trainer(model: str, task: Task, run: RunArguments, args: Any, plan: Plan) -> Any:
    from transformers.trainer import DEFAULT_PROGRESS_CALLBACK  # another one in notebooks
    from transformers.trainer_callback import PrinterCallback

    from ..models.loading import is_adapter
    from ..report.trackers import TrackedSamples
    from ..training.callbacks import Console, LiveReport
    from ..training.trainer import TaskGRPOTrainer

    trainer = TaskGRPOTrainer(
        model,
        args=args,
        train_dataset=plan.rows,
        eval_dataset=plan.choosing_rows,
        processing_class=plan.model.tokenizer,
        task=task,
        # A vLLM server makes the task's constraint itself, so that it cannot sample under one that is given here.
        constraint=None if args.use_vllm and args.vllm_mode == "server" else plan.model.constraint,
        peft_config=None if is_adapter(model) else plan.peft_config,  # that of the cold start is trained further
        quantization_config=plan.quantization,
    )
    if not run.verbose:
        for callback in (DEFAULT_PROGRESS_CALLBACK, PrinterCallback):
            trainer.remove_callback(callback)
        trainer.add_callback(Console("GRPO", CONSOLE_METRICS))
    if args.report_to:
        trainer.add_callback(TrackedSamples(trainer))
    trainer.add_callback(LiveReport(task, trainer.pictures))
    return trainer


class _Evaluations:
    """The evaluations of a run so far. They are kept in results.json, so a resumed run does not repeat them."""

    def __init__(self, task: Task, run: RunArguments, args: Any, state: Any, plan: Plan):
        from accelerate.utils import broadcast_object_list

        self._task, self._run, self._args, self._state, self._plan = task, run, args, state, plan
        self._path = Path(args.output_dir) / RESULTS_FILE
        self._settings = json.loads(json.dumps(evaluation_settings(run, args)))
        # The main process reads the file for all processes, so that they agree on its content.
        self.done: list[Any] = broadcast_object_list([self._read() if state.is_main_process else []])[0]

    def _read(self) -> list[Any]:
        if not self._args.resume_from_checkpoint or not self._path.is_file():
            return []
        from ..evaluation.samples import Evaluation

        saved = json.loads(self._path.read_text(encoding="utf-8"))
        if saved.get("settings") != self._settings:
            return []
        done = [Evaluation.from_dict(one) for one in saved["evaluations"] if one["name"] != "GRPO"]
        # An evaluation of other rows cannot be compared with the one after GRPO.
        rows = json.loads(json.dumps([row for row in self._plan.test_rows for _ in range(self._run.samples)]))
        return [one for one in done if [sample.row for sample in one.samples] == rows]

    def add(self, name: str, model: Any) -> None:
        """Evaluate `model`, or the one at this path; each process takes a share of the rows."""
        if isinstance(model, str):
            model = load_for_evaluation(model, self._task, self._args, self._plan.quantization)
        candidate = Candidate(name, "", self._plan.model)
        evaluation = evaluate_model(candidate, model, self._task, self._plan.test_rows, self._run, self._args)
        self.done = [one for one in self.done if one.name != name] + [evaluation]
        if self._state.is_main_process:
            shown = ", ".join(f"{key} {evaluation.metrics[key]:.3f}" for key in ("success", "valid", "reward"))
            print(f"{name}: {shown} on held-out rows ({duration(evaluation.metrics['seconds'])})", flush=True)
            saved = {
                "task": self._task.name,
                "version": self._task.version,
                "settings": self._settings,
                "evaluations": [one.as_dict() for one in self.done],
            }
            write_atomically(self._path, json.dumps(saved, ensure_ascii=False, indent=1))

    def show(self) -> None:
        if self._state.is_main_process:
            from ..evaluation.summary import table

            rows = self._plan.test_rows
            described = describe_rows(len(rows), len(one_per_request(self._task, rows)))
            print(f"\n{described}, {self._run.samples} samples each, with 95% intervals:\n{table(self.done)}\n")


def _cold_start(task: Task, run: RunArguments, args: Any, plan: Plan) -> str:
    from accelerate.state import AcceleratorState

    from ..training.cold_start import cold_start

    folder = cold_start(
        plan.model.path,
        task,
        plan.rows[: run.cold_start_rows],
        Path(args.output_dir) / COLD_START_FOLDER,
        tokenizer=plan.model.tokenizer,
        steps=run.cold_start_steps,
        learning_rate=run.cold_start_learning_rate,
        batch_size=run.cold_start_batch_size,
        peft_config=copy.deepcopy(plan.peft_config),  # peft writes the name of the base model into its configuration
        bf16=args.bf16,
        fp16=args.fp16,
        gradient_checkpointing=args.gradient_checkpointing,
        dataloader_pin_memory=args.dataloader_pin_memory,
        seed=args.seed,
        use_cpu=args.use_cpu,
        model_init_kwargs=args.model_init_kwargs,
        quantization=plan.quantization,
    )
    if args.deepspeed_plugin is not None:  # the next trainer would be refused, and its model not sharded when loaded
        AcceleratorState._reset_state()
        args.deepspeed_plugin.set_deepspeed_weakref()
    return folder


def _outline(run: RunArguments, args: Any, held_out: int) -> str:
    steps = f"{args.max_steps} steps" if args.max_steps > 0 else f"{args.num_train_epochs:g} epochs"
    cold_start = f"cold start of {run.cold_start_steps} steps, then " if run.cold_start_steps else ""
    evaluation = f"; {held_out} held-out rows before and after" if held_out else ""
    completions = f"{args.generation_batch_size} completions per rollout, {args.num_generations} per prompt"
    return f"{cold_start}GRPO for {steps}, {completions}{evaluation}"


def _how_to_resume(run: RunArguments, args: Any, interruption: KeyboardInterrupt) -> str:
    if run.eval_only:
        return "stopped; the same command resumes the evaluation"
    checkpoint = newest_complete(args.output_dir)
    if checkpoint is None:
        return "stopped before the first checkpoint; the same command starts again"
    return (
        f"{str(interruption) or 'stopped'}; {checkpoint} is complete; to resume:\n{typed_command(args, resuming=True)}"
    )
