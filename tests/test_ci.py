"""Tests depend neither on files left on the machine nor on their order: `.ci/run`, isolation.py and conftest.py."""

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import conftest
from tests.support.isolation import SCRATCH
from tests.support.paths import ROOT

FAKE_MAKE = """#!/bin/sh
echo "$@"
for name in HOME TMPDIR PIP_CONFIG_FILE PIP_CACHE_DIR HF_HOME; do printenv $name || echo "no $name"; done
ls -A "$HOME" "$TMPDIR"
touch "$HOME/left" "$TMPDIR/left"
exit ${FAKE_STATUS:-0}
"""
FAKE_PYTHON = """#!/bin/sh
echo "no wheel for $*"
exit ${FAKE_PIP_STATUS:-0}
"""


def ci(tmp_path, **variables):
    """Run `.ci/run` with a fake `make` that prints its arguments, five variables and the contents of two folders.

    The Python with which `.ci/run` looks for wheels is fake too. Returns the printed lines and the exit status.
    """
    programs, home = tmp_path / "bin", tmp_path / "home"
    for path in (programs, home / ".config" / "pip"):
        path.mkdir(parents=True, exist_ok=True)
    for name in ("make", "chromium", "apt-get"):
        (programs / name).write_text(FAKE_MAKE)
        (programs / name).chmod(0o755)
    (programs / "python").write_text(FAKE_PYTHON)
    (programs / "python").chmod(0o755)
    (home / ".config" / "pip" / "pip.conf").write_text("")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("XDG_", "PIP_"))}
    environment = kept | {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(home), "HF_HOME": "elsewhere"}
    environment["PYTHON"] = str(programs / "python")
    command = [ROOT / ".ci" / "run", "ORDER=--reverse"]
    ended = subprocess.run(command, env=environment | variables, capture_output=True, text=True)
    return ended.stdout.splitlines(), ended.returncode


def test_ci_uses_separate_home_and_temporary_folders(tmp_path):
    lines, status = ci(tmp_path, FAKE_PIP_STATUS="1")
    arguments, home, temporary, pip_config, pip_cache, hub, *listed, last = lines
    assert last.startswith("the tests against vLLM are skipped: torch==") and "no wheel for -m pip install" in last
    assert status == 0 and arguments.startswith("test-all PYTHON=/") and arguments.endswith(" ORDER=--reverse")
    assert str(tmp_path) not in home + temporary and home != os.environ["HOME"]
    assert [line for line in listed if line and not line.endswith(":")] == [], "the folders must be empty at the start"
    assert not Path(home).exists() and not Path(temporary).exists(), "the folders must be removed at the end"
    assert (pip_config, hub) == (f"{tmp_path}/home/.config/pip/pip.conf", "no HF_HOME")
    assert pip_cache == f"{tmp_path}/home/.cache/pip"


def test_ci_fails_when_the_tests_do(tmp_path):
    assert ci(tmp_path, FAKE_STATUS="3")[1] != 0


def test_ci_tests_vllm_where_its_wheel_is_available(tmp_path):
    lines, status = ci(tmp_path)
    assert status == 0 and [line.split()[0] for line in lines if " PYTHON=" in line] == ["test-all", "test-vllm"]


def test_tests_use_separate_home_and_temporary_folders(tmp_path):
    for name in ("HOME", "TMPDIR", "HF_HOME", "TRACKIO_DIR", "WANDB_DIR", "XDG_CACHE_HOME"):
        assert Path(os.environ[name]).is_relative_to(SCRATCH), name
    assert not tmp_path.is_relative_to(SCRATCH), "tmp_path must be kept after a run, for inspection"


@pytest.mark.parametrize("is_reversed", [False, True])
def test_the_order_can_be_reversed(is_reversed):
    """The longest file comes first in both orders."""
    items = [SimpleNamespace(nodeid=f"tests/test_{name}.py::test") for name in ("a", "readme", "z")]
    conftest.pytest_collection_modifyitems(SimpleNamespace(getoption=lambda name: is_reversed), items)
    order = [item.nodeid.removeprefix("tests/test_").removesuffix(".py::test") for item in items]
    assert order == (["readme", "z", "a"] if is_reversed else ["readme", "a", "z"])
