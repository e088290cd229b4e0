"""A run killed with SIGKILL and resumed is, bit for bit, the run that was not killed."""

import json
import shutil
import time
from pathlib import Path

import pytest
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file

from tests.commands.test_train import assert_same_weights
from tests.support.exhaustive import exhaustive_but
from tests.support.forked import Processes
from tests.support.toy import ToyTask
from tests.support.training import config, parameters, resumed, toy_trainer
from tests.training.test_distributed import EXTRAS, EveryTask
from trl_grpo_tasks import TaskGRPOTrainer
from trl_grpo_tasks.models import checkpoints

# Groups of 8 with about one success in ten: some have signal, some have none, so that replay is used.
ALL_ON = {
    "num_generations": 8, "per_device_train_batch_size": 16, "constrain": True, "beta": 0.1, "reference_mode": "ema",
    "ema_alpha": 0.7, "kl_target": 0.01, "replay_size": 6, "resample_rounds": 1, "curriculum": True,
    "curriculum_window": 32, "curriculum_advance": 0.02, "curriculum_fall_back": 0.0, "max_steps": 14,
    "save_strategy": "steps", "save_steps": 3, "save_total_limit": 2, "num_iterations": 2, "steps_per_generation": 2,
    "gradient_accumulation_steps": 1, "logging_steps": 2, "advantage_estimator": "mean",
    "component_weights": {"success": 1.0, "match": 0.0, "short": 0.0},
}  # fmt: skip
SCRIPT = """
import json, sys
from tests.support.training import parameters, toy_trainer
from peft import LoraConfig
model, output_dir, options, resume, peft = json.loads(sys.argv[1])
config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"]) if peft else None
trainer = toy_trainer(model, output_dir, peft_config=config, **options)
trainer.train(resume_from_checkpoint=resume)
trainer.save_model(output_dir + "/final")
"""


def run(model, output_dir, options, resume=False, peft=False, kill_at=None):
    """Train in a process of its own; `kill_at` is a file whose appearance means: SIGKILL now."""
    file = Path(output_dir).parent / f"{Path(output_dir).name}.py"
    file.write_text(SCRIPT)
    process = Processes(file, [model, str(output_dir), options, resume, peft])
    deadline = time.monotonic() + 240
    while kill_at is not None and not kill_at() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    if kill_at is None:
        assert process.wait(240) == 0, process.err.read_text()[-3000:]
    process.kill()


def lines_written(output_dir, count):
    path = Path(output_dir) / "training_metrics.jsonl"
    return lambda: path.is_file() and len(path.read_text().splitlines()) >= count


@pytest.mark.parametrize("peft", exhaustive_but([False], [False, True]), ids=["full", "lora"])
def test_killed_and_resumed_is_bit_for_bit_the_same(tiny_path, tmp_path, peft):
    options = ALL_ON | {"rollout": "fast" if peft else "trl"}
    run(tiny_path, tmp_path / "whole", options, peft=peft)
    # killed three times: after some logging, while a checkpoint is being written, and later again
    killed = tmp_path / "killed"
    run(tiny_path, killed, options, peft=peft, kill_at=lines_written(killed, 2))
    if checkpoints.newest_complete(killed) is None:
        run(tiny_path, killed, options, peft=peft, kill_at=lambda: (killed / "checkpoint-6").is_dir())
    run(tiny_path, killed, options, True, peft, kill_at=lambda: (killed / "checkpoint-9").is_dir())
    run(tiny_path, killed, options, True, peft, kill_at=lines_written(killed, 6))
    run(tiny_path, killed, options, True, peft)
    assert_same_weights(tmp_path / "whole" / "final", killed / "final")
    metrics = [(tmp_path / name / "training_metrics.jsonl").read_text() for name in ("whole", "killed")]
    assert metrics[0] == metrics[1]
    logged = [json.loads(line) for line in metrics[0].splitlines()]
    assert len(logged) == 7 and any(line.get("replay/replaced_groups") for line in logged), "replay was never used"
    assert len({line.get("beta") for line in logged}) > 2 and any(line.get("curriculum/level") for line in logged)


EVERY_STEP = ALL_ON | {"max_steps": 6, "save_steps": 1, "save_total_limit": None, "logging_steps": 3}


def test_resuming_at_every_step(tiny_path, tmp_path):
    """Checkpoints at every step; continuing from each gives the end of the uninterrupted run. A rollout, with the
    advantages of its tokens, lasts for four steps."""

    def make():
        return toy_trainer(tiny_path, tmp_path, EveryTask(), **EVERY_STEP, **EXTRAS)

    for whole, again in resumed(make, tmp_path, range(1, 6)):
        ours, theirs = (one.extras["own_successes"].state.state_dict() for one in (whole, again))
        assert ours == theirs and again.entropy_coef == whole.entropy_coef
    first, last = map(json.loads, (tmp_path / "training_metrics.jsonl").read_text().splitlines())
    assert 0 < last["discount/mean"] < 1 and last["own_successes/loss"] > 0 and first["entropy_coef"] != 0.05


@pytest.mark.exhaustive
def test_resuming_across_epochs(tiny_path, tmp_path):
    """Two prompts per step of 6 rows: step 4 begins the second epoch, which has an order of its own."""
    options = EVERY_STEP | {"num_iterations": 1, "curriculum": False}
    assert len(list(resumed(lambda: toy_trainer(tiny_path, tmp_path, **options), tmp_path, (2, 3, 4, 5)))) == 4


def test_resuming_a_stream(tiny_path, tmp_path):
    """A stream of 6 rows and 2 prompts per step: step 4 begins to read it again, in another order."""
    options = {"max_steps": 5, "save_strategy": "steps", "save_steps": 1, "logging_steps": 2}

    def streaming():
        rows = [{"prompt": row["prompt"]} for row in ToyTask().dataset("train", None, 0)]
        return TaskGRPOTrainer(
            tiny_path,
            reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
            args=config(tmp_path, **options),
            train_dataset=Dataset.from_list(rows).to_iterable_dataset(),
        )

    assert len(list(resumed(streaming, tmp_path, (2, 3, 4)))) == 3


def test_a_run_that_went_back_does_not_go_on_from_what_it_left(tiny_path, tmp_path, capsys):
    """Back to step 1, where the steps after it had failed, and stopped before it is as far as before."""
    options = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1}
    toy_trainer(tiny_path, tmp_path, **options).train()
    slower = toy_trainer(tiny_path, tmp_path, **options | {"learning_rate": 1e-3, "max_steps": 2})
    slower.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert f"{tmp_path / 'checkpoint-3'} is kept" in capsys.readouterr().out
    assert (tmp_path / "checkpoint-3" / "model.safetensors").is_file()
    found, skipped = checkpoints.newest_intact(tmp_path)
    assert found.name == "checkpoint-2" and [path.name for path in skipped] == ["checkpoint-3"]
    assert checkpoints.damage(tmp_path / "checkpoint-3") is None, "it can still be resumed by name"
    weights = load_file(found / "model.safetensors")
    assert all(p.equal(weights[name]) for name, p in parameters(slower).items())
    shutil.rmtree(found)
    assert checkpoints.newest_intact(tmp_path)[0].name == "checkpoint-1", "the one that it went back to"


@pytest.mark.parametrize(("peft", "newest"), [(False, True), (True, False)], ids=["full, newest", "lora, by name"])
def test_resuming_a_finished_run_changes_nothing(tiny_path, tmp_path, capsys, peft, newest):
    """Data of 6 rows and 2 prompts a step: the run ends within an epoch, where transformers would go on."""
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "beta": 0.1}

    def trainer():
        adapter = LoraConfig(r=2, target_modules=["q_proj", "v_proj"]) if peft else None
        return toy_trainer(tiny_path, tmp_path, peft_config=adapter, **options)

    whole = trainer()
    whole.train()
    wanted, metrics = parameters(whole), (tmp_path / "training_metrics.jsonl").read_text()
    again = trainer()
    assert any(not value.equal(wanted[name]) for name, value in parameters(again).items()), "nothing was learned"
    done = again.train(resume_from_checkpoint=newest or str(tmp_path / "checkpoint-2"))
    assert done.global_step == 2 and "checkpoint-2 is the end of the run" in capsys.readouterr().out
    assert all(value.equal(wanted[name]) for name, value in parameters(again).items())
    assert (tmp_path / "training_metrics.jsonl").read_text() == metrics
