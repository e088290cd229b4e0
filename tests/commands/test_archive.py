"""`trl-grpo-tasks export --archive`: its table, its files, and folders that are not to be trusted."""

import csv
import json

import pytest

from tests.report.test_archive import answer, write_archive
from tests.support.run_folders import write_run
from trl_grpo_tasks.commands.main import main
from trl_grpo_tasks.registry import get_task


def said(capsys, *words):
    first, *rest = map(str, words or ("",))
    code = main(["export", *([first, "--archive"] if first else []), *rest])
    return code, *capsys.readouterr()


@pytest.fixture
def toy_run(tmp_path):
    return write_archive(write_run(tmp_path / "run"), [answer(i) for i in range(30)])


@pytest.fixture
def brick_run(tmp_path):
    """A run of the task brick, with two of its gold answers."""
    folder, task = write_run(tmp_path / "brick"), get_task("brick")
    settings = {"task": {"name": "brick", "version": task.version, "options": {}}, "run": {"task": "brick"}}
    (folder / "settings.json").write_text(json.dumps(settings))
    stored = [
        answer(i, row=row, completion=task.gold(row), canonical=task.canonical(row, task.gold(row)))
        for i, row in enumerate(task.dataset("train", 2, 0))
    ]
    return write_archive(folder, stored)


def test_the_table_has_the_best_in_order(toy_run, tmp_path, capsys):
    code, out, err = said(capsys, toy_run, "--top", 3)
    head, columns, *lines = out.splitlines()
    assert (code, err) == (0, "")
    assert head == "120 distinct successful answers, 30 of them stored; the best 3:"
    assert columns.split() == ["number", "score", "seen", "step", "prompt", "answer"]
    assert [line.split() for line in lines] == [
        ["1", "100", "2", "1", "a0x", "a"], ["2", "99", "2", "2", "b1x", "bb"], ["3", "98", "2", "3", "c2x", "ccc"]
    ]  # fmt: skip
    assert len(said(capsys, toy_run)[1].splitlines()) == 22
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"], "without --out nothing is written"


def test_files_of_a_built_in_task(brick_run, tmp_path, capsys):
    code, out, err = said(capsys, brick_run, "--out", tmp_path / "out")
    assert (code, err) == (0, "") and out.endswith(f"files of 2 answers: {tmp_path / 'out'}\n")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    kinds = ("sample_{}.txt", "sample_{}.png", "sample_{}.ldr")
    assert names == {"answers.jsonl"} | {kind.format(rank) for kind in kinds for rank in (1, 2)}
    stored = [json.loads(line) for line in (brick_run / "archive.jsonl").read_text().splitlines()]
    written = [json.loads(line) for line in (tmp_path / "out" / "answers.jsonl").read_text().splitlines()]
    assert written == [{"number": rank} | one for rank, one in enumerate(stored, 1)]
    task = get_task("brick")
    for rank, one in enumerate(stored, 1):
        assert (tmp_path / "out" / f"sample_{rank}.txt").read_text() == one["completion"]
        files = task.exports(one["row"], one["completion"])
        assert (tmp_path / "out" / f"sample_{rank}.ldr").read_text() == files["sample.ldr"]
        assert (tmp_path / "out" / f"sample_{rank}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("text", ['a,"a"\nb', "=1+1", "+1", "-1", "@SUM(A1)", "\t=1"])
def test_formulas_in_a_csv_do_not_run(toy_run, tmp_path, capsys, text):
    row = {"prompt": [{"role": "user", "content": "one\ntwo"}]}
    write_archive(toy_run, [answer(0, completion=text, row=row)])
    words = ("--out", tmp_path / "out", "--format", "csv", "--task", "tests.support.toy")
    assert said(capsys, toy_run, *words)[0] == 0
    with open(tmp_path / "out" / "answers.csv", newline="") as file:
        (line,) = csv.DictReader(file)
    assert line == {
        "number": "1", "total": "100.0", "seen": "2", "first_step": "1", "prompt": "one two",
        "completion": text if text[0] == "a" else f"'{text}", "canonical": "a",
    }  # fmt: skip


def test_code_that_the_folder_names_is_not_run(toy_run, tmp_path, capsys):
    words = (toy_run, "--out", tmp_path / "out")
    code, _, err = said(capsys, *words)
    assert code == 2 and "names code to run or files to write (the task)" in err and len(err.splitlines()) == 1
    assert f"trl-grpo-tasks export {toy_run} --archive --out {tmp_path / 'out'} --task tests.support.toy" in err
    assert not (tmp_path / "out").exists()
    assert said(capsys, *words, "--task", "tests.support.toy")[0] == 0
    assert len(list((tmp_path / "out").glob("sample_*.html"))) == 20


def test_control_characters_are_escaped(toy_run, capsys):
    clear = "\x1b[2J\x07"
    write_archive(toy_run, [answer(0, completion=f"a{clear}", row={"prompt": f"b{clear}\ud800"})])
    out = said(capsys, toy_run)[1]
    assert "\x1b" not in out and "\x07" not in out and out.count("\\x1b[2J\\x07") == 2 and "\\ud800" in out


def test_rows_that_the_task_never_made(brick_run, tmp_path, capsys):
    """The other answers are exported, and the message is safe to print."""
    stored = [json.loads(line) for line in (brick_run / "archive.jsonl").read_text().splitlines()]
    write_archive(brick_run, [answer(0, row={"prompt": "x", "world": "\x1b"}), *stored])
    code, out, _ = said(capsys, brick_run, "--out", tmp_path / "out")
    assert code == 0 and "answer 1: no files (" in out and "\x1b" not in out
    assert (tmp_path / "out" / "sample_1.txt").is_file() and (tmp_path / "out" / "sample_2.ldr").is_file()
    assert not (tmp_path / "out" / "sample_1.ldr").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["RUN", "--top", "0"], "--top 0 must be at least 1"),
        (["RUN", "--format", "xml"], "xml"),
        (["RUN", "--out", "RUN/archive.jsonl"], "--out "),
        (["RUN/archive.jsonl"], "archive.jsonl is a file; give the folder of a run"),
    ],
)
def test_mistakes_are_one_line(toy_run, capsys, words, message):
    code, _, err = said(capsys, *(word.replace("RUN", str(toy_run)) for word in words))
    assert code == 2 and message in err and len(err.splitlines()) == 1


def test_a_run_without_an_archive_and_one_that_is_damaged(toy_run, capsys):
    (toy_run / "archive.jsonl").write_text("{}\n")
    code, _, err = said(capsys, toy_run)
    assert code == 2 and "archive.jsonl, line 1: 'row' must be an object, not None" in err, err
    assert len(err.splitlines()) == 1
    (toy_run / "archive.jsonl").unlink()
    code, _, err = said(capsys, toy_run)
    assert code == 2 and "has no archive.jsonl; train with --archive 1000 to get one" in err
