"""The task pages of the documentation agree with the code; the READMEs of the task folders are short and complete."""

import importlib
import re
import sys
from pathlib import Path

import pytest

from trl_grpo_tasks.commands.recipes import expected_result, expected_results, recipe_names
from trl_grpo_tasks.registry import TASKS, find_task_class, get_task

ROOT = Path(__file__).parent.parent
NAMES = sorted(TASKS)


@pytest.fixture(scope="module")
def generator():
    sys.path.insert(0, str(ROOT / "docs"))
    yield importlib.import_module("make_task_pages")
    sys.path.remove(str(ROOT / "docs"))


def page(name):
    return (ROOT / "docs" / "tasks" / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_tables_are_those_of_the_code(name, generator):
    assert generator.updated(page(name)) == page(name), "run: python docs/make_task_pages.py"


def test_every_generated_block_is_on_a_page_and_those_of_a_task_on_its_own(generator):
    for name in NAMES:
        wanted = [block for block in generator.BLOCKS if block.startswith(f"{name}.")]
        assert sorted(generator.block_names(page(name))) == sorted(wanted)
    written = [block for path in generator.FILES for block in generator.block_names(path.read_text(encoding="utf-8"))]
    assert set(generator.BLOCKS) - set(written) == {"reference.command_screens"}, "which is the whole of commands.txt"


def test_an_outdated_page_is_found(generator, tmp_path, monkeypatch):
    monkeypatch.setattr(generator, "FILES", [tmp_path / "machine.md"])
    (tmp_path / "machine.md").write_text("# x\n\n<!-- generated: machine.levels -->\nstale\n<!-- end -->\n\nrest\n")
    assert generator.main(["--check"]) == 1
    assert generator.main([]) == 0 and generator.main(["--check"]) == 0
    written = (tmp_path / "machine.md").read_text()
    assert "`small`" in written and "stale" not in written and written.endswith("<!-- end -->\n\nrest\n")


def test_generated_parts_of_other_files_are_up_to_date(generator):
    """The reference; expected results in README, quickstart, READMEs of tasks and comments of recipes."""
    written = [path for path in generator.FILES if path.parent.name != "tasks"]
    assert {ROOT / "README.md", ROOT / "docs/start/quickstart.md"} < set(written)
    for path in written:
        text = path.read_text(encoding="utf-8")
        assert generator.regenerated(path, text) == text, f"{path}: run python docs/make_task_pages.py"


def test_results_of_recipes_are_not_written_by_hand(generator):
    for path in generator.FILES:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".yaml":
            text = re.sub(r"# Expected: .*\n(#   .*\n)*", "", text)
        elif path.name == "README.md":
            text = re.sub(r"<!-- (expected|output): .*?<!-- end -->|```.*?```", "", text, flags=re.DOTALL)
        else:
            continue
        found = re.search(r"\d%? (→|->) \d.*|(rises|rose|falls|fell) from [\d.]+.*|\b\d+ min(utes)?\b.*", text)
        assert found is None, f"{path}: {found[0]!r} belongs into trl_grpo_tasks/recipes/expected.yaml"


def test_entries_of_expected_results():
    entries = expected_results()
    assert set(TASKS) <= set(entries) <= {*TASKS, *recipe_names()}
    for name, entry in entries.items():
        assert set(entry) <= {"results", "seeds", "hardware", "minutes", "commit", "note", "output"}, name
        for measure, (before, after) in entry.get("results", {}).items():
            assert f"{measure} {before} -> {after}" in expected_result(name)
            row = re.search(
                rf"^{re.escape(measure)} +([\d.]+) \S+ \S+ +([\d.]+) ", entry.get("output", ""), re.MULTILINE
            )
            shares = [] if row is None else [f"{100 * float(share):.1f}%" for share in row.groups()]
            assert shares in ([], [before, after]), f"{name}: {measure} differs from the output"
        assert "results" not in entry or {"seeds", "hardware"} <= set(entry), name


@pytest.mark.parametrize("name", NAMES)
def test_the_page_has_what_a_reader_looks_for(name):
    text = page(name)
    for section in ("Try it", "What the model reads and writes", "Score", "Options", "Constraint", "Data splits",
                    "Recipes", "Tools", "Limitations", "References"):  # fmt: skip
        assert f"\n## {section}\n" in text, section
    assert f"](../results/{name}.md)" in text and (ROOT / "docs" / "results" / f"{name}.md").is_file()
    task = get_task(name)
    for tool in getattr(task, "tools", ()):
        assert f"trl-grpo-tasks tool {name} {tool}" in text, tool
    for editor in getattr(task, "editors", ()):
        assert f"| `{editor}` |" in text, editor
    for component, weight in task.weights.items():
        assert f"`{component}`" in text, component
        assert name != "brick" or f"| `{component}` | {weight} |" in text, component
    for option in find_task_class(name).Options.__dataclass_fields__:
        assert f"`--{option}`" in text, option


@pytest.mark.parametrize("name", NAMES)
def test_the_readme_of_a_task_fits_a_page(name):
    folder = ROOT / "trl_grpo_tasks" / "tasks" / name
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 45 and len(text.split()) <= 350
    assert f"](../../../docs/tasks/{name}.md)" in text and f"](../../../docs/results/{name}.md)" in text
    for file in sorted(folder.rglob("*.py")):
        name = file.relative_to(folder).as_posix()
        assert f"`{name}`" in text or file.name == "__init__.py", name
