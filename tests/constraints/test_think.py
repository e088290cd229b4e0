"""ThinkThen against the definition: a token is allowed if and only if some sequence of tokens completes the text.

The oracle looks for the first marker end in the bytes written so far. It knows no automaton, no remainders and no
distances: with a limit on the thought, it tries all sequences of tokens.
"""

import json
import random
from functools import lru_cache

import dill
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.support.paths import DATA
from tests.support.tokenizer_makes import MAKES, constraints_for, every_make
from tests.support.walks import random_tokens
from trl_grpo_tasks.constraints import (
    ChoiceTreeConstraint,
    Grammar,
    GrammarConstraint,
    OneSpelling,
    ThinkThen,
    Vocabulary,
    replay,
    unpack,
)
from trl_grpo_tasks.constraints.base import pack_ids
from trl_grpo_tasks.constraints.budget import within
from trl_grpo_tasks.constraints.think import split_thought

VECTORS = json.loads((DATA / "think_vectors.json").read_text())


def texts_constraint(vocabulary, texts):
    """A choice tree of these byte texts, which must be valid UTF-8."""
    return ChoiceTreeConstraint(vocabulary, lambda row: 0, lambda node: [(text.decode(), None) for text in texts])


class Language:
    """All completions t m a: a thought, the first marker end, and one of the texts."""

    def __init__(self, vocabulary, markers, texts, least=0, most=None):
        self.vocabulary, self.markers, self.texts, self.least, self.most = vocabulary, markers, texts, least, most
        self.can_end, self.end = lru_cache(None)(self._can_end), lru_cache(None)(self._end)

    def _end(self, written):
        """Return the place after the first marker end, or None."""
        ends = (n for n in range(1, len(written) + 1) if any(written[:n].endswith(m) for m in self.markers))
        return next(ends, None)

    def allows(self, written, count, spelling):
        """Whether a token with this spelling may follow `count` tokens whose bytes are `written`."""
        end = self.end(written + spelling)
        if self.end(written) is None:
            if end is None:
                return self.can_end(written + spelling, count + 1)
            if count + 1 <= self.least or (self.most is not None and count + 1 > self.most):
                return False
        return any(text.startswith((written + spelling)[end:]) for text in self.texts)

    def _can_end(self, written, count):
        if self.most is None and count >= self.least:
            return True  # the vocabularies have all single bytes of the markers
        if self.most is not None and count >= self.most:
            return False
        return any(self.allows(written, count, spelling) for spelling in set(filter(None, self.vocabulary.bytes_of)))

    def allowed(self, written, count):
        found = {
            id
            for id, spelling in enumerate(self.vocabulary.bytes_of)
            if spelling and self.allows(written, count, spelling)
        }
        end = self.end(written)
        return found | ({self.vocabulary.eos} if end is not None and written[end:] in self.texts else set())


def tokens_of(state, vocabulary):
    return set(np.flatnonzero(unpack(state.mask(), vocabulary.size)).tolist())


def walk(constraint, language, choose, length=12, answers=True):
    """Write a completion of up to `length` tokens, comparing every mask with the language."""
    vocabulary = constraint.vocabulary
    state, tokens, written, masks = constraint.start({}), [], b"", []
    while not state.finished and len(tokens) < length and (state.is_thinking or answers):
        allowed = language.allowed(written, len(tokens))
        assert tokens_of(state, vocabulary) == allowed, (written, language.markers, language.texts)
        assert np.array_equal(state.mask(), pack_ids(sorted(allowed), vocabulary.size)), "spare bits are set"
        assert state.is_thinking == (language.end(written) is None)
        if state.is_thinking:
            assert state.mask() is state.mask() and not state.mask().flags.writeable
        for token in {*range(vocabulary.size), -1, vocabulary.size} - allowed:
            with pytest.raises(ValueError, match=r"allowed|may not end"):
                state.fork().accept(token)
        masks.append(state.mask().copy())
        tokens.append(choose(sorted(allowed)))
        state.accept(tokens[-1])
        written += vocabulary.bytes_of[tokens[-1]] or b""
    assert all(map(np.array_equal, masks, replay(constraint, {}, tokens)))
    lengths = [n for n in range(1, len(tokens) + 1) if language.end(joined(vocabulary, tokens[:n])) is not None]
    assert constraint.thought_length(tokens) == (lengths[0] if lengths else None)


def joined(vocabulary, tokens):
    return b"".join(vocabulary.bytes_of[token] or b"" for token in tokens)


# The vectors


class Spelled:
    """A tokenizer that encodes as the vector says."""

    def __init__(self, spelled):
        self._spelled = spelled

    def encode(self, text, add_special_tokens):
        return self._spelled.get(text, [])


@pytest.mark.parametrize("vector", VECTORS, ids=[each["name"] for each in VECTORS])
def test_vectors(vector):
    """Some have a limit on the whole completion: see test_budget.py."""
    spellings = [None if text is None else text.encode("latin-1") for text in vector["vocab"]]
    vocabulary = Vocabulary([*spellings[: vector["eos"]], None, *spellings[vector["eos"] + 1 :]], vector["eos"])
    kind, answers = vector["answer"]
    if kind in ("plus", "brackets"):
        grammar = Grammar.regex(f"[{answers}]+") if kind == "plus" else Grammar.ebnf('root ::= "[" root* "]"')
        inner = GrammarConstraint(vocabulary, grammar)
    else:
        inner = texts_constraint(vocabulary, [text.encode("latin-1") for text in answers])
    if "spelled" in vector:
        inner = OneSpelling(Spelled(vector["spelled"]), inner)
    limits = {"least_tokens": vector.get("min_think", 0), "most_tokens": vector.get("max_think")}
    markers = [marker.encode("latin-1").decode() for marker in vector["markers"]]
    constraint = within(ThinkThen(vocabulary, inner, markers, **limits), vector.get("limit"))
    for each in (constraint, dill.loads(dill.dumps(constraint, recurse=True))):  # workers get a copy
        for case in vector["cases"]:
            state = each.start({})
            for token in case["prefix"]:
                state.accept(token)
            assert tokens_of(state, vocabulary) == set(case["allowed"]), case


# Random vocabularies, markers and answers

MARKERS = ["#", "##", "aab", "</a>", "aba", "é", "€a", "a\n", "<a<b"]
ANSWERS = ["1", "12", "#1", " 1", "", "a", "ab", "€", ">1"]


@st.composite
def problems(draw):
    """A vocabulary with all single bytes and with random pieces of completions, markers and answers."""
    markers = draw(st.lists(st.sampled_from(MARKERS), min_size=1, max_size=2, unique=True))
    assume(not any(one != other and one in other for one in markers for other in markers))
    texts = draw(st.lists(st.sampled_from(ANSWERS), min_size=1, max_size=3, unique=True))
    singles = sorted({bytes([byte]) for text in [*markers, *texts, "x"] for byte in text.encode()})
    parts = st.sampled_from([*markers, *texts, "x", "a"])
    written = st.lists(parts, min_size=1, max_size=4).map(lambda found: "".join(found).encode())
    cuts = st.tuples(written, st.integers(0, 3), st.integers(1, 6)).map(lambda cut: cut[0][cut[1] :][: cut[2]])
    pieces = draw(st.lists(cuts, max_size=12))
    vocabulary = Vocabulary([*singles, None, b"", *pieces, None], eos=len(singles))
    return vocabulary, markers, texts


def answers_under(vocabulary, texts, kind):
    if kind == "tree":
        return texts_constraint(vocabulary, [text.encode() for text in texts])
    return GrammarConstraint(vocabulary, Grammar.ebnf(f"root ::= {' | '.join(map(json.dumps, texts))}"))


@settings(max_examples=120)
@given(problems(), st.sampled_from(["tree", "tree", "grammar"]), st.data())
def test_any_marker_under_any_vocabulary(problem, kind, data):
    vocabulary, markers, texts = problem
    constraint = ThinkThen(vocabulary, answers_under(vocabulary, texts, kind), markers)
    language = Language(vocabulary, [m.encode() for m in markers], {text.encode() for text in texts})
    walk(constraint, language, lambda allowed: data.draw(st.sampled_from(allowed)))


@settings(max_examples=80)
@given(problems(), st.integers(0, 3), st.integers(1, 3), st.booleans(), st.data())
def test_any_limits_on_the_thought(problem, least, more, has_all_bytes, data):
    """Without single bytes, some thoughts cannot end, or must end before they may."""
    vocabulary, markers, texts = problem
    if not has_all_bytes:
        kept = data.draw(st.sets(st.integers(0, vocabulary.size - 1)))
        spellings = [each if id in kept else None for id, each in enumerate(vocabulary.bytes_of)]
        vocabulary, texts = Vocabulary(spellings, vocabulary.eos), [*texts, ""]
    constraint = ThinkThen(
        vocabulary, answers_under(vocabulary, texts, "tree"), markers, least_tokens=least, most_tokens=least + more
    )
    language = Language(
        vocabulary, [m.encode() for m in markers], {text.encode() for text in texts}, least, least + more
    )
    if not language.allowed(b"", 0):
        with pytest.raises(ValueError, match="no thought can end"):
            constraint.start({})
        return
    # An answer that the vocabulary cannot write is an error of the answer's constraint, not of the thought.
    length = 12 if has_all_bytes else least + more
    walk(constraint, language, lambda allowed: data.draw(st.sampled_from(allowed)), length, has_all_bytes)


# Real tokenizers, special tokens, free answers


@every_make
def test_every_kind_of_tokenizer(tokenizer):
    """Decoded completions are split at the marker into a thought and an allowed answer, whatever the decoder drops."""
    chance = random.Random(0)
    marker = ")," if "(" in tokenizer.get_vocab() else ",1"
    for kind, inner in constraints_for(tokenizer, {"1", " 10", "x1"}).items():
        for spelled in (inner, OneSpelling(tokenizer, inner)):
            constraint = ThinkThen(tokenizer, spelled, marker, most_tokens=6)
            for _ in range(12):
                tokens = random_tokens(constraint, {}, chance)
                thought, answer = split_thought(tokenizer.decode(tokens, skip_special_tokens=True), [marker])
                if "\ufffd" not in thought:  # byte fallback replaces what stands beside bytes that are no text
                    assert answer in {"1", " 10", "x1"}, (kind, tokens)
                assert constraint.thought_length(tokens) <= 6


def test_a_leading_space_that_decoding_drops_is_no_part_of_a_marker():
    tokenizer = MAKES["sentencepiece"]
    vocabulary = Vocabulary.of(tokenizer)
    constraint = ThinkThen(tokenizer, texts_constraint(vocabulary, [b"x"]), " (")
    token = tokenizer.convert_tokens_to_ids("▁(")
    state = constraint.start({})
    state.accept(token)
    assert state.is_thinking and tokenizer.decode([token]) == "("
    state.accept(token)
    assert not state.is_thinking and tokenizer.decode([token, token]) == "( ("


def test_a_special_token_as_marker_is_recognised_by_its_id():
    tokenizer = MAKES["byte_level"]
    marker, vocabulary = tokenizer.convert_tokens_to_ids("<|tool|>"), Vocabulary.of(tokenizer)
    constraint = ThinkThen(tokenizer, constraints_for(tokenizer, {"10"})["ebnf"], "<|tool|>")
    spelled = [vocabulary.bytes_of.index(bytes([byte])) for byte in b"<|tool|>"]
    state = constraint.start({})
    for token in spelled:  # the same text is ordinary text
        state.accept(token)
    assert state.is_thinking and marker in tokens_of(state, vocabulary)
    state.accept(marker)
    assert not state.is_thinking and tokens_of(state, vocabulary) == {
        id for id, text in enumerate(vocabulary.bytes_of) if text in (b"1", b"10")
    }
    assert constraint.thought_length([*spelled, marker, 0]) == len(spelled) + 1
    assert constraint.thought_length(spelled) is None is constraint.thought_length([vocabulary.eos, marker])
    with pytest.raises(ValueError, match="end-of-sequence"):
        ThinkThen(tokenizer, None, tokenizer.eos_token)
    with pytest.raises(ValueError, match="not the id of a special token"):
        ThinkThen(tokenizer, None, spelled[0])


def test_rows_without_a_constraint_have_a_free_answer():
    vocabulary = Vocabulary([b"a", b"#", b"#a", b"", None, None], eos=5)
    for inner in (None, GrammarConstraint(vocabulary, lambda row: None)):
        state = ThinkThen(vocabulary, inner, "##").start({})
        assert tokens_of(state, vocabulary) == {0, 1, 2} and state.origin is not None
        for token in (1, 2):
            state.accept(token)
        assert tokens_of(state, vocabulary) == {0, 1, 2, 5}
        state.accept(5)
        assert state.finished and not state.mask().any()


@pytest.mark.parametrize(
    ("markers", "limits", "reason"),
    [
        ([], {}, "needs a marker"),
        ("", {}, "must not be empty"),
        (["##", "a##"], {}, "contains marker '##'"),
        ("##", {"least_tokens": 2, "most_tokens": 2}, "least_tokens < most_tokens"),
        ("##", {"least_tokens": -1}, "0 <= least_tokens"),
    ],
)
def test_bad_arguments_are_reported(markers, limits, reason):
    with pytest.raises(ValueError, match=reason):
        ThinkThen(Vocabulary([b"a", b"#", None], eos=2), None, markers, **limits)


def test_constraints_and_markers_that_cannot_be_used():
    vocabulary = Vocabulary([b"a", b"#", None], eos=2)
    with pytest.raises(TypeError, match="object cannot follow a thought"):
        ThinkThen(vocabulary, object(), "##")
    with pytest.raises(ValueError, match="no thought can end with '%'"):
        ThinkThen(vocabulary, None, "%").start({})


@given(st.text("a<#>", max_size=12))
def test_texts_are_split_at_the_first_marker_end(text):
    markers = ["<#", "##", "a>"]
    ends = [n for n in range(len(text) + 1) if text[:n].endswith(tuple(markers))]
    thought, answer = split_thought(text, markers)
    if not ends:
        assert (thought, answer) == (text, None)
    else:
        assert thought + text[len(thought) :][:2] + answer == text and len(text) - len(answer) == ends[0]
