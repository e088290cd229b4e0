"""Log-probs as sampled against those of training: what is logged, and that each cause of a difference is named."""

import pytest
import torch
from peft import LoraConfig

from tests.support.training import toy_trainer
from trl_grpo_tasks.constraints.table import FREE
from trl_grpo_tasks.models.loading import load_model
from trl_grpo_tasks.rollout import Rollout, rollout
from trl_grpo_tasks.training import generation

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"])


def trained(tiny_path, tmp_path, **options):
    """A trainer of a model that is not flat, so that a wrong temperature or mask shows."""
    trainer = toy_trainer(tiny_path, tmp_path, **({"max_steps": 2, "rollout": "fast"} | options))
    with torch.no_grad():
        for name, p in trainer.model.named_parameters():
            if "lora_A" not in name:
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(7)) * 0.3)
    return trainer


def hints(capsys):
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("hint: log-probs of the rollout")]


@pytest.mark.parametrize(
    ("engine", "peft", "options"),
    [
        ("trl", LORA, {}),
        ("fast", None, {"constrain": True, "top_p": 0.8}),
        ("trl", None, {"constrain": True, "gradient_checkpointing": True}),
        ("fast", LORA, {"temperature": 0.6, "num_iterations": 2}),
        ("fast", None, {"replay_size": 4}),
    ],
    ids=["plain", "constrained and filtered", "checkpointing", "temperature", "replay"],
)
def test_the_difference_is_rounding(tiny_path, tmp_path, capsys, engine, peft, options):
    trainer = trained(tiny_path, tmp_path, rollout=engine, peft_config=peft, max_steps=4, **options)
    trainer.train()
    logs = [line for line in trainer.state.log_history if "loss" in line]
    seen = [line for line in logs if "sampling/logp_difference_mean" in line]
    assert len(seen) == 4 // options.get("num_iterations", 1), "once for each rollout, before it is learned from"
    for line in seen:
        assert 0 <= line["sampling/logp_difference_mean"] <= line["sampling/logp_difference_max"] < 1e-4
    assert not hints(capsys)


def provoke(trainer, monkeypatch, change):
    """Let rollouts be made by `change(make)`, where `make(**changed)` makes them."""

    def changed(model, prompt_ids, **kwargs):
        def make(**more):
            return rollout(model, prompt_ids, **(kwargs | more))

        make.prompts = prompt_ids
        return change(make, model)

    monkeypatch.setattr(generation, "rollout", changed)
    trainer.train()
    return [line for line in trainer.state.log_history if "loss" in line]


def without_the_adapter(make, model):
    with model.disable_adapter():
        return make(decoder=None)


def in_bf16(make, model):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return make(decoder=None)


def scored_without_masks(make, model):
    """As an engine that samples under masks and filters, but returns the log-probs of the model without them."""
    out = make()
    for prompt, ids, logps in zip(make.prompts, out.completion_ids, out.logps, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0].float()
        logps[:] = [logits[len(prompt) + t - 1].log_softmax(0)[token].item() for t, token in enumerate(ids)]
    return out


def filtered_unsaid(make, model):
    """As a server that filters by its own defaults and says nothing of it."""
    from trl_grpo_tasks.constraints.filters import SamplingFilters
    from trl_grpo_tasks.constraints.table import MaskTable

    out = make(filters=SamplingFilters(top_k=4), table=MaskTable(64))
    return Rollout(out.completion_ids, [[FREE] * len(ids) for ids in out.completion_ids], out.logps)


CAUSES = {
    "temperature (the rollout looks as if sampled at 0.5": ({}, lambda make, _: make(temperature=0.5)),
    "temperature (the rollout looks as if sampled at 1,": ({"temperature": 0.6}, lambda make, _: make(temperature=1)),
    "adapter": ({"peft_config": LORA}, without_the_adapter),
    "dtype (the rollout looks as if computed in bfloat16": ({}, in_bf16),
    "mask": ({"constrain": True}, scored_without_masks),
    "sampling filter (the rollout looks as if sampled without": ({"top_p": 0.6}, scored_without_masks),
    "sampling filter or mask (the rollout looks as if fewer tokens": ({}, filtered_unsaid),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_each_cause_is_named_once(tiny_path, tmp_path, capsys, monkeypatch, cause):
    options, change = CAUSES[cause]
    trainer = trained(tiny_path, tmp_path, **options)
    logs = provoke(trainer, monkeypatch, change)
    (line,) = hints(capsys)
    assert f"likely cause: {cause}" in line, line
    assert logs[0]["sampling/logp_difference_mean"] > 1e-3


def test_a_model_that_ignores_logits_processors_trains_as_in_trl(tiny_path, tmp_path):
    model = load_model(tiny_path)
    generate = model.generate
    model.generate = lambda *args, logits_processor=None, **kwargs: generate(*args, **kwargs)
    trainer = toy_trainer(model, tmp_path, rollout="trl", max_steps=1)
    trainer.train()
    assert "sampling/logp_difference_mean" not in trainer.state.log_history[0]
    with pytest.raises(RuntimeError, match="ignores logits processors"):
        toy_trainer(model, tmp_path, rollout="trl", max_steps=1, top_k=3).train()


# ---- TRL's importance-sampling correction


@pytest.mark.parametrize(
    ("engine", "mode"),
    [("fast", "token_truncate"), ("trl", "token_mask"), ("trl", "sequence_truncate"), ("fast", "sequence_mask")],
)
def test_the_correction_weighs_by_the_ratio_of_probabilities(tiny_path, tmp_path, monkeypatch, mode, engine):
    """The loss of TRL's own code path for vLLM, with log-probs that are off by a known amount."""
    options = {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": 1.3, "rollout": engine}
    options |= {"importance_sampling_correction": True, "loss_type": "grpo", "max_steps": 1}
    trainer = toy_trainer(tiny_path, tmp_path, **options)
    trainer.model.train()
    generate = trainer._generate_single_turn

    def off(*args, **kwargs):
        ids, logps = generate(*args, **kwargs)
        return ids, [[logp - 0.2 for logp in row] for row in logps]

    monkeypatch.setattr(trainer, "_generate_single_turn", off)
    output = trainer._generate_and_score_completions([trainer.train_dataset[i] for i in (0, 0, 0, 0, 3, 3, 3, 3)])
    lengths = output["completion_mask"].sum(1).float()
    is_sequence = mode.startswith("sequence")
    raw = torch.exp(0.2 * lengths) if is_sequence else torch.full_like(lengths, 0.2).exp()
    wanted = raw.clamp(max=1.3) if mode.endswith("truncate") else raw.masked_fill(raw > 1.3, 0)
    torch.testing.assert_close(output["importance_sampling_ratio"][:, 0], wanted, atol=1e-4, rtol=1e-4)
    assert trainer.use_vllm is False
    trainer.current_gradient_accumulation_steps = 1
    corrected = trainer._compute_loss(trainer.model, output)
    expected = -(output["advantages"] * wanted).mean()
    assert corrected.item() == pytest.approx(expected.item(), abs=1e-4)
