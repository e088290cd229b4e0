"""`trl-grpo-tasks solve` with a real server, for a choice tree (brick) and a pattern per row (prompts)."""

import json
import re
from typing import NamedTuple

import pytest

from tests.support.vllm_cpu import save_model, serve_task, serving
from trl_grpo_tasks.commands.solve import solve
from trl_grpo_tasks.registry import get_task

PATTERN = "(yes|no){1,3}"
REQUESTS = {"brick": "a small table, world 8", "prompts": "say"}


class Served(NamedTuple):
    """A task with its options as flags, a model of it, and the address of its server."""

    name: str
    options: list[str]
    model: str
    address: str


@pytest.fixture(scope="module", params=list(REQUESTS))
def served(request, tmp_path_factory):
    name, folder, options = request.param, tmp_path_factory.mktemp("server"), {}
    if name == "prompts":
        options = {"prompts_file": str(folder / "prompts.json")}
        row = {"prompt": "say", "pattern": PATTERN, "rewards": {"regex": 1.0}}
        (folder / "prompts.json").write_text(json.dumps([row]))
    model = save_model(get_task(name, options), folder / "model")
    flags = [word for option, value in options.items() for word in (f"--{option}", value)]
    with serving(serve_task(name, model, *flags), folder / "log") as address:
        yield Served(name, flags, model, address)


def answers(served, folder, *words, with_server=True):
    """The answers that the command writes."""
    where = ["--vllm_server_url", served.address] if with_server else []
    request = ["--text", REQUESTS[served.name], "--max_completion_length", "120", "--out", str(folder)]
    solve([served.model, "--task", served.name, *served.options, *request, *where, *words])
    return [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]


def test_the_likeliest_answer_is_that_of_our_rollouts(served, tmp_path):
    here = answers(served, tmp_path / "here", "--temperature", "0", with_server=False)
    there = answers(served, tmp_path / "there", "--temperature", "0")
    keys = ("completion", "success", "score", "reason")
    assert len(here) == 1 and [here[0][key] for key in keys] == [there[0][key] for key in keys]


def test_samples_follow_the_constraint_of_the_row(served, tmp_path):
    found = answers(served, tmp_path, "--samples", "8", "--top", "8", "--top_p", "0.95")
    assert len({answer["completion"] for answer in found}) == len(found) > 1
    if served.name == "prompts":
        assert all(answer["success"] and re.fullmatch(PATTERN, answer["completion"]) for answer in found)
    else:  # a structure may be cut off, but no brick collides or is outside the world
        task = get_task("brick")
        rows = [answer["row"] for answer in found]
        assert all(task.score(row, answer["completion"].rpartition("\n")[0] + "\n").valid
                   for row, answer in zip(rows, found, strict=True))  # fmt: skip


def test_answers_longer_than_the_context_of_the_server_are_refused(served, tmp_path):
    with pytest.raises(ValueError, match=r"max_completion_length=5000 does not fit into the \d+ tokens"):
        answers(served, tmp_path, "--max_completion_length", "5000")
