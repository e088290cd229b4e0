"""GenerationLayer: completions, and a record of the distribution they were sampled from.

A completion is sampled by one of four generators: our rollout engine, TRL's generation with a logits processor, vLLM
with a logits processor, or a masked language model that fills gaps. Each returns the completions, their log-probs at
sampling time, and the masks they were sampled under. A mask is the set of tokens that could be sampled at a position:
what the constraint allows, and of that what the sampling filters (top_k, top_p, min_p) keep. Masks are stored once
each in a table, and every token refers to its mask by number.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from accelerate.utils import is_peft_model
from peft import get_peft_model
from trl import is_conversational
from trl.extras.profiling import profiling_context
from trl.models import unwrap_model_for_generation

from ...constraints.base import Constraint, pack_ids
from ...constraints.filters import NEUTRAL, SamplingFilters
from ...constraints.replayed import replay_all
from ...constraints.sampling import RecordingProcessor, generating_with
from ...constraints.sharding import output_size
from ...constraints.table import MaskTable, MaskTables, pad_mask_numbers
from ...constraints.turns import TurnsConstraint
from ...constraints.vocabulary import check_outputs
from ...models.loading import adapter_dtype, end_of_answer, is_adapter, load_for_training, set_template_variables
from ...models.masked_policy import MaskedPolicy, check_settings, is_masked_lm, prepare_for_trl, save_fill_steps
from ...models.quantised import (
    adapter_weights,
    check_output_head,
    is_quantised_model,
    keep_weights_unpacked,
    restore_adapter,
)
from ...models.tiny import PLAIN_CHAT_TEMPLATE
from ...rewards.judge import text_of
from ...rollout import Decoder, rollout, unsupported_reason_in
from ...rollout.gathered import GatheredCopy, reason_of_any
from ...rollout.support import unsupported_length, without_adapter
from ...serving.generation import VLLMRequests, engine_options
from ...task import Task
from ..control.reference import ADAPTER, copy_trained_adapter
from ..options.config import TaskGRPOConfig
from ..options.sampling import check_temperature, inexact_option, inexact_sampling, refuse_inexact
from ..options.sharded import check_model
from ..record import RolloutRecord
from ..repair import RepairTask, check_length, refuse_turns
from .checkpoint import CheckpointLayer


class Generated(NamedTuple):
    """Completions of a batch of prompts, with the numbers of their masks and their log-probs at sampling time."""

    completion_ids: list[list[int]]
    masks: list[list[int]]
    logps: list[list[float]] | None


class GenerationLayer(CheckpointLayer):
    """GRPOTrainer with constraints, faster rollouts and masked language models. `constraint` replaces the task's own;
    either is used when `args.constrain` is set."""

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
        is_masked = is_masked_lm(model) if task is None else task.policy == "masked"
        is_quantised = is_quantised_model(model) or kwargs.get("quantization_config") is not None
        check_temperature(args)
        check_model(args, is_masked, is_quantised)
        check_settings(args, is_masked)
        # TRL keeps a frozen adapter "ref", which can be updated, only for a model that has an adapter already.
        needs_adapter = peft_config is not None and args.reference_mode != "static"
        if is_masked or needs_adapter or (isinstance(model, str) and is_adapter(model)):
            model = load_for_training(model, args, kwargs.pop("quantization_config", None))
        if is_masked:
            model, peft_config = prepare_for_trl(model, args, peft_config)
        if needs_adapter:
            model, peft_config = get_peft_model(model, peft_config, **adapter_dtype(args)), None
        given = adapter_weights(model)
        with engine_options(
            args.samples_under_constraint or bool(args.sampling_filters), args.vllm_weights_folder
        ) as engine_key:
            super().__init__(model, reward_funcs, args, *more, peft_config=peft_config, **kwargs)
        self._prepare_quantised(given)
        if is_peft_model(self.model) and ADAPTER in self.model.peft_config:
            copy_trained_adapter(self.model)
        if task is not None:
            self._tokenizer.chat_template = self._tokenizer.chat_template or PLAIN_CHAT_TEMPLATE
            set_template_variables(self._tokenizer, args.chat_template_kwargs)
        self.task = task
        self.latest_rollout = RolloutRecord(self._mode)  # the layer above starts one per rollout
        self._filters = args.sampling_filters
        self._tables = MaskTables()  # of the latest rollouts, in training and in evaluation
        self._is_exact = True  # whether log-probs are those of the distribution that is sampled from
        self._check_sampling(is_masked)
        self._constraint = self._ready_constraint(constraint) if args.samples_under_constraint else None
        self._vllm: VLLMRequests | None = None
        if self.use_vllm and self._samples_under_masks:
            self._vllm = VLLMRequests(self.vllm_generation, engine_key, self._filters.top_k, self._output_size())
            self._vllm.sample_under(self._constraint, self._tokenizer, task if constraint is None else None)
        self._policy: MaskedPolicy | None = None
        self._uses_engine = False
        self._gathered: GatheredCopy | None = None  # what our rollouts generate from if weights are sharded
        self._has_printed_reason = False
        self._decoder: Decoder | None = None
        if is_masked:
            self._policy = MaskedPolicy(self._tokenizer, self.model.config, self.temperature, self._filters)
            for plain in self._plain_models():
                self._policy.add_to(plain)
        else:
            self._set_up_rollouts()

    def _prepare_quantised(self, given: dict[str, Any]) -> None:
        """Make quantised weights fit to be trained on; `given` holds the adapter's weights as they were passed."""
        if not is_quantised_model(self.model):
            return
        for plain in self._plain_models():
            check_output_head(plain)
            keep_weights_unpacked(plain)
        if not (self.is_fsdp_enabled or self.is_deepspeed_enabled):  # they need one dtype for all trained weights
            restore_adapter(self.model, given)

    def _check_sampling(self, is_masked: bool) -> None:
        """Refuse what only the trainer can see: tools, and options of the model's own generation_config. Print a hint
        where TRL's generation samples from another distribution than its log-probs are of, and nothing forbids it."""
        found = inexact_sampling(self.args)
        config = getattr(without_adapter(self.accelerator.unwrap_model(self.model)), "generation_config", None)
        if config is not None and not self.use_vllm and not self._is_vlm:  # of which TRL suppresses the image token
            explicit = {name: value for name, value in self.generation_kwargs.items() if value is not None}
            found = found or inexact_option(config.to_dict() | explicit, "the model's generation_config")
        promise = "a masked language model" if is_masked else str(self._filters) if self.task is not None else ""
        refuse_inexact(found, self.args.promise_of_exactness or promise)
        if found:
            self._is_exact, self._filters = False, SamplingFilters()  # TRL's generation applies its filters itself
            self.accelerator.print(
                f"hint: {found}: completions are sampled from another distribution than their log-probs are of, as in "
                "TRL, so that the policy gradient is biased; temperature, top_k, top_p and min_p alone are exact"
            )
        correction = "importance_sampling_correction" if self.args.importance_sampling_correction else ""
        asked = "constrain=True" if self.args.constrain else str(self._filters) or correction
        asked = asked if self.args.repair_turns == 1 else f"repair_turns={self.args.repair_turns}"
        if asked and (self.tools or self.rollout_func is not None or self._is_vlm or self.aux_loss_enabled):
            raise ValueError(
                f"{asked} does not work with tools, rollout_func, vision-language models or a router loss "
                "(for the last, set router_aux_loss_coef=0)"
            )

    def _ready_constraint(self, constraint: Constraint | None) -> Constraint:
        """The constraint to sample under: the one given, or the task's. ValueError where there is none."""
        if constraint is None and self.task is not None:
            constraint = self.task.constraint(self._tokenizer)
        if constraint is None:
            reason = f"task {self.task.name!r} has none with these options" if self.task else "none was given"
            raise ValueError(f"constrain=True needs a constraint, but {reason}")
        if isinstance(self.task, RepairTask):
            if not isinstance(constraint, TurnsConstraint):
                constraint = self.task.turns_under(self._tokenizer, constraint)
            rows = [json.loads(example["row"]) for example in self.train_dataset]
            check_length(constraint, rows, self.max_completion_length)
        check_outputs(self._tokenizer, self._output_size())
        end = end_of_answer(self._tokenizer) if is_conversational(next(iter(self.train_dataset))) else None
        if end not in (None, self._tokenizer.eos_token):
            self.accelerator.print(
                f"hint: the chat template ends an answer with {end!r}, but constrained text ends with the tokenizer's "
                f"eos_token, {self._tokenizer.eos_token!r}; set tokenizer.eos_token = {end!r}"
            )
        return constraint

    def _set_up_rollouts(self) -> None:
        if self.use_vllm:
            return
        if self._filters:  # our processor applies them and records what they keep; TRL's generation must not
            for name, neutral in (NEUTRAL | {"min_p": None}).items():  # 0.0 would sort the vocabulary for nothing
                setattr(self.generation_config, name, neutral)
                self.generation_kwargs[name] = neutral
        reason = None if self.args.rollout == "trl" else unsupported_reason_in(self)
        if reason is not None:
            self._refuse_turns(reason)
            self.accelerator.print(f"TRL generates the completions, because {reason}")
        self._uses_engine = self.args.rollout != "trl" and reason is None
        if self._uses_engine and self._is_sharded:
            policy = self.accelerator.state.fsdp_plugin.mixed_precision_policy if self.is_fsdp_enabled else None
            dtype = None if policy is None else policy.param_dtype
            self._gathered = GatheredCopy(self._plain_models()[0], dtype, self.accelerator.device)

    def _refuse_turns(self, reason: str) -> None:
        """Raise ValueError if completions have several turns, which TRL's generation would end with the first."""
        if self.args.repair_turns > 1:
            refuse_turns(self.args.repair_turns, reason)

    def _plain_models(self) -> list[Any]:
        """The policy, and the reference model where there is one, without wrappers and adapters."""
        models = [self.model] if self.ref_model is None else [self.model, self.ref_model]
        return [without_adapter(self.accelerator.unwrap_model(model)) for model in models]

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    @property
    def _samples_under_masks(self) -> bool:
        return self._constraint is not None or bool(self._filters)

    def _output_size(self) -> int:
        """Number of outputs of the model, which is often larger than the tokenizer's vocabulary."""
        return output_size(self.accelerator.unwrap_model(self.model_wrapped))

    @contextmanager
    def _vllm_options(self, apply: bool) -> Iterator[None]:
        """With `importance_sampling_correction`, make TRL treat rollouts as vLLM's (or not) while this is open: TRL
        corrects for the difference between sampling and training log-probs only in vLLM's rollouts."""
        before = self.use_vllm
        if self.args.importance_sampling_correction:
            self.use_vllm = apply or self.args.use_vllm
        try:
            yield
        finally:
            self.use_vllm = before

    # ---- generators

    def _generate(self, prompts: list[Any]) -> Any:
        generated = super()._generate(prompts)
        record = self.latest_rollout
        record.prompt_ids, record.completion_ids, _, completions, record.sampling_logps = generated[:5]
        if self._policy is not None:
            completions[:] = [self._policy.text_of(ids) for ids in record.completion_ids]
            # TRL counts a completion without an end token as cut off; fills have no end token.
            self._metrics[record.mode]["completions/clipped_ratio"][-1] = 0.0
        record.last_turns = [0] * len(record.completion_ids)
        if isinstance(constraint := self._constraint, TurnsConstraint):
            for i, (row, ids) in enumerate(zip(record.rows, record.completion_ids, strict=True)):
                text = constraint.text_of(row, ids)
                completions[i] = text if isinstance(prompts[i], str) else [{"role": "assistant", "content": text}]
                record.last_turns[i] = constraint.turns_of(row, ids)[-1][0]
        record.completions = [text_of(completion) for completion in completions]
        return generated

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """Completions and their log-probs at sampling time; the masks they were sampled under go into the record."""
        record = self.latest_rollout
        with self._vllm_options(apply=False):
            generate = functools.partial(super()._generate_single_turn, prompt_ids, *args, **kwargs)
            is_trls = self.tools or self.rollout_func is not None or self.args.use_transformers_continuous_batching
            if is_trls or not self._is_exact or (self.use_vllm and self._vllm is None):
                return generate()
            recording: dict[str, Any] = {}
            if self._samples_under_masks:
                recording["table"] = self._tables.start(record.mode, self._output_size())
            if self._constraint is not None:
                recording |= {"constraint": self._constraint, "rows": record.rows}
            if self._policy is not None:
                generated = self._fill(self._policy, prompt_ids, recording)
            elif self._vllm is not None:
                generated = self._sample_with_vllm(self._vllm, generate, recording)
            elif self._uses_engine and self._can_roll_out(prompt_ids):
                generated = self._roll_out(prompt_ids, recording)
            else:
                generated = self._generate_recorded(generate, recording)
        if self._samples_under_masks:
            record.mask_numbers_B_T = pad_mask_numbers(generated.masks)
        return generated.completion_ids, generated.logps

    def _fill(self, policy: MaskedPolicy, prompt_ids: Any, recording: dict[str, Any]) -> Generated:
        with profiling_context(self, "fill"), self.accelerator.autocast():
            fills = policy.fill(self.accelerator.unwrap_model(self.model_wrapped), prompt_ids, **recording)
        return Generated(fills.ids, fills.masks, fills.logps)

    def _can_roll_out(self, prompt_ids: Any) -> bool:
        """Whether our rollouts support these prompts. Otherwise the reason is printed, once per process.

        If weights are sharded, all processes decide alike, because TRL's generation needs all of them.
        """
        model = self.accelerator.unwrap_model(self.model_wrapped)
        reason = unsupported_length(model, prompt_ids, self.max_completion_length)
        if self._gathered is not None:
            longest = max(map(len, prompt_ids)) + self.max_completion_length
            reason = reason_of_any(reason or self._gathered.unsupported_memory(self.num_generations, longest))
        if reason is not None:
            self._refuse_turns(reason)
        if reason is not None and not self._has_printed_reason:
            if self._gathered is None or self.accelerator.is_main_process:
                print(f"TRL generates the completions of some rollouts, because {reason}", flush=True)
            self._has_printed_reason = True
        return reason is None

    @contextmanager
    def policy_for_evaluation(self) -> Iterator[Any]:
        """The policy without wrappers. If its weights are sharded and a whole copy fits, the copy, which has weights
        within this context. All processes must call this."""
        gathered = self._gathered
        if gathered is None or reason_of_any(gathered.unsupported_memory(1, self.max_completion_length)):
            yield self.accelerator.unwrap_model(self.model)
            return
        with gathered.loaded() as model:
            yield model

    def _roll_out(self, prompt_ids: Any, recording: dict[str, Any]) -> Generated:
        """Completions from our rollout engine."""
        checkpointing = self.args.gradient_checkpointing_kwargs
        if self._gathered is None:
            whole_model = unwrap_model_for_generation(
                self.model_wrapped, self.accelerator, gradient_checkpointing_kwargs=checkpointing
            )
        else:
            whole_model = self._gathered.loaded()
        with profiling_context(self, "rollout"), whole_model as model, self.accelerator.autocast():
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
                batch_size=self.args.rollout_batch_size,
                **recording,
            )
        return Generated(done.completion_ids, done.masks, done.logps)

    def _generate_recorded(self, generate: Callable[[], Any], recording: dict[str, Any]) -> Generated:
        """TRL's completions, recorded by a logits processor."""
        recording = {"rows": [{}] * len(self.latest_rollout.examples)} | recording
        temperature = self.generation_config.temperature
        processor = RecordingProcessor(temperature=temperature, filters=self._filters, **recording)
        with generating_with(self.accelerator.unwrap_model(self.model_wrapped), processor):
            completion_ids, _ = generate()
        processor.finish(completion_ids)
        if any(len(logps) != len(ids) for logps, ids in zip(processor.logps, completion_ids, strict=True)):
            if self._samples_under_masks:
                raise RuntimeError(f"{type(self.model).__name__}.generate() ignores logits processors, so it cannot "
                                   "sample under a constraint or filters")  # fmt: skip
            return Generated(completion_ids, processor.masks, None)
        return Generated(completion_ids, processor.masks, processor.logps)

    def _sample_with_vllm(
        self, vllm: VLLMRequests, generate: Callable[[], Any], recording: dict[str, Any]
    ) -> Generated:
        """vLLM's completions. Masks are rebuilt by replay; kept sets of filters are those that vLLM returned."""
        rows, table = recording.get("rows"), recording["table"]
        group = self.num_generations if self.model.training else self.num_generations_eval
        sampled = vllm.sample(rows, generate, group)
        if rows is not None and (milliseconds := vllm.mask_milliseconds()) is not None:
            self._metrics[self._mode]["perf/vllm_mask_ms"].append(milliseconds)
        masks = []
        if rows is not None:
            try:
                masks = replay_all(recording["constraint"], rows, sampled.completion_ids, table)
            except ValueError as error:
                raise RuntimeError(f"vLLM did not sample under the constraint: {error}") from error
        if sampled.kept is not None:
            masks = [[table.number_of(pack_ids(ids, table.vocab_size)) for ids in row] for row in sampled.kept]
        return Generated(sampled.completion_ids, masks, sampled.logps)

    # ---- checkpoints

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        if self._policy is not None and self.args.should_save:
            save_fill_steps(self.accelerator.unwrap_model(self.model), output_dir or self.args.output_dir)

    def _state_dict(self) -> dict[str, Any]:
        """The mask table is saved only with a rollout that refers to it."""
        state = super()._state_dict()
        if any("mask_numbers" in batch for batch in state["buffered_inputs"] or []):
            state["masks"] = self._tables["train"].state_dict()
        return state

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        super()._load_state_dict(state)
        if "masks" in state:
            self._tables["train"] = MaskTable.from_state_dict(state["masks"])
        for batch in self._buffered_inputs or []:
            if "mask_numbers" in batch:
                batch["mask_numbers"] = batch["mask_numbers"].cpu()
