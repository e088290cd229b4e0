"""Adapters on quantised bases: what is trained, and that sampling and scoring agree."""

import pytest
import torch

from tests.support.quantised import needs_bitsandbytes, quantization, save_sharp
from tests.support.toy import ToyTask
from tests.support.training import config, parameters, resumed
from trl_grpo_tasks import TaskGRPOTrainer

pytestmark = needs_bitsandbytes
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def sharp_path(tiny_path, tmp_path_factory):
    return save_sharp(tiny_path, tmp_path_factory.mktemp("sharp"))


def quantised_trainer(path, folder, bits=4, quantized=None, **options):
    """As the command line builds it: a path, an adapter to make, and TRL's BitsAndBytesConfig."""
    from peft import LoraConfig

    return TaskGRPOTrainer(
        path,
        args=config(folder, model_init_kwargs={"dtype": "float32"}, **options),
        task=ToyTask(),
        peft_config=LoraConfig(r=4, target_modules=LAYERS),
        quantization_config=quantized or quantization(bits),
    )


@pytest.mark.parametrize(
    ("bits", "options"),
    [
        (8, {"rollout": "fast"}),
        (4, {"rollout": "fast", "top_k": 5, "share_prompts": True, "beta": 0.1}),
        (8, {"rollout": "trl", "constrain": True, "beta": 0.1}),
        (4, {"rollout": "trl", "reference_mode": "ema", "beta": 0.1}),
        (4, {"rollout": "fast", "constrain": True, "gradient_checkpointing": True}),
    ],
    ids=["plain", "filtered", "constrained", "moving-reference", "checkpointing"],
)
def test_log_probs_at_sampling_are_those_of_training(sharp_path, tmp_path, capsys, bits, options):
    settings = {"temperature": 0.8, "max_steps": 3, "num_iterations": 2, "learning_rate": 0.05}
    trainer = quantised_trainer(sharp_path, tmp_path, bits, **settings, **options)
    assert "because" not in capsys.readouterr().out, "nothing falls back"
    before = parameters(trainer)
    trainer.train()
    name = "sampling/logp_difference_max"
    differences = [log[name] for log in trainer.state.log_history if name in log]
    assert len(differences) == 2 and max(differences) < 1e-5, "two rollouts for three steps"
    after = parameters(trainer)
    moved = {name for name in before if not after[name].equal(before[name])}
    assert {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in moved} == set(LAYERS)
    assert {name for name in moved if ".default." not in name} <= {name for name in before if ".ref." in name}


def test_steps_smaller_than_the_rounding_of_bfloat16_are_not_lost(tiny_path, tmp_path):
    """TRL keeps adapters on quantised models in bfloat16, in which a step of 1e-5 changes no weight above 0.005."""
    trainer = quantised_trainer(tiny_path, tmp_path, 8, constrain=True, max_steps=2, learning_rate=1e-5)
    before = parameters(trainer)
    assert {weight.dtype for name, weight in before.items() if "lora_" in name} == {torch.float32}
    trainer.train()
    after = parameters(trainer)
    for name, weight in before.items():
        if "lora_A" in name:  # B begins at 0, so that the gradient of A is 0 in the first step
            large = weight.abs() > 0.005
            assert 0 < (after[name] - weight).abs()[large].max() < 1e-4, name


def test_an_adapter_that_is_trained_further_is_not_rounded(tiny_path, tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_path, quantization_config=quantization(4))
    model = get_peft_model(model, LoraConfig(r=4, target_modules=LAYERS))
    given = {name: weight.detach().clone() for name, weight in model.named_parameters() if weight.requires_grad}
    trainer = TaskGRPOTrainer(model, args=config(tmp_path, beta=0.1), task=ToyTask())
    kept = parameters(trainer)
    for name, weight in given.items():
        assert kept[name].equal(weight) and kept[name.replace(".default.", ".ref.")].equal(weight)


def test_a_resumed_run_is_the_run_that_was_not_stopped(tiny_path, tmp_path):
    settings = {"constrain": True, "beta": 0.1, "reference_mode": "ema", "save_strategy": "steps", "save_steps": 1,
                "rollout": "fast", "max_steps": 3}  # fmt: skip
    assert list(resumed(lambda: quantised_trainer(tiny_path, tmp_path, 4, **settings), tmp_path, (2,)))


def test_evaluation_during_training_does_not_change_what_is_trained(tiny_path, tmp_path):
    """On some CPUs, bitsandbytes repacks 4-bit weights in the first evaluation, and they pass no gradient then."""
    trainer = quantised_trainer(tiny_path, tmp_path)
    layers = [part for part in trainer.model.modules() if hasattr(part, "support_avx512bf16_for_cpu")]
    assert len(layers) == len(LAYERS) and not any(layer.support_avx512bf16_for_cpu for layer in layers)


def test_a_quantised_lm_head_is_refused(tiny_path, tmp_path):
    skips = quantization(4, llm_int8_skip_modules=["q_proj"])  # replaces the default, which names the head
    with pytest.raises(ValueError, match=r"^the LM head of this model is quantised.*add 'lm_head' to.*$"):
        quantised_trainer(tiny_path, tmp_path, quantized=skips)
