"""Folders that tests read."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"  # includes reference answers that were computed without this project's code
RECIPES = ROOT / "trl_grpo_tasks" / "recipes"
SHARED = ROOT.parent / "shared"  # beside some clones; tests that read it are skipped where it is missing
