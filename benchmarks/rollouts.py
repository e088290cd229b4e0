"""Rollouts against transformers' `generate` (which is what TRL calls), same model, same prompts, same constraint.

    python benchmarks/rollouts.py [--model FOLDER] [--group 16] [--prompts 4] [--length 128] [--prompt_length 100]

Without --model: the embedded kind of model (hidden size 128, 4 layers) over single characters. Three texts: free;
brick lines under a choice tree (about half of the characters are forced); a long JSON object under its schema (most of
them are). Tokens a second count what was written, forced or not. In turn, median of --repeats. Prints a table and
writes benchmarks/results/rollouts.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import string
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from trl_grpo_tasks.constraints import ChoiceTreeConstraint, Grammar, GrammarConstraint
from trl_grpo_tasks.constraints.sampling import ConstraintProcessor
from trl_grpo_tasks.constraints.table import MaskTable
from trl_grpo_tasks.models import make_tokenizer
from trl_grpo_tasks.rollout import rollout

PART = {"type": "object", "properties": {"kind": {"enum": ["wheel", "block", "hinge"]}, "parent": {"enum": [0, 1, 2]},
        "face": {"enum": ["top", "left", "right"]}}, "required": ["kind", "parent", "face"]}  # fmt: skip
MACHINE = {"type": "object", "properties": {f"part_{i}": PART for i in range(12)},
           "required": [f"part_{i}" for i in range(12)]}  # fmt: skip


def bricks(node: Any) -> list[tuple[str, Any]]:
    """`2x4 (3,0,1)` lines; what may follow depends on where in a line we are and on how many lines there are."""
    kind, count = node
    if kind == "size":
        return [(f"{size} (", ("x", count)) for size in ("1x1", "1x2", "2x2", "2x4", "1x4", "2x6")]
    after = {"x": ",", "y": ",", "z": ")\n"}[kind]
    following = {"x": ("y", count), "y": ("z", count), "z": ("size", count + 1)}[kind]
    return [(f"{value}{after}", following) for value in range(20)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model folder; a tiny Llama over single characters if not given")
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--prompt_length", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.model:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        model = AutoModelForCausalLM.from_pretrained(options.model).to(device)
    else:
        tokenizer = make_tokenizer(list(string.printable[:-5]), 4096)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384,
                                             num_hidden_layers=4, num_attention_heads=4)).to(device)  # fmt: skip
    model.eval()
    words = tokenizer("build a strong table with four legs " * options.prompt_length)["input_ids"]
    prompts = [words[i : i + options.prompt_length] for i in range(options.prompts) for _ in range(options.group)]
    vocabulary = model.get_output_embeddings().weight.shape[0]
    constraints: dict[str, Any] = {
        "free": None,
        "bricks": ChoiceTreeConstraint(tokenizer, lambda row: ("size", 0), bricks, look_ahead=False),
        "JSON": GrammarConstraint(tokenizer, Grammar.json_schema(MACHINE)),
    }

    def with_generate(constraint: Any) -> int:
        ids = torch.tensor(prompts, device=device)
        processors = (
            [] if constraint is None else [ConstraintProcessor(constraint, [{}] * len(prompts), MaskTable(vocabulary))]
        )
        with torch.no_grad():
            out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0,
                                 max_new_tokens=options.length, logits_processor=processors,
                                 eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.eos_token_id)  # fmt: skip
        written = out[:, options.prompt_length :]
        is_end = (written == tokenizer.eos_token_id).int()
        return int(((is_end.cumsum(1) - is_end) == 0).sum())

    def with_rollout(constraint: Any) -> int:
        more = (
            {}
            if constraint is None
            else {"constraint": constraint, "rows": [{}] * len(prompts), "table": MaskTable(vocabulary)}
        )
        out = rollout(model, prompts, max_new_tokens=options.length, eos_token_ids=[tokenizer.eos_token_id], **more)
        return sum(map(len, out.completion_ids))

    size = f"{options.prompts} prompts of {options.prompt_length} tokens, up to {options.length} new ones"
    print(f"{len(prompts)} rows, {size}, on {device}")
    print(f"{'text':<8} {'generate tokens/s':>18} {'rollout tokens/s':>17} {'ratio':>6}")
    results = []
    for name, constraint in constraints.items():
        speeds: dict[str, list[float]] = {"generate": [], "rollout": []}
        for turn in range(options.repeats + 1):
            for way, function in (("generate", with_generate), ("rollout", with_rollout)):
                torch.manual_seed(turn)
                start = time.perf_counter()
                tokens = function(constraint)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                if turn:
                    speeds[way].append(tokens / (time.perf_counter() - start))
        medians = {way: statistics.median(values) for way, values in speeds.items()}
        ratio = medians["rollout"] / medians["generate"]
        results.append({"text": name, **medians, "ratio": ratio})
        print(f"{name:<8} {medians['generate']:>18.0f} {medians['rollout']:>17.0f} {ratio:>6.2f}")
    path = Path(__file__).parent / "results" / "rollouts.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"device": str(device), "results": results}, indent=1))


if __name__ == "__main__":
    main()
