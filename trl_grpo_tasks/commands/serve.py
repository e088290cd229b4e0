"""The command serve: a vLLM server that samples under the constraint of a task."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..redact import redacted_words
from ..registry import find_task_class
from ..report.page import option_words
from ..report.run_folder import settings_of
from ..task import Task
from .command_parser import CommandParser, task_of_run, task_with_options
from .help_screens import PROGRAM
from .recipes import find_recipe, read_recipe

VLLM_VERSIONS = ((0, 24), (0, 31))  # the oldest and the newest supported

_SPECULATIVE = "constraints do not work with speculative decoding; leave it out"
_REVISION = "the constraint needs the tokenizer of the same files; download them to a folder, and give it first"
_BEFORE = "give it before --"
# Options of `vllm serve` that cannot follow --, and why.
REFUSED = {
    "--speculative-config": _SPECULATIVE,
    "--spec-method": _SPECULATIVE,
    "--spec-model": _SPECULATIVE,
    "--spec-tokens": _SPECULATIVE,
    "--logits-processors": "only the constraint's own is run: the trainer cannot reproduce others; leave it out",
    "--additional-config": "it holds the task for vLLM's workers; leave it out",
    "--logprobs-mode": "the trainer needs processed_logprobs, which is set; leave it out",
    "--max-logprobs": "the trainer needs any number of them, which is set; leave it out",
    "--tokenizer": _REVISION,
    "--tokenizer-revision": _REVISION,
    "--revision": _REVISION,
    "--model": _BEFORE,
    "--host": _BEFORE,
    "--port": _BEFORE,
    "--config": "options in a file are not checked; write them after -- one by one",
}


def serve(arguments: Sequence[str]) -> int:
    """Start a vLLM server that samples under the constraint of a task. This process becomes the server."""
    own, passed = split_words(arguments)
    parser = CommandParser(
        "serve",
        "[RUN_OR_MODEL] [--task TASK] [--config RECIPE] [--option value ...] [-- ...]",
        "Start a vLLM server that samples under the task's constraint, for runs with --use_vllm --vllm_mode server. "
        "Give the model, the task and its options as in the run, which compares them with the server's before its "
        "first step. The server has vLLM's development endpoints, through which a run replaces the weights: only "
        "machines that you trust may reach its port. Words after -- go to vllm serve.",
        [
            "trl-grpo-tasks serve Qwen/Qwen2.5-0.5B --task brick",
            "trl-grpo-tasks serve --config brick/multi_gpu --host 0.0.0.0 -- --tensor-parallel-size 2",
        ],
    )
    parser.add_argument(
        "--model", metavar="MODEL",
        help="the model that is trained: a Hub id, a folder, a .gguf file, or tiny; also the first word",
    )  # fmt: skip
    parser.add_task_of_run()
    parser.add_argument(
        "--config", metavar="RECIPE", help="a recipe, whose task, model and options of the task are used"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="HOST",
        help="address to listen on (default: 127.0.0.1, this machine only; 0.0.0.0 is all addresses)",
    )  # fmt: skip
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="port to listen on (default: 8000)")
    # Not a positional argument of the parser, which would take the value of an option of the task.
    first = [] if not own or own[0].startswith("-") else own[:1]
    known, rest = parser.parse_known(own[len(first) :])
    if first and known.model:
        raise ValueError(f"serve takes the model first: {PROGRAM} serve {known.model} --task {first[0]}")
    known.model = known.model or next(iter(first), None)
    recipe = read_recipe(str(find_recipe(known.config))) if known.config else {}
    model = known.model or recipe.get("model_name_or_path")
    if not model:
        raise ValueError(f"give RUN_OR_MODEL, the model that is trained; '{parser.prog} -h' shows how")
    spec = known.task or recipe.get("task")
    if not spec and not settings_of(model):
        raise ValueError(f"{model} is not the folder of a run; name the task too: {parser.prog} {model} --task TASK")
    check_passed(passed)
    check_vllm()
    task = task_of(spec, recipe, rest) if spec else task_of_run(None, [], model, ["serve", *arguments])
    from .quiet import quiet_third_party_logging

    quiet_third_party_logging()
    command, environment, run = server_command(task, model, known.host, known.port, passed)
    if not spec:
        spec, rest = str(task.spec), option_words(asdict(task.options))
    train = [PROGRAM, "train", spec, *(["--config", known.config] if known.config else []), "--model", model, *rest]
    train += [*run, "--use_vllm", "--vllm_mode", "server", "--vllm_server_host"]
    # A client cannot connect to the address that stands for all addresses.
    train += [socket.gethostname() if known.host in ("0.0.0.0", "::") else known.host]
    train += ["--vllm_server_port", str(known.port)]
    print(
        f"vLLM serves {model} for task {task.name!r} on {known.host}:{known.port}; train with: "
        f"{shlex.join(redacted_words(train))}",
        flush=True,
    )
    os.execve(command[0], command, {**os.environ, **environment})


def task_of(spec: str, recipe: Mapping[str, Any], flags: Sequence[str]) -> Task:
    """The task with its options of a recipe and of flags. The path of a task file is made absolute: vLLM's processes
    load it too."""
    if spec.endswith(".py"):
        spec = str(Path(spec).expanduser().resolve())
    own = {one.name: recipe[one.name] for one in fields(find_task_class(spec).Options) if one.name in recipe}
    return task_with_options(spec, [*option_words(own), *flags])


def split_words(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words before the first --, and those after it."""
    words = list(arguments)
    end = words.index("--") if "--" in words else len(words)
    return words[:end], words[end + 1 :]


def check_passed(passed: Sequence[str]) -> None:
    """Raise ValueError for an option of `vllm serve` that does not go with a constraint, however it is written:
    vLLM takes --a_b for --a-b, --a.b VALUE for an entry of the JSON option --a, and the beginning of a name for it."""
    for word in passed:
        name = re.split(r"[=.]", word)[0].replace("_", "-")
        refused = next((one for one in REFUSED if len(name) > 2 and one.startswith(name)), None)
        if word.startswith("-sc"):
            refused = "--speculative-config"
        if word.startswith("-") and refused is not None:
            raise ValueError(f"{name} after --: {REFUSED[refused]}")


def check_vllm() -> None:
    """Raise ValueError if vLLM is not installed in a supported version."""
    oldest, newest = (".".join(map(str, numbers)) for numbers in VLLM_VERSIONS)
    way_out = f"supported are {oldest} to {newest}; install trl_grpo_tasks[vllm] in an environment of its own"
    try:
        installed = version("vllm")
    except PackageNotFoundError as error:
        raise ValueError(f"vLLM is not installed ({way_out})") from error
    match = re.match(r"(\d+)\.(\d+)", installed)
    if match is None or not VLLM_VERSIONS[0] <= (int(match[1]), int(match[2])) <= VLLM_VERSIONS[1]:
        raise ValueError(f"vLLM {installed} is installed ({way_out})")


def server_command(
    task: Task, model: str, host: str, port: int, passed: Sequence[str]
) -> tuple[list[str], dict[str, str], list[str]]:
    """The words of the command that starts the server, what it adds to the environment, and the option of runs that
    need the server. ValueError if vLLM cannot run the model."""
    import torch

    from ..constraints.vocabulary import check_outputs
    from ..models.loading import check_policy, is_adapter, load_tokenizer, merged_folder, prepare_model
    from ..serving.served_task import CONFIG_KEY, PROCESSOR, SERVED_VARIABLE, ServedTask

    if task.policy == "masked":
        raise ValueError(
            f"task {task.name!r} trains a masked language model with these options, and vLLM runs only causal ones; "
            "train it without --use_vllm"
        )
    # The folder of a model that is built here. A run builds its own, with the same tokenizer, and sends its weights.
    folder = Path("outputs", "serve", task.name)
    path = prepare_model(model, task, folder)
    if Path(path).is_dir():
        path = str(Path(path).resolve())
    config = check_policy(path, "causal")
    tokenizer = load_tokenizer(path)
    check_outputs(tokenizer, config.get_text_config().vocab_size)
    if is_adapter(path):  # vLLM applies adapters by request, but runs and `solve` ask for the model itself
        path = str(merged_folder(path, beside=folder).resolve())
    served = json.dumps({CONFIG_KEY: ServedTask.of(task, tokenizer).to_config()})
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", path, "--host", host, "--port", str(port)]
    command += ["--logits-processors", PROCESSOR, "--additional-config", served]
    command += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
    if torch.cuda.is_available():  # TRL's transfer of weights exists for GPUs only
        command += ["--weight-transfer-config", json.dumps({"backend": "nccl"})]
    run = ["--constrain"] if task.constraint(tokenizer) is not None else ["--repair_turns", "2"]
    # TRL's client uses vLLM's development endpoints for the weights and for the configuration.
    return [*command, *passed], {"VLLM_SERVER_DEV_MODE": "1", SERVED_VARIABLE: served}, run
