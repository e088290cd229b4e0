"""--best_by on the command line: the model, the report and the card are those of the best step."""

import json

import pytest

from tests.commands.test_train import LORA, SMALL, assert_same_weights, completions, metrics, train, words
from tests.support.commands import refused
from trl_grpo_tasks.commands.arguments import parse
from trl_grpo_tasks.commands.eval import Candidate, rows_to_report
from trl_grpo_tasks.commands.plan import prepare
from trl_grpo_tasks.report.run_folder import RunFolder
from trl_grpo_tasks.task import short_hash
from trl_grpo_tasks.training.dataset import split_held_out

BEST_BY = {"best_by": "reward", "eval_steps": 1, "save_steps": 50, "learning_rate": 1e-2}


def test_the_best_model_is_saved_evaluated_and_described(tmp_path, capsys):
    train(tmp_path / "run", **(LORA | BEST_BY | {"max_steps": 8}))
    out, folder = capsys.readouterr().out, tmp_path / "run"
    outcome = json.loads((folder / "outcome.json").read_text())
    best = max((line for line in metrics(folder) if "eval_reward" in line), key=lambda line: line["eval_reward"])
    assert (outcome["model_step"], outcome["best_value"]) == (best["step"], best["eval_reward"])
    assert f"the final model is that of step {best['step']}: reward {best['eval_reward']:.4g} on held-out" in out
    assert_same_weights(folder, folder / f"checkpoint-{best['step']}")
    page, card = (folder / "report.html").read_text(), (folder / "README.md").read_text()
    chosen = f"step {best['step']} of {outcome['last_step']}: the best reward ({best['eval_reward']:.4g}) of "
    assert chosen in page and chosen in card and RunFolder.read(folder).final_model.startswith(chosen)
    assert "Held-out reward, which chooses the model" in page
    # The evaluation after GRPO is that of the saved model.
    train(tmp_path / "eval", eval_only=True, model_name_or_path=str(folder))
    assert completions(tmp_path / "eval", "model", "evaluation.json") == completions(folder, "GRPO")
    train(folder, resume=True, **(LORA | BEST_BY | {"max_steps": 8}))
    assert_same_weights(folder, folder / f"checkpoint-{best['step']}")
    assert json.loads((folder / "outcome.json").read_text()) == outcome


def test_models_are_compared_on_other_rows_than_those_reported(tmp_path, capsys):
    task, options, args, model = parse(words(tmp_path, best_by="success"))
    plan = prepare(task, options, args, model)
    assert len(plan.test_rows) == len(plan.choosing_rows) == SMALL["eval_rows"]
    reported, compared = ({str(row["prompt"]) for row in rows} for rows in (plan.test_rows, plan.choosing_rows))
    assert not reported & compared
    assert plan.test_rows == task.dataset("test", SMALL["eval_rows"], args.seed), "those of a run without --best_by"
    options.eval_before_and_after = False
    silent = prepare(task, options, args, model)
    assert silent.choosing_rows == plan.choosing_rows and silent.test_rows == []
    assert prepare(*parse(words(tmp_path))).choosing_rows is None
    golds = [row | {"gold": n} for n in range(9) for row in plan.test_rows]  # the same requests with other answers
    task.dataset = lambda split, size, seed: golds[:size] if split == "test" else plan.rows
    options.eval_before_and_after = True
    again = prepare(task, options, args, model)
    reported, compared = ({str(row["prompt"]) for row in rows} for rows in (again.test_rows, again.choosing_rows))
    assert reported and compared and not reported & compared
    assert "the task has no others" in capsys.readouterr().out


@pytest.mark.parametrize("rows", [SMALL["eval_rows"], 3 * SMALL["eval_rows"]])
def test_a_later_evaluation_leaves_out_the_rows_that_chose_the_model(tmp_path, capsys, rows):
    task, _, args, _ = parse(words(tmp_path, best_by="success"))
    reported, compared = split_held_out(task, args.eval_rows, args.seed)
    hashes = {short_hash(task.request(row)) for row in compared}
    (tmp_path / "outcome.json").write_text(json.dumps({"requests": sorted(hashes)}))
    (tmp_path / "checkpoint-1").mkdir()
    args.eval_rows = rows
    for model in (tmp_path, tmp_path / "checkpoint-1"):
        left = rows_to_report(task, args, [Candidate("run", str(model))], print)
        assert len(left) == rows and not hashes & {short_hash(task.request(row)) for row in left}
    said = capsys.readouterr().out
    if rows == SMALL["eval_rows"]:
        assert left == reported and not said
    else:
        assert said.count("those on which --best_by chose a model are left out") == 2
    others = rows_to_report(task, args, [Candidate("other", str(tmp_path.parent / "other"))], print)
    assert others == task.dataset("test", rows, args.seed)


def test_unknown_metrics_are_refused_before_anything_slow(tmp_path, capsys):
    err = refused(capsys, "train", *words(tmp_path, best_by="sucess", cold_start_steps=10**6))
    assert "best_by='sucess' is no metric of evaluations during training; choose one of: " in err
