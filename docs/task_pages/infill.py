"""Generated blocks of the page of task infill: an example, ways of masking and the built-in corpus."""

from __future__ import annotations

from trl_grpo_tasks import get_task

from .blocks import SEED, code, fenced, first_row, table


def example() -> str:
    task, row = first_row("infill", lambda row: row["schedule"] == "words")
    causal = get_task("infill", {"policy": "causal"})
    other = next(row for row in causal.dataset("test", 64, SEED) if row["schedule"] == "words")
    return "\n\n".join(
        [
            "A masked policy reads a text with mask tokens, and writes one token per mask:",
            fenced(row["prompt"]),
            fenced(task.gold(row)),
            "The filled text, which is what judges read:",
            fenced(task.filled(row, task.gold(row))),
            "A causal policy (`--policy causal`) reads the same text as a chat message, and writes a line per gap:",
            fenced(other["prompt"][-1]["content"]),
            fenced(causal.gold(other)),
        ]
    )


def masking() -> str:
    from trl_grpo_tasks.tasks.infill.masking import SCHEDULES, SPAN_LENGTHS

    meaning = {
        "characters": "single characters, anywhere",
        "spans": "runs of {} to {} characters, or as `--span_lengths` says".format(*SPAN_LENGTHS),
        "words": "whole words with their punctuation",
        "ends": "the beginning of the text, its end, or both",
    }
    rows = []
    for name in SCHEDULES:
        task = get_task("infill", {"masking": [name], "policy": "causal"})
        row = next(row for row in task.dataset("test", 64, SEED) if row["level"] == "0.2")
        rows.append((code(name), meaning[name], code(row["prompt"][-1]["content"].split("\n")[1])))
    return table(["`--masking`", "gaps", "example"], rows)


def corpus() -> str:
    from trl_grpo_tasks.tasks.infill.data import alphabet, cut, read_passages

    passages = read_passages(None, "text")
    parts = cut(passages, get_task("infill").options.test_fraction)
    letters = len({" ", *alphabet(passages)})
    rows = [
        ("passages", *(f"{len(parts[split]):,}" for split in ("train", "test"))),
        ("characters", *(f"{sum(map(len, parts[split])):,}" for split in ("train", "test"))),
    ]
    return table(["built-in corpus", "train", "test"], rows) + f"\n\nIts alphabet has {letters} characters."
