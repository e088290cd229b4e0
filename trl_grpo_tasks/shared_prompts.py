"""Scoring without computing a prompt once for each of its completions.

TRL scores every completion behind a copy of its prompt. Here completions of one prompt stand behind one copy, in one
sequence: each sees the prompt and itself, at the positions it would have alone. The same log-probs and gradients; of
64 completions of 8 prompts of 2,000 tokens, 256 tokens each, the model then sees 32,000 tokens instead of 144,000.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutputWithPast

from .rollout.support import why_not

WORTH = 0.8  # sharing must leave at most this share of the tokens
# Attention in a shared sequence computes what completions do not see of each other. So that this stays small, the
# completions behind one copy of a prompt are at most this many times as long as it.
LONGEST = 2.0


class SharedPrompts:
    """Makes a model's backbone share prompts while `open(length)` is on; otherwise nothing changes."""

    def __init__(self) -> None:
        self._length: int | None = None

    @contextmanager
    def open(self, length: int) -> Iterator[None]:
        """Forward passes until the end of this are over prompts followed by completions `length` long."""
        self._length = length
        try:
            yield
        finally:
            self._length = None

    def add_to(self, model: Any) -> str | None:
        """Wrap the backbone of a causal language model; why not, in words, where that is not known to be right."""
        reason = why_not(model)
        if reason is None and model.config.get_text_config()._attn_implementation != "sdpa":
            reason = "attention is not 'sdpa'"
        if reason is not None:
            return reason
        backbone = model.base_model
        plain_forward = backbone.forward
        sharing = self

        @functools.wraps(plain_forward)
        def forward(self: Any, input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
            if sharing._length is not None and input_ids is not None and attention_mask is not None:
                packing = _Packing.of(input_ids, attention_mask, sharing._length)
                if packing is not None:
                    states = plain_forward(**kwargs | packing.inputs).last_hidden_state
                    return BaseModelOutputWithPast(last_hidden_state=packing.unpack(states))
            return plain_forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)

        backbone.forward = types.MethodType(forward, backbone)
        return None


class _Packing:
    """Rows of (prompt, completion) laid out as sequences of a prompt and several completions.

    Sequence s holds prompt `prompt_of[s]` and the completions `rows[s]`; -1 stands for an empty place.
    """

    def __init__(self, ids: torch.Tensor, mask: torch.Tensor, length: int, sequences: list[list[int]]):
        self._shape, self._length = ids.shape, length
        prompt, device = ids.shape[1] - length, ids.device
        width = max(map(len, sequences))
        rows_S_G = torch.tensor([rows + [-1] * (width - len(rows)) for rows in sequences], device=device)
        first_S = rows_S_G[:, 0]
        is_filled = (rows_S_G >= 0)[:, :, None]
        completions = torch.where(is_filled, ids[rows_S_G, prompt:], 0).flatten(1)
        real = torch.where(is_filled, mask[rows_S_G, prompt:].bool(), False).flatten(1)
        packed = torch.cat([ids[first_S, :prompt], completions], dim=1)
        real = torch.cat([mask[first_S, :prompt].bool(), real], dim=1)
        place = torch.arange(packed.shape[1], device=device)
        part = torch.where(place < prompt, -1, (place - prompt) // length)  # -1: the prompt
        position = torch.where(place < prompt, place, prompt + (place - prompt) % length)
        sees = (place[:, None] >= place) & ((part == -1) | (part[:, None] == part))
        # What is padding sees itself, so that no row of the softmax is empty.
        seen = (sees & real[:, None]) | torch.eye(len(place), dtype=torch.bool, device=device)
        self.inputs = {
            "input_ids": packed,
            "attention_mask": seen[:, None],
            "position_ids": position.expand(len(packed), -1),
        }
        # Where each row's completion begins, and which sequence it is in.
        where = {row: (s, g) for s, rows in enumerate(sequences) for g, row in enumerate(rows)}
        order = torch.tensor([where[row] for row in range(len(ids))], device=device)
        self._sequence, self._begin = order[:, :1], prompt + order[:, 1:] * length

    @classmethod
    def of(cls, ids: torch.Tensor, mask: torch.Tensor, length: int) -> _Packing | None:
        """None where sharing would not pay."""
        rows, total = ids.shape
        prompt = total - length
        if prompt < 1:
            return None
        keys = torch.where(mask[:, :prompt].bool(), ids[:, :prompt], -1)
        _, same = torch.unique(keys, dim=0, return_inverse=True)
        groups: dict[int, list[int]] = {}
        for row, number in enumerate(same.tolist()):
            groups.setdefault(number, []).append(row)
        most = max(1, int(LONGEST * prompt / length))
        sequences = [group[i : i + most] for group in groups.values() for i in range(0, len(group), most)]
        tokens = len(sequences) * (prompt + length * max(map(len, sequences)))
        return cls(ids, mask, length, sequences) if tokens <= WORTH * rows * total else None

    def unpack(self, states: torch.Tensor) -> torch.Tensor:
        """Hidden states by row again: of the last place of the prompt and of the completion, zeros before them."""
        prompt = self._shape[1] - self._length
        steps = torch.arange(self._length, device=states.device)
        last_of_prompt = states[self._sequence[:, 0], prompt - 1][:, None]
        completion = states[self._sequence, self._begin + steps]
        before = states.new_zeros(self._shape[0], prompt - 1, states.shape[-1])
        return torch.cat([before, last_of_prompt, completion], dim=1)
