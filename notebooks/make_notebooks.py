"""Writes the notebooks beside it, one a task: python notebooks/make_notebooks.py

They differ in a few sentences and in one cell; what they share is written once, here. No outputs are kept in them.
NOTEBOOK_OPTIONS, a variable of the environment, adds options to their run: with it tests make it a short one.
"""

import json
import tomllib
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
REPOSITORY = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]["urls"]["Repository"]


class Own(NamedTuple):
    """What is a task's own in its notebook; `text` and `code` are about something to do with the trained model."""

    title: str
    about: str
    extras: str
    text: str
    code: str


TASKS = {
    "brick": Own(
        title="Structures of toy bricks that stand",
        about="""
The model gets a caption and writes a structure, one brick a line. A linear program finds out whether it stands, also
under the weights that the caption names.""",
        extras="brick,report",
        text="""
## A structure of your own

A caption that is not in the data. The folder `generated` then also holds LDraw files, which programs for toy bricks
open.""",
        code="""
words = ["--text", "a small table, world 8", "--num_samples", "3"]
assert main(["generate", "--task", "brick", "--model_name_or_path", run, *words]) == 0
for picture in sorted(Path("generated").glob("*.png")):
    display(Image(filename=picture, width=300))""",
    ),
    "infill": Own(
        title="Gaps of a text, filled in one step",
        about="""
A masked language model over characters fills all gaps of a text at once. A frozen judge, which learned to tell real
from corrupted text, says how real the result looks. Two judges are trained first: one gives the reward, the other is
only watched.""",
        extras="infill,report",
        text="""
## Before and after, by the judge

The first three held-out texts: the original, before GRPO, after GRPO. Fills go from red to green by what the judge
says of the original with this fill alone. What both judges say of the originals, on average, is printed.""",
        code="""
from trl_grpo_tasks.tasks.infill.show import main as show_texts

assert show_texts([run, "--output", "before_and_after.png", "--rows", "3"]) == 0
display(Image(filename="before_and_after.png"))""",
    ),
    "machine": Own(
        title="Machines that drive and throw",
        about="""
The model writes a machine of blocks as JSON. A physics engine builds it, lets it go, and measures how far it drives or
throws.""",
        extras="machine,report",
        text="""
## The best machine, moving

Of the held-out samples after training, the one with the highest score.""",
        code="""
from trl_grpo_tasks.tasks.machine.show import main as show_machine

judged = [sample for sample in after["samples"] if sample["score"]]
best = max(judged, key=lambda sample: sample["score"]["total"])
Path("best.txt").write_text(best["completion"])
if show_machine(["best.txt", "--trial", best["row"]["trial"], "--gif", "best.gif"]) == 0:
    display(Image(filename="best.gif"))""",
    ),
    "prompts": Own(
        title="Your prompts, with rewards that a program can check",
        about="""
Here the prompts are generated: facts to be written as JSON on a GPU, sums on a CPU. With `--prompts_file` they are
yours, and each row chooses its rewards: the final number, tests in a sandbox, a schema, a pattern, a length.""",
        extras="report",
        text="""
## Prompts of your own

A file with prompts and the rewards of each. `check` proves, with no model, that it can be trained on. Then add
`"--prompts_file", "my_prompts.json"` to `options` above, and `"--model_name_or_path"` with a pretrained model.""",
        code="""
prices = [(price, count) for price in range(2, 12) for count in range(3, 9)]
prompts = [{"prompt": f"A pen costs {p} coins. What do {n} pens cost?", "answer": p * n} for p, n in prices]
Path("my_prompts.json").write_text(json.dumps({"prompts": prompts}))
assert main(["check", "--task", "prompts", "--prompts_file", "my_prompts.json", "--rewards", "numeric"]) == 0""",
    ),
    "theory": Own(
        title="Consistent quantum field theories",
        about="""
The model continues a theory, word by word: gauge groups, multiplets, couplings. Exact arithmetic says whether its
anomalies cancel and what masses its particles have.""",
        extras="theory,report",
        text="""
## What was found

How many of the theories succeed and differ, and which of them have a name, beside a random walk of the grammar.""",
        code="""
from trl_grpo_tasks.tasks.theory import survey

survey.main(["--results", run])""",
    ),
}

# Cells in order: Markdown where a text begins with #, else code. @TASK and the like are filled in.
CELLS = [
    """
# @TITLE

[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](@COLAB)

@ABOUT

Choose a GPU (Runtime, Change runtime type, T4). Without one the embedded tiny model is trained, on the CPU.""",
    """
from pathlib import Path

if not Path("recipes").exists():  # on Colab; in a clone of the repository everything is there
    !git clone -q @REPOSITORY
    %cd @FOLDER
    %pip install -q -c constraints.txt -e ".[@EXTRAS]\"""",
    """
import json
import os

import torch
from IPython.display import HTML, Image, display

from trl_grpo_tasks.arguments import parse
from trl_grpo_tasks.commands.main import main

recipe = "recipes/@TASK/" + ("colab_t4.yaml" if torch.cuda.is_available() else "tiny_cpu.yaml")
run = "outputs/@TASK_notebook"
options = ["--config", recipe, "--output_dir", run, *os.environ.get("NOTEBOOK_OPTIONS", "").split()]
task = parse(options)[0]""",
    """
## The task

A held-out row, an answer that succeeds, and what is said of one that does not.""",
    """
def show(row, completion):
    picture = task.render(row, completion)
    display(Image(data=picture, width=400) if isinstance(picture, bytes) else HTML(picture))


row = task.dataset("test", 1, 0)[0]
print(row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"])
print(task.gold(row))
show(row, task.gold(row))
print("a bad answer:", task.score(row, task.bad(row)).reason)""",
    """
## Train

A warm-up on gold answers where the recipe has one, then GRPO; evaluations on held-out rows before and after. If the
run was stopped, `main(["train", *options, "--resume_from_checkpoint"])` continues it.""",
    """
assert main(["train", *options]) == 0""",
    """
## Look

Three held-out rows before and after. `outputs/@TASK_notebook/report.html` has more of them, and curves: download it
and open it in a browser.""",
    """
before, after = json.loads(Path(run, "results.json").read_text())["evaluations"]
one_of_each_row = {json.dumps(sample["row"]): number for number, sample in enumerate(before["samples"])}
for number in list(one_of_each_row.values())[:3]:
    for evaluation in (before, after):
        sample = evaluation["samples"][number]
        print(f"{evaluation['name']}: {sample['reason'] or 'success'}")
        show(sample["row"], sample["completion"])""",
    """
## Evaluate

The trained model once more, with another seed: how far can the table above be trusted? More rows and samples:
`"--eval_rows", "200", "--eval_samples", "16"`.""",
    """
assert main(["eval", *options, "--model_name_or_path", run, "--output_dir", run + "_eval", "--seed", "1"]) == 0""",
    "@OWN_TEXT",
    "@OWN_CODE",
    """
## Push (optional)

The model or adapter, its tokenizer, a model card and the report, to the Hugging Face Hub.""",
    """
push_to = ""  # such as "your-name/@TASK-grpo"
if push_to:
    from huggingface_hub import notebook_login

    notebook_login()
    main(["train", *options, "--resume_from_checkpoint", "--push_to_hub", "true", "--hub_model_id", push_to])""",
]


def notebook(task: str) -> dict:
    own = TASKS[task]
    address = REPOSITORY.replace("https://github.com/", "https://colab.research.google.com/github/")
    filled = {
        "@OWN_TEXT": own.text,
        "@OWN_CODE": own.code,
        "@TITLE": own.title,
        "@ABOUT": own.about.strip(),
        "@EXTRAS": own.extras,
        "@COLAB": f"{address}/blob/main/notebooks/{task}.ipynb",
        "@REPOSITORY": REPOSITORY,
        "@FOLDER": REPOSITORY.rsplit("/", 1)[1],
        "@TASK": task,
    }
    cells = []
    for number, text in enumerate(CELLS):
        for place, value in filled.items():
            text = text.replace(place, value)
        text = text.strip()
        cell = {"cell_type": "code", "execution_count": None, "outputs": []}
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


if __name__ == "__main__":
    for task in TASKS:
        (HERE / f"{task}.ipynb").write_text(json.dumps(notebook(task), indent=1, ensure_ascii=False) + "\n")
