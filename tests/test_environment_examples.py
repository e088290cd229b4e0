"""The examples of environments: their rules against independent ones, known answers, any action, and training."""

import json
import random
import sys
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.exhaustive import exhaustive_but
from tests.support.paths import ROOT
from trl_grpo_tasks import Step
from trl_grpo_tasks.commands import train
from trl_grpo_tasks.models.tiny import make_tokenizer
from trl_grpo_tasks.registry import find_task_class, get_task

FOLDER = ROOT / "examples" / "environments"
# Those with tools have tests of their own (rewards/test_tools.py).
FILES = sorted(str(file) for file in FOLDER.glob("*.py"))
WORDLE, BRICKS = str(FOLDER / "wordle.py"), str(FOLDER / "brick_by_brick.py")


@cache
def example(file, **options):
    return get_task(file, options)


def small(file):
    """The task as the tiny model plays it."""
    given = find_task_class(file).tiny_defaults
    return get_task(file, {name: value for name, value in given.items() if name in ("letters", "turns")})


def module_of(task):
    return sys.modules[type(task).__module__]


@pytest.mark.parametrize("file", exhaustive_but([WORDLE, BRICKS], FILES))
def test_every_known_answer_succeeds_and_every_known_mistake_fails(file):
    task = small(file)
    for row in (*task.dataset("train", 20, 1), *task.dataset("test", 10, 1)):
        good, bad = (task.score(row, text) for text in (task.gold(row), task.bad(row)))
        assert good.success and not bad.success and good.total > bad.total, row


@pytest.mark.parametrize(("letters", "turns"), [(3, 4), (5, 5)])
def test_words_differ_and_the_solver_finds_each_of_them_within_the_turns(letters, turns):
    task = get_task(WORDLE, {"letters": letters, "turns": turns})
    assert len(set(task.words)) == len(task.words) >= 50
    assert all(len(word) == letters and word.isascii() and word.islower() for word in task.words)
    for row in task.dataset("test", 20, 2):
        assert task.score(row, task.gold(row)).success


@given(st.text("abc", min_size=4, max_size=4), st.text("abc", min_size=4, max_size=4))
def test_marks_count_the_letters_that_guess_and_word_share(guess, word):
    told = module_of(example(WORDLE)).marks(guess, word).split()
    assert [mark[1] == "+" for mark in told] == [a == b for a, b in zip(guess, word, strict=True)]
    for letter in "abc":
        found = [mark[1] for mark in told if mark[0] == letter]
        assert sum(mark != "-" for mark in found) == min(guess.count(letter), word.count(letter))
        # Of letters in a wrong place, the first are the ones that are found.
        wrong = "".join(found).replace("+", "")
        assert wrong == "".join(sorted(wrong, reverse=True))


def test_the_reward_of_a_word_counts_turns_and_new_letters():
    task = small(WORDLE)
    row = {"prompt": "", "opening": "bag", "word": "bed"}

    def rewards(*guesses):
        return task.score(row, task.conversation(row, guesses)).info["turn_rewards"]

    assert rewards("bed") == [pytest.approx(1 + 0.4 / 3)], "the first letter was found by the opening"
    assert rewards("bad", "bee", "xyz", "bed") == [pytest.approx(x) for x in (0.2 / 3, 0.2 / 3, 0, 0.7)]
    assert task.score(row, "the word is bed").info["observation"] == "This is no word of the list."


def cells(line):
    """The cells of a brick line, read without the brick task."""
    size, place = line.strip().split(" ")
    h, w = map(int, size.split("x"))
    x, y, z = json.loads(f"[{place[1:-1]}]")
    return {(x + i, y + j, z) for i in range(h) for j in range(w)}


def test_the_constraint_allows_what_touches_and_neither_collides_nor_leaves_the_world():
    """The turns that random choices under the constraint write, against sets of cells; each turn is one line."""
    task, rng, seen = example(BRICKS), random.Random(3), set()
    spec = task.tiny()
    tokenizer = make_tokenizer(spec.tokens, spec.context)
    constraint = task.turn_constraint(tokenizer)
    for row in task.dataset("train", 12, 3):
        h, w, x, y, z = row["first"]
        turns, taken = [], cells(f"{h}x{w} ({x},{y},{z})")
        for _ in range(task.turns):
            state, ids = constraint.start_turn(row, turns), []
            while not state.finished:
                allowed = state.mask()
                ids.append(rng.choice([t for t in range(len(tokenizer)) if allowed[t // 32] >> t % 32 & 1]))
                state.accept(ids[-1])
            turns.append(tokenizer.decode(ids, skip_special_tokens=True))
            new = cells(turns[-1])
            assert all(0 <= part < 8 for cell in new for part in cell) and not new & taken
            assert any(c == 0 or {(a, b, c - 1), (a, b, c + 1)} & taken for a, b, c in new)
            taken |= new
            seen.add(turns[-1])
    assert len(seen) > 40


def test_a_structure_that_falls_ends_the_game_and_height_and_reach_are_those_of_the_cells():
    task = example(BRICKS)
    row = {"prompt": "", "first": [2, 2, 0, 0, 0], "high": 3, "reach": 4}

    def played(*lines):
        return task.play(row, lines)

    first, second = played("4x2 (0,0,1)", "4x2 (2,0,2)")
    assert first.observation.startswith("stands: height 2 of 3, reach 2 of 4, load ") and not first.done
    assert second.success and second.done
    reward = 0.4 * (2 / 3 + 2 / 4) / 2
    assert (first.reward, second.reward) == pytest.approx((reward, 1.4 - reward))
    *_, fallen = played("4x2 (1,0,1)", "4x2 (4,0,2)", "4x2 (4,2,1)")
    assert fallen.done and not fallen.success and "overloaded" in fallen.reason
    assert [step.reason for step in played("4x2 (0,0,0)", "2x2 (7,0,0)", "9x9 (0,0,0)", "")] == [
        "brick 2, 4x2 (0,0,0), collides with brick 1",
        "brick 2, 2x2 (7,0,0), is outside the world of 8",
        "line 1, '9x9 (0,0,0)': there is no 9x9 brick; sizes are 1x1, 1x2, 1x4, 2x1, 2x2, 2x4, 4x1, 4x2",
        "write one line",
    ]
    ground, _ = played("2x2 (4,4,0)", "1x1 (0,0,1)")
    assert ground.observation.startswith("stands: height 1 of 3, reach 0 of 4")


LINES = st.builds("{}x{} ({},{},{})\n".format, *[st.integers(1, 4)] * 2, *[st.integers(-1, 8)] * 3)
WORDS = st.text("abet", min_size=3, max_size=3)


@pytest.mark.parametrize("file", exhaustive_but([WORDLE, BRICKS], FILES))
@settings(max_examples=40)
@given(actions=st.lists(st.one_of(st.text(), LINES, WORDS), min_size=1, max_size=4))
def test_any_text_is_answered(file, actions):
    task = example(file)
    row = task.dataset("test", 1, 1)[0]
    steps = task.play(row, actions)
    assert all(isinstance(step, Step) and isinstance(step.observation, str) for step in steps)
    assert len(steps) == len(actions) or steps[-1].done
    score = task.score(row, task.conversation(row, actions))
    assert score.total == pytest.approx(sum(step.reward for step in steps)) and -1 <= score.total <= 2
    assert score.success == steps[-1].success and (score.success or score.reason)
    if file == WORDLE:  # bricks are drawn by their own task
        task.render(row, task.conversation(row, actions))


@pytest.mark.parametrize("file", exhaustive_but([WORDLE], FILES))
def test_the_tiny_model_trains(file, tmp_path, capsys):
    words = {"out": tmp_path, "cold_start_steps": 2, "max_steps": 2, "eval_rows": 1, "samples": 1, "train_rows": 16,
             "per_device_train_batch_size": 8, "num_generations": 4, "reward_workers": 0, "use_cpu": "true",
             "report_to": "none"}  # fmt: skip
    given = [word for name, value in words.items() for word in (f"--{name}", str(value))]
    assert train.main(["--task", file, *given]) == 0
    evaluations = json.loads((tmp_path / "results.json").read_text())["evaluations"]
    assert [one["name"] for one in evaluations] == ["cold start", "GRPO"]
    assert evaluations[1]["metrics"]["valid"] == 1 and evaluations[1]["metrics"]["turns"] >= 1
    page = (tmp_path / "report.html").read_text()
    has_turns = any(one["metrics"]["turns"] > 1 for one in evaluations)
    assert ("<ol class=turns>" in page) == has_turns and "␞" not in page, "drawn, not printed as they are stored"
