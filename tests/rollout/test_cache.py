"""KV caches under random additions and releases of rows, compared with the texts that the rows should hold."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_grpo_tasks.rollout import cache as cache_module
from trl_grpo_tasks.rollout.cache import CacheShape, PagedCache, RowCache, pages_for

PAGE, ROWS, NEW = 4, 4, 5
LENGTH = 14 + NEW + cache_module.OVERRUN
SHAPE = CacheShape(2, 1, 3, torch.float32, torch.device("cpu"))
LONG = tuple(range(10, 24))
PROMPTS = [(9,), LONG[:4], LONG[:5], LONG[:9], LONG, (9, *LONG[1:9])]
STEPS = st.lists(st.tuples(st.sampled_from(["add", "add", "release", "grow"]), st.integers(0, 100)), max_size=40)


@pytest.fixture(autouse=True, scope="module")
def small_pages():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_module, "PAGE", PAGE)
        yield


def make_paged(pages):
    table = torch.zeros(ROWS, 16, dtype=torch.int32)
    return PagedCache(SHAPE, ROWS, pages, NEW, table, torch.zeros(2, 2, dtype=torch.int64))


class Simulation:
    """Rows in a cache, and the keys and values that they should have, as new random vectors for each token."""

    def __init__(self, cache):
        self.cache, self.prompts, self.texts, self.next = cache, {}, {}, 0
        self.generator = torch.Generator().manual_seed(0)

    def entry(self, row, position):
        """The cache entries of a token: (layer, keys or values, ...)."""
        slot = self.cache.slots([row])[0]
        if isinstance(self.cache, PagedCache):
            slot, position = self.cache._table[slot, position // PAGE], position % PAGE
        return [buffer[slot, position] for pair in self.cache._buffers for buffer in pair]

    def write(self, row, position):
        self.texts[row][position:] = [torch.randn(4, 1, 3, generator=self.generator)]
        for place, value in zip(self.entry(row, position), self.texts[row][position], strict=True):
            place.copy_(value)

    def add(self, number):
        prompt = PROMPTS[number % len(PROMPTS)]
        if not self.cache.fits(prompt):
            return
        row, self.next = self.next, self.next + 1
        source = self.cache.add(row, prompt)
        self.cache.publish()
        self.prompts[row], self.texts[row] = prompt, []
        if source is None:
            assert prompt not in [other for k, other in self.prompts.items() if k != row]
            for position in range(len(prompt) - 1):
                self.write(row, position)
        else:
            assert self.prompts[source] == prompt and source != row
            self.cache.copy_prompts([(source, row)], [len(prompt) - 1])
            self.texts[row] = self.texts[source][: len(prompt) - 1]

    def step(self, kind, number):
        if kind == "add":
            self.add(number)
        elif self.prompts:
            row = sorted(self.prompts)[number % len(self.prompts)]
            if kind == "release":
                self.cache.release(row)
                del self.prompts[row], self.texts[row]
            elif len(self.texts[row]) < len(self.prompts[row]) + NEW:
                self.write(row, len(self.texts[row]))
        for row, text in self.texts.items():
            for position, expected in enumerate(text):
                assert torch.equal(torch.stack(self.entry(row, position)), expected)


@settings(max_examples=100)
@given(STEPS)
def test_rows_in_contiguous_buffers_keep_their_contents(steps):
    simulation = Simulation(RowCache(SHAPE, ROWS, LENGTH))
    for kind, number in steps:
        simulation.step(kind, number)
        assert sorted(simulation.cache.slots(list(simulation.prompts))) == list(range(len(simulation.prompts)))
        assert simulation.cache.fits((9,)) == (len(simulation.prompts) < ROWS)


@settings(max_examples=100)
@given(STEPS, st.sampled_from([7, 12, 28]))
def test_rows_in_pages_keep_their_contents(steps, pages):
    """Only rows with the same prompt share pages, and only those that the prompt fills before its last token."""
    simulation = Simulation(make_paged(pages))
    cache = simulation.cache
    for kind, number in steps:
        simulation.step(kind, number)
        owned = {}
        for row, prompt in simulation.prompts.items():
            needed = -(-(len(prompt) + NEW + cache_module.OVERRUN) // PAGE)
            numbers = cache._table[cache.slots([row])[0], :needed].tolist()
            full = (len(prompt) - 1) // PAGE
            assert len(set(numbers)) == needed
            for place, page in enumerate(numbers):
                owned.setdefault(page, []).append((prompt, place) if place < full else row)
        for users in owned.values():
            assert len(users) == 1 or (isinstance(users[0], tuple) and len(set(users)) == 1)
        assert sorted([*cache._free_pages, *owned]) == list(range(pages)), "no page is lost or free twice"
        assert sorted(cache.slots(list(simulation.prompts))) == sorted(set(range(ROWS)) - set(cache._free_slots))
    for row in list(simulation.prompts):
        cache.release(row)
    assert sorted(cache._free_pages) == list(range(pages)) and len(cache._free_slots) == ROWS


def test_shared_pages_count_once():
    """A prompt of 9 tokens fills two pages before its last token, so further rows need two pages less."""
    needed = pages_for(9, NEW)
    cache, prompt = make_paged(needed + 2 * (needed - 2)), LONG[:9]
    for row in range(3):
        assert cache.fits(prompt)
        cache.add(row, prompt)
    assert not cache.fits(prompt) and not cache._free_pages
    cache.release(0)  # the first row leaves, and the others keep the prompt
    assert cache.fits(prompt) and not cache.fits(LONG)
    assert cache.add(3, prompt) == 1
