"""Sampling of completions from any language model.

Supported causal models use the fast rollouts of this package, other causal models use transformers' `generate`, and
masked models fill the mask tokens of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from trl.chat_template_utils import parse_response

from ..constraints.base import Constraint
from ..constraints.budget import within
from ..constraints.filters import SamplingFilters
from ..constraints.recording import RecordingProcessor, generating_with
from ..constraints.sharding import is_sharded, output_size
from ..constraints.table import MaskTable
from ..constraints.turns import TurnsConstraint
from ..constraints.vocabulary import check_outputs
from ..models.masked_policy import MaskedPolicy, is_masked_lm
from ..models.quantised import check_output_head
from ..rewards.classifier import text_of
from ..rollout import NO_FILTERS, Decoder, Editor, rollout, unsupported_reason
from ..rollout.support import unsupported_length, without_adapter
from ..task import EditorError, Row
from .samples import Completion

PLAIN_BATCH = 64  # rows that `generate` and masked models process at a time if no number is given


def prompt_ids(tokenizer: Any, prompts: Sequence[Any]) -> list[list[int]]:
    """Return the tokens of prompts, which are all text or all chats."""
    if isinstance(prompts[0], str):
        return tokenizer(text=prompts)["input_ids"]
    return tokenizer.apply_chat_template(prompts, add_generation_prompt=True, tokenize=True, return_dict=True)[
        "input_ids"
    ]


def scored_text(tokenizer: Any, prompt: Any, prompt_ids: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text of a completion as the trainer scores it: in a chat, a tokenizer that parses responses leaves
    out what is no part of the answer, such as reasoning."""
    parses = any(getattr(tokenizer, name, None) is not None for name in ("response_template", "response_schema"))
    if isinstance(prompt, str) or not parses:
        return tokenizer.decode(ids, skip_special_tokens=True)
    return text_of([parse_response(tokenizer, list(ids), prefix=list(prompt_ids))])


class CompletionSampler:
    """Samples completions from `model`, which must be in evaluation mode. Temperature 0 means greedy decoding.

    At most `batch_size` rows are sampled at a time; without it, our rollouts take as many as fit into free memory. As
    in training, only the end-of-sequence tokens are taken from the model's `generation_config`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        temperature: float,
        max_length: int,
        constraint: Constraint | None,
        filters: SamplingFilters = NO_FILTERS,
        batch_size: int | None = None,
    ):
        check_output_head(model)
        if constraint is not None:
            constraint = within(constraint, max_length)
        self.model, self.tokenizer, self.constraint = model, tokenizer, constraint
        if constraint is not None:
            check_outputs(tokenizer, output_size(model))
        self.temperature, self.max_length, self._batch_size = temperature, max_length, batch_size
        self.filters = filters if temperature > 0 else NO_FILTERS
        # Why `sample` cannot take an editor: only our own rollouts support editors. None: it can.
        self.no_editor_reason = unsupported_reason(without_adapter(model))
        if is_sharded(model):
            self.no_editor_reason = "sharded weights are only supported by transformers' generate"
        self._decoder = Decoder(model) if self.no_editor_reason is None else None
        self._warned_of_length = False
        self.policy: MaskedPolicy | None = None
        if is_masked_lm(model):
            self.policy = MaskedPolicy(tokenizer, without_adapter(model).config, temperature, filters)

    def sample(self, rows: Sequence[Row], editor: Editor | None = None) -> list[Completion]:
        """Sample one completion per row."""
        size = self._batch_size or PLAIN_BATCH
        parts = [rows[first : first + size] for first in range(0, len(rows), size)]
        if self.policy is not None:
            return [filled for part in parts for filled in self._fill(self.policy, part)]
        ids, eos_ids = prompt_ids(self.tokenizer, [row["prompt"] for row in rows]), self.eos_ids()
        if self._decoder is not None and self._is_length_supported(ids, editor):
            completion_ids = rollout(
                self.model,
                ids,
                max_new_tokens=self.max_length,
                eos_token_ids=sorted(eos_ids),
                temperature=self.temperature,
                decoder=self._decoder,
                editor=editor,
                batch_size=self._batch_size,
                **self._sampling(rows),
            ).completion_ids
        else:
            completion_ids = []
            for part in parts:
                part_ids = ids[len(completion_ids) :][: len(part)]
                completion_ids += self._generate_with_transformers(part_ids, self._sampling(part))
        completions = []
        for row, prompt, tokens in zip(rows, ids, completion_ids, strict=True):
            if not isinstance(self.constraint, TurnsConstraint):  # otherwise each turn has an end
                tokens = tokens[: next((t + 1 for t, token in enumerate(tokens) if token in eos_ids), len(tokens))]
            is_cut_off = not tokens or tokens[-1] not in eos_ids
            completions.append(Completion(self.text_of(row, prompt, tokens), len(tokens), is_cut_off))
        return completions

    def text_of(self, row: Row, prompt: Sequence[int], ids: Sequence[int]) -> str:
        """Return the text of a completion as it is scored; `prompt` are the tokens before it."""
        if isinstance(self.constraint, TurnsConstraint):
            return self.constraint.text_of(row, ids)
        return scored_text(self.tokenizer, row["prompt"], prompt, ids)

    def _fill(self, policy: MaskedPolicy, rows: Sequence[Row]) -> list[Completion]:
        fills = policy.fill(self.model, policy.prompt_ids([row["prompt"] for row in rows])).ids
        return [Completion(policy.text_of(ids), len(ids), cut_off=False) for ids in fills]

    def _sampling(self, rows: Sequence[Row]) -> dict[str, Any]:
        """What the tokens of these rows are sampled under: filters, constraint, and a table for their masks."""
        table = MaskTable(output_size(self.model))
        return {"filters": self.filters, "constraint": self.constraint, "rows": rows, "table": table}

    def _is_length_supported(self, ids: Sequence[Sequence[int]], editor: Editor | None) -> bool:
        """Whether our rollouts support these prompts. Otherwise the reason is printed once; editors are refused."""
        reason = unsupported_length(self.model, ids, self.max_length)
        if reason is not None and editor is not None:
            raise EditorError(f"an editor needs the fast rollout, but {reason}; leave --editor out")
        if reason is not None and not self._warned_of_length:
            print(f"transformers' generate samples some completions, because {reason}", flush=True)
            self._warned_of_length = True
        return reason is None

    def eos_ids(self) -> set[int]:
        """The tokens that end a completion."""
        configured = self.model.generation_config.eos_token_id
        return {self.tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])} - {None}

    def _generate_with_transformers(self, ids: Sequence[list[int]], sampling: dict[str, Any]) -> list[list[int]]:
        device, width = self.model.device, max(map(len, ids))
        pad = self.tokenizer.pad_token_id
        pad = self.tokenizer.eos_token_id if pad is None else pad
        temperature = self.temperature or 1.0
        processor = RecordingProcessor(temperature=temperature, **sampling)
        with generating_with(self.model, processor):
            generated = self.model.generate(
                input_ids=torch.tensor([[pad] * (width - len(i)) + i for i in ids], device=device),
                attention_mask=torch.tensor([[0] * (width - len(i)) + [1] * len(i) for i in ids], device=device),
                max_new_tokens=self.max_length,
                pad_token_id=pad,
                do_sample=self.temperature > 0,
                temperature=temperature,
                top_k=0,
                synced_gpus=is_sharded(self.model),
            )
        return processor.ids or generated[:, width:].tolist()
