"""The trainer in place of GRPOTrainer: sampling options that log-probs cannot follow, held-out sets, errors."""

import re

import pytest
from transformers import TrainerCallback

from tests.support.toy import ToyTask
from tests.support.training import config, toy_trainer
from tests.training.test_trainer import assert_trl_bit_for_bit

INEXACT = [
    ({"repetition_penalty": 1.1}, "repetition_penalty=1.1 in the options"),
    ({"repetition_penalty": 1.1, "top_p": 0.9, "top_k": 6, "min_p": 0.01}, "repetition_penalty=1.1 in the options"),
    ({"generation_kwargs": {"repetition_penalty": 1.1}}, "repetition_penalty=1.1 in generation_kwargs"),
    ({"generation_kwargs": {"num_beams": 2, "top_k": 5, "length_penalty": -0.1}}, "num_beams=2 in generation_kwargs"),
    ({"generation_kwargs": {"no_repeat_ngram_size": 3}}, "no_repeat_ngram_size=3 in generation_kwargs"),
    ({"generation_kwargs": {"do_sample": False}}, "do_sample=False in generation_kwargs"),
    ({"generation_kwargs": {"temperature": 0.5}}, "temperature=0.5 in generation_kwargs, but temperature=1.0"),
    ({"generation_kwargs": {"length_penalty": 2.0}}, "generation_kwargs ['length_penalty'], of which it is unknown"),
]


@pytest.mark.parametrize(("options", "found"), INEXACT)
def test_inexact_sampling_is_refused_where_log_probs_must_be_exact(tmp_path, options, found):
    exact = {"constrain": True}, {"repair_turns": 2, "rollout": "fast"}, {"rollout": "auto"}
    for promise in (*exact, {"importance_sampling_correction": True}):
        with pytest.raises(ValueError, match=re.escape(found)):
            config(tmp_path, **promise, **options)


def test_inexact_sampling_is_refused_with_the_filters_of_a_task(tiny_path, tmp_path):
    with pytest.raises(ValueError, match=r"repetition_penalty=1.1 .* which top_p=0.9 needs, cannot be computed"):
        toy_trainer(tiny_path, tmp_path, repetition_penalty=1.1, top_p=0.9)


@pytest.mark.parametrize(("options", "found"), [INEXACT[i] for i in (1, 3, 6)])
def test_inexact_sampling_is_trls_otherwise_and_a_hint_is_printed(tiny_path, tmp_path, capsys, options, found):
    """The completions, and so the weights, are bit for bit TRL's."""
    assert_trl_bit_for_bit(tiny_path, tmp_path, max_steps=2, **options)
    assert capsys.readouterr().out.count(f"hint: {found}") == 1


def test_several_held_out_sets_of_a_task(tiny_path, tmp_path):
    rows = ToyTask().dataset("test", None, 0)
    options = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 1, "per_device_eval_batch_size": 4}
    trainer = toy_trainer(tiny_path, tmp_path, eval_dataset={"one": rows[:1], "all": rows}, **options)
    assert {name: len(rows) for name, rows in trainer.eval_dataset.items()} == {"one": 1, "all": 2}
    trainer.train()
    lines = [line for line in trainer.state.log_history if "eval_reward" in line]
    assert ["eval_one_loss" in line for line in lines] == [True, False]
    with pytest.raises(ValueError, match="rows of task 'toy' are dictionaries with a 'prompt', but one is 'one'"):
        toy_trainer(tiny_path, tmp_path, eval_dataset=["one"], **options)


def test_errors_before_samples_are_logged_are_raised(tiny_path, tmp_path):
    """Only the table of samples may fail; metrics that cannot be averaged, or a callback, are errors."""

    class Broken(TrainerCallback):
        def on_log(self, *args, **kwargs):
            raise RuntimeError("a callback")

    trainer = toy_trainer(tiny_path, tmp_path, log_completions=True)
    trainer.model.train()
    trainer._metrics["train"]["mine"].append("not a number")
    with pytest.raises(TypeError):
        trainer.log({"loss": 1.0})
    trainer._metrics["train"].clear()
    trainer.add_callback(Broken())
    with pytest.raises(RuntimeError, match="a callback"):
        trainer.log({"loss": 1.0})
