"""Budget against the definition: with R tokens left, a token is allowed if and only if some completion that begins
with it fits. The oracle tries all sequences of tokens under the masks of the unlimited constraint.
"""

import random
import re

import dill
import numpy as np
import pytest
import torch
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tokenizer_makes import byte_level, constraints_for, every_make
from tests.support.toy import LettersConstraint
from tests.support.walks import allowed_tokens, random_tokens
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
from trl_grpo_tasks.constraints.budget import LIMIT, Budget, within
from trl_grpo_tasks.constraints.endings import Endings, UnknownGrammarError
from trl_grpo_tasks.constraints.turns import TurnsConstraint
from trl_grpo_tasks.evaluation.sampler import CompletionSampler
from trl_grpo_tasks.models.loading import load_model, load_tokenizer, prepare_model
from trl_grpo_tasks.models.ready import ready_model
from trl_grpo_tasks.models.tiny import make_tokenizer
from trl_grpo_tasks.registry import get_task

BRACKETS = Grammar.ebnf('root ::= "[" root* "]"')


class Oracle:
    """Which tokens may follow if so many are left, by trying all sequences."""

    def __init__(self, constraint, row):
        self._constraint, self._row, self._known, self._states = constraint, row, {}, {}

    def allowed(self, tokens, left):
        eos = self._constraint.vocabulary.eos
        base = allowed_tokens(self._state(tokens), self._constraint.vocab_size)
        return [w for w in base if left >= 1 and (w == eos or self._fits((*tokens, w), left - 1))]

    def _fits(self, tokens, left):
        if (tokens, left) not in self._known:
            self._known[tokens, left] = left > 0 and bool(self.allowed(tokens, left))
        return self._known[tokens, left]

    def _state(self, tokens):
        if tokens not in self._states:
            state = self._state(tokens[:-1]).fork() if tokens else self._constraint.start(self._row)
            if tokens:
                state.accept(tokens[-1])
            self._states[tokens] = state
        return self._states[tokens]


def check_masks(unlimited, most, choose, is_exact=True, row=None):
    """Write a completion under a limit and compare every mask with the oracle; return the share that was kept."""
    row, oracle, tokens, masks = row or {}, Oracle(unlimited, row or {}), [], []
    limited = within(unlimited, most)
    if not oracle.allowed((), most):
        with pytest.raises(ValueError, match=f"max_completion_length={most} is too short"):
            limited.start(row)
        return 1.0
    state, kept, possible = limited.start(row), 0, 0
    while not state.finished:
        assert len(tokens) < most, f"cut off: {tokens}"
        found, expected = (
            allowed_tokens(state, unlimited.vocab_size),
            oracle.allowed(tuple(tokens), most - len(tokens)),
        )
        assert found == expected if is_exact else found and set(found) <= set(expected), (tokens, found, expected)
        kept, possible = kept + len(found), possible + len(expected)
        for token in set(range(unlimited.vocab_size)) - set(found):
            with pytest.raises(ValueError, match=r"allowed|may not end"):
                state.fork().accept(token)
        masks.append(state.mask().copy())
        tokens.append(choose(found))
        state.accept(tokens[-1])
    for each in (limited, dill.loads(dill.dumps(limited, recurse=True))):  # workers get a copy
        assert all(map(np.array_equal, masks, replay(each, row, tokens)))
    return kept / possible


# ---- the definition

pieces = st.lists(st.text("abc", min_size=1, max_size=3), max_size=5)


def vocabulary_of(texts, letters="abc"):
    spellings = list(dict.fromkeys([*letters, *texts]))
    return Vocabulary([*(text.encode() for text in spellings), None], len(spellings))


@settings(max_examples=60, deadline=None)
@given(pieces, st.lists(st.text("abc", max_size=6), min_size=1, max_size=4, unique=True), st.integers(1, 5), st.data())
def test_choice_trees_equal_the_definition(tokens, texts, most, data):
    tree = ChoiceTreeConstraint(
        vocabulary_of(tokens),
        lambda row: 0,
        lambda node: (
            [(text[:2], text[2:]) if len(text) > 2 else (text, None) for text in texts]
            if node == 0
            else [(node, None)]
        ),
    )
    check_masks(tree, most, lambda found: data.draw(st.sampled_from(found)))


PATTERNS = ["a*b", "(ab|c)+", "[ab]{2,4}c?", "a(bc)*|c{3}", "(a|bb|ccc)(a|b)*c", "[^b]{1,2}"]


@settings(max_examples=60, deadline=None)
@given(pieces, st.sampled_from(PATTERNS), st.integers(1, 5), st.data())
def test_patterns_equal_the_definition(tokens, pattern, most, data):
    constraint = GrammarConstraint(vocabulary_of(tokens), Grammar.regex(pattern))
    check_masks(constraint, most, lambda found: data.draw(st.sampled_from(found)))


@settings(max_examples=60, deadline=None)
@given(pieces, st.sampled_from(["c", "ab", ("bb", "ca")]), st.sampled_from(["tree", "pattern", "free"]), st.data())
def test_thoughts_equal_the_definition(tokens, markers, kind, data):
    vocabulary = vocabulary_of(tokens)
    inner = {
        "tree": ChoiceTreeConstraint(vocabulary, lambda row: 0, lambda node: [("ab", None), ("c", None)]),
        "pattern": GrammarConstraint(vocabulary, Grammar.regex("a+b")),
        "free": None,
    }[kind]
    least = data.draw(st.integers(0, 2))
    most_thought = data.draw(st.sampled_from([None, least + 2]))
    try:
        constraint = ThinkThen(vocabulary, inner, markers, least_tokens=least, most_tokens=most_thought)
        constraint.start({})
    except ValueError:
        return
    check_masks(constraint, data.draw(st.integers(2, 5)), lambda found: data.draw(st.sampled_from(found)))


def turns(most_thought_tokens, *more):
    """Free text without markers ("ca" and `more`), then one with an answer, which is optional if there are no more."""
    thought = {"type": "any_text", "excludes": ["ca", *more], "max_tokens": most_thought_tokens}
    parts = [{"type": "tag", "begin": marker, "content": {"type": "regex", "pattern": "(a|cb)?"}, "end": ""}
             for marker in ("ca", *more)]  # fmt: skip
    rest = {"type": "or", "elements": parts} if more else {"type": "optional", "content": parts[0]}
    return Grammar.structural_tag({"type": "sequence", "elements": [thought, rest]})


@settings(max_examples=60, deadline=None)
@given(pieces, st.booleans(), st.sampled_from([None, 1, 3]), st.integers(2, 5), st.data())
def test_turns_equal_the_definition(tokens, has_two, limit, most, data):
    constraint = GrammarConstraint(vocabulary_of(tokens), turns(limit, *(["bb"] if has_two else [])))
    check_masks(constraint, most, lambda found: data.draw(st.sampled_from(found)))


def test_tokens_of_a_thought_are_counted_where_equal_masks_follow():
    constraint = GrammarConstraint(vocabulary_of(["aca"]), turns(3, "bb"))
    for seed in range(20):  # after "a" and "aa" the masks are equal, and two more tokens or one may be thought
        check_masks(constraint, 5, random.Random(seed).choice)


NESTED = {
    "brackets": (BRACKETS, ["[", "]", "[[", "]]", "]]]", "[]"]),
    "two kinds": (
        Grammar.ebnf('root ::= "a" root "b" | "cc" | "(" root ")" root'),
        ["a", "b", "c", "(", ")", "bb", "cb"],
    ),
    "words": (Grammar.ebnf('root ::= w (" " root)?\nw ::= "a" [ac]* "b"'), ["a", "b", "c", " ", "ab ", "b a", "cb"]),
}


@pytest.mark.parametrize("name", NESTED)
def test_nested_grammars_end_in_time_and_keep_nearly_all_tokens(name):
    grammar, tokens = NESTED[name]
    vocabulary = vocabulary_of(tokens, "")
    rng, constraint = random.Random(0), GrammarConstraint(vocabulary, grammar)
    shares = [check_masks(constraint, most, rng.choice, is_exact=False) for most in (2, 3, 4, 5) for _ in range(6)]
    assert np.mean(shares) > 0.97, "share of the tokens that the definition allows"


@every_make
@pytest.mark.parametrize("is_spelled", [False, True])
def test_every_tokenizer_ends_in_time(tokenizer, is_spelled):
    """With each limit from the shortest answer on; sentencepiece drops a leading space, and may need to write it."""
    rng = random.Random(0)
    for texts in (["2x4 (3,0)\n1x", "10", "1x8 (13,10"], [" 1", " 10 11"]):
        for unlimited in constraints_for(tokenizer, texts).values():
            unlimited = OneSpelling(tokenizer, unlimited) if is_spelled else unlimited
            least = Budget(unlimited, 10**6).plan(unlimited.start({})).least
            for most in (least, least + 1, least + 3, least + 6):
                tokens = random_tokens(within(unlimited, most), {}, rng, tokenizer.eos_token_id, most)
                assert tokens[-1] == tokenizer.eos_token_id


# ---- endings of grammars

BYTES = [bytes([byte]) for byte in range(256)]
SCHEMA = {
    "type": "object", "required": ["a", "e"], "additionalProperties": False,
    "properties": {
        "a": {"type": "string", "maxLength": 5}, "b": {"type": "array", "items": {"type": "integer", "maximum": 120}},
        "c": {"type": "number"}, "d": {"enum": ["x", "é→"]}, "e": {"$ref": "#/$defs/e"},
    },
    "$defs": {"e": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/$defs/e"}, "minItems": 1}]}},
}  # fmt: skip
GRAMMARS = [
    Grammar.json_schema(SCHEMA), Grammar.json_schema(SCHEMA, any_whitespace=True), Grammar.json_schema({}), BRACKETS,
    Grammar.regex(r'[^\n"]{3,5}\n\d+(é|a\\)?x*(ab){2,}[-\]"→-⇒]'), Grammar.ebnf(r'root ::= [^\]\\a-f]* "\"\t" "]"'),
    Grammar.json_schema({"type": "array", "items": {"type": "string", "pattern": r'^([ -w]{2}|\d+-"?(\w|\.\s)*)$'}}),
    turns(None), turns(None, 'a"c', "a→"),
]  # fmt: skip


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_endings_are_the_shortest(grammar):
    """xgrammar accepts each, and the shortest ending is one byte longer than that after the best next byte."""
    parsed = xgrammar.Grammar.concat(grammar.parse())
    info = xgrammar.TokenizerInfo([*BYTES, b"<end>"], xgrammar.VocabType.RAW, stop_token_ids=[256])
    compiled = xgrammar.GrammarCompiler(info).compile_grammar(parsed)
    endings, rng = Endings(str(compiled.grammar), BYTES), random.Random(0)
    for _ in range(12):
        matcher, at = xgrammar.GrammarMatcher(compiled), endings.start
        for _ in range(40):
            words = xgrammar.allocate_token_bitmask(1, 257)
            matcher.fill_next_token_bitmask(words)
            allowed = np.flatnonzero(unpack(words.numpy()[0], 257)).tolist()
            after = {byte: endings.after(at, BYTES[byte]) for byte in range(256)}
            found = {byte: endings.ending(place) for byte, place in after.items()}
            lengths = {byte: len(ending) for byte, ending in found.items() if ending is not None}
            assert sorted(lengths) == [token for token in allowed if token != 256]
            ending, fork = endings.ending(at), matcher.fork()
            assert len(ending) == (0 if 256 in allowed else 1 + min(lengths.values())) <= endings.longest
            assert (not ending or fork.accept_string(ending)) and fork.accept_token(256)
            if not lengths:
                break
            byte = rng.choice(sorted(lengths))
            assert matcher.accept_token(byte)
            at = after[byte]


def test_endings_use_the_bytes_of_tokens_and_refuse_unknown_grammars():
    grammar = str(Grammar.regex(r"[^x]{2}y?(z|[0-9]{3})").parse())
    assert Endings(grammar, [b"\x00", b"a", b"7", b"77"]).ending(Endings(grammar, [b"a", b"7"]).start) == b"77777"
    with pytest.raises(UnknownGrammarError):
        Endings("root ::= TagDispatch(\n  x\n)", BYTES)
    with pytest.raises(UnknownGrammarError):
        Endings(str(Grammar.ebnf('root ::= "x" | root "y"').parse()), BYTES)


# ---- rows, limits and other constraints


def test_far_from_the_limit_masks_are_the_same_arrays():
    tree = ChoiceTreeConstraint(vocabulary_of([]), lambda row: 0, lambda n: [("a", n + 1 if n < 9 else None)])
    state, inner = within(tree, 40).start({}), tree.start({})
    for _ in range(9):
        assert state.mask() is inner.mask()
        state.accept(0)
        inner.accept(0)


def test_other_constraints_and_endless_trees_are_as_before():
    tokenizer = make_tokenizer([*"abcd"], 64)
    other = LettersConstraint(tokenizer)
    assert within(other, 2) is other
    endless = ChoiceTreeConstraint(vocabulary_of([]), lambda row: (), lambda n: [("a", (*n, 0)), ("b", (*n, 1))])
    state = within(endless, 2).start({})
    assert not isinstance(state, type(within(endless, 2))) and state.origin == ()


def test_a_row_may_have_its_own_limit():
    tree = ChoiceTreeConstraint(vocabulary_of([]), lambda row: 0, lambda node: [("a", None), ("bb", None)])
    served = within(tree, None)
    assert [allowed_tokens(served.start(row), 4) for row in ({LIMIT: 2}, {LIMIT: 3}, {LIMIT: None}, {})] == [
        [0], [0, 1], [0, 1], [0, 1]
    ]  # fmt: skip
    limited = within(served, 2)
    assert within(limited, 2) is limited and isinstance(limited, Budget) and limited.unlimited is tree
    with pytest.raises(ValueError, match="max_completion_length=1 is too short: the shortest answer takes 2 tokens"):
        within(tree, 1, [{}])


@pytest.mark.parametrize("grammar", [None, Grammar.regex("a{1,3}b"), turns(None), turns(3)])
@pytest.mark.parametrize("most", [3, 5, 8, 12, 30])
def test_conversations_end_in_time(most, grammar):
    """An observation that leaves no room for another turn ends the conversation."""
    tokenizer = make_tokenizer([*"abcd \n:;"], 64)
    inner = None if grammar is None else GrammarConstraint(tokenizer, grammar)
    unlimited = TurnsConstraint(tokenizer, inner, lambda row, text: "c:", 3)
    constraint = dill.loads(dill.dumps(within(unlimited, most), recurse=True))
    row, rng = {"prompt": "a"}, random.Random(0)
    for _ in range(5):
        tokens = random_tokens(constraint, row, rng, tokenizer.eos_token_id)
        turns = constraint.turns_of(row, tokens)
        assert len(tokens) <= most and 1 <= len(turns) <= 3 and tokens[-1] == tokenizer.eos_token_id
        assert all(tokens[end - 1] == tokenizer.eos_token_id for _, end in turns)
        texts = [tokenizer.decode(tokens[start : end - 1]) for start, end in turns]
        patterns = {"regex": "a{1,3}b", "structural_tag": "((?!ca).)*(ca(a|cb)?)?"}
        assert grammar is None or all(re.fullmatch(patterns[grammar.kind], text, re.DOTALL) for text in texts)


# ---- the task packs

PACKS = {  # the last number is about the shortest answer
    "brick": ("brick", {}, 6), "pivot": ("brick", {"text_form": "pivot"}, 7), "machine": ("machine", {}, 9),
    "schema": ("prompts", {"generator": "schema"}, 125),
    "thought": ("prompts", {"generator": "arithmetic", "think": True, "think_tokens": 50}, 12),
}  # fmt: skip


@pytest.mark.parametrize("pack", PACKS)
def test_packs_end_in_time_under_a_general_tokenizer(pack):
    task, tokenizer, rng = get_task(*PACKS[pack][:2]), byte_level(), random.Random(0)
    rows, unlimited = task.dataset("train", 3, 0), task.constraint(tokenizer)
    least = max(Budget(unlimited, 10**6).plan(unlimited.start(row)).least for row in rows)
    for most in (least, least + 3, 2 * least):
        for row in rows:
            tokens = random_tokens(within(unlimited, most), row, rng, tokenizer.eos_token_id, most)
            assert tokens[-1] == tokenizer.eos_token_id


def test_a_limit_that_is_too_short_is_an_error_before_weights_are_loaded(tmp_path):
    task = get_task("brick")
    with pytest.raises(ValueError, match="max_completion_length=4 is too short: the shortest answer takes 5 tokens"):
        ready_model("tiny", task, task.dataset("train", 2, 0), tmp_path, seed=0, constrain=True, most_tokens=4)


@pytest.mark.parametrize("pack", PACKS)
def test_a_random_model_is_never_cut_off(pack, tmp_path):
    name, options, most = PACKS[pack]
    task = get_task(name, options)
    path = prepare_model("tiny", task, tmp_path, 0, "main")
    tokenizer, model = load_tokenizer(path), load_model(path, dtype="float32").eval()
    rows = task.dataset("train", 4, 0) * 4
    torch.manual_seed(0)
    done = CompletionSampler(model, tokenizer, 1.0, most, task.constraint(tokenizer)).sample(rows)
    assert not any(each.cut_off for each in done) and max(each.tokens for each in done) <= most
