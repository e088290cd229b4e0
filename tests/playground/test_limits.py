"""What a visitor of the playground, or a client of a server, can send: no files, no large bodies, no large rows."""

import base64
import http.client
import json
import tracemalloc
import zlib
from functools import cache
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest

from tests.support.server_process import free_port
from trl_grpo_tasks.constraints.budget import LIMIT
from trl_grpo_tasks.registry import TASKS, get_task
from trl_grpo_tasks.serving import served_task

GRADIO, JSON = "/gradio_api", {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def address():
    gradio = pytest.importorskip("gradio")
    from trl_grpo_tasks.playground.page import launch

    with gradio.Blocks() as page:
        text = gradio.Textbox()
        gradio.Button().click(lambda said: said.upper(), text, text, api_name="upper")
    yield urlsplit(launch(page, "127.0.0.1", free_port())).netloc
    page.close(verbose=False)


def post(address, path, body, **headers):
    connection = http.client.HTTPConnection(address, timeout=30)
    connection.request("POST", GRADIO + path, body, headers)
    return connection.getresponse()


def test_requests_of_the_page_are_answered(address):
    assert post(address, "/call/upper", json.dumps({"data": ["a"]}), **JSON).status == 200


def test_files_are_not_taken(address):
    form = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a"\r\n\r\nsome\r\n--x--\r\n'
    for path in ("/upload", "/upload/", "/upload?upload_id=1"):
        assert post(address, path, form, **{"Content-Type": "multipart/form-data; boundary=x"}).status == 403


@pytest.mark.parametrize("length", ["150000000", "-1", "many"])
def test_a_large_body_is_refused_before_it_is_sent(address, length):
    """The client announces the body and waits for the answer."""
    connection = http.client.HTTPConnection(address, timeout=30)
    connection.putrequest("POST", f"{GRADIO}/queue/join")
    connection.putheader("Content-Length", length)
    connection.endheaders()
    assert connection.getresponse().status in (413, 400)


def test_a_large_body_of_unknown_length_is_refused_too(address):
    connection = http.client.HTTPConnection(address, timeout=30)
    chunks = iter([b"0" * 2**18] * 8)
    connection.request("POST", f"{GRADIO}/queue/join", chunks, JSON, encode_chunked=True)
    assert connection.getresponse().status == 413


# ---- rows


@pytest.mark.parametrize("name", sorted(TASKS))
def test_rows_of_the_data_set_are_accepted_as_they_are(name):
    task = get_task(name)
    for row in task.dataset("train", 40, 0) + task.dataset("test", 10, 0):
        row = json.loads(json.dumps(row))
        assert task.row_from(row) == row


LARGE = [10**3, 10**9, 10**400, -1, 0, 1.5, "8", True, [8], None, {"a": 1}]


def wrong_rows():
    for name, key, values in [
        ("brick", "world", LARGE),
        ("brick", "max_bricks", [one for one in LARGE[1:] if one is not None]),
        ("brick", "loads", [[{"grams": 1}], [{"grams": 1e300, "at": [0, 0]}], [{"grams": 1, "at": [0, 0, 0]}], [5], 7,
                            [{"grams": 1, "at": [0.5, 0]}],
                            [{"grams": float("nan"), "at": [0, 0]}], [{"grams": 1, "at": [0, 0]}] * 5000]),
        ("brick", "voxels", ["?", "AAAA", 5, ["x"], "eJztwTEBAAAA"]),
        ("brick", "caption", [5, ["a"]]),
        ("brick", "gold", [5, ["a"]]),
        ("machine", "max_blocks", [one for one in LARGE if one is not None]),
        ("machine", "trial", ["../x", None, 5, ["car"]]),
        ("machine", "goal", ["9", None, float("inf"), float("nan"), [1]]),
        ("machine", "blocks", [["nothing"], "15", [["0"]], 5]),
        ("theory", "prompt", [[{"role": "user", "content": "BOS"}], "BOS " * 1000, "x", ""]),
        ("theory", "level", ["none", 5, ["a"]]),
        ("infill", "pieces", [5, None, "", ["a", 5], ["a"]]),
        ("infill", "places", [[], [-1], [10**9], [0, 0], [1, 0], "0", [0.5], [True], None, list(range(10**5))]),
    ]:  # fmt: skip
        yield from (pytest.param(name, key, value, id=f"{name}-{key}-{value!r:.30}") for value in values)


@cache
def task_and_row(name):
    task = get_task(name)
    return task, json.dumps(task.dataset("test", 1, 0)[0])


@pytest.mark.parametrize(("name", "key", "value"), wrong_rows())
def test_rows_that_would_cost_much_or_cannot_be_read_are_refused_at_once(name, key, value):
    task, row = task_and_row(name)
    row = json.loads(row) | {key: value}
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"row|prompt"):
            task.row_from(row)
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


def test_a_target_that_unpacks_to_much_is_not_unpacked():
    task = get_task("brick")
    bomb = base64.b64encode(zlib.compress(bytes(2**26), 9)).decode()
    row = task.dataset("test", 1, 0)[0] | {"voxels": bomb}
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="the target shape does not fit"):
            task.row_from(row)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_a_server_refuses_rows_that_its_task_refuses(monkeypatch):
    started = []
    constraint = SimpleNamespace(start=started.append)
    monkeypatch.setattr(served_task, "served_here", lambda: (get_task("brick"), constraint))
    row = get_task("brick").dataset("test", 1, 0)[0]
    served_task.check_row(SimpleNamespace(extra_args={"row": json.dumps(row)}, max_tokens=64))
    refused = SimpleNamespace(extra_args={"row": json.dumps(row | {"world": 1000})}, max_tokens=64)
    with pytest.raises(ValueError, match="'world' of a row must be a whole number from 1 to 40, not 1000"):
        served_task.check_row(refused)
    assert started == [row | {LIMIT: 64}]
