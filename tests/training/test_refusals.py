"""Options that cannot work are refused by name, before anything slow starts."""

import math

import pytest
from trl import GRPOConfig

from tests.support.toy import ToyTask
from tests.support.training import config, toy_trainer
from tests.training.test_trainer import PROMPTS, count_letters
from trl_grpo_tasks import TaskGRPOTrainer
from trl_grpo_tasks.training.extras import EXTRAS

REPAIR = {"repair_turns": 2, "rollout": "fast", "max_completion_length": 24, "constrain": True}
SAVED = {"save_strategy": "steps", "save_steps": 5}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"advantage_estimator": "passk", "pass_k": 4}, "pass_k=4 is invalid"),
        ({"advantage_estimator": "maxk", "pass_k": 1}, "pass_k=1 is invalid"),
        ({"advantage_estimator": "gppo"}, "unknown advantage estimator 'gppo'"),
        ({"advantage_clip": 0.0}, "must be above 0"),
        ({"reference_mode": "ema"}, "needs beta > 0"),
        ({"reference_mode": "emma", "beta": 0.1}, "unknown reference_mode 'emma'"),
        ({"kl_target": 0.1}, "needs beta > 0"),
        ({"offload_reference": True}, "offload_reference needs beta > 0"),
        ({"offload_reference": True, "beta": 0.1, "sync_ref_model": True}, "cannot be offloaded"),
        ({"top_p": 0.9, "use_vllm": True}, "top_p=0.9 with use_vllm.*set top_k as well"),
        ({"generation_kwargs": {"top_k": 50}, "use_transformers_continuous_batching": True}, "top_k=50 with"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0"),
        ({"top_k": -3}, "top_k=-3 must be a whole number"),
        ({"min_p": 1.5}, "min_p=1.5 must be between 0 and 1"),
        ({"importance_sampling_correction": True, "loss_type": "vespo"}, "needs one ratio per token"),
        ({"constrain": True, "use_transformers_continuous_batching": True}, "continuous_batching"),
        ({"curriculum": True, "curriculum_advance": 0.2, "curriculum_fall_back": 0.3}, "must be below"),
        ({"reward_backend": "dask"}, "unknown reward_backend 'dask'"),
        ({"replay_size": 8, "use_vllm": True}, "replay_size does not work with use_vllm"),
        ({"resample_rounds": 1, "use_vllm": True}, "resample_rounds does not work with use_vllm"),
        ({"resample_rounds": -1}, "resample_rounds=-1"),
        ({"own_successes": -1}, "own_successes=-1 must be at least 0"),
        ({"own_successes_fraction": 0.0}, "own_successes_fraction=0.0"),
        ({"own_successes_weight": 0.0}, "own_successes_weight=0.0"),
        ({"relabel": True}, "set own_successes"),
        ({"gamma": 0.0}, "gamma=0"),
        ({"gamma": 1.5}, "gamma=1.5"),
        ({"gamma": math.nan}, "gamma=nan"),
        ({"gamma": 0.9, "importance_sampling_level": "sequence"}, "importance_sampling_level='token'"),
        ({"guard_floor": 0.4}, "guard_floor=0.4 needs guard"),
        ({"guard": "success", "guard_floor": math.inf}, "must be a finite number"),
        ({"guard": "success", "curriculum": True}, "set guard_floor, or leave curriculum off"),
        ({"best_by": "success", "save_strategy": "no"}, "save_strategy='no' saves none; set save_strategy"),
        ({"best_by": "success", "metric_for_best_model": "reward", **SAVED}, "leave metric_for_best_model out"),
        (REPAIR | {"repair_turns": 5}, "repair_turns=5 must be from 1 .off. to 4"),
        (REPAIR | {"repair_turns": 0}, "repair_turns=0 must be from 1"),
        (REPAIR | {"repair_discount": 0.0}, "repair_discount=0.0 must be above 0"),
        (REPAIR | {"relabel": True, "own_successes": 4}, "does not work with relabel"),
    ],
)  # fmt: skip
def test_options(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **options)


def test_filters_work_with_vllm_if_top_k_is_set(tmp_path):
    assert config(tmp_path, use_vllm=True, top_p=0.9, top_k=20).sampling_filters.top_k == 20


@pytest.mark.parametrize("name", ["replay_size", "resample_rounds"])
def test_groups_that_are_replaced_must_lie_on_one_process(tmp_path, name):
    args = config(tmp_path, **{name: 2})
    args.per_device_train_batch_size = 6  # as with two processes and a batch of 12, which TRL accepts
    with pytest.raises(ValueError, match=rf"{name} needs whole .*\(6\) must be a multiple of num_generations \(4\)"):
        for extra in EXTRAS:
            extra.check(args)


class Masked(ToyTask):
    policy = "masked"


BEST = SAVED | {"eval_steps": 2}
ENDS = "completions of a task end with"


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        (ToyTask(), {"component_weights": {"mach": 1}}, "no component 'mach'"),
        (ToyTask(), {"component_weights": {"match": 1e300}},
         "weight of component 'match' must lie within -1e6 and 1e6, got 1e"),
        (ToyTask(), {"temperature": 0.0, "rollout": "fast"}, "temperature=0 gives the same completion each time"),
        (ToyTask(), {"temperature": 0.0, "rollout": "trl"}, "temperature=0 gives the same completion each time"),
        (Masked(), {"gamma": 0.9}, "one after the other; set gamma=1"),
        (ToyTask(), {"generation_kwargs": {"stop": 3}}, rf"generation_kwargs \['stop'\]: {ENDS}"),
        (ToyTask(), {"generation_kwargs": {"stop_strings": 3}}, rf"generation_kwargs \['stop_strings'\]: {ENDS}"),
        (ToyTask(), {"generation_kwargs": {"eos_token_id": 3}}, rf"generation_kwargs \['eos_token_id'\]: {ENDS}"),
        (ToyTask(), {"generation_kwargs": {"max_new_tokens": 3}}, rf"generation_kwargs \['max_new_tokens'\]: {ENDS}"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_the_task(tmp_path, task, options, message):
    with pytest.raises(ValueError, match=message):
        toy_trainer("no model is loaded", tmp_path, task=task, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"own_successes": 8, "relabel": True}, "task 'toy' does not define relabel"),
        (BEST | {"best_by": "sucess"},
         "no metric of evaluations during training; choose one of: valid, success, match, short, reward"),
        (BEST | {"best_by": "pass@8"},
         "with 4 completions per prompt, which num_generations_eval sets; .* pass@1, pass@2, pass@4, max@1"),
        (BEST | {"best_by": "kl"}, "no metric"),
    ],
)  # fmt: skip
def test_options_that_are_checked_by_extras(tiny_path, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        toy_trainer(tiny_path, tmp_path, **options)


def test_trainers_without_a_task_or_with_both(tiny_path, tmp_path):
    for options, more, message in (
        ({}, {"task": ToyTask()}, "defines its own rewards"),
        ({"constrain": True}, {"train_dataset": PROMPTS}, "needs a constraint, but none was given"),
        (REPAIR, {}, "needs a task, which says why an answer fails"),
    ):
        with pytest.raises(ValueError, match=message):
            TaskGRPOTrainer(tiny_path, count_letters, config(tmp_path, **options), **more)
    with pytest.raises(TypeError, match="TaskGRPOConfig"):
        TaskGRPOTrainer(tiny_path, count_letters, GRPOConfig(output_dir=str(tmp_path), bf16=False), PROMPTS)
