"""Sampling under a task's constraint in vLLM, colocated with the trainer or as a server."""

from collections.abc import Sequence
from typing import Any

CONCURRENT_REQUESTS = 64  # to one server


class ServerError(ValueError):
    """A vLLM server does not sample as the run needs it."""


def addresses_in(base_url: str) -> list[str]:
    """Return the addresses of one server or several in TRL's option vllm_server_base_url."""
    addresses = [address.strip().rstrip("/") for address in base_url.split(",")]
    if "" in addresses or len(set(addresses)) < len(addresses):
        raise ValueError(
            f"vllm_server_base_url={base_url!r}: an address is empty or there twice; write one, or several with "
            "commas between them, such as http://a:8000,http://b:8000"
        )
    return addresses


def joined(answers: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """Join what TRL's `VLLMClient.generate` returned for parts of the prompts."""
    return {name: [each for answer in answers for each in answer[name]] for name in answers[0]}
