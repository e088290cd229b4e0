"""Rollouts with less room than rows: waiting rows replace finished ones, and results do not depend on the room."""

import pytest
import torch

from tests.support.families import FAMILIES, SIZES, SOME_FAMILIES
from tests.support.rollouts import EOS, MODELS, PAGED, TOKENIZER, Paged, dense_logps, tiny
from trl_grpo_tasks.constraints import Grammar, GrammarConstraint
from trl_grpo_tasks.constraints.base import replay
from trl_grpo_tasks.constraints.table import MaskTable
from trl_grpo_tasks.rollout import Decoder, rollout
from trl_grpo_tasks.rollout import decoder as decoder_module

VOCABULARY = len(TOKENIZER) + 3
CONSTRAINT = GrammarConstraint(TOKENIZER, lambda row: Grammar.regex(row["pattern"]) if row["pattern"] else None)
PATTERNS = [None, r"abcde[0-9]{2}abcde(x|\(\))", r"[a-e]{1,30}", r"abcde"]
# Prompts that share pages or not: equal ones, one that starts with another, and one token alone.
LONG = [5 + i % 11 for i in range(21)]
PROMPTS = [[9], [5, 6, 7], LONG[:8], LONG[:9], LONG, [5, 6, 7, 8, 10]]


class Counted:
    """Records the largest number of rows in the caches of a decoder, and that every row is released."""

    def __init__(self, decoder):
        self.rows, self.most = set(), 0
        allocate = decoder._allocate

        def counted_allocate(*args):
            allocate(*args)
            add, release = decoder.cache.add, decoder.cache.release

            def counted_add(row, prompt):
                assert row not in self.rows
                self.rows.add(row)
                self.most = max(self.most, len(self.rows))
                return add(row, prompt)

            def counted_release(row):
                self.rows.remove(row)
                release(row)

            decoder.cache.add, decoder.cache.release = counted_add, counted_release

        decoder._allocate = counted_allocate


@torch.no_grad()
def check(model, prompts, out, length, temperature=1.0, constraint=None, rows=None, table=None):
    """Every row is complete, its masks are those of a replay, and its log-probs those of a plain forward pass."""
    for i, (prompt, ids, logps) in enumerate(zip(prompts, out.completion_ids, out.logps, strict=True)):
        masks = out.masks[i]
        assert len(ids) == len(masks) == len(logps)
        assert 1 <= len(ids) <= length and (len(ids) == length or ids[-1] == EOS) and EOS not in ids[:-1]
        if constraint is not None:
            assert masks == [table.number_of(mask) for mask in replay(constraint, rows[i], ids)]
        assert logps == pytest.approx(dense_logps(model, prompt, ids, masks, table, temperature), abs=1e-4)


@pytest.mark.parametrize("is_constrained", [False, True], ids=["free", "constrained"])
@pytest.mark.parametrize("is_paged", [False, True], ids=["rows", "paged"])
def test_memory_for_some_rows_only(is_paged, is_constrained, monkeypatch):
    model, prompts, table = MODELS["llama"], PROMPTS * 3, MaskTable(VOCABULARY)
    decoder = Paged(model) if is_paged else Decoder(model)
    counted = Counted(decoder)
    tokens = in_pages(len(LONG) + 10 + 8, is_paged)  # of the longest row
    bytes_per_token = 2 * 2 * 1 * 8 * 4  # keys and values, layers, heads, width, float32
    monkeypatch.setattr(decoder, "_free_memory", lambda: int(2.5 * tokens * bytes_per_token / 0.8))
    rows = [{"pattern": PATTERNS[i % 4]} for i in range(len(prompts))]
    options = {"constraint": CONSTRAINT, "rows": rows, "table": table} if is_constrained else {}
    torch.manual_seed(0)
    out = rollout(model, prompts, max_new_tokens=10, eos_token_ids=[EOS], decoder=decoder, **options)
    check(model, prompts, out, 10, **options)
    assert counted.most == 2 if not is_paged else 2 <= counted.most < len(prompts)


def in_pages(tokens, is_paged):
    """The room of a number of tokens: whole pages, where there are pages."""
    page = Paged.page if is_paged else 1
    return -(-tokens // page) * page


@pytest.mark.parametrize("is_constrained", [False, True], ids=["free", "constrained"])
@pytest.mark.parametrize("is_paged", [False, True], ids=["rows", "paged"])
def test_memory_for_no_row(is_paged, is_constrained, monkeypatch):
    """With any amount of memory, a rollout either completes or says that a row does not fit."""
    model, prompts = MODELS["llama"], [LONG, [9]]
    decoder = Paged(model) if is_paged else Decoder(model)
    rows = [{"pattern": "[a-e]{1,30}"}] * 2
    options = {"constraint": CONSTRAINT, "rows": rows, "table": MaskTable(VOCABULARY)} if is_constrained else {}
    needed = len(LONG) + 6 + 8
    for tokens in sorted({needed - 1, needed, needed + 1, in_pages(needed, is_paged) - 1, in_pages(needed, is_paged)}):
        monkeypatch.setattr(decoder, "_free_memory", lambda tokens=tokens: int(tokens * 128 / 0.8) + 1)
        if tokens < in_pages(needed, is_paged):
            with pytest.raises(RuntimeError, match=r"of KV cache.*lower max_completion_length"):
                rollout(model, prompts, max_new_tokens=6, eos_token_ids=[EOS], decoder=decoder, **options)
        else:
            out = rollout(model, prompts, max_new_tokens=6, eos_token_ids=[EOS], decoder=decoder, **options)
            check(model, prompts, out, 6, **options)


@pytest.mark.parametrize("limit", [4, 16, 40])
@pytest.mark.parametrize("is_paged", [False, True], ids=["rows", "paged"])
def test_prompts_longer_than_a_pass(is_paged, limit, monkeypatch):
    for name in ("MAX_PREFILL_TOKENS", "MAX_MASKED_PREFILL_TOKENS"):
        monkeypatch.setattr(decoder_module, name, limit)
    model, prompts = MODELS["qwen2"], [*PROMPTS, [5 + i % 7 for i in range(90)]]
    torch.manual_seed(0)
    out = rollout(model, prompts, max_new_tokens=5, eos_token_ids=[EOS], batch_size=4,
                  decoder=PAGED["qwen2"] if is_paged else None)  # fmt: skip
    check(model, prompts, out, 5)


@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_every_family_with_pages(family):
    """Sliding windows, soft-caps and attention sinks reach the kernels; greedy results are those without kernels."""
    config_class, options = FAMILIES[family]
    model = tiny(config_class, **SIZES | options)
    decoder, prompts = Paged(model), [*PROMPTS, *PROMPTS[2:4]]
    torch.manual_seed(0)
    out = rollout(model, prompts, max_new_tokens=9, eos_token_ids=[EOS], decoder=decoder, batch_size=3)
    check(model, prompts, out, 9)
    greedy = [
        rollout(model, prompts, max_new_tokens=9, eos_token_ids=[EOS], temperature=0, decoder=used).completion_ids
        for used in (decoder, None)
    ]
    assert greedy[0] == greedy[1]
