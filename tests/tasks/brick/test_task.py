"""The brick task: its contract under many options, components computed by hand, and reward hacks."""

import functools
import itertools
import json
import operator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.exhaustive import exhaustive_but
from trl_grpo_tasks.commands.check import check_task
from trl_grpo_tasks.evaluation.samples import Sample
from trl_grpo_tasks.evaluation.summary import summarise
from trl_grpo_tasks.models.tiny import make_tokenizer
from trl_grpo_tasks.rewards.components import component_weights
from trl_grpo_tasks.task import rows_of
from trl_grpo_tasks.tasks.brick import BrickOptions, BrickTask
from trl_grpo_tasks.tasks.brick.data.designs import encode_voxels
from trl_grpo_tasks.tasks.brick.data.rows import ALL
from trl_grpo_tasks.tasks.brick.physics import stability
from trl_grpo_tasks.tasks.brick.physics.stability import SolverError
from trl_grpo_tasks.tasks.brick.structure import SIZES, parse

PUBLISHED = "tests/data/stabletext2brick.jsonl"


@functools.cache
def task_and_rows(level, size=6, **options):
    task = BrickTask(BrickOptions(brick_levels=[level], **options))
    return task, task.dataset("test", size, 3)


# ---- the contract


PIVOT = {"brick_levels": ["stack", "small"], "text_form": "pivot"}
CONTRACT_OPTIONS = [
    PIVOT,
    {"world_dim": 24, "text_form": "pivot", "max_offset_distance": 3, "canonical": False},
    {"brick_levels": ["carry"], "attach": False, "prompt_style": "full"},
    {"brick_data": PUBLISHED},
]


@pytest.mark.parametrize("options", exhaustive_but([PIVOT], CONTRACT_OPTIONS), ids=json.dumps)
def test_it_keeps_the_contract(options, monkeypatch):
    if "attach" not in options:  # pictures are slow and depend on no option
        monkeypatch.setattr(BrickTask, "render", lambda *_: b"")
    characters = make_tokenizer([*"0123456789x@(,)- \n"], 2000)
    check_task(BrickTask(BrickOptions(**options)), size=6, tokenizer=characters)


def test_levels_are_those_asked_for_that_fit_the_world():
    assert BrickTask().levels == list(ALL)
    assert BrickTask(BrickOptions(brick_levels=["carry", "stack"])).levels == ["stack", "carry"]
    assert BrickTask(BrickOptions(world_dim=12)).levels == ["stack", "small", "carry", "room"]
    rows = BrickTask(BrickOptions(world_dim=12)).dataset("test", 4, 0)
    assert {row["world"] for row in rows} == {12} and all("world 12" in row["prompt"][-1]["content"] for row in rows)
    with pytest.raises(ValueError, match="--world_dim 5 is too small for these levels: stack needs 8"):
        BrickTask(BrickOptions(world_dim=5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"brick_levels": ["huge"]}, "unknown --brick_levels 'huge'; choose from: stack"),
        ({"success_iou": 1.5}, "--success_iou 1.5 must be above 0"),
        ({"world_dim": 100}, "--world_dim 100 must be between 1 and 40"),
        ({"max_bricks": 0}, "--max_bricks 0 must be between 1 and 2000"),
        ({"max_rollbacks": -1}, "--max_rollbacks -1 must be at least 0"),
        ({"gravity": float("nan")}, "--gravity nan must be a finite number above 0"),
        ({"solver_log": "no_such_folder/log"}, "--solver_log no_such_folder/log: cannot be written; give a file in"),
        ({"prompt_style": "brickgpt"}, "brickgpt is for published structures; add --brick_data AvaLovelace/Stable"),
        ({"prompt_style": "brickgpt", "text_form": "pivot", "brick_data": PUBLISHED}, "absolute positions; leave out"),
    ],
)
def test_invalid_options_are_reported(options, message):
    with pytest.raises(ValueError, match=message):
        BrickOptions(**options)


def test_a_caption_for_published_structures_is_taken_as_it_is_and_only_its_physics_is_scored():
    task = BrickTask(BrickOptions(brick_data=PUBLISHED))
    row = task.row_of("a red dragon")
    assert (row["caption"], row["world"], row["voxels"], row["loads"]) == ("a red dragon", 20, None, [])
    assert task.row_of("a castle, world 9")["prompt"] == [{"role": "user", "content": "a castle, world 9"}]
    assert BrickTask(BrickOptions(world_dim=24, brick_data=PUBLISHED)).row_of("x")["world"] == 24
    with pytest.raises(ValueError, match="a world of 99 must be between 1 and 40"):
        task.row_of("a castle, world 99")
    assert "no target shape" in task.unverifiable(row) and not task.unverifiable(task_and_rows("small")[1][0])
    stands, falls = task.score(row, "2x4 (0,0,0)\n"), task.score(row, "2x4 (0,0,1)\n")
    assert stands.valid and not stands.success and not falls.success
    assert stands.reason == "the shape cannot be judged: this caption has no target" and stands.info["stable"]
    assert stands.info["shape"].startswith("not judged") and "shape" not in falls.reason
    assert stands.components == dict(zip(NAMES, (1, 1, 1, 1 / 150, 0, 1), strict=True)) | {"load_factor": 0}
    assert task.score(row, "2x4 (0,0,0)\n2x4 (0,0,1)\n").components["length"] == 2 / 150, "there is no gold to stop at"
    assert 0 == task.score(row, "").total < falls.total < stands.total < sum(task.weights.values())


def test_exported_files():
    task, rows = task_and_rows("small")
    files = task.exports(rows[0], task.gold(rows[0]))
    assert set(files) == {"sample.png", "sample.ldr"}
    assert files["sample.png"].startswith(b"\x89PNG")
    assert files["sample.ldr"].count(".dat\n") == rows[0]["gold"].count("\n")
    assert set(task.exports(rows[0], "nonsense")) == set(files)


# ---- components by hand

WORLD = 4
TARGET = np.zeros((WORLD,) * 3, dtype=bool)
TARGET[:2, :2, :2] = True  # two 2x2 bricks, one on the other: eight cells
ROW = {"prompt": "", "caption": "two bricks", "world": WORLD, "voxels": encode_voxels(TARGET), "loads": [],
       "gold": "2x2 (0,0,0)\n2x2 (0,0,1)\n"}  # fmt: skip
NAMES = ("stability", "connectivity", "quality", "length", "shape", "syntax")


@pytest.mark.parametrize(("text", "expected", "valid"), [
    # half of the cells; a brick on the ground needs no friction; one of two bricks
    ("2x2 (0,0,0)", (1 / 2, 1 / 2, 1 / 2, 1 / 4, 1 / 2, 1), True),
    # the same cells with an invalid line: not analysed
    ("2x2 (0,0,0)\nand so on", (0, 1 / 2, 1 / 2, 1 / 4, 1 / 2, 1 / 2), False),
    # the second brick coincides with the first: not connected, colliding, and four cells too many
    ("2x2 (0,0,0)\n2x2 (0,0,0)", (0, 1 / 6, 1 / 6, 1 / 3, 1 / 3, 1), False),
    # the second brick floats: IoU is 4 of 12 cells
    ("2x2 (0,0,0)\n2x2 (0,0,2)", (0, 1 / 6, 1 / 3, 1 / 3, 1 / 3, 1), True),
    # the second leaves the world
    ("2x2 (0,0,0)\n2x2 (3,0,0)", (0, 1 / 6, 1 / 6, 1 / 3, 1 / 3, 1), False),
    ("", (0, 0, 0, 0, 0, 0), False),
])  # fmt: skip
def test_components_by_hand(text, expected, valid):
    score = BrickTask().score(ROW, text)
    score.components.pop("load_factor", None)
    assert score.components == pytest.approx(dict(zip(NAMES, expected, strict=True)))
    weights = (1, 0.5, 0.25, 0.1, 2, 0.1)
    assert score.total == pytest.approx(sum(map(operator.mul, weights, expected)))
    assert (score.valid, score.success) == (valid, False) and score.reason


PLAIN_SUM = {"length_weight": 1.0, "quality_weight": 1.0, **dict.fromkeys(
    ("connectivity_weight", "shape_weight", "syntax_weight"), 0.0)}  # fmt: skip


@pytest.mark.parametrize(("text", "stability", "length", "quality"), [
    ("1x1 (0,0,0)\n1x4 (0,0,1)\n", 1 - 1.25 * 0.00157 * 9.8 / 0.98, 2 / 10, 1),  # far from the target
    ("2x2 (0,0,0)\n", 1, 1 / 10, 1),
    ("2x2 (0,0,0)\n2x2 (0,0,2)\n", 0, 2 / 10, 1),  # floats
    ("2x2 (0,0,0)\n2x2 (1,0,0)\n2x2 (3,0,0)\n2x2 (0,2,0)\n", 0, 4 / 10, 2 / 4),  # collides; leaves the world
    ("2x2 (0,0,0)\n" * 12, 0, 1, 1 / 12),  # two bricks too many
])  # fmt: skip
def test_the_plain_sum_of_the_document_by_hand(text, stability, length, quality):
    """stability_weight x stability + length + quality: the target counts nowhere, and length has no cap at gold.

    A 1x4 of weight W on one stud at its end: f = 1.25 W, by the equations of brick_structures.py for 1.5 studs.
    """
    task = BrickTask(BrickOptions(**PLAIN_SUM, stability_weight=3.0, max_bricks=10))
    score = task.score(ROW, text)
    assert score.total == pytest.approx(3 * stability + length + quality, abs=1e-6)
    assert 0 < score.components["shape"] < 1, "it is still logged"


def test_brickgpts_table_is_reported_on_demand():
    """1 minus the friction of each brick of a cantilever, as in test_metrics.py; other answers count as unstable."""
    from tests.tasks.brick.test_metrics import BELOW, CANTILEVER, FORCE

    task = BrickTask(BrickOptions(published_stability=True))
    row = {**ROW, "world": 20, "voxels": None}
    held = task.score(row, CANTILEVER).info
    assert held["published_stable"] and held["min_brick_stability"] == pytest.approx(1 - FORCE, rel=1e-5)
    assert held["mean_brick_stability"] == pytest.approx(1 - (FORCE + BELOW) / 2, rel=1e-5)
    floating = task.score(row, "2x4 (0,0,0)\n2x4 (0,0,2)\n").info
    assert (floating["mean_brick_stability"], floating["min_brick_stability"]) == (0.5, 0)
    wrong = task.score(row, "2x4 (0,0,0)\n2x4 (0,0,0)\n").info
    assert (wrong["published_stable"], wrong["mean_brick_stability"]) == (False, None)
    assert set(task.facts) - set(BrickTask().facts) == set(wrong) - set(BrickTask().score(row, "").info)
    scores = [task.score(row, text).as_dict() for text in (CANTILEVER, "2x4 (0,0,0)\n2x4 (0,0,0)\n")]
    metrics, _ = summarise([Sample(row, "", None, score) for score in scores], 1, task.facts)
    assert metrics["published_stable"] == 0.5 and metrics["valid"] == 0.5
    assert metrics["min_brick_stability"] == pytest.approx(1 - FORCE, rel=1e-5), "of valid structures"


def test_without_a_published_analysis_an_answer_still_has_a_score(monkeypatch):
    def fails(*_):
        raise SolverError("out of luck")

    monkeypatch.setattr(stability, "_published", fails)
    score = BrickTask(BrickOptions(published_stability=True)).score(ROW, ROW["gold"])
    assert score.success and "published_stable" not in score.info, "unknown is not unstable"


def test_the_load_factor_is_logged_where_it_is_known_and_cannot_be_rewarded():
    task = BrickTask()
    assert component_weights(task, None)["load_factor"] == 0
    assert "load_factor" not in task.score(ROW, "2x2 (0,0,0)\n2x2 (0,0,0)").components
    with pytest.raises(ValueError, match="'load_factor' is only logged"):
        component_weights(task, {"load_factor": -1.0})


def test_stability_is_one_minus_the_load_factor():
    """A 1x8 held at its end by a 1x1 has a load factor of 0.098475, derived in brick_structures.py."""
    text = "1x1 (0,0,0)\n1x8 (0,0,1)\n"
    row = {**ROW, "world": 8, "voxels": encode_voxels(parse(text, 8).structure.occupied), "gold": text}
    score = BrickTask().score(row, text)
    expected = {"stability": 1 - 0.098475, "load_factor": 0.098475}
    assert score.components == pytest.approx(dict.fromkeys(NAMES, 1) | expected, abs=1e-6)
    load_factor = pytest.approx(0.098475, abs=1e-6)
    assert score.success and score.info == {"bricks": 2, "stable": True, "iou": 1.0, "load_factor": load_factor}
    heavy = {**row, "loads": [{"grams": 50, "at": [0, 7]}]}
    fallen = BrickTask().score(heavy, text)
    assert fallen.valid and not fallen.success and fallen.components["stability"] == 0
    assert "brick 2" in fallen.reason or "brick 1" in fallen.reason
    nowhere = BrickTask().score({**row, "loads": [{"grams": 5, "at": [3, 3]}]}, text)
    assert not nowhere.success and "has no brick below it" in nowhere.reason


LINES = st.one_of(
    st.builds("{0[0]}x{0[1]} ({1},{2},{3})".format, st.sampled_from(SIZES), *[st.integers(-1, 5)] * 3),
    st.builds(lambda pivot, dx: f"2x2 @{pivot} ({dx},0,1)", st.integers(0, 5), st.integers(-9, 9)),
    st.text(max_size=12),
)  # fmt: skip


@settings(max_examples=80)
@given(st.lists(LINES, max_size=12), st.booleans())
def test_the_total_is_bounded_and_success_implies_its_conditions(lines, has_target):
    task = BrickTask()
    row = ROW if has_target else {**ROW, "voxels": None, "gold": None}
    score = task.score(row, "\n".join(lines))
    assert all(0 <= value <= 1 for value in score.components.values())
    assert 0 <= score.total <= sum(task.weights.values())
    if score.success:
        assert score.valid and score.info["stable"] and score.components["shape"] >= 0.8
    assert bool(score.reason) != score.success


# ---- known ways to cheat


def first_line(row):
    return row["gold"].splitlines(keepends=True)[0]


def blocks(xs, ys, layers):
    places = itertools.product(range(layers), range(0, xs - 1, 2), range(0, ys - 1, 2))
    return "".join(f"2x2 ({x},{y},{z})\n" for z, x, y in places)


HACKS = {
    "single brick": lambda row: "2x4 (0,0,0)\n",
    "stack of 1x1": lambda row: "".join(f"1x1 (0,0,{z})\n" for z in range(row["world"])),
    "box that ignores the caption": lambda row: blocks(row["world"], row["world"], 4),
    "repeating lines": lambda row: first_line(row) * 12,
    "the gold answer twice": lambda row: row["gold"] * 2,
    "two lines in turn": lambda row: "".join(row["gold"].splitlines(keepends=True)[:2]) * 6,
    "10,000 different lines": lambda row: "".join(
        f"1x1 ({x},{y},{z})\n" for z, y, x in itertools.product(range(10_000 // 8**2), range(8), range(8))
    ),
}


@pytest.mark.parametrize("hack", HACKS)
def test_cheating_does_not_pay(hack):
    for level in ("stack", "small", "carry", "overhang"):
        task, rows = task_and_rows(level)
        for row in rows:
            gold, cheat = task.score(row, task.gold(row)), task.score(row, HACKS[hack](row))
            if HACKS[hack](row) == task.gold(row):  # a stack of 1x1 bricks was asked for
                continue
            assert gold.success and not cheat.success
            assert cheat.total < 0.5 * gold.total, (row["caption"], cheat)


def test_no_box_pays_for_all_captions():
    """A box may resemble a tower by chance, but no box may score well on all captions."""
    for level in ("small", "carry"):
        task, rows = task_and_rows(level, 16)
        gold = sum(task.score(row, task.gold(row)).total for row in rows)
        for size in ((2, 2, 4), (4, 4, 3), (8, 2, 4), (8, 4, 2), (8, 8, 3)):
            scores = [task.score(row, blocks(*size)) for row in rows]
            assert sum(score.total for score in scores) < 0.5 * gold, size
            assert sum(score.success for score in scores) <= 1


# ---- solvers


def test_without_a_solver_connectivity_decides(monkeypatch):
    monkeypatch.setattr(stability, "order_of", lambda *_: [])
    with pytest.warns(RuntimeWarning, match="no linear-programming solver is installed"):
        score = BrickTask().score(ROW, ROW["gold"])
    assert score.success and score.components["stability"] == 1 and score.info["load_factor"] is None
    assert not BrickTask().score(ROW, "2x2 (0,0,0)\n2x2 (0,0,2)\n").info["stable"]


def test_a_line_says_that_there_are_fewer_rows_than_asked_for():
    task, said = BrickTask(BrickOptions(brick_levels=["stack"])), []
    rows = rows_of(task, "test", 500, 0, say=said.append)
    assert said == [f"The test split has {len(rows)} rows with these options, not the 500 asked for: all are used."]
    assert len(rows) < 500 and rows_of(task, "test", len(rows), 0, say=said.append) == rows and len(said) == 1
