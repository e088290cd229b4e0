"""Rollouts: samples follow the exact distribution, constraints are respected."""

import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from tests.support.rollouts import EOS, MODELS, PAGED, PROMPTS, TOKENIZER, Paged, dense_logps
from trl_grpo_tasks.constraints import ChoiceTreeConstraint, Grammar, GrammarConstraint, OneSpelling, ThinkThen
from trl_grpo_tasks.constraints.base import replay
from trl_grpo_tasks.constraints.table import MaskTable
from trl_grpo_tasks.rollout import engine, rollout, unsupported_reason


def line_choices(node):
    kind, lines = node
    if kind == "line":
        more = (
            [(f"{a}x{b} (".replace(" ", ""), ("at", lines)) for a in (1, 2) for b in (1, 10, 12)] if lines < 3 else []
        )
        return more + ([("", None)] if lines else [])
    return [(f"{n},0)", ("line", lines + 1)) for n in range(12)]


CONSTRAINTS = {
    "regex": GrammarConstraint(TOKENIZER, lambda row: Grammar.regex(row["pattern"]) if row["pattern"] else None),
    "spelt": OneSpelling(
        TOKENIZER,
        GrammarConstraint(TOKENIZER, lambda row: Grammar.regex(row["pattern"]) if row["pattern"] else None),
    ),
    "tree": ChoiceTreeConstraint(TOKENIZER, lambda row: ("line", 0) if row["pattern"] else None, line_choices),
    "thought": ThinkThen(
        TOKENIZER,
        ChoiceTreeConstraint(TOKENIZER, lambda row: ("line", 0) if row["pattern"] else None, line_choices),
        "x(",
        most_tokens=8,
    ),
}
PATTERNS = [r"abcde[0-9]{2}abcde(x|\(\))", r"(ab,)+", r"[a-e]{1,30}", None, r"abcde"]


@pytest.mark.parametrize(("groups", "batch_size"), [(1, None), (3, None), (1, 70)])
def test_samples_follow_the_exact_distribution(groups, batch_size, monkeypatch):
    """Chi-squared test over all completions of a constraint with six texts. Rows may wait for others to end."""
    monkeypatch.setattr(engine, "group_count", lambda *_: groups)
    model, table = MODELS["qwen2"], MaskTable(len(TOKENIZER) + 3)
    constraint = GrammarConstraint(TOKENIZER, Grammar.regex("a[0-2]x|ab[01]|b"))
    torch.manual_seed(1)
    out = rollout(model, [PROMPTS[0]] * 3000, max_new_tokens=8, eos_token_ids=[EOS], constraint=constraint,
                  rows=[{}] * 3000, table=table, decoder=PAGED["qwen2"] if groups > 1 else None,
                  batch_size=batch_size)  # fmt: skip
    counts: dict[tuple, int] = {}
    exact: dict[tuple, float] = {}
    for ids, masks in zip(out.completion_ids, out.masks, strict=True):
        key = tuple(ids)
        counts[key] = counts.get(key, 0) + 1
        if key not in exact:
            with torch.no_grad():
                exact[key] = float(np.exp(sum(dense_logps(model, PROMPTS[0], ids, masks, table, 1.0))))
    assert {TOKENIZER.decode(key, skip_special_tokens=True) for key in counts} <= {
        "a0x",
        "a1x",
        "a2x",
        "ab0",
        "ab1",
        "b",
    }
    expected = {key: 3000 * p for key, p in exact.items() if 3000 * p >= 5}
    chi2 = sum((counts[key] - e) ** 2 / e for key, e in expected.items())
    assert len(expected) >= 4 and chi2 < 3.3 * len(expected) + 12


class RandomEditor:
    """An editor that deletes a random number of tokens, at most `times` times per row."""

    def __init__(self, seed, times):
        self._random, self._left, self.asked = random.Random(seed), {}, set()
        self._times = times

    def keep(self, i, ids, ended):
        assert ended == (ids[-1] == EOS)
        self.asked.add((i, tuple(ids)))
        if self._left.setdefault(i, self._times) and self._random.random() < 0.4:
            self._left[i] -= 1
            return self._random.randint(0, len(ids))
        return None


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([None, *sorted(CONSTRAINTS)]),
    st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=6),
    st.integers(1, 25),
    st.sampled_from([0.7, 1.0, 1.4]),
    st.integers(0, 10**6),
    st.booleans(),
    st.integers(0, 8),
)
def test_any_batch_under_any_constraint(kind, patterns, length, temperature, seed, is_paged, times):
    """Without an editor and after any number of deletions: masks equal those of a replay, log-probs equal those of a
    plain forward pass, and forced tokens are certain."""
    model, table = MODELS["llama"], MaskTable(len(TOKENIZER) + 3)
    rows = [{"pattern": pattern} for pattern in patterns]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(rows))]
    constrained = {"constraint": CONSTRAINTS[kind], "rows": rows, "table": table} if kind else {}
    torch.manual_seed(seed)
    editor = RandomEditor(seed, times) if times else None
    out = rollout(model, prompts, max_new_tokens=length, eos_token_ids=[EOS], temperature=temperature, editor=editor,
                  decoder=PAGED["llama"] if is_paged else None, **constrained)  # fmt: skip
    for i, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        ids, masks, logps = out.completion_ids[i], out.masks[i], out.logps[i]
        assert len(ids) == len(masks) == len(logps) and (editor is None or (i, tuple(ids)) in editor.asked)
        assert 1 <= len(ids) <= length and (len(ids) == length or ids[-1] == EOS) and EOS not in ids[:-1]
        if kind:
            assert masks == [table.number_of(mask) for mask in replay(CONSTRAINTS[kind], row, ids)]
        with torch.no_grad():
            wanted = dense_logps(model, prompt, ids, masks, table, temperature)
        assert logps == pytest.approx(wanted, abs=1e-4)
        assert all(logps[t] == 0 for t, count in enumerate(table.counts(np.array(masks))) if count == 1)


class RejectionEditor:
    """An editor for rejection sampling: a text for which `is_good` is false is sampled again from the start."""

    def __init__(self, is_good):
        self._is_good = is_good

    def keep(self, i, ids, ended):
        return 0 if ended and not self._is_good(TOKENIZER.decode(ids, skip_special_tokens=True)) else None


@pytest.mark.parametrize("decoders", [{}, PAGED], ids=["plain", "paged"])
def test_rejection_editor_samples_the_conditional_distribution(decoders):
    """Chi-squared test over the four of six texts that are not rejected."""
    model, table = MODELS["qwen2"], MaskTable(len(TOKENIZER) + 3)
    constraint = GrammarConstraint(TOKENIZER, Grammar.regex("a[0-2]x|ab[01]|b"))
    good = ["a0x", "a2x", "ab0", "b"]
    torch.manual_seed(2)
    out = rollout(model, [PROMPTS[0]] * 3000, max_new_tokens=8, eos_token_ids=[EOS], constraint=constraint,
                  rows=[{}] * 3000, table=table, editor=RejectionEditor(good.__contains__),
                  decoder=decoders.get("qwen2"))  # fmt: skip
    counts = Counter(map(tuple, out.completion_ids))
    weight = {}
    for ids in counts:
        masks = [table.number_of(mask) for mask in replay(constraint, {}, list(ids))]
        with torch.no_grad():
            weight[ids] = float(np.exp(sum(dense_logps(model, PROMPTS[0], list(ids), masks, table, 1.0))))
    assert {TOKENIZER.decode(ids, skip_special_tokens=True) for ids in counts} == set(good)
    share = 3000 / sum(weight.values())
    # some texts have two tokenizations
    chi2 = sum((counts[ids] - share * w) ** 2 / (share * w) for ids, w in weight.items() if share * w >= 5)
    assert len(counts) >= 4 and chi2 < 3.3 * len(counts) + 12


def test_forced_tokens_and_shared_prompts_save_forward_passes():
    constraint = GrammarConstraint(TOKENIZER, Grammar.regex(r"ccdde[0-9]ccdde[0-9]ccdde"))
    out = rollout(MODELS["llama"], [PROMPTS[3]] * 8, max_new_tokens=30, eos_token_ids=[EOS], constraint=constraint,
                  rows=[{}] * 8, table=MaskTable(len(TOKENIZER) + 3))  # fmt: skip
    assert all(len(ids) == 18 for ids in out.completion_ids)
    # the prompt; the first forced tokens; the first digit with the forced tokens after it (the rest ends the text)
    assert out.forward_passes == 3


def test_passes_have_few_sizes_and_finished_rows_leave_the_batch():
    """Over many rollouts, a few captured pass sizes serve all of them."""
    constraint = GrammarConstraint(TOKENIZER, Grammar.regex(r"[a-e]{1,40}"))
    decoder = Paged(MODELS["llama"])
    seen = []
    for seed in range(12):
        torch.manual_seed(seed)
        rollout(MODELS["llama"], PROMPTS * 6, max_new_tokens=40, eos_token_ids=[EOS], constraint=constraint,
                rows=[{}] * 30, table=MaskTable(len(TOKENIZER) + 3), decoder=decoder)  # fmt: skip
        seen.append(set(decoder._graphs._passes))
    assert seen[-1] == seen[5] == {8, 16, 24, 32}


def test_unsupported_models_are_reported():
    from transformers import GPT2Config

    assert unsupported_reason(MODELS["llama"]) is None
    gpt2 = AutoModelForCausalLM.from_config(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20))
    assert "'gpt2'" in unsupported_reason(gpt2)
