"""Build a structure that must stand after every brick. The answer to a brick is the stability analysis.

    trl-grpo-tasks train examples/environments/brick_by_brick.py

A row has a first brick on the ground, and says how high the structure must become and how far it must reach beyond
its bricks on the ground. Studs are weak: what reaches too far with too few bricks falls. The analysis needs the extra
`brick` of the package, as task brick does.
"""

import random
from functools import lru_cache

from trl_grpo_tasks import Environment, EnvironmentTask, Step
from trl_grpo_tasks.constraints import ChoiceTreeConstraint, OneSpelling
from trl_grpo_tasks.task import TinySpec
from trl_grpo_tasks.tasks.brick.constraint import BrickTree
from trl_grpo_tasks.tasks.brick.kit import PARTS, Kit
from trl_grpo_tasks.tasks.brick.physics.stability import analyse
from trl_grpo_tasks.tasks.brick.structure import Brick, Structure, parse

WORLD = 8
WEAK = Kit(parts=tuple(part for part in PARTS if part.long <= 4), stud_strength_N=0.05)
RULES = (
    f"Build with bricks in a world of {WORLD} cells along x, y and z. Each turn, add one brick by a line such as "
    "`2x4 (3,0,1)`: 2 cells along x, 4 along y, lowest corner at x=3, y=0, on layer 1. It must touch the ground or a "
    "stud. Reach is how far along x the structure extends beyond its bricks on the ground. The structure must stand "
    "after every turn: the load, the used share of the strength of the studs, must stay below 100%."
)
stability = lru_cache(1 << 16)(analyse)


def with_brick(structure, line):
    """Return the structure with one more brick, or why it cannot be placed."""
    reading = parse(line, WORLD, kit=WEAK)
    if reading.problems or reading.lines != 1:
        return reading.problems[0] if reading.problems else "write one line"
    built = Structure((*structure.bricks, *reading.structure.bricks), WORLD, WEAK)
    return built.problems()[0] if built.problems() else built


def structure_after(row, turns):
    structure = Structure((Brick(*row["first"]),), WORLD, WEAK)
    for turn in turns:
        built = with_brick(structure, turn)
        structure = structure if isinstance(built, str) else built
    return structure


def measures(structure):
    """Return the height and the reach."""
    ground = max(brick.x + brick.h for brick in structure.bricks if brick.z == 0)
    return max(b.z for b in structure.bricks) + 1, max(b.x + b.h for b in structure.bricks) - ground


class Site(Environment):
    """Meeting both targets is worth 1, and progress on the way up to 0.4. Falling ends the game."""

    def start(self, row):
        self.row, self.progress, self.structure = row, 0.0, structure_after(row, ())
        return f"{self.structure.bricks[0]} {self.told()}"

    def step(self, action):
        built = with_brick(self.structure, action)
        if isinstance(built, str):
            return Step(f"not placed: {built}", reason=built)
        if not (found := stability(built)).stable:
            return Step("it falls", done=True, reason=f"it falls: {found.reasons[0]}")
        self.structure, before = built, self.progress
        high, reach = measures(built)
        self.progress = min(high / self.row["high"], 1) / 2 + min(reach / self.row["reach"], 1) / 2
        solved = self.progress == 1
        reward = 0.4 * (self.progress - before) + solved
        return Step(self.told(), reward, done=solved, success=solved, reason=self.told())

    def told(self):
        (high, reach), load = measures(self.structure), stability(self.structure).load_factor
        return f"stands: height {high} of {self.row['high']}, reach {reach} of {self.row['reach']}, load {load:.0%}"


class NextBrick:
    """A turn is one brick inside the world that collides with none and touches the ground or a stud."""

    def __init__(self, tokenizer):
        self.tree = BrickTree(WORLD, 1, "absolute", kit=WEAK)
        tree = ChoiceTreeConstraint(tokenizer, self.root, self.choices, look_ahead=False)
        self.spelled, self.vocab_size = OneSpelling(tokenizer, tree), tree.vocab_size

    def start(self, row):
        return self.start_turn(row, ())

    def start_turn(self, row, turns):
        structure = structure_after(row, turns)
        return self.spelled.start({"most": len(structure) + 1, "built": structure.text})

    def root(self, row):
        return ((WORLD, row["most"], row["built"]),)

    def choices(self, node):
        found = self.tree.choices(node)
        return [one for one in found if one != ("", None)] or found  # the turn ends after a brick only


class BrickByBrick(EnvironmentTask):
    name, version, description = "brick_by_brick", "1", "Build what must stand after every brick."
    turns = 4
    defaults = {"constrain": True, "max_completion_length": 256}
    tiny_defaults = {"max_completion_length": 128, "cold_start_steps": 60, "cold_start_learning_rate": 2e-3,
                     "learning_rate": 3e-4, "warmup_steps": 5, "max_steps": 60, "eval_rows": 100}  # fmt: skip

    def dataset(self, split, size, seed):
        rows = []
        for h, w in ((2, 2), (2, 4), (4, 2)):
            for reach in range(1, min(5, WORLD - h) + 1):
                places = [(x, y) for x in range(WORLD - h - reach + 1) for y in range(WORLD - w + 1)]
                rows += [
                    {"first": [h, w, x, y, 0], "high": high, "reach": reach} for high in (2, 3, 4) for x, y in places
                ]
        random.Random("split").shuffle(rows)
        rows = rows[::5] if split == "test" else [row for place, row in enumerate(rows) if place % 5]
        random.Random(seed).shuffle(rows)
        return [self.opened({"prompt": [{"role": "user", "content": RULES}], **row}) for row in rows[:size]]

    def environment(self):
        return Site()

    def turn_constraint(self, tokenizer):
        return NextBrick(tokenizer)

    def gold(self, row):
        """Stairs: each brick reaches at most 2 cells further than the one below."""
        h, _, x, y, _ = row["first"]
        ends = [min(x + h + max(2 * layer, 4 - h), max(x + h + row["reach"], 4)) for layer in range(1, self.turns + 1)]
        return self.conversation(row, [f"4x2 ({end - 4},{y},{layer})\n" for layer, end in enumerate(ends, 1)])

    def bad(self, row):
        _, _, x, y, _ = row["first"]
        return self.conversation(row, [f"1x1 ({x},{y},1)\n"])

    def tiny(self):
        pieces = [f"{h}x{w} (" for h, w in WEAK.sizes]
        pieces += [f"{n}{end}" for n in range(WORLD + 1) for end in (",", ")\n", ") ", " of ")]
        pieces += ["stands: height ", " reach ", " load ", *(f"{n}%" for n in range(101))]
        return TinySpec([RULES, *pieces], hidden_size=96, layers=3, heads=3, context=256)

    def render_turn(self, row, turns):
        from trl_grpo_tasks.tasks.brick.drawing import render

        structure = structure_after(row, turns)
        found = stability(structure)
        return render.png(render.picture(structure, failing=found.failing, caption="; ".join(found.reasons)))
