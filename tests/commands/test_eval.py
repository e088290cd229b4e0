"""`trl-grpo-tasks eval`: models and files of completions side by side, and what it refuses before it starts."""

import json
from pathlib import Path

import pytest

from tests.support.commands import refused
from tests.support.run_folders import write_run
from tests.support.toy import ToyTask
from trl_grpo_tasks.commands import main as cli
from trl_grpo_tasks.commands.arguments import parse
from trl_grpo_tasks.models.tiny import save_tiny
from trl_grpo_tasks.registry import get_task

ROWS = ToyTask().dataset("test", 5, 0)  # two rows, one three times and one twice
BASE = ["--task", "tests.support.toy", "--use_cpu", "true", "--eval_rows", "5", "--reward_workers", "0"]


def write_lines(path, entries):
    path.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    return str(path)


def golds(path, each=2, **more):
    return write_lines(path, [{"row": row, "completion": row["letter"], **more} for row in ROWS for _ in range(each)])


def run(tmp_path, *words):
    assert cli.main(["eval", *words, *BASE, "--out", str(tmp_path / "out")]) == 0
    results = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    return results, {one["name"]: one for one in results["evaluations"]}


@pytest.fixture(scope="module")
def other_path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("other")
    save_tiny(ToyTask().tiny(), folder, seed=2)
    return str(folder)


def test_models_and_files_side_by_side(tiny_path, other_path, tmp_path, capsys):
    file = golds(tmp_path / "gold.jsonl", each=3, tokens=2, cut_off=False)
    words = [f"base={tiny_path}", other_path, file, "--samples", "4", "--constrain"]
    results, found = run(tmp_path, *words)
    assert list(found) == ["base", Path(other_path).name, "gold"]
    assert [one["model"] for one in found.values()] == [tiny_path, other_path, file]
    base, other, gold = found.values()
    assert [len(one["samples"]) for one in found.values()] == [20, 20, 15]
    assert {s["completion"] for s in base["samples"]} != {s["completion"] for s in other["samples"]}
    assert base["metrics"]["valid"] == other["metrics"]["valid"] == gold["metrics"]["success"] == 1
    assert gold["metrics"]["tokens"] == 2 and gold["metrics"]["pass@1"] == 1 and gold["metrics"]["cut_off"] == 0
    for one, ks in ((base, {1, 2, 4}), (gold, {1, 2, 3})):  # up to the number of samples of each row
        assert {name for name in one["metrics"] if name.startswith("pass@")} == {f"pass@{k}" for k in ks}
    for one in (base, other):
        low, high = one["intervals"]["reward"]
        assert low <= one["metrics"]["reward"] <= high
    settings = {"constrain": True, "editor": None, "num_samples": 4, "rows": 5}
    assert settings.items() <= results["settings"].items()
    out = capsys.readouterr().out
    text = (tmp_path / "out" / "evaluation.md").read_text()
    for said in (out, text):
        assert "5 held-out rows (2 different requests) of task toy 1, 4 samples each, constrained, temperature" in said
        assert f"{base['metrics']['success']:.3f} [{base['intervals']['success'][0]:.3f}, " in said
    assert "| success" in text and f"- gold: `{file}`, 3 samples per row" in text
    assert "\nsuccess  " in out and "written: " in out


def test_what_was_evaluated_is_not_evaluated_again(tiny_path, other_path, tmp_path, monkeypatch):
    from trl_grpo_tasks.evaluation.sampler import CompletionSampler

    written = []
    real = CompletionSampler.sample

    def counted(self, rows, *more):
        written.append(len(rows))
        return real(self, rows, *more)

    monkeypatch.setattr(CompletionSampler, "sample", counted)
    _, first = run(tmp_path, f"a={tiny_path}")
    assert written == [20]
    _, again = run(tmp_path, f"a={tiny_path}", f"b={other_path}")
    assert written == [20, 20] and again["a"]["samples"] == first["a"]["samples"]
    run(tmp_path, f"a={tiny_path}", "--temperature", "0.5")
    weights = Path(tiny_path) / "model.safetensors"
    weights.touch()  # as training would, which saves new weights in the same place
    run(tmp_path, f"a={tiny_path}", "--temperature", "0.5")
    assert written == [20, 20, 20, 20]


def test_the_samples_of_an_evaluation_are_a_file_of_completions(tiny_path, tmp_path):
    _, found = run(tmp_path, f"a={tiny_path}")
    kept = tmp_path / "out" / "evaluation" / "a" / "samples.jsonl"
    again = cli.main(["eval", str(kept), *BASE, "--out", str(tmp_path / "again")])
    (scored,) = json.loads((tmp_path / "again" / "evaluation.json").read_text())["evaluations"]
    scored["metrics"].pop("seconds"), found["a"]["metrics"].pop("seconds")
    assert again == 0 and scored["metrics"] == found["a"]["metrics"] and scored["samples"] == found["a"]["samples"]


def test_another_evaluation_in_the_folder_is_kept(tmp_path, capsys):
    first, second = golds(tmp_path / "first.jsonl"), golds(tmp_path / "second.jsonl", each=3)
    for words in ([first], [first], [first, second]):
        run(tmp_path, *words)  # repeated, and with one model more: it goes on
        assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["evaluation.json", "evaluation.md"]
    text = (tmp_path / "out" / "evaluation.json").read_text()
    run(tmp_path, second)
    assert f"an earlier evaluation is kept: {tmp_path / 'out' / 'evaluation-1.json'}" in capsys.readouterr().out
    assert (tmp_path / "out" / "evaluation-1.json").read_text() == text
    assert "second" in (tmp_path / "out" / "evaluation-1.md").read_text()
    (tmp_path / "out" / "evaluation.json").write_text("{half")
    run(tmp_path, first, "--temperature", "0.5")
    assert (tmp_path / "out" / "evaluation-2.json").read_text() == "{half"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a=tiny", "--out", "short.jsonl"], "short.jsonl is not a writable folder"),
        (["a=tiny", "a=tiny"], "--models: 'a' must be unique and without slashes"),
        (["a=tiny", ".."], "--models: '..' must be unique and without slashes"),
        (["a=tiny", "b=bare"], "model folder 'bare' holds no weights (.safetensors or .bin)"),
        (["a=none.jsonl"], "--models none.jsonl: this path does not exist"),
        (["a=tiny", "b=./none"], "--models ./none: this path does not exist"),
        (["a=tiny", "--editor", "greedy"], "unknown --editor 'greedy'; task 'toy' has no editors"),
        (["short.jsonl"], "has between 0 and 2 completions for each of the 5 held-out rows"),
        (["strange.jsonl"], "strange.jsonl, line 2: its row is not one of the 5 held-out rows"),
        (["broken.jsonl"], 'broken.jsonl, line 1: must be an object with "row"'),
        (["tokens.jsonl"], 'tokens.jsonl, line 1: "tokens" must be a whole number, if it is given'),
    ],
)
def test_mistakes_are_found_before_anything_is_evaluated(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    lines = [{"row": row, "completion": "a"} for row in ROWS for _ in range(2)]
    write_lines(Path("short.jsonl"), [line for line in lines if line["row"] != ROWS[1]])
    write_lines(Path("strange.jsonl"), [lines[0], {"row": {"prompt": "?"}, "completion": "a"}])
    write_lines(Path("broken.jsonl"), [{"completion": "a"}])
    write_lines(Path("tokens.jsonl"), [lines[0] | {"tokens": "two"}])
    Path("bare").mkdir()
    Path("bare/config.json").write_text("{}")
    err = refused(capsys, "eval", *words, *BASE, *([] if "--out" in words else ["--out", "out"]))
    assert message in err and len(err.splitlines()) == 1
    assert not Path("out/evaluation.json").exists()


def test_a_run_of_a_built_in_task_names_the_task_and_its_options(tmp_path):
    folder = write_run(tmp_path / "run")
    options = {"max_bricks": 7, "brick_levels": ["small"]}
    settings = {"task": {"name": "brick", "options": options}, "run": {"task": "brick"}}
    (folder / "settings.json").write_text(json.dumps(settings))
    models = [f"a={folder}", "tiny"]
    task, run, _, _ = parse([*models, "--max_bricks", "9", "--use_cpu", "true"], "eval")
    assert (task.name, task.options.max_bricks, task.options.brick_levels) == ("brick", 9, ["small"])
    assert run.models == models
    settings["run"]["task"] = "planted.py"
    (folder / "settings.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"names code to run .* trl-grpo-tasks eval .* --task planted.py"):
        parse(models, "eval")


def test_the_task_is_not_the_first_word(capsys):
    assert "eval takes models as its first words" in refused(capsys, "eval", "brick", "--models", "a=tiny")


def test_models_are_for_eval(capsys):
    assert "--models is an option of eval" in refused(capsys, "train", *BASE, "--models", "a=tiny")


def test_equal_theories_are_one_answer():
    task = get_task("theory")
    row = task.dataset("test", 1, 0)[0]
    gold = task.gold(row)
    assert task.canonical(row, gold) == task.score(row, gold).info["theory"]
    assert task.canonical(row, " no words of ours ") == "no words of ours"
