"""Masked log-probs, entropies and gradients, compared with reference data and with a dense float64 softmax."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.paths import DATA
from trl_grpo_tasks.constraints import scoring
from trl_grpo_tasks.constraints.base import pack
from trl_grpo_tasks.constraints.head import MaskedHead
from trl_grpo_tasks.constraints.scoring import Head, HeadScale, masked_logps_and_entropies
from trl_grpo_tasks.constraints.table import FREE, MaskTable, pad_mask_numbers, widen_mask_numbers

STEP = json.loads((DATA / "masked_policy.json").read_text())["single_step"]


def dense(hidden, weight, bias, targets, allowed, scale: HeadScale):
    """The oracle: the definition in float64 over the full vocabulary."""
    logits = hidden.double() @ weight.double().T
    if bias is not None:
        logits = logits + bias.double()
    logits = logits * scale.logit_scale
    if scale.softcap is not None:
        logits = torch.tanh(logits / scale.softcap) * scale.softcap
    logps = (logits / scale.temperature).masked_fill(~allowed, -torch.inf).log_softmax(1)
    entropy = -(logps.exp() * logps.masked_fill(~allowed, 0)).sum(1)
    return logps.gather(1, targets[:, None])[:, 0], entropy


def problem(seed, positions=40, vocab=70, hidden=12, counts=(1, 2, 5, 30, 69, 70), dtype=torch.float64, bias=False):
    """Random hidden states, an LM head, and masks that allow between one and all tokens."""
    rng = np.random.default_rng(seed)
    table = MaskTable(vocab)
    masks = []
    for count in counts:
        allowed = np.zeros(vocab, dtype=bool)
        allowed[rng.choice(vocab, count, replace=False)] = True
        masks.append(allowed)
    chosen = rng.integers(len(masks), size=positions)
    allowed = np.stack([masks[i] for i in chosen])
    numbers = np.array([table.number_of(pack(masks[i])) for i in chosen])
    targets = torch.tensor([rng.choice(np.flatnonzero(row)) for row in allowed])
    make = torch.Generator().manual_seed(seed)
    h = torch.randn(positions, hidden, generator=make, dtype=dtype, requires_grad=True)
    w = torch.randn(vocab, hidden, generator=make, dtype=dtype, requires_grad=True)
    b = torch.randn(vocab, generator=make, dtype=dtype, requires_grad=True) if bias else None
    return h, w, b, targets, numbers, table, torch.from_numpy(allowed)


@pytest.mark.parametrize("as_wide", [False, True])
def test_reference_step(as_wide, monkeypatch):
    """One step with reference values computed independently: log-probs, entropy and both gradients."""
    monkeypatch.setattr(scoring, "WIDE_TOKENS", 0 if as_wide else 100)
    monkeypatch.setattr(scoring, "WIDE", 0.0)
    table = MaskTable(6)
    numbers = np.array([table.number_of(pack(np.array(STEP["mask"])))])
    logits = torch.tensor([STEP["logits"]], dtype=torch.float64, requires_grad=True)
    scale = HeadScale(temperature=STEP["temperature"])
    head = torch.eye(6, dtype=torch.float64)
    action = torch.tensor([STEP["action"]])
    logp, entropy = masked_logps_and_entropies(logits, Head(head, None, scale), action, numbers, table)
    assert logp.item() == pytest.approx(STEP["masked_logp"][STEP["action"]], abs=1e-12)
    assert entropy.item() == pytest.approx(STEP["masked_entropy"], abs=1e-12)
    for value, name in ((logp, "grad_masked_logp"), (entropy, "grad_entropy_masked")):
        gradient = torch.autograd.grad(value.sum(), logits, retain_graph=True)[0][0]
        torch.testing.assert_close(gradient, torch.tensor(STEP[name], dtype=torch.float64), atol=1e-7, rtol=0)


@settings(max_examples=40)
@given(
    st.integers(0, 10_000),
    st.sampled_from([HeadScale(), HeadScale(0.7), HeadScale(1.3, 0.5), HeadScale(0.9, 2.0, 3.0)]),
    st.booleans(),
    st.sampled_from([0.0, 0.25, 1.0]),
    st.sampled_from([64, 2**20]),
    st.sampled_from([0, 2**26]),
)
def test_scores_match_a_dense_softmax(seed, scale, bias, wide, chunk, stored_densely):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "WIDE", wide)
        patch.setattr(scoring, "WIDE_TOKENS", 0)
        patch.setattr(scoring, "CHUNK_ELEMENTS", chunk)
        patch.setattr(scoring, "DENSE_MASK_ELEMENTS", stored_densely)
        h, w, b, targets, numbers, table, allowed = problem(seed, bias=bias, counts=(1, 2, 5, 30, 69))
        actual = masked_logps_and_entropies(h, Head(w, b, scale), targets, numbers, table)
    expected = dense(h, w, b, targets, allowed, scale)
    leaves = [h, w] + ([b] if bias else [])
    mix = torch.linspace(-1, 2, len(targets), dtype=torch.float64)
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want)
    got_grads = torch.autograd.grad((actual[0] * mix + 0.3 * actual[1] * mix).sum(), leaves)
    want_grads = torch.autograd.grad((expected[0] * mix + 0.3 * expected[1] * mix).sum(), leaves)
    for got, want in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(got, want)


def test_tokens_that_are_never_allowed_get_exactly_zero_gradient(monkeypatch):
    monkeypatch.setattr(scoring, "WIDE_TOKENS", 0)
    h, w, _, targets, numbers, table, allowed = problem(5, counts=(1, 3, 40), dtype=torch.float32)
    logps, entropies = masked_logps_and_entropies(h, Head(w, None, HeadScale()), targets, numbers, table)
    (gradient,) = torch.autograd.grad((logps + entropies).sum(), w)
    never = ~allowed[allowed.sum(1) > 1].any(0)
    assert never.any() and (gradient[never] == 0).all() and (gradient[~never] != 0).any()


def test_mask_numbers_are_padded_with_the_mask_that_allows_everything():
    padded = pad_mask_numbers([[2, 1], [3], []])
    assert padded.tolist() == [[2, 1], [3, FREE], [FREE, FREE]]
    assert widen_mask_numbers(padded, 3)[:, 2].tolist() == [FREE] * 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("positions", "scale"), [(0, HeadScale(0.7, 0.5)), (1, HeadScale(0.9, 2.0, 3.0)), (40, HeadScale(0.7, 0.5, 3.0))]
)
@pytest.mark.parametrize("route", ["free", "narrow", "wide", "forced", "all"])
def test_each_route_at_edge_cases(route, positions, scale, dtype, monkeypatch):
    """Outputs and gradients are finite, have the right shape and match a dense float64 softmax, for zero, one and many
    positions, every dtype, and scaled and capped logits. A mask over the vocabulary of 70 tokens has 96 bits."""
    monkeypatch.setattr(scoring, "WIDE_TOKENS", 0)
    counts = {"free": (70,), "narrow": (2, 5), "wide": (30, 69), "forced": (1,), "all": (1, 2, 30, 70)}[route]
    h, w, b, targets, numbers, table, allowed = problem(2, positions or 1, counts=counts, dtype=dtype, bias=True)
    if not positions:
        h, targets, numbers, allowed = h[:0].detach().requires_grad_(), targets[:0], numbers[:0], allowed[:0]
    actual = masked_logps_and_entropies(h, Head(w, b, scale), targets, numbers, table)
    got = torch.autograd.grad((actual[0] - 0.5 * actual[1]).sum(), [h, w, b])
    expected = dense(h, w, b, targets, allowed, scale)
    want = torch.autograd.grad((expected[0] - 0.5 * expected[1]).sum(), [h, w, b], allow_unused=True)
    # TRL's kernel, which scores unmasked positions, computes in float32 at most.
    near = {torch.float32: 5e-5, torch.bfloat16: 0.2, torch.float16: 0.03}.get(dtype, 1e-6 if 70 in counts else 1e-9)
    for one, other in zip((*actual, *got), (*expected, *want), strict=True):
        other = torch.zeros_like(one) if other is None else other
        assert one.shape == other.shape and one.isfinite().all()
        torch.testing.assert_close(one.double(), other.double(), atol=4 * near, rtol=4 * near)
    if route == "forced" or not positions:
        assert all((one == 0).all() for one in (*actual, *got)), "the gradient must exist for DDP and be zero"


def tiny(config_class, **special):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}  # fmt: skip
    return AutoModelForCausalLM.from_config(config_class(**sizes, **special)).double()


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere", "granite"])
def test_logit_scaling_of_model_families_is_mirrored(family):
    """The masked head, called as TRL does, matches a masked softmax of the model's own logits."""
    from transformers import CohereConfig, Gemma2Config, GraniteConfig, LlamaConfig
    from trl.trainer.utils import add_fused_lm_head

    model = {
        "llama": lambda: tiny(LlamaConfig),
        "gemma2": lambda: tiny(Gemma2Config, final_logit_softcapping=0.3),
        "cohere": lambda: tiny(CohereConfig, logit_scale=0.25),
        "granite": lambda: tiny(GraniteConfig, logits_scaling=3.0),
    }[family]()
    add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy"))
    head = MaskedHead(temperature=0.7)
    head.add_to(model)
    rng = np.random.default_rng(0)
    ids = torch.from_numpy(rng.integers(1, 60, size=(2, 9)))
    kept = 5
    allowed = rng.random((2, kept, 60)) < 0.4
    np.put_along_axis(allowed, ids[:, -kept:, None].numpy(), True, axis=2)
    table = MaskTable(60)
    numbers = torch.tensor([[table.number_of(pack(mask)) for mask in row] for row in allowed], dtype=torch.int32)
    labels = ids.clone()
    labels[:, :-kept] = -100
    attention = torch.ones_like(ids)
    with head.masks(numbers, table), head.measuring():
        scored = model(input_ids=ids, attention_mask=attention, labels=labels, fused_lm_head=True)
    logits = model(input_ids=ids, attention_mask=attention).logits[:, -kept - 1 : -1] / 0.7
    disallowed = ~torch.from_numpy(allowed)
    logps = logits.masked_fill(disallowed, -torch.inf).log_softmax(-1)
    torch.testing.assert_close(scored.log_probs, logps.gather(2, ids[:, -kept:, None])[..., 0])
    torch.testing.assert_close(scored.entropy, -(logps.exp() * logps.masked_fill(disallowed, 0)).sum(-1))
    mass = (logits.softmax(-1) * ~disallowed).sum(-1).mean().item()
    assert head.allowed_mass == pytest.approx(mass)
