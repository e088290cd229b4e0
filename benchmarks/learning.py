"""Learning over several seeds: settings x seeds from shared cold starts, compared on held-out rows in one table.

    python benchmarks/learning.py benchmarks/grids/brick_demo.yaml --output_dir outputs/learning [--parallel 2]
                                  [--settings NAME ...] [--seeds 1 2 3] [--rows choose|report|all] [--model FOLDER]

A grid names a recipe, or a task with its defaults, options for all runs, seeds, settings (options of train), the
baseline, which is one of them or `cold start`, and, if wanted, components of the score that get a column each, and a
field of the rows, such as their level, for a table by its values (`by`), and metrics of training for a figure of them
per iteration (`curves`, see curves.py). Each seed has one cold start, from which all
settings train with this seed. A setting for which the cold start does not fit, for example because it writes text in
another form, is listed under `own_start`, with the options of its own cold start, training and evaluation. Then the
cold start and all models of a seed are evaluated on the same held-out rows. Settings are chosen on a random half of
their requests (--rows choose) and reported on the others (--rows report, the default). If no setting was chosen, all
rows may be reported (--rows all).

Settings run in the order of the grid, each with all seeds, so that a grid that was stopped has whole settings. The
same command resumes it, and finished runs are not repeated. A setting of which a run failed or, with --finished, is
not there is left out. --parallel runs that many processes at a time; on one GPU, as many as its memory holds.

Each cell is the mean over seeds, with the smallest and the largest in brackets. Distinct answers are counted per row,
distinct successes over all rows; both are shares of the samples. `gain` is the difference to the baseline, with its
95% interval from a paired bootstrap over seeds and, within a seed, over requests. Writes learning.json, learning.md
and, with `curves`, learning.png to --output_dir. --publish also writes benchmarks/results/GRID.md, with its figure.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import curves
import numpy as np
import yaml
from harness import flags, free_port, spread, table_line

from trl_grpo_tasks.evaluation.samples import Sample, request_numbers
from trl_grpo_tasks.files import write_atomically
from trl_grpo_tasks.registry import TASKS
from trl_grpo_tasks.report.run_folder import SETTINGS_FILE
from trl_grpo_tasks.task import describe_rows
from trl_grpo_tasks.training.advantages import expected_best

KEYS = {
    "recipe",
    "seeds",
    "rows",
    "samples",
    "baseline",
    "settings",
    "options",
    "components",
    "own_start",
    "by",
    "curves",
}
OPTIONAL = {"options": {}, "components": [], "own_start": {}, "by": None, "curves": {}}
START = "cold start"
ROWS = {
    "choose": "for choosing settings",
    "report": "not used to choose settings",
    "all": "no setting was chosen on them",
}
EVALUATION_SEED = 4242  # of the held-out rows: none of the seeds of training
RESAMPLES = 2000
DONE_FILE = "finished.json"  # of a run: written last
PAGES = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grid", type=Path)
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/learning"))
    parser.add_argument("--model", help="for the cold starts, instead of the recipe's model")
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--settings", nargs="+", help="only these settings, and the baseline")
    parser.add_argument("--seeds", nargs="+", type=int, help="instead of the seeds of the grid")
    parser.add_argument("--rows", choices=list(ROWS), default="report")
    parser.add_argument("--finished", action="store_true", help="start nothing: the table of what is finished")
    parser.add_argument("--publish", action="store_true", help="write the page of the documentation")
    options = parser.parse_args()
    if options.publish and options.rows == "choose":
        parser.error("--publish needs --rows report or all: these rows were used to choose settings")
    grid = read_grid(options.grid, options.settings, options.seeds)
    folder = options.output_dir / options.grid.stem
    folder.mkdir(parents=True, exist_ok=True)
    samples = collect(grid, folder, options)
    runs = {name: [run_folder(folder, name, seed) for seed in grid["seeds"]] for name in grid["settings"]}
    trained = {name: found for name, found in runs.items() if all((one / DONE_FILE).is_file() for one in found)}
    missing = {name for (name, _), found in samples.items() if found is None}
    grid["settings"] = {name: given for name, given in grid["settings"].items() if name not in missing}
    if not grid["settings"]:
        raise SystemExit("no setting has finished with all seeds; without --finished, the command resumes the grid")
    names = [*starts_of(grid), *grid["settings"]]
    if missing & {grid["baseline"], *names}:
        raise SystemExit("the table needs the cold starts and the baseline with all seeds")
    requests = request_numbers(samples[names[0], grid["seeds"][0]])  # the rows of all evaluations are the same
    places = places_of(requests, options.rows)
    reported = {name: [[samples[name, seed][i] for i in places] for seed in grid["seeds"]] for name in names}
    rows = {name: [values_of(one, grid["components"]) for one in seeds] for name, seeds in reported.items()}
    by = {name: [values_by(one, grid["by"]) for one in seeds] for name, seeds in reported.items()}
    some = reported[grid["baseline"]][0]
    minutes = {name: [finished(folder, name, seed)["minutes"] for seed in grid["seeds"]] for name in grid["settings"]}
    content = {"grid": grid, "rows": options.rows, "values": rows, "minutes": minutes}
    write_atomically(folder / "learning.json", json.dumps(content))
    tables = table(rows, grid["baseline"], minutes, dict.fromkeys(rows[grid["baseline"]][0], request_numbers(some)))
    if grid["by"]:
        tables += f"\n\nBy {grid['by']}:\n\n{table(by, grid['baseline'], {}, requests_by(some, grid['by']))}"
    counted = describe_rows(len(places), len({requests[place] for place in places}))
    text = page(options.grid, grid, options.rows, counted, tables, machine_of(folder, grid))
    if grid["curves"]:
        curves.draw(trained, grid["curves"], folder / "learning.png")
        text += (
            f"\n![Training]({options.grid.stem}.png)\n\n{curves.CAPTION}\n\n{curves.ends(trained, grid['curves'])}\n"
        )
    write_atomically(folder / "learning.md", text)
    if options.publish:
        write_atomically(PAGES / f"{options.grid.stem}.md", text)
        if grid["curves"]:
            write_atomically(PAGES / f"{options.grid.stem}.png", (folder / "learning.png").read_bytes())
    print(f"\n{text}")


def places_of(requests: Sequence[int], which: str) -> list[int]:
    """Return the places of the wanted rows, given the number of each row's request. A random half of the requests is
    for choosing: levels may take turns."""
    count = max(requests) + 1
    chosen = set(random.Random(EVALUATION_SEED).sample(range(count), count // 2))
    return [
        place for place, number in enumerate(requests) if which == "all" or (number in chosen) == (which == "choose")
    ]


def collect(grid: dict[str, Any], folder: Path, options: Any) -> dict[tuple[str, int], Any]:
    """Train and evaluate what is not there yet. Returns {(name, seed): samples of each row, or None}."""
    starts = starts_of(grid)
    runs = [(name, seed) for name in (*starts, *grid["settings"]) for seed in grid["seeds"]]
    with ThreadPoolExecutor(options.parallel) as pool:
        if not options.finished:
            firsts = itertools.product(starts, grid["seeds"])
            list(pool.map(lambda one: cold_start(grid, folder, *one, options.model), firsts))
        found = pool.map(lambda one: samples_of(grid, folder, *one, options.finished), runs)
        return dict(zip(runs, found, strict=True))


def page(path: Path, grid: dict[str, Any], rows: str, counted: str, text: str, machine: str) -> str:
    """Return the page of a grid in Markdown: what was run, on what, and the table."""
    comment = next((line.lstrip("# ") for line in path.read_text().splitlines() if line.startswith("#")), path.stem)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=PAGES.parent)
    return (
        f"# {path.stem.replace('_', ' ')}\n\n{comment}\n\n"
        f"Recipe `{grid['recipe']}`; seeds {', '.join(map(str, grid['seeds']))}; "
        f"{counted}, {ROWS[rows]}, {grid['samples']} samples each; "
        f"{machine}; commit {commit.stdout.strip() or 'unknown'}.\n\n"
        f"```text\npython benchmarks/learning.py benchmarks/grids/{path.name} --rows {rows}\n```\n\n"
        "Each cell is the mean over seeds, with the smallest and the largest in brackets; *gain* is the 95% interval "
        f"of the difference to `{grid['baseline']}`.\n\n{text}\n"
    )


def machine_of(folder: Path, grid: dict[str, Any]) -> str:
    """Return the hardware and versions that the first run recorded."""
    settings = json.loads((run_folder(folder, grid["baseline"], grid["seeds"][0]) / SETTINGS_FILE).read_text())
    versions = ", ".join(f"{name} {settings['versions'][name]}" for name in ("torch", "trl", "transformers"))
    return f"{settings['machine']}; {versions}"


def read_grid(path: Path, settings: Sequence[str] | None, seeds: Sequence[int] | None) -> dict[str, Any]:
    """Read a grid; ValueError for what is missing or unknown."""
    grid = yaml.safe_load(path.read_text())
    if unknown := set(grid) - KEYS or KEYS - set(OPTIONAL) - set(grid):
        raise ValueError(f"{path}: {', '.join(sorted(unknown))} unknown or missing; the keys are {sorted(KEYS)}")
    wanted = [grid["baseline"], *(settings or grid["settings"])]
    if missing := [name for name in wanted if name not in {START, *grid["settings"]}]:
        raise ValueError(f"{path} has no setting {missing[0]!r}; its settings are: {', '.join(grid['settings'])}")
    chosen = {name: options for name, options in grid["settings"].items() if name in wanted}
    grid = OPTIONAL | grid
    own = {name: options for name, options in grid["own_start"].items() if name in chosen}
    if unknown := grid["own_start"].keys() - grid["settings"].keys():
        raise ValueError(f"{path}: own_start names {', '.join(sorted(unknown))}, which is none of the settings")
    return grid | {"settings": chosen, "seeds": list(seeds or grid["seeds"]), "own_start": own}


def start_of(grid: dict[str, Any], name: str) -> str:
    """Return the name of the cold start of a setting. Settings with equal options of their own start share it."""
    if (own := grid["own_start"].get(name)) is None:
        return START
    return f"{START}, {next(other for other, options in grid['own_start'].items() if options == own)}"


def starts_of(grid: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the cold starts by name, each with the options that its settings have in all commands."""
    return {start_of(grid, name): grid["own_start"].get(name, {}) for name in grid["settings"]}


def cold_start(grid: dict[str, Any], folder: Path, start: str, seed: int, model: str | None = None) -> None:
    """Train a cold start of a seed, unless it is there."""
    if not (run_folder(folder, start, seed) / DONE_FILE).is_file():
        given = {"model": model} if model else {}
        run(grid, folder, start, seed, starts_of(grid)[start] | {"max_steps": 1} | given)


def train(grid: dict[str, Any], folder: Path, name: str, seed: int) -> None:
    """Train a setting from the cold start of its seed, unless it has finished."""
    if not (run_folder(folder, name, seed) / DONE_FILE).is_file():
        start = start_of(grid, name)
        options = starts_of(grid)[start] | grid["settings"][name]
        run(grid, folder, name, seed, options | {"model": model_folder(folder, start, seed), "cold_start_steps": 0})


def settings_of(grid: dict[str, Any]) -> list[str]:
    """The words that name the recipe of a grid, or its task with the defaults for the embedded model."""
    return ["--task" if grid["recipe"] in TASKS else "--config", grid["recipe"]]


def run(grid: dict[str, Any], folder: Path, name: str, seed: int, options: dict[str, Any]) -> None:
    """Train with the command line, in a process of its own; an interrupted run resumes."""
    out = run_folder(folder, name, seed)
    fixed = {"seed": seed, "eval_before_and_after": "false", "report_to": "none", "output_dir": out}
    begin = time.monotonic()
    with served(options, seed) as server:
        command(["train", *settings_of(grid), *flags(grid["options"] | options | fixed | server),
                 "--resume_from_checkpoint", "auto"], out.with_suffix(".log"))  # fmt: skip
    minutes = (time.monotonic() - begin) / 60
    write_atomically(out / DONE_FILE, json.dumps({"minutes": minutes}))
    print(f"{name}, seed {seed}: {minutes:.1f} minutes", flush=True)


@contextmanager
def served(options: dict[str, Any], seed: int) -> Iterator[dict[str, Any]]:
    """For a run with use_vllm, start the server of rollouts_ahead.py and yield the options that name it."""
    if not options.get("use_vllm"):
        yield {}
        return
    port = free_port()
    script = Path(__file__).with_name("rollouts_ahead.py")
    server = subprocess.Popen([sys.executable, script, "--serve", str(port), options["model"], str(seed)])
    try:
        yield {"vllm_server_base_url": f"http://127.0.0.1:{port}"}
    finally:
        server.kill()
        server.wait()


def samples_of(
    grid: dict[str, Any], folder: Path, name: str, seed: int, finished_only: bool
) -> list[list[Sample]] | None:
    """Train a setting, if it is one, and evaluate its model. Returns the samples of each row, None without them."""
    try:
        if name in grid["settings"] and not finished_only:
            train(grid, folder, name, seed)
        return evaluate(grid, folder, name, seed, finished_only)
    except RuntimeError as error:
        print(f"{name}, seed {seed}: {error}", flush=True)
        return None


def evaluate(
    grid: dict[str, Any], folder: Path, name: str, seed: int, finished_only: bool
) -> list[list[Sample]] | None:
    """Evaluate a cold start or the model of a setting, unless that was done. Returns the samples of each row."""
    out, model = run_folder(folder, f"evaluation {name}", seed), model_folder(folder, name, seed)
    start = name if name.startswith(START) else start_of(grid, name)
    file, size = out / "evaluation.json", grid["samples"]
    if not file.is_file():
        if finished_only:
            return None
        sampling = {"eval_rows": 2 * grid["rows"], "samples": size, "seed": EVALUATION_SEED}
        options = flags(grid["options"] | starts_of(grid)[start] | sampling | {"output_dir": out})
        command(["eval", f"model={model}", *settings_of(grid), *options], out.with_suffix(".log"))
    samples = [Sample(**one) for one in json.loads(file.read_text())["evaluations"][0]["samples"]]
    if len(samples) != 2 * grid["rows"] * size:
        raise RuntimeError(f"{file} has {len(samples)} samples, not {2 * grid['rows']} x {size}: remove it")
    return [samples[first : first + size] for first in range(0, len(samples), size)]


def command(words: Sequence[str], log: Path) -> None:
    """Run trl-grpo-tasks; its output is in `log`, whose last lines are in the error if it fails."""
    with open(log, "a") as said:
        code = subprocess.run(
            [sys.executable, "-m", "trl_grpo_tasks.commands.main", *words], stdout=said, stderr=said
        ).returncode
    if code:
        last = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
        raise RuntimeError(f"trl-grpo-tasks {' '.join(words)} failed with exit status {code}; {log} ends with\n{last}")


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def run_folder(folder: Path, name: str, seed: int) -> Path:
    return folder / f"{slug(name)}-{seed}"


def model_folder(folder: Path, name: str, seed: int) -> Path:
    return run_folder(folder, name, seed) / ("cold_start" if name.startswith(START) else "")


def finished(folder: Path, name: str, seed: int) -> dict[str, float]:
    return json.loads((run_folder(folder, name, seed) / DONE_FILE).read_text())


def values_of(rows: Sequence[Sequence[Sample]], components: Sequence[str] = ()) -> dict[str, list[float]]:
    """Compute the metrics of each row; a sample that could not be scored counts as a failure with reward 0."""
    import torch

    success = [[float(bool(s.score and s.score["success"])) for s in row] for row in rows]
    reward = [[float(s.score["total"]) if s.score else 0.0 for s in row] for row in rows]
    half, whole = max(len(rows[0]) // 2, 1), len(rows[0])
    forms = [{s.form or s.completion for s in row if s.score and s.score["valid"]} for row in rows]
    solved = [[s.form or s.completion for s in row if s.score and s.score["success"]] for row in rows]
    found = Counter(itertools.chain.from_iterable(solved))
    return {
        "success": [statistics.fmean(row) for row in success],
        f"pass@{half}": [expected_best(torch.tensor(row), half).item() for row in success],
        f"pass@{whole}": [max(row) for row in success],
        "reward": [statistics.fmean(row) for row in reward],
        f"best of {whole}": [max(row) for row in reward],
        "distinct answers": [len(forms_of_row) / whole for forms_of_row in forms],
        # Each success counts 1 / (successes of all rows with the same answer), so that the sum is their number.
        "distinct successes": [sum(1 / found[form] for form in row) / whole for row in solved],
    } | {
        name: [statistics.fmean(s.score["components"][name] if s.score else 0.0 for s in row) for row in rows]
        for name in components
    }


def values_by(rows: Sequence[Sequence[Sample]], field: str | None) -> dict[str, list[float]]:
    """Compute success and reward of the rows with each value of a field; nothing without one."""
    found: dict[str, list[float]] = {}
    for value in sorted({str(row[0].row[field]) for row in rows}) if field else ():
        same = values_of([row for row in rows if str(row[0].row[field]) == value])
        found |= {f"{value}: {metric}": same[metric] for metric in ("success", "reward")}
    return found


def requests_by(rows: Sequence[Sequence[Sample]], field: str) -> dict[str, list[int]]:
    """Return the number of each row's request for each metric of `values_by`."""
    found: dict[str, list[int]] = {}
    for value in sorted({str(row[0].row[field]) for row in rows}):
        numbers = request_numbers([row for row in rows if str(row[0].row[field]) == value])
        found |= {f"{value}: {metric}": numbers for metric in ("success", "reward")}
    return found


def table(
    rows: dict[str, list[dict[str, list[float]]]],
    baseline: str,
    minutes: dict[str, list[float]],
    requests: dict[str, list[int]],
) -> str:
    """Return the Markdown table of {setting: [{metric: value of each row} of each seed]}; `requests` has the number of
    each row's request by metric. A metric that equals one before it everywhere, as rewards of 0 and 1 equal success,
    has no column."""
    columns = {metric: [seed[metric] for seeds in rows.values() for seed in seeds] for metric in rows[baseline][0]}
    metrics = [m for i, m in enumerate(columns) if columns[m] not in [columns[k] for k in list(columns)[:i]]]
    heads = ["setting", *metrics, *(["minutes"] if minutes else [])]
    lines = [table_line(heads), "|---" * len(heads) + "|"]
    for name, seeds in rows.items():
        cells = [spread([statistics.fmean(seed[metric]) for seed in seeds]) for metric in metrics]
        if name != baseline and not name.startswith(START):
            pairs = [
                gain([seed[metric] for seed in seeds], [seed[metric] for seed in rows[baseline]], requests[metric])
                for metric in metrics
            ]
            cells = [f"{cell}; gain {low:+.3f} to {high:+.3f}" for cell, (low, high) in zip(cells, pairs, strict=True)]
        taken = [spread(minutes[name], 1) if name in minutes else ""] if minutes else []
        lines.append(table_line([name, *cells, *taken]))
    return "\n".join(lines)


def gain(
    ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]], requests: Sequence[int]
) -> tuple[float, float]:
    """The 95% interval of the mean difference, from a bootstrap over seeds and, within a seed, over requests."""
    differences = [np.subtract(a, b) for a, b in zip(ours, theirs, strict=True)]
    generator, seeds, rows = np.random.default_rng(0), len(differences), np.bincount(requests)

    def resampled(values: np.ndarray) -> np.ndarray:
        drawn = generator.multinomial(len(rows), np.full(len(rows), 1 / len(rows)), size=RESAMPLES)
        return drawn @ np.bincount(requests, values) / (drawn @ rows)

    drawn = [
        np.choose(generator.integers(seeds, size=RESAMPLES), list(map(resampled, differences))) for _ in range(seeds)
    ]
    means = np.mean(drawn, axis=0)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


if __name__ == "__main__":
    main()
