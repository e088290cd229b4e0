"""Rows of the brick task: requests are buildable, stable under their weights, and in one split only."""

import json
import random
import re
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.support.brick_structures import overlaps
from tests.support.exhaustive import exhaustive_but
from trl_grpo_tasks.tasks.brick.data import designs
from trl_grpo_tasks.tasks.brick.data import rows as data
from trl_grpo_tasks.tasks.brick.data.captions import CAPTION_WORDS, caption, choices
from trl_grpo_tasks.tasks.brick.data.catalogue import CATEGORIES, LEVELS, Request
from trl_grpo_tasks.tasks.brick.data.designs import decode_voxels, design, encode_voxels, load_factor, loads_on
from trl_grpo_tasks.tasks.brick.data.rows import ALL, make_rows
from trl_grpo_tasks.tasks.brick.physics.stability import Analysis, analyse
from trl_grpo_tasks.tasks.brick.shapes.layout import lay, lay_once, layouts
from trl_grpo_tasks.tasks.brick.structure import GROUND, SIZES, Structure, parse

LOADED = [name for name, level in LEVELS.items() if level.grams]


def is_buildable(structure: Structure) -> bool:
    """Whether each brick, in the order given, stands on the ground or on a brick placed before it."""
    return all(
        brick.z == 0 or any(lower.z == brick.z - 1 and overlaps(lower, brick) for lower in structure.bricks[:index])
        for index, brick in enumerate(structure.bricks)
    )


def fills(structure: Structure, voxels: np.ndarray) -> bool:
    legal = all(brick[:2] in SIZES for brick in structure.bricks)
    return (
        legal and not structure.problems() and bool((structure.occupied == voxels).all()) and is_buildable(structure)
    )


def few(level: str, category: str) -> list[Request]:
    """The last and two other requests of a category."""
    found = [request for request in LEVELS[level].requests() if request.category == category]
    return [found[-1], *random.Random(level).choices(found, k=2)]


# ---- shapes and their layouts


CATEGORIES_BY_LEVEL = [(name, category) for name, level in LEVELS.items() for category in level.grids]


@pytest.mark.parametrize(("level", "category"), exhaustive_but(CATEGORIES_BY_LEVEL[::8], CATEGORIES_BY_LEVEL))
def test_gold_answers_fill_the_target_and_are_buildable_and_stable(level, category):
    fewest, most = {"stack": (3, 8), "small": (3, 14), "carry": (3, 14), "furniture": (28, 137)}.get(level, (4, 80))
    for request in few(level, category)[:2]:
        made = design(request, LEVELS[level].world)
        assert fills(made.gold, made.voxels) and made.gold == made.gold.canonical()
        assert fewest <= len(made.gold) <= most
        carried = loads_on(made.gold, made.loads)
        assert len(carried) == len(request.grams)
        assert analyse(made.gold, loads=carried).load_factor < 0.9


@settings(max_examples=40)
@given(arrays(int, (6, 6), elements=st.integers(0, 4)))
def test_any_heap_of_cells_is_covered_exactly(heights):
    voxels = np.arange(6) < heights[:, :, None]
    structure = lay_once(voxels)
    assert fills(structure, voxels) if voxels.any() else structure is None


boxes = st.tuples(*[st.integers(0, 5)] * 3, *[st.integers(1, 6)] * 3)


@settings(max_examples=40)
@given(st.lists(boxes, min_size=1, max_size=5), st.booleans(), st.sampled_from([None, 1, 2]), st.sampled_from([-6, 3]))
def test_overhangs_are_covered_exactly_or_rejected(found, narrow, seed, joint):
    voxels = np.zeros((8, 8, 8), dtype=bool)
    for x, y, z, length, width, height in found:
        voxels[x : x + length, y : y + width, z : z + height] = True
    structure = lay_once(voxels, narrow, None if seed is None else random.Random(seed), joint)
    assert structure is None or fills(structure, voxels)


def test_an_unreachable_cell_gives_no_layout():
    voxels = np.zeros((12, 12, 2), dtype=bool)
    voxels[0, 0, 0] = voxels[:8, 0, 1] = True
    voxels = np.pad(voxels, ((0, 0), (0, 0), (0, 10)))
    assert len(lay_once(voxels)) == 2
    voxels[8, 0, 1] = True  # one cell beyond the longest part
    assert lay_once(voxels) is None


@pytest.mark.parametrize("size", [(12, 1, 5), (12, 2, 5), (10, 7, 4), (20, 2, 6)])
def test_seams_are_bridged(size):
    """Studs connect all bricks with each other even without the ground."""
    voxels = np.zeros((20, 20, 20), dtype=bool)
    voxels[: size[0], : size[1], : size[2]] = True
    structure = lay_once(voxels)
    group = list(range(len(structure)))
    for lower, upper in structure.links:
        if lower != GROUND:
            group = [group[lower] if name == group[upper] else name for name in group]
    assert len(structure) > size[2] and len(set(group)) == 1


def test_layouts_are_tried_until_one_is_strong_enough():
    voxels = design(few("carry", "balcony")[0], 8).voxels
    tried = list(layouts(voxels, 6))
    assert len({structure.text for structure in tried}) == len(tried) > 2
    factors = dict(zip((s.text for s in tried), [2.0, 1.5, 0.7, *[0.1] * 9], strict=False))
    assert lay(voxels, lambda s: factors[s.text], attempts=6) == (tried[2], 0.7)
    strengths = dict(zip((s.text for s in tried), [2.0, 1.5, *[1.7] * 9], strict=False))
    assert lay(voxels, lambda s: strengths[s.text], attempts=6) == (tried[1], 1.5)


# ---- weights


def test_a_weight_comes_down_on_the_highest_brick_of_its_column():
    structure = parse("2x4 (0,0,0)\n1x4 (0,0,1)\n1x4 (0,0,3)", 8).structure
    assert loads_on(structure, [{"grams": 300, "at": [1, 2]}]) == [(1, 2, 0, 0.3)]
    two = [{"grams": 50, "at": [0, 0]}, {"grams": 5, "at": [1, 3]}]
    assert loads_on(structure, two) == [(0, 0, 3, 0.05), (1, 3, 0, 0.005)]
    assert loads_on(structure, [{"grams": 300, "at": [2, 0]}]) == "the weight of 300 g at (2,0) has no brick below it"
    for outside in ([8, 0], [-1, 0]):
        assert "has no brick below it" in loads_on(structure, [{"grams": 300, "at": outside}])
    assert load_factor(parse("1x1 (0,0,0)", 8).structure, [{"grams": 1, "at": [2, 0]}]) == float("inf")


@pytest.mark.parametrize("level", LOADED)
def test_bad_answers_that_ignore_the_weight_are_overloaded(level):
    labels = Counter()
    for category in LEVELS[level].grids:
        for request in few(level, category):
            made = design(request, LEVELS[level].world)
            labels[made.bad_label] += 1
            if made.bad_label in ("thin support", "shallow joints"):
                assert made.bad.problems() == [] and is_buildable(made.bad)
                # the weight rests on a brick, but overloads the structure
                assert load_factor(made.bad, []) < 0.9 < 1 <= load_factor(made.bad, made.loads) < float("inf")
            if made.bad_label == "shallow joints":
                assert fills(made.bad, made.voxels)
    assert labels["thin support"] > 0.4 * labels.total() or labels["shallow joints"] > 0.2 * labels.total()
    assert labels["thin support"] + labels["shallow joints"] > 0.6 * labels.total()


def test_a_support_that_stands_without_a_margin_is_neither_gold_nor_bad():
    """The thinnest wall needs 97% of the strength of its studs."""
    made = design(Request("balcony", (("reach", 2), ("width", 4), ("height", 2)), (1000,)), 8)
    assert made.support == 4 and made.bad_label != "thin support"


def test_a_weight_that_no_design_can_carry_is_reported():
    with pytest.raises(ValueError, match=r"no design can carry .*balcony.*99999.*; reduce its weight"):
        design(Request("balcony", (("reach", 3), ("width", 1), ("height", 3)), (99_999,)), 8)


def test_without_a_solver_only_rows_with_weights_fail(monkeypatch):
    monkeypatch.setattr(designs, "analyse", lambda structure, loads: Analysis(not structure.floating, None))
    structure = parse("2x2 (0,0,0)", 8).structure
    assert load_factor(structure, []) == 0
    with pytest.raises(ImportError, match=r"need a solver.*trl_grpo_tasks\[brick\]"):
        load_factor(structure, [{"grams": 1, "at": [0, 0]}])


# ---- captions


@pytest.mark.parametrize("level", ALL)
def test_captions_are_unique_within_a_level(level):
    meaning: dict[str, Request] = {}
    for request, detail in choices(level):
        for support in (2, 3) if detail == 3 and CATEGORIES[request.category].support else (2,):
            text = caption(level, request, detail, support)
            assert meaning.setdefault(text, request) == request
            assert set(re.findall(r"\w+|\S", text)) <= set(CAPTION_WORDS)
            assert " ".join(text.split()) == text
    details = Counter(detail for _, detail in choices(level))
    assert details[3] >= details[2] > details[1] > 5


@pytest.mark.parametrize("level", ALL)
def test_different_requests_have_different_targets(level):
    seen: dict[tuple, Request] = {}
    for request in LEVELS[level].requests():
        category = CATEGORIES[request.category]
        params = dict(request.params) | ({category.support: 2} if category.support else {})
        shape = category.build(**params)
        target = request.category, request.grams, shape.shape, shape.tobytes()
        assert seen.setdefault(target, request) == request


def test_caption_examples():
    request = Request("table", (("length", 6), ("width", 4), ("height", 3), ("leg", 1)))
    assert caption("small", request, 2, None) == "a table, 6 long, 4 wide, 3 high"
    assert caption("small", request, 3, None) == "a table, 6 long, 4 wide, 3 high, legs 1 thick"
    small = Request("arch", (("length", 6), ("width", 1), ("height", 5), ("pillar", 1)))
    assert caption("small", small, 1, None) == "a small tall arch"
    crane = Request("crane", (("reach", 5), ("back", 7), ("height", 9)), (500, 200))
    assert caption("overhang", crane, 3, 4) == (
        "a crane, reach 5, back 7, 9 high, tower 4 thick, with 500 g on the tip and 200 g on the back"
    )


# ---- rows


@pytest.fixture(scope="module")
def rows():
    return make_rows("train", 120, 0)


def test_columns_of_rows(rows):
    assert Counter(row["level"] for row in rows) == dict.fromkeys(ALL, 20)
    assert len({row["category"] for row in rows}) >= 16
    assert {row["detail"] for row in rows} == {1, 2, 3}
    assert len({(row["caption"], row["world"]) for row in rows}) == len(rows)
    for row in rows:
        assert json.loads(json.dumps(row)) == row and len(json.dumps(row)) < 6_000
        world = LEVELS[row["level"]].world
        reading = parse(row["gold"], world)
        assert row["world"] == world and not reading.problems
        assert (reading.structure.occupied == decode_voxels(row["voxels"], world)).all()
        assert bool(row["loads"]) == (row["level"] in LOADED) == (" g " in row["caption"])
        assert all(f"{load['grams']} g" in row["caption"] for load in row["loads"])
        assert set(re.findall(r"\w+|\S", f"{row['caption']}, world {world}")) <= set(CAPTION_WORDS)


def test_negatives_of_a_structure_as_high_as_the_world():
    made = designs.negatives(parse("".join(f"2x2 (0,0,{z})\n" for z in range(4)), 4).structure)
    assert made["floating"].floating and not made["floating"].problems()
    assert made["colliding"].collisions


def test_rows_depend_on_seed_and_split_only(rows, monkeypatch):
    assert make_rows("train", 50, 0) == rows[:50]
    assert make_rows("train", 50, 1) != rows[:50]
    monkeypatch.setattr(data, "MIN_ROWS_PER_WORKER", 10)
    monkeypatch.setattr(data, "usable_cores", lambda: 2)
    monkeypatch.setattr(data, "make_row", None)  # the rows come from two processes
    assert make_rows("train", 24, 0) == rows[:24]


@pytest.mark.parametrize("split", data.SPLITS)
def test_rows_are_different_requests_and_another_level_provides_what_one_lacks(split, monkeypatch):
    monkeypatch.setattr(data, "choices", lambda level, sharing: choices(level)[: 60 if level == "stack" else 300])
    supply = {}
    for level in ("stack", "small"):
        every = make_rows(split, None, 0, levels=[level])
        supply[level] = sum(request.is_held_out == (split == "test") for request, _ in data.choices(level, ()))
        assert len({row["caption"] for row in every}) == len(every) == supply[level]
    rows = make_rows(split, 2 * supply["stack"] + 8, 0, levels=["stack", "small"])
    assert Counter(row["level"] for row in rows) == {"stack": supply["stack"], "small": supply["stack"] + 8}
    asked = {json.dumps(row | dict.fromkeys(("gold", "bad", "bad_label", "level"))) for row in rows}
    assert len(asked) == len(rows)
    assert [row["level"] for row in rows[:4]] == ["stack", "small"] * 2
    assert len(make_rows(split, 5000, 0, levels=["stack", "small"])) == sum(supply.values())


def test_in_one_world_a_caption_means_one_thing_and_is_in_one_split():
    """Otherwise "a small table" is another table in each level, which only the size of the world tells."""
    sharing = tuple(ALL)
    meanings = defaultdict(set)
    for level in ALL:
        assert set(choices(level, sharing)) < set(choices(level)) or level == "stack"
        for request, detail in choices(level, sharing):
            meanings[caption(level, request, detail, None)].add((level, request))
    assert all(len(found) == 1 for found in meanings.values())
    assert len(meanings) > 0.85 * sum(len(choices(level)) for level in ALL)


@pytest.mark.parametrize("level", ALL)
def test_held_out_requests_recombine_training_values(level):
    requests = list(LEVELS[level].requests())
    train = [request for request in requests if not request.is_held_out]
    assert 0.12 < 1 - len(train) / len(requests) < 0.22
    seen = {(request.category, *param) for request in train for param in request.params}
    seen |= {(request.category, request.grams) for request in train}
    for request in requests:
        assert (request.category, request.grams) in seen
        assert {(request.category, *param) for param in request.params} <= seen


def test_invalid_arguments_are_reported():
    with pytest.raises(ValueError, match="unknown split 'dev'; splits are: train, test"):
        make_rows("dev", 1, 0)


@settings(max_examples=10)
@given(arrays(bool, (5, 5, 5)))
def test_voxels_round_trip(voxels):
    assert (decode_voxels(encode_voxels(voxels), 5) == voxels).all()
