"""OneSpelling: forced text in the tokenizer's own tokenization gives the same texts in fewer tokenizations."""

import random

import numpy as np
import pytest

from tests.support.enumerated import every_completion
from tests.support.tokenizer_makes import LINES, MAKES, constraints_for
from trl_grpo_tasks.constraints import OneSpelling, unpack


@pytest.mark.parametrize("kind", ["tree", "ebnf"])
@pytest.mark.parametrize(
    "make",
    ["byte_level_digits_apart", "sentencepiece", "word_level"],
)
def test_one_spelling_allows_the_same_texts_in_fewer_tokenizations(make, kind):
    tokenizer = MAKES[make]
    texts = {"12 (1", "12 (0,", "12 (0,1)\n", "2x4 (3,0,1)\n"} if make != "word_level" else {"10 (1", "10 (10)"}
    inner = constraints_for(tokenizer, texts)[kind]
    sequences, all_sequences = (
        [tokens for tokens, _ in every_completion(one, {})] for one in (OneSpelling(tokenizer, inner), inner)
    )
    assert {tokenizer.decode(sequence, skip_special_tokens=True) for sequence in sequences} == texts
    assert set(map(tuple, sequences)) <= set(map(tuple, all_sequences))
    if make.startswith("byte_level"):
        natural = {(*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id) for text in texts}
        assert natural <= set(map(tuple, sequences)), "the tokenizer's own tokenization must be allowed"
        assert len(sequences) <= len(all_sequences) / 2


@pytest.mark.parametrize("kind", ["tree", "ebnf", "regex"])
def test_forced_text_is_the_common_prefix_of_all_continuations(kind):
    constraint, chance = constraints_for(MAKES["byte_level"], LINES)[kind], random.Random(3)
    for _ in range(6):
        state, written = constraint.start({}), b""
        while not state.finished:
            rests = [text.encode()[len(written) :] for text in LINES if text.encode().startswith(written)]
            common = next(
                rests[0][:n] for n in range(len(rests[0]), -1, -1) if all(r.startswith(rests[0][:n]) for r in rests)
            )
            forced = state.forced_text()
            assert common.startswith(forced) and (kind != "tree" or forced == common)
            assert bool(forced) == bool(common)
            token = chance.choice(np.flatnonzero(unpack(state.mask(), constraint.vocab_size)).tolist())
            state.accept(token)
            written += constraint.vocabulary.bytes_of[token] or b""
        assert state.forced_text() == b""
