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
    """Write settings.json: the command, all options that differ from their defaults, versions and hardware."""
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
        "training": {f.name: getattr(args, f.name) for f in fields(args) if getattr(args, f.name) != f.default},
    }
    text = json.dumps(redacted(settings), indent=1, default=lambda value: redacted(str(value)))
    write_atomically(folder / SETTINGS_FILE, text)


def typed_command(args: Any, resuming: bool = False) -> str:
    """The command that was typed, without secrets; or the command that resumes the run from its newest checkpoint."""
    typed = list(sys.argv[1:])
    if resuming and "--resume_from_checkpoint" in typed:
        at = typed.index("--resume_from_checkpoint")
        has_value = at + 1 < len(typed) and not typed[at + 1].startswith("--")
        del typed[at : at + 1 + has_value]
    words = shlex.join([*redacted_words(typed), *["--resume_from_checkpoint"] * resuming])
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
