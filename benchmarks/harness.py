"""Parts that benchmarks share: models with random weights, cells in processes of their own, and Markdown tables.

A cell is one row of a table. It runs in its own process, so that its memory and its start-up are its own, with a time
limit. A cell that fails or takes too long becomes a row with an error, and the values it has reported are kept.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import signal
import socket
import statistics
import string
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Configurations of SmolLM2 (Llama) and Qwen2.5: vocabulary, hidden size, MLP size, layers, heads, KV heads, tied head.
SHAPES: dict[str, tuple[str, int, int, int, int, int, int, bool]] = {
    "tiny": ("llama", 100, 128, 384, 4, 4, 4, False),
    "135M": ("llama", 49152, 576, 1536, 30, 9, 3, True),
    "360M": ("llama", 49152, 960, 2560, 32, 15, 5, True),
    "0.5B": ("qwen2", 151936, 896, 4864, 24, 14, 2, True),
    "1.5B": ("qwen2", 151936, 1536, 8960, 28, 12, 2, True),
    "7B": ("qwen2", 152064, 3584, 18944, 28, 28, 4, False),
}
Report = Callable[[dict[str, Any]], None]


def free_port() -> int:
    """Return a port of this machine on which no server listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def config_of(shape: str, dtype: str, vocabulary: int | None = None, eos_token_id: int | None = None) -> Any:
    """Return the configuration of a shape, with another vocabulary size if one is given."""
    import torch
    from transformers import AutoConfig

    family, size, hidden, intermediate, layers, heads, kv_heads, tied = SHAPES[shape]
    return AutoConfig.for_model(
        family,
        vocab_size=vocabulary or size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
        max_position_embeddings=32768,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        pad_token_id=0,
        architectures=["LlamaForCausalLM" if family == "llama" else "Qwen2ForCausalLM"],
        dtype=getattr(torch, dtype),
    )


def random_model(config: Any) -> Any:
    """Create a model with random weights directly on the GPU, or on the CPU if there is none."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return AutoModelForCausalLM.from_config(config, dtype=config.dtype, trust_remote_code=False)


def add_lora(model: Any) -> Any:
    """Add LoRA adapters of rank 16 to all projections, with small random values instead of zeros in lora_B."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=PROJECTIONS))
    fill_adapters(model)
    return model


def fill_adapters(model: Any) -> None:
    """Fill lora_B, which starts as zero, with small random values."""
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(0, 0.02)


def character_tokenizer(size: int, ends: bool) -> Any:
    """Create a tokenizer of `size` tokens over single characters; tokens that no text needs fill the vocabulary.

    Unless it `ends` texts, the end-of-sequence token has the id `size`, which a model with `size` outputs cannot
    sample, so that every completion has its full length however it is generated.
    """
    from tokenizers import Regex, Tokenizer, decoders
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    tokens = ["<pad>", "<unk>", *(["<eos>"] if ends else []), "\n", *string.printable[:-5]]
    tokens += [f"<{i}>" for i in range(len(tokens), size)] + ([] if ends else ["<eos>"])
    backend = Tokenizer(WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    backend.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=32768,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    assert tokenizer.convert_tokens_to_ids("<eos>") == (2 if ends else size), "the shape's vocabulary is too small"
    return tokenizer


def random_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Return distinct prompts of these lengths, as ids of letters of `character_tokenizer`."""
    rng = random.Random(seed)
    return [[rng.randrange(20, 90) for _ in range(length)] for length in lengths]


def now() -> float:
    """Return the time in seconds after all GPU work has finished."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def memory() -> dict[str, Any]:
    """Return the GPU's name, this process's peak of allocated GB, and the GB in use on the whole GPU now."""
    import torch

    if not torch.cuda.is_available():
        return {"device": f"{os.cpu_count()} CPU cores"}
    free, total = torch.cuda.mem_get_info()
    return {
        "device": torch.cuda.get_device_name(),
        "peak_gb": torch.cuda.max_memory_allocated() / 2**30,
        "device_gb": (total - free) / 2**30,
    }


def run_cells(module: str, cells: Sequence[dict[str, Any]], limit_s: float, log: Path) -> Iterator[dict[str, Any]]:
    """Run `measure(report, **cell)` of a module for each cell and yield the cell with all values it reported.

    The function calls `report` with values as soon as it has them. An `error` of one line is among the values of a
    cell that failed or took longer than `limit_s`. The output of the cells goes to the file `log`. The process of the
    next cell imports the module while a cell runs.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    started = [_start(module, log)] if cells else []
    try:
        for n, cell in enumerate(cells, 1):
            process, pipe = started[0]
            if n < len(cells):
                started.append(_start(module, log))
            values = dict(cell)
            with suppress(BrokenPipeError):  # the process has already failed, and its error can be received
                pipe.send(cell)
            end = time.monotonic() + limit_s
            try:
                while pipe.poll(max(end - time.monotonic(), 0)):
                    values |= pipe.recv()
                    if values.pop("done", False):
                        process.join(30)  # it ends by itself: killing a process that uses a GPU can disturb others
                        break
                else:
                    values["error"] = f"stopped after {limit_s:g} s"
            except EOFError:
                process.join(10)
                values["error"] = f"the process ended with exit code {process.exitcode}"
            _end(started.pop(0)[0])
            yield values
    finally:
        for process, _ in started:
            _end(process)


def _end(process: Any) -> None:
    """End a process and the processes that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.is_alive():  # it has not yet made its own process group
        process.kill()
    process.join()


def _start(module: str, log: Path) -> tuple[Any, Connection]:
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, module, str(log)))
    process.start()
    there.close()
    return process, here


def _serve(pipe: Connection, module: str, log: str) -> None:
    """Import the module, wait for a cell and run it."""
    os.setsid()  # a process group of its own, which can be ended as a whole
    file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, sys.stdout.fileno())
    os.dup2(file, sys.stderr.fileno())
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # nothing is lost when it is ended
    try:
        measure = importlib.import_module(module).measure
        cell = pipe.recv()
        print(f"\n== {cell}")
        measure(pipe.send, **cell)
    except BaseException as error:  # noqa: BLE001 (whatever fails becomes a row of the table)
        traceback.print_exc()
        pipe.send({"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]})
    pipe.send({"done": True})


def shown(value: Any) -> str:
    """Return a value as a table shows it; of several, the median with the smallest and the largest."""
    if isinstance(value, list):
        middle = shown(statistics.median(value)) if value else ""
        return middle if len(value) < 2 else f"{middle} ({shown(min(value))}-{shown(max(value))})"
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Return the mean of values with the smallest and the largest."""
    low, mean, high = (f"{value:.{digits}f}" for value in (min(values), statistics.fmean(values), max(values)))
    return f"{mean} ({low}-{high})"


def table_parser(description: str | None, file: str, limit: float = 240) -> argparse.ArgumentParser:
    """Return a parser with the options that `run_table` reads; results are named after the benchmark's file."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=limit, help="seconds after which a row is given up")
    parser.add_argument("--out", default=str(Path(file).parent / "results" / f"{Path(file).stem}.json"))
    return parser


def flags(options: dict[str, Any]) -> list[str]:
    """Options as words of a command line; a list has several values."""
    return [
        word
        for name, value in options.items()
        for word in (f"--{name}", *map(str, value if isinstance(value, list) else [value]))
    ]


def run_table(
    module: str,
    cells: Sequence[dict[str, Any]],
    options: Any,
    columns: Mapping[str, str],
    derive: Callable[[dict[str, Any], list[dict[str, Any]]], dict[str, Any]] = lambda row, rows: {},
    **settings: Any,
) -> None:
    """Run cells, print a line of a Markdown table for each, and write all rows to `options.out` after each.

    `columns` maps headings to the names of values. Cells get `options` and `settings` as well, which are not among the
    values. `derive` returns more values of a row, given the rows before it.
    """
    hidden = {"options": options, **settings}
    print(table_line(list(columns)), table_line(["---"] * len(columns)), sep="\n", flush=True)
    rows: list[dict[str, Any]] = []
    given = [{**hidden, **cell} for cell in cells]
    for values in run_cells(module, given, options.limit, Path(options.out).with_suffix(".log")):
        row = {name: value for name, value in values.items() if name not in hidden}
        row |= derive(row, rows)
        rows.append(row)
        print(table_line([row.get(key) for key in columns.values()], row.get("error")), flush=True)
        write_results(options.out, rows)


def table_line(cells: Sequence[Any], error: str | None = None) -> str:
    """Return a line of a Markdown table, with an error after it if there is one."""
    return f"| {' | '.join(map(shown, cells))} |{'' if error is None else f' {error}'}"


def write_results(path: str | Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write all rows so far as JSON."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps({"command": " ".join(sys.argv[1:]), "results": list(rows)}, indent=1))
