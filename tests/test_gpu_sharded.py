"""One process under FSDP2 and under ZeRO-3 on a GPU trains as without sharding, in bf16, up to rounding."""

import json
import os
import socket
import subprocess
import sys

import pytest
import torch

from tests.support.paths import ROOT
from tests.training.test_sharded import ZERO3

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
STEPS = 4
# Completions are given, so that the runs differ by rounding only. bf16 has 8 bits: a log-prob of about -1 differs by
# some 0.005. On top of that, FSDP2 and ZeRO-3 round norms and the residual stream to bf16, which autocast does not.
TOLERANCES = {"logp_mean": 0.02, "entropy": 0.02, "kl": 0.01, "loss": 0.02, "grad_norm": 0.15, "reward": 1e-6}
TOLERANCES |= {"constraint/allowed_mass": 0.02}
SCRIPT = """
import json, sys
from transformers import LlamaConfig, LlamaForCausalLM, set_seed
kind, folder = sys.argv[1:]
if kind != "none":
    from tests.support.sharded import launch_environment
    launch_environment(kind, "bf16")
from tests.support.toy import ToyTask
from tests.support.training import config
from tests.training.test_forced_distributed import HalfForced, PlacedTrainer
from trl_grpo_tasks.constraints.sharding import is_sharded
from trl_grpo_tasks.evaluation.evaluate import evaluate
from trl_grpo_tasks.models.loading import load_model
from trl_grpo_tasks.models.tiny import make_tokenizer
from trl_grpo_tasks.rewards.executor import RewardExecutor

tokenizer = make_tokenizer(ToyTask().tiny().tokens, 64)
set_seed(0)
sizes = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2, head_dim=64)
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=False, **sizes))
model.save_pretrained(folder + "/model")
tokenizer.save_pretrained(folder + "/model")
options = dict(use_cpu=False, bf16=True, constrain=True, beta=0.1, reference_mode="ema", ema_alpha=0.7,
               max_steps=STEPS, learning_rate=1e-3, optim="adamw_torch", model_init_kwargs={"dtype": "float32"})
trainer = PlacedTrainer(folder + "/model", args=config(folder, **options), task=HalfForced())
assert (trainer.is_fsdp_enabled, trainer._dist.is_zero3) == (kind == "fsdp2", kind == "zero3")
trainer.train()
trained = trainer.accelerator.unwrap_model(trainer.model)
assert trained.device.type == DEVICE and is_sharded(trained) == (kind != "none")
# Generation by the sharded model, and the saved model.
task = HalfForced()
with trainer.accelerator.autocast():
    made = evaluate("after", trained, tokenizer, task, task.dataset("test", 2, 0),
                    executor=RewardExecutor(task, workers=0), num_samples=8, max_completion_length=5,
                    constraint=trainer.generation.constraint)
assert made.metrics["valid"] == 1
trainer.save_model(folder + "/saved")
before, after = (load_model(folder + name, dtype="float32").state_dict() for name in ("/model", "/saved"))
assert all(not after[name].equal(value) for name, value in before.items() if "proj" in name)
json.dump(trainer.state.log_history, open(folder + "/log.json", "w"))
"""


def train(folder, kind, device="cuda"):
    """Train in another process; return the metrics of each step."""
    folder.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"} if kind != "none" else {}
    script = SCRIPT.replace("STEPS", str(STEPS)).replace("DEVICE", repr(device))
    done = subprocess.run([sys.executable, "-c", script, kind, str(folder)], env=os.environ | address | one, cwd=ROOT,
                          capture_output=True, text=True, timeout=120)  # fmt: skip
    assert done.returncode == 0, f"{kind}: {done.stderr[-4000:]}"
    return [line for line in json.loads((folder / "log.json").read_text()) if "loss" in line]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return train(tmp_path_factory.mktemp("gpu") / "none", "none")


@pytest.mark.parametrize("kind", ["fsdp2", ZERO3])
def test_one_sharded_process_trains_as_without_sharding(plain, tmp_path, kind):
    sharded = train(tmp_path / kind, kind)
    assert len(sharded) == len(plain) == STEPS
    for ours, expected in zip(sharded, plain, strict=True):
        for key, tolerance in TOLERANCES.items():
            assert ours[key] == pytest.approx(expected[key], abs=tolerance), (kind, key, ours["step"])
    assert sharded[-1]["kl"] > 0 and all(line["grad_norm"] > 0 for line in sharded)
