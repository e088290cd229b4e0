"""Cold start: a short supervised warm-up on a task's gold answers, with TRL's SFTTrainer; for masked language models,
with transformers' Trainer on the gold fills."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from datasets import Dataset

from ..models.loading import building, is_made_from, load_for_training, load_tokenizer, origin_of
from ..models.quantised import adapter_weights, restore_adapter
from ..models.shared_prompts import SharedPrompts
from ..rewards.environment import TurnsTask
from ..rollout.attention import disable_cudnn_attention
from ..rollout.support import without_adapter
from ..task import Row, Task


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
    quantization: Any = None,
    **settings: Any,
) -> str:
    """Train `model` on the gold answers of `rows` and save the result to `folder`, whose path is returned.

    With a `peft_config`, or if `model` is an adapter, the adapter is trained and saved. A complete result of an
    earlier call with the same settings is reused.
    """
    from transformers.trainer import DEFAULT_PROGRESS_CALLBACK, TRAINING_ARGS_NAME
    from transformers.trainer_callback import PrinterCallback
    from trl import SFTConfig, SFTTrainer

    from .callbacks import Console

    disable_cudnn_attention()
    folder = Path(folder)
    if tokenizer is None and isinstance(task, TurnsTask):  # which writes feedback with it
        tokenizer = load_tokenizer(model)
    golds, template = gold_dataset(task, rows, tokenizer), getattr(tokenizer, "chat_template", None)
    origin = {
        "model": origin_of(model) or model,
        "answers": hashlib.sha256(json.dumps([golds.to_list(), template]).encode()).hexdigest(),
        "steps": steps,
        "learning_rate": learning_rate,
        "batch_size": batch_size,
        "adapter": None if peft_config is None else _described(peft_config),
        "seed": settings.get("seed"),
    } | ({} if quantization is None else {"quantization": quantization.quantization_method()})
    if is_made_from(folder, origin):
        return str(folder)
    args = SFTConfig(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=batch_size,
        max_length=None,  # the default cuts answers off at 1,024 tokens, prompt included
        learning_rate=learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, steps // 20),
        logging_steps=max(1, steps // 10),
        save_strategy="no",
        report_to="none",
        ddp_find_unused_parameters=False,
        adam_beta2=0.98,  # the default averages over a thousand steps, longer than this run
        **settings,
    )
    loaded = load_for_training(model, args, quantization)
    args.model_init_kwargs = None  # TRL warns that it does not use them
    given = adapter_weights(loaded)
    if task.policy == "masked":
        trainer = _fill_trainer(loaded, args, golds, tokenizer, peft_config)
    else:
        trainer = SFTTrainer(
            loaded, args=args, train_dataset=golds, processing_class=tokenizer, peft_config=peft_config
        )
    restore_adapter(trainer.model, given)
    packing = SharedPrompts()
    if task.policy != "masked":
        packing.add_to(without_adapter(trainer.model))  # models that it does not support train on padded batches
    for callback in (DEFAULT_PROGRESS_CALLBACK, PrinterCallback):
        trainer.remove_callback(callback)
    trainer.add_callback(Console("cold start", ("loss", "mean_token_accuracy")))
    with packing.open(sys.maxsize):
        trainer.train()
    is_main = trainer.accelerator.is_main_process
    with building(folder, origin) if is_main else nullcontext():
        trainer.save_model(str(folder))  # by all processes, since weights may be sharded over them
        if is_main:
            (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)
            shutil.rmtree(folder / "runs", ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    return str(folder)


def _described(peft_config: Any) -> dict[str, Any]:
    """The settings of an adapter, without the name of its base model, as JSON can hold them."""
    settings = peft_config.to_dict() | {"base_model_name_or_path": None}
    return {name: sorted(value) if isinstance(value, set) else value for name, value in settings.items()}


def _fill_trainer(model: Any, args: Any, golds: Dataset, tokenizer: Any, peft_config: Any) -> Any:
    """A Trainer for the cross-entropy of gold fills at the masks. Fills that are no token of the model are ignored."""
    import torch
    from peft import get_peft_model
    from torch.nn.utils.rnn import pad_sequence
    from transformers import Trainer

    from ..models.masked_policy import MaskedPolicy

    policy = MaskedPolicy(tokenizer, model.config)
    if peft_config is not None:
        peft_config.task_type = None
        model = get_peft_model(model, peft_config)
    args.remove_unused_columns = False

    def batch(rows: list[dict[str, str]]) -> dict[str, torch.Tensor]:
        ids = [torch.tensor(prompt) for prompt in policy.prompt_ids([row["prompt"] for row in rows])]
        labels = []
        for row, prompt in zip(rows, ids, strict=True):
            fills = torch.tensor(policy.ids_of(row["completion"]))
            fills[fills == tokenizer.unk_token_id] = -100
            labels.append(torch.full_like(prompt, -100).masked_scatter(prompt == tokenizer.mask_token_id, fills))
        return {
            "input_ids": pad_sequence(ids, batch_first=True, padding_value=tokenizer.pad_token_id),
            "attention_mask": pad_sequence([torch.ones_like(i) for i in ids], batch_first=True),
            "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
        }

    return Trainer(model, args, data_collator=batch, train_dataset=golds, processing_class=tokenizer)


def gold_dataset(task: Task, rows: Sequence[Row], tokenizer: Any = None) -> Dataset:
    """Prompts and gold answers as SFTTrainer takes them: the loss covers the answers only."""
    examples = []
    for row in rows:
        if isinstance(task, TurnsTask):
            shown = task.demonstrations(row, tokenizer)
        else:
            shown = [(row["prompt"], task.gold(row))]
        for prompt, gold in shown:
            completion = gold if isinstance(prompt, str) else [{"role": "assistant", "content": gold}]
            examples.append({"prompt": prompt, "completion": completion})
    return Dataset.from_list(examples)
