"""`trl-grpo-tasks export`: answers as files for other programs, such as LDraw, SARAH and MuJoCo files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..failures import first_line
from ..files import write_atomically
from ..report.gallery import key_of, rank_of
from ..report.run_folder import RunFolder
from ..task import Row, Task, printable

Answer = tuple[Row, str]  # a row and its completion


def answers_of_run(run_dir: str | Path, top: int) -> list[Answer]:
    """Return the best `top` different samples of the run's last evaluation: successes first, then by score."""
    if top < 1:
        raise ValueError(f"--top {top} must be at least 1")
    before, after = RunFolder.read(run_dir).before_and_after
    evaluation = after or before
    if evaluation is None:
        raise ValueError(f"{run_dir} has no evaluation yet; evaluate the run with 'trl-grpo-tasks eval'")
    scored = sorted((s for s in evaluation["samples"] if s["score"] is not None), key=rank_of, reverse=True)
    different = {key_of(sample): (sample["row"], sample["completion"]) for sample in scored}
    return list(different.values())[:top]


def answers_of_file(path: str | Path, task: Task, text: str | None) -> list[Answer]:
    """Return the answer in a text file, which belongs to the row of `text`, or the answers in the lines of a .jsonl
    file, which have their own rows."""
    from .compare import read_scored_line

    path = Path(path)
    content = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix != ".jsonl":
        if text is None:
            raise ValueError(
                f"{path} is an answer without a prompt; add --text with the prompt, or give a .jsonl file whose lines "
                'are {"row": {...}, "completion": "..."}'
            )
        return [(task.row_of(text), content)]
    if text is not None:
        raise ValueError("--text is for a file with one answer; the lines of a .jsonl file have their own rows")
    answers: list[Answer] = []
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            try:
                row, completion, _ = read_scored_line(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
            answers.append((row, completion))
    return answers


def export(task: Task, answers: Iterable[Answer], folder: str | Path, text_name: str = "sample.txt") -> list[str]:
    """Write for each answer its text and the files that the task exports, with the number of the answer in each name.
    Return a line for each answer whose files the task could not make."""
    problems = []
    for number, (row, completion) in enumerate(answers, 1):
        files: dict[str, str | bytes] = {text_name: completion}
        try:
            files |= task.exports(row, completion)
        except Exception as error:  # noqa: BLE001 - the row may be one that the task never made
            problems.append(printable(f"answer {number}: no files ({type(error).__name__}: {first_line(error)})"))
        write_numbered(files, folder, number)
    return problems


def write_numbered(files: Mapping[str, str | bytes], folder: str | Path, number: int) -> None:
    """Write files into `folder`, with the number of an answer in each name: sample.txt becomes sample_1.txt."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        file = Path(folder) / f"{Path(name).stem}_{number}{Path(name).suffix}"
        file.write_bytes(content if isinstance(content, bytes) else content.encode(errors="replace"))


def write_table(answers: Iterable[Answer], folder: str | Path) -> None:
    """Write answers.jsonl, which `trl-grpo-tasks score` and `export` read."""
    lines = [
        json.dumps({"number": number, "row": row, "completion": completion})
        for number, (row, completion) in enumerate(answers, 1)
    ]
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_atomically(Path(folder) / "answers.jsonl", "".join(f"{line}\n" for line in lines))
