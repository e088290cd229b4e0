"""Conversations of several turns with vLLM, for which a stand-in samples; tests/vllm has the real one."""

import json

import pytest

from tests.support.enumerated import assert_recorded
from tests.support.toy import ToyTask
from tests.support.toy_environment import EchoTask
from tests.support.toy_repair import AdvisingToy
from trl_grpo_tasks import Solver
from trl_grpo_tasks.constraints.base import unpack
from trl_grpo_tasks.constraints.turns import split_turns
from trl_grpo_tasks.models.loading import load_tokenizer
from trl_grpo_tasks.rewards.repair import RepairTask
from trl_grpo_tasks.serving.conversations import EARLIER_TURNS, OneTurn

REPAIR = {"repair_turns": 3, "constrain": True, "max_completion_length": 36}
CASES = {
    "environment": (EchoTask, {"max_completion_length": 16}),
    "repair": (AdvisingToy, REPAIR),
    "free text": (AdvisingToy, REPAIR | {"constrain": False}),
    "cut off in and after an observation": (AdvisingToy, REPAIR | {"repair_turns": 2, "max_completion_length": 9}),
    "free text in time": (AdvisingToy, REPAIR | {"constrain": False, "max_completion_length": 18}),
    "filters": (AdvisingToy, REPAIR | {"top_k": 2, "temperature": 0.7}),
}


@pytest.mark.parametrize(("mode", "kind"), [*(("colocate", kind) for kind in CASES), ("server", "repair"),
                                            ("server", "free text"), ("server", "filters")])  # fmt: skip
def test_masks_and_log_probs_are_those_of_the_distribution_sampled_from(make, mode, kind):
    task, options = CASES[kind]
    trainer, engine = make(mode, task(), **options, num_generations=8)
    inputs = [trainer.train_dataset[i] for i in (0, 3) for _ in range(8)]
    output = trainer._generate_and_score_completions(inputs)
    assert_recorded(trainer, output)
    record, constraint = trainer.latest_rollout, trainer.generation.constraint
    eos, most = trainer._tokenizer.eos_token_id, options["max_completion_length"]
    pairs = list(zip(record.rows, record.completion_ids, strict=True))
    turns = [constraint.turns_of(*pair) for pair in pairs]
    assert record.completions == [constraint.text_of(*pair) for pair in pairs]
    if kind == "environment":
        assert {len(each) for each in turns} == {2}
    elif kind.startswith("cut off"):
        ends = {ids[-1] for ids in record.completion_ids if len(ids) == most}
        assert len(ends) > 1 and eos not in ends and {len(each) for each in turns} == {1}
    else:
        assert len({len(each) for each in turns}) > 1 or kind == "filters"
    for ids in record.completion_ids:
        assert (len(ids) == most and not kind.endswith("in time")) or ids[-1] == eos
    if kind.endswith("in time"):
        assert max(map(len, record.completion_ids)) == most

    # A turn is a request, which has the turns before it in its prompt and in its row. First turns are sent per group.
    sent = [(prompt, json.loads(params.extra_args["row"]), params) for prompt, params in engine.requests]
    first, later = sent[: 2 if mode == "server" else 16], sent[2 if mode == "server" else 16 :]
    assert all(params.n == (8 if mode == "server" else 1) for _, _, params in first)
    expected = []
    for (row, ids), spans, text in zip(pairs, turns, record.completions, strict=True):
        prompt = record.prompt_ids[0] if row == record.rows[0] else record.prompt_ids[8]
        told = split_turns(text)[0]
        assert (prompt, row | {EARLIER_TURNS: [] if options.get("constrain", True) else None}, most) in [
            (prompt, row, params.max_tokens) for prompt, row, params in first
        ]
        for n, (start, _) in enumerate(spans[1:], 1):
            earlier = told[:n] if options.get("constrain", True) else None
            expected.append((prompt + ids[:start], row | {EARLIER_TURNS: earlier}, 1, most - start))
    found = [(prompt, row, params.n, params.max_tokens) for prompt, row, params in later]
    assert sorted(found, key=str) == sorted(expected, key=str)


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_training_with_vllm(make, mode):
    trainer, engine = make(mode, EchoTask(), max_completion_length=16, max_steps=2)
    before = {name: weight.clone() for name, weight in engine.model.state_dict().items()}
    trainer.train()
    logs = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["sampling/logp_difference_max"] < 1e-5 for line in logs] == [True, True]
    assert all(line["environment/turns"] == 2 for line in logs)
    assert any(not weight.equal(before[name]) for name, weight in engine.model.state_dict().items())


def test_a_task_without_a_constraint_has_turns_of_free_text_on_a_server(make, monkeypatch):
    monkeypatch.setattr(AdvisingToy, "constraint", lambda self, tokenizer: None)
    trainer, _ = make("server", AdvisingToy(), **REPAIR | {"constrain": False}, num_generations=8)
    assert_recorded(trainer, trainer._generate_and_score_completions([trainer.train_dataset[0]] * 8))


@pytest.mark.parametrize(
    ("make_task", "temperature"),
    [(EchoTask, 0.0), (lambda: RepairTask(AdvisingToy(), 2, 0.9, True), 0.0), (EchoTask, 1.0)],
)
def test_answers_of_a_server_are_conversations(serve, tiny_path, make_task, temperature):
    """The likeliest one is that of our rollouts."""
    task = make_task()
    options = {"max_completion_length": 24, "reward_workers": 1, "temperature": temperature, "constrain": True}
    server = serve(task)
    rows = task.dataset("train", 4, 0)
    with Solver.from_pretrained(tiny_path, task, **options, vllm_server_url=server.url) as solver:
        there = [[one.completion for one in solver.sample(row, 6)] for row in rows]
    if temperature == 0:
        with Solver.from_pretrained(tiny_path, task, **options) as solver:
            assert there == [[one.completion for one in solver.sample(row, 6)] for row in rows]
    else:
        constraint = task.constraint(load_tokenizer(tiny_path))
        for row, texts in zip(rows, there, strict=True):
            for turns, observations in map(split_turns, texts):
                for n, observation in enumerate(observations):
                    told = constraint.spelled(row, task.reply(row, "".join(turns[:1])) or "")
                    assert n == 0 and observation == constraint.observed_text(told)
        assert len({text for texts in there for text in texts}) > 4


def test_one_turn_is_that_of_a_conversation(tiny_path):
    tokenizer = load_tokenizer(tiny_path)

    def allowed(constraint, row):
        state = constraint.start(row)
        mask = state.mask()
        return tokenizer.convert_ids_to_tokens(unpack(mask, 32 * len(mask)).nonzero()[0].tolist())

    echo, toy = (
        OneTurn(tokenizer, EchoTask().constraint(tokenizer)),
        OneTurn(tokenizer, ToyTask().constraint(tokenizer)),
    )
    row = {"prompt": "a1x", "letter": "a"}
    assert allowed(echo, row) == allowed(echo, row | {EARLIER_TURNS: []}) == [*"abcd"]
    assert allowed(echo, row | {EARLIER_TURNS: ["b"]}) == [*"acd"]
    assert allowed(toy, row) == allowed(toy, row | {EARLIER_TURNS: ["b"]}) == [*"abcd"]
    free = allowed(toy, row | {EARLIER_TURNS: None})
    assert free == allowed(OneTurn(tokenizer, None), row | {EARLIER_TURNS: ["b"]})
    assert set(free) == set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens) | {tokenizer.eos_token}
    assert OneTurn(tokenizer, None).start(row) is None
    for turns in ("b", [1], {}):
        with pytest.raises(ValueError, match="'earlier_turns' must be a list of texts"):
            echo.start(row | {EARLIER_TURNS: turns})
