"""Cold start: a short supervised warm-up on a task's gold answers, with TRL's SFTTrainer; for masked language models,
with transformers' Trainer on the gold fills."""

from __future__ import annotations

import hashlib
import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from datasets import Dataset

from ..models.loading import building, is_made_from, load_model, load_tokenizer, origin_of
from ..models.quantised import is_quantised_model, restore_adapter
from ..rollout.attention import disable_cudnn_attention
from ..task import Row, Task
from .repair import RepairTask

ADAPTER_FOLDER = "adapter"  # inside the cold start's folder, until its weights are merged


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
    """Train `model` on the gold answers of `rows` and save the result to `folder`, whose path is returned. With a
    `peft_config` an adapter is trained and merged; on quantised weights, `folder` holds the adapter. A complete result
    of an earlier call with the same settings is reused."""
    from transformers.trainer import DEFAULT_PROGRESS_CALLBACK, TRAINING_ARGS_NAME
    from transformers.trainer_callback import PrinterCallback
    from trl import SFTConfig, SFTTrainer

    from .callbacks import Console

    disable_cudnn_attention()
    folder = Path(folder)
    if tokenizer is None and isinstance(task, RepairTask):  # which writes feedback with it
        tokenizer = load_tokenizer(model)
    golds = gold_dataset(task, rows, tokenizer)
    origin = {
        "model": origin_of(model) or model,
        "answers": hashlib.sha256(json.dumps(golds.to_list()).encode()).hexdigest(),
        "steps": steps,
        "learning_rate": learning_rate,
        "batch_size": batch_size,
        "adapter": peft_config is not None,
        "seed": settings.get("seed"),
    } | ({} if quantization is None else {"quantization": quantization.quantization_method()})
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
        adam_beta2=0.98,  # the default averages over a thousand steps, longer than this run
        **settings,
    )
    if task.policy == "masked":
        trainer = _fill_trainer(model, args, golds, tokenizer, peft_config, quantization)
    else:
        trainer = SFTTrainer(
            model,
            args=args,
            train_dataset=golds,
            processing_class=tokenizer,
            peft_config=peft_config,
            quantization_config=quantization,
        )
    is_quantised = is_quantised_model(trainer.model)
    if is_quantised:
        restore_adapter(trainer.model, {})
    merges = peft_config is not None and not is_quantised  # rounding to 4 or 8 bits would lose most of the adapter
    for callback in (DEFAULT_PROGRESS_CALLBACK, PrinterCallback):
        trainer.remove_callback(callback)
    trainer.add_callback(Console("cold start", ("loss", "mean_token_accuracy")))
    trainer.train()
    is_main = trainer.accelerator.is_main_process
    with building(folder, origin) if is_main else nullcontext():
        # All processes take part in saving, since weights may be sharded over them.
        trained = folder / ADAPTER_FOLDER if merges else folder
        trainer.save_model(str(trained))
        if is_main:
            if merges:
                init = {"dtype": "float32"} | (args.model_init_kwargs or {})  # the precision that TRL loads it in
                merged = load_model(str(trained), policy=task.policy, **init)
                merged.merge_and_unload().save_pretrained(folder)
                trainer.processing_class.save_pretrained(folder)
                shutil.rmtree(trained)
            (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)
            shutil.rmtree(folder / "runs", ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    return str(folder)


def _fill_trainer(model: str, args: Any, golds: Dataset, tokenizer: Any, peft_config: Any, quantization: Any) -> Any:
    """A Trainer for the cross-entropy of gold fills at the masks. Fills that are no token of the model are ignored."""
    import torch
    from peft import get_peft_model
    from torch.nn.utils.rnn import pad_sequence
    from transformers import Trainer, set_seed

    from ..models.masked_policy import MaskedPolicy

    set_seed(args.seed)
    loaded = load_model(model, policy="masked", quantization_config=quantization, **(args.model_init_kwargs or {}))
    policy = MaskedPolicy(tokenizer, loaded.config)
    if peft_config is not None:
        peft_config.task_type = None
        loaded = get_peft_model(loaded, peft_config)
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

    return Trainer(loaded, args, data_collator=batch, train_dataset=golds, processing_class=tokenizer)


def gold_dataset(task: Task, rows: list[dict[str, Any]], tokenizer: Any = None) -> Dataset:
    """Prompts and gold answers as SFTTrainer takes them: the loss covers the answers only."""
    return Dataset.from_list([_example(task, row, tokenizer) for row in rows])


def _example(task: Task, row: Row, tokenizer: Any) -> dict[str, Any]:
    if isinstance(task, RepairTask):
        prompt, gold = task.demonstration(row, tokenizer)
    else:
        prompt, gold = row["prompt"], task.gold(row)
    return {
        "prompt": prompt,
        "completion": gold if isinstance(prompt, str) else [{"role": "assistant", "content": gold}],
    }
