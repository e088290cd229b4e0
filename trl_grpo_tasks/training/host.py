"""What the objects that a trainer owns use of it. TaskGRPOTrainer has all of it; tests of one object give less.

Names that begin with an underscore are TRL's or transformers' own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from ..task import Task
from .record import RolloutRecord


class Host(Protocol):
    """What all of them use."""

    args: Any
    accelerator: Any
    model: Any
    state: Any
    task: Task | None
    latest_rollout: RolloutRecord
    _metrics: dict[str, dict[str, list[float]]]  # by mode; the mean of each list is logged

    @property
    def mode(self) -> str: ...
    @property
    def group_size(self) -> int: ...


class GenerationHost(Host, Protocol):
    """What Generation uses."""

    generation_config: Any
    generation_kwargs: dict[str, Any]
    is_fsdp_enabled: bool
    max_completion_length: int
    model_wrapped: Any
    num_generations: int
    ref_model: Any
    temperature: float
    train_dataset: Any
    use_vllm: bool
    vllm_generation: Any
    eos_token_ids: Any
    tools: Any
    rollout_func: Any
    aux_loss_enabled: bool
    _is_vlm: bool
    _tokenizer: Any

    @property
    def is_sharded(self) -> bool: ...


class ScoringHost(Host, Protocol):
    """What Scoring uses."""

    beta: float
    num_iterations: int
    ref_model: Any
    temperature: float
    _get_per_token_logps_and_entropies: Callable[..., Any]
    _step: int  # batches so far


class RewardingHost(Host, Protocol):
    """What Rewarding uses. It sets the names and weights of the task's components."""

    reward_func_names: list[str]
    reward_weights: torch.Tensor
    _log_completion_extra: Callable[..., None]
    _log_metric: Callable[[str, float], None]
    _logs: Mapping[str, Any]  # the table of completions


class CheckpointsHost(Host, Protocol):
    """What Checkpoints saves, restores and calls."""

    extras: Mapping[str, Any]
    generation: Any
    is_deepspeed_enabled: bool
    is_fsdp_enabled: bool
    model_wrapped: Any
    num_iterations: int
    updated_at: int | None
    _buffered_inputs: Any
    _globalstep_last_logged: int
    _load_from_checkpoint: Callable[[str], None]
    _push_from_checkpoint: Callable[[str], None]
    _step: int
    _tr_loss: torch.Tensor

    @property
    def is_sharded(self) -> bool: ...
    def parts(self, is_common: bool) -> dict[str, Any]: ...
