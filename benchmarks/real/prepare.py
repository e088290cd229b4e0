"""Data of the tables of compare.py, as files that task prompts reads.

    python benchmarks/real/prepare.py gsm8k --out data [--source FOLDER]   # openai/gsm8k from the Hub, or a local copy
    python benchmarks/real/prepare.py humaneval --out data --source human-eval-v1-20210705.jsonl.gz

A local copy of GSM8K is a folder with train.jsonl(.gz) and test.jsonl(.gz), whose lines have `question` and `answer`.
The file of HumanEval comes with the package human-eval; its problems become prompts with unit tests.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

INSTRUCTION = "Solve the problem step by step. Write the final number after ####."
CODE = "Complete this Python function. Answer with the whole function in a ```python block.\n\n```python\n{}```"


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    yield from map(json.loads, content.decode().splitlines())


def gsm8k(source: str | None) -> dict[str, list[dict[str, Any]]]:
    """Training and test problems."""
    if source is None:
        from datasets import load_dataset

        splits: dict[str, Any] = dict(load_dataset("openai/gsm8k", "main"))
    else:
        files = {split: sorted(Path(source).glob(f"{split}.jsonl*")) for split in ("train", "test")}
        if missing := [split for split, found in files.items() if not found]:
            raise SystemExit(f"{source} has no file {missing[0]}.jsonl or {missing[0]}.jsonl.gz")
        splits = {split: lines_of(found[0]) for split, found in files.items()}
    return {
        f"gsm8k_{split}": [
            {"prompt": f"{row['question'].strip()}\n\n{INSTRUCTION}", "answer": row["answer"]} for row in splits[split]
        ]
        for split in ("train", "test")
    }


def humaneval(source: str | None) -> dict[str, list[dict[str, Any]]]:
    """The problems as prompts, each with its unit tests as one statement list."""
    if source is None:
        raise SystemExit(
            "humaneval needs --source, the file human-eval-v1-20210705.jsonl.gz of the package human-eval"
        )
    return {
        "humaneval": [
            {
                "prompt": CODE.format(row["prompt"]),
                "tests": [f"{row['test']}\ncheck({row['entry_point']})"],
                "gold": f"```python\n{row['prompt']}{row['canonical_solution']}```",
                "rewards": ["tests"],
            }
            for row in lines_of(Path(source))
        ]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", choices=["gsm8k", "humaneval"])
    parser.add_argument("--source", help="local copy")
    parser.add_argument("--out", type=Path, default=Path("data"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name, rows in globals()[options.data](options.source).items():
        path = options.out / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        print(f"{path}: {len(rows)} rows")


if __name__ == "__main__":
    main()
