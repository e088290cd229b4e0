"""`trl-grpo-tasks play`: mistakes before a model is loaded, the page until Ctrl+C, and the folder of a Space."""

import signal
import socket
import sys

import pytest
import yaml

from tests.support.paths import ROOT
from tests.support.played import MOST_TOKENS, save_run
from tests.support.server_process import start
from trl_grpo_tasks.commands import play as module
from trl_grpo_tasks.commands.main import main


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path / "gradio"))
    save_run("run")
    return "run"


def said(capsys, *words):
    code = main(["play", *map(str, words)])
    return code, *capsys.readouterr()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port", "0"], "--port 0 must be from 1 to 65535"),
        (["--temperature", "-1"], "--temperature -1.0 must be at least 0"),
        (["--share", "maybe"], "'maybe' must be true or false"),
        (["--space", "full"], "--space full is not an empty folder"),
        (["--space", "new", "--task", "brick", "--brick_data", "data.jsonl"], "--brick_data names data.jsonl, a file"),
    ],
)
def test_mistakes_are_told_in_one_line(run, tmp_path, capsys, monkeypatch, words, message):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "data.jsonl").write_text("{}\n")
    if "--space" not in words:
        pytest.importorskip("gradio")
    if "--port" not in words:  # the default port may be in use
        monkeypatch.setattr(module, "check_port", lambda port: None)
    code, _, err = said(capsys, run, *words)
    assert code == 2 and message in err and err.count("\n") == 1 and not (tmp_path / "new").exists()


def test_without_gradio_the_hint_comes_first(run, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    code, _, err = said(capsys, run)
    assert code == 2 and "pip install 'trl_grpo_tasks[play]'" in err


def test_a_port_in_use_is_reported_before_the_model_is_loaded(run, capsys):
    pytest.importorskip("gradio")
    with socket.socket() as taken:
        taken.bind((module.HOST, 0))
        taken.listen()
        code, _, err = said(capsys, run, "--port", taken.getsockname()[1])
    assert code == 2 and "choose another one" in err


def test_the_page_is_for_this_machine_only_unless_it_is_shared(run, capsys, monkeypatch):
    pytest.importorskip("gradio")
    from trl_grpo_tasks.playground import page

    launched = []
    monkeypatch.setattr(page, "launch", lambda *words: launched.append(words[1:]))
    monkeypatch.setattr("gradio.Blocks.block_thread", lambda page: None)
    monkeypatch.setattr(module, "check_port", lambda port: None)
    assert said(capsys, run, "--port", 7999)[0] == 0 and said(capsys, run, "--share", "--port", 7999)[0] == 0
    assert launched == [("127.0.0.1", 7999, False), ("127.0.0.1", 7999, True)]


PLAY = """
import signal, sys
from trl_grpo_tasks.commands.main import main

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background ignores it
    sys.exit(main(["play", "run", "--port", sys.argv[1]]))
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_page_is_served_until_it_is_stopped_and_leaves_no_folder(run, tmp_path, capfd, monkeypatch, number):
    pytest.importorskip("gradio")
    (tmp_path / "main.py").write_text(PLAY)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.delenv("GRADIO_TEMP_DIR")
    process, url = start(tmp_path / "main.py", path="/config")
    try:
        out = ""
        while "page: " not in out:  # the server answers a little earlier
            out += capfd.readouterr().out
        process.send_signal(number)
        assert process.wait(120) == 0
    finally:
        process.kill()
    assert f"page: {url}" in out and "share=True" not in out and "Traceback" not in capfd.readouterr().err
    left = [path.name for path in (tmp_path / "temporary").iterdir()]
    assert not [name for name in left if name.startswith(("playground", "gradio"))]


# ---- Spaces


def test_a_space_holds_what_it_needs_and_nothing_of_this_machine(run, tmp_path, capsys):
    code, out, err = said(capsys, run, "--space", "space", "--temperature", "0.5")
    assert code == 0 and err == "" and "--repo-type space" in out
    space = tmp_path / "space"
    _, head, _ = (space / "README.md").read_text().split("---\n", 2)
    head = yaml.safe_load(head)
    assert head["sdk"] == "gradio" and head["app_file"] == "app.py" and head["title"] == "brick playground"
    assert head["sdk_version"].startswith("6.")
    wanted = (space / "requirements.txt").read_text().splitlines()
    assert any(line.startswith("trl") for line in wanted) and any(line.startswith("highspy") for line in wanted)
    assert not any(line.startswith(("mujoco", "pytest", "ray")) for line in wanted)
    files = {path.relative_to(space).as_posix() for path in space.rglob("*") if path.is_file()}
    models = {name for name in files if name.startswith(("model/", "before/"))}
    assert {"model/model.safetensors", "before/model.safetensors", "model/tokenizer.json"} <= models
    assert not any(name.endswith(("settings.json", ".bin", ".pyc")) for name in models)
    assert "trl_grpo_tasks/playground/page.py" in files
    mine = [*models, "app.py", "README.md", "requirements.txt"]
    texts = {name: (space / name).read_bytes() for name in mine}
    assert not any(str(part).encode() in text for text in texts.values() for part in (tmp_path, ROOT, "somebody"))
    assert f"'max_completion_length': {MOST_TOKENS}" in texts["app.py"].decode()
    assert "'temperature': 0.5" in texts["app.py"].decode()


def test_a_task_in_a_file_travels_with_the_space(my_task, tmp_path, capsys):
    code, _, err = said(capsys, "tiny", "--task", "my_task.py", "--word_length", 3, "--space", "space")
    assert code == 0, err
    app = (tmp_path / "space" / "app.py").read_text()
    assert "SPEC = 'my_task.py'" in app and "{'word_length': 3}" in app and "BEFORE: str | None = None" in app
    assert (tmp_path / "space" / "my_task.py").is_file() and (tmp_path / "space" / "model" / "config.json").is_file()
    code, _, err = said(capsys, "tiny", "--task", "tests.support.toy", "--space", "other")
    assert code == 2 and "cannot be copied" in err
