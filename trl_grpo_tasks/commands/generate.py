"""`trl-grpo-tasks generate`: completions of a text of your own, with their pictures, files and scores."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..task import Row, Task, printable
from .command_parser import CommandParser
from .sampling_options import add_sampling_options, sampling_of, task_of_model

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


def generate_command(arguments: Sequence[str]) -> int:
    """Generate completions for a text of your own."""
    parser = CommandParser(
        "generate",
        "[TASK] --model RUN_OR_MODEL --text TEXT [--option value ...]",
        "Generate completions for a text of your own, score them, and write texts, pictures and other files into a "
        "folder. For the folder of a run of a built-in task, the task and its options are those of the run; otherwise "
        "name the task: code is never imported because a run folder says so.",
        [
            "trl-grpo-tasks generate --model outputs/demo --text 'a small table, world 8'",
            "trl-grpo-tasks generate my_task.py --model outputs/my_task --text abc",
        ],
        takes_task=True,
    )
    parser.add_argument(
        "--model", "--model_name_or_path", required=True, metavar="MODEL",
        help="the folder of a run or a model, a .gguf file, a Hub id, or tiny",
    )  # fmt: skip
    parser.add_argument("--text", required=True, metavar="TEXT", help="what to generate, in the words of the task")
    parser.add_argument("--num_samples", type=int, default=4, metavar="N", help="number of completions (default: 4)")
    add_sampling_options(parser, "generated")
    known, rest = parser.parse_known(arguments)
    task = task_of_model(parser, known, rest, "generate", arguments)
    row = task.row_of(known.text)
    from .plan import check_writable
    from .quiet import quiet_third_party_logging

    check_writable(known.output_dir)
    quiet_third_party_logging()
    samples = generate(task, known.model, row, known.output_dir, num_samples=known.num_samples, **sampling_of(known))
    if "interpretation" in row:
        print(printable(f"understood as: {row['interpretation']}"))
    for number, sample in enumerate(samples, 1):
        print(f"sample {number}: {describe_sample(sample)}")
    print(f"files: {Path(known.output_dir) / 'sample_*'}")
    return 0


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
