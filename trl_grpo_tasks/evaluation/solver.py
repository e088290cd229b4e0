"""`Solver`: draws samples for a request until the task accepts one or the budget ends.

with Solver.from_pretrained("outputs/demo") as solver:
    solution = solver("a small table, world 8", seconds=10)
    solution.solved, solution.answers[0].completion
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from ..constraints.filters import SamplingFilters
from ..files import check_local_path
from ..models.loading import load_model
from ..models.masked_policy import MaskedPolicy
from ..models.quantised import is_quantised_model
from ..models.ready import ReadyModel, ready_model
from ..registry import get_task
from ..report.page import task_of
from ..report.run_folder import local_run, sampling_of, settings_of
from ..rewards.components import component_weights as component_weights_of
from ..rewards.components import worker_count
from ..rewards.environment import TurnsTask, answering_with
from ..rewards.executor import RewardExecutor
from ..rewards.repair import RepairTask, refuse_editor, with_repair_of
from ..task import Row, Task, check_editor, checked_row
from ..training.ranges import check_ranges
from .evaluate import ROLLOUT_ROWS, sample_batch, scored_samples
from .sampler import CompletionSampler, prompt_ids
from .samples import Completion, Sample
from .server_sampler import ServerSampler
from .solution import Solution, check_budget

SAMPLES = 64  # the budget if none is given
FIRST_BATCH = 8  # samples; each further batch is twice as large, up to ROLLOUT_ROWS


class Solver:
    """Answers requests with a model and the verifier of a task. The model stays loaded between requests.

    Use `from_pretrained` to make one. `close`, or the end of a `with` block, stops the reward workers.
    """

    def __init__(
        self,
        task: Task,
        sampler: Any,
        ready: ReadyModel,
        executor: RewardExecutor,
        *,
        editor: str | None = None,
        seed: int = 0,
        is_greedy: bool = False,
    ):
        self.task = task
        self.sampler, self._ready, self._executor = sampler, ready, executor
        self._editor, self.seed, self._is_greedy = editor, seed, is_greedy
        self.weights = executor.weights
        self._devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        self._largest_batch = ROLLOUT_ROWS["cuda" if self._devices else "cpu"]

    @classmethod
    def from_pretrained(
        cls,
        model_or_run: str | Path,
        task: Task | str | None = None,
        *,
        constrain: bool | None = None,
        editor: str | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        max_completion_length: int | None = None,
        rollout_batch_size: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        component_weights: Mapping[str, float] | None = None,
        seed: int = 0,
        reward_timeout: float = 30.0,
        reward_workers: int | None = None,
        vllm_server_url: str | None = None,
        folder: str | Path = "outputs/solve",
    ) -> Solver:
        """Load a model: the folder or Hub id of a run, a model or an adapter, a .gguf file, or tiny.

        Args:
            task: The task, or its name, file or module. None: the built-in task of the run, with the run's options.
            constrain: Sample under the task's constraint. None: if it has one that the editor does not replace.
            editor: One of the task's editors, which may delete generated text.
            temperature: 0 takes the likeliest token. This and the filters top_k, top_p and min_p default to the run's.
            max_completion_length: The maximum number of tokens; the run's, or the task's, by default.
            rollout_batch_size: How many completions are generated at a time; by default, as many as fit.
            chat_template_kwargs: Variables of the chat template; the run's by default.
            component_weights: Weights of reward components in the score; the run's, or the task's, by default.
            seed: The same seed gives the same answers, unless a time limit ends the search.
            reward_timeout: How many seconds scoring one completion may take.
            reward_workers: The number of processes that score; by default, one per core.
            vllm_server_url: Sample from this server of the same model, of which only the tokenizer is loaded here.
            folder: Where `tiny` and .gguf files are converted to a model.
        """
        numbers = {"temperature": temperature, "max_completion_length": max_completion_length}
        numbers |= {"rollout_batch_size": rollout_batch_size, "reward_timeout": reward_timeout}
        check_ranges(numbers, as_flags=True)
        name = local_run(str(model_or_run))
        settings = settings_of(name)
        if task is None:
            check_local_path(name, "model")
            if not settings:
                raise ValueError(f"{name} is not a run, neither a folder nor on the Hub; name the task too")
            task = task_of(name)
        elif isinstance(task, str):
            task = get_task(task)
        if not isinstance(task, RepairTask):
            task = with_repair_of(task, settings)
        if isinstance(task, TurnsTask):
            refuse_editor(editor, task.turns)
        if isinstance(task, RepairTask):
            task, constrain = RepairTask(task.inner, task.turns, task.discount, constrain), constrain or None
        check_editor(task, editor, bool(constrain))
        check_local_path(name, "model")
        if constrain is None and editor in task.redundant_editors:
            constrain = False
        given = {
            "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
            "max_completion_length": max_completion_length, "chat_template_kwargs": chat_template_kwargs,
            "component_weights": component_weights,
        }  # fmt: skip
        used = {"temperature": 1.0, "max_completion_length": 256, **task.defaults, **sampling_of(settings)}
        used |= {name: value for name, value in given.items() if value is not None}
        temperature, length, filters = used["temperature"], used["max_completion_length"], SamplingFilters.of(used)
        weights = component_weights_of(task, used.get("component_weights"))
        if vllm_server_url is not None and (task.policy == "masked" or editor is not None):
            what = "an editor" if editor is not None else f"task {task.name!r} with these options"
            raise ValueError(
                f"--vllm_server_url: vLLM does not support {what}; leave it out, and the model is run here"
            )
        # Judges of the run are found by its seed, rather than trained again.
        task.prepare(settings.get("training", {}).get("seed", 42))
        workers = worker_count(reward_workers, 1)
        executor = RewardExecutor(task, workers, reward_timeout, weights=weights)  # starts meanwhile
        variables = used.get("chat_template_kwargs")
        ready = ready_model(
            name, task, [], folder,
            seed=seed, constrain=constrain, most_tokens=length, chat_template_kwargs=variables,
        )  # fmt: skip
        sampler: Any
        if vllm_server_url is not None:
            sampler = ServerSampler(
                vllm_server_url, task, ready.tokenizer, temperature, length, filters, ready.constraint
            )
        else:
            model = load_model(ready.path, policy=task.policy, dtype="float32")
            if not is_quantised_model(model):  # otherwise it is on its device already
                model = model.to("cuda" if torch.cuda.is_available() else "cpu")
            sampler = CompletionSampler(
                model.eval(), ready.tokenizer, temperature, length, ready.constraint, filters, rollout_batch_size
            )
        return cls(task, sampler, ready, executor, editor=editor, seed=seed, is_greedy=temperature == 0)

    def __call__(self, request: str | Row, samples: int | None = None, seconds: float | None = None) -> Solution:
        """Draw samples until the task accepts one, `samples` are drawn, or `seconds` have passed.

        `request` is text, which `Task.row_of` understands, or a row. If neither limit is given, 64 samples are drawn.
        The time limit is checked between batches of samples and while they are scored, not while a batch is sampled.
        On a terminal, a bar shows how many samples were drawn, and the best so far.
        """
        check_budget(samples, seconds)
        row = self.row_of(request)
        most = SAMPLES if samples is None and seconds is None else samples
        if self._is_greedy:
            most = 1  # every further sample would be the same
        solution = Solution(request, row, self.task.unverifiable(row))
        self._executor.wait_until_started()
        start = time.monotonic()
        deadline = None if seconds is None else start + seconds
        size = FIRST_BATCH
        # With None, tqdm shows the bar only on a terminal, so that log files stay free of it.
        with tqdm(total=most, desc="solve", unit="sample", leave=False, disable=None) as bar:
            while not solution.stopped:
                size = size if most is None else min(size, most - solution.samples)
                solution.add(self._batch(row, size, solution.samples, deadline))
                elapsed = time.monotonic() - start
                speed = size / max(elapsed - solution.seconds, 1e-9)
                solution.seconds = elapsed
                bar.update(size)
                bar.set_postfix_str(_best_so_far(solution))
                if solution.solved:
                    solution.stopped = "an answer was accepted"
                elif solution.samples == most:
                    solution.stopped = f"{most} sample{'s were' if most > 1 else ' was'} drawn"
                elif seconds is not None and elapsed >= seconds:
                    solution.stopped = f"{seconds:g} s passed"
                size = min(2 * size, self._largest_batch)
                if seconds is not None:  # a batch that would not end in time is made smaller
                    size = max(1, min(size, int((seconds - elapsed) * speed)))
        return solution

    def sample(self, request: str | Row, samples: int) -> list[Sample]:
        """Draw exactly this number of samples, and return them in order with their scores."""
        row = self.row_of(request)
        drawn: list[Sample] = []
        while len(drawn) < samples:
            drawn += self._batch(row, min(self._largest_batch, samples - len(drawn)), len(drawn), None)
        return drawn

    def row_of(self, request: str | Row) -> dict[str, Any]:
        """Return the row that a request means; ValueError if the task, the model or the constraint cannot use it."""
        row = self.task.row_of(request) if isinstance(request, str) else checked_row(self.task, request)
        self.check_row(row)
        return row

    def score(
        self,
        row: Row,
        completions: Sequence[Completion],
        counts: Sequence[dict[str, int]] | None = None,
        deadline: float | None = None,
    ) -> list[Sample]:
        """Score completions of one row in the reward workers."""
        rows, texts = [row] * len(completions), [one.text for one in completions]
        pending = self._executor.submit([json.dumps(row, ensure_ascii=False)] * len(rows), texts)
        outcomes = pending.result(deadline)
        return scored_samples(self.task, rows, completions, outcomes, counts)

    def check_row(self, row: Row) -> None:
        """Raise ValueError if the model or the constraint cannot work with this row."""
        if self.task.policy == "masked":
            MaskedPolicy(self._ready.tokenizer, self._ready.config).prompt_ids([row["prompt"]])
        elif limit := getattr(self._ready.config, "max_position_embeddings", None):
            length = len(prompt_ids(self._ready.tokenizer, [row["prompt"]])[0])
            if length >= limit:
                raise ValueError(f"the prompt has {length} tokens, and the model reads at most {limit}; shorten it")
        if self._ready.constraint is not None:
            try:
                state = self._ready.constraint.start(row)
                if state is not None:
                    state.mask()
            except Exception as error:  # the row comes from the user, so that a task's code can fail in any way
                raise ValueError(
                    f"the constraint of task {self.task.name!r} cannot start on this row ({type(error).__name__}: "
                    f"{error}); give a row like those of the task's data set"
                ) from error

    def close(self) -> None:
        """Stop the reward workers."""
        self._executor.close()

    def __enter__(self) -> Solver:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _batch(self, row: dict[str, Any], size: int, first: int, deadline: float | None) -> list[Sample]:
        """Sample and score a batch that begins with sample number `first` of this request."""
        rows = [row] * size
        # Different rows get different random numbers, whatever was asked before.
        seed = f"{self.seed}-{json.dumps(row, sort_keys=True)}"
        turns_scored = answering_with(self._executor, self._ready.constraint)
        with torch.random.fork_rng(self._devices), torch.no_grad(), turns_scored:
            completions, counts = sample_batch(
                self.sampler, self.task, self._ready.tokenizer, rows, [], self._editor, seed, first
            )
            return self.score(row, completions, counts, deadline)


def _best_so_far(solution: Solution) -> str:
    score = solution.answers[0].sample.score
    if score is None:
        return "nothing could be scored"
    return "solved" if solution.solved else f"best score {score['total']:.4g}"
