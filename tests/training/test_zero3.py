"""ZeRO-3 in two processes (gloo) trains as whole weights do: constraints, filters, LoRA, replay. Needs DeepSpeed."""

import pytest

from tests.training.test_sharded import CASES, SAME_PROCESSES, assert_equal, train

pytest.importorskip("deepspeed")

CASES = {name: CASES[name] for name in ("plain", "constraint", "filters", "both", "forced", "lora")}


@pytest.fixture(scope="module")
def runs(tiny_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("zero3")
    return [train(folder / "one", tiny_path, 1, CASES, None), train(folder / "two", tiny_path, 2, CASES, "zero3")]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES)
def test_two_sharded_processes_equal_one(runs, case):
    one, two = runs[0][case], runs[1][case]
    assert_equal(two, one)
    for line in two[1]:
        assert line.get("sampling/logp_difference_max", 0) < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_replay_equals_that_of_two_processes_with_whole_weights(tiny_path, tmp_path):
    cases = {"replay": SAME_PROCESSES["replay"]}
    whole = train(tmp_path / "ddp", tiny_path, 2, cases, None)["replay"]
    sharded = train(tmp_path / "zero3", tiny_path, 2, cases, "zero3")["replay"]
    assert 1 in [line.get("replay/replaced_groups") for line in whole[1]]
    assert_equal(sharded, whole)
