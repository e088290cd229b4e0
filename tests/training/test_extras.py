"""Extras: one file and one line each. Nothing else names them, and without them the trainer is the same."""

import ast
import shutil
import subprocess
import sys
from dataclasses import fields

import pytest
from trl import GRPOConfig

from tests.support import forked
from tests.support.paths import ROOT
from trl_grpo_tasks import TaskGRPOConfig
from trl_grpo_tasks.training.extras import EXTRAS

PACKAGE = ROOT / "trl_grpo_tasks"
FILES = {extra: extra.__module__.rpartition(".")[2] for extra in EXTRAS}

TRAIN = """
import hashlib, sys
from pathlib import Path
import trl_grpo_tasks
assert Path(trl_grpo_tasks.__file__).is_relative_to(sys.argv[1])
from tests.support.training import parameters, toy_trainer
trainer = toy_trainer(sys.argv[2], sys.argv[3], max_steps=3, constrain=True, advantage_estimator="mean")
trainer.train()
whole = b"".join(weight.numpy().tobytes() for weight in parameters(trainer).values())
print("weights", hashlib.sha256(whole).hexdigest(), "extras", len(trainer.extras))
"""
REMOVED = """
import dataclasses, importlib, sys
import trl_grpo_tasks
for folder in sys.argv[1:]:
    for name in list(sys.modules):
        if name.startswith(("trl_grpo_tasks.training", "trl_grpo_tasks.commands")):
            del sys.modules[name]
    trl_grpo_tasks.__path__[:] = [folder + "/trl_grpo_tasks", trl_grpo_tasks.__path__[-1]]
    trainer = importlib.import_module("trl_grpo_tasks.training.trainer")
    assert trainer.__file__.startswith(folder)
    config = importlib.import_module("trl_grpo_tasks.training.config").TaskGRPOConfig
    config(output_dir=folder, bf16=False, use_cpu=True)
    importlib.import_module("trl_grpo_tasks.commands.plan")
    print("options", *(field.name for field in dataclasses.fields(config)))
"""


def without(folder, extras, copied="training"):
    """Copy a part of the package without these extras: their files and their lines in the list are deleted."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE / copied, folder / "trl_grpo_tasks" / copied, ignore=ignored)
    home = folder / "trl_grpo_tasks" / "training" / "extras"
    lines = (home / "__init__.py").read_text().splitlines()
    for extra in extras:
        (home / f"{FILES[extra]}.py").unlink()
        lines = [line for line in lines if extra.__name__ not in line]
    (home / "__init__.py").write_text("\n".join(lines))
    return folder


def run(script, *words, first):
    """Run a script in a new interpreter with the package in `first`; return what it prints."""
    program = f"import sys; sys.path[:0] = [{str(first)!r}, {str(ROOT)!r}]\n{script}"
    done = subprocess.run([sys.executable, "-c", program, *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_no_other_module_imports_an_extra():
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        if path == PACKAGE / "training" / "extras" / "__init__.py" or not ("extras" in text or "extras" in path.parts):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom):
                folder, _, last = (node.module or "").rpartition(".")
                is_near = path.parent.name == "extras" and node.level == 1
                is_extra = last in FILES.values() and (is_near or folder.endswith("extras"))
                assert not is_extra, f"{path.relative_to(ROOT)} imports {node.module}"


def test_every_option_belongs_to_one_extra_or_to_the_core():
    names = [name for group in TaskGRPOConfig.own_options().values() for name in group]
    assert len(names) == len(set(names)) and len(TaskGRPOConfig.own_options()) == len(EXTRAS) + 1
    added = set(names) - {field.name for field in fields(GRPOConfig)}  # of others, only the default is ours
    assert len(added) <= 42, "a new option replaces one"


def test_an_extra_is_removed_by_deleting_its_file_and_its_line(tmp_path):
    folders = [without(tmp_path / FILES[extra], [extra]) for extra in EXTRAS]
    done = forked.python("-c", REMOVED, *folders, check=True)
    printed = [line for line in done.stdout.splitlines() if line.startswith("options")]
    for extra, line in zip(EXTRAS, printed, strict=True):
        own, left = set(extra.Options.__dataclass_fields__), set(line.split())
        assert own and not own & left
        others = {name for other in EXTRAS if other is not extra for name in other.Options.__dataclass_fields__}
        assert others <= left


@pytest.mark.exhaustive
def test_without_any_extra_the_same_model_is_trained(tiny_path, tmp_path):
    bare = without(tmp_path / "bare", EXTRAS, ".")
    ours = run(TRAIN, ROOT, tiny_path, tmp_path / "ours", first=ROOT)
    assert "extras 0" in ours
    assert run(TRAIN, bare, tiny_path, tmp_path / "other", first=bare).splitlines()[-1] == ours.splitlines()[-1]
