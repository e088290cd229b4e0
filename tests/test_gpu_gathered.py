"""Our rollouts on a GPU under FSDP2, in one process: CUDA graphs read a gathered copy of the weights in bf16."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from tests.support.paths import ROOT
from tests.support.rollouts import dense_logps
from tests.support.toy import ToyTask
from tests.support.training import toy_trainer
from trl_grpo_tasks.constraints.sharding import reshard
from trl_grpo_tasks.models.tiny import save_tiny
from trl_grpo_tasks.rollout import gathered
from trl_grpo_tasks.rollout.graphs import Graphs
from trl_grpo_tasks.rollout.support import without_adapter

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

OPTIONS = {"use_cpu": False, "bf16": True, "rollout": "fast", "max_steps": 4, "max_completion_length": 24}
OPTIONS |= {"temperature": 0.8, "num_generations": 8, "per_device_train_batch_size": 16}
# Copies are freed after each rollout in the first case, and kept in the second.
CASES = {
    "freed": {"learning_rate": 1e-3},
    "kept": {"learning_rate": 1e-2, "constrain": True, "peft_config": LoraConfig(r=4, target_modules="all-linear")},
}
ENVIRONMENT = os.environ | {
    "PYTHONPATH": str(ROOT),
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    # Each stream on which a graph is captured has such a workspace, of 32 MB by default.
    "CUBLAS_WORKSPACE_CONFIG": ":16:8",
    "CUBLASLT_WORKSPACE_SIZE": "128",
}
CAPTURE = Graphs.capture
SCRIPT = f"import json, sys\nfrom {__name__} import train\ntrain(**json.loads(sys.argv[1]))\n"


class Watched:
    """Notes what happens in each rollout of a trainer, and checks its log-probs against the sharded model."""

    def __init__(self, trainer):
        generation = trainer.generation
        self._trainer, self._roll_out, self._loaded = trainer, generation.roll_out, generation.gathered.loaded
        self.notes, self.copy, self.captures = [], None, 0
        generation.roll_out, generation.gathered.loaded = self.roll_out, self.loaded
        Graphs.capture = self.capture

    def capture(self, function):
        self.captures += 1
        return CAPTURE(self._trainer.generation.decoder._graphs, function)

    @contextmanager
    def loaded(self):
        with self._loaded() as self.copy:
            shards = list(without_adapter(self._trainer.model).parameters())
            for weight, shard in zip(self.copy.parameters(), shards, strict=True):
                assert isinstance(shard, DTensor) and weight.equal(shard.full_tensor().bfloat16())
            yield self.copy

    def roll_out(self, prompt_ids, recording):
        reshard(self._trainer.model)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        generated = self._roll_out(prompt_ids, recording)
        after, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        graphs = self._trainer.generation.decoder._graphs
        storages = [weight.untyped_storage() for weight in self.copy.parameters()]
        self.notes.append(
            {
                "kept": after - before,
                "peak": peak - before,
                "held": sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()),
                "graphs": len(graphs._passes) + len(graphs._steps),
                "error": self.error(prompt_ids, generated, recording.get("table")),
            }
        )
        return generated

    @torch.no_grad()
    def error(self, prompt_ids, generated, table):
        """The mean error of the log-probs of some rows."""
        rows = list(zip(prompt_ids, *generated, strict=True))[::5]
        errors = []
        for prompt, ids, masks, logps in rows:
            wanted = dense_logps(self._trainer.model, prompt, ids, masks, table, 0.8)
            errors += [abs(a - b) for a, b in zip(logps, wanted, strict=True)]
        return sum(errors) / len(errors)


def train(model, folder):
    for name, options in CASES.items():
        gathered.is_freed_between_rollouts = lambda size, device, name=name: name == "freed"
        # Compilation takes seconds, so that one case is compiled.
        os.environ["TORCH_COMPILE_DISABLE"] = "1" if name == "freed" else "0"
        trainer = toy_trainer(model, Path(folder) / name, **(OPTIONS | options))
        watched = Watched(trainer)
        before = [weight.clone() for weight in trainer.model.parameters() if weight.requires_grad]
        trainer.train()
        assert trainer.accelerator.is_fsdp2 and trainer.generation.decoder.is_asynchronous
        reshard(trainer.model)
        after = [weight.full_tensor().cpu() for weight in trainer.model.parameters() if weight.requires_grad]
        moved = max((a - b.cpu()).abs().max().item() for a, b in zip(after, before, strict=True))
        size = sum(2 * weight.numel() for weight in without_adapter(trainer.model).parameters())
        logs = [line for line in trainer.state.log_history if "loss" in line]
        found = {"rollouts": watched.notes, "captures": watched.captures, "moved": moved, "size": size, "logs": logs}
        (Path(folder) / f"{name}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What both cases noted. The model has heads of size 64, and its next token is uncertain."""
    folder = tmp_path_factory.mktemp("gathered")
    save_tiny(replace(ToyTask().tiny(), hidden_size=768, layers=4, heads=12), folder / "model", seed=0)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            weight.data.mul_(4 if "lm_head" in name else 2)
    model.save_pretrained(folder / "model")
    (folder / "run.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]
    command += [str(folder / "run.py"), json.dumps({"model": str(folder / "model"), "folder": str(folder)})]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "TRL generates" not in done.stdout
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in CASES}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES)
def test_log_probs_of_rollouts_are_those_of_the_sharded_model(found, case):
    """At each step, after weights have moved by more than their rounding to bf16."""
    assert found[case]["moved"] > 1e-3 and len(found[case]["rollouts"]) == len(found[case]["logs"]) == 4
    assert max(rollout["error"] for rollout in found[case]["rollouts"]) < 0.04
    assert all(line["sampling/logp_difference_mean"] < 0.05 for line in found[case]["logs"])


@pytest.mark.timeout(600)
def test_memory_of_the_copy_is_freed(found):
    size = found["freed"]["size"]
    assert size > 2**25
    for rollout in found["freed"]["rollouts"]:
        assert rollout["held"] == 0 and rollout["peak"] > size and rollout["graphs"]
    for rollout in found["freed"]["rollouts"][1:]:  # the first one also creates what is kept for graphs
        assert rollout["kept"] < size / 4


@pytest.mark.timeout(600)
def test_graphs_are_captured_once_if_the_copy_is_kept(found):
    *_, last = rollouts = found["kept"]["rollouts"]
    assert all(rollout["held"] == found["kept"]["size"] for rollout in rollouts)
    assert 0 < last["graphs"] == found["kept"]["captures"]
