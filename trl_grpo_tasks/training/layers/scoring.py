"""ScoringLayer: log-probs, entropies and KL of exactly the distribution that completions were sampled from.

Current, old and reference log-probs are computed under the masks that the rollout recorded. In a rollout TRL scores
all of its completions; in training it scores one batch at a time, and `mask_numbers` travel with the batch. The
record whose completions TRL scores now is set with `_scoring(record)`, which also receives the resulting log-probs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils import gather

from ...constraints.head import MaskedHead
from ...constraints.sharding import end_forward
from ...constraints.table import FREE, widen_mask_numbers
from ...models.shared_prompts import SharedPrompts
from ..control.consistency import ConsistencyCheck
from ..control.reference import Offloaded
from ..options.config import TaskGRPOConfig
from ..record import RolloutRecord
from .generation import GenerationLayer


class ScoringLayer(GenerationLayer):
    """Scores completions under the masks of their record."""

    def __init__(self, model: Any, reward_funcs: Any, args: TaskGRPOConfig, *more: Any, **kwargs: Any):
        super().__init__(model, reward_funcs, args, *more, **kwargs)
        self._scored: RolloutRecord | None = None  # see _scoring
        self._consistency = ConsistencyCheck()
        self._shared: SharedPrompts | None = None
        if self._policy is None and self._samples_under_masks:
            self._head = MaskedHead(self.temperature, args.cast_lm_head_to_fp32)
            for plain in self._plain_models():
                self._head.add_to(plain)
        if self._policy is None and args.share_prompts:
            self._share_prompts()
        self._offloaded: Offloaded | None = None
        if args.offload_reference and self.ref_model is not None:
            self._offloaded = Offloaded(self.accelerator.unwrap_model(self.ref_model))
        elif args.offload_reference:
            self.accelerator.print(
                "offload_reference has no effect: the reference of an adapter shares the weights of the policy, so "
                "that there is no second model in memory"
            )

    def _share_prompts(self) -> None:
        self._shared = SharedPrompts()
        for model in self._plain_models():
            reason = self._shared.add_to(model)
            if reason is not None:
                self.accelerator.print(f"each completion is scored with its own copy of the prompt, because {reason}")
                self._shared = None
                return

    @contextmanager
    def _scoring(self, record: RolloutRecord | None) -> Iterator[None]:
        """While open, log-probs are computed under the masks of `record`, and stored there. None: without masks."""
        outer, self._scored = self._scored, record
        try:
            yield
        finally:
            self._scored = outer

    def _record_of(self, batch: dict[str, Any]) -> RolloutRecord:
        """The record for scoring a batch of a rollout as TRL keeps it."""
        return RolloutRecord(self._mode, mask_numbers_B_T=batch.get("mask_numbers"))

    # ---- one rollout

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self.latest_rollout = RolloutRecord(self._mode, inputs)
        with self._scoring(self.latest_rollout), self._vllm_options(apply=True):
            output = super()._generate_and_score_completions(inputs)
        if (numbers_B_T := self.latest_rollout.mask_numbers_B_T) is not None:
            output["mask_numbers"] = widen_mask_numbers(numbers_B_T, output["completion_ids"].shape[1])
            self._log_masks(output)
        return output

    def _log_masks(self, output: dict[str, Any]) -> None:
        numbers = output["mask_numbers"][output["completion_mask"].bool().cpu()].numpy()
        counts = self._tables[self._mode].counts(numbers[numbers != FREE])
        sums = torch.tensor([counts.sum(), (counts == 1).sum(), len(counts)], dtype=torch.float32)
        allowed, forced, total = gather(sums.to(self.accelerator.device)).view(-1, 3).sum(0).tolist()
        if total:
            kind = "sampling" if self._constraint is None else "constraint"
            self._metrics[self._mode][f"{kind}/allowed_tokens"].append(allowed / total)
            self._metrics[self._mode][f"{kind}/forced_fraction"].append(forced / total)

    # ---- log-probs

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Any,
        attention_mask: Any,
        logits_to_keep: int,
        batch_size: Any = None,
        **kwargs: Any,
    ) -> Any:
        score = super()._get_per_token_logps_and_entropies
        record = self._scored or RolloutRecord(self._mode)
        offloaded = self._offloaded if model is self.ref_model else None
        with (
            nullcontext() if offloaded is None else offloaded.on_device(),
            nullcontext() if self._shared is None else self._shared.open(logits_to_keep),
        ):
            if record.mask_numbers_B_T is None:
                scored = score(model, input_ids, attention_mask, logits_to_keep, batch_size=batch_size, **kwargs)
                end_forward(model, scored)
                record.logps_B_T = scored[0].detach()
                return scored
            batch_size = batch_size or len(input_ids)
            numbers_B_T = widen_mask_numbers(record.mask_numbers_B_T, logits_to_keep)
            logps, entropies = [], []
            for start in range(0, len(input_ids), batch_size):
                rows = slice(start, start + batch_size)
                with (self._policy or self._head).masks(numbers_B_T[rows], self._tables[record.mode]):
                    scored = score(model, input_ids[rows], attention_mask[rows], logits_to_keep, **kwargs)
                logps.append(scored[0])
                entropies.append(scored[1])
        end_forward(model, (logps, entropies))
        record.logps_B_T = torch.cat(logps).detach()
        return torch.cat(logps), torch.cat(entropies) if kwargs.get("compute_entropy") else None, None

    # ---- loss

    def _decisions(self, mask_numbers_B_T: torch.Tensor) -> torch.Tensor:
        """True where the mask allows more than one token; elsewhere the token was forced."""
        counts = self._tables[self._mode].counts(mask_numbers_B_T.numpy())
        return torch.from_numpy(counts > 1).to(self.accelerator.device)

    def get_high_entropy_mask(self, entropies: torch.Tensor, mask: torch.Tensor, threshold: float) -> torch.Tensor:
        """The tokens that `top_entropy_quantile` selects. Forced tokens are not selected and do not count in the
        quantile: their entropy is 0, and if they are many the threshold would be 0, which every token reaches."""
        if self._scored is not None and self._scored.mask_numbers_B_T is not None:
            mask = mask * self._decisions(self._scored.mask_numbers_B_T)
        return super().get_high_entropy_mask(entropies, mask, threshold)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        is_masked = "mask_numbers" in inputs and self._policy is None
        measuring = self._head.measuring() if is_masked else nullcontext()
        record = self._record_of(inputs)
        with self._scoring(record), self._vllm_options(apply=True), measuring:
            loss = super()._compute_loss(model, inputs)
        if is_masked and self._constraint is not None:
            mass = torch.tensor(self._head.allowed_mass, device=loss.device)
            self._metrics[self._mode]["constraint/allowed_mass"].append(self.accelerator.gather(mass).mean().item())
        assert record.logps_B_T is not None
        # Before the first update from this rollout: TRL has scored it for that, or no update came in between.
        is_first = not self.model.training or self._step // self.args.steps_per_generation % self.num_iterations == 0
        if "sampling_per_token_logps" in inputs and is_first:
            logps_B_T = inputs.get("old_per_token_logps", record.logps_B_T)
            self._consistency.check(self, inputs, logps_B_T, self._tables if "mask_numbers" in inputs else None)
        if self.task is not None:
            self._log_loss_parts(inputs, record.logps_B_T)
        return loss

    def _log_loss_parts(self, inputs: dict[str, Any], logps_B_T: torch.Tensor) -> None:
        """Token means of the policy-gradient loss before clipping and of the log-probs; the KL penalty."""
        mask_B_T, advantages_B, metrics = inputs["completion_mask"], inputs["advantages"], self._metrics[self._mode]
        advantages_B_T = advantages_B if advantages_B.ndim == 2 else advantages_B[:, None]
        if advantages_B.ndim == 2:  # with step_credit
            advantages_B = (advantages_B_T * mask_B_T).sum(1) / mask_B_T.sum(1).clamp(min=1)
        ratios_B_T = (logps_B_T - inputs.get("old_per_token_logps", logps_B_T)).exp()
        sums = [-(ratios_B_T * advantages_B_T * mask_B_T).sum(), (logps_B_T * mask_B_T).sum(), mask_B_T.sum()]
        sums += [advantages_B.sum(), torch.tensor(len(advantages_B), device=mask_B_T.device)]
        pg, logp, tokens, advantage, rows = self.accelerator.reduce(torch.stack([x.float() for x in sums])).tolist()
        metrics["pg_loss"].append(pg / max(tokens, 1))
        metrics["logp_mean"].append(logp / max(tokens, 1))
        metrics["advantage_mean"].append(advantage / rows)
        if self.beta:
            metrics["kl_penalty"].append(self.beta * metrics["kl"][-1])
