"""Losses of GRPO and its variants in float64, written from their definitions: the oracle of test_loss_matrix.py.

Nothing here calls the package or TRL. Shapes: B completions, T tokens, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")  # PPO's surrogate; they differ in how tokens are averaged


@dataclass(frozen=True)
class Objective:
    """The hyperparameters of a loss, under TRL's names."""

    loss_type: str
    importance_sampling_level: str
    beta: float
    entropy_coef: float
    epsilon: float
    epsilon_high: float
    delta: float
    max_completion_length: int
    sapo_temperatures: tuple[float, float] = (1.0, 1.05)  # of positive and of other advantages
    vespo_pos: tuple[float, float] = (2.0, 3.0)  # k, lambda
    vespo_neg: tuple[float, float] = (3.0, 2.0)
    top_entropy_quantile: float = 1.0


@dataclass
class Batch:
    """A micro-batch. `counted_B_T` marks the tokens of the loss, `choices_B_T` those that were not forced.

    `old_B_T` is None if the policy has not changed since it sampled.
    """

    logps_B_T: torch.Tensor
    entropies_B_T: torch.Tensor
    ref_B_T: torch.Tensor
    old_B_T: torch.Tensor | None
    advantages_B: torch.Tensor
    counted_B_T: torch.Tensor
    choices_B_T: torch.Tensor
    weights_B_T: torch.Tensor | float = 1.0  # of the policy's part of the loss


def masked_logps_and_entropies(logits_B_T_V, targets_B_T, allowed_B_T_V, temperature):
    """Log-probs of the targets and entropies of softmax(logits / temperature) over the allowed tokens."""
    logps = (logits_B_T_V / temperature).masked_fill(~allowed_B_T_V, -math.inf).log_softmax(-1)
    entropies = -(logps.exp() * logps.masked_fill(~allowed_B_T_V, 0.0)).sum(-1)
    return logps.gather(-1, targets_B_T[..., None])[..., 0], entropies


def step_loss(batches: list[Batch], objective: Objective) -> tuple[torch.Tensor, list[dict[str, float]]]:
    """The loss of one optimizer step over these micro-batches, and the metrics of each."""
    tokens = sum(batch.counted_B_T.sum() for batch in batches)
    loss, metrics = 0.0, []
    for batch in batches:
        part, logged = _micro_batch_loss(batch, objective, tokens, len(batches))
        loss = loss + part
        metrics.append(logged)
    return loss, metrics


def _micro_batch_loss(batch, objective, tokens, micro_batches):
    counted = batch.counted_B_T.double()
    lengths_B = counted.sum(1)
    advantages_B_1 = batch.advantages_B.double()[:, None]
    old = batch.logps_B_T.detach() if batch.old_B_T is None else batch.old_B_T
    log_ratios = batch.logps_B_T - old
    if objective.importance_sampling_level == "sequence":  # GSPO: the geometric mean over the completion's tokens
        ratios = _over(log_ratios * counted, lengths_B).exp()[:, None].expand_as(counted)
    else:
        ratios = log_ratios.exp()

    losses_B_T, metrics = _policy_loss(objective, batch.logps_B_T, log_ratios, ratios, advantages_B_1, counted)
    losses_B_T = losses_B_T * batch.weights_B_T
    selected = counted
    if objective.top_entropy_quantile < 1:  # the share of choices with the highest entropy
        is_choice = batch.counted_B_T & batch.choices_B_T
        threshold = torch.quantile(batch.entropies_B_T[is_choice], 1 - objective.top_entropy_quantile)
        selected = (is_choice & (batch.entropies_B_T >= threshold)).double()
        losses_B_T = losses_B_T * selected
    # Schulman's k3 estimator of KL(policy || reference), with the importance weight that makes its gradient unbiased.
    gap = batch.ref_B_T - batch.logps_B_T
    kl_B_T = ratios * (gap.exp() - gap - 1)
    losses_B_T = (losses_B_T + objective.beta * kl_B_T) * counted

    if objective.loss_type in ("grpo", "sapo"):
        loss = _over(losses_B_T, lengths_B).mean() / micro_batches
    elif objective.loss_type == "bnpo":
        loss = losses_B_T.sum() / counted.sum() / micro_batches
    elif objective.loss_type == "dr_grpo":
        loss = losses_B_T.sum() / (len(losses_B_T) * objective.max_completion_length) / micro_batches
    elif objective.loss_type == "luspo":
        loss = losses_B_T.sum(1).mean() / micro_batches
    elif objective.loss_type in ("dapo", "cispo", "vespo"):
        loss = losses_B_T.sum() / tokens
    loss = loss - objective.entropy_coef * (batch.entropies_B_T * selected).sum() / selected.sum() / micro_batches

    metrics["entropy"] = _mean(batch.entropies_B_T, counted)
    if objective.beta:
        metrics["kl"] = _mean(kl_B_T, counted)
    return loss, metrics


def _policy_loss(objective, logps, log_ratios, ratios, advantages_B_1, counted):
    """The loss of each token before averaging, and the metrics of this kind of loss."""
    by_sequence = objective.importance_sampling_level == "sequence"

    def share(flags_B_T):
        """The share of flagged tokens, or of flagged completions if all tokens of a completion share one ratio."""
        return flags_B_T[:, 0].double().mean().item() if by_sequence else _mean(flags_B_T.double(), counted)

    if objective.loss_type in CLIPPED:
        low, high = 1 - objective.epsilon, 1 + objective.epsilon_high
        bounded = ratios.clamp(max=objective.delta)
        is_low = (ratios < low) & (advantages_B_1 < 0)
        is_high = (ratios > high) & (advantages_B_1 > 0)
        rows = [i for i in range(len(counted)) if by_sequence or counted[i].sum()]
        row_shares = [
            [flags[i, 0].double().item() if by_sequence else _mean(flags[i].double(), counted[i]) for i in rows]
            for flags in (is_low, is_high)
        ]
        metrics = {
            "clip_ratio/low_mean": share(is_low),
            "clip_ratio/high_mean": share(is_high),
            "clip_ratio/region_mean": share(is_low | is_high),
            "clip_ratio/low_min": min(row_shares[0]),
            "clip_ratio/high_max": max(row_shares[1]),
        }
        return -torch.minimum(bounded * advantages_B_1, ratios.clamp(low, high) * advantages_B_1), metrics
    if objective.loss_type == "cispo":  # REINFORCE with a truncated importance weight, which is a constant
        is_cut = (ratios > objective.epsilon_high) & (advantages_B_1 > 0)
        weights = ratios.detach().clamp(max=objective.epsilon_high)
        return -weights * advantages_B_1 * logps, {"cispo_clip_ratio": share(is_cut)}
    if objective.loss_type == "sapo":  # a sigmoid gate in place of the clip
        positive, other = objective.sapo_temperatures
        tau = torch.where(advantages_B_1 > 0, positive, other).double()
        return -advantages_B_1 * 4 / tau / (1 + (-tau * (ratios - 1)).exp()), {}
    if objective.loss_type == "vespo":  # phi(W) = W^k exp(lambda (1 - W)), W the product of the token ratios
        weight_B_1 = (log_ratios * counted).sum(1, keepdim=True).exp().detach()
        k, rate = (
            torch.where(advantages_B_1 >= 0, positive, negative).double()
            for positive, negative in zip(objective.vespo_pos, objective.vespo_neg, strict=True)
        )
        phi_B_1 = weight_B_1**k * (rate * (1 - weight_B_1)).exp()
        return -phi_B_1 * advantages_B_1 * logps, {"vespo/phi_seq_mean": phi_B_1.mean().item()}
    raise NotImplementedError(f"loss_type {objective.loss_type!r} is new in TRL: write its definition here")


def _over(values_B_T, lengths_B):
    """The mean of each row over its length; 0 for a row without tokens."""
    return values_B_T.sum(1) / lengths_B.where(lengths_B > 0, 1.0)


def _mean(values, counted):
    return ((values * counted).sum() / counted.sum()).item()
