"""Prompts of the machine task: twelve phrasings per trial, and the manual that explains the format and the blocks."""

from __future__ import annotations

from collections.abc import Sequence

from .blocks import BLOCKS, LIMITS

# The last TEST_VARIANTS phrasings of each trial are held out for testing.
TEST_VARIANTS = 2
VARIANTS: dict[str, tuple[str, ...]] = {
    "car": (
        "Build a car that drives as far as it can on flat ground in five seconds.",
        "Design a vehicle that covers the greatest distance in five seconds.",
        "Make a machine on wheels that gets far away from where it starts.",
        "I need a fast car. How far it is from its start after five seconds is all that counts.",
        "Construct a cart with powered wheels that travels a long way over level ground.",
        "Put together a car that drives straight and far.",
        "Give me a machine that rolls away from its starting place as quickly as possible.",
        "Design a simple racing car. The ground is flat.",
        "Build something that moves by itself, as far as possible in five seconds.",
        "A flat field lies ahead. Build a car to cross as much of it as time allows.",
        "Invent a car whose start block ends up far from where it began.",
        "Build a vehicle for a race of five seconds on level ground.",
    ),
    "rough": (
        "Build a car that drives as far as it can over bumpy ground in five seconds.",
        "Design a vehicle that crosses a field of bumps.",
        "The ground has ridges across the way. Make a car that gets over them and goes far.",
        "I need a car for rough ground. Distance after five seconds counts.",
        "Construct a machine on wheels that bumps cannot stop.",
        "Put together an off-road car that keeps going.",
        "Build a vehicle that rolls over one ridge after another.",
        "Give me a car with enough clearance for a bumpy track.",
        "Design a car that stays on its wheels over uneven ground and goes far.",
        "Bumps lie every few metres. Build a machine that drives across as many as possible.",
        "Make a rugged car for a rough road.",
        "Build something that travels far although the ground is not flat.",
    ),
    "slope": (
        "Build a car that climbs a slope of fifteen degrees as far as it can.",
        "Design a vehicle that drives uphill for five seconds.",
        "The ground rises ahead. Make a car that gets far up.",
        "I need a hill climber. How far up it is after five seconds counts.",
        "Construct a machine on wheels that does not roll back on a hill.",
        "Put together a car that drives forward up a steep road.",
        "Build a vehicle that climbs without tipping over.",
        "Give me a car with the grip to go uphill.",
        "Design a climbing car. It starts on the slope.",
        "A long hill lies ahead. Build a machine to drive up it.",
        "Make a car that wins a race uphill.",
        "Build something that moves up a slope by itself.",
    ),
    "catapult": (
        "Build a catapult that throws its boulder high and far.",
        "Design a machine that throws a boulder. Height times distance counts.",
        "Make a throwing machine. The boulder must rise three metres above its start.",
        "I need a siege engine that hurls a boulder as far and as high as it can.",
        "Construct a catapult with a motor, an arm and a bowl for the boulder.",
        "Put together a machine that flings a boulder through the air.",
        "Build a stable frame with an arm that throws a boulder a long way.",
        "Give me a trebuchet that throws a boulder beyond the walls of a castle.",
        "Design a machine whose boulder flies in a high arc and lands far away.",
        "A boulder lies in a container. Build the machine that throws it.",
        "Make a catapult that gets the most out of one boulder.",
        "Build something that throws a heavy ball high and far.",
    ),
    "wall": (
        "Build a catapult that throws its boulder over a wall twelve metres ahead.",
        "Design a machine that throws a boulder forward over a wall four metres high.",
        "A wall stands in the way. Make a machine that gets a boulder behind it.",
        "I need a siege engine whose boulder clears a wall and flies on.",
        "Construct a catapult that throws forward, high enough for the wall.",
        "Put together a machine that lobs a boulder over an obstacle.",
        "Build a throwing machine for a target behind a wall.",
        "Give me a catapult whose boulder lands far behind the wall.",
        "Design a machine that throws in a high arc. A wall blocks every low throw.",
        "The castle hides behind a wall. Throw a boulder over it.",
        "Make a catapult that no wall of four metres can stop.",
        "Build something that gets a heavy ball across a wall.",
    ),
    "rings": (
        "Build a catapult that throws its boulder through two rings.",
        "Design a machine that throws a boulder forward through rings in the air.",
        "Two rings hang ahead, at eight and at sixteen metres. Throw a boulder through both.",
        "I need a throwing machine that hits targets in the air.",
        "Construct a catapult with good aim. It must throw straight ahead.",
        "Put together a machine that sends a boulder through the middle of the rings.",
        "Build a throwing machine for ring targets.",
        "Give me a catapult whose boulder passes close to the middle of each ring.",
        "Design a machine that throws straight. The nearer to the middle of a ring, the better.",
        "Rings hang six and seven metres high. Build the machine that throws through them.",
        "Make a catapult for a contest of aim.",
        "Build something that throws a heavy ball through hoops.",
    ),
}


def question(trial: str, variant: int, max_blocks: int) -> str:
    return f"{VARIANTS[trial][variant]} Use at most {max_blocks} blocks."


def manual(kinds: Sequence[str]) -> str:
    """Return the text of the system message: the format, the blocks, and what makes a machine invalid."""
    lines = [
        "You design machines. Answer with one JSON list of blocks and nothing else.",
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
