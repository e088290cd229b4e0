"""The trainer: TRL bit for bit at its defaults; advantages, constraints and rewards where they are asked for."""

import json
import math

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from tests.support.enumerated import allowed_in, assert_exact_policy_gradient, every_completion
from tests.support.loss_oracle import masked_logps_and_entropies
from tests.support.scripted import FixedTrainer
from tests.support.toy import LETTERS, LettersConstraint, ToyTask
from tests.support.training import QUIET, config, parameters, timeless, toy_trainer
from trl_grpo_tasks import TaskGRPOConfig, TaskGRPOTrainer
from trl_grpo_tasks.models.loading import load_tokenizer
from trl_grpo_tasks.training.advantages import estimate

OURS = ("reward_workers",)
PROMPTS = Dataset.from_dict({"prompt": [f"{letter}{i}x" for letter in LETTERS for i in "12"]})


def count_letters(completions, **kwargs):
    return [sum(map(text.count, LETTERS)) / 5 + 0.01 * len(text) for text in completions]


def assert_trl_bit_for_bit(model, folder, peft_config=None, **options):
    """Train with TRL and with this package: the weights are equal. Return the logs of both."""
    weights, logs = [], []
    for trainer_class, config_class in ((GRPOTrainer, GRPOConfig), (TaskGRPOTrainer, TaskGRPOConfig)):
        settings = {name: value for name, value in QUIET.items() if name not in OURS} | options
        args = config_class(output_dir=str(folder / trainer_class.__name__), **settings)
        trainer = trainer_class(model, count_letters, args, PROMPTS, peft_config=peft_config)
        trainer.train()
        weights.append(parameters(trainer))
        logs.append([timeless(line) for line in trainer.state.log_history])
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[0].items():
        assert value.equal(weights[1][name]), name
    return logs


@pytest.mark.parametrize("peft", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("options", [{}, {"beta": 0.1, "num_iterations": 2, "steps_per_generation": 2}])
def test_at_default_options_it_is_trl_bit_for_bit(tiny_path, tmp_path, peft, options):
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if peft else None
    options = {"max_steps": 5, "num_train_epochs": 9, **options}
    trl_logs, our_logs = assert_trl_bit_for_bit(tiny_path, tmp_path, adapter, **options)
    assert any(line.get("grad_norm") for line in trl_logs), "nothing was trained"
    # What ours logs beside TRL's: log-probs as sampled against those of training.
    assert all(line.get("sampling/logp_difference_max", 0) < 1e-4 for line in our_logs)
    ours_alone = ("sampling/logp_difference_mean", "sampling/logp_difference_max")
    assert trl_logs == [{key: line[key] for key in line if key not in ours_alone} for line in our_logs]


def test_a_task_with_default_options_trains_as_trl_with_its_reward_functions(tiny_path, tmp_path):
    task = ToyTask()
    ours = toy_trainer(tiny_path, tmp_path / "ours", max_steps=3)
    ours.train()

    def match(completions, row, name="match", **kwargs):
        return [task.score(json.loads(r), c).components[name] for r, c in zip(row, completions, strict=True)]

    def short(completions, row, **kwargs):
        return match(completions, row, "short")

    settings = {k: v for k, v in QUIET.items() if k not in OURS} | {"max_steps": 3, "reward_weights": [1.0, 0.1]}
    args = GRPOConfig(output_dir=str(tmp_path / "theirs"), **settings)
    theirs = GRPOTrainer(tiny_path, [match, short], args, ours.train_dataset)
    theirs.train()
    for name, value in parameters(theirs).items():
        torch.testing.assert_close(value, parameters(ours)[name], atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize(("estimator", "k", "scale"), [("topk", 2, "none"), ("maxk", 2, "none"), ("maxk", 3, "group")])
def test_the_advantages_used_are_those_of_the_estimator(tiny_path, tmp_path, estimator, k, scale):
    FixedTrainer.fixed = ["a", "ab", "bb", "cccc", "d", "aa", "abab", "dd"]
    options = config(tmp_path, advantage_estimator=estimator, pass_k=k, scale_rewards=scale, max_steps=1)
    trainer = FixedTrainer(tiny_path, args=options, task=ToyTask())
    examples = [trainer.train_dataset[0]] * 4 + [trainer.train_dataset[4]] * 4
    trainer.model.train()
    output = trainer._generate_and_score_completions(examples)
    task = ToyTask()
    totals = [
        task.score(json.loads(e["row"]), text).total for e, text in zip(examples, FixedTrainer.fixed, strict=True)
    ]
    expected = estimate(torch.tensor(totals).view(2, 4), estimator, k, scale=scale).flatten()
    expected = expected * (4 if estimator == "maxk" else 1)
    torch.testing.assert_close(output["advantages"], expected)
    assert list(trainer._logs["advantages"]) == pytest.approx(expected.tolist())


class HalfScored(ToyTask):
    """Cannot score completions that contain the letter d."""

    spec = None

    def score(self, row, completion):
        return None if "d" in completion else super().score(row, completion)


@pytest.mark.parametrize("estimator", ["grpo", "mean"])
def test_unscored_completions_get_advantage_zero(tiny_path, tmp_path, estimator):
    FixedTrainer.fixed = ["a", "d", "bb", "ab"]
    trainer = FixedTrainer(tiny_path, args=config(tmp_path, advantage_estimator=estimator), task=HalfScored())
    trainer.model.train()
    output = trainer._generate_and_score_completions([trainer.train_dataset[0]] * 4)
    assert output["advantages"][1] == 0
    totals = [ToyTask().score({"letter": "a"}, text).total for text in ("a", "bb", "ab")]
    expected = estimate(torch.tensor([totals]), estimator)[0]
    torch.testing.assert_close(output["advantages"][[0, 2, 3]], expected, atol=1e-5, rtol=1e-5)
    assert trainer._metrics["train"]["reward_failures"] == [0.25]


class Novelty(ToyTask):
    weights = {"match": 1.0, "short": 0.1, "novelty": 0.5}
    spec = None

    def group_components(self, rows, completions, scores):
        pairs = zip(completions, scores, strict=True)
        return {"novelty": [(completions.count(text) == 1) * score.components["match"] for text, score in pairs]}


def test_components_of_whole_groups(tiny_path, tmp_path):
    FixedTrainer.fixed = ["a", "a", "b", "ab"]
    trainer = FixedTrainer(tiny_path, args=config(tmp_path), task=Novelty())
    trainer.model.train()
    trainer._generate_and_score_completions([trainer.train_dataset[0]] * 4)
    assert trainer.rewarding.component("novelty").tolist() == [0.0, 0.0, 0.0, 0.5]
    assert trainer._metrics["train"]["rewards/novelty/mean"] == [0.125]


class Judged(ToyTask):
    """Has a frozen reward model beside its own score."""

    weights = {"match": 1.0, "short": 0.1, "judge": 0.5}
    spec = None

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def judges(self):
        return {"judge": self.folder}


def test_a_judge_is_scored_by_trl_and_never_trained(tiny_path, tmp_path):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    judge = AutoModelForSequenceClassification.from_pretrained(tiny_path, num_labels=1)
    judge.save_pretrained(tmp_path / "judge")
    AutoTokenizer.from_pretrained(tiny_path).save_pretrained(tmp_path / "judge")
    trainer = toy_trainer(tiny_path, tmp_path / "run", task=Judged(str(tmp_path / "judge")), max_steps=2)
    trainer.train()
    line = trainer.state.log_history[0]
    expected = line["rewards/match/mean"] + 0.1 * line["rewards/short/mean"] + 0.5 * line["rewards/judge/mean"]
    assert line["rewards/judge/mean"] != 0 and line["reward"] == pytest.approx(expected, abs=1e-5)
    frozen = trainer.reward_funcs[trainer.reward_func_names.index("judge")]
    for (name, before), after in zip(judge.named_parameters(), frozen.parameters(), strict=True):
        assert torch.equal(before, after), name


# ---- constraints


@pytest.mark.parametrize(
    ("peft", "options"),
    [(True, {"gradient_checkpointing": True}), (False, {"bf16": True}), (True, {"num_iterations": 2}),
     (False, {"temperature": 0.7})],
    ids=str,
)  # fmt: skip
def test_scoring_is_of_the_sampled_distribution(tiny_path, tmp_path, options, peft):
    """Old and reference log-probs of a rollout against a dense softmax over what the constraint allows."""
    peft_config = LoraConfig(r=4, target_modules=["q_proj"]) if peft else None
    settings = {"steps_per_generation": 2, "beta": 0.1} | options
    trainer = toy_trainer(tiny_path, tmp_path, constrain=True, peft_config=peft_config, **settings)
    trainer.model.train()
    output = trainer._generate_and_score_completions([trainer.train_dataset[i] for i in (0, 0, 0, 0, 3, 3, 3, 3)])
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], 1)
    attention = torch.cat([output["prompt_mask"], output["completion_mask"]], 1)
    with torch.no_grad(), trainer.accelerator.autocast():
        logits = trainer.model(input_ids=ids, attention_mask=attention).logits.double()
    targets, mask = output["completion_ids"], output["completion_mask"].bool()
    logits, allowed = logits[:, -targets.shape[1] - 1 : -1], allowed_in(trainer, output)
    expected, _ = masked_logps_and_entropies(logits, targets, allowed, trainer.temperature)
    tolerance = 0.05 if options.get("bf16") else 1e-4
    for key in ("old_per_token_logps", "ref_per_token_logps"):
        torch.testing.assert_close(output[key][mask].double(), expected[mask], atol=tolerance, rtol=0, msg=key)
    is_forced = mask & (allowed.sum(-1) == 1)
    assert is_forced.any() and (output["old_per_token_logps"][is_forced] == 0).all()


def test_the_expected_update_is_the_exact_gradient(tiny_path, tmp_path):
    trainer = toy_trainer(tiny_path, tmp_path, constrain=True)
    row, decode = json.loads(trainer.train_dataset[0]["row"]), trainer._tokenizer.decode
    completions = every_completion(trainer.generation.constraint, row)
    rewards = [ToyTask().score(row, decode(ids, skip_special_tokens=True)).total for ids, _ in completions]
    assert len(completions) == 4 + 16 + 64 and len(set(rewards)) > 3
    assert_exact_policy_gradient(trainer, row, completions, rewards)


def test_constrained_samples_are_allowed_and_learn(tiny_path, tmp_path):
    options = {"max_steps": 40, "per_device_train_batch_size": 32, "num_generations": 8, "rollout": "fast"}
    trainer = toy_trainer(tiny_path, tmp_path, constrain=True, **options)
    trainer.train()
    history = [line for line in trainer.state.log_history if "reward" in line]
    assert all(line["rewards/valid/mean"] == 1.0 for line in history)
    assert all(0 < line["constraint/allowed_mass"] <= 1 for line in history)
    assert all(1 <= line["constraint/allowed_tokens"] <= 5 for line in history)
    first, last = history[:10], history[-10:]
    # Six prompts in batches of four: the mean over ten steps has a standard error of about 0.03.
    assert sum(line["reward"] for line in last) / 10 > sum(line["reward"] for line in first) / 10 + 0.15


def test_evaluation_between_steps_does_not_disturb_training(tiny_path, tmp_path):
    options = {"constrain": True, "max_steps": 4, "steps_per_generation": 2, "num_iterations": 2, "beta": 0.1}
    plain = toy_trainer(tiny_path, tmp_path / "plain", **options)
    plain.train()
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8}
    checked = toy_trainer(tiny_path, tmp_path / "eval", **evaluated, **options)
    checked.train()
    evaluations = [line for line in checked.state.log_history if "eval_reward" in line]
    assert len(evaluations) == 4 and "eval_constraint/allowed_mass" in evaluations[0]
    # The rollouts in use and their masks are as they were; only the random numbers drawn later differ.
    first = [next(line for line in t.state.log_history if "loss" in line)["loss"] for t in (plain, checked)]
    assert first[0] == first[1]
    assert math.isfinite(checked.state.log_history[-1]["train_loss"])


def test_rewards_are_begun_before_reference_log_probs(tiny_path, tmp_path, monkeypatch):
    trainer = toy_trainer(tiny_path, tmp_path, beta=0.1, steps_per_generation=2)
    order = []
    rewards = trainer.rewarding.rewards
    monkeypatch.setattr(rewards, "begin", _noting(order, "begin", rewards.begin))
    monkeypatch.setattr(rewards, "finish", _noting(order, "finish", rewards.finish))
    score = trainer._get_per_token_logps_and_entropies
    monkeypatch.setattr(trainer, "_get_per_token_logps_and_entropies", _noting(order, "log-probs", score))
    trainer.model.train()
    trainer._generate_and_score_completions([trainer.train_dataset[0]] * 8)
    assert order == ["begin", "log-probs", "log-probs", "finish"]


def _noting(order, name, function):
    def noted(*args, **kwargs):
        order.append(name)
        return function(*args, **kwargs)

    return noted


def test_scores_reach_the_table_of_completions(tiny_path, tmp_path):
    import pandas

    trainer = toy_trainer(tiny_path, tmp_path, max_steps=1, log_completions=True, num_completions_to_print=1)
    trainer.train()
    table = pandas.read_parquet(tmp_path / "completions" / "completions_00001.parquet")
    assert {"match", "short", "valid", "success", "reason", "advantage"} <= set(table.columns) and len(table) == 8


def test_a_constraint_says_when_it_waits_for_another_end_than_the_chat_writes(tiny_path, tmp_path, capsys):
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "a1x"}]}] * 8)
    tokenizer = load_tokenizer(tiny_path)
    other_end = "{% for m in messages %}{{ m['content'] }}<unk>{% endfor %}"
    for template, hints in ((tokenizer.chat_template, False), (other_end, True)):
        tokenizer.chat_template = template
        more = {"processing_class": tokenizer, "constraint": LettersConstraint(tokenizer)}
        TaskGRPOTrainer(tiny_path, count_letters, config(tmp_path, constrain=True), rows, **more)
        assert ("hint: the chat template ends an answer with '<unk>'" in capsys.readouterr().out) == hints
