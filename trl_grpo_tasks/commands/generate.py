"""Completions of a text of your own from Python, with their pictures, files and scores; a sample in one line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..task import Row, Task, printable

if TYPE_CHECKING:
    from ..evaluation.samples import Sample

LONGEST_SHOWN = 60  # characters of a completion that is shown in its line


def generate(
    task: Task, model: str, request: str | Row, output_dir: str | Path, *, num_samples: int = 4, **sampling: Any
) -> list[Sample]:
    """Sample completions of a text or a row, and write `sample_1.txt` and the files that the task exports for each.

    `sampling` are further arguments of `Solver.from_pretrained`.
    """
    from ..evaluation.answer_files import write_files
    from ..evaluation.solver import Solver
    from ..rewards.components import worker_count

    workers = min(num_samples, worker_count(None, 1))
    with Solver.from_pretrained(model, task, folder=output_dir, reward_workers=workers, **sampling) as solver:
        samples = solver.sample(request, num_samples)
    for problem in write_files(task, [{"row": s.row, "completion": s.completion} for s in samples], output_dir):
        print(problem)
    return samples


def describe_sample(sample: Sample) -> str:
    """The score of a sample in one line, with the completion if it is short."""
    score, text = sample.score, sample.completion.strip()
    if score is None:  # the text shows what the scorer could not deal with
        cut = f"{text[:LONGEST_SHOWN]!r}{' ...' * (len(text) > LONGEST_SHOWN)}"
        return printable(f"{cut}; could not be scored: {sample.reason}")
    word = "success" if score["success"] else "valid" if score["valid"] else "not valid"
    # Lists and tables would fill the screen; they are in the pictures and files.
    info = score["info"].items()
    plain = {name: value for name, value in info if isinstance(value, (bool, int, float, str)) and value != ""}
    facts = plain | sample.counts
    told = [f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in facts.items()]
    written = repr(text) if 0 < len(text) <= LONGEST_SHOWN and text.isprintable() else ""
    return printable("; ".join(part for part in (written, word, sample.reason, ", ".join(told)) if part))
