"""The structure of the package: layers, no import cycles, few modules at the root, tests in the same folders."""

import ast
import dataclasses
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT
from trl_grpo_tasks.training.record import RolloutRecord

PACKAGE = ROOT / "trl_grpo_tasks"
FOLDERS = {
    "constraints", "rollout", "rewards", "models", "report", "serving", "training", "adapters", "tasks", "evaluation",
    "playground", "commands", "task",
}  # fmt: skip


def lint_imports(folder):
    """Run the contracts of pyproject.toml on the package in `folder`."""
    program = "import sys; sys.path.insert(0, ''); from importlinter.cli import lint_imports_command as run; run()"
    return subprocess.run([sys.executable, "-c", program, "--no-cache"], cwd=folder, capture_output=True, text=True)


def test_imports_keep_the_contracts():
    checked = lint_imports(ROOT)
    assert checked.returncode == 0 and "3 kept, 0 broken" in checked.stdout, checked.stdout


VIOLATIONS = [
    ("rollout/batch.py", "from ..training import config", "trl_grpo_tasks.rollout.batch -> trl_grpo_tasks.training"),
    (
        "task/base.py",
        "def late():\n    from ..commands import plan",
        "trl_grpo_tasks.task.base -> trl_grpo_tasks.commands",
    ),
    (
        "tasks/brick/data/rows.py",
        "from ...machine import data",
        "tasks.brick.data.rows -> trl_grpo_tasks.tasks.machine",
    ),
    ("constraints/vocabulary.py", "from . import choices", "no import cycles BROKEN"),
]


def test_violations_are_found(tmp_path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(PACKAGE, tmp_path / "trl_grpo_tasks", ignore=shutil.ignore_patterns("__pycache__"))
    for module, line, _ in VIOLATIONS:
        with (tmp_path / "trl_grpo_tasks" / module).open("a") as file:
            file.write(f"\n{line}\n")
    checked = lint_imports(tmp_path)
    assert checked.returncode == 1 and "0 kept, 3 broken" in checked.stdout
    for _, _, said in VIOLATIONS:
        assert said in checked.stdout, checked.stdout


def test_the_root_stays_small():
    modules = {path.name for path in PACKAGE.glob("*.py")}
    assert "__init__.py" in modules and len(modules) <= 5
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == FOLDERS


def test_tests_mirror_the_package():
    tested = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")}
    tested -= {Path("."), Path("vllm")}  # tests/vllm runs in its own environment
    packages = {path.parent.relative_to(PACKAGE) for path in PACKAGE.rglob("__init__.py")}
    assert tested <= packages
    # Every pack, and commands/test_check.py, test the contract.
    assert {str(folder) for folder in tested} >= FOLDERS - {"tasks", "task"}


def test_the_diagram_is_drawn_from_its_text_and_names_what_exists():
    spec = importlib.util.spec_from_file_location("make_diagram", ROOT / "docs" / "make_diagram.py")
    diagram = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(diagram)
    source = diagram.SOURCE.read_text()
    assert diagram.IMAGE.read_text() == diagram.svg(source), "run python docs/make_diagram.py"
    known = {field.name for field in dataclasses.fields(RolloutRecord)}
    fields = " ".join(fields for _, _, fields in diagram.stages(source))
    named = {word for word in fields.replace(",", "").split() if "_" in word}
    assert named and named <= known
    assert all((PACKAGE / "training" / file).is_file() for file, _, _ in diagram.stages(source))


def test_the_page_names_methods_that_exist():
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`([A-Z]\w+)\.(\w+)`", page))
    named |= {("TaskGRPOTrainer", name) for name in re.findall(r"`(_\w+)`", page)}
    classes = {name for name, _ in named}
    texts = [path.read_text() for path in PACKAGE.rglob("*.py")]
    trees = [ast.parse(text) for text in texts if classes & set(re.findall(r"^class (\w+)", text, re.MULTILINE))]
    nodes = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    methods = {(c.name, part.name) for c in nodes for part in c.body if isinstance(part, ast.FunctionDef)}
    assert len(named) >= 8 and named <= methods, named - methods
