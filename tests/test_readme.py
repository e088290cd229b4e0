"""What the READMEs show works: every command and piece of Python is run, shortened; every link leads somewhere."""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from tests.commands.test_recipes import HUB_DATA, save_small
from tests.support.gguf_file import write_gguf
from tests.support.paths import ROOT
from tests.tasks.infill.test_task import CORPUS
from tests.test_notebooks import OF_TASK, SHORT
from trl_grpo_tasks import Task, TaskGRPOConfig
from trl_grpo_tasks.commands import main as cli
from trl_grpo_tasks.commands import train as run
from trl_grpo_tasks.commands.check import check_task
from trl_grpo_tasks.task import TASKS

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES += [ROOT / "trl_grpo_tasks" / "tasks" / name / "README.md" for name in sorted(TASKS)]
README = PAGES[0].read_text()
NOT_RUN = {
    "source": "an environment is there already",
    "sbatch": "there is no Slurm here; test_recipes.py runs the script",
    "python -m mujoco.viewer": "opens a window",
    "python docs/make_pictures.py": "takes minutes; there is a test below",
    "python notebooks/make_notebooks.py": "test_notebooks.py runs it",
    "python -m trl_grpo_tasks.tasks.machine.make_gold": "takes minutes; test_machine_task.py looks at what it made",
}


def page_name(path):
    return path.name if path.parent == ROOT else path.parent.name


def blocks(path, language):
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(), re.DOTALL)


def commands(path):
    """The words of each command as the shell makes them, loops and variables filled in; none of them is run."""
    show = "command_not_found_handle() { printf '%s\\0' \"$@\"; printf '\\n\\0'; }\n"
    show += 'source() { command_not_found_handle source "$@"; }\n'
    script = "set -eu\n" + show + "".join(blocks(path, "bash"))
    shell = subprocess.run([shutil.which("bash"), "-c", script], env={"PATH": "/none"}, capture_output=True, text=True)
    assert shell.returncode == 0, shell.stderr
    return [command.split("\0")[:-1] for command in shell.stdout.split("\n\0")[:-1]]


# ---- commands


@pytest.fixture
def clone(tmp_path, judges_path, monkeypatch):
    """A folder like a clone of the repository, with the files that a reader of the READMEs has, and two judges."""
    for name in ("accelerate_configs", "train.py", "Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("my.json", "my_prompts.json"):
        shutil.copy(ROOT / "tests/data/word_problems.json", tmp_path / name)
        text = (tmp_path / name).read_text().replace('"question"', '"prompt"')
        (tmp_path / name).write_text(text)
    (tmp_path / "my_rewards.py").write_text(blocks(ROOT / "trl_grpo_tasks/tasks/prompts/README.md", "python")[0])
    (tmp_path / "my_texts.txt").write_text(CORPUS)
    (tmp_path / "judges").symlink_to(judges_path)
    write_gguf(tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_command_runs(page, clone, monkeypatch):
    """In the order of the page, since one uses what another made."""
    for words in commands(page):
        typed = " ".join(words)
        if any(typed.startswith(start) for start in NOT_RUN):
            continue
        assert run_here(words, clone, monkeypatch) == 0, typed


def run_here(words, clone, monkeypatch):
    if words[0] == "make":
        lines = subprocess.run(["make", "-n", *words[1:]], capture_output=True, text=True, check=True).stdout
        trained = [shlex.split(line) for line in lines.splitlines() if "train.py" in line]
        return max([train(line[line.index("train.py") + 1 :], clone) for line in trained], default=0)
    if words[:2] == ["accelerate", "launch"]:
        launcher = words[2 : words.index("train.py")]
        assert all((clone / file).is_file() for file in launcher if file.endswith(".yaml"))
        return train(words[words.index("train.py") + 1 :], clone)
    if words[:2] == ["trl-grpo-tasks", "train"]:
        return train(words[2:], clone)
    if words[0] == "trl-grpo-tasks":
        return cli.main([*words[1:], *added(words)])
    if words[:2] == ["python", "-m"]:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.run([sys.executable, *words[1:]], env=environment).returncode
    raise AssertionError(f"this test does not know how to run {' '.join(words)!r}: add it, or say in NOT_RUN why not")


def added(words):
    """Options that make another command a short one."""
    if words[1] == "eval":
        return ["--eval_rows", "2", "--max_completion_length", "16", "--use_cpu", "true"]
    if words[1] == "sweep":
        return f"{SHORT} --trials 2".split()
    if words[1] == "prepare-judge":
        return ["--judge_steps", "150", "--judge_width", "16", "--text_length", "16"]
    return []


def train(words, clone):
    """With small steps, and a small model of the same family where the Hub would be asked for one."""
    given = dict(pairwise(words))
    recipe = yaml.safe_load(Path(given["--config"]).read_text()) if "--config" in given else {}
    options = {f"--{name}": value for name, value in recipe.items()} | given
    task = options.get("--task", "prompts")
    short = f"{SHORT} {OF_TASK.get(task, '')} --max_steps 1 --max_completion_length 16".split()
    short += ["--cold_start_steps", str(min(1, int(options.get("--cold_start_steps", 0))))]
    short += ["--bf16", "false", "--fp16", "false", "--push_to_hub", "false"]
    if "--pass_k" in options:
        short += ["--num_generations", "8"]  # k must be below the size of a group
    if "/" in (name := options.get("--model_name_or_path", "")) and not Path(name).is_dir():
        small = save_small(name, clone / "small" / name)
        short += ["--model_name_or_path", str(small)]
    if options.get("--prompts_file", "").count("/") == 1:
        short += ["--prompts_file", HUB_DATA["prompts_file"]]
    if "--output_dir" not in options:  # several commands of a page train the same task
        short += ["--output_dir", f"outputs/{len(list(clone.glob('outputs/*')))}"]
    return run.main([*words, *short])


@pytest.mark.slow
def test_the_pictures_can_be_made_again(clone, tmp_path, monkeypatch):
    """One seed, a few steps."""
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("make_pictures", ROOT / "docs" / "make_pictures.py")
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    monkeypatch.setattr(pictures, "IMAGES", tmp_path / "images")
    monkeypatch.setattr(pictures, "SEEDS", (0,))
    pictures.constraints(steps=8)
    for task in ("brick", "machine", "theory", "infill"):
        words = f"--config {ROOT}/trl_grpo_tasks/recipes/{task}/tiny_cpu.yaml --output_dir {tmp_path}/{task}_tiny"
        assert run.main([*words.split(), *SHORT.split(), *OF_TASK[task].split()]) == 0
    pictures.strip(str(tmp_path / "brick_tiny"), columns=2)
    pictures.tasks(str(tmp_path))
    made = {file.name: file.stat().st_size for file in (tmp_path / "images").iterdir()}
    kept = {file.name: file.stat().st_size for file in (ROOT / "docs" / "images").iterdir()}
    assert made.keys() == kept.keys() and max(kept.values()) < 300_000


# ---- Python


NEEDED = """
from tests.support.toy import ToyTask
from trl_grpo_tasks import Task
from trl_grpo_tasks.constraints import ChoiceTreeConstraint, Grammar, GrammarConstraint, OneSpelling
from trl_grpo_tasks.models.tiny import make_tokenizer
from trl_grpo_tasks.tasks.machine.data import gold_machines
tokenizer = make_tokenizer(list("-0123456789"), 64)
root, choices = "", lambda node: [("1", None)]
constraint = GrammarConstraint(tokenizer, Grammar.ebnf('root ::= "1"'))
text = gold_machines()["car"]["small"][0]["machine"]
"""


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_piece_of_python_runs(page):
    namespace = {}
    exec(NEEDED, namespace)
    for code in blocks(page, "python"):
        exec(code, namespace)


def test_the_task_in_the_readme_keeps_the_contract():
    (code,) = [block for block in blocks(PAGES[0], "python") if "class Shout" in block]
    namespace = {"Task": Task}
    exec(code, namespace)
    check_task(namespace["Shout"](), size=3)
    assert len(code.splitlines()) <= 25


# ---- words


@pytest.mark.parametrize("name", sorted(TaskGRPOConfig.__annotations__))
def test_help_says_what_an_option_does(name):
    help_text = TaskGRPOConfig.__dataclass_fields__[name].metadata["help"]
    assert len(help_text) > 20 and help_text.endswith(".")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=page_name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert link.startswith("http") or (page.parent / link).exists(), link


def test_options_that_the_readme_names_exist():
    from trl import ModelConfig

    from trl_grpo_tasks.commands.arguments import RunArguments, make_parser
    from trl_grpo_tasks.task import find_task_class

    known = {"--config", "--text", "--input", "--num_samples", "--num_processes", "--config_file", "--search"}
    for name in TASKS:
        parser = make_parser(RunArguments, TaskGRPOConfig, ModelConfig, find_task_class(name).Options)
        known |= {option for action in parser._actions for option in action.option_strings}
    known |= {"--prompt_lengths", "--model", "--length"}  # of benchmarks
    assert set(re.findall(r"(?<![\w-])--[a-z]\w+", README)) <= known


def test_version_and_address_are_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == project["version"] and citation["license"] == project["license"] == "Apache-2.0"
    assert citation["repository-code"] == project["urls"]["Repository"]
    assert project["version"] in (ROOT / "CHANGELOG.md").read_text()
    assert "Apache License" in (ROOT / "LICENSE").read_text()
