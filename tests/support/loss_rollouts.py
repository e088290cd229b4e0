"""Helpers of test_loss_matrix.py: scripted constraints, and one step by the trainer, by TRL and by the oracle."""

import functools
import random
from typing import NamedTuple

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from tests.support.loss_oracle import Batch, Objective, masked_logps_and_entropies, step_loss
from tests.support.training import QUIET, config
from trl_grpo_tasks import TaskGRPOTrainer
from trl_grpo_tasks.constraints.base import pack_ids
from trl_grpo_tasks.models.loading import load_tokenizer
from trl_grpo_tasks.models.tiny import save_tiny
from trl_grpo_tasks.task import TinySpec

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMN"
FORCED, FREE, *_ = PROMPTS = ["a", "bcd", "ef", "ghij"]  # the first is entirely forced, the second unconstrained
GROUP, MICRO_BATCHES, MOST_TOKENS = 6, 2, 7
OPTIONS = {
    "num_generations": GROUP,
    "per_device_train_batch_size": len(PROMPTS) * GROUP // MICRO_BATCHES,
    "gradient_accumulation_steps": MICRO_BATCHES,
    "steps_per_generation": MICRO_BATCHES,
    "max_completion_length": MOST_TOKENS,
    "beta": 0.3,
}
# Clipping of ratios: epsilon, epsilon_high, delta. Ratios of sequences are means, so they are closer to 1.
CLIPS = {"token": (0.1, 0.15, 1.2), "sequence": (0.02, 0.03, 1.04)}


def objective(loss_type, level, beta=0.3, entropy_coef=0.2, **more):
    """A loss whose hyperparameters are such that every part of it has an effect."""
    epsilon, epsilon_high, delta = CLIPS[level]
    if loss_type == "cispo":  # an upper bound of the ratio, not a distance from 1
        epsilon_high += 1
    return Objective(loss_type, level, beta, entropy_coef, epsilon, epsilon_high, delta, MOST_TOKENS, **more)


class Script:
    """The tokens that each position of a completion allows, by prompt; serves as the trainer's constraint."""

    def __init__(self, tokenizer, kind):
        self.vocab_size, self._eos, self._kind = len(tokenizer), tokenizer.eos_token_id, kind
        self._letters = tokenizer.convert_tokens_to_ids(list(LETTERS))

    def start(self, row):
        allowed = self.allowed(row["prompt"])
        return None if allowed is None else ScriptState(allowed, self._eos, self.vocab_size)

    def allowed(self, prompt):
        """Token ids by position; None if the prompt is not constrained."""
        if self._kind == "none" or prompt == FREE:
            return None
        if prompt == FORCED:
            return [[self._letters[3]], [self._letters[1]], [self._eos]]
        sizes = (2, 6) if self._kind == "narrow" else (len(LETTERS) // 2, len(LETTERS) - 2)
        positions = []
        for t in range(MOST_TOKENS - 1):
            rng = random.Random(f"{self._kind} {prompt} {t}")
            drawn = rng.sample(self._letters, 1 if t in (1, 4) else rng.randint(*sizes))
            positions.append(drawn + [self._eos] * (t == 3))
        return [*positions, [self._eos]]


class ScriptState:
    def __init__(self, allowed, eos, vocab_size):
        self._allowed, self._eos, self._vocab_size, self._t, self.finished = allowed, eos, vocab_size, 0, False

    def mask(self):
        return pack_ids([] if self.finished else self._allowed[self._t], self._vocab_size)

    def accept(self, token):
        assert token in self._allowed[self._t]
        self._t += 1
        self.finished = token == self._eos


def rewards_by_position(completions, **kwargs):
    return [(7 * i % 5) / 5 for i in range(len(completions))]


class Cell(NamedTuple):
    """The settings that a rollout depends on; the other dimensions of the matrix only affect the loss."""

    kind: str
    temperature: float = 0.7
    num_iterations: int = 2

    @property
    def policy(self):
        """The weights at which the loss is computed. With two iterations, the policy has changed since it sampled."""
        return "moved" if self.num_iterations == 2 else "old"


class Laboratory:
    """Trainers, rollouts and the oracle's log-probs, each made once per cell."""

    def __init__(self, folder):
        self._folder, self._path = folder, str(folder / "model")
        save_tiny(TinySpec(list(LETTERS), hidden_size=16, layers=1, heads=2, context=32), self._path)
        self._tokenizer = load_tokenizer(self._path)
        old = shaken(AutoModelForCausalLM.from_pretrained(self._path).state_dict(), seed=0, size=0.5)
        self._weights = {"old": old, "moved": shaken(old, 1, 0.02), "reference": shaken(old, 2, 0.05)}
        self.trainer = functools.cache(self._trainer)
        self.trl_trainer = functools.cache(self._trl_trainer)
        self.rollout = functools.cache(self._rollout)
        self.oracle = functools.cache(self._oracle)

    def _trainer(self, cell):
        options = OPTIONS | cell._asdict()
        kind = options.pop("kind")
        constrained = {} if kind == "none" else {"constraint": Script(self._tokenizer, kind)}
        args = config(self._folder, constrain=kind != "none", **options)
        return TaskGRPOTrainer(self._path, rewards_by_position, args, dataset(), **constrained)

    def _trl_trainer(self, temperature):
        options = {name: value for name, value in QUIET.items() if name != "reward_workers"} | OPTIONS
        args = GRPOConfig(output_dir=str(self._folder), temperature=temperature, **options)
        return GRPOTrainer(self._path, rewards_by_position, args, dataset())

    def _rollout(self, cell):
        """The micro-batches of one rollout, as they reach the loss."""
        trainer = self.trainer(cell)
        trainer.model.load_state_dict(self._weights["old"])
        trainer.ref_model.load_state_dict(self._weights["reference"])
        trainer.model.train()
        torch.manual_seed(0)
        trainer._prepare_inputs([{"prompt": prompt} for prompt in PROMPTS for _ in range(GROUP)])
        return trainer._buffered_inputs

    def step(self, cell, what, trainer=None, batches=None):
        """The loss of one optimizer step, the gradients by name and the metrics of each micro-batch."""
        batches = batches or self.rollout(cell)
        trainer = trainer or self.trainer(cell)
        trainer.model.load_state_dict(self._weights[cell.policy])
        trainer.loss_type, trainer.importance_sampling_level = what.loss_type, what.importance_sampling_level
        trainer.epsilon_low, trainer.epsilon_high, trainer.args.delta = what.epsilon, what.epsilon_high, what.delta
        trainer.beta = what.beta
        trainer.entropy_coef, trainer._entropy_bonus_enabled = what.entropy_coef, what.entropy_coef > 0
        trainer.top_entropy_quantile = what.top_entropy_quantile
        trainer.current_gradient_accumulation_steps = MICRO_BATCHES
        trainer.model.train()
        trainer._metrics["train"].clear()
        loss = sum(trainer._compute_loss(trainer.model, batch) for batch in batches)
        metrics = [
            {name: values[i] for name, values in trainer._metrics["train"].items() if "logp_difference" not in name}
            for i in range(len(batches))
        ]
        return loss, gradients(loss, trainer.model), metrics

    def expected_step(self, cell, what):
        """The same from the oracle."""
        policy, batches = self.oracle(cell)
        loss, metrics = step_loss(batches, what)
        return loss, gradients(loss, policy), metrics

    def _oracle(self, cell):
        """The oracle's model and micro-batches, with a graph from its parameters to the log-probs and entropies."""
        models = {name: self._float64(weights) for name, weights in self._weights.items()}
        batches = []
        for inputs in self.rollout(cell):
            allowed_B_T_V = self.allowed(cell.kind, inputs)
            is_choice_B_T = allowed_B_T_V.sum(-1) > 1
            counted_B_T = inputs["completion_mask"].bool()
            score = functools.partial(scored, inputs=inputs, allowed_B_T_V=allowed_B_T_V, temperature=cell.temperature)
            logps_B_T, entropies_B_T = score(models[cell.policy])
            batches.append(
                Batch(
                    logps_B_T,
                    entropies_B_T,
                    ref_B_T=score(models["reference"])[0].detach(),
                    old_B_T=score(models["old"])[0].detach() if cell.num_iterations == 2 else None,
                    advantages_B=inputs["advantages"],
                    counted_B_T=counted_B_T,
                    choices_B_T=is_choice_B_T,
                )
            )
        return models[cell.policy], batches

    def _float64(self, weights):
        model = AutoModelForCausalLM.from_pretrained(self._path, dtype=torch.float64)
        model.load_state_dict(weights)
        return model

    def allowed(self, kind, inputs):
        """The tokens allowed at each position of a rollout; all tokens at padding."""
        script = Script(self._tokenizer, kind)
        prompts = self._tokenizer.batch_decode(inputs["prompt_ids"], skip_special_tokens=True)
        allowed_B_T_V = torch.ones(*inputs["completion_ids"].shape, script.vocab_size, dtype=torch.bool)
        for b, prompt in enumerate(prompts):
            for t, ids in enumerate((script.allowed(prompt) or [])[: inputs["completion_mask"][b].sum()]):
                allowed_B_T_V[b, t] = False
                allowed_B_T_V[b, t, ids] = True
        return allowed_B_T_V


def dataset():
    return Dataset.from_dict({"prompt": PROMPTS})


def shaken(weights, seed, size):
    generator = torch.Generator().manual_seed(seed)
    return {name: w + size * torch.randn(w.shape, generator=generator) for name, w in weights.items()}


def scored(model, inputs, allowed_B_T_V, temperature):
    ids, mask = (torch.cat([inputs[f"prompt_{x}"], inputs[f"completion_{x}"]], dim=1) for x in ("ids", "mask"))
    length = allowed_B_T_V.shape[1]
    logits = model(input_ids=ids, attention_mask=mask).logits[:, -length - 1 : -1]
    return masked_logps_and_entropies(logits, inputs["completion_ids"], allowed_B_T_V, temperature)


def gradients(loss, model):
    names, parameters = zip(*model.named_parameters(), strict=True)
    values = torch.autograd.grad(loss, parameters, retain_graph=True)
    return dict(zip(names, values, strict=True))
