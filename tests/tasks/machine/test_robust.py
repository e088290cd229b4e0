"""Perturbed starts, trials from files, and the rule against wheels on wheels."""

import json
import math
import random

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tasks.machine.test_constraint import KINDS, legal_blocks, walk
from tests.tasks.machine.test_tree import car, catapult, random_machine
from trl_grpo_tasks.commands.check import check_task
from trl_grpo_tasks.tasks.machine import MachineOptions, MachineTask, simulate
from trl_grpo_tasks.tasks.machine import task as task_module
from trl_grpo_tasks.tasks.machine.blocks import BLOCKS
from trl_grpo_tasks.tasks.machine.constraint import MachineTree
from trl_grpo_tasks.tasks.machine.data import gold_machines
from trl_grpo_tasks.tasks.machine.prompts import variants
from trl_grpo_tasks.tasks.machine.scene import Scene
from trl_grpo_tasks.tasks.machine.show import main as show
from trl_grpo_tasks.tasks.machine.simulator import DT, PERTURBED_DT, simulate_each
from trl_grpo_tasks.tasks.machine.starts import DROP_M, GRIP, SHIFT_M, YAW_DEGREES, Start, perturbed_starts
from trl_grpo_tasks.tasks.machine.tree import ROOT, Block, ConstructionTree
from trl_grpo_tasks.tasks.machine.trials import TRIALS, Trial, load_trials, read_trials, task_score


def make(**options):
    return MachineTask(MachineOptions(**options))


# ---- perturbed starts


@pytest.mark.parametrize("trial", TRIALS)
def test_zero_perturbations_give_the_unperturbed_score(trial, monkeypatch):
    monkeypatch.setattr(task_module, "perturbed_starts", lambda tree, count: [Start()] * count)
    monkeypatch.setattr(task_module, "PERTURBED_DT", DT)
    machine = gold_machines()[trial][0].machine
    plain = make().score({"trial": trial}, machine)
    for way in ("mean", "min"):
        score = make(perturbations=4, perturbed_score=way).score({"trial": trial}, machine)
        assert score.info.pop("perturbed_scores") == [plain.total] * 4
        assert score == plain


@pytest.mark.parametrize("trial", ["car", "rings"])
def test_the_score_is_that_of_separate_simulations(trial):
    for tree in [gold.tree for gold in gold_machines()[trial] if len(gold.tree.blocks) > 10][:2]:
        runs = [simulate(tree, trial, dt=PERTURBED_DT, start=start) for start in perturbed_starts(tree, 3)]
        scores = [task_score(TRIALS[trial], run)[0] for run in runs]
        assert len(set(scores)) == 3
        for way, combine in (("mean", lambda s: math.fsum(s) / 3), ("min", min)):
            score = make(perturbations=3, perturbed_score=way).score({"trial": trial}, tree.to_json())
            assert score.info["perturbed_scores"] == scores and score.total == pytest.approx(
                combine(scores), rel=1e-14
            )
            assert score.success == (score.total >= TRIALS[trial].goal)


def test_starts_depend_on_the_machine_only_and_stay_within_their_limits():
    assert perturbed_starts(car(), 4) == perturbed_starts(car(), 4)[:4] == perturbed_starts(car(), 6)[:4]
    assert perturbed_starts(car(), 4) != perturbed_starts(catapult(), 4)
    for start in perturbed_starts(car(), 200):
        assert max(abs(start.right), abs(start.forward)) <= SHIFT_M and 0 <= start.drop <= DROP_M
        assert abs(math.degrees(start.yaw)) <= YAW_DEGREES and abs(start.friction - 1) <= GRIP


def test_what_a_start_does():
    """A turned car drives the other way, a shifted one starts elsewhere, and a boulder moves with its machine."""
    ahead, turned = simulate(car()), simulate(car(), start=Start(yaw=math.pi / 2))
    assert turned.distance == pytest.approx(ahead.distance, rel=1e-3)
    assert (turned.path[-1] - turned.path[0])[0] == pytest.approx(-ahead.forward, rel=1e-2)
    shifted = simulate(car(), start=Start(right=0.5, forward=-0.25, drop=0.01))
    assert shifted.path[0] - ahead.path[0] == pytest.approx([0.5, -0.25, 0.01])
    straight, moved = (simulate(catapult(), "catapult", start=start) for start in (Start(), Start(0.3, 0.2, 0, 0.5)))
    between = [math.dist(run.path[0], run.boulder_paths[0][0]) for run in (straight, moved)]
    assert between[0] == pytest.approx(between[1])
    sled = ConstructionTree((ROOT, Block("15", 0, 0)))
    slide = Trial("slide", "", "distance", 1.0, Scene(slope=44.9), seconds=1.0)
    distances = [simulate(sled, slide, start=Start(friction=f)).distance for f in (0.5, 0.9, 1.1)]
    # On a slope a block slides by (g sin - mu g cos) t^2 / 2; friction above tan(slope) holds it.
    assert distances[0] > distances[1] > 0.1 > distances[2]
    assert distances[0] == pytest.approx(9.81 / 2 * math.sqrt(0.5) * (1 - 0.5), rel=0.1)


def test_runs_that_share_a_model_do_not_disturb_each_other():
    starts = [Start(friction=0.5), Start(), Start(yaw=1.0), Start()]
    runs = list(simulate_each(car(), "rough", starts))
    assert runs[1] == runs[3] == simulate(car(), "rough") and len({run.distance for run in runs}) == 3


def test_invalid_and_unfinished_perturbed_runs(monkeypatch):
    task = make(perturbations=2)
    real = list(simulate_each(car(), "car", [Start()]))
    bad = task_module.Result(False, "the simulation became unstable")
    slow = task_module.Result(False, "slow", timed_out=True)
    for results, expected in (([*real, bad], real[0].distance / 2), ([bad, bad], 0.0), ([*real, slow], None)):
        monkeypatch.setattr(task_module, "simulate_each", lambda *_, results=results: iter(results))
        score = task.score({"trial": "car"}, car().to_json())
        assert (None if score is None else score.total) == expected
        assert score is None or score.valid == (expected > 0)
    assert make(perturbations=2).score({"trial": "car"}, "nonsense").valid is False


def test_the_contract_with_perturbations():
    """Gold machines succeed from perturbed starts too; pictures and exports work."""
    check_task(make(trials=["car"], perturbations=2, perturbed_score="min"), size=3)


# ---- wheels on wheels


def stacks(blocks):
    """By following parents: the wheels with a wheel below them."""
    found = []
    for index, block in enumerate(blocks):
        parent = block.parent
        while block.type.is_wheel and parent >= 0:
            if blocks[parent].type.is_wheel:
                found.append((index, parent))
                break
            parent = blocks[parent].parent
    return found


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from([("2", "15", "46", "9"), ("40", "60", "1", "22"), KINDS]))
def test_sampled_machines_have_no_wheels_on_wheels(seed, kinds):
    rng = random.Random(seed)
    free, strict = MachineTree(kinds, 14), MachineTree(kinds, 14, wheels_on_wheels=False)
    for tree in (free, strict):
        machine = ConstructionTree.parse(walk(rng.choice, tree.choices, tree.root({})))
        assert machine.validate() == [] and machine.carried_wheels() == stacks(machine.blocks)
        assert tree is free or not machine.carried_wheels()


@pytest.mark.parametrize("seed", range(4))
def test_the_constraint_forbids_nothing_else(seed):
    """Every legal next block without a stack can be chosen, and no other."""
    rng = random.Random(seed)
    kinds = ["2", "46", "15", "1"]
    machine = next(m for m in iter(lambda: random_machine(rng, 6), None)
                   if any(b.type.is_wheel and b.type.faces for b in m.blocks) and not m.carried_wheels())  # fmt: skip
    tree = MachineTree(kinds, 20, wheels_on_wheels=False)
    node = (tree.root({})[0], machine.to_json()[:-1])
    found = set()
    for _, kind in tree.choices(node):
        for _, parent in tree.choices(kind) if kind else ():
            found |= {text[len(machine.to_json()) :] for _, (_, text) in tree.choices(parent)}
    expected = {
        ConstructionTree((*machine.blocks, block)).to_json()[len(machine.to_json()) : -1]
        for block in legal_blocks(machine.blocks, kinds)
        if not stacks((*machine.blocks, block))
    }
    assert found == expected and len(expected) < len(list(legal_blocks(machine.blocks, kinds)))


def test_wheels_on_wheels_are_not_valid_if_forbidden():
    stacked = ConstructionTree((ROOT, Block("2", 0, 2), Block("2", 1, 0)))
    through = ConstructionTree((ROOT, Block("2", 0, 2), Block("15", 1, 0), Block("2", 2, 0)))
    on_motor = ConstructionTree((ROOT, Block("22", 0, 2), Block("2", 1, 0)))
    for tree, pair in ((stacked, (2, 1)), (through, (3, 1))):
        assert tree.validate() == [] and tree.carried_wheels() == [pair]
        assert make().score({"trial": "car"}, tree.to_json()).valid
        score = make(wheels_on_wheels=False).score({"trial": "car"}, tree.to_json())
        assert not score.valid and f"wheel {pair[0]} sits on wheel {pair[1]}" in score.reason
    assert make(wheels_on_wheels=False).score({"trial": "car"}, on_motor.to_json()).valid
    broken = ConstructionTree((ROOT, Block("2", 7, 0), Block("2", -5, 0)))
    assert broken.carried_wheels() == [] and broken.validate()


def test_gold_machines_without_wheels_on_wheels():
    task = make(trials=list(TRIALS), wheels_on_wheels=False, manual=True)
    rows = task.dataset("train", None, 0)
    assert {(row["trial"], row["level"]) for row in rows} == {
        (trial, level) for trial in TRIALS for level in task.levels
    }
    golds = {task.gold(row) for row in rows}
    assert not any(ConstructionTree.parse(text).carried_wheels() for text in golds)
    assert "No wheel may sit on a wheel" in rows[0]["prompt"][0]["content"]
    assert any(stacks(ConstructionTree.parse(row["gold"]).blocks) for row in make().dataset("train", None, 0))
    assert all(BLOCKS[kind].is_wheel == ("wheel" in BLOCKS[kind].name) for kind in BLOCKS)


# ---- trials from files

HILL = {
    "words": "drive up a hill with ridges",
    "score": "forward",
    "goal": 5,
    "seconds": 3,
    "slope": 8,
    "bumps": [[12, 0.1], [15, 0.2]],
    "requests": ["Climb the ridged hill.", "Drive up over the ridges.", "Go uphill."],
}


def test_a_file_of_trials(tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"hill": HILL}))
    (trial,) = read_trials(path).values()
    assert trial.scene == Scene(bumps=((12.0, 0.1), (15.0, 0.2)), slope=8.0) and trial.seconds == 3
    other = tmp_path / "mine.json"
    other.write_text(json.dumps({"hill": HILL}))
    assert read_trials(other) == read_trials(path)
    task = make(trials=["car", str(path)])
    check_task(task, size=6)
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
    source = yaml.safe_load((task_module.data.GOLD_FILE.parent / "trials.yaml").read_text())
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
        ({"goal": True}, "'goal': True must be a number"),
        ({"goal": float("nan")}, "'goal': nan must be a number"),
        ({"goal": []}, r"'goal': \[\] must be a number, or numbers that rise"),
        ({"goal": [5, 4]}, r"'goal': \[5, 4\] must be a number, or numbers that rise"),
        ({"goal": [5, "6"]}, "'goal': '6' must be a number"),
        ({"slope": 80}, "'slope': 80 must be a number from -45 to 45"),
        ({"seconds": 1e9}, "'seconds': 1000000000.0 must be a number from 0.5 to 30"),
        ({"bumps": [[1, 2, 3]]}, r"'bumps': \[1, 2, 3\] must be a list of 2 numbers"),
        ({"bumps": 3}, "'bumps' must be a list of 1 to 100 lists of 2 numbers"),
        ({"wall": [3, 4]}, "'wall': 3 must be a number from 10 to 200"),
        ({"wall": 3}, "'wall': 3 must be a list of 2 numbers"),
        ({"score": "speed"}, "unknown score 'speed'; scores are: distance, forward, throw, over_wall, rings"),
        ({"score": "rings"}, "the score 'rings' needs 'rings'"),
        ({"score": "over_wall"}, "the score 'over_wall' needs 'wall'"),
        ({"slop": 3}, r"unknown key 'slop' \(did you mean 'slope'\?\); keys are: words, score, goal"),
        ({"requests": ["One."]}, "at least two different wordings"),
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
        ("", "must map names of trials"),
        ("hill: 3", "3 must be a mapping with words, score, goal, requests"),
        ("hill: {words: a}", "'score' is missing"),
        ("Hill!: {words: a}", "its name must consist of lower-case letters"),
        ("3: {words: a}", "its name must consist of lower-case letters"),
        ("a: {}\na: {}", "a is given 2 times"),
        ("a: [", "is not YAML"),
    ],
)
def test_files_that_are_no_trials(text, message, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_trials([str(path)])


def test_a_missing_file_of_trials(tmp_path):
    with pytest.raises(ValueError, match=r"--trials .*none.yaml: this path does not exist"):
        load_trials([str(tmp_path / "none.yaml")])


keys = st.sampled_from([*HILL, "x", "wall"])
leaves = st.none() | st.booleans() | st.floats() | st.text(max_size=5) | st.integers()
contents = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner), max_leaves=12
)


@settings(max_examples=200, deadline=None)
@given(contents)
def test_any_content_is_a_trial_or_a_clear_error(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("trials") / "any.json"
    path.write_text(json.dumps({"hill": content}))
    try:
        read_trials(path)
    except ValueError as error:
        assert str(error).startswith(f"--trials {path}")
