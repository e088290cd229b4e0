"""Cold start: a short supervised warm-up on a task's gold answers, with TRL's SFTTrainer."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from datasets import Dataset

from .models import is_made_from, making, origin_of
from .task import Row, Task


def cold_start(
    model: str,
    task: Task,
    rows: list[dict[str, Any]],
    folder: str | Path,
    *,
    tokenizer: Any = None,
    steps: int,
    learning_rate: float,
    batch_size: int,
    peft_config: Any = None,
    **settings: Any,
) -> str:
    """Train `model` on the gold answers of `rows` and save the result to `folder`, whose path is returned. With a
    `peft_config` an adapter is trained and merged. What was made there before in the same way is taken as it is."""
    from transformers.trainer_callback import PrinterCallback, ProgressCallback
    from trl import SFTConfig, SFTTrainer

    from .callbacks import Console

    folder = Path(folder)
    golds = gold_dataset(task, rows)
    origin = {
        "model": origin_of(model) or model,
        "answers": hashlib.sha256(json.dumps(golds.to_list()).encode()).hexdigest(),
        "steps": steps,
        "learning_rate": learning_rate,
        "batch_size": batch_size,
        "adapter": peft_config is not None,
        "seed": settings.get("seed"),
    }
    if is_made_from(folder, origin):
        return str(folder)
    args = SFTConfig(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=batch_size,
        learning_rate=learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, steps // 20),
        logging_steps=max(1, steps // 10),
        save_strategy="no",
        report_to="none",
        ddp_find_unused_parameters=False,
        adam_beta2=0.98,  # a short run must not wait a thousand steps for its averages
        **settings,
    )
    trainer = SFTTrainer(model, args=args, train_dataset=golds, processing_class=tokenizer, peft_config=peft_config)
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    trainer.add_callback(Console("cold start", ("loss", "mean_token_accuracy")))
    trainer.train()
    trained = trainer.accelerator.unwrap_model(trainer.model)
    if trainer.accelerator.is_main_process:
        if peft_config is not None:
            trained = trained.merge_and_unload()
        with making(folder, origin):
            trained.save_pretrained(folder)
            trainer.processing_class.save_pretrained(folder)
        shutil.rmtree(folder / "runs", ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    return str(folder)


def gold_dataset(task: Task, rows: list[dict[str, Any]]) -> Dataset:
    """Prompts and gold answers in the form that SFTTrainer takes; only the answers count in its loss."""
    return Dataset.from_list([{"prompt": row["prompt"], "completion": _answer(task, row)} for row in rows])


def _answer(task: Task, row: Row) -> Any:
    gold = task.gold(row)
    return gold if isinstance(row["prompt"], str) else [{"role": "assistant", "content": gold}]
