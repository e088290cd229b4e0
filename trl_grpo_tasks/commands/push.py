"""`trl-grpo-tasks push`: upload the final model of a run, its card and its report to the Hub, without training."""

from __future__ import annotations

import shlex
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

from ..redact import redacted, redacted_words, remember
from ..report.page import REPORT_FILE
from ..report.run_folder import OUTCOME_FILE, SETTINGS_FILE, RunFolder
from ..task import Task
from .command_parser import FLAG, CommandParser, task_of_run
from .errors import failed
from .help_screens import PROGRAM


def push(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "push",
        "RUN [--repo USER/NAME] [--merged] [--private BOOL] [--dry_run] [--task TASK]",
        "Upload the final model of a run to the Hub: weights or adapter, tokenizer, model card, report.html and "
        "settings.json. Checkpoints, optimizer states, metrics and evaluation files are not uploaded. Log in with "
        "'hf auth login' or set HF_TOKEN. After an interruption, the same command uploads what is missing. The exit "
        "status is 0 if everything was uploaded, 1 if the upload failed, 2 for wrong options. An adapter of the "
        "embedded tiny model is merged first; that of another local model needs --merged.",
        [
            "trl-grpo-tasks push outputs/demo --dry_run",
            "trl-grpo-tasks push outputs/demo --repo me/brick-demo --private true",
            "trl-grpo-tasks push outputs/my_lora_run --merged",
        ],
    )
    parser.add_argument("run_dir", metavar="RUN", help="the folder of a run")
    parser.add_argument(
        "--repo", metavar="USER/NAME", help="the repository (default: --hub_model_id of the run, or the folder's name)"
    )
    parser.add_argument("--merged", **FLAG, default=False, help="upload the adapter merged into its base model")
    parser.add_argument(
        "--private", **FLAG,
        help="whether the repository is private (default: as it is, and for a new one the Hub's default)",
    )  # fmt: skip
    parser.add_argument("--dry_run", **FLAG, default=False, help="only show what would be uploaded")
    parser.add_argument("--hub_token", metavar="TOKEN", help="a token of the Hub (default: that of your login)")
    parser.add_task_of_run()
    known, rest = parser.parse_known(arguments)
    from .final_model import check_final_model
    from .hub import PushError, take_token

    remember({"hub_token": known.hub_token})
    take_token(Namespace(hub_token=known.hub_token, model_init_kwargs={}))
    typed = redacted_words(["push", *arguments])
    run = RunFolder.read(check_final_model(known.run_dir))
    try:
        return _push(run, known, rest, typed)
    except PushError as error:
        return failed(error, 1)


def _push(run: RunFolder, known: Namespace, rest: Sequence[str], typed: Sequence[str]) -> int:
    from ..models.loading import is_adapter
    from .hub import create_repository, must_be_merged
    from .quiet import quiet_third_party_logging

    if known.merged and not is_adapter(run.path):
        raise ValueError(f"--merged: {run.path} holds full weights and no adapter; leave --merged out")
    merged = known.merged or (is_adapter(run.path) and must_be_merged(run.path, "--merged"))
    if not (run.path / REPORT_FILE).is_file():
        raise ValueError(f"{run.path} has no {REPORT_FILE}; write it first: {PROGRAM} report {known.run_dir}")
    quiet_third_party_logging()
    task = task_of_run(known.task, rest, known.run_dir, typed)
    name = known.repo or run.settings.get("training", {}).get("hub_model_id") or run.path.absolute().name
    if not known.dry_run:
        name = create_repository(name, known.private, "push")
    again = f"to try again, repeat the command: {shlex.join([PROGRAM, *typed])}"
    push_run(run.path, task, name, again, merged=merged, dry_run=known.dry_run)
    return 0


def push_run(
    run_dir: str | Path,
    task: Task,
    name: str,
    again: str | None = None,
    *,
    merged: bool = False,
    dry_run: bool = False,
) -> None:
    """Upload the final model of a run, its card, its report and its settings to the existing repository `name`.

    `again` says how to repeat the upload, in the error if it fails. With `merged`, the adapter is merged first; that
    of a tiny model always is. With `dry_run`, the files are only shown.
    """
    from ..models.loading import MERGED_FOLDER, is_adapter, merged_folder
    from ..report.card import write_card
    from .final_model import ADAPTER_FILES, WEIGHT_FILES, model_files
    from .hub import files_in, must_be_merged, upload

    source = run = Path(run_dir)
    merged = merged or (is_adapter(run) and must_be_merged(run, "--merged"))
    if merged:
        source = run / MERGED_FOLDER if dry_run else merged_folder(run, task.policy)
    with tempfile.TemporaryDirectory() as folder:
        write_card(run, task, name, merged=merged, folder=folder)
        for file in (REPORT_FILE, SETTINGS_FILE, OUTCOME_FILE):
            if (run / file).is_file():
                text = (run / file).read_text(encoding="utf-8")
                (Path(folder) / file).write_text(redacted(text), encoding="utf-8")
        paths = [*model_files(source, is_adapter(run) and not merged), *sorted(Path(folder).iterdir())]
        files = {path.name: path for path in paths}
        print(describe(name, files))
        if dry_run:
            made = " (weights are merged before the upload)" if merged and not source.is_dir() else ""
            print(f"nothing was uploaded: --dry_run{made}")
            return
        # Files of another form of the model, from an earlier push: with both, an adapter would be loaded on top of the
        # weights that contain it.
        forms, others = (*ADAPTER_FILES, *WEIGHT_FILES), [file for file in files_in(name) if file not in files]
        removed = [file for file in others if any(fnmatch(file, form) for form in forms)]
        if removed:
            print(f"removed from the repository: {', '.join(removed)}")
        upload(name, files, removed, again or f"to try again: {PROGRAM} push {run_dir} --repo {name}")
    print(f"pushed to {name}")


def describe(name: str, files: Mapping[str, Path]) -> str:
    """A table of the files and their sizes."""
    sizes = {file: path.stat().st_size for file, path in files.items()}
    width = max(map(len, sizes))
    lines = [f"  {file:{width}}  {_size(size):>9}" for file, size in sizes.items()]
    return "\n".join([f"files for {name}:", *lines, f"  {'total':{width}}  {_size(sum(sizes.values())):>9}"])


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
