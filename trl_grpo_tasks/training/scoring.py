"""Scoring: log-probs, entropies and KL of exactly the distribution that completions were sampled from.

Current, old and reference log-probs are computed under the masks that the rollout recorded. In a rollout TRL scores
all of its completions; in training it scores one batch at a time, and `mask_numbers` travel with the batch. The
record whose completions TRL scores now is set with `under(record)`, which also receives the resulting log-probs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils import gather
from trl.trainer.utils import use_adapter

from ..constraints.head import MaskedHead
from ..constraints.sharding import end_forward
from ..constraints.table import FREE, widen_mask_numbers
from ..models.shared_prompts import SharedPrompts
from .consistency import ConsistencyCheck
from .generation import Generation
from .policy import plain_models
from .record import RolloutRecord
from .reference import ADAPTER, Offloaded


class Scoring:
    """Scores completions of a trainer under the masks of their record."""

    def __init__(self, trainer: Any, generation: Generation):
        self._trainer, self._generation = trainer, generation
        self._record: RolloutRecord | None = None  # see `under`
        self.consistency = ConsistencyCheck()
        self._head: MaskedHead | None = None
        self._shared: SharedPrompts | None = None
        self._offloaded: Offloaded | None = None
        args, is_masked_policy = trainer.args, generation.masked_policy is not None
        if generation.samples_under_masks and not is_masked_policy:
            self._head = MaskedHead(trainer.temperature, args.cast_lm_head_to_fp32)
            for plain in plain_models(trainer):
                self._head.add_to(plain)
        if args.share_prompts and not is_masked_policy:
            self._share_prompts()
        if args.offload_reference and trainer.ref_model is not None:
            self._offloaded = Offloaded(trainer.accelerator.unwrap_model(trainer.ref_model))
        elif args.offload_reference:
            trainer.accelerator.print(
                "offload_reference has no effect: the reference of an adapter shares the weights of the policy, so "
                "that there is no second model in memory"
            )

    def _share_prompts(self) -> None:
        shared = SharedPrompts()
        for model in plain_models(self._trainer):
            reason = shared.add_to(model)
            if reason is not None:
                self._trainer.accelerator.print(
                    f"each completion is scored with its own copy of the prompt, because {reason}"
                )
                return
        self._shared = shared

    @property
    def _metrics(self) -> dict[str, list[float]]:
        return self._trainer._metrics[self._trainer.mode]

    @contextmanager
    def under(self, record: RolloutRecord | None) -> Iterator[None]:
        """While open, log-probs are computed under the masks of `record`, and stored there. None: without masks."""
        outer, self._record = self._record, record
        try:
            yield
        finally:
            self._record = outer

    def record_of(self, batch: dict[str, Any]) -> RolloutRecord:
        """The record for scoring a batch of a rollout as TRL keeps it."""
        return RolloutRecord(self._trainer.mode, mask_numbers_B_T=batch.get("mask_numbers"))

    # ---- log-probs

    def logps_and_entropies(
        self,
        score: Callable[..., Any],
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """What TRL's `score` returns for these tokens: log-probs, entropies and a router loss."""
        record = self._record or RolloutRecord(self._trainer.mode)
        offloaded = self._offloaded if model is self._trainer.ref_model else None
        with (
            nullcontext() if offloaded is None else offloaded.on_device(),
            nullcontext() if self._shared is None else self._shared.open(logits_to_keep),
        ):
            if record.mask_numbers_B_T is None:
                scored = score(model, input_ids, attention_mask, logits_to_keep, batch_size=batch_size, **kwargs)
                end_forward(model, scored)
                record.keep(*scored[:2])
                return scored
            batch_size = batch_size or len(input_ids)
            numbers_B_T = widen_mask_numbers(record.mask_numbers_B_T, logits_to_keep)
            masked: Any = self._generation.masked_policy or self._head
            logps, entropies = [], []
            for start in range(0, len(input_ids), batch_size):
                rows = slice(start, start + batch_size)
                with masked.masks(numbers_B_T[rows], self._generation.tables[record.mode]):
                    scored = score(model, input_ids[rows], attention_mask[rows], logits_to_keep, **kwargs)
                logps.append(scored[0])
                entropies.append(scored[1])
        end_forward(model, (logps, entropies))
        scored = torch.cat(logps), torch.cat(entropies) if kwargs.get("compute_entropy") else None
        record.keep(*scored)
        return *scored, None

    def logps(self, output: dict[str, Any], of_reference: bool) -> torch.Tensor:
        """Log-probs of a rollout's completions under the present policy or reference."""
        trainer = self._trainer
        model, adapter = trainer.model, nullcontext()
        if of_reference and trainer.ref_model is not None:
            model = trainer.ref_model
        elif of_reference:
            policy = trainer.accelerator.unwrap_model(trainer.model)
            adapter = use_adapter(policy, ADAPTER if ADAPTER in policy.peft_config else None)
        with self.under(self.record_of(output)), adapter:
            return trainer._get_per_token_logps_and_entropies(
                model,
                torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1),
                torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1),
                output["completion_ids"].shape[1],
                batch_size=trainer.args.per_device_train_batch_size,
            )[0]

    def decisions(self, mask: torch.Tensor) -> torch.Tensor:
        """`mask` without forced tokens, those whose mask allows no other, in the completions that are scored now."""
        if self._record is None or self._record.mask_numbers_B_T is None:
            return mask
        counts = self._generation.tables[self._trainer.mode].counts(self._record.mask_numbers_B_T.numpy())
        return mask * torch.from_numpy(counts > 1).to(mask.device)

    # ---- a rollout, and the loss of a batch

    def add_masks(self, output: dict[str, Any]) -> None:
        """Add the mask numbers of the latest rollout to what TRL keeps of it, and log how many tokens they allow."""
        numbers_B_T = self._trainer.latest_rollout.mask_numbers_B_T
        if numbers_B_T is None:
            return
        output["mask_numbers"] = widen_mask_numbers(numbers_B_T, output["completion_ids"].shape[1])
        numbers = output["mask_numbers"][output["completion_mask"].bool().cpu()].numpy()
        counts = self._generation.tables[self._trainer.mode].counts(numbers[numbers != FREE])
        sums = torch.tensor([counts.sum(), (counts == 1).sum(), len(counts)], dtype=torch.float32)
        device = self._trainer.accelerator.device
        allowed, forced, total = gather(sums.to(device)).view(-1, 3).sum(0).tolist()
        if total:
            kind = "sampling" if self._generation.constraint is None else "constraint"
            self._metrics[f"{kind}/allowed_tokens"].append(allowed / total)
            self._metrics[f"{kind}/forced_fraction"].append(forced / total)

    def loss(self, batch: dict[str, Any], compute: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, RolloutRecord]:
        """The loss of a batch, computed by TRL under the batch's masks, and the batch's record. Parts of the loss are
        logged."""
        trainer, generation, record = self._trainer, self._generation, self.record_of(batch)
        head = self._head if "mask_numbers" in batch else None
        with self.under(record), generation.vllm_options(apply=True), head.measuring() if head else nullcontext():
            loss = compute()
        if head is not None and generation.constraint is not None:
            mass = torch.tensor(head.allowed_mass, device=loss.device)
            self._metrics["constraint/allowed_mass"].append(trainer.accelerator.gather(mass).mean().item())
        assert record.logps_B_T is not None
        # Before the first update from this rollout: TRL has scored it for that, or no update came in between.
        iteration = trainer._step // trainer.args.steps_per_generation % trainer.num_iterations
        if "sampling_per_token_logps" in batch and (iteration == 0 or trainer.mode != "train"):
            logps_B_T = batch.get("old_per_token_logps", record.logps_B_T)
            tables = generation.tables if "mask_numbers" in batch else None
            self.consistency.check(trainer, batch, logps_B_T, tables)
        if trainer.task is not None:
            self._log_parts(batch, record.logps_B_T)
        return loss, record

    def _log_parts(self, batch: dict[str, Any], logps_B_T: torch.Tensor) -> None:
        """Token means of the policy-gradient loss before clipping and of the log-probs; the KL penalty."""
        trainer, metrics = self._trainer, self._metrics
        mask_B_T, advantages_B = batch["completion_mask"], batch["advantages"]
        advantages_B_T = advantages_B if advantages_B.ndim == 2 else advantages_B[:, None]
        if advantages_B.ndim == 2:  # those of tokens
            advantages_B = (advantages_B_T * mask_B_T).sum(1) / mask_B_T.sum(1).clamp(min=1)
        ratios_B_T = (logps_B_T - batch.get("old_per_token_logps", logps_B_T)).exp()
        sums = [-(ratios_B_T * advantages_B_T * mask_B_T).sum(), (logps_B_T * mask_B_T).sum(), mask_B_T.sum()]
        sums += [advantages_B.sum(), torch.tensor(len(advantages_B), device=mask_B_T.device)]
        sums = trainer.accelerator.reduce(torch.stack([x.float() for x in sums])).tolist()
        pg, logp, tokens, advantage, rows = sums
        metrics["pg_loss"].append(pg / max(tokens, 1))
        metrics["logp_mean"].append(logp / max(tokens, 1))
        metrics["advantage_mean"].append(advantage / rows)
        if trainer.beta:
            metrics["kl_penalty"].append(trainer.beta * metrics["kl"][-1])
