"""Masked language models as policies: they fill the masked positions of a text in one or several steps.

The completion of a prompt is its sequence of fills, one token per mask. With K steps, mask i is filled in step i mod
K, given the text and all fills of earlier steps; fills of one step are independent of each other. Neighbouring masks
thus belong to different steps. The order does not depend on the model, so the probability of a completion is the
product of its fills' conditional probabilities, and log-probs, entropies and KL are exact. (An order by the model's
confidence would be part of the policy, and would need log-probs of its own.)

Sampling and scoring use the same distribution: the softmax at the sampling temperature over all tokens that may be
filled in or, with sampling filters, over the recorded set of tokens that they kept. Sampling makes one forward pass
per step. Scoring knows all fills, and makes one pass over the texts of all steps. Equal texts are passed once: in the
first step, those are all completions of a group.
"""

from __future__ import annotations

import functools
import json
import types
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from ..constraints.base import attribute_set, unpack
from ..constraints.filters import SamplingFilters, pack_on_device
from ..constraints.table import FREE, MaskTable
from ..files import write_atomically
from ..rollout.attention import disable_cudnn_attention
from ..rollout.support import without_adapter

# Models that number positions from the padding token's id on, and so have fewer positions than embeddings of them.
POSITIONS_AFTER_PADDING = ("camembert", "data2vec-text", "longformer", "mpnet", "roberta", "roberta-prelayernorm",
                           "xlm-roberta", "xlm-roberta-xl")  # fmt: skip
ADAPTER_FILE = "masked_policy.json"  # in the folder of an adapter


@dataclass(frozen=True)
class Fills:
    """The fills of each prompt: token ids, their log-probs, and the numbers of the masks they were sampled under."""

    ids: list[list[int]]
    logps: list[list[float]]
    masks: list[list[int]]


@dataclass(frozen=True)
class FillStep:
    """The fills of one step: for each the prompt and the number of its mask, the token, and the log-probs that it was
    sampled with. `kept_N_V` are the tokens that sampling filters keep, None without filters."""

    places: list[tuple[int, int]]
    tokens: list[int]
    logps_N_V: torch.Tensor
    kept_N_V: torch.Tensor | None


class MaskedPolicy:
    """Fills and scores texts that contain the tokenizer's mask token, in the number of steps that the model's `config`
    has (see `set_fill_steps`). Temperature 0 selects the most likely tokens."""

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
        self._steps = fill_steps_of(config)
        positions = getattr(config, "max_position_embeddings", None) or 2**31
        if config.model_type in POSITIONS_AFTER_PADDING:
            positions -= config.pad_token_id + 1
        self._context = min(tokenizer.model_max_length, positions)
        vocab_size = config.vocab_size
        # Outputs beyond the tokenizer's vocabulary are disallowed too: models round the number of outputs up.
        disallowed = [*tokenizer.all_special_ids, *range(len(tokenizer), vocab_size)]
        self._allowed_V = torch.ones(vocab_size, dtype=torch.bool).index_fill_(
            0, torch.tensor(sorted(set(disallowed))), False
        )
        self._active_masks: tuple[torch.Tensor, MaskTable] | None = None
        names = {token: number for token, number in tokenizer.get_vocab().items() if self._allowed_V[number]}
        self._tokens_are_characters = all(len(token) == 1 for token in names)
        if not self._tokens_are_characters:  # a token with a space could not be told from two tokens in a completion
            self._allowed_V[[number for token, number in names.items() if " " in token]] = False

    @property
    def allowed(self) -> int:
        """The number of tokens that may be filled in."""
        return int(self._allowed_V.sum())

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
        if self._tokens_are_characters and any(self._tokenizer.pad_token_id in one for one in ids):
            # The tokenizer of a converted .pt file reads characters that it does not know as padding.
            text = "".join(prompts).replace(self._tokenizer.mask_token, "")
            lacking = " ".join(map(repr, sorted(set(text) - set(self._tokenizer.get_vocab()))[:20]))
            raise ValueError(
                f"the model has no token for these characters of the prompts: {lacking}; choose the --corpus that it "
                "was trained on, or another --model"
            )
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
        """Sample fills for each prompt, step by step.

        The sets of tokens that the sampling filters keep are stored in `table`.
        """
        self.check(prompt_ids)
        counts = [ids.count(self._mask_id) for ids in prompt_ids]
        fills = Fills([[0] * n for n in counts], [[0.0] * n for n in counts], [[FREE] * n for n in counts])
        for step in self.steps(model, prompt_ids):
            masks_N = [FREE] * len(step.tokens)
            if step.kept_N_V is not None and table is not None:
                masks_N = table.numbers_of(pack_on_device(step.kept_N_V).cpu().numpy())
            logps_N = step.logps_N_V.gather(1, torch.tensor(step.tokens, device=step.logps_N_V.device)[:, None])[:, 0]
            for (row, i), token, logp, mask in zip(step.places, step.tokens, logps_N.tolist(), masks_N, strict=True):
                fills.ids[row][i], fills.logps[row][i], fills.masks[row][i] = token, logp, mask
        return fills

    @torch.no_grad()
    def steps(
        self, model: Any, prompt_ids: Sequence[list[int]], generator: torch.Generator | None = None
    ) -> Iterator[FillStep]:
        """Sample fills for each prompt, and yield those of each step. Without a generator, torch's own is used."""
        texts = [list(ids) for ids in prompt_ids]
        masks = [[place for place, token in enumerate(ids) if token == self._mask_id] for ids in prompt_ids]
        for step in range(min(self._steps, max(map(len, masks)))):
            places = [(row, i) for row, found in enumerate(masks) for i in range(step, len(found), self._steps)]
            logits_N_V = self._logits(model, texts, [(row, masks[row][i]) for row, i in places])
            logps_N_V = self._log_softmax(logits_N_V, self._allowed_V.to(logits_N_V.device))
            kept_N_V = None
            if self._filters is not None:
                kept_N_V = self._filters.kept(logps_N_V)
                logps_N_V = logps_N_V.masked_fill(~kept_N_V, -torch.inf).log_softmax(1)
            if self._temperature == 0:
                tokens = logps_N_V.argmax(1).tolist()
            else:
                tokens = torch.multinomial(logps_N_V.exp(), 1, generator=generator)[:, 0].tolist()
            for (row, i), token in zip(places, tokens, strict=True):
                texts[row][masks[row][i]] = token
            yield FillStep(places, tokens, logps_N_V, kept_N_V)

    def _logits(self, model: Any, texts: list[list[int]], places: list[tuple[int, int]]) -> torch.Tensor:
        """Return the logits at each place, which is a text and a position in it; equal texts are passed once."""
        numbers: dict[tuple[int, ...], int] = {}
        number_N = [numbers.setdefault(tuple(texts[row]), len(numbers)) for row, _ in places]
        rows = [torch.tensor(ids, device=model.device) for ids in numbers]
        ids_P_L = pad_sequence(rows, batch_first=True, padding_value=self._tokenizer.pad_token_id)
        attended_P_L = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        logits_P_L_V = model(input_ids=ids_P_L, attention_mask=attended_P_L).logits
        return logits_P_L_V[number_N, [place for _, place in places]]

    def text_of(self, ids: Sequence[int]) -> str:
        """Return fills as text: tokens joined by spaces, or without spaces if every token is a single character."""
        tokens = self._tokenizer.convert_ids_to_tokens(list(ids))
        return ("" if self._tokens_are_characters else " ").join(tokens)

    def ids_of(self, text: str) -> list[int]:
        """Return the token ids of fills in the format of `text_of`."""
        tokens = list(text) if self._tokens_are_characters else text.split(" ")
        return self._tokenizer.convert_tokens_to_ids(tokens)

    def check_answers(self, prompts: Sequence[str], answers: Sequence[str]) -> None:
        """Raise ValueError for the first answer that does not have one token per mask of its prompt."""
        for ids, answer in zip(self.prompt_ids(prompts), answers, strict=True):
            masks, tokens = ids.count(self._mask_id), len(self.ids_of(answer))
            if masks != tokens:
                raise ValueError(
                    f"the task's answer {answer[:80]!r} has {tokens} tokens of this model for {masks} masks; let the "
                    "task make gaps of the model's tokens (task infill: --tokens_of with the name of the model)"
                )

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

    def masks(self, masks_B_T: torch.Tensor, table: MaskTable) -> AbstractContextManager[None]:
        """Within this context, forward passes score under these masks (numbers in `table`)."""
        return attribute_set(self, "_active_masks", (masks_B_T, table))

    def _score(self, forward: Any, input_ids: Any, attention_mask: Any, labels: Any) -> Any:
        from trl.trainer.utils import FusedCausalLMOutput  # slow to import, and only training needs it

        is_fill = labels != -100
        is_prompt = attention_mask.bool() & ~is_fill
        ids_B_L, attended_B_L = _without_left_padding(input_ids, is_prompt)
        # Indices go row by row and in order, so the n-th mask belongs to the n-th label.
        is_mask_B_L = (ids_B_L == self._mask_id) & attended_B_L
        row_N, place_N = is_mask_B_L.nonzero(as_tuple=True)
        step_N = (is_mask_B_L.cumsum(1)[row_N, place_N] - 1) % self._steps
        text_N, texts_T_L = _texts_of_steps(
            ids_B_L.masked_fill(~attended_B_L, -1), row_N, place_N, step_N, labels[is_fill]
        )
        distinct_P_L, number_T = torch.unique(texts_T_L, dim=0, return_inverse=True)
        attended_P_L = distinct_P_L >= 0
        ids_P_L = distinct_P_L.masked_fill(~attended_P_L, self._tokenizer.pad_token_id)
        logits_P_L_V = forward(input_ids=ids_P_L, attention_mask=attended_P_L.long()).logits
        allowed = self._allowed_V.to(input_ids.device)
        if self._active_masks is not None:
            masks_B_T, table = self._active_masks
            first = int(is_prompt.any(0).nonzero().max()) + 1  # the column where completions begin
            masks_N = masks_B_T.numpy()[is_fill[:, first : first + masks_B_T.shape[1]].cpu().numpy()]
            # Special tokens stay disallowed under the FREE mask, which allows all outputs.
            allowed = allowed & torch.from_numpy(unpack(table.words(masks_N), table.vocab_size)).to(allowed.device)
        logps_N_V = self._log_softmax(logits_P_L_V[number_T[text_N], place_N], allowed)
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


def fill_steps_of(config: Any) -> int:
    """Return the number of steps in which a model with this configuration fills masks."""
    return getattr(config, "fill_steps", None) or 1


def set_fill_steps(model: Any, steps: int | None) -> None:
    """Make a masked language model fill masks in this number of steps; None: as its configuration says.

    The number is stored in the model's config.json, so that the saved model is evaluated and used as it was trained.
    """
    if steps is not None:
        without_adapter(model).config.fill_steps = steps


def save_fill_steps(model: Any, folder: str | Path) -> None:
    """Store the number of steps beside an adapter, whose folder has no config.json."""
    if without_adapter(model) is not model and (steps := fill_steps_of(model.config)) > 1:
        write_atomically(Path(folder) / ADAPTER_FILE, json.dumps({"fill_steps": steps}))


def load_fill_steps(base: Any, adapter: str | Path) -> None:
    """Set the number of steps that is stored beside an adapter, if any, in its base model."""
    file = Path(adapter) / ADAPTER_FILE
    set_fill_steps(base, json.loads(file.read_text(encoding="utf-8"))["fill_steps"] if file.is_file() else None)


def is_masked_lm(model: Any) -> bool:
    """Whether a model, or the base model of an adapter, is a masked language model."""
    return type(without_adapter(model)).__name__.endswith("ForMaskedLM")


def check_settings(args: Any, is_masked: bool) -> None:
    """Raise ValueError for training options that do not work with a masked language model, or only with one."""
    if not is_masked:
        if args.fill_steps is not None:
            raise ValueError(
                f"fill_steps={args.fill_steps} is for masked language models, but this policy is causal; remove it"
            )
        return
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
    set_fill_steps(model, args.fill_steps)
    args.disable_dropout = True  # with dropout, scored log-probs would differ from those sampled
    without_adapter(model).generation_config = GenerationConfig()
    if peft_config is not None:
        peft_config.task_type = None  # the PEFT class for causal models requires generation methods
    return model, peft_config


def _texts_of_steps(
    ids_B_L: torch.Tensor, row_N: torch.Tensor, place_N: torch.Tensor, step_N: torch.Tensor, fills_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the model reads in each step of each row that fills masks in it, and the number of this text for
    each fill. A text holds the fills of earlier steps."""
    steps = int(step_N.max()) + 1
    texts_K_B_L = ids_B_L.repeat(steps, 1, 1)
    for step in range(1, steps):
        is_filled_N = step_N < step
        texts_K_B_L[step, row_N[is_filled_N], place_N[is_filled_N]] = fills_N[is_filled_N]
    is_read_K_B = torch.zeros(texts_K_B_L.shape[:2], dtype=torch.bool, device=ids_B_L.device)
    is_read_K_B[step_N, row_N] = True
    number_K_B = (is_read_K_B.flatten().cumsum(0) - 1).view_as(is_read_K_B)
    return number_K_B[step_N, row_N], texts_K_B_L[is_read_K_B]


def _without_left_padding(ids_B_L: torch.Tensor, attended_B_L: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Move the attended tokens to the left end, so that their positions do not depend on the rest of the batch."""
    order = attended_B_L.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    width = int(attended_B_L.sum(1).max())
    return ids_B_L.gather(1, order)[:, :width], attended_B_L.gather(1, order)[:, :width]
