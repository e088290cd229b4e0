"""Tokenizers of every common kind, constraints of every kind, and an oracle that tries every token."""

import json
import re
from functools import cache

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from trl_grpo_tasks.constraints import ChoiceTreeConstraint, Grammar, GrammarConstraint, unpack
from trl_grpo_tasks.constraints.base import pack_ids

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
    """The choice tree of LINES; a node holds the text written so far."""

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


@cache
def beginnings(texts, strips_leading_space):
    """Everything with which one of `texts` begins, as it may be written."""
    if strips_leading_space:
        texts = {text for text in texts if not text.startswith(b" ")} | {b" " + text for text in texts}
    return {text[:length] for text in texts for length in range(len(text) + 1)}


def oracle(vocabulary, texts, written, first):
    """The tokens after which the text is still a prefix of one of `texts`, found by trying every token."""
    viable = beginnings(texts, vocabulary.strips_leading_space)
    allowed = {
        id
        for id, spelling in enumerate(vocabulary.bytes_of)
        if spelling and written + spelling in viable and not (first and id in vocabulary.not_first)
    }
    decoded = written.removeprefix(b" ") if vocabulary.strips_leading_space else written
    return allowed | ({vocabulary.eos} if decoded in texts else set())


def walk(constraint, texts, choose, row=None):
    """Write a text token by token, comparing every mask with the oracle; gives the tokens."""
    texts = frozenset(text.encode() for text in texts)
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
        token = choose(sorted(allowed))
        state.accept(token)
        tokens.append(token)
        written += vocabulary.bytes_of[token] or b""
    assert not state.mask().any()
    with pytest.raises(ValueError, match="after the end"):
        state.accept(tokens[0])
    return tokens


def constraints_for(tokenizer, texts):
    """The same texts as a tree that is one level deep, an EBNF of literals and a regular expression."""
    escaped = [re.sub(r"([()])", r"\\\1", text).replace("\n", "\\n") for text in sorted(texts)]
    literals = " | ".join(json.dumps(text) for text in sorted(texts))
    return {
        "tree": ChoiceTreeConstraint(tokenizer, lambda row: 0, lambda node: [(text, None) for text in texts]),
        "ebnf": GrammarConstraint(tokenizer, Grammar.ebnf(f"root ::= {literals}")),
        "regex": GrammarConstraint(tokenizer, Grammar.regex("|".join(f"({text})" for text in escaped))),
    }
