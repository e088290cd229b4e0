"""The archive in files and reports: reading of archive.jsonl, charts of distinct successes, the ranked gallery."""

import json
import re

import pytest

from tests.report.test_page import page_of
from tests.support.run_folders import PngTask, before_and_after, rows, write_run
from tests.support.toy import ToyTask
from trl_grpo_tasks.report import archive, gallery
from trl_grpo_tasks.report.archive import ANSWERS_SHOWN, read_answers
from trl_grpo_tasks.report.gallery import Pictures
from trl_grpo_tasks.report.page import write_report


def answer(number, **more):
    row = rows(number + 1)[number]
    text = row["letter"] * (number + 1)
    return {
        "row": row, "completion": text, "canonical": text, "total": 100.0 - number, "first_step": number + 1, "seen": 2
    } | more  # fmt: skip


def write_archive(folder, answers, logged=True):
    (folder / "archive.jsonl").write_text("".join(json.dumps(one) + "\n" for one in answers))
    path = folder / "training_metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines if logged else ():
        line |= {"archive/distinct": 3.0 * line["step"], "archive/new": 3.0}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_distinct_successes_over_time_and_the_best_in_order(tmp_path):
    folder = write_archive(write_run(tmp_path), [answer(i) for i in range(30)])
    page, parsed, text = page_of(folder, PngTask())
    assert "Training rollouts contained 120 distinct successful answers (counted per prompt)." in text
    assert "<code>archive/distinct</code></figcaption><svg" in page and "<title>step 7: 21</title>" in page
    assert parsed.count("figure", "sample") == ANSWERS_SHOWN == page.count("<img ")
    section = page[page.index("<h2>Discoveries") :]
    section = section[: section.index("</section>")]
    assert re.findall(r"reward ([\d.]+)<", section) == [f"{100 - i:.2f}" for i in range(ANSWERS_SHOWN)]
    page, parsed, _ = page_of(write_archive(write_run(tmp_path / "both", evaluations=before_and_after()), [answer(0)]))
    assert page.index("Before and after") < page.index("Discoveries") < page.index("Rewards during training")


def test_the_answers_have_room_on_a_full_page_and_are_bounded(tmp_path, monkeypatch):
    folder = write_archive(write_run(tmp_path, evaluations=before_and_after(PngTask())), [answer(i) for i in range(9)])
    size = len(Pictures(PngTask()).of(archive.as_sample(answer(0))))
    page = write_report(folder, PngTask(), pictures=Pictures(PngTask(), most_bytes=size // 2)).read_text()
    before, _, after = page.partition("<h2>Discoveries")
    assert "<img " not in before and before.count("picture omitted") > 8 and after.count("<img ") == ANSWERS_SHOWN
    monkeypatch.setattr(archive, "MOST_BYTES", 3 * size + size // 2)
    assert page_of(folder, PngTask())[0].partition("<h2>Discoveries")[2].count("<img ") == 3


def test_no_section_without_an_archive_or_for_that_of_an_earlier_run(tmp_path):
    assert "Discoveries" not in page_of(write_run(tmp_path))[0]
    assert "Discoveries" not in page_of(write_archive(tmp_path, [answer(0)], logged=False))[0]
    page, _, text = page_of(write_archive(tmp_path, []))
    assert "Discoveries" in page and "best by" not in text


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"row": {"prompt": "a"}, "compl', "not valid JSON"),
        ("[1]", "its content must be an object"),
        (json.dumps(answer(0, completion=3)), "'completion' must be of type str, not 3"),
        (json.dumps(answer(0, total="best")), "'total' must be of type int | float, not 'best'"),
        (json.dumps(answer(0, first_step=float("nan"))), "not valid JSON (NaN is not a number)"),
        (json.dumps(answer(0, row={"prompt": 3})), "'prompt' must be of type str | list, not 3"),
        ("[" * 100_000, "not valid JSON"),
        ("\udcff", "not valid JSON"),
    ],
)
def test_a_damaged_file_is_an_error_with_the_line(tmp_path, line, problem):
    text = json.dumps(answer(1)) + "\n" + line + "\n"
    (tmp_path / "archive.jsonl").write_text(text, errors="surrogateescape")
    with pytest.raises(ValueError, match=r"archive\.jsonl, line 2: .*resume the run") as raised:
        read_answers(tmp_path)
    assert problem in str(raised.value)
    assert read_answers(tmp_path, 1) == [answer(1)]


def test_kept_pictures_are_bounded(monkeypatch):
    monkeypatch.setattr(gallery, "MOST_KEPT", 3)
    pictures, drawn = Pictures(ToyTask()), []
    monkeypatch.setattr(pictures, "_draw", lambda sample: drawn.append(sample["completion"]) or sample["completion"])
    for text in ("a", "b", "c", "a", "d", "a", "b"):  # b is dropped for d, because a was used after it
        assert pictures.drawn({"row": {}, "completion": text}) == text
    assert drawn == ["a", "b", "c", "d", "b"] and len(pictures._drawn) == 3
