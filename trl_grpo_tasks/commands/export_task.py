"""`trl-grpo-tasks tool TASK export --to LIBRARY`: a task as a package of verifiers or as a server of OpenEnv."""

from __future__ import annotations

import dataclasses
import re
import shutil
from importlib.metadata import version
from pathlib import Path

from ..redact import is_secret
from ..task import Task

LIBRARIES = ("verifiers", "openenv")


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
    values = {"spec": copied_spec(task, code), "options": exported_options(task)}
    if library == "openenv":
        (code / "server.py").write_text(rendered("openenv_server.py", **values))
        return f"start it: python {folder / 'server.py'}; then train on it: --task openenv:http://localhost:8000"
    (code / "__init__.py").write_text(rendered("verifiers_package.py", **values))
    described = {"name": name, "version": re.sub(r"[^\w.+]", ".", task.version), "ours": version("trl_grpo_tasks")}
    project = rendered("verifiers_pyproject.toml", **described, description=task.description)
    (folder / "pyproject.toml").write_text(project)
    return f"install it: pip install {folder}; its id in verifiers is {name}"


def copied_spec(task: Task, folder: Path) -> str:
    """Return how exported code in `folder` names the task; a task that is a file is copied there."""
    spec = task.spec or ""
    if not spec.endswith(".py"):
        return spec
    return Path(shutil.copy(Path(spec).expanduser(), folder)).name


def rendered(template: str, **values: object) -> str:
    """Return the text of TEMPLATE.jinja in the folder templates, with these values."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    folder = FileSystemLoader(Path(__file__).parent / "templates")
    environment = Environment(loader=folder, keep_trailing_newline=True, undefined=StrictUndefined)
    environment.filters["repr"] = repr
    return environment.get_template(f"{template}.jinja").render(values)


def exported_options(task: Task) -> dict[str, object]:
    """The options that differ from their defaults. Secrets stay here: an exported task is for others."""
    default = dataclasses.asdict(type(task.options)())
    given = dataclasses.asdict(task.options)
    return {name: value for name, value in given.items() if value != default[name] and not is_secret(name)}
