"""pyproject.toml declares what the package imports, and no task requires a package that it does not import."""

import re
import sys
import tomllib

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


IMPORT = re.compile(r"^( *)(?:from (\w+)[\w.]* import|import (\w[\w., ]*))", re.MULTILINE)


def imported(folder, at_top=False):
    """Distribution -> a file that imports it; with `at_top`, whenever the file itself is imported."""
    found = {}
    for file in folder.rglob("*.py"):
        if not file.name.endswith("_template.py"):  # templates are files of other projects
            lines = IMPORT.findall(file.read_text())
            names = [
                name for indent, *names in lines if not (at_top and indent) for name in ",".join(names).split(",")
            ]
            modules = {name.split()[0].split(".")[0] for name in names if name.strip()}
            modules -= {*sys.stdlib_module_names, "trl_grpo_tasks"}
            found |= {canonicalize_name(DISTRIBUTIONS.get(module, module)): file for module in modules}
    return found


def declared(*lists):
    return {canonicalize_name(Requirement(one).name) for requirements in lists for one in requirements}


def test_what_is_imported_is_declared():
    known = declared(PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()) | BY_OTHERS
    assert {name: file for name, file in imported(PACKAGE).items() if name not in known} == {}


def test_no_extra_is_needed_to_import_the_core():
    core = declared(PROJECT["dependencies"])
    for folder in CORE:
        assert {name: file for name, file in imported(PACKAGE / folder, at_top=True).items() if name not in core} == {}


def test_a_task_requires_only_what_it_imports():
    for task in ("brick", "machine", "theory", "infill"):
        assert declared(PROJECT["optional-dependencies"][task]) <= set(imported(PACKAGE / "tasks" / task)), task


def test_the_package_requires_only_what_it_imports():
    # transformers imports gguf to read .gguf files.
    assert declared(PROJECT["dependencies"]) - set(imported(PACKAGE)) == {"gguf"}
