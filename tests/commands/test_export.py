"""`trl-grpo-tasks export`: files of a run's samples and of answers from files, and wrong options."""

import json

import pytest

from tests.support.commands import refused, said
from tests.support.run_folders import before_and_after, write_run
from tests.support.toy import ToyTask
from trl_grpo_tasks.registry import get_task
from trl_grpo_tasks.report.page import write_report

TOY = ("--task", "tests.support.toy")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def toy_run(tmp_path):
    return write_run(tmp_path / "run", evaluations=before_and_after())


def test_the_best_samples_of_a_run(toy_run, capsys):
    code, out, err = said(capsys, "export", toy_run, "--top", 3, *TOY)
    folder = toy_run / "exports"
    assert (code, err) == (0, "") and out == f"files of 3 answers: {folder}\n"
    assert names(folder) == ["answers.jsonl", *(f"sample_{n}.{kind}" for n in (1, 2, 3) for kind in ("html", "txt"))]
    samples = json.loads((toy_run / "results.json").read_text())["evaluations"][1]["samples"]
    best = sorted({(-s["score"]["success"], -s["score"]["total"]) for s in samples})[0]
    for number, line in enumerate((folder / "answers.jsonl").read_text().splitlines(), 1):
        answer = json.loads(line)
        score = ToyTask().score(answer["row"], answer["completion"])
        assert answer["number"] == number and (-score.success, -score.total) == best
        assert (folder / f"sample_{number}.txt").read_text() == answer["completion"]
        assert answer["completion"] in (folder / f"sample_{number}.html").read_text()


def test_an_answer_from_a_file(tmp_path, capsys):
    task = get_task("brick")
    (tmp_path / "table.txt").write_text("2x4 (0,0,0)\n2x2 (0,1,1)\n")
    words = ("--task", "brick", "--text", "a table, world 8", "--out", tmp_path / "out", "--prompt_style", "full")
    code, out, err = said(capsys, "export", tmp_path / "table.txt", *words)
    assert (code, err) == (0, "") and out == f"files of 1 answer: {tmp_path / 'out'}\n"
    kinds = ["sample_1.ldr", "sample_1.png", "sample_1.txt"]
    assert names(tmp_path / "out") == ["answers.jsonl", *kinds]
    files = task.exports(task.row_of("a table, world 8"), "2x4 (0,0,0)\n2x2 (0,1,1)\n")
    assert (tmp_path / "out" / "sample_1.ldr").read_text() == files["sample.ldr"]


@pytest.mark.exhaustive
def test_answers_from_a_jsonl_file(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    task = get_task("machine")
    (row,) = task.dataset("test", 1, 0)
    lines = [{"row": row, "completion": task.gold(row)}, {"row": {"prompt": "\x1b"}, "completion": task.gold(row)}]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    code, out, _ = said(capsys, "export", "in.jsonl", "--task", "machine")
    assert code == 0 and "answer 2: no files (KeyError" in out and out.endswith("files of 2 answers: exports\n")
    assert {"machine_1.xml", "film_1.gif", "sample_2.txt"} <= set(names(tmp_path / "exports"))
    assert "machine_2.xml" not in names(tmp_path / "exports")
    again = said(capsys, "export", "exports/answers.jsonl", "--task", "machine", "--out", "again")
    assert again[0] == 0 and (tmp_path / "again" / "machine_1.json").is_file(), "it reads what it wrote"


def test_the_report_links_to_the_files(toy_run, capsys):
    assert "Exported files" not in write_report(toy_run, ToyTask()).read_text()
    said(capsys, "export", toy_run, "--top", 2, *TOY)
    (toy_run / "exports" / "a'<b>_1.txt").write_text("x")
    text = write_report(toy_run, ToyTask()).read_text()
    assert "<a href='exports/sample_2.html'>sample_2.html</a>, <a href='exports/sample_2.txt'>" in text
    assert "<a href='exports/a%27%3Cb%3E_1.txt'>a&#39;&lt;b&gt;_1.txt</a>" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none"], "none: there is no such run folder or file"),
        ([], "give RUN_OR_FILE"),
        (["RUN", "--top", "0", *TOY], "--top 0 must be at least 1"),
        (["RUN", "--text", "a"], "--text is for a file with one answer"),
        (["RUN/results.json"], "name a task: trl-grpo-tasks export FILE --task TASK"),
        (["RUN/results.json", "--task", "brick"], "is an answer without a prompt; add --text"),
        (["RUN/in.jsonl", "--task", "brick"], "in.jsonl, line 2: must be an object with"),
        (["RUN/in.jsonl", "--task", "brick", "--text", "a"], "the lines of a .jsonl file have their own rows"),
        (["RUN", *TOY, "--out", "RUN/results.json"], "--out "),
        (["EMPTY", *TOY], "has no evaluation yet"),
    ],
)
def test_mistakes_are_one_line(toy_run, tmp_path, capsys, words, message):
    (toy_run / "in.jsonl").write_text('{"row": {}, "completion": ""}\n{}\n')
    empty = write_run(tmp_path / "empty")
    err = refused(
        capsys, "export", *(word.replace("RUN", str(toy_run)).replace("EMPTY", str(empty)) for word in words)
    )
    assert message in err
