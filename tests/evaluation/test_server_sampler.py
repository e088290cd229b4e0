"""Sampling from a vLLM server: a stand-in that speaks its protocol and samples under the constraint of each request's
row. tests/vllm has the real one."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import torch

from tests.support.toy import LETTERS, LettersConstraint, ToyTask
from trl_grpo_tasks import Solver
from trl_grpo_tasks.models.loading import load_tokenizer
from trl_grpo_tasks.serving import ServerError
from trl_grpo_tasks.serving.generation import server_problem
from trl_grpo_tasks.serving.served_task import CONFIG_KEY, ServedTask

ROW = {"prompt": "a1x", "letter": "a", "level": "1"}


class Server:
    """Answers as `trl-grpo-tasks serve` does: completions are sampled uniformly under the constraint of the row."""

    def __init__(self, tokenizer):
        self.tokenizer, self.bodies, self.failure, self.reply = tokenizer, [], None, None
        self.served = {CONFIG_KEY: ServedTask.of(ToyTask(), tokenizer).to_config()}
        handler = type("Handler", (Handler,), {"server_state": self})
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def completions(self, body):
        generator = torch.Generator().manual_seed(body["seed"])
        choices = []
        for _ in range(body["n"]):
            state, ids = LettersConstraint(self.tokenizer).start(json.loads(body["vllm_xargs"]["row"])), []
            while not state.finished:
                packed = torch.as_tensor(state.mask())
                allowed = [t for t in range(len(self.tokenizer)) if int(packed[t // 32]) >> (t % 32) & 1]
                ids.append(allowed[int(torch.randint(len(allowed), (), generator=generator))])
                state.accept(ids[-1])
            choices.append({"token_ids": ids})
        return {"choices": choices}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        state = self.server_state
        config = {"logprobs_mode": "processed_logprobs", "max_model_len": 64}
        answers = {
            "/v1/models": {"data": [{"id": "served/model"}]},
            "/server_info?config_format=json": {
                "vllm_config": {"additional_config": state.served, "model_config": config}
            },
        }
        missing = state.served is None and self.path.startswith("/server_info")
        self.reply(404 if missing else 200, answers[self.path])

    def do_POST(self):
        state = self.server_state
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))  # closing before all is read resets
        state.bodies.append(body)
        if state.reply is not None:
            return self.reply_text(state.reply)
        if state.failure is not None:
            return self.reply(400, {"message": state.failure})
        self.reply(200, state.completions(body))

    def reply(self, status, content):
        self.reply_text(json.dumps(content), status)

    def reply_text(self, text, status=200):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def server(tiny_path):
    made = Server(load_tokenizer(tiny_path))
    yield made
    made.http.shutdown()
    made.http.server_close()


def solver_at(server, tiny_path, **options):
    given = {"max_completion_length": 5, "reward_workers": 1, "vllm_server_url": server.url} | options
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
    assert body["model"] == "served/model" and json.loads(body["vllm_xargs"]["row"]) == ROW
    assert body["prompt"] == [server.tokenizer("a1x")["input_ids"]]
    assert len({one["seed"] for one in server.bodies}) == len(server.bodies) // 2


def test_greedy_decoding_asks_for_one_completion(server, tiny_path):
    with solver_at(server, tiny_path, temperature=0.0) as solver:
        assert len(solver.sample(ROW, 3)) == 3
    assert [body["n"] for body in server.bodies] == [1]


def test_a_server_without_the_constraint_is_refused(server, tiny_path):
    server.served = {}
    with pytest.raises(ValueError, match="samples without a constraint; start it with `trl-grpo-tasks serve`"):
        solver_at(server, tiny_path)
    server.served = {CONFIG_KEY: {**ServedTask.of(ToyTask(), server.tokenizer).to_config(), "task": "brick"}}
    with pytest.raises(ValueError, match="the server samples for task 'brick'"):
        solver_at(server, tiny_path)
    server.served = None
    with pytest.raises(ValueError, match="its constraint cannot be checked"):
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
        Solver.from_pretrained(tiny_path, ToyTask(), max_completion_length=5, reward_workers=1, vllm_server_url=url)


def test_what_a_server_refuses_is_one_message(server, tiny_path):
    server.failure = "the constraint cannot start on this row"
    with (
        solver_at(server, tiny_path) as solver,
        pytest.raises(ValueError, match=r"status 400.*cannot start on this row"),
    ):
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
    monkeypatch.setattr(Handler, "do_GET", lambda self: self.reply_text(reply))
    with pytest.raises(ServerError, match="is not that of a vLLM server"):
        solver_at(server, tiny_path)


@pytest.mark.parametrize("config", [{}, {"model_config": 3}, {"model_config": {"max_model_len": "64"}}])
def test_a_server_whose_configuration_lacks_what_is_checked_is_refused(server, config):
    info = {"additional_config": server.served, **config}
    client = SimpleNamespace(get_server_info=lambda: info)
    assert "start it with `trl-grpo-tasks serve`" in server_problem(client, ToyTask(), server.tokenizer, 5)
