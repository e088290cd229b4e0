"""Own successes are stored by a bounded policy, imitated with an exact gradient, and resumed bit for bit."""

import json
import random
from collections import defaultdict

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.toy import LETTERS, ToyTask
from tests.training.test_distributed import EveryTask
from tests.training.test_resampling import EQUAL, MIXED, make
from trl_grpo_tasks.training import rewarding
from trl_grpo_tasks.training.extras.own_successes import MOST_PER_REQUEST, Success, SuccessStore

ON = {"own_successes": 8, "own_successes_fraction": 0.5, "own_successes_weight": 0.3}


def success(request, answer, total, step=0, row="row"):
    return Success(row, request, answer, [1], [2, 3], total, step)


def stored(store):
    return [Success(**item) for kept in store.state_dict()["requests"] for item in kept]


# ---- the store


@pytest.mark.parametrize("seed", range(30))
def test_the_store_is_bounded_and_keeps_the_best_of_each_request_and_rare_requests(seed):
    rng = random.Random(seed)
    capacity, requests = rng.randint(1, 12), [f"request {i}" for i in range(rng.randint(1, 10))]
    store, seen = SuccessStore(capacity), defaultdict(dict)
    for step in range(20):
        batch = [
            success(rng.choice(requests), rng.choice("abcdefg"), rng.choice((1.0, 2.0, 3.0)), step, rng.choice("rst"))
            for _ in range(6)
        ]
        for s in batch:
            seen[s.request][s.answer] = max(s.total, seen[s.request].get(s.answer, 0.0))
        store.update(batch)
        kept = stored(store)
        assert len(kept) == len(store) <= capacity
        assert len({(s.request, s.answer) for s in kept}) == len(kept), "answers of a request are distinct"
        totals_of = defaultdict(list)
        for s in kept:
            totals_of[s.request].append(s.total)
        assert all(len(totals) <= MOST_PER_REQUEST for totals in totals_of.values())
        if capacity >= len(requests):
            assert totals_of.keys() == seen.keys(), "no request that was ever solved is lost while requests fit"
        if capacity >= len(requests) * MOST_PER_REQUEST:
            for request, answers in seen.items():
                assert sorted(totals_of[request]) == sorted(answers.values())[-MOST_PER_REQUEST:], "the best are kept"


def test_requests_that_are_often_solved_leave_first():
    store = SuccessStore(2)
    store.update([success("rare", "a", 1.0), *(success("common", "a", 1.0) for _ in range(5))])
    store.update([success("new", "a", 0.5)])
    assert {s.request for s in stored(store)} == {"rare", "new"}


def test_draws_cover_all_requests_before_they_repeat_and_survive_a_checkpoint():
    store = SuccessStore(10)
    store.update(
        [success(one, answer, 1.0) for one, answers in (("r", "abc"), ("s", "a"), ("t", "ab")) for answer in answers]
    )
    again = SuccessStore(10)
    again.load_state_dict(json.loads(json.dumps(store.state_dict())))
    orders = set()
    for seed in range(20):
        drawn = store.draw(14, random.Random(seed))
        assert drawn == again.draw(14, random.Random(seed))
        assert {s.request for s in drawn[:3]} == {"r", "s", "t"}
        assert len({(s.request, s.answer) for s in drawn[:6]}) == 6
        orders.add(tuple((s.request, s.answer) for s in drawn))
    assert len(orders) > 5
    assert SuccessStore(3).draw(4, random.Random(0)) == []


# ---- the loss


def hand_nll(model_path, trainer, answers, constrained):
    """The negative log-likelihood per token of (prompt, letters) pairs, one at a time, by a dense softmax."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_path), trainer._tokenizer
    letters, eos = tokenizer.convert_tokens_to_ids(list(LETTERS)), tokenizer.eos_token_id
    total, tokens = 0.0, 0
    for prompt, text in answers:
        before = tokenizer(prompt)["input_ids"]
        ids = [*tokenizer.convert_tokens_to_ids(list(text)), eos]
        logits = model(torch.tensor([before + ids])).logits[0, len(before) - 1 : -1] / trainer.temperature
        for position, token in enumerate(ids):
            row = logits[position]
            if constrained:  # one to three letters, then the end
                allowed = (letters if position < 3 else []) + ([eos] if position else [])
                row = torch.full_like(row, -torch.inf).index_copy(0, torch.tensor(allowed), row[allowed])
            total = total - row.log_softmax(0)[token]
            tokens += 1
    (total / tokens).backward()
    return (total / tokens).item(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("constrain", [False, True], ids=["free", "constrained"])
def test_the_gradient_is_that_of_a_hand_computed_likelihood(tiny_path, tmp_path, constrain):
    """Prompt a1x is solved by "a", "aa", "aaa", and by "aaa" again. With and without the feature, the gradients of the
    loss differ by the weight times the gradient of the mean over tokens."""
    script = ["a", "aa", "aaa", "bbb", *EQUAL]
    options = {"constrain": constrain, "temperature": 0.7, "own_successes_fraction": 0.5}
    gradients = []
    for weight in (None, 0.3):
        extra = {} if weight is None else {"own_successes": 8, "own_successes_weight": weight}
        trainer = make(tiny_path, tmp_path / str(weight), script, **options, **extra)
        output = trainer._generate_and_score_completions([trainer.train_dataset[0]] * 8)
        trainer._compute_loss(trainer.model, output).backward()
        gradients.append({name: p.grad for name, p in trainer.model.named_parameters()})
    assert {s.answer for s in stored(trainer.extras["own_successes"].state)} == {"a", "aa", "aaa"}
    prompt = trainer.train_dataset[0]["prompt"]
    drawn = [(prompt, s.answer) for s in trainer.extras["own_successes"].drawn()]
    assert len(drawn) == 4, "half of a batch of 8"
    loss, expected = hand_nll(tiny_path, trainer, drawn, constrain)
    assert trainer._metrics["train"]["own_successes/loss"] == [pytest.approx(loss, rel=1e-5)]
    assert trainer._metrics["train"]["own_successes/size"] == [3]
    for name, gradient in expected.items():
        difference = gradients[1][name] - gradients[0][name]
        torch.testing.assert_close(difference, 0.3 * gradient, atol=1e-6, rtol=1e-4, msg=name)
        assert constrain or gradient.abs().sum() > 0


def test_nothing_is_imitated_before_the_first_success_or_in_evaluations(tiny_path, tmp_path):
    trainer = make(tiny_path, tmp_path, [*EQUAL, *EQUAL, *MIXED, *MIXED], **ON)
    trainer._compute_loss(trainer.model, trainer._generate_and_score_completions([trainer.train_dataset[0]] * 8))
    assert trainer._metrics["train"]["own_successes/size"] == [0]
    assert "own_successes/loss" not in trainer._metrics["train"]
    trainer.model.eval()
    trainer._generate_and_score_completions([trainer.train_dataset[0]] * 8)
    assert len(trainer.extras["own_successes"].state) == 0


def test_successes_of_new_groups_are_stored_too(tiny_path, tmp_path):
    trainer = make(tiny_path, tmp_path, [*EQUAL, *EQUAL, *(c * 2 for c in "abcdabcd")], resample_rounds=1, **ON)
    trainer._generate_and_score_completions([trainer.train_dataset[0]] * 8)
    assert {s.row for s in stored(trainer.extras["own_successes"].state)} == {
        trainer.train_example(trainer.extras["resampling"].draw(0, place))["row"] for place in range(2)
    }


# ---- relabelling


class PartTask(EveryTask):
    """The first letter alone is the answer to its prompt."""

    def relabel(self, row, completion):
        new = super().relabel(row, completion)
        return None if new is None else (new, completion[0])


@pytest.mark.parametrize("constrain", [False, True], ids=["free", "constrained"])
@pytest.mark.parametrize("task", [EveryTask(), PartTask()], ids=["whole", "part"])
def test_failed_completions_are_stored_with_a_prompt_that_they_or_a_part_of_them_solve(
    tiny_path, tmp_path, constrain, task
):
    options = ON | {"relabel": True, "constrain": constrain}
    trainer = make(tiny_path, tmp_path, ["bb", "bc", "a", "ccc", *EQUAL], task=task, **options)
    output = trainer._generate_and_score_completions([trainer.train_dataset[0]] * 8)
    found = stored(trainer.extras["own_successes"].state)
    answers = ("b", "c", "d") if isinstance(task, PartTask) else ("bb", "ccc", "dd")
    expected = {("a1x", "a", False), *((f"{answer[0]}1x", answer, True) for answer in answers)}
    assert {(json.loads(s.row)["prompt"], s.answer, s.is_relabelled) for s in found} == expected
    tokenizer = trainer._tokenizer
    for s in found:
        assert s.prompt_ids == tokenizer(json.loads(s.row)["prompt"])["input_ids"]
        assert s.completion_ids == [*tokenizer.encode(s.answer, add_special_tokens=False), tokenizer.eos_token_id]
    trainer._compute_loss(trainer.model, output)
    metrics = trainer._metrics["train"]
    assert metrics["own_successes/relabelled"] == [3] and metrics["own_successes/loss"][0] > 0


# ---- canonical forms


class FaultyTask(ToyTask):
    calls = 0

    def canonical(self, row, completion):
        type(self).calls += 1
        if "a" in completion:
            raise RuntimeError("no form")
        while "b" in completion:
            pass
        return "same"


def test_forms_that_fail_or_take_too_long_are_texts(monkeypatch, capsys):
    monkeypatch.setattr(rewarding, "SECONDS_PER_FORM", 0.2)
    forms = rewarding.CanonicalForms(FaultyTask())
    texts = [" a", "c", "d", "b", " a", "c"]
    assert [forms.of("{}", text) for text in texts] == ["a", "same", "same", "b", "a", "same"]
    assert FaultyTask.calls == 4, "forms are cached"
    said = capsys.readouterr()
    assert (said.out + said.err).count("canonical of task 'toy' failed (RuntimeError: no form)") == 1
