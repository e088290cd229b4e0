"""Conversations with vLLM in two processes, which end after different numbers of turns; a stand-in samples."""

import json

import pytest

from tests.support import forked, vllm_stand_in
from tests.support.exhaustive import exhaustive_but
from tests.support.toy_repair import AdvisingToy
from trl_grpo_tasks.models.loading import load_tokenizer

SCRIPT = """
import json, sys
import pytest
from tests.support import vllm_stand_in
vllm_stand_in.install(pytest.MonkeyPatch())
from tests.support.toy_repair import AdvisingToy
from tests.support.training import toy_trainer
model, output_dir, options = json.loads(sys.argv[1])
trainer = toy_trainer(model, output_dir, AdvisingToy(), constrain=True, repair_turns=3, max_completion_length=36,
                      per_device_train_batch_size=2, num_generations=4, use_vllm=True, max_steps=2, **options)
generation, own, calls, turns = trainer.generation, trainer.accelerator.process_index, [], []
if own == 1:
    generation.constraint.answers = lambda questions: [None] * len(questions)  # the first turn is the last
sample, generate = generation.vllm.sample, trainer.vllm_generation.generate
def counted(*args, **kwargs):
    calls[-1] += 1
    return generate(*args, **kwargs)
def sampled(*args):
    calls.append(0)
    found = sample(*args)
    turns.append(max(ids.count(trainer._tokenizer.eos_token_id) for ids in found.completion_ids))
    return found
generation.vllm.sample, trainer.vllm_generation.generate = sampled, counted
trainer.train()
exact = [line["sampling/logp_difference_max"] < 1e-5 for line in trainer.state.log_history if "loss" in line]
print("\\n" + json.dumps({"process": own, "calls": calls, "turns": turns, "exact": exact}), flush=True)
"""
MODES = ["colocate", "colocate, tensor parallel", "server"]


@pytest.mark.parametrize("mode", exhaustive_but(["server"], MODES))
def test_all_processes_call_vllm_until_the_last_conversation_has_ended(mode, tiny_path, tmp_path, monkeypatch):
    """A group of four completions is that of both processes."""
    options = {"vllm_mode": mode.partition(",")[0], "vllm_tensor_parallel_size": 1 + ("parallel" in mode)}
    vllm_stand_in.install(monkeypatch)
    with vllm_stand_in.serving(monkeypatch, tiny_path, AdvisingToy(), load_tokenizer(tiny_path)) as server:
        if mode == "server":
            options |= {"vllm_server_base_url": server.url, "vllm_weights_folder": str(tmp_path / "weights")}
        arguments = [tiny_path, str(tmp_path / "run"), options]
        out, _ = forked.launch(SCRIPT, 2, arguments, tmp_path / "run", timeout=100)
    found = [json.loads(line) for line in out.splitlines() if line.startswith('{"process"')]
    one, other = sorted(found, key=lambda each: each["process"])
    assert one["calls"] == other["calls"] == one["turns"] and set(one["turns"]) <= {2, 3} and other["turns"] == [1, 1]
    assert one["exact"] == other["exact"] == [True, True]
