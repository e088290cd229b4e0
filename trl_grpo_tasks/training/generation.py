"""Generation: completions, and a record of the distribution they were sampled from.

A completion is sampled by one of four generators: our rollout engine, TRL's generation with a logits processor, vLLM
with a logits processor, or a masked language model that fills gaps. Each returns the completions, their log-probs at
sampling time, and the masks they were sampled under. A mask is the set of tokens that could be sampled at a position:
what the constraint allows, and of that what the sampling filters (top_k, top_p, min_p) keep. Masks are stored once
each in a table, and every token refers to its mask by number.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from trl import is_conversational
from trl.extras.profiling import profiling_context
from trl.models import unwrap_model_for_generation

from ..constraints.base import Constraint, pack_ids
from ..constraints.budget import within
from ..constraints.filters import NEUTRAL, SamplingFilters
from ..constraints.rebuilt import replay_all
from ..constraints.recording import RecordingProcessor, generating_with
from ..constraints.sharding import output_size
from ..constraints.table import MaskTable, MaskTables, pad_mask_numbers
from ..constraints.turns import TurnsConstraint
from ..constraints.vocabulary import check_outputs
from ..models.loading import end_of_answer
from ..models.masked_policy import MaskedPolicy
from ..rewards.classifier import text_of
from ..rewards.environment import TurnsTask, check_length
from ..rollout import Decoder, rollout, unsupported_reason_in
from ..rollout.gathered import GatheredCopy, reason_of_any
from ..rollout.support import unsupported_length, without_adapter
from ..serving.generation import VLLMRequests
from .exact_sampling import inexact_option, inexact_sampling, refuse_inexact
from .policy import plain_models


class Generated(NamedTuple):
    """Completions of a batch of prompts, with the numbers of their masks and their log-probs at sampling time."""

    completion_ids: list[list[int]]
    masks: list[list[int]]
    logps: list[list[float]] | None


class Generation:
    """Samples the completions of a trainer. `constraint` replaces the task's own; either is used when the option
    `constrain` is set. `engine_key` names vLLM's engine, where there is one."""

    def __init__(self, trainer: Any, constraint: Constraint | None, is_masked: bool, engine_key: Any):
        self._trainer, self._args = trainer, trainer.args
        self.filters: SamplingFilters = trainer.args.sampling_filters
        self.tables = MaskTables()  # of the latest rollouts, in training and in evaluation
        self._is_exact = True  # whether log-probs are those of the distribution that is sampled from
        self._check_sampling(is_masked)
        self.constraint = self._ready_constraint(constraint) if self._args.samples_under_constraint else None
        self.vllm: VLLMRequests | None = None
        self.masked_policy: MaskedPolicy | None = None
        self.uses_engine = False
        self.gathered: GatheredCopy | None = None  # what our rollouts generate from if weights are sharded
        self.decoder: Decoder | None = None
        self._has_printed_reason = False
        if trainer.use_vllm and self.samples_under_masks:
            self.vllm = VLLMRequests(trainer.vllm_generation, engine_key, self.filters.top_k, self.output_size())
            self.vllm.sample_under(self.constraint, trainer._tokenizer, trainer.task if constraint is None else None)
        if is_masked:
            tokenizer, config = trainer._tokenizer, trainer.model.config
            self.masked_policy = MaskedPolicy(tokenizer, config, trainer.temperature, self.filters)
            for plain in plain_models(trainer):
                self.masked_policy.add_to(plain)
        elif not trainer.use_vllm:
            self._set_up_rollouts()

    @property
    def samples_under_masks(self) -> bool:
        return self.constraint is not None or bool(self.filters)

    @property
    def _policy(self) -> Any:
        return self._trainer.accelerator.unwrap_model(self._trainer.model_wrapped)

    def output_size(self) -> int:
        """Number of outputs of the model, which is often larger than the tokenizer's vocabulary."""
        return output_size(self._policy)

    def _check_sampling(self, is_masked: bool) -> None:
        """Refuse what only the trainer can see: tools, and options of the model's own generation_config. Print a hint
        where TRL's generation samples from another distribution than its log-probs are of, and nothing forbids it."""
        trainer, args = self._trainer, self._args
        found = inexact_sampling(args)
        config = getattr(without_adapter(trainer.accelerator.unwrap_model(trainer.model)), "generation_config", None)
        if config is not None and not trainer.use_vllm and not trainer._is_vlm:  # TRL suppresses its image token
            explicit = {name: value for name, value in trainer.generation_kwargs.items() if value is not None}
            found = found or inexact_option(config.to_dict() | explicit, "the model's generation_config")
        promise = "a masked language model" if is_masked else str(self.filters) if trainer.task is not None else ""
        refuse_inexact(found, args.promise_of_exactness or promise)
        if found:
            self._is_exact, self.filters = False, SamplingFilters()  # TRL's generation applies its filters itself
            trainer.accelerator.print(
                f"hint: {found}: completions are sampled from another distribution than their log-probs are of, as in "
                "TRL, so that the policy gradient is biased; temperature, top_k, top_p and min_p alone are exact"
            )
        correction = "importance_sampling_correction" if args.importance_sampling_correction else ""
        asked = "constrain=True" if args.constrain else str(self.filters) or correction
        asked = asked if args.repair_turns == 1 else f"repair_turns={args.repair_turns}"
        if asked and (
            trainer.tools or trainer.rollout_func is not None or trainer._is_vlm or trainer.aux_loss_enabled
        ):
            raise ValueError(
                f"{asked} does not work with tools, rollout_func, vision-language models or a router loss "
                "(for the last, set router_aux_loss_coef=0)"
            )

    def _ready_constraint(self, constraint: Constraint | None) -> Constraint:
        """The constraint to sample under: the one given, or the task's. ValueError where there is none."""
        trainer, task, tokenizer = self._trainer, self._trainer.task, self._trainer._tokenizer
        if constraint is None and task is not None:
            constraint = task.constraint(tokenizer)
        if constraint is None:
            reason = f"task {task.name!r} has none with these options" if task else "none was given"
            raise ValueError(f"constrain=True needs a constraint, but {reason}")
        if isinstance(task, TurnsTask):
            if not isinstance(constraint, TurnsConstraint):
                constraint = task.turns_under(tokenizer, constraint)
            rows = [json.loads(example["row"]) for example in trainer.train_dataset]
            check_length(constraint, rows, trainer.max_completion_length)
        check_outputs(tokenizer, self.output_size())
        end = end_of_answer(tokenizer) if is_conversational(next(iter(trainer.train_dataset))) else None
        if end not in (None, tokenizer.eos_token):
            trainer.accelerator.print(
                f"hint: the chat template ends an answer with {end!r}, but constrained text ends with the tokenizer's "
                f"eos_token, {tokenizer.eos_token!r}; set tokenizer.eos_token = {end!r}"
            )
        asked = (json.loads(each["row"]) if "row" in each else each for each in trainer.train_dataset)
        return within(constraint, trainer.max_completion_length, asked)

    def _set_up_rollouts(self) -> None:
        trainer, accelerator = self._trainer, self._trainer.accelerator
        if self.filters:  # our processor applies them and records what they keep; TRL's generation must not
            for name, neutral in (NEUTRAL | {"min_p": None}).items():  # 0.0 would sort the vocabulary for nothing
                setattr(trainer.generation_config, name, neutral)
                trainer.generation_kwargs[name] = neutral
        reason = None if self._args.rollout == "trl" else unsupported_reason_in(trainer)
        if reason is not None:
            accelerator.print(f"TRL generates the completions, because {reason}")
        self.uses_engine = self._args.rollout != "trl" and reason is None
        if self.uses_engine and trainer.is_sharded:
            precision = accelerator.state.fsdp_plugin.mixed_precision_policy if trainer.is_fsdp_enabled else None
            dtype = None if precision is None else precision.param_dtype
            self.gathered = GatheredCopy(plain_models(trainer)[0], dtype, accelerator.device)

    @contextmanager
    def vllm_options(self, apply: bool) -> Iterator[None]:
        """With `importance_sampling_correction`, make TRL treat rollouts as vLLM's (or not) while this is open: TRL
        corrects for the difference between sampling and training log-probs only in vLLM's rollouts."""
        before = self._trainer.use_vllm
        if self._args.importance_sampling_correction:
            self._trainer.use_vllm = apply or self._args.use_vllm
        try:
            yield
        finally:
            self._trainer.use_vllm = before

    @contextmanager
    def policy_for_evaluation(self) -> Iterator[Any]:
        """The policy without wrappers. If its weights are sharded and a whole copy fits, the copy, which has weights
        within this context. All processes must call this."""
        trainer, gathered = self._trainer, self.gathered
        if gathered is None or reason_of_any(gathered.unsupported_memory(1, trainer.max_completion_length)):
            yield trainer.accelerator.unwrap_model(trainer.model)
            return
        with gathered.loaded() as model:
            yield model

    # ---- generators

    def sample(self, prompt_ids: Any, generate: Callable[[], Any]) -> tuple[Any, Any]:
        """Completions and their log-probs at sampling time; the masks they were sampled under go into the record.
        `generate` is TRL's own generation."""
        trainer, record = self._trainer, self._trainer.latest_rollout
        with self.vllm_options(apply=False):
            is_trls = trainer.tools or trainer.rollout_func is not None
            is_trls = is_trls or self._args.use_transformers_continuous_batching or not self._is_exact
            if is_trls or (trainer.use_vllm and self.vllm is None):
                return generate()
            recording: dict[str, Any] = {}
            if self.samples_under_masks:
                recording["table"] = self.tables.start(record.mode, self.output_size())
            if self.constraint is not None:
                recording |= {"constraint": self.constraint, "rows": record.rows}
            if self.masked_policy is not None:
                generated = self._fill(self.masked_policy, prompt_ids, recording)
            elif self.vllm is not None:
                generated = self._sample_with_vllm(self.vllm, generate, recording)
            elif self.uses_engine and self._can_roll_out(prompt_ids):
                generated = self.roll_out(prompt_ids, recording)
            else:
                generated = self.generate_recorded(generate, recording)
        if self.samples_under_masks:
            record.mask_numbers_B_T = pad_mask_numbers(generated.masks)
        return generated.completion_ids, generated.logps

    def record(self, prompts: list[Any], generated: Any) -> None:
        """Put what TRL's `_generate` returns into the record, with completions as the task reads them."""
        record = self._trainer.latest_rollout
        record.prompt_ids, record.completion_ids, _, completions, record.sampling_logps = generated[:5]
        if self.masked_policy is not None:
            completions[:] = [self.masked_policy.text_of(ids) for ids in record.completion_ids]
            # TRL counts a completion without an end token as cut off; fills have no end token.
            self._trainer._metrics[record.mode]["completions/clipped_ratio"][-1] = 0.0
        record.last_turns = [0] * len(record.completion_ids)
        if isinstance(constraint := self.constraint, TurnsConstraint):
            learns_last = getattr(self._trainer.task, "learns_last_turn_only", False)
            for i, (row, ids) in enumerate(zip(record.rows, record.completion_ids, strict=True)):
                text = constraint.text_of(row, ids)
                completions[i] = text if isinstance(prompts[i], str) else [{"role": "assistant", "content": text}]
                record.last_turns[i] = constraint.turns_of(row, ids)[-1][0] if learns_last else 0
        record.completions = [text_of(completion) for completion in completions]

    def _fill(self, policy: MaskedPolicy, prompt_ids: Any, recording: dict[str, Any]) -> Generated:
        with profiling_context(self._trainer, "fill"), self._trainer.accelerator.autocast():
            fills = policy.fill(self._policy, prompt_ids, **recording)
        return Generated(fills.ids, fills.masks, fills.logps)

    def _can_roll_out(self, prompt_ids: Any) -> bool:
        """Whether our rollouts support these prompts. Otherwise the reason is printed, once per process.

        If weights are sharded, all processes decide alike, because TRL's generation needs all of them.
        """
        trainer, longest = self._trainer, self._trainer.max_completion_length
        reason = unsupported_length(self._policy, prompt_ids, longest)
        if self.gathered is not None:
            longest += max(map(len, prompt_ids))
            reason = reason_of_any(reason or self.gathered.unsupported_memory(trainer.num_generations, longest))
        if reason is not None and not self._has_printed_reason:
            if self.gathered is None or trainer.accelerator.is_main_process:
                print(f"TRL generates the completions of some rollouts, because {reason}", flush=True)
            self._has_printed_reason = True
        return reason is None

    def roll_out(self, prompt_ids: Any, recording: dict[str, Any]) -> Generated:
        """Completions from our rollout engine."""
        trainer, args = self._trainer, self._args
        if self.gathered is None:
            whole_model = unwrap_model_for_generation(
                trainer.model_wrapped,
                trainer.accelerator,
                gradient_checkpointing_kwargs=args.gradient_checkpointing_kwargs,
            )
        else:
            whole_model = self.gathered.loaded()
        with profiling_context(trainer, "rollout"), whole_model as model, trainer.accelerator.autocast():
            if self.decoder is None:
                self.decoder = Decoder(model, head_in_fp32=args.cast_lm_head_to_fp32)
            done = rollout(
                model,
                prompt_ids,
                decoder=self.decoder,
                max_new_tokens=trainer.max_completion_length,
                eos_token_ids=trainer.eos_token_ids,
                temperature=trainer.temperature,
                filters=self.filters,
                batch_size=args.rollout_batch_size,
                **recording,
            )
        return Generated(done.completion_ids, done.masks, done.logps)

    def generate_recorded(self, generate: Callable[[], Any], recording: dict[str, Any]) -> Generated:
        """TRL's completions, recorded by a logits processor."""
        trainer = self._trainer
        recording = {"rows": [{}] * len(trainer.latest_rollout.examples)} | recording
        temperature = trainer.generation_config.temperature
        processor = RecordingProcessor(temperature=temperature, filters=self.filters, **recording)
        with generating_with(self._policy, processor):
            completion_ids, _ = generate()
        completion_ids = processor.ids or completion_ids
        processor.finish(completion_ids)
        if any(len(logps) != max(len(ids), 1) for logps, ids in zip(processor.logps, completion_ids, strict=True)):
            if self.samples_under_masks:
                raise RuntimeError(f"{type(trainer.model).__name__}.generate() ignores logits processors, so it "
                                   "cannot sample under a constraint or filters")  # fmt: skip
            return Generated(completion_ids, processor.masks, None)
        return Generated(completion_ids, processor.masks, processor.logps)

    def _sample_with_vllm(
        self, vllm: VLLMRequests, generate: Callable[[], Any], recording: dict[str, Any]
    ) -> Generated:
        """vLLM's completions. Masks are rebuilt by replay; kept sets of filters are those that vLLM returned."""
        trainer, rows, table = self._trainer, recording.get("rows"), recording["table"]
        sampled = vllm.sample(rows, generate, trainer.group_size)
        if rows is not None and (milliseconds := vllm.mask_milliseconds()) is not None:
            trainer._metrics[trainer.mode]["perf/vllm_mask_ms"].append(milliseconds)
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

    def state_of_masks(self, batches: list[dict[str, Any]]) -> dict[str, Any]:
        """The mask table, if batches of a rollout refer to it."""
        is_needed = any("mask_numbers" in batch for batch in batches)
        return {"masks": self.tables["train"].state_dict()} if is_needed else {}

    def load_masks(self, state: dict[str, Any], batches: list[dict[str, Any]]) -> None:
        if "masks" in state:
            self.tables["train"] = MaskTable.from_state_dict(state["masks"])
        for batch in batches:
            if "mask_numbers" in batch:
                batch["mask_numbers"] = batch["mask_numbers"].cpu()
