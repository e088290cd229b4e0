"""Checks of options under FSDP and DeepSpeed. docs/scaling.md lists what works with which of them."""

from __future__ import annotations

import os
from typing import Any


def shards_weights(args: Any) -> bool:
    """Whether processes will hold parts of the weights: FSDP or ZeRO-3."""
    return _fsdp(args)[0] > 0 or (args.deepspeed_plugin is not None and args.deepspeed_plugin.zero_stage == 3)


def check_sharding(args: Any) -> None:
    """Raise ValueError for options of a TaskGRPOConfig that do not work with the way weights are sharded."""
    fsdp, fsdp_checkpoints = _fsdp(args)
    if fsdp == 1 and args.needs_fsdp2:
        raise ValueError(
            "moving references, replay, own successes, constraints and sampling filters do not work with the first "
            "version of FSDP; use FSDP2 (fsdp_version: 2), DDP or DeepSpeed"
        )
    if fsdp and fsdp_checkpoints.upper() not in ("FULL_STATE_DICT", "1"):
        raise ValueError(
            f"fsdp_state_dict_type: {fsdp_checkpoints} would save no model that transformers can load; set "
            "fsdp_state_dict_type: FULL_STATE_DICT in the fsdp_config"
        )
    if fsdp and _is_set("FSDP_CPU_RAM_EFFICIENT_LOADING"):
        raise ValueError(
            "fsdp_cpu_ram_efficient_loading, which `accelerate launch` turns on by default, loads weights in the "
            "first process only; reference models and models that are evaluated would be empty in the others. Set "
            "fsdp_cpu_ram_efficient_loading: false in the fsdp_config"
        )
    if shards_weights(args) and not fsdp and not args.deepspeed_plugin.zero3_save_16bit_model:
        raise ValueError(
            "ZeRO-3 without zero3_save_16bit_model would save no model that transformers can load; set "
            "zero3_save_16bit_model: true in the deepspeed_config (stage3_gather_16bit_weights_on_model_save in a "
            "configuration file of DeepSpeed)"
        )
    if args.offload_reference and shards_weights(args):
        raise ValueError(
            "offloaded references must be whole on each process; leave offload_reference out, or use DDP or ZeRO-2 "
            "instead of ZeRO-3 or FSDP"
        )


def check_model(args: Any, masked: bool, quantised: bool) -> None:
    """Raise ValueError for a kind of model whose weights cannot be sharded."""
    if (masked or quantised) and shards_weights(args):
        kind = "masked language models" if masked else "quantised weights"
        raise ValueError(
            f"{kind} cannot be sharded; use DDP (accelerate_configs/multi_gpu.yaml) instead of FSDP or ZeRO-3"
        )


def _fsdp(args: Any) -> tuple[int, str]:
    """The version of FSDP, 0 for none, and the kind of its checkpoints: by options or by `accelerate launch`."""
    options = args.fsdp_plugin_args or {}
    if not options and not _is_set("ACCELERATE_USE_FSDP"):
        return 0, ""
    version = int(options.get("fsdp_version", os.environ.get("FSDP_VERSION", "1")))
    checkpoints = os.environ.get("FSDP_STATE_DICT_TYPE", "FULL_STATE_DICT" if version == 1 else "SHARDED_STATE_DICT")
    return version, options.get("state_dict_type", checkpoints)


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true")
