"""The page that compares runs."""

import pytest

from tests.report.test_page import found_in, needs_browser
from tests.support.commands import refused
from tests.support.run_folders import before_and_after, edited, write_run
from trl_grpo_tasks.commands.main import main
from trl_grpo_tasks.report.comparison import write_comparison


@pytest.fixture
def two_runs(tmp_path):
    first = write_run(tmp_path / "first", evaluations=before_and_after(), steps=40)
    second = write_run(tmp_path / "second", evaluations=before_and_after(), steps=25, finished=False)
    with edited(second / "settings.json") as settings:
        settings["training"] |= {"learning_rate": 0.5, "output_dir": "elsewhere"}
        settings["model"]["name"] = "<b>other</b>"
    (first / "report.html").write_text("report")
    return first, second


def test_two_runs_on_one_page(tmp_path, two_runs):
    page = write_comparison(two_runs, tmp_path / "pages" / "comparison.html").read_text()
    assert "<a href='../first/report.html'>first</a>" in page and ">second <span" in page
    assert "finished: step 40" in page and "not finished: step 25" in page

    assert "<title>first, step 40: 0.865" in page and "<title>second, step 25: 0.713" in page
    table = page[page.index("Settings that differ") :]
    assert "training.learning_rate</td><td>0.001</td><td>0.5" in table
    assert "&lt;b&gt;other&lt;/b&gt;" in table and "<b>other</b>" not in page
    assert "output_dir" not in table and "max_steps" not in table
    assert "same prompts" in page


def test_evaluations_on_other_prompts_are_said_not_to_be_comparable(tmp_path, two_runs):
    write_run(tmp_path / "third", evaluations=before_and_after(count=18))
    page = write_comparison([two_runs[0], tmp_path / "third"], tmp_path / "page.html").read_text()
    assert "not comparable" in page


def test_folders_of_the_same_name_are_told_apart_and_the_command_writes_the_page(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [write_run(tmp_path / name / "run") for name in "ab"]
    assert main(["report", *map(str, runs)]) == 0
    assert capsys.readouterr().out == "comparison.html\n"
    page = (tmp_path / "comparison.html").read_text()
    assert all(f"{run} <span" in page for run in runs)
    # Without an evaluation, runs are compared by their curves.
    assert "<code>reward</code>" in page and "held-out" not in page and "<p class=soft>None.</p>" in page


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["first", "first"], "first is given twice"),
        (["first", "missing"], "missing: folder not found"),
        (["first", "empty"], "empty is not a run folder"),
        (["first"] * 7, "7 runs cannot be compared on one page; give 2 to 6"),
        (["first", "--out", "x.html"], "--out is for a page that compares several runs"),
        (["first", "second", "--brick_levels", "carry"], "--brick_levels"),
    ],
)
def test_wrong_words_are_refused_in_one_line(tmp_path, two_runs, capsys, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert said in refused(capsys, "report", *words) and not (tmp_path / "comparison.html").exists()


@needs_browser
@pytest.mark.parametrize("width", [1200, 390])
def test_a_browser_shows_the_page(tmp_path, two_runs, width):
    page = write_comparison(two_runs, tmp_path / "page.html")
    probe = (
        "<script>document.body.dataset.found=document.documentElement.scrollWidth"
        "-document.documentElement.clientWidth</script></body>"
    )
    page.write_text(page.read_text().replace("</body>", probe))
    assert found_in(page, tmp_path, width) == 0
