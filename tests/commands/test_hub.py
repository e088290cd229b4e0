"""Pushing to the Hub, with the real client and a server on this machine."""

import json
import os
import shlex

import pytest

from tests.commands.test_train import LORA, ROOT, TASK, words
from tests.support import forked
from tests.support.hub_server import Hub

SECRET = "hf_verysecretverysecret"
TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
ABOUT = {"README.md", "report.html", "settings.json"}
WEIGHTS = {"config.json", "generation_config.json", "model.safetensors"}


def environment(endpoint, cwd):
    """HF_ENDPOINT is read once per process, so each run has a process of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return kept | {"HF_ENDPOINT": endpoint, "HF_HOME": str(cwd / "hf"), "HF_HUB_DISABLE_XET": "1"}


def train(endpoint, cwd, token=SECRET, **options):
    hub = {"push_to_hub": True, "hub_model_id": "user/letters"} | ({"hub_token": token} if token else {})
    typed = words(cwd / "run", **hub, **LORA, **options)
    done = forked.python(ROOT / "train.py", *typed, env=environment(endpoint, cwd), cwd=cwd)
    files = [path for path in (cwd / "run").rglob("*") if path.is_file()]
    return done, {path.relative_to(cwd / "run").as_posix(): path.read_bytes() for path in files}


@pytest.mark.exhaustive
@pytest.mark.parametrize("problem", ["nobody listens", "no token"])
def test_a_hub_that_cannot_be_used_is_found_before_training(tmp_path, problem):
    with Hub("another token") as hub:
        endpoint, token = ("http://127.0.0.1:9", SECRET) if problem == "nobody listens" else (hub.url, None)
        done, files = train(endpoint, tmp_path, token=token)
    assert done.returncode == 2 and files == {}
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: --push_to_hub: the repository 'user/letters' cannot be created or used (")
    way_out = "connect to the network" if problem == "nobody listens" else "HF_TOKEN"
    assert way_out in line and "train without --push_to_hub" in line


@pytest.mark.exhaustive
def test_a_hub_that_goes_away_during_a_run_costs_one_message(tmp_path):
    """The Hub fails for good after the repository was made; every save would push."""
    with Hub(SECRET, refuse="/commit/", status=503) as hub:
        done, files = train(hub.url, tmp_path, hub_strategy="every_save", max_steps=4)
        assert done.returncode == 1 and hub.repos["user/letters"] == {}, done.stderr
        failed = hub.requests.count("POST /api/models/user/letters/commit/main")
        hub.refuse = None
        typed = shlex.split(done.stderr.split("to try again: trl-grpo-tasks ")[1])
        again = environment(hub.url, tmp_path) | {"HF_TOKEN": SECRET}
        forked.python("-m", "trl_grpo_tasks.commands.main", *typed, "--task", TASK, env=again, check=True)
    assert hub.repos["user/letters"]["model.safetensors"] == files["merged/model.safetensors"]
    assert done.stdout.count("a push to the Hub failed") == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert f"trl-grpo-tasks push {tmp_path / 'run'} --repo user/letters" in line and "push to the Hub failed" in line
    assert {"adapter_model.safetensors", "report.html", "checkpoint-4/complete"} <= set(files)
    assert "GRPO 4/4" in done.stdout and failed > 4, "saves push, and the end tries thrice"
    assert not [name for name, content in files.items() if SECRET.encode() in content], "the token is in no file"
    saved = [json.loads(text) for text in files["training_metrics.jsonl"].splitlines()]
    assert [one["step"] for one in saved if "loss" in one] == [1, 2, 3, 4]


@pytest.mark.exhaustive
def test_checkpoints_are_pushed_complete(tmp_path):
    """transformers pushes a checkpoint before our state is in it."""
    with Hub(SECRET) as hub:
        done, files = train(hub.url, tmp_path, hub_strategy="all_checkpoints", max_steps=1)
    assert done.returncode == 0, done.stderr
    pushed = hub.repos["user/letters"]
    names = [name for name in files if name.startswith("checkpoint-1/")]
    assert "checkpoint-1/task_state_0.pt" in names and "checkpoint-1/complete" in names
    assert all(pushed[name] == files[name] for name in names), "a run can be resumed from what was pushed"
