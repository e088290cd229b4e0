"""Prompts of the brick task describe its answers: a gold answer that is read as its prompt says fills the target.

The readers here know only what the prompts say.
"""

import re

import numpy as np
import pytest

from tests.support.paths import DATA
from trl_grpo_tasks.tasks.brick import BrickOptions, BrickTask
from trl_grpo_tasks.tasks.brick.data.designs import decode_voxels
from trl_grpo_tasks.tasks.brick.prompts import prompt
from trl_grpo_tasks.tasks.brick.structure import SIZES

PUBLISHED = {"brick_data": str(DATA / "stabletext2brick.jsonl")}
GENERATED = {"brick_levels": ["stack", "carry", "overhang"]}
PLACE = r"\((-?\d+),(-?\d+),(-?\d+)\)"


def bricks_of(text, instruction):
    """The bricks (h, w, x, y, z) of an answer, read by the rules of an instruction; fails if a line breaks one."""
    sizes = re.search(r"(?:Sizes:|dimensions are) ([\dx, ]+)\.", instruction)[1].split(", ")
    if "`hxw @n (x,y,z)`" in instruction:
        limit = int(re.search(r"at most (\d+) along each axis", instruction)[1])
        form = re.compile(rf"(\d+x\d+) @(\d+) {PLACE}")
    else:
        assert "`hxw (x,y,z)`" in instruction or "<brick dimensions> <brick position>" in instruction
        form = re.compile(rf"(\d+x\d+)() {PLACE}")
    bricks = []
    for line in text.splitlines():
        match = form.fullmatch(line)
        assert match, f"{line!r} is not of the form that the prompt asks for"
        assert match[1] in sizes
        place = tuple(map(int, match.groups()[2:]))
        if int(match[2] or 0):
            assert int(match[2]) <= len(bricks) and max(map(abs, place)) <= limit
            place = tuple(np.add(place, bricks[int(match[2]) - 1][2:]).tolist())
        bricks.append((*map(int, match[1].split("x")), *place))
    return bricks


@pytest.mark.parametrize("options", [
    {**PUBLISHED, "prompt_style": "brickgpt"},
    {**PUBLISHED, "text_form": "pivot"},
    GENERATED,
    {**GENERATED, "text_form": "pivot", "max_offset_distance": 3, "world_dim": 18},
])  # fmt: skip
def test_gold_answers_are_what_the_prompt_describes(options):
    task = BrickTask(BrickOptions(**{"prompt_style": "full"} | options))
    for row in task.dataset("train", 6, 0):
        instruction, _, caption = row["prompt"][-1]["content"].partition("\n\n### Input:\n")
        assert caption == row["caption"]
        bricks = bricks_of(task.gold(row), instruction)
        target = decode_voxels(row["voxels"], row["world"])
        filled = np.zeros_like(target)
        for h, w, x, y, z in bricks:
            assert min(x, y, z) >= 0
            filled[x : x + h, y : y + w, z] = True
        assert (filled == target).all()
        if stated := re.search(r"from 0 to (\d+) in a world of (\d+)x", instruction):
            assert (int(stated[1]), int(stated[2])) == (row["world"] - 1, row["world"])
            assert bricks == sorted(bricks, key=lambda brick: (brick[4], -brick[2], -brick[3]))
        generated = ["corner where x and y are 0" in instruction, "carry the weights" in instruction]
        assert generated == [row["level"] != "published"] * 2
        assert not any(generated) or (target[0].any() and target[:, 0].any())


def test_prompts_are_short_or_explain_everything():
    assert prompt("a table", 20, BrickOptions()) == [{"role": "user", "content": "a table"}]
    assert prompt("a table", 8, BrickOptions()) == [{"role": "user", "content": "a table, world 8"}]
    system, user = prompt("a table", 12, BrickOptions(prompt_style="full"))
    assert system["role"] == "system" and user["role"] == "user"
    assert user["content"].endswith("\n\n### Input:\na table")
    assert all(f"{h}x{w}" in user["content"] for h, w in SIZES)
