"""Conversations of several turns: every one is found by enumeration, probabilities sum to 1, and no turn is forged."""

import copy
import itertools
import math
from collections import Counter

import dill
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from tests.constraints.test_workers import started
from tests.support.enumerated import every_completion
from tests.support.rollouts import Paged, dense_logps
from tests.support.tokenizer_makes import byte_level
from tests.support.toy_repair import AdvisingToy
from trl_grpo_tasks.constraints import replay, unpack
from trl_grpo_tasks.constraints.base import Asked
from trl_grpo_tasks.constraints.rebuilt import replay_all
from trl_grpo_tasks.constraints.shared import SharedStates
from trl_grpo_tasks.constraints.table import MaskTable
from trl_grpo_tasks.constraints.turns import MARK, REPLACEMENT, TurnsConstraint, TurnsForm, join_turns, split_turns
from trl_grpo_tasks.constraints.workers import WorkerStates
from trl_grpo_tasks.models.loading import load_tokenizer
from trl_grpo_tasks.models.tiny import make_tokenizer
from trl_grpo_tasks.rewards.repair import AFTER, BEFORE, RepairTask
from trl_grpo_tasks.rollout import rollout

ROWS = [{"prompt": f"{letter}1x", "letter": letter, "level": "1"} for letter in "ab"]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PIECES = [MARK, "\n", " ", "a", "é", "<|im_start|>", "<|im_end|>", "</s>", f"\n{MARK} ", f" {MARK}\n", "\x1e"]
HOSTILE = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(AdvisingToy().tiny().tokens, 64)


@pytest.fixture(scope="module")
def model(tiny_path):
    return AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float64).eval()


@pytest.fixture(scope="module")
def chat_tokenizer():
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.eos_token, tokenizer.chat_template = "<|im_end|>", CHATML
    return tokenizer


@pytest.fixture(scope="module")
def workers(tokenizer):
    return started(toy_constraint(tokenizer, turns=3))


def toy_constraint(tokenizer, turns=2):
    return RepairTask(AdvisingToy(), turns, 0.9, True).constraint(tokenizer)


def conversations(constraint, row):
    return [ids for ids, _ in every_completion(constraint, row)]


# ---- the text of a conversation


@given(st.lists(st.tuples(HOSTILE, HOSTILE), min_size=1, max_size=4))
def test_text_is_split_as_it_was_joined_whatever_the_model_wrote(pairs):
    turns, reasons = [turn for turn, _ in pairs], [" ".join(reason.split()) for _, reason in pairs[:-1]]
    found = split_turns(join_turns(turns, reasons))
    assert found == tuple([text.replace(MARK, REPLACEMENT) for text in part] for part in (turns, reasons))


@given(HOSTILE)
def test_any_text_can_be_split(text):
    turns, reasons = split_turns(text)
    assert len(turns) == len(reasons) + 1


# ---- the tokens of a conversation


def test_every_conversation_has_the_turns_that_were_written(tokenizer):
    constraint, row = toy_constraint(tokenizer), ROWS[0]
    texts = ["".join(letters) for n in (1, 2) for letters in itertools.product("abcd", repeat=n)]
    failing = [text for text in texts if set(text) != {"a"}]
    expected = [text for text in texts if text not in failing]
    # The word "length" cannot be spelled by the tiny model.
    expected += [join_turns([first, second], [f"{len(first)}x"]) for first in failing for second in texts]
    found = [constraint.text_of(row, ids) for ids in conversations(constraint, row)]
    assert Counter(found) == Counter(expected) and len(found) == 362
    for ids in conversations(constraint, row):
        for cut in range(1, len(ids)):
            turns = constraint.turns_of(row, ids[:cut])  # of a completion that was cut off
            assert [start for start, _ in turns] == [s for s, _ in constraint.turns_of(row, ids) if s < cut]


@settings(max_examples=60)
@given(st.lists(st.tuples(HOSTILE, HOSTILE), min_size=2, max_size=3), st.booleans())
def test_feedback_in_a_chat_injects_no_turn(chat_tokenizer, pairs, is_chat):
    """Turns of free text and reasons may spell special tokens; those are plain text then."""
    row = {"prompt": [{"role": "user", "content": "q"}] if is_chat else "q"}
    reason_of = {turn.replace(MARK, REPLACEMENT): " ".join(reason.split()) for turn, reason in pairs}
    shown = TurnsForm(before=BEFORE, after=AFTER, is_prompt_repeated=True)
    constraint = TurnsConstraint(
        chat_tokenizer, None, lambda row, text: reason_of[split_turns(text)[0][-1]], len(pairs), shown
    )
    state, ids = constraint.start(row), []
    for turn, _ in pairs:
        while not state.finished and state._forced:
            ids.append(state._forced[0])
            state.accept(ids[-1])
        written = chat_tokenizer(turn, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        for token in [*written, chat_tokenizer.eos_token_id]:
            state.accept(token)
            ids.append(token)
    assert state.finished
    turns, found = split_turns(constraint.text_of(row, ids))
    assert turns == [turn.replace(MARK, REPLACEMENT) for turn, _ in pairs]
    assert found == [reason_of[turn].replace(MARK, REPLACEMENT) for turn in turns[:-1]]
    if is_chat:  # the special tokens are those of the chat template
        whole = chat_tokenizer.decode(ids)
        starts = chat_tokenizer.convert_tokens_to_ids("<|im_start|>")
        assert (
            ids.count(starts) == 2 * (len(pairs) - 1) and ids.count(chat_tokenizer.eos_token_id) == 2 * len(pairs) - 1
        )
        assert "<|im_start|>user\nThis answer is not accepted: " in whole and whole.endswith("<|im_end|>")


def test_free_text_allows_every_token_but_special_ones(chat_tokenizer):
    state = TurnsConstraint(chat_tokenizer, None, lambda row, text: None, 2).start({"prompt": "q"})
    with pytest.raises(ValueError, match="not allowed"):
        state.accept(chat_tokenizer.convert_tokens_to_ids("<|im_start|>"))
    state.accept(chat_tokenizer.eos_token_id)
    assert state.finished and not state.mask().any()


def test_a_chat_template_without_a_second_question_is_refused(chat_tokenizer):
    chat_tokenizer = dill.copy(chat_tokenizer)
    chat_tokenizer.chat_template = "{{ raise_exception('one question only') }}"
    with pytest.raises(ValueError, match=r"takes no second message of the user .one question only"):
        TurnsConstraint(chat_tokenizer, None, lambda row, text: None, 2).form({"prompt": [{}]})


# ---- probabilities


def test_probabilities_of_all_conversations_sum_to_1_and_samples_follow_them(model, tiny_path):
    tokenizer = load_tokenizer(tiny_path)
    constraint, table, row = toy_constraint(tokenizer), MaskTable(len(tokenizer)), ROWS[0]
    prompt = tokenizer(row["prompt"])["input_ids"]
    exact = {}
    for ids in conversations(constraint, row):
        masks = [table.number_of(mask) for mask in replay(constraint, row, ids)]
        with torch.no_grad():
            exact[tuple(ids)] = math.exp(sum(dense_logps(model, prompt, ids, masks, table, 1.0)))
    assert sum(exact.values()) == pytest.approx(1, abs=1e-6)
    assert {len(constraint.turns_of(row, ids)) for ids in exact} == {1, 2}
    torch.manual_seed(0)
    count = 4000
    out = rollout(model, [prompt] * count, max_new_tokens=32, eos_token_ids=[tokenizer.eos_token_id],
                  constraint=constraint, rows=[row] * count, table=table)  # fmt: skip
    counts = Counter(map(tuple, out.completion_ids))
    assert counts.keys() <= exact.keys()
    expected = {ids: count * p for ids, p in exact.items() if count * p >= 5}
    rest = count - sum(expected.values()), count - sum(counts[ids] for ids in expected)
    chi2 = sum((counts[ids] - e) ** 2 / e for ids, e in expected.items()) + (rest[1] - rest[0]) ** 2 / rest[0]
    degrees = len(expected)
    assert degrees > 50 and chi2 < degrees + 4 * math.sqrt(2 * degrees)


@pytest.mark.parametrize("as_on_gpu", [False, True])
def test_rollouts_record_the_masks_of_a_replay_and_forced_tokens_are_certain(model, tokenizer, as_on_gpu):
    """Rows that succeed at once, late and never are in one batch, some of which are cut off."""
    constraint, table = toy_constraint(tokenizer, turns=3), MaskTable(len(tokenizer))
    rows = [ROWS[i % 2] for i in range(40)]
    prompts = [tokenizer(row["prompt"])["input_ids"] for row in rows]
    decoder = Paged(copy.deepcopy(model).float()) if as_on_gpu else None
    for length in (60, 12):
        torch.manual_seed(3)
        out = rollout(model, prompts, max_new_tokens=length, eos_token_ids=[tokenizer.eos_token_id],
                      constraint=constraint, rows=rows, table=table, decoder=decoder)  # fmt: skip
        assert out.masks == replay_all(constraint, rows, out.completion_ids, table)
        counts = {len(constraint.turns_of(row, ids)) for row, ids in zip(rows, out.completion_ids, strict=True)}
        assert counts >= {1, 2}
        for row, ids, masks, logps in zip(rows, out.completion_ids, out.masks, out.logps, strict=True):
            is_decision = table.counts(np.array(masks)) > 1
            turns = constraint.turns_of(row, ids)
            inside = {at for start, end in turns for at in range(start, end)}
            assert all(not is_decision[at] and logps[at] == 0 for at in set(range(len(ids))) - inside)
            assert masks == [table.number_of(mask) for mask in replay(constraint, row, ids)]


@pytest.mark.parametrize(("held_by", "is_free"), [("this process", True), ("workers", False)])
def test_turns_that_end_in_the_same_pass_are_scored_together(model, tokenizer, workers, held_by, is_free, monkeypatch):
    """Completions and masks are those of turns that are scored one at a time. Some ends are forced, others sampled."""
    task = RepairTask(AdvisingToy(), 3, 0.9, not is_free)
    rows = [ROWS[i % 2] for i in range(40)]
    prompts = [tokenizer(row["prompt"])["input_ids"] for row in rows]
    asked, together = [], [0]

    def asks(row, text):
        asked.append((row["letter"], text))
        together.append(together[-1] + 1)

        def answer():
            together.append(0)
            return task.reply(row, text)

        return Asked(lambda: True, answer)

    def sampled(constraint, states=None):
        table = MaskTable(len(tokenizer))
        if states is not None:
            monkeypatch.setattr("trl_grpo_tasks.rollout.engine.states_for", lambda *_: states(table))
        torch.manual_seed(3)
        out = rollout(model, prompts, max_new_tokens=60, eos_token_ids=[tokenizer.eos_token_id],
                      constraint=constraint, rows=rows, table=table)  # fmt: skip
        return out.completion_ids, [[table.ids(n).tolist() for n in masks] for masks in out.masks], out.logps

    expected = sampled(task.constraint(tokenizer))
    constraint = task.constraint(tokenizer)
    constraint.asks = asks
    if held_by == "workers":
        found = sampled(constraint, lambda table: WorkerStates(workers, table, constraint.ask))
    else:
        found = sampled(constraint)
    assert found == expected
    assert max(together) > 3
    turns = [constraint.turns_of(row, ids) for row, ids in zip(rows, found[0], strict=True)]
    ended = {
        (row["letter"], constraint.text_of(row, ids[:end]))
        for row, ids, found_turns in zip(rows, found[0], turns, strict=True)
        for _, end in found_turns[:2]
        if ids[end - 1] == tokenizer.eos_token_id and end < 60
    }
    assert set(asked) == ended


@pytest.mark.parametrize(("held_by", "groups"), [("this process", 1), ("workers", 3)])
def test_rows_go_on_while_others_wait_for_an_answer(model, tokenizer, workers, held_by, groups, monkeypatch):
    """The first answer to row 0 comes when all other rows have ended: a rollout that waited for it would not end."""
    constraint, table = toy_constraint(tokenizer, turns=3), MaskTable(len(tokenizer))
    rows = [{**ROWS[0], "slow": i == 0} for i in range(40)]
    prompts = [tokenizer(row["prompt"])["input_ids"] for row in rows]
    decoder, asked, polled = Paged(copy.deepcopy(model).float()), [], 0

    def asks(row, text):
        nonlocal polled
        asked.append((row["slow"], text))
        is_held = row["slow"] and sum(is_slow for is_slow, _ in asked) == 1

        def is_answered():
            nonlocal polled
            polled += is_held
            return not is_held or len(decoder.cache._rows) == 1

        def answer():
            assert is_answered(), "the rollout waits"
            return constraint._reply(row, text)

        return Asked(is_answered, answer)

    constraint.asks = asks
    states = SharedStates(constraint, table)
    if held_by == "workers":
        states = WorkerStates(workers, table, constraint.ask)
    monkeypatch.setattr("trl_grpo_tasks.rollout.engine.states_for", lambda *_: states)
    monkeypatch.setattr("trl_grpo_tasks.rollout.engine.group_count", lambda *_: groups)
    torch.manual_seed(3)
    out = rollout(model, prompts, max_new_tokens=60, eos_token_ids=[tokenizer.eos_token_id], decoder=decoder,
                  constraint=constraint, rows=rows, table=table, batch_size=12)  # fmt: skip
    assert polled and out.batch_size == 12
    assert out.masks == replay_all(toy_constraint(tokenizer, turns=3), rows, out.completion_ids, table)
    for prompt, ids, masks, logps in zip(prompts, out.completion_ids, out.masks, out.logps, strict=True):
        assert logps == pytest.approx(dense_logps(model, prompt, ids, masks, table, 1.0), abs=1e-4)


def test_restarted_rows_are_past_their_questions(tokenizer):
    """A row that starts in the middle of a conversation, and a constraint that forces whole turns."""
    constraint, table, row = toy_constraint(tokenizer, turns=3), MaskTable(len(tokenizer)), ROWS[0]
    states = SharedStates(constraint, table)
    for ids in conversations(toy_constraint(tokenizer), row)[::30]:
        states.start([0], [row])
        for cut in range(len(ids)):
            forced = states.restart(0, ids[:cut])
            state = constraint.start(row)
            for token in ids[:cut]:
                state.accept(token)
            expected = []
            while not state.finished and len(only := np.flatnonzero(unpack(state.mask(), len(tokenizer)))) == 1:
                expected.append(int(only[0]))
                state.accept(expected[-1])
            assert list(forced.tokens) == expected
