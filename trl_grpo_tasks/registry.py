"""The tables of built-in tasks and adapters, and how a task is found by name, file or module."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from .task import Task, describe_error, nearest

# The built-in tasks. To add one, create a folder under tasks/ and add a line here.
TASKS: dict[str, str] = {
    "brick": "trl_grpo_tasks.tasks.brick",
    "infill": "trl_grpo_tasks.tasks.infill",
    "machine": "trl_grpo_tasks.tasks.machine",
    "prompts": "trl_grpo_tasks.tasks.prompts",
    "theory": "trl_grpo_tasks.tasks.theory",
}

# Tasks of other libraries are named PREFIX:NAME; `task_class` of the module gets the NAME.
PREFIXES: dict[str, str] = {
    "openenv": "trl_grpo_tasks.adapters.openenv",
    "reasoning_gym": "trl_grpo_tasks.adapters.reasoning_gym",
    "trl": "trl_grpo_tasks.adapters.trl_function",
    "trl_env": "trl_grpo_tasks.adapters.trl_environment",
    "verifiers": "trl_grpo_tasks.adapters.verifiers",
}


def get_task(spec: str, options: Any = None) -> Task:
    """Load the task `spec`: the name of a built-in task, a path to a .py file, an importable module, or PREFIX:NAME
    for a task of another library.

    `options` is an instance of the task's `Options`, a mapping of its fields, or None for the defaults.
    """
    task_class = find_task_class(spec)
    if options is None or isinstance(options, Mapping):
        options = task_class.Options(**(options or {}))
    elif not is_dataclass(options):
        raise TypeError(
            f"options of task {spec!r} must be a mapping or {task_class.Options.__name__}, got {options!r}"
        )
    task = task_class(options)
    task.spec = spec
    return task


def check_task_name(spec: str) -> None:
    """Raise ValueError for a name that is no built-in task, file, module or task of another library."""
    prefix, colon, _ = spec.partition(":")
    if not (spec in TASKS or "." in spec or (colon and prefix in PREFIXES)):
        raise ValueError(
            f"unknown task {spec!r}{nearest(spec, TASKS)}; tasks are: {', '.join(sorted(TASKS))}; "
            "or pass a path to a .py file, a module such as my_package.my_task, or PREFIX:NAME for a task of another "
            f"library ({', '.join(PREFIXES)})"
        )


def find_task_class(spec: str) -> type[Task]:
    """Find the Task subclass for the name of a built-in task, a .py file, a module or a task of another library."""
    check_task_name(spec)
    prefix, colon, name = spec.partition(":")
    if colon and prefix in PREFIXES:
        if not name:
            raise ValueError(f"task {spec!r} names no task of {prefix}; write {prefix}:NAME")
        return importlib.import_module(PREFIXES[prefix]).task_class(name)
    module = importlib.import_module(TASKS[spec]) if spec in TASKS else load_module(spec, "task")
    classes = [one for one in vars(module).values() if inspect.isclass(one) and one.__module__ == module.__name__]
    found = [module.TASK] if hasattr(module, "TASK") else [one for one in classes if issubclass(one, Task)]
    if len(found) != 1:
        names = ", ".join(cls.__name__ for cls in found) or "none"
        raise ValueError(
            f"task {spec!r}: the module must define exactly one subclass of Task, or name one with "
            f"TASK = ThatClass; found: {names}"
        )
    if not isinstance(getattr(found[0], "name", None), str):
        raise ValueError(f'task {spec!r}: class {found[0].__name__} needs a name, such as name = "my_task"')
    return found[0]


def is_safe_by_name(spec: str) -> bool:
    """Whether a run folder may name this task: then no code of a third party is imported, and no server is asked."""
    return spec in TASKS or spec.startswith("reasoning_gym:")


def add_current_folder_to_path() -> None:
    """Make modules in the current folder importable, as `python -m` does; installed modules take precedence."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def load_module(spec: str, kind: str) -> Any:
    """Load a .py file or a module. `kind` says in errors what the user named by it."""
    add_current_folder_to_path()
    if spec.endswith(".py"):
        path = Path(spec).expanduser().resolve()
        if not path.is_file():
            raise ValueError(f"{kind} file {spec!r} does not exist (full path: {path})")
        name = f"_{kind.replace(' ', '_')}_file_{path.stem}"
        loader = importlib.util.spec_from_file_location(name, path)
        assert loader is not None and loader.loader is not None  # a .py path always has a loader
        module = importlib.util.module_from_spec(loader)
        sys.modules[name] = module  # dataclasses look their module up there
        with _named(f"{kind} file {spec!r}", path):
            loader.loader.exec_module(module)
        return module
    if importlib.util.find_spec(spec.split(".")[0]) is None:
        raise ValueError(
            f"{kind} module {spec!r} cannot be found; install its package, or add its folder to PYTHONPATH"
        )
    with _named(f"{kind} module {spec!r}", ""):
        return importlib.import_module(spec)


@contextmanager
def _named(what: str, path: str | Path) -> Iterator[None]:
    """Name the file or module that is imported here in errors of its code."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{what} cannot be imported: {describe_error(error, path)}", name=error.name) from error
    except Exception as error:
        raise ValueError(f"{what} cannot be read: {describe_error(error, path)}") from error
