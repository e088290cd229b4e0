"""Defaults of a run by kind of weights, what the run says of them, and hints about learning rates."""

import json

import pytest

from trl_grpo_tasks.commands.arguments import parse
from trl_grpo_tasks.commands.defaults import KINDS, describe, kind_of, layers, rate_hints, take_adapter_defaults
from trl_grpo_tasks.commands.plan import prepare
from trl_grpo_tasks.commands.recipes import FOLDER, read_recipe, recipe_names
from trl_grpo_tasks.registry import TASKS, find_task_class
from trl_grpo_tasks.task import Task
from trl_grpo_tasks.training.config import TaskGRPOConfig


def parsed(*words):
    _, run, args, model = parse([*words, "--use_cpu", "--report_to", "none"])
    return run, args, model


@pytest.mark.parametrize(
    "given, kind",
    [
        ({}, "tiny"),
        ({"model_name_or_path": "tiny"}, "tiny"),
        ({"models": "base=tiny"}, "tiny"),
        ({"model_name_or_path": "./model"}, "full"),
        ({"models": "base=./model"}, "full"),
        ({"model_name_or_path": "./model", "use_peft": "true"}, "adapter"),
        ({"model_name_or_path": "./model", "use_peft": "false"}, "full"),
    ],
)
def test_the_kind_of_weights_follows_from_the_options(given, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert kind_of(given) == kind


def test_models_that_a_run_made_of_the_embedded_model_are_of_its_kind(tmp_path):
    (tmp_path / "settings.json").write_text(json.dumps({"model": {"name": "tiny"}}))
    (tmp_path / "cold_start").mkdir()
    assert kind_of({"model_name_or_path": str(tmp_path)}) == "tiny"
    given = {"model_name_or_path": str(tmp_path / "cold_start")}
    assert kind_of(given) == "tiny"
    assert layers(OWN, "tiny", given, None)[-1].values == {"cold_start_steps": 0}, "it has had one"
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "settings.json").write_text(json.dumps({"model": {"name": given["model_name_or_path"]}}))
    assert kind_of({"models": f"model={tmp_path / 'later'}"}) == "tiny", "also of a second run"


@pytest.mark.parametrize("task", sorted(TASKS))
def test_every_task_learns_from_a_cold_start_with_a_rate_for_its_kind_of_weights_and_few_steps(task):
    run, args, _ = parsed("--task", task)
    assert run.kind == "tiny" and run.cold_start_steps > 0 and not rate_hints("tiny", args.learning_rate)
    assert args.max_steps <= 200 and args.generation_batch_size >= 4 * args.num_generations
    for words, kind in ((("--use_peft",), "adapter"), ((), "full")):
        run, args, _ = parsed("--task", task, "--model", "./model", *words)
        assert run.kind == kind and args.learning_rate == KINDS[kind].defaults["learning_rate"]
        assert 0 < args.max_steps <= 200, "bounded"
        assert args.generation_batch_size == 8 * args.num_generations, "several prompts per step"
    assert KINDS["adapter"].defaults["learning_rate"] >= 10 * KINDS["full"].defaults["learning_rate"]


def test_the_python_api_keeps_the_defaults_of_trl(tmp_path):
    from trl import GRPOConfig

    ours, theirs = (one(str(tmp_path), use_cpu=True, bf16=False) for one in (TaskGRPOConfig, GRPOConfig))
    for name in ("learning_rate", "max_steps", "num_generations", "gradient_accumulation_steps", "temperature"):
        assert getattr(ours, name) == getattr(theirs, name)


def test_options_that_the_user_gives_replace_defaults_and_a_given_batch_is_kept():
    given = ("--lr", "1e-5", "--batch_size", "32", "--num_train_epochs", "2")
    _, args, _ = parsed("--task", "theory", "--model", "./model", *given)
    assert args.learning_rate == 1e-5 and args.gradient_accumulation_steps == 1
    assert args.max_steps == -1 and args.num_train_epochs == 2


OWN = type("Own", (Task,), {"name": "own"})


def test_more_processes_need_fewer_passes(monkeypatch):
    for processes, passes in (("4", 2), ("64", 1)):
        monkeypatch.setenv("WORLD_SIZE", processes)
        assert layers(OWN, "full", {}, None)[0].values["gradient_accumulation_steps"] == passes


def test_frozen_weights_are_bf16_where_it_is_fast_and_trained_ones_are_not():
    assert layers(OWN, "adapter", {}, "bf16")[0].values["dtype"] == "bfloat16"
    assert "dtype" not in layers(OWN, "adapter", {}, "fp16")[0].values | layers(OWN, "full", {}, "bf16")[0].values


def test_on_a_cpu_pretrained_models_get_gradient_checkpointing_and_the_embedded_one_does_not():
    def checkpointing(*words):
        return parsed("--task", "brick", "--use_cpu", *words)[1].gradient_checkpointing

    assert not checkpointing() and checkpointing("--gradient_checkpointing")
    for words in ((), ("--use_peft",)):
        assert checkpointing("--model", "./model", *words)
        assert not checkpointing("--model", "./model", *words, "--gradient_checkpointing", "false")


def test_a_run_says_which_defaults_it_took_and_from_where():
    own = type("Own", (Task,), {"name": "own", "defaults": {"temperature": 0.9, "max_steps": 7}})
    lines = describe(layers(own, "full", {"learning_rate": "1e-5"}, None), {"learning_rate": "1e-5"})
    assert lines == [
        "defaults for full weights: cold_start_learning_rate 3e-05, gradient_accumulation_steps 8",
        "defaults of task own: temperature 0.9, max_steps 7",
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_learning_rates_outside_the_range_of_their_kind_get_a_hint(kind):
    known = KINDS[kind]
    assert not rate_hints(kind, known.defaults["learning_rate"])
    (low,), (high,) = rate_hints(kind, known.lowest_rate / 2), rate_hints(kind, known.highest_rate * 2)
    assert "little is learned" in low and "ruin" in high and f"{known.defaults['learning_rate']:g}" in low


@pytest.mark.parametrize("name", recipe_names())
def test_recipes_for_the_embedded_model_set_all_options_that_its_defaults_change(name):
    recipe = read_recipe(str(FOLDER / f"{name}.yaml"))
    task = find_task_class(recipe["task"])
    left_out = {"eval_rows", "samples", "reward_workers"}
    for switch in ("cold_start_steps", "own_successes"):
        if recipe.get(switch) == 0:
            left_out |= {name for name in task.tiny_defaults if name.startswith(switch.removesuffix("_steps"))}
    if kind_of(recipe) == "tiny":
        assert not task.tiny_defaults.keys() - recipe.keys() - left_out, "the recipe would change with these defaults"


def test_a_cold_start_that_nobody_asked_for_is_left_out_where_rows_have_no_answers(tmp_path):
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps([{"prompt": text, "target_length": 3} for text in "ab"]))
    words = f"--task prompts --prompts_file {file} --rewards length --output_dir {tmp_path / 'run'}".split()
    for more in ([], ["--cold_start_steps", "3"]):
        task, run, args, model = parse([*words, *more, "--use_cpu", "--report_to", "none", "--eval_rows", "1"])
        if more:
            with pytest.raises(ValueError, match="--cold_start_steps 3: this row has no known good answer"):
                prepare(task, run, args, model)
        else:
            prepare(task, run, args, model)
            reason = "no cold start: this row has no known good"
            assert run.cold_start_steps == 0 and run.defaults[-1].startswith(reason)


def test_an_adapter_from_the_hub_gets_the_defaults_of_adapters():
    """Its kind is known after it was downloaded. What was given stays."""
    for words, rate, steps in (((), 5e-5, 0), (("--lr", "1e-6", "--cold_start_steps", "7"), 1e-6, 7)):
        task, run, args, _ = parse(["--task", "brick", "--model", "someone/model", "--use_cpu", *words])
        assert run.kind == "full"
        take_adapter_defaults(task, run, args)
        assert (run.kind, args.learning_rate, run.cold_start_steps) == ("adapter", rate, steps)
        assert run.cold_start_learning_rate == KINDS["adapter"].defaults["cold_start_learning_rate"]
        assert not rate_hints(run.kind, 5e-5) and run.defaults[-1].startswith("the model is an adapter, so instead: ")
