"""The parts of a command line: the task as first word, short names, recipes by name, tools of a task, numbers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import refused, said
from tests.support.paths import ROOT
from trl_grpo_tasks.commands.arguments import parse, read_command_line
from trl_grpo_tasks.commands.command_words import AUTO, NEWEST
from trl_grpo_tasks.commands.recipes import describe_recipe, find_recipe, recipe_names
from trl_grpo_tasks.files import check_local_path, looks_local
from trl_grpo_tasks.registry import TASKS, find_task_class


def parsed(*words):
    return parse([*words, "--use_cpu", "true"])


# ---- the task


@pytest.mark.parametrize("command", ["train", "eval"])
def test_without_a_task_it_is_said_what_to_pass(capsys, command):
    for words in ([], ["--steps", "3"]):
        code, out, err = said(capsys, command, *words)
        assert code == 2 and out == "" and err.startswith("error: name a task or a recipe:\n")
        first = "eval NAME=MODEL" if command == "eval" else "train"
        task = f"{first} --task brick" if command == "eval" else "train brick"
        assert f"trl-grpo-tasks {first} --config brick/single_gpu" in err and f"trl-grpo-tasks {task} " in err
        assert ", ".join(sorted(TASKS)) in err and f"'trl-grpo-tasks {command} -h'" in err


def test_the_task_is_the_first_word_or_an_option(my_task, capsys):
    for words in ("my_task.py", "--task my_task.py", "--task=my_task.py", "my_task.py --task my_task.py"):
        task, arguments, _, _ = parsed(*words.split())
        assert task.name == "my_task" and arguments.task == "my_task.py"
    for words, message in {
        "train my_task.py --task brick": "is given twice, as 'my_task.py' and as --task 'brick'; give it once",
        "train --config recipe.yaml": "recipe.yaml names no task; give one: trl-grpo-tasks train TASK --config",
        "check my_task.py --task=brick": "the task is given twice",
    }.items():
        Path("recipe.yaml").write_text("max_steps: 3")
        assert message in refused(capsys, *words.split())
    assert "name a task" in said(capsys, "train", "--steps", "3", "my_task.py")[2]


# ---- options


def test_short_names_of_options(my_task, capsys):
    words = ["--model", "tiny", "--lr", "1e-3", "--batch_size", "32", "--steps=7"]
    _, _, args, model = parsed("my_task.py", *words)
    assert (model.model_name_or_path, args.learning_rate) == ("tiny", 1e-3)
    assert (args.per_device_train_batch_size, args.max_steps) == (32, 7)
    assert parsed("my_task.py", "--batch-size", "64")[2].per_device_train_batch_size == 64
    for one, other in (("--lr", "--learning_rate"), ("--lr", "--learning-rate"), ("--max-steps", "--steps")):
        code, _, err = said(capsys, "train", "my_task.py", one, "1", f"{other}=2")
        assert code == 2 and f"{one} and {other} are the same option; give one of them" in err
    assert parsed("my_task.py", "--lr", "1", "--lr", "2")[2].learning_rate == 2  # the last counts, as in all shells
    assert "--max_steps 'many' must be a whole number" in refused(capsys, "train", "my_task.py", "--steps", "many")
    Path("recipe.yaml").write_text("lr: 0.1")
    err = refused(capsys, "train", "my_task.py", "--config", "recipe.yaml")
    assert "--config recipe.yaml: write learning_rate; lr is for the command line only" in err


@pytest.mark.parametrize(
    ("given", "suggested"),
    [
        ("--sampels", "--samples"), ("--constrian", "--constrain"), ("--cold_steps", "--cold_start_steps"),
        ("--batchsize", "--batch_size"), ("--word_lenght", "--word_length"), ("--replay", "--replay_size"),
    ],
)  # fmt: skip
def test_suggestions_prefer_our_options(my_task, capsys, given, suggested):
    code, _, err = said(capsys, "train", "my_task.py", given, "3")
    assert code == 2 and err == f"error: unknown option {given}; did you mean {suggested}?\n"


def test_settings_for_the_tiny_model_are_for_no_other(my_task):
    def settings(*words):
        _, arguments, args, _ = parsed("my_task.py", *words)
        return arguments.cold_start_steps, args.max_steps, args.learning_rate, args.max_completion_length

    tiny, other = (150, 120, 5e-4, 12), (0, 200, 5e-6, 12)  # 120 is of the task, the others are of the kind of weights
    assert settings() == settings("--model", "owner/name", "--model", "tiny") == tiny
    assert settings("--model-name-or-path=tiny") == tiny
    assert settings("--model=owner/name") == settings("--model", "tiny", "--model", "owner/name") == other
    Path("recipe.yaml").write_text("model_name_or_path: owner/name")
    assert settings("--config", "recipe.yaml") == other
    assert settings("--config", "recipe.yaml", "--model", "tiny", "--steps", "3") == (150, 3, 5e-4, 12)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ([], None),
        (["--resume_from_checkpoint"], NEWEST),
        (["--resume-from-checkpoint"], NEWEST),
        (["--resume-from-checkpoint", "--steps", "3"], NEWEST),
        (["--resume-from-checkpoint=auto"], AUTO),
        (["--resume_from_checkpoint", "false"], None),
        (["--resume_from_checkpoint", "a/checkpoint-3"], "a/checkpoint-3"),
        ("false", None),
        ("true", NEWEST),
        ("null", None),
        ("auto", AUTO),
    ],
)
def test_what_to_resume_from_on_the_command_line_and_in_a_recipe(my_task, words, meant):
    if isinstance(words, str):
        Path("recipe.yaml").write_text(f"resume_from_checkpoint: {words}")
        words = ["--config", "recipe.yaml"]
    assert parsed("my_task.py", *words)[2].resume_from_checkpoint == meant


def test_yes_no_options_decide_on_the_defaults_however_they_are_written(my_task):
    for words in (["--use_cpu"], ["--use-cpu"], ["--use-cpu=yes"], ["--use_cpu", "True"]):
        args = parse(["my_task.py", *words])[2]
        assert not (args.bf16 or args.gradient_checkpointing or args.dataloader_pin_memory) and args.use_cpu


# ---- recipes


def test_tasks_and_recipes_are_listed_with_what_they_are(capsys):
    code, out, _ = said(capsys, "list")
    assert code == 0 and set(recipe_names()) <= set(out.split())
    for line, name in zip(out.splitlines()[::2], sorted(TASKS), strict=True):
        task_class = find_task_class(name)
        assert line.split()[:2] == [name, task_class.version] and task_class.description in line
    code, out, _ = said(capsys, "list", "brick")
    listed = [line.split()[0] for line in out.splitlines()[1:] if line.startswith("  brick/")]
    assert code == 0 and listed == recipe_names("brick") and "brick/single_gpu" in listed
    assert "Expected: " in out and max(map(len, out.splitlines())) <= 100
    assert "no recipes for task 'bric' (did you mean 'brick'?)" in refused(capsys, "list", "bric")
    assert all(describe_recipe(name) for name in recipe_names())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("brick/single", "there is no recipe of this name (did you mean 'brick/single_gpu'?)"),
        ("colab_t4", "recipes are: brick/colab_t4, infill/colab_t4, "),
        ("recipes/brick/paper.yaml", "this file does not exist; the recipe of the package is --config brick/paper"),
        ("my_recip.yaml", "this file does not exist (did you mean 'my_recipe.yaml'?)"),
    ],
)
def test_a_recipe_that_is_not_there(tmp_path, monkeypatch, given, message):
    monkeypatch.chdir(tmp_path)
    Path("my_recipe.yaml").write_text("task: brick")
    with pytest.raises(ValueError, match=f"--config {given}: ") as error:
        read_command_line(["--config", given])
    assert message in str(error.value)
    assert find_recipe("my_recipe.yaml") == Path("my_recipe.yaml") and find_recipe("brick/paper").is_file()


# ---- paths


def test_what_looks_like_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    local = ["./a", "/a", "~/a", "a/b/c", "outputs/a", "runs/a", "a.json", "a.gguf", "owner/a.safetensors"]
    hub = ["gpt2", "owner/name", "Qwen/Qwen2.5-0.5B-Instruct", "openai/gsm8k:main"]
    assert all(map(looks_local, local)) and not any(map(looks_local, hub))


def test_a_misspelt_path_is_an_error_with_the_nearest_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("outputs/brick_demo").mkdir(parents=True)
    for given, message in {
        "outputs/brik_demo": "this path does not exist (did you mean 'outputs/brick_demo'?)",
        "./output/brick_demo": "folder 'output' does not exist (did you mean 'outputs'?)",
        "/none/such": "folder '/none' does not exist",
    }.items():
        with pytest.raises(ValueError) as error:
            check_local_path(given, "--model")
        assert str(error.value) == f"--model {given}: {message}"
    Path("small.gguf").write_bytes(b"<html>not found</html>")
    with pytest.raises(ValueError, match=r"--model small.gguf is not a GGUF file"):  # before anything slow
        check_local_path("small.gguf", "--model")
    for given in ("outputs/brick_demo", "owner/name", "gpt2"):
        check_local_path(given, "--model")


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["train", "my_task.py", "--model"], "--model"),
        (["eval", "--task", "my_task.py", "--models"], "--models"),
        (["solve", "--task", "my_task.py", "--text", "abc"], "model"),
        (["check", "prompts", "--prompts_file"], "--prompts_file"),
        (["check", "prompts", "--reward_model"], "--reward_model"),
        (["check", "theory", "--prompts_file"], "--prompts_file"),
        (["check", "infill", "--corpus"], "--corpus"),
        (["check", "infill", "--tokens_of"], "--tokens_of"),
        (["check", "brick", "--brick_data"], "--brick_data"),
    ],
)
def test_a_misspelt_path_fails_before_anything_is_asked_for(my_task, capsys, monkeypatch, words, option):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    Path("outputs/mine").mkdir(parents=True)
    code, _, err = said(capsys, *words, "outputs/min")
    assert code == 2
    assert err == f"error: {option} outputs/min: this path does not exist (did you mean 'outputs/mine'?)\n"


# ---- check and the tools of a task


def test_check_lists_what_it_checked(my_task, capsys):
    code, out, _ = said(capsys, "check", "my_task.py")
    lines = out.splitlines()
    assert code == 0 and len(lines) == 13 and all(line[:4] in ("ok  ", "-   ") for line in lines[:-1])
    assert "ok  gold answers are valid and succeed (16 rows)" in lines
    assert "ok  the constraint allows gold answers (16 rows)" in lines
    assert "-   components of a group: the task has none" in lines
    my_task.write_text(my_task.read_text().replace('return row["word"][::-1]', 'return row["word"]'))
    code, out, err = said(capsys, "check", "my_task.py")
    assert "ok  train and test share no request (128 rows, 102 different requests)" in out
    assert code == 1 and "gold" not in out
    row = find_task_class("my_task.py")().dataset("train", 1, 0)[0]
    assert err == (
        f"task 'my_task' failed the check: train row 0: the gold answer {row['word']!r} does not succeed: "
        f"expected {row['word'][::-1]!r}\n"
    )


def test_tools_are_listed_and_run(capsys):
    code, out, _ = said(capsys, "tool")
    assert code == 2 and "machine     show, make-gold" in out and "prompts" not in out
    assert "every TASK  score" in out
    own = {"machine": ["show", "make-gold"], "brick": ["metrics"], "infill": ["prepare-judge"]}
    for name, tools in own.items():
        code, out, _ = said(capsys, "tool", name)
        listed = {line.split()[0]: line.split(None, 1)[1] for line in out.splitlines()[2:]}
        assert code == 0 and list(listed) == [*tools, "score"]
        assert all(text.endswith(".") for text in listed.values())
    err = refused(capsys, "tool", "machine", "shw")
    assert "has no tool 'shw' (did you mean 'show'?); its tools are: show, make-gold, " in err
    err = refused(capsys, "tool", "prompts", "show")
    assert "task 'prompts' has no tool 'show'; its tools are: score" in err
    err = refused(capsys, "tool", "infill", "prepare-judge", "--output_dir", "x", "--judge_step", "3")
    assert "unknown option --judge_step (did you mean '--judge_steps'?)" in err


def test_a_task_of_your_own_can_have_tools(my_task, capsys):
    tool = '''
    def count(words):
        """Count words."""
        print(len(words))

    tools = {"count": count}
'''
    my_task.write_text(my_task.read_text().replace("    Options = MyOptions\n", "    Options = MyOptions\n" + tool))
    assert said(capsys, "tool", "my_task.py")[1].splitlines()[2] == "  count  Count words."
    assert said(capsys, "tool", "my_task.py", "count", "a", "b") == (0, "2\n", "")


# ---- numbers

SOLVE = ["solve", "tiny", "--task", "brick", "--text", "a table"]


WRONG_WORDS = [
    ([*SOLVE, "--samples", "0"], "--samples 0 must be at least 1"),
    ([*SOLVE, "--temperature", "-1"], "--temperature -1.0 must be at least 0"),
    ([*SOLVE, "--top_p", "2"], "top_p=2.0 must be above 0 and at most 1"),
    ([*SOLVE, "--all", "--samples", "0"], "--samples 0 must be at least 1"),
    (["play", "tiny", "--task", "brick", "--max_completion_length", "0"], "--max_completion_length 0 must be at"),
    (["train", "brick", "--temperature", "-1"], "--temperature -1 must be at least 0"),
    (["train", "brick", "--lr=-1e-3"], "--learning_rate -0.001 must be at least 0"),
    (["train", "--config", "brick/paper", "--batch-size", "0"], "--per_device_train_batch_size 0 must be at"),
    (["train", "--config", "wrong.yaml"], "--curriculum_advance 1.5 must be at most 1"),
    (["train", "brick", "--steps", "-5"], "--max_steps -5 must be at least 1, or -1"),
    (["train", "brick", "--steps", "0"], "--max_steps 0 must be at least 1, or -1"),
    (["train", "brick", "--lr", "inf"], "--learning_rate inf must be finite"),
    (["train", "brick", "--seed", str(2**70)], f"--seed {2**70} must be at most 4294967295"),
    (["train", "brick", "--seed=-1"], "--seed -1 must be at least 0"),
    (["train", "brick", "--num_train_epochs", "0"], "--num_train_epochs 0 must be above 0"),
    (["train", "brik"], "unknown task 'brik' (did you mean 'brick'?); tasks are: brick, infill,"),
    (["eval", "tiny", "--task", "brick", "--samples=0"], "--samples 0 must be at least 1"),
    (["trian"], "unknown command 'trian' (did you mean 'train'?); commands are: train, eval,"),
    (["tool", "prompts", "score", "--input", "none.jsonl"], "--input none.jsonl: this file does not exist"),
]
SLOW = ["torch", "transformers", "trl", "datasets", "xgrammar", "matplotlib"]


def test_what_needs_no_model_needs_no_slow_imports(tmp_path):
    """Wrong words, the package, and what reward workers and other programs use. One new process for all of them, since
    an interpreter without torch takes a second to start. The last command scores a line of standard input."""
    (tmp_path / "wrong.yaml").write_text("task: brick\ncurriculum_advance: 1.5\n")
    code = """
import contextlib, io, json, sys
import trl_grpo_tasks.constraints, trl_grpo_tasks.rewards.executor, trl_grpo_tasks.rewards.worker
from trl_grpo_tasks.commands.main import main
from trl_grpo_tasks.tasks.machine import simulate
from trl_grpo_tasks.tasks.theory import anomalies
typed, slow = json.loads(sys.argv[1])
for words in typed:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        status = main(words)
    print(json.dumps([status, said.getvalue(), [name for name in slow if name in sys.modules]]))
"""
    scored = ["tool", "prompts", "score", "--input", "-"]
    row = {"prompt": "1+1=", "rewards": {"exact": 1.0}, "answer": "2"}
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps([[*(words for words, _ in WRONG_WORDS), scored], SLOW])],
        capture_output=True, text=True, check=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
        input=json.dumps({"row": row, "completion": "2"}),
    )  # fmt: skip
    *lines, scores, last = done.stdout.splitlines()
    for (words, message), line in zip(WRONG_WORDS, lines, strict=True):
        status, said, loaded = json.loads(line)
        assert status == 2 and message in said and not loaded, (words, said)
    assert json.loads(scores)["success"] and json.loads(last) == [0, "", []]
