"""The Triton kernels against dense float64 computations, on small inputs. On a CPU, Triton's interpreter runs them."""

from contextlib import ExitStack

import numpy as np
import pytest
import torch

from tests.support.exhaustive import exhaustive_but
from tests.support.rollouts import allowed_bits
from trl_grpo_tasks.rollout.cache import CacheShape
from trl_grpo_tasks.rollout.compiled import kernels_fit

kernels = pytest.importorskip("trl_grpo_tasks.rollout.kernels", reason="needs Triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE, TILE = kernels.attention.PAGE, kernels.PREFILL_TILE


@pytest.fixture(autouse=True)
def without_replacements():
    """Other tests replace the kernels on the CPU by plain torch operations."""
    with ExitStack() as stack:
        for operator in (kernels.paged_attention, kernels.adapted_linear):
            stack.enter_context(operator.set_kernel_enabled("cpu", False))
        yield


def random_numbers(*size, seed, dtype=torch.float32):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Texts:
    """Rows with some tokens in a cache of shuffled pages and some new tokens; unused cache entries are NaN."""

    def __init__(self, heads, kv_heads, width, cached, new, dtype=torch.float32, padding=0, tile=1):
        self.heads, self.kv_heads, self.width, self.dtype = heads, kv_heads, width, dtype
        self.cached, rows = cached, len(cached)
        longest = max(c + n for c, n in zip(cached, new, strict=True))
        pages = -(-longest // PAGE) + 1
        order = torch.randperm(rows * pages + 3, generator=torch.Generator().manual_seed(0))
        self.pages = order[: rows * pages].view(rows, pages).int()
        self.keys, self.values = (
            [random_numbers(c + n, kv_heads, width, seed=10 * kind + row, dtype=dtype)
             for row, (c, n) in enumerate(zip(cached, new, strict=True))]
            for kind in (1, 2)
        )  # fmt: skip
        self.slots, positions = [], []
        for row, (start, count) in enumerate(zip(cached, new, strict=True)):
            self.slots += [row] * count
            positions += range(start, start + count)
            short = -count % tile
            self.slots += [-1] * short
            positions += [0] * short
        self.slots += [-1] * padding
        self.positions = positions + [0] * padding
        self.query = random_numbers(len(self.slots), heads, width, seed=3, dtype=dtype)
        self.memory = [torch.full((len(order), PAGE, kv_heads, width), torch.nan, dtype=dtype) for _ in range(2)]
        for memory, texts in zip(self.memory, (self.keys, self.values), strict=True):
            for row, text in enumerate(texts):
                for position in range(cached[row]):
                    memory[self.pages[row, position // PAGE], position % PAGE] = text[position]

    def attend(self, window=0, softcap=0.0, sinks=None):
        """The result of the kernels, and the cache afterwards."""
        new = [
            torch.stack([texts[r][p] if r >= 0 else torch.full_like(texts[0][0], torch.nan)
                         for r, p in zip(self.slots, self.positions, strict=True)])
            for texts in (self.keys, self.values)
        ]  # fmt: skip
        where = torch.tensor([self.slots, self.positions])[None, None]
        memory = [part.to(DEVICE) for part in self.memory]
        addresses = torch.tensor([part.data_ptr() for part in memory])
        # Strides as in a fused projection, whose parts lie side by side.
        joined = torch.cat([self.query, *new], dim=1).to(DEVICE)
        parts = joined.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        sinks = None if sinks is None else sinks.to(DEVICE)
        out = torch.ops.trl_grpo_tasks.paged_attention(
            *parts, where.to(DEVICE), addresses.to(DEVICE), self.pages.to(DEVICE), sinks, 0.3, window, softcap,
            self.is_prefill,
        )  # fmt: skip
        return out.cpu(), [part.cpu() for part in memory]

    is_prefill = False

    def check(self, window=0, softcap=0.0, sinks=None, near=1e-5):
        out, memory = self.attend(window, softcap, sinks)
        group = self.heads // self.kv_heads
        for t, (row, position) in enumerate(zip(self.slots, self.positions, strict=True)):
            if row < 0:
                continue
            first = max(0, position + 1 - window) if window else 0
            key, value = (texts[row][first : position + 1].double().repeat_interleave(group, 1)
                          for texts in (self.keys, self.values))  # fmt: skip
            scores = torch.einsum("hd,lhd->hl", self.query[t].double(), key) * 0.3
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks.double()[:, None]], 1)
            expected = torch.einsum("hl,lhd->hd", scores.softmax(1)[:, : len(key)], value)
            torch.testing.assert_close(out[t].double(), expected, atol=near, rtol=near)
        for after, texts in zip(memory, (self.keys, self.values), strict=True):
            is_written = torch.zeros(after.shape[:2], dtype=torch.bool)
            for row, text in enumerate(texts):
                place = torch.arange(len(text))
                where = self.pages[row, place // PAGE].long(), place % PAGE
                assert torch.equal(after[where], text)
                is_written[where] = True
            assert after[~is_written].isnan().all(), "nothing else is written"


OPTIONS = {
    "plain": {},
    "window": {"window": 9},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": torch.linspace(-2, 3, 6)},
    "all": {"window": 70, "softcap": 2.0, "sinks": torch.linspace(-2, 3, 6)},
}


@pytest.mark.parametrize("programs", [1, 30], ids=["one split", "splits"])
@pytest.mark.parametrize("options", exhaustive_but([OPTIONS["all"]], list(OPTIONS.values())), ids=OPTIONS)
def test_one_new_token_per_row(options, programs, monkeypatch):
    """Rows of several lengths, an empty one, one whose new token starts a page, and padding."""
    monkeypatch.setattr(kernels.attention, "ATTENTION_PROGRAMS", programs)
    Texts(6, 2, 16, cached=[2 * PAGE + 10, 0, PAGE], new=[1] * 3, padding=1).check(**options)


@pytest.mark.parametrize("programs", [1, 60], ids=["one split", "splits"])
def test_several_new_tokens_per_row(programs, monkeypatch):
    monkeypatch.setattr(kernels.attention, "ATTENTION_PROGRAMS", programs)
    Texts(6, 3, 8, cached=[PAGE - 2, 0, 100], new=[4, 2, 1], padding=1).check(**OPTIONS["all"])


@pytest.mark.parametrize("programs", [1, 30], ids=["one split", "splits"])
def test_prefill_in_tiles(programs, monkeypatch):
    """New prompts and the rest of a prompt that a pass before has begun, padded to tiles."""
    monkeypatch.setattr(kernels.attention, "ATTENTION_PROGRAMS", programs)
    monkeypatch.setattr(Texts, "is_prefill", True)
    texts = Texts(6, 2, 8, cached=[0, PAGE + 3, 0], new=[2 * TILE + 1, TILE, PAGE + 6], tile=TILE)
    texts.check(**OPTIONS["all"])


def test_widths_and_groups_that_are_no_powers_of_two():
    Texts(6, 2, 24, cached=[3, PAGE], new=[2, 1]).check()


def test_attention_in_half_precision():
    Texts(4, 2, 16, cached=[3, PAGE + 9], new=[1, 1], dtype=torch.float16).check(window=20, near=5e-3)


def test_a_pass_over_padding_writes_nothing_and_is_finite():
    """A pass is captured with padding only, before the first one over tokens."""
    texts = Texts(4, 2, 8, cached=[3], new=[0], padding=3)
    out, memory = texts.attend()
    assert out.isfinite().all()
    assert torch.equal(memory[0].nan_to_num(7), texts.memory[0].nan_to_num(7))


# ---- sampling


def packed_masks(count, vocabulary):
    generator = torch.Generator().manual_seed(5)
    words = torch.randint(-(2**31), 2**31, (count, -(-vocabulary // 32)), generator=generator).int()
    words[0] = 0
    words[0, vocabulary // 32 // 2] = 1 << 7  # a single token
    return words


@pytest.mark.parametrize(
    ("is_masked", "softcap", "is_greedy", "programs"),
    [(False, None, False, 512), (True, 3.0, False, 1), (True, None, True, 512), (False, 3.0, True, 1),
     (True, 3.0, False, 512)],
)  # fmt: skip
def test_log_probs_of_sampled_tokens(is_masked, softcap, is_greedy, programs, monkeypatch):
    monkeypatch.setattr(kernels.next_token, "SAMPLING_PROGRAMS", programs)
    rows, vocabulary = 3, 2500
    logits = random_numbers(rows, vocabulary + 60, seed=0)[:, :vocabulary] * 4  # a stride of its own
    masks = (packed_masks(3, vocabulary), torch.tensor([2, 0, 1])) if is_masked else None
    given = None if masks is None else tuple(part.to(DEVICE) for part in masks)
    torch.manual_seed(0)
    tokens, drawn = (part.cpu() for part in kernels.sample(logits.to(DEVICE), given, 0.5, softcap, is_greedy))
    expected = logits.double() * 0.5
    expected = expected if softcap is None else softcap * torch.tanh(expected)
    if masks is not None:
        allowed = allowed_bits(masks[0][masks[1]], vocabulary)
        expected = expected.masked_fill(~allowed, -torch.inf)
        assert allowed[range(rows), tokens].all()
    expected = expected.log_softmax(1)
    assert drawn[0].long().equal(tokens) and drawn.dtype == torch.float64
    torch.testing.assert_close(drawn[1], expected.gather(1, tokens[:, None])[:, 0], atol=1e-4, rtol=1e-5)
    if is_greedy:
        assert tokens.equal(expected.argmax(1))


def test_the_lowest_of_equally_likely_tokens_is_greedy():
    logits = torch.zeros(1, 2500)
    logits[0, [700, 701, 1800]] = 5
    assert kernels.sample(logits.to(DEVICE), is_greedy=True)[0].tolist() == [700]


def test_samples_follow_the_distribution(monkeypatch):
    """Chi-squared test over allowed tokens in two shares of the vocabulary."""
    monkeypatch.setattr(kernels.next_token, "SAMPLE_BLOCK", 4)
    count = 20_000 if DEVICE == "cuda" else 80  # the interpreter is slow
    monkeypatch.setattr(kernels.next_token, "SAMPLING_PROGRAMS", 2 * count)
    logits = torch.tensor([0.3, 1.0, 2.0, 0.6, 0.5, 1.5])
    allowed = torch.tensor([False, True, False, True, True, True])
    masks = (torch.tensor([[0b111010]], dtype=torch.int32, device=DEVICE),
             torch.zeros(count, dtype=torch.int64, device=DEVICE))  # fmt: skip
    torch.manual_seed(0)
    tokens, _ = kernels.sample(logits.repeat(count, 1).to(DEVICE), masks)
    expected = logits.masked_fill(~allowed, -torch.inf).double().softmax(0) * count
    counts = torch.bincount(tokens.cpu(), minlength=len(logits))
    assert not counts[~allowed].any()
    chi2 = ((counts - expected)[allowed] ** 2 / expected[allowed]).sum()
    assert chi2 < 16.3  # exceeded with probability 0.001 at 3 degrees of freedom


def test_seeds_decide_what_is_sampled():
    logits = random_numbers(5, 300, seed=1).to(DEVICE)
    seeds = torch.arange(5, device=DEVICE)
    first, again, other = (kernels.sample(logits, seeds=s)[0].tolist() for s in (seeds, seeds, seeds + 100))
    assert first == again != other
    torch.manual_seed(3)
    drawn = kernels.sample(logits)[0].tolist()
    torch.manual_seed(3)
    assert kernels.sample(logits)[0].tolist() == drawn


# ---- linear layers with adapters


@pytest.mark.parametrize(
    ("tokens", "ends", "inputs", "rank", "has_bias"),
    [
        (5, [64, 96, 128], 200, 3, True),
        (33, [48], 1100, 16, True),  # split over the inputs
        (33, [48], 1100, 16, False),
        (16, [32, 64], 64, 20, False),
        (2, [16, 24], 64, 2, True),  # parts that do not end at a block: separate products
        (65, [32], 64, 4, False),  # many tokens: separate products
    ],
)
def test_linear_layer_with_adapters(tokens, ends, inputs, rank, has_bias, monkeypatch):
    monkeypatch.setattr(kernels.linear, "ADAPTED_BLOCK_K", 32)
    outputs, dtype = ends[-1], torch.float16
    x = random_numbers(tokens, inputs + 8, seed=0, dtype=dtype)[:, :inputs]
    weight = random_numbers(outputs, inputs, seed=1).div(10).to(dtype)
    bias = random_numbers(outputs, seed=2, dtype=dtype)
    down = random_numbers(rank * len(ends), inputs, seed=3).div(10).to(dtype)
    up = torch.zeros(outputs, rank * len(ends), dtype=dtype)
    expected = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
    for k, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        part = random_numbers(end - begin, rank, seed=4 + k, dtype=dtype)
        columns = slice(k * rank, (k + 1) * rank)
        up[begin:end, columns] = part
        expected[:, begin:end] += x.double() @ down[columns].double().T @ part.double().T
    given = [tensor.to(DEVICE) for tensor in (x, weight, bias, down, up)]
    if not has_bias:
        given[2] = None
    out = torch.ops.trl_grpo_tasks.adapted_linear(*given, ends).cpu()
    assert out.dtype == dtype and np.abs(out.double() - expected).max() < 2e-3 * expected.abs().max()


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU may have too little memory for the kernels")
def test_kernels_that_cannot_be_built_are_not_used(monkeypatch, capsys):
    shape = CacheShape(1, 2, 8, torch.float32, torch.device("cpu"))
    assert kernels_fit(shape, 4) and not capsys.readouterr().out
    monkeypatch.setattr(kernels, "paged_attention", lambda *_: 1 / 0)
    assert not kernels_fit(shape, 4)
    assert "rollouts run without our GPU kernels" in capsys.readouterr().out
