"""TaskGRPOTrainer: TRL's GRPOTrainer with a task. Every override calls super(); at default options nothing differs.

What is added, in the order of a training step:

1. `_generate_and_score_completions`: before the rollout the reference and beta move and the curriculum chooses rows;
   after it the advantages are replaced, and groups without signal may give way to stored ones.
2. `_generate_single_turn`: completions come from our rollouts; from a masked language model, which fills gaps; or from
   TRL's, with the constraint's logits processor in `generate`. What could have been drawn is recorded.
3. `_generate` and `_calculate_rewards`: rewards start to be computed as soon as there are completions, and are awaited
   after TRL has computed reference log-probs.
4. `_get_per_token_logps_and_entropies`: current, old and reference log-probs are all under the masks of the rollout.
5. `_compute_loss`: hands the masks of its rows to 4., and the KL divergence it measured to the controller of beta;
   logs the parts of the loss.

Checkpoints hold all of it: see resume.py.
"""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from typing import Any

import torch
from accelerate.utils import gather, gather_object
from trl.extras.profiling import profiling_context
from trl.models import unwrap_model_for_generation
from trl.trainer.utils import use_adapter

from .advantages import estimate, expected_best_curve, k_fits, without_signal
from .callbacks import Hints, MetricsFile
from .card import write_card
from .config import TaskGRPOConfig
from .constraints.base import Constraint, replay
from .constraints.grammar import GrammarConstraint
from .constraints.sampling import ConstraintProcessor, logits_processor_in
from .constraints.scoring import MaskedHead
from .constraints.spelling import OneSpelling
from .constraints.table import FREE, MaskTables, padded, widened
from .curriculum import Curriculum
from .data import task_dataset
from .kl import AdaptiveKL
from .masked import MaskedPolicy, is_masked_lm, ready
from .models import PLAIN_CHAT_TEMPLATE
from .reference import MovingReference, created, with_adapter
from .replay import ReplayBuffer, groups_of, put_groups
from .report import SECONDS_WHILE_RUNNING, Pictures
from .resume import ResumableGRPOTrainer
from .rewards.components import TaskRewards
from .rewards.judge import text_of
from .rollout import Decoder, rollout, why_not_in
from .rollout.support import without_adapter
from .shared_prompts import SharedPrompts
from .task import Task


class TaskGRPOTrainer(ResumableGRPOTrainer):
    """`TaskGRPOTrainer(model, args=TaskGRPOConfig(...), task=task)`; or as GRPOTrainer, with reward functions and a
    data set. `constraint` stands in for the task's own; either is used when `args.constrain` is set."""

    _tag_names = ["trl", "grpo", "trl_grpo_tasks"]
    args: TaskGRPOConfig

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: TaskGRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *more: Any,
        task: Task | None = None,
        constraint: Constraint | None = None,
        peft_config: Any = None,
        **kwargs: Any,
    ):
        args = TaskGRPOConfig() if args is None else args
        if not isinstance(args, TaskGRPOConfig):
            raise TypeError(
                f"args must be a TaskGRPOConfig (it takes all options of {type(args).__name__}), got {args!r}"
            )
        self.task = task
        self.pictures = None if task is None else Pictures(task)  # for report and card, each drawn once
        self._rewards: TaskRewards | None = None
        if task is not None:
            if reward_funcs is not None or args.reward_weights is not None:
                raise ValueError("a task brings its own rewards; to weight them use component_weights")
            self._rewards = TaskRewards(task, args, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
            reward_funcs = self._rewards.functions()
            train_dataset = task_dataset(task, "train", args.train_rows, args.seed, train_dataset)
            if eval_dataset is not None or args.eval_strategy != "no":
                eval_dataset = task_dataset(task, "test", args.eval_rows, args.seed, eval_dataset)
        fills = is_masked_lm(model) if task is None else task.policy == "masked"
        if fills:
            model, peft_config = ready(
                created(model, args, kwargs.pop("quantization_config", None)), args, peft_config
            )
        if peft_config is not None and args.reference_mode != "static":
            model = with_adapter(model, peft_config, args, kwargs.pop("quantization_config", None))
            peft_config = None
        super().__init__(
            model, reward_funcs, args, train_dataset, eval_dataset, *more, peft_config=peft_config, **kwargs
        )
        if self._rewards is not None:
            self.reward_func_names = self._rewards.names
            self.reward_weights = torch.tensor(self._rewards.weights, dtype=torch.float32)
            if self._tokenizer.chat_template is None:
                self._tokenizer.chat_template = PLAIN_CHAT_TEMPLATE
        self._inputs: list[dict[str, Any]] = []  # the examples of the rollout under way
        self._texts: list[str] = []  # and its completions
        self._set_up_constraint(constraint)
        self._set_up_controllers()
        self._policy: MaskedPolicy | None = None
        self._support: torch.Tensor | None = None  # what could have been drawn for the rows being scored
        self._rolls_out = False
        self._decoder: Decoder | None = None
        self._shared: SharedPrompts | None = None
        if fills:
            self._set_up_filling()
        else:
            self._set_up_rollouts()
        self.add_callback(MetricsFile())
        self.add_callback(Hints())

    def _set_up_constraint(self, constraint: Constraint | None) -> None:
        self._constraint: Constraint | None = None
        self._tables = MaskTables()  # of the rollouts in use, in training and in evaluation
        self._masks: torch.Tensor | None = None  # mask numbers of the rows being scored
        if not self.args.constrain:
            return
        if constraint is None and self.task is not None:
            constraint = self.task.constraint(self._tokenizer)
        if constraint is None:
            why = f"task {self.task.name!r} has none with these options" if self.task else "none was given"
            raise ValueError(f"constrain=True needs a constraint, but {why}")
        if self.tools or self.rollout_func is not None or self._is_vlm or self.aux_loss_enabled:
            raise ValueError(
                "constrain=True does not go with tools, rollout_func, vision-language models or a router loss "
                "(for the last, set router_aux_loss_coef=0)"
            )
        if self.use_vllm:
            constraint = constraint.constraint if isinstance(constraint, OneSpelling) else constraint
            self._hand_to_vllm(constraint)
        self._constraint = constraint
        self._head = MaskedHead(self.temperature, self.args.cast_lm_head_to_fp32)
        self._head.add_to(without_adapter(self.model))
        if self.ref_model is not None:
            self._head.add_to(self.accelerator.unwrap_model(self.ref_model))

    def _hand_to_vllm(self, constraint: Constraint) -> None:
        """vLLM samples under the grammar itself, in any spelling; the masks are rebuilt from what it wrote."""
        try:
            if not isinstance(constraint, GrammarConstraint):
                raise ValueError("it is not a grammar")
            self.vllm_generation.generation_kwargs["structured_outputs"] = constraint.for_vllm()
        except ValueError as error:
            raise ValueError(
                f"constrain=True with use_vllm: this constraint cannot be handed to vLLM: {error}; "
                "leave use_vllm off (--rollout auto is fast without it)"
            ) from error

    def _set_up_controllers(self) -> None:
        args, task = self.args, self.task
        self._moved_at: int | None = None  # the optimizer step at which reference and beta last moved
        self._reference: MovingReference | None = None
        self._kl: AdaptiveKL | None = None
        self._replay: ReplayBuffer | None = None
        self._curriculum: Curriculum | None = None
        if args.reference_mode != "static":
            policy = self.accelerator.unwrap_model(self.model)
            ref_model = None if self.ref_model is None else self.accelerator.unwrap_model(self.ref_model)
            frequency = args.reference_update_freq
            self._reference = MovingReference(args.reference_mode, policy, ref_model, args.ema_alpha, frequency)
        if args.kl_target is not None:
            self._kl = AdaptiveKL(args.beta, args.kl_target, args.kl_horizon)
        if args.replay_size:
            if task is None:
                raise ValueError("replay_size needs a task: what is replayed belongs to a row of it")
            if self.tools or self._is_vlm:
                raise ValueError("replay_size does not go with tools or vision-language models")
            seed = args.seed + self.accelerator.process_index
            self._replay = ReplayBuffer(
                args.replay_size, args.replay_max_age, args.replay_alpha, args.replay_beta, seed
            )
        if args.curriculum:
            if task is None or not task.levels:
                raise ValueError("curriculum=True needs a task with levels, and this one has none")
            self._curriculum = Curriculum(
                [json.loads(row) for row in self.train_dataset["row"]],
                task.levels,
                args.curriculum_window,
                args.curriculum_advance,
                args.curriculum_fall_back,
                args.curriculum_review,
                args.seed,
            )

    def _set_up_filling(self) -> None:
        self._policy = MaskedPolicy(self._tokenizer, self.model.config, self.temperature, self.top_p)
        for model in [self.model] if self.ref_model is None else [self.model, self.ref_model]:
            self._policy.add_to(without_adapter(self.accelerator.unwrap_model(model)))

    def _set_up_rollouts(self) -> None:
        why_trl = None if self.args.rollout == "trl" else why_not_in(self)
        if why_trl is not None:
            self.accelerator.print(f"rollouts are TRL's: {why_trl}")
        self._rolls_out = self.args.rollout != "trl" and why_trl is None
        if self.args.share_prompts:
            self._share_prompts()

    def _share_prompts(self) -> None:
        self._shared = SharedPrompts()
        models = [self.model] if self.ref_model is None else [self.model, self.ref_model]
        for model in map(self.accelerator.unwrap_model, models):
            reason = self._shared.add_to(without_adapter(model))
            if reason is not None:
                self.accelerator.print(f"prompts are not shared in scoring: {reason}")
                self._shared = None
                return

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    @property
    def _group_size(self) -> int:
        return self.num_generations if self.model.training else self.num_generations_eval

    # ---- 1. around a rollout

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        is_training = self.model.training
        if is_training:
            self._move_controllers()
            if self._curriculum is not None:
                chosen = [self._curriculum.select(example["index"], self.state.global_step) for example in inputs]
                inputs = [self.train_dataset[index] for index in chosen]
        self._inputs = inputs
        try:
            output = super()._generate_and_score_completions(inputs)
        finally:
            masks, self._masks = self._masks, None
            support, self._support = self._support, None
        if support is not None:
            output["support"] = support
        if masks is not None:
            output["mask_numbers"] = widened(masks, output["completion_ids"].shape[1])
            self._log_constraint(output)
        if self._rewards is not None or self.args.advantage_estimator != "grpo" or self.args.advantage_clip:
            self._replace_advantages(output)
        if is_training and self._curriculum is not None:
            self._metrics["train"]["curriculum/level"].append(float(self._curriculum.level))
            levels = gather_object([str(json.loads(example["row"]).get("level")) for example in inputs])
            self._curriculum.observe(levels, self._column("success").tolist())
        if is_training and self._replay is not None:
            self._replay_groups(output)
        return output

    def _move_controllers(self) -> None:
        """Once an iteration, before its rollout: the reference follows the policy, beta follows the KL divergence."""
        if self._moved_at is not None and self._moved_at != self.state.global_step:
            if self._reference is not None:
                self._reference.update()
            if self._kl is not None:
                self.beta = self._kl.update(self.args.generation_batch_size)
                self._metrics["train"]["beta"].append(self.beta)
        self._moved_at = self.state.global_step

    # ---- 2. sampling, under a constraint or not

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        model = self.accelerator.unwrap_model(self.model_wrapped)
        if self._policy is not None:
            with profiling_context(self, "fill"), self.accelerator.autocast():
                fills = self._policy.fill(model, prompt_ids)
            self._support = fills.support_B_T_V
            return fills.ids, None
        constrained: dict[str, Any] = {}
        if self._constraint is not None:
            constrained = {
                "constraint": self._constraint,
                "rows": [json.loads(example["row"]) if "row" in example else example for example in self._inputs],
                "table": self._tables.start(self._mode, model.get_output_embeddings().weight.shape[0]),
            }
        logps = None
        if self._rolls_out:
            completion_ids, masks = self._roll_out(prompt_ids, constrained)
        elif not constrained:
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        elif self.use_vllm:
            completion_ids, logps = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            masks = [self._mask_numbers(*pair) for pair in zip(constrained["rows"], completion_ids, strict=True)]
        else:
            processor = ConstraintProcessor(**constrained)
            with logits_processor_in(model, processor):
                completion_ids, _ = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            masks = [numbers[: len(ids)] for numbers, ids in zip(processor.masks, completion_ids, strict=True)]
        if constrained:
            self._masks = padded(masks)
        return completion_ids, logps

    def _mask_numbers(self, row: dict[str, Any], ids: list[int]) -> list[int]:
        """The numbers of the masks that a completion was written under, by replaying it."""
        assert self._constraint is not None
        return [self._tables[self._mode].number_of(mask) for mask in replay(self._constraint, row, ids)]

    def _roll_out(self, prompt_ids: Any, constrained: dict[str, Any]) -> tuple[list[list[int]], list[list[int]]]:
        checkpointing = self.args.gradient_checkpointing_kwargs
        with (
            profiling_context(self, "rollout"),
            unwrap_model_for_generation(
                self.model_wrapped, self.accelerator, gradient_checkpointing_kwargs=checkpointing
            ) as model,
            self.accelerator.autocast(),
        ):
            if self._decoder is None:
                self._decoder = Decoder(model)
            done = rollout(
                model,
                prompt_ids,
                decoder=self._decoder,
                max_new_tokens=self.max_completion_length,
                eos_token_ids=self.eos_token_ids,
                temperature=self.temperature,
                **constrained,
            )
        return done.completion_ids, done.masks

    # ---- 3. rewards and advantages

    def _generate(self, prompts: list[Any]) -> Any:
        generated = super()._generate(prompts)
        if self._policy is not None:
            generated[3][:] = [self._policy.text_of(ids) for ids in generated[1]]
            self._metrics[self._mode]["completions/clipped_ratio"][-1] = 0.0  # for want of an end TRL thinks them cut
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

    def _replace_advantages(self, output: dict[str, Any]) -> None:
        """Advantages of whole groups, from rewards gathered over all processes; this process keeps its slice."""
        args, size, metrics = self.args, self._group_size, self._metrics[self._mode]
        totals_N = (self._rewards_N_F * self.reward_weights.to(self._rewards_N_F.device)).nansum(1)
        totals_N[torch.isnan(self._rewards_N_F).all(1)] = torch.nan
        totals_P_G = totals_N.view(-1, size)
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
        if args.advantage_estimator == "grpo" and args.advantage_clip is None:
            return
        local = len(output["advantages"])
        first = self.accelerator.process_index * local
        output["advantages"] = advantages_N[first : first + local].to(output["advantages"].dtype)
        logged = self._logs["advantages"]
        for _ in range(min(len(logged), len(advantages_N))):
            logged.pop()
        logged.extend(advantages_N.tolist())

    def latest_samples(self) -> list[tuple[dict[str, Any], str, Any]]:
        """Row, completion and outcome of the last rollout of this process, for people to look at."""
        if self._rewards is None:
            return []
        rows = [json.loads(example["row"]) for example in self._inputs]
        return list(zip(rows, self._texts, self._rewards.outcomes, strict=True))

    # ---- 4. and 5. scoring under the masks that were sampled under

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
        with self._shared.open(logits_to_keep) if self._shared is not None else nullcontext():
            if self._masks is None and self._support is None:
                scored = score(model, input_ids, attention_mask, logits_to_keep, batch_size=batch_size, **kwargs)
                self._logps = scored[0].detach()
                return scored
            batch_size = batch_size or len(input_ids)
            logps, entropies = [], []
            for start in range(0, len(input_ids), batch_size):
                rows = slice(start, start + batch_size)
                with self._drawn_from(rows, logits_to_keep):
                    scored = score(model, input_ids[rows], attention_mask[rows], logits_to_keep, **kwargs)
                logps.append(scored[0])
                entropies.append(scored[1])
        self._logps = torch.cat(logps).detach()
        return torch.cat(logps), torch.cat(entropies) if kwargs.get("compute_entropy") else None, None

    def _drawn_from(self, rows: slice, length: int) -> Any:
        """While open, these rows of a rollout are scored under what they were drawn from."""
        if self._policy is not None:
            assert self._support is not None
            return self._policy.support(self._support[rows])
        assert self._masks is not None
        return self._head.masks(widened(self._masks, length)[rows], self._tables[self._mode])

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        metrics = self._metrics[self._mode]
        self._masks, self._support = inputs.get("mask_numbers"), inputs.get("support")
        measuring = nullcontext() if self._masks is None else self._head.measuring()
        try:
            with measuring:
                loss = super()._compute_loss(model, inputs)
        finally:
            is_constrained = self._masks is not None
            self._masks = self._support = None
        if is_constrained:
            mass = torch.tensor(self._head.allowed_mass, device=loss.device)
            metrics["constraint/allowed_mass"].append(self.accelerator.gather(mass).mean().item())
        if self._kl is not None and self.model.training:
            self._kl.observe(metrics["kl"][-1])
        if self.task is not None:
            self._log_parts_of_loss(inputs)
        return loss

    def _log_parts_of_loss(self, inputs: dict[str, Any]) -> None:
        """Means over tokens of the policy gradient's loss before clipping and of log-probs; the KL penalty."""
        mask_B_T, advantages_B, metrics = inputs["completion_mask"], inputs["advantages"], self._metrics[self._mode]
        ratios_B_T = (self._logps - inputs.get("old_per_token_logps", self._logps)).exp()
        sums = [-(ratios_B_T * advantages_B[:, None] * mask_B_T).sum(), (self._logps * mask_B_T).sum(), mask_B_T.sum()]
        sums += [advantages_B.sum(), torch.tensor(len(advantages_B), device=mask_B_T.device)]
        pg, logp, tokens, advantage, rows = self.accelerator.reduce(torch.stack([x.float() for x in sums])).tolist()
        metrics["pg_loss"].append(pg / max(tokens, 1))
        metrics["logp_mean"].append(logp / max(tokens, 1))
        metrics["advantage_mean"].append(advantage / rows)
        if self.beta:
            metrics["kl_penalty"].append(self.beta * metrics["kl"][-1])

    def _log_constraint(self, output: dict[str, Any]) -> None:
        numbers = output["mask_numbers"][output["completion_mask"].bool().cpu()].numpy()
        counts = self._tables[self._mode].counts(numbers[numbers != FREE])
        sums = torch.tensor([counts.sum(), (counts == 1).sum(), len(counts)], dtype=torch.float32)
        allowed, forced, total = gather(sums.to(self.accelerator.device)).view(-1, 3).sum(0).tolist()
        if total:
            self._metrics[self._mode]["constraint/allowed_tokens"].append(allowed / total)
            self._metrics[self._mode]["constraint/forced_fraction"].append(forced / total)

    # ---- replay

    @torch.no_grad()
    def _replay_groups(self, output: dict[str, Any]) -> None:
        """Groups without signal give way to stored ones; groups with signal are stored."""
        assert self._replay is not None
        step, size = self.state.global_step, self.num_generations
        groups = len(output["advantages"]) // size
        first = self.accelerator.process_index * groups
        is_empty = self._without_signal_P[first : first + groups].tolist()
        empty = [group for group in range(groups) if is_empty[group]]
        self._replay.drop_older(step)
        drawn = self._replay.sample(min(len(empty), int(self.args.replay_fraction * groups)))
        chosen = [(group, stored, weight) for group, (stored, weight) in zip(empty, drawn, strict=False)]
        if "old_per_token_logps" not in output:
            # TRL leaves them out where they equal the current ones, which those of a stored group do not.
            output["old_per_token_logps"] = self._score(output, of_reference=False)
        rows = [example["row"] for example in self._inputs]
        for group in groups_of(output, rows, [g for g in range(groups) if not is_empty[g]], size, step):
            self._replay.add(group)
        if chosen:
            replaced = put_groups(output, chosen, size, self._tokenizer.pad_token_id)
            if self._constraint is not None:
                self._rebuild_masks(output, replaced, [json.loads(s.row) for _, s, _ in chosen for _ in range(size)])
            if "ref_per_token_logps" in output:
                part = {
                    key: value[replaced]
                    for key, value in output.items()
                    if isinstance(value, torch.Tensor) and value.ndim == 2
                }
                output["ref_per_token_logps"][replaced] = self._score(part, of_reference=True)
        output["num_items_in_batch"] = self.accelerator.gather(output["completion_mask"].sum()).sum()
        ages = [float(step - stored.step) for _, stored, _ in chosen]
        sums = torch.tensor([len(ages), sum(ages), len(self._replay)], device=self.accelerator.device)
        replaced_groups, age, stored_groups = gather(sums.float()).view(-1, 3).sum(0).tolist()
        self._metrics["train"]["replay/size"].append(stored_groups)
        self._metrics["train"]["replay/replaced_groups"].append(replaced_groups)
        if replaced_groups:
            self._metrics["train"]["replay/age"].append(age / replaced_groups)

    def _rebuild_masks(self, output: dict[str, Any], replaced: list[int], rows: list[dict[str, Any]]) -> None:
        for i, row in zip(replaced, rows, strict=True):
            ids = output["completion_ids"][i][output["completion_mask"][i].bool()].tolist()
            numbers = torch.tensor(self._mask_numbers(row, ids), dtype=output["mask_numbers"].dtype)
            output["mask_numbers"][i, : len(ids)] = numbers

    def _score(self, output: dict[str, Any], of_reference: bool) -> torch.Tensor:
        """Log-probs of a rollout's completions under the policy or the reference as they are now."""
        model, adapter = self.model, nullcontext()
        if of_reference and self.ref_model is not None:
            model = self.ref_model
        elif of_reference:
            policy = self.accelerator.unwrap_model(self.model)
            adapter = use_adapter(policy, "ref" if "ref" in policy.peft_config else None)
        self._masks = output.get("mask_numbers")
        try:
            with adapter:
                return self._get_per_token_logps_and_entropies(
                    model,
                    torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1),
                    torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1),
                    output["completion_ids"].shape[1],
                    batch_size=self.args.per_device_train_batch_size,
                )[0]
        finally:
            self._masks = None

    # ---- checkpoints

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """TRL calls this at every checkpoint, before it may push; with a task the card is ours."""
        if self.pictures is None or not self.is_world_process_zero():
            return super().create_model_card(*args, **kwargs)
        assert self.task is not None
        os.makedirs(self.args.output_dir, exist_ok=True)
        self.pictures.start_page(SECONDS_WHILE_RUNNING)
        try:
            write_card(self.args.output_dir, self.task, getattr(self, "hub_model_id", None), pictures=self.pictures)
        except Exception as error:  # noqa: BLE001 - whatever ails a card, the checkpoint is written
            self.accelerator.print(f"the model card could not be written ({type(error).__name__}: {error})")

    def _parts(self) -> dict[str, Any]:
        parts: dict[str, Any] = {
            "reference": self._reference,
            "kl": self._kl,
            "replay": self._replay,
            "curriculum": self._curriculum,
            "tables": self._tables,
            "rewards": self._rewards.executor if self._rewards is not None else None,
        }
        if self._rewards is not None:
            parts |= {f"judge {name}": judge for name, judge in self._rewards.frozen_judges.items()}
        return {name: part for name, part in parts.items() if part is not None}

    def _state_dict(self) -> dict[str, Any]:
        return super()._state_dict() | {"moved_at": self._moved_at}

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        super()._load_state_dict(state)
        self._moved_at = state["moved_at"]
        if self._kl is not None:
            self.beta = self._kl.beta
        for batch in self._buffered_inputs or []:
            if "mask_numbers" in batch:
                batch["mask_numbers"] = batch["mask_numbers"].cpu()
