"""The benchmark of learning over several seeds: statistics, grids, and a small grid from start to end."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import learning  # noqa: E402

from tests.support import forked  # noqa: E402
from trl_grpo_tasks.evaluation.samples import Sample  # noqa: E402


def sample(success, total, form, valid=True):
    score = {"success": success, "total": total, "valid": valid, "components": {"half": total / 2}}
    return Sample({}, form, 1, score, form=form)


def test_values_of_rows():
    unscored = Sample({}, "?", 1, None)
    first = [sample(True, 2.0, "a"), sample(False, 1.0, "b"), sample(False, 0.0, "a"), sample(False, 0.0, "x", False)]
    rows = [first, [sample(True, 1.0, "c"), sample(True, 3.0, "c"), unscored, sample(False, 0.0, "d")]]
    assert learning.values_of(rows, ["half"])["half"] == [0.375, 0.5]
    assert learning.values_of(rows) == {
        "success": [0.25, 0.5],
        "pass@2": [pytest.approx(3 / 6), pytest.approx(5 / 6)],  # pairs with a success, of six
        "pass@4": [1, 1],
        "reward": [0.75, 1.0],
        "best of 4": [2, 3],
        "distinct answers": [0.5, 0.5],
        "distinct successes": [0.25, 0.25],
    }
    again = [sample(True, 1.0, "a")] * 4
    assert sum(learning.values_of([*rows, again])["distinct successes"]) * 4 == pytest.approx(2), "a and c"


def test_no_request_is_used_for_choosing_and_for_reporting():
    for requests in ([place % 12 for place in range(80)], list(range(120))):
        choose, report = (learning.places_of(requests, which) for which in ("choose", "report"))
        assert sorted(choose + report) == learning.places_of(requests, "all") == list(range(len(requests)))
        chosen, reported = ({requests[i] for i in places} for places in (choose, report))
        assert len(chosen) == len(reported) == len(set(requests)) / 2 and not chosen & reported
    for levels in (2, 3, 4):  # which take turns: both halves have rows of each
        assert {i % levels for i in choose} == {i % levels for i in report} == set(range(levels))


def test_tables_by_a_field_of_the_rows():
    def row(level, *samples):
        return [Sample(one.row | {"level": level}, *list(vars(one).values())[1:]) for one in samples]

    rows = [row("b", sample(True, 1.0, "x"), sample(False, 0.0, "y")), row("a", *[sample(True, 1.0, "x")] * 2)]
    found = learning.values_by(rows, "level")
    assert found == {"a: success": [1], "a: reward": [1], "b: success": [0.5], "b: reward": [0.5]}
    assert learning.values_by(rows, None) == {}
    requests = learning.requests_by(rows, "level")
    assert requests == {metric: [0] for metric in found}
    printed = learning.table({"cold start": [found], "grpo": [found]}, "grpo", {}, requests)
    assert printed.splitlines()[0] == "| setting | a: success | b: success |", "rewards equal successes: no columns"


def test_the_interval_of_a_gain_covers_the_truth_as_often_as_it_says():
    """Many small experiments with a known difference. Three seeds are few, so that fewer than 95% are covered."""
    random = np.random.default_rng(1)
    covered = 0
    for _ in range(30):
        seeds = random.normal(0.1, 0.05, size=3)
        ours = [random.normal(0.5 + effect, 0.2, size=60) for effect in seeds]
        theirs = [random.normal(0.5, 0.2, size=60) for _ in seeds]
        low, high = learning.gain(ours, theirs, range(60))
        covered += low <= 0.1 <= high
    assert 23 <= covered <= 30
    shifted = [list(np.arange(20.0) + seed) for seed in range(3)]
    low, high = learning.gain([[x + 0.25 for x in row] for row in shifted], shifted, range(20))
    assert (low, high) == pytest.approx((0.25, 0.25))


def test_a_gain_on_one_request_is_not_taken_for_one_on_many_rows():
    """Eight of ten rows are one request, which alone has the gain: resampled requests often lack it."""
    ours, theirs, requests = [[1.0] * 8 + [0.0] * 2], [[0.0] * 10], [0] * 8 + [1, 2]
    assert learning.gain(ours, theirs, requests) == pytest.approx((0, 1))
    assert learning.gain(ours, theirs, range(10))[0] > 0.4, "as if each row were a request"


def grid_file(folder, **changes):
    grid = {
        "recipe": "brick/single_gpu", "seeds": [1], "rows": 2, "samples": 2, "baseline": "grpo",
        "settings": {"grpo": {}},
    }  # fmt: skip
    path = folder / "grid.yaml"
    path.write_text(yaml.safe_dump(grid | changes))
    return path


def test_grids_with_mistakes_are_refused(tmp_path):
    with pytest.raises(ValueError, match="stepz unknown or missing"):
        learning.read_grid(grid_file(tmp_path, stepz=3), None, None)
    with pytest.raises(ValueError, match="has no setting 'passk'; its settings are: grpo"):
        learning.read_grid(grid_file(tmp_path), ["passk"], None)
    with pytest.raises(ValueError, match="own_start names pivot, which is none of the settings"):
        learning.read_grid(grid_file(tmp_path, own_start={"pivot": {}}), None, None)


def test_the_cold_start_can_be_the_baseline(tmp_path):
    grid = learning.read_grid(grid_file(tmp_path, baseline="cold start"), None, None)
    rows = {"cold start": [{"success": [0.25, 0.5]}], "grpo": [{"success": [0.5, 0.75]}]}
    printed = learning.table(rows, grid["baseline"], {}, {"success": [0, 1]})
    assert printed.splitlines()[2:] == [
        "| cold start | 0.375 (0.375-0.375) |",
        "| grpo | 0.625 (0.625-0.625); gain +0.250 to +0.250 |",
    ]


def test_settings_share_a_cold_start_unless_they_have_their_own(tmp_path, monkeypatch):
    own = {"pivot": {"text_form": "pivot"}}
    path = grid_file(tmp_path, settings={"grpo": {}, "pivot": {"lr": 1}, "maxrl": {}}, own_start=own)
    grid = learning.read_grid(path, None, None)
    assert learning.starts_of(grid) == {"cold start": {}, "cold start, pivot": {"text_form": "pivot"}}
    assert learning.starts_of(learning.read_grid(path, ["maxrl"], None)) == {"cold start": {}}
    runs = []
    monkeypatch.setattr(learning, "run", lambda *given: runs.append(given[2:]))
    learning.cold_start(grid, tmp_path, "cold start, pivot", 1)
    learning.train(grid, tmp_path, "pivot", 1)
    model = tmp_path / "cold_start_pivot-1" / "cold_start"
    assert runs == [
        ("cold start, pivot", 1, {"text_form": "pivot", "max_steps": 1}),
        ("pivot", 1, {"text_form": "pivot", "lr": 1, "model": model, "cold_start_steps": 0}),
    ]


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks/grids").glob("*.yaml")), ids=lambda path: path.stem)
def test_grids_name_options_that_exist(path):
    from trl_grpo_tasks.commands.arguments import parse

    grid = learning.read_grid(path, None, None)
    for name, options in grid["settings"].items():
        started = learning.starts_of(grid)[learning.start_of(grid, name)]
        parse([*learning.settings_of(grid), *learning.flags(grid["options"] | started | options)])


def test_curves_are_means_over_seeds_of_moving_averages(tmp_path, monkeypatch):
    """Made-up logs with known values, one of them resumed; the figure has a panel per metric and all lines."""
    import curves
    from matplotlib.figure import Figure

    def log(name, values, resumed=()):
        folder = tmp_path / name
        folder.mkdir()
        lines = [{"step": n, "max@1": value, "max@64": 10 * value} for n, value in enumerate(values, 1)]
        lines[1:1] = [{"step": n, "max@1": -99.0, "max@64": -99.0} for n in resumed]
        content = [json.dumps(line) for line in [*lines, {"train_runtime": 1.0}]]
        (folder / curves.METRICS_FILE).write_text("\n".join(content))
        return folder

    plain = [log("a", range(30)), log("b", [2 * n for n in range(30)], resumed=(2, 3)), log("c", [3.0] * 24)]
    passk = [log("d", [7.0] * 4)]
    np.testing.assert_allclose(curves.smoothed(curves.values_of(plain[1], "max@1"))[[0, -1]], [[10, 9], [30, 49]])
    kept = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: kept.append(self))
    curves.draw({"plain": plain, "passk": passk}, {"max@1": "mean", "max@64": "best"}, tmp_path / "x.png")
    (figure,) = kept
    assert [axes.get_title() for axes in figure.axes] == ["mean", "best"]
    *_, mean, one, same = figure.axes[0].lines
    assert len(figure.axes[0].lines) == 3 + 1 + 1 + 1
    assert mean.get_xdata()[[0, -1]].tolist() == [10, 24], "where all seeds have values"
    assert mean.get_ydata()[0] == pytest.approx((4.5 + 9 + 3) / 3)
    assert one.get_ydata().tolist() == same.get_ydata().tolist() == [pytest.approx(7)]
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["plain", "passk"]
    assert curves.ends({"plain": plain, "passk": passk}, {"max@1": "mean", "max@64": "best"}).splitlines() == [
        "| last 20 iterations | mean | best |",
        "|---|---|---|",
        "| plain | 20.5 (3.0-39.0) | 205.0 (30.0-390.0) |",
        "| passk | 7.0 (7.0-7.0) | 70.0 (70.0-70.0) |",
    ]
    with pytest.raises(ValueError, match=r"has no metric 'max@8'; remove the run's folder"):
        curves.draw({"plain": plain}, {"max@8": "?"}, tmp_path / "x.png")


def test_a_table_of_nothing_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x", str(grid_file(tmp_path)), "--output_dir", str(tmp_path), "--finished"])
    with pytest.raises(SystemExit, match="no setting has finished with all seeds"):
        learning.main()


def run_forked(words, stdout=None, **options):
    """As `subprocess.run`, without the time for imports if it is Python."""
    if words[0] != sys.executable:
        return subprocess.run(words, **options)
    done = forked.python(*words[1:])
    stdout.write(done.stdout + done.stderr)
    return done


@pytest.mark.exhaustive
def test_a_small_grid_from_start_to_end(tmp_path, monkeypatch, capsys):
    recipe = tmp_path / "toy.yaml"
    options = {"task": str(ROOT / "tests/support/toy.py"), "cold_start_steps": 2, "max_steps": 2, "num_generations": 4,
               "per_device_train_batch_size": 8, "max_completion_length": 4, "use_cpu": True}  # fmt: skip
    recipe.write_text(yaml.safe_dump(options))
    path = grid_file(tmp_path, recipe=str(recipe), rows=2, samples=4, curves={"max@1": "mean", "max@4": "best"})
    monkeypatch.setattr(learning, "subprocess", SimpleNamespace(run=run_forked))
    monkeypatch.setattr(sys, "argv", ["learning.py", str(path), "--output_dir", str(tmp_path / "out")])
    learning.main()
    printed = capsys.readouterr().out
    assert "| cold start |" in printed and "| grpo |" in printed
    page = (tmp_path / "out/grid/learning.md").read_text()
    assert page.strip() in printed
    assert "2 held-out rows (1 different request), not used to choose settings, 4 samples each; cpu" in page
    assert (tmp_path / "out/grid/learning.png").read_bytes().startswith(b"\x89PNG") and "![Training](grid.png)" in page
    content = json.loads((tmp_path / "out/grid/learning.json").read_text())
    evaluated = json.loads((tmp_path / "out/grid/evaluation_grpo-1/evaluation.json").read_text())["evaluations"]
    successes = np.reshape([one["score"]["success"] for one in evaluated[0]["samples"]], (4, 4))
    expected = successes[learning.places_of(range(4), "report")].mean()
    assert np.mean(content["values"]["grpo"][0]["success"]) == pytest.approx(expected)
    finished = tmp_path / "out/grid/grpo-1/finished.json"
    before = finished.stat().st_mtime_ns
    sys.argv += ["--rows", "choose"]
    learning.main()
    assert finished.stat().st_mtime_ns == before, "a finished run is not repeated"
