"""Masks of grammars and choice trees, checked by trying every token, for all common types of tokenizers.

The oracle is a finite set of texts: a token is allowed if and only if some text begins with the text after that token.
"""

import itertools
import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders
from transformers import PreTrainedTokenizerFast

from tests.support.tokenizer_makes import (
    LINES,
    MAKES,
    byte_level,
    constraints_for,
    every_make,
    lines_tree,
    walk,
    word_level,
)
from tests.support.walks import random_tokens
from trl_grpo_tasks.constraints import ChoiceTreeConstraint, Grammar, GrammarConstraint, Vocabulary, replay, unpack
from trl_grpo_tasks.constraints.base import only_token, pack
from trl_grpo_tasks.constraints.vocabulary import token_bytes

# Vocabularies


@every_make
def test_token_bytes_join_to_what_decode_gives(tokenizer):
    spelled, chance = token_bytes(tokenizer), random.Random(0)
    texts = [id for id, spelling in enumerate(spelled) if spelling]
    assert all(spelled[id] is None for id in tokenizer.all_special_ids)
    for _ in range(300):
        ids = chance.choices(texts, k=chance.randint(1, 6))
        if ids[0] not in Vocabulary.of(tokenizer).not_first:
            joined = b"".join(spelled[id] for id in ids)
            if Vocabulary.of(tokenizer).strips_leading_space:
                joined = joined.removeprefix(b" ")
            if b"\xff" in joined or "�" in joined.decode(errors="replace"):
                continue  # incomplete characters: decoders differ in the number of replacement characters
            assert tokenizer.decode(ids, skip_special_tokens=True) == joined.decode()


@pytest.mark.parametrize("make", ["byte_level", "sentencepiece"])
def test_token_bytes_agree_with_xgrammar(make):
    import xgrammar

    theirs = xgrammar.TokenizerInfo.from_huggingface(MAKES[make]).decoded_vocab
    for id, ours in enumerate(token_bytes(MAKES[make])):
        # The added token is not in the byte-level alphabet.
        assert ours is None or ours == theirs[id] or MAKES[make].convert_ids_to_tokens(id) == "é 1"


def test_vocabularies_are_cached_and_unsupported_tokenizers_rejected():
    tokenizer = byte_level()
    assert Vocabulary.of(tokenizer) is Vocabulary.of(tokenizer)
    before = Vocabulary.of(tokenizer)
    tokenizer.add_tokens(["<more>"])
    assert Vocabulary.of(tokenizer).size == before.size + 1
    assert MAKES["metaspace"].decode([18]) == "1" and 18 in Vocabulary.of(MAKES["metaspace"]).not_first
    with pytest.raises(ValueError, match=r"decoders.Fuse"):
        Vocabulary.of(word_level(fuse=False))
    tokenizer = word_level()
    tokenizer.backend_tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="WordPiece"):
        Vocabulary.of(tokenizer)
    tokenizer = word_level()
    tokenizer.clean_up_tokenization_spaces = True
    with pytest.raises(ValueError, match="clean up"):
        Vocabulary.of(tokenizer)
    with pytest.raises(ValueError, match="no eos_token"):
        Vocabulary.of(PreTrainedTokenizerFast(tokenizer_object=word_level().backend_tokenizer))


# Grammars and choice trees with every type of tokenizer


@every_make
def test_masks_are_exact_and_walks_end_in_allowed_texts(tokenizer):
    kinds = {**constraints_for(tokenizer, LINES), "lines": lines_tree(tokenizer)}
    for kind, constraint in kinds.items():
        chance = random.Random(1)
        for _ in range(4):
            tokens = walk(constraint, LINES, chance.choice)
            assert tokenizer.decode(tokens, skip_special_tokens=True) in LINES, kind
    spaced = {" 1", " 10,1", " (1)"}
    for kind, constraint in constraints_for(tokenizer, spaced).items():
        for _ in range(20):
            tokens = random_tokens(constraint, {}, chance)
            assert tokenizer.decode(tokens, skip_special_tokens=True) in spaced, kind


LITERALS = ["", "0", "1", "10", "11", "1,", ",", "é", "€0", "€", "a", "ab", "abc", "ba"]


@st.composite
def trees(draw):
    """Random finite trees with shared nodes: node i leads to later nodes or to the end. Many are ambiguous."""
    size = draw(st.integers(1, 4))
    later = [[None, *range(node + 1, size)] for node in range(size)]
    pairs = [st.tuples(st.sampled_from(LITERALS), st.sampled_from(options)) for options in later]
    return [draw(st.lists(pairs[node], min_size=1, max_size=4)) for node in range(size)]


@st.composite
def vocabularies(draw):
    """Random vocabularies: all single bytes of the alphabet, so that every text can be written, and substrings."""
    singles = sorted({bytes([byte]) for text in LITERALS for byte in text.encode()})
    joined = st.lists(st.sampled_from(LITERALS), min_size=1, max_size=4).map(lambda texts: "".join(texts).encode())
    cuts = st.tuples(joined, st.integers(0, 3), st.integers(1, 9)).map(lambda cut: cut[0][cut[1] :][: cut[2]])
    pieces = draw(st.lists(cuts, max_size=30))
    return Vocabulary([*singles, None, b"", *pieces, None], eos=len(singles))


def language(tree, node=0):
    """All texts of a tree."""
    if node is None:
        return {""}
    return {text + rest for text, after in tree[node] for rest in language(tree, after)}


@settings(max_examples=150)
@given(trees(), vocabularies(), st.data())
def test_any_tree_under_any_vocabulary(tree, vocabulary, data):
    constraint = ChoiceTreeConstraint(vocabulary, lambda row: 0, tree.__getitem__, look_ahead=data.draw(st.booleans()))
    walk(constraint, language(tree), lambda allowed: data.draw(st.sampled_from(allowed)))


@settings(max_examples=40)
@given(trees(), vocabularies(), st.data())
def test_any_finite_grammar_under_any_vocabulary(tree, vocabulary, data):
    texts = language(tree)
    constraint = constraints_for(vocabulary, texts)["ebnf"]
    walk(constraint, texts, lambda allowed: data.draw(st.sampled_from(allowed)))


# Grammars


@settings(max_examples=100)
@given(st.lists(st.text("ab0", min_size=1, max_size=6), min_size=1, max_size=12), st.data())
def test_tokens_that_contain_each_other(pieces, data):
    """xgrammar alone skips `abab0` after it has rejected `ab0`."""
    text = pieces[-1]
    spellings = [b"a", b"b", b"0", None, *(piece.encode() for piece in pieces)]
    constraint = GrammarConstraint(Vocabulary(spellings, eos=3), Grammar.ebnf(f'root ::= "{text}"'))
    walk(constraint, {text}, lambda allowed: data.draw(st.sampled_from(allowed)))


@pytest.mark.parametrize("rules", ['root ::= "a" root "b" | "é"', 'root ::= pair\npair ::= "a" pair "b" | "é"'])
def test_tokens_that_end_a_rule_within_another(rules):
    """xgrammar alone leaves `bb` out if the rule is the root."""
    joined = [text.encode() for text in ("bb", "bbb", "éb", "aéb", "aa")]
    spellings = [*(bytes([byte]) for byte in "abé".encode()), None, *joined]
    constraint = GrammarConstraint(Vocabulary(spellings, eos=4), Grammar.ebnf(rules))
    texts = {"a" * depth + "é" + "b" * depth for depth in range(60)}
    chance = random.Random(5)
    for _ in range(20):
        walk(constraint, texts, chance.choice)


@st.composite
def recursive_grammars(draw):
    """Random rules that may refer to each other and to the root. The first alternative of each refers to none."""
    plain = st.one_of(
        st.sampled_from(LITERALS[1:]).map(lambda text: json.dumps(text, ensure_ascii=False)),
        st.sampled_from(["[ab]", "[^a]", "[0-9]+", "[é-€]", "[^b0]*", "[ab]{1,3}"]),
    )
    names = ["root", "x", "y"][: draw(st.integers(1, 3))]
    reference = st.tuples(st.sampled_from(names), st.sampled_from(["{}", "({})*", "{}?", '({} | "0")']))
    part = st.one_of(plain, reference.map(lambda drawn: drawn[1].format(drawn[0])))
    rules = []
    for name in names:
        first = " ".join(draw(st.lists(plain, min_size=1, max_size=3)))
        others = draw(st.lists(st.lists(part, min_size=1, max_size=3).map(" ".join), max_size=2))
        rules.append(f"{name} ::= {' | '.join([first, *others])}")
    return "\n".join(rules)


@settings(max_examples=80)
@given(recursive_grammars(), vocabularies(), st.data())
def test_masks_agree_with_what_is_accepted(rules, vocabulary, data):
    constraint = GrammarConstraint(vocabulary, Grammar.ebnf(rules))
    state = constraint.start({})
    for _ in range(8):
        if state.finished:
            break
        allowed = np.flatnonzero(unpack(state.mask(), constraint.vocab_size)).tolist()
        assert allowed == [token for token in range(vocabulary.size) if is_accepted(state.fork(), token)], rules
        state.accept(data.draw(st.sampled_from(allowed)))


def is_accepted(state, token):
    try:
        state.accept(token)
    except ValueError:
        return False
    return True


def test_json_schema_allows_exactly_its_instances():
    fields = {"a": ["pé", 'q"'], "n": list(range(8, 13)), "b": [True, False]}
    properties = {"a": {"enum": fields["a"]}, "n": {"type": "integer", "minimum": 8, "maximum": 12}}
    properties["b"] = {"type": "boolean"}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    values = [dict(zip(fields, each, strict=True)) for each in itertools.product(*fields.values())]
    for separators in ((", ", ": "), (",", ":")):
        texts = {json.dumps(value, separators=separators, ensure_ascii=False) for value in values}
        constraint = GrammarConstraint(MAKES["byte_level"], Grammar.json_schema(schema, separators=separators))
        chance = random.Random(4)
        for _ in range(4):
            walk(constraint, texts, chance.choice)
    loose = GrammarConstraint(MAKES["byte_level"], Grammar.json_schema(schema, any_whitespace=True)).start({})
    for token in MAKES["byte_level"].encode('{\n  "a"  :'):
        loose.accept(token)


def test_grammar_per_row_and_unconstrained_rows():
    def grammar(row):
        return Grammar.regex(row["pattern"]) if row["pattern"] else None

    constraint = GrammarConstraint(MAKES["word_level"], grammar)
    assert replay(constraint, {"pattern": None}, [3, 4]) == [None, None]
    walk(constraint, {"1", "10"}, max, {"pattern": "10?"})
    walk(constraint, {"2x"}, max, {"pattern": "2x"})
    with pytest.raises(ValueError, match="invalid regex"):
        constraint.start({"pattern": "("})
    with pytest.raises(TypeError, match="Grammar or None"):
        GrammarConstraint(MAKES["word_level"], lambda row: "1").start({})


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar.regex("(1"), r"missing \)"),
        (Grammar.ebnf('root ::= "a" other'), '"other" is not defined'),
        (Grammar.json_schema({"type": "number of bricks"}), "number of bricks"),
        (Grammar.json_schema("{"), "JSON"),
        (Grammar("lark", "x"), "kinds are: ebnf"),
    ],
)
def test_invalid_grammars_are_reported_immediately(grammar, reason):
    with pytest.raises(ValueError, match=reason):
        GrammarConstraint(object(), grammar)  # fails before the tokenizer is used


def test_text_without_a_token_is_an_error_not_an_empty_mask():
    with pytest.raises(RuntimeError, match="no token"):
        GrammarConstraint(MAKES["word_level"], Grammar.regex("q")).start({}).mask()
    tree = ChoiceTreeConstraint(MAKES["word_level"], lambda row: 0, lambda node: [("qq", None)])
    with pytest.raises(RuntimeError, match=r"no token for the text that must follow: expected 'qq'"):
        tree.start({}).mask()


# Choice trees


def test_dead_end_nodes_are_dropped_or_reported():
    tree = {"root": [("1", "dead"), ("10", "alive"), ("2", "doomed")], "dead": [], "alive": [("x", None)]}
    tree["doomed"] = [("x", "dead")]
    careful = ChoiceTreeConstraint(MAKES["word_level"], lambda row: row["node"], tree.__getitem__)
    state = careful.start({"node": "root"})
    ids = MAKES["word_level"].convert_tokens_to_ids(["1", "10", "2"])
    assert set(np.flatnonzero(unpack(state.mask(), careful.vocab_size))) == set(ids)
    with pytest.raises(RuntimeError, match="node 'doomed'"):
        state.accept(ids[2])
    state.accept(ids[0])  # "1" may still become "10x", but the text may not end here
    for token in [*MAKES["word_level"].encode("0x"), MAKES["word_level"].eos_token_id]:
        assert only_token(state.mask()) == token
        state.accept(token)
    with pytest.raises(RuntimeError, match="node 'dead'"):
        careful.start({"node": "dead"})
    quick = ChoiceTreeConstraint(MAKES["word_level"], lambda row: "doomed", tree.__getitem__, look_ahead=False)
    with pytest.raises(RuntimeError, match="node 'dead'"):
        quick.start({}).accept(MAKES["word_level"].convert_tokens_to_ids("x"))


def test_endless_choices_with_empty_text_are_an_error():
    circle = {0: [("", 1), ("1", None)], 1: [("", 0)]}
    with pytest.raises(ValueError, match="after node 0 have empty text, perhaps"):
        ChoiceTreeConstraint(MAKES["word_level"], lambda row: 0, circle.__getitem__).start({})
    with pytest.raises(ValueError, match="have empty text"):
        ChoiceTreeConstraint(MAKES["word_level"], lambda row: 0, lambda node: [("", node + 1)]).start({})


def test_new_nodes_share_masks_and_caches_are_bounded():
    tree = ChoiceTreeConstraint(
        MAKES["word_level"], lambda row: (), lambda node: [("1x", (*node, 1)), ("2", (*node, 2))]
    )
    state, masks = tree.start({}), set()
    for token in MAKES["word_level"].encode("1x2" * 100):
        masks.add(id(state.mask()))
        state.accept(token)
    assert len(masks) == 2
    for cache in (tree.expand, tree.packed, tree.vocabulary.along):
        assert cache.cache_info().maxsize is not None
    with pytest.raises(ValueError, match="read-only"):
        state.mask()[0] = 0


# The interface


@given(st.lists(st.booleans(), min_size=1, max_size=100))
def test_packing(allowed):
    words = pack(np.array(allowed))
    assert unpack(words, len(allowed)).tolist() == allowed
    assert [bool(words[id // 32] >> (id % 32) & 1) for id in range(len(allowed))] == allowed
