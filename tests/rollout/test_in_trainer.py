"""Rollouts in the trainer: scoring matches sampling, and vLLM receives the right grammar."""

import numpy as np
import pytest
import torch

from tests.support.training import toy_trainer
from trl_grpo_tasks.constraints import ChoiceTreeConstraint, Grammar, GrammarConstraint
from trl_grpo_tasks.constraints.table import MaskTable
from trl_grpo_tasks.models.tiny import make_tokenizer
from trl_grpo_tasks.rollout import rollout


@pytest.mark.parametrize("options", [{"constrain": True}, {}, {"constrain": True, "gradient_checkpointing": True}])
@pytest.mark.parametrize("peft", [False, True], ids=["full", "lora"])
def test_scored_log_probs_equal_sampled_log_probs(tiny_path, tmp_path, monkeypatch, options, peft):
    from peft import LoraConfig

    from trl_grpo_tasks.training import generation_layer

    rollouts = []

    def recording_rollout(*args, **kwargs):
        rollouts.append(rollout(*args, **kwargs))
        return rollouts[-1]

    monkeypatch.setattr(generation_layer, "rollout", recording_rollout)
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


# ---- vLLM: the parts that can be tested without it


class FakeVLLM:
    """A stand-in for TRL's VLLMGeneration: samples under the grammar it receives, and returns log-probs."""

    def __init__(self, model, tokenizer):
        self.model, self.tokenizer, self.generation_kwargs = model, tokenizer, {}

    def sync_weights(self):
        pass

    def generate(self, prompts, **_):
        grammar = Grammar.ebnf(self.generation_kwargs["structured_outputs"]["grammar"])
        out = rollout(self.model, prompts, max_new_tokens=5, eos_token_ids=[self.tokenizer.eos_token_id],
                      constraint=GrammarConstraint(self.tokenizer, grammar), rows=[{}] * len(prompts),
                      table=MaskTable(self.model.get_output_embeddings().weight.shape[0]))  # fmt: skip
        return None, out.completion_ids, [[[logp] for logp in logps] for logps in out.logps], None


def with_fake_vllm(trainer, constraint):
    trainer.vllm_generation = FakeVLLM(trainer.model, trainer.processing_class)
    trainer.use_vllm, trainer._last_loaded_step = True, -1
    trainer._constraint = trainer._ready_constraint(constraint)
    return trainer


def test_vllm_samples_under_the_grammar_and_scoring_replays_the_masks(tiny_path, tmp_path):
    trainer = toy_trainer(tiny_path, tmp_path, constrain=True, max_steps=1)
    constraint = GrammarConstraint(trainer.processing_class, Grammar.regex("[ab]{1,2}|c"))
    with_fake_vllm(trainer, constraint)
    trainer.model.train()
    output = trainer._generate_and_score_completions([trainer.train_dataset[i] for i in (0, 0, 0, 0, 3, 3, 3, 3)])
    scored = trainer._score(output, of_reference=False)
    is_real = output["completion_mask"].bool()
    assert (output["mask_numbers"][is_real] != 0).all()
    torch.testing.assert_close(scored[is_real], output["sampling_per_token_logps"][is_real], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.regex(r"(ab|c)+[0-9]{2}(x|\(\))?"),
        Grammar.json_schema({"type": "object", "properties": {"a": {"enum": [1, 10, "ab"]}}, "required": ["a"]}),
        Grammar.ebnf('root ::= "a" root "b" | [c-e]'),
    ],
    ids=lambda grammar: grammar.kind,
)
def test_grammar_for_vllm_is_equivalent(grammar):
    tokenizer = make_tokenizer([*'0123456789abcdex,(){}":', " ", "10", "ab"], 64)
    ours = GrammarConstraint(tokenizer, grammar)
    theirs = GrammarConstraint(tokenizer, Grammar.ebnf(ours.for_vllm()["grammar"]))
    generator = np.random.default_rng(0)
    for _ in range(10):
        a, b = ours.start({}), theirs.start({})
        for _ in range(30):
            assert np.array_equal(a.mask(), b.mask())
            allowed = np.flatnonzero(np.unpackbits(a.mask().view(np.uint8), bitorder="little"))
            token = int(generator.choice(allowed))
            a.accept(token)
            b.accept(token)
            if a.finished:
                break


def test_constraints_that_vllm_cannot_apply_are_rejected(tiny_path, tmp_path):
    trainer = toy_trainer(tiny_path, tmp_path, constrain=True, max_steps=1)
    by_row = GrammarConstraint(trainer.processing_class, lambda row: Grammar.regex(row["letter"]))
    with pytest.raises(ValueError, match=r"from row to row.*set use_vllm=False"):
        with_fake_vllm(trainer, by_row)
    tree = ChoiceTreeConstraint(trainer.processing_class, lambda row: 0, lambda node: [("a", None)])
    with pytest.raises(ValueError, match="not a grammar"):
        with_fake_vllm(trainer, tree)
