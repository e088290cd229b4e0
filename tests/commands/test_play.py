"""`trl-grpo-tasks play`: mistakes before a model is loaded, and the page until Ctrl+C."""

import signal
import socket
import sys

import pytest

from tests.support.commands import refused, said
from tests.support.played import save_run
from tests.support.server_process import start
from trl_grpo_tasks.commands import play as module


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path / "gradio"))
    save_run("run")
    return "run"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port", "0"], "--port 0 must be from 1 to 65535"),
        (["--temperature", "-1"], "--temperature -1.0 must be at least 0"),
        (["--share", "maybe"], "'maybe' must be true or false"),
        (["--space", "new"], "--space is now: gone"),
    ],
)
def test_mistakes_are_told_in_one_line(run, tmp_path, capsys, monkeypatch, words, message):
    if "--space" not in words:
        pytest.importorskip("gradio")
    if "--port" not in words:  # the default port may be in use
        monkeypatch.setattr(module, "check_port", lambda port: None)
    code, _, err = said(capsys, "play", run, *words)
    assert code == 2 and message in err and err.count("\n") == 1 and not (tmp_path / "new").exists()


def test_without_gradio_the_hint_comes_first(run, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert "pip install 'trl_grpo_tasks[play]'" in refused(capsys, "play", run)


def test_a_port_in_use_is_reported_before_the_model_is_loaded(run, capsys):
    pytest.importorskip("gradio")
    with socket.socket() as taken:
        taken.bind((module.HOST, 0))
        taken.listen()
        code, _, err = said(capsys, "play", run, "--port", taken.getsockname()[1])
    assert code == 2 and "choose another one" in err


def test_the_page_is_for_this_machine_only_unless_it_is_shared(run, capsys, monkeypatch):
    pytest.importorskip("gradio")
    from trl_grpo_tasks.playground import page

    launched = []
    monkeypatch.setattr(page, "launch", lambda *words: launched.append(words[1:]))
    monkeypatch.setattr("gradio.Blocks.block_thread", lambda page: None)
    monkeypatch.setattr(module, "check_port", lambda port: None)
    for share in ([], ["--share"]):
        assert said(capsys, "play", run, "--port", 7999, *share)[0] == 0
    assert launched == [("127.0.0.1", 7999, False), ("127.0.0.1", 7999, True)]


PLAY = """
import sys
from trl_grpo_tasks.commands.main import main

if __name__ == "__main__":
    sys.exit(main(["play", "run", "--port", sys.argv[1]]))
"""


@pytest.mark.exhaustive
def test_the_page_is_served_until_it_is_stopped_and_leaves_no_folder(run, tmp_path, capfd, monkeypatch):
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
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    finally:
        process.kill()
    assert f"page: {url}" in out and "share=True" not in out and "Traceback" not in capfd.readouterr().err
    left = [path.name for path in (tmp_path / "temporary").iterdir()]
    assert not [name for name in left if name.startswith(("playground", "gradio"))]
