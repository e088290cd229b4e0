"""Repair over k turns against independent samples, at equal numbers of tokens.

    python benchmarks/repair.py --task prompts --model outputs/prompts_repair --turns 2 3

Attempts are made until one succeeds or the budget of tokens is spent. An attempt is one answer, or a conversation of
up to k turns, whose feedback counts as tokens. Prints a Markdown table with the share of held-out rows that are
solved within a budget, and writes benchmarks/results/repair.json. Brackets: 95% bootstrap intervals over requests.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from trl_grpo_tasks.evaluation.evaluate import evaluate
from trl_grpo_tasks.models.loading import load_model, load_tokenizer
from trl_grpo_tasks.registry import get_task
from trl_grpo_tasks.rewards.executor import RewardExecutor
from trl_grpo_tasks.rewards.repair import MOST_TURNS, RepairTask
from trl_grpo_tasks.task import one_per_request

ORDERS = 200  # random orders of the attempts of a row
RESAMPLES = 2000
Attempt = tuple[bool, int]  # success, tokens


def solved(attempts: Sequence[Attempt], budget: float, rng: random.Random) -> float:
    """The probability that attempts in random order succeed before their tokens exceed the budget."""
    wins = 0
    for _ in range(ORDERS):
        left = budget
        for success, tokens in rng.sample(attempts, len(attempts)):
            left -= tokens
            if left < 0 or success:
                wins += success and left >= 0
                break
    return wins / ORDERS


def most_budget(attempts_P: Sequence[Sequence[Attempt]]) -> int:
    """The largest budget that the attempts of every row cover."""
    return min(sum(tokens for _, tokens in attempts) for attempts in attempts_P)


def interval(values_P: Sequence[float]) -> tuple[float, float]:
    means = np.random.default_rng(0).choice(np.array(values_P), (RESAMPLES, len(values_P))).mean(1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="prompts")
    parser.add_argument("--options", type=json.loads, default={}, metavar="JSON", help="options of the task")
    parser.add_argument("--model", required=True, help="a folder or Hub id; best one that was trained with repair")
    parser.add_argument(
        "--turns", type=int, nargs="+", default=[2], help=f"turns of a conversation, 2 to {MOST_TURNS}"
    )
    parser.add_argument("--constrain", action="store_true", help="sample under the task's constraint")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--samples", type=int, default=16, help="attempts per row and kind")
    parser.add_argument("--answer_length", type=int, default=64, help="tokens of one turn with its feedback, at most")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    task = get_task(options.task, options.options)
    rows = one_per_request(task, task.dataset("test", options.rows, options.seed))
    tokenizer = load_tokenizer(options.model)
    model = load_model(options.model, dtype="float32").to("cuda" if torch.cuda.is_available() else "cpu")
    attempts: dict[int, list[list[Attempt]]] = {}
    for turns in (1, *options.turns):
        kind = task if turns == 1 else RepairTask(task, turns, 1.0, options.constrain)
        constraint = kind.constraint(tokenizer) if options.constrain or turns > 1 else None
        with RewardExecutor(kind) as executor:
            samples = evaluate(
                f"{turns} turns", model, tokenizer, kind, rows, executor=executor, num_samples=options.samples,
                max_completion_length=turns * options.answer_length, constraint=constraint, seed=options.seed,
            ).samples  # fmt: skip
        made = [(bool(sample.score and sample.score["success"]), sample.tokens or 0) for sample in samples]
        attempts[turns] = [made[i : i + options.samples] for i in range(0, len(made), options.samples)]
    answer = np.mean([tokens for row in attempts[1] for _, tokens in row])
    most = min(map(most_budget, attempts.values()))
    budgets = [round(factor * answer) for factor in (1, 2, 4, 8, 16) if factor * answer <= most]
    print(f"{len(rows)} held-out rows of task {task.name} {task.version}, {options.samples} attempts each, seed "
          f"{options.seed}; an answer has {answer:.1f} tokens on average\n")  # fmt: skip
    print("| attempt | success | tokens | " + " | ".join(f"solved in {budget} tokens" for budget in budgets) + " |")
    print("|---" * (3 + len(budgets)) + "|")
    results = []
    for turns, attempts_P in attempts.items():
        success = float(np.mean([won for row in attempts_P for won, _ in row]))
        tokens = float(np.mean([count for row in attempts_P for _, count in row]))
        cells, result = [], {"turns": turns, "success": success, "tokens": tokens, "solved": {}}
        for budget in budgets:
            solved_P = [solved(row, budget, random.Random(f"{i}")) for i, row in enumerate(attempts_P)]
            low, high = interval(solved_P)
            result["solved"][budget] = [float(np.mean(solved_P)), low, high]
            cells.append(f"{np.mean(solved_P):.3f} [{low:.3f}, {high:.3f}]")
        name = "1 turn" if turns == 1 else f"{turns} turns"
        print(f"| {name} | {success:.3f} | {tokens:.1f} | {' | '.join(cells)} |", flush=True)
        results.append(result)
    folder = Path(__file__).parent / "results"
    folder.mkdir(exist_ok=True)
    (folder / "repair.json").write_text(json.dumps({"options": vars(options), "results": results}, indent=1))


if __name__ == "__main__":
    main()
