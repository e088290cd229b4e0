"""SamplingLayer: completions are scored under exactly what they were drawn from.

- What could have been drawn at a position is a mask over the vocabulary: what a constraint allows, and of that what
  sampling filters (top_k, top_p, min_p) keep. The masks of a rollout are recorded when it is sampled, by our rollouts,
  by a logits processor in TRL's, or by a masked language model; masks of constraints alone can also be rebuilt by
  replaying what vLLM wrote. They travel with the rows as numbers into a table, `mask_numbers`.
- The log-probs that completions were sampled with travel as TRL's `sampling_per_token_logps`, and are compared with
  those that training computes (consistency.py).

While a rollout is sampled and while its rows are scored, `_masks` holds the mask numbers of these rows.
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

from ..constraints.base import Constraint, replay
from ..constraints.grammar import GrammarConstraint
from ..constraints.head import MaskedHead
from ..constraints.sampling import RecordingProcessor, generating_with
from ..constraints.spelling import OneSpelling
from ..constraints.table import FREE, MaskTables, padded, widened
from ..constraints.vocabulary import check_outputs
from ..models.loading import end_of_answer
from ..models.masked_policy import MaskedPolicy, is_masked_lm, ready
from ..models.shared_prompts import SharedPrompts
from ..rollout import Decoder, rollout, unsupported_reason_in
from ..rollout.support import without_adapter
from ..task import Task
from .checkpoint_layer import CheckpointLayer
from .config import TaskGRPOConfig, check_sampling
from .consistency import ConsistencyCheck
from .reference import created, with_adapter


class SamplingLayer(CheckpointLayer):
    """GRPOTrainer with constraints, faster rollouts and masked language models. `constraint` stands in for the task's
    own; either is used when `args.constrain` is set."""

    args: TaskGRPOConfig
    use_vllm: bool

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
        self._scored_logps: torch.Tensor | None = None  # of the last pass that scored completions
        self._consistency = ConsistencyCheck()
        self._filters = args.sampling_filters
        self._policy: MaskedPolicy | None = None
        self._rolls_out = False
        self._decoder: Decoder | None = None
        self._shared: SharedPrompts | None = None
        self._check_sampling()
        self._set_up_constraint(constraint)
        if fills:
            self._set_up_filling()
        else:
            self._set_up_rollouts()

    def _check_sampling(self) -> None:
        """Refuse what the trainer can see only now: options of the model's own generation_config, and tools."""
        config = getattr(without_adapter(self.accelerator.unwrap_model(self.model)), "generation_config", None)
        if config is not None and not self.use_vllm and not self._is_vlm:  # of which TRL suppresses the image token
            explicit = {name: value for name, value in self.generation_kwargs.items() if value is not None}
            check_sampling(config.to_dict() | explicit, "the model's generation_config")
        correction = "importance_sampling_correction" if self.args.importance_sampling_correction else ""
        asked = "constrain=True" if self.args.constrain else str(self._filters) or correction
        if asked and (self.tools or self.rollout_func is not None or self._is_vlm or self.aux_loss_enabled):
            raise ValueError(
                f"{asked} does not go with tools, rollout_func, vision-language models or a router loss "
                "(for the last, set router_aux_loss_coef=0)"
            )

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
        check_outputs(self._tokenizer, self._output_size())
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
        self._policy = MaskedPolicy(self._tokenizer, self.model.config, self.temperature, self._filters)
        for model in self._plain_models():
            self._policy.add_to(model)

    def _set_up_rollouts(self) -> None:
        if self._constraint is not None or self._filters:
            self._head = MaskedHead(self.temperature, self.args.cast_lm_head_to_fp32)
            for model in self._plain_models():
                self._head.add_to(model)
        if self._filters:  # they are applied, and what they keep is recorded, by our processor
            for name, neutral in (("top_k", 0), ("top_p", 1.0), ("min_p", None)):
                setattr(self.generation_config, name, neutral)
                self.generation_kwargs[name] = neutral
        why_trl = None if self.args.rollout == "trl" else unsupported_reason_in(self)
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

    def _output_size(self) -> int:
        """Number of outputs of the model: often more than the tokenizer has tokens."""
        return self.accelerator.unwrap_model(self.model_wrapped).get_output_embeddings().weight.shape[0]

    @contextmanager
    def _drawn_as(self, recorded: dict[str, Any]) -> Iterator[None]:
        """While open, rows are scored under what was recorded when they were drawn, if anything was."""
        self._masks = recorded.get("mask_numbers")
        try:
            yield
        finally:
            self._masks = None

    @contextmanager
    def _vllm_options(self, apply: bool) -> Iterator[None]:
        """While open, TRL does (or does not) treat rollouts as vLLM's: correct for the log-probs they came with."""
        before = self.use_vllm
        if self.args.importance_sampling_correction:
            self.use_vllm = apply or self.args.use_vllm
        try:
            yield
        finally:
            self.use_vllm = before

    # ---- sampling

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self._inputs = inputs
        with self._drawn_as({}), self._vllm_options(apply=True):  # nothing is recorded yet
            output = super()._generate_and_score_completions(inputs)
            if self._masks is not None:
                output["mask_numbers"] = widened(self._masks, output["completion_ids"].shape[1])
        if "mask_numbers" in output:
            self._log_masks(output)
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
        """Completions and the log-probs they were sampled with; the masks they were sampled under go to `_masks`."""
        with self._vllm_options(apply=False):
            generate = functools.partial(super()._generate_single_turn, prompt_ids, *args, **kwargs)
            is_trls = self.tools or self.rollout_func is not None or self.args.use_transformers_continuous_batching
            if is_trls or (self.use_vllm and self._constraint is None):
                return generate()
            masked = self._constraint is not None or bool(self._filters)
            recording: dict[str, Any] = (
                {"table": self._tables.start(self._mode, self._output_size())} if masked else {}
            )
            if self._constraint is not None:
                rows = [json.loads(example["row"]) if "row" in example else example for example in self._inputs]
                recording |= {"constraint": self._constraint, "rows": rows}
            if self._policy is not None:
                completion_ids, masks, logps = self._fill(self._policy, prompt_ids, **recording)
            elif self.use_vllm:
                completion_ids, logps = generate()
                pairs = zip(recording["rows"], completion_ids, strict=True)
                masks = [self._mask_numbers(row, ids) for row, ids in pairs]
            elif self._rolls_out:
                completion_ids, masks, logps = self._roll_out(prompt_ids, recording)
            else:
                completion_ids, masks, logps = self._generate_recorded(generate, recording)
        if masked:
            self._masks = padded(masks)
        return completion_ids, logps

    def _fill(self, policy: MaskedPolicy, prompt_ids: Any, **recording: Any) -> tuple[Any, Any, Any]:
        with profiling_context(self, "fill"), self.accelerator.autocast():
            fills = policy.fill(self.accelerator.unwrap_model(self.model_wrapped), prompt_ids, **recording)
        return fills.ids, fills.masks, fills.logps

    def _roll_out(self, prompt_ids: Any, recording: dict[str, Any]) -> tuple[Any, Any, Any]:
        checkpointing = self.args.gradient_checkpointing_kwargs
        with (
            profiling_context(self, "rollout"),
            unwrap_model_for_generation(
                self.model_wrapped, self.accelerator, gradient_checkpointing_kwargs=checkpointing
            ) as model,
            self.accelerator.autocast(),
        ):
            if self._decoder is None:
                self._decoder = Decoder(model, head_in_fp32=self.args.cast_lm_head_to_fp32)
            done = rollout(
                model,
                prompt_ids,
                decoder=self._decoder,
                max_new_tokens=self.max_completion_length,
                eos_token_ids=self.eos_token_ids,
                temperature=self.temperature,
                filters=self._filters,
                **recording,
            )
        return done.completion_ids, done.masks, done.logps

    def _generate_recorded(
        self, generate: Callable[[], Any], recording: dict[str, Any]
    ) -> tuple[list[list[int]], list[list[int]], list[list[float]] | None]:
        """TRL's completions, with the masks and the log-probs they were sampled with."""
        recording = {"rows": [{}] * len(self._inputs)} | recording
        temperature = self.generation_config.temperature
        processor = RecordingProcessor(temperature=temperature, filters=self._filters, **recording)
        with generating_with(self.accelerator.unwrap_model(self.model_wrapped), processor):
            completion_ids, _ = generate()
        processor.finish(completion_ids)
        if any(len(logps) != len(ids) for logps, ids in zip(processor.logps, completion_ids, strict=True)):
            if self._constraint is not None or self._filters:
                raise RuntimeError(f"{type(self.model).__name__}.generate() ignores logits processors: it cannot be "
                                   "sampled under a constraint or filters")  # fmt: skip
            return completion_ids, processor.masks, None
        return completion_ids, processor.masks, processor.logps

    def _mask_numbers(self, row: dict[str, Any], ids: list[int]) -> list[int]:
        """The numbers of the masks that a completion was written under, by replaying it."""
        assert self._constraint is not None
        return [self._tables[self._mode].number_of(mask) for mask in replay(self._constraint, row, ids)]

    def _log_masks(self, output: dict[str, Any]) -> None:
        numbers = output["mask_numbers"][output["completion_mask"].bool().cpu()].numpy()
        counts = self._tables[self._mode].counts(numbers[numbers != FREE])
        sums = torch.tensor([counts.sum(), (counts == 1).sum(), len(counts)], dtype=torch.float32)
        allowed, forced, total = gather(sums.to(self.accelerator.device)).view(-1, 3).sum(0).tolist()
        if total:
            kind = "sampling" if self._constraint is None else "constraint"
            self._metrics[self._mode][f"{kind}/allowed_tokens"].append(allowed / total)
            self._metrics[self._mode][f"{kind}/forced_fraction"].append(forced / total)

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
            if self._masks is None:
                scored = score(model, input_ids, attention_mask, logits_to_keep, batch_size=batch_size, **kwargs)
                self._scored_logps = scored[0].detach()
                return scored
            batch_size = batch_size or len(input_ids)
            logps, entropies = [], []
            for start in range(0, len(input_ids), batch_size):
                rows = slice(start, start + batch_size)
                masks = widened(self._masks, logits_to_keep)[rows]
                with (self._policy or self._head).masks(masks, self._tables[self._mode]):
                    scored = score(model, input_ids[rows], attention_mask[rows], logits_to_keep, **kwargs)
                logps.append(scored[0])
                entropies.append(scored[1])
        self._scored_logps = torch.cat(logps).detach()
        return torch.cat(logps), torch.cat(entropies) if kwargs.get("compute_entropy") else None, None

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
        is_masked = "mask_numbers" in inputs and self._policy is None
        measuring = self._head.measuring() if is_masked else nullcontext()
        if self.args.loss_tokens == "decisions":
            # TRL leaves tokens where `tool_mask` is 0 out of the loss and its metrics, but attends to them.
            inputs = inputs | {"tool_mask": self._loss_mask(inputs)}
        with self._drawn_as(inputs), self._vllm_options(apply=True), measuring:
            loss = super()._compute_loss(model, inputs)
        if is_masked and self._constraint is not None:
            mass = torch.tensor(self._head.allowed_mass, device=loss.device)
            self._metrics[self._mode]["constraint/allowed_mass"].append(self.accelerator.gather(mass).mean().item())
        # Before anything is learned from a rollout: TRL has scored it for that, or no update came in between.
        is_first = not self.model.training or self._step // self.args.steps_per_generation % self.num_iterations == 0
        if "sampling_per_token_logps" in inputs and is_first:
            scored = inputs.get("old_per_token_logps", self._scored_logps)
            self._consistency.check(self, inputs, scored, self._tables if "mask_numbers" in inputs else None)
        return loss

    # ---- checkpoints

    def _parts(self) -> dict[str, Any]:
        return super()._parts() | {"tables": self._tables}

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        super()._load_state_dict(state)
        for batch in self._buffered_inputs or []:
            if "mask_numbers" in batch:
                batch["mask_numbers"] = batch["mask_numbers"].cpu()
