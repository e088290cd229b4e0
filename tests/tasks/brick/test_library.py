"""Brick libraries of the user's own: reading, errors, and what every part of the task does with other bricks."""

import json
import re

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.support.exhaustive import exhaustive_but
from tests.tasks.brick.test_constraint import Oracle, chooser, every_vocabulary, walk
from trl_grpo_tasks.commands.check import check_task
from trl_grpo_tasks.models.tiny import make_tokenizer
from trl_grpo_tasks.tasks.brick import BrickOptions, BrickTask
from trl_grpo_tasks.tasks.brick.constraint import brick_constraint
from trl_grpo_tasks.tasks.brick.kit import KIT, PARTS, Kit, Part
from trl_grpo_tasks.tasks.brick.ldraw import from_ldr
from trl_grpo_tasks.tasks.brick.library import library_text, read_library
from trl_grpo_tasks.tasks.brick.physics.stability import analyse
from trl_grpo_tasks.tasks.brick.structure import parse

BUILT_IN = {"bricks": [{"size": f"{p.short}x{p.long}", "mass_g": round(p.mass_kg * 1000, 2)} for p in PARTS]}
OTHER = {
    "bricks": [
        {"size": "1x1", "mass_g": 0.5},
        {"size": "3x1", "mass_g": 1.2, "name": "short beam", "ldraw": 3622},
        {"size": "3x3", "mass_g": 2.5, "name": "tile, square"},
        {"size": "1x5", "mass_g": 2, "height": 1},
        {"size": "2x10", "mass_g": 5.25, "ldraw": "3006"},
    ]
}
PIVOT = {"brick_levels": ["stack"], "text_form": "pivot"}
ROW = {"prompt": "", "caption": "a beam", "world": 12, "voxels": None, "gold": None, "loads": []}


def kit_of(content):
    return Kit(read_library(json.dumps(content)))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "bricks.yaml"
    path.write_text(yaml.safe_dump(OTHER))
    return str(path)


# ---- reading


def test_json_and_yaml_files_are_read(tmp_path, file):
    (tmp_path / "bricks.json").write_text(json.dumps(OTHER, indent="\t"))
    parts = read_library(file)
    assert parts == read_library(str(tmp_path / "bricks.json"))
    assert parts == (
        Part(1, 1, 0.0005, "3005"), Part(1, 3, 0.0012, "3622", "short beam"), Part(1, 5, 0.002),
        Part(2, 10, 0.00525, "3006"), Part(3, 3, 0.0025, "", "tile, square"),
    )  # fmt: skip
    assert Kit(parts).sizes == ((1, 1), (1, 3), (1, 5), (2, 10), (3, 1), (3, 3), (5, 1), (10, 2))


SIDES = st.integers(1, 20)
ENTRIES = st.fixed_dictionaries(
    {"size": st.builds("{}x{}".format, SIDES, SIDES), "mass_g": st.floats(1e-6, 9999) | st.integers(1, 99)},
    optional={"name": st.text(st.characters(categories=["L", "N", "Zs"]), max_size=20).filter(str.isprintable),
              "ldraw": st.from_regex(r"[0-9]{1,6}[a-z]?", fullmatch=True), "height": st.just(1)},
)  # fmt: skip


@given(st.lists(ENTRIES, min_size=1, max_size=9, unique_by=lambda e: tuple(sorted(map(int, e["size"].split("x"))))))
def test_text_in_normal_form_gives_the_same_parts(entries):
    given_text = json.dumps({"bricks": entries})
    text = library_text(given_text)
    assert read_library(text) == read_library(given_text) and library_text(text) == text
    assert len(read_library(text)) == len(entries)
    assert library_text(json.dumps({"bricks": entries[::-1]})) == text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("bricks: [", "is not YAML"),
        ("", "must hold one key, `bricks`, with a list such as [{size: 2x4, mass_g: 2.16}]"),
        ("bricks: []", "lists 0 bricks; it must list 1 to 64"),
        ("bricks: [2x4]", "brick 1: '2x4' must be a mapping such as {size: 2x4, mass_g: 2.16}"),
        ("bricks: [{size: 2x4, mass: 2}]", "unknown key 'mass' (did you mean 'mass_g'?); keys are: size, "),
        ("bricks: [{mass_g: 2}]", "brick 1: 'size' is missing"),
        ("bricks: [{size: 2 by 4, mass_g: 2}]", "size '2 by 4' must be of the form 2x4, with sides from 1 to 20"),
        ("bricks: [{size: 2x21, mass_g: 2}]", "size '2x21' must be of the form 2x4"),
        ("bricks: [{size: 2x4, mass_g: 0}]", "mass_g 0 must be a number from 1e-06 to 10000"),
        ("bricks: [{size: 2x4, mass_g: true}]", "mass_g True must be a number"),
        ("bricks: [{size: 2x4, mass_g: 2, height: 3}]", "height 3 must be 1: text gives bricks no height"),
        ("bricks: [{size: 2x4, mass_g: 2, ldraw: ../x}]", "ldraw '../x' must be a part number such as 3001"),
        ('bricks: [{size: 2x4, mass_g: 2, name: "a\\nb"}]', "name 'a\\nb' must be one line"),
        ("bricks: [{size: 2x4, mass_g: 2}, {size: 4x2, mass_g: 3}]", "brick 2: there is another 2x4 brick"),
    ],
)  # fmt: skip
def test_mistakes_in_a_file(tmp_path, content, message):
    path = tmp_path / "bricks.yaml"
    path.write_text(content)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        BrickOptions(brick_library=str(path))
    assert str(error.value).startswith(f"--brick_library {path}")


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path, tmp_path / "none.yaml", "my_bricks"):
        with pytest.raises(ValueError, match=r"--brick_library .*does not exist"):
            BrickOptions(brick_library=str(path))
    for text, message in ((str(tmp_path / "binary.yaml"), "is not YAML"), ('{"bricks"', "is not JSON")):
        with pytest.raises(ValueError, match=f"--brick_library .*{message}"):
            BrickOptions(brick_library=text)


def test_a_library_without_a_brick_that_fits_is_an_error():
    library = json.dumps({"bricks": [{"size": "9x1", "mass_g": 1}]})
    with pytest.raises(ValueError, match="no brick of --brick_library fits into a world of 8"):
        BrickTask(BrickOptions(brick_library=library))
    task = BrickTask(BrickOptions(brick_library=library.replace("9x1", "7x7"), brick_levels=["carry"]))
    with pytest.raises(
        ValueError, match=r"nothing of level 'carry' can be built with these bricks at gravity 9\.8 and"
    ):
        task.dataset("test", 2, 0)


# ---- the built-in bricks as a library


def test_the_built_in_bricks_as_a_library_change_nothing():
    ours, theirs = BrickTask(), BrickTask(BrickOptions(brick_library=json.dumps(BUILT_IN)))
    assert theirs.kit == KIT and theirs.tiny() == ours.tiny()
    rows = ours.dataset("train", 12, 5)
    assert theirs.dataset("train", 12, 5) == rows
    for row in rows:
        for text in (ours.gold(row), ours.bad(row)):
            assert theirs.score(row, text) == ours.score(row, text)
    files = theirs.exports(rows[0], rows[0]["gold"])
    assert files == ours.exports(rows[0], rows[0]["gold"])


# ---- other bricks


@pytest.mark.parametrize("options", exhaustive_but([PIVOT], [PIVOT, {"brick_levels": ["small", "carry"]}]))
def test_the_contract_holds_with_other_bricks(file, monkeypatch, options):
    monkeypatch.setattr(BrickTask, "render", lambda *_: b"")
    characters = make_tokenizer([*"0123456789x@(,)- \n"], 2000)
    check_task(BrickTask(BrickOptions(brick_library=file, **options)), size=4, tokenizer=characters)


def test_gold_answers_prompts_and_vocabulary_use_the_library(file):
    task = BrickTask(BrickOptions(brick_library=file, brick_levels=["small"], prompt_style="full"))
    rows = task.dataset("train", 8, 0)
    used = {brick[:2] for row in rows for brick in parse(row["gold"], 8, kit=task.kit).structure.bricks}
    assert used <= set(task.kit.sizes) and {(3, 3), (5, 1)} & used
    assert "Sizes: 1x1, 1x3, 1x5, 2x10, 3x1, 3x3, 5x1, 10x2." in rows[0]["prompt"][-1]["content"]
    tokens = BrickTask(BrickOptions(brick_library=file)).tiny().tokens
    assert {t for t in tokens if re.fullmatch(r"\d+x\d+ \(", t)} == {f"{h}x{w} (" for h, w in task.kit.sizes}


def test_text_with_built_in_sizes_is_invalid_with_other_bricks(file):
    task = BrickTask(BrickOptions(brick_library=file))
    found = task.score(ROW, "2x4 (0,0,0)\n")
    assert not found.valid and "there is no 2x4 brick; sizes are 1x1, 1x3, 1x5, 2x10, 3x1" in found.reason
    assert task.score(ROW, "3x3 (0,0,0)\n").valid and not BrickTask().score(ROW, "3x3 (0,0,0)\n").valid


def test_masses_are_those_of_the_library():
    """A 1x5 on a 1x1 at its end, by hand: its weight acts 2 cells from the stud, against friction at 1/4 on one side
    and, with the push at the other side, half a cell apart; the four points share the rest."""
    heavy = {"bricks": [{"size": "1x1", "mass_g": 1}, {"size": "1x5", "mass_g": 10}]}
    light = {"bricks": [{"size": "1x1", "mass_g": 1}, {"size": "1x5", "mass_g": 5}]}
    text = "1x1 (0,0,0)\n1x5 (0,0,1)\n"
    # three points pull with f and one pushes with A at 1/4: A - 3f = W and A/4 + f/4 = 2W, so f = 7/4 W
    for content, mass_kg in ((heavy, 0.01), (light, 0.005)):
        found = analyse(text, kit=kit_of(content))
        assert found.load_factor == pytest.approx(7 / 4 * mass_kg * 9.8 / 0.98, rel=1e-6)


@pytest.mark.parametrize("backend", ["highs", "clarabel"])
def test_wide_parts_against_the_plain_model(backend):
    from tests.tasks.brick.test_stability import PlainModel

    kit = kit_of(
        {"bricks": [{"size": f"{h}x{w}", "mass_g": h * w} for h, w in ((1, 1), (3, 3), (2, 5), (4, 6), (1, 9))]}
    )
    texts = [
        "3x3 (0,0,0)\n6x4 (2,2,1)\n2x5 (6,3,2)\n",
        "1x1 (0,0,0)\n4x6 (0,0,1)\n9x1 (0,0,2)\n",
        "3x3 (3,3,0)\n3x3 (5,5,1)\n3x3 (7,7,2)\n",
        "4x6 (0,0,0)\n4x6 (3,3,1)\n1x9 (6,2,2)\n3x3 (6,8,3)\n",
    ]
    for text in texts:
        structure = parse(text, 20, kit=kit).structure
        masses = [kit.part_of[brick[:2]].mass_kg for brick in structure.bricks]
        assert analyse(structure, backend=backend).load_factor == pytest.approx(
            PlainModel(structure, masses).solve(), rel=1e-5
        )


@every_vocabulary
@pytest.mark.parametrize(("form", "rules"), [("absolute", (True, True)), ("pivot", (True, False))])
def test_the_constraint_allows_exactly_what_fits(vocabulary, form, rules):
    """Every mask against an enumeration of all sizes and places."""
    kit = kit_of({"bricks": [{"size": size, "mass_g": 1} for size in ("3x3", "2x3", "1x5", "4x4", "1x20")]})
    attach, canonical = rules
    options = {"max_bricks": 3, "form": form, "attach": attach, "canonical": canonical, "max_offset": 2}
    constraint = brick_constraint(vocabulary, world=5, kit=kit, **options)
    oracle = Oracle(5, sizes=kit.sizes, **options)
    for seed in range(3):
        text = walk(constraint, chooser(seed, vocabulary.eos), oracle)
        assert not parse(text, 5, 2, kit).problems and not parse(text, 5, 2, kit).structure.problems(3)


def test_exports_with_parts_that_ldraw_lacks(file):
    task = BrickTask(BrickOptions(brick_library=file))
    text = "3x3 (0,0,0)\n1x5 (1,0,1)\n3x1 (0,5,0)\n10x2 (0,6,0)\n"
    files = task.exports(ROW, text)
    model = files["sample.ldr"].splitlines()
    assert model[0] == "0 FILE a_beam.ldr" and "0 FILE brick_1x5.dat" in model and "0 FILE brick_3x3.dat" in model
    assert sum(line.startswith("4 16 ") for line in model) == 12 and not any("FILE 3622" in line for line in model)
    assert sorted(from_ldr(files["sample.ldr"], 12, task.kit).bricks) == sorted(
        parse(text, 12, kit=task.kit).structure.bricks
    )
    assert files["sample.png"].startswith(b"\x89PNG")
    assert "0 tile, square" in model
