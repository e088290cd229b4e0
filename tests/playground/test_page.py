"""The page without a browser: requests, examples, and what a player changes on the page."""

import json
import random
import re
import shutil
import zipfile
from pathlib import Path

import huggingface_hub
import pytest

from tests.support.played import MOST_TOKENS, save_run
from tests.support.toy import ToyTask
from trl_grpo_tasks.playground.models import AFTER, BEFORE, Models, initial_model
from trl_grpo_tasks.playground.page import (
    BOTH,
    LONGEST_REQUEST,
    Player,
    example,
    make_page,
    request_of,
)
from trl_grpo_tasks.registry import get_task

TEXT = "a wall, 7 long, 3 high, world 8"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (" ", "press Example"),
        ("x" * (LONGEST_REQUEST + 1), "at most 50,000"),
        ("{x", "is a row in JSON"),
        ('{"a":' * 9000, "JSON"),
    ],
)
def test_requests_that_cannot_be_read(text, message):
    with pytest.raises(ValueError, match=message):
        request_of(text)


def test_requests_are_texts_or_rows():
    assert request_of(" a table ") == "a table" and request_of('{"prompt": "x"}') == {"prompt": "x"}


def test_examples_are_held_out_rows():
    """What the example means has the prompt of a row of the test split."""
    task = get_task("prompts")
    prompts = [row["prompt"] for row in task.dataset("test", 64, 0)]
    for seed in range(3):
        random.seed(seed)
        request = request_of(example(task))
        row = task.row_of(request) if isinstance(request, str) else task.row_from(request)
        assert row["prompt"] in prompts


def test_a_task_that_reads_no_text_has_rows_as_examples():
    assert json.loads(example(ToyTask())) in ToyTask().dataset("test", None, 0)


# ---- models


def test_the_initial_model_of_a_run(tmp_path, tiny_path):
    run = save_run(tmp_path / "run")
    shutil.copytree(tmp_path / "run" / "cold_start", tmp_path / "run" / "base_model")
    assert initial_model(run) == f"{run}/cold_start"
    shutil.rmtree(tmp_path / "run" / "cold_start")
    assert initial_model(run) == f"{run}/base_model"
    (tmp_path / "run" / "base_model").rename(tmp_path / "other")
    assert initial_model(run) is None, "a tiny model that is not there any more"
    settings = json.loads((tmp_path / "run" / "settings.json").read_text())
    (tmp_path / "run" / "settings.json").write_text(json.dumps(settings | {"model": {"name": "org/model"}}))
    assert initial_model(run) == "org/model"
    assert initial_model(tiny_path) is None and initial_model("org/model") is None


def test_the_revision_of_the_initial_model(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    stored = tmp_path / "cache" / "models--org--model"
    snapshot = stored / "snapshots" / ("1" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (stored / "refs").mkdir()
    (stored / "refs" / "v1").write_text("1" * 40)
    run = tmp_path / "run"
    run.mkdir()
    for revision, expected in (("v1", str(snapshot)), ("v2", None), ("main", "org/model")):
        (run / "settings.json").write_text(json.dumps({"model": {"name": "org/model", "revision": revision}}))
        assert initial_model(str(run)) == expected
    (run / "settings.json").write_text(json.dumps({"model": {"name": "./gone.gguf", "revision": "v1"}}))
    assert initial_model(str(run)) == "./gone.gguf", "loading it says that the file is not there"


# ---- a player


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("played")
    run = save_run(folder / "run", top_k=20)
    with Models(run, get_task("brick"), initial_model(run), folder / "made", reward_workers=1) as models:
        yield models


@pytest.fixture(scope="module")
def player(models):
    pytest.importorskip("gradio", reason="needs gradio (pip install 'trl_grpo_tasks[play]')")
    page = make_page(models)
    return next(fn.fn.__self__ for fn in page.fns.values() if isinstance(getattr(fn.fn, "__self__", None), Player))


def played(player, changes):
    """The last value of each component, by panel and name; every change is kept under "all"."""
    names = {id(player._status): "status"}
    for which, panel in player._panels.items():
        names |= {id(component): f"{which}: {name}" for name, component in vars(panel).items()}
    last = {"all": []}
    for change in changes:
        named = {names[id(component)]: value for component, value in change.items()}
        last |= named
        last["all"].append(named)
    return last


def test_the_page_opens_with_an_example_that_is_answered(player, models):
    last = played(player, [{key: value for key, value in player.opening().items() if key in component_of(player)}])
    (text,) = [value for key, value in player.opening().items() if key not in component_of(player)]
    prompts = [row["prompt"] for row in models.task.dataset("test", 1, 0)]
    assert models.solver(AFTER).row_of(request_of(text))["prompt"] in prompts
    assert 'class="verdict' in last[f"{AFTER}: verdict"] and "data:image/png" in last[f"{AFTER}: picture"]
    steps = played(player, player.ask(text, AFTER, models.solver(AFTER).seed))[f"{AFTER}: steps"]
    assert last[f"{AFTER}: steps"] == steps and Path(last[f"{AFTER}: files"]["value"]).is_file()


def component_of(player):
    return [player._status, *(one for panel in player._panels.values() for one in panel.components)]


def test_both_models_have_the_settings_of_the_run(models):
    for which in (AFTER, BEFORE):
        sampler = models.solver(which).sampler
        assert (sampler.temperature, sampler.max_length, sampler.filters.top_k) == (0.9, MOST_TOKENS, 20)
    assert models.solver(AFTER) is models.solver(AFTER) is not models.solver(BEFORE)


def test_an_answer_is_streamed_judged_and_drawn(player, tmp_path):
    last = played(player, player.ask(TEXT, AFTER, 3))
    assert len([change for change in last["all"] if f"{AFTER}: strip" in change]) >= 3
    steps = last[f"{AFTER}: steps"]
    written = re.sub("<[^>]+>", "", last[f"{AFTER}: strip"])
    assert written.replace("&lt;eos&gt;", "").replace("<eos>", "") == steps[-1].written and len(steps) > 3
    assert "tokens were allowed" in last[f"{AFTER}: table"] or "1 token was" in last[f"{AFTER}: table"]
    assert 'class="verdict bad"' in last[f"{AFTER}: verdict"] and "component" in last[f"{AFTER}: verdict"]
    assert "data:image/png;base64," in last[f"{AFTER}: picture"]
    with zipfile.ZipFile(last[f"{AFTER}: files"]["value"]) as files:
        assert {"sample_1.txt", "sample_1.ldr", "answers.jsonl"} <= set(files.namelist())
        assert files.read("sample_1.txt").decode() == steps[-1].written
    assert last["status"] == "" and last[f"{BEFORE}: strip"] == ""
    again = played(player, player.ask(TEXT, AFTER, 3))
    assert again[f"{AFTER}: steps"] == steps != played(player, player.ask(TEXT, AFTER, 4))[f"{AFTER}: steps"]


def test_both_models_answer_in_their_panels(player):
    last = played(player, player.ask(TEXT, BOTH, 1))
    texts = [last[f"{which}: steps"][-1].written for which in (BEFORE, AFTER)]
    assert texts[0] != texts[1] and all("verdict" in last[f"{which}: verdict"] for which in (BEFORE, AFTER))
    assert all(last[f"{which}: column"]["visible"] for which in (BEFORE, AFTER))


def test_best_of_k_shows_the_best_answer_of_the_solver(player, models):
    last = played(player, player.best(TEXT, AFTER, 5, 6))
    solver = models.solver(AFTER)
    assert solver.seed == 5
    solution = solver(TEXT, 6)
    assert f"{solution.samples} samples" in last[f"{AFTER}: verdict"]
    assert re.sub("<[^>]+>", "", last[f"{AFTER}: strip"]) == solution.answers[0].completion


@pytest.mark.parametrize("text", ["", "{", '{"prompt": 3}', "a wall, world 9999"])
def test_mistakes_are_told_on_the_page(player, text):
    for changes in (player.ask(text, AFTER, 0), player.best(text, AFTER, None, 2)):
        last = played(player, changes)
        assert "<p" in last["status"] and last[f"{AFTER}: verdict"] == ""
