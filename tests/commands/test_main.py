"""The command line: what a person types, and what is said when it was mistyped."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.support.commands import refused, said
from trl_grpo_tasks.commands import plan
from trl_grpo_tasks.commands import train as run
from trl_grpo_tasks.commands.arguments import parse
from trl_grpo_tasks.commands.command_words import NEWEST
from trl_grpo_tasks.models import checkpoints
from trl_grpo_tasks.registry import get_task

# ---- score


ROW = {"prompt": [{"role": "user", "content": "abc"}], "word": "abc", "level": "long"}


def lines(*entries):
    return "".join(entry if isinstance(entry, str) else json.dumps(entry) + "\n" for entry in entries)


def test_score_prints_a_line_each_and_reports_bad_ones_by_number(my_task, capsys):
    Path("in.jsonl").write_text(
        lines(
            {"row": ROW, "completion": "cba"},
            "{not json\n",
            {"row": ROW, "completion": "cab"},
            "\n",
            {"completion": "no row"},
            {"row": ROW, "completion": 3},
            "[" * 100_000 + "\n",
            {"row": {}, "completion": "a row that lacks what the task needs"},
            {"row": ROW, "completion": "\ud800 é"},
        )
    )
    code, out, err = said(capsys, "tool", "my_task.py", "score", "--input", "in.jsonl")
    right, partly, unscored, strange = (json.loads(line) for line in out.splitlines())
    assert code == 1
    assert right == {
        "total": pytest.approx(1.3), "valid": True, "success": True, "components": {"letters": 1.0, "exact": 1.0},
        "reason": "", "info": {},
    }  # fmt: skip
    assert (partly["total"], partly["success"]) == (pytest.approx(0.1), False) and "cba" in partly["reason"]
    assert unscored["total"] is None and not unscored["success"] and "KeyError" in unscored["reason"]
    assert set(unscored) == set(right) and strange["valid"] is False
    assert [line.split(":")[0] for line in err.splitlines()] == ["line 2", "line 5", "line 6", "line 7"]


def test_score_ends_what_takes_too_long(task_file, tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text(lines({"row": {"prompt": "?", "x": 2}, "completion": "hang"}))
    words = ["tool", task_file, "score", "--input", tmp_path / "in.jsonl", "--reward_timeout", "0.5"]
    code, out, _ = said(capsys, *words)
    hung = json.loads(out)
    assert code == 0 and hung["total"] is None and hung["reason"] == "timed out after 0.5 s"


# ---- new and check


def test_new_writes_a_task_under_its_name_and_does_not_overwrite(my_task, capsys):
    task = get_task("my_task.py")
    assert (task.name, type(task).__name__, type(task.options).__name__) == ("my_task", "MyTask", "MyOptions")
    assert said(capsys, "new", "other_word")[0] == 0
    assert "class OtherWordTask" in Path("other_word.py").read_text()
    for name in ("my-task", "3d", "class", "a/b", ""):
        assert "cannot be the name of a module" in refused(capsys, "new", name)
    my_task.write_text("mine")
    assert "exists already" in refused(capsys, "new", "my_task") and my_task.read_text() == "mine"


def test_short_answers_of_a_new_task_are_shown(my_task, capsys):
    prepare = "\n    def prepare(self, seed, say=print):\n        say(f'seed {seed}')\n"
    my_task.write_text(my_task.read_text() + prepare)
    words = ["tiny", "--text", "abc", "--samples", "1", "--all"]
    code, out, _ = said(capsys, "solve", *words, "--task", "my_task.py")
    written = Path("solved/sample_1.txt").read_text()
    assert code == 0 and f"  1. {written!r}; valid; expected 'cba'; score " in out
    words[0] = "solved/base_model"  # with what a run leaves beside its model
    settings = {"task": {"name": "my_task", "options": {"word_length": 3}}, "run": {"task": "my_task.py"}}
    Path(words[0], "settings.json").write_text(json.dumps(settings | {"training": {"seed": 7}}))
    out = said(capsys, "solve", *words, "--task", "my_task.py")[1]
    assert "expected 'cba'" in out and "seed 7\n" in out  # what the run made is found again
    err = refused(capsys, "solve", *words, "--word_length", "4")
    assert "--word_length; to set options of a task, name it with --task" in err


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("import random", "import random; class", "'my_task.py' cannot be read: SyntaxError: invalid syntax"),
        ("LETTERS =", "1 / 0\nLETTERS =", "'my_task.py' cannot be read: ZeroDivisionError: division by zero (line 1"),
        ("import random", "import nonesuch", "'my_task.py' cannot be imported: ModuleNotFoundError: No module named "),
        ('    name = "my_task"\n', "", "class MyTask needs a name"),
        ('(random.Random(word).random() < 0.2) == (split == "test")', "True", "train and test share a request"),
        ('"exact": 1.0}', '"exat": 1.0}', "component 'exact' has no weight; weights are: letters, exat"),
        ('wanted, given = row["word"]', 'wanted, given = row["wrd"]', "score raised KeyError: 'wrd' (line 5"),
        ("    def score(", "    def rate(", "task 'my_task' must define score(row, completion)"),
        ('"temperature"', '"temprature"', "temprature"),
        ("return rows\n", 'return [] if split == "train" else rows\n', "has no rows in its 'train' split"),
        ("return rows\n", 'return [] if split == "test" else rows\n', "has no rows in its 'test' split"),
    ],
)
def test_a_mistake_in_a_task_file_is_said_with_its_place(my_task, capsys, old, new, message):
    assert old in my_task.read_text()
    my_task.write_text(my_task.read_text().replace(old, new))
    command = "train" if old in ("return rows\n", '"temperature"') else "check"
    code, _, err = said(capsys, command, "--task", "my_task.py")
    assert code in (1, 2) and message in err and len(err.splitlines()) == 1, err


@pytest.mark.parametrize("kind", [[], ["--environment"]])
def test_a_verifier_is_a_task(tmp_path, monkeypatch, capsys, kind):
    """Without gold and bad answers, checks say what they leave out."""
    monkeypatch.chdir(tmp_path)
    assert said(capsys, "new", "verifier", "--no-gold", *kind)[0] == 0
    code, out, err = said(capsys, "check", "verifier.py")
    assert code == 0 and "gold answers: no row has one" in out, (out, err)


def test_an_environment_is_a_task(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert said(capsys, "new", "my_game", "--environment")[0] == 0
    code, out, err = said(capsys, "check", "my_game.py")
    assert code == 0 and "the constraint allows gold answers" in out, (out, err)
    short = "--cold_start_steps 2 --steps 1 --eval_rows 4 --train_rows 16 --reward_workers 0 --report_to none"
    code, out, err = said(capsys, "train", "my_game.py", *short.split(), "--out", "out")
    assert code == 0 and "success" in out, (out, err)
    assert "<ol class=turns>" in Path("out/report.html").read_text()


def test_a_task_in_a_package_of_the_current_folder(my_task, capsys):
    """The console script does not have the current folder on its path; reward workers need it too."""
    (package := my_task.parent / "my_package").mkdir()
    my_task.rename(package / "letters.py")
    (package / "__init__.py").touch()
    sys.path[:] = [entry for entry in sys.path if entry]
    Path("in.jsonl").write_text(lines({"row": ROW, "completion": "cba"}))
    assert said(capsys, "check", "--task", "my_package.letters")[1].endswith("passed all checks\n")
    missing = "task module 'my_package.none' cannot be imported: ModuleNotFoundError: No module named "
    assert f"{missing}'my_package.none'" in refused(capsys, "check", "--task", "my_package.none")
    assert json.loads(said(capsys, "tool", "my_package.letters", "score", "--input", "in.jsonl")[1])["success"]


# ---- options of a run


def parsed(*words):
    return parse(["--use_cpu", "true", *words])


def test_precedence_of_options(my_task):
    """TRL's default < the toolkit's < the task's < the recipe's < the flag's."""
    Path("recipe.yaml").write_text("task: my_task.py\nlearning_rate: 3e-4\nmax_steps: 7\nword_length: 5\nbeta: 0.01\n")
    task, arguments, args, _ = parsed("--config", "recipe.yaml", "--max_steps", "9", "--beta", "0.5")
    assert (args.max_steps, args.beta) == (9, 0.5)
    assert (args.learning_rate, task.options.word_length, arguments.task) == (3e-4, 5, "my_task.py")
    assert (args.max_completion_length, arguments.cold_start_steps) == (12, 150)
    assert (args.save_steps, args.output_dir) == (50, "outputs/my_task")
    assert (args.epsilon, args.loss_type) == (0.2, type(args)(use_cpu=True, bf16=False).loss_type)
    assert parsed("--task=my_task.py")[2].learning_rate == 5e-4


def test_a_flag_chooses_another_task_than_the_recipe_and_adapters_have_no_dropout(my_task):
    """TRL's default of 0.05 would make sampling and scoring draw different masks."""
    Path("recipe.yaml").write_text("task: prompts\nmax_steps: 7\n")
    task, _, args, model = parsed("--config=recipe.yaml", "--task=my_task.py")
    assert (task.name, args.max_steps, model.lora_dropout) == ("my_task", 7, 0)
    assert parsed("--task", "my_task.py", "--lora_dropout", "0.1")[3].lora_dropout == 0.1


@pytest.mark.parametrize(
    ("half", "words", "bf16", "fp16"),
    [
        ("bf16", [], True, False), ("fp16", [], False, True), (None, [], False, False),
        ("fp16", ["--fp16", "false"], False, False), ("fp16", ["--bf16=false"], False, False),
        ("fp16", ["--bf16", "true"], True, False), ("fp16", ["--config", "recipe.yaml"], True, False),
        ("fp16", ["--use_cpu", "true"], False, False), ("bf16", ["--use_cpu"], False, False),
        ("fp16", ["--use_cpu", "false"], False, True),
    ],
)  # fmt: skip
def test_half_precision_is_what_the_machine_is_fast_at_unless_it_is_named(
    my_task, monkeypatch, half, words, bf16, fp16
):
    Path("recipe.yaml").write_text("bf16: true\n")
    monkeypatch.setattr("trl_grpo_tasks.models.precision.fast_half_precision", lambda: half)
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    args = parse(["--task", "my_task.py", *words])[2]
    assert (args.bf16, args.fp16) == (bf16, fp16)


def test_a_run_in_fp16_says_that_the_gpu_has_no_fast_bf16(my_task, monkeypatch, capsys):
    monkeypatch.setattr("trl_grpo_tasks.models.precision.fast_half_precision", lambda: "fp16")
    task, arguments, args, model = parse(["--task", "my_task.py"])
    with pytest.raises(AttributeError):  # after the first line, because there is no plan
        run.run_training(task, arguments, args, model, plan=None)
    assert "model tiny, fp16 on cpu (this GPU has no fast bf16), output in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max_stepz", "3"], "unknown option --max_stepz; did you mean --max_steps?"),
        (["--zzzzzzzzzzzz=3"], "unknown option --zzzzzzzzzzzz; --help-all lists all"),
        (["stray"], "'stray' does not belong to any option"),
        (["--constrain", "perhaps"], "constrain"),
        (["--max_steps"], "--max_steps needs a value"),
        (["--config"], "--config needs a value"),
        (["--task", "prompts"], "--task is given twice; give it once"),
        (["--word_length", "60"], "--word_length 60 must be between 2 and 8"),
        (["--num_generations", "7"], "per_device_train_batch_size x gradient_accumulation_steps x processes"),
        (["--learning_rate", "nan"], "--learning_rate nan must be at least 0"),
        (["--reward_memory_mb", "-5"], "--reward_memory_mb -5 must be above 0"),
        (["--loss_type", "grop"], "unknown loss_type 'grop'; choose one of: grpo, "),
        (["--use_liger_kernel", "true"], "--use_liger_kernel: liger_kernel is not installed"),
        (["--component_weights", '{"success": NaN}'], "the weight of 'success' must be a number, got nan"),
        (["--report_to", "wandbb"], "unknown --report_to 'wandbb' (did you mean 'wandb'?)"),
        (["--output_dir", "my_task.py/out"], "my_task.py is not a writable folder; choose another"),
        (["--output_dir", ""], "--out is empty"),
        (["--output_dir", "/proc/x"], "--out /proc/x: /proc is not a writable folder; choose another"),
        (["--resume_from_checkpoint", "none"], "--resume_from_checkpoint none: this folder does not exist"),
        (["--resume_from_checkpoint", "."], "--resume_from_checkpoint . is not a checkpoint: give a folder checkp"),
        (
            ["--model", "none/such"],
            "--model none/such: there is no such folder, the model is not in the cache of the ",
        ),
        (["--load_in_4bit", "true"], "quantised weights cannot be trained, only an adapter on them; give --use_peft"),
        (["--dtype", "float16"], "--dtype float16: float16 weights lose most updates; train float32 weights in half"),
    ],
)
def test_mistakes_are_one_line(my_task, capsys, words, message):
    assert message in refused(capsys, "train", "--task", "my_task.py", *words)
    assert not Path("outputs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lora_target_modules", "c_attn"], r"'c_attn'} not found in .*\(modules of this model: down_proj, gate_"),
        (["--lora_r", "0"], "--use_peft: `r` should be a positive integer"),
    ],
)
def test_an_adapter_that_does_not_fit_is_found_first(my_task, capsys, words, message):
    assert re.search(message, refused(capsys, "train", "--task", "my_task.py", "--use_peft", "true", *words))


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("max_stepz: 3", "unknown option --max_stepz; did you mean --max_steps?"),
        ("max_steps: three", "--max_steps 'three' must be a whole number"),
        ("max_steps: 2.5", "max_steps: 2.5 must be a whole number"),
        ("learning_rate: [1]", "learning_rate: [1] must be a number"),
        ("constrain: 3", "constrain: 3 must be a bool"),
        ("lora_target_modules: q_proj", "lora_target_modules: 'q_proj' must be a list"),
        ("max_steps: 3\nlogging_steps: 1\nmax_steps: 4", "recipe.yaml: max_steps is given 2 times; keep one"),
        ("3: 4", "must hold options as 'name: value' lines"),
        ("a: [", "recipe.yaml is not YAML"),
        ("- just\n- words", "must hold options as 'name: value' lines"),
        ("task: promts", "did you mean 'prompts'?"),
    ],
)
def test_mistakes_in_a_recipe_are_said(my_task, capsys, recipe, message):
    Path("recipe.yaml").write_text(recipe)
    words = [] if "task" in recipe else ["--task", "my_task.py"]
    assert message in refused(capsys, "train", *words, "--config", "recipe.yaml")


def test_a_run_is_resumed_only_with_the_same_physics(my_task, capsys):
    Path("out/checkpoint-5").mkdir(parents=True)
    checkpoints.mark_complete("out/checkpoint-5")
    Path("out/settings.json").write_text(json.dumps({"task": {"options": {"gravity": 9.8}}}))
    words = ["--task", "brick", "--output_dir", "out", "--resume_from_checkpoint", "--gravity", "1.6"]
    err = refused(capsys, "train", *words)
    assert "was started with another --gravity (9.8, not 1.6); resume with the original value" in err


def test_an_earlier_run_is_not_overwritten(my_task, capsys):
    Path("out/checkpoint-5").mkdir(parents=True)
    words = ["--task", "my_task.py", "--output_dir", "out"]
    code, _, err = said(capsys, "train", *words, "--resume_from_checkpoint")
    assert code == 2 and "no complete checkpoint in out" in err  # this one is half-written, and starting is allowed
    started = parsed(*words, "--resume_from_checkpoint", "auto")
    plan.prepare(*started)
    assert started[2].resume_from_checkpoint is None
    assert "no complete checkpoint in out to resume from: this run starts" in capsys.readouterr().out
    checkpoints.mark_complete("out/checkpoint-5")
    started = parsed(*words, "--resume_from_checkpoint", "auto")
    plan.prepare(*started)
    assert started[2].resume_from_checkpoint == NEWEST
    err = refused(capsys, "train", *words)
    assert "out holds an earlier run (checkpoint-5)" in err
    assert "--resume_from_checkpoint" in err and "another --out" in err
    Path("other/checkpoint-2").mkdir(parents=True)
    Path("other/checkpoint-2/trainer_state.json").write_text("{}")
    # The checkpoint that is named is not the one that would go on.
    err = refused(capsys, "train", *words, "--resume_from_checkpoint", "other/checkpoint-2")
    assert "out holds an earlier run (checkpoint-5)" in err


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json"])
def test_a_model_is_not_overwritten(my_task, capsys, name):
    """Of the user's, given as --model_name_or_path perhaps; or of a run with --save_strategy no."""
    Path("mine").mkdir()
    Path("mine", name).write_text("{}")
    for more in ([], ["--resume_from_checkpoint", "auto"]):  # there is no checkpoint, so the run would start
        err = refused(capsys, "train", "--task", "my_task.py", "--output_dir", "mine", *more)
        assert f"mine holds a model ({name})" in err and "another --out" in err
    assert [path.name for path in Path("mine").iterdir()] == [name]


NO_CONSTRAINT = "    def constraint(self, tokenizer):\n        return None\n\n"  # with the options of now


@pytest.mark.parametrize("own", ["", NO_CONSTRAINT], ids=["never", "not now"])
@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_constraint_that_the_task_does_not_have_is_an_error(my_task, capsys, command, own):
    text = my_task.read_text()
    my_task.write_text(text[: text.index("    def constraint(")] + own + text[text.index("    def tiny(") :])
    words = ["my_task.py"] if command == "train" else ["tiny", "--task", "my_task.py"]
    code, out, err = said(capsys, command, *words, "--constrain")
    message = "task 'my_task' has no constraint" + " with these options" * bool(own)
    assert code == 2 and message in err and "cold start" not in out
