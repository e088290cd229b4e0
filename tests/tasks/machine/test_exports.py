"""Files of machines for other programs: MuJoCo XML that simulates the same, a short film, and JSON."""

import io
import json
from functools import cache

import mujoco
import numpy as np
import pytest
from PIL import Image

from trl_grpo_tasks import get_task
from trl_grpo_tasks.tasks.machine import ConstructionTree, simulate
from trl_grpo_tasks.tasks.machine.render import animation
from trl_grpo_tasks.tasks.machine.tree import ROOT, Block

LARGEST_FILM = 1_000_000  # bytes


@pytest.fixture(scope="module")
def made():
    """A function that returns the task of a trial, a row, and the files of its gold answer."""

    @cache
    def files_and_row(trial, **options):
        task = get_task("machine", {"trials": [trial], **options})
        (row,) = task.dataset("test", 1, 0)
        return task, row, task.exports(row, task.gold(row))

    return files_and_row


def run_alone(xml, seconds, samples_per_second=50):
    """The path of the start block, simulated by MuJoCo from the file alone."""
    model = mujoco.MjModel.from_xml_string(xml)
    data = mujoco.MjData(model)
    mujoco.mj_resetDataKeyframe(model, data, model.key("start").id)
    mujoco.mj_forward(model, data)
    path = [data.body("b0").xpos.copy()]
    for sample in range(round(seconds * samples_per_second)):
        if sample == samples_per_second // 5:  # springs contract and grabbers release after 0.2 s
            for i in range(model.nu):
                data.ctrl[i] = 1.0 if model.actuator(i).name.startswith("spring") else data.ctrl[i]
            for i in range(model.neq):
                data.eq_active[i] = 0 if model.equality(i).name.startswith("held") else data.eq_active[i]
        for _ in range(round(1 / samples_per_second / model.opt.timestep)):
            mujoco.mj_step(model, data)
        mujoco.mj_kinematics(model, data)
        path.append(data.body("b0").xpos.copy())
    return np.array(path)


@pytest.mark.parametrize("trial", ["slope", "catapult"])
def test_the_xml_simulates_the_same(trial, made):
    task, row, files = made(trial)
    result = simulate(task.gold(row), trial)
    path = run_alone(files["machine.xml"], result.seconds)
    masses = mujoco.MjModel.from_xml_string(files["machine.xml"]).body_mass
    assert sum(masses) == pytest.approx(sum(b.type.mass for b in ConstructionTree.parse(task.gold(row)).blocks))
    assert path.shape == result.path.shape and np.array_equal(path, result.path)
    if trial != "catapult":
        assert np.ptp(path[:, 1]) > 5, "it drives"


def test_the_film_is_short_and_small(made):
    for trial in ("car", "catapult"):
        task, row, files = made(trial)
        film = Image.open(io.BytesIO(files["film.gif"]))
        assert film.format == "GIF" and 5 < film.n_frames <= 51 and len(files["film.gif"]) < LARGEST_FILM
        frames = []
        for number in (0, film.n_frames - 1):
            film.seek(number)
            frames.append(np.asarray(film.convert("RGB")))
        assert (frames[0] != frames[1]).any()
    with pytest.raises(ValueError, match="record=True"):
        animation(simulate(task.gold(row), "catapult"), "catapult")


def test_json_and_what_is_missing(made):
    task, row, files = made("car")
    assert set(files) == {"sample.png", "machine.json", "paper.json", "machine.xml", "machine.bsg", "film.gif"}
    blocks = json.loads(files["machine.json"])
    assert blocks == json.loads(task.gold(row)) and blocks[0] == {"id": "0", "order_id": 0, "parent": -1, "bp_id": -1}
    for ours, theirs in zip(blocks, json.loads(files["paper.json"]), strict=True):
        names = {"type": "id", "id": "order_id", "parent": "parent", "face_id": "bp_id"}
        assert theirs == {paper: ours[name] for paper, name in names.items()}
    spring = ConstructionTree((ROOT, Block("15", 0, 4), Block("9", 0, 1, 1, 0))).to_paper_json()
    assert json.loads(spring)[2] == {
        "type": "9", "id": 2, "parent_a": 0, "face_id_a": 1, "parent_b": 1, "face_id_b": 0,
    }  # fmt: skip
    assert task.score(row, files["paper.json"]) == task.score(row, task.gold(row))
    assert set(task.exports(row, "nonsense")) == {"sample.png"}
    task, row, files = made("car", breakage=True)
    assert "<sensor>" in files["machine.xml"], "the model that was simulated, with separate bodies"
