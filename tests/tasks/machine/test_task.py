"""The machine task: its contract, gold machines, prompts, rewards, pictures, and recipes."""

import io
import json
import pickle
import random
import re
from collections import Counter
from dataclasses import replace

import mujoco
import numpy as np
import pytest
from PIL import Image

from tests.commands.test_recipes import save_small
from tests.support.paths import RECIPES
from tests.support.walks import random_tokens
from tests.tasks.machine.test_constraint import SIGNS, VOCABULARY, spells
from tests.tasks.machine.test_tree import car, catapult
from trl_grpo_tasks import get_task
from trl_grpo_tasks.commands import train as run
from trl_grpo_tasks.commands.arguments import parse as parse_arguments
from trl_grpo_tasks.commands.check import check_task
from trl_grpo_tasks.models.ready import ready_model
from trl_grpo_tasks.models.tiny import make_tokenizer
from trl_grpo_tasks.tasks.machine import (
    ConstructionTree,
    MachineOptions,
    MachineTask,
    make_gold,
    show,
    simulate,
    to_xml,
)
from trl_grpo_tasks.tasks.machine import task as task_module
from trl_grpo_tasks.tasks.machine.blocks import BLOCKS, PROMPT_BLOCKS
from trl_grpo_tasks.tasks.machine.constraint import machine_constraint
from trl_grpo_tasks.tasks.machine.data import MARGIN, GoldMachine, gold_machines
from trl_grpo_tasks.tasks.machine.designs import LEVELS, mutated, sketch_car, sketch_catapult
from trl_grpo_tasks.tasks.machine.painter import Camera, paint
from trl_grpo_tasks.tasks.machine.prompts import manual
from trl_grpo_tasks.tasks.machine.reasoning import explanation
from trl_grpo_tasks.tasks.machine.render import picture
from trl_grpo_tasks.tasks.machine.results import Result
from trl_grpo_tasks.tasks.machine.tree import ROOT, Block
from trl_grpo_tasks.tasks.machine.trials import SCORINGS, TRIALS, Trial, task_score

MODULE = "trl_grpo_tasks.tasks.machine"
OWN_RECIPES = RECIPES / "machine"


def make(**options):
    return get_task(MODULE, options)


@pytest.mark.parametrize(
    "options",
    [
        {"trials": list(TRIALS), "breakage": True, "manual": True},
        {"trials": ["rings", "catapult"], "scoring": "authors", "reasoning": True},
    ],
    ids=["breakage", "authors"],
)
def test_contract(options):
    check_task(make(**options), size=3)


# ---- gold machines and rows


def test_every_gold_machine_has_its_score_and_can_be_generated():
    constraint = machine_constraint(VOCABULARY, PROMPT_BLOCKS, 24)
    assert set(gold_machines()) == set(TRIALS)
    for name, machines in gold_machines().items():
        trial, blocks = TRIALS[name], [gold.size for gold in machines]
        assert len({gold.blocks for gold in machines}) == len(machines)
        assert all(sum(least <= n <= most for n in blocks) >= 30 for least, most in LEVELS.values())
        assert all(gold.score >= MARGIN * trial.goal for gold in machines)
        for gold in machines[:: 1 + len(machines) // 100]:
            assert gold.tree.validate() == [] and gold.size == len(gold.tree.blocks)
            assert gold.kinds == {block.kind for block in gold.tree.blocks}
            assert GoldMachine.of(ConstructionTree.parse(gold.machine), gold.score, gold.holds) == gold
        for gold in machines[:: len(machines) // 4]:  # the others are similar
            assert set(gold.machine) <= {sign.decode() for sign in SIGNS}
            assert spells(constraint, {"max_blocks": 24}, gold.machine)
            result = simulate(gold.machine, trial)
            for scoring in SCORINGS:  # scores are those of one processor; demands leave a margin of 10%
                assert task_score(trial, result, scoring)[0] >= 0.97 * gold.score, (name, gold.machine)


@pytest.mark.exhaustive
def test_there_are_ten_thousand_different_designs_of_cars_and_catapults():
    """No two have the same blocks at the same places, however they are written."""
    shapes = {name: {gold.tree.shape() for gold in gold_machines()[name]} for name in ("car", "catapult")}
    assert sum(map(len, shapes.values())) >= 10_000 and not shapes["car"] & shapes["catapult"]


def test_rods_for_wood_change_only_the_colour():
    other_kind = {"1": "41", "41": "1"}
    for gold in gold_machines()["catapult"][-200::40]:
        blocks = [replace(block, kind=other_kind.get(block.kind, block.kind)) for block in gold.tree.blocks]
        assert tuple(blocks) != gold.tree.blocks and not gold.holds
        one, two = (
            re.sub(r' rgba="[^"]*"', "", to_xml(each)) for each in (gold.tree, ConstructionTree(tuple(blocks)))
        )
        assert one == two, "MuJoCo simulates the same model"


def test_a_shape_does_not_depend_on_the_order_of_blocks():
    left, right = Block("2", 0, 2), Block("2", 0, 3)
    both = [ConstructionTree((ROOT, *pair)) for pair in ((left, right), (right, left))]
    assert both[0] != both[1] and both[0].shape() == both[1].shape()
    assert ConstructionTree((ROOT, left)).shape() != ConstructionTree((ROOT, right)).shape()
    springs = [ConstructionTree((ROOT, Block("9", 0, *ends))) for ends in ((2, 0, 3), (3, 0, 2), (2, 0, 4))]
    assert springs[0].shape() == springs[1].shape() != springs[2].shape()


@pytest.mark.parametrize("trials", [["rings"], ["car", "catapult"]])
def test_splits_have_many_different_requests_and_share_none(trials):
    task = make(trials=trials)
    train, test = ([task.request(row) for row in task.dataset(split, None, 0)] for split in ("train", "test"))
    assert len(set(train)) == len(train) >= 500 and len(set(test)) == len(test) >= 100
    assert not set(train) & set(test)
    assert len(task.dataset("test", 10_000, 0)) == len(test), "the test split never repeats a request"


def test_rows_cover_trials_and_levels_evenly():
    task = make(trials=["car", "wall"])
    train = task.dataset("train", None, 0)
    assert Counter((r["trial"], r["level"]) for r in train[:60]) == {
        (trial, level): 10 for trial in ("car", "wall") for level in LEVELS
    }
    assert task.dataset("train", 20, 0) == train[:20] and task.dataset("train", 20, 1) != train[:20]
    for row in train:
        text = row["prompt"][-1]["content"]
        assert f"at most {row['max_blocks']} blocks" in text and f"at least {row['goal']:g}" in text
        assert row["max_blocks"] <= LEVELS[row["level"]][1] and row["goal"] in TRIALS[row["trial"]].goals
        assert len(ConstructionTree.parse(row["gold"]).blocks) <= row["max_blocks"]
    for demand, count in (("max_blocks", 15), ("goal", 8)):
        assert len({row[demand] for row in train if row["trial"] == "car"}) >= count
    with pytest.raises(ValueError, match="unknown split 'dev'"):
        task.dataset("dev", 1, 0)
    with pytest.raises(ValueError, match=r"no known machine succeeds at car with only the blocks 0, 36 .*allow more"):
        make(trials=["car"], blocks=["36"]).dataset("train", 1, 0)


@pytest.mark.exhaustive
def test_more_rows_than_requests_have_further_gold_machines():
    task = make(trials=["car"])
    requests = len(task.dataset("train", None, 0))
    rows = task.dataset("train", 2 * requests, 0)
    assert len(rows) == 2 * requests and len({task.request(row) for row in rows}) == requests
    every = task.dataset("train", 100_000, 0)
    first, later = ([row["gold"] for row in some] for some in (every[:requests], every[requests:]))
    assert every[: len(rows)] == rows and len(every) > 5600
    assert len(later) == len({*later}) and not {*first} & {*later}, "no machine twice"
    assert len({*first}) >= 0.99 * len(first), "except for requests that few machines satisfy"
    known_machines = {gold.machine: gold for gold in gold_machines()["car"]}
    for row in every[::50]:
        known = known_machines[row["gold"]]
        assert known.score >= MARGIN * row["goal"] and len(known.tree.blocks) <= row["max_blocks"]
    few = make(trials=["rough"]).dataset("train", 100_000, 0)
    assert len(few) > len({row["gold"] for row in few}), "with fewer machines than requests, some are in several rows"


def test_the_manual_names_every_block_it_offers():
    text = manual(["0", *PROMPT_BLOCKS])
    assert all(f"\n{kind}: {BLOCKS[kind].name}" in text for kind in PROMPT_BLOCKS)
    task = make(manual=True)
    (row,) = task.dataset("train", 1, 0)
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    assert row["prompt"][0] == task.row_of("a car")["prompt"][0] == {"role": "system", "content": text}


# ---- the generator


def test_sketches_and_changes_can_be_built():
    rng = random.Random(0)
    for draw in (sketch_car, sketch_catapult):
        for _ in range(15):
            tree = draw(rng, (2, 16))
            assert tree.validate() == [] and len(tree.blocks) <= 16
            for _ in range(5):
                assert mutated(tree, rng, 16).validate() == []


def test_the_script_writes_gold_machines_and_resumes(tmp_path, capsys, monkeypatch):
    output = tmp_path / "gold.json"
    output.write_text('{"wall": [["1/0/0", 50.0, 0]], "car": []}')
    monkeypatch.setattr(make_gold, "LEVELS", {"small": (2, 10)})
    monkeypatch.setattr(make_gold, "_PART", 2)
    words = ["--per_level", "4", "--trials", "car", "--output", str(output)]
    part, calls = make_gold._part, []

    def stopped(*given):
        calls.append(given)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return part(*given)

    monkeypatch.setattr(make_gold, "_part", stopped)
    with pytest.raises(KeyboardInterrupt):
        make_gold.main(words)
    make_gold.main(words)
    assert len(calls) == 3 and not output.with_suffix(".part").exists(), "the first part was not made again"
    resumed = output.read_text()
    make_gold.main(words)
    assert output.read_text() == resumed, "the same seed gives the same file"
    stored = json.loads(resumed)
    assert stored["wall"] == [["1/0/0", 50.0, 0]], "machines of other trials stay"
    found = [GoldMachine(*entry) for entry in stored["car"]]
    assert len({gold.tree.shape() for gold in found}) == len(found) > 4, "designs and their mirror images"
    assert f"car small: {len(found)} machines" in capsys.readouterr().out
    for gold in found:
        assert simulate(gold.tree, "car").distance >= gold.score >= MARGIN * TRIALS["car"].goal


# ---- reasoning


def test_gold_answers_with_reasoning_say_what_the_machine_is():
    task = make(trials=list(TRIALS), reasoning=True)
    for row in task.dataset("train", 60, 0):
        gold = task.gold(row)
        text, _, fenced = gold.partition("\n```json\n")
        blocks = json.loads(fenced.removesuffix("\n```"))
        assert fenced == row["gold"] + "\n```" and row["prompt"][-1]["content"].endswith("then give the machine.")
        assert f"In all {len(blocks)} blocks, {sum(BLOCKS[b['id']].mass for b in blocks):g} kg" in text
        wheels = re.findall(r"Wheels: (.*?)\.", text)
        named = {int(n) for part in wheels for n in re.findall(r"(?:^|[;,] )(\d+)(?=,| on)", part)}
        assert named == {b["order_id"] for b in blocks if b["id"] == "2"}
        assert len(re.findall(r"Motor \d+ turns", text)) == sum(b["id"] == "22" for b in blocks)
        assert ("Boulder" in text) == any(b["id"] == "36" for b in blocks)
    assert len({task.gold(row).partition("`")[0] for row in task.dataset("train", 60, 0)}) > 50, "no constant phrase"


def test_a_hand_computed_explanation():
    """The car of test_tree: logs in front and behind, four wheels at their sides."""
    assert explanation(car()) == (
        "Frame: log 1 forward from 0, log 2 back from 0, small block 3 forward from 1, small block 4 back from 2, "
        "small block 9 up from 0. Wheels: 5, 6 on block 1; 7, 8 on block 2; 5, 6, 7, 8 drive forward. "
        "In all 10 blocks, 7.15 kg, 2 m wide, 2.5 m high, 9 m long."
    )
    text = explanation(catapult())
    assert "Motor 10 turns 3 blocks, 6.5 kg, up to " in text and "about the axis from left to right" in text
    assert "Boulder 14 on container 13, " in text and "brace 15 from block 9 to 3" in text


def test_reasoning_needs_a_pretrained_model_without_constraint(tmp_path):
    task = make(reasoning=True)
    assert task.constraint(None) is None and task.tiny() is None
    row = task.row_of("a small car")
    assert row["prompt"][-1]["content"].endswith("First say what the blocks do, then give the machine.")
    assert task.row_of(row["prompt"][-1]["content"]) == row
    model = str(save_small("Qwen/Qwen2", tmp_path / "model"))
    with pytest.raises(ValueError, match="'machine' has no constraint with these options; give --constrain false"):
        ready_model(model, task, [row], tmp_path, seed=0, constrain=True, most_tokens=4)


@pytest.mark.parametrize("with_manual", [False, True])
def test_the_tiny_model_never_reaches_a_dead_end(with_manual):
    task = make(manual=with_manual, blocks=list(BLOCKS))
    spec = task.tiny()
    tokenizer = make_tokenizer(spec.tokens, spec.context)
    constraint, rng = task.constraint(tokenizer), random.Random(0)
    row = task.dataset("train", 1, 0)[0]
    for _ in range(12):
        ids = random_tokens(constraint, row, rng)
        blocks = ConstructionTree.parse(tokenizer.decode(ids[:-1])).blocks
        assert ConstructionTree(blocks).validate() == []
        # The start block, four tokens per other block, two more per two-ended block, the bracket, and the end token.
        assert len(ids) == 3 + sum(4 + 2 * block.type.two_ended for block in blocks[1:])


# ---- rewards


def test_rewards_are_metres_or_nothing():
    task = make(trials=["car", "catapult"])
    drive, throw = ({"trial": trial, "max_blocks": 24} for trial in ("car", "catapult"))
    score = task.score(drive, car().to_json())
    assert score.valid and score.success and score.total == score.components["score"] == pytest.approx(44, abs=2)
    assert score.components["distance"] == score.total and score.components["blocks"] == 10
    failed = task.score({**drive, "goal": 60}, car().to_json())
    assert not failed.success and failed.valid and failed.reason.endswith("success needs 60")
    thrown = task.score(throw, catapult().to_json())
    flight = thrown.info["throws"][0]
    assert thrown.total == pytest.approx(flight["height"] * flight["distance"]) and thrown.total > 100
    authors = make(scoring="authors").score(throw, catapult().to_json())
    assert authors.total == pytest.approx((1 + flight["rise"]) * flight["distance"]) and authors.total < thrown.total
    nothing = task.score(throw, car().to_json())
    assert nothing.valid and nothing.total == 0 and nothing.reason == "the machine has no boulder to throw"
    broken = task.score(drive, car().to_json().replace('"bp_id":3', '"bp_id":99', 1))
    assert not broken.valid and broken.total == 0 and "face 99" in broken.reason
    long = task.score({**drive, "max_blocks": 9}, car().to_json())
    assert not long.valid and "10 blocks; the prompt allows at most 9" in long.reason
    assert pickle.loads(pickle.dumps(thrown)) == thrown


def test_a_run_that_exceeds_its_time_limit_is_not_scored(monkeypatch):
    monkeypatch.setattr(task_module, "simulate", lambda *a, **k: Result(False, "slow", timed_out=True))
    assert make().score({"trial": "car"}, car().to_json()) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trials": ["cra"]}, r"unknown --trials 'cra' \(did you mean 'car'\?\); choose from: car, rough"),
        ({"trials": []}, "name at least one of car rough"),
        ({"trials": ["car", "car"]}, "there is already a trial 'car'"),
        ({"blocks": ["99"]}, "unknown --blocks '99'"),
        ({"scoring": "mine"}, "unknown --scoring 'mine'; choose from: paper, authors"),
        ({"tiny_width": 100}, "--tiny_width 100 must be a multiple of 32"),
    ],
)
def test_invalid_options_are_reported(options, message):
    with pytest.raises(ValueError, match=message):
        MachineTask(MachineOptions(**options))


# ---- pictures and files


def test_pictures_show_the_machine():
    result = simulate(car(), "car", record=True)
    image = np.array(Image.open(io.BytesIO(picture(result, "car", ["a car"]))))
    assert image.shape == (700, 560, 3)
    dark = (image.max(axis=2) < 75).sum(axis=(0, 1))  # wheels
    red = ((image[..., 0] > 150) & (image[..., 1] < 90)).sum()  # the path
    assert dark > 1_000 and red > 100
    task = make()
    row = task.dataset("train", 1, 0)[0]
    for text in (task.gold(row), "nonsense \ud800", ConstructionTree.parse(task.bad(row)).to_json()):
        assert Image.open(io.BytesIO(task.render(row, text))).format == "PNG"


def test_solids_in_front_hide_what_is_behind():
    """Seen from either side, the wheel on that side hides the bar behind it."""
    frames = simulate(car(), Trial("t", "", "distance", 1.0, seconds=0.02), record=True).frames
    wheel = frames.positions[0][frames.model.geom("g6").id]
    assert wheel[0] > 0.5
    for azimuth, is_dark in ((-90.0, True), (90.0, True)):  # a wheel on each side is in front of the bar
        camera = Camera(wheel, 3.0, (60, 60), 1.0, azimuth=azimuth, elevation=0.0)
        pixels = np.array(paint(camera, frames, 0))
        assert (pixels[28:32, 28:32].max() < 80) == is_dark


def test_show_prints_scores_and_writes_files(tmp_path, capsys):
    files = {kind: tmp_path / f"machine.{kind}" for kind in ("png", "xml")}
    (tmp_path / "machine.txt").write_text(f"Here it is:\n```json\n{car().to_json()}\n```")
    words = [str(tmp_path / "machine.txt"), *(w for kind, file in files.items() for w in (f"--{kind}", str(file)))]
    assert show.main(words) == 0
    out = capsys.readouterr().out
    assert "10 blocks, 2 x 2.5 x 9 m" in out and "score (paper): 44" in out
    assert Image.open(files["png"]).format == "PNG" and mujoco.MjModel.from_xml_path(str(files["xml"])).nu == 4
    assert show.main(["gold", "--trial", "wall"]) == 0 and "score (authors)" in capsys.readouterr().out
    (tmp_path / "machine.txt").write_text("nothing")
    assert show.main([str(tmp_path / "machine.txt")]) == 1
    assert "not valid: there is no JSON list" in capsys.readouterr().out


def test_the_best_machine_of_a_run_is_shown(tmp_path, capsys):
    task, row = make(trials=["car"]), {"prompt": "", "trial": "car", "max_blocks": 24}
    texts = {"cold start": [task.bad(row), "nothing"], "GRPO": [task.bad(row), car().to_json()]}
    found = [
        {
            "name": name,
            "metrics": {},
            "samples": [{"row": row, "completion": text, "score": task.score(row, text).as_dict()} for text in some]
            + [{"row": row, "completion": "took too long", "score": None}],
        }
        for name, some in texts.items()
    ]
    (tmp_path / "results.json").write_text(json.dumps({"evaluations": found}))
    best = simulate(car(), "car").distance
    assert show.main([str(tmp_path)]) == 0 and f"score (paper): {best:.2f}" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        show.main([str(tmp_path), "--trial", "wall"])
    assert "has no machine for --trial wall" in capsys.readouterr().err
    (tmp_path / "results.json").unlink()
    with pytest.raises(SystemExit):
        show.main([str(tmp_path)])
    assert "contains no results.json" in capsys.readouterr().err


# ---- recipes


def test_the_recipe_of_the_authors_has_their_settings():
    words = ["--config", str(OWN_RECIPES / "authors.yaml"), "--use_cpu", "true", "--bf16", "false"]
    task, options, args, model = parse_arguments(words)
    assert args.top_p == 0.95 and args.generation_batch_size == 8 * args.num_generations == 512
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps * 8 == 512, "one update per rollout"
    assert options.cold_start_batch_size * 8 == 128 and options.cold_start_learning_rate == 1e-6
    assert (args.advantage_estimator, args.epsilon, args.epsilon_high) == ("best_minus_second", 0.2, 0.28)
    assert task.options.scoring == "authors" and args.advantage_clip is None
    assert (model.lora_r, model.lora_alpha, args.max_completion_length) == (64, 32, 1168)


@pytest.mark.exhaustive
def test_training_raises_the_distance(tmp_path):
    """After a cold start of a small model, a few constrained GRPO steps increase the distance."""
    settings = {"task": MODULE, "output_dir": tmp_path, "use_cpu": True, "trials": "car", "tiny_width": 64,
                "tiny_layers": 2, "train_rows": 24, "eval_rows": 3, "cold_start_steps": 12,
                "samples": 40,  # with fewer, chance decides
                "cold_start_learning_rate": 3e-3, "cold_start_batch_size": 16, "num_generations": 8,
                "per_device_train_batch_size": 24, "max_completion_length": 144, "max_steps": 10,
                "learning_rate": 3e-3, "beta": 0.0, "reward_workers": 0}  # fmt: skip
    assert run.main([word for name, value in settings.items() for word in (f"--{name}", str(value))]) == 0
    before, after = json.loads((tmp_path / "results.json").read_text())["evaluations"]
    for sample in before["samples"] + after["samples"]:
        assert ConstructionTree.parse(sample["completion"]).validate() == []
    assert after["metrics"]["reward"] > before["metrics"]["reward"]
