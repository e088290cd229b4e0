"""`trl-grpo-tasks solve` with a real server, for a choice tree (brick); tests/vllm/test_server.py has other rows."""

import json

import pytest

from tests.support.vllm_cpu import save_model, serve_task, serving
from trl_grpo_tasks.commands.solve import solve
from trl_grpo_tasks.registry import get_task


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A model of the task, and the address of its server."""
    folder = tmp_path_factory.mktemp("server")
    model = save_model(get_task("brick"), folder / "model")
    with serving(serve_task("brick", model), folder / "log") as address:
        yield model, address


def answers(served, folder, *words, with_server=True):
    """The answers that the command writes."""
    model, address = served
    where = ["--vllm_server_url", address] if with_server else []
    request = ["--text", "a small table, world 8", "--max_completion_length", "120", "--out", str(folder)]
    solve([model, "--task", "brick", *request, *where, *words])
    return [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]


def test_the_likeliest_answer_is_that_of_our_rollouts(served, tmp_path):
    here = answers(served, tmp_path / "here", "--temperature", "0", with_server=False)
    there = answers(served, tmp_path / "there", "--temperature", "0")
    keys = ("completion", "success", "score", "reason")
    assert len(here) == 1 and [here[0][key] for key in keys] == [there[0][key] for key in keys]


def test_samples_follow_the_constraint(served, tmp_path):
    found = answers(served, tmp_path, "--samples", "8", "--top", "8", "--top_p", "0.95")
    assert len({answer["completion"] for answer in found}) == len(found) > 1
    task = get_task("brick")
    for answer in found:  # a structure may be cut off, but no brick collides or is outside the world
        assert task.score(answer["row"], answer["completion"].rpartition("\n")[0] + "\n").valid
