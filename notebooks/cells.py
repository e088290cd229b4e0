"""The cells of the notebooks: those of all tasks (`CELLS`), and what each task fills into them (`TASKS`)."""

from typing import Any, NamedTuple


class Own(NamedTuple):
    """What differs between the notebooks.

    `cpu` is the recipe for machines without a GPU. `cpu_memory` was measured in the stored run, and `gpu_memory` is an
    estimate. `changes` is code that changes `settings`. `stored` are the options of the
    run whose outputs are stored. `text` and `code` are the last section, which uses the model.
    """

    title: str
    about: str
    extras: str
    cpu: str
    gpu_memory: str
    cpu_memory: str
    stored: dict[str, Any]
    text: str
    code: str
    changes: str = ""


TASKS = {
    "brick": Own(
        title="Structures of toy bricks that stand",
        about="""
The model reads a caption and writes a structure, one brick per line. A linear program decides whether the structure
stands, also under the weights that the caption names.""",
        extras="brick,report",
        cpu="brick",
        gpu_memory="about 4 GB (estimate: a step with 64 completions of 256 tokens peaked at 4.3 GB on an H200)",
        cpu_memory="less than 2 GB, without reward workers",
        stored={"max_steps": 60, "eval_rows": 40, "logging_steps": 5},
        text="""
## Use the model

Write a caption of your own. `generate` samples structures and writes each of them to `generated/`, also as an LDraw
file, which programs for toy bricks open.""",
        code="""
from trl_grpo_tasks.commands.generate import generate

caption = "a small table, world 8"
for sample in generate(task, str(OUTPUT), caption, "generated", num_samples=2, max_completion_length=longest):
    print(sample.reason or "success")
    show(task, sample.row, sample.completion)""",
    ),
    "infill": Own(
        title="Gaps of a text, filled in one step",
        about="""
A masked language model over characters fills all gaps of a text at once. The reward is the opinion of a frozen judge,
which was trained to tell original text from corrupted text. Before the run, two judges are trained: one gives the
reward, the other is only logged, as a check.""",
        extras="infill,report",
        cpu="infill",
        gpu_memory="less than 8 GB (estimate from the sizes of weights and activations)",
        cpu_memory="less than 2 GB, without reward workers",
        changes='settings["judges_folder"] = f"{OUTPUT}_judges"\n',
        stored={
            "judge_steps": 600,
            "cold_start_steps": 120,
            "train_rows": 2000,
            "max_steps": 10,
            "per_device_train_batch_size": 64,
            "eval_rows": 12,
            "logging_steps": 1,
        },
        text="""
## Use the model

Write a text of your own with a `_` for each missing character. Fills are coloured by the judge, from red to
green.""",
        code="""
from trl_grpo_tasks.commands.generate import generate

text = "she smi_ed at him and said noth_ng"
for sample in generate(task, str(OUTPUT), text, "generated", num_samples=3, max_completion_length=longest):
    print(sample.reason or "success")
    show(task, sample.row, sample.completion)""",
    ),
    "machine": Own(
        title="Machines that drive and throw",
        about="""
The model writes a machine made of blocks as JSON. A physics engine builds the machine, starts it, and measures how far
it drives or throws.""",
        extras="machine,report",
        cpu="machine",
        gpu_memory="less than 8 GB (estimate: a step with 64 completions of 512 tokens peaked at 6.3 GB on an H200)",
        cpu_memory="less than 2 GB, without reward workers",
        stored={
            "cold_start_steps": 30,
            "max_steps": 8,
            "num_generations": 8,
            "per_device_train_batch_size": 16,
            "eval_rows": 4,
            "samples": 2,
            "logging_steps": 1,
        },
        text="""
## Use the model

Sample four machines for a held-out prompt, and watch the one with the highest score move.""",
        code="""
from IPython.display import Image, display

from trl_grpo_tasks.commands.generate import generate
from trl_grpo_tasks.tasks.machine.render import animation
from trl_grpo_tasks.tasks.machine.simulator import simulate
from trl_grpo_tasks.tasks.machine.tree import ConstructionTree

samples = generate(task, str(OUTPUT), row, "generated", num_samples=4, max_completion_length=longest)
for sample in samples:
    print(sample.reason or "success")
best = max(samples, key=lambda sample: sample.score["total"] if sample.score else 0)
if best.score and best.score["valid"]:
    motion = simulate(ConstructionTree.parse(best.completion), row["trial"], record=True, to_the_end=True)
    display(Image(data=animation(motion, row["trial"])))""",
    ),
    "prompts": Own(
        title="Your prompts, with rewards that a program can check",
        about="""
The prompts of this notebook are generated: facts to be written as JSON on a GPU, sums on a CPU. With the option
`prompts_file` you give your own, and each row names its rewards: the final number, tests in a sandbox, a JSON schema,
a pattern, a length.""",
        extras="report",
        cpu="prompts",
        gpu_memory="less than 6 GB (estimate from the sizes of weights and activations)",
        cpu_memory="less than 2 GB, without reward workers",
        stored={
            "cold_start_steps": 100,
            "max_steps": 20,
            "per_device_train_batch_size": 128,
            "eval_rows": 16,
            "samples": 4,
            "logging_steps": 1,
        },
        text="""
## Use the model

Sample answers to three held-out prompts. To train on your own prompts, write them to a file, set
`OPTIONS = {"prompts_file": "my_prompts.json", "rewards": ["numeric"], "model_name_or_path": "..."}` above, and run the
notebook again:

```python
prompts = [{"prompt": "A pen costs 3 coins. What do 4 pens cost?", "answer": 12}, ...]
Path("my_prompts.json").write_text(json.dumps({"prompts": prompts}))
```""",
        code="""
from trl_grpo_tasks.commands.generate import generate

for row in task.dataset("test", 3, seed=1):
    for sample in generate(task, str(OUTPUT), row, "generated", num_samples=1, max_completion_length=longest):
        print(sample.reason or "success")
        show(task, row, sample.completion)""",
    ),
    "theory": Own(
        title="Consistent quantum field theories",
        about="""
The model continues a theory word by word: gauge groups, multiplets, couplings. Exact arithmetic decides whether its
anomalies cancel and computes the masses of its particles.""",
        extras="theory,report",
        cpu="theory",
        gpu_memory="about 6 GB (estimate: a step with 64 completions of 512 tokens peaked at 6.3 GB on an H200)",
        cpu_memory="less than 2 GB, without reward workers",
        stored={"max_steps": 30, "eval_rows": 21, "logging_steps": 5},
        text="""
## Use the model

Sample four continuations of a held-out beginning.""",
        code="""
from trl_grpo_tasks.commands.generate import generate

for sample in generate(task, str(OUTPUT), row, "generated", num_samples=4, max_completion_length=longest):
    print(f"{sample.completion}: {sample.reason or 'success'}")
show(task, row, sample.completion)""",
    ),
}

WITHOUT_RECIPE = """ Without a recipe, GRPO alone is:

```python
from trl_grpo_tasks import TaskGRPOConfig, TaskGRPOTrainer, get_task

task = get_task("@TASK")
config = TaskGRPOConfig(output_dir="outputs/my_run", max_steps=100, num_generations=8)
trainer = TaskGRPOTrainer("HuggingFaceTB/SmolLM2-135M-Instruct", args=config, task=task)
trainer.train()
```"""

# Cells in order: Markdown where a text begins with #, else code. @TASK and the like are filled in.
CELLS = [
    """
# @TITLE

@BADGE@ABOUT

| recipe | hardware | time | memory |
|---|---|---|---|
| `@TASK/colab_t4` | T4 (15 GB) or larger | not measured on a T4; the log prints the time that is left | @GPU_MEMORY |
| `@CPU` | CPU, the embedded tiny model | @CPU_TIME | @CPU_MEMORY |

Run the cells from top to bottom. The outputs that are stored in this file come from a short run on a CPU, with
`ALLOW_CPU = True` and `OPTIONS = @STORED`; they show what to expect of the cells, not of the recipe.""",
    """
## Settings""",
    """
REPOSITORY = "@REPOSITORY"  # address of the project's git repository, to be set by whoever hosts the project
ALLOW_CPU = False  # True: train the embedded tiny model on the CPU if there is no GPU
USE_DRIVE = False  # True (on Colab): keep the run on Google Drive, so that another session can resume it
OPTIONS = {}  # changes to the recipe, such as {"max_steps": 20, "learning_rate": 5e-5}
PUSH_TO = ""  # such as "your-name/@TASK-grpo": push the trained model to the Hugging Face Hub""",
    """
## Install

On Colab this takes a few minutes. The installed torch is kept if it is recent enough; the other packages get the
versions that were tested together. If the package is installed already, nothing happens.""",
    """
import importlib.util
import subprocess
import sys
from pathlib import Path

if importlib.util.find_spec("trl_grpo_tasks") is None:
    clone = Path("trl-grpo-tasks")
    if not clone.exists():
        if not REPOSITORY:
            raise RuntimeError(f"Set REPOSITORY above, or upload a clone of the repository to the folder {clone}.")
        subprocess.run(["git", "clone", "-q", REPOSITORY, clone], check=True)
    subprocess.run([sys.executable, clone / "notebooks" / "install.py", "@EXTRAS"], check=True)
    importlib.invalidate_caches()""",
    """
## GPU and recipe

A recipe is a file with all settings of a run. Without a GPU the notebook stops here, unless `ALLOW_CPU` is set.""",
    """
import os

import torch

if torch.cuda.is_available():
    gpu = torch.cuda.get_device_properties(0)
    bf16 = "with" if gpu.major >= 8 else "without"
    print(f"GPU: {gpu.name}, {gpu.total_memory / 2**30:.1f} GiB, {bf16} bf16; torch {torch.__version__}")
    name = "@TASK/colab_t4"
    memory = "@GPU_MEMORY_SHORT"
elif ALLOW_CPU:
    print(f"no GPU found; ALLOW_CPU is set, so training runs on the CPU ({os.cpu_count()} cores)")
    name = "@CPU"
    memory = "@CPU_MEMORY"
else:
    raise RuntimeError(
        "No GPU found. On Colab choose Runtime, Change runtime type, T4 GPU. To train the embedded tiny model on the "
        "CPU instead, set ALLOW_CPU = True."
    )
print(f"recipe: {name}; expected memory: {memory}")""",
    """
## Output folder

Everything that a run writes goes into one folder. On Google Drive it outlives the Colab session: to resume a run, set
`USE_DRIVE` again and run all cells.""",
    """
OUTPUT = Path("outputs/@TASK_notebook")
if USE_DRIVE:
    from google.colab import drive

    drive.mount("/content/drive")
    OUTPUT = Path("/content/drive/MyDrive/trl_grpo_tasks/@TASK_notebook")
print(f"output: {OUTPUT}")""",
    """
## The task

`load_recipe` returns the settings: `recipe.task`, `recipe.config` (a `TaskGRPOConfig`), `recipe.model` (TRL's
`ModelConfig`) and `recipe.run` (cold start and evaluations). Below: a held-out row, an answer that succeeds, and the
score of one that does not.""",
    """
from trl_grpo_tasks import load_recipe, train
from trl_grpo_tasks.report.notebook import RewardCurve, show, show_report

settings = {"output_dir": OUTPUT, "resume_from_checkpoint": "auto", "report_to": "none"}
@CHANGESrecipe = load_recipe(name, **settings | OPTIONS)
task = recipe.task
longest = recipe.config.max_completion_length
row = task.dataset("test", 1, seed=0)[0]
print(row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"])
print(f"\\nan answer that succeeds:\\n{task.gold(row)}")
show(task, row, task.gold(row))
print(f"an answer that does not: {task.score(row, task.bad(row)).reason}")""",
    """
## Train

A cold start on gold answers where the recipe has one, then GRPO, with evaluations on held-out rows before and after.
Interrupting the cell saves a checkpoint; running it again resumes from the newest one. `result.trainer` is a
`TaskGRPOTrainer`, which is TRL's `GRPOTrainer` with a task.@WITHOUT_RECIPE""",
    """
import resource

result = train(recipe, callbacks=[RewardCurve()])
on_gpu = torch.cuda.is_available()
peak = torch.cuda.max_memory_allocated() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10
print(f"peak memory: {peak / 2**30:.1f} GiB on the {'GPU' if on_gpu else 'CPU, without reward workers'}")""",
    """
## Before and after

A sample of the first and one of the last held-out row, before and after GRPO.""",
    """
for number in (0, -1):
    for evaluation in result.evaluations:
        sample = evaluation.samples[number]
        print(f"{evaluation.name}: {sample.reason or 'success'}")
        show(task, sample.row, sample.completion)""",
    """
## The report

`report.html` in the output folder: curves, samples, times, settings. It opens in any browser.""",
    """
show_report(OUTPUT)""",
    """
## Push to the Hub (optional)

With `PUSH_TO` set, the first cell asks for a token, the second uploads the model or adapter, its tokenizer, a model
card and the report.""",
    """
if PUSH_TO:
    from huggingface_hub import notebook_login

    notebook_login()""",
    """
if PUSH_TO:
    from huggingface_hub import create_repo

    from trl_grpo_tasks.commands.push import push_run

    push_run(OUTPUT, task, create_repo(PUSH_TO, exist_ok=True).repo_id)""",
    "@OWN_TEXT",
    "@OWN_CODE",
]
