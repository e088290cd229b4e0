"""The parts that benchmarks share: shapes, tokenizer, cells in their own processes, ratios; and a whole small run."""

import ast
import itertools
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(FOLDER))

import colab_t4  # noqa: E402
import harness  # noqa: E402
import reasoning_gym_gallery as gallery  # noqa: E402
import repair  # noqa: E402
import rollouts  # noqa: E402
import workloads  # noqa: E402


@pytest.mark.exhaustive
def test_cells_that_fail_keep_what_they_reported_and_the_next_cells_run(tmp_path):
    kinds = ["works", "raises", "dies", "sleeps", "works"]
    log = tmp_path / "results" / "cells.log"
    rows = list(harness.run_cells("tests.support.cells", [{"kind": kind} for kind in kinds], 10, log))
    whole = {"kind": "works", "first": 1, "second": 2}
    assert rows == [
        whole,
        {"kind": "raises", "first": 1, "error": "RuntimeError: no room for it"},
        {"kind": "dies", "first": 1, "error": "the process ended with exit code 7"},
        {"kind": "sleeps", "first": 1, "error": "stopped after 10 s"},
        whole,
    ]
    assert log.read_text().count("output of works") == 2


def test_cells_of_a_module_that_cannot_be_imported_are_rows_with_the_error(tmp_path):
    (row,) = harness.run_cells("no_such_module", [{"kind": "works"}], 60, tmp_path / "log")
    assert row == {"kind": "works", "error": "ModuleNotFoundError: No module named 'no_such_module'"}


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [
        ("135M", 134_515_008), ("360M", 361_821_120), ("0.5B", 494_032_768), ("1.5B", 1_543_714_304),
        ("7B", 7_615_616_512),
    ],
)  # fmt: skip
def test_shapes_have_the_published_numbers_of_parameters(shape, parameters):
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(harness.config_of(shape, "bfloat16"))
    assert sum(weight.numel() for weight in model.parameters()) == parameters


def test_the_tokenizer_has_one_token_per_character_and_an_end_that_a_model_cannot_sample():
    tokenizer = harness.character_tokenizer(1000, ends=False)
    text = "build a table,\n2x4 (3,0,1)"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text) and tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id == 1000
    assert harness.character_tokenizer(1000, ends=True).eos_token_id < 1000


def test_tables_show_medians_with_their_spread():
    assert harness.table_line(["ours", [3.0, 1.0, 2.0], 1234.5, None, 7]) == "| ours | 2 (1-3) | 1,234 |  | 7 |"
    assert harness.table_line([0.1234], "too slow") == "| 0.123 | too slow"


def row(way, weights, rollout_s, step_s=None):
    same = {"shape": "7B", "text": "free", "prompt": 100, "group": 8, "length": 256}
    return {**same, "way": way, "weights": weights, "rollout_s": rollout_s, "step_s": step_s}


def test_rollouts_are_compared_with_vllm_and_steps_with_colocated_vllm_of_the_same_weights():
    rows = [row("vllm", "full", [2.0, 1.0, 9.0]), row("trl+vllm", "full", [4.0], [16.0])]
    rows += [row("trl+vllm", "lora", [5.0], [8.0]), row("trl", "lora", [20.0], [30.0])]
    assert rollouts.ratios(row("ours", "lora", [1.0], [4.0]), rows) == {"rollout_ratio": 2.0, "step_ratio": 2.0}
    assert rollouts.ratios(row("ours alone", "full", [4.0]), rows) == {"rollout_ratio": 0.5}
    assert rollouts.ratios(row("ours", "lora", [1.0], [4.0]), rows[3:]) == {"rollout_ratio": 20.0, "step_ratio": 7.5}
    assert rollouts.ratios({**row("ours", "lora", [1.0], [4.0]), "shape": "1.5B"}, rows) == {}


@pytest.mark.parametrize("sweep", workloads.SWEEPS)
def test_a_sweep_changes_one_number_of_64_rows_of_256_tokens(sweep):
    for value in workloads.SWEEPS[sweep]:
        cell = workloads.point(sweep, value)
        prompts, shortest, longest, group, length = cell.pop("sizes")
        expected = {"rows": 64, "length": 256} | ({sweep: value} if sweep in ("rows", "length") else {})
        assert {"rows": prompts * group, "length": length} == expected and shortest == longest == 100
        assert list(cell.values()) == ([] if sweep in ("rows", "length") else [value])


@pytest.mark.parametrize("budget", [1, 4, 7, 100])
def test_rows_are_solved_within_a_budget_as_in_all_orders_of_their_attempts(budget):
    attempts = [(True, 3), (False, 2), (True, 5), (False, 1)]
    orders = list(itertools.permutations(attempts))

    def solves(order):
        spent = list(itertools.accumulate(tokens for _, tokens in order))
        first = next(at for at, (success, _) in enumerate(order) if success)
        return spent[first] <= budget

    expected = sum(map(solves, orders)) / len(orders)
    assert repair.solved(attempts, budget, random.Random(0)) == pytest.approx(expected, abs=0.12)
    assert repair.solved([(False, 2)], budget, random.Random(0)) == 0
    assert repair.most_budget([attempts, [(False, 2)]]) == 2


def test_minutes_of_a_recipe_include_preparation_and_cold_start():
    measured = {"steps": 100, "step_s": [2.0, 1.0, 9.0], "preparation_s": 30.0, "cold_start_s": 70.0}
    assert colab_t4.extrapolated(measured) == {"minutes": 5.0}
    assert colab_t4.extrapolated({"steps": 100, "error": "out of memory"}) == {}


def test_adapters_are_not_zero():
    model = harness.add_lora(harness.random_model(harness.config_of("tiny", "float32")))
    deltas = [part.get_delta_weight("default") for part in model.modules() if hasattr(part, "get_delta_weight")]
    assert len(deltas) == 7 * 4 and all(delta.abs().max() > 0 for delta in deltas)


@pytest.mark.exhaustive
def test_rollouts_skips_vllm_if_it_is_missing_and_measures_full_length_completions(tmp_path):
    out = tmp_path / "rollouts.json"
    words = "--ways vllm trl ours --weights full --texts free --prompts 2 --groups 2 --lengths 6 --repeats 1 --out"
    hidden = {"PYTHONPATH": str(FOLDER.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(FOLDER / "rollouts.py"), *words.split(), str(out)],
        capture_output=True, text=True, env=os.environ | hidden,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    if "skipped: vllm, because vLLM is not installed" not in done.stdout:
        pytest.skip("vLLM is installed")
    trl, ours = json.loads(out.read_text())["results"]
    assert (trl["way"], ours["way"]) == ("trl", "ours") and "error" not in {*trl, *ours}
    for one in (trl, ours):
        assert one["tokens_per_s"] * one["rollout_s"][0] == pytest.approx(2 * 2 * 6)
        assert one["step_s"][0] > one["rollout_s"][0] > 0
    assert ours["rollout_ratio"] == pytest.approx(trl["rollout_s"][0] / ours["rollout_s"][0])


def test_the_gallery_keeps_rows_of_the_same_seed_and_machine():
    page = f"head\n{gallery.BEGIN}\nold\n{gallery.END}\ntail\n"
    for name in ("gcd", "chain_sum"):
        page = gallery.with_table(page, {name: {"task": f"`{name}`", "after": "1%"}}, "Seed 1")
    table = ["| task | after |", "| --- | --- |", "| `chain_sum` | 1% |", "| `gcd` | 1% |"]
    assert page.splitlines() == ["head", gallery.BEGIN, "", "Seed 1", "", *table, "", gallery.END, "tail"]
    again = {"gcd": {"task": "`gcd`", "after": "2%"}}
    assert gallery.with_table(page, again, "Seed 1") == page.replace("| `gcd` | 1% |", "| `gcd` | 2% |")
    assert "chain_sum" not in gallery.with_table(page, again, "Seed 2")


def test_make_bench_runs_benchmarks_that_need_no_words():
    """The loop in the Makefile ends at the first benchmark that fails."""
    makefile = (FOLDER.parent / "Makefile").read_text()
    left_out = re.search(r"filter-out [$][(]addprefix benchmarks/,([^)]*)[)]", makefile)[1].split()
    needing = set()
    for file in FOLDER.glob("*.py"):
        for call in ast.walk(ast.parse(file.read_text())):
            if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "add_argument":
                options = {one.arg: ast.unparse(one.value) for one in call.keywords}
                is_word = not ast.literal_eval(call.args[0]).startswith("-") and "nargs" not in options
                if is_word or options.get("required") == "True":
                    needing.add(file.name)
    assert {"repair.py", "solve.py"} <= needing <= set(left_out)
