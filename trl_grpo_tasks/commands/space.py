"""A Hugging Face Space with the playground of a model: `trl-grpo-tasks play --space DIR`."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from ..models.loading import full_model_of, is_adapter, prepare_model, save_merged
from ..redact import redacted
from ..registry import TASKS
from ..report.run_folder import sampling_of, settings_of
from ..task import Task
from ..training.repair import RepairTask
from .export_task import copied_spec, exported_options, rendered
from .final_model import model_files

PACKAGE = Path(__file__).parents[1]
REPAIR_OF_RUN = ("repair_turns", "repair_discount")
GRADIO = "6.31.0"  # the version of the Space if none is installed here


def write_space(model: str, task: Task, before: str | None, folder: str | Path, sampling: Mapping[str, Any]) -> str:
    """Write app.py, README.md, requirements.txt, the package and the models into a new folder; return what to do next.

    A model on the Hub is named, not copied. An adapter is copied if its base model is on the Hub; otherwise the merged
    model is written.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"--space {folder} is not an empty folder; give another one, or move it away")
    inner = task.inner if isinstance(task, RepairTask) else task
    check_task(inner.spec or "", exported_options(inner))
    settings = settings_of(model)
    chosen = sampling_of(settings) | {name: value for name, value in sampling.items() if value is not None}
    with tempfile.TemporaryDirectory() as scratch:
        path = prepare_model(model, task, scratch, sampling["seed"])
        folder.mkdir(parents=True, exist_ok=True)
        model = _copied(path, folder, "model", task.policy)
    if before is not None:
        before = _copied(before, folder, "before", task.policy)
    repair = {name: value for name, value in settings.get("training", {}).items() if name in REPAIR_OF_RUN}
    values = {"spec": copied_spec(inner, folder), "options": exported_options(inner), "model": model, "before": before}
    values |= {"settings": {"training": repair}, "sampling": chosen}
    app = rendered("space_app.py", **{name: redacted(value) for name, value in values.items()})
    (folder / "app.py").write_text(app, encoding="utf-8")
    readme = rendered("space_README.md", title=f"{task.name} playground", task=task.name, gradio=_gradio_version())
    (folder / "README.md").write_text(readme, encoding="utf-8")
    (folder / "requirements.txt").write_text("".join(f"{line}\n" for line in _requirements(inner.name)))
    shutil.copytree(PACKAGE, folder / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    start, publish = f"python {folder / 'app.py'}", f"hf upload OWNER/NAME {folder} --repo-type space"
    return f"Space: {folder}\nstart it here: {start}\npublish it: {publish}"


def check_task(spec: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError for a task that needs code or files that a Space does not have."""
    if spec not in TASKS and not spec.endswith(".py"):
        raise ValueError(
            f"--space: the code of task {spec!r} cannot be copied; built-in tasks ({', '.join(sorted(TASKS))}) and "
            "tasks in a .py file can"
        )
    for name, value in options.items():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, str) and one and Path(one).expanduser().exists():
                raise ValueError(
                    f"--space: --{name} names {one}, a file of this machine, which a Space cannot read; put it on the "
                    "Hub and name it there, or leave the option out"
                )


def _copied(path: str, folder: Path, name: str, policy: str) -> str:
    """Copy a model folder to `name` in the Space and return that name; a Hub id is returned as it is."""
    source, target = Path(path), folder / name
    if not source.is_dir():
        return path
    has_adapter = is_adapter(path)
    if has_adapter and Path(full_model_of(path)[0]).exists():
        save_merged(source, target, policy)
        return name
    target.mkdir()
    for file in model_files(source, has_adapter):
        shutil.copy(file, target)
    return name


def _requirements(task: str) -> list[str]:
    """What the package requires, with the extra of the task, for the copy of it in the Space."""
    lines = []
    for line in requires(PACKAGE.name) or []:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": task}):
            requirement.marker = None
            lines.append(str(requirement))
    return sorted(lines)


def _gradio_version() -> str:
    try:
        return version("gradio")
    except PackageNotFoundError:
        return GRADIO
