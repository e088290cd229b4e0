"""`tool TASK export --to LIBRARY`: the library's own loaders load what it writes, and it scores as the task does."""

import importlib
import tomllib

import pytest

from tests.support.commands import refused
from tests.support.paths import ROOT
from tests.support.server_process import start
from trl_grpo_tasks.commands.main import main
from trl_grpo_tasks.registry import get_task

TEMPLATE = ROOT / "trl_grpo_tasks" / "commands" / "task_template.py"


@pytest.fixture
def task_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.py").write_text(TEMPLATE.read_text().replace("my_task", "words"))
    return "words.py"


def export(task_file, library):
    assert main(["tool", task_file, "export", "--to", library, "--out", "out", "--word_length", "3"]) == 0
    return get_task(task_file, {"word_length": 3})


def test_files(task_file, tmp_path, capsys):
    export(task_file, "verifiers")
    assert "pip install out; its id in verifiers is words" in capsys.readouterr().out
    project = tomllib.loads((tmp_path / "out" / "pyproject.toml").read_text())["project"]
    assert project["name"] == "words" and project["version"] == "1"
    text = (tmp_path / "out" / "words" / "__init__.py").read_text()
    assert "SPEC = 'words.py'" in text and "{'word_length': 3}" in text
    assert (tmp_path / "out" / "words" / "words.py").read_text() == (tmp_path / "words.py").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prompts", "--to", "verifires"], "did you mean 'verifiers'"),
        (["prompts"], "give --to"),
        (["infill", "--to", "openenv"], "cannot be exported to openenv"),
        (["prompts", "--to", "openenv", "--out", "full"], "--out full is not empty"),
    ],
)
def test_mistakes_are_reported(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert message in refused(capsys, "tool", words[0], "export", *words[1:])


def test_verifiers_loads_and_scores_it(task_file, tmp_path, monkeypatch):
    pytest.importorskip("verifiers.v1", reason="needs verifiers")
    from verifiers.v1.utils.loaders import load_taskset

    from trl_grpo_tasks.adapters.verifiers_turn import messages_of, scored_trace

    task = export(task_file, "verifiers")
    monkeypatch.syspath_prepend(str(tmp_path / "out"))
    module = importlib.import_module("words")
    taskset = load_taskset(module.Config(id="words", split="test", size=6, seed=1))
    rows = task.dataset("test", 6, 1)
    for theirs, row in zip(taskset, rows, strict=True):
        assert messages_of(theirs) == row["prompt"]
        for answer in (task.gold(row), task.bad(row), "ab"):
            trace = scored_trace(theirs, row["prompt"], answer)
            score = task.score(row, answer)
            assert trace.reward == pytest.approx(score.total)
            assert trace.metrics == {"success": float(score.success)}


def test_openenv_serves_and_scores_it(task_file, tmp_path):
    pytest.importorskip("openenv.core", reason="needs openenv")
    from openenv.core.generic_client import GenericEnvClient

    task = export(task_file, "openenv")
    process, url = start(tmp_path / "out" / "server.py")
    try:
        with GenericEnvClient(base_url=url).sync() as env:
            rows = [*task.dataset("test", 32, 0), *task.dataset("test", 32, 1)]
            for seed in (0, 1, 31, 32, 33):
                row = rows[seed]
                for answer in (task.gold(row), task.bad(row), "ab"):
                    assert env.reset(seed=seed, split="test").observation["prompt"] == row["prompt"]
                    result = env.step({"completion": answer})
                    score = task.score(row, answer)
                    assert result.done and result.reward == pytest.approx(score.total)
        back = get_task(f"openenv:{url}")
        row = back.dataset("train", 1, 0)[0]
        assert back.score(row, row["prompt"][0]["content"][::-1]).success
    finally:
        process.terminate()
        process.wait()
