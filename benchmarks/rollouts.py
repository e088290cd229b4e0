"""Time of complete GRPO steps with TRL's generation, TRL's with a static cache, and fast rollouts with shared prompts.

    python benchmarks/rollouts.py [--model FOLDER] [--dtype float32] [--weights lora full] [--prompt_lengths 100 2000]
                                  [--texts free bricks JSON] [--engines trl static fast] [--groups 8] [--lengths 256]

Without --model, the model is a Llama like the embedded tiny models (hidden size 128, 4 layers) over single characters.
There are three kinds of text: unconstrained; brick lines under a choice tree, with about half of the tokens forced; a
long JSON object under its schema, with most tokens forced. Each table row is a trainer in its own process with TRL's
default settings (float32 weights, bf16 autocast on a GPU, gradient checkpointing). The static cache of transformers
does not work with autocast and needs --dtype bfloat16. Step times are medians over all steps but the first; start-up
is the additional time of the first step. Prints a table and writes benchmarks/results/rollouts.json. To measure
scaling, use --groups 8 32 128, --lengths 128 256 512, or a --model with a larger vocabulary.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import string
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    TrainerCallback,
)

from trl_grpo_tasks import TaskGRPOConfig, TaskGRPOTrainer
from trl_grpo_tasks.constraints import ChoiceTreeConstraint, Grammar, GrammarConstraint, OneSpelling
from trl_grpo_tasks.models.tiny import make_tokenizer

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PART = {"type": "object", "properties": {"kind": {"enum": ["wheel", "block", "hinge"]}, "parent": {"enum": [0, 1, 2]},
        "face": {"enum": ["top", "left", "right"]}}, "required": ["kind", "parent", "face"]}  # fmt: skip
MACHINE = {"type": "object", "properties": {f"part_{i}": PART for i in range(12)},
           "required": [f"part_{i}" for i in range(12)]}  # fmt: skip
TEXTS = ("free", "bricks", "JSON")
ENGINES: dict[str, dict[str, Any]] = {
    "trl": {"rollout": "trl"},
    "static": {"rollout": "trl", "cache_implementation": "static"},
    "fast": {"rollout": "fast", "share_prompts": True},
}


def bricks(node: Any) -> list[tuple[str, Any]]:
    """The choices of a tree of `2x4 (3,0,1)` lines; a node is the position within a line and the number of lines."""
    kind, count = node
    if kind == "size":
        return [(f"{size} (", ("x", count)) for size in ("1x1", "1x2", "2x2", "2x4", "1x4", "2x6")]
    after = {"x": ",", "y": ",", "z": ")\n"}[kind]
    following = {"x": ("y", count), "y": ("z", count), "z": ("size", count + 1)}[kind]
    return [(f"{value}{after}", following) for value in range(20)]


class StepTimer(TrainerCallback):
    """Records the seconds of each optimizer step, including its GPU work."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._begin = now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(now() - self._begin)


class TimedTrainer(TaskGRPOTrainer):
    """Records the time of each generation and its number of tokens."""

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        begin = now()
        out = super()._generate_single_turn(*args, **kwargs)
        self.generations = [*getattr(self, "generations", []), (now() - begin, sum(map(len, out[0])))]
        return out


def now() -> float:
    """Return the time in seconds after all GPU work has finished."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model folder (default: a tiny Llama over single characters)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="dtype of the weights")
    parser.add_argument("--weights", nargs="+", default=["lora", "full"], choices=["lora", "full"])
    parser.add_argument("--prompt_lengths", nargs="+", type=int, default=[100])
    parser.add_argument("--texts", nargs="+", default=list(TEXTS), choices=TEXTS)
    parser.add_argument("--engines", nargs="+", default=["trl", "fast"], choices=list(ENGINES))
    parser.add_argument("--groups", nargs="+", type=int, default=[8], help="completions per prompt")
    parser.add_argument("--lengths", nargs="+", type=int, default=[256], help="maximum tokens per completion")
    parser.add_argument("--prompts", type=int, default=8, help="distinct prompts per step")
    parser.add_argument(
        "--steps", type=int, default=5, help="measured steps after one warm-up step; TRL engines: always one"
    )
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "rollouts.json"))
    options = parser.parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
    print(f"{options.prompts} prompts; {device}")
    print(f"{'weights':<8}{'prompt':>7} {'text':<8}{'group':>6}{'length':>7} {'engine':<8}{'tokens/s':>9}"
          f"{'rollout s':>10}{'step s':>8}{'start-up s':>11}{'peak GB':>9}{'step ratio':>11}")  # fmt: skip
    results = []
    cells = itertools.product(options.weights, options.prompt_lengths, options.texts, options.groups, options.lengths)
    for weights, prompt, text, group, length in cells:
        first = None
        for engine in options.engines:
            cell = {
                "weights": weights,
                "prompt": prompt,
                "text": text,
                "group": group,
                "length": length,
                "engine": engine,
            }
            with ProcessPoolExecutor(1, get_context("spawn")) as alone:
                cell |= alone.submit(measure, options, **cell).result()
            first = first or cell["step_s"]
            results.append({**cell, "ratio": first / cell["step_s"]})
            print(f"{weights:<8}{prompt:>7} {text:<8}{group:>6}{length:>7} {engine:<8}{cell['tokens_per_s']:>9.0f}"
                  f"{cell['rollout_s']:>10.2f}{cell['step_s']:>8.2f}{cell['start_up_s']:>11.1f}"
                  f"{cell['peak_gb']:>9.1f}{first / cell['step_s']:>11.1f}", flush=True)  # fmt: skip
            path = Path(options.out)
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps({"device": device, "results": results}, indent=1))


def model_and_tokenizer(folder: str | None, dtype: str) -> tuple[Any, Any]:
    if folder:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        return model, AutoTokenizer.from_pretrained(folder)
    tokenizer = make_tokenizer(list(string.printable[:-5]), 4096)
    config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=4,
                         num_attention_heads=4, eos_token_id=tokenizer.eos_token_id,
                         pad_token_id=tokenizer.pad_token_id)  # fmt: skip
    return LlamaForCausalLM(config), tokenizer


def constraint_of(text: str, tokenizer: Any) -> Any:
    if text == "bricks":
        return ChoiceTreeConstraint(tokenizer, lambda row: ("size", 0), bricks, look_ahead=False)
    if text == "JSON":
        return OneSpelling(tokenizer, GrammarConstraint(tokenizer, Grammar.json_schema(MACHINE)))
    return None


def measure(
    options: Any, weights: str, prompt: int, text: str, group: int, length: int, engine: str
) -> dict[str, float]:
    model, tokenizer = model_and_tokenizer(options.model, options.dtype)
    constraint = constraint_of(text, tokenizer)
    words = tokenizer("build a strong table with four legs " * prompt)["input_ids"]
    texts = [tokenizer.decode(words[i : i + prompt]) for i in range(options.prompts)]
    on_gpu = torch.cuda.is_available()
    steps = StepTimer()
    measured = options.steps if engine == "fast" else 1
    with tempfile.TemporaryDirectory() as folder:
        args = TaskGRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=options.prompts * group,
            num_generations=group,
            max_completion_length=length,
            max_steps=measured + 1,
            bf16=on_gpu,
            use_cpu=not on_gpu,
            report_to="none",
            save_strategy="no",
            logging_steps=1000,
            disable_tqdm=True,
            constrain=constraint is not None,
            **ENGINES[engine],
        )
        trainer = TimedTrainer(
            model,
            reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
            args=args,
            train_dataset=Dataset.from_list([{"prompt": text} for text in texts * (measured + 1)]),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=PROJECTIONS) if weights == "lora" else None,
            constraint=constraint,
            callbacks=[steps],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    seconds = statistics.median(steps.seconds[1:])
    return {
        "tokens_per_s": statistics.median(tokens / seconds for seconds, tokens in trainer.generations[1:]),
        "rollout_s": statistics.median(seconds for seconds, _ in trainer.generations[1:]),
        "step_s": seconds,
        "start_up_s": max(steps.seconds[0] - seconds, 0.0),
        "peak_gb": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else float("nan"),
    }


if __name__ == "__main__":
    main()
