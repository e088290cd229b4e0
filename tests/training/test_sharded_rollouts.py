"""Our rollouts under FSDP2 and ZeRO-3, in two processes (gloo): each generates from a whole copy of the weights."""

import copy
import importlib
import json
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, Qwen2Config, Qwen3MoeConfig

from tests.support.forked import launch
from tests.support.rollouts import EOS, MODELS, PROMPTS, Paged, dense_logps, tiny
from tests.support.sharded import options_of, shard_on_cpu
from tests.support.toy import ToyTask
from tests.support.training import toy_trainer
from trl_grpo_tasks.constraints.sharding import reshard, whole
from trl_grpo_tasks.evaluation.evaluate import evaluate
from trl_grpo_tasks.rewards.executor import RewardExecutor
from trl_grpo_tasks.rollout import Decoder, gathered, rollout
from trl_grpo_tasks.rollout.gathered import GatheredCopy
from trl_grpo_tasks.rollout.groups import SteppedGroup
from trl_grpo_tasks.rollout.support import without_adapter
from trl_grpo_tasks.training.layers.generation import GenerationLayer

LORA = {"r": 2, "lora_alpha": 4, "target_modules": "all-linear"}
CASES = {
    "full": {"constrain": True, "kl_target": 0.01},
    "lora": {"constrain": True, "lora": True},
    "free": {"top_k": 6, "gradient_checkpointing": True, "eval_strategy": "steps", "eval_steps": 2},
}
# A large epsilon, because Adam divides the rounding of gradients near zero by their size.
COMMON = {"max_steps": 3, "beta": 0.1, "rollout": "fast", "adam_epsilon": 1e-3}
TEXTS = {"num_samples": 3, "max_completion_length": 5, "batch_size": 4}  # in the last round, one process has no rows
CROWDED = "the GPU of the second process is full"


# ---- what runs in the processes


def train_cases(model, folder, sharded):
    """Train all cases with our rollouts; save weights, and completions of an evaluation afterwards."""
    options = COMMON | sharding_options(sharded)
    processes = 1 if sharded is None else 2
    sizes = {f"per_device_{part}_batch_size": 8 // processes for part in ("train", "eval")}
    for name, case in CASES.items():
        case, out = dict(case), Path(folder) / name
        extra = {"peft_config": LoraConfig(task_type="CAUSAL_LM", **LORA)} if case.pop("lora", False) else {}
        trainer = toy_trainer(model, out, **(options | sizes | case), **extra)
        with without_trls_generation(), placed_sampling(trainer):
            trainer.train()
        weights = {name: whole(p).detach().clone() for name, p in trainer.model.named_parameters()}
        with trainer.policy_for_evaluation() as policy, RewardExecutor(ToyTask()) as executor:
            assert all(p.isfinite().all() and p.numel() for p in policy.parameters())
            rows = ToyTask().dataset("test", 3, 0)
            found = evaluate("a", policy, trainer.processing_class, ToyTask(), rows, executor=executor, **TEXTS)
        if sharded is not None:
            assert policy is not without_adapter(trainer.model) and held_bytes(policy) == 0
        if trainer.accelerator.is_main_process:
            torch.save(weights, out / "weights.pt")
            (out / "texts.json").write_text(json.dumps([sample.completion for sample in found.samples]))
        trainer.accelerator.wait_for_everyone()


def sharding_options(kind):
    """Prepare this process for sharded trainers; return the options of trainers."""
    if kind == "zero3":
        importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # compiling it takes a minute
    if kind is not None:
        shard_on_cpu(kind)
    return options_of(kind)


@contextmanager
def placed_sampling(trainer):
    """While open, a token that our rollouts draw depends on its row in the batch of all processes, its position and
    the step, but not on the number of processes."""
    places = []
    gather_logits, multinomial = SteppedGroup._gather_logits, torch.multinomial

    def noted(group):
        logits, batch = gather_logits(group), group._batch
        first = len(batch.prompts) * trainer.accelerator.process_index
        places[:] = [(first + i, len(batch.result.completion_ids[i])) for i in group.active]
        return logits

    def placed(probabilities_B_V, num_samples):
        seeds = [10_000 * trainer.state.global_step + 100 * row + position for row, position in places]
        size = probabilities_B_V.shape[1]
        noise = torch.stack([torch.rand(size, generator=torch.Generator().manual_seed(seed)) for seed in seeds])
        return (probabilities_B_V / -noise.log()).argmax(1, keepdim=True)

    SteppedGroup._gather_logits, torch.multinomial = noted, placed
    try:
        yield
    finally:
        SteppedGroup._gather_logits, torch.multinomial = gather_logits, multinomial


@contextmanager
def without_trls_generation():
    def refuse(*_):
        raise AssertionError("TRL generates")

    original, GenerationLayer._generate_recorded = GenerationLayer._generate_recorded, refuse
    try:
        yield
    finally:
        GenerationLayer._generate_recorded = original


def held_bytes(model):
    return sum(weight.untyped_storage().nbytes() for weight in model.parameters())


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
    """If one process has no room for the copy, TRL generates in all of them."""
    trainer = toy_trainer(model, folder, **COMMON | {"max_steps": 2, "per_device_train_batch_size": 4})
    reason = CROWDED if trainer.accelerator.process_index == 1 else None
    trainer._gathered.unsupported_memory = lambda rows, length: reason
    trainer._roll_out = None
    trainer.train()
    with trainer.policy_for_evaluation() as policy:
        assert policy is trainer.model


SCRIPT = f"""
import json, sys
from {__name__} import check_copies, check_crowded, check_mixed_precision, train_cases
argument = json.loads(sys.argv[1])
train_cases(**argument)
if argument["sharded"] == "fsdp2":
    check_crowded(argument["model"], argument["folder"] + "/crowded")
    check_copies()
    check_mixed_precision()
"""


# ---- tests


METRICS = ("loss", "kl", "reward", "entropy", "grad_norm", "beta", "completions/mean_length", "eval_kl", "eval_reward")


def outcomes(folder):
    """The weights, metrics and evaluated completions of each case."""
    for case in CASES:
        lines = (folder / case / "training_metrics.jsonl").read_text().splitlines()
        weights = torch.load(folder / case / "weights.pt")
        yield (
            case,
            weights,
            [json.loads(line) for line in lines],
            json.loads((folder / case / "texts.json").read_text()),
        )


@pytest.fixture(scope="module")
def one(tiny_path, tmp_path_factory):
    """All cases in one process, with whole weights."""
    folder = tmp_path_factory.mktemp("one")
    train_cases(tiny_path, folder, None)
    return list(outcomes(folder))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["fsdp2", "zero3"])
def test_rollouts_of_sharded_weights_are_those_of_whole_weights(one, tiny_path, tmp_path, kind):
    """Trains as one process does, where the weights of each step are those that the next rollout uses."""
    if kind == "zero3":
        pytest.importorskip("deepspeed")
    argument = {"model": tiny_path, "folder": str(tmp_path / "two"), "sharded": kind}
    out, _ = launch(SCRIPT, 2, argument, tmp_path / "two", timeout=400)
    for expected, found in zip(one, outcomes(tmp_path / "two"), strict=True):
        case, weights, metrics, texts = found
        torch.testing.assert_close(weights, expected[1], atol=1e-5, rtol=1e-5)
        for line, wanted in zip(metrics, expected[2], strict=True):
            both = {key: (line[key], wanted[key]) for key in METRICS if key in line}
            assert all(a == pytest.approx(b, abs=1e-5) for a, b in both.values()), (case, both)
        trained = [line for line in metrics if "loss" in line]
        assert len(trained) == 3 and any(line["grad_norm"] > 0 for line in trained), case
        assert all(line["sampling/logp_difference_max"] < 1e-5 for line in trained), case
        assert texts == expected[3] and len(texts) == 9
    if kind == "fsdp2":
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
