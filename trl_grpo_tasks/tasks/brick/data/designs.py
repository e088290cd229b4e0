"""Gold and bad answers for a request: the target voxels, a stable layout with its weights, and failing layouts."""

from __future__ import annotations

import base64
import functools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..kit import KIT, Kit
from ..physics.stability import Load, analyse
from ..shapes.layout import lay, lay_once
from ..structure import Structure
from .catalogue import CATEGORIES, Request

LIMIT = 0.9  # the largest load factor of a gold answer, which leaves a safety margin


@dataclass(frozen=True)
class Design:
    """A solved request. `support` is the least sufficient thickness; `bad_label` says why `bad` fails."""

    voxels: np.ndarray
    gold: Structure
    loads: list[dict[str, Any]]
    support: int | None
    bad: Structure
    bad_label: str


class NoDesignError(ValueError):
    """Raised when no layout of these parts is strong enough for a request."""


@functools.lru_cache(maxsize=4_000)
def design(request: Request, world: int, kit: Kit = KIT) -> Design:
    """Find the gold answer to a request, with the thinnest support that carries the weights, or raise NoDesignError.

    Every request of the levels has an answer with the default kit.
    """
    category = CATEGORIES[request.category]
    supports = category.supports(dict(request.params)) if category.support else [None]
    thin: Structure | None = None
    for support in supports:
        params = dict(request.params) | ({category.support: support} if category.support else {})
        shape = category.build(**params)
        if max(shape.shape) > world:
            break
        voxels = np.zeros((world,) * 3, dtype=bool)
        voxels[tuple(map(slice, shape.shape))] = shape
        places = category.weight_x(params), shape.shape[0] - 1
        y = (shape.shape[1] - 1) // 2
        loads = [{"grams": grams, "at": [x, y]} for grams, x in zip(request.grams, places, strict=False)]
        factor_of = functools.partial(load_factor, loads=loads, kit=kit)
        gold, factor = lay(voxels, factor_of, LIMIT, attempts=2 if category.support else 20)
        if gold is not None and factor < LIMIT:
            return Design(voxels, gold, loads, support, *_bad(voxels, gold, loads, thin, kit))
        thin = gold if factor >= 1 else None
    raise NoDesignError(f"no design can carry {request}; reduce its weight or its reach")


def load_factor(structure: Structure, loads: Sequence[Mapping[str, Any]], kit: Kit = KIT) -> float:
    """Return the load factor under weights; infinite if a brick floats or a weight has no brick below it."""
    carried = loads_on(structure, loads)
    if isinstance(carried, str):
        return float("inf")
    analysis = analyse(replace(structure, kit=kit), loads=carried)
    if analysis.load_factor is None:
        if analysis.stable and loads:
            raise ImportError(
                "rows with weights need a solver to compute their supports: pip install 'trl_grpo_tasks[brick]'"
            )
        return 0.0 if analysis.stable else float("inf")
    return analysis.load_factor


def loads_on(structure: Structure, loads: Sequence[Mapping[str, Any]]) -> list[Load] | str:
    """Return where a row's weights rest, or a message if one has no brick below it.

    A weight {"grams": 300, "at": [x, y]} rests on the highest brick in the column (x, y).

    >>> from trl_grpo_tasks.tasks.brick.structure import parse
    >>> loads_on(parse("2x2 (0,0,0)", 8).structure, [{"grams": 300, "at": [1, 0]}])
    [Load(x=1, y=0, z=0, mass_kg=0.3)]
    """
    resting = []
    for load in loads:
        x, y = load["at"]
        inside = 0 <= x < structure.world and 0 <= y < structure.world
        heights = np.flatnonzero(structure.occupied[x, y]) if inside else np.empty(0)
        if len(heights) == 0:
            return f"the weight of {load['grams']} g at ({x},{y}) has no brick below it"
        resting.append(Load(x, y, int(heights[-1]), load["grams"] / 1000))
    return resting


def _bad(
    voxels: np.ndarray, gold: Structure, loads: Sequence[Mapping[str, Any]], thin: Structure | None, kit: Kit
) -> tuple[Structure, str]:
    """Return a failing answer and its label, preferably one that fails only because it ignores the weight."""
    if thin is not None:
        return thin, "thin support"
    if loads:
        for joint in (-3.0, -6.0):
            careless = lay_once(voxels, joint=joint)
            if careless is not None and load_factor(careless, loads, kit) > 1:
                return careless, "shallow joints"
    made = negatives(gold)
    label = sorted(made)[len(gold) % len(made)]
    return made[label], label


def negatives(gold: Structure) -> dict[str, Structure]:
    """Make invalid answers of the kinds that models produce, by the kind of error."""
    *others, last = gold.bricks
    lifted = last._replace(z=last.z + 1)
    if lifted.is_inside(gold.world):
        floating = [*others, lifted]
    else:
        floating = [brick for brick in gold.bricks if brick.z > 0]
    return {
        "floating": Structure(tuple(floating), gold.world),
        "colliding": Structure((*gold.bricks, last), gold.world),
    }


def encode_voxels(voxels: np.ndarray) -> str:
    """Encode a boolean grid as text: bits in [x, y, z] order, packed, compressed with zlib, in base 64."""
    return base64.b64encode(zlib.compress(np.packbits(voxels).tobytes(), 9)).decode()


def decode_voxels(text: str, world: int) -> np.ndarray:
    """Decode the boolean grid [x, y, z] that `encode_voxels` encoded; ValueError if it is that of another world."""
    size = -(-(world**3) // 8)
    packed = zlib.decompressobj().decompress(base64.b64decode(text), size + 1)  # at most: it may come from a stranger
    if len(packed) != size:
        raise ValueError(f"the target shape does not fit a world of {world}")
    bits = np.unpackbits(np.frombuffer(packed, dtype=np.uint8), count=world**3)
    return bits.reshape((world,) * 3).astype(bool)
