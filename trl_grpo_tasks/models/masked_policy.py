"""Masked language models as policies: one forward pass fills every masked position of a text.

The completion of a prompt is its fills, one token a mask, in order. Given the prompt they are independent, so their
log-probs, entropies and KL are exact. What is sampled from is what is scored: the softmax at the sampling temperature
over all tokens but the special ones, and with sampling filters over the tokens they kept, which are recorded.

Fills do not enter the forward pass: the completions of a group share one, in sampling and in scoring.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from trl.trainer.utils import FusedCausalLMOutput

from ..constraints.base import unpack
from ..constraints.filters import SamplingFilters, pack_on_device
from ..constraints.table import FREE, MaskTable
from ..rollout.attention import disable_cudnn_attention
from ..rollout.support import without_adapter


@dataclass(frozen=True)
class Fills:
    """The fills of each prompt: token ids, their log-probs, and the numbers of the masks of what could be drawn."""

    ids: list[list[int]]
    logps: list[list[float]]
    masks: list[list[int]]


class MaskedPolicy:
    """How texts are filled and scored with `tokenizer`'s mask token. `temperature` 0 takes the likeliest tokens."""

    def __init__(self, tokenizer: Any, config: Any, temperature: float = 1.0, filters: SamplingFilters | None = None):
        if tokenizer.mask_token_id is None:
            raise ValueError(
                f"the tokenizer {tokenizer.name_or_path!r} has no mask token, which a masked language model needs"
            )
        self._tokenizer = tokenizer
        self._mask_id = tokenizer.mask_token_id
        self._temperature = temperature
        self._filters = filters if filters and temperature > 0 else None
        self._context = min(tokenizer.model_max_length, getattr(config, "max_position_embeddings", None) or 2**31)
        vocab_size = config.vocab_size
        # Also the outputs that belong to no token: models round their number up.
        shut = [*tokenizer.all_special_ids, *range(len(tokenizer), vocab_size)]
        self._allowed_V = torch.ones(vocab_size, dtype=torch.bool).index_fill_(
            0, torch.tensor(sorted(set(shut))), False
        )
        self._open: tuple[torch.Tensor, MaskTable] | None = None
        self._writes_characters = all(
            len(token) == 1 for token, number in tokenizer.get_vocab().items() if self._allowed_V[number]
        )

    def prompt_ids(self, prompts: Sequence[Any]) -> list[list[int]]:
        """Token ids of texts with masks. ValueError for what is no text, has no mask, or is too long."""
        wrong = next((prompt for prompt in prompts if not isinstance(prompt, str)), None)
        if wrong is not None:
            raise ValueError(f"a masked language model fills texts, and this prompt is none: {str(wrong)[:100]!r}")
        ids = self._tokenizer(text=list(prompts), truncation=False)["input_ids"] if prompts else []
        self.check(ids)
        return ids

    def check(self, prompt_ids: Sequence[list[int]]) -> None:
        """ValueError for the first prompt that has no mask or is longer than the model's context."""
        for ids in prompt_ids:
            if len(ids) > self._context:
                raise ValueError(
                    f"a prompt of {len(ids)} tokens is longer than the model's context of {self._context}: give "
                    f"shorter texts, or a model with a longer context; it begins {self._shown(ids)}"
                )
            if self._mask_id not in ids:
                raise ValueError(
                    f"a prompt holds no mask token {self._tokenizer.mask_token!r}, so there is nothing to fill; it "
                    f"begins {self._shown(ids)}"
                )

    def _shown(self, ids: list[int]) -> str:
        return repr(self._tokenizer.decode(ids[:40]))

    @torch.no_grad()
    def fill(self, model: Any, prompt_ids: Sequence[list[int]], table: MaskTable | None = None) -> Fills:
        """Draw fills for each prompt; equal prompts share a forward pass. What filters keep is numbered in `table`."""
        self.check(prompt_ids)
        distinct = {tuple(ids): number for number, ids in enumerate(dict.fromkeys(map(tuple, prompt_ids)))}
        rows = [torch.tensor(ids, device=model.device) for ids in distinct]
        ids_P_L = pad_sequence(rows, batch_first=True, padding_value=self._tokenizer.pad_token_id)
        attended_P_L = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        logits_P_L_V = model(input_ids=ids_P_L, attention_mask=attended_P_L).logits
        is_gap_P_L = (ids_P_L == self._mask_id) & attended_P_L.bool()
        number_B = torch.tensor([distinct[tuple(ids)] for ids in prompt_ids], device=model.device)
        counts = is_gap_P_L.sum(1)[number_B].tolist()
        logps_N_V = self._log_softmax(logits_P_L_V[number_B][is_gap_P_L[number_B]], self._allowed_V.to(model.device))
        masks_N = [FREE] * len(logps_N_V)
        if self._filters is not None:
            kept_N_V = self._filters.kept(logps_N_V)
            logps_N_V = logps_N_V.masked_fill(~kept_N_V, -torch.inf).log_softmax(1)
            if table is not None:
                masks_N = table.numbers_of(pack_on_device(kept_N_V).cpu().numpy())
        if self._temperature == 0:
            drawn_N = logps_N_V.argmax(1)
        else:
            drawn_N = torch.multinomial(logps_N_V.exp(), 1)[:, 0]
        drawn_logps_N = logps_N_V.gather(1, drawn_N[:, None])[:, 0]
        ends = list(itertools.accumulate(counts))
        return Fills(
            [part.tolist() for part in drawn_N.split(counts)],
            [part.tolist() for part in drawn_logps_N.split(counts)],
            [masks_N[end - count : end] for count, end in zip(counts, ends, strict=True)],
        )

    def text_of(self, ids: Sequence[int]) -> str:
        """Fills as text: characters as they are, other tokens as the tokenizer names them, with spaces between."""
        tokens = self._tokenizer.convert_ids_to_tokens(list(ids))
        return ("" if self._writes_characters else " ").join(tokens)

    def ids_of(self, text: str) -> list[int]:
        """The ids of fills written as `text_of` writes them."""
        tokens = list(text) if self._writes_characters else text.split(" ")
        return self._tokenizer.convert_tokens_to_ids(tokens)

    # ---- scoring

    def add_to(self, model: Any) -> None:
        """Let `model(..., labels=..., fused_lm_head=True)`, which is how TRL scores, score fills. The labels that
        count are those of the completion; everything attended to before them is the prompt."""
        disable_cudnn_attention()
        plain_forward, policy = model.forward, self

        @functools.wraps(plain_forward)
        def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
            if not fused_lm_head:
                return plain_forward(*args, **kwargs)
            return policy._score(plain_forward, **kwargs)

        model.forward = types.MethodType(forward, model)

    @contextmanager
    def masks(self, masks_B_T: torch.Tensor, table: MaskTable) -> Iterator[None]:
        """While open, forward passes score under what could have been drawn."""
        self._open = (masks_B_T, table)
        try:
            yield
        finally:
            self._open = None

    def _score(self, forward: Any, input_ids: Any, attention_mask: Any, labels: Any) -> FusedCausalLMOutput:
        is_fill = labels != -100
        ids_B_L, attended_B_L = _without_left_padding(input_ids, attention_mask.bool() & ~is_fill)
        distinct_P_L, number_B = torch.unique(ids_B_L.masked_fill(~attended_B_L, -1), dim=0, return_inverse=True)
        attended_P_L = distinct_P_L >= 0
        ids_P_L = distinct_P_L.masked_fill(~attended_P_L, self._tokenizer.pad_token_id)
        logits_P_L_V = forward(input_ids=ids_P_L, attention_mask=attended_P_L.long()).logits
        is_gap_B_L = (ids_P_L == self._mask_id)[number_B]
        allowed = self._allowed_V.to(input_ids.device)
        if self._open is not None:
            masks_B_T, table = self._open
            first = int((attention_mask.bool() & ~is_fill).any(0).nonzero().max()) + 1  # where completions begin
            masks_N = masks_B_T.numpy()[is_fill[:, first : first + masks_B_T.shape[1]].cpu().numpy()]
            # A mask over all outputs stands for no filter, which leaves special tokens out all the same.
            allowed = allowed & torch.from_numpy(unpack(table.words(masks_N), table.vocab_size)).to(allowed.device)
        # Row after row, and in order within a row: the n-th gap belongs to the n-th label.
        logps_N_V = self._log_softmax(logits_P_L_V[number_B][is_gap_B_L], allowed)
        logps_N = logps_N_V.gather(1, labels[is_fill][:, None])[:, 0]
        entropies_N = -(logps_N_V.exp() * logps_N_V.masked_fill(~allowed, 0)).sum(1)
        nothing = torch.zeros(labels.shape, device=labels.device, dtype=logps_N.dtype)
        logps_B_L = nothing.masked_scatter(is_fill, logps_N)
        entropies_B_L = nothing.masked_scatter(is_fill, entropies_N)
        return FusedCausalLMOutput(loss=-logps_N.sum(), log_probs=logps_B_L, entropy=entropies_B_L)

    def _log_softmax(self, logits_N_V: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
        """Log-probs at the temperature over what is allowed, in float32 (float64 stays)."""
        logits_N_V = logits_N_V.to(torch.promote_types(logits_N_V.dtype, torch.float32))
        return (logits_N_V / (self._temperature or 1.0)).masked_fill(~allowed, -torch.inf).log_softmax(1)


def is_masked_lm(model: Any) -> bool:
    return type(without_adapter(model)).__name__.endswith("ForMaskedLM")


def check_settings(args: Any) -> None:
    """ValueError for options that a masked language model cannot follow."""
    for name in ("constrain", "use_vllm", "use_transformers_continuous_batching", "mask_truncated_completions",
                 "generation_kwargs", "cache_implementation", "cast_lm_head_to_fp32"):  # fmt: skip
        if getattr(args, name):
            raise ValueError(f"{name}={getattr(args, name)} does not go with a masked language model; leave it off")


def ready(model: Any, args: Any, peft_config: Any) -> tuple[Any, Any]:
    """A masked language model and an adapter's configuration as TRL can take them."""
    from transformers import GenerationConfig

    if not is_masked_lm(model):
        raise ValueError(
            f"the task fills masks, and {type(without_adapter(model)).__name__} is no masked language model: give a "
            "model whose class ends with ForMaskedLM, or let the task use a causal one"
        )
    check_settings(args)
    args.disable_dropout = True  # or no log-prob would be that of what was sampled
    without_adapter(model).generation_config = GenerationConfig()
    if peft_config is not None:
        peft_config.task_type = None  # peft's class for causal models asks for methods of generation
    return model, peft_config


def _without_left_padding(ids_B_L: torch.Tensor, attended_B_L: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows moved to the left end, so that positions do not depend on what else is in the batch."""
    order = attended_B_L.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    width = int(attended_B_L.sum(1).max())
    return ids_B_L.gather(1, order)[:, :width], attended_B_L.gather(1, order)[:, :width]
