"""RewardLayer: rewards of a task, computed while TRL computes reference log-probs, and advantage estimators."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from accelerate.utils import gather, gather_object

from ...failures import FailureNotice
from ...rewards.api_judge import Usage
from ...rewards.components import TaskRewards, unusable
from ...rewards.judge import text_of
from ...task import Task, printable
from ..advantages import estimate, expected_best_curve, k_fits, without_signal
from ..credit import StepFinder, check_credit_task, step_credits, token_credits
from ..dataset import split_held_out, task_dataset
from ..evaluated import EvaluatedBatches
from ..options.config import TaskGRPOConfig
from ..options.sampling import check_endings
from ..repair import RepairTask, scoring_turns_with
from ..stores.canonical_forms import CanonicalForms
from .scoring import ScoringLayer


class RewardLayer(ScoringLayer):
    """With a task: its rewards and its rows. Without one: reward functions and a data set, as TRL takes them."""

    def __init__(
        self,
        model: Any,
        reward_funcs: Any,
        args: TaskGRPOConfig,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *more: Any,
        task: Task | None,
        **kwargs: Any,
    ):
        check_credit_task(args, task)
        if isinstance(eval_dataset, Mapping) and args.best_by is not None:
            raise ValueError(
                f"best_by={args.best_by!r} chooses the model by one evaluation, but eval_dataset has "
                f"{len(eval_dataset)}: {', '.join(eval_dataset)}; pass one of them, or leave best_by out"
            )
        self._rewards: TaskRewards | None = None
        self._forms = None if task is None else CanonicalForms(task)
        if task is not None:
            check_endings(args)
            if reward_funcs is not None or args.reward_weights is not None:
                raise ValueError("a task defines its own rewards: leave out reward_funcs and reward_weights, and set "
                                 "component_weights to weight its components")  # fmt: skip
            self._rewards = TaskRewards(task, args, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
            reward_funcs = self._rewards.functions()
            train_dataset = task_dataset(task, "train", args.train_rows, args.seed, train_dataset)
            if eval_dataset is None and args.load_best_model_at_end:
                _, eval_dataset = split_held_out(task, args.eval_rows, args.seed)
            test_rows = partial(task_dataset, task, "test", args.eval_rows, args.seed)
            if isinstance(eval_dataset, Mapping):  # several, each of which is evaluated
                eval_dataset = {name: test_rows(rows) for name, rows in eval_dataset.items()}
            elif eval_dataset is not None or args.eval_strategy != "no":
                eval_dataset = test_rows(eval_dataset)
        super().__init__(model, reward_funcs, args, train_dataset, eval_dataset, *more, task=task, **kwargs)
        if self._rewards is not None:
            self.reward_func_names = self._rewards.names
            self.reward_weights = torch.tensor(self._rewards.weights, dtype=torch.float32)
        if args.step_credit and self.tools:
            raise ValueError("step_credit does not work with tools, whose results are in the text; set step_credit=0")
        self._steps = StepFinder(self._tokenizer)
        self._judge_usage: Usage | None = None  # of all processes
        self._unscored_notice, self._unusable_notice = FailureNotice(), FailureNotice()  # each is printed once
        self._evaluated = EvaluatedBatches()

    @property
    def _group_size(self) -> int:
        return self.num_generations if self.model.training else self.num_generations_eval

    def latest_samples(self) -> list[tuple[dict[str, Any], str, Any]]:
        """Row, completion and outcome of each sample in this process's latest rollout, for reports and trackers."""
        record = self.latest_rollout
        return list(zip(record.rows, record.completions, record.outcomes, strict=True)) if record.outcomes else []

    def latest_distributions(self) -> dict[str, list[float]]:
        """The reward and each component of all completions of the latest rollout, over all processes, for histograms.
        Completions that could not be scored are left out, and so are `success` and `valid`, which are 0 or 1."""
        if self._rewards is None or self.latest_rollout.rewards_N_F is None:
            return {}
        names = [name for name in self.reward_func_names if name not in ("success", "valid")]
        values_N = {"reward": self._totals(), **{name: self._component(name) for name in names}}
        found = {name: values[values.isfinite()].tolist() for name, values in values_N.items()}
        return {name: values for name, values in found.items() if values}

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if self._rewards is not None or self.args.advantage_estimator != "grpo" or self.args.advantage_clip:
            self._replace_advantages(output)
        return output

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._evaluated = EvaluatedBatches()
        return super().evaluation_loop(*args, **kwargs)

    def log(self, *args: Any, **kwargs: Any) -> None:
        metrics = self._metrics["train"]
        if self._judge_usage is not None and self.model.training and metrics:
            # TRL logs the mean since the last log, which for a total must be the mean of one value.
            for name, value in asdict(self._judge_usage).items():
                metrics[f"perf/judge_{name}"].append(float(value))
        if not self.model.training:
            self._evaluated.average(self._metrics["eval"])
        super().log(*args, **kwargs)

    # ---- rewards

    def _generate(self, prompts: list[Any]) -> Any:
        if self._rewards is None:
            return super()._generate(prompts)
        with scoring_turns_with(self._rewards.executor, self._constraint):
            generated = super()._generate(prompts)
        record = self.latest_rollout
        self._rewards.begin([example["row"] for example in record.examples], record.completions)
        return generated

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, *args: Any, **kwargs: Any) -> Any:
        record, rewards = self.latest_rollout, self._rewards
        if rewards is not None:
            record.outcomes = outcomes = rewards.finish()
            self._log_completion_extra("reason", [o.reason or (o.score.reason if o.score else "") for o in outcomes])
            self._log_metric("reward_failures", sum(o.score is None for o in outcomes) / len(outcomes))
            self._log_metric("perf/reward_seconds", sum(o.seconds for o in outcomes) / len(outcomes))
            self._log_metric("perf/reward_cache_hit_rate", rewards.executor.stats.hit_rate)
            if isinstance(self.task, RepairTask):
                infos = [o.score.info for o in outcomes if o.score] or [{"turns": 0, "repaired": False}]
                self._log_metric("repair/turns", sum(info["turns"] for info in infos) / len(infos))
                self._log_metric("repair/repaired", sum(info["repaired"] for info in infos) / len(infos))
            if rewards.executor.judge is not None:
                self._judge_usage = Usage.sum(gather_object([rewards.executor.judge.usage]))
            if reason := next((outcome.reason for outcome in outcomes if outcome.score is None), ""):
                self._unscored_notice.failed(
                    "completions could not be scored and are left out; reward_failures logs their share. The first: "
                    + printable(reason)
                )
        rewards_N_F = super()._calculate_rewards(inputs, prompts, completions, *args, **kwargs)
        if rewards is not None and rewards.has_group_components:
            rows = gather_object([example["row"] for example in inputs])
            texts = gather_object([text_of(completion) for completion in completions])
            scores = gather_object([outcome.score for outcome in record.outcomes])
            rewards.fill_group_components(rewards_N_F, rows, texts, scores, self._group_size)
        if (wrong_N_F := unusable(rewards_N_F)).any():
            i, f = wrong_N_F.nonzero()[0].tolist()
            asked = gather_object([str(example.get("row", example.get("prompt"))) for example in inputs])[i]
            effect = "such completions are left out" if rewards else "the advantages of its group cannot be used"
            self._unusable_notice.failed(
                f"{self.reward_func_names[f]!r} is {rewards_N_F[i, f]:g} for {printable(asked):.100}, but rewards "
                f"must lie within -1e9 and 1e9; {effect}"
            )
        if rewards is not None:
            rewards_N_F = rewards.unscored_to_nan(rewards_N_F)
        if not self.model.training:
            indexes = gather_object([example.get("index") for example in inputs])
            rewards_N_F = self._evaluated.add(indexes, rewards_N_F, self._group_size)
        record.rewards_N_F = rewards_N_F
        return rewards_N_F

    def _component(self, name: str) -> torch.Tensor:
        """One reward component of all completions of the latest rollout, over all processes."""
        assert self.latest_rollout.rewards_N_F is not None
        return self.latest_rollout.rewards_N_F[:, self.reward_func_names.index(name)]

    def _totals(self) -> torch.Tensor:
        """The weighted sum of each completion's components; NaN where it has none."""
        rewards_N_F = self.latest_rollout.rewards_N_F
        assert rewards_N_F is not None
        totals_N = (rewards_N_F * self.reward_weights.to(rewards_N_F.device)).nansum(1)
        totals_N[torch.isnan(rewards_N_F).all(1)] = torch.nan
        return totals_N

    # ---- advantages

    def _replace_advantages(self, output: dict[str, Any]) -> None:
        """Compute advantages of whole groups from rewards gathered over all processes; keep this process's slice."""
        args, size, metrics = self.args, self._group_size, self._metrics[self._mode]
        totals_P_G = self._totals().view(-1, size)
        advantages_N = gather(output["advantages"])
        # In evaluation groups may be too small for k: then TRL's own advantages stay. Only the loss shows them.
        estimator, k = args.advantage_estimator, args.pass_k
        if estimator != "grpo" and (self.model.training or k_fits(estimator, k, size)):
            advantages_N = estimate(totals_P_G, estimator, k, scale=args.scale_rewards).flatten()
            if estimator == "maxk":
                advantages_N = advantages_N * size  # the estimator is for a sum over the group, the loss is a mean
        if args.advantage_clip is not None:
            clipped = advantages_N.clamp(-args.advantage_clip, args.advantage_clip)
            metrics["advantage_clipped_fraction"].append((clipped != advantages_N).float().mean().item())
            advantages_N = clipped
        is_in_loss_N = gather(output["completion_mask"].any(1))  # not if mask_truncated_completions leaves it out
        compared_P_G = totals_P_G
        if args.multi_objective_aggregation == "normalize_then_sum":  # components may differ where totals are equal
            compared_P_G = gather(output["advantages"]).view(-1, size).masked_fill(totals_P_G.isnan(), torch.nan)
        without_signal_P = without_signal(compared_P_G, (advantages_N * is_in_loss_N).view(-1, size))
        credits_N: list[list[float]] = []
        if args.step_credit and self.model.training:  # in evaluation only the loss would show it
            scores_N = gather_object([outcome.prefix_scores for outcome in self.latest_rollout.outcomes])
            credits_N = step_credits(scores_N, size, args.gamma)
            has_credit_N = torch.tensor([any(credits) for credits in credits_N], device=without_signal_P.device)
            without_signal_P &= ~(has_credit_N & is_in_loss_N).view(-1, size).any(1)
            metrics["step_credit/steps"].append(sum(map(len, credits_N)) / len(credits_N))
            metrics["step_credit/unscored"].append(scores_N.count(None) / len(scores_N))
        self.latest_rollout.without_signal_P = without_signal_P
        kept_P = slice(None) if self.model.training else self._evaluated.is_new_N[::size]
        metrics["groups_without_signal"].append(without_signal_P[kept_P].float().mean().item())
        if self._rewards is not None:
            for name, values_P_G in (("pass", self._component("success").view(-1, size)), ("max", totals_P_G)):
                for k, value in expected_best_curve(values_P_G).items():
                    metrics[f"{name}@{k}"].append(value)
            if not self.model.training:
                metrics["distinct_answers"].append(self._distinct_answers())
        if args.advantage_estimator != "grpo" or args.advantage_clip is not None:
            self._put_advantages(output, advantages_N)
        if credits_N:
            self._add_credit(output, credits_N)

    def _distinct_answers(self) -> float:
        """The number of different valid answers per group, divided by its size, over all processes."""
        assert self._forms is not None
        record, size = self.latest_rollout, self._group_size
        samples = zip(record.examples, record.completions, record.outcomes, strict=True)
        forms = gather_object(
            [self._forms.of(one["row"], text) if out.score and out.score.valid else None for one, text, out in samples]
        )
        is_new_N = self._evaluated.is_new_N
        groups = [set(forms[start : start + size]) - {None} for start in range(0, len(forms), size) if is_new_N[start]]
        new = sum(is_new_N)
        return sum(map(len, groups)) / new if new else math.nan  # all rows of the batch were there before

    def _put_advantages(self, output: dict[str, Any], advantages_N: torch.Tensor) -> None:
        """Replace TRL's advantages in a rollout and in the table of logged completions."""
        local = len(output["advantages"])
        first = self.accelerator.process_index * local
        output["advantages"] = advantages_N[first : first + local].to(output["advantages"].dtype)
        logged = self._logs["advantages"]
        for _ in range(min(len(logged), len(advantages_N))):
            logged.pop()
        logged.extend(advantages_N.tolist())

    def _add_credit(self, output: dict[str, Any], credits_N: list[list[float]]) -> None:
        """Give every token the advantage of its completion plus the weighted credit of its step."""
        record, local = self.latest_rollout, len(output["advantages"])
        first = self.accelerator.process_index * local
        scores_B = [outcome.prefix_scores for outcome in record.outcomes]
        credits_B = credits_N[first : first + local]
        mask_B_T, advantages_B = output["completion_mask"], output["advantages"]
        credits_B_T = self.args.step_credit * token_credits(
            self._steps,
            record.completion_ids,
            record.completions,
            scores_B,
            credits_B,
            record.last_turns,
            mask_B_T.shape[1],
        ).to(advantages_B)
        output["advantages"] = (advantages_B[:, None] + credits_B_T) * mask_B_T
        sums = torch.stack([(credits_B_T * mask_B_T).abs().sum(), mask_B_T.sum().to(advantages_B)])
        credit, tokens = gather(sums).view(-1, 2).sum(0).tolist()
        self._metrics[self._mode]["step_credit/mean_abs"].append(credit / max(tokens, 1))

    # ---- checkpoints

    def _parts(self) -> dict[str, Any]:
        if self._rewards is None:
            return super()._parts()
        judges = {f"judge {name}": judge for name, judge in self._rewards.executor.frozen_judges.items()}
        return super()._parts() | {"rewards": self._rewards.executor} | judges
