"""Rollouts in the trainer: options for which TRL generates. training/test_consistency.py compares log-probs."""

import pytest

from tests.support.training import toy_trainer


@pytest.mark.parametrize("options", [{"cache_implementation": "dynamic"}, {"generation_kwargs": {"num_beams": 1}}])
def test_unsupported_options_fall_back_to_trl_with_a_printed_reason(tiny_path, tmp_path, capsys, options):
    trainer = toy_trainer(tiny_path, tmp_path, rollout="fast", max_steps=1, **options)
    output = capsys.readouterr().out
    assert output.count("TRL generates the completions, because ") == 1 and next(iter(options)) in output
    trainer.train()
