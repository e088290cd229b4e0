"""ExactGRPOTrainer: completions are scored under exactly what they were drawn from.

- With a constraint, what may come next is a mask over the vocabulary. The masks of a rollout are recorded when it is
  sampled, by our rollouts or by a logits processor in TRL's; or rebuilt by replaying what was written (by vLLM, or
  from a replay buffer). They travel with its rows as numbers into a table, `mask_numbers`.
- A masked language model fills gaps instead; with top_p, what could have been drawn travels as `support`.

While a rollout is sampled and while its rows are scored, `_masks` and `_support` hold what belongs to these rows.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils import gather
from trl import is_conversational
from trl.extras.profiling import profiling_context
from trl.models import unwrap_model_for_generation

from .config import TaskGRPOConfig
from .constraints.base import Constraint, replay
from .constraints.grammar import GrammarConstraint
from .constraints.sampling import ConstraintProcessor, logits_processor_in
from .constraints.scoring import MaskedHead
from .constraints.spelling import OneSpelling
from .constraints.table import FREE, MaskTables, padded, widened
from .masked import MaskedPolicy, is_masked_lm, ready
from .models import end_of_answer
from .reference import created, with_adapter
from .resume import ResumableGRPOTrainer
from .rollout import Decoder, rollout, why_not_in
from .rollout.support import without_adapter
from .shared_prompts import SharedPrompts
from .task import Task


class ExactGRPOTrainer(ResumableGRPOTrainer):
    """GRPOTrainer with constraints, faster rollouts and masked language models. `constraint` stands in for the task's
    own; either is used when `args.constrain` is set."""

    args: TaskGRPOConfig

    def __init__(
        self,
        model: Any,
        reward_funcs: Any,
        args: TaskGRPOConfig,
        *more: Any,
        task: Task | None,
        constraint: Constraint | None = None,
        peft_config: Any = None,
        **kwargs: Any,
    ):
        fills = is_masked_lm(model) if task is None else task.policy == "masked"
        if fills:
            model = created(model, args, kwargs.pop("quantization_config", None))
            model, peft_config = ready(model, args, peft_config)
        if peft_config is not None and args.reference_mode != "static":
            model = with_adapter(model, peft_config, args, kwargs.pop("quantization_config", None))
            peft_config = None
        super().__init__(model, reward_funcs, args, *more, peft_config=peft_config, **kwargs)
        self.task = task
        self._inputs: list[dict[str, Any]] = []  # the examples of the rollout under way
        self._masks: torch.Tensor | None = None
        self._support: torch.Tensor | None = None
        self._policy: MaskedPolicy | None = None
        self._rolls_out = False
        self._decoder: Decoder | None = None
        self._shared: SharedPrompts | None = None
        self._set_up_constraint(constraint)
        if fills:
            self._set_up_filling()
        else:
            self._set_up_rollouts()

    def _set_up_constraint(self, constraint: Constraint | None) -> None:
        self._constraint: Constraint | None = None
        self._tables = MaskTables()  # of the rollouts in use, in training and in evaluation
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
        end = end_of_answer(self._tokenizer) if is_conversational(next(iter(self.train_dataset))) else None
        if end not in (None, self._tokenizer.eos_token):
            self.accelerator.print(
                f"hint: the chat template ends an answer with {end!r}, but constrained text ends with the tokenizer's "
                f"eos_token, {self._tokenizer.eos_token!r}; set tokenizer.eos_token = {end!r}"
            )
        self._constraint = constraint
        self._head = MaskedHead(self.temperature, self.args.cast_lm_head_to_fp32)
        for model in self._plain_models():
            self._head.add_to(model)

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

    def _set_up_filling(self) -> None:
        self._policy = MaskedPolicy(self._tokenizer, self.model.config, self.temperature, self.top_p)
        for model in self._plain_models():
            self._policy.add_to(model)

    def _set_up_rollouts(self) -> None:
        why_trl = None if self.args.rollout == "trl" else why_not_in(self)
        if why_trl is not None:
            self.accelerator.print(f"rollouts are TRL's: {why_trl}")
        self._rolls_out = self.args.rollout != "trl" and why_trl is None
        if self.args.share_prompts:
            self._share_prompts()

    def _share_prompts(self) -> None:
        self._shared = SharedPrompts()
        for model in self._plain_models():
            reason = self._shared.add_to(model)
            if reason is not None:
                self.accelerator.print(f"prompts are not shared in scoring: {reason}")
                self._shared = None
                return

    def _plain_models(self) -> list[Any]:
        """The policy's model, and the reference's where it has one of its own, as transformers made them."""
        models = [self.model] if self.ref_model is None else [self.model, self.ref_model]
        return [without_adapter(self.accelerator.unwrap_model(model)) for model in models]

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    @contextmanager
    def _drawn_as(self, recorded: dict[str, Any]) -> Iterator[None]:
        """While open, rows are scored under what was recorded when they were drawn, if anything was."""
        self._masks, self._support = recorded.get("mask_numbers"), recorded.get("support")
        try:
            yield
        finally:
            self._masks = self._support = None

    # ---- sampling

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self._inputs = inputs
        with self._drawn_as({}):  # nothing is recorded yet
            output = super()._generate_and_score_completions(inputs)
            if self._support is not None:
                output["support"] = self._support
            if self._masks is not None:
                output["mask_numbers"] = widened(self._masks, output["completion_ids"].shape[1])
        if "mask_numbers" in output:
            self._log_constraint(output)
        if self.args.loss_tokens == "decisions":
            output["num_items_in_batch"] = gather(self._loss_mask(output).sum()).sum()
        return output

    def _generate(self, prompts: list[Any]) -> Any:
        generated = super()._generate(prompts)
        if self._policy is not None:
            generated[3][:] = [self._policy.text_of(ids) for ids in generated[1]]
            self._metrics[self._mode]["completions/clipped_ratio"][-1] = 0.0  # for want of an end TRL thinks them cut
        return generated

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if self._policy is not None:
            return self._fill(self._policy, prompt_ids), None
        generate = functools.partial(super()._generate_single_turn, prompt_ids, *args, **kwargs)
        constrained = {} if self._constraint is None else self._start_constraint(self._constraint)
        if not self._rolls_out and not constrained:
            return generate()
        if self._rolls_out:
            completion_ids, masks, logps = *self._roll_out(prompt_ids, constrained), None
        else:
            completion_ids, masks, logps = self._generate_under(constrained, generate)
        if constrained:
            self._masks = padded(masks)
        return completion_ids, logps

    def _start_constraint(self, constraint: Constraint) -> dict[str, Any]:
        """What sampling under the constraint needs, with a new table for the masks."""
        model = self.accelerator.unwrap_model(self.model_wrapped)
        return {
            "constraint": constraint,
            "rows": [json.loads(example["row"]) if "row" in example else example for example in self._inputs],
            "table": self._tables.start(self._mode, model.get_output_embeddings().weight.shape[0]),
        }

    def _fill(self, policy: MaskedPolicy, prompt_ids: Any) -> list[list[int]]:
        with profiling_context(self, "fill"), self.accelerator.autocast():
            fills = policy.fill(self.accelerator.unwrap_model(self.model_wrapped), prompt_ids)
        self._support = fills.support_B_T_V
        return fills.ids

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

    def _generate_under(self, constrained: dict[str, Any], generate: Callable[[], Any]) -> tuple[Any, Any, Any]:
        """TRL's completions under the constraint, their masks, and log-probs where vLLM wrote them."""
        if self.use_vllm:
            completion_ids, logps = generate()
            pairs = zip(constrained["rows"], completion_ids, strict=True)
            return completion_ids, [self._mask_numbers(row, ids) for row, ids in pairs], logps
        processor = ConstraintProcessor(**constrained)
        with logits_processor_in(self.accelerator.unwrap_model(self.model_wrapped), processor):
            completion_ids, _ = generate()
        pairs = zip(processor.masks, completion_ids, strict=True)
        return completion_ids, [numbers[: len(ids)] for numbers, ids in pairs], None

    def _mask_numbers(self, row: dict[str, Any], ids: list[int]) -> list[int]:
        """The numbers of the masks that a completion was written under, by replaying it."""
        assert self._constraint is not None
        return [self._tables[self._mode].number_of(mask) for mask in replay(self._constraint, row, ids)]

    def _log_constraint(self, output: dict[str, Any]) -> None:
        numbers = output["mask_numbers"][output["completion_mask"].bool().cpu()].numpy()
        counts = self._tables[self._mode].counts(numbers[numbers != FREE])
        sums = torch.tensor([counts.sum(), (counts == 1).sum(), len(counts)], dtype=torch.float32)
        allowed, forced, total = gather(sums.to(self.accelerator.device)).view(-1, 3).sum(0).tolist()
        if total:
            self._metrics[self._mode]["constraint/allowed_tokens"].append(allowed / total)
            self._metrics[self._mode]["constraint/forced_fraction"].append(forced / total)

    # ---- scoring

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
        with nullcontext() if self._shared is None else self._shared.open(logits_to_keep):
            if self._masks is None and self._support is None:
                return score(model, input_ids, attention_mask, logits_to_keep, batch_size=batch_size, **kwargs)
            batch_size = batch_size or len(input_ids)
            logps, entropies = [], []
            for start in range(0, len(input_ids), batch_size):
                rows = slice(start, start + batch_size)
                with self._only_what_could_be_drawn(rows, logits_to_keep):
                    scored = score(model, input_ids[rows], attention_mask[rows], logits_to_keep, **kwargs)
                logps.append(scored[0])
                entropies.append(scored[1])
        return torch.cat(logps), torch.cat(entropies) if kwargs.get("compute_entropy") else None, None

    def _only_what_could_be_drawn(self, rows: slice, length: int) -> Any:
        """While open, forward passes score these rows under what they were drawn from."""
        if self._policy is not None:
            assert self._support is not None
            return self._policy.support(self._support[rows])
        assert self._masks is not None
        return self._head.masks(widened(self._masks, length)[rows], self._tables[self._mode])

    def _decisions(self, mask_numbers_B_T: torch.Tensor) -> torch.Tensor:
        """True where the mask allows more than one token; elsewhere the token was forced."""
        counts = self._tables[self._mode].counts(mask_numbers_B_T.numpy())
        return torch.from_numpy(counts > 1).to(self.accelerator.device)

    def _loss_mask(self, batch: dict[str, Any]) -> torch.Tensor:
        """1 for the tokens that the loss and its metrics are averaged over."""
        if self.args.loss_tokens == "all":
            return batch["completion_mask"]
        return batch["completion_mask"] * self._decisions(batch["mask_numbers"])

    def get_high_entropy_mask(self, entropies: torch.Tensor, mask: torch.Tensor, threshold: float) -> torch.Tensor:
        """The tokens that `top_entropy_quantile` selects. Forced ones are not selected, nor do they move the quantile:
        their entropy is 0, and where they are many the threshold would be 0, which every token reaches."""
        if self._masks is not None:
            mask = mask * self._decisions(self._masks)
        return super().get_high_entropy_mask(entropies, mask, threshold)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        if "mask_numbers" not in inputs:
            with self._drawn_as(inputs):
                return super()._compute_loss(model, inputs)
        if self.args.loss_tokens == "decisions":
            # TRL leaves tokens where `tool_mask` is 0 out of the loss and its metrics, but attends to them.
            inputs = inputs | {"tool_mask": self._loss_mask(inputs)}
        with self._drawn_as(inputs), self._head.measuring():
            loss = super()._compute_loss(model, inputs)
        mass = torch.tensor(self._head.allowed_mass, device=loss.device)
        self._metrics[self._mode]["constraint/allowed_mass"].append(self.accelerator.gather(mass).mean().item())
        return loss

    # ---- checkpoints

    def _parts(self) -> dict[str, Any]:
        return super()._parts() | {"tables": self._tables}

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        super()._load_state_dict(state)
        for batch in self._buffered_inputs or []:
            if "mask_numbers" in batch:
                batch["mask_numbers"] = batch["mask_numbers"].cpu()
