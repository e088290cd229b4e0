"""Training of the shipped tasks with a real colocated vLLM: log-probs of vLLM equal those of training."""

import json
import random

import pytest
from peft import LoraConfig

from tests.support.toy import LettersConstraint, ToyTask
from tests.support.training import config, launch
from tests.support.vllm_cpu import save_model, use_runner
from trl_grpo_tasks import TaskGRPOTrainer
from trl_grpo_tasks.registry import get_task

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 10]}, "b": {"type": "boolean"}}, "required": ["a", "b"]}
PROMPTS = [
    {"prompt": "say one", "schema": SCHEMA, "rewards": {"schema": 1.0}},
    {"prompt": "say two", "pattern": "(yes|no){1,3}", "rewards": {"regex": 1.0}},
    {"prompt": "say more", "answer": "7", "rewards": {"exact": 1.0}},  # no format: it is not constrained
]


def make_task(name, tmp_path):
    if name == "toy":
        return ToyTask()
    if name == "prompts":
        file = tmp_path / "prompts.json"
        file.write_text(json.dumps(PROMPTS * 4))
        return get_task("prompts", {"prompts_file": str(file), "test_fraction": 0.25})
    return get_task(name, {})


def make_trainer(name, tmp_path, peft=None, **options):
    task = make_task(name, tmp_path)
    settings = {"constrain": True, "use_vllm": True, "vllm_mode": "colocate", "max_steps": 2,
                "max_completion_length": 64, "vllm_max_model_length": 512} | options  # fmt: skip
    args = config(tmp_path / "run", **settings)
    rows = {split: task.dataset(split, 4, 0) for split in ("train", "test")}
    return TaskGRPOTrainer(save_model(task, tmp_path / "model"), args=args, task=task, peft_config=peft,
                           train_dataset=rows["train"], eval_dataset=rows["test"])  # fmt: skip


def check_logs(trainer, steps=2):
    logs = [line for line in trainer.state.log_history if "loss" in line]
    assert len(logs) == steps
    for line in logs:
        assert line["sampling/logp_difference_max"] < 2e-5
        assert line["perf/vllm_mask_ms"] > 0
    # The rows of a step may all be without a format (task prompts).
    assert any(line.get("constraint/allowed_tokens", 0) > 1 for line in logs)
    return logs


@pytest.mark.parametrize("name", ["brick", "theory", "machine", "prompts"])
def test_every_task_trains_with_a_constraint(name, tmp_path):
    with use_runner(1):
        trainer = make_trainer(name, tmp_path)
        trainer.train()
        check_logs(trainer)
        del trainer


@pytest.mark.parametrize("kind", ["lora", "filters", "filters only", "evaluation", "own successes"])
def test_with_other_options(kind, runner, tmp_path):
    options = {
        "lora": {"peft": LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)},
        "filters": {"top_k": 3, "top_p": 0.9, "min_p": 0.01},
        "filters only": {"top_k": 5, "top_p": 0.8, "constrain": False},
        "evaluation": {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4},
        "own successes": {"own_successes": 64, "num_generations": 64, "per_device_train_batch_size": 128},
    }[kind]
    trainer = make_trainer("toy", tmp_path, max_completion_length=6, vllm_max_model_length=32, **options)
    trainer.train()
    if kind == "filters only":
        logs = [line for line in trainer.state.log_history if "loss" in line]
        assert max(line["sampling/logp_difference_max"] for line in logs) < 2e-5
    else:
        logs = check_logs(trainer)
        assert all(line["rewards/valid/mean"] == 1 for line in logs)
    if kind == "evaluation":
        evaluations = [line for line in trainer.state.log_history if "eval_reward" in line]
        assert len(evaluations) == 2 and all(line["eval_rewards/valid/mean"] == 1 for line in evaluations)
    if kind == "own successes":
        stored = trainer.extras["own_successes"].state.draw(64, random.Random(0))
        assert stored and all(trainer.task.score(json.loads(one.row), one.answer).success for one in stored)
        assert logs[-1]["own_successes/loss"] > 0


def test_a_constraint_of_your_own(tmp_path):
    """Without a task: rows are the entries of the data set."""
    with use_runner(1):
        task = ToyTask()
        model = save_model(task, tmp_path / "model")
        from datasets import Dataset
        from transformers import AutoTokenizer

        args = config(tmp_path / "run", constrain=True, use_vllm=True, vllm_mode="colocate", max_steps=1,
                      vllm_max_model_length=64)  # fmt: skip
        trainer = TaskGRPOTrainer(
            model, args=args, reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
            constraint=LettersConstraint(AutoTokenizer.from_pretrained(model), most=2),
            train_dataset=Dataset.from_dict({"prompt": ["a1x", "b2x"] * 4, "more": [1, None] * 4}),
        )  # fmt: skip
        trainer.train()
        check_logs(trainer, steps=1)


SCRIPT = """
import json, sys
from tests.support import vllm_cpu
vllm_cpu.set_up()
from tests.support.toy import ToyTask
from tests.support.training import toy_trainer
model, output_dir = json.loads(sys.argv[1])
if __name__ == "__main__":
    trainer = toy_trainer(model, output_dir, constrain=True, use_vllm=True, vllm_mode="colocate", max_steps=2,
                          vllm_max_model_length=32, per_device_train_batch_size=4)
    trainer.train()
    for line in trainer.state.log_history:
        if "loss" in line:
            print(trainer.accelerator.process_index, line["sampling/logp_difference_max"] < 2e-5, flush=True)
"""


def test_two_processes(model_path, tmp_path):
    out, _ = launch(SCRIPT, 2, [model_path, str(tmp_path / "run")], tmp_path / "run", timeout=300)
    assert out.count("0 True") == 2
