"""The best model by a held-out metric is the final one, also after early stopping and after resuming."""

import io
import json
import shutil
from contextlib import redirect_stdout

import pytest
from peft import LoraConfig

from tests.commands.test_train import assert_same_weights, saved
from tests.support.exhaustive import exhaustive_but
from tests.support.toy import ToyTask
from tests.support.training import config, parameters, toy_trainer
from trl_grpo_tasks.models import checkpoints
from trl_grpo_tasks.training.extras.best_model import metric_name

# Steps of saves are no multiple of the steps of evaluations.
OPTIONS = {
    "best_by": "success", "save_strategy": "steps", "save_steps": 5, "eval_steps": 2, "save_total_limit": 1,
    "max_steps": 12, "beta": 0.1,
}  # fmt: skip
RISE_AND_FALL = {2: 0.1, 4: 0.6, 6: 0.3, 8: 0.6, 10: 0.2, 12: 0.5}
BEST = 4  # step 8 is not better


def scripted(model, folder, values=None, lora=False, **options):
    """A trainer whose evaluations give these values of success, by step."""
    if lora:
        options["peft_config"] = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    trainer = toy_trainer(model, folder, **(OPTIONS | options))
    log = trainer.log

    def scripted_log(logs, *args, **kwargs):
        log(logs, *args, **kwargs)
        if "eval_rewards/success/mean" in logs:
            logs["eval_rewards/success/mean"] = (values or RISE_AND_FALL)[trainer.state.global_step]

    trainer.log = scripted_log
    return trainer


def outcome(folder):
    return json.loads((folder / "outcome.json").read_text())


@pytest.fixture(scope="module", params=exhaustive_but([False], [False, True]), ids=["full", "lora"])
def ended(request, tiny_path, tmp_path_factory):
    """A run to its end: its folder, trainer, options, and what it printed."""
    # The reference of an adapter is a second adapter.
    options = {"lora": True, "reference_mode": "ema", "ema_alpha": 0.5} if request.param else {}
    folder, out = tmp_path_factory.mktemp("ended") / "run", io.StringIO()
    trainer = scripted(tiny_path, folder, **options)
    with redirect_stdout(out):
        trainer.train()
    return folder, trainer, options, out.getvalue()


def test_the_final_model_is_that_of_the_best_step(tiny_path, tmp_path, ended):
    folder, trainer, options, out = ended
    trainer.save_model(str(tmp_path / "final"))
    folders = sorted(path.name for path in folder.glob("checkpoint-*"))
    assert folders == ["checkpoint-12", "checkpoint-4"], "the best one, and the newest to resume from"
    final, last = saved(tmp_path / "final"), saved(folder / "checkpoint-12")
    assert_same_weights(tmp_path / "final", folder / "checkpoint-4")
    assert any(not value.equal(last[name]) for name, value in final.items())
    # The saved weights are those that an independent run of four steps has.
    runs = []
    for steps in (4, 6):
        runs.append(
            scripted(tiny_path, tmp_path / str(steps), max_steps=steps, lr_scheduler_type="constant", **options)
        )
        runs[-1].train()
    short, long = map(parameters, runs)
    assert all(value.equal(long[name]) for name, value in short.items() if ".ref." not in name)
    made = outcome(folder)
    assert made["model_step"] == made["best_step"] == BEST and made["best_value"] == 0.6 and made["last_step"] == 12
    assert made["evaluations"] == [list(one) for one in RISE_AND_FALL.items()]
    assert "held-out rows at step 4: success 0.6 (the best so far)" in out
    assert "held-out rows at step 6: success 0.3 (best: 0.6 at step 4)" in out
    assert "the final model is that of step 4: success 0.6 on held-out rows, the best of 6 evaluations" in out


def test_a_finished_run_is_resumed_with_its_best_model(tiny_path, tmp_path, ended):
    folder, trainer, options, _ = ended
    shutil.copytree(folder, tmp_path / "run")
    (tmp_path / "run" / "outcome.json").unlink()  # killed before it was written
    again = scripted(tiny_path, tmp_path / "run", **options)
    assert again.train(resume_from_checkpoint=True).global_step == 12
    assert outcome(tmp_path / "run")["model_step"] == 4
    wanted = parameters(trainer)
    assert all(value.equal(wanted[name]) for name, value in parameters(again).items() if ".ref." not in name)


@pytest.mark.exhaustive
def test_resuming_at_each_checkpoint_chooses_the_same_model(tiny_path, tmp_path):
    options = {"save_total_limit": None, "save_steps": 1}
    whole = scripted(tiny_path, tmp_path / "whole", **options)
    whole.train()
    wanted, made = parameters(whole), outcome(tmp_path / "whole")
    metrics = (tmp_path / "whole" / "training_metrics.jsonl").read_text()
    for step in (3, 4, 9):
        shutil.copytree(tmp_path / "whole", tmp_path / str(step))  # a run folder may be moved
        for path in (tmp_path / str(step)).glob("checkpoint-*"):
            if checkpoints.step_of(path) > step:
                shutil.rmtree(path)
        again = scripted(tiny_path, tmp_path / str(step), **options)
        again.train(resume_from_checkpoint=True)
        assert outcome(tmp_path / str(step)) == made, step
        assert (tmp_path / str(step) / "training_metrics.jsonl").read_text() == metrics, step
        assert all(value.equal(wanted[name]) for name, value in parameters(again).items()), step


def test_a_later_run_without_the_option_leaves_no_outcome(tiny_path, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 1}
    toy_trainer(tiny_path, tmp_path, max_steps=1, **options).train()
    (tmp_path / "outcome.json").write_text("{}")
    toy_trainer(tiny_path, tmp_path, max_steps=2, **options).train(resume_from_checkpoint=True)
    assert not (tmp_path / "outcome.json").exists()


def test_a_best_model_that_could_not_be_saved_is_reported(tiny_path, tmp_path, monkeypatch, capsys):
    trainer = scripted(tiny_path, tmp_path, max_steps=6)
    save = trainer.save_model

    def fails_once(folder, *args, **kwargs):
        save(folder, *args, **kwargs)
        if folder.endswith("checkpoint-4"):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(trainer, "save_model", fails_once)
    trainer.train()
    out = capsys.readouterr().out
    assert "the final model is that of step 6, because the checkpoint of step 4 (success 0.6" in out
    assert outcome(tmp_path)["model_step"] == 6 and outcome(tmp_path)["best_step"] == 4


def test_nothing_scored_is_no_improvement(tiny_path, tmp_path):
    values = {2: 0.1, 4: None, 6: None}
    trainer = scripted(tiny_path, tmp_path, values, max_steps=6)
    trainer.train()
    assert trainer.state.global_step == 6 and outcome(tmp_path)["evaluations"] == [[2, 0.1], [4, None], [6, None]]


@pytest.mark.parametrize(
    "best_by", exhaustive_but(["loss", "distinct_answers"], ["loss", "distinct_answers", "max@2", "match"])
)
def test_other_metrics(tiny_path, tmp_path, best_by):
    trainer = toy_trainer(tiny_path, tmp_path, **(OPTIONS | {"best_by": best_by, "max_steps": 6}))
    trainer.train()
    name = f"eval_{metric_name(best_by)}" if best_by == "match" else f"eval_{best_by}"
    logged = [(line["step"], line[name]) for line in trainer.state.log_history if name in line]
    best = min(logged, key=lambda one: one[1] if best_by == "loss" else -one[1])
    assert len(logged) == 3 and (outcome(tmp_path)["best_step"], outcome(tmp_path)["best_value"]) == best
    assert trainer.state.best_global_step == best[0] and trainer.state.best_metric == best[1]


def test_distinct_answers_of_an_evaluation(tiny_path, tmp_path):
    """Of the toy task's answers, those with other letters than a to d are not valid."""
    trainer = toy_trainer(tiny_path, tmp_path, eval_strategy="steps", per_device_eval_batch_size=4, eval_rows=3)
    trainer.model.eval()
    groups = (["a", "a", "b", "ab"], ["x", "c", "c", "c"], ["1", "2", "x", "12"])
    found = []
    for example, texts in zip(trainer.eval_dataset, groups, strict=True):
        ids = [trainer._tokenizer(text)["input_ids"] + [trainer._tokenizer.eos_token_id] for text in texts]
        trainer._generate_single_turn = lambda prompt_ids, *args, ids=ids: (ids, None)
        trainer._generate_and_score_completions([example] * 4)
        found.append(trainer._metrics["eval"]["distinct_answers"][-1])
    assert found == [3 / 4, 1 / 4, 0]


def test_options(tmp_path):
    steps = {"save_strategy": "steps", "save_steps": 7}
    args = config(tmp_path, best_by="pass@4", per_device_train_batch_size=12, num_generations=4, **steps)
    assert (args.eval_strategy, args.eval_steps, args.metric_for_best_model) == ("steps", 7, "pass@4")
    assert args.load_best_model_at_end and args.greater_is_better and args.per_device_eval_batch_size == 12
    args = config(tmp_path, best_by="loss", num_generations=6, per_device_train_batch_size=6, eval_steps=2, **steps)
    assert not args.greater_is_better and args.per_device_eval_batch_size == 12 and args.eval_steps == 2
    given = {"per_device_eval_batch_size": 8, "per_device_train_batch_size": 12}  # TRL's default, but given
    assert config(tmp_path, best_by="loss", num_generations=4, **given, **steps).per_device_eval_batch_size == 8
    assert config(tmp_path, best_by="kl", greater_is_better=True, **steps).greater_is_better
    assert config(tmp_path, best_by="valid", save_strategy="epoch").eval_strategy == "epoch"
    assert metric_name("eval_success") == metric_name("success") == "rewards/success/mean"
    off = config(tmp_path)
    assert (off.eval_strategy, off.load_best_model_at_end, off.metric_for_best_model) == ("no", False, None)


def test_several_held_out_sets_are_refused(tiny_path, tmp_path):
    sets = {"easy": ToyTask().dataset("test", None, 0), "hard": ToyTask().dataset("test", 1, 0)}
    with pytest.raises(ValueError, match=r"best_by='success' chooses .* eval_dataset has 2: easy, hard; pass one"):
        toy_trainer("no model is loaded", tmp_path, eval_dataset=sets, **OPTIONS)


def test_a_full_name_is_checked_at_the_first_evaluation(tiny_path, tmp_path):
    trainer = toy_trainer(tiny_path, tmp_path, **(OPTIONS | {"best_by": "rewards/mach/mean"}))
    with pytest.raises(ValueError, match=r"no metric of this evaluation; it has: .*rewards/match/mean"):
        trainer.train()
    assert trainer.state.global_step == 2
