"""settings.json of a run: what was asked for, with which versions, on which machine."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import asdict, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..files import write_atomically
from ..redact import redacted, redacted_words
from ..report.run_folder import SETTINGS_FILE
from ..task import Task
from .arguments import RunArguments


def write_settings(
    folder: Path, task: Task, run: RunArguments, args: Any, model_args: Any, model: Any, command: str
) -> None:
    """Write settings.json: the command, the options that the run used, versions and hardware."""
    from ..models.quantised import is_quantised_model

    if not args.should_save:
        return
    # Quantised models store several weights per number, so that a count of numbers would be misleading.
    is_packed = is_quantised_model(model)
    settings = {
        "command": command,
        "task": {"name": task.name, "version": task.version, "options": asdict(task.options)},
        "run": asdict(run),
        "model": {
            "name": model_args.model_name_or_path or "tiny",
            "revision": model_args.model_revision,
            "use_peft": model_args.use_peft,
        }
        | ({} if is_packed else {"parameters": sum(p.numel() for p in model.parameters())}),
        "machine": describe_machine(args),
        "versions": {name: version(name) for name in ("trl", "transformers", "torch", "peft")},
        # Defaults too: those of TRL change, and a task has defaults of its own.
        "training": {f.name: getattr(args, f.name) for f in fields(args)},
    }
    text = json.dumps(redacted(settings), indent=1, default=lambda value: redacted(str(value)))
    write_atomically(folder / SETTINGS_FILE, text)


def typed_command(args: Any, resuming: bool = False) -> str:
    """The command that was typed, without secrets; or the command that resumes the run from its newest checkpoint."""
    flag = "--resume_from_checkpoint"
    typed: list[str] = []
    is_value = False  # of the flag, which is left out
    for word in sys.argv[1:]:
        is_flag = word.partition("=")[0].replace("-", "_") == flag.replace("-", "_")
        if not resuming or not (is_flag or (is_value and not word.startswith("--"))):
            typed.append(word)
        is_value = is_flag and "=" not in word
    words = shlex.join([*redacted_words(typed), *[flag] * resuming])
    program = os.path.basename(sys.argv[0])
    if Path(sys.argv[0]).absolute() == Path(__file__).with_name("main.py"):
        program = f"-m {__package__}.main"
    elif not program.endswith(".py"):
        return f"{program} {words}"
    return f"{'accelerate launch' if args.world_size > 1 else 'python'} {program} {words}"


def describe_machine(args: Any) -> str:
    """Number of processes, device and precision, for the report and the model card."""
    import torch

    name = torch.cuda.get_device_name(args.device) if args.device.type == "cuda" else args.device.type
    many = f"{args.world_size} processes, " if args.world_size > 1 else ""
    return f"{many}{name}, {precision(args)}"


def precision(args: Any) -> str:
    return "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"
