"""What we lean on in TRL and transformers. When a version moves something, this says what, by name.

A method is named here with a fingerprint of its source: a change is not necessarily a break, but somebody must read
it. To accept a change after reading it, put the new fingerprint here.
"""

import hashlib
import inspect
import itertools

import pytest
import transformers
import trl
from transformers import Trainer, trainer_utils
from trl import GRPOConfig, GRPOTrainer
from trl.kernels import ChunkedLogProbFunction
from trl.trainer import utils

FINGERPRINTS = {
    "GRPOTrainer.__init__": "18f01b7a46c9544b",
    "GRPOTrainer._calculate_rewards": "736ae29b083840b5",
    "GRPOTrainer._compute_loss": "80295546bbdbf6f7",
    "GRPOTrainer._generate": "2a27fdf8f5e6f356",
    "GRPOTrainer._generate_and_score_completions": "1fa48922792dcd5c",
    "GRPOTrainer._generate_single_turn": "e0f02e4fc094cefd",
    "GRPOTrainer._get_per_token_logps_and_entropies": "ea73c3909275851d",
    "GRPOTrainer._get_train_sampler": "36497afb4d311dc9",
    "GRPOTrainer._load_optimizer_and_scheduler": "5c1772becdfd7fdb",
    "GRPOTrainer._prepare_inputs": "f824e7fb07147956",
    "GRPOTrainer._save_checkpoint": "ec91bde123649111",
    "GRPOTrainer._tokenize_prompts": "d2d27f7c9bfda85f",
    "GRPOTrainer.get_high_entropy_mask": "ce6e86287bac23d6",
    "GRPOTrainer.log": "1e7772819cc8cf09",
    "utils.add_fused_lm_head": "422d009f04b66659",
    "utils.RepeatSampler": "ba139f4a43eeecd4",
    "utils.split_tensor_dict": "b61a5760a03e95db",
    "utils.shuffle_sequence_dict": "bab038755e57ed2b",
    "ChunkedLogProbFunction.forward": "1d8220b44273cdf3",
}
PLACES = {"GRPOTrainer": GRPOTrainer, "utils": utils, "ChunkedLogProbFunction": ChunkedLogProbFunction}


def fingerprint(name: str) -> str:
    place, attribute = name.split(".")
    return hashlib.sha256(inspect.getsource(getattr(PLACES[place], attribute)).encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", FINGERPRINTS)
def test_trl_is_as_it_was_read(name):
    place, attribute = name.split(".")
    assert hasattr(PLACES[place], attribute), f"TRL {trl.__version__} has no {name} any more: our override is dead"
    assert fingerprint(name) == FINGERPRINTS[name], (
        f"TRL {trl.__version__} changed {name}; read the change against training/trainer.py and the objects that it "
        f"owns, then put the new fingerprint {fingerprint(name)!r} here"
    )


# Methods of transformers' Trainer that we override or whose work we go on from, with the parameters we pass.
TRAINER_METHODS = {
    "_save_checkpoint": ["model", "trial"],
    "_load_from_checkpoint": ["resume_from_checkpoint", "model"],
    "_load_optimizer_and_scheduler": ["checkpoint"],
    "_get_output_dir": ["trial"],
    "_init_training_state": [
        "max_steps", "num_update_steps_per_epoch", "num_train_epochs", "resume_from_checkpoint", "trial",
    ],
    "train": ["resume_from_checkpoint"],
}  # fmt: skip


@pytest.mark.parametrize("name", TRAINER_METHODS)
def test_transformers_has_the_methods_we_override(name):
    parameters = list(inspect.signature(getattr(Trainer, name)).parameters)
    for parameter in TRAINER_METHODS[name]:
        assert parameter in parameters, f"transformers {transformers.__version__}: Trainer.{name} lost {parameter!r}"


@pytest.mark.parametrize("attribute", ["_tr_loss", "_globalstep_last_logged", "callback_handler.on_train_begin"])
def test_transformers_sets_its_counters_before_on_train_begin(attribute):
    source = inspect.getsource(Trainer._inner_training_loop)
    assert attribute in source, f"transformers {transformers.__version__}: the training loop no longer has {attribute}"
    assert source.index("self._tr_loss =") < source.index("on_train_begin"), "counters are reset after we restore them"


def test_checkpoints_are_rotated_by_the_function_we_call():
    parameters = inspect.signature(trainer_utils.rotate_checkpoints).parameters
    assert {"output_dir", "save_total_limit", "best_model_checkpoint", "use_mtime"} <= set(parameters)


def test_our_options_do_not_hide_trls():
    from trl_grpo_tasks import TaskGRPOConfig

    own = set(itertools.chain(*TaskGRPOConfig.own_options().values()))
    shared = own & {f for c in GRPOConfig.__mro__ for f in getattr(c, "__annotations__", {})}
    # The default None tells whether it was given, and then holds with best_by too. TRL's default holds without it.
    assert shared == {"per_device_eval_batch_size"}
    ours, trls = TaskGRPOConfig(bf16=False), GRPOConfig(bf16=False)
    for name in shared:
        assert getattr(ours, name) == getattr(trls, name)


def test_the_trainer_is_one_class_and_every_override_calls_super():
    from trl_grpo_tasks import TaskGRPOTrainer

    assert TaskGRPOTrainer.__bases__ == (GRPOTrainer,)
    source = inspect.getsource(TaskGRPOTrainer)
    for name, method in vars(TaskGRPOTrainer).items():
        if inspect.isfunction(method) and hasattr(GRPOTrainer, name):
            called = f"super().{name}"  # by the method itself, or by one that it calls
            assert called in source, f"TaskGRPOTrainer does not call {called}"
