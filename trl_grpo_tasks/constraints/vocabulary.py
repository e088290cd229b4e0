"""The bytes that each token of a tokenizer stands for, and the sorted vocabulary as a trie.

Constraints speak of text, models of tokens. What a token stands for is what the tokenizer's decoder makes of it, so
that is what is read here, for the decoders that causal language models use: byte-level BPE (GPT-2, Llama 3, Qwen,
SmolLM), sentencepiece pieces with a metaspace and byte fallback (Llama 2, Mistral, Gemma), and pieces that are simply
joined. The result is checked against the tokenizer's own `decode`, so a decoder that does something else is refused
with a message instead of giving masks that are wrong.

Some sentencepiece decoders drop one space in front of the text. Then a completion may be written with that space or
without it, and `strips_leading_space` tells the constraints so.
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
    """The tokens that no text is spelled with."""
    added = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return set(tokenizer.all_special_ids) | added


def check_outputs(tokenizer: Any, outputs: int) -> None:
    """ValueError where a constraint may ask for a token that the model has no output for. Special tokens beyond the
    outputs, which some tokenizers add when they are loaded, are never asked for, unless one ends the text."""
    never_written = special_ids(tokenizer) - {tokenizer.eos_token_id}
    if any(token not in never_written for token in range(outputs, len(tokenizer))):
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens, but the model has only {outputs} outputs; call "
            f"model.resize_token_embeddings({len(tokenizer)}), or use a tokenizer without the added tokens"
        )


def token_bytes(tokenizer: Any) -> list[bytes | None]:
    """What each token of a Hugging Face tokenizer adds to the decoded text, by token id.

    None for special tokens (decoding for a reward skips them) and for ids that no token has. A token that cuts a
    character in two has the bytes of its part. ValueError for a tokenizer whose decoder does more than join pieces.
    """
    spell = _speller(_decoder_steps(tokenizer))
    token_ids = tokenizer.get_vocab()
    special = special_ids(tokenizer)
    spelled: list[bytes | None] = [None] * (max(token_ids.values()) + 1)
    for token, id in token_ids.items():
        if id not in special:
            spelled[id] = spell(token)
    return spelled


class Vocabulary:
    """A tokenizer's tokens as bytes, and a trie over them. Make it with `Vocabulary.of(tokenizer)`.

    `bytes_of[id]` are the bytes of a token (None where it is not text), `size` the number of ids, `eos` the one token
    that ends a completion. `strips_leading_space`: decoding a completion drops one space in front of it; and
    `not_first` are the few tokens that must not open a completion because decoding would drop more of them.

    The trie is the sorted list of distinct spellings: all that begin with a prefix stand side by side, right after the
    prefix itself. It needs no building beyond a sort.
    """

    def __init__(self, bytes_of: list[bytes | None], eos: int, *, strips_leading_space: bool = False):
        self.bytes_of = list(bytes_of)
        self.size = len(self.bytes_of)
        if not 0 <= eos < self.size:
            raise ValueError(f"the end-of-sequence token {eos} is not one of the {self.size} tokens")
        self.eos = eos
        self.bytes_of[eos] = None
        self.strips_leading_space = strips_leading_space
        self.not_first: frozenset[int] = frozenset()
        ids_of: dict[bytes, list[int]] = {}
        for id, spelling in enumerate(self.bytes_of):
            if spelling:  # an empty token would change nothing for ever
                ids_of.setdefault(spelling, []).append(id)
        self._ids_of = {spelling: tuple(ids) for spelling, ids in ids_of.items()}
        self._sorted = sorted(ids_of)
        self.along: Callable[[bytes, bytes], tuple[tuple[int, ...], bool]] = lru_cache(_ALONG_CACHE)(self._along)

    @classmethod
    def of(cls, tokenizer: Any) -> Vocabulary:
        """The vocabulary of a tokenizer, made once for each tokenizer and remembered as long as that lives. A
        vocabulary is its own."""
        if isinstance(tokenizer, Vocabulary):
            return tokenizer
        eos = tokenizer.eos_token_id
        if eos is None:
            raise ValueError("the tokenizer has no eos_token, so no constrained text could ever end; set one")
        state = (len(tokenizer), eos)
        known = _VOCABULARIES.get(tokenizer)
        if known is None or known[0] != state:
            known = _VOCABULARIES[tokenizer] = (state, cls._read(tokenizer, eos))
        return known[1]

    @classmethod
    def _read(cls, tokenizer: Any, eos: int) -> Vocabulary:
        spelled = token_bytes(tokenizer)
        whole = {id: text for id, spelling in enumerate(spelled) if spelling and (text := _utf8(spelling)) is not None}
        spaced = [id for id, text in whole.items() if text[0] == " " and text[1:2] != " "]
        strips = bool(spaced) and not tokenizer.decode([spaced[0]]).startswith(" ")
        vocabulary = cls(spelled, eos, strips_leading_space=strips)
        if strips:
            # Metaspace decoders drop every space of the first token, not only the one in front.
            several = [id for id, text in whole.items() if " " in text[1:]]
            vocabulary.not_first = frozenset(
                id for id in several if tokenizer.decode([id]) != whole[id].removeprefix(" ")
            )
        _check_decoding(tokenizer, whole, strips)
        return vocabulary

    def _along(self, prefix: bytes, text: bytes) -> tuple[tuple[int, ...], bool]:
        """The tokens that begin with all of `prefix` and end somewhere in the `text` after it, and whether any token
        goes on beyond the end of `text`."""
        found: list[int] = []
        for end in range(1, len(text) + 1):
            walked = prefix + text[:end]
            found += self._ids_of.get(walked, ())
            if not self._goes_on(walked):
                return tuple(found), False
        return tuple(found), True

    def _goes_on(self, prefix: bytes) -> bool:
        """Some token is longer than `prefix` and begins with it."""
        after = bisect_right(self._sorted, prefix)
        return after < len(self._sorted) and self._sorted[after].startswith(prefix)


_VOCABULARIES: weakref.WeakKeyDictionary[Any, tuple[tuple[int, int], Vocabulary]] = weakref.WeakKeyDictionary()


def _decoder_steps(tokenizer: Any) -> list[dict[str, Any]]:
    """The tokenizer's decoder as a flat list of steps."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            f"{type(tokenizer).__name__} is not backed by the tokenizers library, so the bytes of its tokens cannot "
            "be read; load the fast version of this tokenizer"
        )
    if backend.decoder is None:
        raise ValueError(
            "the tokenizer has no decoder, so decoding puts spaces between tokens; give it one, for instance "
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


def _speller(steps: list[dict[str, Any]]) -> Callable[[str], bytes]:
    """The function that gives the bytes of a token under these decoder steps."""
    kinds = [step["type"] for step in steps]
    unknown = sorted(set(kinds) - {"ByteLevel", "Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"})
    if unknown:
        raise ValueError(
            f"the tokenizer's decoder ({', '.join(unknown)}) does not simply join its tokens; constraints can read "
            "byte-level, metaspace, byte-fallback and fusing decoders"
        )
    if "ByteLevel" in kinds:
        return _byte_level_bytes
    replacements: list[tuple[str, str]] = []
    for step in steps:
        if step["type"] == "Replace":
            if "String" not in step["pattern"]:
                raise ValueError(f"the tokenizer's decoder replaces a pattern, which is not supported: {step}")
            replacements.append((step["pattern"]["String"], step["content"]))
        elif step["type"] == "Metaspace":
            replacements.append((step["replacement"], " "))
    byte_fallback = "ByteFallback" in kinds

    def spell(token: str) -> bytes:
        if byte_fallback and (byte := _BYTE_PIECE.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        for old, new in replacements:
            token = token.replace(old, new)
        return token.encode()

    return spell


def _byte_level_alphabet() -> dict[str, int]:
    """The characters that stand for the 256 bytes in byte-level BPE: printable Latin-1 characters for themselves, the
    other bytes, in order, for the characters from U+0100 on."""
    alphabet: dict[str, int] = {}
    for byte in range(256):
        printable = 0x21 <= byte <= 0x7E or (0xA1 <= byte <= 0xFF and byte != 0xAD)
        if printable:
            alphabet[chr(byte)] = byte
    for shift, byte in enumerate(sorted(set(range(256)) - set(alphabet.values()))):
        alphabet[chr(0x100 + shift)] = byte
    return alphabet


_BYTE_LEVEL = _byte_level_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_LEVEL[character] for character in token])
    except KeyError:  # an added token, which the decoder takes as it stands
        return token.encode()


def _utf8(spelling: bytes) -> str | None:
    try:
        return spelling.decode()
    except UnicodeDecodeError:
        return None


def _check_decoding(tokenizer: Any, whole: dict[int, str], strips_leading_space: bool) -> None:
    """ValueError unless the tokenizer decodes a sample of its tokens to what we believe they stand for."""
    ids = list(whole)[:: max(1, len(whole) // _CHECKED_TOKENS)]
    ids.sort(key=lambda id: whole[id].startswith(" "))  # a leading space would hide what is looked for
    id_of = {text: id for id, text in whole.items()}
    ids += [id_of[text] for text in (" ", ",", " ", ".") if text in id_of]  # what cleaning up would change
    expected = "".join(whole[id] for id in ids)
    if strips_leading_space:
        expected = expected.removeprefix(" ")
    if tokenizer.decode(ids) == expected:
        return
    for id in sorted(set(ids)):
        alone = whole[id].removeprefix(" ") if strips_leading_space else whole[id]
        if (decoded := tokenizer.decode([id])) != alone:
            raise ValueError(f"token {id} should stand for {alone!r} but the tokenizer decodes it to {decoded!r}")
    raise ValueError(
        "the tokenizer does not decode tokens to the text they stand for one after another (does it put spaces "
        "between them, or clean up spaces? set tokenizer.clean_up_tokenization_spaces = False)"
    )
