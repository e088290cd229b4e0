"""TRL's entropy target: the entropy is that of the constrained policy over the tokens of the loss, and the coefficient
follows it, over micro-batches and processes, and after resuming."""

import pytest
import torch

from tests.support.toy import LETTERS
from tests.support.training import toy_trainer

ADAPTIVE = {"use_adaptive_entropy": True, "entropy_coef": 0.05, "entropy_coef_delta": 0.02, "constrain": True}


def dense_entropies(trainer, batch):
    """The entropy at each position of a batch's completions, from float64 logits of the whole vocabulary and the rule
    of the toy task's constraint."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    length = batch["completion_ids"].shape[1]
    with torch.no_grad():
        logits = trainer.model(ids, attention_mask=mask).logits[:, -length - 1 : -1].double() / trainer.temperature
    letters, end = trainer._tokenizer.convert_tokens_to_ids(list(LETTERS)), trainer._tokenizer.eos_token_id
    entropies = torch.zeros(logits.shape[:2]).double()
    for t in range(length):  # one to three letters, then the end
        kept = logits[:, t, letters * (t < 3) + [end] * (t > 0)]
        p = kept.softmax(-1)
        entropies[:, t] = -(p * p.log()).sum(-1)
    return entropies


def test_the_coefficient_follows_the_entropy_of_the_constrained_policy(tiny_path, tmp_path):
    """Two micro-batches per step. The controller of the text: up by delta at or below the target, else down, within
    bounds; applied in a step after one at or below the target."""
    options = ADAPTIVE | {"gradient_accumulation_steps": 2, "max_steps": 8}
    target = 1.29
    trainer = toy_trainer(tiny_path, tmp_path, entropy_target=target, entropy_coef_max=0.07, **options)
    seen = []
    compute = trainer._compute_loss

    def observed(model, inputs):
        entropies = dense_entropies(trainer, inputs)
        loss = compute(model, inputs)
        counted = inputs["completion_mask"]
        policy_loss = trainer._metrics["train"]["policy_loss"][-1]
        seen.append(((entropies * counted).sum().item(), counted.sum().item(), policy_loss - loss.item()))
        return loss

    trainer._compute_loss = observed
    trainer.train()
    coefficient, is_below, expected = 0.05, False, []
    for first, second in zip(seen[::2], seen[1::2], strict=True):
        for entropy, tokens, bonus in (first, second):
            wanted = coefficient * entropy / tokens / 2 if is_below else 0.0
            assert bonus == pytest.approx(wanted, abs=1e-6)
        entropy = (first[0] + second[0]) / (first[1] + second[1])
        is_below = entropy <= target
        coefficient = min(coefficient + 0.02, 0.07) if is_below else max(coefficient - 0.02, 0.0)
        expected.append((entropy, coefficient))
    logs = [line for line in trainer.state.log_history if "entropy_coef" in line]
    assert [line["entropy_coef"] for line in logs] == pytest.approx([c for _, c in expected])
    assert {entropy <= target for entropy, _ in expected} == {True, False}, "the target was never crossed"
    assert trainer.entropy_coef == logs[-1]["entropy_coef"]
