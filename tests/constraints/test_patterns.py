"""Regular expressions as constraints: the same texts as `regex.fullmatch`, or a refusal that names the construct."""

import itertools
import re

import numpy as np
import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.walks import allows
from trl_grpo_tasks.constraints.base import unpack
from trl_grpo_tasks.constraints.grammar import Grammar, GrammarConstraint
from trl_grpo_tasks.constraints.vocabulary import Vocabulary
from trl_grpo_tasks.tasks.prompts import reward

CHARACTERS = ["a", "K", "1", " ", "\n", "{", "\u212a"]  # the last one, the Kelvin sign, is a k if case is ignored
TEXTS = ["".join(text) for length in range(4) for text in itertools.product(CHARACTERS, repeat=length)]

atoms = st.sampled_from(
    ["a", "k", "1", "é", " ", r"\n", ".", r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", "[aé]", "[^a1]", "[^\\n]",
     r"[\w ]", "[]a]", "[[:alpha:]1]", r"\x61", r"\u00e9", r"\p{Lu}", r"\P{L}", r"\{", "{", r"\ ", "[a-é]", "[.]"]
)  # fmt: skip
quantifiers = st.sampled_from(["", "", "", "?", "*", "+", "{2}", "{,2}", "{1,}", "{1,2}", "*?", "+?", "??", "{1,2}?"])
groups = st.sampled_from(["({})", "(?:{})", "(?P<{name}>{})", "(?i:{})", "(?s:{})", "(?s-i:{})"])


def extended(inner):
    return st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
        st.builds(lambda part, many: f"(?:{part}){many}", inner, quantifiers),
        st.builds(lambda form, part: form.replace("{name}", f"n{abs(hash(part))}").replace("{}", part), groups, inner),
        st.builds(lambda part, anchor, first: f"({anchor[0]}{part}|1)" if first else f"({part}{anchor[1]}|1)", inner,
                  st.sampled_from(["^$", (r"\A", r"\Z")]), st.booleans()),
    )  # fmt: skip


patterns = st.builds(
    lambda flags, before, body, after: f"{flags}{before}{body}{after}",
    st.sampled_from(["", "", "(?i)", "(?s)", "(?a)", "(?m)", "(?is)", "(?a)(?s)"]),
    st.sampled_from(["", "^", r"\A"]),
    st.recursive(st.builds(lambda atom, many: atom + many, atoms, quantifiers), extended, max_leaves=6),
    st.sampled_from(["", "$", r"\Z"]),
)


def language(pattern):
    """The texts among TEXTS that the constraint allows, found by walking through it."""
    tokens = [character.encode() for character in CHARACTERS]
    eos = len(tokens)
    others = [bytes([byte]) for byte in range(256) if bytes([byte]) not in tokens]  # so that every text has tokens
    constraint = GrammarConstraint(Vocabulary([*tokens, None, *others], eos), Grammar.regex(pattern))
    found, open_states = set(), [("", constraint.start({}))]
    for text, state in open_states:
        for token in np.flatnonzero(unpack(state.mask(), constraint.vocab_size)[: eos + 1]):
            if token == eos:
                found.add(text)
            elif len(text) < 3:
                following = state.fork()
                following.accept(int(token))
                open_states.append((text + CHARACTERS[token], following))
    return found


@settings(max_examples=80)
@given(patterns)
@example(r"\Aab\Z")
@example(" a")
@example(r"a\s")
@example("a.1")
@example("[^x]{2}")
@example(r"(?i)k\d")
@example("a|^1$|K")
@example(r"(a|)1?")
@example("{a}")
@example("(?i:k)K")
def test_a_constraint_allows_what_fullmatch_accepts(pattern):
    try:
        regex.compile(pattern)
    except regex.error:  # such as "?" after an anchor
        return
    try:
        allowed = language(pattern)
    except ValueError as refusal:
        assert re.search(
            r"a constraint cannot enforce .*(inside the pattern|repeated|'\{'|a and i together)", str(refusal)
        )
        return
    assert allowed == {text for text in TEXTS if regex.fullmatch(pattern, text)}
    assert all(reward.pattern({"pattern": pattern}, text).value == 1 for text in allowed)


@pytest.mark.parametrize("written", [r"\w", r"\d", r"[^\s]", ".", "(?s).", r"\p{Greek}", "(?i)[k-s]", "(?a)\\W"])
def test_sets_of_characters_have_the_same_bounds(written):
    constraint = GrammarConstraint(Vocabulary([*(bytes([b]) for b in range(256)), None], 256), Grammar.regex(written))
    assert not allows(constraint, {}, [0xED, 0xA0, 0x80, 256]), "a surrogate"
    every = "".join(map(chr, range(0x110000)))
    bounds = {at for found in regex.finditer(f"{written}+", every) for at in found.span()}
    for point in {point for bound in bounds for point in (bound - 1, bound)} - {-1, 0x110000}:
        if 0xD800 <= point < 0xE000:
            continue
        is_allowed = allows(constraint, {}, [*chr(point).encode(), 256])
        assert is_allowed == bool(regex.fullmatch(written, chr(point))), hex(point)


@pytest.mark.parametrize(
    ("pattern", "construct"),
    [
        (r"\bab\b", r"a word boundary \(\\bab\)"),
        ("(?=a)ab", "a lookahead"),
        ("a(?<=a)b", "a lookbehind"),
        (r"(a)\1", "a backreference"),
        ("(?>a|ab)c", "an atomic group"),
        ("a*+a", r"the possessive quantifier \*\+ .*; write \*, or"),
        ("(a)?(?(1)b|c)", "a conditional group"),
        ("(a(?R)?b)", "recursion"),
        ("a(?#note)?", "a comment"),
        ("(?x)a b", "the flag 'x'"),
        ("(?V1)[a-z--b]", "the flag '1'"),
        ("(?a)(?i:k)", "the flags a and i together"),
        ("a(?i)b", r"'\(\?i\)'"),
        ("(?:ab){e<=1}", r"a '\{' that may begin a fuzzy match .*; write \\\{"),
        (r"\X", r"'\\\\X'"),
        ("a^b", r"\^ inside the pattern"),
        ("a$\n", r"\$ inside the pattern"),
        ("(^a)+", r"\^ inside the pattern"),
        (r"a(?:\Zb|c)", r"\\Z inside the pattern"),
    ],
)
def test_what_a_constraint_cannot_enforce_is_named(pattern, construct):
    regex.compile(pattern)
    with pytest.raises(ValueError, match=rf"a constraint cannot enforce {construct}.*--constrain false"):
        Grammar.regex(pattern).parse()


def test_patterns_that_are_nested_too_deeply_are_refused():
    with pytest.raises(ValueError, match="nested too deeply"):
        Grammar.regex("(" * 5000 + "a" + ")" * 5000).parse()
