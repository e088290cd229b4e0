"""`trl-grpo-tasks push`, with the real client and a server on this machine; the card's code is run."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.commands.test_hub import ABOUT, SECRET, TOKENIZER, WEIGHTS, environment
from tests.support import forked
from tests.support.adapters import save_adapter
from tests.support.commands import refused
from tests.support.hub_server import Hub
from tests.support.paths import ROOT
from tests.support.run_folders import before_and_after, edited, write_run
from tests.support.toy import ToyTask
from trl_grpo_tasks.commands.main import main
from trl_grpo_tasks.models.loading import prepare_model
from trl_grpo_tasks.report.page import write_report

TOY = ("--task", "tests.support.toy")
ADAPTER = {"adapter_config.json", "adapter_model.safetensors"}
PRIVATE = ("checkpoint-3/optimizer.pt", "checkpoint-3/model.safetensors", "training_args.bin", "exports/sample_1.txt",
           "completions/c.parquet", "base_model/model.safetensors", "notes.txt")  # fmt: skip


def fill(folder):
    """Add what a run folder of the toy task holds besides the model, also what must not be uploaded."""
    write_run(folder, evaluations=before_and_after())
    write_report(folder, ToyTask())
    for name in PRIVATE:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("private")
    return folder


@pytest.fixture
def full_run(tmp_path, tiny_path):
    shutil.copytree(tiny_path, tmp_path / "letters")
    return fill(tmp_path / "letters")


@pytest.fixture
def adapter_run(tmp_path, tiny_path):
    """The run of an adapter whose base model is user/base on the Hub."""
    save_adapter(tiny_path, tmp_path / "letters", "user/base")
    return fill(tmp_path / "letters")


def set_base(run, base):
    with edited(run / "adapter_config.json") as config:
        config["base_model_name_or_path"] = str(base)


def python(hub, cwd, *words, token=None):
    env = environment(hub.url, cwd) | {"PYTHONPATH": str(ROOT)} | ({"HF_TOKEN": token} if token else {})
    return forked.python(*words, env=env, cwd=cwd)


def push(hub, run, *words, token=SECRET):
    command = ["-m", "trl_grpo_tasks.commands.main", "push", run.name, *words, *TOY]
    return python(hub, run.parent, *command, *(["--hub_token", token] if token else []))


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.exhaustive
def test_a_run_is_uploaded_bit_for_bit_and_used_as_its_card_says(full_run):
    with edited(full_run / "settings.json") as settings:
        settings["task"]["options"] = {"api_key": "key-of-an-older-version"}
    before = contents(full_run)
    with Hub(SECRET, refuse="/commit/", status=503, times=1) as hub:
        done = push(hub, full_run, "--repo", "user/toy", "--private")
        assert done.returncode == 0, done.stderr
        pushed = dict(hub.repos["user/toy"])
        assert hub.private == {"user/toy"} and pushed.keys() == WEIGHTS | TOKENIZER | ABOUT
        snippets = re.findall(r"```python\n(.*?)```", pushed["README.md"].decode(), re.DOTALL)
        outputs = [python(hub, full_run.parent, "-c", code, token=SECRET) for code in snippets[:2]]
    assert contents(full_run) == before, "the run folder is only read"
    for name in pushed.keys() - {"README.md", "settings.json"}:
        assert pushed[name] == before[name], name
    clean = json.loads(pushed["settings.json"])
    assert clean["task"]["options"] == {"api_key": "..."} and clean["training"] == settings["training"]
    assert done.stdout.count("trying again in 2 s") == 1 and done.stdout.endswith("pushed to user/toy\n")
    assert f"model.safetensors {len(before['model.safetensors']) / 1000:.3g} kB" in re.sub(" +", " ", done.stdout)
    assert SECRET not in done.stdout + done.stderr
    assert not [name for name, content in pushed.items() if SECRET.encode() in content]
    assert "AutoModelForCausalLM" in snippets[0] and "Solver" in snippets[1] and len(snippets) == 3
    for one in outputs:
        assert one.returncode == 0, one.stderr
    assert re.search(r"^(True|False) [abcd]{1,3}$", outputs[1].stdout, re.MULTILINE), "under the constraint"


@pytest.mark.exhaustive
def test_a_pushed_run_is_used_by_its_hub_id(tmp_path):
    settings = json.dumps({"task": {"name": "brick"}, "training": {}}).encode()
    code = "import sys; from trl_grpo_tasks.report.run_folder import local_run; print(*map(local_run, sys.argv[1:]))"
    names = ("user/run", "user/model", "user/other", "user/missing", "tiny", "outputs/run")
    with Hub(SECRET) as hub:
        hub.repos["user/run"] = {"settings.json": settings, "config.json": b"{}", "report.html": b"large"}
        hub.repos["user/model"] = {"config.json": b"{}"}
        hub.repos["user/other"] = {"settings.json": b"[1]", "config.json": b"{}"}
        done = python(hub, tmp_path, "-c", code, *names, token=SECRET)
        hub.repos["user/cut_off"], hub.refuse, hub.status = hub.repos["user/run"], "/user/cut_off/.*/config.json", 403
        refused = python(hub, tmp_path, "-c", code, "user/cut_off", token=SECRET)
    assert done.returncode == 0, done.stderr
    folder, *others = done.stdout.split()
    assert others == list(names[1:]), "a model without the settings of a run is loaded as before"
    assert contents(Path(folder)) == {"settings.json": settings, "config.json": b"{}"}
    assert "ValueError: the run user/cut_off could not be downloaded from the Hub" in refused.stderr


@pytest.mark.exhaustive
def test_an_adapter_is_replaced_by_merged_weights_and_the_reverse(adapter_run, tmp_path, tiny_path):
    from trl_grpo_tasks.models.loading import load_model

    with Hub(SECRET) as hub:
        hub.repos["user/base"] = contents(Path(tiny_path))
        assert push(hub, adapter_run).returncode == 0
        assert set(hub.repos["user/letters"]) == ADAPTER | TOKENIZER | ABOUT, "the folder's name, of the user"
        card = hub.repos["user/letters"]["README.md"].decode()
        assert "library_name: peft" in card and 'AutoPeftModelForCausalLM.from_pretrained("user/letters")' in card
        merged = push(hub, adapter_run, "--merged", "--repo", "user/letters")
        assert merged.returncode == 0, merged.stderr
        assert "removed from the repository: adapter_config.json, adapter_model.safetensors" in merged.stdout
        pushed = dict(hub.repos["user/letters"])
        again = push(hub, adapter_run)
        assert again.returncode == 0 and set(hub.repos["user/letters"]) == ADAPTER | TOKENIZER | ABOUT
        refused = push(hub, adapter_run, "--private", "true")
        assert refused.returncode == 2 and "exists and is public, not private" in refused.stderr
    assert pushed.keys() == WEIGHTS | TOKENIZER | ABOUT
    card = pushed["README.md"].decode()
    assert "library_name: transformers" in card and "peft" not in card.split("## How to use it")[1].split("## Tr")[0]
    (tmp_path / "got.safetensors").write_bytes(pushed["model.safetensors"])
    set_base(adapter_run, tiny_path)
    expected = load_model(str(adapter_run)).merge_and_unload().state_dict()
    got = load_file(tmp_path / "got.safetensors")
    assert got.keys() == expected.keys() and all(got[name].equal(expected[name]) for name in got)
    assert 'subfolder="merged"' not in hub.repos["user/letters"]["README.md"].decode(), "it was not uploaded"


@pytest.mark.exhaustive
def test_an_upload_that_failed_is_repeated_without_sending_weights_again(full_run):
    with Hub(SECRET, refuse="/commit/", status=403) as hub:
        done = push(hub, full_run, token=None)
        assert done.returncode == 2 and "log in with `hf auth login` or set HF_TOKEN" in done.stderr
        done = push(hub, full_run)
        assert done.returncode == 1 and hub.repos["user/letters"] == {} and SECRET not in done.stderr
        (line,) = done.stderr.splitlines()
        assert "the push to the Hub failed" in line and "--hub_token ..." in line
        typed = shlex.split(line.split("repeat the command: trl-grpo-tasks ")[1])
        hub.refuse = None
        words = ["-m", "trl_grpo_tasks.commands.main", *typed[: typed.index("--hub_token")]]
        again = python(hub, full_run.parent, *words, token=SECRET)
        assert again.returncode == 0, again.stderr
    assert hub.repos["user/letters"]["model.safetensors"] == (full_run / "model.safetensors").read_bytes()
    assert sum(request.startswith("PUT") for request in hub.requests) == 1


def dry_run(capsys, run, *flags):
    assert main(["push", str(run), "--dry_run", *flags, *TOY]) == 0
    return capsys.readouterr().out


def test_a_dry_run_shows_the_files_and_changes_nothing(adapter_run, capsys):
    before = contents(adapter_run)
    for flags, weights in (((), True), (("--merged",), False)):
        said = dry_run(capsys, adapter_run, *flags)
        assert said.startswith("files for letters:\n") and "report.html" in said and "  total " in said
        assert ("adapter_model.safetensors" in said) == weights and "optimizer" not in said
        assert "nothing was uploaded: --dry_run" in said
        assert ("weights are merged before the upload" in said) == (not weights)
    assert contents(adapter_run) == before


def test_adapters_of_local_models_must_be_merged_and_those_of_tiny_ones_are(adapter_run, tiny_path, tmp_path, capsys):
    set_base(adapter_run, tiny_path)
    line = refused(capsys, "push", str(adapter_run), *TOY, "--hub_token", SECRET)
    assert f"its base model is in a local folder, {tiny_path}; push the merged weights (--merged)" in line
    set_base(adapter_run, prepare_model("tiny", ToyTask(), tmp_path))
    said = dry_run(capsys, adapter_run)
    assert "weights are merged before the upload" in said and "adapter_model" not in said


@pytest.mark.parametrize(
    ("change", "words", "message"),
    [
        ("remove", (), "letters: folder not found; give the folder of a run"),
        ("no model", (), "holds no final model: a run writes it when it ends"),
        ("training", (), "is still being trained (process"),
        ("no report", (), "has no report.html; write it first: trl-grpo-tasks report"),
        (None, ("--merged",), "holds full weights and no adapter; leave --merged out"),
        (None, ("--private", "perhaps"), "must be true or false"),
        ("own task", (), "which for safety is not taken"),
    ],
)
def test_wrong_options_are_found_before_the_hub_is_asked(full_run, capsys, change, words, message):
    from trl_grpo_tasks.commands.lock import locked

    if change == "remove":
        shutil.rmtree(full_run)
    if change in ("no model", "no report"):
        (full_run / {"no model": "model.safetensors", "no report": "report.html"}[change]).unlink()
    task = () if change == "own task" else TOY
    typed = ["push", str(full_run), *words, *task, "--hub_token", SECRET]
    if change == "training":
        with locked(full_run, "train"):
            code = main(typed)
    else:
        code = main(typed)
    out, err = capsys.readouterr()
    assert code == 2 and message in err and len(err.splitlines()) == 1 and SECRET not in out + err
