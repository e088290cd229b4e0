"""Training of the shipped tasks with a real colocated vLLM: log-probs of vLLM equal those of training."""

import json

import pytest
from peft import LoraConfig

from tests.support.toy import ToyTask
from tests.support.training import config, launch
from tests.support.vllm_cpu import save_model
from trl_grpo_tasks import TaskGRPOTrainer
from trl_grpo_tasks.registry import get_task

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 10]}, "b": {"type": "boolean"}}, "required": ["a", "b"]}
PROMPTS = [
    {"prompt": "say one", "schema": SCHEMA, "rewards": {"schema": 1.0}},
    {"prompt": "say two", "pattern": "(yes|no){1,3}", "rewards": {"regex": 1.0}},
    {"prompt": "say more", "answer": "7", "rewards": {"exact": 1.0}},  # no format: it is not constrained
]
SHORT = {"max_completion_length": 6, "vllm_max_model_length": 32}
ADAPTER = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
CASES = {  # model runner, task, options
    "choice tree": (1, "brick", {}),
    "grammars that differ by row": (1, "prompts", {}),
    "adapter and evaluation": (
        1, "toy", SHORT | {"peft_config": ADAPTER, "eval_strategy": "steps", "eval_steps": 1,
                           "per_device_eval_batch_size": 4},
    ),
    "filters": (2, "toy", SHORT | {"top_k": 3, "top_p": 0.9, "min_p": 0.01}),
    "filters only": (1, "toy", SHORT | {"top_k": 5, "top_p": 0.8, "constrain": False}),
}  # fmt: skip


def make_trainer(task, folder, **options):
    settings = {"constrain": True, "use_vllm": True, "vllm_mode": "colocate", "max_steps": 2,
                "max_completion_length": 64, "vllm_max_model_length": 512} | options  # fmt: skip
    adapter = settings.pop("peft_config", None)
    args, rows = config(folder / "run", **settings), [task.dataset(split, 4, 0) for split in ("train", "test")]
    return TaskGRPOTrainer(save_model(task, folder / "model"), args=args, task=task, peft_config=adapter,
                           train_dataset=rows[0], eval_dataset=rows[1])  # fmt: skip


@pytest.mark.parametrize(("runner", "case"), [(each[0], case) for case, each in CASES.items()], indirect=["runner"])
def test_log_probs_are_those_of_training(runner, case, tmp_path):
    _, name, options = CASES[case]
    if name == "prompts":
        (tmp_path / "prompts.json").write_text(json.dumps(PROMPTS * 4))
        task = get_task("prompts", {"prompts_file": str(tmp_path / "prompts.json"), "test_fraction": 0.25})
    else:
        task = ToyTask() if name == "toy" else get_task(name)
    trainer = make_trainer(task, tmp_path, **options)
    trainer.train()
    logs = [line for line in trainer.state.log_history if "loss" in line]
    assert len(logs) == 2 and all(line["sampling/logp_difference_max"] < 2e-5 for line in logs)
    if case != "filters only":
        assert all(line["perf/vllm_mask_ms"] > 0 for line in logs)
        # The rows of a step may all be without a format (task prompts).
        assert any(line.get("constraint/allowed_tokens", 0) > 1 for line in logs)
    if name == "toy" and case != "filters only":
        assert all(line["rewards/valid/mean"] == 1 for line in logs)
    evaluations = [line for line in trainer.state.log_history if "eval_reward" in line]
    assert len(evaluations) == 2 * ("evaluation" in case)
    assert all(line["eval_rewards/valid/mean"] == 1 for line in evaluations)


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
