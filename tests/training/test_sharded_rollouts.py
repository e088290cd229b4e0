"""Whole copies of weights under FSDP2, from which our rollouts generate, in two processes (gloo); test_sharded.py
trains with them."""

import copy

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, Qwen2Config, Qwen3MoeConfig

from tests.support.forked import launch
from tests.support.rollouts import EOS, MODELS, PROMPTS, Paged, dense_logps, tiny
from tests.support.sharded import held_bytes, options_of, shard_on_cpu
from tests.support.toy_repair import AdvisingToy
from tests.support.training import toy_trainer
from trl_grpo_tasks.constraints.sharding import reshard
from trl_grpo_tasks.rollout import Decoder, gathered, rollout
from trl_grpo_tasks.rollout.gathered import GatheredCopy
from trl_grpo_tasks.rollout.support import without_adapter

LORA = {"r": 2, "lora_alpha": 4, "target_modules": "all-linear"}
CROWDED = "the GPU of the second process is full"


# ---- what runs in the processes


def sharded_with_copy(model, dtype=None):
    """Shard a model as accelerate does; return a whole copy from before, and the copy under test."""
    plain = without_adapter(model)
    reference, tested = copy.deepcopy(model), GatheredCopy(plain, dtype, torch.device("cpu"))
    policy = MixedPrecisionPolicy(param_dtype=dtype, output_dtype=dtype)
    for layer in plain.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return reference, tested


def move(*models):
    """Change all weights, as an optimizer does."""
    with torch.no_grad():
        for model in models:
            reshard(model)  # after a forward pass, FSDP2 leaves some weights whole
            for weight in model.parameters():
                weight.mul_(0.8)


def check_copies():
    """Completions of copies are those of `generate`, before and after weights change; the copies are freed."""
    untied = {"tie_word_embeddings": False}
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    models = [
        tiny(LlamaConfig, tie_word_embeddings=True),
        tiny(Qwen3MoeConfig, **moe, **untied),
        get_peft_model(tiny(Qwen2Config, **untied), LoraConfig(init_lora_weights=False, **LORA)).eval(),
    ]
    for model, decoder_class in zip(models, (Decoder, Decoder, Paged), strict=True):
        reference, tested = sharded_with_copy(model)
        decoder, length = None, 8
        for _ in range(2):
            prompts = PROMPTS if dist.get_rank() == 0 else []  # one process has nothing to generate
            with tested.loaded() as whole_model:
                wanted = list(without_adapter(reference).parameters())
                torch.testing.assert_close(list(whole_model.parameters()), wanted, rtol=0, atol=0)
                decoder = decoder or decoder_class(whole_model)
                for prompt in prompts:
                    done = rollout(whole_model, [prompt], max_new_tokens=length, eos_token_ids=[EOS], temperature=0,
                                   decoder=decoder)  # fmt: skip
                    given = torch.tensor([prompt])
                    ids = reference.generate(input_ids=given, max_new_tokens=length, do_sample=False, pad_token_id=0)
                    assert done.completion_ids == [ids[0, len(prompt) :].tolist()]
            assert held_bytes(whole_model) == 0
            move(model, reference)


def check_mixed_precision():
    """A copy in bf16 has the log-probs of the sharded model that FSDP2 runs in bf16."""
    torch.manual_seed(0)
    model = get_peft_model(tiny(LlamaConfig), LoraConfig(init_lora_weights=False, **LORA)).eval()
    reference, tested = sharded_with_copy(model, torch.bfloat16)
    prompt, errors = PROMPTS[0], []
    for _ in range(2):
        with tested.loaded() as whole_model, torch.autocast("cpu", torch.bfloat16):
            for ours, theirs in zip(whole_model.parameters(), without_adapter(reference).parameters(), strict=True):
                assert ours.equal(theirs.bfloat16())
            done = rollout(whole_model, [prompt] * 3, max_new_tokens=8, eos_token_ids=[], temperature=1.0)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            for ids, masks, logps in zip(done.completion_ids, done.masks, done.logps, strict=True):
                wanted = dense_logps(model, prompt, ids, masks, None, 1.0)
                errors += [abs(a - b) for a, b in zip(logps, wanted, strict=True)]
        move(model, reference)
    assert sum(errors) / len(errors) < 0.02 and max(errors) < 0.1, errors


def check_crowded(model, folder):
    """If one process has no room for the copy, TRL generates in all of them, also conversations, which end earlier in
    that process."""
    shard_on_cpu("fsdp2")
    options = {"max_steps": 2, "beta": 0.1, "rollout": "fast", "per_device_train_batch_size": 4}
    options |= {"repair_turns": 2, "constrain": True, "max_completion_length": 24}
    trainer = toy_trainer(model, folder, AdvisingToy(), **options, **options_of("fsdp2"))
    reason = CROWDED if trainer.accelerator.process_index == 1 else None
    if reason is not None:
        trainer.generation.constraint.answers = lambda questions: [None] * len(questions)
    trainer.generation.gathered.unsupported_memory = lambda rows, length: reason
    trainer.generation.roll_out = None
    trainer.train()
    logs = [line for line in trainer.state.log_history if "loss" in line]
    assert len(logs) == 2 and all(line["sampling/logp_difference_max"] < 1e-5 for line in logs)
    with trainer.generation.policy_for_evaluation() as policy:
        assert policy is trainer.model


SCRIPT = f"""
import json, sys
from {__name__} import check_copies, check_crowded, check_mixed_precision
check_crowded(*json.loads(sys.argv[1]))
check_copies()
check_mixed_precision()
"""


# ---- tests


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_whole_copies_of_sharded_weights(tiny_path, tmp_path):
    out, _ = launch(SCRIPT, 2, [tiny_path, str(tmp_path / "crowded")], tmp_path / "two", timeout=400)
    assert out.count(f"TRL generates the completions of some rollouts, because {CROWDED}\n") == 1


def test_the_reason_if_a_copy_does_not_fit(monkeypatch):
    """A copy in bf16, one float32 weight beside it, and a KV cache that takes at most 80% of what is then free."""
    model = MODELS["llama"]
    shapes = [p.shape for p in model.parameters()]
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    largest = 4 * max(layer, *(shape.numel() for shape in shapes))
    cache = 3 * 100 * (2 * 2 * 1 * 8 * 2)  # rows, tokens, and bytes per token: keys and values of 2 layers, 1 head
    needed = sum(2 * shape.numel() for shape in shapes) + largest + cache / 0.8
    tested = GatheredCopy(model, torch.bfloat16, torch.device("cuda"))
    monkeypatch.setattr(gathered, "free_memory", lambda device: needed)
    assert tested.unsupported_memory(3, 100) is None
    monkeypatch.setattr(gathered, "free_memory", lambda device: needed - 1)
    assert "3 completions need 0.0 GB per GPU, but only 0.0 GB are free" in tested.unsupported_memory(3, 100)
    assert GatheredCopy(model, None, torch.device("cpu")).unsupported_memory(3, 10**15) is None
