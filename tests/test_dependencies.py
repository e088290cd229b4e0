"""pyproject.toml declares what the package imports, and no task requires a package that it does not import."""

import ast
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.paths import ROOT

PACKAGE = ROOT / "trl_grpo_tasks"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# The distributions whose names differ from those of their modules.
DISTRIBUTIONS = {"PIL": "pillow", "yaml": "pyyaml"}
# Required by libraries that are named by their extras: trl[deepspeed], and the CUDA builds of torch.
BY_OTHERS = {"deepspeed", "triton"}


def imported(*folders):
    """Distribution -> one of the files that import it. Templates are files of other projects."""
    found = {}
    for file in sorted(path for folder in folders for path in folder.rglob("*.py")):
        if file.name.endswith("_template.py"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            for name in {name.split(".")[0] for name in names} - {*sys.stdlib_module_names, "trl_grpo_tasks"}:
                found[canonicalize_name(DISTRIBUTIONS.get(name, name))] = file.relative_to(ROOT).as_posix()
    return found


def declared(*lists):
    return {canonicalize_name(Requirement(one).name) for requirements in lists for one in requirements}


def test_what_is_imported_is_declared():
    known = declared(PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()) | BY_OTHERS
    assert {name: file for name, file in imported(PACKAGE).items() if name not in known} == {}


def test_what_is_imported_everywhere_is_not_an_extra():
    """Imports at the top of a module outside tasks and adapters must not need an extra."""
    missing = {}
    for file in PACKAGE.rglob("*.py"):
        if file.relative_to(PACKAGE).parts[0] in ("tasks", "adapters", "playground", "serving"):
            continue
        if file.name.endswith("_template.py") or "kernels" in file.parts:
            continue
        for node in ast.parse(file.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            for name in {name.split(".")[0] for name in names} - {*sys.stdlib_module_names, "trl_grpo_tasks"}:
                if canonicalize_name(DISTRIBUTIONS.get(name, name)) not in declared(PROJECT["dependencies"]):
                    missing[name] = file.relative_to(ROOT).as_posix()
    assert missing == {}


@pytest.mark.parametrize("task", ["brick", "machine", "theory", "infill"])
def test_a_task_requires_only_what_it_imports(task):
    assert declared(PROJECT["optional-dependencies"][task]) <= set(imported(PACKAGE / "tasks" / task))


def test_the_package_requires_only_what_it_imports():
    # transformers imports gguf to read .gguf files.
    assert declared(PROJECT["dependencies"]) - set(imported(PACKAGE)) == {"gguf"}
