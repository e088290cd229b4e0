"""Recipes: YAML files with options. Those that ship with the package are found by name, such as brick/single_gpu."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from ..files import read_yaml
from ..task import nearest

FOLDER = Path(__file__).parents[1] / "recipes"


def recipe_names(task: str | None = None) -> list[str]:
    """The names of all recipes, or of those of one task."""
    found = FOLDER.glob(f"{task or '*'}/*.yaml")
    return sorted(path.relative_to(FOLDER).with_suffix("").as_posix() for path in found)


def describe_recipe(name: str) -> str:
    """The comment in the first line of a recipe, which says what it trains on which machine."""
    first = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").partition("\n")[0]
    return first.lstrip("# ").rstrip(".:") if first.startswith("#") else ""


@functools.cache
def expected_results() -> dict[str, dict[str, Any]]:
    """The expected results of recipes, and of tasks without a recipe, by name; the file says what an entry holds."""
    return read_yaml(FOLDER / "expected.yaml", "expected results")


def expected_result(name: str) -> str:
    """What a recipe, or a task without a recipe, is expected to give on held-out rows, in one line.

    >>> expected_result("theory/paper")
    'success 11% -> 87% (one seed; H200, 7 min; in 221 of its 1,000 steps)'
    """
    entry = expected_results().get(name, {})
    if "results" not in entry:
        return entry.get("note", "not measured")
    results = ", ".join(f"{measure} {before} -> {after}" for measure, (before, after) in entry["results"].items())
    commit = f"commit {entry['commit']}" if "commit" in entry else None
    about = (entry["seeds"], expected_time(name), commit, entry.get("note"))
    return f"{results} ({'; '.join(filter(None, about))})"


def expected_time(name: str) -> str:
    """The hardware on which the expected result was measured, and the minutes that it took where they are recorded."""
    entry = expected_results().get(name, {})
    minutes = f", {entry['minutes']} min" if "minutes" in entry else ""
    return f"{entry['hardware']}{minutes}" if "hardware" in entry else "not measured"


def find_recipe(given: str) -> Path:
    """The file that `--config` names: a path to a YAML file, or the name of a recipe in the package."""
    path = Path(given).expanduser()
    if path.is_file():
        return path
    names = recipe_names()
    if given in names:
        return FOLDER / f"{given}.yaml"
    if path.suffix in (".yaml", ".yml"):
        beside = path.parent.iterdir() if path.parent.is_dir() else ()
        hint = nearest(path.name, [one.name for one in beside])
        by_name = path.with_suffix("").as_posix().removeprefix("recipes/")
        known = f"; the recipe of the package is --config {by_name}" if by_name in names else ""
        raise ValueError(f"--config {given}: this file does not exist{hint}{known}")
    # A name without its task, such as single_gpu, is near to nothing.
    same = [name for name in names if name.split("/")[1] == given]
    raise ValueError(
        f"--config {given}: there is no recipe of this name{nearest(given, names)}; recipes are: "
        f"{', '.join(same or names)}; or give a YAML file"
    )


def read_recipe(path: str) -> dict[str, Any]:
    """The options in a recipe file. They are read before the parser is built, because the task may be among them."""
    values = read_yaml(path, "--config")
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise ValueError(f"--config {path} must hold options as 'name: value' lines")
    return values


def check_recipe_value(action: Any, value: Any) -> None:
    """argparse converts and checks text only; numbers, lists and booleans from YAML are checked here."""
    if value is None or (isinstance(value, str) and action.nargs != "+"):
        return
    kinds = {"int": (int, "a whole number"), "float": ((int, float), "a number"), "string_to_bool": (bool, "a bool")}
    kind: Any
    kind, words = kinds.get(getattr(action.type, "__name__", ""), (object, "anything"))
    if action.nargs == "+":
        fits, words = isinstance(value, list), "a list"
    else:
        fits = isinstance(value, kind) and (kind in (bool, object) or not isinstance(value, bool))
    if not fits:
        raise ValueError(f"--config: {action.dest}: {value!r:.200} must be {words}")
