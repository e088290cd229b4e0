"""Cost of sampling filters in fast rollouts, as the ratio of rollout times with and without filters.

    python benchmarks/filters.py          # on a GPU: 64 rows of 256 tokens, 135M model; on a CPU: a small model

Weights are random, and the LM head is scaled up so that the distribution is not flat. Rows never end. Prints a table
and writes benchmarks/results/filters.json.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trl_grpo_tasks.constraints.filters import SamplingFilters
from trl_grpo_tasks.constraints.table import MaskTable
from trl_grpo_tasks.rollout import Decoder, rollout

CASES = [
    SamplingFilters(),
    SamplingFilters(top_k=50),
    SamplingFilters(top_p=0.95),
    SamplingFilters(min_p=0.05),
    SamplingFilters(top_k=50, top_p=0.95, min_p=0.05),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--rows", type=int, default=64 if on_gpu else 16)
    parser.add_argument("--length", type=int, default=256 if on_gpu else 16)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=options.vocabulary, hidden_size=576, intermediate_size=1536, num_attention_heads=9,
                         num_key_value_heads=3, num_hidden_layers=30 if on_gpu else 2)  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(6.0)
    model = model.to("cuda", torch.bfloat16) if on_gpu else model
    prompts = [list(range(5 + i % 8, 105 + i % 8)) for i in range(options.rows)]  # eight distinct prompts
    decoder, results = Decoder(model), {}
    for filters in CASES:
        times = []
        for _ in range(options.repeats + 1):  # the first is a warm-up
            table = MaskTable(options.vocabulary)
            start = time.perf_counter()
            out = rollout(model, prompts, max_new_tokens=options.length, eos_token_ids=[-1], filters=filters,
                          table=table, decoder=decoder)  # fmt: skip
            times.append(time.perf_counter() - start)
        results[str(filters) or "none"] = seconds = min(times[1:])
        kept = np.mean([table.counts(np.array(row)).mean() for row in out.masks])
        print(
            f"{str(filters) or 'none':34} {seconds:7.3f} s   ratio {seconds / results['none']:5.2f}   kept {kept:8.1f}"
        )
    path = Path(__file__).parent / "results" / "filters.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"device": str(model.device), "seconds": results}, indent=1))


if __name__ == "__main__":
    main()
