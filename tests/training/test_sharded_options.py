"""What does not work with sharded weights is refused, with a way out, before anything is loaded or trained."""

import sys
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


@pytest.fixture
def launched(monkeypatch):
    """Sets the variables that `accelerate launch` sets for FSDP."""

    def launch(version="2", checkpoints="FULL_STATE_DICT", efficient="false"):
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
        monkeypatch.setenv("FSDP_VERSION", version)
        monkeypatch.setenv("FSDP_STATE_DICT_TYPE", checkpoints)
        monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", efficient)

    return launch


def assert_refused(message, *arguments, **options):
    with pytest.raises(ValueError, match=message):
        config(*arguments, **options)


@pytest.mark.parametrize(
    "option", [{"constrain": True}, {"top_p": 0.9}, {"replay_size": 4}, {"reference_mode": "ema", "beta": 0.1}]
)
def test_the_first_version_of_fsdp_is_refused_where_only_the_second_works(tmp_path, monkeypatch, launched, option):
    launched("1")
    assert_refused("use FSDP2", tmp_path, **option)
    launched("2")
    config(tmp_path, **option)
    monkeypatch.delenv("FSDP_VERSION")  # accelerate then takes the first version
    assert_refused("use FSDP2", tmp_path, **option)
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    assert_refused("use FSDP2", tmp_path, fsdp=True, fsdp_config={"version": 1}, **option)
    config(tmp_path, fsdp=True, fsdp_config={"version": 2}, **option)
    config(tmp_path, fsdp=True, **option)


def test_models_that_cannot_be_sharded_are_refused(tmp_path, launched, tiny_path, bert_path):
    quantised = {"quantization_config": object()}
    for model, more, kind in ((bert_path, {"task": FillTask()}, "masked"), (tiny_path, quantised, "quantised")):
        launched()
        with pytest.raises(ValueError, match=f"{kind}.* cannot be sharded; use DDP"):
            TaskGRPOTrainer(model, args=config(tmp_path), **({"task": ToyTask()} | more))
    assert train.main(["infill", "--output_dir", str(tmp_path), "--use_cpu", "true"]) == 2


def test_fsdp_must_load_weights_in_all_processes(tmp_path, monkeypatch, launched):
    """Otherwise the reference model of all processes but the first is empty."""
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")  # as `accelerate launch` sets it by default
    config(tmp_path)
    launched(efficient="true")
    assert_refused("fsdp_cpu_ram_efficient_loading: false", tmp_path)


def test_fsdp_must_save_whole_weights(tmp_path, monkeypatch, launched):
    """Otherwise transformers saves no model at the end of the training."""
    message = "SHARDED_STATE_DICT would save no model"
    launched(checkpoints="SHARDED_STATE_DICT")
    assert_refused(message, tmp_path)
    monkeypatch.delenv("FSDP_STATE_DICT_TYPE")  # accelerate then saves shards
    assert_refused(message, tmp_path)
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    assert_refused(message, tmp_path, fsdp=True, fsdp_config={"state_dict_type": "SHARDED_STATE_DICT"})


def test_zero3_must_save_whole_weights(tmp_path):
    args = config(tmp_path, constrain=True, top_k=3, replay_size=4, beta=0.1, reference_mode="ema")
    args.deepspeed_plugin = SimpleNamespace(zero_stage=3, zero3_save_16bit_model=False)
    with pytest.raises(ValueError, match="zero3_save_16bit_model: true"):
        check_sharding(args)
    args.deepspeed_plugin.zero3_save_16bit_model = True
    check_sharding(args)
    args.deepspeed_plugin = SimpleNamespace(zero_stage=2, zero3_save_16bit_model=False)
    check_sharding(args)


@pytest.mark.parametrize("kind", ["1", "2", "zero3"])
def test_offloaded_references_are_refused(tmp_path, launched, kind):
    args = config(tmp_path, beta=0.1, offload_reference=True)
    if kind == "zero3":
        args.deepspeed_plugin = SimpleNamespace(zero_stage=3, zero3_save_16bit_model=True)
    else:
        launched(kind)
    with pytest.raises(ValueError, match="offloaded references"):
        check_sharding(args)


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
