"""Rows from the published data set StableText2Brick, by Hub id or from files in its format.

Its columns are `structure_id`, `object_id`, `category_id` (a WordNet number, as in ShapeNet), `captions` (several per
structure), `bricks` (text in our absolute format, in a world of 20) and `stability_scores` (8,000 numbers per row,
which are not read).
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ....files import check_local_path
from ..structure import READ_LIMIT, WORLD, parse
from .designs import encode_voxels, negatives

DATASET = "AvaLovelace/StableText2Brick"
LEVEL = "published"
COLUMNS = ("object_id", "category_id", "captions", "bricks")
FILES = (".jsonl", ".json", ".parquet")
TEST_SHARE = 0.1  # fraction of the objects held out from a file without splits

CATEGORY_IDS = {
    "02801938": "basket", "02818832": "bed", "02828884": "bench", "02843684": "birdhouse", "02871439": "bookshelf",
    "02876657": "bottle", "02880940": "bowl", "02924116": "bus", "02942699": "camera", "02958343": "car",
    "03001627": "chair", "03467517": "guitar", "03593526": "jar", "03797390": "mug", "03928116": "piano",
    "03991062": "pot", "04256520": "sofa", "04379243": "table", "04460130": "tower", "04468005": "train",
    "04530566": "ship",
}  # fmt: skip


def from_hub(
    source: str = DATASET, split: str = "train", size: int | None = None, seed: int = 0, max_bricks: int = READ_LIMIT
) -> list[dict[str, Any]]:
    """Return `size` rows (None: all) of a split in random order, each with one of its structure's captions.

    Of structures with one shape and one caption, which differ in their layout only, the first is taken. Structures of
    more than `max_bricks` bricks are left out.

    `source` is a Hub id, a folder with files whose names begin with "train" and "test", or one .jsonl, .json or
    .parquet file, of which a tenth of the objects form the test split. The columns are those of `make_rows`, without
    weights; `detail` is the number of the caption.
    """
    if split not in ("train", "test"):
        raise ValueError(f"unknown split {split!r}; splits are: train, test")
    check_local_path(source, "--brick_data")
    path = Path(source).expanduser()
    entries: Sequence[Mapping[str, Any]]
    if path.is_dir():
        files = sorted(file for file in path.rglob(f"{split}*") if file.suffix in FILES)
        if not files:
            raise ValueError(f"folder {source!r} contains no {split}*.jsonl, {split}*.json or {split}*.parquet file")
        entries = [entry for file in files for entry in read_entries(file)]
    elif path.suffix in FILES:
        found = read_entries(path)
        held_out = _held_out(found)
        entries = [entry for entry in found if (_object(entry) in held_out) == (split == "test")]
    else:
        entries = _download(source, split)
    order = list(range(len(entries)))
    random.Random(f"{seed}-{split}").shuffle(order)
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for index in order:
        if len(rows) == size:
            break
        rng = random.Random(f"{seed}-{split}-{index}")
        row = _row(entries[index], f"{source} {split}, row {index + 1}", rng)
        if row["gold"].count("\n") <= max_bricks:
            rows.setdefault((row["caption"], row["voxels"]), row)
    if order and not rows:
        raise ValueError(f"no structure of {source} {split} has at most {max_bricks} bricks; raise --max_bricks")
    return list(rows.values())


def read_entries(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a .jsonl, .json or .parquet file as dictionaries. Raises ValueError if it is damaged."""
    if file.suffix == ".parquet":
        import pyarrow.parquet

        wanted = [name for name in pyarrow.parquet.read_schema(file).names if name in COLUMNS]
        return pyarrow.parquet.read_table(file, columns=wanted).to_pylist()
    text = file.read_text(encoding="utf-8")
    try:
        entries = (
            [json.loads(line) for line in text.splitlines() if line.strip()]
            if file.suffix == ".jsonl"
            else json.loads(text)
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"{file.name} is not valid JSON: {error}") from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{file.name} must contain a list of objects with the columns {', '.join(COLUMNS)}")
    return entries


def _download(name: str, split: str) -> Sequence[Mapping[str, Any]]:
    from datasets import load_dataset

    try:
        entries = load_dataset(name, split=split)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the data set {name!r} cannot be loaded from the Hub: {error}. Without network access, pass the folder "
            "of a local copy (train*.parquet and test*.parquet), or omit --brick_data to generate rows offline"
        ) from error
    return entries.select_columns([column for column in COLUMNS if column in entries.column_names])


def _held_out(entries: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the objects of the test split. Layouts of one object are variants of a shape, so they stay together."""
    objects = sorted({_object(entry) for entry in entries}, key=lambda name: hashlib.sha256(name.encode()).digest())
    return set(objects[: max(1, round(TEST_SHARE * len(objects)))]) if len(objects) > 1 else set()


def _object(entry: Mapping[str, Any]) -> str:
    return str(entry.get("object_id") or entry.get("bricks"))


def _row(entry: Mapping[str, Any], place: str, rng: random.Random) -> dict[str, Any]:
    for column in ("captions", "bricks"):
        if not entry.get(column):
            raise ValueError(f"{place}: column {column!r} is missing or empty; columns are: {', '.join(entry)}")
    reading = parse(entry["bricks"], WORLD)
    if problems := reading.problems or reading.structure.problems():
        raise ValueError(f"{place}: column 'bricks' is not a structure: {problems[0]}")
    gold = reading.structure.canonical()
    captions = [entry["captions"]] if isinstance(entry["captions"], str) else list(entry["captions"])
    number = rng.randrange(len(captions))
    category = str(entry.get("category_id") or "")
    label, bad = rng.choice(sorted(negatives(gold).items()))
    return {
        "caption": captions[number],
        "category": CATEGORY_IDS.get(category, category),
        "level": LEVEL,
        "world": WORLD,
        "detail": number + 1,
        "voxels": encode_voxels(reading.structure.occupied),
        "gold": gold.text,
        "loads": [],
        "bad": bad.text,
        "bad_label": label,
    }
