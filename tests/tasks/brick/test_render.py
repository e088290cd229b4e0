"""Pictures are compared with ray marching through the cells."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.support.brick_structures import random_structure
from trl_grpo_tasks.tasks.brick.drawing import scene as drawn
from trl_grpo_tasks.tasks.brick.drawing.render import DRAWN_LIMIT, picture, png
from trl_grpo_tasks.tasks.brick.drawing.scene import EMPTY, HEIGHT, PLATE, PLATE_MARGIN, Camera, Scene, index_buffer
from trl_grpo_tasks.tasks.brick.ldraw import PALETTE, palette_indices
from trl_grpo_tasks.tasks.brick.structure import SIZES, Brick, Structure, parse

SMALL = (160, 160)
CUBE_OF_ONES = Structure(tuple(Brick(1, 1, x, y, z) for z in range(3) for x in range(3) for y in range(3)))
any_brick = st.builds(lambda size, *at: Brick(*size, *at), st.sampled_from(SIZES), *[st.integers(-9, 26)] * 3)
any_bricks = st.lists(any_brick, max_size=30)


def solid_at(structure: Structure, points: np.ndarray) -> np.ndarray:
    """What owns each point of the scene, from the structure's own cells: a brick, its studs, the plate or nothing."""
    # The scene's x is our -y, its y our x.
    place = np.stack([points[..., 1], -points[..., 0], points[..., 2] / HEIGHT], -1)
    grid = np.pad(structure.owner, 12, constant_values=EMPTY)
    bricks = np.array(structure.bricks)
    (x0, y0), (x1, y1) = bricks[:, 2:4].min(0), (bricks[:, 2:4] + bricks[:, :2]).max(0)
    grid[12 + x0 - PLATE_MARGIN : 12 + x1 + PLATE_MARGIN, 12 + y0 - PLATE_MARGIN : 12 + y1 + PLATE_MARGIN, 11] = PLATE
    cell = np.clip(np.floor(place).astype(int) + 12, 1, structure.world + 22)
    owner, below = (grid[cell[..., 0], cell[..., 1], cell[..., 2] - down] for down in (0, 1))
    owner = np.where((owner == PLATE) & (points[..., 2] < -drawn.PLATE_THICKNESS), EMPTY, owner)
    in_stud = np.hypot(*np.moveaxis(place[..., :2] % 1 - 0.5, -1, 0)) < drawn.STUD_RADIUS
    in_stud &= (place[..., 2] % 1) * HEIGHT < drawn.STUD_HEIGHT
    return np.where((owner == EMPTY) & in_stud, below, owner)


def owners_seen(scene: Scene, camera: Camera, supersample: int = 2) -> np.ndarray:
    owner_of = np.concatenate([[EMPTY], scene.face_owner, scene.cylinder_owner, scene.cylinder_owner])
    return owner_of[index_buffer(scene, camera, supersample)]


def rays_through(camera: Camera, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Viewing directions [point, xyz] through points of the picture: the inverse of Camera.project."""
    across, down = (x - camera.shift[0]) / camera.scale, (y - camera.shift[1]) / camera.scale
    return across[:, None] * camera.right - down[:, None] * camera.up - drawn.TO_CAMERA


@pytest.mark.parametrize("seed", range(4))
def test_every_pixel_shows_what_its_ray_hits_first(seed):
    structure = random_structure(14, seed, world=8)
    scene = Scene(dict(enumerate(structure.bricks)))
    camera = Camera(scene, SMALL)
    seen = owners_seen(scene, camera)
    rng = np.random.default_rng(seed)
    rows, columns = rng.integers(2, len(seen) - 2, (2, 700))
    # At a border either side is right; inside, the pixels around agree.
    around = np.stack([seen[rows + i, columns + j] for i in (-2, 0, 2) for j in (-2, 0, 2)])
    inside = (around == around[0]).all(0)
    rows, columns = rows[inside], columns[inside]
    rays = rays_through(camera, (columns + 0.5) / 2, (rows + 0.5) / 2)
    reach = camera.distance + np.arange(-11, 11, 0.02)
    met = solid_at(structure, camera.eye + reach[:, None, None] * rays)
    first = np.where((met != EMPTY).any(0), met[(met != EMPTY).argmax(0), range(len(rows))], EMPTY)
    assert len(rows) > 400 and len(np.unique(first)) > 5
    np.testing.assert_array_equal(seen[rows, columns], first)


def test_a_brick_inside_others_has_no_pixel():
    sound = picture(CUBE_OF_ONES, failing=[0], size=SMALL)
    enclosed, on_top = ([b[2:] for b in CUBE_OF_ONES.bricks].index(cell) for cell in ((1, 1, 1), (1, 1, 2)))
    assert png(sound) == png(picture(CUBE_OF_ONES, failing=[0, enclosed], size=SMALL))
    assert png(sound) != png(picture(CUBE_OF_ONES, failing=[0, on_top], size=SMALL))


def red_pixels(image: Image.Image) -> int:
    r, g, b = np.moveaxis(np.asarray(image).astype(int), -1, 0)
    return int(((r > 120) & (g < 0.2 * r) & (b < 0.2 * r)).sum())


def test_failing_bricks_are_red():
    structure = parse("2x4 (0,0,0)\n2x4 (2,0,0)\n2x4 (1,0,1)\n").structure
    # The palette has a red of its own, for the first brick; it is pale beside failing ones.
    assert red_pixels(picture(structure, failing=[2], size=SMALL)) > 1_500


def test_a_weight_is_dark_and_labelled():
    plank = parse("2x4 (0,0,0)").structure
    plain, loaded = (picture(plank, weights=w, size=(320, 320)) for w in ((), [(1, 1, 0, 0.2)]))
    dark = [(np.asarray(image).max(-1) < 75).sum() for image in (plain, loaded)]
    assert dark[0] < 50 and dark[1] > 1_000


def test_problems_are_visible_in_the_picture():
    sound = "2x4 (0,0,0)\n2x4 (0,0,1)\n"
    many = "".join(f"1x1 ({i % 20},{i // 20 % 20},{i // 400})\n" for i in range(DRAWN_LIMIT + 1))
    broken = ["2x4 (0,0,0)\n2x4 (1,0,0)", "2x4 (17,0,0)\n2x4 (19,0,1)", f"{sound}1x1 (0,0,-1)", ""]
    texts = (sound, *broken, many, many.rstrip().rpartition("\n")[0])
    pictures = [png(picture(parse(text).structure, size=SMALL)) for text in texts]
    assert len(set(pictures)) == len(pictures)


@settings(max_examples=20)
@given(any_bricks, st.lists(st.tuples(*[st.integers(-6, 26)] * 3, st.floats(0, 9)), max_size=3), st.text(max_size=80))
def test_any_bricks_give_a_picture(bricks, weights, caption):
    image = picture(Structure(tuple(bricks)), weights=weights, failing=range(0, 40, 7), caption=caption, size=(96, 80))
    assert image.size == (96, 80)


def test_colours_differ_between_neighbours_and_stay_as_bricks_are_added():
    structure = random_structure(30, 3, world=9)
    colours = palette_indices(structure.bricks)
    assert palette_indices(structure.bricks[:11]) == colours[:11]
    owner = structure.owner
    for axis in range(3):
        a, b = (np.moveaxis(owner, axis, 0)[part] for part in (slice(None, -1), slice(1, None)))
        touching = (a >= 0) & (b >= 0) & (a != b)
        assert touching.any()
        assert all(colours[i] != colours[j] for i, j in zip(a[touching], b[touching], strict=True))
    assert len({colour.code for colour in PALETTE}) == len(PALETTE)
