"""Grammars, regular expressions and JSON schemas as constraints, compiled by xgrammar.

Use a grammar for regular and context-free languages. Constraints that depend on the meaning of the text are choice
trees (`choices.py`).
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from .base import pack_ids, words_for
from .endings import Endings, Position, UnknownGrammarError
from .patterns import pattern_to_ebnf
from .schemas import unenforced_keywords
from .vocabulary import Vocabulary

_COMPILED_CACHE = 256
_SMALL_VOCABULARY = 1024


@dataclass(frozen=True)
class Grammar:
    """The source text of a grammar. Create it with `Grammar.ebnf`, `Grammar.regex` or `Grammar.json_schema`.

    >>> line = Grammar.regex(r"[0-9]x[0-9]")
    >>> answer = Grammar.json_schema({"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]})
    """

    kind: Literal["ebnf", "regex", "json_schema", "structural_tag"]
    text: str
    any_whitespace: bool = False
    separators: tuple[str, str] = (", ", ": ")

    @staticmethod
    def ebnf(text: str) -> Grammar:
        """Create a grammar from rules in xgrammar's EBNF (llama.cpp's notation); the start rule is named `root`."""
        return Grammar("ebnf", text)

    @staticmethod
    def regex(pattern: str) -> Grammar:
        """Create a grammar of the texts that `regex.fullmatch(pattern, text)` accepts.

        Constructs that no grammar can express, such as a lookahead, are refused when the grammar is parsed.
        """
        return Grammar("regex", pattern)

    @staticmethod
    def json_schema(
        schema: Mapping[str, Any] | str, any_whitespace: bool = False, separators: tuple[str, str] = (", ", ": ")
    ) -> Grammar:
        """Create a grammar from a JSON schema; properties appear in the schema's order, and no others are allowed.

        By default the text is formatted like `json.dumps(value, separators=separators)`, so that each value has
        exactly one text and the model cannot emit endless whitespace. `any_whitespace=True` allows any formatting.
        Avoid `maxLength`: close to the limit a mask takes milliseconds, because xgrammar tests thousands of tokens
        one by one. `Grammar.unenforced` names the keywords that no grammar enforces, such as `uniqueItems`.
        """
        return Grammar(
            "json_schema", schema if isinstance(schema, str) else json.dumps(schema), any_whitespace, separators
        )

    @staticmethod
    def structural_tag(form: Mapping[str, Any]) -> Grammar:
        """Create a grammar from a format of xgrammar's structural tags, such as free text before a tool call."""
        return Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": form}))

    def parse(self) -> Any:
        """Return the grammar as an xgrammar object. Raises ValueError with the reason if it cannot be parsed."""
        if self.kind not in (kinds := ("ebnf", "regex", "json_schema", "structural_tag")):
            raise ValueError(f"unknown kind of grammar {self.kind!r}; kinds are: {', '.join(kinds)}")
        import xgrammar

        try:
            if self.kind == "ebnf":
                return xgrammar.Grammar.from_ebnf(self.text)
            if self.kind == "structural_tag":
                return xgrammar.Grammar.from_structural_tag(self.text)
            if self.kind == "regex":
                return xgrammar.Grammar.from_ebnf(pattern_to_ebnf(self.text))
            parsed = xgrammar.Grammar.from_json_schema(
                self.text, any_whitespace=self.any_whitespace, separators=self.separators
            )
            self.unenforced()
            return parsed
        except RuntimeError as error:
            if "Regex" in str(error):
                self.unenforced()  # its error has a way out
            reason = str(error).strip().split(": ", 1)[-1]  # drops xgrammar's timestamp and source line
            shown = self.text if len(self.text) <= 300 else self.text[:300] + "..."
            raise ValueError(f"invalid {self.kind.replace('_', ' ')}: {reason}\n{shown}") from error

    def unenforced(self) -> dict[str, str]:
        """Return the keywords of a JSON schema that the grammar does not enforce, with the first place of each.

        ValueError if the grammar excludes texts that the schema accepts.
        """
        return unenforced_keywords(json.loads(self.text)) if self.kind == "json_schema" else {}


class GrammarConstraint:
    """A constraint that allows the completions of a grammar, which may be the same for all rows or differ by row.

    `grammar` is a `Grammar`, or a function that maps a row to a `Grammar`, or to None if the row is unconstrained. A
    fixed grammar is parsed immediately, so that errors appear before anything slow starts. Compiled grammars are
    cached.

    A text may end only where the grammar is complete, and only with the tokenizer's `eos_token`. A rule that can never
    be completed (`a ::= "x" a`) is not detected at compile time and fails during generation, so avoid such rules.
    """

    def __init__(self, tokenizer: Any, grammar: Grammar | Callable[[Mapping[str, Any]], Grammar | None]):
        if isinstance(grammar, Grammar):
            grammar.parse()
        elif not callable(grammar):
            raise TypeError(f"grammar must be a Grammar or a function that maps a row to one, got {grammar!r}")
        self.grammar = grammar
        self.vocabulary = Vocabulary.of(tokenizer)
        self.vocab_size = self.vocabulary.size
        self._compiler: Any = None
        self._filled_words = 0  # of a mask with separators; known with the compiler
        self._compile = lru_cache(_COMPILED_CACHE)(self._compile_new)
        self.endings = lru_cache(_COMPILED_CACHE)(self._endings_new)
        spare_bits = words_for(self.vocab_size) * 32 - self.vocab_size
        self._last_word = np.int32(0xFFFFFFFF >> spare_bits) if spare_bits else np.int32(-1)
        self._first_token_mask = ~pack_ids(sorted(self.vocabulary.not_first), self.vocab_size)

    def __reduce__(self) -> Any:  # without the compiled grammars
        return GrammarConstraint, (self.vocabulary, self.grammar)

    def start(self, row: Mapping[str, Any]) -> GrammarState | None:
        return self.start_after(row, None)

    def start_after(self, row: Mapping[str, Any], remainder: bytes | None) -> GrammarState | None:
        grammar = self.grammar if isinstance(self.grammar, Grammar) else self.grammar(row)
        if not isinstance(grammar, Grammar | None):
            raise TypeError(f"the grammar function must return a Grammar or None, but returned {grammar!r}")
        if grammar is None:
            return None
        import xgrammar

        is_first = remainder is None
        drops_space = is_first and self.vocabulary.strips_leading_space
        matcher = xgrammar.GrammarMatcher(self._compile(grammar, drops_space))
        if remainder and not matcher.accept_string(remainder):
            return None
        return GrammarState(self, matcher, grammar, is_first, drops_space, remainder or b"")

    def _endings_new(self, grammar: Grammar, drops_space: bool) -> Endings | None:
        try:
            return Endings(str(self._compile(grammar, drops_space).grammar), self.vocabulary.bytes_of)
        except UnknownGrammarError:
            return None

    def _compile_new(self, grammar: Grammar, drops_space: bool) -> Any:
        """Compile a grammar. `drops_space`: decoding drops a leading space of the text."""
        import xgrammar

        parts = [grammar.parse()]
        vocabulary = self.vocabulary
        if drops_space:
            # The space is required if the grammar has texts that begin with a space,
            # because the first space of such a text would be lost otherwise; in all other cases it is optional.
            optional = "" if _may_begin_with_space(parts[0]) else ' | ""'
            parts.insert(0, xgrammar.Grammar.from_ebnf(f'root ::= " "{optional}'))
        # Under a new root, to which no rule refers: xgrammar leaves tokens out that end a root within another rule.
        parsed = xgrammar.Grammar.concat(*parts)
        if self._compiler is None:
            # Special tokens get no bytes, because xgrammar never allows tokens without bytes.
            spellings = [spelling or b"" for spelling in vocabulary.bytes_of]
            spellings += separators(spellings[: vocabulary.eos] + spellings[vocabulary.eos + 1 :])
            self._filled_words = words_for(len(spellings))
            info = xgrammar.TokenizerInfo(spellings, xgrammar.VocabType.RAW, stop_token_ids=[vocabulary.eos])
            self._compiler = xgrammar.GrammarCompiler(info, cache_enabled=False)
        return self._compiler.compile_grammar(parsed)


class GrammarState:
    """The position of one completion in a grammar. States with equal `origin` start in the same grammar."""

    def __init__(
        self,
        constraint: GrammarConstraint,
        matcher: Any,
        origin: Grammar,
        is_first: bool,
        drops_space: bool,
        text: bytes,
    ):
        self._constraint, self._matcher, self.origin = constraint, matcher, origin
        self._is_first, self._drops_space = is_first, drops_space  # is_first: no token of the text has been accepted
        self._text, self._count = text, 0  # tokens so far
        self._words: np.ndarray | None = None  # the current mask, once it has been computed
        self.finished = False

    def fork(self) -> GrammarState:
        forked = copy.copy(self)
        forked._matcher = self._matcher.fork()
        return forked

    @property
    def vocabulary(self) -> Vocabulary:
        return self._constraint.vocabulary

    @property
    def _endings(self) -> Endings | None:
        return self._constraint.endings(self.origin, self._drops_space)

    @property
    def room(self) -> float:
        return math.inf if self._endings is None else self._endings.longest + 1

    @property
    def is_searched(self) -> bool:
        return self.vocabulary.size <= _SMALL_VOCABULARY and self.room < math.inf

    @property
    def position(self) -> Hashable | None:
        if self._endings is None:
            return None
        at = self._endings.at(self._text)
        tokens = None
        if self._endings.limits_tokens:
            tokens = hash(self.mask().tobytes()), self._endings.counts_tokens(at) and self._count
        return self._endings, self.finished, self._is_first, at, tokens

    def alike(self, tokens: Sequence[int]) -> Iterable[Sequence[int]]:
        assert self._endings is not None
        groups: dict[Position | None, list[int]] = {}
        at, after, spellings = self._endings.at(self._text), self._endings.after, self.vocabulary.bytes_of
        for token in tokens:
            groups.setdefault(after(at, spellings[token] or b""), []).append(token)
        return groups.values()

    def endings(self) -> Iterable[bytes]:
        assert self._endings is not None
        ending = self._endings.ending(self._endings.at(self._text))
        return [] if ending is None else [ending]

    def mask(self) -> np.ndarray:
        if self._words is None:
            self._words = self._new_mask()
        return self._words

    def accept(self, token: int) -> None:
        vocabulary = self._constraint.vocabulary
        if self.finished:
            raise ValueError(f"token {token} is not allowed after the end of the text")
        if token != vocabulary.eos:
            known = 0 <= token < vocabulary.size and vocabulary.bytes_of[token]
            if not known or (self._is_first and token in vocabulary.not_first):
                raise ValueError(f"token {token} is not allowed here")
        if not self._matcher.accept_token(token):
            raise ValueError(f"token {token} ({vocabulary.bytes_of[token]!r}) is not allowed here")
        self._is_first = False
        self._text += vocabulary.bytes_of[token] or b""
        self._count += 1
        self._words = None
        self.finished = token == vocabulary.eos

    def forced_text(self) -> bytes:
        """Return a prefix, not always the longest, of all allowed continuations; empty if the text may end here."""
        return b"" if self.finished else self._matcher.find_jump_forward_string().encode()

    def _new_mask(self) -> np.ndarray:
        constraint = self._constraint
        size = words_for(constraint.vocab_size)
        if self.finished:
            return np.zeros(size, dtype=np.int32)
        filled = np.zeros(constraint._filled_words, dtype=np.int32)
        self._matcher.fill_next_token_bitmask(filled)
        words = filled[:size]  # without the separators
        words[-1] &= constraint._last_word  # clears the spare bits, which xgrammar sets
        if self._is_first:
            words &= constraint._first_token_mask
        if not np.count_nonzero(words):  # three times as fast as any()
            raise RuntimeError(
                "the grammar allows no token here: it has a rule that can never be completed, or text that the "
                "tokenizer cannot encode; change the grammar"
            )
        return words


def separators(spellings: Iterable[bytes]) -> list[bytes]:
    """Return byte strings that make masks exact if they are added to the vocabulary that xgrammar gets.

    xgrammar (up to 0.2.8) walks through the sorted tokens. After one that it rejects, it skips those that follow for
    as long as they contain it, anywhere instead of at their beginning: for the text `abab0` and the tokens `ab0` and
    `abab0`, it skips the second one. A separator sorts between two such tokens and does not contain the first.
    """
    found: list[bytes] = []
    path: list[bytes] = []  # the tokens to which xgrammar counts the next one, if it contains them
    for spelling in sorted(set(filter(None, spellings))):
        parts = [spelling]
        while True:
            while path and path[-1] not in parts[-1]:
                path.pop()
            if not path or parts[-1].startswith(path[-1]):
                break
            parts.append(parts[-1][: parts[-1].index(path[-1]) + len(path[-1]) - 1])
        found += parts[1:]
        path += reversed(parts)
    return found


def _may_begin_with_space(parsed: Any) -> bool:
    import xgrammar

    one_token = xgrammar.TokenizerInfo([b" ", b"<end>"], xgrammar.VocabType.RAW, stop_token_ids=[1])
    return xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(one_token).compile_grammar(parsed)).accept_token(0)
