"""Cases in which sampling and scoring could diverge silently: options in a model's generation_config, tokens without
outputs, adapters on the LM head, nothing to score."""

import pytest
import torch
from peft import LoraConfig

from tests.support.toy import LettersConstraint, ToyTask
from tests.support.training import config, parameters, toy_trainer
from trl_grpo_tasks import TaskGRPOTrainer
from trl_grpo_tasks.constraints import Grammar, GrammarConstraint
from trl_grpo_tasks.evaluation.sampler import CompletionSampler
from trl_grpo_tasks.models.loading import load_model, load_tokenizer


@pytest.mark.parametrize("engine", ["trl", "fast"])
def test_generation_config_options_that_scoring_cannot_mirror_are_rejected(tiny_path, tmp_path, engine, capsys):
    model = load_model(tiny_path)
    model.generation_config.no_repeat_ngram_size = 1
    found = "no_repeat_ngram_size=1 in the model's generation_config"
    with pytest.raises(ValueError, match=found):
        toy_trainer(model, tmp_path, rollout=engine, constrain=engine == "trl")
    toy_trainer(model, tmp_path)
    assert f"hint: {found}" in capsys.readouterr().out, "TRL's own sampling may be inexact"
    # The workaround that the error message suggests:
    toy_trainer(model, tmp_path, generation_kwargs={"no_repeat_ngram_size": 0})
    assert "hint" not in capsys.readouterr().out
    for name, value in {"repetition_penalty": 1.3, "top_k": 2, "min_p": 0.9, "temperature": 0.1}.items():
        setattr(model.generation_config, name, value)
    trainer = toy_trainer(model, tmp_path, rollout=engine, generation_kwargs={"no_repeat_ngram_size": 0})
    trainer.model.train()
    output = trainer._generate_and_score_completions([trainer.train_dataset[i] for i in (0, 0, 0, 0, 3, 3, 3, 3)])
    assert "mask_numbers" not in output
    trainer.current_gradient_accumulation_steps = 1
    trainer._compute_loss(trainer.model, output)
    assert trainer._metrics["train"]["sampling/logp_difference_max"][-1] < 1e-4, (
        "the options of generation_config were used"
    )


def test_evaluation_ignores_the_models_generation_config(tiny_path, monkeypatch):
    from trl_grpo_tasks.evaluation import sampler

    monkeypatch.setattr(sampler, "unsupported_reason", lambda model: "as if it were unknown")
    model, tokenizer = load_model(tiny_path).eval(), load_tokenizer(tiny_path)
    rows = ToyTask().dataset("train", 32, 0)
    written = []
    for size in (0, 1):
        model.generation_config.no_repeat_ngram_size = size
        torch.manual_seed(0)
        written.append(CompletionSampler(model, tokenizer, 1.0, 5, None).sample(rows))
    assert written[0] == written[1]
    assert any(len(set(text)) < len(text) for text, *_ in written[0]), (
        "the ban on repeated n-grams would have had no effect"
    )


def test_tokenizer_with_more_tokens_than_model_outputs_is_rejected(tiny_path, tmp_path):
    tokenizer = load_tokenizer(tiny_path)
    tokenizer.add_tokens([f"<{i}>" for i in range(40)])
    with pytest.raises(ValueError, match=r"the tokenizer has 5\d tokens, but the model has only 1\d outputs; call"):
        TaskGRPOTrainer(tiny_path, args=config(tmp_path, constrain=True), task=ToyTask(), processing_class=tokenizer)
    with pytest.raises(ValueError, match="but the model has only"):
        CompletionSampler(load_model(tiny_path), tokenizer, 1.0, 4, LettersConstraint(tokenizer))


def test_special_tokens_without_model_outputs_are_never_required(tiny_path, tmp_path):
    """Some tokenizers add special tokens on loading; here they span more than one 32-bit word of a mask."""
    tokenizer = load_tokenizer(tiny_path)
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<{i}>" for i in range(40)]})
    grammar = GrammarConstraint(tokenizer, Grammar.regex("[abcd]{1,3}"))
    for engine, constraint in (("trl", LettersConstraint(tokenizer)), ("fast", grammar)):
        args = config(tmp_path, constrain=True, max_steps=2, rollout=engine)
        trainer = TaskGRPOTrainer(tiny_path, args=args, task=ToyTask(), processing_class=tokenizer,
                                  constraint=constraint)  # fmt: skip
        trainer.train()
        assert trainer.state.log_history[0]["sampling/logp_difference_max"] < 1e-4


def test_adapter_on_the_lm_head_is_rejected(tiny_path, tmp_path):
    """Rollouts would apply the adapter, but scoring, which uses the head's weights directly, would not."""
    adapter = LoraConfig(r=2, target_modules=["q_proj", "lm_head"])
    with pytest.raises(ValueError, match="adapter to `lm_head` is not supported"):
        toy_trainer(tiny_path, tmp_path, constrain=True, peft_config=adapter)


def test_lm_head_in_modules_to_save_is_used_for_scoring(tiny_path, tmp_path):
    adapter = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    trainer = toy_trainer(tiny_path, tmp_path, constrain=True, peft_config=adapter, beta=0.1, max_steps=4)
    before = parameters(trainer)
    trainer.train()
    moved = [name for name, p in trainer.model.named_parameters() if not p.equal(before[name])]
    assert any("lm_head" in name for name in moved)
    logs = [line for line in trainer.state.log_history if "loss" in line]
    assert all(line["sampling/logp_difference_max"] < 1e-4 for line in logs) and logs[-1]["kl"] > 0


@pytest.mark.parametrize("options", [{"top_k": 3}, {"beta": 0.1, "num_iterations": 2}], ids=str)
def test_masking_all_truncated_completions_gives_zero_loss(tiny_path, tmp_path, options):
    settings = {"constrain": True, "mask_truncated_completions": True, "max_completion_length": 1, "max_steps": 2}
    trainer = toy_trainer(tiny_path, tmp_path, **settings, **options)
    trainer.train()
    logs = [line for line in trainer.state.log_history if "loss" in line]
    assert all(line["loss"] == 0 for line in logs) and logs[0]["completions/clipped_ratio"] == 1
