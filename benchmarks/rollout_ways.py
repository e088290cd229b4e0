"""The ways of benchmarks/rollouts.py to generate completions, each measured in a process of its own."""

from __future__ import annotations

import functools
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from harness import (
    PROJECTIONS,
    SHAPES,
    Report,
    add_lora,
    character_tokenizer,
    config_of,
    fill_adapters,
    memory,
    now,
    random_model,
    random_prompts,
)
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from trl_grpo_tasks import TaskGRPOConfig, TaskGRPOTrainer
from trl_grpo_tasks.constraints import ChoiceTreeConstraint, Grammar, GrammarConstraint, OneSpelling
from trl_grpo_tasks.rollout import Decoder, rollout

PART = {"type": "object", "properties": {"kind": {"enum": ["wheel", "block", "hinge"]}, "parent": {"enum": [0, 1, 2]},
        "face": {"enum": ["top", "left", "right"]}}, "required": ["kind", "parent", "face"]}  # fmt: skip
MACHINE = {"type": "object", "properties": {f"part_{i}": PART for i in range(12)},
           "required": [f"part_{i}" for i in range(12)]}  # fmt: skip


def measure(report: Report, options: Any, folder: str, way: str, **cell: Any) -> None:
    """Measure one row."""
    if way == "vllm":
        measure_vllm(report, options, folder, **cell)
    elif way == "ours alone":
        measure_alone(report, options, folder, **cell)
    else:
        measure_trainer(report, options, folder, way, **cell)


def report_times(report: Report, start_up: float, tokens: int, **seconds: list[float]) -> None:
    """Report the measured seconds so far; the first of each list is the warm-up, and `start_up` includes it."""
    if len(seconds["rollout_s"]) > 1:
        longest = statistics.median((seconds.get("step_s") or seconds["rollout_s"])[1:])
        measured = {name: values[1:] for name, values in seconds.items()}
        rate = tokens / statistics.median(measured["rollout_s"])
        report({**measured, "tokens_per_s": rate, "start_up_s": max(start_up - longest, 0.0), **memory()})


def measure_vllm(
    report: Report, options: Any, folder: str, shape: str, prompt: int, group: int, length: int, **_: Any
) -> None:
    from vllm import LLM, SamplingParams

    source = options.model or saved_config(options, folder, shape)
    begin = time.perf_counter()  # no torch.cuda call before vLLM has started its own process
    engine = LLM(
        model=source,
        load_format="auto" if options.model else "dummy",
        skip_tokenizer_init=True,
        dtype=dtype_of(options, shape),
        gpu_memory_utilization=options.vllm_memory,
        max_model_len=prompt + length,
        max_num_seqs=options.prompts * group,
    )
    sampling = SamplingParams(n=group, temperature=1.0, max_tokens=length, ignore_eos=True, detokenize=False)

    def generate(prompts: list[list[int]]) -> int:
        outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        return sum(len(one.token_ids) for output in outputs for one in output.outputs)

    repeat_rollouts(report, options, begin, prompt, generate)


def measure_alone(
    report: Report, options: Any, folder: str, shape: str, weights: str, prompt: int, group: int, length: int, **_: Any
) -> None:
    model, _ = model_and_tokenizer(options, folder, shape, "free")
    model = add_lora(model) if weights == "lora" else model
    model.eval()
    kind = model.device.type
    begin = now()
    decoder = Decoder(model)

    def generate(prompts: list[list[int]]) -> int:
        repeated = [ids for ids in prompts for _ in range(group)]
        with torch.autocast(kind, autocast_dtype(options), enabled=kind == "cuda"):  # as the trainer does
            done = rollout(model, repeated, max_new_tokens=length, eos_token_ids=[], decoder=decoder)
        return sum(map(len, done.completion_ids))

    repeat_rollouts(report, options, begin, prompt, generate)


def repeat_rollouts(report: Report, options: Any, begin: float, prompt: int, generate: Any) -> None:
    """Time `generate`, which returns token ids to the CPU, on new prompts each time."""
    rollouts: list[float] = []
    for repeat in range(options.repeats + 1):
        prompts = random_prompts([prompt] * options.prompts, repeat)
        start = time.perf_counter()
        tokens = generate(prompts)
        rollouts.append(time.perf_counter() - start)
        if repeat == 0:
            start_up = time.perf_counter() - begin
        report_times(report, start_up, tokens, rollout_s=rollouts)


def measure_trainer(
    report: Report, options: Any, folder: str, way: str, shape: str, weights: str, text: str, prompt: int, group: int,
    length: int,
) -> None:  # fmt: skip
    on_gpu = torch.cuda.is_available()
    model, tokenizer = model_and_tokenizer(options, folder, shape, text)
    kind: dict[str, Any] = {}
    if way == "trl+vllm":
        model.name_or_path = options.model or saved_config(options, folder, shape, tokenizer)
        if options.model is None:
            use_dummy_weights_in_vllm()
        # TRL sets RANK, LOCAL_RANK and WORLD_SIZE itself; set before the trainer is made, they would add DDP to it.
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
        kind = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": options.vllm_memory,
            "vllm_max_model_length": prompt + length,
        }
    constraint = constraint_of(text, tokenizer)
    if is_ours := way == "ours" or constraint is not None:
        kind |= {"rollout": "fast" if way == "ours" else "trl", "share_prompts": way == "ours"}
        kind["constrain"] = constraint is not None
    words = tokenizer("build a strong table with four legs " * prompt)["input_ids"]
    texts = [tokenizer.decode(words[i : i + prompt]) for i in range(options.prompts * (options.repeats + 1))]
    args = (TaskGRPOConfig if is_ours else GRPOConfig)(
        output_dir=folder,
        per_device_train_batch_size=options.prompts * group,
        num_generations=group,
        max_completion_length=length,
        max_steps=options.repeats + 1,
        bf16=on_gpu and autocast_dtype(options) == torch.bfloat16,
        fp16=on_gpu and autocast_dtype(options) == torch.float16,
        use_cpu=not on_gpu,
        report_to="none",
        save_strategy="no",
        logging_steps=1000,
        disable_tqdm=True,
        **kind,
    )
    begin = now()
    trainer = (TaskGRPOTrainer if is_ours else GRPOTrainer)(
        model,
        reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
        args=args,
        train_dataset=Dataset.from_list([{"prompt": text} for text in texts]),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=PROJECTIONS) if weights == "lora" else None,
        **({"constraint": constraint} if is_ours else {}),
    )
    if way == "ours" and not trainer.generation.uses_engine:
        raise RuntimeError("our rollouts do not support this model, so TRL would generate")
    fill_adapters(trainer.model)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Timer(trainer, report, begin))
    trainer.train()


class Timer(TrainerCallback):
    """Reports the seconds of every generation and of every step, including their GPU work."""

    def __init__(self, trainer: Any, report: Report, begin: float):
        self._report, self._begin = report, begin
        self._steps: list[float] = []
        self._rollouts: list[float] = []
        self._generate = trainer._generate_single_turn
        trainer._generate_single_turn = self._timed

    def _timed(self, *args: Any, **kwargs: Any) -> Any:
        start = now()
        out = self._generate(*args, **kwargs)
        self._rollouts.append(now() - start)
        self._tokens = sum(map(len, out[0]))
        return out

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._start = now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._steps.append(now() - self._start)
        if len(self._steps) == 1:
            self._start_up = now() - self._begin
        report_times(self._report, self._start_up, self._tokens, rollout_s=self._rollouts, step_s=self._steps)


def autocast_dtype(options: Any) -> torch.dtype:
    """Return the dtype of autocast on a GPU: that of the weights, or bfloat16 if they are float32."""
    return torch.float16 if options.dtype == "float16" else torch.bfloat16


def dtype_of(options: Any, shape: str) -> str:
    is_large = shape not in ("tiny", "model")
    return options.dtype or ("bfloat16" if is_large and torch.cuda.is_available() else "float32")


def model_and_tokenizer(options: Any, folder: str, shape: str, text: str) -> tuple[Any, Any]:
    """Return a real model, or one with random weights; quantised weights are saved once and read from disk."""
    tokenizer = (
        AutoTokenizer.from_pretrained(options.model, trust_remote_code=False)
        if options.model
        else character_tokenizer(SHAPES[shape][1], ends=text != "free")
    )
    dtype = getattr(torch, dtype_of(options, shape))
    source = Path(options.model or f"{folder}/weights {shape}")
    if not source.exists():
        model = random_model(config_of(shape, dtype_of(options, shape), eos_token_id=tokenizer.eos_token_id))
        if options.quantize is None:
            return model, tokenizer
        model.save_pretrained(source)
        del model
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    quantization = None
    if options.quantize:
        compute = autocast_dtype(options) if torch.cuda.is_available() else torch.float32
        quantization = BitsAndBytesConfig(
            load_in_4bit=options.quantize == "4bit",
            load_in_8bit=options.quantize == "8bit",
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=compute,
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=dtype, quantization_config=quantization, device_map=device, trust_remote_code=False
    )
    return model, tokenizer


def saved_config(options: Any, folder: str, shape: str, tokenizer: Any = None) -> str:
    """Save the configuration of a shape, and the tokenizer if one is given, for vLLM; it makes its own weights."""
    tokenizer = tokenizer or character_tokenizer(SHAPES[shape][1], ends=False)
    path = Path(folder) / f"vllm {shape}"
    config_of(shape, dtype_of(options, shape), eos_token_id=tokenizer.eos_token_id).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def use_dummy_weights_in_vllm() -> None:
    """Let vLLM in TRL's colocate mode make up its weights; TRL replaces them before the first rollout."""
    import trl.generation.vllm_generation as module

    module.LLM = functools.partial(module.LLM, load_format="dummy")


def constraint_of(text: str, tokenizer: Any) -> Any:
    if text == "bricks":
        return ChoiceTreeConstraint(tokenizer, lambda row: ("size", 0), bricks, look_ahead=False)
    if text == "JSON":
        return OneSpelling(tokenizer, GrammarConstraint(tokenizer, Grammar.json_schema(MACHINE)))
    return None


def bricks(node: Any) -> list[tuple[str, Any]]:
    """The choices of a tree of `2x4 (3,0,1)` lines; a node is the position within a line and the number of lines."""
    kind, count = node
    if kind == "size":
        return [(f"{size} (", ("x", count)) for size in ("1x1", "1x2", "2x2", "2x4", "1x4", "2x6")]
    after = {"x": ",", "y": ",", "z": ")\n"}[kind]
    following = {"x": ("y", count), "y": ("z", count), "z": ("size", count + 1)}[kind]
    return [(f"{value}{after}", following) for value in range(20)]
