"""Options of TaskGRPOTrainer, beside those of TRL's GRPOConfig. At their defaults the trainer is TRL's."""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields
from typing import Any

import torch
from trl import GRPOConfig

from ..constraints.filters import NAMES as FILTERS
from ..constraints.filters import SamplingFilters
from ..redact import redacted
from ..rewards.repair import check_repair
from ..serving import addresses_in
from ..task import option
from .advantages import ESTIMATORS, check_estimator
from .exact_sampling import check_sampling_options
from .extras import EXTRAS, Extra
from .ranges import check_ranges
from .sharding import check_sharding

# TRL and transformers check their own options only when training starts, which may be after a cold start.
CHOICES = {
    "loss_type": ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"),
    "importance_sampling_level": ("token", "sequence"),
    "scale_rewards": ("group", "batch", "none"),
    "reward_backend": ("process", "ray"),
    "rollout": ("trl", "fast", "auto"),
}


@dataclass
class TaskGRPOConfig(*(extra.Options for extra in EXTRAS), GRPOConfig):  # type: ignore[misc]
    """GRPOConfig with advantages, constraints, rollouts and parallel rewards, and the options of the extras.

    The help text of each field is shown by `train.py --help-all`. Invalid values raise ValueError here, before a model
    is loaded.
    """

    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "component_weights"]

    # Data and rewards of a task
    train_rows: int | None = option(None, "Rows of the task's training split. Default: all.")
    eval_rows: int | None = option(None, "Rows of the task's held-out split. Default: all.")
    component_weights: dict | str | None = option(
        None,
        'Weights of reward components by name, as JSON: {"format": 0.2}. Other components keep the task\'s weights. '
        "'success' and 'valid' are components with weight 0.",
    )
    reward_workers: int | None = option(
        None,
        "Worker processes that score completions, per training process. 0: score in the training process. Default: by "
        "the number of cores.",
    )
    reward_timeout: float = option(30.0, "Seconds that scoring one completion may take; then its worker is replaced.")
    reward_memory_mb: int | None = option(None, "Memory limit of a reward worker in MB.")
    reward_backend: str = option("process", "Where rewards are computed: 'process' (this machine) or 'ray'.")

    # Advantages
    advantage_estimator: str = option(
        "grpo",
        f"How advantages are computed from rewards: {', '.join(ESTIMATORS)}. 'grpo' is TRL's. Or a function of your "
        "own, as my_file.py:my_function, from the rewards of a group to its advantages.",
    )
    pass_k: int | None = option(None, "The k of the estimators 'passk', 'maxk' and 'topk'.")
    advantage_clip: float | None = option(
        None, "Clamp advantages to [-x, x] after normalisation. The clip of the PPO ratio is epsilon."
    )

    # Constraint
    constrain: bool = option(
        False, "Sample under the task's constraint, with exact log-probs, entropies and KL of the constrained policy."
    )

    # Repair
    repair_turns: int = option(
        1,
        "Turns of a completion, from 1 to 4. After a turn that fails, the reason is fed back, and the model answers "
        "again. max_completion_length counts all turns and the feedback.",
    )
    repair_discount: float = option(
        0.9,
        "Factor on the positive parts of the reward for each turn before the last, so that answers which succeed at "
        "once are preferred.",
    )

    # Rollouts
    rollout: str = option(
        "trl",
        "Which engine generates completions: 'trl'; 'fast' (one prefill per prompt, forced tokens without a model "
        "call, CUDA graphs); or 'auto' (fast for supported models, otherwise TRL's, and the reason is printed).",
    )
    rollout_batch_size: int | None = option(
        None,
        "Completions that our rollouts generate at a time, per process, also in evaluations; waiting ones take the "
        "places of finished ones. Default: as many as fit into free memory.",
    )
    vllm_weights_folder: str | None = option(
        None,
        "With vllm_mode=server, send weights through files in this folder, which the server must be able to read, "
        "instead of NCCL: for a server on the same GPU or on a CPU, several servers, or machines that share a folder.",
    )
    importance_sampling_correction: bool = option(
        False,
        "Apply TRL's vllm_importance_sampling_* options to rollouts without vLLM too: tokens are weighted by the "
        "ratio of their probability in training to that in the rollout. Costs one more forward pass per rollout.",
    )
    fill_steps: int | None = option(
        None,
        "Steps in which a masked language model fills the masks of a text: mask i in step i mod fill_steps, given the "
        "fills of earlier steps. Stored with the model. Default: that of the model, or 1.",
    )
    share_prompts: bool = option(
        False,
        "Compute no padding in passes of training, and the prompt of a group once, where that saves at least a fifth "
        "of the tokens. Log-probs are the same up to rounding.",
    )

    # Reference policy
    offload_reference: bool = option(
        False,
        "Keep the reference model in CPU memory, and copy it to the GPU only while it scores a rollout. Results do "
        "not change. No effect with use_peft, because the reference of an adapter is not a model of its own.",
    )
    # Evaluations during training
    per_device_eval_batch_size: int | None = option(
        None, "Completions per batch and process in evaluations. Default: 8 during training, more with best_by."
    )

    def __post_init__(self) -> None:
        check_ranges(vars(self))  # before TRL, which divides by some of them
        self.is_eval_batch_size_given = self.per_device_eval_batch_size is not None
        if self.per_device_eval_batch_size is None:
            self.per_device_eval_batch_size = GRPOConfig.per_device_eval_batch_size
        for extra in EXTRAS:
            extra.complete(self)
        try:
            super().__post_init__()
        except ValueError as error:
            if "divisible by num_generations" in str(error):  # TRL's message names only the product
                raise ValueError(
                    f"{str(error).rstrip('.')}; change num_generations or the batch, which is "
                    "per_device_train_batch_size x gradient_accumulation_steps x processes"
                ) from error
            raise
        check_estimator(self.advantage_estimator, self.pass_k, self.num_generations)
        if self.advantage_estimator != "grpo" and self.multi_objective_aggregation != "sum_then_normalize":
            raise ValueError(
                f"advantage_estimator={self.advantage_estimator!r} uses the weighted sum of the components; "
                f"multi_objective_aggregation={self.multi_objective_aggregation!r} works with 'grpo' only"
            )
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"unknown {name} {getattr(self, name)!r}; choose one of: {', '.join(choices)}")
        if self.offload_reference and self.beta == 0:
            raise ValueError("offload_reference needs beta > 0: with beta=0 there is no reference; leave it out")
        if self.offload_reference and self.sync_ref_model:
            raise ValueError(
                "TRL's sync_ref_model updates a reference on the GPU, so that it cannot be offloaded; use "
                "reference_mode 'ema' or 'periodic' instead"
            )
        for extra in EXTRAS:
            extra.check(self)
        check_sharding(self)
        check_repair(self)
        check_sampling_options(self)
        if self.vllm_weights_folder is not None and not (self.use_vllm and self.vllm_mode == "server"):
            raise ValueError(
                "vllm_weights_folder is for a server; set use_vllm=True and vllm_mode='server', or leave it out"
            )
        addresses = addresses_in(self.vllm_server_base_url) if self.vllm_server_base_url else []
        if len(addresses) > 1 and self.vllm_weights_folder is None:
            raise ValueError(
                "several servers in vllm_server_base_url need vllm_weights_folder, which all of them can read: NCCL "
                "connects the trainer to one server; set the folder, or give one address"
            )

    @classmethod
    def own_options(cls) -> dict[str, list[str]]:
        """The options that this package adds to TRL's: the core's under "", those of extras under their headings."""
        of_extras = {str(extra.Options.__doc__): [field.name for field in fields(extra.Options)] for extra in EXTRAS}
        return {"": list(vars(cls)["__annotations__"])} | of_extras

    def to_dict(self) -> dict[str, Any]:
        """The options as trackers log them, without secrets in nested options."""
        return redacted(super().to_dict())

    def __getstate__(self) -> dict[str, Any]:
        """The state for pickling (training_args.bin in every checkpoint), without secrets. Copies keep them."""
        return redacted(self.__dict__)

    def __copy__(self) -> TaskGRPOConfig:
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> TaskGRPOConfig:
        memo[id(self)] = made = object.__new__(type(self))
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    @property
    def device(self) -> torch.device:
        """The device of this process. accelerate names that of several CPU processes "cpu:0", and transformers 5.17
        passes it to torch.load, which knows only "cpu"."""
        device = super().device
        return torch.device("cpu") if device.type == "cpu" else device

    @property
    def updates_reference(self) -> bool:
        """Whether the reference changes during training, so that an adapter needs a frozen copy of its own."""
        return any(extra.updates_reference for extra in self._extras)

    @property
    def needs_fsdp2(self) -> bool:
        """Whether an option does not work with the first version of FSDP."""
        extras = any(extra.needs_fsdp2 for extra in self._extras)
        return extras or self.samples_under_constraint or bool(self.sampling_filters)

    @property
    def _extras(self) -> list[type[Extra]]:
        """The extras that are on."""
        return [extra for extra in EXTRAS if extra.is_on(self)]

    @property
    def samples_under_constraint(self) -> bool:
        """Whether completions are under the task's constraint, or under that of several turns."""
        return self.constrain or self.repair_turns > 1

    @property
    def promise_of_exactness(self) -> str:
        """The option that needs log-probs of exactly the distribution that was sampled from; "" if none does, so that
        sampling may be as inexact as in TRL. A task with sampling filters needs them too."""
        if self.samples_under_constraint:
            return "constrain=True" if self.constrain else f"repair_turns={self.repair_turns}"
        if self.rollout != "trl":
            return f"rollout={self.rollout!r}"
        if self.importance_sampling_correction:
            return "importance_sampling_correction=True"
        return str(self.sampling_filters) if self.use_vllm else ""

    @property
    def sampling_filters(self) -> SamplingFilters:
        """top_k, top_p and min_p; generation_kwargs come before the options of the same name, as in TRL."""
        return SamplingFilters.of({name: getattr(self, name) for name in FILTERS} | (self.generation_kwargs or {}))
