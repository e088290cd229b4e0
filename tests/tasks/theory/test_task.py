"""The theory task: its contract, robustness of the reward, levels, prompts from a file, requests."""

import json
import math
import pickle
import random
import re
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tasks.theory.test_language import SM, random_walk
from trl_grpo_tasks.commands import train as run
from trl_grpo_tasks.commands.check import GARBAGE, check_task
from trl_grpo_tasks.registry import get_task
from trl_grpo_tasks.tasks.theory import TheoryOptions, TheoryTask, examples
from trl_grpo_tasks.tasks.theory.constraint import check_prompt
from trl_grpo_tasks.tasks.theory.data import STARTS, cut
from trl_grpo_tasks.tasks.theory.language import parse, write
from trl_grpo_tasks.tasks.theory.reward import GOALS, find_exotics, judge, log_reward, square_threshold_reward
from trl_grpo_tasks.tasks.theory.task import EXAMPLE

MODULE = "trl_grpo_tasks.tasks.theory"


def make(**options):
    return TheoryTask(TheoryOptions(**options))


def prompt_of(name, given):
    """A named theory cut after so many of its fermions, and the rest."""
    return cut(examples.named(name), given)


# ---- the contract


def test_contract():
    task = get_task(MODULE, {"start": "mixed", "goals": ["length", "exotics", "anomalies"]})
    check_task(task, size=5)
    assert pickle.loads(pickle.dumps(task)).dataset("test", 3, 0) == task.dataset("test", 3, 0)


@pytest.mark.parametrize("start", STARTS)
def test_rows(start):
    task = make(start=start)
    train, test = task.dataset("train", 15, 1), task.dataset("test", 10, 1)
    assert len(train) == 15 and len({row["prompt"] for row in test}) == len(test) > 0
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in test}
    assert all(task.score(row, row["gold"]).success for row in train + test)
    assert train != task.dataset("train", 15, 2)


# ---- rewards


def test_reward_functions():
    assert log_reward(0) == 0 and log_reward(Fraction(-1)) == -math.log(2) == log_reward(1.0)
    values = [log_reward(x) for x in (0, 0.1, 1, 10, 1000)]
    assert values == sorted(values, reverse=True)
    assert square_threshold_reward(100.0) == square_threshold_reward(5e4) == 0
    assert square_threshold_reward(10.0) == pytest.approx(-1) and square_threshold_reward(1.0) == pytest.approx(-4)
    assert square_threshold_reward(99.999) > -1e-6  # no jump at the threshold
    assert square_threshold_reward(0.0) == square_threshold_reward(1e-9) == pytest.approx(-25)  # finite
    assert square_threshold_reward(10.0, threshold=1000.0) == pytest.approx(-4)


def test_a_known_theory_has_full_reward_and_its_name():
    prompt, gold = prompt_of("seesaw_1", 5)
    score = make().score({"prompt": prompt}, gold)
    assert score.success and score.total == 3.0 and score.info["named"] == "seesaw_1"
    assert score.components["anomalies"] == 1.0 and score.info["anomalies"] == {}


# Theories with one thing wrong, by the component that must notice it.
WRONG = {
    "anomalies": examples.extend({}, {"X": ("fund singlet 2/3", 1), "Y": ("antifund singlet -5/6", 1)}, {}),
    "exotics": examples.extend({}, {"E": ("singlet fund -1/2", 1), "F": ("singlet fund 1/2", 1)}, {"E F": 50}),
    "perturbativity": examples.extend({}, {"N": ("singlet singlet 0", 3)}, {"L N H": 5.0, "N N": 1000}),
    # Q = T3 + 3 Y: there is no electron of charge -1 with a mass.
    "standard_model": examples.make(
        examples.SM_GROUPS,
        {"H": ("singlet fund 1/6", 125, (0, 2, 0), 246)},
        {**examples.SM_FERMIONS, "N": ("singlet singlet 0", 3)},
        {},
    ),
}


@pytest.mark.parametrize("component", WRONG)
def test_each_condition_is_needed(component):
    prompt, completion = cut(WRONG[component], 5)
    score = make().score({"prompt": prompt}, completion)
    assert score.valid and not score.success
    assert component in score.info["problems"] and score.info["problems"][component] in score.reason
    assert score.components[component] < (1 if component == "anomalies" else 0)
    if component in ("exotics", "perturbativity"):
        assert list(score.info["problems"]) == [component]  # nothing else is wrong


def test_more_light_exotics_are_worse_and_heavier_ones_better():
    task = make()
    prompt, gold = prompt_of("vectorlike_leptons", 5)
    totals = [task.score({"prompt": prompt}, gold.replace("m_300GeV", mass)).total for mass in
              ("m_0GeV", "m_10GeV", "m_50GeV", "m_125GeV")]  # fmt: skip
    assert totals == sorted(totals) and totals[2] < totals[3] == 3.0
    strict = make(threshold_gev=500.0).score({"prompt": prompt}, gold)
    assert task.score({"prompt": prompt}, gold).success and not strict.success


def test_a_fourth_light_family_is_exotic_and_a_missing_one_is_missed():
    theory = examples.named("fourth_generation")
    found = judge(theory, 0, 400)
    assert found.problems == {} and len(found.exotics) == 3
    light = write(theory).replace("y_2e0", "y_1e-2")
    assert "2 charged or coloured states are below 100 GeV" in judge(parse(light), 0, 400).problems["exotics"]
    # A top quark as light as a muon is one light state too many, and there is no top quark.
    no_top = write(examples.named("standard_model")).replace("h_1e0", "h_1e-1")
    assert (
        "1 charged or coloured states are below 100 GeV (colour 3, charge 2/3: 17.4 GeV)"
        in judge(parse(no_top), 0, 400).problems["exotics"]
    )
    assert judge(parse(no_top), 0, 400, threshold=10.0).problems == {}
    two = write(examples.named("standard_model")).replace("GENERATIONS num_3", "GENERATIONS num_2")
    found = judge(parse(two), 0, 400)
    assert found.problems["standard_model"] == "3 of 9 quarks and charged leptons are missing"
    assert found.components["standard_model"] == pytest.approx(-1 / 3)


def test_which_triplets_are_quarks_is_a_convention():
    for name in ("standard_model", "pati_salam"):
        found = judge(examples.named(name), 0, 400)
        fermions = [sector for sector in found.sectors if sector.kind != "scalar"]
        assert find_exotics(fermions, [])[0] == 0


# ---- reward hacks


def test_nothing_is_gained_by_writing_nothing():
    task = make()
    for row in task.dataset("train", 6, 0):
        for text in ("", " ", " END", " INTERACTIONS END", *GARBAGE):
            score = task.score(row, text)
            assert not score.success and not score.valid and score.total == -13


def test_nothing_is_gained_by_being_long():
    """A theory over the limit keeps its other components and gets the penalty in addition."""
    prompt, gold = prompt_of("e6_u1n", 5)
    short, long = make(max_words=400), make(max_words=300)
    good, bad = short.score({"prompt": prompt}, gold), long.score({"prompt": prompt}, gold)
    assert good.success and bad.valid and not bad.success and "the theory has 348 words" in bad.reason
    assert bad.components["length"] == -300 and bad.components["anomalies"] == good.components["anomalies"]
    assert bad.total == pytest.approx(good.total - 3 - 2)


def test_nothing_is_gained_by_repeating_the_prompt():
    task = make()
    prompt, rest = prompt_of("standard_model", 5)
    score = task.score({"prompt": prompt}, rest)  # the Standard Model, and nothing else
    assert score.valid and not score.success and "adds no fermion" in score.reason
    assert score.components["solved"] == 0
    for text in (" " + prompt, " " + prompt + rest, " " + SM):
        again = task.score({"prompt": prompt}, text)
        assert not again.valid and again.total == -13
    # A fermion that was begun in the prompt and finished by the model is the model's.
    whole = write(examples.named("seesaw_1")).split()
    last = max(place for place, word in enumerate(whole) if word == "FERMION")
    for end, success in ((last + 2, True), (last + 12, True), (last + 13, False)):
        score = task.score({"prompt": " ".join(whole[:end])}, " " + " ".join(whole[end:]))
        assert score.success == success


def test_invalid_texts_never_score_better_than_theories():
    task, rng = make(), random.Random(5)
    row = task.dataset("train", 1, 0)[0]
    totals = [task.score(row, random_walk(row["prompt"], rng)).total for _ in range(150)]
    assert min(totals) > -13 == task.score(row, "").total
    assert max(totals) <= 3 and len(set(totals)) > 50


def test_the_documents_total_is_the_plain_sum_of_three_parts():
    """Against numbers by hand: the Standard Model has 6 conditions; a singlet of charge 1 violates two of them by 1,
    and without a partner it is a massless charged state, which costs 25."""
    task = make(scoring="document")
    prompt, gold = prompt_of("seesaw_1", 5)
    score = task.score({"prompt": prompt}, gold)
    assert score.success and score.total == 6 and score.components["anomalies"] == 6
    wrong = gold.split(" INTERACTIONS")[0].replace("num_3", "num_1").replace("q_0/1", "q_1/1") + " INTERACTIONS"
    terms = re.findall(r" YUKAWA(?: \S+){5}", SM)
    score = task.score({"prompt": prompt}, wrong + "".join(terms) + " END")
    assert score.valid and not score.success
    assert score.total == pytest.approx(4 - 2 * math.log(2) - 25)
    assert score.components["anomalies"] == pytest.approx(4 - 2 * math.log(2))
    too_long = make(scoring="document", max_words=10).score({"prompt": prompt}, gold)
    assert too_long.total == 6 - 300, "the penalty comes in addition"
    assert task.score({"prompt": prompt}, " nonsense").total == -500
    row = {"prompt": prompt, "level": "exotics"}
    assert task.score(row, gold).total == 0 and "anomalies" not in task.score(row, gold).components
    with pytest.raises(ValueError, match="scoring"):
        make(scoring="paper")


def test_copies_of_one_success_share_their_bonus():
    task = make()
    prompt, gold = prompt_of("seesaw_1", 5)
    other = gold.replace("GENERATIONS num_3", "GENERATIONS num_2")
    same = gold.replace("m_1000GeV", "m_3000GeV")  # a different mass is the same theory
    texts = [gold, same, other, " nonsense", gold]
    scores = [task.score({"prompt": prompt}, text) for text in texts]
    found = task.group_components([{"prompt": prompt}] * 6, [*texts, gold], [*scores, None])  # the last was not judged
    assert found == {"distinct": [1 / 3, 1 / 3, 1.0, 0.0, 1 / 3, 0.0]}


# ---- levels


def test_levels_count_one_thing_after_another():
    task = make(goals=["length", "exotics", "anomalies"])
    assert task.levels == ("length", "exotics", "anomalies")
    rows = task.dataset("train", 30, 0)
    assert Counter(row["level"] for row in rows) == dict.fromkeys(task.levels, 10)
    assert {row["level"] for row in task.dataset("test", 10, 0)} == {"anomalies"}
    prompt, gold = prompt_of("vectorlike_leptons", 5)
    light = gold.replace("m_300GeV", "m_10GeV")
    successes = [task.score({"prompt": prompt, "level": level}, light).success for level in task.levels]
    assert successes == [True, False, False]
    prompt, gold = prompt_of("seesaw_3", 5)
    assert [task.score({"prompt": prompt, "level": level}, gold).success for level in task.levels] == [True] * 3
    for level, counted in GOALS.items():
        score = task.score({"prompt": prompt, "level": level}, gold)
        assert set(score.components) == {*counted, "solved"}
        assert not task.score({"prompt": prompt, "level": level}, "").success


# ---- options and files


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": "standard"}, "unknown --start 'standard' .*choose from: standard_model"),
        ({"goals": ["masses"]}, "unknown --goals 'masses'"),
        ({"goals": ["anomalies", "length"]}, "in this order"),
        ({"goals": []}, "name at least one of"),
        ({"new_multiplets": 8}, "--new_multiplets 8 must be from 1 to 7"),
        ({"start": "one_given", "new_multiplets": 1}, "from 2 to 7, because --start one_given gives one of them"),
        ({"max_words": 0}, "--max_words 0 must be greater than 0"),
        ({"tiny_width": 100, "tiny_heads": 8}, "--tiny_width 100 must be an even multiple of --tiny_heads 8"),
        ({"prompts_file": "nowhere.txt"}, "nowhere.txt: this path does not exist"),
    ],
)
def test_invalid_options_are_reported(options, message):
    with pytest.raises(ValueError, match=message):
        TheoryTask(TheoryOptions(**options))


def test_prompts_from_a_file(tmp_path):
    file = tmp_path / "prompts.txt"
    prompt, gold = prompt_of("seesaw_1", 5)
    lines = [" ".join(SM.split()[:n]) for n in range(4, 60)]
    file.write_text("\n".join([*lines, "", json.dumps({"prompt": prompt, "gold": gold})]) + "\n")
    task = make(prompts_file=str(file))
    train, test = task.dataset("train", None, 0), task.dataset("test", None, 0)
    assert len(train) + len(test) == 57 and not {r["prompt"] for r in train} & {r["prompt"] for r in test}
    (known,) = [row for row in train + test if "gold" in row]
    assert task.gold(known) == gold
    with pytest.raises(ValueError, match="no known completion"):
        task.gold(train[0] if "gold" not in train[0] else train[1])
    file.write_text("BOS GAUGE_GROUPS NUM_GAUGE num_1\nBOS GAUGE_GROUPS NUM_GAUGE num_3\n")
    few = make(prompts_file=str(file), goals=["length", "exotics", "anomalies"])
    assert {row["level"] for row in few.dataset("train", None, 0)} == {"length", "exotics", "anomalies"}
    assert few.dataset("test", None, 0)
    file.write_text("BOS GAUGE_GROUPS NUM_GAUGE num_1\nBOS GAUGE_GROUPS NUM_GAUGE num_9\n")
    with pytest.raises(ValueError, match=r"prompts.txt, line 2: word 4 of the prompt is 'num_9'"):
        make(prompts_file=str(file))


# ---- requests


def test_the_beginning_of_a_theory_is_a_request():
    prompt, rest = prompt_of("su5", 1)
    row = make().row_of(f" {prompt}\n")
    assert row == {"prompt": prompt, "level": "anomalies"} and make().score(row, f" {rest}").success
    assert make().row_of(EXAMPLE)["prompt"] == EXAMPLE and prompt_of("su5", 0)[0].startswith(EXAMPLE)
    with pytest.raises(ValueError, match=r"'SU\(5\) x' is not the beginning of a theory; write one, such as 'BOS G"):
        make().row_of("SU(5) x")


@given(st.lists(st.sampled_from([*EXAMPLE.split(), "num_2", "U_1", "SU(5)", "é"]), max_size=7).map(" ".join))
def test_any_text_is_a_prompt_or_a_clear_error(text):
    try:
        row = make().row_of(text)
    except ValueError as error:
        assert str(error)
    else:
        check_prompt(row["prompt"])


@pytest.mark.exhaustive
def test_training_raises_the_reward(tmp_path):
    """After a short cold start of a small model, ten constrained GRPO steps improve the theories."""
    settings = {"task": MODULE, "output_dir": tmp_path, "use_cpu": True, "new_multiplets": 2, "tiny_width": 64,
                "tiny_layers": 1, "train_rows": 64, "eval_rows": 8, "samples": 4, "cold_start_steps": 15,
                "cold_start_learning_rate": 3e-3, "cold_start_batch_size": 16, "num_generations": 16,
                "per_device_train_batch_size": 64, "max_completion_length": 120, "max_steps": 10,
                "learning_rate": 2e-3, "beta": 0.0, "reward_workers": 0}  # fmt: skip
    assert run.main([word for name, value in settings.items() for word in (f"--{name}", str(value))]) == 0
    before, after = json.loads((tmp_path / "results.json").read_text())["evaluations"]
    assert before["metrics"]["valid"] == after["metrics"]["valid"] == 1
    assert after["metrics"]["reward"] > before["metrics"]["reward"] + 1
    assert after["metrics"]["anomalies"] > before["metrics"]["anomalies"]
