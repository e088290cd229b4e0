"""Notebooks: written by their script, with stored outputs of a CPU run; one runs from top to bottom, and the code of
each that differs is run on its own."""

import base64
import importlib.util
import io
import json
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from types import SimpleNamespace

import nbformat
import pytest

from tests.support.paths import ROOT
from trl_grpo_tasks.commands import generate as generate_module
from trl_grpo_tasks.evaluation.samples import Sample
from trl_grpo_tasks.registry import TASKS, get_task
from trl_grpo_tasks.report import notebook as shown_module

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# Options that make a run of a minute one of seconds. Those of a task shrink its embedded model.
SHORT = (
    "--use_cpu true --max_steps 2 --cold_start_steps 3 --cold_start_batch_size 8 --train_rows 16 --eval_rows 3 "
    "--samples 2 --num_generations 4 --per_device_train_batch_size 8 --logging_steps 1 "
    "--save_steps 2 --reward_workers 0"
)
JUDGES = "--judge judges/judge --held_out_judge judges/held_out"
OF_TASK = {
    "infill": f"--tiny_width 32 --tiny_layers 1 --tiny_heads 2 {JUDGES}",
    "machine": "--tiny_width 32 --tiny_layers 1",
    "theory": "--tiny_width 32 --tiny_layers 1 --new_multiplets 2",
    "brick": "--brick_levels stack small carry",
}
of_each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def script(name):
    """A script of the folder notebooks, which is no package."""
    sys.path.insert(0, str(ROOT / "notebooks"))
    spec = importlib.util.spec_from_file_location(f"notebooks_{name}", ROOT / "notebooks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.remove(str(ROOT / "notebooks"))
    return module


def code_cells(path):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def outputs_of(path):
    return [output for cell in code_cells(path) for output in cell.outputs]


def test_every_task_has_a_notebook():
    assert [path.stem for path in NOTEBOOKS] == sorted(TASKS)


def test_notebooks_are_what_their_script_writes(tmp_path):
    scripts = ("make_notebooks.py", "cells.py")
    for name in ("pyproject.toml", *(f"notebooks/{name}" for name in (*scripts, *(path.name for path in NOTEBOOKS)))):
        copy = tmp_path / name
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes((ROOT / name).read_bytes())
    subprocess.run([sys.executable, str(tmp_path / "notebooks" / "make_notebooks.py")], check=True)
    for path in NOTEBOOKS:
        made = (tmp_path / "notebooks" / path.name).read_text()  # with outputs where the cell has not changed
        assert path.read_text() == made, (
            f"python notebooks/make_notebooks.py --run {path.stem} writes the notebook and its outputs"
        )


@of_each
def test_a_notebook_holds_the_outputs_of_a_whole_run_and_names_nothing_of_its_machine(path):
    notebook, code, outputs = nbformat.read(path, as_version=4), code_cells(path), outputs_of(path)
    nbformat.validate(notebook)
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert path.stat().st_size <= 300_000
    pictures = [one["data"]["image/png"] for one in outputs if "image/png" in one.get("data", {})]
    assert pictures and all(base64.b64decode(picture).startswith(b"\x89PNG") for picture in pictures)
    (report,) = [cell.outputs[0]["data"]["text/html"] for cell in code if cell.source == "show_report(OUTPUT)"]
    stored = script("make_notebooks").TASKS[path.stem].stored
    assert "<iframe" in report and f"--max_steps {stored['max_steps']}" in report
    first = notebook.cells[0].source
    assert f"`OPTIONS = {json.dumps(stored)}`" in first and "`ALLOW_CPU = True`" in first
    printed = "".join(one["text"] for one in outputs if one["output_type"] == "stream")
    assert "no GPU found; ALLOW_CPU is set, so training runs on the CPU" in printed
    assert f"recipe: {path.stem};" in printed and "held-out rows" in printed and "peak memory" in printed
    assert code[-1].outputs, "the last cell uses the model"
    assert not [one for one in outputs if one["output_type"] == "error" or one.get("name") == "stderr"]
    texts = [str(one["data"][kind]) for one in outputs for kind in one.get("data", {}) if kind.startswith("text/")]
    text = re.sub(r"base64,[A-Za-z0-9+/=]+", "", "\n".join([printed, *texts]))
    assert "Traceback" not in text and not re.search(r"\bhf_[A-Za-z0-9]{10,}", text)
    assert not re.search(r"(?<![\w<])/(tmp|root|home|work|usr|opt|var|Users)/", text)


def test_the_address_of_the_repository_is_that_of_the_project_or_none():
    make = script("make_notebooks")
    for address in ("", "https://github.com/someone/something"):
        text = "\n".join("".join(cell["source"]) for cell in make.notebook("brick", address)["cells"])
        assert f'REPOSITORY = "{address}"' in text
        assert ("Open in Colab" in text) == bool(address)
    assert "https://colab.research.google.com/github/someone/something/blob/main/notebooks/brick.ipynb" in text
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for path in NOTEBOOKS:
        code = "\n".join(cell.source for cell in code_cells(path))
        assert f'REPOSITORY = "{project.get("urls", {}).get("Repository", "")}"' in code
        extras = re.search(r'"install.py", "([\w,]+)"', code)[1].split(",")
        assert set(extras) <= set(project["optional-dependencies"])


@pytest.mark.parametrize(("installed", "expected"), [("2.11.1+cu126", "2.11.1+cu126"), ("2.9.1", None), (None, None)])
def test_an_installed_torch_is_kept_where_it_is_recent_enough(installed, expected, monkeypatch, capsys):
    install = script("install")
    monkeypatch.setattr(install, "_installed", lambda name: installed if name == "torch" else None)
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", install.constraints(), re.MULTILINE))
    tested = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert pins == tested | {"torch": expected or tested["torch"]}
    assert ("torch 2.11.1+cu126 is kept" in capsys.readouterr().out) == (expected is not None)


@of_each
def test_without_a_gpu_a_notebook_stops_unless_the_cpu_is_allowed(path):
    (source,) = [cell.source for cell in code_cells(path) if "raise RuntimeError(\n" in cell.source]
    source = source.replace("torch.cuda.is_available()", "False")
    with pytest.raises(RuntimeError, match=r"No GPU found.*set ALLOW_CPU = True"):
        exec(source, {"ALLOW_CPU": False})
    names = {"ALLOW_CPU": True}
    exec(source, names)
    assert names["name"] == path.stem  # the plain task: its defaults for the embedded model


def test_pictures_are_made_small():
    from PIL import Image

    make, file = script("make_notebooks"), io.BytesIO()
    frames = [Image.effect_noise((900, 300), 50 + number).convert("P") for number in range(40)]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], duration=100)
    small = Image.open(io.BytesIO(base64.b64decode(make.smaller_picture(base64.b64encode(file.getvalue()), 480))))
    assert small.size == (480, 160) and small.n_frames <= make.GIF_FRAMES


@of_each
def test_the_last_cell_uses_the_model_of_the_task(path, monkeypatch):
    """With gold answers instead of a model's."""
    task = get_task(path.stem)
    row = task.dataset("test", 1, 0)[0]
    score = task.score(row, task.gold(row)).as_dict()
    sample, asked, seen = Sample(row, task.gold(row), 1, score), [], []
    monkeypatch.setattr(generate_module, "generate", lambda *words, **more: asked.append(words[:2]) or [sample] * 2)
    monkeypatch.setattr("IPython.display.display", seen.append)
    worse = replace(sample, score=None)
    names = {"task": task, "row": row, "OUTPUT": ROOT, "longest": 9, "show": shown_module.show}
    exec(code_cells(path)[-1].source, names | {"result": SimpleNamespace(evaluations=[
        SimpleNamespace(name="GRPO", samples=[sample, worse])])})  # fmt: skip
    assert asked[0] == (task, str(ROOT)) and seen


@pytest.mark.exhaustive
def test_a_notebook_runs_from_top_to_bottom(tmp_path):
    """In an empty folder; a cell that raises fails the test. All notebooks have the same cells but for the last."""
    (path,) = [path for path in NOTEBOOKS if path.stem == "brick"]
    given = [words.split() for words in f"{SHORT} {OF_TASK[path.stem]}".split("--")[1:]]
    options = {name: values[0] if len(values) == 1 else values for name, *values in given}
    written = json.loads(path.read_text())
    notebook = script("make_notebooks").execute(written, options, tmp_path, timeout=300)
    assert [(cell["id"], cell["source"]) for cell in notebook.cells] == [
        (cell["id"], cell["source"]) for cell in written["cells"]
    ]
    kinds = [kind for cell in notebook.cells for output in cell.get("outputs", []) for kind in output.get("data", {})]
    assert len([kind for kind in kinds if kind in ("image/png", "image/gif", "text/html")]) >= 5
    run = tmp_path / "outputs" / "brick_notebook"
    assert (run / "report.html").is_file()
    assert len((run / "training_metrics.jsonl").read_text().splitlines()) == 2
    assert list((tmp_path / "generated").iterdir())
