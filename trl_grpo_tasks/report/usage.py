"""What the section "How to use it" of a model card needs: code for transformers, Solver, vLLM and Ollama."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..models.loading import TINY
from ..redact import is_secret
from ..registry import find_task_class, is_safe_by_name
from ..task import Task
from .run_folder import RunFolder, sampling_of
from .templating import literal

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM takes as max_lora_rank


def usage(name: str, run: RunFolder, task: Task, adapter_of: str | None, prompt: Any) -> dict[str, Any]:
    """Return what the template `usage.md` needs.

    Args:
        name: The model's repository on the Hub, or its folder.
        run: The run that made it.
        task: Its task.
        adapter_of: The base model, if it is an adapter.
        prompt: A prompt of the run's last evaluation; None without an evaluation.
    """
    training, used = run.settings.get("training", {}), {"temperature": 1.0} | sampling_of(run.settings)
    filters = {name: used[name] for name in ("top_k", "top_p", "min_p") if used.get(name)}
    sampling = {"temperature": used["temperature"], **filters}
    # Filters that are not given would be those of the model's generation_config.
    generate = {"do_sample": True, "top_k": 0, "top_p": 1.0, **sampling}
    spec, options = run.task_spec or task.name, changed_options(run, task)
    spec = Path(spec).name if spec.endswith(".py") else spec  # its folder is that of another machine
    public = {name: value for name, value in options.items() if not is_secret(name)}
    lora = [] if adapter_of is None else ["enable_lora=True", *_lora_rank(run.path)]
    return {
        "prompt": prompt,
        "sampling": sampling,
        "generate": generate if sampling["temperature"] else {"do_sample": False},
        "max_tokens": used.get("max_completion_length", 256),
        "fill_steps": training.get("fill_steps") or 1,
        "repair_turns": training.get("repair_turns", 1),
        "editor": run.settings.get("run", {}).get("editor"),
        "is_constrained": bool(training.get("constrain")),
        "is_tiny": run.settings.get("model", {}).get("name") == TINY,  # llama.cpp does not know its tokenizer
        "is_task_known": is_safe_by_name(spec) and not find_task_class(spec).user_options(options),
        "task_line": f"task = get_task({literal(spec)}{f', {public!r}' if public else ''})",
        "engine": [literal(adapter_of or name), *lora],  # of vLLM
    }


def changed_options(run: RunFolder, task: Task) -> dict[str, Any]:
    """Return the options of the run's task that differ from their defaults."""
    options, defaults = run.settings.get("task", {}).get("options", {}), task.Options()
    return {name: value for name, value in options.items() if value != getattr(defaults, name, None)}


def _lora_rank(folder: Path) -> list[str]:
    """vLLM's option for adapters of a rank above 16, its default. Before the end of a run the rank is not known."""
    config = folder / "adapter_config.json"
    rank = json.loads(config.read_text())["r"] if config.is_file() else 0
    return [f"max_lora_rank={next((one for one in LORA_RANKS if one >= rank), rank)}"] * (rank > 16)
