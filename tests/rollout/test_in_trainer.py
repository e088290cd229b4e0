"""Rollouts in the trainer: scoring matches sampling."""

import pytest

from tests.support.training import toy_trainer
from trl_grpo_tasks.rollout import rollout


@pytest.mark.parametrize("options", [{"constrain": True}, {}, {"constrain": True, "gradient_checkpointing": True}])
@pytest.mark.parametrize("peft", [False, True], ids=["full", "lora"])
def test_scored_log_probs_equal_sampled_log_probs(tiny_path, tmp_path, monkeypatch, options, peft):
    from peft import LoraConfig

    from trl_grpo_tasks.training.layers import generation

    rollouts = []

    def recording_rollout(*args, **kwargs):
        rollouts.append(rollout(*args, **kwargs))
        return rollouts[-1]

    monkeypatch.setattr(generation, "rollout", recording_rollout)
    adapter = LoraConfig(r=2, target_modules=["q_proj", "v_proj"]) if peft else None
    settings = {"rollout": "fast", "temperature": 0.8, "steps_per_generation": 2, "num_iterations": 2, "max_steps": 3}
    trainer = toy_trainer(tiny_path, tmp_path, peft_config=adapter, **settings, **options)
    trainer.train()
    trainer.model.train()
    trainer.model.gradient_checkpointing_disable()
    output = trainer._generate_and_score_completions([trainer.train_dataset[i] for i in (0, 0, 0, 0, 3, 3, 3, 3)])
    for row, logps in enumerate(rollouts[-1].logps):
        assert output["old_per_token_logps"][row, : len(logps)].tolist() == pytest.approx(logps, abs=1e-4)
        assert output["completion_ids"][row, : len(logps)].tolist() == rollouts[-1].completion_ids[row]


@pytest.mark.parametrize("options", [{"cache_implementation": "dynamic"}, {"generation_kwargs": {"num_beams": 1}}])
def test_unsupported_options_fall_back_to_trl_with_a_printed_reason(tiny_path, tmp_path, capsys, options):
    trainer = toy_trainer(tiny_path, tmp_path, rollout="fast", max_steps=1, **options)
    output = capsys.readouterr().out
    assert output.count("TRL generates the completions, because ") == 1 and next(iter(options)) in output
    trainer.train()
