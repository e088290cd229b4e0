"""The model that is trained: made ready before TRL's trainer gets it, and corrected after."""

from __future__ import annotations

from typing import Any

from accelerate.utils import is_peft_model
from peft import get_peft_model

from ..models.loading import adapter_dtype, is_adapter, load_for_training
from ..models.masked_policy import check_settings, prepare_for_trl
from ..models.quantised import check_output_head, is_quantised_model, keep_weights_unpacked, restore_adapter
from ..rollout.support import without_adapter
from .reference import ADAPTER, copy_trained_adapter
from .sharding import check_model


def model_for_trl(
    model: Any, args: Any, is_masked: bool, peft_config: Any, quantization_config: Any
) -> tuple[Any, Any, Any]:
    """Return the model for TRL's trainer, and those of the two configurations that it still has to apply."""
    check_model(args, is_masked, is_quantised_model(model) or quantization_config is not None)
    check_settings(args, is_masked)
    # TRL keeps a frozen adapter "ref", which can be updated, only for a model that has an adapter already.
    needs_adapter = peft_config is not None and args.updates_reference
    if is_masked or needs_adapter or (isinstance(model, str) and is_adapter(model)):
        model, quantization_config = load_for_training(model, args, quantization_config), None
    if is_masked:
        model, peft_config = prepare_for_trl(model, args, peft_config)
    if needs_adapter:
        model, peft_config = get_peft_model(model, peft_config, **adapter_dtype(args)), None
    return model, peft_config, quantization_config


def correct_model(trainer: Any, given: dict[str, Any]) -> None:
    """Correct what TRL's trainer does to quantised weights and to its reference adapter; `given` are the weights of
    the adapter as they were passed to it."""
    if is_quantised_model(trainer.model):
        for plain in plain_models(trainer):
            check_output_head(plain)
            keep_weights_unpacked(plain)
        if not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):  # they need one dtype for trained weights
            restore_adapter(trainer.model, given)
    if is_peft_model(trainer.model) and ADAPTER in trainer.model.peft_config:
        copy_trained_adapter(trainer.model)


def plain_models(trainer: Any) -> list[Any]:
    """The policy, and the reference model where there is one, without wrappers and adapters."""
    models = [trainer.model] if trainer.ref_model is None else [trainer.model, trainer.ref_model]
    return [without_adapter(trainer.accelerator.unwrap_model(model)) for model in models]
