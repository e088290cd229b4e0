"""Completions of untrained tiny models that are cut off at the limit, with and without masks that end in time.

python benchmarks/cut_off.py
"""

from tempfile import TemporaryDirectory

import torch

from trl_grpo_tasks.constraints.budget import within
from trl_grpo_tasks.evaluation import sampler
from trl_grpo_tasks.models.loading import load_model, load_tokenizer, prepare_model
from trl_grpo_tasks.registry import get_task

RUNS = [
    ("brick", {}, 64),
    ("machine", {}, 60),
    ("prompts", {"generator": "schema"}, 256),
    ("prompts", {"generator": "arithmetic", "think": True}, 64),
]


def main():
    for name, options, limit in RUNS:
        task = get_task(name, options)
        with TemporaryDirectory() as folder:
            path = prepare_model("tiny", task, folder, 0, "main")
            tokenizer, model = load_tokenizer(path), load_model(path, dtype="float32").eval()
        rows = task.dataset("train", 64, 0) * 2
        for label, limited in (("before", lambda constraint, most: constraint), ("after", within)):
            sampler.within = limited
            torch.manual_seed(0)
            under = sampler.CompletionSampler(model, tokenizer, 1.0, limit, task.constraint(tokenizer))
            drawn = under.sample(rows)
            scores = [task.score(row, one.text) for row, one in zip(rows, drawn, strict=True)]
            cut_off, valid = (
                sum(one.cut_off for one in drawn),
                sum(score is not None and score.valid for score in scores),
            )
            print(
                f"{name} {options} limit {limit} {label}: {cut_off} of {len(drawn)} cut off, {valid} valid", flush=True
            )


if __name__ == "__main__":
    main()
