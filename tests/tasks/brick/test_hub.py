"""Rows from the published data set: from files in its format, from folders, and by Hub id. The fixture is our own."""

import json

import numpy as np
import pytest

from tests.support.paths import DATA
from tests.support.walks import allows
from tests.tasks.brick.test_stability import PUBLIC
from trl_grpo_tasks.models.tiny import make_tokenizer
from trl_grpo_tasks.tasks.brick import BrickOptions, BrickTask
from trl_grpo_tasks.tasks.brick.data import hub
from trl_grpo_tasks.tasks.brick.data.designs import decode_voxels
from trl_grpo_tasks.tasks.brick.data.hub import from_hub
from trl_grpo_tasks.tasks.brick.data.rows import make_rows
from trl_grpo_tasks.tasks.brick.physics.stability import analyse
from trl_grpo_tasks.tasks.brick.structure import parse

FIXTURE = str(DATA / "stabletext2brick.jsonl")


def entries():
    with open(FIXTURE, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def check_published(found):
    by_bricks = {entry["bricks"]: entry for entry in entries()}
    for row in found:
        entry = by_bricks[row["gold"]]
        assert row["caption"] == entry["captions"][row["detail"] - 1]
        assert row["category"] == hub.CATEGORY_IDS[entry["category_id"]]
        assert (parse(row["gold"]).structure.occupied == decode_voxels(row["voxels"], 20)).all()
        assert (row["level"], row["world"], row["loads"]) == ("published", 20, [])
        assert analyse(row["gold"]).stable and not analyse(row["bad"]).stable
        assert set(row) == set(make_rows("train", 1, 0)[0])


def test_files_in_the_published_format_become_rows():
    train, test = from_hub(FIXTURE, "train"), from_hub(FIXTURE, "test")
    check_published(train + test)
    objects = {entry["bricks"]: entry["object_id"] for entry in entries()}
    split_of = {split: {objects[row["gold"]] for row in found} for split, found in (("train", train), ("test", test))}
    assert len(train) + len(test) == len(entries()) and test and not split_of["train"] & split_of["test"]
    assert from_hub(FIXTURE, "train", 3, seed=0) == train[:3] != from_hub(FIXTURE, "train", 3, seed=1)


def test_two_layouts_of_one_shape_with_one_caption_are_one_request(tmp_path):
    plain = {"captions": ["a plate"], "bricks": "2x4 (0,0,0)\n"}
    layouts = [plain, {**plain, "bricks": "2x2 (0,2,0)\n2x2 (0,0,0)\n"}, {**plain, "captions": ["a slab"]}]
    (tmp_path / "train.json").write_text(json.dumps(layouts), encoding="utf-8")
    for seed in range(8):
        assert sorted(row["caption"] for row in from_hub(str(tmp_path), "train", 2, seed)) == ["a plate", "a slab"]


def hanging_entries():
    """Structures as in the published set: anywhere in the world, and with bricks that hang from later ones."""
    arch = "1x2 (19,18,0)\n1x2 (14,18,0)\n1x1 (17,18,1)\n1x2 (19,18,1)\n1x2 (14,18,1)\n6x2 (14,18,2)\n"
    lamp = "2x2 (3,9,0)\n1x1 (6,9,1)\n2x2 (3,9,1)\n4x2 (3,9,2)\n"
    captions = ["An arch with a lamp.", "Arch.", "Two posts and a beam.", "A gate, plain.", "A small archway."]
    return [
        {"structure_id": f"{name}_0", "object_id": name, "category_id": "04379243", "captions": captions,
         "bricks": bricks, "stability_scores": np.zeros((20, 20, 20), np.float32).tolist()}
        for name, bricks in (("a", arch), ("b", lamp))
    ]  # fmt: skip


@pytest.mark.parametrize("form", ["absolute", "pivot"])
def test_the_constraint_allows_published_structures_whose_bricks_hang(tmp_path, form):
    """In the published order, a brick may come before the one that it hangs from: all 7 public examples have some."""
    import pyarrow
    import pyarrow.parquet

    entries = hanging_entries()
    if PUBLIC.is_file():
        public = json.loads(PUBLIC.read_text())["cases"]
        entries += [{**entries[0], "object_id": case["name"], "bricks": case["bricks"]}
                    for case in public if case["source"] == "BrickGPT"]  # fmt: skip
    for split in ("train", "test"):
        file = tmp_path / "data" / f"{split}-00000-of-00001.parquet"
        file.parent.mkdir(exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(entries), file)
    characters = make_tokenizer([*"0123456789x@(,)- \n"], 4000)
    task = BrickTask(BrickOptions(brick_data=str(tmp_path), text_form=form))
    rows = task.dataset("train", None, 0)
    assert len(rows) == len(entries) and not task.options.attach
    strict = BrickTask(BrickOptions(brick_data=str(tmp_path), text_form=form, attach=True))
    for row in rows:
        ids = [*characters(task.gold(row))["input_ids"], characters.eos_token_id]
        for one, allowed in ((task, True), (strict, False)):
            assert allows(one.constraint(characters), row, ids) == allowed
    assert BrickOptions().attach, "gold answers of levels are attached"


def test_structures_with_too_many_bricks_are_left_out():
    counts = [row["gold"].count("\n") for row in from_hub(FIXTURE, "train")]
    limit = sorted(counts)[len(counts) // 2]
    task = BrickTask(BrickOptions(brick_data=FIXTURE, max_bricks=limit))
    rows = task.dataset("train", None, 0)
    assert len(rows) == sum(count <= limit for count in counts) < len(counts)
    assert all(task.score(row, task.gold(row)).success for row in rows)
    with pytest.raises(ValueError, match="has at most 2 bricks; raise --max_bricks"):
        BrickTask(BrickOptions(brick_data=FIXTURE, max_bricks=2)).dataset("train", 4, 0)


def test_loading_a_hub_id_skips_unneeded_columns(monkeypatch):
    datasets = pytest.importorskip("datasets")
    scores = np.zeros((20, 20, 20)).tolist()
    table = datasets.Dataset.from_list([{**entry, "stability_scores": scores} for entry in entries()])
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: asked.append((name, split)) or table)
    check_published(from_hub(split="test", size=4))
    assert asked == [("AvaLovelace/StableText2Brick", "test")]


def test_errors_in_a_source_are_reported(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")

    def no_network(name, split):
        raise ConnectionError("the Hub cannot be reached")

    monkeypatch.setattr(datasets, "load_dataset", no_network)
    for arguments, complaint in {
        ("some/bricks",): r"'some/bricks' cannot be loaded.*cannot be reached.*generate rows offline",
        (FIXTURE, "dev"): "unknown split 'dev'",
        ("missing.jsonl",): "does not exist",
        (str(tmp_path),): r"contains no train\*\.jsonl",
    }.items():
        with pytest.raises(ValueError, match=complaint):
            from_hub(*arguments)
    file = tmp_path / "train.jsonl"
    for text, complaint in {
        "no json": "train.jsonl is not valid JSON",
        "[1]": "must contain a list of objects with the columns",
        '{"captions": ["a"], "text": "b"}': "row 1: column 'bricks' is missing or empty; columns are: captions, text",
        '{"captions": [], "bricks": "1x1 (0,0,0)"}': "column 'captions' is missing or empty",
        '{"captions": ["a"], "bricks": "3x3 (0,0,0)"}': "column 'bricks' is not a structure: .*there is no 3x3 brick",
        '{"captions": ["a"], "bricks": "1x1 (0,0,20)"}': "not a structure: .*outside the world of 20",
    }.items():
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=complaint):
            from_hub(str(tmp_path))
