"""Sampling filters keep the same tokens as transformers, kept sets are recorded, and training under them is exact."""

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence
from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from tests.support.toy import LettersConstraint, ToyTask
from tests.support.training import toy_trainer
from trl_grpo_tasks.constraints.base import pack, pack_ids, replay, unpack
from trl_grpo_tasks.constraints.filters import SamplingFilters, pack_on_device
from trl_grpo_tasks.constraints.table import FREE, MaskTable, pad_mask_numbers
from trl_grpo_tasks.training.groups import RolloutGroups

FILTERS = st.builds(
    SamplingFilters,
    top_k=st.sampled_from([0, 1, 3, 20, 500]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)


@settings(max_examples=200)
@given(FILTERS, st.integers(0, 10_000), st.sampled_from([0.3, 2.0, 8.0]), st.integers(1, 70))
def test_filters_keep_the_same_tokens_as_transformers(filters, seed, spread, allowed):
    make = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, 70, generator=make, dtype=torch.float64) * spread
    logits[:, torch.randperm(70, generator=make)[allowed:]] = -torch.inf
    peers = LogitsProcessorList()
    if filters.top_k:
        peers.append(TopKLogitsWarper(filters.top_k))
    if filters.top_p < 1:
        peers.append(TopPLogitsWarper(filters.top_p))
    if filters.min_p:
        peers.append(MinPLogitsWarper(filters.min_p))
    wanted = peers(None, logits.clone()) > -torch.inf
    assert torch.equal(filters.kept(logits), wanted)


def test_equal_logits_are_kept_or_dropped_together():
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0]])
    assert SamplingFilters(top_k=2).kept(logits).tolist() == [[True, True, True, False]]
    assert SamplingFilters(top_p=0.7).kept(logits).tolist() == [[True, True, True, False]]
    assert SamplingFilters(top_p=1e-6).kept(torch.zeros(1, 3)).all()
    halves = torch.tensor([[2.0, 1.0, 1.0]], dtype=torch.float64).log()
    assert SamplingFilters(top_p=0.5).kept(halves).tolist() == [[True, False, False]], "exactly the share is enough"


def test_filters_are_read_from_trl_and_transformers_options():
    assert not SamplingFilters.of({"top_k": None, "top_p": None, "min_p": None})
    assert not SamplingFilters.of({"top_k": -1}) and not SamplingFilters.of({})
    assert str(SamplingFilters.of({"top_k": 5, "top_p": 0.9, "min_p": 0.01})) == "top_k=5, top_p=0.9, min_p=0.01"


@settings(max_examples=60)
@given(st.integers(1, 200), st.integers(0, 1000), st.floats(0, 1))
def test_packing_on_the_device_equals_packing_in_numpy(vocabulary, seed, share):
    kept = np.random.default_rng(seed).random((3, vocabulary)) < share
    assert (pack_on_device(torch.from_numpy(kept)).numpy() == np.stack([pack(row) for row in kept])).all()


@settings(max_examples=60)
@given(st.integers(40, 400), st.lists(st.sets(st.integers(0, 39), min_size=1), min_size=1, max_size=6), st.booleans())
def test_mask_table_round_trip_in_every_storage_format(vocabulary, sets, complement):
    masks = [sorted(set(range(vocabulary)) - one if complement else one) for one in sets]
    table = MaskTable(vocabulary)
    numbers = [table.number_of(pack_ids(ids, vocabulary)) for ids in masks]
    assert len(table) == len({tuple(ids) for ids in masks}) + 1
    other = MaskTable(vocabulary)
    other.number_of_single_token(3)
    moved = other.add(table.export(numbers))
    again = MaskTable.from_state_dict(table.state_dict())
    for ids, number, there in zip(masks, numbers, moved, strict=True):
        assert table.ids(number).tolist() == other.ids(there).tolist() == again.ids(number).tolist() == ids
        assert np.flatnonzero(unpack(table.words([number])[0], vocabulary)).tolist() == ids
        assert table.counts(np.array([number])) == [len(ids)]
        narrow = table.number_of(pack_ids(ids, vocabulary)[: max(ids) // 32 + 1])  # of a tokenizer with fewer tokens
        assert narrow == number
    assert table.ids(FREE).tolist() == list(range(vocabulary)) and table.words([]).shape[0] == 0
    assert table.number_of(None) == table.number_of(pack_ids(range(vocabulary), vocabulary)) == FREE


# ---- in the trainer

CASES = [  # engine, constrain, options
    ("fast", False, {"top_k": 3}), ("trl", True, {"top_p": 0.7}), ("fast", True, {"min_p": 0.9}),
    ("trl", False, {"generation_kwargs": {"top_p": 0.8, "top_k": 4}}), ("fast", True, {"top_k": 2, "top_p": 0.7}),
]  # fmt: skip


def dense_kept(logits, filters):
    """The oracle: the definition of the filters in float64, for one token position."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    order = [i for i in order if logits[i] > -np.inf]
    order = order[: filters.top_k] if filters.top_k else order
    probs = np.exp(np.array([logits[i] for i in order]) - max(logits))
    probs = probs / probs.sum()
    if filters.top_p < 1:
        count = next(n for n in range(1, len(order) + 1) if probs[:n].sum() >= filters.top_p)
        order, probs = order[:count], probs[:count]
    return {i for i, p in zip(order, probs, strict=True) if p >= filters.min_p * probs[0]}


@pytest.mark.parametrize(("engine", "constrain", "options"), CASES, ids=str)
def test_kept_set_is_recorded_and_used_for_scoring(tiny_path, tmp_path, options, engine, constrain):
    trainer = toy_trainer(tiny_path, tmp_path, rollout=engine, constrain=constrain, temperature=0.8, beta=0.1,
                          num_iterations=2, **options)  # fmt: skip
    filters = trainer.args.sampling_filters
    trainer.model.train()
    output = trainer._generate_and_score_completions([trainer.train_dataset[i] for i in (0, 0, 0, 0, 3, 3, 3, 3)])
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], 1)
    attention = torch.cat([output["prompt_mask"], output["completion_mask"]], 1)
    model = trainer.model.double()
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=attention).logits.double().numpy() / 0.8
    table, length = trainer.generation.tables["train"], output["completion_ids"].shape[1]
    constraint, filtered = LettersConstraint(trainer._tokenizer), 0
    for row in range(len(ids)):
        tokens = output["completion_ids"][row][output["completion_mask"][row].bool()].tolist()
        masks = replay(constraint, {}, tokens) if constrain else [None] * len(tokens)
        for t, (token, mask) in enumerate(zip(tokens, masks, strict=True)):
            step = logits[row, t - length - 1].copy()
            if mask is not None:
                step[~unpack(mask, len(step))] = -np.inf
            wanted = dense_kept(step, filters)
            if mask is not None and np.isfinite(step).sum() == 1:
                wanted = set(np.flatnonzero(np.isfinite(step)).tolist())
            number = int(output["mask_numbers"][row, t])
            assert set(table.ids(number).tolist()) == wanted, (row, t)
            filtered += len(wanted) < np.isfinite(step).sum()
            logp = step[token] - np.log(np.exp(step[sorted(wanted)]).sum())
            for key in ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps"):
                assert output[key][row, t].item() == pytest.approx(logp, abs=1e-4), (key, row, t)
    assert filtered, "the filter dropped no token, so nothing was tested"


@pytest.mark.parametrize("constrain", [False, True], ids=["free", "constrained"])
def test_expected_update_is_the_exact_gradient(tiny_path, tmp_path, constrain):
    """Summed over all completions of up to two tokens, weighted by their probability, the gradient of the loss equals
    the gradient of the expected reward under the filtered policy, with fixed kept sets."""
    filters = SamplingFilters(top_k=5, top_p=0.9, min_p=0.05)
    trainer = toy_trainer(tiny_path, tmp_path, constrain=constrain, loss_type="dr_grpo", max_completion_length=2,
                          temperature=0.9, **asdict(filters))  # fmt: skip
    model, tokenizer = trainer.model.double(), trainer._tokenizer
    row = json.loads(trainer.train_dataset[0]["row"])
    prompt, eos = tokenizer(row["prompt"])["input_ids"], tokenizer.eos_token_id
    constraint, outputs = LettersConstraint(tokenizer), model.config.vocab_size

    def step_logits(written):
        logits = model(input_ids=torch.tensor([prompt + written])).logits[0, -1].double() / 0.9
        if constrain:
            state = constraint.start({})
            for token in written:
                state.accept(token)
            logits = logits.masked_fill(~torch.from_numpy(unpack(state.mask(), outputs)), -torch.inf)
        return logits

    # The oracle: all completions, with log-probs from a dense softmax over the kept tokens.
    completions, sets = [], []

    def grow(written, logp, kept_sets):
        if len(written) == 2 or (written and written[-1] == eos):
            completions.append((written, logp))
            sets.append(kept_sets)
            return
        logits = step_logits(written)
        kept = sorted(dense_kept(logits.detach().numpy(), filters))
        for token in kept:
            grow([*written, token], logp + logits[token] - logits[kept].logsumexp(0), [*kept_sets, kept])

    grow([], torch.zeros((), dtype=torch.float64), [])
    probabilities = torch.stack([logp for _, logp in completions]).exp()
    assert probabilities.sum().item() == pytest.approx(1, abs=1e-9) and len(completions) > 5
    texts = [tokenizer.decode([t for t in ids if t != eos]) for ids, _ in completions]
    rewards = torch.tensor([ToyTask().score(row, text).total for text in texts], dtype=torch.float64)
    exact = torch.autograd.grad((probabilities * rewards).sum(), list(model.parameters()), allow_unused=True)

    table = trainer.generation.tables.start("train", outputs)
    batch = len(completions)
    inputs = {
        "prompt_ids": torch.tensor([prompt] * batch),
        "prompt_mask": torch.ones(batch, len(prompt), dtype=torch.long),
        "completion_ids": pad_sequence([torch.tensor(ids) for ids, _ in completions], batch_first=True),
        "completion_mask": pad_sequence([torch.ones(len(ids), dtype=torch.long) for ids, _ in completions], True),
        "advantages": probabilities.detach() * rewards * batch * 2,
        "mask_numbers": pad_mask_numbers([[table.number_of(pack_ids(kept, outputs)) for kept in row] for row in sets]),
        "num_items_in_batch": torch.tensor(2 * batch),
    }
    model.train()
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer._compute_loss(model, inputs)
    ours = torch.autograd.grad(-loss, list(model.parameters()), allow_unused=True)
    for (name, _), want, got in zip(model.named_parameters(), exact, ours, strict=True):
        torch.testing.assert_close(got, want, atol=1e-7, rtol=1e-5, msg=name)  # norms are computed in float32


def test_samples_follow_the_filtered_policy(tiny_path, tmp_path):
    """Chi-squared test of first tokens against a softmax over the kept tokens, for both engines."""
    for engine in ("fast", "trl"):
        trainer = toy_trainer(tiny_path, tmp_path, rollout=engine, top_p=0.8, max_completion_length=1)
        trainer.model.eval()
        trainer.num_generations_eval = 64
        example = trainer.train_dataset[0]
        drawn = []
        for _ in range(8):
            drawn += trainer._generate_and_score_completions([example] * 64)["completion_ids"][:, 0].tolist()
        ids = trainer._tokenizer(json.loads(example["row"])["prompt"], return_tensors="pt")["input_ids"]
        with torch.no_grad():
            logits = trainer.model(input_ids=ids).logits[0, -1].double()
        kept = sorted(dense_kept(logits.numpy(), SamplingFilters(top_p=0.8)))
        expected = logits[kept].softmax(0).numpy() * len(drawn)
        counts = np.array([drawn.count(token) for token in kept])
        assert counts.sum() == len(drawn), "a token was sampled that the filter drops"
        degrees = len(kept) - 1
        assert ((counts - expected) ** 2 / expected).sum() < degrees + 4.5 * (2 * degrees) ** 0.5, engine


def test_replayed_groups_keep_their_recorded_masks(tiny_path, tmp_path):
    """A stored group is restored with the masks it was sampled under, although the policy has changed since."""
    trainer = toy_trainer(tiny_path, tmp_path, top_k=3, replay_size=4, max_steps=1)
    trainer.model.train()
    examples = [trainer.train_dataset[i] for i in (0, 0, 0, 0, 3, 3, 3, 3)]
    first = trainer._generate_and_score_completions(examples)
    group, size = trainer.extras["replay"].state._groups[-1], trainer.num_generations
    rows = zip(first["mask_numbers"][-size:], first["completion_mask"][-size:].bool(), strict=True)
    table = trainer.generation.tables["train"]
    wanted = [[set(table.ids(number).tolist()) for number in row[mask].tolist()] for row, mask in rows]
    with torch.no_grad():
        for p in trainer.model.parameters():
            p.add_(torch.randn_like(p))
    second = trainer._generate_and_score_completions(examples)
    RolloutGroups(trainer, second, []).replace([(0, group, 1.0)], 0)
    table = trainer.generation.tables["train"]
    for j in range(size):
        numbers = second["mask_numbers"][j, : len(wanted[j])].tolist()
        assert [set(table.ids(number).tolist()) for number in numbers] == wanted[j]


@pytest.mark.parametrize("engine", ["our rollouts", "transformers"])
def test_evaluation_samples_under_the_filters(tiny_path, monkeypatch, engine):
    from trl_grpo_tasks.evaluation import sampler
    from trl_grpo_tasks.evaluation.sampler import CompletionSampler
    from trl_grpo_tasks.models.loading import load_model, load_tokenizer

    model, tokenizer = load_model(tiny_path).eval(), load_tokenizer(tiny_path)
    if engine == "transformers":
        monkeypatch.setattr(sampler, "unsupported_reason", lambda model: "as if it were unknown")
    rows = ToyTask().dataset("train", 3, 0) * 20
    greedy = CompletionSampler(model, tokenizer, 0.0, 4, None).sample(rows)
    assert CompletionSampler(model, tokenizer, 1.0, 4, None, SamplingFilters(top_k=1)).sample(rows) == greedy
    assert CompletionSampler(model, tokenizer, 1.0, 4, None).sample(rows) != greedy
