"""Groups of rows in turn: results do not depend on their number, whether this process or workers hold the states."""

from types import SimpleNamespace

import pytest
import torch

from tests.constraints.test_workers import started
from tests.rollout.test_bounded import CONSTRAINT, PATTERNS, PROMPTS, VOCABULARY, Counted, check
from tests.rollout.test_rollout import RandomEditor
from tests.support.rollouts import EOS, MODELS, PAGED, Paged
from trl_grpo_tasks.constraints.shared import SharedStates
from trl_grpo_tasks.constraints.table import MaskTable
from trl_grpo_tasks.constraints.workers import WorkerStates
from trl_grpo_tasks.rollout import engine, rollout

PROMPTS_OF_ROWS = PROMPTS * 4
ROWS = [{"pattern": PATTERNS[i % 4]} for i in range(len(PROMPTS_OF_ROWS))]
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def workers():
    return started(CONSTRAINT)


@pytest.fixture(params=["this process", "workers"])
def held_by(request, workers, monkeypatch):
    def states(constraint, table, rows):
        return SharedStates(constraint, table) if request.param == "this process" else WorkerStates(workers, table)

    monkeypatch.setattr(engine, "states_for", states)
    return request.param


def run(table, decoder=PAGED["llama"], **options):
    return rollout(MODELS["llama"], PROMPTS_OF_ROWS, max_new_tokens=NEW_TOKENS, eos_token_ids=[EOS], table=table,
                   decoder=decoder, constraint=CONSTRAINT, rows=ROWS, **options)  # fmt: skip


def check_run(table, out):
    check(MODELS["llama"], PROMPTS_OF_ROWS, out, NEW_TOKENS, constraint=CONSTRAINT, rows=ROWS, table=table)


@pytest.mark.parametrize(("batch_size", "edits"), [(3, 3), (None, 0)])
def test_sampled_rows_of_three_groups(held_by, batch_size, edits, monkeypatch):
    """Rows start and are edited, which needs the workers, while tokens of other groups are with the workers."""
    monkeypatch.setattr(engine, "group_count", lambda *_: 3)
    decoder = Paged(MODELS["llama"])
    counted = Counted(decoder)
    torch.manual_seed(0)
    table = MaskTable(VOCABULARY)
    editor = RandomEditor(0, edits) if edits else None
    check_run(table, run(table, decoder, batch_size=batch_size, editor=editor))
    assert counted.most == (batch_size or len(ROWS)) and not counted.rows


@pytest.mark.parametrize(("count", "ahead"), [(2, 1), (3, 2)])
def test_workers_have_tokens_of_two_groups_if_there_are_three(workers, count, ahead, monkeypatch):
    """With fewer groups, reading ahead would wait for the pass that the GPU has just begun."""
    outstanding, most = [], 0

    class Recorded(WorkerStates):
        def accept_async(self, slots, tokens):
            nonlocal most
            wait, key = super().accept_async(slots, tokens), object()  # several groups may have no slots
            outstanding.append(key)
            most = max(most, len(outstanding))

            def recorded():
                outstanding.remove(key)
                return wait()

            return recorded

    monkeypatch.setattr(engine, "states_for", lambda constraint, table, rows: Recorded(workers, table))
    monkeypatch.setattr(engine, "group_count", lambda *_: count)
    torch.manual_seed(0)
    table = MaskTable(VOCABULARY)
    check_run(table, run(table))
    assert most == ahead and not outstanding


def test_a_rollout_after_one_that_failed_with_tokens_at_the_workers(workers, monkeypatch):
    class FailingEditor:
        calls = 0

        def keep(self, i, ids, ended):
            self.calls += 1
            if self.calls == 60:
                raise KeyError("the editor failed")

    used = []
    monkeypatch.setattr(engine, "states_for", lambda *_: used.append(WorkerStates(workers, table)) or used[-1])
    monkeypatch.setattr(engine, "group_count", lambda *_: 3)
    for _ in range(2):
        table = MaskTable(VOCABULARY)
        with pytest.raises(KeyError, match="the editor failed"):
            run(table, editor=FailingEditor())
        assert used[-1]._outstanding
        table = MaskTable(VOCABULARY)
        check_run(table, run(table))
        assert not used[-1]._outstanding


def test_small_models_with_many_rows_at_workers_have_three_groups():
    shared, at_workers = SharedStates.__new__(SharedStates), WorkerStates.__new__(WorkerStates)
    gpu = SimpleNamespace(is_asynchronous=True, parameters=135 * 10**6)
    large = SimpleNamespace(is_asynchronous=True, parameters=7 * 10**9)
    assert [engine.group_count(gpu, at_workers, rows) for rows in (255, 256, 767, 768, 1024)] == [1, 2, 2, 3, 3]
    assert engine.group_count(gpu, shared, 1024) == engine.group_count(large, at_workers, 1024) == 2
    assert engine.group_count(gpu, None, 1024) == 1
    cpu = SimpleNamespace(is_asynchronous=False, parameters=135 * 10**6)
    assert engine.group_count(cpu, at_workers, 1024) == 1
    assert Paged(MODELS["llama"]).parameters == sum(p.numel() for p in MODELS["llama"].parameters())
