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
# Required by libraries that are named by their extras, trl[deepspeed] and trl[vllm], and by the CUDA builds of torch.
BY_OTHERS = {"deepspeed", "requests", "triton"}
CORE = ("commands", "constraints", "evaluation", "models", "report", "rewards", "training")


def distributions(nodes):
    """The distributions that import statements among these nodes need."""
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0]
    modules = {name.split(".")[0] for name in names} - {*sys.stdlib_module_names, "trl_grpo_tasks"}
    return {canonicalize_name(DISTRIBUTIONS.get(name, name)) for name in modules}


def imported(folder, at_top=False):
    """Distribution -> a file that imports it; with `at_top`, whenever the file itself is imported."""
    found = {}
    for file in folder.rglob("*.py"):
        if not file.name.endswith("_template.py"):  # templates are files of other projects
            tree = ast.parse(file.read_text())
            found |= dict.fromkeys(distributions(tree.body if at_top else [*ast.walk(tree)]), file)
    return found


def declared(*lists):
    return {canonicalize_name(Requirement(one).name) for requirements in lists for one in requirements}


def test_what_is_imported_is_declared():
    known = declared(PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()) | BY_OTHERS
    assert {name: file for name, file in imported(PACKAGE).items() if name not in known} == {}


@pytest.mark.parametrize("folder", CORE)
def test_no_extra_is_needed_to_import_the_core(folder):
    core = declared(PROJECT["dependencies"])
    assert {name: file for name, file in imported(PACKAGE / folder, at_top=True).items() if name not in core} == {}


@pytest.mark.parametrize("task", ["brick", "machine", "theory", "infill"])
def test_a_task_requires_only_what_it_imports(task):
    assert declared(PROJECT["optional-dependencies"][task]) <= set(imported(PACKAGE / "tasks" / task))


def test_the_package_requires_only_what_it_imports():
    # transformers imports gguf to read .gguf files.
    assert declared(PROJECT["dependencies"]) - set(imported(PACKAGE)) == {"gguf"}
