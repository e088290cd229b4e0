"""Sampling under a task's constraint in vLLM, colocated with the trainer or as a server."""


class ServerError(ValueError):
    """A vLLM server does not sample as the run needs it."""
