"""What does not work with sharded weights is refused, with a way out, before anything is loaded or trained."""

import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.toy import ToyTask
from tests.support.toy_fill import FillTask
from tests.support.training import config, toy_trainer
from trl_grpo_tasks import TaskGRPOTrainer
from trl_grpo_tasks.commands import train
from trl_grpo_tasks.models.checkpoints import CheckpointError, mark_complete
from trl_grpo_tasks.training import deepspeed_checkpoint
from trl_grpo_tasks.training.sharding import check_sharding

LAUNCHED = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}  # fmt: skip


@pytest.fixture
def launched(monkeypatch):
    """Sets the variables that `accelerate launch` sets for FSDP; None: it does not set this one."""

    def launch(**changed):
        for name, value in (LAUNCHED | changed).items():
            monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)

    return launch


NO_LAUNCH = dict.fromkeys(LAUNCHED)
FIRST = "use FSDP2"
SHARDS = "SHARDED_STATE_DICT would save no model"
EMPTY = "fsdp_cpu_ram_efficient_loading: false"  # the reference would be empty in all processes but the first
OFFLOADED = {"beta": 0.1, "offload_reference": True}


def fsdp(**settings):
    return {"fsdp": True, "fsdp_config": settings}


@pytest.mark.parametrize(
    ("variables", "options", "message"),
    [
        ({"FSDP_VERSION": "1"}, {"constrain": True}, FIRST),
        ({"FSDP_VERSION": "1"}, {"top_p": 0.9}, FIRST),
        ({"FSDP_VERSION": "1"}, {"reference_mode": "ema", "beta": 0.1}, FIRST),
        ({"FSDP_VERSION": None}, {"replay_size": 4}, FIRST),  # accelerate then takes the first version
        (NO_LAUNCH, {"constrain": True} | fsdp(version=1), FIRST),
        ({}, {"constrain": True, "top_p": 0.9, "replay_size": 4, "reference_mode": "ema", "beta": 0.1}, None),
        (NO_LAUNCH, {"constrain": True} | fsdp(version=2), None),
        (NO_LAUNCH, {"constrain": True, "fsdp": True}, None),
        ({"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}, {}, SHARDS),
        ({"FSDP_STATE_DICT_TYPE": None}, {}, SHARDS),  # accelerate then saves shards
        (NO_LAUNCH, fsdp(state_dict_type="SHARDED_STATE_DICT"), SHARDS),
        ({"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}, {}, EMPTY),
        (NO_LAUNCH | {"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}, {}, None),
        ({"FSDP_VERSION": "1"}, OFFLOADED, "offloaded references"),
        ({}, OFFLOADED, "offloaded references"),
    ],
)
def test_options_of_fsdp(tmp_path, launched, variables, options, message):
    launched(**variables)
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        config(tmp_path, **options)


ALL = {"constrain": True, "top_k": 3, "replay_size": 4, "beta": 0.1, "reference_mode": "ema"}


@pytest.mark.parametrize(
    ("stage", "saves_whole", "options", "message"),
    [
        (3, False, ALL, "zero3_save_16bit_model: true"),
        (3, True, ALL, None),
        (2, False, ALL | OFFLOADED, None),
        (3, True, OFFLOADED, "offloaded references"),
    ],
)
def test_options_of_deepspeed(tmp_path, stage, saves_whole, options, message):
    args = config(tmp_path, **options)
    args.deepspeed_plugin = SimpleNamespace(zero_stage=stage, zero3_save_16bit_model=saves_whole)
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        check_sharding(args)


def test_models_that_cannot_be_sharded_are_refused(tmp_path, launched, tiny_path, bert_path):
    launched()
    quantised = {"quantization_config": object()}
    for model, more, kind in ((bert_path, {"task": FillTask()}, "masked"), (tiny_path, quantised, "quantised")):
        with pytest.raises(ValueError, match=f"{kind}.* cannot be sharded; use DDP"):
            TaskGRPOTrainer(model, args=config(tmp_path), **({"task": ToyTask()} | more))
    assert train.main(["infill", "--output_dir", str(tmp_path), "--use_cpu", "true"]) == 2


def test_editors_are_refused(tmp_path, launched, capsys):
    """Sharded weights are evaluated after the training; an editor that fails then would come hours too late."""
    launched()
    words = ["--task", "brick", "--constrain", "True", "--editor", "rollback", "--output_dir", str(tmp_path)]
    assert train.main([*words, "--use_cpu", "True", "--report_to", "none"]) == 2
    assert "--editor rollback needs whole weights" in capsys.readouterr().err


def test_checkpoints_that_deepspeed_cannot_load_are_refused(tiny_path, tmp_path):
    toy_trainer(tiny_path, tmp_path, max_steps=1, save_strategy="steps", save_steps=1).train()
    for steps, processes, message in ((1, 1, "is the end of the run; .* raise max_steps"), (2, 3, "use 3 processes")):
        trainer = toy_trainer(tiny_path, tmp_path, max_steps=steps)
        trainer.is_deepspeed_enabled = trainer.args.load_best_model_at_end = True
        file = tmp_path / "checkpoint-1" / "task_state_0.pt"
        torch.save(torch.load(file) | {"processes": processes}, file)
        mark_complete(file.parent)
        with pytest.raises(CheckpointError, match=message):
            trainer.train(resume_from_checkpoint=True)


def test_a_conversion_starts_anew_and_names_optimizers_that_cannot_be_converted(tmp_path, monkeypatch):
    """A conversion that ended early leaves nothing that the next one takes for its own. DeepSpeed is not needed."""
    converted = []

    def main(args):
        folder = Path(args.output_folder)
        assert not folder.exists() and not (tmp_path / "latest_universal").exists()
        folder.mkdir()
        (tmp_path / "latest_universal").write_text(folder.name)
        converted.append(args.input_folder)
        if len(converted) == 1:
            raise KeyError("exp_avg")

    module = SimpleNamespace(ds_to_universal=SimpleNamespace(main=main))
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(checkpoint=module))
    monkeypatch.setitem(sys.modules, "deepspeed.checkpoint", module)
    (tmp_path / "latest").write_text("global_step2\n")
    with pytest.raises(CheckpointError, match=r"of Adam only, .* \('exp_avg' is missing"):
        deepspeed_checkpoint.convert(str(tmp_path))
    deepspeed_checkpoint.convert(str(tmp_path))
    assert converted == [str(tmp_path / "global_step2")] * 2
    deepspeed_checkpoint.remove(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]
