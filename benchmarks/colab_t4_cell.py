"""One recipe of benchmarks/colab_t4.py, measured in a process of its own.

It is a module apart, because the processes that compute rewards import the main module again.
"""

from __future__ import annotations

import re
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from harness import Report, config_of, memory, now, random_model
from masks import synthetic_bpe_tokenizer
from transformers import Trainer, TrainerCallback

import trl_grpo_tasks.training.cold_start as cold_start_module
from trl_grpo_tasks import load_recipe, train
from trl_grpo_tasks.commands.recipes import find_recipe, read_recipe
from trl_grpo_tasks.models.tiny import PLAIN_CHAT_TEMPLATE

ON_CPU = {
    "fp16": False,
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "gradient_accumulation_steps": 1,
    "max_completion_length": 64,
    "train_rows": 16,
    "cold_start_batch_size": 2,
    "text_length": 40,
    "judge_steps": 400,
    "judge_width": 64,
    "tiny_width": 64,
}


def measure(report: Report, options: Any, folder: str, recipe: str) -> None:
    """Measure one recipe."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(options.cap * 1e9 / total, 1.0))
    written = read_recipe(str(find_recipe(recipe)))
    cold_steps = written.get("cold_start_steps", 0)
    replaced: dict[str, Any] = {
        "output_dir": f"{folder}/{recipe}",
        "max_steps": options.steps + 1,
        "cold_start_steps": min(cold_steps, options.cold_start_steps),
        "eval_before_and_after": False,
        "save_strategy": "no",
        "report_to": "none",
    }
    if "judges_folder" in written:
        replaced["judges_folder"] = f"{folder}/{recipe} judges"
    if not on_gpu:
        replaced |= {name: value for name, value in ON_CPU.items() if name in written}
    if "model_name_or_path" in written and not options.hub:
        replaced["model_name_or_path"] = model_of(options, folder, written["model_name_or_path"])
    settings = load_recipe(recipe, **replaced)
    precision = "fp16" if settings.config.fp16 else "bf16" if settings.config.bf16 else "fp32"
    report({"precision": precision, "steps": written["max_steps"], **memory()})
    timer = Timer(report, cold_steps)
    train(settings, callbacks=[timer])


class Timer(TrainerCallback):
    """Reports the times of preparation, cold start and GRPO steps, and the peak of reserved memory."""

    def __init__(self, report: Report, cold_steps: int):
        self._report, self._cold_steps = report, cold_steps
        self._prepared: float | None = None
        self._seconds: list[float] = []
        self._begin = now()
        self._cold_start = cold_start_module.cold_start
        cold_start_module.cold_start = self._timed_cold_start

    def _timed_cold_start(self, *args: Any, steps: int, **kwargs: Any) -> str:
        begin, starts = self._preparation_ends(), []
        training_step = Trainer.training_step

        def recorded(*args: Any, **kwargs: Any) -> Any:
            starts.append(now())
            return training_step(*args, **kwargs)

        Trainer.training_step = recorded
        try:
            made = self._cold_start(*args, steps=steps, **kwargs)
        finally:
            Trainer.training_step = training_step
        per_step = statistics.median(later - earlier for earlier, later in pairwise(starts))
        self._report({"cold_start_s": now() - begin + (self._cold_steps - steps) * per_step, **reserved()})
        return made

    def _preparation_ends(self) -> float:
        if self._prepared is None:
            self._prepared = now()
            self._report({"preparation_s": self._prepared - self._begin})
        return self._prepared

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._preparation_ends()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._start = now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._seconds.append(now() - self._start)
        if len(self._seconds) > 1:
            self._report({"step_s": self._seconds[1:], **reserved()})


def reserved() -> dict[str, float]:
    """Return the peak of the memory that torch has reserved, in GB."""
    return {"reserved_gb": torch.cuda.max_memory_reserved() / 1e9} if torch.cuda.is_available() else {}


def model_of(options: Any, folder: str, name: str) -> str:
    """Return the real model given for the shape of a Hub id, or a folder with random weights of this shape."""
    found = re.search(r"SmolLM2-(\d+M)", name)
    if found is None:
        raise ValueError(f"the shape of {name} is unknown; add it to SHAPES")
    shape = found[1]
    given = dict(one.split("=", 1) for one in options.model)
    if shape in given:
        return given[shape]
    path = Path(folder) / f"model {shape}"
    if not path.exists():
        size = 49_152 if torch.cuda.is_available() else 2_000
        tokenizer = synthetic_bpe_tokenizer(size)
        tokenizer.chat_template = PLAIN_CHAT_TEMPLATE
        tokenizer.save_pretrained(path)
        shape = shape if torch.cuda.is_available() else "tiny"
        random_model(config_of(shape, "float32", size, tokenizer.eos_token_id)).save_pretrained(path)
        torch.cuda.empty_cache()
    return str(path)
