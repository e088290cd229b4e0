"""A real server started with `trl-grpo-tasks serve`: training against it, and what it refuses."""

import json
import os
import re
import subprocess
import sys

import httpx
import pytest
from peft import LoraConfig
from transformers import TrainerCallback

from tests.support import vllm_cpu
from tests.support.observed import logged, logps_under, observe
from tests.support.paths import ROOT
from tests.support.server_process import free_port
from tests.support.training import config, launch
from tests.support.vllm_cpu import ENVIRONMENT, save_model, serve_task, serving
from trl_grpo_tasks import TaskGRPOTrainer
from trl_grpo_tasks.registry import get_task

NAME = "prompts"  # its constraint differs from row to row, and a row can be wrong
ROW = {"prompt": "p", "pattern": "(yes|no){1,3}", "rewards": {"regex": 1.0}}


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("prompts") / "prompts.json"
    file.write_text(json.dumps([{**ROW, "prompt": f"say {i}", "pattern": f"(yes|no){{1,3}}{i}"} for i in range(8)]))
    return str(file)


@pytest.fixture(scope="module")
def task(prompts_file):
    return get_task(NAME, {"prompts_file": prompts_file})


@pytest.fixture(scope="module")
def path(task, tmp_path_factory):
    return save_model(task, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(path, prompts_file, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    with serving(serve_task(NAME, path, "--prompts_file", prompts_file), log) as address:
        yield address, log


def options_of(server, folder, **options):
    return {"constrain": True, "use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server[0],
            "vllm_weights_folder": folder, "max_steps": 3, "max_completion_length": 12} | options  # fmt: skip


def make_trainer(task, path, server, folder, peft_config=None, **options):
    args = config(folder, **options_of(server, str(folder / "weights"), **options))
    rows = task.dataset("train", 4, 0)
    return TaskGRPOTrainer(path, args=args, task=task, train_dataset=rows, peft_config=peft_config)


def test_training_with_a_server(task, path, server, tmp_path):
    """Weights change in each step, and log-probs of the server equal those of training."""
    trainer = make_trainer(task, path, server, tmp_path, learning_rate=3e-3)
    trainer.train()
    differences = logged(trainer, "sampling/logp_difference_max")
    assert len(differences) == 3 and max(differences) < 2e-5
    assert all(share > 0 for share in logged(trainer, "rewards/valid/mean"))


def test_rollouts_ahead_are_sampled_with_earlier_weights(task, path, server, tmp_path):
    """Rewards are equal under the constraint, so that only weight decay moves the weights."""
    options = {"learning_rate": 3e-3, "weight_decay": 50.0, "max_steps": 4, "rollouts_ahead": 2}
    trainer = make_trainer(task, path, server, tmp_path, **options)
    seen = observe(trainer)
    trainer.train()
    assert logged(trainer, "rollout/staleness") == [0.0, 1.0, 2.0, 2.0]
    for n, one in enumerate(seen):
        expected = logps_under(seen[max(n - 2, 0)]["model"], one, 1.0)
        for logps, wanted in zip(one["record"].sampling_logps, expected, strict=True):
            assert logps == pytest.approx(wanted, abs=2e-5)
    assert logged(trainer, "sampling/logp_difference_max")[-1] > 1e-3, "the weights moved"


class Faults(TrainerCallback):
    """Kills a server as the third step begins, and starts it again, with the weights of its files, for the fifth."""

    def __init__(self, words, log, port):
        self.words, self.log, self.port = words, log, port
        self.begin()

    def begin(self):
        self.server = vllm_cpu.start(self.words, self.log, self.port)
        vllm_cpu.wait_for(self.server, self.log, self.port)

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2:
            vllm_cpu.kill(self.server)
        if state.global_step == 4:
            self.begin()


def test_a_server_that_dies_comes_back_with_the_newest_weights(task, path, server, prompts_file, tmp_path, capsys):
    port = free_port()
    words = serve_task(NAME, path, "--prompts_file", prompts_file)
    faults = Faults(words, tmp_path / "log", port)
    other = f"http://127.0.0.1:{port}"
    try:
        options = {"vllm_server_base_url": f"{server[0]},{other}", "weight_decay": 50.0, "max_steps": 6}
        trainer = make_trainer(task, path, server, tmp_path, learning_rate=3e-3, **options)
        trainer.add_callback(faults)
        seen = observe(trainer)
        trainer.train()
    finally:
        vllm_cpu.end(faults.server)
    assert len(seen) == 6 and max(logged(trainer, "sampling/logp_difference_max")) < 2e-5
    out = capsys.readouterr().out
    assert out.count(f"vLLM server {other} is out: ") == out.count(f"vLLM server {other} is back, ") == 1
    assert out.index("is out: ") < out.index("is back, ")
    metrics = httpx.get(f"{server[0]}/metrics").text
    assert "\nprocess_start_time_seconds " in metrics and "\nvllm:generation_tokens_total{" in metrics


def test_filters_and_an_adapter_with_a_server(task, path, server, tmp_path):
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    trainer = make_trainer(task, path, server, tmp_path, adapter, top_k=2, top_p=0.8, max_steps=1)
    trainer.train()
    (difference,) = logged(trainer, "sampling/logp_difference_max")
    assert difference < 2e-5


SCRIPT = """
import json, sys
from tests.support import vllm_cpu
vllm_cpu.set_up()
from tests.support.training import config
from trl_grpo_tasks import TaskGRPOTrainer
from trl_grpo_tasks.registry import get_task
model, prompts_file, output_dir, options = json.loads(sys.argv[1])
if __name__ == "__main__":
    task = get_task("prompts", {"prompts_file": prompts_file})
    args = config(output_dir, per_device_train_batch_size=4, **options)
    trainer = TaskGRPOTrainer(model, args=args, task=task, train_dataset=task.dataset("train", 4, 0))
    trainer.train()
    for line in trainer.state.log_history:
        if "loss" in line:
            print("differs by", trainer.accelerator.process_index, line["sampling/logp_difference_max"], flush=True)
"""


def test_two_processes_with_one_server(path, prompts_file, server, tmp_path):
    argument = [path, prompts_file, str(tmp_path / "run"), options_of(server, str(tmp_path / "weights"), max_steps=2)]
    out, _ = launch(SCRIPT, 2, argument, tmp_path / "run", timeout=300)
    differences = [float(value) for value in re.findall(r"differs by 0 (\S+)", out)]
    assert len(differences) == 2 and max(differences) < 2e-5, out


def test_the_command_line(path, prompts_file, server, tmp_path):
    words = ["-m", "trl_grpo_tasks.commands.main", "train", NAME, "--prompts_file", prompts_file, "--model", path]
    words += ["--constrain", "--use_vllm", "--vllm_mode", "server", "--vllm_server_base_url", server[0]]
    words += ["--vllm_weights_folder", str(tmp_path / "weights"), "--output_dir", str(tmp_path / "run")]
    words += ["--max_steps", "1", "--num_generations", "4", "--per_device_train_batch_size", "8"]
    words += ["--max_completion_length", "12", "--eval_before_and_after", "False"]

    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (tmp_path / "run" / "training_metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["sampling/logp_difference_max"] < 2e-5


def ask(server, path, row, **more):
    body = {"model": path, "prompt": [5, 6], "max_tokens": 30, "vllm_xargs": {"row": row, **more}}
    return httpx.post(f"{server[0]}/v1/completions", json=body, timeout=60)


def is_allowed(answer):
    return answer.status_code == 200 and re.fullmatch("(yes|no){1,3}", answer.json()["choices"][0]["text"])


def test_an_invalid_row_is_a_bad_request(server, path):
    for row in ("no JSON", "[1]", "{}", json.dumps({**ROW, "pattern": "("})):
        answer = ask(server, path, row)
        assert answer.status_code == 400 and "row" in answer.text
        assert is_allowed(ask(server, path, json.dumps(ROW))), server[1].read_text()[-3000:]


def test_a_request_cannot_name_code_to_load(server, path):
    row = {**ROW, "rewards": {"os:system": 1.0, "regex": 1.0}, "task": "os", "grammar": "os:system"}
    answer = ask(server, path, json.dumps(row), task="os")
    assert answer.status_code == 400 or is_allowed(answer)


def test_another_option_of_the_task_is_refused_before_the_first_step(task, path, server, tmp_path):
    other = get_task(NAME, {"prompts_file": task.options.prompts_file, "target_length": 7})
    with pytest.raises(ValueError, match="--target_length of the task is not set on the server and 7 in this run"):
        make_trainer(other, path, server, tmp_path)
