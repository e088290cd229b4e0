"""Step-level credit: its gradient, by enumeration; the steps of tokens; and what the trainer makes of it."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.exhaustive import exhaustive_but
from tests.support.stepped import SteppedTask
from tests.support.tokenizer_makes import byte_level, sentencepiece
from tests.support.training import config, parameters, toy_trainer
from tests.training.test_resampling import EQUAL, MIXED, ScriptedTrainer
from trl_grpo_tasks.models.tiny import make_tokenizer
from trl_grpo_tasks.training.extras.step_credit import StepFinder, step_credits, token_credits
from trl_grpo_tasks.training.groups import groups_of, put_groups

# ---- the gradient


class Characters:
    """A tokenizer of one character per token; 0 is the end."""

    def decode(self, ids, skip_special_tokens):
        return "".join(chr(token) for token in ids if token)


class Tree:
    """All texts of a, b and c with at most three letters, each the result of choices with random logits. Only "b" may
    follow "a", as under a constraint. A step is complete after each b and c; scores are random."""

    def __init__(self, seed):
        random = torch.Generator().manual_seed(seed)
        self.logits, self.step_score, self.end_score, self.texts = {}, {}, {}, []
        for text in ("".join(letters) for n in range(4) for letters in itertools.product("abc", repeat=n)):
            self.logits[text] = torch.randn(4, generator=random, dtype=torch.float64).requires_grad_()
            self.step_score[text], self.end_score[text] = torch.rand(2, generator=random).tolist()
        self._grow("", [])

    def _grow(self, text, log_probs):
        allowed = [1] if text.endswith("a") else [0, 1, 2, 3] if len(text) < 3 else [3]
        chosen = self.logits[text][allowed].log_softmax(0)
        for log_prob, choice in zip(chosen, allowed, strict=True):
            if choice == 3 or (len(text) == 3 and text.endswith("a")):
                self.texts.append((text, [*log_probs, log_prob]))
            else:
                self._grow(text + "abc"[choice], [*log_probs, log_prob])

    def pairs(self, text):
        steps = [(n, self.step_score[text[:n]]) for n in range(1, len(text) + 1) if text[n - 1] in "bc"]
        return [*steps, (len(text), self.end_score[text])]


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("size", exhaustive_but([2], [2, 3]))
def test_the_expected_gradient_is_that_of_the_shaped_objective(gamma, size):
    """Over all groups of completions, against the derivative of the expected discounted sum of the step rewards."""
    tree = Tree(seed=size)
    everything = list(tree.logits.values())
    probabilities = [torch.stack(log_probs).sum().exp() for _, log_probs in tree.texts]
    assert sum(probabilities).item() == pytest.approx(1)

    def shaped(pairs):
        scores = [0.0, *(score for _, score in pairs)]
        return sum(gamma**k * (gamma * scores[k + 1] - scores[k]) for k in range(len(pairs)))

    objective = sum(p * shaped(tree.pairs(text)) for p, (text, _) in zip(probabilities, tree.texts, strict=True))
    expected = torch.autograd.grad(objective, everything, retain_graph=True, allow_unused=True)

    advantages = [[0.0] * len(log_probs) for _, log_probs in tree.texts]  # expected, times the probability of the text
    finder = StepFinder(Characters())
    for group in itertools.product(range(len(tree.texts)), repeat=size):
        weight = torch.stack([probabilities[i] for i in group]).prod().item() / size
        texts = [tree.texts[i][0] for i in group]
        ids = [[*map(ord, text), 0][: len(tree.texts[i][1])] for text, i in zip(texts, group, strict=True)]
        scores = [tree.pairs(text) for text in texts]
        credits = step_credits(scores, size, gamma)
        found = token_credits(finder, ids, texts, scores, credits, [0] * len(ids), 4).tolist()
        for i, row in zip(group, found, strict=True):
            for t in range(len(advantages[i])):
                advantages[i][t] += weight * row[t]
    surrogate = sum(
        a * log_prob
        for (_, log_probs), row in zip(tree.texts, advantages, strict=True)
        for log_prob, a in zip(log_probs, row, strict=True)
    )
    actual = torch.autograd.grad(surrogate, everything, allow_unused=True)
    moved = 0
    for want, got in zip(expected, actual, strict=True):
        assert (want is None) == (got is None)
        if want is not None:
            torch.testing.assert_close(got, want, atol=1e-7, rtol=1e-5)
            moved += bool(want.abs().max() > 1e-3)
    assert moved > 3


def test_credit_of_a_group_by_hand():
    """Scores 0.5 then 1, 0.5 then 0, and one without steps; the last has no scores."""
    scores = [[(1, 0.5), (2, 1.0)], [(1, 0.5), (2, 0.0)], [(2, 0.25)], None]
    credits = step_credits(scores, 4, 1.0)
    assert credits[0] == pytest.approx([1.0 - (0.0 + 0.25) / 2, 0.5 - -0.5])
    assert credits[1] == pytest.approx([0.0 - (1.0 + 0.25) / 2, -0.5 - 0.5])
    assert credits[2] == pytest.approx([0.25 - 0.5]) and credits[3] == []
    discounted = step_credits([scores[0], scores[1]], 2, 0.9)
    assert discounted[0] == pytest.approx([0.81 - 0.0, (0.81 - 0.45) - (0.0 - 0.45)])
    assert step_credits([[(3, 0.1), (5, 0.3)]] * 3, 3, 0.7) == [[0.0, 0.0]] * 3, "equal completions: exactly 0"
    assert step_credits([[(2, 0.25), (2, 0.5)], None], 2, 1.0) == [[0.5, 0.25], []], "without others: no baseline"


# ---- the steps of tokens


class Bytes:
    """A tokenizer whose tokens are pieces of UTF-8, which may end within a character."""

    def __init__(self, pieces):
        self.pieces = pieces

    def decode(self, ids, skip_special_tokens):
        return b"".join(self.pieces[token] for token in ids).decode("utf-8", "replace")


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab\né漢🧱", max_size=12), st.lists(st.integers(1, 5), min_size=60, max_size=60), st.data())
def test_steps_before_each_token(text, sizes, data):
    encoded = text.encode()
    cuts = [0, *itertools.accumulate(sizes)]
    pieces = [encoded[a:b] for a, b in itertools.pairwise(cuts) if encoded[a:b]] + [b""]
    ends = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    found = StepFinder(Bytes(pieces)).steps_before(range(len(pieces)), text, ends)
    starts = [sum(map(len, pieces[:t])) for t in range(len(pieces))]
    complete = [len(encoded[:start].decode("utf-8", "ignore")) for start in starts]
    assert found == [sum(end <= place for end in ends) for place in complete]


@pytest.mark.parametrize(
    "make", [byte_level, sentencepiece, lambda: make_tokenizer(["2x4 (", "3,", "0,", "1)\n"], 64)]
)
def test_steps_with_real_tokenizers(make):
    tokenizer = make()
    line = "2x4 (3,0,1)\n"
    ids = [*tokenizer(line * 3, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert text == line * 3
    found = StepFinder(tokenizer).steps_before(ids, text, [12, 24, 36])
    spelt = [len(tokenizer.decode(ids[:t], skip_special_tokens=True)) for t in range(len(ids))]
    assert found == [n // 12 for n in spelt] and found[-1] == 3 and found[0] == 0


def test_text_that_the_tokens_do_not_spell_gets_no_credit():
    finder = StepFinder(Characters())
    assert finder.steps_before([*b"<think>ab"], "ab", [1]) == [0] * 8 + [1], "text after a part that was parsed away"
    assert finder.steps_before([*b"ab"], "xy", [1]) is None
    credits = token_credits(finder, [[*b"ab"], [*b"ab"]], ["xy", "ab"], [[(2, 1.0)], None], [[1.0], []], [0, 0], 3)
    assert credits.tolist() == [[0.0] * 3] * 2


# ---- in the trainer


def make(tiny_path, folder, script, task=None, **options):
    options = {"max_steps": 1, "step_credit": 0.5} | options
    trainer = ScriptedTrainer(tiny_path, args=config(folder, **options), task=task or SteppedTask())
    trainer.script, trainer.current_gradient_accumulation_steps = list(script), 1
    trainer.model.train()
    return trainer


def expected_credit(group, letter="a"):
    """The credit of a group at gamma 1, one value per token: the letters and the end. Two letters are a step."""
    phi = [[0.0] + [text[:n].count(letter) / n for n in (*range(2, len(text) + 1, 2), len(text))] for text in group]
    togo = [[scores[-1] - score for score in scores[:-1]] for scores in phi]
    rows = []
    for i, own in enumerate(togo):
        others = [other for j, other in enumerate(togo) if j != i]
        credit = []
        for m, value in enumerate(own):
            there = [other[m] for other in others if len(other) > m]
            credit.append(value - sum(there) / len(there) if there else value)
        rows.append([credit[t // 2] for t in range(len(group[i]) + 1)])
    return rows


class Unscored(SteppedTask):
    def score(self, row, completion):
        return None if "d" in completion else super().score(row, completion)


@pytest.mark.parametrize("constrain", [False, True])
def test_tokens_get_the_advantage_of_their_completion_and_the_credit_of_their_step(tiny_path, tmp_path, constrain):
    group = ["aab", "ab", "aba" if constrain else "abba", "d"]  # the constraint allows three letters
    options = {"constrain": constrain, "advantage_estimator": "mean", "beta": 0.0}
    trainer = make(tiny_path, tmp_path / "on", group, Unscored(), **options)
    output = trainer._generate_and_score_completions([trainer.train_dataset[0]] * 4)
    plain = make(tiny_path, tmp_path / "off", group, Unscored(), step_credit=0.0, **options)
    whole = plain._generate_and_score_completions([plain.train_dataset[0]] * 4)["advantages"]
    advantages, mask = output["advantages"], output["completion_mask"]
    assert advantages.shape == mask.shape and (advantages[~mask.bool()] == 0).all()
    for i, credit in enumerate(expected_credit(group[:3])):
        torch.testing.assert_close(advantages[i, : len(credit)], whole[i] + 0.5 * torch.tensor(credit))
    assert (advantages[3] == 0).all(), "no score, no credit"
    metrics = trainer._metrics["train"]
    assert metrics["step_credit/unscored"] == [0.25]
    credit = ((advantages - whole[:, None]) * mask).abs().sum() / mask.sum()
    assert metrics["step_credit/mean_abs"] == [pytest.approx(credit.item())] and credit > 0.01
    assert list(trainer._logs["advantages"]) == pytest.approx(whole.tolist())

    loss = trainer._compute_loss(trainer.model, output)
    loss.backward()
    gradients = [p.grad.clone() for p in trainer.model.parameters()]
    trainer.model.zero_grad()
    with trainer.scoring.under(trainer.scoring.record_of(output)):
        logps = trainer._get_per_token_logps_and_entropies(
            trainer.model,
            torch.cat([output["prompt_ids"], output["completion_ids"]], 1),
            torch.cat([output["prompt_mask"], output["completion_mask"]], 1),
            mask.shape[1],
        )[0]
    (-(logps * advantages * mask).sum() / mask.sum()).backward()  # loss type dapo: the mean over tokens
    for ours, p in zip(gradients, trainer.model.parameters(), strict=True):
        torch.testing.assert_close(ours, p.grad, atol=1e-6, rtol=1e-4)
    ratio_free = -(advantages * mask).sum() / mask.sum()
    assert metrics["pg_loss"] == [pytest.approx(ratio_free.item(), abs=1e-6)]


def test_groups_with_equal_rewards_have_signal_if_their_steps_differ(tiny_path, tmp_path):
    """All fail, so that all rewards are 0, but one has lost more on the way."""
    weights = {"component_weights": {"success": 1.0, "match": 0.0, "short": 0.0}}
    trainer = make(tiny_path, tmp_path / "on", ["ab", "bb", "ba", "bb", *EQUAL], **weights)
    output = trainer._generate_and_score_completions([trainer.train_dataset[0]] * 8)
    assert trainer.latest_rollout.without_signal_P.tolist() == [False, True]
    assert (output["advantages"][4:] == 0).all() and (output["advantages"][:4] != 0).any()
    assert trainer._metrics["train"]["groups_without_signal"] == [0.5]


def test_replay_stores_and_returns_the_advantages_of_tokens(tiny_path, tmp_path):
    """A group with credit replaces a shorter one without; its priority is the mean over its tokens."""
    trainer = make(tiny_path, tmp_path, [*MIXED, *EQUAL])
    output = trainer._generate_and_score_completions([trainer.train_dataset[0]] * 4 + [trainer.train_dataset[1]] * 4)
    before = {name: value.clone() for name, value in output.items() if isinstance(value, torch.Tensor)}
    rows = [trainer.train_dataset[i // 4]["row"] for i in range(8)]
    output["old_per_token_logps"] = torch.randn_like(before["advantages"])
    (stored,) = groups_of(output, rows, [0], 4, step=3)
    tokens = before["advantages"][:4][before["completion_mask"][:4].bool()]
    assert stored.priority == pytest.approx(tokens.abs().mean().item() + 0.01)
    put_groups(output, [(1, stored, 0.5)], 4, trainer._tokenizer.pad_token_id)
    width = before["advantages"].shape[1]
    assert output["advantages"].shape == output["completion_ids"].shape == (8, width)
    torch.testing.assert_close(output["advantages"][:4], before["advantages"][:4])
    torch.testing.assert_close(output["advantages"][4:], 0.5 * before["advantages"][:4])


ALL_ON = {
    "step_credit": 0.5, "gamma": 0.95, "constrain": True, "beta": 0.1, "replay_size": 6, "resample_rounds": 1,
    "num_generations": 8, "per_device_train_batch_size": 16, "steps_per_generation": 2, "num_iterations": 2,
    "gradient_accumulation_steps": 1, "max_steps": 8, "save_strategy": "steps", "save_steps": 3,
    "component_weights": {"success": 1.0, "match": 0.0, "short": 0.0},
}  # fmt: skip


@pytest.mark.parametrize(("before", "after"), [(0.7, 0.0), (0.0, 0.7)])
def test_stored_groups_are_dropped_if_a_run_is_resumed_with_another_credit(tiny_path, tmp_path, before, after):
    options = ALL_ON | {"resample_rounds": 0, "step_credit": before}
    toy_trainer(tiny_path, tmp_path / "run", task=SteppedTask(), **options).train()
    again = toy_trainer(tiny_path, tmp_path / "run", task=SteppedTask(), **options | {"step_credit": after})
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert len(again.extras["replay"].state) and {
        group.advantages.ndim for group in again.extras["replay"].state._groups
    } == {2 if after else 1}


@pytest.mark.parametrize(
    "loss_type", exhaustive_but(["grpo"], ["grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"])
)
def test_it_trains_with_every_loss(tiny_path, tmp_path, loss_type):
    """The first step of a run with credit differs from one without, and evaluation works."""
    moved = []
    for weight in (0.0, 1.0):
        options = {"loss_type": loss_type, "max_steps": 1, "step_credit": weight, "eval_strategy": "steps"}
        trainer = toy_trainer(tiny_path, tmp_path / str(weight), task=SteppedTask(), **options)
        trainer.train()
        moved.append(parameters(trainer))
        assert all(value.isfinite().all() for value in moved[-1].values())
    assert any(not value.equal(moved[1][name]) for name, value in moved[0].items())
