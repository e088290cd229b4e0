"""Recipes: files of options that ship with the package and are found by name, such as brick/demo."""

from __future__ import annotations

from pathlib import Path

from ..task import nearest

FOLDER = Path(__file__).parents[1] / "recipes"


def recipe_names() -> list[str]:
    return sorted(path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.glob("*/*.yaml"))


def find_recipe(given: str) -> Path:
    """The file that `--config` names: a path to a YAML file, or the name of a recipe in the package."""
    path = Path(given)
    if path.is_file():
        return path
    names = recipe_names()
    if given in names:
        return FOLDER / f"{given}.yaml"
    raise ValueError(
        f"--config {given}: there is no such file or recipe{nearest(given, names)}; recipes are: {', '.join(names)}"
    )
