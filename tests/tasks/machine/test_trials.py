"""Trials from files."""

import json

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_grpo_tasks.tasks.machine import MachineOptions, MachineTask
from trl_grpo_tasks.tasks.machine.data import GOLD_FILE, gold_machines
from trl_grpo_tasks.tasks.machine.prompts import variants
from trl_grpo_tasks.tasks.machine.scene import Scene
from trl_grpo_tasks.tasks.machine.show import main as show
from trl_grpo_tasks.tasks.machine.trials import TRIALS, load_trials, read_trials


def make(**options):
    return MachineTask(MachineOptions(**options))


HILL = {
    "words": "drive up a hill with ridges",
    "score": "forward",
    "goal": 0.5,
    "seconds": 1,
    "slope": 8,
    "bumps": [[12, 0.1], [15, 0.2]],
    "requests": ["Climb the ridged hill.", "Drive up over the ridges.", "Go uphill."],
}


def test_a_file_of_trials(tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"hill": HILL}))
    (trial,) = read_trials(path).values()
    assert trial.scene == Scene(bumps=((12.0, 0.1), (15.0, 0.2)), slope=8.0) and trial.seconds == 1
    other = tmp_path / "mine.json"
    other.write_text(json.dumps({"hill": HILL}))
    assert read_trials(other) == read_trials(path)
    task = make(trials=["car", str(path)])
    rows = task.dataset("train", None, 0)
    assert {row["trial"] for row in rows} == {"car", "hill"}
    hill = [row for row in rows if row["trial"] == "hill"]
    assert {row["prompt"][-1]["content"].split(" Use")[0] for row in hill} == {HILL["requests"][0]}
    assert task.score(hill[0], task.gold(hill[0])).success
    # The words of the new requests are in the vocabulary of the embedded model.
    assert " ridged" in task.tiny().tokens and " ridged" not in make().tiny().tokens
    machine = tmp_path / "machine.txt"
    machine.write_text(task.gold(hill[0]))
    assert show([str(machine), "--trial", "hill", "--trials", str(path)]) == 0
    assert "score (paper)" in capsys.readouterr().out


def test_a_trial_that_no_known_machine_passes_has_rows_without_gold(tmp_path):
    path = tmp_path / "hard.yaml"
    path.write_text(yaml.safe_dump({"hard": {**HILL, "slope": 45, "goal": 1000, "requests": ["One.", "Two."]}}))
    task = make(trials=[str(path)])
    (row, *_), test = task.dataset("train", None, 0), task.dataset("test", None, 0)
    assert row["prompt"][-1]["content"].startswith("One.") and test[0]["prompt"][-1]["content"].startswith("Two.")
    with pytest.raises(ValueError, match=r"no known machine of at most [0-9]+ blocks scores 1000 at 'hard'"):
        task.gold(row)


def test_built_in_trials_in_a_file_of_their_own_score_the_same(tmp_path):
    source = yaml.safe_load((GOLD_FILE.parent / "trials.yaml").read_text())
    path = tmp_path / "copies.yaml"
    path.write_text(yaml.safe_dump({f"my_{name}": entry for name, entry in source.items()}))
    task = make(trials=[str(path)])
    for name in TRIALS:
        machine = gold_machines()[name][1].machine
        assert task.score({"trial": f"my_{name}"}, machine) == make().score({"trial": name}, machine)
        assert variants(TRIALS[name], "test") == range(10, 12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"goal": None}, "'goal': None must be a number from 1e-06 to"),
        ({"goal": float("nan")}, "'goal': nan must be a number"),
        ({"goal": [5, 4]}, r"'goal': \[5, 4\] must be a number, or numbers that rise"),
        ({"goal": [5, "6"]}, "'goal': '6' must be a number"),
        ({"slope": 80}, "'slope': 80 must be a number from -45 to 45"),
        ({"seconds": 1e9}, "'seconds': 1000000000.0 must be a number from 0.5 to 30"),
        ({"bumps": [[1, 2, 3]]}, r"'bumps': \[1, 2, 3\] must be a list of 2 numbers"),
        ({"bumps": 3}, "'bumps' must be a list of 1 to 100 lists of 2 numbers"),
        ({"wall": [3, 4]}, "'wall': 3 must be a number from 10 to 200"),
        ({"score": "speed"}, "unknown score 'speed'; scores are: distance, forward, throw, over_wall, rings"),
        ({"score": "rings"}, "the score 'rings' needs 'rings'"),
        ({"slop": 3}, r"unknown key 'slop' \(did you mean 'slope'\?\); keys are: words, score, goal"),
        ({"requests": ["One.", "One."]}, "at least two different wordings"),
        ({"requests": ["One.", 2]}, "2 must be a text"),
        ({"words": ""}, "'' must be a text of 1 to 1,000 characters"),
    ],
)
def test_mistakes_in_a_file_of_trials(change, message, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"hill": {**HILL, **change}}))
    with pytest.raises(ValueError, match=rf"--trials .*mine.yaml, trial 'hill': .*{message}"):
        MachineOptions(trials=[str(path)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("car: {words: a, score: distance, goal: 1, requests: [a, b]}", "there is already a trial 'car'"),
        ("- 1", "must map names of trials"),
        ("hill: 3", "3 must be a mapping with words, score, goal, requests"),
        ("hill: {words: a}", "'score' is missing"),
        ("Hill!: {words: a}", "its name must consist of lower-case letters"),
        ("a: {}\na: {}", "a is given 2 times"),
        ("a: [", "is not YAML"),
        (None, r"--trials .*mine.yaml: this path does not exist"),
    ],
)
def test_files_that_are_no_trials(text, message, tmp_path):
    path = tmp_path / "mine.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_trials([str(path)])


keys = st.sampled_from([*HILL, "x", "wall"])
leaves = st.none() | st.booleans() | st.floats() | st.text(max_size=5) | st.integers()
contents = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner), max_leaves=12
)


@settings(max_examples=80)
@given(contents)
def test_any_content_is_a_trial_or_a_clear_error(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("trials") / "any.json"
    path.write_text(json.dumps({"hill": content}))
    try:
        read_trials(path)
    except ValueError as error:
        assert str(error).startswith(f"--trials {path}")
