"""Batched sampling under constraints and filters, which records the masks and log-probs for scoring."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from .base import Constraint, attribute_set, unpack, words_for
from .filters import SamplingFilters, pack_on_device
from .table import FREE, MaskTable

_FIRST_DEVICE_MASKS = 256
_DEVICE_MASKS = 4096  # at most as many masks are kept on the device, unless one batch has more


class RecordingProcessor:
    """A logits processor for transformers' `generate` that applies masks and filters and records both.

    It sets the score of a token to -inf if the row's constraint or one of the `filters` disallows it; do not pass the
    filters to `generate` as well. It records the mask number of every position (`masks`) and the log-prob at
    `temperature` of every sampled token (`logps`). Call `finish` after `generate`.

    Under a constraint of several turns, `ids` are the completions: callers cut those of `generate` at the first end.
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
        self._answers = getattr(constraint, "answers", None)
        self.ids: list[list[int]] | None = None if self._answers is None else [[] for _ in rows]
        self._device_masks: DeviceMasks | None = None
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
            self._device_masks = self._device_masks or DeviceMasks(self._table, scores.device)
            numbers = [self._table.number_of(None if state is None else state.mask()) for state in self._states]
            self._device_masks.fill(numbers).apply(scores)
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

    def have_ended(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Return which conversations have ended: the stopping criterion of `generate`, in place of the
        end-of-sequence token, with which every turn ends."""
        self._accept(input_ids[:, -1])
        return torch.tensor([state is None for state in self._states], device=input_ids.device)

    def _accept(self, tokens_B: torch.Tensor) -> None:
        self._record_logps(tokens_B)
        for place, token in enumerate(tokens_B.tolist()):
            if (state := self._states[place]) is not None:
                state.accept(token)
                if self.ids is not None:
                    self.ids[place].append(token)
        asking: list[Any] = [state for state in self._states if getattr(state, "question", None) is not None]
        if asking and self._answers is not None:  # together, which is faster
            for state, answer in zip(asking, self._answers([state.question for state in asking]), strict=True):
                state.resume(answer)
        # what generate() writes after the end is no text, so these states are dropped
        self._states = [None if state is None or state.finished else state for state in self._states]

    def _record_logps(self, tokens_B: torch.Tensor) -> None:
        assert self._logps_B_V is not None
        drawn = self._logps_B_V.gather(1, tokens_B[:, None])[:, 0].tolist()
        for recorded, logp in zip(self.logps, drawn, strict=True):
            recorded.append(logp)
        self._logps_B_V = None


class DeviceMasks:
    """The masks of a table on the device. A mask is copied there when it is used for the first time."""

    def __init__(self, table: MaskTable, device: torch.device):
        self._table, self._device = table, device
        self._row_of: dict[int, int] = {}  # row in the matrix by mask number
        self._words = torch.empty((0, words_for(table.vocab_size)), dtype=torch.int32, device=device)

    def fill(self, numbers: Sequence[int]) -> PassMasks:
        """Return the masks with these numbers, one per row of a batch. Copies to the device are only queued."""
        new = [number for number in dict.fromkeys(numbers) if number not in self._row_of]
        if new:
            if len(self._row_of) + len(new) > _DEVICE_MASKS:  # start again with the masks of this batch
                self._row_of, new = {}, list(dict.fromkeys(numbers))
            self._add(new)
        row_of = self._row_of
        index = torch.tensor([row_of[number] for number in numbers], pin_memory=self._device.type == "cuda")
        return PassMasks(list(numbers), self._words, index.to(self._device, non_blocking=True))

    def _add(self, numbers: list[int]) -> None:
        held, count = len(self._row_of), len(self._row_of) + len(numbers)
        if held == 0 or count > len(self._words):
            # A new matrix, because batches that were filled before still use the old one.
            size = (max(_FIRST_DEVICE_MASKS, 1 << (count - 1).bit_length()), self._words.shape[1])
            grown = torch.empty(size, dtype=torch.int32, device=self._device)
            grown[:held] = self._words[:held]
            self._words = grown
        words = torch.from_numpy(self._table.words(numbers))
        words = words.pin_memory() if self._device.type == "cuda" else words
        self._words[held:count].copy_(words, non_blocking=True)
        self._row_of |= zip(numbers, range(held, count), strict=True)


class PassMasks(NamedTuple):
    """The masks of one batch: their table numbers and, on the device, packed masks and the index of each row's."""

    numbers: list[int]
    words_N_W: torch.Tensor
    index_B: torch.Tensor

    def apply(self, scores_B_V: torch.Tensor) -> None:
        """Set the scores of disallowed tokens to -inf, in place."""
        words_B_W = self.words_N_W[self.index_B]
        if scores_B_V.device.type == "cuda":
            from xgrammar import apply_token_bitmask_inplace

            apply_token_bitmask_inplace(scores_B_V, words_B_W)
            return
        disallowed = unpack(~words_B_W.cpu().numpy(), scores_B_V.shape[1])
        scores_B_V.masked_fill_(torch.from_numpy(disallowed).to(scores_B_V.device), -torch.inf)


@contextmanager
def generating_with(model: Any, processor: RecordingProcessor) -> Iterator[None]:
    """Within this context, `model.generate` uses `processor` and ignores the model's own `generation_config`.

    TRL has no argument for a logits processor, and transformers takes missing options from the model's
    `generation_config`. So both are overridden on this instance (and on the base model of a PeftModel), and restored
    afterwards. Conversations of several turns end by the processor's criterion alone.
    """
    generate, own_generate = model.generate, vars(model).get("generate")
    holders = [model, model.get_base_model()] if hasattr(model, "get_base_model") else [model]

    def generate_with_processor(*args: Any, **kwargs: Any) -> Any:
        if processor.ids is not None:
            if "generation_config" in kwargs:
                kwargs["generation_config"] = copy.copy(kwargs["generation_config"])
                kwargs["generation_config"].eos_token_id = None
            kwargs["stopping_criteria"] = [processor.have_ended]
        return generate(*args, logits_processor=[processor], **kwargs)

    object.__setattr__(model, "generate", generate_with_processor)
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    with ExitStack() as restored:
        for holder in holders:
            own = holder.generation_config
            only_ids = type(own)(**{name: getattr(own, name) for name in names})
            if processor.ids is not None:
                only_ids.eos_token_id = None
            restored.enter_context(attribute_set(holder, "generation_config", only_ids))
        try:
            yield
        finally:
            if own_generate is None:
                del model.generate
            else:
                object.__setattr__(model, "generate", own_generate)
