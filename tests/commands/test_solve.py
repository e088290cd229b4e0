"""`trl-grpo-tasks solve`: exit status, files that other commands read, requests from files, mistakes in one line."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.support.commands import refused, said
from trl_grpo_tasks.commands.solve import counted
from trl_grpo_tasks.evaluation import solver as module
from trl_grpo_tasks.registry import TASKS, get_task
from trl_grpo_tasks.task import checked_row

TINY = ("tiny", "--task", "my_task.py", "--max_completion_length", "4")


@pytest.fixture
def easy(my_task):
    """The task of `new`, which accepts any answer to a word of x, none to one of y, and cannot score one to z."""
    text = my_task.read_text()
    scored = "    def score(self, row, completion):\n"
    assert scored in text
    more = '        if row["word"] == "z":\n            return None\n'
    more += '        if row["word"][0] in "xy":\n'
    more += '            accepted = row["word"][0] == "x"\n'
    more += '            return self.make_score({}, True, accepted, "" if accepted else "never")\n'
    my_task.write_text(text.replace(scored, scored + more))
    return my_task


def test_solved_requests_exit_with_0_and_leave_files_that_other_commands_read(easy, capsys):
    code, out, err = said(capsys, "solve", *TINY, "--text", "xab", "--samples", 16, "--top", 2)
    assert code == 0 and err == "" and out.splitlines()[0] == "request 1: xab"
    assert "  solved (8 samples, " in out and out.endswith("1 of 1 request solved; files: solved\n")
    answers = [json.loads(line) for line in Path("solved/answers.jsonl").read_text().splitlines()]
    assert [(a["number"], a["request"], a["rank"]) for a in answers] == [(1, 1, 1), (2, 1, 2)]
    assert all(answer["success"] for answer in answers)
    for answer in answers:
        assert Path(f"solved/sample_{answer['number']}.txt").read_text() == answer["completion"]
        assert Path(f"solved/sample_{answer['number']}.html").is_file()
    assert answers[0]["row"]["word"] == "xab"
    code, out, _ = said(capsys, "tool", "my_task.py", "score", "--input", "solved/answers.jsonl")
    assert code == 0 and [json.loads(line)["success"] for line in out.splitlines()] == [True, True]
    code, out, _ = said(capsys, "export", "solved/answers.jsonl", "--task", "my_task.py", "--out", "again")
    assert code == 0 and Path("again/sample_2.txt").read_text() == answers[1]["completion"]


def test_a_file_of_requests_exits_with_1_unless_all_are_solved(easy, capsys):
    Path("in.jsonl").write_text('{"text": "x"}\n\n{"text": "y"}\n{"prompt": "zzz", "word": "z"}\n')
    code, out, err = said(capsys, "solve", *TINY, "--requests", "in.jsonl", "--samples", 9, "--top", 1)
    assert code == 1 and err == "" and out.endswith("1 of 3 requests solved; files: solved\n")
    assert "  not solved: 9 samples were drawn (9 samples, " in out and "  failures: 9 x never\n" in out
    assert 'request 3: {"prompt": "zzz", "word": "z"}\n' in out
    assert "  could not be scored: 9 x the task returned None" in out
    answers = [json.loads(line) for line in Path("solved/answers.jsonl").read_text().splitlines()]
    assert f"  1. {answers[2]['completion'].strip()!r}; could not be scored: the task returned None" in out
    assert [(a["request"], a["success"], a["reason"][:5]) for a in answers] == [
        (1, True, ""), (2, False, "never"), (3, None, "the t")
    ]  # fmt: skip
    assert sorted(path.name for path in Path("solved").glob("*.txt")) == [f"sample_{n}.txt" for n in (1, 2, 3)]


def test_files_of_an_earlier_command_are_replaced_and_others_stay(easy, capsys):
    Path("in.txt").write_text("x\nxa\nxb\n")
    assert said(capsys, "solve", *TINY, "--requests", "in.txt", "--top", 1)[0] == 0
    Path("solved/notes_3.txt").write_text("mine")
    assert said(capsys, "solve", *TINY, "--text", "x", "--top", 1)[0] == 0
    (answer,) = [json.loads(line) for line in Path("solved/answers.jsonl").read_text().splitlines()]
    assert answer["files"] == ["sample_1.txt", "sample_1.html"]
    assert {path.name for path in Path("solved").iterdir() if path.is_file()} == {
        *answer["files"], "answers.jsonl", "notes_3.txt"
    }  # fmt: skip
    # A table that names files elsewhere, or is no table, removes nothing.
    for text in ('{"files": ["../in.txt", 3, "/etc"]}\n{"files": 1}\n[]\n', "not JSON"):
        Path("solved/answers.jsonl").write_text(text)
        assert said(capsys, "solve", *TINY, "--text", "x", "--top", 1)[0] == 0
        assert Path("in.txt").is_file() and Path("solved/notes_3.txt").is_file()


def test_an_interrupted_command_leaves_what_it_has_found(easy, capsys, monkeypatch):
    Path("in.txt").write_text("x\nxa\nxb\n")
    answer, asked = module.Solver.__call__, []

    def interrupted(self, row, *budget):
        asked.append(row)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return answer(self, row, *budget)

    monkeypatch.setattr(module.Solver, "__call__", interrupted)
    code, out, err = said(capsys, "solve", *TINY, "--requests", "in.txt", "--top", 1)
    assert code == 130 and err == ""
    assert out.endswith("interrupted at request 3; 2 of 3 requests solved; files: solved\n")
    assert len(Path("solved/answers.jsonl").read_text().splitlines()) == 2


def test_what_cannot_be_judged_is_said_and_not_a_success_and_hostile_text_is_printed_safely(easy, capsys):
    easy.write_text(
        easy.read_text() + "\n    def unverifiable(self, row):\n        return 'the word is \\x1b[31m secret'\n"
    )
    Path("in.txt").write_text("x\x1b]0;title\x07\u202e\u2028x\n")
    code, out, _ = said(capsys, "solve", *TINY, "--requests", "in.txt", "--samples", 8)
    assert code == 1 and "  cannot be judged: the word is \\x1b[31m secret (8 samples, " in out
    assert "success" not in out and "0 of 1 request solved" in out
    assert out.splitlines()[0] == r"request 1: x\x1b]0;title\x07\u202e\u2028x"
    assert all(character.isprintable() for line in out.split("\n") for character in line)


def test_reasons_that_differ_in_numbers_count_together():
    reasons = Counter({"an IoU of 0.46; success needs 0.8": 8, "an IoU of 0.7; success needs 0.8": 7, "1 loose": 9})
    assert counted(reasons) == "15 x an IoU of ...; success needs 0.8; 9 x 1 loose"
    reasons = Counter({"a": 4, "b": 3, "c1": 1, "c2": 1, "d": 1, "12 3": 1, "1 23": 1})
    assert counted(reasons) == "4 x a; 3 x b; 2 x c...; and 2 other reasons"
    assert counted(Counter({"": 2, "ab": 1, "a1b": 1})) == "2 x ; 1 x ab; 1 x a1b"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "there is no request; give one of --text TEXT, --requests FILE and --row JSON"),
        (("--text", "a", "--row", "{}"), "--text and --row exclude each other"),
        (("--row", "{"), "--row: not JSON"),
        (("--row", "[1]"), "--row: must be a row"),
        (("--row", '{"word": "a"}'), "--row: a row needs a 'prompt'"),
        (("--requests", "none.txt"), "--requests none.txt: this file does not exist"),
        (("--requests", "my_task.py"), "the name must end in .txt or .jsonl"),
        (("--requests", "empty.txt"), "contains no request"),
        (("--requests", "bad.jsonl"), "bad.jsonl, line 3: not JSON"),
        (("--requests", "text.jsonl"), "text.jsonl, line 1: a row needs a 'prompt'"),
        (("--text", "a", "--sample", "3"), "unknown option --sample; did you mean --samples?"),
        (("--text", "a", "--top", "0"), "--top 0 must be at least 1"),
        (("--text", "a", "--seconds", "0"), "--seconds 0 must be more than 0"),
        (("--text", "a", "--out", "my_task.py"), "--out my_task.py"),
        (("--text", "a", "--all", "--seconds", "1"), "--all draws a fixed number; give one of them"),
        (("--text", "a", "--reward_timeout", "0"), "--reward_timeout 0"),
        (("--text", "a", "--editor", "x"), "has no editors"),
        (("--text", "a", "--vllm_server_url", "here"), "give an address such as"),
    ],
)
def test_mistakes_are_one_line_before_the_model_is_loaded(my_task, capsys, monkeypatch, words, message):
    monkeypatch.setattr(module, "load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    Path("empty.txt").write_text("\n \n")
    Path("bad.jsonl").write_text('{"text": "ab"}\n\nnot JSON\n')
    Path("text.jsonl").write_text('{"text": 3}\n')
    assert message in refused(capsys, "solve", *TINY, *words)


def test_a_text_that_is_not_understood_names_its_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("in.txt").write_text("a car\na poem\n")
    code, _, err = said(capsys, "solve", "tiny", "--task", "machine", "--requests", "in.txt")
    assert code == 2 and "in.txt, line 2: 'a poem' is not understood" in err and not Path("solved").exists()


@pytest.mark.parametrize("name", sorted(TASKS))
def test_a_row_with_nothing_but_a_prompt_is_refused_or_can_be_used(name):
    task = get_task(name)
    try:
        row = checked_row(task, {"prompt": "x"})
    except ValueError as error:
        assert "row" in str(error) or "prompt" in str(error)
    else:
        assert isinstance(task.canonical(row, "y"), str) and isinstance(task.unverifiable(row), str)
