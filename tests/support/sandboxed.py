"""Helpers of the sandbox tests: available layers and running processes. The fixtures are in conftest.py."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from trl_grpo_tasks.rewards.sandbox import run_python, sandbox_layers


def active(*names: str) -> bool:
    """Tell whether at least one of these layers is active on this machine."""
    return any(sandbox_layers()[name] == "" for name in names)


def needs(*names: str) -> None:
    """Skip the test unless at least one of these layers is active."""
    if not active(*names):
        pytest.skip("; ".join(f"{name}: {sandbox_layers()[name]}" for name in names))


def dedent_run(code: str, **options):
    return run_python(textwrap.dedent(code), **options)


def with_package() -> dict[str, str]:
    """Return the environment with this package on the import path, for scripts in other folders."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}


def run_script(script: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own."""
    words = [sys.executable, "-c", textwrap.dedent(script)]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, env=with_package())


def children_of(pid: int) -> set[int]:
    return {child for child, parent in _parents().items() if parent == pid}


def descendants(pid: int) -> list[int]:
    parents = _parents()
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def _parents() -> dict[int, int]:
    """The parent's id of every process on this machine."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    return parents


def command_of(pid: int) -> str:
    """The command line of a process; "" if it has ended or is a zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def is_refused(statements: str, setup: str = "") -> bool:
    """Tell whether these statements of a program in the sandbox raise an OSError."""
    attempt = textwrap.indent(f"{statements}\nprint('done')", "    ")
    result = run_python(f"{setup}\ntry:\n{attempt}\nexcept OSError:\n    print('refused')")
    assert result.stdout in ("done\n", "refused\n"), result
    return result.stdout == "refused\n"
