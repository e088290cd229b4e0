"""The hint about a collapse: shown when pass@k falls while success rises, and not on noise."""

from types import SimpleNamespace

import numpy as np
import pytest

from trl_grpo_tasks.training.callbacks import Hints
from trl_grpo_tasks.training.collapse import collapse

PROMPTS, SIZE = 16, 8


def history(success, best, every=5, size=SIZE, **more):
    """Logs with these values of success and pass@size, each over `every` steps."""
    pairs = zip(success, best, strict=True)
    return [
        {
            "step": every * (i + 1), "reward": a, "pass@1": a, "pass@2": (a + b) / 2, f"pass@{size}": b,
        }
        | {name: values[i] for name, values in more.items()}
        for i, (a, b) in enumerate(pairs)
    ]  # fmt: skip


def line(start, end, count=24):
    return np.linspace(start, end, count).tolist()


def test_success_rises_and_passk_falls():
    logs = history(line(0.2, 0.5), line(0.8, 0.6))
    logs.insert(5, {"step": 25, "eval_pass@1": 0.0, "eval_pass@8": 1.0})
    found = collapse(logs, PROMPTS)
    assert list(found) == ["pass@1", "pass@8"]
    # the means of the first and of the last eight logs
    assert found["pass@1"] == pytest.approx((0.2 + 0.3 * 3.5 / 23, 0.5 - 0.3 * 3.5 / 23))
    assert found["pass@8"] == pytest.approx((0.8 - 0.2 * 3.5 / 23, 0.6 + 0.2 * 3.5 / 23))


def test_a_fall_after_a_rise_is_found_too():
    success, best = line(0.2, 0.6), line(0.5, 0.8, 8) + line(0.85, 0.8, 8) + line(0.8, 0.5, 8)
    assert collapse(history(success, best), PROMPTS) is not None


@pytest.mark.parametrize(
    ("success", "best"),
    [
        (line(0.2, 0.5), line(0.6, 0.8)),  # both rise
        (line(0.5, 0.2), line(0.8, 0.6)),  # both fall
        (line(0.2, 0.5), line(0.7, 0.685)),  # less than two points
        (line(0.2, 0.215), line(0.8, 0.6)),
        (line(0.2, 0.5, 5), line(0.8, 0.6, 5)),  # too few logs
    ],
)
def test_no_collapse(success, best):
    assert collapse(history(success, best), 10**6) is None


def test_the_number_of_prompts_decides_what_is_noise():
    """Each third has 40 steps, and pass@8 is 0.65 on average. Its fall must be two standard errors."""
    logs = history(line(0.2, 0.5), line(0.7, 0.6))
    fall = 0.1 * 16 / 23
    enough = 4 * 2 * 0.65 * 0.35 / fall**2 / 40
    assert collapse(logs, enough * 1.01) is not None and collapse(logs, enough * 0.99) is None


def test_a_new_level_of_the_curriculum_starts_again():
    success, best = [0.2] * 11 + [0.5] * 13, [0.8] * 11 + [0.6] * 13
    assert collapse(history(success, best, **{"curriculum/level": [0.0] * 24}), PROMPTS) is not None
    assert collapse(history(success, best, **{"curriculum/level": [0.0] * 10 + [0.5] + [1.0] * 13}), PROMPTS) is None


def test_without_groups_or_with_unscored_logs_there_is_no_hint():
    logs = history(line(0.2, 0.5), line(0.8, 0.6))
    assert collapse([*logs[:3], logs[3] | {"pass@8": None}, *logs[4:]], PROMPTS) is None
    assert collapse([{"step": i, "pass@1": 0.1 * i} for i in range(1, 10)], PROMPTS) is None
    assert collapse([], PROMPTS) is None


@pytest.mark.parametrize(
    ("prompts", "size", "alpha", "beta"), [(4, 2, 1.0, 2.0), (8, 16, 0.1, 0.5)], ids=["few", "very uneven"]
)
def test_flat_noise_is_no_collapse(prompts, size, alpha, beta):
    """Runs of 100 steps in which nothing changes. Prompts differ in difficulty (a beta distribution), completions are
    independent given the prompt. Every log of every run is looked at; fewer than 1% of the runs may show the hint."""
    random = np.random.default_rng(7)
    runs, shown = 200, 0
    for _ in range(runs):
        p = random.beta(alpha, beta, size=(100, prompts))
        successes = random.binomial(size, p).reshape(20, 5 * prompts)
        logs = history((successes / size).mean(1).tolist(), (successes > 0).mean(1).tolist(), size=size)
        shown += any(collapse(logs[:count], prompts) for count in range(1, 21))
    assert shown < 0.01 * runs


def test_the_hint_is_shown_once_and_says_what_to_do():
    said = []
    hints = Hints(say=said.append)
    args = SimpleNamespace(
        kl_target=None, gradient_accumulation_steps=4, steps_per_generation=8, num_iterations=1,
        generation_batch_size=2 * PROMPTS * SIZE, num_generations=SIZE,
    )  # fmt: skip
    logs = history(line(0.2, 0.5), line(0.8, 0.6))
    for count in range(1, len(logs) + 1):
        state = SimpleNamespace(is_world_process_zero=True, log_history=logs[:count])
        hints.on_log(args, state, None, logs=logs[count - 1])
    assert len(said) == 1 and said[0].startswith("hint: success has risen from 0.2") and "\n" not in said[0]
    for word in ("pass@8 has fallen from 0.7", "maxrl", "learning_rate", "best_by pass@8"):
        assert word in said[0], word
