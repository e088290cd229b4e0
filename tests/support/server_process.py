"""A server in a process of its own, for tests."""

import os
import socket
import subprocess
import sys
import time

import httpx


def free_port() -> int:
    """Return a port of this machine on which no server listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start(file, *words, path="/health", **environment):
    """Start a server process; return it and its address once it answers at `path`."""
    port = free_port()
    environment = {**os.environ, "GRADIO_SERVER_PORT": str(port), **environment}  # other servers read their argument
    process = subprocess.Popen([sys.executable, str(file), str(port), *words], env=environment)
    url = f"http://127.0.0.1:{port}"
    for _ in range(600):
        try:
            httpx.get(f"{url}{path}", timeout=5).raise_for_status()
            return process, url
        except httpx.HTTPError:
            assert process.poll() is None, "the server ended"
            time.sleep(0.5)
    raise AssertionError("the server does not answer")
