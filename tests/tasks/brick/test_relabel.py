"""A failed structure is the right answer to the row that it is relabelled with, a row of the training data."""

import random

import pytest

from tests.support.exhaustive import exhaustive_but
from trl_grpo_tasks.tasks.brick import BrickOptions, BrickTask
from trl_grpo_tasks.tasks.brick.data.captions import caption, choices
from trl_grpo_tasks.tasks.brick.data.catalogue import LEVELS
from trl_grpo_tasks.tasks.brick.data.designs import design
from trl_grpo_tasks.tasks.brick.structure import Structure, parse


def mutations(gold, rng):
    """A gold structure with one layer twice, without one layer, without some bricks, and with a brick moved."""
    top = max(brick.z for brick in gold.bricks)
    layer, index = rng.randint(0, top), rng.randrange(len(gold))
    bricks = gold.bricks
    doubled = [b for b in bricks if b.z <= layer] + [b._replace(z=b.z + 1) for b in bricks if b.z >= layer]
    cut = [b._replace(z=b.z - (b.z > layer)) for b in bricks if b.z != layer]
    fewer = [b for b in bricks if rng.random() < 0.9]
    moved = [b._replace(x=b.x + 1) if i == index else b for i, b in enumerate(bricks)]
    return [Structure(tuple(made), gold.world).canonical().text for made in (doubled, cut, fewer, moved)]


@pytest.mark.parametrize(
    ("level", "rows", "least"), exhaustive_but([("stack", 30, 15)], [("small", 60, 20), ("stack", 30, 15)])
)
def test_mutated_golds_solve_the_row_that_they_are_relabelled_with(level, rows, least):
    task = BrickTask(BrickOptions(brick_levels=[level], success_iou=0.95))  # so that most mutations fail
    held_out = {caption(level, request, detail, None) for request, detail in choices(level) if request.is_held_out}
    rng, solved = random.Random(0), 0
    for row in task.dataset("train", rows, 0):
        for text in mutations(parse(row["gold"], row["world"]).structure, rng):
            new = None if task.score(row, text).success else task.relabel(row, text)
            if new is None:
                continue
            assert task.row_of(f"{new['caption']}, world 8") == new, "the generator makes this row"
            assert new["caption"] not in held_out and new["gold"] != row["gold"]
            score = task.score(new, text)
            assert score.info["iou"] >= task.options.success_iou
            assert score.success == score.info["stable"], "what else can be wrong is its stability"
            solved += score.success
    assert solved >= least, solved


def test_the_answer_to_another_row_is_recognised_with_its_weights():
    task = BrickTask(BrickOptions(brick_levels=["carry"]))
    rows = task.dataset("train", 40, 0)
    rng, tried = random.Random(1), 0
    for row in rows:
        other = rng.choice(rows)
        if not task.score(row, other["gold"]).success:
            new, tried = task.relabel(row, other["gold"]), tried + 1
            assert task.score(new, other["gold"]).success
            assert new["voxels"] == other["voxels"]
            assert task.row_of(new["caption"] + f", world {new['world']}") == new
    assert tried > 0.8 * len(rows)


def test_an_overloaded_structure_is_right_for_a_smaller_weight():
    task = BrickTask(BrickOptions(brick_levels=["carry"]))
    thin = [row for row in task.dataset("train", 100, 0) if row["bad_label"] == "thin support"]
    solved = 0
    for row in thin:
        new = task.relabel(row, row["bad"])
        if new is not None and task.score(new, row["bad"]).success:
            solved += 1
            assert new["loads"][0]["grams"] < row["loads"][0]["grams"] or new["category"] != row["category"]
    assert solved > len(thin) / 2 > 10


def test_the_weight_asked_for_is_kept_where_the_support_is_meant_for_it():
    task = BrickTask(BrickOptions(brick_levels=["carry"]))
    params = (("reach", 2), ("width", 2), ("height", 2))
    shelves = [one for one in LEVELS["carry"].requests() if (one.category, one.params) == ("shelf", params)]
    made = {one.grams: design(one, 8) for one in shelves if not one.is_held_out}
    thick = sorted(grams for grams, one in made.items() if one.support == 4)
    assert len(thick) > 1
    row = task.row_of("a balcony, reach 2, 4 wide, 2 high, with 1000 g on the tip")
    for asked in (*thick, (1,)):
        new = task.relabel({**row, "loads": [{"grams": asked[0], "at": [0, 1]}]}, made[thick[0]].gold.text)
        assert (new["category"], new["loads"][0]["grams"]) == ("shelf", max(asked, thick[0])[0])


def test_rows_follow_the_options():
    levels = ("small", "room")  # which share captions, as in "a small table"
    known = {caption(level, request, detail, None) for level in levels for request, detail in choices(level, levels)}
    task = BrickTask(BrickOptions(brick_levels=[*levels], world_dim=12, text_form="pivot", prompt_style="full"))
    rows = task.dataset("train", 40, 0)
    for row, other in zip(rows[:20], rows[20:], strict=True):
        new = task.relabel(row, task.gold(other))
        assert task.score(new, task.gold(other)).success and new["caption"] in known and new["world"] == 12
        asked, now = (one["prompt"][-1]["content"].partition(one["caption"]) for one in (row, new))
        assert asked[::2] == now[::2], "only the caption differs"


def test_what_is_no_structure_or_has_no_target_is_not_relabelled():
    task = BrickTask(BrickOptions(brick_levels=["stack"]))
    rows = task.dataset("train", 20, 0)
    other = next(row for row in rows if row["gold"] != rows[0]["gold"])
    for text in ("", "a tower", "2x4 (0,0,3)\n", other["gold"] + other["gold"]):
        assert task.relabel(rows[0], text) is None
    assert task.relabel({**other, "voxels": None}, other["gold"]) is None
    published = BrickTask(BrickOptions(brick_data="tests/data/stabletext2brick.jsonl"))
    row = published.dataset("train", 1, 0)[0]
    assert published.relabel(row, row["gold"]) is None
