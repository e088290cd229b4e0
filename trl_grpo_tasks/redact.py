"""Redaction of tokens, keys and passwords from every file that a run writes.

A secret is recognised by the name of the option, key or environment variable that holds it. Its value is then removed
wherever it occurs. `remember` collects the values; `redacted` and `redacted_words` remove them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

REDACTED = "..."
SHORTEST = 8  # characters; a shorter value could occur in any text, so it is only removed under its own name

_SECRET_NAME = re.compile(
    r"(.*_)?(token|jwt|api_?key|password|passwd|passcode|passphrase|credentials?|auth|authorization|bearer|cookie)"
    r"|.*secret|.+_(key(_id)?|pass|pwd|pat)"
)
_PLAIN_KEY = re.compile(r"(.*_)?(public|primary|foreign|sort|cache|group|row|dict|partition)_key")
_TOKENIZER_NAME = re.compile(r"(.*_)?(pad|eos|bos|unk|mask|sep|cls|stop|start|end|image|video|audio)_token")
_PASSWORD_IN_URL = re.compile(r"(://[^/\s:@]*:)[^/\s@]+@")
_USER_IN_URL = re.compile(r"(https?://)[^/\s:@]+@")  # a token may be given in place of a user
_QUERY = re.compile(r"([?&;])([\w.-]+)=([^&;#\s\"']+)")
_known: set[str] = set()


def is_secret(name: str) -> bool:
    """Tell whether an option, key or environment variable of this name (hub-token, apiKey, HF_TOKEN) is secret."""
    plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.lstrip("-")).replace("-", "_").lower()
    return bool(_SECRET_NAME.fullmatch(plain)) and not (
        _TOKENIZER_NAME.fullmatch(plain) or _PLAIN_KEY.fullmatch(plain)
    )


def remember(value: Any, name: str = "") -> None:
    """Collect the secrets in nested options, so that they are also removed from other text."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            remember(inner, str(key))
    elif isinstance(value, list | tuple):
        for inner in value:
            remember(inner, name)
    elif isinstance(value, str) and is_secret(name):
        # Split into words: "Bearer hf_..." holds the secret in its second word.
        _known.update(word for word in value.split() if len(word) >= SHORTEST)


def redacted(value: Any, name: str = "") -> Any:
    """Return a copy of nested options without secrets; `name` is the option or key that holds `value`."""
    if type(value) is dict:
        return {key: redacted(inner, str(key)) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(redacted(inner, name) for inner in value)
    if type(value) is not str:
        return value
    return REDACTED if value and is_secret(name) else _without_values(value)


def redacted_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command line without secrets."""
    clean: list[str] = []
    follows_name = False
    for word in words:
        name, equals, _ = word.partition("=")
        if follows_name and not word.startswith("--"):
            clean.append(REDACTED)
        else:
            clean.append(f"{name}={REDACTED}" if equals and is_secret(name) else _without_values(word))
        follows_name = word.startswith("--") and is_secret(word)
    return clean


def _without_values(text: str) -> str:
    """Remove known secrets from `text`; if it is JSON, also remove the values of keys with secret names."""
    in_environment = {value for name, value in os.environ.items() if is_secret(name) and len(value) >= SHORTEST}
    for secret in sorted(_known | in_environment, key=len, reverse=True):
        text = text.replace(secret, REDACTED)
    text = _USER_IN_URL.sub(rf"\g<1>{REDACTED}@", _PASSWORD_IN_URL.sub(rf"\g<1>{REDACTED}@", text))
    text = _QUERY.sub(lambda part: f"{part[1]}{part[2]}={REDACTED}" if is_secret(part[2]) else part[0], text)
    if text.lstrip().startswith(("{", "[")):
        try:
            parsed = json.loads(text)
            clean = redacted(parsed)
        except (ValueError, RecursionError):
            return text
        return text if clean == parsed else json.dumps(clean)
    return text
