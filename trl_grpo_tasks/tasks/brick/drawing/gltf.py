"""Binary glTF 2.0 files (.glb), which 3D viewers and browsers open: a box with studs per brick, coloured by layer.

Lengths are in metres, and y is up: a cell is 8 mm wide and 9.6 mm high. Our x is glTF's x and our y is its -z, which
preserves handedness.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np

from ..ldraw import PALETTE
from ..structure import Brick, Structure

PITCH, HEIGHT = 0.008, 0.0096
STUD_RADIUS, STUD_HEIGHT = 0.0024, 0.0018
GAP = 0.0001  # bricks are smaller by this on every side, so that neighbours in one colour can be told apart
SIDES = 16  # of a stud
_FLOAT, _UNSIGNED_SHORT, _VERTICES, _INDICES = 5126, 5123, 34962, 34963  # constants of the format


def to_glb(structure: Structure, name: str) -> bytes:
    """Convert a structure to a .glb file with a node per brick, a mesh per size and layer, and a material per layer.

    Bricks that collide or leave the world are included, as in the LDraw file.
    """
    content: dict[str, Any] = {
        "asset": {"version": "2.0", "generator": "trl_grpo_tasks"},
        "scene": 0,
        "scenes": [{"name": name.encode(errors="replace").decode()}],
    }
    binary = b""
    if structure.bricks:
        layers = sorted({brick.z for brick in structure.bricks})
        meshes = sorted({(brick.h, brick.w, brick.z) for brick in structure.bricks})
        shapes = sorted({(h, w) for h, w, _ in meshes})
        buffer = _Buffer()
        accessors = {shape: buffer.add(*_geometry(*shape)) for shape in shapes}
        content["materials"] = [_material(layer) for layer in layers]
        content["meshes"] = [
            {"name": f"{h}x{w}", "primitives": [{**accessors[h, w], "material": layers.index(layer)}]}
            for h, w, layer in meshes
        ]
        content["nodes"] = [
            {
                "name": f"brick {n}: {brick}",
                "mesh": meshes.index((brick.h, brick.w, brick.z)),
                "translation": _at(brick),
            }
            for n, brick in enumerate(structure.bricks, 1)
        ]
        content["scenes"][0]["nodes"] = list(range(len(structure)))
        content |= {"accessors": buffer.accessors, "bufferViews": buffer.views}
        content["buffers"] = [{"byteLength": len(buffer.content)}]
        binary = buffer.content
    text = json.dumps(content, separators=(",", ":")).encode()
    chunks = _chunk(b"JSON", text, b" ") + (_chunk(b"BIN\0", binary, b"\0") if binary else b"")
    return struct.pack("<4sII", b"glTF", 2, 12 + len(chunks)) + chunks


class _Buffer:
    """The binary buffer with its views and accessors."""

    def __init__(self) -> None:
        self.content = b""
        self.views: list[dict[str, int]] = []
        self.accessors: list[dict[str, Any]] = []

    def add(self, points: np.ndarray, normals: np.ndarray, triangles: np.ndarray) -> dict[str, Any]:
        """Append a geometry and return the part of a primitive that refers to it."""
        limits = {"min": points.min(0).tolist(), "max": points.max(0).tolist()}
        return {
            "attributes": {"POSITION": self._append(points, _VERTICES, limits), "NORMAL": self._append(normals)},
            "indices": self._append(triangles.reshape(-1), _INDICES),
        }

    def _append(self, array: np.ndarray, target: int = _VERTICES, limits: dict[str, Any] | None = None) -> int:
        kind = _FLOAT if array.dtype == np.float32 else _UNSIGNED_SHORT
        self.views.append({"buffer": 0, "byteOffset": len(self.content), "byteLength": array.nbytes, "target": target})
        self.content += array.tobytes()
        self.content += b"\0" * (-len(self.content) % 4)
        self.accessors.append(
            {"bufferView": len(self.views) - 1, "componentType": kind, "count": len(array),
             "type": "VEC3" if array.ndim == 2 else "SCALAR", **(limits or {})}
        )  # fmt: skip
        return len(self.accessors) - 1


def _geometry(h: int, w: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return points, normals and triangles of a brick whose lowest corner is at the origin; outsides are
    anticlockwise."""
    points: list[np.ndarray] = []
    normals: list[np.ndarray] = []
    triangles: list[tuple[int, int, int]] = []

    def add(outline: np.ndarray, directions: np.ndarray) -> None:
        start = sum(map(len, points))
        points.append(outline)
        normals.append(directions)
        triangles.extend((start, start + i, start + i + 1) for i in range(1, len(outline) - 1))

    low = np.array([GAP, GAP, GAP - w * PITCH])
    high = np.array([h * PITCH - GAP, HEIGHT - GAP, -GAP])
    for axis in range(3):
        for end, sign in ((low, -1), (high, 1)):
            # Anticlockwise in the plane of the two other axes, which follow this one in cyclic order.
            square = np.array([(0, 0), (1, 0), (1, 1), (0, 1)])[::sign]
            corners = np.empty((4, 3))
            corners[:, axis] = end[axis]
            for column, other in enumerate(((axis + 1) % 3, (axis + 2) % 3)):
                corners[:, other] = np.where(square[:, column], high[other], low[other])
            add(corners, np.tile(sign * np.eye(3)[axis], (4, 1)))
    turns = -np.linspace(0, 2 * np.pi, SIDES, endpoint=False)  # anticlockwise seen from above, from +x towards -z
    ring = np.stack([np.cos(turns), np.zeros(SIDES), np.sin(turns)], axis=1)
    top = np.array([0, STUD_HEIGHT, 0])
    for i in range(h):
        for j in range(w):
            foot = np.array([(i + 0.5) * PITCH, high[1], -(j + 0.5) * PITCH])
            rim = foot + STUD_RADIUS * ring
            add(rim + top, np.tile([0.0, 1.0, 0.0], (SIDES, 1)))
            for n in range(SIDES):
                edge = [n, (n + 1) % SIDES]
                add(np.concatenate([rim[edge], rim[edge[::-1]] + top]), ring[[*edge, *edge[::-1]]])
    return (
        np.concatenate(points).astype(np.float32),
        np.concatenate(normals).astype(np.float32),
        np.array(triangles, dtype=np.uint16),
    )


def _at(brick: Brick) -> list[float]:
    return [round(value, 6) + 0.0 for value in (brick.x * PITCH, brick.z * HEIGHT, -brick.y * PITCH)]


def _material(layer: int) -> dict[str, Any]:
    colour = PALETTE[layer % len(PALETTE)]
    # Colours of materials are linear, those of the palette are sRGB.
    shares = [value / 255 for value in colour.rgb]
    linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
    surface = {"baseColorFactor": [*(round(s, 5) for s in linear), 1.0], "metallicFactor": 0.0, "roughnessFactor": 0.4}
    return {"name": f"layer {layer}: {colour.name}", "pbrMetallicRoughness": surface}


def _chunk(kind: bytes, data: bytes, padding: bytes) -> bytes:
    data += padding * (-len(data) % 4)
    return struct.pack("<I4s", len(data), kind) + data
