"""What differs on a GPU: half precision, captured decode steps, masks and kept sets that cross to the CPU."""

import numpy as np
import pytest
import torch
from peft import LoraConfig

from tests.models.test_shared_prompts import batch, plain_and_shared, tiny
from tests.support.toy import LettersConstraint, ToyTask
from tests.support.training import config
from trl_grpo_tasks import TaskGRPOTrainer
from trl_grpo_tasks.constraints import scoring
from trl_grpo_tasks.constraints.base import pack, replay, unpack
from trl_grpo_tasks.constraints.filters import SamplingFilters, pack_on_device
from trl_grpo_tasks.constraints.scoring import Head, HeadScale, masked_logps_and_entropies
from trl_grpo_tasks.constraints.table import MaskTable
from trl_grpo_tasks.models import shared_prompts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("counts", [(500,), (2, 30), (200, 499), (1,), (1, 2, 30, 200, 499, 500)], ids=str)
@pytest.mark.parametrize("scale", [HeadScale(0.8), HeadScale(0.9, 2.0, 3.0)], ids=repr)
def test_every_route_in_every_precision(dtype, counts, scale, monkeypatch):
    """Log-probs, entropies and gradients against a dense float64 softmax of the same rounded weights."""
    monkeypatch.setattr(scoring, "WIDE_TOKENS", 0)
    rng, vocabulary, positions, width = np.random.default_rng(0), 500, 300, 64
    table, masks = MaskTable(vocabulary), []
    for count in counts:
        mask = np.zeros(vocabulary, dtype=bool)
        mask[rng.choice(vocabulary, count, replace=False)] = True
        masks.append(mask)
    chosen = rng.integers(len(masks), size=positions)
    allowed = torch.from_numpy(np.stack([masks[i] for i in chosen])).cuda()
    numbers = np.array([table.number_of(pack(masks[i])) for i in chosen])
    targets = torch.tensor([rng.choice(np.flatnonzero(masks[i])) for i in chosen]).cuda()
    make = torch.Generator().manual_seed(0)
    hidden = torch.randn(positions, width, generator=make).to("cuda", dtype).requires_grad_()
    weight = (torch.randn(vocabulary, width, generator=make) / 8).to("cuda", dtype).requires_grad_()
    logps, entropies = masked_logps_and_entropies(hidden, Head(weight, None, scale), targets, numbers, table)
    logits = hidden.double() @ weight.double().T * scale.logit_scale
    if scale.softcap is not None:
        logits = torch.tanh(logits / scale.softcap) * scale.softcap
    dense = (logits / scale.temperature).masked_fill(~allowed, -torch.inf).log_softmax(1)
    wanted = dense.gather(1, targets[:, None])[:, 0], -(dense.exp() * dense.masked_fill(~allowed, 0)).sum(1)
    near = {torch.float32: 2e-3, torch.bfloat16: 0.05, torch.float16: 0.01}[dtype]
    leaves = [hidden, weight]
    got = torch.autograd.grad((logps - 0.5 * entropies).sum(), leaves)
    want = torch.autograd.grad((wanted[0] - 0.5 * wanted[1]).sum(), leaves)
    for one, other in zip((logps, entropies, *got), (*wanted, *want), strict=True):
        assert one.isfinite().all()
        error = (one.double() - other.double()).abs().max() / other.double().abs().max().clamp(min=1)
        assert error < near


@pytest.mark.parametrize("filters", [SamplingFilters(top_k=7), SamplingFilters(top_p=0.8), SamplingFilters(min_p=0.1)])
def test_filters_keep_the_same_as_on_a_cpu(filters):
    logits = torch.randn(16, 49152, generator=torch.Generator().manual_seed(0)) * 3
    kept = filters.kept(logits)
    assert torch.equal(filters.kept(logits.cuda()).cpu(), kept)
    assert torch.equal(pack_on_device(kept.cuda()).cpu(), pack_on_device(kept))


@pytest.mark.parametrize("peft", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("precision", [{}, {"bf16": True}, {"fp16": True}], ids=["float32", "bf16", "fp16"])
@pytest.mark.parametrize("engine", ["fast", "trl"])
@pytest.mark.parametrize("options", [{"top_p": 0.8}, {"constrain": True}, {"constrain": True, "top_k": 3}], ids=str)
def test_rollouts_are_scored_as_they_were_sampled(tiny_path, tmp_path, options, engine, precision, peft):
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if peft else None
    settings = {"use_cpu": False, "temperature": 0.8, "max_steps": 4, "learning_rate": 1e-3, "entropy_coef": 0.01}
    args = config(tmp_path, rollout=engine, **(settings | options | precision))
    trainer = TaskGRPOTrainer(tiny_path, args=args, task=ToyTask(), peft_config=adapter)
    trainer.train()
    logs = [line for line in trainer.state.log_history if "loss" in line]
    near = {"bf16": 0.05, "fp16": 0.01}.get(next(iter(precision), ""), 1e-3)
    assert all(line["sampling/logp_difference_mean"] < near for line in logs)
    assert all(np.isfinite(line["loss"]) and np.isfinite(line["entropy"]) for line in logs)
    assert np.isfinite(logs[-1]["grad_norm"])
    if options.get("constrain"):
        trainer.model.train()
        output = trainer._generate_and_score_completions([trainer.train_dataset[i] for i in (0, 0, 0, 0, 3, 3, 3, 3)])
        table, constraint = trainer.generation.tables["train"], LettersConstraint(trainer._tokenizer)
        for row, number_row in zip(range(8), output["mask_numbers"], strict=True):
            ids = output["completion_ids"][row][output["completion_mask"][row].bool()].tolist()
            for mask, number, token in zip(replay(constraint, {}, ids), number_row.tolist(), ids, strict=False):
                kept = set(table.ids(number).tolist())
                allowed = set(np.flatnonzero(unpack(mask, table.vocab_size)).tolist())
                assert token in kept and kept <= allowed and (kept == allowed or "top_k" in options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["static", "ema", "periodic"])
def test_an_offloaded_reference_is_on_the_gpu_only_while_it_scores(tiny_path, tmp_path, mode, dtype):
    """Two trainers score the same rollout before and after the same update of the policy: all bits are equal."""
    settings = {"use_cpu": False, "beta": 0.1, "constrain": True, "rollout": "fast", "max_steps": 3, "ema_alpha": 0.7}
    settings |= {"reference_mode": mode, "reference_update_freq": 1, "model_init_kwargs": {"dtype": dtype}}
    trainers = [
        TaskGRPOTrainer(tiny_path, args=config(tmp_path / str(offload), offload_reference=offload, **settings),
                        task=ToyTask())
        for offload in (False, True)
    ]  # fmt: skip
    plain, offloaded = trainers
    used = []
    offloaded.ref_model.model.register_forward_pre_hook(
        lambda *_: used.append({weight.device.type for weight in offloaded.ref_model.parameters()})
    )
    for trainer in trainers:
        trainer.model.train()
    output = plain._generate_and_score_completions([plain.train_dataset[i] for i in (0, 0, 0, 0, 3, 3, 3, 3)])
    offloaded.generation.tables["train"] = plain.generation.tables["train"]
    for _ in range(3):
        logps = [trainer.scoring.logps(output, of_reference=True) for trainer in trainers]
        assert torch.equal(*logps) and logps[0].device.type == "cuda"
        assert all(weight.is_pinned() for weight in offloaded.ref_model.parameters())
        for trainer in trainers:
            shift = torch.Generator("cuda").manual_seed(0)
            for weight in trainer.model.parameters():
                weight.data.add_(0.1 * torch.randn(weight.shape, generator=shift, device="cuda", dtype=weight.dtype))
            if mode != "static":
                trainer.extras["reference"].state.update()
        for weight, copy in zip(plain.ref_model.parameters(), offloaded.ref_model.parameters(), strict=True):
            assert weight.is_cuda and torch.equal(weight.cpu(), copy)
    assert used and all(devices == {"cuda"} for devices in used)
    if mode == "ema":
        assert all(value.is_pinned() for value in offloaded.extras["reference"].state._average.values())
    before = torch.cuda.memory_allocated()
    with offloaded.scoring._offloaded.on_device():
        during = torch.cuda.memory_allocated()
    size = sum(weight.nbytes for weight in offloaded.ref_model.parameters())
    assert during - before >= size and torch.cuda.memory_allocated() == before
    offloaded.train()
    logs = [line for line in offloaded.state.log_history if "kl" in line]
    assert len(logs) == 3 and all(np.isfinite(line["kl"]) for line in logs)


@pytest.mark.parametrize("rows", [[7, 7, 2, 7, 2, 2, 8, 7], [1, 2, 3, 4, 5, 6, 7, 8]], ids=["shared", "distinct"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma", "cohere"])
def test_packed_rows_in_half_precision_are_as_exact_as_padded_ones(family, rows, monkeypatch):
    """Log-probs and gradients by FlashAttention against float64 on the CPU."""
    monkeypatch.setattr(shared_prompts, "MAX_TOKEN_FRACTION", 1.0)
    monkeypatch.setattr(shared_prompts, "LEAST_WORK_ON_GPU", 0)
    calls, flash = [], shared_prompts.flash_attention
    monkeypatch.setattr(shared_prompts, "flash_attention", lambda *args: calls.append(1) or flash(*args))
    ids, mask, length = batch(rows, [4, 2, 3, 4, 1, 9, 3, 2])
    exact = plain_and_shared(tiny(family), ids, mask, length)[0]
    padded, packed = plain_and_shared(tiny(family, torch.bfloat16).cuda(), ids.cuda(), mask.cuda(), length)
    assert len(calls) == 2  # one for each layer

    def error(found):
        pairs = [(found[0], exact[0]), *((found[1][name], grad) for name, grad in exact[1].items())]
        return max((one.double().cpu() - other).norm() / other.norm() for one, other in pairs if other.norm() > 1e-3)

    assert error(packed) < 1.5 * error(padded) + 1e-3 < 0.2


@pytest.mark.parametrize(
    "options", [{"bf16": True}, {"fp16": True}, {"bf16": True, "gradient_checkpointing": True}], ids=str
)
def test_training_on_packed_rows_equals_training_on_padded_ones(tiny_path, tmp_path, options, monkeypatch):
    monkeypatch.setattr(shared_prompts, "MAX_TOKEN_FRACTION", 1.0)
    monkeypatch.setattr(shared_prompts, "LEAST_WORK_ON_GPU", 0)
    losses = []
    for share in (False, True):
        args = config(tmp_path / str(share), use_cpu=False, constrain=True, beta=0.1, max_steps=4, learning_rate=1e-4,
                      share_prompts=share, **options)  # fmt: skip
        trainer = TaskGRPOTrainer(tiny_path, args=args, task=ToyTask())
        trainer.train()
        logs = [line for line in trainer.state.log_history if "loss" in line]
        assert all(line["sampling/logp_difference_mean"] < 0.05 for line in logs)
        losses.append([line["loss"] for line in logs])
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)
