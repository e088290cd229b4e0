"""RewardLayer: a task's rewards, begun while TRL computes reference log-probs; and advantages of our own."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from accelerate.utils import gather, gather_object

from ..models.tiny import PLAIN_CHAT_TEMPLATE
from ..rewards.components import TaskRewards
from ..rewards.judge import text_of
from ..task import Task
from .advantages import estimate, expected_best_curve, k_fits, without_signal
from .config import TaskGRPOConfig
from .dataset import task_dataset
from .sampling_layer import SamplingLayer


class RewardLayer(SamplingLayer):
    """With a task, its rewards and its rows; without one, reward functions and a data set as TRL takes them."""

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
        self._rewards: TaskRewards | None = None
        if task is not None:
            if reward_funcs is not None or args.reward_weights is not None:
                raise ValueError("a task brings its own rewards; to weight them use component_weights")
            self._rewards = TaskRewards(task, args, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
            reward_funcs = self._rewards.functions()
            train_dataset = task_dataset(task, "train", args.train_rows, args.seed, train_dataset)
            if eval_dataset is not None or args.eval_strategy != "no":
                eval_dataset = task_dataset(task, "test", args.eval_rows, args.seed, eval_dataset)
        super().__init__(model, reward_funcs, args, train_dataset, eval_dataset, *more, task=task, **kwargs)
        self._texts: list[str] = []  # the completions of the rollout under way
        if self._rewards is not None:
            self.reward_func_names = self._rewards.names
            self.reward_weights = torch.tensor(self._rewards.weights, dtype=torch.float32)
            if self._tokenizer.chat_template is None:
                self._tokenizer.chat_template = PLAIN_CHAT_TEMPLATE

    @property
    def _group_size(self) -> int:
        return self.num_generations if self.model.training else self.num_generations_eval

    def latest_samples(self) -> list[tuple[dict[str, Any], str, Any]]:
        """Row, completion and outcome of the last rollout of this process, for people to look at."""
        if self._rewards is None:
            return []
        rows = [json.loads(example["row"]) for example in self._inputs]
        return list(zip(rows, self._texts, self._rewards.outcomes, strict=True))

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if self._rewards is not None or self.args.advantage_estimator != "grpo" or self.args.advantage_clip:
            self._replace_advantages(output)
        return output

    # ---- rewards

    def _generate(self, prompts: list[Any]) -> Any:
        generated = super()._generate(prompts)
        if self._rewards is not None:
            self._texts = [text_of(completion) for completion in generated[3]]
            self._rewards.begin([example["row"] for example in self._inputs], self._texts)
        return generated

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, *args: Any, **kwargs: Any) -> Any:
        if self._rewards is not None:
            outcomes = self._rewards.finish()
            self._log_completion_extra("reason", [o.reason or (o.score.reason if o.score else "") for o in outcomes])
            self._log_metric("reward_failures", sum(o.score is None for o in outcomes) / len(outcomes))
            self._log_metric("perf/reward_seconds", sum(o.seconds for o in outcomes) / len(outcomes))
            self._log_metric("perf/reward_cache_hit_rate", self._rewards.executor.stats.hit_rate)
        rewards_N_F = super()._calculate_rewards(inputs, prompts, completions, *args, **kwargs)
        if self._rewards is not None:
            if self._rewards.has_group_components:
                rows = gather_object([example["row"] for example in inputs])
                texts = gather_object([text_of(completion) for completion in completions])
                scores = gather_object([outcome.score for outcome in outcomes])
                self._rewards.fill_group_components(rewards_N_F, rows, texts, scores, self._group_size)
            rewards_N_F = self._rewards.unscored_to_nan(rewards_N_F)
        self._rewards_N_F = rewards_N_F
        return rewards_N_F

    def _column(self, name: str) -> torch.Tensor:
        """One component of all completions of the rollout, over all processes."""
        return self._rewards_N_F[:, self.reward_func_names.index(name)]

    # ---- advantages

    def _replace_advantages(self, output: dict[str, Any]) -> None:
        """Advantages of whole groups, from rewards gathered over all processes; this process keeps its slice."""
        args, size, metrics = self.args, self._group_size, self._metrics[self._mode]
        totals_P_G = self._totals().view(-1, size)
        advantages_N = gather(output["advantages"])
        # In evaluation groups may be too small for k: then TRL's own advantages stay. Only the loss shows them.
        if args.advantage_estimator != "grpo" and (
            self.model.training or k_fits(args.advantage_estimator, args.pass_k, size)
        ):
            scale = args.scale_rewards == "group"
            advantages_N = estimate(totals_P_G, args.advantage_estimator, args.pass_k, scale=scale).flatten()
            if args.advantage_estimator == "maxk":
                advantages_N = advantages_N * size  # the estimator is for a sum over the group, the loss is a mean
        if args.advantage_clip is not None:
            clipped = advantages_N.clamp(-args.advantage_clip, args.advantage_clip)
            metrics["advantage_clipped_fraction"].append((clipped != advantages_N).float().mean().item())
            advantages_N = clipped
        self._without_signal_P = without_signal(totals_P_G, advantages_N.view(-1, size))
        metrics["groups_without_signal"].append(self._without_signal_P.float().mean().item())
        if self._rewards is not None:
            for name, values_P_G in (("pass", self._column("success").view(-1, size)), ("max", totals_P_G)):
                for k, value in expected_best_curve(values_P_G).items():
                    metrics[f"{name}@{k}"].append(value)
        if args.advantage_estimator != "grpo" or args.advantage_clip is not None:
            self._put_advantages(output, advantages_N)

    def _totals(self) -> torch.Tensor:
        """The weighted sum of each completion's components; NaN where it has none."""
        totals_N = (self._rewards_N_F * self.reward_weights.to(self._rewards_N_F.device)).nansum(1)
        totals_N[torch.isnan(self._rewards_N_F).all(1)] = torch.nan
        return totals_N

    def _put_advantages(self, output: dict[str, Any], advantages_N: torch.Tensor) -> None:
        local = len(output["advantages"])
        first = self.accelerator.process_index * local
        output["advantages"] = advantages_N[first : first + local].to(output["advantages"].dtype)
        logged = self._logs["advantages"]
        for _ in range(min(len(logged), len(advantages_N))):
            logged.pop()
        logged.extend(advantages_N.tolist())

    # ---- the parts of the loss, for people to read

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        loss = super()._compute_loss(model, inputs)
        if self.task is not None:
            self._log_parts_of_loss(inputs)
        return loss

    def _log_parts_of_loss(self, inputs: dict[str, Any]) -> None:
        """Means over tokens of the policy gradient's loss before clipping and of log-probs; the KL penalty."""
        mask_B_T, advantages_B, metrics = self._loss_mask(inputs), inputs["advantages"], self._metrics[self._mode]
        logps_B_T = self._scored_logps
        assert logps_B_T is not None
        ratios_B_T = (logps_B_T - inputs.get("old_per_token_logps", logps_B_T)).exp()
        sums = [-(ratios_B_T * advantages_B[:, None] * mask_B_T).sum(), (logps_B_T * mask_B_T).sum(), mask_B_T.sum()]
        sums += [advantages_B.sum(), torch.tensor(len(advantages_B), device=mask_B_T.device)]
        pg, logp, tokens, advantage, rows = self.accelerator.reduce(torch.stack([x.float() for x in sums])).tolist()
        metrics["pg_loss"].append(pg / max(tokens, 1))
        metrics["logp_mean"].append(logp / max(tokens, 1))
        metrics["advantage_mean"].append(advantage / rows)
        if self.beta:
            metrics["kl_penalty"].append(self.beta * metrics["kl"][-1])

    # ---- checkpoints

    def _parts(self) -> dict[str, Any]:
        if self._rewards is None:
            return super()._parts()
        judges = {f"judge {name}": judge for name, judge in self._rewards.frozen_judges.items()}
        return super()._parts() | {"rewards": self._rewards.executor} | judges
