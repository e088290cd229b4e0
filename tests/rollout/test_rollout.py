"""Rollouts: samples follow the exact distribution, constraints are respected."""

import copy
import math
import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.rollout.test_bounded import PROMPTS as SOME_PROMPTS
from tests.rollout.test_bounded import Counted, check
from tests.support.rollouts import EOS, MODELS, PAGED, PROMPTS, TOKENIZER, Paged, dense_logps
from trl_grpo_tasks.constraints import ChoiceTreeConstraint, Grammar, GrammarConstraint, OneSpelling, ThinkThen
from trl_grpo_tasks.constraints.base import replay
from trl_grpo_tasks.constraints.filters import SamplingFilters
from trl_grpo_tasks.constraints.table import MaskTable
from trl_grpo_tasks.rollout import Decoder, engine, rollout


def line_choices(node):
    kind, lines = node
    if kind == "line":
        more = [(f"{a}x{b}(", ("at", lines)) for a in (1, 2) for b in (1, 10, 12) if lines < 3]
        return more + ([("", None)] if lines else [])
    return [(f"{n},0)", ("line", lines + 1)) for n in range(12)]


GRAMMARS = GrammarConstraint(TOKENIZER, lambda row: Grammar.regex(row["pattern"]) if row["pattern"] else None)
TREE = ChoiceTreeConstraint(TOKENIZER, lambda row: ("line", 0) if row["pattern"] else None, line_choices)
CONSTRAINTS = {
    "regex": GRAMMARS,
    "spelt": OneSpelling(TOKENIZER, GRAMMARS),
    "tree": TREE,
    "thought": ThinkThen(TOKENIZER, TREE, "x(", most_tokens=8),
}
PATTERNS = [r"abcde[0-9]{2}abcde(x|\(\))", r"(ab,)+", r"[a-e]{1,30}", None, r"abcde"]


def assert_samples_follow_the_exact_distribution(texts, **options):
    """Chi-squared test over all completions of a constraint with six texts, of which the editor keeps `texts`."""
    model, table = MODELS["qwen2"], MaskTable(len(TOKENIZER) + 3)
    constraint = GrammarConstraint(TOKENIZER, Grammar.regex("a[0-2]x|ab[01]|b"))
    torch.manual_seed(1)
    out = rollout(model, [PROMPTS[0]] * 3000, max_new_tokens=8, eos_token_ids=[EOS], constraint=constraint,
                  rows=[{}] * 3000, table=table, **options)  # fmt: skip
    counts, exact = Counter(map(tuple, out.completion_ids)), {}
    for ids in counts:  # some texts have two tokenizations
        masks = [table.number_of(mask) for mask in replay(constraint, {}, list(ids))]
        with torch.no_grad():
            exact[ids] = math.exp(sum(dense_logps(model, PROMPTS[0], list(ids), masks, table, 1.0)))
    assert {TOKENIZER.decode(ids, skip_special_tokens=True) for ids in counts} == set(texts)
    share = 3000 / sum(exact.values())
    expected = {ids: share * p for ids, p in exact.items() if share * p >= 5}
    chi2 = sum((counts[ids] - e) ** 2 / e for ids, e in expected.items())
    assert len(expected) >= 4 and chi2 < 3.3 * len(expected) + 12
    return sum(exact.values())


@pytest.mark.parametrize(("groups", "batch_size"), [(1, None), (3, None), (1, 70)])
def test_samples_follow_the_exact_distribution(groups, batch_size, monkeypatch):
    """Rows may wait for others to end."""
    monkeypatch.setattr(engine, "group_count", lambda *_: groups)
    decoder = PAGED["qwen2"] if groups > 1 else None
    texts = ["a0x", "a1x", "a2x", "ab0", "ab1", "b"]
    sampled = assert_samples_follow_the_exact_distribution(texts, batch_size=batch_size, decoder=decoder)
    assert sampled == pytest.approx(1, abs=0.01)


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


@settings(max_examples=50)
@given(
    st.sampled_from([None, "filters", *sorted(CONSTRAINTS)]),
    st.lists(st.tuples(st.sampled_from(SOME_PROMPTS), st.sampled_from(PATTERNS)), min_size=1, max_size=8),
    st.integers(1, 25),
    st.sampled_from([0.7, 1.0, 1.4]),
    st.sampled_from([1, 2, 3, None]),
    st.integers(0, 10**6),
    st.booleans(),
    st.sampled_from([0, 0, 1, 8]),
)
@example("filters", [(SOME_PROMPTS[1], None)] * 3 + [(SOME_PROMPTS[4], None)], 14, 1.0, 3, 0, True, 0)
@example("filters", [(SOME_PROMPTS[1], None)] * 3, 5, 0.7, None, 1, False, 2)
@example(None, [(prompt, None) for prompt in SOME_PROMPTS * 3], 13, 1.3, 2, 0, True, 0)  # several tokens per call
@example(None, [(prompt, None) for prompt in SOME_PROMPTS * 3], 3, 1.3, None, 0, True, 0)
def test_any_batch_under_any_constraint(kind, given_rows, length, temperature, batch_size, seed, is_paged, times):
    """Without an editor and after any number of deletions, in any number of places: masks equal those of a replay,
    log-probs equal those of a plain forward pass, and forced tokens are certain."""
    model, table = MODELS["llama"], MaskTable(len(TOKENIZER) + 3)
    prompts, rows = [prompt for prompt, _ in given_rows], [{"pattern": pattern} for _, pattern in given_rows]
    constrained = {"table": table}
    if kind in CONSTRAINTS:
        constrained |= {"constraint": CONSTRAINTS[kind], "rows": rows}
    filters = {"filters": SamplingFilters(top_k=5)} if kind == "filters" else {}
    editor = RandomEditor(seed, times) if times else None
    decoder = Paged(model) if is_paged else Decoder(model)
    counted = Counted(decoder)
    torch.manual_seed(seed)
    out = rollout(model, prompts, max_new_tokens=length, eos_token_ids=[EOS], temperature=temperature, editor=editor,
                  decoder=decoder, batch_size=batch_size, **constrained, **filters)  # fmt: skip
    check(model, prompts, out, length, temperature, **constrained)
    assert not counted.rows and 1 <= counted.most <= (batch_size or len(prompts))
    for i, (ids, masks, logps) in enumerate(zip(out.completion_ids, out.masks, out.logps, strict=True)):
        assert editor is None or (i, tuple(ids)) in editor.asked
        assert all(logps[t] == 0 for t, count in enumerate(table.counts(np.array(masks))) if count == 1)


class RejectionEditor:
    """An editor for rejection sampling: a text for which `is_good` is false is sampled again from the start."""

    def __init__(self, is_good):
        self._is_good = is_good

    def keep(self, i, ids, ended):
        return 0 if ended and not self._is_good(TOKENIZER.decode(ids, skip_special_tokens=True)) else None


def test_rejection_editor_samples_the_conditional_distribution():
    good = ["a0x", "a2x", "ab0", "b"]
    editor = RejectionEditor(good.__contains__)
    assert_samples_follow_the_exact_distribution(good, editor=editor, decoder=PAGED["qwen2"])


def test_forced_tokens_and_shared_prompts_save_forward_passes():
    constraint = GrammarConstraint(TOKENIZER, Grammar.regex(r"ccdde[0-9]ccdde[0-9]ccdde"))
    out = rollout(MODELS["llama"], [PROMPTS[3]] * 8, max_new_tokens=30, eos_token_ids=[EOS], constraint=constraint,
                  rows=[{}] * 8, table=MaskTable(len(TOKENIZER) + 3))  # fmt: skip
    assert all(len(ids) == 18 for ids in out.completion_ids)
    # the prompt; the first forced tokens; the first digit with the forced tokens after it (the rest ends the text)
    assert out.forward_passes == 3


@pytest.mark.parametrize("kind", [Decoder, Paged])
def test_lm_head_stays_in_float32_with_cast_lm_head_to_fp32(kind):
    """With cast_lm_head_to_fp32, neither the weights of the LM head nor its logits are rounded to bf16."""
    outs, prompt = {}, (5, 6, 7)
    for in_fp32 in (False, True):
        decoder = kind(copy.deepcopy(MODELS["llama"]), head_in_fp32=in_fp32)
        with torch.autocast("cpu", dtype=torch.bfloat16), decoder.running([prompt], 8, 1.0), torch.no_grad():
            decoder.prefill([0], [prompt], [decoder.cache.add(0, prompt)])
            outs[in_fp32] = decoder.feed([0], [[7]], [2])[0].float()
    assert torch.equal(outs[False], outs[False].bfloat16().float())
    assert not torch.equal(outs[True], outs[True].bfloat16().float())
    torch.testing.assert_close(outs[True], outs[False], atol=0.3, rtol=0.05)
