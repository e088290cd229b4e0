"""What the training rollouts of a trainer were, and their log-probs under any weights."""

import copy

import torch
from transformers import AutoModelForCausalLM

from tests.support.rollouts import dense_logps


def observe(trainer):
    """Return a list that gets, for each training rollout, its record, its masks, what TRL made of it, the number of
    optimizer steps before it, and a plain model with the weights then."""
    seen, score = [], trainer.sample_and_reward

    def sample_and_reward(inputs):
        output = score(inputs)
        if trainer.model.training:
            record, step = trainer.latest_rollout, trainer.state.global_step
            table = copy.deepcopy(trainer.generation.tables["train"]) if record.mask_numbers_B_T is not None else None
            seen.append({"record": record, "step": step, "model": model_of(trainer), "table": table, "output": output})
        return output

    trainer.sample_and_reward = sample_and_reward
    return seen


def model_of(trainer):
    """A plain model with a copy of the weights."""
    model = AutoModelForCausalLM.from_config(trainer.model.config)
    model.load_state_dict(trainer.accelerator.unwrap_model(trainer.model).state_dict())
    return model.double().eval()


def rows_of(seen):
    return [[row["prompt"] for row in one["record"].rows] for one in seen]


def logps_under(model, one, temperature):
    """The log-probs of a rollout under these weights and its masks, from plain forward passes."""
    record, found = one["record"], []
    for b, ids in enumerate(record.completion_ids):
        masks = record.mask_numbers_B_T[b, : len(ids)].tolist()
        with torch.no_grad():
            found.append(dense_logps(model, record.prompt_ids[b], ids, masks, one["table"], temperature))
    return found


def logged(trainer, name):
    return [line[name] for line in trainer.state.log_history if name in line]
