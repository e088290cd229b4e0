"""`trl-grpo-tasks generate`: completions of a text of your own, with their pictures, files and scores."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..task import Row, Task, check_editor, printable
from .export import write_numbered

if TYPE_CHECKING:
    from ..evaluation.samples import Sample

LONGEST_SHOWN = 60  # characters of a completion that is shown in its line


def generate(
    task: Task,
    model_name: str,
    text: str | Row,
    output_dir: str | Path,
    *,
    num_samples: int = 4,
    constrain: bool | None = None,
    editor: str | None = None,
    temperature: float | None = None,
    filters: Mapping[str, Any] | None = None,
    max_completion_length: int | None = None,
    rollout_batch_size: int | None = None,
    seed: int = 0,
    reward_timeout: float = 30.0,
    run_seed: int = 42,
) -> list[Sample]:
    """Sample completions of `text`, which may also be a row of the task, and write for each of them `sample_1.txt` and
    the other files the task exports. `filters` are top_k, top_p and min_p by name.

    If `constrain` is not given, sampling follows the task's constraint where there is one, unless the editor makes
    it redundant. At most `rollout_batch_size` completions are generated at a time; by default, as many as fit into
    free memory. The others default to the task's settings. `run_seed` is the seed of the run that made the model, so
    that its judges are found rather than trained again.
    """
    check_editor(task, editor, bool(constrain))
    if constrain is None and editor in task.redundant_editors:
        constrain = False
    row = task.row_of(text) if isinstance(text, str) else dict(text)
    if interpretation := row.get("interpretation"):
        print(printable(interpretation))
    if num_samples < 1:
        raise ValueError(f"--num_samples {num_samples} must be at least 1")
    if temperature is not None and temperature < 0:
        raise ValueError(f"--temperature {temperature} must be at least 0")
    if max_completion_length is not None and max_completion_length < 1:
        raise ValueError(f"--max_completion_length {max_completion_length} must be at least 1")
    if rollout_batch_size is not None and rollout_batch_size < 1:
        raise ValueError(f"--rollout_batch_size {rollout_batch_size} must be at least 1")
    if not reward_timeout > 0:
        raise ValueError(f"--reward_timeout {reward_timeout:g} must be more than 0")

    import torch

    from ..constraints.filters import SamplingFilters
    from ..evaluation.evaluate import evaluate
    from ..models.loading import load_model
    from ..models.quantised import is_quantised_model
    from ..rewards.components import worker_count
    from ..rewards.executor import RewardExecutor
    from .plan import check_writable, ready_model

    sampling_filters = SamplingFilters.of(filters or {})
    check_writable(output_dir)
    folder = Path(output_dir)
    task.prepare(run_seed)
    ready = ready_model(model_name, task, [row], folder, seed=seed, constrain=constrain)
    model = load_model(ready.path, policy=task.policy, dtype="float32")
    if not is_quantised_model(model):  # otherwise it is on its device already
        model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    with RewardExecutor(task, min(num_samples, worker_count(None, 1)), reward_timeout) as executor:
        samples = evaluate(
            "generate",
            model,
            ready.tokenizer,
            task,
            [row],
            executor=executor,
            num_samples=num_samples,
            temperature=task.defaults.get("temperature", 1.0) if temperature is None else temperature,
            filters=sampling_filters,
            max_completion_length=max_completion_length or task.defaults.get("max_completion_length", 256),
            rollout_batch_size=rollout_batch_size,
            constraint=ready.constraint,
            editor=editor,
            seed=seed,
        ).samples
    for number, sample in enumerate(samples, 1):
        write_numbered({"sample.txt": sample.completion, **task.exports(row, sample.completion)}, folder, number)
    return samples


def describe_sample(sample: Sample) -> str:
    """The score of a sample in one line, with the completion if it is short."""
    score = sample.score
    if score is None:
        return printable(f"could not be scored: {sample.reason}")
    word = "success" if score["success"] else "valid" if score["valid"] else "not valid"
    facts = {name: value for name, value in score["info"].items() if value is not None} | sample.counts
    told = [f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in facts.items()]
    text = sample.completion.strip()
    written = repr(text) if 0 < len(text) <= LONGEST_SHOWN and text.isprintable() else ""
    return printable("; ".join(part for part in (written, word, sample.reason, ", ".join(told)) if part))
