"""Everything that a constraint allows, by trying every token in fresh states, and the exact gradient over it."""

import copy

import pytest
import torch

from tests.support.rollouts import dense_logps
from trl_grpo_tasks.constraints import unpack
from trl_grpo_tasks.constraints.rebuilt import replay_all
from trl_grpo_tasks.constraints.table import pad_mask_numbers
from trl_grpo_tasks.training.record import RolloutRecord


def every_completion(constraint, row):
    """Return (tokens, the tokens allowed at each position) of every completion that the constraint allows."""
    done, todo = [], [([], [])]
    while todo:
        tokens, sets = todo.pop()
        state = constraint.start(row)
        for token in tokens:
            state.accept(token)
        if state.finished:
            done.append((tokens, sets))
        else:
            allowed = unpack(state.mask(), constraint.vocab_size).nonzero()[0].tolist()
            todo += [([*tokens, token], [*sets, allowed]) for token in allowed]
    return done


def allowed_in(trainer, output):
    """The tokens that fresh states allow at each position of the latest rollout (B, T, V); all tokens at padding."""
    constraint, rows = trainer.generation.constraint, trainer.latest_rollout.rows
    allowed = torch.ones(*output["completion_ids"].shape, constraint.vocab_size, dtype=torch.bool)
    lengths = output["completion_mask"].sum(1).tolist()
    for b, (row, ids) in enumerate(zip(rows, output["completion_ids"].tolist(), strict=True)):
        state = constraint.start(row)
        for t, token in enumerate(ids[: lengths[b]]):
            allowed[b, t] = torch.from_numpy(unpack(state.mask(), constraint.vocab_size))
            state.accept(token)
    return allowed


def assert_recorded(trainer, output):
    """The masks in the record of the latest rollout are those of fresh states, of which filters may keep a part, and
    its log-probs are those of a forward pass under these masks."""
    record, table, allowed = trainer.latest_rollout, trainer.generation.tables["train"], allowed_in(trainer, output)
    model, top_k = copy.deepcopy(trainer.model).double(), trainer.generation.filters.top_k
    for b, ids in enumerate(record.completion_ids):
        masks = record.mask_numbers_B_T[b, : len(ids)].tolist()
        for t, number in enumerate(masks):
            wanted, found = allowed[b, t].nonzero().flatten().tolist(), table.ids(number).tolist()
            assert (
                found == wanted if not top_k else set(found) <= set(wanted) and len(found) == min(top_k, len(wanted))
            )
        with torch.no_grad():
            expected = dense_logps(model, record.prompt_ids[b], ids, masks, table, trainer.temperature)
        assert record.sampling_logps[b] == pytest.approx(expected, abs=1e-5)


def assert_exact_policy_gradient(trainer, row, completions, rewards):
    """The sum of p R grad(log p) over all completions, with log-probs of the trainer under its masks, equals the
    derivative of the expected reward, from plain forward passes and softmaxes over the tokens that were allowed."""
    generation, prompt = trainer.generation, trainer._tokenizer(row["prompt"])["input_ids"]
    ids, allowed = zip(*completions, strict=True)
    table = generation.tables.start("train", generation.output_size())
    numbers = pad_mask_numbers(replay_all(generation.constraint, [row] * len(ids), ids, table))
    width, rewards = max(map(len, ids)), torch.tensor(rewards)
    ids_B_T = torch.tensor([prompt + one + [0] * (width - len(one)) for one in ids])
    mask_B_T = torch.tensor([[1] * len(one) + [0] * (width - len(one)) for one in ids])
    attention = torch.cat([torch.ones(len(ids), len(prompt), dtype=torch.long), mask_B_T], 1)
    with trainer.scoring.under(RolloutRecord("train", mask_numbers_B_T=numbers)):
        logps_B_T = trainer._get_per_token_logps_and_entropies(trainer.model, ids_B_T, attention, width)[0]
    for logps_T, sets in zip(logps_B_T, allowed, strict=True):
        assert all(logps_T[t] == 0 for t, one in enumerate(sets) if len(one) == 1), "forced tokens are certain"
    logps_B = (logps_B_T * mask_B_T).sum(1)
    assert logps_B.exp().sum().item() == pytest.approx(1, abs=1e-5)
    (logps_B.exp().detach() * rewards * logps_B).sum().backward()
    found = {name: p.grad.clone() for name, p in trainer.model.named_parameters()}

    model = trainer.model.double()
    model.zero_grad()
    logits = model(input_ids=ids_B_T, attention_mask=attention, fused_lm_head=False).logits[:, len(prompt) - 1 : -1]
    expected = torch.zeros((), dtype=torch.float64)
    for b, (one, sets) in enumerate(completions):
        steps = [logits[b, t, a].log_softmax(0)[a.index(one[t])] for t, a in enumerate(sets)]
        expected = expected + rewards[b].double() * torch.stack(steps).sum().exp()
    expected.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name].double(), p.grad, rtol=1e-3, atol=1e-6, msg=name)
