"""Whole runs: cold start, evaluation, GRPO, report; resumed, with adapters, quantised, in two processes."""

import json
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import PartialState
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from tests.support.commands import refused
from tests.support.exhaustive import exhaustive_but
from tests.support.gguf_file import write_gguf
from tests.support.paths import ROOT
from tests.support.quantised import needs_bitsandbytes, quantization
from tests.support.training import toy_trainer
from trl_grpo_tasks.commands import train as run
from trl_grpo_tasks.commands.arguments import parse
from trl_grpo_tasks.evaluation import evaluate
from trl_grpo_tasks.models.loading import load_model, save_merged

TASK = str(ROOT / "trl_grpo_tasks" / "commands" / "task_template.py")
SMALL = {
    "task": TASK, "use_cpu": True, "max_steps": 3, "save_steps": 1, "logging_steps": 1, "cold_start_steps": 0,
    "eval_rows": 4, "samples": 2, "num_generations": 4, "per_device_train_batch_size": 8, "reward_workers": 0,
    "train_rows": 64, "report_to": "none",
}  # fmt: skip
LORA = {"use_peft": True, "lora_target_modules": "q_proj", "lora_r": 2, "learning_rate": 1e-2}
CONTINUED = {"cold_start_steps": 12, "beta": 0.1, **LORA}
UNEVALUATED = {"eval_before_and_after": False, "save_steps": 3}


def words(output_dir, **options):
    options = SMALL | {"output_dir": str(output_dir)} | options
    return [word for name, value in options.items() for word in (f"--{name}", *str(value).split(" "))]


def train(output_dir, resume=False, **options):
    assert run.main([*words(output_dir, **options), *(["--resume_from_checkpoint"] if resume else [])]) == 0


def results(folder, name="results.json"):
    return {one["name"]: one for one in json.loads((Path(folder) / name).read_text())["evaluations"]}


def metrics(folder):
    return [json.loads(line) for line in (Path(folder) / "training_metrics.jsonl").read_text().splitlines()]


def completions(folder, evaluation, name="results.json"):
    return [sample["completion"] for sample in results(folder, name)[evaluation]["samples"]]


def saved(folder):
    """The weights of a model or adapter folder."""
    return next(load_file(folder / name) for name in ("model.safetensors", "adapter_model.safetensors")
                if (folder / name).is_file())  # fmt: skip


def base_of(adapter):
    return json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"]


def assert_same_weights(one, other):
    """Two folders of models or adapters, bit for bit."""
    ours, theirs = saved(one), saved(other)
    assert ours.keys() == theirs.keys() and all(value.equal(theirs[name]) for name, value in ours.items())


WHOLE = {"cold_start_steps": 12, "constrain": True, "beta": 0.02, "samples": 4, "eval_rows": 6}


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """A run as a user starts it; other tests look at it and leave it as it is."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    train(folder, **WHOLE)
    return folder


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "adapter"
    train(folder, **LORA)
    return folder


def test_a_whole_run_leaves_everything_a_person_needs(whole_run, capsys):
    tokenizer = AutoTokenizer.from_pretrained(whole_run)
    model = AutoModelForCausalLM.from_pretrained(whole_run)
    assert model(**tokenizer("ab", return_tensors="pt")).logits.shape[-1] == len(tokenizer)
    lines = metrics(whole_run)
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert line["rewards/valid/mean"] == 1 and 0 < line["constraint/allowed_mass"] < 1
        expected = 0.3 * line["rewards/letters/mean"] + line["rewards/exact/mean"]
        assert line["reward"] == pytest.approx(expected, abs=1e-5)
    evaluations = results(whole_run)
    assert list(evaluations) == ["cold start", "GRPO"]
    for evaluation in evaluations.values():
        assert evaluation["metrics"]["valid"] == 1 and len(evaluation["samples"]) == 24
    settings = json.loads((whole_run / "settings.json").read_text())
    assert settings["task"]["name"] == "my_task" and settings["run"]["cold_start_steps"] == 12
    assert settings["training"]["beta"] == 0.02 and settings["training"]["constrain"] is True
    assert settings["training"]["temperature"] == 1.0, "TRL's default is recorded too"
    cold, trained = saved(whole_run / "cold_start"), saved(whole_run)
    assert any(not value.equal(trained[name]) for name, value in cold.items()), "GRPO moved nothing"


class CtrlC(TrainerCallback):
    """In the second step, which has been logged but not saved."""

    def on_log(self, args, state, control, **kwargs):
        if state.global_step == 2:
            raise KeyboardInterrupt


def test_resuming_repeats_neither_cold_start_nor_the_first_evaluation(whole_run, tmp_path, capsys, monkeypatch):
    stopped = tmp_path / "stopped"
    monkeypatch.setattr(run, "run_training", partial(run.run_training, callbacks=[CtrlC()]))
    assert run.main(words(stopped, **WHOLE)) == 130
    err = capsys.readouterr().err
    assert err.startswith(f"stopped; {stopped / 'checkpoint-1'} is complete; to resume:\n") and "Traceback" not in err
    monkeypatch.undo()
    assert list(results(stopped)) == ["cold start"] and (stopped / "checkpoint-1" / "complete").is_file()
    evaluated = []
    real = evaluate.evaluate
    monkeypatch.setattr(evaluate, "evaluate", lambda name, *a, **k: (evaluated.append(name), real(name, *a, **k))[1])
    capsys.readouterr()
    train(stopped, resume=True, **WHOLE)
    assert "cold start 1" not in (out := capsys.readouterr().out) and "resuming from" in out
    assert evaluated == ["GRPO"]
    assert _timeless(results(stopped)) == _timeless(results(whole_run))
    assert metrics(stopped) == metrics(whole_run)
    assert_same_weights(stopped, whole_run)


def _timeless(evaluations):
    for evaluation in evaluations.values():
        evaluation["metrics"].pop("seconds")
    return evaluations


def test_evaluations_of_other_settings_are_not_reused(whole_run):
    """The evaluation before GRPO, and the one after it, must be made with the same settings."""
    for changed in (
        {},
        {"eval_rows": 4},
        {"temperature": 0.5},
        {"top_k": 2},
        {"constrain": False},
        {"component_weights": '{"success":1}'},
    ):
        given = words(whole_run, **WHOLE | {"max_steps": 4} | changed)
        task, options, args, _ = parse([*given, "--resume_from_checkpoint"])
        plan = SimpleNamespace(test_rows=task.dataset("test", args.eval_rows, args.seed))
        kept = run._Evaluations(task, options, args, PartialState(), plan)
        assert [one.name for one in kept.done] == ([] if changed else ["cold start"]), changed


@pytest.mark.parametrize(
    ("changed", "folder", "other"),
    [
        ({"seed": 43}, "base_model", "seed"),
        ({"task": "tests.support.toy"}, "base_model", "task"),
        ({"cold_start_steps": 13}, "cold_start", "steps"),
        ({"train_rows": 63}, "cold_start", "answers"),
    ],
)
def test_what_a_run_began_with_is_not_replaced_when_it_goes_on(whole_run, capsys, changed, folder, other):
    weights, lines = (whole_run / folder / "model.safetensors").read_bytes(), metrics(whole_run)
    assert run.main([*words(whole_run, **WHOLE | {"max_steps": 4} | changed), "--resume_from_checkpoint"]) == 2
    said = capsys.readouterr()
    assert f"started from {whole_run / folder}, which was built with a different {other}" in said.err
    assert "cold start 1" not in said.out and metrics(whole_run) == lines
    assert (whole_run / folder / "model.safetensors").read_bytes() == weights


def test_a_finished_run_is_evaluated_without_touching_its_results(whole_run, capsys):
    kept = (whole_run / "results.json").read_bytes()
    options = {name: value for name, value in WHOLE.items() if "cold" not in name}
    train(whole_run, eval_only=True, model_name_or_path=str(whole_run), **options)
    assert list(results(whole_run, "evaluation.json")) == ["model"]
    assert (whole_run / "results.json").read_bytes() == kept
    assert completions(whole_run, "model", "evaluation.json") == completions(whole_run, "GRPO")
    assert "GRPO 1/3" not in capsys.readouterr().out


# ---- adapters


def test_a_lora_run_saves_an_adapter(adapter):
    weights = saved(adapter)
    adapted = {word for name in weights for word in name.split(".") if word.endswith("_proj")}
    assert not (adapter / "model.safetensors").exists()
    assert adapted == {"q_proj"}, "a single name, of which TRL makes a pattern"
    assert any(value.any() for name, value in weights.items() if "lora_B" in name), "the adapter learned nothing"


def test_merged_weights_are_those_of_the_adapter(adapter, tmp_path, capsys):
    save_merged(adapter, tmp_path)
    ids = torch.tensor([[3, 4, 5, 6]])
    merged, whole = AutoModelForCausalLM.from_pretrained(tmp_path), load_model(str(adapter))
    base = whole.get_base_model().state_dict()
    with torch.no_grad():
        assert torch.allclose(merged(ids).logits, whole(ids).logits, atol=1e-5)
    assert not (tmp_path / "adapter_config.json").exists() and AutoTokenizer.from_pretrained(tmp_path)
    moved = merged.state_dict()["model.layers.0.self_attn.q_proj.weight"]
    assert not moved.equal(base["model.layers.0.self_attn.q_proj.base_layer.weight"]), "nothing was merged"
    err = refused(capsys, "train", *words(tmp_path / "none", save_merged=True))
    assert "--save_merged: there is no adapter to merge" in err


def test_the_card_of_a_checkpoint_is_ours(tiny_path, tmp_path):
    trainer = toy_trainer(tiny_path, tmp_path / "run", max_steps=1, save_strategy="steps", save_steps=1)
    trainer.train()
    card = (tmp_path / "run" / "README.md").read_text()
    assert "trained with GRPO on the task **toy** (version 1)" in card and "trl-grpo-tasks" in card


def test_an_adapter_is_evaluated_and_trained_further(adapter, tmp_path):
    train(tmp_path / "eval", eval_only=True, model_name_or_path=str(adapter))
    assert completions(tmp_path / "eval", "model", "evaluation.json") == completions(adapter, "GRPO")
    train(tmp_path / "on", model_name_or_path=str(adapter), beta=0.1, constrain=True, **LORA)
    first, second = saved(adapter), saved(tmp_path / "on")
    assert first.keys() == second.keys() and any(not value.equal(second[name]) for name, value in first.items())
    assert list(results(tmp_path / "on")) == ["before", "GRPO"]


@pytest.fixture(scope="module")
def continued(tmp_path_factory):
    """A run with a cold start whose adapter GRPO trains further."""
    folder = tmp_path_factory.mktemp("runs") / "continued"
    train(folder, **CONTINUED)
    return folder


@pytest.mark.filterwarnings("error:.*base_model_name_or_path. was renamed")
def test_grpo_trains_the_adapter_of_the_cold_start_further(continued, tmp_path):
    for folder in (continued / "cold_start", continued):
        assert base_of(folder) == str(continued / "base_model")
    start, end = saved(continued / "cold_start"), saved(continued)
    assert start.keys() == end.keys()
    assert all(start[name].any() and not end[name].equal(start[name]) for name in start if "lora_B" in name)
    divergences = [line["kl"] for line in metrics(continued)]
    assert divergences[0] == pytest.approx(0, abs=1e-7) and divergences[-1] > 1e-6, "the reference is the first one"
    train(tmp_path, eval_only=True, model_name_or_path=str(continued / "cold_start"), eval_rows=4)
    assert completions(tmp_path, "model", "evaluation.json") == completions(continued, "cold start")


def test_a_continued_adapter_resumes_bit_for_bit(continued, tmp_path):
    shutil.copytree(continued, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint-3")
    train(tmp_path / "run", resume=True, **CONTINUED)
    assert_same_weights(tmp_path / "run", continued)
    assert metrics(tmp_path / "run") == metrics(continued)


def test_a_cold_start_of_an_adapter_trains_it_further(adapter, tmp_path):
    train(tmp_path, model_name_or_path=str(adapter), cold_start_steps=2, max_steps=1, **UNEVALUATED)
    assert base_of(tmp_path) == base_of(adapter)
    given, cold, end = map(saved, (adapter, tmp_path / "cold_start", tmp_path))
    assert given.keys() == cold.keys() == end.keys()
    assert all(not cold[name].equal(value) and not end[name].equal(cold[name]) for name, value in given.items())


# ---- bitsandbytes


@needs_bitsandbytes
def test_an_eight_bit_optimizer(tmp_path):
    train(tmp_path, optim="adamw_8bit", **UNEVALUATED)
    state = torch.load(tmp_path / "checkpoint-3" / "optimizer.pt", weights_only=True)
    assert state["state"] and not (tmp_path / "results.json").exists()
    base, trained = saved(tmp_path / "base_model"), saved(tmp_path)
    assert any(not value.equal(trained[name]) for name, value in base.items())


@needs_bitsandbytes
def test_qlora_with_a_constraint(tmp_path, monkeypatch):
    from transformers.quantizers import quantizer_bnb_4bit

    quantized = []
    kind = quantizer_bnb_4bit.Bnb4BitHfQuantizer
    real = kind._process_model_before_weight_loading
    monkeypatch.setattr(
        kind,
        "_process_model_before_weight_loading",
        lambda self, model, *a, **k: (quantized.append(type(model).__name__), real(self, model, *a, **k))[1],
    )
    train(tmp_path / "q", load_in_4bit=True, constrain=True, **LORA)
    assert quantized == ["LlamaForCausalLM"] * 2, "once to evaluate, once to train"
    assert any(value.any() for name, value in saved(tmp_path / "q").items() if "lora_B" in name)
    assert all(line["rewards/valid/mean"] == 1 for line in metrics(tmp_path / "q"))
    train(tmp_path / "on", load_in_4bit=True, constrain=True, model_name_or_path=str(tmp_path / "q"), **LORA)
    assert len(quantized) == 4


@pytest.mark.exhaustive
@needs_bitsandbytes
@pytest.mark.parametrize("bits", [4, 8])
def test_a_cold_start_on_quantised_weights_is_an_adapter_that_grpo_trains_further(tmp_path, bits):
    options = {f"load_in_{bits}bit": True, "cold_start_steps": 12, "beta": 0.1, **LORA}
    train(tmp_path, save_merged=True, **options)
    start, end = saved(tmp_path / "cold_start"), saved(tmp_path)
    assert start.keys() == end.keys() and {weight.dtype for weight in end.values()} == {torch.float32}
    assert all(start[name].any() and not end[name].equal(start[name]) for name in start if "lora_B" in name)
    assert list(results(tmp_path)) == ["cold start", "GRPO"]
    base, merged = saved(tmp_path / "base_model"), saved(tmp_path / "merged")
    assert {name.split(".")[-2] for name in base if not merged[name].equal(base[name])} == {"q_proj"}
    assert base_of(tmp_path) == str(tmp_path / "base_model")
    written = (tmp_path / "cold_start" / "adapter_model.safetensors").stat().st_mtime_ns
    train(tmp_path, resume=True, **(options | {"max_steps": 4}))
    assert (tmp_path / "cold_start" / "adapter_model.safetensors").stat().st_mtime_ns == written


@needs_bitsandbytes
@pytest.mark.parametrize("bits", exhaustive_but([4], [4, 8]))
def test_a_model_that_is_stored_quantised(adapter, tmp_path, capsys, bits):
    stored = tmp_path / "stored"
    base = base_of(adapter)
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=quantization(bits))
    model.save_pretrained(stored)
    AutoTokenizer.from_pretrained(base).save_pretrained(stored)
    expected = model.state_dict()  # not its logits: bitsandbytes rounds them where a CPU multiplies in bf16
    for loaded in (load_model(str(stored), dtype="float32"), load_model(str(stored), quantization_config=None)):
        found = loaded.state_dict()
        assert found.keys() == expected.keys() and all(found[name].equal(expected[name]) for name in expected)
    train(tmp_path / "run", model_name_or_path=str(stored), cold_start_steps=3, **LORA | UNEVALUATED)
    assert (tmp_path / "run" / "adapter_model.safetensors").is_file()
    assert "parameters" not in json.loads((tmp_path / "run" / "settings.json").read_text())["model"]
    train(tmp_path / "eval", eval_only=True, model_name_or_path=str(tmp_path / "run"))
    for mistake, message in (
        ({}, "quantised weights cannot be trained, only an adapter on them; give --use_peft"),
        ({"save_merged": True, **LORA}, f"--save_merged: the weights of {stored} are stored quantised"),
    ):
        capsys.readouterr()
        error = refused(capsys, "train", *words(tmp_path / "refused", model_name_or_path=str(stored), **mistake))
        assert message in error and len(error.splitlines()) == 1


# ---- others


def test_a_run_from_a_gguf_file(tmp_path):
    write_gguf(tmp_path / "small.gguf")
    train(tmp_path / "run", model_name_or_path=str(tmp_path / "small.gguf"), beta=0.1, max_steps=2)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run").config.vocab_size == 261
    assert all("kl" in line for line in metrics(tmp_path / "run"))
