"""Prompts around a caption: the caption alone, an explanation of the task, or the prompt of the published model."""

from __future__ import annotations

from .kit import GRAVITY, KIT, STUD_STRENGTH_N
from .options import BrickOptions
from .structure import WORLD


def prompt(caption: str, world: int, options: BrickOptions) -> list[dict[str, str]]:
    """Make chat messages that ask for `caption`.

    "short" is little more than the caption. "full" explains the task and the text form; published structures carry no
    weights and stand anywhere in the world. "brickgpt" is what BrickGPT was trained on: absolute positions of its own
    parts.
    """
    if options.prompt_style == "short":
        return [{"role": "user", "content": caption if world == WORLD else f"{caption}, world {world}"}]
    if options.prompt_style == "brickgpt":
        system, instruction = "You are a helpful assistant.", _BRICKGPT
    else:
        system = "You design toy-brick structures that can be built and that stand."
        grip = "1" if options.stud_strength == STUD_STRENGTH_N else f"{options.stud_strength:.2g}"
        instruction = " ".join(
            [
                "Build what the input describes.",
                (_PIVOT if options.text_form == "pivot" else _ABSOLUTE).format(max_offset=options.max_offset_distance),
                _WORLD.format(sizes=KIT.written_sizes, last=world - 1, world=world),
                _CONNECTED if options.brick_data else _GENERATED.format(grip=grip),
                *([] if options.gravity == GRAVITY else [f"Gravity is {options.gravity:g} m/s2."]),
            ]
        )
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": f"{instruction}\n\n### Input:\n{caption}"},
    ]


_ABSOLUTE = (
    "Write one brick a line, as `hxw (x,y,z)`: h cells along x, w cells along y, one high, with its lowest corner at "
    "(x,y,z)."
)
_PIVOT = (
    "Write one brick a line, as `hxw @n (x,y,z)`: h cells along x, w cells along y, one high. (x,y,z) is the way from "
    "the lowest corner of the brick in line n, an earlier line, to that of the new brick, at most {max_offset} along "
    "each axis. Lines are counted from 1. With @0, (x,y,z) is the position of the lowest corner itself."
)
_WORLD = (
    "Sizes: {sizes}. Coordinates go from 0 to {last} in a world of {world}x{world}x{world}; z=0 is the ground. Go up "
    "layer by layer; within a layer x falls, then y."
)
_CONNECTED = "Bricks must not overlap, and studs must connect each to the ground, directly or through other bricks."
_GENERATED = (
    "Bricks must not overlap, and each must stand on the ground or on studs of a brick below. Lengths and reaches run "
    "along x, widths and depths along y; the structure stands in the corner where x and y are 0, and what overhangs "
    "points towards x=0. It must carry the weights that the input names, with the thinnest support that holds: a stud "
    "grips with about {grip} N."
)

# Word for word what the published weights were trained with: they were not tried with any other prompt.
_BRICKGPT = (
    "Create a LEGO model of the input. Format your response as a list of bricks: <brick dimensions> <brick position>, "
    "where the brick position is (x,y,z).\n"
    "Allowed brick dimensions are 2x4, 4x2, 2x6, 6x2, 1x2, 2x1, 1x4, 4x1, 1x6, 6x1, 1x8, 8x1, 1x1, 2x2.\n"
    "All bricks are 1 unit tall."
)
