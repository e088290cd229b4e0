"""Idle time of the GPU during rollouts under the brick task's constraint.

    python benchmarks/idle.py [--rows 1024] [--model FOLDER_OR_GGUF] [--new_tokens 32 96] [--groups 2 3]

The prompts are captions of the task, 8 completions each. Without --model, the model has the shape of SmolLM2-135M with
random weights and a BPE vocabulary of the same size, trained on synthetic words. Completions may not end while they
can go on, so that all rows are active (`rows left` counts them at the end). The table has, for the second half of the
passes of a rollout, the wall-clock time per pass and the time that the CPU spent on masks, which may overlap with the
GPU. The time during which kernels ran comes from torch.profiler: the difference of two rollouts of different lengths,
per additional pass. Wall-clock time without it is the idle time of the GPU. `step idle ms` is the idle time until all
rows have taken a step: large batches are split into two or three groups, with a pass each. --groups compares numbers
of groups; without it, the rollout chooses. More groups have smaller passes, so that the GPU is busy for longer per
step: compare `step ms`. On a CPU there is no idle time. Writes benchmarks/results/idle.json.
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from harness import Report, config_of, memory, now, random_model, run_table, table_parser
from masks import synthetic_bpe_tokenizer
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from trl_grpo_tasks.constraints.recording import DeviceMasks
from trl_grpo_tasks.constraints.shared import SharedStates
from trl_grpo_tasks.constraints.table import MaskTable
from trl_grpo_tasks.constraints.workers import _WORKERS, WorkerStates
from trl_grpo_tasks.models.loading import load_tokenizer, prepare_model
from trl_grpo_tasks.models.tiny import PLAIN_CHAT_TEMPLATE
from trl_grpo_tasks.rollout import Decoder, engine, rollout
from trl_grpo_tasks.tasks.brick import BrickTask

GROUP = 8
COLUMNS = {
    "rows": "rows",
    "groups": "groups",
    "ms per pass": "pass_ms",
    "GPU busy ms": "busy_ms",
    "GPU idle ms": "idle_ms",
    "step ms": "step_ms",
    "step idle ms": "step_idle_ms",
    "CPU masks ms": "masks_ms",
    "passes": "passes",
    "rows left": "rows_left",
    "start-up s": "start_up_s",
    "peak GB": "peak_gb",
}


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = table_parser(__doc__, __file__)
    parser.add_argument("--rows", nargs="+", type=int, default=[1024] if on_gpu else [16])
    parser.add_argument("--shape", default="135M" if on_gpu else "tiny")
    parser.add_argument("--model", help="model folder or .gguf file, instead of a shape")
    parser.add_argument("--new_tokens", nargs=2, type=int, default=[32, 96], help="lengths of the two rollouts")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--groups", nargs="+", type=int, default=[None], help="numbers of groups to compare")
    options = parser.parse_args()
    cells = [{"rows": rows, "groups": groups} for rows in options.rows for groups in options.groups]
    with tempfile.TemporaryDirectory() as folder:
        run_table("idle", cells, options, COLUMNS, folder=folder)


def measure(report: Report, options: Any, rows: int, groups: int | None, folder: str) -> None:
    """Measure one row of the table; `groups` None leaves the number of groups to the rollout."""
    task = BrickTask()
    model, tokenizer = model_and_tokenizer(options, task, folder)
    examples = [row for row in task.dataset("train", rows // GROUP, 0) for _ in range(GROUP)]
    prompts = [
        tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False) for row in examples
    ]
    constraint = Endless(task.constraint(tokenizer), tokenizer.eos_token_id)
    decoder = Decoder(model)
    kind = model.device.type
    rule, counts = engine.group_count, [0]

    def counted(*args: Any) -> int:
        counts.append(groups or rule(*args))
        return counts[-1]

    def run(new_tokens: int, seed: int) -> tuple[Passes, Any]:
        torch.manual_seed(seed)
        table = MaskTable(model.get_output_embeddings().weight.shape[0])
        autocast = torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda")
        with timed_masks() as passes, patch.object(engine, "group_count", counted), autocast:
            done = rollout(
                model, prompts, max_new_tokens=new_tokens, eos_token_ids=[tokenizer.eos_token_id], table=table,
                constraint=constraint, rows=examples, decoder=decoder,
            )  # fmt: skip
        return passes, done

    short, long = sorted(options.new_tokens)
    start = now()
    for repeat in range(options.repeats):
        run(long, repeat)  # other random numbers meet other sizes, for which CUDA graphs are recorded
    report({"start_up_s": now() - start})
    deadline = now() + 60
    while (workers := _WORKERS.get(constraint)) is not None and not workers.ready and now() < deadline:
        time.sleep(0.1)  # the first rollout has started them, and does not wait
    values: dict[str, list[float]] = {"pass_ms": [], "masks_ms": [], "passes": []}
    for repeat in range(options.repeats):
        passes, done = run(long, repeat)
        half = len(passes.starts) // 2
        values["pass_ms"].append((passes.starts[-1] - passes.starts[half]) / (len(passes.starts) - 1 - half) * 1e3)
        values["masks_ms"].append(sum(passes.seconds[half:-1]) / (len(passes.starts) - 1 - half) * 1e3)
        values["passes"].append(done.forward_passes)
        left = sum(len(ids) == long for ids in done.completion_ids)
        step_ms = [counts[-1] * ms for ms in values["pass_ms"]]
        report({**values, "step_ms": step_ms, "rows_left": left, "groups": counts[-1], **memory()})
    if kind == "cuda":
        (more, last), (fewer, first) = (busy_seconds(run, tokens) for tokens in (long, short))
        busy = (more - fewer) / (last - first) * 1e3
        idle = [max(ms - busy, 0.0) for ms in values["pass_ms"]]
        report({"busy_ms": busy, "idle_ms": idle, "step_idle_ms": [counts[-1] * ms for ms in idle]})


@dataclass
class Passes:
    """When the masks of each pass were asked for, and the seconds that the CPU then spent on masks and states."""

    starts: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


class Endless:
    """A constraint without the end-of-sequence token wherever another token is allowed."""

    def __init__(self, constraint: Any, eos: int):
        self._constraint, self._word, self._bit = constraint, eos // 32, np.uint32(1 << eos % 32)
        self.vocab_size = constraint.vocab_size
        self._masks: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def start(self, row: Any) -> EndlessState:
        return EndlessState(self, self._constraint.start(row))

    def without_end(self, words: np.ndarray) -> np.ndarray:
        known = self._masks.get(id(words))
        if known is None or known[0] is not words:
            changed = words.copy()
            changed.view(np.uint32)[self._word] &= ~self._bit
            changed = changed if changed.any() else words.copy()
            changed.flags.writeable = words.flags.writeable
            known = words, changed
            if not words.flags.writeable:  # only such masks can be told apart by their address
                self._masks[id(words)] = known
        return known[1]


class EndlessState:
    """A state of Endless."""

    def __init__(self, constraint: Endless, state: Any):
        self._constraint, self._state = constraint, state
        self.origin = state.origin
        self.accept = state.accept

    @property
    def finished(self) -> bool:
        return bool(self._state.finished)

    def mask(self) -> np.ndarray:
        return self._constraint.without_end(self._state.mask())

    def fork(self) -> EndlessState:
        return EndlessState(self._constraint, self._state.fork())


def model_and_tokenizer(options: Any, task: Any, folder: str) -> tuple[Any, Any]:
    on_gpu = torch.cuda.is_available()
    dtype = "bfloat16" if on_gpu else "float32"
    if options.model:
        source = prepare_model(options.model, task, folder)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype), trust_remote_code=False)
        return model.to("cuda" if on_gpu else "cpu").eval(), load_tokenizer(source)
    size = 2_000 if options.shape == "tiny" else 49_152
    tokenizer = synthetic_bpe_tokenizer(size)
    tokenizer.chat_template = PLAIN_CHAT_TEMPLATE
    return random_model(config_of(options.shape, dtype, max(size, len(tokenizer)))).eval(), tokenizer


@contextmanager
def timed_masks() -> Iterator[Passes]:
    """Record when masks are computed, and for how long; accepting tokens counts for the pass before it.

    With workers, this is the time that this process spends on sending, waiting and receiving.
    """
    passes = Passes()

    def timed(function: Any, begins_pass: bool) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            if begins_pass:
                passes.starts.append(start)
                passes.seconds.append(0.0)
            try:
                result = function(*args, **kwargs)
                return result if begins_pass or not callable(result) else timed(result, False)
            finally:
                if passes.seconds:
                    passes.seconds[-1] += time.perf_counter() - start

        return call

    places = [(DeviceMasks, "fill"), (SharedStates, "accept_async"), (WorkerStates, "accept_async")]
    originals = [(place, name, getattr(place, name)) for place, name in places]
    try:
        for place, name, function in originals:
            setattr(place, name, timed(function, name == "fill"))
        yield passes
    finally:
        for place, name, function in originals:
            setattr(place, name, function)


def busy_seconds(run: Any, new_tokens: int) -> tuple[float, int]:
    """Return for how long at least one kernel or copy ran on the GPU during a rollout, and its number of passes."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        _, done = run(new_tokens, 0)
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    spans = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in profiler.profiler.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA and not event.is_user_annotation()
    )
    busy, reached = 0, 0
    for start, end in spans:
        busy += max(end - max(start, reached), 0)
        reached = max(reached, end)
    return busy / 1e9, done.forward_passes


if __name__ == "__main__":
    main()
