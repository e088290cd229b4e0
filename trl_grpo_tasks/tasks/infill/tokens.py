"""Texts as tokens of a masked language model, and prompts that the model reads as exactly these tokens with masks."""

from __future__ import annotations

from collections.abc import Sequence

from ...models.loading import load_tokenizer
from .data import GAP


class ModelTokens:
    """The tokens of a model: Hub id or folder. ValueError if it cannot fill masks."""

    def __init__(self, model: str):
        self._tokenizer = load_tokenizer(model)
        if self._tokenizer.mask_token is None:
            raise ValueError(
                f"--tokens_of {model}: its tokenizer has no mask token; choose a masked language model, such as "
                "answerdotai/ModernBERT-base"
            )
        if not self._tokenizer.is_fast:
            raise ValueError(
                f"--tokens_of {model}: its tokenizer is written in Python and does not tell which tokens form a word; "
                "choose a model with a fast tokenizer"
            )
        self.mask: str = self._tokenizer.mask_token

    def split(self, text: str, length: int) -> tuple[list[str], list[list[int]]]:
        """Return whole words of a text, as at most `length` tokens, and the places of each word's tokens.

        Of a text whose first word is longer, the first `length` tokens are returned.
        """
        encoded = self._tokenizer(text, add_special_tokens=False, truncation=False)
        word_of = encoded.word_ids()
        if len(word_of) > length and word_of[length] != word_of[0]:
            while word_of[length - 1] == word_of[length]:
                length -= 1
        words: dict[int | None, list[int]] = {}
        for place, word in enumerate(word_of[:length]):
            words.setdefault(word, []).append(place)
        return self._tokenizer.convert_ids_to_tokens(encoded["input_ids"][:length]), list(words.values())

    def split_with_gaps(self, text: str) -> list[str]:
        """Return the tokens of a text in which each gap marker, or mask token, is one missing token."""
        tokens = self._tokenizer.tokenize(text.replace(GAP, self.mask))
        return [GAP if token == self.mask else token for token in tokens]

    def join(self, pieces: Sequence[str]) -> str:
        return self._tokenizer.convert_tokens_to_string(list(pieces))

    def masked(self, pieces: Sequence[str], places: Sequence[int]) -> list[str]:
        """Return the tokens with masks at these places."""
        return [self.mask if place in places else piece for place, piece in enumerate(pieces)]

    def readable_places(
        self, pieces: Sequence[str], places: Sequence[int], words: Sequence[Sequence[int]]
    ) -> list[int] | None:
        """Return places whose masks leave a text that the tokenizer splits into the same tokens, or None.

        Where it would read the rest of a word differently without its beginning, gaps are extended to whole words.
        """
        whole = sorted({place for word in words if set(word) & set(places) for place in word})
        unfillable = set(self._tokenizer.all_special_tokens)
        for candidate in (list(places), whole):
            masked = self.masked(pieces, candidate)
            is_fillable = unfillable.isdisjoint(pieces[place] for place in candidate)
            if is_fillable and self._tokenizer.tokenize(self.join(masked)) == masked:
                return candidate
        return None
