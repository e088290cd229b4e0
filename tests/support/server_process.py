"""A server in a process of its own, for tests."""

import socket
import subprocess
import sys
import time

import httpx


def start(file, *words):
    """Start a server process; return it and its address once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(file), str(port), *words])
    url = f"http://127.0.0.1:{port}"
    for _ in range(600):
        try:
            httpx.get(f"{url}/health", timeout=5).raise_for_status()
            return process, url
        except httpx.HTTPError:
            assert process.poll() is None, "the server ended"
            time.sleep(0.5)
    raise AssertionError("the server does not answer")
