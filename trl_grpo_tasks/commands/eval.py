"""`trl-grpo-tasks eval`: compare models, adapters, checkpoints and files of completions on the same held-out rows."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import check_local_path, write_atomically
from ..redact import redacted
from ..report.run_folder import EVAL_ONLY_FILE, compared_requests
from ..task import Row, Task, check_editor, describe_rows, one_per_request, rows_of, short_hash
from .arguments import RunArguments
from .plan import check_turns, check_writable

if TYPE_CHECKING:
    from ..evaluation.samples import Completion
    from ..models.ready import ReadyModel
    from ..rewards.llm_judge import Usage

TABLE_FILE = "evaluation.md"
KEPT_FOLDER = "evaluation"  # samples of an unfinished evaluation, and converted models


@dataclass
class Candidate:
    """What is evaluated, with its name: a model, or completions from a file."""

    name: str
    given: str
    model: ReadyModel | None = None
    completions: list[Completion] | None = None


@dataclass
class Comparison:
    """An evaluation of several candidates on the same rows."""

    task: Task
    run: RunArguments
    args: Any
    rows: list[dict[str, Any]]
    candidates: list[Candidate]
    quantization: Any

    @classmethod
    def prepare(cls, task: Task, run: RunArguments, args: Any, model_args: Any) -> Comparison:
        """Find rows, models and files; ValueError for what is missing or does not fit."""
        from accelerate import PartialState

        from ..models.masked_policy import check_settings
        from ..models.quantised import quantization_config
        from ..models.ready import ready_model
        from ..rewards.components import component_weights
        from ..training.exact_sampling import check_endings

        check_writable(args.output_dir)
        check_editor(task, run.editor, args.constrain)
        if task.policy != "masked":
            check_settings(args, is_masked=False)
        found = [_named(text) for text in run.models or [f"model={model_args.model_name_or_path or 'tiny'}"]]
        component_weights(task, args.component_weights)
        check_endings(args)
        for candidate in found:
            check_local_path(candidate.given, "--models" if run.models else "--model")
        say = print if PartialState().is_main_process else None
        rows = rows_to_report(task, args, found, say)
        names = [candidate.name for candidate in found]
        for name in names:
            if names.count(name) > 1 or name in ("", ".", "..") or set(name) & set("/\\"):
                raise ValueError(f"--models: {name!r} must be unique and without slashes; give NAME=MODEL")
        with PartialState().main_process_first():
            task.prepare(args.seed)
            for candidate in found:
                if candidate.given.endswith(".jsonl"):
                    candidate.completions = read_completions(candidate.given, rows)
                    continue
                candidate.model = ready_model(
                    candidate.given,
                    task,
                    rows,
                    Path(args.output_dir) / KEPT_FOLDER / candidate.name,
                    seed=args.seed,
                    constrain=args.samples_under_constraint,
                    most_tokens=args.max_completion_length,
                    revision=model_args.model_revision,
                    chat_template_kwargs=args.chat_template_kwargs,
                )
                check_turns(candidate.model, rows, args.max_completion_length)
        return cls(task, run, args, rows, found, quantization_config(model_args, args))

    def evaluate(self) -> dict[str, Any]:
        """Evaluate the candidates in turn; print the table and write it as JSON and Markdown. Returns the content of
        the JSON. With several processes, all evaluate, and the main process prints and writes."""
        from accelerate import PartialState

        from ..evaluation.summary import table

        is_main = PartialState().is_main_process
        run, args, folder = self.run, self.args, Path(self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        how = evaluation_settings(run, args)
        counts = {"rows": len(self.rows), "requests": len(one_per_request(self.task, self.rows))}
        results = {"task": self.task.name, "version": self.task.version, "settings": counts | how}
        if is_main:
            self._keep_earlier(folder, results)
        done: list[Any] = []
        for candidate in self.candidates:
            done.append(self._evaluate(candidate, how))
            results["evaluations"] = [
                one.as_dict() | {"model": its.given} for one, its in zip(done, self.candidates, strict=False)
            ]
            if is_main:
                write_atomically(folder / EVAL_ONLY_FILE, json.dumps(results, ensure_ascii=False, indent=1))
                write_atomically(folder / TABLE_FILE, _markdown(results, table(done, markdown=True)))
        if is_main:
            print(
                f"\n{_sentence(results)}\n\n{table(done)}\n\nwritten: {folder / EVAL_ONLY_FILE}, {folder / TABLE_FILE}"
            )
        if (usage := judge_usage(self.task)) is not None and is_main:
            print(usage)
        return results

    def _keep_earlier(self, folder: Path, results: dict[str, Any]) -> None:
        """Rename the results of an earlier evaluation of other models or with other settings."""
        written = folder / EVAL_ONLY_FILE
        if not written.is_file():
            return
        try:
            earlier = json.loads(written.read_text(encoding="utf-8"))
            models = [(one["name"], one["model"]) for one in earlier.pop("evaluations")]
        except (ValueError, KeyError, TypeError, AttributeError):
            earlier, models = None, []
        if earlier == results and models == [(one.name, one.given) for one in self.candidates][: len(models)]:
            return
        number = next(n for n in itertools.count(1) if not (folder / f"evaluation-{n}.json").exists())
        written.rename(folder / f"evaluation-{number}.json")
        if (folder / TABLE_FILE).is_file():
            (folder / TABLE_FILE).rename(folder / f"evaluation-{number}.md")
        print(f"an earlier evaluation is kept: {folder / f'evaluation-{number}.json'}")

    def _evaluate(self, candidate: Candidate, how: dict[str, Any]) -> Any:
        from ..evaluation.evaluate import KeptSamples

        if candidate.model is None:
            return evaluate_completions(candidate, self.task, self.rows, self.run, self.args)
        path = candidate.model.path
        settings = how | {
            "task": [self.task.name, self.task.version, redacted(asdict(self.task.options))],
            "rows": hashlib.sha256(json.dumps(self.rows, sort_keys=True).encode()).hexdigest(),
            "model": [path, _written_at(path), str(redacted(self.args.model_init_kwargs))],
            "quantization": str(self.quantization),
        }
        kept = KeptSamples(Path(self.args.output_dir) / KEPT_FOLDER / candidate.name / "samples.jsonl", settings)
        model = load_for_evaluation(path, self.task, self.args, self.quantization)
        return evaluate_model(candidate, model, self.task, self.rows, self.run, self.args, kept)


def rows_to_report(task: Task, args: Any, candidates: Sequence[Candidate], say: Any) -> list[dict[str, Any]]:
    """The held-out rows, without those on which --best_by chose one of the models."""
    rows = rows_of(task, "test", args.eval_rows, args.seed, say=say)
    compared = {request for one in candidates for request in compared_requests(one.given)}
    if all(short_hash(task.request(row)) not in compared for row in rows):
        return rows
    more = rows_of(task, "test", None if args.eval_rows is None else 2 * args.eval_rows, args.seed)
    left = [row for row in more if short_hash(task.request(row)) not in compared][: args.eval_rows]
    if not left:
        raise ValueError(
            "--best_by has compared models on all of these held-out rows, so that none is left to report; give a "
            "larger --eval_rows"
        )
    if say is not None:
        say(f"{len(left)} held-out rows are evaluated: those on which --best_by chose a model are left out")
    return left


def evaluation_settings(run: RunArguments, args: Any) -> dict[str, Any]:
    """How evaluations with the options of a run sample and score; two of them can be compared if these are equal."""
    how = {
        "num_samples": run.samples,
        "temperature": args.temperature,
        "filters": str(args.sampling_filters),
        "max_completion_length": args.max_completion_length,
        "constrain": args.constrain,
        "fill_steps": args.fill_steps,
        "editor": run.editor,
        "seed": args.seed,
    }
    if args.repair_turns > 1:
        how |= {"repair_turns": args.repair_turns, "repair_discount": args.repair_discount}
    more = {name: getattr(args, name) for name in ("component_weights", "chat_template_kwargs")}
    return how | {name: value for name, value in more.items() if value}


def evaluate_model(
    candidate: Candidate, model: Any, task: Task, rows: Sequence[Row], run: RunArguments, args: Any, kept: Any = None
) -> Any:
    """Evaluate one model with the options of a run."""
    from ..evaluation.evaluate import evaluate

    assert candidate.model is not None  # only files of completions have none
    with _executor(task, args) as executor:
        return evaluate(
            candidate.name,
            model,
            candidate.model.tokenizer,
            task,
            rows,
            executor=executor,
            num_samples=run.samples,
            temperature=args.temperature,
            filters=args.sampling_filters,
            max_completion_length=args.max_completion_length,
            batch_size=args.per_device_eval_batch_size if args.is_eval_batch_size_given else None,
            rollout_batch_size=args.rollout_batch_size,
            constraint=candidate.model.constraint,
            editor=run.editor,
            seed=args.seed,
            kept=kept,
        )


def evaluate_completions(candidate: Candidate, task: Task, rows: Sequence[Row], run: RunArguments, args: Any) -> Any:
    """Evaluate completions from a file; each process scores a share of them."""
    from accelerate import PartialState
    from accelerate.utils import gather_object

    from ..evaluation.evaluate import add_group_components, scored_samples
    from ..evaluation.samples import Evaluation
    from ..evaluation.summary import summarise

    completions = candidate.completions or []
    each = len(completions) // len(rows)
    repeated = [row for row in rows for _ in range(each)]
    index, count = PartialState().process_index, PartialState().num_processes
    share = slice(len(repeated) * index // count, len(repeated) * (index + 1) // count)
    with _executor(task, args) as executor:
        texts = [one.text for one in completions[share]]
        outcomes = executor.submit([json.dumps(row, ensure_ascii=False) for row in repeated[share]], texts).result()
    samples = gather_object(scored_samples(task, repeated[share], completions[share], outcomes))
    add_group_components(task, executor.weights, samples, each)
    metrics, intervals = summarise(samples, each, task.facts)
    return Evaluation(candidate.name, metrics | {"seconds": math.nan}, samples, intervals)


def judge_usage(task: Task) -> Usage | None:
    """What the LLM judge of a task has used, over all processes, which must all call this; None without a judge."""
    from accelerate.utils import gather_object

    from ..rewards.llm_judge import Usage

    judge = task.llm_judge()
    return None if judge is None else Usage.sum(gather_object([judge.usage]))


def load_for_evaluation(path: str, task: Task, args: Any, quantization: Any) -> Any:
    """The model at `path`, ready to generate."""
    from ..models.loading import load_model
    from ..models.masked_policy import set_fill_steps
    from ..models.quantised import is_quantised_model

    model = load_model(path, policy=task.policy, quantization_config=quantization, **args.model_init_kwargs)
    set_fill_steps(model, args.fill_steps)
    return model if is_quantised_model(model) else model.to(args.device)


def read_completions(path: str, rows: Sequence[Row]) -> list[Completion]:
    """Read completions from lines of {"row": {...}, "completion": "..."}: in the order of `rows`, the same number for
    each. ValueError for any other file."""
    # Equal rows share their completions.
    keys = [json.dumps(row, sort_keys=True) for row in rows]
    written: dict[str, list[Completion]] = {key: [] for key in keys}
    with open(path, encoding="utf-8", errors="replace") as lines:
        for number, row, completion in read_scored_lines(path, lines):
            of_row = written.get(json.dumps(row, sort_keys=True))
            if of_row is None:
                raise ValueError(
                    f"{path}, line {number}: its row is not one of the {len(rows)} held-out rows, which depend on "
                    "--eval_rows, --seed and the options of the task"
                )
            of_row.append(completion)
    repeats = Counter(keys)
    each = {key: len(texts) / repeats[key] for key, texts in written.items()}
    fewest, most = min(each.values()), max(each.values())
    if fewest != most or fewest < 1 or fewest != int(fewest):
        raise ValueError(
            f"{path} has between {fewest:g} and {most:g} completions for each of the {len(rows)} held-out rows; it "
            "must have the same number for each, at least one (--eval_rows sets the number of rows)"
        )
    left = {key: iter(texts) for key, texts in written.items()}
    return [next(left[key]) for key in keys for _ in range(int(fewest))]


def read_scored_lines(path: str | Path, lines: Iterable[str]) -> Iterator[tuple[int, dict, Completion]]:
    """The number, the row and the completion of each line that is not empty; ValueError, with its place, for a wrong
    one."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield number, *read_scored_line(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error


def read_scored_line(line: str) -> tuple[dict, Completion]:
    """The row and the completion of a line of JSON, which may give "tokens" and "cut_off"; ValueError for any other
    line."""
    from ..evaluation.samples import Completion

    try:
        entry = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(entry, dict) or not isinstance(entry.get("row"), dict):
        raise ValueError('must be an object with "row" (an object) and "completion" (text)')
    if not isinstance(entry.get("completion"), str):
        raise ValueError('"completion" must be text')
    tokens = entry.get("tokens")
    if not (tokens is None or (isinstance(tokens, int) and tokens >= 0)):
        raise ValueError('"tokens" must be a whole number, if it is given')
    if not (entry.get("cut_off") is None or isinstance(entry["cut_off"], bool)):
        raise ValueError('"cut_off" must be true or false, if it is given')
    return entry["row"], Completion(entry["completion"], tokens, entry.get("cut_off"))


def _named(text: str) -> Candidate:
    name, equals, given = text.partition("=")
    if equals and "/" not in name:  # otherwise the sign is part of a path
        return Candidate(name, given)
    return Candidate(Path(text).name.removesuffix(".jsonl"), text)


def _executor(task: Task, args: Any) -> Any:
    from ..rewards.components import component_weights, worker_count
    from ..rewards.executor import RewardExecutor

    workers = worker_count(args.reward_workers, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    weights = component_weights(task, args.component_weights)
    return RewardExecutor(task, workers, args.reward_timeout, args.reward_memory_mb, weights=weights)


def _written_at(path: str) -> int | None:
    """When the weights of a local model were last written; None for a model on the Hub."""
    weights = [file for kind in ("*.safetensors", "*.bin") for file in Path(path).glob(kind)]
    return max((file.stat().st_mtime_ns for file in weights), default=None)


def _sentence(results: dict[str, Any]) -> str:
    how = results["settings"]
    sampling = [
        "constrained" if how["constrain"] else "unconstrained",
        *([f"editor {how['editor']}"] if how["editor"] else []),
        f"temperature {how['temperature']:g}",
        *([how["filters"]] if how["filters"] else []),
        *([f"up to {how['repair_turns']} turns"] if "repair_turns" in how else []),
    ]
    return (
        f"{describe_rows(how['rows'], how['requests'])} of task {results['task']} {results['version']}, "
        f"{how['num_samples']} samples each, {', '.join(sampling)}; in brackets: 95% bootstrap intervals"
    )


def _markdown(results: dict[str, Any], text: str) -> str:
    rows = results["settings"]["rows"]
    models = "\n".join(
        f"- {one['name']}: `{one['model']}`, {len(one['samples']) // rows} samples per row"
        for one in results["evaluations"]
    )
    return f"{_sentence(results)}.\n\n{text}\n\n{models}\n"
