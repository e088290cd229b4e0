"""Push a run to the Hub. Access is checked before training, and a push that fails loses nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from ..failures import first_line

# Files of a run that are not pushed: what it started from, checkpoints, and files of trackers and evaluations.
NOT_PUSHED = ("checkpoint-*", "base_model/*", "cold_start/*", "wandb/*", "completions/*", "evaluation/*",
                ".*.lock")  # fmt: skip
PAUSES = (2.0, 10.0)  # seconds before an upload that failed is tried again


class PushError(RuntimeError):
    """The push failed. The run is on disk; the message says how to push it by hand."""


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


def check_hub(args: Any) -> None:
    """Create the repository unless it exists; ValueError if that fails."""
    from huggingface_hub import create_repo

    name = args.hub_model_id or Path(args.output_dir).absolute().name
    try:
        create_repo(name, private=args.hub_private_repo, exist_ok=True)
    except _errors() as error:
        raise ValueError(
            f"--push_to_hub: the repository {name!r} cannot be created or used ({first_line(error)}); log in "
            "with `hf auth login` or set HF_TOKEN, or train without --push_to_hub"
        ) from error


def push(trainer: Any) -> None:
    """Upload the model or adapter, tokenizer, model card, metrics and report."""
    from huggingface_hub import upload_folder

    if not trainer.accelerator.is_main_process:
        return
    folder, name = trainer.args.output_dir, trainer.hub_model_id
    for pause in (*PAUSES, None):
        try:
            upload_folder(
                repo_id=name,
                folder_path=folder,
                ignore_patterns=[*NOT_PUSHED],
                commit_message="Trained with trl_grpo_tasks",
            )
            return
        except _errors() as error:
            if pause is None or _is_refusal(error):
                raise PushError(
                    f"the push to the Hub failed ({first_line(error)}); everything is in {folder}; to try again: "
                    f"hf upload {name} {folder} . " + " ".join(f"--exclude '{pattern}'" for pattern in NOT_PUSHED)
                ) from error
            print(f"the push to the Hub failed ({first_line(error)}); trying again in {pause:g} s", flush=True)
            time.sleep(pause)


def _is_refusal(error: Exception) -> bool:
    """Whether the Hub refused the request, so that repeating it is useless."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status is not None and 400 <= status < 500


def _errors() -> tuple[type[Exception], ...]:
    from huggingface_hub.errors import HfHubHTTPError

    # The bases are OSError and the error class of the client's HTTP library, which covers refused connections;
    # RuntimeError is raised by the client of large files (xet).
    return *HfHubHTTPError.__bases__, RuntimeError
