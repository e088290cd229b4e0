"""A run from Python: the same as from the command line, resumed by a second call, with errors that are raised."""

import json

import pytest
import yaml
from transformers import TrainerCallback

from tests.commands.test_train import SMALL, metrics, train
from trl_grpo_tasks import TaskGRPOConfig, TaskGRPOTrainer, load_recipe
from trl_grpo_tasks import train as train_recipe


@pytest.fixture
def recipe_file(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    return path


class Steps(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_step_end(self, args, state, control, **kwargs):
        self.seen.append(state.global_step)


def test_a_recipe_is_found_by_name_and_its_values_are_replaced(tmp_path):
    options = {"brick_levels": ["stack", "small"], "component_weights": {"success": 2.0}, "constrain": False}
    options |= {"learning_rate": 3e-5, "fp16": False, "use_cpu": True}
    recipe = load_recipe("brick/colab_t4", output_dir=tmp_path / "run", **options)
    assert recipe.task.name == "brick" and recipe.task.options.brick_levels == ["stack", "small"]
    assert isinstance(recipe.config, TaskGRPOConfig)
    assert recipe.config.component_weights == {"success": 2.0} and recipe.config.learning_rate == 3e-5
    assert recipe.config.constrain is False and recipe.config.output_dir == str(tmp_path / "run")
    assert recipe.model.model_name_or_path == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert recipe.run.cold_start_steps == 300
    assert not (tmp_path / "run").exists()  # nothing is written before training


def test_what_cannot_be_is_raised_as_on_the_command_line(tmp_path):
    with pytest.raises(ValueError, match="brick/paper"):
        load_recipe("brick/dem")
    with pytest.raises(ValueError, match="unknown option --max_stps; did you mean --max_steps"):
        load_recipe("brick", max_stps=3)


def test_a_run_from_python_is_the_run_of_the_command_line(recipe_file, tmp_path):
    steps = Steps()
    recipe = load_recipe(recipe_file, output_dir=tmp_path / "python", resume_from_checkpoint="auto")
    result = train_recipe(recipe, callbacks=[steps])
    train(tmp_path / "shell")
    assert metrics(tmp_path / "python") == metrics(tmp_path / "shell")
    assert steps.seen == [1, 2, 3]
    assert isinstance(result.trainer, TaskGRPOTrainer) and result.folder == tmp_path / "python"
    assert [one.name for one in result.evaluations] == ["before", "GRPO"]
    saved = json.loads((tmp_path / "python" / "results.json").read_text())["evaluations"]
    assert [one.as_dict()["samples"] for one in result.evaluations] == [one["samples"] for one in saved]
    command = json.loads((tmp_path / "python" / "settings.json").read_text())["command"]
    assert command == recipe.command
    assert command.startswith(f"trl-grpo-tasks train --config {recipe_file} --output_dir")
    assert not list((tmp_path / "python").glob(".*.lock"))
    again = Steps()
    train_recipe(recipe, callbacks=[again])  # the same object: it looks for checkpoints anew
    assert again.seen == []
