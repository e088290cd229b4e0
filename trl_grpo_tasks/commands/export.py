"""`trl-grpo-tasks export`: answers as files for other programs, such as LDraw, SARAH and MuJoCo files."""

from __future__ import annotations

from pathlib import Path

from ..evaluation.answer_files import Answer, check_top
from ..report.gallery import key_of, rank_of
from ..report.run_folder import RunFolder
from ..task import Task


def answers_of_run(run_dir: str | Path, top: int) -> list[Answer]:
    """Return the best `top` different samples of the run's last evaluation: successes first, then by score."""
    check_top(top)
    before, after = RunFolder.read(run_dir).before_and_after
    evaluation = after or before
    if evaluation is None:
        raise ValueError(f"{run_dir} has no evaluation yet; evaluate the run with 'trl-grpo-tasks eval'")
    scored = sorted((s for s in evaluation["samples"] if s["score"] is not None), key=rank_of, reverse=True)
    different: dict[str, Answer] = {
        key_of(sample): {"row": sample["row"], "completion": sample["completion"]} for sample in scored
    }
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
        return [{"row": task.row_of(text), "completion": content}]
    if text is not None:
        raise ValueError("--text is for a file with one answer; the lines of a .jsonl file have their own rows")
    answers: list[Answer] = []
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            try:
                row, completion = read_scored_line(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
            answers.append({"row": row, "completion": completion.text})
    return answers
