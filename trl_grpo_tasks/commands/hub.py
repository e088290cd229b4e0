"""Uploads to the Hub. Access is checked before anything slow starts, and an upload that fails loses nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ..failures import first_line
from ..models.hub_access import is_unreachable

PAUSES = (2.0, 10.0)  # seconds before an upload that failed is tried again


class PushError(RuntimeError):
    """The push failed. The run is on disk; the message says how to push it again."""


def take_token(args: Any) -> None:
    """Move the Hub token from the options to HF_TOKEN, where the Hub's client finds it: options are written to files,
    some of which transformers and trackers write. `model_init_kwargs` must be a dictionary."""
    names = ("token", "use_auth_token")
    loading = [args.model_init_kwargs.pop(n) for n in names if isinstance(args.model_init_kwargs.get(n), str)]
    tokens = {token for token in (args.hub_token, *loading) if token}
    if len(tokens) > 1:
        raise ValueError(
            "--hub_token and the token in --model_init_kwargs differ: give one token, which may read the model and "
            "write the repository"
        )
    if tokens:
        os.environ["HF_TOKEN"] = tokens.pop()
    args.hub_token = None


def create_repository(name: str, private: bool | None, option: str, way_out: str = "") -> str:
    """Create a repository unless it exists, and return its name with the account; ValueError if that fails, or if it
    exists and is public although it is to be private, or the reverse."""
    from huggingface_hub import create_repo, model_info

    try:
        repo = create_repo(name, private=private, exist_ok=True).repo_id
        is_private = private if private is None else model_info(repo).private
    except _errors() as error:
        fix = "log in with `hf auth login` or set HF_TOKEN"
        if is_unreachable(error):
            fix = "the Hub cannot be reached: connect to the network, and unset HF_HUB_OFFLINE if it is set"
        raise ValueError(
            f"{option}: the repository {name!r} cannot be created or used ({first_line(error)}); {fix}{way_out}"
        ) from error
    if is_private != private:
        kinds = {True: "private", False: "public"}
        raise ValueError(
            f"{option}: the repository {repo!r} exists and is {kinds[bool(is_private)]}, not {kinds[bool(private)]}; "
            "change that in its settings on the Hub, or choose another repository"
        )
    return repo


def must_be_merged(model: str | Path, option: str) -> bool:
    """Whether an adapter, or a new one of a full model, must be merged to be pushed: that of the embedded tiny model.

    ValueError for that of another local model; `option` merges the adapter, which is the way out.
    """
    from ..models.loading import full_model_of, is_tiny
    from ..report.card import is_on_hub

    base, _ = full_model_of(str(model))
    if not is_on_hub(base) and not is_tiny(base):
        raise ValueError(
            f"others could not load the adapter, because its base model is in a local folder, {base}; push the merged "
            f"weights ({option}), or train on a model from the Hub"
        )
    return is_tiny(base)


def upload(repo: str, files: Mapping[str, Path], removed: Collection[str], again: str) -> None:
    """Upload files, by their paths in the repository, and remove others from it, in one commit. Large files that an
    earlier, interrupted upload has transferred are not transferred again. `again` says how to repeat the upload."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    added = [CommitOperationAdd(name, str(path)) for name, path in files.items()]
    deleted = [CommitOperationDelete(name) for name in removed]
    for pause in (*PAUSES, None):
        try:
            HfApi().create_commit(repo, [*added, *deleted], commit_message="Trained with trl_grpo_tasks")
            return
        except _errors() as error:
            # A request that the Hub refused would be refused again.
            status = getattr(getattr(error, "response", None), "status_code", None)
            if pause is None or (status is not None and 400 <= status < 500):
                raise PushError(f"the push to the Hub failed ({first_line(error)}); {again}") from error
            print(f"the push to the Hub failed ({first_line(error)}); trying again in {pause:g} s", flush=True)
            time.sleep(pause)


def files_in(repo: str) -> list[str]:
    """Return the paths of the files in a repository; PushError if the Hub does not answer."""
    from huggingface_hub import list_repo_files

    try:
        return list_repo_files(repo)
    except _errors() as error:
        raise PushError(f"the files of {repo} could not be listed ({first_line(error)})") from error


def _errors() -> tuple[type[Exception], ...]:
    from huggingface_hub.errors import HfHubHTTPError

    # The bases are OSError and the error class of the client's HTTP library, which covers refused connections;
    # RuntimeError is raised by the client of large files (xet).
    return *HfHubHTTPError.__bases__, RuntimeError
