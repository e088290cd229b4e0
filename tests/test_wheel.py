"""The wheel is built, installed in an empty environment and used there."""

import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from trl_grpo_tasks.registry import TASKS


def done(*words, **settings):
    finished = subprocess.run([str(word) for word in words], capture_output=True, text=True, **settings)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, so that it contains no files left in the repository by an earlier build."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "trl_grpo_tasks", source / "trl_grpo_tasks", ignore=shutil.ignore_patterns("__pycache__"))
    done(sys.executable, "-m", "build", "--wheel", "--no-isolation", source)
    (built,) = (source / "dist").glob("*.whl")
    return built


def test_everything_the_package_reads_is_in_the_wheel(wheel):
    packed = set(zipfile.ZipFile(wheel).namelist())
    for path in (ROOT / "trl_grpo_tasks").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            assert path.relative_to(ROOT).as_posix() in packed, path
    assert not [name for name in packed if name.startswith(("tests", "docs", "recipes", "notebooks"))]


@pytest.mark.exhaustive
def test_the_wheel_works_in_an_empty_environment(wheel, tmp_path):
    """Nothing is downloaded: the dependencies of the wheel, but not the wheel, come from the current environment."""
    environment = tmp_path / "empty"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    done(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel)
    (packages,) = environment.glob("lib/python*/site-packages")
    # Added as a plain path, so that .pth files in it, such as that of an editable install, are ignored.
    (packages / "lent.pth").write_text(sysconfig.get_path("purelib"))
    alone = {"cwd": tmp_path, "env": {"PATH": str(environment / "bin"), "HOME": str(tmp_path)}}
    where = done(python, "-c", "import trl_grpo_tasks; print(trl_grpo_tasks.__file__)", **alone)
    assert Path(where.strip()).is_relative_to(environment)
    command = environment / "bin" / "trl-grpo-tasks"
    listed = done(command, "list", **alone).splitlines()[::2]
    assert [line.split()[0] for line in listed] == sorted(TASKS)
    done(command, "new", "my_task", **alone)
    assert "passed all checks" in done(command, "check", "my_task.py", **alone)
    short = "--steps 1 --cold_start_steps 1 --cold_start_batch_size 4 --train_rows 8 --eval_rows 2 --samples 2"
    short += " --batch_size 8 --reward_workers 0 --use_cpu true --report_to none"
    done(command, "train", "brick", "--output_dir", "outputs/demo", *short.split(), **alone)
    assert (tmp_path / "outputs" / "demo" / "report.html").is_file()
