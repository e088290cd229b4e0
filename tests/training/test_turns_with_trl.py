"""Conversations of several turns with transformers' generate: masks are those of fresh states, log-probs those of a
forward pass, and what is likeliest is that of our rollouts."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.enumerated import assert_recorded, every_completion
from tests.support.toy_environment import EchoTask
from tests.support.toy_repair import AdvisingToy
from tests.support.training import toy_trainer
from trl_grpo_tasks.constraints.filters import SamplingFilters
from trl_grpo_tasks.constraints.recording import RecordingProcessor
from trl_grpo_tasks.constraints.table import MaskTable
from trl_grpo_tasks.evaluation.sampler import CompletionSampler
from trl_grpo_tasks.models.loading import load_tokenizer
from trl_grpo_tasks.rewards.repair import RepairTask

ECHO = (EchoTask, {"max_completion_length": 16})
REPAIR = (AdvisingToy, {"repair_turns": 2, "constrain": True, "max_completion_length": 24})
CASES = {
    "environment": ECHO,
    "repair": REPAIR,
    "free text": (AdvisingToy, REPAIR[1] | {"constrain": False}),
    "cut off in and after an observation": (AdvisingToy, REPAIR[1] | {"max_completion_length": 9}),
    "filters": (AdvisingToy, REPAIR[1] | {"top_k": 2, "temperature": 0.7}),
}
TURNS = {"environment": {2}, "filters": {2}}  # otherwise some succeed in the first turn


def repaired(tokenizer):
    return RepairTask(AdvisingToy(), 2, 0.9, True).constraint(tokenizer)


@pytest.mark.parametrize("kind", CASES)
def test_masks_and_log_probs_are_those_of_the_distribution_sampled_from(tiny_path, tmp_path, kind):
    task, options = CASES[kind]
    trainer = toy_trainer(tiny_path, tmp_path, task(), **options, rollout="trl", num_generations=8)
    trainer.model.train()
    inputs = [trainer.train_dataset[i] for i in (0, 3) for _ in range(8)]
    output = trainer._generate_and_score_completions(inputs)
    assert_recorded(trainer, output)
    record = trainer.latest_rollout
    constraint, lengths = trainer.generation.constraint, [len(ids) for ids in record.completion_ids]
    if kind.startswith("cut off"):
        ends = {ids[-1] for ids in record.completion_ids if len(ids) == 9}
        assert max(lengths) == 9 and len(ends) > 1 and trainer._tokenizer.eos_token_id not in ends
    else:
        pairs = list(zip(record.rows, record.completion_ids, strict=True))
        assert {len(constraint.turns_of(*pair)) for pair in pairs} == TURNS.get(kind, {1, 2})
        assert record.completions == [constraint.text_of(*pair) for pair in pairs]


@pytest.mark.parametrize("length", [24, 9])
def test_the_likeliest_conversation_is_that_of_our_rollouts(tiny_path, length):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_path).eval(), load_tokenizer(tiny_path)
    for weight in model.parameters():  # whose tokens after one prompt are hardly those after another
        weight.data.mul_(5)
    rows, found = AdvisingToy().dataset("train", 6, 0), []
    for is_ours in (True, False):
        sampler = CompletionSampler(model, tokenizer, 0.0, length, repaired(tokenizer), batch_size=4)
        sampler._decoder = sampler._decoder if is_ours else None
        found.append(sampler.sample(rows))
    assert found[0] == found[1] and len({one.text for one in found[0]}) > 1


def test_every_conversation_is_recorded_as_its_fresh_states_allow(tiny_path):
    """All of them as one batch, whose rows end at different positions; finished rows may get any token."""
    tokenizer = load_tokenizer(tiny_path)
    constraint, row = repaired(tokenizer), AdvisingToy().dataset("train", 1, 0)[0]
    asked, constraint.replies = [], None
    answers = constraint.answers
    constraint.answers = lambda questions: (asked.append(len(questions)), answers(questions))[1]
    completions = every_completion(constraint, row)
    asked.clear()
    table, size = MaskTable(len(tokenizer)), len(completions)
    processor = RecordingProcessor([row] * size, 1.0, SamplingFilters(), constraint, table)
    input_ids, steps = torch.zeros(size, 1, dtype=torch.long), max(len(ids) for ids, _ in completions)
    for t in range(steps):
        processor(input_ids, torch.zeros(size, len(tokenizer)))
        tokens = [ids[t] if t < len(ids) else tokenizer.unk_token_id for ids, _ in completions]
        input_ids = torch.cat([input_ids, torch.tensor(tokens)[:, None]], 1)
        assert processor.have_ended(input_ids, None).tolist() == [t + 1 >= len(ids) for ids, _ in completions]
    processor.finish(processor.ids)
    assert processor.ids == [ids for ids, _ in completions]
    for masks, logps, (_, sets) in zip(processor.masks, processor.logps, completions, strict=True):
        assert [table.ids(number).tolist() for number in masks] == sets
        assert logps == pytest.approx([-torch.tensor(float(len(one))).log().item() for one in sets])
    assert len(asked) == 2 and sum(asked) == size, "turns that end in the same step are answered together"
