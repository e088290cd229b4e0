"""The computed step times: they agree with measured steps on one GPU, and the page shows what the script prints."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import step_time  # noqa: E402


@pytest.mark.parametrize("name", step_time.MEASURED)
def test_estimates_agree_with_measured_steps_on_one_gpu(name):
    rollout, training = step_time.MEASURED[name]
    shape = step_time.SHAPES[name]
    tokens = 64 * 256 + 8 * 100  # prompts are shared
    assert step_time.rollout_seconds(shape, 1, 64, 100, 256) == pytest.approx(rollout, rel=0.35)
    assert step_time.training_seconds(shape, 1, 64, tokens) == pytest.approx(training, rel=0.35)


def test_gathering_takes_as_long_as_the_bytes_need_on_the_slowest_link():
    assert step_time.gather_seconds(1e9, 1, collectives=0) == 0
    assert step_time.gather_seconds(315e9, 8, collectives=0) == pytest.approx(7 / 8)
    assert step_time.gather_seconds(35e9, 64, collectives=0) == pytest.approx(63 / 64)


def test_a_copy_is_split_only_if_it_does_not_fit():
    # 32B: 65.6 GB in bf16. A GPU holds 65.6 GB of training state on 8 GPUs, and 8.2 GB on 64.
    assert step_time.split_of(step_time.SHAPES["32B"], 8) == 2
    assert step_time.split_of(step_time.SHAPES["32B"], 64) == 1


def test_the_page_has_the_table_of_the_script():
    assert step_time.table([8, 64, 512], 64, 512, 1024) in (ROOT / "benchmarks/results/step_time.md").read_text()
