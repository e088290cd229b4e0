"""Masked language models as policies: one forward pass fills every masked position of a text.

The completion of a prompt is its sequence of fills, one token per mask. Given the prompt, the fills are independent,
so log-probs, entropies and KL are exact. Sampling and scoring use the same distribution: the softmax at the sampling
temperature over all non-special tokens or, with sampling filters, over the recorded set of tokens that they kept.

Fills are not inputs of the forward pass, so the completions of a group share one pass, in sampling and in scoring.
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
    """The fills of each prompt: token ids, their log-probs, and the numbers of the masks they were sampled under."""

    ids: list[list[int]]
    logps: list[list[float]]
    masks: list[list[int]]


class MaskedPolicy:
    """Fills and scores texts that contain the tokenizer's mask token. Temperature 0 selects the most likely tokens."""

    def __init__(self, tokenizer: Any, config: Any, temperature: float = 1.0, filters: SamplingFilters | None = None):
        if tokenizer.mask_token_id is None:
            raise ValueError(
                f"the tokenizer {tokenizer.name_or_path!r} has no mask token, which a masked language model needs; "
                "choose another model"
            )
        self._tokenizer = tokenizer
        self._mask_id = tokenizer.mask_token_id
        self._temperature = temperature
        self._filters = filters if filters and temperature > 0 else None
        self._context = min(tokenizer.model_max_length, getattr(config, "max_position_embeddings", None) or 2**31)
        vocab_size = config.vocab_size
        # Outputs beyond the tokenizer's vocabulary are disallowed too: models round the number of outputs up.
        disallowed = [*tokenizer.all_special_ids, *range(len(tokenizer), vocab_size)]
        self._allowed_V = torch.ones(vocab_size, dtype=torch.bool).index_fill_(
            0, torch.tensor(sorted(set(disallowed))), False
        )
        self._active_masks: tuple[torch.Tensor, MaskTable] | None = None
        self._tokens_are_characters = all(
            len(token) == 1 for token, number in tokenizer.get_vocab().items() if self._allowed_V[number]
        )

    def prompt_ids(self, prompts: Sequence[Any]) -> list[list[int]]:
        """Return the token ids of texts with masks.

        Raises ValueError for a prompt that is not a string, has no mask or is too long.
        """
        not_text = next((prompt for prompt in prompts if not isinstance(prompt, str)), None)
        if not_text is not None:
            raise ValueError(
                f"a masked language model needs prompts that are strings, but got {str(not_text)[:100]!r}; "
                "use text prompts instead of chat messages"
            )
        ids = self._tokenizer(text=list(prompts), truncation=False)["input_ids"] if prompts else []
        self.check(ids)
        return ids

    def check(self, prompt_ids: Sequence[list[int]]) -> None:
        """Raise ValueError for the first prompt that has no mask or is longer than the model's context."""
        for ids in prompt_ids:
            if len(ids) > self._context:
                raise ValueError(
                    f"a prompt of {len(ids)} tokens is longer than the model's context of {self._context}; use "
                    f"shorter texts or a model with a longer context. The prompt begins with {self._shown(ids)}"
                )
            if self._mask_id not in ids:
                raise ValueError(
                    f"a prompt has no mask token {self._tokenizer.mask_token!r}, so there is nothing to fill; it "
                    f"begins with {self._shown(ids)}"
                )

    def _shown(self, ids: list[int]) -> str:
        return repr(self._tokenizer.decode(ids[:40]))

    @torch.no_grad()
    def fill(self, model: Any, prompt_ids: Sequence[list[int]], table: MaskTable | None = None) -> Fills:
        """Sample fills for each prompt; equal prompts share a forward pass.

        The sets of tokens that the sampling filters keep are stored in `table`.
        """
        self.check(prompt_ids)
        distinct = {tuple(ids): number for number, ids in enumerate(dict.fromkeys(map(tuple, prompt_ids)))}
        rows = [torch.tensor(ids, device=model.device) for ids in distinct]
        ids_P_L = pad_sequence(rows, batch_first=True, padding_value=self._tokenizer.pad_token_id)
        attended_P_L = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        logits_P_L_V = model(input_ids=ids_P_L, attention_mask=attended_P_L).logits
        is_mask_P_L = (ids_P_L == self._mask_id) & attended_P_L.bool()
        number_B = torch.tensor([distinct[tuple(ids)] for ids in prompt_ids], device=model.device)
        counts = is_mask_P_L.sum(1)[number_B].tolist()
        logps_N_V = self._log_softmax(logits_P_L_V[number_B][is_mask_P_L[number_B]], self._allowed_V.to(model.device))
        masks_N = [FREE] * len(logps_N_V)
        if self._filters is not None:
            kept_N_V = self._filters.kept(logps_N_V)
            logps_N_V = logps_N_V.masked_fill(~kept_N_V, -torch.inf).log_softmax(1)
            if table is not None:
                masks_N = table.numbers_of(pack_on_device(kept_N_V).cpu().numpy())
        if self._temperature == 0:
            sampled_N = logps_N_V.argmax(1)
        else:
            sampled_N = torch.multinomial(logps_N_V.exp(), 1)[:, 0]
        sampled_logps_N = logps_N_V.gather(1, sampled_N[:, None])[:, 0]
        ends = list(itertools.accumulate(counts))
        return Fills(
            [part.tolist() for part in sampled_N.split(counts)],
            [part.tolist() for part in sampled_logps_N.split(counts)],
            [masks_N[end - count : end] for count, end in zip(counts, ends, strict=True)],
        )

    def text_of(self, ids: Sequence[int]) -> str:
        """Return fills as text: tokens joined by spaces, or without spaces if every token is a single character."""
        tokens = self._tokenizer.convert_ids_to_tokens(list(ids))
        return ("" if self._tokens_are_characters else " ").join(tokens)

    def ids_of(self, text: str) -> list[int]:
        """Return the token ids of fills in the format of `text_of`."""
        tokens = list(text) if self._tokens_are_characters else text.split(" ")
        return self._tokenizer.convert_tokens_to_ids(tokens)

    # ---- scoring

    def add_to(self, model: Any) -> None:
        """Make `model(..., labels=..., fused_lm_head=True)`, which TRL calls to score completions, score fills.

        Positions with a label are the fills; all other attended positions are the prompt.
        """
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
        """Within this context, forward passes score under these masks (numbers in `table`)."""
        self._active_masks = (masks_B_T, table)
        try:
            yield
        finally:
            self._active_masks = None

    def _score(self, forward: Any, input_ids: Any, attention_mask: Any, labels: Any) -> FusedCausalLMOutput:
        is_fill = labels != -100
        ids_B_L, attended_B_L = _without_left_padding(input_ids, attention_mask.bool() & ~is_fill)
        distinct_P_L, number_B = torch.unique(ids_B_L.masked_fill(~attended_B_L, -1), dim=0, return_inverse=True)
        attended_P_L = distinct_P_L >= 0
        ids_P_L = distinct_P_L.masked_fill(~attended_P_L, self._tokenizer.pad_token_id)
        logits_P_L_V = forward(input_ids=ids_P_L, attention_mask=attended_P_L.long()).logits
        is_mask_B_L = (ids_P_L == self._mask_id)[number_B]
        allowed = self._allowed_V.to(input_ids.device)
        if self._active_masks is not None:
            masks_B_T, table = self._active_masks
            first = (
                int((attention_mask.bool() & ~is_fill).any(0).nonzero().max()) + 1
            )  # the column where completions begin
            masks_N = masks_B_T.numpy()[is_fill[:, first : first + masks_B_T.shape[1]].cpu().numpy()]
            # Special tokens stay disallowed under the FREE mask, which allows all outputs.
            allowed = allowed & torch.from_numpy(unpack(table.words(masks_N), table.vocab_size)).to(allowed.device)
        # Boolean indexing goes row by row and in order, so the n-th mask belongs to the n-th label.
        logps_N_V = self._log_softmax(logits_P_L_V[number_B][is_mask_B_L], allowed)
        logps_N = logps_N_V.gather(1, labels[is_fill][:, None])[:, 0]
        entropies_N = -(logps_N_V.exp() * logps_N_V.masked_fill(~allowed, 0)).sum(1)
        zeros_B_L = torch.zeros(labels.shape, device=labels.device, dtype=logps_N.dtype)
        logps_B_L = zeros_B_L.masked_scatter(is_fill, logps_N)
        entropies_B_L = zeros_B_L.masked_scatter(is_fill, entropies_N)
        return FusedCausalLMOutput(loss=-logps_N.sum(), log_probs=logps_B_L, entropy=entropies_B_L)

    def _log_softmax(self, logits_N_V: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
        """Return log-probs over the allowed tokens at the sampling temperature, in at least float32."""
        logits_N_V = logits_N_V.to(torch.promote_types(logits_N_V.dtype, torch.float32))
        return (logits_N_V / (self._temperature or 1.0)).masked_fill(~allowed, -torch.inf).log_softmax(1)


def is_masked_lm(model: Any) -> bool:
    """Whether a model, or the base model of an adapter, is a masked language model."""
    return type(without_adapter(model)).__name__.endswith("ForMaskedLM")


def check_settings(args: Any) -> None:
    """Raise ValueError for training options that do not work with a masked language model."""
    for name in ("constrain", "use_vllm", "use_transformers_continuous_batching", "mask_truncated_completions",
                 "generation_kwargs", "cache_implementation", "cast_lm_head_to_fp32"):  # fmt: skip
        if getattr(args, name):
            raise ValueError(f"{name}={getattr(args, name)} is not supported with a masked language model; remove it")


def prepare_for_trl(model: Any, args: Any, peft_config: Any) -> tuple[Any, Any]:
    """Adapt a masked language model, the training arguments and an adapter's configuration to TRL's requirements."""
    from transformers import GenerationConfig

    if not is_masked_lm(model):
        raise ValueError(
            f"the task fills masks, but {type(without_adapter(model)).__name__} is not a masked language model; "
            "choose a model whose class name ends in ForMaskedLM"
        )
    check_settings(args)
    args.disable_dropout = True  # with dropout, scored log-probs would differ from those sampled
    without_adapter(model).generation_config = GenerationConfig()
    if peft_config is not None:
        peft_config.task_type = None  # the PEFT class for causal models requires generation methods
    return model, peft_config


def _without_left_padding(ids_B_L: torch.Tensor, attended_B_L: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Move the attended tokens to the left end, so that their positions do not depend on the rest of the batch."""
    order = attended_B_L.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    width = int(attended_B_L.sum(1).max())
    return ids_B_L.gather(1, order)[:, :width], attended_B_L.gather(1, order)[:, :width]
