"""Rollouts and complete GRPO steps: TRL's generation, vLLM alone, TRL with colocated vLLM, and our rollouts.

    python benchmarks/rollouts.py [--shape tiny] [--ways trl ours] [--weights lora full] [--quantize 4bit]
                                  [--prompt_lengths 100] [--lengths 256] [--groups 8] [--texts free bricks JSON]

Shapes have random weights: tiny is a Llama like the embedded tiny models, 135M is SmolLM2's configuration, the others
are Qwen2.5's. --model FOLDER measures a real model instead. The ways are

    trl         TRL's GRPOTrainer with transformers' generate
    trl+vllm    TRL's GRPOTrainer with vLLM in the same process (colocate)
    vllm        vLLM's LLM.generate without a trainer, full weights
    ours alone  our rollouts without a trainer
    ours        our trainer

Without a constraint every completion has its full length. Each row is a process of its own, with one warm-up and
--repeats measured rollouts or steps: median (smallest-largest). Start-up is what the constructor of the trainer or of
the engine and the warm-up take longer than a measured step; vLLM reads no weights from disk, and compilation caches
of earlier runs are used. Peak GB is the process's peak of allocated memory, device GB is what is in use on the GPU at
the end, with vLLM's pool. Ratios above 1 mean faster: rollouts against vllm, steps against trl+vllm, each against trl
where that is not measured. Texts under a constraint: brick lines under a choice tree, with about half of the tokens
forced; a long JSON object under its schema, with most tokens forced. Rows are printed and written as JSON at once; the
output of the processes is in a .log file next to it.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import statistics
import tempfile
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
    run_cells,
    table_line,
    write_results,
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
TEXTS = ("free", "bricks", "JSON")
WAYS = ("vllm", "trl+vllm", "trl", "ours alone", "ours")  # in this order, so that ratios are known at once
KEYS = ("shape", "weights", "text", "prompt", "group", "length")
COLUMNS = {key: key for key in (*KEYS, "way")} | {
    "rollout s": "rollout_s",
    "rollout ratio": "rollout_ratio",
    "step s": "step_s",
    "step ratio": "step_ratio",
    "tokens/s": "tokens_per_s",
    "start-up s": "start_up_s",
    "peak GB": "peak_gb",
    "device GB": "device_gb",
}


def bricks(node: Any) -> list[tuple[str, Any]]:
    """The choices of a tree of `2x4 (3,0,1)` lines; a node is the position within a line and the number of lines."""
    kind, count = node
    if kind == "size":
        return [(f"{size} (", ("x", count)) for size in ("1x1", "1x2", "2x2", "2x4", "1x4", "2x6")]
    after = {"x": ",", "y": ",", "z": ")\n"}[kind]
    following = {"x": ("y", count), "y": ("z", count), "z": ("size", count + 1)}[kind]
    return [(f"{value}{after}", following) for value in range(20)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=["tiny"], choices=list(SHAPES))
    parser.add_argument("--model", help="model folder, instead of a shape")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"],
                        help="dtype of the weights (default: bfloat16 for shapes on a GPU, else float32)")  # fmt: skip
    parser.add_argument("--quantize", choices=["4bit", "8bit"], help="bitsandbytes weights, with LoRA")
    parser.add_argument("--weights", nargs="+", default=["lora", "full"], choices=["lora", "full"])
    parser.add_argument("--ways", nargs="+", default=["trl", "ours"], choices=WAYS)
    parser.add_argument("--prompt_lengths", nargs="+", type=int, default=[100])
    parser.add_argument("--texts", nargs="+", default=["free"], choices=TEXTS)
    parser.add_argument("--groups", nargs="+", type=int, default=[8], help="completions per prompt")
    parser.add_argument("--lengths", nargs="+", type=int, default=[256], help="maximum tokens per completion")
    parser.add_argument("--prompts", type=int, default=8, help="distinct prompts per step")
    parser.add_argument("--repeats", type=int, default=3, help="measured steps after one warm-up step")
    parser.add_argument("--vllm_memory", type=float, default=0.3, help="fraction of the GPU that vLLM may use")
    parser.add_argument("--limit", type=float, default=240, help="seconds after which a row is given up")
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "rollouts.json"))
    options = parser.parse_args()

    ways = [way for way in WAYS if way in options.ways]
    for way in [way for way in ways if "vllm" in way]:
        reason = importlib.util.find_spec("vllm") is None and "vLLM is not installed"
        if reason := reason or (options.quantize and "it is not measured with quantised weights"):
            print(f"skipped: {way}, because {reason}")
            ways.remove(way)
    shapes = ["model"] if options.model else options.shape
    weights = ["lora"] if options.quantize else options.weights
    cells = [
        dict(zip(KEYS, values, strict=True)) | {"way": way}
        for *values, way in itertools.product(
            shapes, weights, options.texts, options.prompt_lengths, options.groups, options.lengths, ways
        )
        if way in ("trl", "ours") or values[2] == "free"  # only these two trainers sample under our constraints
        if way != "vllm" or values[1] == weights[-1]  # once per shape
    ]
    cells.sort(key=lambda cell: (shapes.index(cell["shape"]), WAYS.index(cell["way"]) > 0))  # vLLM before all ratios
    rows: list[dict[str, Any]] = []
    print(table_line(list(COLUMNS)), table_line(["---"] * len(COLUMNS)), sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        settings = [{"options": options, "folder": folder, **cell} for cell in cells]
        for row in run_cells(measure, settings, options.limit, Path(options.out).with_suffix(".log")):
            del row["options"], row["folder"]
            if row["way"] == "vllm":
                row["weights"] = "full"
            rows.append(row := row | ratios(row, rows))
            print(table_line([row.get(key) for key in COLUMNS.values()], row.get("error")), flush=True)
            write_results(options.out, rows)


def ratios(row: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return how many times as fast as the baseline the rollouts and the steps of a row are."""
    found = {}
    for kind, baselines in (("rollout_s", ("vllm", "trl")), ("step_s", ("trl+vllm", "trl"))):
        for baseline in (one for way in baselines for one in rows if one["way"] == way):
            same = all(baseline[key] == row[key] or (baseline["way"], key) == ("vllm", "weights") for key in KEYS)
            if same and row.get(kind) and baseline.get(kind):
                ratio = statistics.median(baseline[kind]) / statistics.median(row[kind])
                found.setdefault(kind.replace("_s", "_ratio"), ratio)
    return found


def measure(report: Report, options: Any, folder: str, way: str, **cell: Any) -> None:
    """Measure one row."""
    os.environ |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
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
        with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):  # as the trainer does
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
        use_dummy_weights_in_vllm(options)
        kind = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": options.vllm_memory,
            "vllm_max_model_length": prompt + length,
        }
    constraint = constraint_of(text, tokenizer)
    if is_ours := way == "ours" or constraint is not None:
        kind = {"rollout": "fast" if way == "ours" else "trl", "share_prompts": way == "ours"}
        kind["constrain"] = constraint is not None
    words = tokenizer("build a strong table with four legs " * prompt)["input_ids"]
    texts = [tokenizer.decode(words[i : i + prompt]) for i in range(options.prompts * (options.repeats + 1))]
    args = (TaskGRPOConfig if is_ours else GRPOConfig)(
        output_dir=folder,
        per_device_train_batch_size=options.prompts * group,
        num_generations=group,
        max_completion_length=length,
        max_steps=options.repeats + 1,
        bf16=on_gpu,
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
    if way == "ours" and not trainer._uses_engine:
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


def dtype_of(options: Any, shape: str) -> str:
    is_large = shape not in ("tiny", "model")
    return options.dtype or ("bfloat16" if is_large and torch.cuda.is_available() else "float32")


def model_and_tokenizer(options: Any, folder: str, shape: str, text: str) -> tuple[Any, Any]:
    """Return a real model, or one with random weights; quantised weights are saved once and read from disk."""
    tokenizer = (
        AutoTokenizer.from_pretrained(options.model)
        if options.model
        else character_tokenizer(SHAPES[shape][1], ends=text != "free")
    )
    dtype = getattr(torch, dtype_of(options, shape))
    if options.model is None:
        model = random_model(config_of(shape, dtype_of(options, shape), eos_token_id=tokenizer.eos_token_id))
        if options.quantize is None:
            return model, tokenizer
        source = Path(folder) / f"weights {shape}"
        if not source.exists():
            model.save_pretrained(source)
        del model
    source = Path(options.model or source)
    quantization = None
    if options.quantize:
        compute = torch.bfloat16 if torch.cuda.is_available() else torch.float32
        quantization = BitsAndBytesConfig(
            load_in_4bit=options.quantize == "4bit",
            load_in_8bit=options.quantize == "8bit",
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=compute,
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=dtype, quantization_config=quantization, device_map=device
    )
    return model, tokenizer


def saved_config(options: Any, folder: str, shape: str, tokenizer: Any = None) -> str:
    """Save the configuration of a shape, and the tokenizer if one is given, for vLLM; it makes its own weights."""
    tokenizer = tokenizer or character_tokenizer(SHAPES[shape][1], ends=False)
    path = Path(folder) / f"vllm {shape}"
    config_of(shape, dtype_of(options, shape), eos_token_id=tokenizer.eos_token_id).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def use_dummy_weights_in_vllm(options: Any) -> None:
    """Set vLLM up for TRL's colocate mode; TRL replaces vLLM's made-up weights before the first rollout."""
    import functools

    import trl.generation.vllm_generation as module

    rendezvous = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
    }
    os.environ |= rendezvous
    if options.model is None:
        module.LLM = functools.partial(module.LLM, load_format="dummy")


def constraint_of(text: str, tokenizer: Any) -> Any:
    if text == "bricks":
        return ChoiceTreeConstraint(tokenizer, lambda row: ("size", 0), bricks, look_ahead=False)
    if text == "JSON":
        return OneSpelling(tokenizer, GrammarConstraint(tokenizer, Grammar.json_schema(MACHINE)))
    return None


if __name__ == "__main__":
    main()
