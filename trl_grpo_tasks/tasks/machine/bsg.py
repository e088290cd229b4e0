"""Saved machines of the game Besiege (.bsg, XML): a construction tree as such a file, and back.

A file has no parents: each block has an id, a position and a rotation. Its parent is the block with a face at this
position that looks the same way, which is unique in machines without overlaps.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator
from xml.etree import ElementTree

import numpy as np

from .blocks import BLOCKS, rotation
from .reading import MOST_BLOCKS
from .simulator import mujoco_module
from .tree import ROOT, Block, ConstructionTree, block_json, place

LARGEST_FILE = 2_000_000  # characters; larger files are rejected
_NEAR = 0.01  # positions and directions that differ by less are the same
_STANDS_AT = "5.05"  # height of the start block above the ground of the game's empty levels

# What the game needs to run a block without keys: (element, key, text). Springs contract when L is pressed.
_SETTINGS = {
    "0": [("Integer", "bmt-version", "1")],
    "9": [("Single", "bmt-slider", "10"), ("StringArray", "bmt-contract", "L"), ("Boolean", "bmt-toggle", "False")],
    "35": [("Single", "bmt-mass", "3")],
}
_DRIVEN = [("Boolean", "bmt-automatic", "True"), ("Boolean", "bmt-auto-brake", "False")]


def to_bsg(tree: ConstructionTree, name: str = "machine") -> str:
    """Return a valid machine as the text of a .bsg file. The same machine gives the same file.

    Wheels and motors run from the start, as in our simulation; wheels that face left are flipped, so that they drive
    forward too.
    """
    if problems := tree.validate():
        raise ValueError(f"a machine that cannot be built has no .bsg file: {'; '.join(problems[:3])}")
    machine = ElementTree.Element("Machine", version="1", bsgVersion="1.3", name=name)
    where = _add(machine, "Global")
    _add(where, "Position", x="0", y=_STANDS_AT, z="0")
    _add(where, "Rotation", x="0", y="0", z="0", w="1")
    _add(_add(machine, "Data"), "StringArray", key="requiredMods")
    blocks = _add(machine, "Blocks")
    for index, (block, placement) in enumerate(zip(tree.blocks, tree.placements, strict=True)):
        element = _add(blocks, "Block", id=block.kind, guid=_guid(index, block))
        at = tree.end(block) if placement is None else placement.origin
        transform = _add(element, "Transform")
        _add(transform, "Position", **_texts("xyz", at))
        _add(transform, "Rotation", **_texts("xyzw", _quaternion("z+" if placement is None else placement.facing)))
        _add(transform, "Scale", x="1", y="1", z="1")
        settings = [*_SETTINGS.get(block.kind, ()), *(_DRIVEN if block.type.drive in ("wheel", "motor") else ())]
        if block.type.drive == "wheel" and placement is not None and placement.facing == "x-":
            settings.append(("Boolean", "flipped", "True"))
        data = _add(element, "Data")
        for tag, key, text in settings:
            _add(data, tag, key=key).text = text
        if placement is None:
            for key, point in (("start-position", np.zeros(3)), ("end-position", tree.end(block, True) - at)):
                vector = _add(data, "Vector3", key=key)
                for axis, value in _texts("XYZ", point).items():
                    _add(vector, axis).text = value
    ElementTree.indent(machine, "\t")
    return ElementTree.tostring(machine, encoding="unicode", xml_declaration=True) + "\n"


def from_bsg(text: str) -> ConstructionTree:
    """Return the machine of a .bsg file; ValueError names what in the file is not a machine of these blocks.

    The machine may stand anywhere. A block that is the same after a quarter turn about its own front may be turned.
    """
    if len(text) > LARGEST_FILE:
        raise ValueError(f"the file has {len(text)} characters; at most {LARGEST_FILE} are accepted")
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise ValueError("the file defines a document type or entities, which .bsg files do not have")
    try:
        found = ElementTree.fromstring(text.lstrip("\ufeff").strip()).findall("./Blocks/Block")
    except (ElementTree.ParseError, ValueError) as error:  # ValueError: text that cannot be encoded
        raise ValueError(f"the file is not XML: {str(error)[:200]}") from None
    if not 2 <= len(found) <= MOST_BLOCKS:
        raise ValueError(f"the file has {len(found)} blocks in Machine/Blocks; 2 to {MOST_BLOCKS} are accepted")
    saved = [_Saved(number, element) for number, element in enumerate(found)]
    starts = [one for one in saved if one.kind == "0"]
    if len(starts) != 1:
        raise ValueError(f"the file has {len(starts)} start blocks (id 0), not one")
    turn, origin = starts[0].turn.T, starts[0].at
    for one in saved:
        one.at, one.end, one.turn = turn @ (one.at - origin), turn @ (one.end - origin), turn @ one.turn
    tree, left = ConstructionTree((ROOT,)), [one for one in saved if one is not starts[0]]
    while left:  # blocks keep their order, except that each comes after what it sits on
        grown = next(((one, block) for one in left if (block := _attached(tree, one)) is not None), None)
        if grown is None:
            raise ValueError(f"{left[0]} does not sit on a face of another block of the file")
        tree = ConstructionTree((*tree.blocks, grown[1]))
        left.remove(grown[0])
    if problems := tree.validate():
        raise ValueError("; ".join(problems[:3]))
    return tree


class _Saved:
    """A block as it is in a file: its position, rotation matrix, and second end."""

    def __init__(self, number: int, element: ElementTree.Element):
        self.number, self.kind, self.guid = number, element.get("id", ""), element.get("guid", "")
        if self.kind not in BLOCKS:
            raise ValueError(
                f"block {number} of the file has the id {self.kind!r:.40}, which is not a block of this task; "
                f"ids are: {', '.join(BLOCKS)}"
            )
        self.at = self._numbers(element.find("./Transform/Position"), "xyz")
        quaternion = self._numbers(element.find("./Transform/Rotation"), "xyzw")
        size = np.linalg.norm(quaternion)
        if abs(size - 1) > _NEAR:
            raise ValueError(f"{self} has a rotation that is not a unit quaternion")
        self.turn = _matrix(quaternion / size)
        scale = element.find("./Transform/Scale")
        if scale is not None and np.abs(self._numbers(scale, "xyz") - 1).max() > _NEAR:
            raise ValueError(f"{self} is scaled; only blocks of their normal size can be read")
        self.end = self.at
        if BLOCKS[self.kind].two_ended:
            points = {vector.get("key"): vector for vector in element.findall("./Data/Vector3")}
            ends = [self._numbers(points.get(key), "XYZ") for key in ("start-position", "end-position")]
            self.at, self.end = (self.at + self.turn @ end for end in ends)

    def __str__(self) -> str:
        return f"block {self.number} of the file ({BLOCKS[self.kind].name})"

    def _numbers(self, element: ElementTree.Element | None, names: str) -> np.ndarray:
        """Return the numbers in the attributes, or in the children, of these names."""
        texts = {} if element is None else element.attrib | {part.tag: part.text or "" for part in element}
        try:
            values = [float(texts[name]) for name in names]
        except (KeyError, ValueError):
            values = [math.nan]
        if not all(abs(value) < 1e6 for value in values):
            raise ValueError(f"{self} needs finite numbers {', '.join(names)} for its position, rotation and ends")
        return np.array(values)


def _attached(tree: ConstructionTree, saved: _Saved) -> Block | None:
    """Return the block as a child of a machine, None if nothing of the machine is where it sits."""
    if BLOCKS[saved.kind].two_ended:
        ends = [list(_faces_at(tree, at)) for at in (saved.at, saved.end)]
        made = [Block(saved.kind, *a, *b) for a in ends[0] for b in ends[1] if a != b]
        # Faces of two blocks can be at one place. In our own files the GUID tells which of them is meant.
        return next((b for b in made if _guid(len(tree.blocks), b) == saved.guid), made[0] if made else None)
    for parent, face in _faces_at(tree, saved.at):
        below = tree.placements[parent]
        assert below is not None
        here = place(below, tree.blocks[parent].kind, face, saved.kind)
        if _same_turn(saved, here.facing):
            return Block(saved.kind, parent, face)
    return None


def _faces_at(tree: ConstructionTree, at: np.ndarray) -> Iterator[tuple[int, int]]:
    for index, (block, placement) in enumerate(zip(tree.blocks, tree.placements, strict=True)):
        for face in range(len(block.type.faces) if placement is not None else 0):
            assert placement is not None
            if np.abs(placement.face(block.kind, face) - at).max() < _NEAR:
                yield index, face


def _same_turn(saved: _Saved, facing: str) -> bool:
    kind, wanted = BLOCKS[saved.kind], rotation(facing)
    turns = kind.size[0] == kind.size[1] and kind.joint not in ("bend", "turn")
    return bool(np.abs(saved.turn - wanted)[:, 2 if turns else 0 :].max() < _NEAR)


def _guid(index: int, block: Block) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_OID, block_json(index, block)))


def _add(parent: ElementTree.Element, tag: str, **attributes: str) -> ElementTree.Element:
    return ElementTree.SubElement(parent, tag, attributes)


def _texts(names: str, values: np.ndarray) -> dict[str, str]:
    return {name: f"{value:.7g}" for name, value in zip(names, values + 0.0, strict=True)}


def _quaternion(facing: str) -> np.ndarray:
    """Return x, y, z, w of the rotation of a block with this facing."""
    found = np.zeros(4)  # w, x, y, z
    mujoco_module().mju_mat2Quat(found, rotation(facing).ravel())
    return np.roll(found, -1)


def _matrix(quaternion: np.ndarray) -> np.ndarray:
    """Return the rotation matrix of x, y, z, w."""
    found = np.zeros(9)
    mujoco_module().mju_quat2Mat(found, np.roll(quaternion, 1))
    return found.reshape(3, 3)
