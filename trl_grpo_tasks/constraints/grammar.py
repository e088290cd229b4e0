"""Grammars, regular expressions and JSON schemas as constraints, compiled by xgrammar.

For what is regular or context-free. What depends on meaning is a choice tree (`choices.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from .base import FORCED_LIMIT, only_token, pack_ids, words_for
from .vocabulary import Vocabulary

_COMPILED_CACHE = 256


@dataclass(frozen=True)
class Grammar:
    """A grammar as text. Make it with `Grammar.ebnf`, `Grammar.regex` or `Grammar.json_schema`.

    >>> line = Grammar.regex(r"[0-9]x[0-9]")
    >>> answer = Grammar.json_schema({"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]})
    """

    kind: Literal["ebnf", "regex", "json_schema"]
    text: str
    any_whitespace: bool = False
    separators: tuple[str, str] = (", ", ": ")

    @staticmethod
    def ebnf(text: str) -> Grammar:
        """Rules in xgrammar's EBNF (the notation of llama.cpp); the first one is called `root`."""
        return Grammar("ebnf", text)

    @staticmethod
    def regex(pattern: str) -> Grammar:
        """A regular expression that the whole text matches."""
        return Grammar("regex", pattern)

    @staticmethod
    def json_schema(
        schema: Mapping[str, Any] | str, any_whitespace: bool = False, separators: tuple[str, str] = (", ", ": ")
    ) -> Grammar:
        """JSON that follows a schema, properties in the schema's order and no others.

        The text is laid out as `json.dumps(value, separators=separators)` does it, which makes one text of one value
        and leaves no room for endless blanks. `any_whitespace=True` lets the model lay it out as it likes.
        A `maxLength` is dear: near it a mask takes milliseconds, because thousands of tokens are tried one by one.
        """
        return Grammar(
            "json_schema", schema if isinstance(schema, str) else json.dumps(schema), any_whitespace, separators
        )

    def parse(self) -> Any:
        """The grammar as an xgrammar object; ValueError with what is wrong where it cannot be read."""
        if self.kind not in ("ebnf", "regex", "json_schema"):
            raise ValueError(f"unknown kind of grammar {self.kind!r}; kinds are: ebnf, regex, json_schema")
        import xgrammar

        try:
            if self.kind == "ebnf":
                return xgrammar.Grammar.from_ebnf(self.text)
            if self.kind == "regex":
                return xgrammar.Grammar.from_regex(self.text)
            return xgrammar.Grammar.from_json_schema(
                self.text, any_whitespace=self.any_whitespace, separators=self.separators
            )
        except RuntimeError as error:
            reason = str(error).strip().split(": ", 1)[-1]  # without xgrammar's time and source line
            shown = self.text if len(self.text) <= 300 else self.text[:300] + "..."
            raise ValueError(f"bad {self.kind.replace('_', ' ')}: {reason}\n{shown}") from error


class GrammarConstraint:
    """Completions that follow a grammar: the same one for all rows, or one for each row.

    `grammar` is a `Grammar`, or a function from a row to a `Grammar` (None: the row is not constrained). A fixed
    grammar is read at once, so that a mistake in it shows before anything slow; compiled ones are remembered.

    A text is allowed to end only where the grammar is complete, and only with the tokenizer's `eos_token`. A rule that
    can never be completed (`a ::= "x" a`) is not found out before the text has run into it: keep such rules out.
    """

    def __init__(self, tokenizer: Any, grammar: Grammar | Callable[[Mapping[str, Any]], Grammar | None]):
        if isinstance(grammar, Grammar):
            grammar.parse()
        elif not callable(grammar):
            raise TypeError(f"grammar must be a Grammar or a function from a row to one, got {grammar!r}")
        self.grammar = grammar
        self.vocabulary = Vocabulary.of(tokenizer)
        self.vocab_size = self.vocabulary.size
        self._compiler: Any = None
        self._compile = lru_cache(_COMPILED_CACHE)(self._compile_new)
        spare_bits = words_for(self.vocab_size) * 32 - self.vocab_size
        self._last_word = np.int32(0xFFFFFFFF >> spare_bits) if spare_bits else np.int32(-1)
        self._may_open = ~pack_ids(sorted(self.vocabulary.not_first), self.vocab_size)

    def start(self, row: Mapping[str, Any]) -> GrammarState | None:
        grammar = self.grammar if isinstance(self.grammar, Grammar) else self.grammar(row)
        if grammar is None:
            return None
        if not isinstance(grammar, Grammar):
            raise TypeError(f"the grammar of a row must be a Grammar or None, got {grammar!r}")
        return GrammarState(self, self._compile(grammar))

    def for_vllm(self) -> dict[str, str]:
        """The grammar as vLLM's structured outputs take it; ValueError says why where it cannot be handed over."""
        if not isinstance(self.grammar, Grammar):
            raise ValueError("its grammar differs from row to row, and vLLM takes one for a batch")
        if self.vocabulary.not_first or self.vocabulary.strips_leading_space:
            raise ValueError("the tokenizer drops a leading space, which vLLM's grammars do not know")
        return {"grammar": str(self.grammar.parse())}

    def _compile_new(self, grammar: Grammar) -> Any:
        import xgrammar

        parsed = grammar.parse()
        vocabulary = self.vocabulary
        if vocabulary.strips_leading_space:
            # Decoding drops one space in front. Where the grammar has texts that begin with a space it must be there,
            # or the first space of such a text would be lost; elsewhere it may be.
            optional = "" if _may_begin_with_space(parsed) else ' | ""'
            parsed = xgrammar.Grammar.concat(xgrammar.Grammar.from_ebnf(f'root ::= " "{optional}'), parsed)
        if self._compiler is None:
            # xgrammar never allows tokens without bytes, which is what special tokens must be.
            info = xgrammar.TokenizerInfo(
                [spelling or b"" for spelling in vocabulary.bytes_of],
                xgrammar.VocabType.RAW,
                stop_token_ids=[vocabulary.eos],
            )
            self._compiler = xgrammar.GrammarCompiler(info, cache_enabled=False)
        return self._compiler.compile_grammar(parsed)


class GrammarState:
    """Where one completion stands in a grammar."""

    def __init__(self, constraint: GrammarConstraint, compiled: Any):
        import xgrammar

        self.finished = False
        self._constraint = constraint
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._accepted = 0
        self._words = np.zeros(words_for(constraint.vocab_size), dtype=np.int32)
        self._fresh = False

    def mask(self) -> np.ndarray:
        if not self._fresh:
            self._fill()
            self._fresh = True
        return self._words

    def accept(self, token: int) -> None:
        self._check(token)
        self._moved(token, self._matcher.accept_token(token))

    def _check(self, token: int) -> None:
        vocabulary = self._constraint.vocabulary
        if self.finished:
            raise ValueError(f"token {token} after the end of the text")
        if token != vocabulary.eos:
            known = 0 <= token < vocabulary.size and vocabulary.bytes_of[token]
            if not known or (self._accepted == 0 and token in vocabulary.not_first):
                raise ValueError(f"token {token} is not allowed here")

    def _moved(self, token: int, is_accepted: bool) -> None:
        vocabulary = self._constraint.vocabulary
        if not is_accepted:
            raise ValueError(f"token {token} ({vocabulary.bytes_of[token]!r}) is not allowed here")
        self._accepted += 1
        self._fresh = False
        self.finished = token == vocabulary.eos

    @staticmethod
    def accept_many(states: Sequence[GrammarState], tokens: Sequence[int]) -> None:
        """`accept` for many states at once."""
        import xgrammar

        for state, token in zip(states, tokens, strict=True):
            state._check(token)
        accepted = xgrammar.BatchGrammarMatcher.batch_accept_token([s._matcher for s in states], list(tokens))
        for state, token, is_accepted in zip(states, tokens, accepted, strict=True):
            state._moved(token, is_accepted)

    @staticmethod
    def fill_many(states: Sequence[GrammarState], words_B_W: np.ndarray, rows: Sequence[int]) -> None:
        """The masks of many states at once, written into rows of a matrix of another width."""
        import xgrammar

        constraint = states[0]._constraint
        width = words_for(constraint.vocab_size)
        words = np.empty((len(states), width), dtype=np.int32)
        # One thread: a mask takes about a microsecond, starting threads takes a thousand.
        xgrammar.BatchGrammarMatcher(1).batch_fill_next_token_bitmask([state._matcher for state in states], words)
        words[:, -1] &= constraint._last_word  # xgrammar sets the spare bits
        first = [i for i, state in enumerate(states) if state._accepted == 0]
        words[first] &= constraint._may_open
        if not words.any(axis=1).all():
            raise RuntimeError(_NO_TOKEN)
        words_B_W[rows, :width] = words[:, : words_B_W.shape[1]]
        words_B_W[rows, width:] = 0

    def forced_text(self) -> bytes:
        return b"" if self.finished else self._matcher.find_jump_forward_string().encode()

    def forced(self) -> list[int]:
        tokens: list[int] = []
        words_before, was_fresh, was_accepted = self._words.copy(), self._fresh, self._accepted
        while not self.finished and len(tokens) < FORCED_LIMIT:
            token = only_token(self.mask())
            if token is None:
                break
            self.accept(token)
            tokens.append(token)
        if tokens:
            self._matcher.rollback(len(tokens))
            self.finished = False
            self._words[:] = words_before
            self._fresh, self._accepted = was_fresh, was_accepted
        return tokens

    def _fill(self) -> None:
        words = self._words
        if self.finished:
            words[:] = 0
            return
        self._matcher.fill_next_token_bitmask(words)
        words[-1] &= self._constraint._last_word  # xgrammar sets the spare bits
        if self._accepted == 0:
            words &= self._constraint._may_open
        if not np.count_nonzero(words):  # three times as fast as any()
            raise RuntimeError(_NO_TOKEN)


_NO_TOKEN = (
    "the grammar allows no token here: a rule that can never be completed, or text that the tokenizer cannot write"
)


def _may_begin_with_space(parsed: Any) -> bool:
    import xgrammar

    one_token = xgrammar.TokenizerInfo([b" ", b"<end>"], xgrammar.VocabType.RAW, stop_token_ids=[1])
    return xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(one_token).compile_grammar(parsed)).accept_token(0)
