"""Batched sampling under constraints and filters, which records the masks and log-probs for scoring."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .base import Constraint, State, accept_all, fill_all, unpack, words_for
from .filters import SamplingFilters, pack_on_device
from .table import FREE, MaskTable


class RecordingProcessor:
    """A logits processor for transformers' `generate` that applies masks and filters and records both.

    It sets the score of a token to -inf if the row's constraint or one of the `filters` disallows it; do not pass the
    filters to `generate` as well. It records the mask number of every position (`masks`) and the log-prob at
    `temperature` of every sampled token (`logps`). Call `finish` after `generate`.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        temperature: float,
        filters: SamplingFilters,
        constraint: Constraint | None = None,
        table: MaskTable | None = None,
    ):
        self._states = [None if constraint is None else constraint.start(row) for row in rows]
        self._temperature, self._filters, self._table = temperature, filters, table
        self._is_constrained = constraint is not None
        self._batch_masks: BatchMasks | None = None
        self._logps_B_V: torch.Tensor | None = None  # of the previous step
        self.masks: list[list[int]] = [[] for _ in rows]
        self.logps: list[list[float]] = [[] for _ in rows]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[0] != len(self.masks):
            raise RuntimeError(
                f"generate() passed {input_ids.shape[0]} sequences for {len(self.masks)} rows; "
                "beam search is not supported, use sampling"
            )
        if self._logps_B_V is not None:
            self._accept(input_ids[:, -1])
        numbers = [FREE] * len(self.masks)
        if self._is_constrained:
            assert self._table is not None
            self._batch_masks = self._batch_masks or BatchMasks(len(self.masks), self._table, scores.device)
            self._batch_masks.fill(self._states)
            numbers = self._batch_masks.apply(scores)
        logits = scores.float() / self._temperature
        if self._filters:
            assert self._table is not None
            kept = self._filters.kept(logits)
            scores = scores.masked_fill(~kept, -torch.inf)
            logits = logits.masked_fill(~kept, -torch.inf)
            numbers = self._table.numbers_of(pack_on_device(kept).cpu().numpy())
        for recorded, number in zip(self.masks, numbers, strict=True):
            recorded.append(number)
        self._logps_B_V = logits.log_softmax(1)
        return scores

    def finish(self, completion_ids: Sequence[Sequence[int]]) -> None:
        """Truncate the records to the completions that `generate` returned, and record the log-prob of the last token,
        with which the processor was never called."""
        if self._logps_B_V is not None:
            steps = len(self.masks[0])
            last = [ids[steps - 1] if len(ids) == steps else 0 for ids in completion_ids]
            self._record_logps(torch.tensor(last, device=self._logps_B_V.device))
        for masks, logps, ids in zip(self.masks, self.logps, completion_ids, strict=True):
            del masks[len(ids) :], logps[len(ids) :]

    def _accept(self, tokens_B: torch.Tensor) -> None:
        self._record_logps(tokens_B)
        drawn = zip(self._states, tokens_B.tolist(), strict=True)
        accepted = [(state, token) for state, token in drawn if state is not None]
        accept_all([state for state, _ in accepted], [token for _, token in accepted])
        # generate() pads finished rows, so their states are dropped
        self._states = [None if state is None or state.finished else state for state in self._states]

    def _record_logps(self, tokens_B: torch.Tensor) -> None:
        assert self._logps_B_V is not None
        drawn = self._logps_B_V.gather(1, tokens_B[:, None])[:, 0].tolist()
        for recorded, logp in zip(self.logps, drawn, strict=True):
            recorded.append(logp)


class BatchMasks:
    """The masks of the next token of each row: `fill` computes them on the CPU, `apply` applies them to logits."""

    def __init__(self, rows: int, table: MaskTable, device: torch.device):
        self.table = table
        # Pinned memory makes the copy to a GPU fast.
        self._words = torch.empty(
            (rows, words_for(table.vocab_size)), dtype=torch.int32, pin_memory=device.type == "cuda"
        )
        self._numbers: list[int] = []

    def fill(self, states: Sequence[State | None]) -> None:
        """Compute the mask of each state; a state of None allows every token."""
        words = self._words[: len(states)].numpy()
        constrained = [i for i, state in enumerate(states) if state is not None]
        if len(constrained) < len(states):
            words.fill(-1)
        fill_all([state for state in states if state is not None], words, constrained)
        self._numbers = [FREE] * len(states)
        for i in constrained:
            self._numbers[i] = self.table.number_of(words[i])

    def apply(self, scores: torch.Tensor) -> list[int]:
        """Set the scores of disallowed tokens to -inf, in place, and return the mask number of each row."""
        _apply_packed(scores, self._words[: len(self._numbers)])
        return self._numbers


def _apply_packed(scores: torch.Tensor, words_B_W: torch.Tensor) -> None:
    """Set scores to -inf, in place, where the bit of the packed mask is not set."""
    if scores.device.type == "cuda":
        from xgrammar import apply_token_bitmask_inplace

        apply_token_bitmask_inplace(scores, words_B_W.to(scores.device, non_blocking=True))
        return
    disallowed = unpack(~words_B_W.numpy(), scores.shape[1])
    scores.masked_fill_(torch.from_numpy(disallowed).to(scores.device), -torch.inf)


@contextmanager
def generating_with(model: Any, processor: RecordingProcessor) -> Iterator[None]:
    """Within this context, `model.generate` uses `processor` and ignores the model's own `generation_config`.

    TRL has no argument for a logits processor, and transformers takes missing options from the model's
    `generation_config`. So both are overridden on this instance (and on the base model of a PeftModel), and restored
    afterwards.
    """
    generate, own_generate = model.generate, vars(model).get("generate")
    holders = [model, model.get_base_model()] if hasattr(model, "get_base_model") else [model]
    configs = [holder.generation_config for holder in holders]

    def generate_with_processor(*args: Any, **kwargs: Any) -> Any:
        return generate(*args, logits_processor=[processor], **kwargs)

    object.__setattr__(model, "generate", generate_with_processor)
    for holder, config in zip(holders, configs, strict=True):
        holder.generation_config = _only_token_ids(config)
    try:
        yield
    finally:
        for holder, config in zip(holders, configs, strict=True):
            holder.generation_config = config
        if own_generate is None:
            del model.generate
        else:
            object.__setattr__(model, "generate", own_generate)


def _only_token_ids(config: Any) -> Any:
    """Return a generation config that keeps only the special token ids of `config`."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return type(config)(**{name: getattr(config, name) for name in names})
