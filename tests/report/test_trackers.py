"""Trackers: metrics, tables of completions and pictures, read back from the files that each tracker writes."""

import json
import os
import sqlite3
import warnings
from pathlib import Path

import pytest
from PIL import Image

from tests.support import forked
from tests.support.run_folders import PngTask, png
from tests.support.toy import ToyTask
from tests.support.training import toy_trainer
from trl_grpo_tasks.commands.arguments import parse
from trl_grpo_tasks.commands.plan import prepare
from trl_grpo_tasks.report import trackers


@pytest.fixture(autouse=True)
def no_project(monkeypatch):
    """Remove the project variables of trackers from the environment, for the test and after it."""
    for name in trackers.PROJECT_VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


ROWS = [row["prompt"] for row in ToyTask().dataset("train", None, 0)]


def train(tiny_path, tmp_path, *names, task=None, **options):
    trainer = toy_trainer(
        tiny_path, tmp_path / "run", task or PngTask(), report_to=list(names), max_steps=2, project="letters",
        run_name="a run", **options,
    )  # fmt: skip
    said = []
    trainer.add_callback(trackers.TrackedSamples(trainer, say=said.append))
    trainer.train()
    return trainer, said


def test_tensorboard(tiny_path, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer, said = train(tiny_path, tmp_path, "tensorboard")
    (folder,) = (tmp_path / "run" / "runs").iterdir()
    found = EventAccumulator(str(folder), size_guidance={"images": 0, "tensors": 0}).Reload()
    tags = found.Tags()
    assert said == [] and "train/rewards/match/mean" in tags["scalars"] and "samples/1" in tags["images"]
    picture = found.Images("samples/1")[0]
    assert (picture.width, picture.height, picture.step) == (24, 24, 1)
    text = found.Tensors("completions/text_summary")[-1].tensor_proto.string_val[0].decode()
    head, _, *lines = text.splitlines()
    assert head == "| step | prompt | completion | reward | success | valid | reason |" and len(lines) == 8
    for line, (row, completion, outcome) in zip(lines, trainer.latest_samples(), strict=True):
        written = completion.replace("\n", "<br>")
        assert line.startswith(f"| 2 | {row['prompt']} | {written} | {outcome.score.total} |")
    scores = [outcome.score for _, _, outcome in trainer.latest_samples()]
    assert set(tags["histograms"]) == {"histograms/reward", *(f"histograms/{name}" for name in scores[0].components)}
    *_, drawn = found.Histograms("histograms/reward")
    shown, values = drawn.histogram_value, [score.total for score in scores]
    assert (drawn.step, shown.num) == (2, 8)
    wanted = (min(values), max(values), sum(values), sum(value**2 for value in values))
    assert (shown.min, shown.max, shown.sum, shown.sum_squares) == pytest.approx(wanted)


def test_histograms_leave_out_what_was_not_scored(tiny_path, tmp_path):
    class Unsure(ToyTask):
        def score(self, row, completion):
            return None if len(completion) % 2 else super().score(row, completion)

    trainer, _ = train(tiny_path, tmp_path, task=Unsure())
    scores = [outcome.score for _, _, outcome in trainer.latest_samples() if outcome.score is not None]
    assert 0 < len(scores) < 8
    assert trainer.rewarding.distributions() == {"reward": [pytest.approx(score.total) for score in scores]} | {
        name: [pytest.approx(score.components[name]) for score in scores] for name in scores[0].components
    }


@pytest.mark.exhaustive
def test_wandb_offline(tiny_path, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    logged, send = [], trackers._SEND["wandb"]

    def recorded(*args):
        # wandb.log exists only while there is a run
        log = wandb.log
        monkeypatch.setattr(wandb, "log", lambda data: (logged.append(data), log(data)))
        send(*args)
        monkeypatch.setattr(wandb, "log", log)

    monkeypatch.setitem(trackers._SEND, "wandb", recorded)
    _, said = train(tiny_path, tmp_path, "wandb")
    project = wandb.run.project
    wandb.finish()
    assert said == [] and project == "letters"
    media = tmp_path / "wandb" / "latest-run" / "files" / "media"
    pictures = list((media / "images" / "samples").glob("*.png"))
    assert pictures and all(Image.open(path).size == (24, 24) for path in pictures)
    assert len(list((media / "table").glob("completions_*.table.json"))) == 2
    drawn = [one["histograms/reward"] for one in logged if "histograms/reward" in one]
    assert len(drawn) == 2 and all(isinstance(one, wandb.Histogram) and sum(one.histogram) == 8 for one in drawn)


@pytest.mark.parametrize(
    ("project", "in_environment", "used"),
    [
        ("letters", None, "letters"),
        ("letters", "of the shell", "letters"),
        (trackers.DEFAULT_PROJECT, None, trackers.DEFAULT_PROJECT),
        (trackers.DEFAULT_PROJECT, "of the shell", "of the shell"),
    ],
)
def test_the_project_reaches_the_trackers_that_look_in_the_environment(monkeypatch, project, in_environment, used):
    names = ("WANDB_PROJECT", "COMET_PROJECT_NAME", "MLFLOW_EXPERIMENT_NAME", "CLEARML_PROJECT", "SWANLAB_PROJECT")
    for name in names if in_environment else ():
        monkeypatch.setenv(name, in_environment)
    trackers.use_project(project)
    assert [os.environ[name] for name in names] == [used] * len(names)


@pytest.mark.exhaustive
def test_trackio_on_this_machine(tiny_path, tmp_path):
    """In a separate process, because trackio starts threads."""
    pytest.importorskip("trackio")
    script = """
import json, sys
from pathlib import Path
from tests.report.test_trackers import train
_, said = train(sys.argv[1], Path(sys.argv[2]), "trackio")
print(json.dumps(said))
"""
    ended = forked.python("-c", script, tiny_path, tmp_path, cwd=tmp_path, check=True)
    assert json.loads(ended.stdout.splitlines()[-1]) == ["to watch the run: trackio show --project letters"]
    assert "Trackio" not in ended.stdout, "trackio's own messages must be suppressed"
    with sqlite3.connect(Path(os.environ["TRACKIO_DIR"]) / "letters.db") as data:
        found = data.execute("select metrics from metrics where run_name='a run'")
        logged = [bytes(line[0]).decode() for line in found]
    assert any('"train/rewards/match/mean"' in line for line in logged)
    assert any('"trackio.table"' in line and '"completion"' in line for line in logged)
    assert any('"samples/1":{"_type":"trackio.image"' in line for line in logged)
    drawn = [json.loads(line)["histograms/reward"] for line in logged if "histograms/reward" in line]
    assert [(one["_type"], sum(one["values"])) for one in drawn] == [("trackio.histogram", 8)] * 2


def test_what_trackio_prints_is_left_out_but_for_its_last_warning(tiny_path, tmp_path, capsys):
    """If its server does not answer, trackio keeps the data, and its last warning says where."""
    said = []
    tracked = trackers.TrackedSamples(toy_trainer(tiny_path, tmp_path), say=said.append)

    def noisy(answer):
        print("* Trackio project initialized")
        for text in ("first", "* saved locally"):
            warnings.warn(text)
        return answer

    assert tracked._without_output(noisy)(3) == 3
    assert said == ["trackio: saved locally"] and capsys.readouterr().out == ""


def test_the_default_is_trackio_where_it_is_installed(monkeypatch):
    for found, tracker in ((object(), "trackio"), (None, "none")):
        monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name, found=found: found)
        assert trackers.default_tracker() == tracker
    monkeypatch.undo()
    monkeypatch.setattr(trackers, "default_tracker", lambda: "tensorboard")
    words = ["--task", "tests.support.toy", "--use_cpu", "true"]
    _, _, args, _ = parse([*words, "--output_dir", "runs/mine"])
    assert (args.report_to, args.project, args.run_name) == (["tensorboard"], "trl_grpo_tasks", "mine")
    assert parse([*words, "--report_to", "none"])[2].report_to == []


def test_a_tracker_that_is_not_installed_is_reported_before_training(monkeypatch, tmp_path):
    words = ["--task", "tests.support.toy", "--use_cpu", "true", "--report_to", "wandb"]
    parsed = parse([*words, "--output_dir", str(tmp_path / "no")])
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="--report_to wandb: the package is not installed; run pip install wandb, or"):
        prepare(*parsed)
    assert not (tmp_path / "no").exists()


def test_a_tracker_that_fails_does_not_stop_training(tiny_path, tmp_path, monkeypatch):
    def refuse(*_):
        raise RuntimeError("no room left")

    monkeypatch.setitem(trackers._SEND, "tensorboard", refuse)
    trainer, said = train(tiny_path, tmp_path, "tensorboard")
    assert trainer.state.global_step == 2
    problem = "samples could not be sent to the tracker (RuntimeError: no room left)"
    assert said == [f"{problem}; training continues without them"]


def test_pictures_are_of_different_prompts_and_take_at_most_two_percent_of_the_time(tiny_path, tmp_path, monkeypatch):
    drawn, now = [], [0.0]

    class SlowTask(ToyTask):
        def render(self, row, completion):
            drawn.append((row["prompt"], now[0]))
            now[0] += 0.5
            return png(3)

    sent = []
    monkeypatch.setitem(trackers._SEND, "tensorboard", lambda t, step, lines, images: sent.append(len(images)))
    monkeypatch.setattr(trackers.time, "monotonic", lambda: now[0])
    trainer, _ = train(tiny_path, tmp_path, "tensorboard", task=SlowTask())
    assert sent == [2, 0] and len({prompt for prompt, _ in drawn}) == 2 and set(dict(drawn)) <= set(ROWS)
    now[0] += 51
    callback = trackers.TrackedSamples(trainer)
    assert len(callback._pictures(trainer.latest_samples())) == 2 and callback._next_pictures == now[0] + 50
