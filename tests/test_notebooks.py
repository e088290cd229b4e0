"""Notebooks: as their script writes them, without outputs, with the tested versions; each runs from top to bottom."""

import os
import re
import subprocess
import sys
import tomllib

import nbformat
import pytest

from tests.support.paths import ROOT
from trl_grpo_tasks.task import TASKS

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# Options that make a run of a minute one of seconds. Those of a task shrink its embedded model.
SHORT = (
    "--use_cpu true --max_steps 2 --cold_start_steps 3 --cold_start_batch_size 8 --train_rows 16 --eval_rows 3 "
    "--eval_samples 2 --num_generations 4 --per_device_train_batch_size 8 --logging_steps 1 "
    "--save_steps 2 --reward_workers 0"
)
JUDGES = "--judge judges/judge --held_out_judge judges/held_out"
OF_TASK = {
    "infill": f"--tiny_width 32 --tiny_layers 1 --tiny_heads 2 {JUDGES}",
    "machine": "--tiny_width 32 --tiny_layers 1",
    "theory": "--tiny_width 32 --tiny_layers 1 --new_multiplets 1",
    "brick": "--brick_levels stack",
}


def by_name(path):
    return path.stem


def test_every_task_has_a_notebook():
    assert [path.stem for path in NOTEBOOKS] == sorted(TASKS)


def test_notebooks_are_what_their_script_writes(tmp_path):
    for name in ("pyproject.toml", "notebooks/make_notebooks.py"):
        copy = tmp_path / name
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes((ROOT / name).read_bytes())
    subprocess.run([sys.executable, str(tmp_path / "notebooks" / "make_notebooks.py")], check=True)
    for path in NOTEBOOKS:
        made = (tmp_path / "notebooks" / path.name).read_text()
        assert path.read_text() == made, "change make_notebooks.py and run it: python notebooks/make_notebooks.py"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=by_name)
def test_outputs_are_stripped(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=by_name)
def test_what_is_installed_are_the_tested_versions(path):
    tested = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    text = path.read_text()
    (install,) = re.findall(r"%pip install .*", text)
    assert "-c constraints.txt" in install
    for name, version in re.findall(r"([\w-]+)==([\w.]+)", text):
        assert tested[name] == version
    extras = re.search(r"\.\[([\w,]+)\]", install)[1].split(",")
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras) <= set(known)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=by_name)
def test_a_notebook_runs_from_top_to_bottom(path, tmp_path, judges_path, monkeypatch):
    """In a folder with the recipes, as in a clone, and two judges; a cell that raises fails the test."""
    from nbclient import NotebookClient

    (tmp_path / "recipes").symlink_to(ROOT / "trl_grpo_tasks" / "recipes")
    (tmp_path / "judges").symlink_to(judges_path)
    monkeypatch.setenv("NOTEBOOK_OPTIONS", f"{SHORT} {OF_TASK.get(path.stem, '')}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    kinds = [kind for cell in notebook.cells for output in cell.get("outputs", []) for kind in output.get("data", {})]
    assert len([kind for kind in kinds if kind in ("image/png", "image/gif", "text/html")]) >= 5
    run = tmp_path / "outputs" / f"{path.stem}_notebook"
    assert (run / "report.html").is_file()
    assert list((tmp_path / "outputs" / f"{path.stem}_notebook_eval").iterdir())
    assert len((run / "training_metrics.jsonl").read_text().splitlines()) == 2
