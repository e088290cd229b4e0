"""Tests do not depend on what is left on a machine, nor on their order: `.ci/run`, isolation.py and conftest.py."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.isolation import SCRATCH
from tests.support.paths import ROOT

FAKE_MAKE = """#!/bin/sh
echo "$@"
for name in HOME TMPDIR PIP_CONFIG_FILE PIP_CACHE_DIR HF_HOME; do printenv $name || echo "no $name"; done
ls -A "$HOME" "$TMPDIR"
touch "$HOME/left" "$TMPDIR/left"
exit ${FAKE_STATUS:-0}
"""


def ci(tmp_path, **variables):
    """The words of `make`, five variables and the contents of two folders, as `.ci/run` gives them; and its status."""
    programs, home = tmp_path / "bin", tmp_path / "home"
    for path in (programs, home / ".config" / "pip"):
        path.mkdir(parents=True, exist_ok=True)
    for name in ("make", "chromium", "apt-get"):
        (programs / name).write_text(FAKE_MAKE)
        (programs / name).chmod(0o755)
    (home / ".config" / "pip" / "pip.conf").write_text("")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("XDG_", "PIP_"))}
    environment = kept | {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(home), "HF_HOME": "elsewhere"}
    environment["PYTHON"] = sys.executable
    ended = subprocess.run(
        [ROOT / ".ci" / "run", "ORDER=--reverse"], env=environment | variables, capture_output=True, text=True
    )
    return ended.stdout.splitlines(), ended.returncode


def test_ci_has_a_home_and_a_temporary_folder_of_its_own(tmp_path):
    (said, home, temporary, pip_config, pip_cache, hub, *listed), status = ci(tmp_path)
    assert status == 0 and said.startswith("test PYTHON=/") and said.endswith(" ORDER=--reverse")
    assert str(tmp_path) not in home + temporary and home != os.environ["HOME"]
    assert [line for line in listed if line and not line.endswith(":")] == [], "they are not empty"
    assert not Path(home).exists() and not Path(temporary).exists(), "they are not removed"
    assert (pip_config, hub) == (f"{tmp_path}/home/.config/pip/pip.conf", "no HF_HOME")
    assert pip_cache == f"{tmp_path}/home/.cache/pip"


def test_ci_fails_when_the_tests_do(tmp_path):
    assert ci(tmp_path, FAKE_STATUS="3")[1] != 0


def test_tests_have_a_home_and_a_temporary_folder_of_their_own(tmp_path):
    for name in ("HOME", "TMPDIR", "HF_HOME", "TRACKIO_DIR", "WANDB_DIR", "XDG_CACHE_HOME"):
        assert Path(os.environ[name]).is_relative_to(SCRATCH), name
    assert not tmp_path.is_relative_to(SCRATCH), "it is kept after a run, to look into"


def test_the_order_can_be_reversed():
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/test_ci.py", "-p", "no:cacheprovider"]
    orders = []
    for more in ([], ["--reverse"]):
        out = subprocess.run([*command, *more], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        orders.append([line for line in out.splitlines() if "::" in line])
    assert len(orders[0]) > 2 and orders[1] == orders[0][::-1]
