"""Rewarding: rewards of a task, computed while TRL computes reference log-probs, and advantage estimators."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import torch
from accelerate.utils import gather, gather_object

from ..failures import FailureNotice, first_line
from ..rewards.classifier import text_of
from ..rewards.components import TaskRewards, unusable
from ..rewards.environment import TurnsTask, answering_with
from ..rewards.llm_judge import Usage
from ..rewards.repair import RepairTask
from ..rewards.time_limit import time_limit
from ..task import Task, printable
from .advantages import estimate, expected_best_curve, k_fits, without_signal
from .evaluated import EvaluatedBatches

CACHED_FORMS = 10_000
SECONDS_PER_FORM = 5.0


class Rewarding:
    """Rewards and advantages of a trainer's rollouts. `rewards` are those of its task; without a task they are None,
    and TRL calls the trainer's reward functions."""

    def __init__(self, trainer: Any, rewards: TaskRewards | None):
        self._trainer, self.rewards = trainer, rewards
        self.forms = None if rewards is None else CanonicalForms(rewards.task)
        self._judge_usage: Usage | None = None  # of all processes
        self._unscored_notice, self._unusable_notice = FailureNotice(), FailureNotice()  # each is printed once
        self._evaluated = EvaluatedBatches()
        if rewards is not None:
            trainer.reward_func_names = rewards.names
            trainer.reward_weights = torch.tensor(rewards.weights, dtype=torch.float32)

    @property
    def _metrics(self) -> dict[str, list[float]]:
        return self._trainer._metrics[self._trainer.mode]

    def start_evaluation(self) -> None:
        self._evaluated = EvaluatedBatches()

    def parts(self) -> dict[str, Any]:
        """What checkpoints hold: see Checkpoints."""
        if self.rewards is None:
            return {}
        judges = {f"judge {name}": judge for name, judge in self.rewards.executor.frozen_judges.items()}
        return {"rewards": self.rewards.executor} | judges

    # ---- rewards

    def scoring_turns(self, constraint: Any) -> AbstractContextManager[None]:
        """While open, a constraint of several turns asks the reward workers why an answer fails."""
        return nullcontext() if self.rewards is None else answering_with(self.rewards.executor, constraint)

    def begin(self) -> None:
        """Let the workers start to score the completions of the latest rollout."""
        record = self._trainer.latest_rollout
        if self.rewards is not None:
            self.rewards.begin([example["row"] for example in record.examples], record.completions)

    def collect(self, inputs: Any, completions: Any, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The rewards of all completions, over all processes, as TRL computes them from what the workers found. They
        go into the record."""
        trainer, rewards, record = self._trainer, self.rewards, self._trainer.latest_rollout
        if rewards is not None:
            record.outcomes = rewards.finish()
            self._log_outcomes(record.outcomes)
        rewards_N_F = compute()
        if rewards is not None and rewards.has_group_components:
            rows = gather_object([example["row"] for example in inputs])
            texts = gather_object([text_of(completion) for completion in completions])
            scores = gather_object([outcome.score for outcome in record.outcomes])
            rewards.fill_group_components(rewards_N_F, rows, texts, scores, trainer.group_size)
        if (wrong_N_F := unusable(rewards_N_F)).any():
            i, f = wrong_N_F.nonzero()[0].tolist()
            asked = gather_object([str(example.get("row", example.get("prompt"))) for example in inputs])[i]
            effect = "such completions are left out" if rewards else "the advantages of its group cannot be used"
            self._unusable_notice.failed(
                f"{trainer.reward_func_names[f]!r} is {rewards_N_F[i, f]:g} for {printable(asked):.100}, but rewards "
                f"must lie within -1e9 and 1e9; {effect}"
            )
        if rewards is not None:
            rewards_N_F = rewards.unscored_to_nan(rewards_N_F)
        if trainer.mode != "train":
            indexes = gather_object([example.get("index") for example in inputs])
            rewards_N_F = self._evaluated.add(indexes, rewards_N_F, trainer.group_size)
        record.rewards_N_F = rewards_N_F
        return rewards_N_F

    def _log_outcomes(self, outcomes: list[Any]) -> None:
        trainer, rewards = self._trainer, self.rewards
        assert rewards is not None
        reasons = [outcome.reason or (outcome.score.reason if outcome.score else "") for outcome in outcomes]
        trainer._log_completion_extra("reason", reasons)
        trainer._log_metric("reward_failures", sum(outcome.score is None for outcome in outcomes) / len(outcomes))
        trainer._log_metric("perf/reward_seconds", sum(outcome.seconds for outcome in outcomes) / len(outcomes))
        trainer._log_metric("perf/reward_cache_hit_rate", rewards.executor.stats.hit_rate)
        if isinstance(trainer.task, TurnsTask):
            infos = [o.score.info for o in outcomes if o.score] or [{"turns": 0, "repaired": False}]
            is_repair = isinstance(trainer.task, RepairTask)
            for name in ("turns", "repaired") if is_repair else ("turns",):
                mean = sum(info[name] for info in infos) / len(infos)
                trainer._log_metric(f"{'repair' if is_repair else 'environment'}/{name}", mean)
        if rewards.executor.judge is not None:
            self._judge_usage = Usage.sum(gather_object([rewards.executor.judge.usage]))
        if reason := next((outcome.reason for outcome in outcomes if outcome.score is None), ""):
            self._unscored_notice.failed(
                "completions could not be scored and are left out; reward_failures logs their share. The first: "
                + printable(reason)
            )

    def component(self, name: str) -> torch.Tensor:
        """One reward component of all completions of the latest rollout, over all processes."""
        rewards_N_F = self._trainer.latest_rollout.rewards_N_F
        assert rewards_N_F is not None
        return rewards_N_F[:, self._trainer.reward_func_names.index(name)]

    def totals(self) -> torch.Tensor:
        """The weighted sum of each completion's components; NaN where it has none."""
        rewards_N_F = self._trainer.latest_rollout.rewards_N_F
        assert rewards_N_F is not None
        totals_N = (rewards_N_F * self._trainer.reward_weights.to(rewards_N_F.device)).nansum(1)
        totals_N[torch.isnan(rewards_N_F).all(1)] = torch.nan
        return totals_N

    # ---- advantages

    def set_advantages(self, output: dict[str, Any]) -> None:
        """Compute advantages of whole groups from rewards gathered over all processes; keep this process's slice.
        Plain reward functions with TRL's own advantages are left as they are."""
        trainer, args, size = self._trainer, self._trainer.args, self._trainer.group_size
        estimator, k = args.advantage_estimator, args.pass_k
        if self.rewards is None and estimator == "grpo" and not args.advantage_clip:
            return
        totals_P_G = self.totals().view(-1, size)
        advantages_N = gather(output["advantages"])
        # In evaluation groups may be too small for k: then TRL's own advantages stay. Only the loss shows them.
        if estimator != "grpo" and (trainer.mode == "train" or k_fits(estimator, k, size)):
            advantages_N = estimate(totals_P_G, estimator, k, scale=args.scale_rewards).flatten()
            if estimator == "maxk":
                advantages_N = advantages_N * size  # the estimator is for a sum over the group, the loss is a mean
        if args.advantage_clip is not None:
            clipped = advantages_N.clamp(-args.advantage_clip, args.advantage_clip)
            self._metrics["advantage_clipped_fraction"].append((clipped != advantages_N).float().mean().item())
            advantages_N = clipped
        is_in_loss_N = gather(output["completion_mask"].any(1))  # not if mask_truncated_completions leaves it out
        compared_P_G = totals_P_G
        if args.multi_objective_aggregation == "normalize_then_sum":  # components may differ where totals are equal
            compared_P_G = gather(output["advantages"]).view(-1, size).masked_fill(totals_P_G.isnan(), torch.nan)
        is_in_loss_P_G = (advantages_N * is_in_loss_N).view(-1, size)
        trainer.latest_rollout.without_signal_P = without_signal(compared_P_G, is_in_loss_P_G)
        if estimator != "grpo" or args.advantage_clip is not None:
            self._put_advantages(output, advantages_N)

    def _put_advantages(self, output: dict[str, Any], advantages_N: torch.Tensor) -> None:
        """Replace TRL's advantages in a rollout and in the table of logged completions."""
        local = len(output["advantages"])
        first = self._trainer.accelerator.process_index * local
        output["advantages"] = advantages_N[first : first + local].to(output["advantages"].dtype)
        logged = self._trainer._logs["advantages"]
        for _ in range(min(len(logged), len(advantages_N))):
            logged.pop()
        logged.extend(advantages_N.tolist())

    # ---- metrics

    def log_totals(self) -> None:
        """Add what is logged once per log: the use of an LLM judge so far, and the means over evaluated rows."""
        trainer = self._trainer
        if trainer.mode == "train" and self._judge_usage is not None and self._metrics:
            for name, value in asdict(self._judge_usage).items():
                self._metrics[f"perf/judge_{name}"].append(float(value))
        if trainer.mode != "train":
            self._evaluated.average(self._metrics)

    def log_groups(self) -> None:
        """Log the share of groups without signal, and pass@k and max@k of the latest rollout."""
        trainer, metrics, size = self._trainer, self._metrics, self._trainer.group_size
        without_signal_P = trainer.latest_rollout.without_signal_P
        if without_signal_P is None:
            return
        kept_P = slice(None) if trainer.mode == "train" else self._evaluated.is_new_N[::size]
        metrics["groups_without_signal"].append(without_signal_P[kept_P].float().mean().item())
        if self.rewards is None:
            return
        for name, values_N in (("pass", self.component("success")), ("max", self.totals())):
            for k, value in expected_best_curve(values_N.view(-1, size)).items():
                metrics[f"{name}@{k}"].append(value)
        if trainer.mode != "train":
            metrics["distinct_answers"].append(self._distinct_answers())

    def _distinct_answers(self) -> float:
        """The number of different valid answers per group, divided by its size, over all processes."""
        assert self.forms is not None
        record, size, is_new_N = self._trainer.latest_rollout, self._trainer.group_size, self._evaluated.is_new_N
        samples = zip(record.examples, record.completions, record.outcomes, strict=True)
        forms = gather_object(
            [self.forms.of(one["row"], text) if out.score and out.score.valid else None for one, text, out in samples]
        )
        groups = [set(forms[start : start + size]) - {None} for start in range(0, len(forms), size) if is_new_N[start]]
        new = sum(is_new_N)
        return sum(map(len, groups)) / new if new else math.nan  # all rows of the batch were there before

    def distributions(self) -> dict[str, list[float]]:
        """The reward and each component of all completions of the latest rollout, over all processes, for histograms.
        Completions that could not be scored are left out, and so are `success` and `valid`, which are 0 or 1."""
        if self.rewards is None or self._trainer.latest_rollout.rewards_N_F is None:
            return {}
        names = [name for name in self.rewards.names if name not in ("success", "valid")]
        values_N = {"reward": self.totals(), **{name: self.component(name) for name in names}}
        found = {name: values[values.isfinite()].tolist() for name, values in values_N.items()}
        return {name: values for name, values in found.items() if values}


class CanonicalForms:
    """Canonical forms of answers, cached by row and text. An error in the task's code does not stop training: such an
    answer, and one whose form takes longer than SECONDS_PER_FORM, is compared by its text."""

    def __init__(self, task: Task):
        self._task = task
        self._notice = FailureNotice()
        self.of = lru_cache(CACHED_FORMS)(self._compute)

    def _compute(self, row: str, completion: str) -> str:
        try:
            with time_limit(SECONDS_PER_FORM):
                return str(self._task.canonical(json.loads(row), completion))
        except Exception as error:  # noqa: BLE001 - the task's code, on text that a model wrote
            self._notice.failed(
                f"canonical of task {self._task.name!r} failed ({type(error).__name__}: {first_line(error)}); "
                "training continues, and such answers are compared by their text"
            )
            return completion.strip()
