"""Prompts of the machine task: a request, and the manual that explains format and blocks."""

from __future__ import annotations

from collections.abc import Sequence

from .blocks import BLOCKS, LIMITS
from .trials import Trial

TEST_VARIANTS = 2  # the last phrasings of a trial are held out for testing
EXPLAIN = " First say what the blocks do, then give the machine."  # the end of a request with --reasoning
_DEMANDS = {"distance": "get at least {:g} m away", "forward": "get at least {:g} m ahead"}


def variants(trial: Trial, split: str) -> range:
    """Return the numbers of the phrasings of a split: the last ones are for testing, at least one for training."""
    numbers = range(len(trial.requests))
    held_out = min(TEST_VARIANTS, len(numbers) - 1)
    return numbers[:-held_out] if split == "train" else numbers[-held_out:]


def question(trial: Trial, variant: int, max_blocks: int, goal: float, reasoning: bool = False) -> str:
    """Return a request: a phrasing of the trial, and what is demanded of the machine and of the answer."""
    demand = f"Use at most {max_blocks} blocks and {_DEMANDS.get(trial.score, 'score at least {:g}').format(goal)}."
    return f"{trial.requests[variant]} {demand}{EXPLAIN if reasoning else ''}"


def manual(kinds: Sequence[str], reasoning: bool = False) -> str:
    """Return the text of the system message: the format, the blocks, and what makes a machine invalid."""
    answer = "First say what the blocks do. Then give" if reasoning else "Answer with"
    where = "in a ```json code block" if reasoning else "and nothing else"
    lines = [
        f"You design machines. {answer} one JSON list of blocks {where}.",
        'The first is the start block {"id":"0","order_id":0,"parent":-1,"bp_id":-1}. Every other block sits on a '
        'face of an earlier one: {"id":type,"order_id":n,"parent":order_id of that block,"bp_id":number of the face}. '
        "order_id counts up from 0. Blocks with two ends have parent_a, bp_id_a, parent_b and bp_id_b instead.",
        "x is right, y is up, z is forward. A block grows along its own z from the face that it sits on.",
        "Faces of a block of length n: 0 is its front; then n on the left, n on the right, n above, n below, each "
        "from the near end to the far end. The start block has front, back, left, right, up, down.",
        f"No two blocks may overlap. At most {LIMITS[0]:g} wide, {LIMITS[2]:g} long, {LIMITS[1]:g} high.",
        "Blocks:",
    ]
    for kind in dict.fromkeys(["0", *kinds]):
        block = BLOCKS[kind]
        size = " by ".join(f"{side:g}" for side in block.size)
        shape = "two ends" if block.two_ended else f"{size}, faces: {len(block.faces)}"
        lines.append(f"{kind}: {block.name}, {shape}, {block.mass:g} kg; {block.words}")
    return "\n".join(lines)
