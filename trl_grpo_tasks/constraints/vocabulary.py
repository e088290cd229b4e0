"""The bytes of each token of a tokenizer, and the sorted vocabulary as a trie.

Constraints are defined over text, models generate tokens. The text of a token is defined by the tokenizer's decoder,
which is read here for the decoders that causal language models use: byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM),
sentencepiece with metaspace and byte fallback (Llama 2, Mistral, Gemma), and plain concatenation. The result is
checked against the tokenizer's own `decode`: an unsupported decoder raises an error instead of producing wrong masks.

Some sentencepiece decoders drop one leading space of the text. A completion may then begin with that space or not;
`strips_leading_space` reports this to the constraints.
"""

from __future__ import annotations

import json
import re
import weakref
from bisect import bisect_right
from collections.abc import Callable
from functools import lru_cache
from typing import Any

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CHECKED_TOKENS = 512
_ALONG_CACHE = 1 << 16


def special_ids(tokenizer: Any) -> set[int]:
    """Return the ids of the special tokens, which are not part of any text."""
    added = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return set(tokenizer.all_special_ids) | added


def check_outputs(tokenizer: Any, outputs: int) -> None:
    """Raise ValueError if a constraint could require a token for which the model has no output.

    Some tokenizers add special tokens on loading that have no output in the model. They are accepted, because no
    constraint requires a special token other than end-of-sequence.
    """
    never_required = special_ids(tokenizer) - {tokenizer.eos_token_id}
    if any(token not in never_required for token in range(outputs, len(tokenizer))):
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens, but the model has only {outputs} outputs; call "
            f"model.resize_token_embeddings({len(tokenizer)}), or use a tokenizer without the added tokens"
        )


def token_bytes(tokenizer: Any) -> list[bytes | None]:
    """Return the bytes that each token of a Hugging Face tokenizer adds to the decoded text, by token id.

    The entry is None for special tokens (decoding for a reward skips them) and for unused ids. A token that holds part
    of a multi-byte character has the bytes of that part. Raises ValueError if the decoder does more than concatenate
    tokens.
    """
    to_bytes = _token_to_bytes(_decoder_steps(tokenizer))
    token_ids = tokenizer.get_vocab()
    special = special_ids(tokenizer)
    spelled: list[bytes | None] = [None] * (max(token_ids.values()) + 1)
    for token, id in token_ids.items():
        if id not in special:
            spelled[id] = to_bytes(token)
    return spelled


class Vocabulary:
    """The tokens of a tokenizer as bytes, and a trie over them. Create it with `Vocabulary.of(tokenizer)`.

    `bytes_of[id]` holds the bytes of a token (None if the token is not text), `size` is the number of ids, and `eos`
    is the only token that ends a completion. `strips_leading_space` is true if decoding drops one leading space;
    `not_first` then holds the tokens that must not begin a completion, because decoding would drop more than that.

    The trie is a sorted list of the distinct byte strings: all strings with a given prefix are adjacent and directly
    follow the prefix itself.
    """

    def __init__(
        self,
        bytes_of: list[bytes | None],
        eos: int,
        strips_leading_space: bool = False,
        not_first: frozenset[int] = frozenset(),
    ):
        self.bytes_of = list(bytes_of)
        self.size = len(self.bytes_of)
        if not 0 <= eos < self.size:
            raise ValueError(f"the end-of-sequence token {eos} is outside the vocabulary of {self.size} tokens")
        self.eos = eos
        self.bytes_of[eos] = None
        self.strips_leading_space, self.not_first = strips_leading_space, not_first
        ids_of: dict[bytes, list[int]] = {}
        for id, spelling in enumerate(self.bytes_of):
            if spelling:  # empty tokens are excluded: they would never advance the text
                ids_of.setdefault(spelling, []).append(id)
        self._ids_of = {spelling: tuple(ids) for spelling, ids in ids_of.items()}
        self._sorted = sorted(ids_of)
        self.along: Callable[[bytes, bytes], tuple[tuple[int, ...], bool]] = lru_cache(_ALONG_CACHE)(self._along)

    def __reduce__(self) -> Any:  # without the caches
        return Vocabulary, (self.bytes_of, self.eos, self.strips_leading_space, self.not_first)

    @classmethod
    def of(cls, tokenizer: Any) -> Vocabulary:
        """Return the vocabulary of a tokenizer, cached while the tokenizer exists. A Vocabulary is returned as is."""
        if isinstance(tokenizer, Vocabulary):
            return tokenizer
        eos = tokenizer.eos_token_id
        if eos is None:
            raise ValueError(
                "the tokenizer has no eos_token, so no constrained text could end; set tokenizer.eos_token"
            )
        state = (len(tokenizer), eos)
        known = _VOCABULARIES.get(tokenizer)
        if known is None or known[0] != state:
            known = _VOCABULARIES[tokenizer] = (state, cls._from_tokenizer(tokenizer, eos))
        return known[1]

    @classmethod
    def _from_tokenizer(cls, tokenizer: Any, eos: int) -> Vocabulary:
        spelled = token_bytes(tokenizer)
        whole = {id: text for id, spelling in enumerate(spelled) if spelling and (text := _utf8(spelling)) is not None}
        spaced = [id for id, text in whole.items() if text[0] == " " and text[1:2] != " "]
        strips = bool(spaced) and not tokenizer.decode([spaced[0]]).startswith(" ")
        # Metaspace decoders drop every space of the first token, not only the leading one.
        several = [id for id, text in whole.items() if strips and " " in text[1:]]
        not_first = frozenset(id for id in several if tokenizer.decode([id]) != whole[id].removeprefix(" "))
        _check_decoding(tokenizer, whole, strips)
        return cls(spelled, eos, strips, not_first)

    def _along(self, prefix: bytes, text: bytes) -> tuple[tuple[int, ...], bool]:
        """Return the tokens that begin with all of `prefix` and end within the `text` after it, and whether any token
        extends past the end of `text`."""
        found: list[int] = []
        for end in range(1, len(text) + 1):
            candidate = prefix + text[:end]
            found += self._ids_of.get(candidate, ())
            longer = bisect_right(self._sorted, candidate)  # of the tokens that begin with the candidate, if any does
            if longer == len(self._sorted) or not self._sorted[longer].startswith(candidate):
                return tuple(found), False
        return tuple(found), True


_VOCABULARIES: weakref.WeakKeyDictionary[Any, tuple[tuple[int, int], Vocabulary]] = weakref.WeakKeyDictionary()


def _decoder_steps(tokenizer: Any) -> list[dict[str, Any]]:
    """Return the tokenizer's decoder as a flat list of steps."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            f"{type(tokenizer).__name__} is not backed by the tokenizers library, so the bytes of its tokens are "
            "unknown; load the fast version of this tokenizer"
        )
    if backend.decoder is None:
        raise ValueError(
            "the tokenizer has no decoder, so decoding puts spaces between tokens; set one, for example "
            "tokenizer.backend_tokenizer.decoder = tokenizers.decoders.Fuse()"
        )
    steps: list[dict[str, Any]] = []
    todo = [json.loads(backend.decoder.__getstate__())]
    while todo:
        step = todo.pop(0)
        if step["type"] == "Sequence":
            todo = step["decoders"] + todo
        else:
            steps.append(step)
    return steps


def _token_to_bytes(steps: list[dict[str, Any]]) -> Callable[[str], bytes]:
    """Return the function that maps a token to its bytes under these decoder steps."""
    kinds = [step["type"] for step in steps]
    unknown = sorted(set(kinds) - {"ByteLevel", "Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"})
    if unknown:
        raise ValueError(
            f"constraints do not support the tokenizer's decoder ({', '.join(unknown)}); supported are byte-level, "
            "metaspace, byte-fallback and fusing decoders"
        )
    if "ByteLevel" in kinds:
        return _byte_level_bytes
    replacements: list[tuple[str, str]] = []
    for step in steps:
        if step["type"] == "Replace":
            if "String" not in step["pattern"]:
                raise ValueError(f"constraints do not support a tokenizer whose decoder replaces a pattern: {step}")
            replacements.append((step["pattern"]["String"], step["content"]))
        elif step["type"] == "Metaspace":
            replacements.append((step["replacement"], " "))
    byte_fallback = "ByteFallback" in kinds

    def to_bytes(token: str) -> bytes:
        if byte_fallback and (byte := _BYTE_PIECE.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        for old, new in replacements:
            token = token.replace(old, new)
        return token.encode()

    return to_bytes


@lru_cache(maxsize=1)
def _byte_level_alphabet() -> dict[str, int]:
    """Return the mapping from characters to bytes in byte-level BPE."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_byte_level_alphabet()[character] for character in token])
    except KeyError:  # an added token, which the decoder emits verbatim
        return token.encode()


def _utf8(spelling: bytes) -> str | None:
    try:
        return spelling.decode()
    except UnicodeDecodeError:
        return None


def _check_decoding(tokenizer: Any, whole: dict[int, str], strips_leading_space: bool) -> None:
    """Raise ValueError unless the tokenizer decodes a sample of its tokens to the expected text."""
    ids = list(whole)[:: max(1, len(whole) // _CHECKED_TOKENS)]
    ids.sort(key=lambda id: whole[id].startswith(" "))  # so that the joined text begins without a space
    id_of = {text: id for id, text in whole.items()}
    # Text that clean_up_tokenization_spaces would change.
    ids += [id_of[text] for text in (" ", ",", " ", ".") if text in id_of]
    dropped = " " if strips_leading_space else ""
    if tokenizer.decode(ids) == "".join(whole[id] for id in ids).removeprefix(dropped):
        return
    for id in sorted(set(ids)):
        alone = whole[id].removeprefix(dropped)
        if (decoded := tokenizer.decode([id])) != alone:
            raise ValueError(
                f"token {id} should decode to {alone!r}, but the tokenizer decodes it to {decoded!r}; constraints do "
                "not support this tokenizer"
            )
    raise ValueError(
        "the tokenizer's decode() does not simply concatenate tokens: it may insert or clean up spaces; try "
        "tokenizer.clean_up_tokenization_spaces = False"
    )
