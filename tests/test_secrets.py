"""Secrets passed to a run, in whatever way, do not appear in any file that it writes."""

import copy
import json
import os
import pickle
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.commands.test_train import ROOT, train, words
from tests.support import forked
from tests.support.commands import refused
from tests.support.training import config
from trl_grpo_tasks import redact
from trl_grpo_tasks.commands import train as run
from trl_grpo_tasks.commands.arguments import parse
from trl_grpo_tasks.redact import is_secret, redacted, redacted_words

TOKEN, KEY, PASSWORD, FROM_ENVIRONMENT = "hf_planted" * 3, "key-planted-0123", "planted:pass/word", "env_planted_0123"
SECRETS = (TOKEN, KEY, PASSWORD, FROM_ENVIRONMENT)
TASK = """
from dataclasses import dataclass

from trl_grpo_tasks.commands.task_template import MyTask as Base
from trl_grpo_tasks.task import option


@dataclass(frozen=True)
class Options(Base.Options):
    api_key: str = option("", "of a judge")
    judge_url: str = option("", "of a judge")


class MyTask(Base):
    Options = Options
"""


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    monkeypatch.setattr(redact, "_known", set())
    monkeypatch.setenv("HF_TOKEN", "")


def files_with_secrets(folder, *left_out):
    """Return (file name, secret) for each file under `folder` that contains a secret, also inside zip archives."""
    found = []
    for path in folder.rglob("*"):
        if not path.is_file() or path in left_out:
            continue
        contents = [path.read_bytes()]
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                contents += [archive.read(name) for name in archive.namelist()]
        found += [(path.name, secret) for secret in SECRETS if any(secret.encode() in one for one in contents)]
    return found


@pytest.mark.exhaustive
def test_no_file_of_a_run_holds_a_secret_and_the_run_resumes(tmp_path):
    """Secrets in options, in a recipe, in nested options and in the environment; with every local tracker."""
    task = tmp_path / "my_task.py"
    task.write_text(TASK)
    recipe = tmp_path / "recipe.yaml"
    nested = {"gradient_checkpointing_kwargs": {"a": [{"password": PASSWORD}]}}
    recipe.write_text(yaml.safe_dump({"api_key": KEY, "report_to": ["tensorboard", "wandb", "trackio"], **nested}))
    environment = os.environ | {"HF_HOME": str(tmp_path / "hf"), "WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path),
                                "WANDB_API_KEY": FROM_ENVIRONMENT}  # fmt: skip
    options = {"task": task, "log_completions": True, "project": "secrets"}
    tracked = Path(os.environ["TRACKIO_DIR"])  # which trackio reads when it is imported
    command = [ROOT / "train.py", "--config", str(recipe), "--hub-token", TOKEN,
               "--judge_url", f"https://me:{FROM_ENVIRONMENT}@example.com/{FROM_ENVIRONMENT}",
               "--model_init_kwargs", json.dumps({"token": TOKEN})]  # fmt: skip
    for more in ([], ["--resume_from_checkpoint"]):
        steps = 3 if more else 2
        typed = [*command, *words(tmp_path / "run", **options, max_steps=steps), *more]
        at = typed.index("--report_to")
        del typed[at : at + 2]
        done = forked.python(*typed, env=environment, cwd=tmp_path, check=True)
        assert files_with_secrets(tmp_path, recipe) == files_with_secrets(tracked) == []
        assert not [secret for secret in SECRETS if secret in done.stdout + done.stderr]
    names = {path.name for folder in (tmp_path, tracked) for path in folder.rglob("*")}
    assert {"training_args.bin", "secrets.db", "README.md", "report.html"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    assert any(name.endswith(".wandb") for name in names)
    settings = json.loads((tmp_path / "run" / "settings.json").read_text())
    assert "--hub-token ... " in settings["command"] and settings["task"]["options"]["api_key"] == "..."
    assert settings["task"]["options"]["judge_url"] == "https://me:...@example.com/..."


SPELLINGS = {
    "a word": ["--hub_token", TOKEN],
    "an equals sign": [f"--hub_token={TOKEN}"],
    "dashes": ["--hub-token", TOKEN],
    "dashes and an equals sign": [f"--hub-token={TOKEN}"],
    "nested": ["--model_init_kwargs", json.dumps({"token": TOKEN})],
    "nested after an equals sign": [f"--model_init_kwargs={json.dumps({'token': TOKEN})}"],
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_token_is_passed_to_the_hub_client_only(tmp_path, monkeypatch, spelling):
    given = SPELLINGS[spelling]
    monkeypatch.setattr(sys, "argv", ["train.py", *words(tmp_path), *given])
    _, _, args, _ = parse()
    assert os.environ["HF_TOKEN"] == TOKEN
    assert TOKEN not in str(sys.argv) + run.typed_command(args) + args.to_json_string() + str(vars(args))
    assert TOKEN.encode() not in pickle.dumps(args)


def test_a_token_in_a_recipe_is_passed_to_the_hub_client(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"hub_token": TOKEN}))
    _, _, args, _ = parse([*words(tmp_path), "--config", str(recipe)])
    assert os.environ["HF_TOKEN"] == TOKEN and args.hub_token is None


def test_two_different_tokens_are_refused(tmp_path, capsys):
    other = ["--hub_token", "hf_another", "--model_init_kwargs", json.dumps({"token": TOKEN})]
    said = refused(capsys, "train", *words(tmp_path / "run"), *other)
    assert "differ: give one token" in said and TOKEN not in said and not (tmp_path / "run").exists()


def test_secrets_are_removed_from_the_options_in_trackers_and_checkpoints(tmp_path):
    """The configuration is built in Python, without a command line."""
    nested = {"headers": {"Authorization": f"Bearer {KEY}"}, "tries": 3, "names": ["a", {"password": PASSWORD}]}
    args = config(tmp_path, gradient_checkpointing_kwargs=nested, hub_token=TOKEN)
    kept = {"headers": {"Authorization": "..."}, "tries": 3, "names": ["a", {"password": "..."}]}
    again = pickle.loads(pickle.dumps(args))
    assert args.to_dict()["gradient_checkpointing_kwargs"] == again.gradient_checkpointing_kwargs == kept
    assert again.hub_token == "..." and again.save_strategy == args.save_strategy
    for used in (args, copy.copy(args), copy.deepcopy(args)):  # the run itself needs the secrets
        assert used.gradient_checkpointing_kwargs == nested and used.hub_token == TOKEN
    assert copy.deepcopy(args).gradient_checkpointing_kwargs is not args.gradient_checkpointing_kwargs


@pytest.mark.parametrize("name", ["token", "hub_token", "--hub-token", "HF_TOKEN", "WANDB_API_KEY", "apiKey", "apikey",
                                  "AWS_SECRET_ACCESS_KEY", "aws_access_key_id", "client_secret", "Authorization",
                                  "DB_PASSWORD", "credentials", "accessToken", "OPENAI_KEY",
                                  "Ocp-Apim-Subscription-Key", "auth", "HTTP_AUTH", "jwt", "GITHUB_PAT",
                                  "GRB_WLSSECRET", "DB_PASS", "Cookie", "ssh_private_key", "x-api-key"])  # fmt: skip
def test_names_of_secrets(name):
    assert is_secret(name)


@pytest.mark.parametrize("name", ["pad_token", "eos_token", "image_token", "max_new_tokens", "pass_k", "key",
                                  "TOKENIZERS_PARALLELISM", "PWD", "HF_TOKEN_PATH", "keywords", "pass@4",
                                  "judge_key_variable", "sort_key", "author", "OLDPWD", "public_key",
                                  "SSH_AUTH_SOCK"])  # fmt: skip
def test_names_that_are_not_secret(name):
    assert not is_secret(name)


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("https://hf_abc@host/x", "https://...@host/x"),
        ("https://me:hf_abc@host/x", "https://me:...@host/x"),
        ("see http://host/v1?a=1&token=abc&b=2#top", "see http://host/v1?a=1&token=...&b=2#top"),
        ("http://host?access_key=abc", "http://host?access_key=..."),
        ("http://host/?page=2&sort_key=name", "http://host/?page=2&sort_key=name"),
        ("mail me@example.com, ssh://git@host/x", "mail me@example.com, ssh://git@host/x"),
    ],
)
def test_secrets_in_addresses_are_removed(address, shown):
    assert redacted(address) == shown


def test_other_values_are_kept(monkeypatch):
    monkeypatch.setenv("SHORT_TOKEN", "true")
    redact.remember({"token": "tiny", "hub_token": TOKEN, "max_tokens": "abcdefghi"})
    value = {"a": [True, None, 1.5, "true", "tiny abcdefghi"], "use": "{not JSON", "token": True}
    assert redacted(value) == value
    assert redacted(f"x{TOKEN}y") == "x...y"
    typed = ["train", "--token", "--task", "a", "--models", "token=a,b", "--text", '{"a": 1}', "-v"]
    assert redacted_words(typed) == [*typed[:5], "token=...", *typed[6:]]


def test_an_evaluation_keeps_no_secret(tmp_path):
    task = tmp_path / "my_task.py"
    task.write_text(TASK)
    train(tmp_path / "run", task=task, eval_only=True, api_key=KEY)
    assert files_with_secrets(Path(tmp_path)) == []
