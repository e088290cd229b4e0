"""The published metrics of files: by hand, against published scores, and with files that cannot be read."""

import json

import pytest

from tests.tasks.brick.test_stability import PUBLIC
from trl_grpo_tasks.commands import main as cli
from trl_grpo_tasks.tasks.brick import metrics
from trl_grpo_tasks.tasks.brick.physics.stability import SolverError

STANDS = "2x4 (0,0,0)\n"  # needs no friction: 1 for its brick
CANTILEVER = "1x1 (5,5,0)\n1x8 (5,5,1)\n"
FLOATS = "2x4 (0,0,0)\n2x4 (0,0,2)\n"
COLLIDES = "2x4 (0,0,0)\n2x4 (1,1,0)\n"
OUTSIDE = "2x4 (19,0,0)\n"
NOT_A_BRICK = "2x5 (0,0,0)\n"
FORCE = 3.25 * 0.00303 * 9.8 / 0.98  # friction at the 1x8, relative to the strength of a stud
BELOW = FORCE - 0.00043 * 9.8 / 4 / 0.98  # and at the 1x1


def test_metrics_by_hand():
    texts = [STANDS, CANTILEVER, COLLIDES, OUTSIDE, NOT_A_BRICK, "", "no bricks", STANDS]
    expected = {"structures": 8, "unsolved": 0, **dict.fromkeys(("valid", "stable", "stable_by_load_factor"), 3 / 8)}
    expected["mean_brick_stability"] = (1 + (2 - FORCE - BELOW) / 2 + 1) / 3
    expected["min_brick_stability"] = (1 + 1 - FORCE + 1) / 3
    assert metrics.metrics_of(texts) == pytest.approx(expected, rel=1e-5)
    for texts, expected in (([FLOATS], (1, 0, 0.5, 0)), ([COLLIDES, ""], (0, 0, None, None))):
        found = metrics.metrics_of(texts)
        names = ("valid", "stable", "mean_brick_stability", "min_brick_stability")
        assert tuple(found[name] for name in names) == expected


def test_structures_that_cannot_be_analysed_are_left_out(monkeypatch):
    def fails(*_):
        raise SolverError("out of luck")

    monkeypatch.setattr(metrics, "analyse", fails)
    found = metrics.metrics_of([STANDS, COLLIDES])
    assert (found["structures"], found["unsolved"], found["valid"]) == (1, 1, 0)


@pytest.mark.skipif(not PUBLIC.is_file(), reason="public structures are not part of the repository")
def test_published_structures_have_their_published_scores():
    cases = [case for case in json.loads(PUBLIC.read_text())["cases"] if case["source"] == "BrickGPT"]
    assert len(cases) == 7
    for case in cases:
        found = metrics.metrics_of([case["bricks"]])
        assert (found["valid"], found["stable"]) == (1, float(case["upstream"]["stable"]))
        # Scores per brick are not unique; their largest, and nearly their mean, are.
        assert found["min_brick_stability"] == pytest.approx(1 - case["upstream"]["max_score"], abs=2e-3)
        scores = case["upstream"]["scores"]
        assert found["mean_brick_stability"] == pytest.approx(1 - sum(scores) / len(scores), abs=2e-3)


def test_the_command_prints_a_table(tmp_path, capsys):
    assert cli.main(["tool", "brick", "metrics", "tests/data/stabletext2brick.jsonl"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].split() == ["structures", "12"] and out[1].split() == ["valid", "100.0%"]
    assert out[2].split() == ["stable", "100.0%"] and len(out) == 6
    (tmp_path / "own.json").write_text(json.dumps([{"bricks": COLLIDES}, {"bricks": STANDS, "captions": ["a"]}]))
    assert cli.main(["tool", "brick", "metrics", str(tmp_path / "own.json")]) == 0
    assert "valid                    50.0%" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"captions": ["a"]}\n', "row 1: column 'bricks' is not text; columns are: captions"),
        ("a.jsonl", '{"bricks": 3}\n', "row 1: column 'bricks' is not text"),
        ("a.json", "[]", "contains no structures"),
        ("a.json", "{", "a.json is not valid JSON"),
        ("a.csv", "bricks", "is not a .ldr, .mpd, .jsonl, .json or .parquet file; give a file of structures"),
    ],
)
def test_files_in_another_format_are_errors(tmp_path, capsys, name, content, message):
    (tmp_path / name).write_text(content)
    for file, said in ((name, message), ("none.jsonl", "does not exist")):
        assert cli.main(["tool", "brick", "metrics", str(tmp_path / file)]) == 2
        assert said in capsys.readouterr().err
