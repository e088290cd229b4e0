"""A client of OpenAI-compatible chat APIs: one request, with its errors sorted by whether a retry can help.

openai's client has no time limit for a whole request, and none for the size of a reply.
"""

from __future__ import annotations

import contextlib
import email.utils
import json
import os
import threading
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ..redact import REDACTED, redacted, remember

LARGEST_REPLY = 4_000_000  # bytes
RETRIED = (408, 425, 429, *range(500, 600))


class ChatError(Exception):
    """A request failed. `status` is that of the reply, if there was one, and `retry_after` the wait it asks for."""

    def __init__(self, reason: str, retryable: bool, status: int | None = None, retry_after: float | None = None):
        super().__init__(reason)
        self.retryable, self.status, self.retry_after = retryable, status, retry_after


@dataclass(frozen=True)
class ChatReply:
    """The text of a reply, and its tokens as the server counted them; None if it did not."""

    text: str
    tokens_in: int | None
    tokens_out: int | None


class ChatApi:
    """A chat endpoint. The key is read from the environment when it is needed, and never stored or shown."""

    def __init__(
        self, base_url: str, model: str, key_variable: str | None, timeout: float, parameters: dict[str, Any]
    ):
        self.base_url, self.model, self.parameters = base_url.rstrip("/"), model, parameters
        self._key_variable, self._timeout = key_variable, timeout
        self._client: Any = None
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_client": None, "_lock": None}  # connections stay in the process that opened them

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def complete(self, messages: list[dict[str, str]]) -> ChatReply:
        """Send messages and return the reply; ChatError if there is none."""
        body = {"model": self.model, "messages": messages, **self.parameters}
        content = self._send("POST", "/chat/completions", body)
        try:
            answer = json.loads(content)
            text = answer["choices"][0]["message"]["content"]
            usage = answer.get("usage") or {}
            tokens = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
        except (ValueError, RecursionError, KeyError, IndexError, TypeError, AttributeError) as error:
            said = self.clean(content.decode("utf-8", "replace"))
            raise ChatError(f"the reply is not that of a chat API: {said:.100}", retryable=True, status=200) from error
        counted = [n if isinstance(n, int) and not isinstance(n, bool) and n >= 0 else None for n in tokens]
        return ChatReply(self.clean(text) if isinstance(text, str) else "", *counted)

    def check(self) -> None:
        """Raise ValueError if the endpoint cannot be reached or refuses the key. This sends nothing but the key."""
        try:
            self._send("GET", "/models", None)
        except ChatError as error:
            if error.status in (None, 401, 403):  # other errors may only mean that it does not list its models
                raise ValueError(f"the judge cannot be used: {error}") from error

    def _send(self, method: str, path: str, body: Any) -> bytes:
        import httpx

        with self._lock:
            if self._client is None:
                # Redirects are not followed: they could carry the key to another host.
                limits = httpx.Limits(max_connections=None)  # the judge limits its concurrency itself
                self._client = httpx.Client(timeout=self._timeout, follow_redirects=False, limits=limits)
        url, deadline = f"{self.base_url}{path}", time.monotonic() + self._timeout
        headers = {"Authorization": f"Bearer {self._key()}"} if self._key_variable else {}
        content = bytearray()
        try:
            with self._client.stream(method, url, json=body, headers=headers) as response:
                for piece in response.iter_bytes():
                    content += piece
                    if len(content) > LARGEST_REPLY:
                        reason = f"the reply is larger than {LARGEST_REPLY} bytes"
                        raise ChatError(reason, retryable=False, status=response.status_code)
                    if time.monotonic() > deadline:  # httpx limits each read, not their sum
                        raise httpx.ReadTimeout("")
        except httpx.TimeoutException as error:
            raise ChatError(f"no reply within {self._timeout:g} s", retryable=True) from error
        except httpx.HTTPError as error:
            said = self.clean(f"{type(error).__name__}: {error}")
            raise ChatError(f"no connection to {self.base_url}: {said:.200}", retryable=True) from error
        if response.status_code != 200:
            raise self._refusal(response, bytes(content))
        return bytes(content)

    def _refusal(self, response: Any, content: bytes) -> ChatError:
        text = content.decode("utf-8", "replace")
        try:
            error = json.loads(text)["error"]
            text = str(error["message"] if isinstance(error, dict) else error)
        except (ValueError, RecursionError, KeyError, TypeError):
            pass  # not the error format of OpenAI; the text is shown as it is
        status = response.status_code
        said = " ".join(self.clean(text).split())
        return ChatError(
            f"status {status} from {self.base_url}{f': {said:.200}' if said else ''}",
            retryable=status in RETRIED,
            status=status,
            retry_after=_seconds(response.headers.get("Retry-After")),
        )

    def _key(self) -> str:
        assert self._key_variable is not None
        key = os.environ.get(self._key_variable, "").strip()
        if not key or not key.isascii() or not key.isprintable():
            # The value of the option is not shown: it may be a key that was given by mistake.
            raise ValueError(
                "the environment variable that --judge_key_variable names is not set, or does not hold a key; export "
                "it, and pass its name, never the key itself"
            )
        remember(key, "api_key")
        return key

    def clean(self, text: str) -> str:
        """Remove the key from text of the server, which may repeat it."""
        key = os.environ.get(self._key_variable or "", "").strip()
        return redacted(text.replace(key, REDACTED) if key else text)


def check_url(url: str) -> None:
    """Raise ValueError if `url` cannot be the base of a chat API. No connection is made."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and not parts.query and not parts.fragment
        has_password = "@" in parts.netloc
        _ = parts.port
    except ValueError:
        usable, has_password = False, False
    if has_password:
        raise ValueError("--judge_url must not contain a user or password; name a variable with --judge_key_variable")
    if not usable:
        raise ValueError(f"--judge_url {url!r} is not the base URL of a chat API, such as http://localhost:8000/v1")


def _seconds(retry_after: Any) -> float | None:
    """Return the seconds of a Retry-After header, which is a number or a date; None if it is neither."""
    for read in (float, lambda text: email.utils.parsedate_to_datetime(text).timestamp() - time.time()):
        with contextlib.suppress(ValueError, TypeError, OverflowError):
            return max(0.0, read(retry_after))
    return None
