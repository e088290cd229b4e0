"""Masks of both kinds against trying every token of the vocabulary, for tokenizers of every common make.

The oracle is a finite set of texts: a token is allowed if and only if some text begins with what is written then.
"""

import itertools
import json
import random
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from trl_grpo_tasks.constraints import (
    ChoiceTreeConstraint,
    Grammar,
    GrammarConstraint,
    OneSpelling,
    Vocabulary,
    replay,
    unpack,
)
from trl_grpo_tasks.constraints.base import FORCED_LIMIT, pack, pack_ids
from trl_grpo_tasks.constraints.vocabulary import token_bytes

CORPUS = ["2x4 (3,0,1)\n1x8 (13,10,1)\n", "héllo wörld €5 10 11 12", '{"a": "pé", "n": 10, "b": true}', "x  y"] * 20


def byte_level(digits_apart=False):
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), split]) if digits_apart else split
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<pad>", "</s>", "<|tool|>"]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("é 1")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>")


def sentencepiece(strip=True):
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = [*"▁0123456789x(),é€ab", "▁2", "2x", "10", ",1", "1,", "▁(", "(1", "▁▁", "▁1", "x4"]
    vocabulary = {piece: id for id, piece in enumerate(["<unk>", "<s>", "</s>", *bytes_, *pieces])}
    merges = [tuple(p) for p in [("▁", "2"), ("1", "0"), ("▁", "("), ("▁", "▁"), ("▁", "1"), ("x", "4")]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    if strip:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), tokenizer.normalizer])
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>", unk_token="<unk>")


def metaspace():
    pieces = ["<unk>", "</s>", *"▁0123456789x(),\n", "▁▁1", "1▁(", "▁2x", "10", "11", ",1"]
    tokenizer = Tokenizer(models.Unigram([(piece, -float(len(pieces))) for piece in pieces], unk_id=0))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def word_level(fuse=True):
    words = ["<pad>", "</s>", "<unk>", *"0123456789x(), \n", "10", "11", "é"]
    tokenizer = Tokenizer(models.WordLevel({word: id for id, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("10|11|.|\n"), "isolated")
    if fuse:
        tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>", pad_token="<pad>")


MAKES = {
    "byte_level": byte_level(),
    "byte_level_digits_apart": byte_level(digits_apart=True),
    "sentencepiece": sentencepiece(),
    "sentencepiece_unstripped": sentencepiece(strip=False),
    "metaspace": metaspace(),
    "word_level": word_level(),
}
every_make = pytest.mark.parametrize("tokenizer", MAKES.values(), ids=MAKES.keys())
LINES = {
    line + again
    for line in (f"{h}x{w} ({x},{y})\n" for h, w in [(1, 2), (2, 4)] for x in (0, 1, 10, 11) for y in (1, 10))
    for again in ("", "1x2 (1,1)\n")
}


def lines_tree(tokenizer, **options):
    """The tree of LINES; a node is what was written before."""

    def choices(node):
        line, step, *_ = node
        if step == "size":
            again = [("1x2 (1,1)\n", None), ("", None)]
            return again if line else [("1x2 ", ("1x2 ", "x")), ("2x4 ", ("2x4 ", "x"))]
        if step == "x":
            return [(f"({x},", (line + f"({x},", "y")) for x in (0, 1, 10, 11)]
        return [(f"{y}", (line, "close", y)) for y in (1, 10)] if step == "y" else [(")\n", (line, "size"))]

    return ChoiceTreeConstraint(
        tokenizer, lambda row: ("", "size") if row.get("on", True) else None, choices, **options
    )


def oracle(vocabulary, texts, written, first):
    """The tokens after which what is written is still the beginning of a text, found by trying each."""

    def viable(raw):
        begun = {text for text in texts if text.startswith(raw)}
        if vocabulary.strips_leading_space:
            begun = {t for t in begun if not t.startswith(b" ")} | {t for t in texts if (b" " + t).startswith(raw)}
        return bool(begun)

    allowed = {
        id
        for id, spelling in enumerate(vocabulary.bytes_of)
        if spelling and viable(written + spelling) and not (first and id in vocabulary.not_first)
    }
    decoded = written.removeprefix(b" ") if vocabulary.strips_leading_space else written
    return allowed | ({vocabulary.eos} if decoded in texts else set())


def walk(constraint, texts, choose, row=None):
    """Write a text token by token, comparing every mask with the oracle; gives the tokens."""
    texts = {text.encode() for text in texts}
    vocabulary, state, tokens, written = constraint.vocabulary, constraint.start(row or {}), [], b""
    while not state.finished:
        allowed = oracle(vocabulary, texts, written, not tokens)
        mask = state.mask()
        assert set(np.flatnonzero(unpack(mask, constraint.vocab_size))) == allowed, written
        assert np.array_equal(mask, pack_ids(sorted(allowed), constraint.vocab_size)), "spare bits are set"
        assert allowed, f"nothing may follow {written!r}"
        for token in (*range(0, vocabulary.size, 1 + vocabulary.size // 40), -1, vocabulary.size):
            if token not in allowed:
                with pytest.raises(ValueError, match=r"allowed|may not end"):
                    state.accept(token)
        forced, token = state.forced(), choose(sorted(allowed))
        assert not forced or forced[0] == token
        assert bool(forced) == (len(allowed) == 1)
        state.accept(token)
        tokens.append(token)
        written += vocabulary.bytes_of[token] or b""
    assert not state.mask().any() and state.forced() == []
    with pytest.raises(ValueError, match="after the end"):
        state.accept(tokens[0])
    return tokens


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
                continue  # cut characters; decoders differ in how many marks they put
            assert tokenizer.decode(ids, skip_special_tokens=True) == joined.decode()


@pytest.mark.parametrize("make", ["byte_level", "sentencepiece"])
def test_token_bytes_agree_with_xgrammar(make):
    import xgrammar

    theirs = xgrammar.TokenizerInfo.from_huggingface(MAKES[make]).decoded_vocab
    for id, ours in enumerate(token_bytes(MAKES[make])):
        if ours is not None and MAKES[make].convert_ids_to_tokens(id) != "é 1":  # not spelled in the byte alphabet
            assert ours == theirs[id]


def test_vocabularies_are_remembered_and_bad_tokenizers_refused():
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


# Both kinds, every make of tokenizer


def constraints_for(tokenizer, texts):
    """The same texts as a tree that is one level deep, an EBNF of literals and a regular expression."""
    escaped = [re.sub(r"([()])", r"\\\1", text).replace("\n", "\\n") for text in sorted(texts)]
    literals = " | ".join(json.dumps(text) for text in sorted(texts))
    return {
        "tree": ChoiceTreeConstraint(tokenizer, lambda row: 0, lambda node: [(text, None) for text in texts]),
        "ebnf": GrammarConstraint(tokenizer, Grammar.ebnf(f"root ::= {literals}")),
        "regex": GrammarConstraint(tokenizer, Grammar.regex("|".join(f"({text})" for text in escaped))),
    }


@every_make
def test_masks_are_exact_and_walks_end_in_allowed_texts(tokenizer):
    kinds = {**constraints_for(tokenizer, LINES), "lines": lines_tree(tokenizer)}
    for kind, constraint in kinds.items():
        chance = random.Random(1)
        for _ in range(4):
            tokens = walk(constraint, LINES, chance.choice)
            assert tokenizer.decode(tokens, skip_special_tokens=True) in LINES, kind


@every_make
def test_every_text_can_be_written_in_its_natural_tokenisation(tokenizer):
    for constraint in (lines_tree(tokenizer), constraints_for(tokenizer, LINES)["ebnf"]):
        for text in sorted(LINES):
            natural = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
            state = constraint.start({})
            for token, mask in zip(natural, replay(constraint, {}, natural), strict=True):
                assert np.array_equal(state.mask(), mask)
                state.accept(token)
            assert state.finished


@pytest.mark.parametrize("make", ["sentencepiece", "metaspace"])
def test_texts_that_begin_with_a_space_keep_it(make):
    texts = {" 1", " 10,1", " (1)"}
    tokenizer = MAKES[make]
    for kind, constraint in constraints_for(tokenizer, texts).items():
        chance = random.Random(2)
        for _ in range(20):
            state, tokens = constraint.start({}), []
            while not state.finished:
                tokens.append(chance.choice(np.flatnonzero(unpack(state.mask(), constraint.vocab_size)).tolist()))
                state.accept(tokens[-1])
            assert tokenizer.decode(tokens, skip_special_tokens=True) in texts, kind


LITERALS = ["", "0", "1", "10", "11", "1,", ",", "é", "€0", "€", "a", "ab", "abc", "ba"]


@st.composite
def trees(draw):
    """A finite tree with shared nodes: node i leads to later nodes or to the end. Ambiguity is common."""
    size = draw(st.integers(1, 4))
    later = [[None, *range(node + 1, size)] for node in range(size)]
    pairs = [st.tuples(st.sampled_from(LITERALS), st.sampled_from(options)) for options in later]
    return [draw(st.lists(pairs[node], min_size=1, max_size=4)) for node in range(size)]


@st.composite
def vocabularies(draw):
    """All single bytes of the alphabet (so that anything can be written), and pieces cut anywhere from texts."""
    singles = sorted({bytes([byte]) for text in LITERALS for byte in text.encode()})
    joined = st.lists(st.sampled_from(LITERALS), min_size=1, max_size=4).map(lambda texts: "".join(texts).encode())
    cuts = st.tuples(joined, st.integers(0, 3), st.integers(1, 9)).map(lambda cut: cut[0][cut[1] :][: cut[2]])
    pieces = draw(st.lists(cuts, max_size=30))
    return Vocabulary([*singles, None, b"", *pieces, None], eos=len(singles))


def language(tree, node=0):
    if node is None:
        return {""}
    return {text + rest for text, after in tree[node] for rest in language(tree, after)}


@settings(max_examples=150, deadline=None)
@given(trees(), vocabularies(), st.data())
def test_any_tree_under_any_vocabulary(tree, vocabulary, data):
    constraint = ChoiceTreeConstraint(vocabulary, lambda row: 0, tree.__getitem__, look_ahead=data.draw(st.booleans()))
    walk(constraint, language(tree), lambda allowed: data.draw(st.sampled_from(allowed)))


@settings(max_examples=40, deadline=None)
@given(trees(), vocabularies(), st.data())
def test_any_finite_grammar_under_any_vocabulary(tree, vocabulary, data):
    texts = language(tree)
    constraint = constraints_for(vocabulary, texts)["ebnf"]
    walk(constraint, texts, lambda allowed: data.draw(st.sampled_from(allowed)))


# Grammars


def test_a_regular_expression_against_python():
    pattern = r"(1?[0-9]|20)x[24](,-?1)?"
    texts = {
        text
        for length in range(8)
        for text in map("".join, itertools.product("0124x,-", repeat=length))
        if re.fullmatch(pattern, text)
    }
    digits = {f"{left}x{right}{tail}" for left in range(21) for right in (2, 4) for tail in ("", ",1", ",-1")}
    assert {text for text in digits if not re.search("[356789]", text)} == texts
    for tokenizer in (MAKES["byte_level"], MAKES["byte_level_digits_apart"]):
        constraint = GrammarConstraint(tokenizer, Grammar.regex(pattern))
        chance = random.Random(3)
        for _ in range(5):
            walk(constraint, digits, chance.choice)


def test_a_json_schema_against_its_instances():
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


def test_a_grammar_for_each_row_and_rows_without_one():
    def grammar(row):
        return Grammar.regex(row["pattern"]) if row["pattern"] else None

    constraint = GrammarConstraint(MAKES["word_level"], grammar)
    assert constraint.start({"pattern": None}) is None
    assert replay(constraint, {"pattern": None}, [3, 4]) == [None, None]
    walk(constraint, {"1", "10"}, max, {"pattern": "10?"})
    walk(constraint, {"2x"}, max, {"pattern": "2x"})
    with pytest.raises(ValueError, match="bad regex"):
        constraint.start({"pattern": "("})
    with pytest.raises(TypeError, match="Grammar or None"):
        GrammarConstraint(MAKES["word_level"], lambda row: "1").start({})


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar.regex("(1"), "parenthesis"),
        (Grammar.ebnf('root ::= "a" other'), '"other" is not defined'),
        (Grammar.json_schema({"type": "number of bricks"}), "number of bricks"),
        (Grammar.json_schema("{"), "JSON"),
        (Grammar("lark", "x"), "kinds are: ebnf"),
    ],
)
def test_bad_grammars_say_what_is_wrong_at_once(grammar, reason):
    with pytest.raises(ValueError, match=reason):
        GrammarConstraint(object(), grammar)  # before the tokenizer is even looked at


def test_text_without_a_token_is_an_error_not_an_empty_mask():
    with pytest.raises(RuntimeError, match="no token"):
        GrammarConstraint(MAKES["word_level"], Grammar.regex("q")).start({}).mask()
    tree = ChoiceTreeConstraint(MAKES["word_level"], lambda row: 0, lambda node: [("qq", None)])
    with pytest.raises(RuntimeError, match=r"no token for what may follow: expected 'qq'"):
        tree.start({}).mask()


def test_a_grammar_of_any_text_allows_all_text_and_nothing_else():
    for tokenizer in (MAKES["word_level"], MAKES["sentencepiece_unstripped"]):
        constraint = GrammarConstraint(tokenizer, Grammar.regex(r"(.|\n)*"))
        spelled = [b.decode(errors="ignore") if b else "" for b in constraint.vocabulary.bytes_of]
        mask = constraint.start({}).mask()
        allowed = unpack(mask, constraint.vocab_size)
        assert np.array_equal(mask, pack(allowed)), "spare bits are set"
        assert allowed[tokenizer.eos_token_id]
        assert all(allowed[id] for id, text in enumerate(spelled) if text)
        assert sum(allowed[id] for id in tokenizer.all_special_ids) == 1


# Choice trees


def test_one_token_that_reaches_the_same_node_at_two_places():
    tree = [[("1", 1), ("11", 1)], [("x", None), ("1", 2)], [("y", None)]]
    vocabulary = Vocabulary([None, b"1", b"11", b"x", b"y", b"1x"], eos=0)
    constraint = ChoiceTreeConstraint(vocabulary, lambda row: 0, tree.__getitem__)
    for seed in range(20):
        walk(constraint, {"1x", "11y", "11x", "111y"}, random.Random(seed).choice)


def test_nodes_without_choices_are_left_out_or_named():
    tree = {"root": [("1", "dead"), ("10", "alive"), ("2", "doomed")], "dead": [], "alive": [("x", None)]}
    tree["doomed"] = [("x", "dead")]
    careful = ChoiceTreeConstraint(MAKES["word_level"], lambda row: row["node"], tree.__getitem__)
    state = careful.start({"node": "root"})
    ids = MAKES["word_level"].convert_tokens_to_ids(["1", "10", "2"])
    assert set(np.flatnonzero(unpack(state.mask(), careful.vocab_size))) == set(ids)
    with pytest.raises(RuntimeError, match="node 'doomed'"):
        state.accept(ids[2])
    state.accept(ids[0])  # "1" may still become "10x", but may not be all
    assert MAKES["word_level"].decode(state.forced()) == "0x</s>"
    with pytest.raises(RuntimeError, match="node 'dead'"):
        careful.start({"node": "dead"})
    quick = ChoiceTreeConstraint(MAKES["word_level"], lambda row: "doomed", tree.__getitem__, look_ahead=False)
    with pytest.raises(RuntimeError, match="node 'dead'"):
        quick.start({}).accept(MAKES["word_level"].convert_tokens_to_ids("x"))


def test_choices_that_write_nothing_for_ever_are_an_error():
    circle = {0: [("", 1), ("1", None)], 1: [("", 0)]}
    with pytest.raises(ValueError, match="node 0 back to it"):
        ChoiceTreeConstraint(MAKES["word_level"], lambda row: 0, circle.__getitem__).start({})
    with pytest.raises(ValueError, match="write nothing"):
        ChoiceTreeConstraint(MAKES["word_level"], lambda row: 0, lambda node: [("", node + 1)]).start({})


def test_forced_tokens_stop_at_the_end_and_at_the_limit():
    tokenizer = MAKES["word_level"]
    for constraint in constraints_for(tokenizer, {"1x2 (1,1)\n"}).values():
        state = constraint.start({})
        mask = state.mask().copy()
        assert tokenizer.decode(state.forced()) == "1x2 (1,1)\n</s>"
        assert np.array_equal(state.mask(), mask) and not state.finished
    endless = ChoiceTreeConstraint(tokenizer, lambda row: 0, lambda node: [("1x", node + 1)])
    assert len(endless.start({}).forced()) == FORCED_LIMIT
    assert len(GrammarConstraint(tokenizer, Grammar.ebnf('root ::= "1x" root')).start({}).forced()) == FORCED_LIMIT


def test_fresh_nodes_share_masks_and_memory_is_bounded():
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


def test_unconstrained_rows_of_a_tree():
    assert lines_tree(MAKES["word_level"]).start({"on": False}) is None


# One spelling of forced text


def written_ways(constraint):
    """Every sequence of tokens that may be written, by following all of every mask."""
    ways, todo = [], [[]]
    while todo:
        tokens = todo.pop()
        state = constraint.start({})
        for token in tokens:
            state.accept(token)
        if state.finished:
            ways.append(tokens)
        else:
            todo += [[*tokens, int(id)] for id in np.flatnonzero(unpack(state.mask(), constraint.vocab_size))]
    return ways


@pytest.mark.parametrize("kind", ["tree", "ebnf"])
@pytest.mark.parametrize("make", ["byte_level", "byte_level_digits_apart", "sentencepiece", "word_level"])
def test_one_spelling_writes_the_same_texts_in_fewer_ways(make, kind):
    tokenizer = MAKES[make]
    texts = {"12 (1", "12 (0,", "12 (0,1)\n", "2x4 (3,0,1)\n"} if make != "word_level" else {"10 (1", "10 (10)"}
    inner = constraints_for(tokenizer, texts)[kind]
    ways, all_ways = written_ways(OneSpelling(tokenizer, inner)), written_ways(inner)
    assert {tokenizer.decode(way, skip_special_tokens=True) for way in ways} == texts
    assert set(map(tuple, ways)) <= set(map(tuple, all_ways))
    if make.startswith("byte_level"):
        natural = {(*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id) for text in texts}
        assert natural <= set(map(tuple, ways)), "the tokenizer's own spelling is one of them"
        assert len(ways) <= len(all_ways) / 2


@pytest.mark.parametrize("kind", ["tree", "ebnf", "regex"])
def test_forced_text_is_what_all_texts_have_in_common(kind):
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


def test_one_spelling_forces_most_of_a_json_object_and_says_what_it_refuses():
    tokenizer = MAKES["byte_level"]
    schema = {"type": "object", "properties": {"n": {"enum": [10, 11]}, "b": {"enum": [True]}}, "required": ["n", "b"]}
    constraint = OneSpelling(tokenizer, GrammarConstraint(tokenizer, Grammar.json_schema(schema)))
    state, tokens, chosen = constraint.start({}), [], 0
    while not state.finished:
        forced = state.forced()
        allowed = np.flatnonzero(unpack(state.mask(), constraint.vocab_size))
        assert bool(forced) == (len(allowed) == 1) and (not forced or forced[0] == allowed[0])
        refused = next(id for id in range(constraint.vocab_size) if id not in allowed)
        with pytest.raises(ValueError, match="not allowed here"):
            state.accept(refused)
        chosen += not forced
        for token in forced or [int(allowed[-1])]:
            state.accept(token)
            tokens.append(token)
    assert json.loads(tokenizer.decode(tokens, skip_special_tokens=True))["n"] in (10, 11)
    assert chosen <= 2 < len(tokens)


# The interface


@given(st.lists(st.booleans(), min_size=1, max_size=100))
def test_packing(allowed):
    words = pack(np.array(allowed))
    assert unpack(words, len(allowed)).tolist() == allowed
    assert [bool(words[id // 32] >> (id % 32) & 1) for id in range(len(allowed))] == allowed


def test_importing_constraints_is_cheap():
    code = "import sys, trl_grpo_tasks.constraints; print({'torch', 'xgrammar', 'transformers'} & set(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "set()"
