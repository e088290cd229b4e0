"""`trl-grpo-tasks solve`: sample until the verifier accepts an answer or the budget ends; write the best answers."""

from __future__ import annotations

import re
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..evaluation.answer_files import check_top, remove_earlier, write_files, write_table
from ..evaluation.solution import Answer, Solution, check_budget
from ..task import printable
from .asked import Request, read_requests
from .command_parser import CommandParser
from .generate import describe_sample
from .plan import check_writable
from .sampling_options import add_model, add_sampling_options, sampling_of, task_of_model

_NUMBER = re.compile(r"(\d+(?:\.\d+)?)")
LONGEST_REQUEST = 100  # characters of a request that are shown
REASONS_SHOWN = 3
ALL_SAMPLES = 4  # of --all, if --samples is not given
INTERRUPTED = 130  # the exit status that shells report after Ctrl-C


def solve(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "solve",
        "RUN_OR_MODEL --text TEXT | --requests FILE | --row JSON [--option value ...]",
        "Draw samples until the task's verifier accepts one or the budget ends; show and write the best distinct "
        "answers. With --all, draw a fixed number and show each. The exit status is 0 if every request was solved or "
        "with --all, 1 if not, 2 for wrong options, 130 after Ctrl-C. For a run of a built-in task, the task and its "
        "options are the run's.",
        [
            "trl-grpo-tasks solve outputs/demo --text 'a small table, world 8' --seconds 10",
            "trl-grpo-tasks solve outputs/demo --text 'a small table, world 8' --samples 4 --all",
            "trl-grpo-tasks solve outputs/my_task --task my_task.py --requests captions.txt --top 1",
        ],
    )
    add_model(parser)
    parser.add_argument("--text", metavar="TEXT", help="what to solve, in the words of the task")
    parser.add_argument(
        "--requests", metavar="FILE", help='a .txt file with a text per line, or .jsonl with rows or {"text": "..."}'
    )
    parser.add_argument("--row", metavar="JSON", help="a row of the task")
    parser.add_argument(
        "--samples", type=int, metavar="N", help="most samples per request (default: 64, or any with --seconds)"
    )
    parser.add_argument("--seconds", type=float, metavar="X", help="time limit per request (default: none)")
    parser.add_argument(
        "--all",
        action="store_true",
        help=f"draw exactly --samples (default: {ALL_SAMPLES}); show and write each",
    )
    parser.add_argument("--top", type=int, default=3, metavar="N", help="answers to show and write (default: 3)")
    parser.add_argument("--out", default="solved", metavar="DIR", help="folder of the files (default: solved)")
    parser.add_argument("--editor", metavar="NAME", help="let an editor of the task delete generated text")
    parser.add_argument("--vllm_server_url", metavar="URL", help="sample from a server of trl-grpo-tasks serve")
    add_sampling_options(parser)
    known, rest = parser.parse_known(arguments)
    check_top(known.top)
    check_budget(known.samples, known.seconds)
    if known.all and known.seconds is not None:
        raise ValueError("--seconds limits the search for an answer, and --all draws a fixed number; give one of them")
    task = task_of_model(parser, known, rest, "solve", arguments)
    requests = read_requests(task, known.text, known.requests, known.row)
    check_writable(known.out, "--out")
    solutions: list[Solution] = []
    ending = ""
    try:
        from ..evaluation.solver import Solver  # slow
        from .quiet import quiet_third_party_logging

        quiet_third_party_logging()
        more = {"editor": known.editor, "vllm_server_url": known.vllm_server_url, "folder": known.out}
        with Solver.from_pretrained(known.model, task, **more, **sampling_of(known)) as solver:
            for number, request in enumerate(requests, 1):
                try:
                    solver.check_row(request.row)
                except ValueError as error:
                    raise ValueError(f"request {number}: {error}") from error
            written: list[dict[str, Any]] = []
            for number, request in enumerate(requests, 1):
                solution, shown = _answered(solver, request, known)
                print("\n".join(describe_solution(solution, request, number, shown)), flush=True)
                if not written:
                    remove_earlier(known.out)
                # After each request, so that an interrupted command leaves what it has found.
                new = [_entry(answer, request, number, rank) for rank, answer in enumerate(shown, 1)]
                for problem in write_files(task, new, known.out, first=len(written) + 1):
                    print(problem)
                written += new
                write_table(written, known.out)
                solutions.append(solution)
    except KeyboardInterrupt:
        ending = f"interrupted at request {len(solutions) + 1}; "
    solved = sum(solution.solved for solution in solutions)
    ending += f"{solved} of {len(requests)} request{'s' * (len(requests) != 1)} solved"
    print(ending + (f"; files: {Path(known.out)}" if solutions else ""))
    if len(solutions) < len(requests):
        return INTERRUPTED
    return 0 if known.all or solved == len(requests) else 1


def _answered(solver: Any, request: Request, known: Namespace) -> tuple[Solution, list[Answer]]:
    """The solution of a request, and the answers to show: the best distinct ones, or all in the order of sampling."""
    if not known.all:
        solution = solver(request.row, known.samples, known.seconds)
        return solution, solution.answers[: known.top]
    start = time.monotonic()
    samples = solver.sample(request.row, known.samples or ALL_SAMPLES)
    solution = Solution(request.row, request.row, solver.task.unverifiable(request.row))
    solution.add(samples)
    solution.seconds = time.monotonic() - start
    solution.stopped = "no answer was accepted"
    return solution, [Answer(sample) for sample in samples]


def describe_solution(solution: Solution, request: Request, number: int, shown: Sequence[Answer]) -> list[str]:
    """The result of a request in lines that are safe to print: these answers, and why others failed."""
    text = str(request)
    lines = [f"request {number}: {text[:LONGEST_REQUEST]}{' ...' * (len(text) > LONGEST_REQUEST)}"]
    if solution.interpretation:
        lines.append(f"  understood as: {solution.interpretation}")
    spent = f"{solution.samples} sample{'s' * (solution.samples != 1)}, {solution.seconds:.1f} s"
    if solution.solved:
        lines.append(f"  solved ({spent})")
    elif solution.unverifiable:
        lines.append(f"  cannot be judged: {solution.unverifiable} ({spent})")
    else:
        lines.append(f"  not solved: {solution.stopped} ({spent})")
    for rank, answer in enumerate(shown, 1):
        often = f" (drawn {answer.drawn} times)" if answer.drawn > 1 else ""
        # What cannot be judged was already said.
        known = solution.unverifiable.startswith(answer.sample.reason)
        sample = replace(answer.sample, reason="") if known else answer.sample
        score = "" if sample.score is None else f"; score {sample.score['total']:.4g}"
        lines.append(f"  {rank}. {describe_sample(sample)}{score}{often}")
    if solution.failures and not (solution.solved or solution.unverifiable):
        lines.append(f"  failures: {counted(solution.failures)}")
    if solution.unscored:
        lines.append(f"  could not be scored: {counted(solution.unscored)}")
    return [printable(line) for line in lines]


def counted(reasons: Counter[str]) -> str:
    """The most frequent reasons. Those that differ only in numbers count together; such numbers are shown as dots."""
    merged: Counter[str] = Counter()
    alike: dict[tuple[str, ...], list[list[str]]] = {}
    for reason in reasons:
        parts = _NUMBER.split(reason)  # numbers are at odd places
        alike.setdefault(tuple(parts[::2]), []).append(parts)
    for group in alike.values():
        common = "".join(part[0] if len(set(part)) == 1 else "..." for part in zip(*group, strict=True))
        merged[common] = sum(reasons["".join(parts)] for parts in group)
    shown = [f"{count} x {reason}" for reason, count in merged.most_common(REASONS_SHOWN)]
    left = len(merged) - len(shown)
    return "; ".join([*shown, *([f"and {left} other reason{'s' * (left > 1)}"] if left else [])])


def _entry(answer: Answer, request: Request, number: int, rank: int) -> dict[str, Any]:
    """A line of answers.jsonl. `success` is null if the answer could not be scored."""
    score = answer.sample.score
    judged = (
        {"success": None, "score": None} if score is None else {"success": answer.success, "score": score["total"]}
    )
    return {"request": number, "rank": rank, **judged, "reason": answer.sample.reason, "row": dict(request.row),
            "completion": answer.completion, "files": []}  # fmt: skip
