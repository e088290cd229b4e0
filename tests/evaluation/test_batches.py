"""Batch sizes of evaluations: how many completions are generated at a time, and that it does not change them."""

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from tests.commands.test_train import results, words
from tests.evaluation.test_evaluate import ROWS, TASK, run
from tests.support.training import toy_trainer
from trl_grpo_tasks.commands import train as command
from trl_grpo_tasks.evaluation import evaluate, sampler
from trl_grpo_tasks.models.loading import load_tokenizer
from trl_grpo_tasks.rollout import Decoder
from trl_grpo_tasks.task import EditorError


class Meter:
    """Counts the rows that a decoder holds at a time, in each rollout."""

    def __init__(self, monkeypatch):
        self.most: list[int] = []
        allocate = Decoder._allocate
        held = set()

        def counting_allocate(decoder, *args):
            assert not held
            self.most.append(0)
            allocate(decoder, *args)
            add, release = decoder.cache.add, decoder.cache.release

            def counting_add(row, prompt):
                held.add(row)
                self.most[-1] = max(self.most[-1], len(held))
                return add(row, prompt)

            def counting_release(row):
                held.remove(row)
                release(row)

            decoder.cache.add, decoder.cache.release = counting_add, counting_release

        monkeypatch.setattr(Decoder, "_allocate", counting_allocate)


@pytest.fixture
def meter(monkeypatch):
    return Meter(monkeypatch)


@pytest.fixture(scope="module")
def loaded(tiny_path):
    return AutoModelForCausalLM.from_pretrained(tiny_path), load_tokenizer(tiny_path)


@pytest.fixture(scope="module")
def limited(tiny_path):
    """A model whose rotary embeddings change beyond 10 tokens; a prompt of the toy task has 3."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config = AutoConfig.from_pretrained(tiny_path, max_position_embeddings=10, rope_parameters=rope)
    return AutoModelForCausalLM.from_pretrained(tiny_path, config=config)


def texts(evaluation):
    return [sample.completion for sample in evaluation.samples]


@pytest.mark.parametrize(
    ("constrain", "options", "most"),
    [
        (True, {}, [24]),
        (False, {"rollout_batch_size": 3}, [3]),
        (True, {"rollout_batch_size": 1}, [1]),
        (False, {"batch_size": 7}, [7, 7, 7, 3]),
        (True, {"batch_size": 7, "rollout_batch_size": 4}, [4, 4, 4, 3]),
    ],
)
def test_rows_at_a_time_do_not_change_greedy_completions(loaded, meter, constrain, options, most):
    constraint = TASK.constraint(loaded[1]) if constrain else None
    found = texts(run(*loaded, temperature=0, constraint=constraint, **options))
    assert meter.most == most
    assert found == texts(run(*loaded, temperature=0, constraint=constraint, batch_size=1))


def test_many_samples_take_several_rollouts(loaded, meter, monkeypatch):
    """So that samples are scored and kept while others are generated; 24 samples in batches of 10."""
    monkeypatch.setitem(evaluate.ROLLOUT_ROWS, "cpu", 10)
    run(*loaded)
    assert meter.most == [10, 10, 4]


@pytest.mark.parametrize(("options", "sizes"), [({}, [10, 10, 4]), ({"rollout_batch_size": 5}, [5, 5, 5, 5, 4])])
def test_transformers_generates_small_batches_too(loaded, meter, monkeypatch, options, sizes):
    model, tokenizer = loaded
    wanted = texts(run(model, tokenizer, temperature=0))
    monkeypatch.setattr(sampler, "unsupported_reason", lambda _: "of a test")
    monkeypatch.setattr(sampler, "PLAIN_BATCH", 10)
    generate, found = model.generate, []

    def counting_generate(**kwargs):
        found.append(len(kwargs["input_ids"]))
        return generate(**kwargs)

    monkeypatch.setattr(model, "generate", counting_generate)
    assert texts(run(model, tokenizer, temperature=0, **options)) == wanted
    assert found == sizes and meter.most == [24]


@pytest.mark.parametrize(("length", "is_ours"), [(7, True), (8, False)])
def test_texts_beyond_the_length_limit_are_generated_by_transformers(limited, loaded, meter, capsys, length, is_ours):
    evaluation = run(limited, loaded[1], max_completion_length=length, batch_size=8)
    assert len(evaluation.samples) == 24 and bool(meter.most) == is_ours
    told = "transformers' generate samples some completions, because the rotary embeddings of this model depend on "
    told += "the length beyond 10 tokens, and a prompt of 3 tokens with a completion of up to 8 exceeds that\n"
    assert capsys.readouterr().out == ("" if is_ours else told)


def test_an_editor_needs_texts_within_the_length_limit(limited, loaded):
    sampling = sampler.CompletionSampler(limited.eval(), loaded[1], 1.0, 8, None)
    with pytest.raises(EditorError, match=r"an editor needs the fast rollout, but the rotary .* exceeds that"):
        sampling.sample(ROWS, editor=object())


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({}, [24]),
        ({"per_device_eval_batch_size": 8, "rollout_batch_size": 5}, [5, 5, 5]),  # 8: TRL's default, but given
    ],
)
def test_batch_sizes_of_the_eval_command(tmp_path, meter, options, most):
    given = {"eval_rows": 6, "samples": 4, "eval_only": True, "temperature": 0, **options}
    assert command.main(words(tmp_path, **given)) == 0
    assert meter.most == most and len(results(tmp_path, "evaluation.json")["model"]["samples"]) == 24


@pytest.mark.parametrize(("limit", "most"), [(None, {8, 4}), (3, {3})])
def test_batch_sizes_of_evaluations_during_training(tiny_path, tmp_path, meter, limit, most):
    """Rollouts of 8 completions in training and of 4 in evaluation, from 3 held-out rows with 4 completions each."""
    sizes = {"per_device_eval_batch_size": 4, "rollout_batch_size": limit, "eval_rows": 3}
    trainer = toy_trainer(
        tiny_path, tmp_path, rollout="fast", max_steps=1, eval_strategy="steps", eval_steps=1, **sizes
    )
    trainer.train()
    assert set(meter.most) == most and len(meter.most) == 1 + 3


def test_training_beyond_the_length_limit_falls_back_to_trl(limited, loaded, tmp_path, meter, capsys):
    limited.name_or_path = loaded[0].name_or_path  # where TRL finds the tokenizer
    told = "TRL generates the completions of some rollouts, because the rotary embeddings of this model"
    for length, is_ours in ((7, True), (8, False)):
        meter.most.clear()
        options = {"rollout": "fast", "max_steps": 2, "max_completion_length": length, "constrain": True}
        toy_trainer(limited, tmp_path / str(length), **options).train()
        assert len(meter.most) == (2 if is_ours else 0)
        assert capsys.readouterr().out.count(told) == (0 if is_ours else 1)
