"""Sampling from a vLLM server: a stand-in that speaks its protocol. tests/vllm has the real one."""

import json
from types import SimpleNamespace

import pytest

from tests.support.toy import LETTERS, ToyTask
from tests.support.vllm_stand_in import Handler, install, serving
from trl_grpo_tasks import Solver
from trl_grpo_tasks.models.loading import load_tokenizer
from trl_grpo_tasks.serving import ServerError
from trl_grpo_tasks.serving.generation import server_problem
from trl_grpo_tasks.serving.served_task import CONFIG_KEY, ServedTask

ROW = {"prompt": "a1x", "letter": "a", "level": "1"}


def answer(handler, text, status=200):
    handler.send_response(status)
    handler.end_headers()
    handler.wfile.write(text.encode())


@pytest.fixture
def server(tiny_path, monkeypatch):
    """A server of the toy task, whose seeds are those of requests. It notes them as `bodies`; a `reply` replaces its
    own."""
    install(monkeypatch)
    complete = Handler.complete

    def noted(handler, body):
        made.bodies.append(body)
        made.engine.generator.manual_seed(body["seed"])
        return complete(handler, body) if made.reply is None else answer(handler, made.reply)

    monkeypatch.setattr(Handler, "complete", noted)
    with serving(monkeypatch, tiny_path, ToyTask(), load_tokenizer(tiny_path)) as made:
        made.bodies, made.reply = [], None
        yield made


def solver_at(server, tiny_path, **options):
    given = {"max_completion_length": 5, "reward_workers": 0, "vllm_server_url": server.url} | options
    return Solver.from_pretrained(tiny_path, ToyTask(), **given)


def test_a_server_samples_under_the_constraint_of_the_row(server, tiny_path):
    with solver_at(server, tiny_path, temperature=0.7, top_k=4) as solver:
        solution = solver(ROW, 64)
        again = solver(ROW, 64)
    assert solution.solved and set(solution.answers[0].completion) == {"a"}
    assert all(set(answer.completion) <= set(LETTERS) for answer in solution.answers)
    assert [a.completion for a in again.answers] == [a.completion for a in solution.answers], "seeds repeat"
    body = server.bodies[0]
    assert (body["n"], body["temperature"], body["top_k"], body["max_tokens"]) == (8, 0.7, 4, 5)
    assert body["model"] == "model" and json.loads(body["vllm_xargs"]["row"]) == ROW
    assert body["prompt"] == [load_tokenizer(tiny_path)("a1x")["input_ids"]]
    assert len({one["seed"] for one in server.bodies}) == len(server.bodies) // 2


def test_greedy_decoding_asks_for_one_completion(server, tiny_path):
    with solver_at(server, tiny_path, temperature=0.0) as solver:
        assert len(solver.sample(ROW, 3)) == 3
    assert [body["n"] for body in server.bodies] == [1]


def test_a_server_without_the_constraint_is_refused(server, tiny_path, monkeypatch):
    brick = {CONFIG_KEY: {**ServedTask.of(ToyTask(), load_tokenizer(tiny_path)).to_config(), "task": "brick"}}
    for config, status, message in (
        ({}, 200, "samples without a constraint; start it with `trl-grpo-tasks serve`"),
        (brick, 200, "the server samples for task 'brick'"),
        ({}, 404, "its constraint cannot be checked"),
    ):
        known = {"logprobs_mode": "processed_logprobs", "max_model_len": 64}
        info = {"additional_config": config, "model_config": known}
        text = json.dumps({"data": [{"id": "model"}], "vllm_config": info})

        def reply(handler, text=text, status=status):
            answer(handler, text, status if handler.path.startswith("/server_info") else 200)

        monkeypatch.setattr(Handler, "do_GET", reply)
        with pytest.raises(ValueError, match=message):
            solver_at(server, tiny_path)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("localhost:8000", "give an address such as http://127.0.0.1:8000"),
        ("http://127.0.0.1:9", r"at http://127\.0\.0\.1:9 does not answer \(.+\); start one with"),
        ("http://127.0.0.1:nine", r"does not answer \(.+\); start one with"),
    ],
)
def test_a_wrong_address_is_one_message(tiny_path, url, words):
    with pytest.raises(ValueError, match=words):
        Solver.from_pretrained(tiny_path, ToyTask(), max_completion_length=5, reward_workers=0, vllm_server_url=url)


def test_what_a_server_refuses_is_one_message(server, tiny_path):
    def refuse(*_):
        raise ValueError("the constraint cannot start on this row")

    server.engine.generate = refuse
    refusal = r"status 400.*cannot start on this row"
    with solver_at(server, tiny_path) as solver, pytest.raises(ValueError, match=refusal):
        solver(ROW)


TOKENS = ["null", '["a"]', "[1e9]", "[-1]", "[123456789]", "[5]"]  # the last one is only one completion of two
MALFORMED = ["no JSON", "[" * 100_000, "null", "[]", '{"choices": null}', '{"choices": [1]}', '{"choices": [{}]}']
MALFORMED += ['{"choices": []}', *(f'{{"choices": [{{"token_ids": {ids}}}]}}' for ids in TOKENS)]


def test_replies_that_are_malformed_or_have_too_few_completions_are_errors(server, tiny_path):
    with solver_at(server, tiny_path) as solver:
        for server.reply in MALFORMED:
            with pytest.raises(ServerError, match="/v1/completions is not that of a vLLM server"):
                solver.sample(ROW, 2)


@pytest.mark.parametrize("reply", ["<html>", "[]", '{"data": []}', '{"vllm_config": 3}'])
def test_a_server_of_another_kind_is_an_error(server, tiny_path, monkeypatch, reply):
    monkeypatch.setattr(Handler, "do_GET", lambda handler: answer(handler, reply))
    with pytest.raises(ServerError, match="is not that of a vLLM server"):
        solver_at(server, tiny_path)


@pytest.mark.parametrize("config", [{}, {"model_config": 3}, {"model_config": {"max_model_len": "64"}}])
def test_a_server_whose_configuration_lacks_what_is_checked_is_refused(tiny_path, config):
    tokenizer = load_tokenizer(tiny_path)
    info = {"additional_config": {CONFIG_KEY: ServedTask.of(ToyTask(), tokenizer).to_config()}, **config}
    client = SimpleNamespace(get_server_info=lambda: info)
    assert "start it with `trl-grpo-tasks serve`" in server_problem(client, ToyTask(), tokenizer, 5)
