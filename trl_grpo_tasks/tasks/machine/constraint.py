"""The constraint for machines, a choice tree: only those that can be built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...constraints.choices import Choices, ChoiceTreeConstraint
from ...task import Row
from .blocks import BLOCKS
from .growth import Growth
from .reading import MOST_BLOCKS
from .tree import ROOT, Block, ConstructionTree, block_json

_GROWTHS_KEPT = 4096  # cache size
_OPENING = "[" + block_json(0, ROOT)


def machine_constraint(tokenizer: Any, kinds: Sequence[str], max_blocks: int) -> ChoiceTreeConstraint:
    """Make a constraint to valid machines with 2 to `max_blocks` blocks, as `ConstructionTree.to_json` writes them.

    A row's `blocks` and `max_blocks` override the arguments.
    """
    tree = MachineTree(kinds, max_blocks)
    return ChoiceTreeConstraint(
        tokenizer, tree.root, tree.choices, look_ahead=False, longest_ending=tree.longest_block()
    )


class MachineTree:
    """The choice tree. A node is (rules, text so far, *choices made for the next block).

    The rules are (max_blocks, kinds). The choices are kind, parent and face, and for two-ended blocks a second parent
    and face. Growths are cached by text and recomputed from it if they have been evicted; nodes contain only strings,
    numbers and tuples, because the engine keeps many thousands of them.
    """

    def __init__(self, kinds: Sequence[str], max_blocks: int):
        self._defaults = (max_blocks, tuple(kinds))
        self.growths: dict[str, Growth] = {_OPENING: Growth.start()}
        self.root({})  # report invalid options now, not at the first row

    def root(self, row: Row) -> tuple[Any, ...]:
        max_blocks = row.get("max_blocks") or self._defaults[0]
        kinds = tuple(row.get("blocks") or self._defaults[1])
        unknown = [kind for kind in kinds if kind not in BLOCKS]
        if unknown or not any(not BLOCKS[kind].two_ended and kind != "0" for kind in kinds):
            raise ValueError(
                f"blocks {', '.join(kinds)}: name some of {', '.join(BLOCKS)}, including a one-ended type other than 0"
            )
        if not 2 <= max_blocks <= MOST_BLOCKS:
            raise ValueError(f"max_blocks is {max_blocks}; it must be from 2 to {MOST_BLOCKS}, the parser's limit")
        return ((max_blocks, kinds), "")

    def longest_block(self) -> list[list[str]]:
        """Return the literals of the first two blocks by place. After a second block, the text may end anywhere."""
        numbers = range(MOST_BLOCKS)
        faces = range(max(len(block.faces) for block in BLOCKS.values()))
        kinds = [f',{{"id":"{kind}","order_id":{n},"parent_a":' for kind in BLOCKS for n in numbers]
        first, second = ([f'{parent},"bp_id_{letter}":' for parent in numbers] for letter in "ab")
        return [[_OPENING], kinds, first, [f'{face},"parent_b":' for face in faces], second,
                [f"{face}}}" for face in faces], ["]"]]  # fmt: skip

    def choices(self, node: tuple[Any, ...]) -> Choices:
        """Return the next literals. No dead ends: every kind offered fits, and two blocks may end the text."""
        rules, text, *chosen = node
        if not text:
            return [(_OPENING, (rules, _OPENING))]
        growth = self._growth(text)
        index = len(growth.blocks)
        if not chosen:
            max_blocks, kinds = rules
            literals: list[tuple[str, Any]] = [] if index == 1 else [("]", None)]
            for kind in growth.kinds(kinds) if index < max_blocks else ():
                end = "_a" if BLOCKS[kind].two_ended else ""
                literals.append((f',{{"id":"{kind}","order_id":{index},"parent{end}":', (rules, text, kind)))
            return literals
        kind, *ends = chosen
        two_ended = BLOCKS[kind].two_ended
        places = growth.places(kind)
        if len(ends) >= 2:
            places = [place for place in places if place != (ends[0], ends[1])]  # both ends on one face is invalid
        letter = ("_a" if len(ends) < 2 else "_b") if two_ended else ""
        if len(ends) % 2 == 0:
            parents = dict.fromkeys(parent for parent, _ in places)
            return [(f'{parent},"bp_id{letter}":', (*node, parent)) for parent in parents]
        faces = [face for parent, face in places if parent == ends[-1]]
        if two_ended and len(ends) == 1:
            return [(f'{face},"parent_b":', (*node, face)) for face in faces]
        return [(f"{face}}}", (rules, f"{text},{block_json(index, Block(kind, *[*ends, face]))}")) for face in faces]

    def _growth(self, text: str) -> Growth:
        """Return the growth of a text, from the cached one a block earlier if possible."""
        growth = self.growths.get(text)
        if growth is None:
            tree = ConstructionTree.parse(text + "]")
            before = self.growths.get(text[: text.rfind(",{")])
            growth = before.grow(tree.blocks[-1]) if before is not None else Growth(tree)
            self.growths[text] = growth
            if len(self.growths) > _GROWTHS_KEPT:
                del self.growths[next(iter(self.growths))]  # the oldest
        return growth
