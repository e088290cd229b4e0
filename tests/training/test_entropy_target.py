"""The entropy target: the entropy is that of the constrained policy over the tokens of the loss, and the coefficient
follows it, over micro-batches and processes, and after resuming."""

import pytest
import torch

from tests.support.toy import LETTERS
from tests.support.training import config, parameters, run_processes, toy_trainer
from tests.training.test_distributed import SCRIPT

ADAPTIVE = {"entropy_coef": 0.05, "entropy_coef_delta": 0.02, "constrain": True}


def dense_entropies(trainer, batch):
    """Entropy and number of allowed tokens at each position of a batch's completions, from float64 logits of the whole
    vocabulary and the rule of the toy task's constraint."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    length = batch["completion_ids"].shape[1]
    with torch.no_grad():
        logits = trainer.model(ids, attention_mask=mask).logits[:, -length - 1 : -1].double() / trainer.temperature
    letters, end = trainer._tokenizer.convert_tokens_to_ids(list(LETTERS)), trainer._tokenizer.eos_token_id
    entropies, allowed = torch.zeros(logits.shape[:2]).double(), torch.zeros(logits.shape[:2])
    for t in range(length):  # one to three letters, then the end
        kept = logits[:, t, letters * (t < 3) + [end] * (t > 0)]
        p = kept.softmax(-1)
        entropies[:, t], allowed[:, t] = -(p * p.log()).sum(-1), kept.shape[-1]
    return entropies, allowed


@pytest.mark.parametrize("loss_tokens", ["all", "decisions"])
def test_the_coefficient_follows_the_entropy_of_the_constrained_policy(tiny_path, tmp_path, loss_tokens):
    """Two micro-batches per step. The controller of the text: up by delta at or below the target, else down, within
    bounds; applied in a step after one at or below the target."""
    options = ADAPTIVE | {"loss_tokens": loss_tokens, "gradient_accumulation_steps": 2, "max_steps": 8}
    target = 1.29 if loss_tokens == "all" else 1.505
    trainer = toy_trainer(tiny_path, tmp_path, entropy_target=target, entropy_coef_max=0.07, **options)
    seen = []
    compute = trainer._compute_loss

    def observed(model, inputs):
        entropies, allowed = dense_entropies(trainer, inputs)
        loss = compute(model, inputs)
        counted = inputs["completion_mask"] * (allowed > (1 if loss_tokens == "decisions" else 0))
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


def test_a_resumed_run_is_the_same_bit_for_bit(tiny_path, tmp_path):
    options = ADAPTIVE | {"entropy_target": 1.29, "gradient_accumulation_steps": 2, "max_steps": 5, "logging_steps": 2}
    options |= {"save_strategy": "steps", "save_steps": 1, "steps_per_generation": 4, "per_device_train_batch_size": 4}
    whole = toy_trainer(tiny_path, tmp_path, **options)
    whole.train()
    wanted, metrics = parameters(whole), (tmp_path / "training_metrics.jsonl").read_text()
    assert '"entropy_coef"' in metrics and 0 < whole.entropy_coef != 0.05
    for step in (1, 2, 3, 4):
        again = toy_trainer(tiny_path, tmp_path, **options)
        again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert (tmp_path / "training_metrics.jsonl").read_text() == metrics, step
        assert again.entropy_coef == whole.entropy_coef
        assert all(value.equal(wanted[name]) for name, value in parameters(again).items()), step


def test_a_target_keeps_the_entropy_up(tiny_path, tmp_path):
    """Without it, training on one letter makes the policy certain."""
    found = {}
    for target in (None, 1.0):
        options = {"constrain": True, "max_steps": 60, "train_rows": 2, "learning_rate": 3e-2}
        options |= {"entropy_target": target, "entropy_coef_delta": 0.02, "lr_scheduler_type": "constant"}
        trainer = toy_trainer(tiny_path, tmp_path / str(target), **options)
        trainer.train()
        logs = [line["entropy"] for line in trainer.state.log_history if "entropy" in line]
        assert len(logs) == 60
        found[target] = sum(logs[-20:]) / 20
    assert found[None] < 0.1 and found[1.0] > 0.5


@pytest.mark.slow
def test_two_processes_have_one_coefficient(tiny_path, tmp_path):
    """Completions are fixed. The entropy of both processes together decides, as in one process."""
    options = ADAPTIVE | {"entropy_target": 1.287, "num_generations": 6, "max_steps": 5, "learning_rate": 1e-3}
    _, one = run_processes(SCRIPT, tiny_path, tmp_path / "one", 1, options | {"per_device_train_batch_size": 12})
    _, two = run_processes(SCRIPT, tiny_path, tmp_path / "two", 2, options | {"per_device_train_batch_size": 6})
    coefficients = [[line["entropy_coef"] for line in log] for log in (one, two)]
    assert coefficients[0] == coefficients[1] and len(set(coefficients[0])) > 1
    for a, b in zip(one, two, strict=True):
        assert a["entropy"] == pytest.approx(b["entropy"], abs=1e-4)


def test_options(tmp_path):
    off = config(tmp_path)
    assert not off.use_adaptive_entropy and off.entropy_target is None
    on = config(tmp_path, entropy_target=0.7)
    assert on.use_adaptive_entropy and on.entropy_target == 0.7
    assert config(tmp_path, use_adaptive_entropy=True).entropy_target == 0.2, "TRL's default"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"entropy_target": 0.0}, "entropy_target=0.0 must be above 0"),
        ({"entropy_target": 1.0, "entropy_coef_delta": 0.0}, "entropy_coef_delta=0.0 must be above 0"),
        ({"entropy_target": 1.0, "entropy_coef": 2.0}, "entropy_coef=2.0 must lie between .* entropy_coef_max=1.0"),
        ({"entropy_target": 1.0, "entropy_coef_min": 0.1}, "entropy_coef=0.0 must lie between entropy_coef_min=0.1"),
    ],
)
def test_options_that_do_not_fit(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **options)
