"""`trl-grpo-tasks export TASK --to LIBRARY`: a task as a package of verifiers or as a server of OpenEnv."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from ..redact import is_secret
from ..task import Task

LIBRARIES = ("verifiers", "openenv")

PYPROJECT = """[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "{version}"
description = {description}
dependencies = ["trl_grpo_tasks>={ours}", "verifiers>=0.4"]

[tool.setuptools]
packages = ["{name}"]
"""


def export_task(task: Task, library: str, folder: str | Path) -> str:
    """Write the task as `library` loads it into a new folder. Return what to do next."""
    if task.judges() or task.policy != "causal":
        what = "judges, which score on the accelerator" if task.judges() else f"policy {task.policy!r}"
        raise ValueError(f"task {task.name!r} cannot be exported to {library}: it has {what}")
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"--out {folder} is not empty; give another folder, or move this one away")
    name = re.sub(r"\W", "_", task.name)
    code = folder / name if library == "verifiers" else folder
    code.mkdir(parents=True)
    text = filled_template(library, {"SPEC": copied_spec(task, code), "OPTIONS": exported_options(task)})
    if library == "openenv":
        (code / "server.py").write_text(text)
        return f"start it: python {folder / 'server.py'}; then train on it: --task openenv:http://localhost:8000"
    (code / "__init__.py").write_text(text)
    described = {"name": name, "version": re.sub(r"[^\w.+]", ".", task.version), "ours": version("trl_grpo_tasks")}
    project = PYPROJECT.format(**described, description=json.dumps(task.description))
    (folder / "pyproject.toml").write_text(project)
    return f"install it: pip install {folder}; its id in verifiers is {name}"


def copied_spec(task: Task, folder: Path) -> str:
    """Return how exported code in `folder` names the task; a task that is a file is copied there."""
    spec = task.spec or ""
    if not spec.endswith(".py"):
        return spec
    return Path(shutil.copy(Path(spec).expanduser(), folder)).name


def filled_template(name: str, values: Mapping[str, object]) -> str:
    """Return the code of NAME_template.py with these values for the constants at its top."""
    lines = (Path(__file__).parent / f"{name}_template.py").read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        start, equals, _ = line.partition(" = ")
        constant = start.partition(":")[0]
        if equals and constant in values:
            lines[number] = f"{start} = {values[constant]!r}"
    return "\n".join(lines) + "\n"


def exported_options(task: Task) -> dict[str, object]:
    """The options that differ from their defaults. Secrets stay here: an exported task is for others."""
    default = dataclasses.asdict(type(task.options)())
    given = dataclasses.asdict(task.options)
    return {name: value for name, value in given.items() if value != default[name] and not is_secret(name)}
