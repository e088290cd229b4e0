"""Faster rollouts for groups that share a prompt and a constraint: the same distribution, fewer forward passes.

Compared with transformers' `generate`: each distinct prompt is prefilled once and its cache copied to the group; rows
have no padding, each writes its keys and values at its own place of a preallocated cache; tokens that a constraint
forces are written without asking the model, several at a time, rows of different length in one ragged forward pass;
rows that have finished leave the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .config import NEUTRAL_SAMPLING
from .constraints.base import Constraint, State, accept_all
from .constraints.sampling import mask_buffer, mask_scores
from .constraints.scoring import HeadScale
from .constraints.table import FREE, MaskTable

# Families whose attention is plain and causal, so that a mask and positions of our own say all there is to say.
KNOWN_FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "granite")
FEED_LIMIT = 16  # forced tokens fed in one forward pass; a longer run takes several


@dataclass
class Rollout:
    """Completions by row, without padding: tokens, the number of the mask of each, and its log-prob when sampled."""

    completion_ids: list[list[int]]
    masks: list[list[int]]
    logps: list[list[float]]
    forward_passes: int = 0


def why_not(model: Any) -> str | None:
    """Why this model cannot be rolled out here, in words; None if it can."""
    config = model.config.get_text_config()
    if config.model_type not in KNOWN_FAMILIES:
        return f"models of type {config.model_type!r} are not known to it"
    layers = getattr(config, "layer_types", None) or []
    sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    if sliding or any(kind != "full_attention" for kind in layers):
        return "the model has sliding-window layers"
    if config._attn_implementation not in ("sdpa", "eager"):
        return f"attention {config._attn_implementation!r} takes no mask of our own"
    return None


def why_not_in(trainer: Any) -> str | None:
    """Why this trainer's completions cannot be rolled out here, in words; None if they can."""
    args = trainer.args
    for name in ("use_vllm", "use_transformers_continuous_batching"):
        if getattr(args, name):
            return f"{name} is on"
    for name, values in NEUTRAL_SAMPLING.items():
        if getattr(args, name) not in values:
            return f"{name}={getattr(args, name)} is left to transformers"
    if args.generation_kwargs or args.cache_implementation:
        return "generation_kwargs and cache_implementation are transformers' own"
    if trainer.tools or trainer.rollout_func is not None or trainer._is_vlm:
        return "tools, rollout_func and vision-language models are TRL's own"
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return "sharded weights are gathered by TRL"
    reason = why_not(_without_adapter(trainer.accelerator.unwrap_model(trainer.model)))
    if reason is None and args.rollout == "auto" and trainer.accelerator.device.type != "cpu":
        return "it has only been measured on CPUs; --rollout fast tries it here"
    return reason


def _without_adapter(model: Any) -> Any:
    """The model inside a PeftModel; its layers still apply the adapter."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class RaggedCache:
    """Keys and values in preallocated buffers where each row has a length of its own."""

    def __init__(self, batch: int, capacity: int):
        self.batch = batch
        self._capacity = capacity
        self._buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._rows: torch.Tensor | None = None
        self._slots: torch.Tensor | None = None
        self._used = 0

    def place(self, slots_B_L: torch.Tensor, used: int) -> None:
        """Where the tokens of the next forward pass go; the last slot is for padding and is never attended to."""
        self._slots = slots_B_L
        self._rows = torch.arange(self.batch, device=slots_B_L.device)[:, None]
        self._used = used

    @property
    def padding_slot(self) -> int:
        return self._capacity

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any) -> Any:
        """Called by each attention layer: keys and values (B, H, L, D) in, all that may be attended to out."""
        if layer not in self._buffers:
            shape = (self.batch, self._capacity + 1, keys.shape[1], keys.shape[3])
            self._buffers[layer] = (keys.new_zeros(shape), values.new_zeros(shape))
        out = []
        for buffer, new in zip(self._buffers[layer], (keys, values), strict=True):
            buffer[self._rows, self._slots] = new.transpose(1, 2)
            out.append(buffer[:, : self._used].transpose(1, 2))
        return tuple(out)

    def get_seq_length(self, layer: int = 0) -> int:
        return self._used

    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows, in this order; a row may be asked for more than once."""
        self._buffers = {i: (k[rows], v[rows]) for i, (k, v) in self._buffers.items()}
        self.batch = len(rows)


@torch.no_grad()
def rollout(
    model: Any,
    prompt_ids: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    eos_token_ids: Sequence[int],
    temperature: float = 1.0,
    constraint: Constraint | None = None,
    rows: Sequence[Mapping[str, Any]] | None = None,
    table: MaskTable | None = None,
) -> Rollout:
    """Sample one completion of each prompt. Temperature 0 takes the likeliest token. Random numbers come from torch's
    default generator."""
    batch = _Batch(model, prompt_ids, max_new_tokens, eos_token_ids, temperature)
    if constraint is not None:
        assert rows is not None and table is not None, "a constraint needs the rows and a table for its masks"
        batch.constrain(constraint, rows, table)
    batch.prefill()
    while batch.open:
        batch.sample()
        batch.feed()
    return batch.result


class _Batch:
    """The rows of one rollout on their way. `open` are the rows still written, in the order of the cache."""

    def __init__(
        self, model: Any, prompts: Sequence[Sequence[int]], most: int, eos_ids: Sequence[int], temperature: float
    ):
        self._model = _without_adapter(model)
        self._head = self._model.get_output_embeddings()
        self._scale = HeadScale.of(self._model.config, temperature or 1.0)
        self._greedy = temperature == 0
        self._prompts = [list(prompt) for prompt in prompts]
        self._most, self._eos = most, frozenset(eos_ids)
        count = len(self._prompts)
        self.open = list(range(count))
        self.result = Rollout([[] for _ in range(count)], [[] for _ in range(count)], [[] for _ in range(count)])
        self._unfed: list[list[int]] = [[] for _ in range(count)]
        self._lengths = [len(prompt) for prompt in self._prompts]
        self._states: dict[int, State] = {}
        self._table: MaskTable | None = None
        self._words: torch.Tensor | None = None
        self._logits: torch.Tensor = torch.empty(0)

    def constrain(self, constraint: Constraint, rows: Sequence[Mapping[str, Any]], table: MaskTable) -> None:
        self._table = table
        self._states = {i: state for i, row in enumerate(rows) if (state := constraint.start(row)) is not None}
        for i in list(self._states):
            self._write_forced(i)

    def prefill(self) -> None:
        """One forward pass over the distinct prompts; the cache is then copied to the rows that share them."""
        # What a constraint forces from the start differs by row: it is fed after the copy.
        distinct = list(dict.fromkeys(tuple(prompt) for prompt in self._prompts))
        place_of = {prompt: place for place, prompt in enumerate(distinct)}
        capacity = max(map(len, distinct)) + self._most
        self._cache = RaggedCache(len(distinct), capacity)
        logits = self._run([list(prompt) for prompt in distinct], [0] * len(distinct))
        copies = torch.tensor([place_of[tuple(prompt)] for prompt in self._prompts], device=logits.device)
        self._cache.select(copies)
        self._logits = logits[copies]
        self.feed()

    def sample(self) -> None:
        """The next token of every open row."""
        numbers = [FREE] * len(self.open)
        if self._table is not None:
            states = [self._states.get(i) for i in self.open]
            if self._words is None:
                self._words = mask_buffer(len(states), self._table, self._logits.device)
            numbers = mask_scores(states, self._logits, self._table, self._words[: len(states)])
        logps = self._logits.log_softmax(1)
        tokens = logps.argmax(1) if self._greedy else torch.multinomial(logps.exp(), 1)[:, 0]
        chosen = logps.gather(1, tokens[:, None])[:, 0].tolist()
        for i, token, logp, number in zip(self.open, tokens.tolist(), chosen, numbers, strict=True):
            self._write(i, token, logp, number)
        constrained = [i for i in self.open if i in self._states]
        accept_all([self._states[i] for i in constrained], [self.result.completion_ids[i][-1] for i in constrained])
        for i in constrained:
            self._write_forced(i)

    def feed(self) -> None:
        """Run what was written since the last pass through the model, for the rows that go on."""
        self._close_finished()
        while any(self._unfed[i] for i in self.open):
            self._feed_some()

    def _feed_some(self) -> None:
        feeds = [self._unfed[i][:FEED_LIMIT] for i in self.open]
        starts = [self._lengths[i] for i in self.open]
        logits = self._run(feeds, starts)
        fed = torch.tensor([bool(feed) for feed in feeds], device=logits.device)
        self._logits = torch.where(fed[:, None], logits, self._logits)
        for i, feed in zip(self.open, feeds, strict=True):
            del self._unfed[i][: len(feed)]
            self._lengths[i] += len(feed)

    def _run(self, feeds: Sequence[Sequence[int]], starts: Sequence[int]) -> torch.Tensor:
        """Scaled logits after the last token of each feed. Rows of different length share one pass."""
        device, cache = self._head.weight.device, self._cache
        width = max(map(len, feeds))
        used = max(start + len(feed) for start, feed in zip(starts, feeds, strict=True))
        ids = torch.tensor([[*feed, *[0] * (width - len(feed))] for feed in feeds], device=device)
        slots = torch.tensor([start + t if t < len(feed) else cache.padding_slot
                              for start, feed in zip(starts, feeds, strict=True) for t in range(width)],
                             device=device).view(len(feeds), width)  # fmt: skip
        is_real = slots != cache.padding_slot
        positions = torch.where(is_real, slots, 0)
        cache.place(slots, used)
        mask = torch.arange(used, device=device) <= positions[:, :, None]
        states = self._model.base_model(
            input_ids=ids,
            attention_mask=mask[:, None],
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        last = torch.tensor([max(len(feed) - 1, 0) for feed in feeds], device=device)
        hidden = states[torch.arange(len(feeds), device=device), last]
        self.result.forward_passes += 1
        return self._scale.apply(self._head(hidden).float())

    def _write(self, i: int, token: int, logp: float, mask_number: int) -> None:
        self.result.completion_ids[i].append(token)
        self.result.logps[i].append(logp)
        self.result.masks[i].append(mask_number)
        self._unfed[i].append(token)

    def _write_forced(self, i: int) -> None:
        """Tokens that must follow: certain, so that the model need not be asked."""
        state = self._states[i]
        for token in state.forced() if not state.finished else []:
            if len(self.result.completion_ids[i]) >= self._most:
                break
            assert self._table is not None
            self._write(i, token, 0.0, self._table.number_of(state.mask()))
            state.accept(token)

    def _close_finished(self) -> None:
        """Rows that ended, or are as long as allowed, leave the batch and the cache."""
        done = {
            i
            for i in self.open
            if (ids := self.result.completion_ids[i]) and (ids[-1] in self._eos or len(ids) >= self._most)
        }
        if not done:
            return
        keep = [k for k, i in enumerate(self.open) if i not in done]
        self.open = [self.open[k] for k in keep]
        if keep:
            index = torch.tensor(keep, device=self._logits.device)
            self._cache.select(index)
            self._logits = self._logits[index]
