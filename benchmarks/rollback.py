"""Cost of physics rollback: seconds that the editor takes for the structures of many captions, on one core.

    python benchmarks/rollback.py [--captions 200] [--levels small carry room overhang furniture]

No model is used. A simulated one writes the gold answers, and makes a mistake in each of the first --mistakes tries of
a caption: a brick that floats or collides. The editor of `--editor
rollback` gets the tokens as the rollout gives them, one more per call, and cuts back what does not stand. Prints
CPU seconds, rollbacks, and a checksum of everything that was kept, which must not depend on the speed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trl_grpo_tasks.models.tiny import make_tokenizer
from trl_grpo_tasks.tasks.brick import BrickOptions, BrickTask


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--captions", type=int, default=200)
    parser.add_argument("--levels", nargs="+", default=["small", "carry", "room", "overhang", "furniture"])
    parser.add_argument("--editor", default="rollback", help="rollback or rejection+rollback")
    parser.add_argument("--mistakes", type=int, default=2, help="failed tries per caption: the published median")
    parser.add_argument("--output", default=str(Path(__file__).parent / "results" / "rollback.json"))
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    task = BrickTask(BrickOptions(brick_levels=options.levels, max_bricks=200))
    rows = task.dataset("test", options.captions, 0)
    spec = task.tiny()
    assert spec is not None
    tokenizer = make_tokenizer(spec.tokens, spec.context)
    task.editor(options.editor, rows[:1], tokenizer).keep(0, [*tokenizer.encode(rows[0]["gold"]), 0], True)  # warm-up
    editor = task.editor(options.editor, rows, tokenizer)
    seconds, kept = 0.0, hashlib.sha256()
    for index, row in enumerate(rows):
        for ids, start in tries(row, tokenizer, options.mistakes, index):
            for count in range(start + 1, len(ids) + 1):
                began = time.process_time()
                cut = editor.keep(index, ids[:count], count == len(ids))
                seconds += time.process_time() - began
                if cut is not None:
                    kept.update(f"{index} {count} {cut}\n".encode())
                    del ids[cut:]
                    break
    counts = [editor.counts(index) for index in range(len(rows))]
    result = {
        "captions": len(rows),
        "bricks": sum(row["gold"].count("\n") for row in rows) / len(rows),
        "rollbacks": sum(count["rollbacks"] for count in counts),
        "cpu_seconds": round(seconds, 2),
        "kept": kept.hexdigest()[:16],
    }
    print(json.dumps(result))
    machine = {"machine": platform.machine(), "processors": os.cpu_count(), "python": platform.python_version()}
    output = Path(options.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({**machine, **vars(options), **result}, indent=2))


def tries(row: Mapping[str, Any], tokenizer: Any, mistakes: int, seed: int) -> Iterator[tuple[list[int], int]]:
    """Yield the tokens of each try of a caption and how many of them were kept from the try before.

    The consumer deletes from the list what the editor cuts; the next try goes on from there.
    """
    rng = random.Random(seed)
    gold = tokenizer.encode(row["gold"])
    ids: list[int] = []
    for number in range(mistakes + 1):
        start = len(ids)
        rest = gold[start:] if gold[:start] == ids else tokenizer.encode("")
        if number < mistakes:
            rest = spoilt(tokenizer, rest, row, rng)
        ids += [*rest, tokenizer.eos_token_id]
        yield ids, start
        if ids and ids[-1] == tokenizer.eos_token_id:
            return


def spoilt(tokenizer: Any, rest: Sequence[int], row: Mapping[str, Any], rng: random.Random) -> list[int]:
    """Insert a line that is wrong at a random place."""
    lines = tokenizer.decode(rest).splitlines(keepends=True)
    place = rng.randint(0, len(lines))
    top = row["world"] - 1
    wrong = rng.choice([f"1x1 ({top},{top},{top})\n", f"1x1 ({top},{top},{top // 2})\n", *lines[-1:]])
    return tokenizer.encode("".join([*lines[:place], wrong, *lines[place:]]))


if __name__ == "__main__":
    main()
