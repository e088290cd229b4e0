"""Several vLLM servers: load, faults and versions of the weights, with servers whose answers say which they have.

tests/vllm kills a real one."""

import itertools
import json
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from trl.generation import vllm_client

from tests.support import vllm_stand_in
from tests.support.exhaustive import exhaustive_but
from tests.support.observed import logged, observe, rows_of
from tests.support.toy import ToyTask
from tests.support.training import config, toy_trainer
from trl_grpo_tasks.models.loading import load_tokenizer
from trl_grpo_tasks.serving import ServerError, servers, weights

FILES = 0  # the version of the weights with which a process starts


class HTTP(ThreadingHTTPServer):
    request_queue_size = 128


class Process:
    """A server process. Completions are [version of the weights, first token of the prompt]."""

    def __init__(self, port=0, count_tokens=True):
        self.version, self.tokens, self.status = FILES, 0, 200
        self.count_tokens, self.is_slow = count_tokens, False
        self.started, self.answered, self.loads, self.connections = time.time(), [], [], []
        self.works, self.completes, self.reads = (threading.Event() for _ in range(3))
        for event in (self.works, self.completes, self.reads):
            event.set()
        self.http = HTTP(("127.0.0.1", port), Handler)
        self.http.process = self
        self.port = self.http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def end(self):
        """Connections break, and new ones are refused."""
        self.status = None
        self.completes.set()
        self.works.set()
        self.http.shutdown()
        self.http.server_close()
        for connection in self.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def again(self):
        return Process(self.port, self.count_tokens)


class Handler(BaseHTTPRequestHandler):
    protocol_version, wbufsize = "HTTP/1.1", -1  # a reply is sent as a whole

    def setup(self):
        super().setup()
        self.server.process.connections.append(self.connection)

    def do_GET(self):
        process = self.server.process
        process.works.wait(60)
        process.tokens += process.is_slow
        counted = f'\nvllm:generation_tokens_total{{engine="0"}} {process.tokens}.0' if process.count_tokens else ""
        content = f"# HELP of metrics\nprocess_start_time_seconds {process.started}{counted}\n"
        self.reply(json.dumps({"data": [{"id": "model"}]}) if self.path == "/v1/models" else content)

    def do_POST(self):
        process, body = self.server.process, self.rfile.read(int(self.headers["Content-Length"] or 0))
        process.works.wait(60)
        if self.path == "/collective_rpc":
            process.reads.wait(60)
            if process.status == 200:
                path = json.loads(body)["kwargs"]["weights_path"]
                process.version = int(load_file(f"{path}/model-00000.safetensors")["version"])
                process.loads.append(process.version)
        if self.path != "/v1/completions":
            return self.reply("{}", process.status)
        (prompt,) = json.loads(body)["prompt"]
        process.completes.wait(60)
        process.tokens += 2
        process.answered.append(prompt[0])
        token_ids = [process.version, prompt[0]]
        choice = {"prompt_token_ids": prompt, "token_ids": token_ids, "logprobs": None}
        return self.reply(json.dumps({"choices": [choice] * json.loads(body)["n"]}), process.status)

    def reply(self, text, status=200):
        if self.server.process.status is None:
            self.close_connection = True
            return
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def processes():
    started = [Process(), Process()]
    yield started
    for process in started:
        if process.status is not None:
            process.end()


@pytest.fixture
def client(processes, tmp_path, monkeypatch):
    monkeypatch.setattr(servers, "WATCH_SECONDS", 0.1)
    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda *_, **__: True)
    made = servers.client_of(str(tmp_path / "weights"), ", ".join(process.url for process in processes))
    made.init_communicator()
    send(made, 1)
    return made


def send(client, version):
    client.update_named_params(None, iter([("version", torch.tensor(version))]))


@pytest.fixture
def _impatient(monkeypatch):
    monkeypatch.setattr(servers, "HANGS_AFTER", 2.0)
    monkeypatch.setattr(servers, "ANSWERS_WITHIN", 1.0)


def complete(client, prompts, n=1):
    """Ask for completions of prompts, which must be of these prompts, in order; return the versions."""
    answer = client.generate(prompts=[[prompt] for prompt in prompts], n=n, logprobs=None, max_tokens=2)
    assert answer["prompt_ids"] == [[prompt] for prompt in prompts]
    assert [ids[1] for ids in answer["completion_ids"]] == [prompt for prompt in prompts for _ in range(n)]
    return {ids[0] for ids in answer["completion_ids"]}


def hold(client, processes, until, more_seconds=0.0):
    """Let servers answer only when there are so many requests."""

    def release():
        while sum(len(server.open) for server in client.servers) < until:
            time.sleep(0.01)
        time.sleep(more_seconds)
        for process in processes:
            process.completes.set()

    for process in processes:
        process.completes.clear()
    threading.Thread(target=release, daemon=True).start()


@pytest.fixture
def _no_logprobs(monkeypatch):
    monkeypatch.setattr(vllm_client, "parse_logprobs", lambda given: ([[[0.0]]] * len(given), [[[0]]] * len(given)))


pytestmark = pytest.mark.usefixtures("_no_logprobs")


def test_requests_go_to_the_server_with_the_fewest(client, processes):
    hold(client, processes, until=20)
    assert complete(client, range(20), n=3) == {1}
    assert [len(process.answered) for process in processes] == [10, 10]
    processes[0].completes.clear()
    with ThreadPoolExecutor(9) as pool:
        first = pool.submit(complete, client, [20])
        while not client.servers[0].open:
            time.sleep(0.01)
        assert complete(client, [21]) == complete(client, [22]) == {1}
        processes[0].completes.set()
        assert first.result(60) == {1}
    assert processes[1].answered[-2:] == [21, 22] and processes[0].answered[-1] == 20


def test_a_server_that_dies_loses_no_request_and_comes_back_with_the_newest_weights(client, processes, capsys):
    processes[0].completes.clear()
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(complete, client, range(8))
        while not client.servers[0].open:
            time.sleep(0.01)
        processes[0].end()
        assert whole.result(60) == {1}
    assert f"vLLM server {processes[0].url} is out: " in capsys.readouterr().out
    processes[0] = processes[0].again()
    assert complete(client, range(8)) == {1} and not processes[0].answered, "it has the weights of its files"
    send(client, 2)
    assert f"vLLM server {processes[0].url} is back, with the newest weights" in capsys.readouterr().out
    assert complete(client, range(8)) == {2} and processes[0].answered


def test_a_server_that_was_restarted_between_rollouts_samples_nothing_with_old_weights(client, processes, capsys):
    processes[0].end()
    processes[0] = processes[0].again()
    time.sleep(0.2)  # longer than between two looks, as any start of a server is
    assert complete(client, range(6)) == {1} and not processes[0].answered
    assert "is out: it was restarted" in capsys.readouterr().out


def test_an_answer_with_old_weights_does_not_count_when_its_server_has_read_the_newest_since(
    client, processes, monkeypatch
):
    """The only server was restarted. It answers a request with the weights of its files, and another one later."""
    monkeypatch.setattr(servers, "WATCH_SECONDS", 0.5)
    processes[1].end()
    assert complete(client, [1]) == {1}
    processes[0].end()
    processes[0] = process = processes[0].again()
    calls, is_open = itertools.count(), threading.Event()
    process.completes = SimpleNamespace(wait=lambda _: next(calls) == 0 or is_open.wait(60), set=is_open.set)
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(complete, client, [2, 3])
        while not process.loads:
            time.sleep(0.01)
        is_open.set()
        assert whole.result(60) == {1}
    assert process.answered[0] in (2, 3) and len(process.answered) >= 3


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("what", ["works", "completes"])
def test_a_server_that_hangs_is_left_and_its_late_answers_are_not_used(client, processes, capsys, what):
    """All of it, or only its engine."""
    getattr(processes[0], what).clear()
    assert complete(client, range(6)) == {1}
    assert "is out: no answer, or open requests and no token, for 2 s" in capsys.readouterr().out
    send(client, 2)
    getattr(processes[0], what).set()
    assert complete(client, range(6)) == {2}
    time.sleep(0.1)
    send(client, 3)
    assert complete(client, range(6)) == {3} and len(client.servers[0].open) == 0


@pytest.mark.parametrize("counts", [True, False])
def test_a_slow_server_is_not_taken_for_one_that_hangs(processes, client, monkeypatch, capsys, counts):
    """Its tokens grow, or it is one that does not count them."""
    monkeypatch.setattr(servers, "HANGS_AFTER", 0.2)
    for process in processes:
        process.count_tokens, process.is_slow = counts, True
    hold(client, processes, until=4, more_seconds=0.6)
    assert complete(client, range(4)) == {1}
    assert [len(process.answered) for process in processes] == [2, 2] and "is out" not in capsys.readouterr().out


@pytest.mark.usefixtures("_impatient")
def test_a_server_that_hangs_while_it_reads_weights(client, processes, monkeypatch, capsys):
    """It may take its time if it answers. The weights are kept until the next ones, and then deleted."""
    processes[0].reads.clear()
    threading.Timer(2.6, processes[0].reads.set).start()
    send(client, 2)
    assert complete(client, range(4)) == {2} and "is out" not in capsys.readouterr().out
    processes[0].works.clear()
    send(client, 3)
    assert complete(client, range(4)) == {3} and "is out: " in capsys.readouterr().out
    assert len(list((client.servers[0].client._folder).iterdir())) == 1


def test_a_server_that_cannot_read_weights_is_out(client, processes, capsys):
    processes[0].status = 500
    send(client, 2)
    assert complete(client, range(3)) == {2} and not processes[0].answered
    assert "is out: the vLLM server could not read the weights in " in capsys.readouterr().out


def test_the_weights_for_a_single_server_are_deleted_when_it_has_read_them(processes, tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda *_, **__: True)
    single = servers.client_of(str(tmp_path), processes[0].url)
    single.init_communicator()
    send(single, 5)
    assert processes[0].loads == [5] and not list(tmp_path.iterdir())
    processes[0].status = 500
    with pytest.raises(RuntimeError, match=r"status 500: {}\); vllm_weights_folder must be"):
        send(single, 6)


def test_tensors_are_written_in_parts_of_limited_size(monkeypatch):
    monkeypatch.setattr(weights, "_FILE_BYTES", 90)
    tensor = torch.arange(24.0).view(4, 6)
    given = {"a": tensor.T, "b": tensor[:1], "c": tensor[:, :1], "d": torch.zeros(40)}
    parts = list(weights._parts(iter(given.items())))
    assert [list(part) for part in parts] == [["a"], ["b", "c", "d"]]
    merged = {name: value for part in parts for name, value in part.items()}
    assert all(value.equal(given[name]) and value.is_contiguous() for name, value in merged.items())
    tensor += 1  # an adapter that is taken out again
    assert not merged["a"].equal(given["a"])


def test_at_the_start_each_server_must_read_the_weights(processes, client, tmp_path, capsys):
    new = servers.client_of(str(tmp_path / "other"), ",".join(process.url for process in processes))
    new.init_communicator()
    processes[1].status = 500
    with pytest.raises(ServerError, match=f"{processes[1].url}: the vLLM server could not read the weights"):
        send(new, 1)
    assert "vllm_weights_folder must be a folder that the server can read" in capsys.readouterr().out


def test_if_none_is_left_the_first_that_comes_back_reads_the_newest_weights(client, processes, monkeypatch, capsys):
    for process in processes:
        process.end()
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(complete, client, range(4))
        time.sleep(0.3)
        assert not whole.done()
        processes[1] = processes[1].again()
        assert whole.result(60) == {1} and set(processes[1].loads) == {1}
    processes[1].end()
    monkeypatch.setattr(servers, "NONE_LEFT_SECONDS", 0.2)
    with pytest.raises(
        ServerError, match=r"none of the vLLM servers .* has answered for 0.2 s.*--resume_from_checkpoint"
    ):
        complete(client, range(4))


def test_an_error_of_servers_that_work_is_raised_after_a_few_tries(client, processes, monkeypatch):
    reply = Handler.reply
    monkeypatch.setattr(Handler, "reply", failing(reply, 500))
    with pytest.raises(ServerError, match="answered a request 3 times with an error: status 500: no room"):
        complete(client, [7])
    monkeypatch.setattr(Handler, "reply", failing(reply, 400))
    with pytest.raises(Exception, match="Request failed: 400, no room"):
        complete(client, [7])
    assert not any(server.is_out for server in client.servers)


def failing(reply, status):
    def replied(self, text, status_given=200):
        is_completion = self.path == "/v1/completions"
        return reply(self, "no room" if is_completion else text, status if is_completion else status_given)

    return replied


@pytest.mark.parametrize("seed", exhaustive_but([0], [0, 1]))
def test_whatever_fails_all_completions_have_the_newest_weights(client, processes, monkeypatch, seed):
    """Servers die, hang and start again at random moments, while weights and requests are sent."""
    monkeypatch.setattr(servers, "HANGS_AFTER", 0.2)
    monkeypatch.setattr(servers, "ANSWERS_WITHIN", 0.1)
    chance, ended = random.Random(seed), threading.Event()

    def disturb():
        while not ended.wait(chance.random() / 5):
            place = chance.randrange(2)
            process, kind = processes[place], chance.choice(["end", "hang", "hang", "slow"])
            if kind == "end":
                process.end()
                processes[place] = process.again()
            else:
                event = process.works if kind == "hang" else process.completes
                event.clear()
                ended.wait(chance.random() / 2)
                event.set()

    disturbing = threading.Thread(target=disturb)
    disturbing.start()
    try:
        for version in range(2, 8):
            send(client, version)
            with ThreadPoolExecutor(4) as pool:
                assert set.union(*pool.map(lambda n: complete(client, range(n, n + 4)), range(4))) == {version}
    finally:
        ended.set()
        disturbing.join()
        for process in processes:
            process.works.set()
            process.completes.set()


# ---- training


def test_training_goes_on_when_a_server_dies(tiny_path, tmp_path, monkeypatch, capsys):
    """The rows are those of the plan, and log-probs those of the newest weights."""
    vllm_stand_in.install(monkeypatch)
    monkeypatch.setattr(vllm_client, "parse_logprobs", PARSE)
    monkeypatch.setattr(servers, "WATCH_SECONDS", 0.1)
    tokenizer = load_tokenizer(tiny_path)

    def made(name, *urls):
        return toy_trainer(tiny_path, tmp_path / name, max_steps=6, use_vllm=True, vllm_mode="server", constrain=True,
                           vllm_server_base_url=",".join(urls), vllm_weights_folder=str(tmp_path / "weights"),
                           learning_rate=3e-3)  # fmt: skip

    with vllm_stand_in.serving(monkeypatch, tiny_path, ToyTask(), tokenizer) as one:
        alone = made("alone", one.url)
        wanted = observe(alone)
        alone.train()
        with vllm_stand_in.serving(monkeypatch, tiny_path, ToyTask(), tokenizer) as other:
            trainer = made("several", one.url, other.url)
            seen, sampled = observe(trainer), len(one.engine.requests)
            dies_at(other, 3)
            slow_down(one.engine)
            trainer.train()
    assert len(seen) == 6 and rows_of(seen) == rows_of(wanted)
    assert len(other.engine.requests) == 2 and len(one.engine.requests) == sampled + 10
    assert f"vLLM server {other.url} is out: " in capsys.readouterr().out
    assert max(logged(trainer, "sampling/logp_difference_max")) < 2e-5


PARSE = vllm_client.parse_logprobs


def slow_down(engine):
    """So that requests also go to the other server."""
    generate = engine.generate
    engine.generate = lambda *args: time.sleep(0.2) or generate(*args)


def dies_at(server, number):
    """End a server while it works on the request of this number."""
    generate = server.engine.generate

    def failing(*args):
        if len(server.engine.requests) == number - 1:
            server.http.server_close()
            raise OSError
        return generate(*args)

    server.engine.generate = failing


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vllm_mode": "colocate", "vllm_weights_folder": "w"}, "vllm_mode='server'"),
        ({"use_vllm": False, "vllm_weights_folder": "w"}, "vllm_mode='server'"),
        ({"vllm_server_base_url": "http://a:1,http://b:1"}, "need vllm_weights_folder, which all of them can read"),
        ({"vllm_server_base_url": "http://a:1,", "vllm_weights_folder": "w"}, "an address is empty or there twice"),
        ({"vllm_server_base_url": "http://a:1,http://a:1/", "vllm_weights_folder": "w"}, "there twice; write one, or"),
    ],
)
def test_options_that_cannot_work(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **({"use_vllm": True, "vllm_mode": "server"} | options))
