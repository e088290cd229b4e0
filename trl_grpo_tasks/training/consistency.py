"""Policy consistency: compares the log-probs at sampling time with those that training computes.

They differ by rounding. A larger difference means that training optimises another policy than the one that was
sampled. `explain` finds the likely cause by scoring a few completions in other ways and comparing the results.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils import gather

from ..constraints.base import unpack
from ..constraints.table import MaskTable, MaskTables
from ..rollout.support import without_adapter

# Largest mean absolute difference of log-probs that rounding explains, by the dtype of the forward pass.
# SmolLM2-135M on an H200: 5e-6 in float32, 0.004 in float16, 0.03 to 0.04 in bfloat16.
ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 0.1}
ROWS = 4  # completions that are scored again to find the cause
POSITIONS = 256  # tokens of them; each needs a row over the vocabulary
EXPLAINS = 0.25  # another way of scoring is the cause if it leaves at most this share of the difference


class ConsistencyCheck:
    """Logs the difference between sampling and training log-probs, and prints one hint if it is too large."""

    def __init__(self) -> None:
        self._hinted = False
        self.trains_on_stale = False  # whether an older policy sampled what is trained on: then it is not rounding

    def check(self, trainer: Any, inputs: dict[str, Any], scored_B_T: torch.Tensor, tables: MaskTables | None) -> None:
        """Compare the sampling log-probs of the completions in `inputs` with those of training."""
        mode = trainer.mode
        own = difference(inputs["sampling_per_token_logps"], scored_B_T, inputs["completion_mask"])
        sums = gather(own).view(-1, 3)
        mean, largest = (sums[:, 0].sum() / sums[:, 1].sum().clamp(min=1)).item(), sums[:, 2].max().item()
        trainer._metrics[mode]["sampling/logp_difference_mean"].append(mean)
        trainer._metrics[mode]["sampling/logp_difference_max"].append(largest)
        model = trainer.accelerator.unwrap_model(trainer.model)
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(trainer.accelerator.mixed_precision)
        dtype = half or without_adapter(model).dtype
        if self._hinted or mean <= ROUNDING[dtype] or (mode == "train" and self.trains_on_stale):
            return
        self._hinted = True
        was_training = model.training
        model.eval()
        table, args = None if tables is None else tables[mode], trainer.args
        cause = explain(model, inputs, table, args.temperature, dtype, bool(args.sampling_filters))
        model.train(was_training)
        trainer.accelerator.print(
            f"hint: log-probs of the rollout differ from those of training by {mean:.2g} on average ({largest:.2g} at "
            f"most), where {str(dtype).removeprefix('torch.')} explains {ROUNDING[dtype]:g}; likely cause: {cause}"
        )


def difference(sampled_B_T: torch.Tensor, scored_B_T: torch.Tensor, mask_B_T: torch.Tensor) -> torch.Tensor:
    """(sum of absolute differences, number of tokens, largest difference) over the tokens that were sampled."""
    known = mask_B_T.bool() & ~sampled_B_T.isnan()
    delta = (sampled_B_T - scored_B_T).abs()[known].float()
    return torch.stack([delta.sum(), known.sum().float(), delta.max() if len(delta) else delta.sum()])


@torch.no_grad()
def explain(
    model: Any,
    inputs: dict[str, Any],
    table: MaskTable | None,
    temperature: float,
    dtype: torch.dtype,
    has_filters: bool,
) -> str:
    """Describe the likely cause of a difference, by the first tokens of the first few completions in `inputs`. Scoring
    is at `temperature`, with products in `dtype`, under the masks of `table`; None: every token is allowed."""
    if type(without_adapter(model)).__name__.endswith("ForMaskedLM"):
        return "unknown; check temperature, sampling filter and dtype of the rollout"
    rows = {name: value[:ROWS] for name, value in inputs.items() if isinstance(value, torch.Tensor) and value.ndim}
    drawn_B_T, mask_B_T = rows["sampling_per_token_logps"], rows["completion_mask"].bool()
    mask_B_T = mask_B_T & ~drawn_B_T.isnan()
    mask_B_T = mask_B_T & (mask_B_T.flatten().cumsum(0).view_as(mask_B_T) <= POSITIONS)
    drawn_N, targets_N = drawn_B_T[mask_B_T].float(), rows["completion_ids"][mask_B_T]
    allowed_N_V = None
    if table is not None:
        words = table.words(rows["mask_numbers"][mask_B_T.cpu()].tolist())
        allowed_N_V = torch.from_numpy(unpack(words, table.vocab_size)).to(mask_B_T.device)

    def logits_in(dtype: torch.dtype) -> torch.Tensor:
        """The logits that predict each sampled token, one row over the vocabulary per token."""
        ids, attention = (torch.cat([rows[f"prompt_{x}"], rows[f"completion_{x}"]], 1) for x in ("ids", "mask"))
        with torch.autocast(ids.device.type, dtype, enabled=dtype in (torch.bfloat16, torch.float16)):
            logits = model(input_ids=ids, attention_mask=attention).logits
        return logits[:, -mask_B_T.shape[1] - 1 : -1][mask_B_T].float()

    logits_N_V = logits_in(dtype)

    def left(logits: torch.Tensor, at: float, under: torch.Tensor | None) -> float:
        logits = logits / at
        logits = logits if under is None else logits.masked_fill(~under, -torch.inf)
        return (logits.log_softmax(1).gather(1, targets_N[:, None])[:, 0] - drawn_N).abs().mean().item()

    def candidates() -> Iterator[tuple[float, str]]:
        if hasattr(model, "disable_adapter"):
            with model.disable_adapter():
                plain = logits_in(dtype)
            yield left(plain, temperature, allowed_N_V), "adapter (the rollout looks as if sampled without it)"
        if allowed_N_V is not None:
            kind = "sampling filter" if has_filters else "mask"
            yield left(logits_N_V, temperature, None), f"{kind} (the rollout looks as if sampled without it)"
        for other in (1.0, *(1.1**power for power in range(-12, 13))):
            yield (
                left(logits_N_V, other, allowed_N_V),
                f"temperature (the rollout looks as if sampled at {other:.2g}, training scores at {temperature:g})",
            )
        for other_dtype in (torch.float32, torch.bfloat16, torch.float16):
            if other_dtype != dtype:
                name = str(other_dtype).removeprefix("torch.")
                yield (
                    left(logits_in(other_dtype), temperature, allowed_N_V),
                    f"dtype (the rollout looks as if computed in {name})",
                )

    as_scored = left(logits_N_V, temperature, allowed_N_V)
    best, cause = min(candidates())
    if best <= EXPLAINS * as_scored:
        return cause
    logps = (logits_N_V / temperature).log_softmax(1).gather(1, targets_N[:, None])[:, 0]
    if allowed_N_V is None and (drawn_N >= logps - ROUNDING[dtype]).all():
        # Every token was more likely than the model says, so other tokens must have been excluded.
        return "sampling filter or mask (the rollout looks as if fewer tokens could be drawn than training assumes)"
    return "unknown; check adapter, mask, temperature, sampling filter and dtype of the rollout"
