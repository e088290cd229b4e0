"""Pushing a run to the Hub: found out before training whether it can work; a push that fails loses nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from ..failures import first_line

# Of a run's folder: what it started from, what it would resume from, and what trackers and evaluations keep.
LEFT_AT_HOME = ("checkpoint-*", "base_model/*", "cold_start/*", "wandb/*", "completions/*", "evaluation/*",
                ".*.lock")  # fmt: skip
PAUSES = (2.0, 10.0)  # seconds before an upload that failed is tried again


class PushError(RuntimeError):
    """The run is on disk, but not on the Hub; the message says how to push it by hand."""


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
    """Create the repository, or find that it is there. ValueError in a line if that cannot be done."""
    from huggingface_hub import create_repo

    name = args.hub_model_id or Path(args.output_dir).absolute().name
    try:
        create_repo(name, private=args.hub_private_repo, exist_ok=True)
    except _errors() as error:
        raise ValueError(
            f"--push_to_hub: the Hub does not take {name!r} ({first_line(error)}); log in with `hf auth login` "
            "or set HF_TOKEN, or train without --push_to_hub"
        ) from error


def push(trainer: Any) -> None:
    """Upload what was saved: model or adapter, tokenizer, model card, metrics, report."""
    from huggingface_hub import upload_folder

    if not trainer.accelerator.is_main_process:
        return
    folder, name = trainer.args.output_dir, trainer.hub_model_id
    for pause in (*PAUSES, None):
        try:
            upload_folder(
                repo_id=name,
                folder_path=folder,
                ignore_patterns=[*LEFT_AT_HOME],
                commit_message="Trained with trl_grpo_tasks",
            )
            return
        except _errors() as error:
            if pause is None or _is_refusal(error):
                raise PushError(
                    f"the push to the Hub failed ({first_line(error)}); everything is in {folder}; to try again: "
                    f"hf upload {name} {folder} . " + " ".join(f"--exclude '{pattern}'" for pattern in LEFT_AT_HOME)
                ) from error
            print(f"the push to the Hub failed ({first_line(error)}); trying again in {pause:g} s", flush=True)
            time.sleep(pause)


def _is_refusal(error: Exception) -> bool:
    """Whether the Hub understood and said no, which it would say again."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status is not None and 400 <= status < 500


def _errors() -> tuple[type[Exception], ...]:
    from huggingface_hub.errors import HfHubHTTPError

    # Its bases are OSError and the error of whichever HTTP library the client uses, of which a refused connection is
    # one; RuntimeError is what the client of large files (xet) raises.
    return *HfHubHTTPError.__bases__, RuntimeError
