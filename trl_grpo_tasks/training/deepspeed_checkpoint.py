"""Conversion of DeepSpeed's checkpoints, so that another number of processes can load them.

DeepSpeed splits a checkpoint by processes. Its "universal" form has whole tensors instead, one file each.
"""

from __future__ import annotations

import contextlib
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from ..models.checkpoints import CheckpointError

FOLDER = "universal"  # in the checkpoint; DeepSpeed writes this name to the file latest_universal when it is complete


def convert(checkpoint: str) -> None:
    """Write the universal form of a checkpoint into a folder in it. What an interrupted conversion left is removed."""
    from deepspeed.checkpoint import ds_to_universal

    remove(checkpoint)
    source = Path(checkpoint) / (Path(checkpoint) / "latest").read_text().strip()
    workers = {"num_extract_workers": 1, "num_merge_workers": 1}  # this process has threads and must not fork
    checks = {"keep_temp_folder": False, "strict": True, "inject_missing_state": True}
    with contextlib.redirect_stdout(None):
        try:
            folders = {"input_folder": str(source), "output_folder": str(Path(checkpoint) / FOLDER)}
            ds_to_universal.main(Namespace(**folders, **workers, **checks))
        except KeyError as error:
            raise CheckpointError(
                f"DeepSpeed converts the optimizer states of Adam only, and {checkpoint} has others ({error} is "
                "missing); use the number of processes that wrote it"
            ) from error


def correct_optimizer(optimizer: Any, checkpoint: str) -> None:
    """Correct what DeepSpeed 0.19 loads under ZeRO-3: one step counter, a CPU tensor, which all parts of the weights
    share and would increment in turn, and the options of the first parameter group for all groups."""
    file = Path(checkpoint) / FOLDER / "zero" / "optimizer_state.pt"
    saved = torch.load(file, map_location="cpu", weights_only=False, mmap=True)  # has classes of DeepSpeed
    for group, options in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        group.update({name: value for name, value in options.items() if name != "params"})
    is_on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    for weights, state in optimizer.state.items():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].to(weights.device if is_on_device else "cpu", copy=True)


def remove(checkpoint: str) -> None:
    """Remove the universal form of a checkpoint, complete or not."""
    (Path(checkpoint) / f"latest_{FOLDER}").unlink(missing_ok=True)
    shutil.rmtree(Path(checkpoint) / FOLDER, ignore_errors=True)
