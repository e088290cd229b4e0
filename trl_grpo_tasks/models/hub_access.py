"""Whether the Hub can be reached, found with one request instead of the client's six per file."""

from __future__ import annotations

from ..failures import first_line

SECONDS = 10.0  # for an answer of the Hub


def is_unreachable(error: Exception) -> bool:
    """Whether an error of the Hub's client means that there was no answer, rather than a refusal."""
    from huggingface_hub.errors import HfHubHTTPError

    client_error = HfHubHTTPError.__bases__[0]  # of the HTTP library that the client uses
    no_answer = isinstance(error, client_error) and getattr(error, "response", None) is None
    return no_answer or isinstance(error, ConnectionError)  # the latter with HF_HUB_OFFLINE


def use_cache_if_unreachable() -> None:
    """Set the client to its offline mode for this process, and say so, if the Hub does not answer."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=SECONDS)
    except Exception as error:
        if not is_unreachable(error):
            raise
        print(f"{constants.ENDPOINT} cannot be reached ({first_line(error)}); only models in the cache can be used")
        constants.HF_HUB_OFFLINE = True
