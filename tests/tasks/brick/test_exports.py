"""glTF files of brick structures, by the rules of the format."""

import json
import struct

import numpy as np
import pytest

from tests.support.brick_structures import random_structure
from trl_grpo_tasks.tasks.brick.drawing.gltf import to_glb
from trl_grpo_tasks.tasks.brick.structure import Brick, Structure

PITCH, HEIGHT, STUD, GAP = 8.0, 9.6, 1.8, 0.1  # in mm
TABLE = Structure((Brick(1, 1, 0, 0, 0), Brick(1, 1, 5, 0, 0), Brick(6, 1, 0, 0, 2), Brick(1, 2, 3, 0, 1),
                   Brick(1, 1, 0, 0, 1), Brick(1, 1, 5, 0, 1)))  # fmt: skip
KINDS = {5126: np.dtype("<f4"), 5123: np.dtype("<u2")}
WIDTHS = {"VEC3": 3, "SCALAR": 1}


def read_glb(data):
    """The JSON and the arrays of a .glb file, with the rules of the format checked on the way."""
    magic, version, length = struct.unpack_from("<4sII", data)
    assert (magic, version, length) == (b"glTF", 2, len(data))
    chunks, at = [], 12
    while at < length:
        size, kind = struct.unpack_from("<I4s", data, at)
        assert size % 4 == 0
        chunks.append((kind, data[at + 8 : at + 8 + size]))
        at += 8 + size
    assert at == length and [kind for kind, _ in chunks] == [b"JSON", b"BIN\0"][: len(chunks)]
    content = json.loads(chunks[0][1])
    assert content["asset"]["version"] == "2.0"
    assert all(value != [] for value in content.values()), "an empty list is not allowed; it is left out"
    if len(chunks) == 1:
        assert "buffers" not in content
        return content, []
    (buffer,) = content["buffers"]
    assert "uri" not in buffer and 0 <= len(chunks[1][1]) - buffer["byteLength"] < 4
    arrays = []
    for accessor in content["accessors"]:
        view, kind, width = (
            content["bufferViews"][accessor["bufferView"]], KINDS[accessor["componentType"]], WIDTHS[accessor["type"]]
        )  # fmt: skip
        assert view["byteOffset"] % kind.itemsize == 0 and view["target"] in (34962, 34963)
        assert view["byteLength"] == accessor["count"] * width * kind.itemsize
        assert view["byteOffset"] + view["byteLength"] <= buffer["byteLength"]
        array = np.frombuffer(chunks[1][1], kind, accessor["count"] * width, view["byteOffset"])
        arrays.append(array.reshape(-1, width) if width > 1 else array)
        assert np.isfinite(arrays[-1]).all()
    return content, arrays


def bricks_in(content, arrays):
    """For each node its name, its triangles as (n, 3 corners, xyz) in mm, their declared normals, and its colour."""
    assert content["scenes"][content["scene"]]["nodes"] == list(range(len(content["nodes"])))
    for node in content["nodes"]:
        (primitive,) = content["meshes"][node["mesh"]]["primitives"]
        names = primitive["attributes"]
        points, normals, indices = arrays[names["POSITION"]], arrays[names["NORMAL"]], arrays[primitive["indices"]]
        limits = content["accessors"][names["POSITION"]]
        assert limits["min"] == points.min(0).tolist() and limits["max"] == points.max(0).tolist()
        assert len(points) == len(normals) and len(indices) % 3 == 0 and indices.max() < len(points)
        material = content["materials"][primitive["material"]]["pbrMetallicRoughness"]
        at = np.array(node["translation"])
        yield node["name"], 1000 * (points[indices] + at).reshape(-1, 3, 3), normals[indices[::3]], material


@pytest.mark.parametrize("structure", [TABLE, random_structure(25, 3), Structure((Brick(8, 1, 30, -2, 7),))])
def test_gltf(structure):
    found = list(bricks_in(*read_glb(to_glb(structure, 'a "small" table\ud800'))))
    assert len(found) == len(structure)
    for (name, triangles, normals, material), (h, w, x, y, z) in zip(found, structure.bricks, strict=True):
        assert name.endswith(f"{h}x{w} ({x},{y},{z})")
        low = (PITCH * x + GAP, HEIGHT * z + GAP, -PITCH * (y + w) + GAP)
        high = (PITCH * (x + h) - GAP, HEIGHT * (z + 1) - GAP + STUD, -PITCH * y - GAP)
        assert np.allclose([triangles.min((0, 1)), triangles.max((0, 1))], [low, high], atol=1e-3)
        # By the divergence theorem, the triangles enclose the box and its studs if they all face outwards.
        crosses = np.cross(triangles[:, 1] - triangles[:, 0], triangles[:, 2] - triangles[:, 0])
        facing = crosses / np.linalg.norm(crosses, axis=1, keepdims=True)
        assert (np.einsum("ij,ij->i", facing, normals) > 0.97).all()
        middle = triangles.mean((0, 1))
        # A stud has no foot: the cones to its rim are closed by the face of the brick below it.
        volume = np.einsum("ij,ij->i", triangles[:, 0] - [middle[0], high[1] - STUD, middle[2]], crosses).sum() / 6
        box = np.prod(np.subtract(high, low) - (0, STUD, 0))
        assert box + h * w * 0.97 * np.pi * 2.4**2 * STUD < volume < box + h * w * np.pi * 2.4**2 * STUD
        assert len(material["baseColorFactor"]) == 4 and all(0 <= c <= 1 for c in material["baseColorFactor"])
    colours = {brick.z: found[n][3]["baseColorFactor"] for n, brick in enumerate(structure.bricks)}
    for n, brick in enumerate(structure.bricks):
        assert found[n][3]["baseColorFactor"] == colours[brick.z]
    assert len({tuple(colour) for colour in colours.values()}) == min(10, len(colours))


def test_gltf_without_bricks_is_an_empty_scene():
    content, arrays = read_glb(to_glb(Structure(()), "nothing"))
    assert content["scenes"] == [{"name": "nothing"}] and not arrays and "nodes" not in content
