"""What the READMEs and docs/ show works: every command and `python` block is run, shortened; every link leads
somewhere. Training is prepared only, unless the page uses the run. Blocks marked `py` are fragments, not run."""

import importlib.util
import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from PIL import Image

from tests.commands.test_recipes import HUB_DATA, save_small
from tests.support.chat_server import ChatServer
from tests.support.exhaustive import exhaustive_but
from tests.support.gguf_file import write_gguf
from tests.support.paths import ROOT
from tests.support.run_folders import edited, evaluation, write_run
from tests.tasks.infill.test_task import CORPUS
from tests.test_notebooks import OF_TASK, SHORT
from trl_grpo_tasks import TaskGRPOConfig
from trl_grpo_tasks.adapters import openenv, reasoning_gym, trl_environment, verifiers
from trl_grpo_tasks.commands import main as cli
from trl_grpo_tasks.commands import train as run
from trl_grpo_tasks.commands.arguments import parse
from trl_grpo_tasks.commands.check import check_task
from trl_grpo_tasks.commands.command_words import ALIASES
from trl_grpo_tasks.commands.plan import prepare
from trl_grpo_tasks.commands.recipes import find_recipe
from trl_grpo_tasks.registry import TASKS, get_task
from trl_grpo_tasks.tasks.brick.drawing import render

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES += [ROOT / "trl_grpo_tasks" / "tasks" / name / "README.md" for name in sorted(TASKS)]
DOCS = ROOT / "docs"
PAGES += sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts)
NOT_RUN = {
    "source": "an environment is there already",
    "pip": "needs a network; test_wheel.py installs the wheel",
    "python -m build": "test_wheel.py builds the wheel",
    "sbatch": "there is no Slurm here; test_recipes.py runs the script",
    "trl-grpo-tasks serve": "needs vLLM; tests/vllm starts a server",
    "trl-grpo-tasks solve outputs/demo --vllm_server_url": "needs a server; test_server_sampler.py has a stand-in",
    "trl-grpo-tasks play outputs": "serves a page until it is stopped; tests/playground opens one",
    "python -m mujoco.viewer": "opens a window",
    "python docs/make_pictures.py": "takes minutes; there is a test below",
    "python notebooks/make_notebooks.py": "test_notebooks.py runs it",
    "trl-grpo-tasks tool machine make-gold": "takes minutes; tests of task machine look at what it made",
}


def page_name(path):
    if path.name == "README.md" and path.parent != ROOT:
        return path.parent.name
    return path.relative_to(ROOT).as_posix()


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


def saved_files(path):
    """Files that a page tells the reader to save: name -> text; the last one where it changes."""
    text = path.read_text()
    return dict(re.findall(r"[Ss]ave this as\s+`(\w+\.\w+)`.*?```(?:python|json|yaml)\n(.*?)```", text, re.DOTALL))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, judges_path):
    """A folder like a clone of the repository, with the files that a reader has, and two judges. All pages share it,
    so that a command of several pages is run once."""
    folder = tmp_path_factory.mktemp("clone")
    linked = (
        "accelerate_configs",
        "train.py",
        "Makefile",
        "pyproject.toml",
        "constraints.txt",
        "constraints-vllm.txt",
    )
    for name in linked:
        (folder / name).symlink_to(ROOT / name)
    for name in ("my.json", "my_prompts.json"):
        text = (ROOT / "tests/data/word_problems.json").read_text().replace('"question"', '"prompt"')
        (folder / name).write_text(text)
    (folder / "my_rewards.py").write_text("def polite(row, completion):\n    return float('please' in completion)\n")
    guesses = [{"prompt": f"Guess a number up to {n + 3}.", "target": n} for n in range(20)]
    (folder / "guesses.json").write_text(json.dumps(guesses))
    (folder / "my_texts.txt").write_text(CORPUS)
    (folder / "chair.ldr").write_text("1 4 20 -24 40 0 0 1 0 1 0 -1 0 0 3001.dat\n")
    (folder / "answers.jsonl").write_text(json.dumps({"bricks": "2x4 (0,0,0)\n2x4 (0,0,1)"}))
    chats = [{"prompt": [{"role": "user", "content": text}]} for text in ("one", "two", "three")]
    (folder / "my_chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    row = {"prompt": "2 + 2 =", "answer": 4, "rewards": ["numeric"]}
    (folder / "completions.jsonl").write_text(json.dumps({"row": row, "completion": "4"}))
    (folder / "judges").symlink_to(judges_path)
    write_gguf(folder / "SmolLM2-135M-Instruct.Q4_1.gguf")
    return folder


@pytest.fixture
def clone(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    monkeypatch.setenv("JUDGE_KEY", "the-key-of-your-provider")  # the pages export it
    return folder


@pytest.fixture(scope="module")
def reader(folder):
    return Reader(folder)


@pytest.fixture
def plain_bricks(monkeypatch):
    """Empty pictures of bricks: painting them takes most of the time of a short run."""
    monkeypatch.setattr(render, "_painted", lambda scene, camera, colours: Image.new("RGB", camera.size))


@pytest.mark.parametrize("page", exhaustive_but(PAGES[:1], PAGES), ids=page_name)
def test_every_command_runs(page, clone, reader, plain_bricks):
    """In the order of the page, since one uses what another made."""
    for name, text in saved_files(page).items():
        (clone / name).write_text(text)
    all_words = commands(page)
    for number, words in enumerate(all_words, 1):
        typed = " ".join(words)
        if "--use_vllm" in words:  # tests/vllm trains with vLLM; here its options are read
            start = words.index("train.py" if "train.py" in words else "train")
            task, _, args, _ = parse([*words[start + 1 :], "--use_cpu", "--bf16", "false"])
            assert task.name and args.use_vllm
        elif not any(typed.startswith(start) for start in NOT_RUN):
            unsolved = 1 if words[:2] == ["trl-grpo-tasks", "solve"] else 0  # a model of one step solves nothing
            assert reader.run(words, all_words[number:]) in (0, unsolved), typed


class Reader:
    """Runs the commands of all pages in one folder, shortened. `later` are the commands that follow on the page."""

    def __init__(self, folder):
        self._folder = folder
        self._trained = {}  # output folder -> the command that made it
        self._prepared = itertools.count()

    def run(self, words, later):
        if words[0] == "make":
            lines = subprocess.run(["make", "-n", *words[1:]], capture_output=True, text=True, check=True).stdout
            trained = [shlex.split(line) for line in lines.splitlines() if "train.py" in line]
            return max([self._train(line[line.index("train.py") + 1 :], later) for line in trained], default=0)
        if words[:2] == ["accelerate", "launch"]:
            launcher = words[2 : words.index("train.py")]
            assert all((self._folder / file).is_file() for file in launcher if file.endswith(".yaml"))
            return self._train(words[words.index("train.py") + 1 :], later)
        if words[:2] == ["trl-grpo-tasks", "train"]:
            return self._train(words[2:], later)
        if words[:2] == ["trl-grpo-tasks", "new"]:
            (self._folder / f"{words[2]}.py").unlink(missing_ok=True)
        assert words[0] == "trl-grpo-tasks", f"how to run {' '.join(words)!r}: add it here, or say in NOT_RUN why not"
        return cli.main([*words[1:], *added(words)])

    def _train(self, words, later):
        """With small steps, and a small model of the same family where the Hub would be asked for one."""
        words = [ALIASES.get(word, word) for word in words]
        given = dict(pairwise(words))
        recipe = yaml.safe_load(find_recipe(given["--config"]).read_text()) if "--config" in given else {}
        options = {f"--{name}": value for name, value in recipe.items()} | given
        if not words[0].startswith("--"):
            options["--task"] = words[0]
        task = options["--task"]
        output, resumes = options.get("--output_dir", f"outputs/{Path(task).stem}"), words[-1].startswith("--resume")
        is_used = resumes or any(output in word for line in later for word in line)
        if not is_used:
            output = f"prepared/{next(self._prepared)}"
        elif self._trained.get(output) == words:
            return 0  # an earlier page had the same command
        elif not resumes:
            shutil.rmtree(self._folder / output, ignore_errors=True)
        length = 128 if task == "prompts" else 16  # the shortest answer under a JSON schema needs more than 16
        short = f"{SHORT} {OF_TASK.get(task, '')} --max_steps 1 --max_completion_length {length}".split()
        is_default = not {"--model_name_or_path", "--prompts_file"} & options.keys()
        has_cold_start = int(options.get("--cold_start_steps", is_default)) > 0
        short += ["--cold_start_steps", str(int(has_cold_start))]
        short += ["--bf16", "false", "--fp16", "false", "--dtype", "float32", "--push_to_hub", "false"]
        short += ["--output_dir", output]
        if "--pass_k" in options:
            short += ["--num_generations", "8"]  # k must be below the size of a group
        if "/" in (name := options.get("--model_name_or_path", "")) and not Path(name).is_dir():
            short += ["--model_name_or_path", str(save_small(name, self._folder / "small" / name))]
        if options.get("--prompts_file", "").count("/") == 1:
            short += ["--prompts_file", HUB_DATA["prompts_file"]]
        with ChatServer(grades_for) as server:
            short += ["--judge_url", server.url] if "--judge_url" in options else []
            if not is_used:
                prepare(*parse([*words, *short]))
                return 0
            self._trained[output] = words
            return run.main([*words, *short])


def grades_for(request):
    """The reply of a judge that finds everything acceptable."""
    criteria = re.findall(r'^- "(\w+)":', request["messages"][0]["content"], re.MULTILINE)
    return json.dumps({"reason": "", "scores": dict.fromkeys(criteria, 3)})


def added(words):
    """Options that make another command a short one. A run has a length of its own."""
    is_run = any(Path(word, "settings.json").is_file() for word in words[2:])
    length = [] if is_run else ["--max_completion_length", "16"]
    if words[1] == "eval":
        return ["--eval_rows", "2", "--samples", "2", "--use_cpu", "true", *length]
    if words[1] == "solve":
        return ["--samples", "2", *length]
    if words[1] == "tool" and words[3] == "prepare-judge":
        return ["--judge_steps", "150", "--judge_width", "16", "--text_length", "16"]
    return []


@pytest.mark.exhaustive
def test_the_pictures_can_be_made_again(tmp_path, judges_path, monkeypatch):
    """One seed, a few steps; gold answers instead of those of trained models."""
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("make_pictures", ROOT / "docs" / "make_pictures.py")
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    monkeypatch.setattr(pictures, "IMAGES", tmp_path / "images")
    monkeypatch.setattr(pictures, "SEEDS", (0,))
    pictures.constraints(steps=8)
    judges = {"judge": str(judges_path / "judge"), "held_out_judge": str(judges_path / "held_out"), "text_length": 128}
    for name in ("brick", "machine", "theory", "infill"):
        options = judges if name == "infill" else {}
        task = get_task(name, options)
        rows = task.dataset("test", 4, 0)
        golds = [evaluation(when, task, [(task.gold(row),) for row in rows], rows) for when in ("before", "GRPO")]
        for one in golds:
            one.metrics.setdefault("judge", 0.5)
        folder = write_run(tmp_path / name, evaluations=golds)
        with edited(folder / "settings.json") as settings:
            settings |= {"task": {"name": name, "options": options}, "run": {"task": name}}
    pictures.strip(str(tmp_path / "brick"), columns=2)
    pictures.tasks(str(tmp_path))
    made = {file.name: file.stat().st_size for file in (tmp_path / "images").iterdir()}
    kept = {file.name: file.stat().st_size for file in (ROOT / "docs" / "images").iterdir()}
    pictures_kept = {name for name in kept if name.endswith(".png")} - {"playground.png"}  # which needs a browser
    assert made.keys() == pictures_kept and max(kept.values()) < 300_000


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
text = gold_machines()["car"][0].machine
"""


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_piece_of_python_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write models
    namespace = {}
    exec(NEEDED, namespace)
    for code in blocks(page, "python"):
        exec(code, namespace)


def test_the_task_in_the_readme_keeps_the_contract():
    (code,) = saved_files(PAGES[0]).values()
    namespace = {}
    exec(code, namespace)
    check_task(namespace["Shout"](), size=3)
    assert len(code.splitlines()) <= 25


# ---- words


@pytest.mark.parametrize("name", sorted(itertools.chain(*TaskGRPOConfig.own_options().values())))
def test_help_says_what_an_option_does(name):
    help_text = TaskGRPOConfig.__dataclass_fields__[name].metadata["help"]
    assert len(help_text) > 20 and help_text.endswith(".")


RAW_RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.md"))


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md", *RAW_RESULTS], ids=page_name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert link.startswith("http") or (page.parent / link).exists(), link


@pytest.fixture(scope="module")
def known_options():
    """Those in the help of commands and tools, as the reference shows it, of benchmarks, of training with each kind of
    task, and of other programs (the first words of options)."""
    from trl import ModelConfig

    from trl_grpo_tasks.commands.arguments import RunArguments, make_parser
    from trl_grpo_tasks.registry import find_task_class

    # Of accelerate, build, pip (--no-deps), vLLM, ray start, pytest, make_notebooks.py; and of earlier versions.
    other = "num_processes config_file wheel no tensor gpu head num address block reverse run num_samples "
    other += "input to trial gif png xml mjcf bsg json results rows output held_out"  # of tools of tasks
    known = {"--config", "--version", *ALIASES, *(f"--{name}" for name in other.split())}
    known |= set(re.findall(r"--[a-z]\w+", (DOCS / "reference" / "commands.txt").read_text()))
    for benchmark in (ROOT / "benchmarks").glob("*.py"):
        known |= set(re.findall(r'add_argument\(\s*"(--\w+)"', benchmark.read_text()))
    for name in (*TASKS, "trl:trl.rewards:think_format_reward"):
        parser = make_parser(RunArguments, TaskGRPOConfig, ModelConfig, find_task_class(name).Options)
        known |= {option for action in parser._actions for option in action.option_strings}
    adapters = (openenv.OpenEnvOptions, reasoning_gym.GymOptions, trl_environment.TrlEnvironmentOptions,
                verifiers.VerifiersOptions)  # fmt: skip
    return known | {f"--{field.name}" for options in adapters for field in fields(options)}


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_options_that_pages_name_exist(page, known_options):
    assert set(re.findall(r"(?<![\w-])--[a-z]\w+", page.read_text())) <= known_options | saved_options(page)


def saved_options(page):
    """Options of tasks that a page tells the reader to save."""
    return {f"--{name}" for text in saved_files(page).values() for name in re.findall(r"(\w+): \w+ = option\(", text)}


def test_version_and_address_are_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == project["version"] and citation["license"] == project["license"] == "Apache-2.0"
    assert citation.get("repository-code") == project.get("urls", {}).get("Repository")
    assert project["version"] in (ROOT / "CHANGELOG.md").read_text()
    assert "Apache License" in (ROOT / "LICENSE").read_text()
