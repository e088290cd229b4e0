"""Writes the notebooks beside it, one per task:

    python notebooks/make_notebooks.py                 # the cells; outputs of unchanged cells are kept
    python notebooks/make_notebooks.py --run brick     # one notebook, executed on this CPU, with its outputs

The texts are in cells.py. A stored run is short: the settings in `Own.stored` replace those of the recipe, and the
notebook says so.
"""

import argparse
import base64
import io
import json
import os
import re
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cells import CELLS, TASKS, WITHOUT_RECIPE

from trl_grpo_tasks.commands.recipes import expected_time

HERE = Path(__file__).parent
ROOT = HERE.parent
LARGEST = 300_000  # bytes of a stored notebook
# Widths of stored pictures: in cells, and in the report. The first that keep the notebook small enough are taken.
WIDTHS = ((480, 150), (480, 90), (420, 60), (360, 50), (300, 40), (260, 40), (220, 30))
GIF_FRAMES = 12
SMALL = 30_000  # characters of a picture in a cell that is stored as it is, such as a chart
WIDGET = "application/vnd.jupyter.widget-view+json"  # the kind of output that a progress bar is


def repository() -> str:
    """The address in pyproject.toml, or nothing where nobody has set it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project.get("urls", {}).get("Repository", "")


def notebook(task: str, address: str) -> dict[str, Any]:
    """The notebook of a task, without outputs."""
    own = TASKS[task]
    is_on_github = address.startswith("https://github.com/")
    colab = address.replace("https://github.com/", "https://colab.research.google.com/github/")
    badge = "https://colab.research.google.com/assets/colab-badge.svg"
    filled = {
        "@OWN_TEXT": own.text,
        "@OWN_CODE": own.code,
        "@TITLE": own.title,
        "@BADGE": f"[![Open in Colab]({badge})]({colab}/blob/main/notebooks/{task}.ipynb)\n\n" if is_on_github else "",
        "@ABOUT": own.about.strip(),
        "@EXTRAS": own.extras,
        "@GPU_MEMORY_SHORT": own.gpu_memory.split(" (")[0] + " (estimate)",
        "@GPU_MEMORY": own.gpu_memory,
        "@CPU_TIME": expected_time(own.cpu),
        "@CPU_MEMORY": own.cpu_memory,
        "@CPU": own.cpu,
        "@STORED": json.dumps(own.stored),
        "@CHANGES": own.changes,
        "@WITHOUT_RECIPE": "" if task == "infill" else WITHOUT_RECIPE,  # which fills masks and needs its judges
        "@REPOSITORY": address,
        "@TASK": task,
    }
    cells = []
    for number, text in enumerate(CELLS):
        for place, value in filled.items():
            text = text.replace(place, value)
        text = text.strip()
        cell: dict[str, Any] = {"cell_type": "code", "execution_count": None, "outputs": []}
        if text.startswith("#"):
            cell = {"cell_type": "markdown"}
        cells.append(cell | {"id": f"cell-{number}", "metadata": {}, "source": text.splitlines(keepends=True)})
    return {
        "cells": cells,
        "metadata": {
            "accelerator": "GPU",
            "colab": {"gpuType": "T4", "provenance": []},
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def with_stored_outputs(made: dict[str, Any], path: Path) -> dict[str, Any]:
    """`made` with the outputs that the file at `path` has for the same cells."""
    stored = json.loads(path.read_text())["cells"] if path.is_file() else []
    by_source = {(cell["id"], "".join(cell["source"])): cell for cell in stored if cell["cell_type"] == "code"}
    for cell in made["cells"]:
        earlier = by_source.get((cell["id"], "".join(cell["source"])))
        if earlier is not None:
            cell |= {"execution_count": earlier["execution_count"], "outputs": earlier["outputs"]}
    return made


def execute(made: dict[str, Any], options: dict[str, Any], folder: str | Path, timeout: int = 1800) -> Any:
    """Run a notebook in `folder` on the CPU, with `OPTIONS` and `ALLOW_CPU` set. Returns a copy with outputs and with
    the sources of `made`."""
    import nbformat
    from nbclient import NotebookClient

    executed = nbformat.from_dict(json.loads(json.dumps(made)))
    settings = next(cell for cell in executed.cells if "ALLOW_CPU = False" in "".join(cell.source))
    sources = {cell.id: cell.source for cell in executed.cells}
    for cell in executed.cells:
        cell.source = "".join(cell.source)
    settings.source += f"\nALLOW_CPU = True\nOPTIONS = {options!r}"
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "CUDA_VISIBLE_DEVICES": "",
        "IPYTHONDIR": str(Path(folder) / ".ipython"),
        "TOKENIZERS_PARALLELISM": "false",
    }
    client = NotebookClient(
        executed,
        timeout=timeout,
        resources={"metadata": {"path": str(folder)}},
        store_widget_state=False,
    )
    client.execute(env=environment)
    for cell in executed.cells:
        cell.source = sources[cell.id]
        cell.metadata = {}
    executed.metadata = nbformat.from_dict(made["metadata"])  # without the details of this machine's Python
    return executed


def is_kept(output: dict[str, Any]) -> bool:
    """Whether an output is stored. Left out: progress bars, and warnings of libraries on stderr."""
    return output.get("name") != "stderr" and WIDGET not in output.get("data", {})


def joined(outputs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The outputs with printed text that follows printed text appended to it."""
    found: list[dict[str, Any]] = []
    for one in outputs:
        if found and one["output_type"] == found[-1]["output_type"] == "stream":
            found[-1]["text"] += one["text"]
        else:
            found.append(one)
    return found


def small(output: dict[str, Any], width: int, report_width: int) -> dict[str, Any]:
    """A copy of an output with smaller pictures."""
    output = json.loads(json.dumps(output))
    data = output.get("data", {})
    for kind, most in (("image/png", width), ("image/gif", width // 2)):
        if len(data.get(kind, "")) > SMALL:
            data[kind] = smaller_picture(data[kind], most)
    if "text/html" in data:
        data["text/html"] = re.sub(
            r"(?<=data:image/png;base64,)[A-Za-z0-9+/=]+",
            lambda found: smaller_picture(found[0], report_width),
            "".join(data["text/html"]),
        )
    return output


def smaller_picture(encoded: str, width: int) -> str:
    """A PNG or GIF in base64 with at most `width` pixels per row, few colours and few frames."""
    from PIL import Image, ImageSequence

    image = Image.open(io.BytesIO(base64.b64decode(encoded)))
    frames = [frame.convert("RGB") for frame in ImageSequence.Iterator(image)]
    step = -(-len(frames) // GIF_FRAMES)
    frames = [frame.copy() for frame in frames[::step]]
    for frame in frames:
        frame.thumbnail((width, 10 * width))
    first, *others = [frame.quantize(32) for frame in frames]
    file = io.BytesIO()
    if image.format == "GIF":
        pause = image.info.get("duration", 100) * step
        first.save(file, "GIF", save_all=True, append_images=others, duration=pause, loop=0, optimize=True)
    else:
        first.save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def run(task: str) -> Any:
    """The notebook of a task with the outputs of a short run."""
    with tempfile.TemporaryDirectory() as folder:
        executed = execute(notebook(task, repository()), TASKS[task].stored, folder)
    text = as_text(executed)
    for local in (folder, str(ROOT), str(Path.home()) + "/"):
        if local in text:
            at = text.index(local)
            raise ValueError(f"{task}: an output names a folder of this machine: {text[max(0, at - 80) : at + 80]!r}")
    return with_small_outputs(executed)


def with_small_outputs(executed: Any) -> Any:
    """The notebook without progress bars and warnings, and with pictures that keep it smaller than LARGEST."""
    outputs = {cell.id: joined(one for one in cell.get("outputs", []) if is_kept(one)) for cell in executed.cells}
    for widths in WIDTHS:
        for cell in executed.cells:
            if cell.cell_type == "code":
                cell.outputs = [small(one, *widths) for one in outputs[cell.id]]
        size = len(as_text(executed).encode())
        if size <= LARGEST:
            return executed
    raise ValueError(f"{size:,} bytes with outputs; at most {LARGEST:,} are stored")


def as_text(made: dict[str, Any]) -> str:
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", nargs="*", metavar="TASK", help="execute these notebooks, or all, and store outputs")
    executed = parser.parse_args().run
    for task in TASKS:
        path = HERE / f"{task}.ipynb"
        if executed is None:
            made = with_stored_outputs(notebook(task, repository()), path)
        elif task in executed or not executed:
            made = run(task)
        else:
            continue
        path.write_text(as_text(made))


if __name__ == "__main__":
    main()
