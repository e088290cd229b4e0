"""A fake OpenAI-compatible chat API on 127.0.0.1 that plays a script of replies and records what it was sent."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HANG = object()  # a reply: the server says nothing until it is closed


class ChatServer:
    """A context manager. `replies` are used one after the other, and the last one again and again.

    A reply is the text of a chat message; or (status, headers, body); or HANG; or a function of the request's body
    that returns one of these.
    """

    def __init__(self, *replies, usage=None):
        self.replies, self.usage = list(replies), usage
        self.requests, self.keys, self.most_at_once = [], [], 0
        self._lock, self._open, self.closing = threading.Lock(), 0, threading.Event()

    def __enter__(self):
        handler = type("Handler", (_Handler,), {"server_state": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()

    def next_reply(self, body, key):
        with self._lock:
            self.requests.append(body)
            self.keys.append(key)
            self._open += 1
            self.most_at_once = max(self.most_at_once, self._open)
            reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        return reply(body) if callable(reply) else reply

    def done(self):
        with self._lock:
            self._open -= 1


class _Handler(BaseHTTPRequestHandler):
    server_state: ChatServer
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self._send(200, {}, {"data": []})

    def do_POST(self):
        state = self.server_state
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            reply = state.next_reply(body, self.headers.get("Authorization"))
            if reply is HANG:
                state.closing.wait(20)
                self.close_connection = True
            elif isinstance(reply, tuple):
                self._send(*reply)
            else:
                choice = {"index": 0, "message": {"role": "assistant", "content": reply}, "finish_reason": "stop"}
                usage = {} if state.usage is None else {"usage": state.usage}
                self._send(200, {}, {"choices": [choice], **usage})
        finally:
            state.done()

    def _send(self, status, headers, body):
        content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass
