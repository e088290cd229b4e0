"""Notebooks: written by their script, with stored outputs of a CPU run; each runs from top to bottom."""

import base64
import importlib.util
import io
import json
import re
import subprocess
import sys
import tomllib

import nbformat
import pytest

from tests.support.paths import ROOT
from trl_grpo_tasks.registry import TASKS

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


def script(name):
    """A script of the folder notebooks, which is no package."""
    sys.path.insert(0, str(ROOT / "notebooks"))
    spec = importlib.util.spec_from_file_location(f"notebooks_{name}", ROOT / "notebooks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.remove(str(ROOT / "notebooks"))
    return module


def by_name(path):
    return path.stem


def sources(cells):
    return [(cell["id"], cell["cell_type"], "".join(cell["source"])) for cell in cells]


def code_of(path):
    cells = json.loads(path.read_text())["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def outputs_of(path):
    return [output for cell in nbformat.read(path, as_version=4).cells for output in cell.get("outputs", [])]


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


@pytest.mark.parametrize("path", NOTEBOOKS, ids=by_name)
def test_a_notebook_holds_the_outputs_of_a_whole_run(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert path.stat().st_size <= 300_000
    pictures = [one["data"]["image/png"] for one in outputs_of(path) if "image/png" in one.get("data", {})]
    assert len(pictures) >= 1
    for picture in pictures:
        assert base64.b64decode(picture).startswith(b"\x89PNG")
    (report,) = [cell.outputs for cell in code if cell.source == "show_report(OUTPUT)"]
    assert "<iframe" in report[0]["data"]["text/html"]
    printed = "".join(one["text"] for one in outputs_of(path) if one["output_type"] == "stream")
    assert "no GPU found; ALLOW_CPU is set, so training runs on the CPU" in printed
    assert f"recipe: {path.stem};" in printed and "held-out rows" in printed and "peak memory" in printed
    assert code[-1].outputs, "the last cell uses the model"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=by_name)
def test_stored_outputs_name_nothing_of_the_machine_they_were_made_on(path):
    outputs = outputs_of(path)
    assert not [one for one in outputs if one["output_type"] == "error" or one.get("name") == "stderr"]
    texts = [one["text"] for one in outputs if one["output_type"] == "stream"]
    texts += [str(one["data"][kind]) for one in outputs for kind in one.get("data", {}) if kind.startswith("text/")]
    text = re.sub(r"base64,[A-Za-z0-9+/=]+", "", "\n".join(texts))
    assert "Traceback" not in text
    assert not re.search(r"(?<![\w<])/(tmp|root|home|work|usr|opt|var|Users)/", text)
    assert not re.search(r"\bhf_[A-Za-z0-9]{10,}", text)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=by_name)
def test_the_notebook_says_of_which_run_its_outputs_are(path):
    first = "".join(json.loads(path.read_text())["cells"][0]["source"])
    stored = script("make_notebooks").TASKS[path.stem].stored
    assert f"`OPTIONS = {json.dumps(stored)}`" in first and "`ALLOW_CPU = True`" in first
    report = next(one["data"]["text/html"] for one in outputs_of(path) if "<iframe" in str(one.get("data")))
    assert f"--max_steps {stored['max_steps']}" in report


def test_the_address_of_the_repository_is_that_of_the_project_or_none():
    make = script("make_notebooks")
    set_by_host = "https://github.com/someone/something"
    for address in ("", set_by_host):
        cells = make.notebook("brick", address)["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells)
        assert f'REPOSITORY = "{address}"' in text
        assert ("Open in Colab" in text) == bool(address)
    assert "https://colab.research.google.com/github/someone/something/blob/main/notebooks/brick.ipynb" in text
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    for path in NOTEBOOKS:
        assert f'REPOSITORY = "{urls.get("Repository", "")}"' in code_of(path)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=by_name)
def test_what_is_installed_are_extras_of_the_project(path):
    extras = re.search(r'"install.py", "([\w,]+)"', code_of(path))[1].split(",")
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras) <= set(known)


@pytest.mark.parametrize(("installed", "expected"), [("2.11.1+cu126", "2.11.1+cu126"), ("2.9.1", None), (None, None)])
def test_an_installed_torch_is_kept_where_it_is_recent_enough(installed, expected, monkeypatch, capsys):
    install = script("install")
    monkeypatch.setattr(install, "_installed", lambda name: installed if name == "torch" else None)
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", install.constraints(), re.MULTILINE))
    tested = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert pins == tested | {"torch": expected or tested["torch"]}
    assert ("torch 2.11.1+cu126 is kept" in capsys.readouterr().out) == (expected is not None)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=by_name)
def test_without_a_gpu_a_notebook_stops_unless_the_cpu_is_allowed(path):
    source = next(
        "".join(cell["source"])
        for cell in json.loads(path.read_text())["cells"]
        if "torch.cuda.is_available()" in "".join(cell["source"]) and "raise RuntimeError" in "".join(cell["source"])
    )
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


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", NOTEBOOKS, ids=by_name)
def test_a_notebook_runs_from_top_to_bottom(path, tmp_path, judges_path, monkeypatch):
    """In an empty folder, with two judges; a cell that raises fails the test."""
    (tmp_path / "judges").symlink_to(judges_path)
    given = [words.split() for words in f"{SHORT} {OF_TASK.get(path.stem, '')}".split("--")[1:]]
    options = {name: values[0] if len(values) == 1 else values for name, *values in given}
    notebook = script("make_notebooks").execute(json.loads(path.read_text()), options, tmp_path, timeout=300)
    assert sources(notebook.cells) == sources(json.loads(path.read_text())["cells"])
    kinds = [kind for cell in notebook.cells for output in cell.get("outputs", []) for kind in output.get("data", {})]
    assert len([kind for kind in kinds if kind in ("image/png", "image/gif", "text/html")]) >= 5
    run = tmp_path / "outputs" / f"{path.stem}_notebook"
    assert (run / "report.html").is_file()
    assert len((run / "training_metrics.jsonl").read_text().splitlines()) == 2
    assert list((tmp_path / "generated").iterdir())
