"""Visibility of bricks on a baseplate: which face or stud each pixel shows.

Faces and studs are painted back to front into an index buffer. The camera is beyond the largest x, y and z of the
scene, so everything that a cell hides has a smaller x + y + z, and painting in this order is exact. Lengths are in
stud pitches.

A scene is the structure rotated by a quarter turn (its x is our -y, its y is our x), because structures usually have
their front at low y, for example the chairs, shelves and beds of the published data set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image, ImageDraw

from ..structure import Brick

EMPTY, PLATE, WEIGHT = -1, -2, -3  # owners of cells without a brick

HEIGHT = 1.2  # height of a brick
UNIT = np.array([1, 1, HEIGHT])
STUD_RADIUS, STUD_HEIGHT = 0.3, 0.21
PLATE_THICKNESS, PLATE_MARGIN = 0.4, 1

TO_CAMERA = np.array([0.70, 0.50, 0.51]) / np.linalg.norm([0.70, 0.50, 0.51])
RING = np.linspace(0, 2 * np.pi, 24, endpoint=False)


class Scene:
    """The cell faces that point towards the camera, and the cylinders (studs and weights) that stand on them.

    A cell shared by bricks belongs to the earlier one. `weights` are (x, y, z, kg), each on top of its cell. The faces
    of `hatched` cells are striped.
    """

    def __init__(
        self,
        bricks: Mapping[int, Brick],
        weights: Sequence[tuple[int, int, int, float]] = (),
        hatched: frozenset[tuple[int, int, int]] = frozenset(),
    ) -> None:
        turned = {index: Brick(w, h, -y - w, x, z) for index, (h, w, x, y, z) in bricks.items()}
        self.weights = [(-y - 1, x, z, mass_kg) for x, y, z, mass_kg in weights]
        boxes = [(b.x, b.y, b.x + b.h, b.y + b.w, b.z + 1) for b in turned.values()]
        boxes += [(x, y, x + 1, y + 1, z + 1) for x, y, z, _ in self.weights]
        lows, highs = np.min(boxes or [(0, 0, 8, 8, 0)], axis=0), np.max(boxes or [(0, 0, 8, 8, 0)], axis=0)
        (low_x, low_y), (high_x, high_y) = lows[:2] - PLATE_MARGIN, highs[2:4] + PLATE_MARGIN
        self.top = int(highs[4])
        self.plate = np.array([(low_x, low_y), (high_x, low_y), (high_x, high_y), (low_x, high_y)])

        # A margin of one empty cell gives every cell neighbours. The plate is the layer below 0.
        self.low = np.array([low_x - 1, low_y - 1, -2])
        self.owner = np.full((high_x - low_x + 2, high_y - low_y + 2, self.top + 3), EMPTY, dtype=np.int32)
        self.owner[1:-1, 1:-1, 1] = PLATE
        for index, brick in turned.items():
            x, y, z = brick[2:] - self.low
            cells = self.owner[x : x + brick.h, y : y + brick.w, z]
            cells[cells == EMPTY] = index

        shown = [np.argwhere((self.owner != EMPTY) & (np.roll(self.owner, -1, axis) == EMPTY)) for axis in range(3)]
        self.axis = np.repeat(range(3), [len(cells) for cells in shown])
        self.cell = np.concatenate(shown)  # indices into `owner`; add `low` for scene coordinates
        self.face_owner = self.owner[tuple(self.cell.T)]
        places = (self.cell + self.low).tolist()
        self.is_hatched = np.array([bool(hatched) and (y, -x - 1, z) in hatched for x, y, z in places])

        face_on_top = {tuple(places[face]): int(face) for face in np.flatnonzero(self.axis == 2)}
        rows: list[tuple[float, ...]] = [
            (x + 0.5, y + 0.5, HEIGHT * (z + 1), STUD_HEIGHT, STUD_RADIUS, x + y + z + 1, self.face_owner[face], face)
            for (x, y, z), face in face_on_top.items()
        ]
        for x, y, z, _ in self.weights:
            if self.owner[tuple((x, y, z + 1) - self.low)] != EMPTY:
                continue
            face, floor, order = face_on_top.get((x, y, z), -1), HEIGHT * (z + 1), x + y + z + 1
            rows.append((x + 0.5, y + 0.5, floor, 0.75, 0.44, order, WEIGHT, face))
            rows.append((x + 0.5, y + 0.5, floor + 0.75, 0.3, 0.17, order, WEIGHT, face))
        table = np.array(rows, dtype=float)
        self.centre, self.base, self.rise, self.radius = table[:, :2], table[:, 2], table[:, 3], table[:, 4]
        self.cylinder_order, self.cylinder_owner, self.stands_on = table[:, 5:].astype(int).T

    def face_corners(self) -> np.ndarray:
        """Return the corners of every face as [face, 4, xyz]."""
        corners = np.ones((3, 4, 3))
        for axis in range(3):
            corners[axis][:, [a for a in range(3) if a != axis]] = [(0, 0), (1, 0), (1, 1), (0, 1)]
        points = ((self.cell + self.low)[:, None] + corners[self.axis]) * UNIT
        points[..., 2] = points[..., 2].clip(-PLATE_THICKNESS)
        return points

    def rims(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the lower and upper rims of every cylinder, each [cylinder, 24, xyz]."""
        circle = self.centre[:, None] + self.radius[:, None, None] * np.stack([np.cos(RING), np.sin(RING)], -1)
        lower = np.concatenate([circle, np.broadcast_to(self.base[:, None, None], (*circle.shape[:2], 1))], -1)
        return lower, lower + self.rise[:, None, None] * (0, 0, 1)


class Camera:
    """A camera with slight perspective, fitted so that the scene fills the picture above `below` pixels."""

    def __init__(self, scene: Scene, size: tuple[int, int], below: float = 0) -> None:
        points = np.concatenate([scene.face_corners().reshape(-1, 3), scene.rims()[1].reshape(-1, 3)])
        low, high = points.min(0), points.max(0)
        self.size = size
        self.distance = 3.5 * float(np.linalg.norm(high - low))
        self.eye = (low + high) / 2 + self.distance * TO_CAMERA
        self.right = np.cross((0, 0, 1), TO_CAMERA)
        self.right /= np.linalg.norm(self.right)
        self.up = np.cross(TO_CAMERA, self.right)
        self.scale, self.shift = 1.0, np.zeros(2)
        flat = self.project(points)
        margin = 0.05 * min(size)
        room = np.maximum([size[0] - 2 * margin, size[1] - below - 2 * margin], 8)
        self.scale = float((room / np.ptp(flat, axis=0)).min())
        self.shift = (size[0] / 2, margin + room[1] / 2) - self.scale * (flat.min(0) + flat.max(0)) / 2

    def project(self, points: np.ndarray) -> np.ndarray:
        """Project points [..., xyz] to picture coordinates, x to the right and y down."""
        away = points - self.eye
        flat = np.stack([away @ self.right, -(away @ self.up)], -1) / -(away @ TO_CAMERA)[..., None]
        return self.scale * flat + self.shift


def index_buffer(scene: Scene, camera: Camera, supersample: int) -> np.ndarray:
    """Return the index buffer [row, column]: 0 for background, then faces, cylinder walls and cylinder tops."""
    lower, upper = scene.rims()
    # The outline of a wall is the near half of the lower rim and the far half of the upper rim.
    near = np.cos(RING - np.arctan2(TO_CAMERA[1], TO_CAMERA[0])) > 0
    polygons = [
        outline
        for points in (scene.face_corners(), np.where(near[:, None], lower, upper), upper)
        for outline in (supersample * camera.project(points)).reshape(len(points), -1).tolist()
    ]
    order = np.concatenate([(scene.cell + scene.low).sum(1), *[scene.cylinder_order] * 2])
    # Within a cell: faces, then each cylinder (a weight's knob after the weight), wall before top.
    number = np.arange(len(scene.base))
    turn = np.concatenate([np.full(len(scene.cell), -1), 2 * number, 2 * number + 1])
    buffer = Image.new("I", (camera.size[0] * supersample, camera.size[1] * supersample))
    draw = ImageDraw.Draw(buffer)
    for index in np.lexsort([turn, order]).tolist():
        draw.polygon(polygons[index], fill=index + 1)
    return np.asarray(buffer)
