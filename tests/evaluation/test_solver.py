"""Solver: budgets, ranking, what cannot be judged, the same seed; scripted samplers with known odds, and a model."""

import random
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.toy import LETTERS, ToyTask
from trl_grpo_tasks import Solver
from trl_grpo_tasks.evaluation import solver as module
from trl_grpo_tasks.evaluation.samples import Completion, Sample
from trl_grpo_tasks.evaluation.solution import Solution
from trl_grpo_tasks.models.ready import ready_model
from trl_grpo_tasks.report.run_folder import sampling_of
from trl_grpo_tasks.rewards.executor import RewardExecutor
from trl_grpo_tasks.task import Task

ROW = {"prompt": "a1x", "letter": "a", "level": "1"}


class CodeTask(Task):
    """One secret number is right; a text `None` cannot be scored."""

    name, version, description, weights = "code", "1", "Find the number.", {"near": 1.0}

    def row_of(self, text):
        return {"prompt": text, "secret": int(text), "interpretation": f"the number {text}"}

    def score(self, row, completion):
        if completion == "None":
            return None
        success = completion == str(row["secret"])
        return self.make_score({"near": -abs(int(completion) - row["secret"])}, True, success, "" if success else "no")


class Scripted:
    """Draws texts with torch's random numbers, as a model does; records the sizes of batches, and the time they take
    by a clock of its own."""

    no_editor_reason = None

    def __init__(self, draw, seconds=0.0):
        self.draw, self.seconds, self.sizes, self.clock = draw, seconds, [], 0.0

    def sample(self, rows, editor=None):
        self.sizes.append(len(rows))
        self.clock += self.seconds * len(rows)
        return [Completion(self.draw(), 1) for _ in rows]


def number_below(n):
    return lambda: str(int(torch.randint(n, ())))


def scripted(draw, task=None, seconds=0.0, **options):
    task, sampler = task or CodeTask(), Scripted(draw, seconds)
    ready = SimpleNamespace(tokenizer=None, config=None, constraint=None)
    return Solver(task, sampler, ready, RewardExecutor(task, 0), **options), sampler


# ---- budgets


@pytest.mark.parametrize(("samples", "sizes"), [(1, [1]), (8, [8]), (9, [8, 1]), (64, [8, 16, 32, 8]), (None, None)])
def test_batches_grow_and_the_budget_of_samples_is_exact(samples, sizes):
    solver, sampler = scripted(lambda: "1")
    solution = solver("0", samples)
    assert sampler.sizes == (sizes or [8, 16, 32, 8]) and solution.samples == sum(sampler.sizes)
    assert not solution.solved and solution.stopped.startswith(f"{samples or 64} sample")
    assert solution.failures == {"no": solution.samples} and solution.answers[0].drawn == solution.samples


@pytest.mark.parametrize("seed", range(2))
def test_a_verifier_that_accepts_one_answer_of_n_is_satisfied_by_enough_samples(seed):
    """Batches have random numbers of their own: if they repeated those of the first, most answers were never drawn."""
    solver, _ = scripted(number_below(200), seed=seed)
    solution = solver("123", 5000)
    assert solution.solved and solution.answers[0].completion == "123" and solution.stopped == "an answer was accepted"
    assert sum(answer.drawn for answer in solution.answers) == solution.samples
    totals = [answer.sample.score["total"] for answer in solution.answers]
    assert totals == sorted(totals, reverse=True) and len({a.completion for a in solution.answers}) == len(totals)


def test_a_time_limit_ends_the_search_and_makes_the_last_batches_smaller(monkeypatch):
    """With a clock that only sampling advances: an eighth of a second per sample."""
    solver, sampler = scripted(lambda: "1", seconds=0.125)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: sampler.clock))
    solution = solver("0", seconds=10)
    assert sampler.sizes == [8, 16, 32, 24] and solution.seconds == 10 and not solution.solved
    assert solution.stopped == "10 s passed"
    sampler.sizes.clear()
    assert solver("0", seconds=0.5).seconds == 1 and sampler.sizes == [8], "a batch is not interrupted"
    assert solver("0", samples=9, seconds=10).stopped == "9 samples were drawn"


def test_greedy_decoding_draws_one_sample():
    solver, sampler = scripted(lambda: "1", is_greedy=True)
    assert solver("0", seconds=30).samples == 1 and sampler.sizes == [1]


@pytest.mark.parametrize(
    ("budget", "message"), [({"samples": 0}, "--samples 0"), ({"seconds": 0}, "--seconds 0"), ({"seconds": -1}, "-1")]
)
def test_a_budget_must_be_positive(budget, message):
    with pytest.raises(ValueError, match=message):
        scripted(lambda: "1")[0]("0", **budget)


def test_sample_draws_exactly_so_many_whether_they_succeed_or_not():
    solver, sampler = scripted(lambda: "0")
    assert len(solver.sample("0", 70)) == 70 and sampler.sizes == [64, 6]


def test_the_same_seed_gives_the_same_answers_whatever_was_asked_before():
    first = scripted(number_below(50), seed=5)[0]
    other = scripted(number_below(50), seed=5)[0]
    other("3")
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert _texts(first("60")) == _texts(other("60"))
    assert torch.equal(before, torch.get_rng_state()), "the global random state is restored"
    assert _texts(scripted(number_below(50), seed=6)[0]("60")) != _texts(first("60"))


def _texts(solution):
    return [(answer.completion, answer.drawn) for answer in solution.answers]


# ---- what cannot be judged is never a success


def test_answers_that_could_not_be_scored_are_named_and_come_last():
    draws = iter(["None", "5", "None", "9"])
    solution = scripted(lambda: next(draws))[0]("0", 4)
    assert [answer.completion for answer in solution.answers] == ["5", "9", "None"]
    assert not solution.solved and sum(solution.unscored.values()) == 2 and solution.failures == {"no": 2}
    assert "could not score" in next(iter(solution.unscored))


def test_nothing_that_is_unverifiable_is_a_success(monkeypatch):
    monkeypatch.setattr(CodeTask, "unverifiable", lambda self, row: "nobody knows")
    solution = scripted(lambda: "0")[0]("0", 16)
    assert not solution.solved and solution.unverifiable == "nobody knows" and solution.samples == 16
    assert solution.failures.total() == 16


def test_a_verifier_that_hangs_could_not_judge(wild):
    """In a worker: beyond the limit of the request."""
    row = {"prompt": "x"}
    ready = SimpleNamespace(tokenizer=None, config=None, constraint=None)
    texts = iter(f"hang {n}" for n in range(100))
    with RewardExecutor(wild, 1, timeout=60.0) as executor:
        solver = Solver(wild, Scripted(lambda: next(texts)), ready, executor)
        solution = solver(row, seconds=0.3)
        assert solution.stopped == "0.3 s passed"
        assert solution.unscored == {"it was not scored before the time limit": 8}


# ---- ranking


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from([None, 0.0, 1.0, -3.5]), st.booleans()), max_size=30)
)
def test_ranking_agrees_with_sorting_everything(drawn):
    samples = [
        Sample({}, form, 1, None if total is None else {"success": success, "total": total}, "r", {}, form)
        for form, total, success in drawn
    ]
    solution, cut = Solution("x", {}), random.Random(0).randint(0, len(samples))
    for part in (samples[:cut], samples[cut:]):
        solution.add(part)
    best, often = {}, Counter(form for form, _, _ in drawn)
    for form, total, success in drawn:
        key = (-1, 0.0, often[form]) if total is None else (int(success), total, often[form])
        best[form] = max(best.get(form, key), key)
    assert [best[answer.sample.form] for answer in solution.answers] == sorted(best.values(), reverse=True)
    assert {a.sample.form: a.drawn for a in solution.answers} == often
    assert solution.solved == any(total is not None and success for _, total, success in drawn)
    failed = sum(total is not None and not success for _, total, success in drawn)
    assert (solution.failures.total(), solution.unscored.total()) == (failed, sum(t is None for _, t, _ in drawn))


# ---- a real model under a constraint


@pytest.fixture(scope="module")
def toy_solver(tiny_path):
    with Solver.from_pretrained(tiny_path, ToyTask(), max_completion_length=5, reward_workers=1) as solver:
        yield solver


def test_a_model_solves_rows_under_the_constraint(toy_solver):
    solution = toy_solver(ROW, 64)
    assert solution.solved and set(solution.answers[0].completion) == {"a"} and solution.row == ROW
    assert all(set(answer.completion) <= set(LETTERS) for answer in solution.answers)
    again = toy_solver({**ROW, "prompt": "b2x", "letter": "b"}, 64)
    assert again.solved and again.answers[0].completion.strip("b") == ""
    assert _texts(toy_solver(ROW, 64)) == _texts(solution), "the model and the decoder are kept"


def test_generate_and_solve_draw_the_same_samples(toy_solver):
    drawn = Counter(sample.completion for sample in toy_solver.sample({**ROW, "letter": "z"}, 8))
    assert dict(_texts(toy_solver({**ROW, "letter": "z"}, 8))) == drawn


def test_a_prompt_that_the_model_cannot_read_and_text_that_the_task_cannot_are_refused(toy_solver):
    limit = toy_solver._ready.config.max_position_embeddings
    with pytest.raises(ValueError, match=f"the prompt has .* tokens, and the model reads at most {limit}; shorten it"):
        toy_solver({"prompt": "a" * limit, "letter": "a", "level": "1"}, 1)
    with pytest.raises(ValueError, match="define row_of"):
        toy_solver("abc")


def test_a_row_on_which_the_constraint_cannot_start_is_refused():
    class Picky:
        def start(self, row):
            return row["missing"]

    solver, sampler = scripted(lambda: "1")
    solver._ready.constraint = Picky()
    with pytest.raises(ValueError, match=r"cannot start on this row \(KeyError: 'missing'\)"):
        solver("3")
    assert not sampler.sizes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": None}, "is not a run, neither a folder nor on the Hub; name the task too"),
        ({"temperature": -1}, "--temperature -1"),
        ({"top_p": 2.0}, "top_p=2.0"),
        ({"editor": "none"}, "has no editors"),
        ({"max_completion_length": 0}, "--max_completion_length 0"),
        ({"vllm_server_url": "here"}, "give an address such as"),
        ({"vllm_server_url": "http://127.0.0.1:9"}, "does not answer"),
    ],
)
def test_wrong_options_are_refused_before_the_weights_are_loaded(tiny_path, monkeypatch, options, message):
    monkeypatch.setattr(module, "load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    with pytest.raises(ValueError, match=message):
        Solver.from_pretrained(tiny_path, **{"task": ToyTask()} | options)


def test_settings_are_those_of_the_run_unless_given(tiny_path, tmp_path, monkeypatch):
    from tests.support.run_folders import write_run

    run = write_run(tmp_path / "run")
    text = (run / "settings.json").read_text().replace('"max_steps"', '"temperature": 0.5, "top_k": 3, "max_steps"')
    (run / "settings.json").write_text(text)
    seen = {}

    def record(*arguments):
        seen["arguments"] = arguments
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "CompletionSampler", record)
    ready = ready_model(tiny_path, ToyTask(), [], tmp_path, seed=0)
    monkeypatch.setattr(module, "ready_model", lambda *_, **__: ready)
    for asked, expected in (
        ({}, (0.5, 256, 3)),
        ({"temperature": 2.0, "top_k": 0, "max_completion_length": 7}, (2.0, 7, 0)),
    ):
        with pytest.raises(KeyboardInterrupt):
            Solver.from_pretrained(run, ToyTask(), **asked)
        _, _, temperature, length, _, filters, _ = seen["arguments"]
        assert (temperature, length, filters.top_k) == expected


def test_how_a_run_sampled_is_read_from_its_settings():
    training = {"temperature": 1.0, "top_k": 0, "top_p": None, "max_completion_length": 512, "learning_rate": 1e-6}
    training |= {"generation_kwargs": {"top_k": 4}, "component_weights": {"match": 2}, "chat_template_kwargs": None}
    expected = {"temperature": 1.0, "top_k": 4, "max_completion_length": 512, "component_weights": {"match": 2}}
    assert sampling_of({"training": training}) == expected
    assert sampling_of({}) == sampling_of({"training": {}}) == {}
