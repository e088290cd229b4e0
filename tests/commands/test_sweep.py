"""Sweeps: what is searched, trials that are runs, going on after a stop, and the page."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.commands.test_train import words
from tests.report.test_page import browse, needs_browser
from trl_grpo_tasks.commands import main as cli
from trl_grpo_tasks.commands import sweep
from trl_grpo_tasks.commands import train as run
from trl_grpo_tasks.commands.interrupt import exit_status
from trl_grpo_tasks.report.sweep_page import write_sweep_report

optuna = pytest.importorskip("optuna")


@pytest.mark.parametrize(
    ("text", "name", "wanted"),
    [
        ("rate=1e-5..1e-3:log", "rate", optuna.distributions.FloatDistribution(1e-5, 1e-3, log=True)),
        ("beta=0..0.1", "beta", optuna.distributions.FloatDistribution(0.0, 0.1)),
        ("shift=-2..3", "shift", optuna.distributions.IntDistribution(-2, 3)),
        ("steps=1..64:log", "steps", optuna.distributions.IntDistribution(1, 64, log=True)),
        ("kind=grpo,rloo", "kind", optuna.distributions.CategoricalDistribution(["grpo", "rloo"])),
    ],
)
def test_what_is_searched(text, name, wanted):
    assert sweep._read_values(text) == (name, wanted)


BASE = ["--task", "tests.support.toy", "--use_cpu", "true"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--search", "beta"], "--search beta: write NAME=LOW..HIGH"),
        (["--search", "beta=a..b"], "both ends of a range must be numbers"),
        (["--search", "beta=1..0"], "--search beta=1..0: "),
        (["--search", "beta=-1.0..1.0:log"], "--search beta=-1.0..1.0:log: "),
        (["--search", "bta=0..1"], "unknown option --bta; did you mean --beta?"),
        (["--search", "num_generations=4,7"], "must be divisible"),
        (["--search", "seed=1..4", "--seed", "3"], "--seed is both searched and given"),
        (["--search", "seed=1..4", "--out", __file__], "is not a writable folder"),
        (
            ["--search", "seed=1..4", "--search_metric", "sucess"],
            "--search_metric sucess: evaluations have no such metric; their metrics are: ",
        ),
        (["--search", "seed=1..4", "seed=5,6"], "give each option once"),
        (["--search", "seed=1..4", "--search_trials", "0"], "--search_trials 0 must be at least 1"),
        (["--search", "seed=1..4", "--eval_before_and_after", "false"], "a sweep compares evaluations after GRPO"),
        (["--search", "seed=1..4", "--push_to_hub", "true"], "runs of a sweep cannot be pushed"),
    ],
)
def test_mistakes_are_found_before_the_first_trial(tmp_path, capsys, options, message):
    assert cli.main(["train", *BASE, "--out", str(tmp_path / "sweep"), *options]) == 2
    err = capsys.readouterr().err
    assert message in err and len(err.splitlines()) == 1 and not (tmp_path / "sweep").exists()


def test_a_run_is_not_taken_for_the_folder_of_a_sweep(tmp_path, capsys):
    (tmp_path / "settings.json").write_text("{}")
    assert cli.main(["train", *BASE, "--out", str(tmp_path), "--search", "seed=1..4"]) == 2
    assert f"{tmp_path} holds a run" in capsys.readouterr().err and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("name", ["valid", "reward", "match", "pass@4", "tokens", "seconds"])
def test_metrics_of_an_evaluation_are_taken(tmp_path, monkeypatch, name):
    monkeypatch.setattr(sweep._Sweep, "run", lambda _: 0)
    assert cli.main(["train", *BASE, "--out", str(tmp_path), "--search", "seed=1..4", "--search_metric", name]) == 0


@pytest.fixture(scope="module")
def stopped_and_finished(tmp_path_factory):
    """Four trials in this process: the second is stopped once and goes on, the third fails."""
    folder = tmp_path_factory.mktemp("sweeps") / "sweep"
    tried = []

    def in_this_process(command, console):
        folder_of_trial = command[command.index("--output_dir") + 1]
        tried.append((Path(folder_of_trial).name, "--resume_from_checkpoint" in command))
        if len(tried) == 2:
            assert run.main([*command[4:], "--max_steps", "2"]) == 0  # as far as it came
            (Path(folder_of_trial) / "results.json").unlink()
            raise KeyboardInterrupt
        if tried[-1][0] == "trial-002":
            console.write_text("something\nerror: no room left\n")
            return 1
        return run.main(command[4:])

    options = words("", eval_rows=6, max_steps=3)
    del options[options.index("--output_dir") : options.index("--output_dir") + 2]
    searched = ["--search", "learning_rate=1e-4..1e-1:log", "advantage_estimator=grpo,rloo"]
    command = ["train", *options, *searched, "--search_metric", "reward", "--search_trials", "4", "--out", str(folder)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "_run", in_this_process)
        codes = [cli.main(command), cli.main(command), cli.main(command)]
        other = cli.main([*command[:-4], "--search_trials", "4", "--search_metric", "success", "--out", str(folder)])
    return folder, tried, codes, other


def test_a_sweep_goes_on_where_it_was_stopped(stopped_and_finished):
    folder, tried, codes, other = stopped_and_finished
    assert codes == [130, 0, 0] and other == 2, "a sweep of something else would have been mixed in"
    assert tried == [("trial-000", False), ("trial-001", False), ("trial-001", True), ("trial-002", False),
                     ("trial-003", False)]  # fmt: skip
    trials = json.loads((folder / "sweep.json").read_text())["trials"]
    assert [trial["state"] for trial in trials] == ["complete", "complete", "fail", "complete"]
    assert trials[2]["reason"] == "error: no room left"
    assert len({trial["params"]["learning_rate"] for trial in trials}) == 4, "a trial was proposed twice"
    for trial in (trials[0], trials[1], trials[3]):
        assert 1e-4 <= trial["params"]["learning_rate"] <= 1e-1
        made = folder / f"trial-{trial['number']:03d}"
        settings = json.loads((made / "settings.json").read_text())["training"]
        assert settings["learning_rate"] == pytest.approx(trial["params"]["learning_rate"], rel=1e-5)
        after = json.loads((made / "results.json").read_text())["evaluations"][-1]
        assert after["name"] == "GRPO" and trial["value"] == after["metrics"]["reward"]


def test_a_trial_that_was_stopped_in_its_last_evaluation_begins_again(tmp_path, monkeypatch):
    """With --save_strategy no its model is there and no checkpoint: train.py would refuse the folder."""
    found = []

    def stopped_once(command, console):
        model = Path(command[command.index("--output_dir") + 1]) / "config.json"
        found.append(model.exists())
        if len(found) == 1:
            model.write_text("{}")
            raise KeyboardInterrupt
        console.write_text("error: enough")
        return 1

    monkeypatch.setattr(sweep, "_run", stopped_once)
    options = words("", eval_rows=6, max_steps=3)
    del options[options.index("--output_dir") : options.index("--output_dir") + 2]
    command = ["train", *options, "--search", "seed=1,2", "--search_trials", "1", "--out", str(tmp_path / "sweep")]
    assert [cli.main(command), cli.main(command)] == [130, 1] and found == [False, False]


@needs_browser
def test_the_page_of_a_sweep(stopped_and_finished, tmp_path, capsys):
    folder, *_ = stopped_and_finished
    assert cli.main(["report", str(folder)]) == 0 and capsys.readouterr().out.strip() == str(folder / "report.html")
    page = (folder / "report.html").read_text()
    best = max(json.loads((folder / "sweep.json").read_text())["trials"], key=lambda trial: trial["value"] or 0)
    assert f"<b>{best['value']:.3f}</b>" in page and f"--learning_rate {best['params']['learning_rate']:.6g}" in page
    assert "href='trial-000/report.html'" in page and "error: no room left" in page and "4 of 4 trials" in page
    assert "http-equiv=refresh" not in page
    dom, console = browse(folder / "report.html", tmp_path, 390, "--dump-dom")
    assert console == [] and dom.count("<svg") == 2 and dom.count("<table") == 2


def test_the_page_before_the_first_trial_is_over(tmp_path):
    running = {"number": 0, "state": "running", "params": {"beta": 0.1}, "value": None, "reason": "", "seconds": None}
    content = {"task": "<b>", "metric": "success", "log": [], "wanted": 3, "trials": [running | {"command": "x"}]}
    (tmp_path / "sweep.json").write_text(json.dumps(content))
    page = write_sweep_report(tmp_path).read_text()
    assert "No trial is finished yet" in page and "&lt;b&gt;" in page and "http-equiv=refresh" in page


def test_a_trial_is_a_process_that_ctrl_c_does_not_cut_short(tmp_path):
    console = tmp_path / "console.txt"
    assert sweep._run([sys.executable, "-c", "print('said'); raise SystemExit(3)"], console) == 3
    assert console.read_text() == "said\n"
    for code in (130, 143):
        with pytest.raises(KeyboardInterrupt) as caught:
            sweep._run([sys.executable, "-c", f"raise SystemExit({code})"], console)
        assert exit_status(caught.value) == code
    slow = "import time; time.sleep(1.5); print('saved')"
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        sweep._run([sys.executable, "-c", slow], console)
    assert console.read_text() == "said\nsaved\n"


def test_the_page_of_a_sweep_runs_nothing_that_its_file_says(tmp_path):
    """Names and values in sweep.json, which may come from elsewhere, are text on the page."""
    hostile = "<script>alert(1)</script><img src=x onerror=alert(1)>"
    trials = [
        {"number": n, "state": hostile, "params": {hostile: 0.1 + n, f"b{hostile}": hostile}, "value": n / 2,
         "reason": hostile, "seconds": 1.0, "command": hostile}
        for n in range(3)
    ]  # fmt: skip
    content = {"task": hostile, "metric": hostile, "log": [hostile], "wanted": 3, "trials": trials}
    (tmp_path / "sweep.json").write_text(json.dumps(content))
    page = write_sweep_report(tmp_path).read_text()
    assert page.count("<script>") == 1 and "<img" not in page and page.count("&lt;script&gt;") > 5


def test_sigterm_is_passed_on_to_a_trial(tmp_path):
    trial = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit('saved')); print('on', flush=True); "
    console = tmp_path / "console.txt"

    def terminate():
        while not console.is_file() or "on" not in console.read_text():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=terminate).start()
    with pytest.raises(KeyboardInterrupt) as caught:
        sweep._run([sys.executable, "-c", trial + "time.sleep(100)"], console)
    assert exit_status(caught.value) == 143 and console.read_text() == "on\nsaved\n"
