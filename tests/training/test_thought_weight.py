"""Thoughts and answers apart: the weight of thoughts in every loss, and their entropies, against dense float64."""

import copy
import re

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.commands import refused
from tests.support.enumerated import allowed_in
from tests.support.loss_oracle import Batch, step_loss
from tests.support.loss_rollouts import MOST_TOKENS, gradients, objective, scored, shaken
from tests.support.toy import ToyTask
from tests.support.training import assert_same_runs, config, parameters, run_processes, toy_trainer
from tests.training.test_distributed import SCRIPT
from tests.training.test_think import MARKER, ThinkingToy
from trl_grpo_tasks import TaskGRPOConfig, TaskGRPOTrainer
from trl_grpo_tasks.constraints import ChoiceTreeConstraint, ThinkThen
from trl_grpo_tasks.training import trainer as trainer_module
from trl_grpo_tasks.training.config import CHOICES
from trl_grpo_tasks.training.extras import EXTRAS

OPTIONS = {"constrain": True, "max_completion_length": MOST_TOKENS, "beta": 0.3, "num_iterations": 2}


class EndlessToy(ThinkingToy):
    """No thought ends within one token, and no known answer could be reserved room for. Rewards depend on the
    letter."""

    def constraint(self, tokenizer):
        answers = ChoiceTreeConstraint(tokenizer, lambda row: 0, lambda node: [("a", None)], longest_ending=None)
        return ThinkThen(tokenizer, answers, MARKER)

    def score(self, row, completion):
        return self.make_score({"match": ord(completion) % 5, "short": 0.0}, True, False)


def rolled_out(tiny_path, folder, task=None, **options):
    """A trainer and a rollout of two prompts, the same for all options that do not change what is sampled."""
    trainer = toy_trainer(tiny_path, folder, task or ThinkingToy(), **OPTIONS | options)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    torch.manual_seed(0)
    examples = [trainer.train_dataset[i] for i in (0, 3) for _ in range(4)]
    return trainer, trainer._generate_and_score_completions(examples)


def thought_of(trainer, output):
    """Which tokens belong to a thought: those before which the text does not hold the marker."""
    found = torch.zeros(output["completion_ids"].shape, dtype=torch.bool)
    for b, ids in enumerate(output["completion_ids"].tolist()):
        for t in range(len(ids)):
            found[b, t] = MARKER not in trainer._tokenizer.decode(ids[:t])
    return found & output["completion_mask"].bool()


@pytest.mark.parametrize(("weight", "gamma"), [(0.0, 1.0), (0.3, 1.0), (2.0, 0.8)])
def test_the_loss_of_thoughts_is_weighted_and_nothing_else(tiny_path, tmp_path, weight, gamma):
    """Gradients of every loss, with KL and entropy, against a float64 loss whose policy term is weighted. With a
    discount, weights fall with the number of later decisions."""
    trainer, output = rolled_out(tiny_path, tmp_path, thought_weight=weight, gamma=gamma)
    _, plain = rolled_out(tiny_path, tmp_path)
    assert plain["advantages"].ndim == 1 and plain["completion_ids"].equal(output["completion_ids"])
    old = copy.deepcopy(trainer.model.state_dict())
    trainer.model.load_state_dict(shaken(old, 1, 0.02))
    dense = AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float64)
    policy, sampler = copy.deepcopy(dense), copy.deepcopy(dense)
    policy.load_state_dict(trainer.model.state_dict())
    sampler.load_state_dict(old)
    allowed, is_thought, counted = allowed_in(trainer, output), thought_of(trainer, output), output["completion_mask"]
    logps, entropies = scored(policy, output, allowed, 1.0)
    choices = (allowed.sum(-1) > 1) & counted.bool()
    later = gamma ** torch.stack([choices[:, t + 1 :].sum(1) for t in range(choices.shape[1])], 1).double()
    batch = Batch(
        logps,
        entropies,
        scored(dense, output, allowed, 1.0)[0].detach(),
        scored(sampler, output, allowed, 1.0)[0].detach(),
        plain["advantages"],
        counted.bool(),
        choices,
        torch.where(is_thought, weight, 1.0).double() * later,
    )
    assert (choices & is_thought).any() and (choices & ~is_thought).any() and plain["advantages"].any()
    for loss_type in CHOICES["loss_type"]:
        what = objective(loss_type, "token")
        trainer.loss_type, trainer.entropy_coef, trainer._entropy_bonus_enabled = loss_type, what.entropy_coef, True
        trainer.epsilon_low, trainer.epsilon_high, trainer.args.delta = what.epsilon, what.epsilon_high, what.delta
        trainer._metrics["train"].clear()
        loss = trainer._compute_loss(trainer.model, output)
        expected, _ = step_loss([batch], what)
        assert loss.item() == pytest.approx(expected.item(), abs=2e-5), loss_type
        wanted = gradients(expected, policy)
        for name, grad in gradients(loss, trainer.model).items():
            scale = wanted[name].abs().max().item()
            torch.testing.assert_close(grad.double(), wanted[name], rtol=0, atol=1e-4 * scale, msg=name)
    metrics = trainer._metrics["train"]
    for name, part in (("entropy", choices & is_thought), ("answer_entropy", choices & ~is_thought)):
        assert metrics[f"thought/{name}"] == [pytest.approx(entropies[part].mean().item(), abs=1e-5)]


def test_weight_1_is_the_run_without_the_extra_bit_for_bit(tiny_path, tmp_path, monkeypatch):
    """In which evaluations log the same metrics as training."""
    options = OPTIONS | {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
    ours = toy_trainer(tiny_path, tmp_path / "ours", ThinkingToy(), **options, thought_weight=1.0)
    ours.train()
    names = {"thought/ended", "thought/tokens", "thought/answer_tokens", "thought/entropy", "thought/answer_entropy"}
    logged = {name for line in ours.state.log_history for name in line}
    assert logged >= names | {f"eval_{name}" for name in names}
    monkeypatch.setattr(trainer_module, "EXTRAS", [extra for extra in EXTRAS if extra.name != "thought"])
    bare = toy_trainer(tiny_path, tmp_path / "bare", ThinkingToy(), **options)
    bare.train()
    assert not any("thought" in name for line in bare.state.log_history for name in line)
    assert all(value.equal(parameters(ours)[name]) for name, value in parameters(bare).items())


def test_groups_of_unended_thoughts_have_no_signal_with_weight_0(tiny_path, tmp_path):
    metrics = []
    for weight in (0.0, 1.0):
        options = {"max_completion_length": 1, "thought_weight": weight}
        trainer, output = rolled_out(tiny_path, tmp_path, EndlessToy(), **options)
        trainer._compute_loss(trainer.model, output)
        metrics.append(trainer._metrics["train"])
    assert output["advantages"].any(), "the rewards differ"
    assert metrics[0]["groups_without_signal"] == [1.0] and metrics[1]["groups_without_signal"][0] < 1
    assert metrics[0]["thought/ended"] == [0.0]
    assert metrics[0]["thought/entropy"] and "thought/answer_entropy" not in metrics[0]


def test_what_cannot_work_is_refused(tiny_path, tmp_path):
    for options, words in (
        ({"thought_weight": -1.0}, "thought_weight=-1.0 must be"),
        ({"thought_weight": float("nan")}, "thought_weight=nan"),
        ({"thought_weight": float("inf")}, "thought_weight=inf"),
        ({"thought_weight": 0.5, "importance_sampling_level": "sequence"}, "importance_sampling_level='token'"),
    ):
        with pytest.raises(ValueError, match=words):
            TaskGRPOConfig(output_dir=str(tmp_path), bf16=False, **options)
    turns = {"repair_turns": 2, "rollout": "fast", "constrain": True}
    for task, options, words in (
        (ToyTask(), {"constrain": True}, "under LettersConstraint; set constrain=True"),
        (ThinkingToy(), {}, "there is no constraint; set constrain=True"),
        (ThinkingToy(), turns, "under TurnsConstraint; set constrain=True and repair_turns=1"),
    ):
        args = config(tmp_path, thought_weight=0.5, max_completion_length=99, **options)
        with pytest.raises(ValueError, match=words):
            TaskGRPOTrainer(tiny_path, args=args, task=task)


def test_a_command_is_refused_before_its_cold_start(tmp_path, capsys):
    words = ["train", "--task", "prompts", "--generator", "arithmetic", "--thought_weight", "0.5", "--constrain"]
    err = refused(capsys, *words, "--think", "--repair_turns", "2", "--output_dir", str(tmp_path), "--use_cpu")
    assert "repair_turns=1 with a task that uses ThinkThen" in err


@pytest.mark.exhaustive
def test_two_processes_equal_one(tiny_path, tmp_path):
    """Groups of 4 in batches of 6 per process: the middle group lies half on each. Adam would magnify the rounding of
    gradients that are almost 0."""
    texts = ["xxa", "axxa", "bxxab", "xxb", "cxxa", "dxxab", "xxab", "axxb", "xxa", "1xxb", "2xxa", "axxab"]
    script = SCRIPT.replace("test_distributed import EveryTask", "test_think import ThinkingToy as EveryTask")
    script = re.sub(r"fixed = \[.*\]", f"fixed = {texts}", script)
    options = {"num_generations": 4, "max_steps": 2, "constrain": True, "thought_weight": 0.3, "optim": "sgd",
               "max_completion_length": 8}  # fmt: skip
    one = run_processes(script, tiny_path, tmp_path / "one", 1, options | {"per_device_train_batch_size": 12})
    two = run_processes(script, tiny_path, tmp_path / "two", 2, options | {"per_device_train_batch_size": 6})
    same = [name for name in one[1][0] if name.startswith("thought/")]
    assert_same_runs(one, two, same)
    assert len(same) == 5 and all(name in line for name in same for line in one[1])
