"""The option vllm_weights_folder; tests/vllm sends weights to a real server."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch
from safetensors.torch import load_file

from tests.support.training import config
from trl_grpo_tasks.serving import weights


def test_the_folder_is_for_a_server(tmp_path):
    server = {"use_vllm": True, "vllm_mode": "server"}
    assert config(tmp_path, vllm_weights_folder="w", **server).vllm_weights_folder == "w"
    for options in ({}, {"use_vllm": True, "vllm_mode": "colocate"}):
        with pytest.raises(ValueError, match="vllm_mode='server'"):
            config(tmp_path, vllm_weights_folder="w", **options)


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


class Server(BaseHTTPRequestHandler):
    """Reads the weights as vLLM does when its workers reload them."""

    status, loaded = 200, []

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (self.path, body["method"]) == ("/collective_rpc", "reload_weights")
        self.loaded.append(load_file(f"{body['kwargs']['weights_path']}/model-00000.safetensors"))
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(b"no such folder")

    def log_message(self, *_):
        pass


@pytest.fixture
def client(tmp_path):
    http = HTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
    made = object.__new__(weights.FolderClient)  # TRL's constructor needs vLLM
    made._folder, made.base_url = tmp_path / "weights", f"http://127.0.0.1:{http.server_address[1]}"
    made.init_communicator()
    yield made
    http.shutdown()
    http.server_close()


def test_the_server_reads_the_weights_before_they_are_deleted(client, monkeypatch):
    given = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2)}
    client.update_named_params(None, iter(given.items()))
    read = Server.loaded.pop()
    assert set(read) == set(given) and all(read[name].equal(value) for name, value in given.items())
    assert not list(client._folder.iterdir())
    monkeypatch.setattr(Server, "status", 500)
    with pytest.raises(RuntimeError, match=r"status 500: no such folder\); vllm_weights_folder must be"):
        client.update_named_params(None, iter(given.items()))
