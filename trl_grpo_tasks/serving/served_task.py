"""ServedTask: the task, its options and the tokenizer that a vLLM server samples under.

`trl-grpo-tasks serve` passes it to vLLM as `--additional-config`, from which each worker builds the constraint, and in
the environment variable SERVED_VARIABLE, from which the front-end process builds it: that process checks requests, and
vLLM gives it no configuration. The trainer reads it back over HTTP and compares it with its own. A request carries
only its row, so that no request can name code to load.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

from ..constraints.base import Constraint
from ..constraints.budget import LIMIT
from ..constraints.vocabulary import Vocabulary, special_ids
from ..redact import is_secret
from ..registry import TASKS, get_task
from ..task import Task
from .conversations import EARLIER_TURNS, OneTurn

CONFIG_KEY = "trl_grpo_tasks"  # our entry in vLLM's additional_config
PROCESSOR = "trl_grpo_tasks.serving.processor:Processor"
SERVED_VARIABLE = "TRL_GRPO_TASKS_SERVED"  # holds the same JSON text as --additional-config
ROW = "row"  # the entry of SamplingParams.extra_args that holds a request's row as JSON text

_ENCODED_TOKENS = 4096  # how many tokens' texts are encoded for a tokenizer's fingerprint
_MISSING = object()
_checking = Lock()  # vLLM may check requests in several threads, and constraints are built for one


@dataclass(frozen=True)
class ServedTask:
    """What a server samples under.

    Attributes:
        task: The name, .py file or module of the task, as `get_task` takes it.
        options: The task's options by name, as JSON values.
        tokenizer: The folder or Hub id of the tokenizer.
        fingerprint: `fingerprint_of` the tokenizer.
    """

    task: str
    options: dict[str, Any]
    tokenizer: str
    fingerprint: str

    @classmethod
    def of(cls, task: Task, tokenizer: Any) -> ServedTask:
        """Describe a task and a loaded tokenizer. Options that hold secrets are left out: servers publish the rest.
        A task with repairs is that of its turns, which servers sample one at a time."""
        task = getattr(task, "inner", task)
        spec = task.spec
        if spec is None:
            module = type(task).__module__
            spec = next((name for name, path in TASKS.items() if f"{module}.".startswith(f"{path}.")), module)
        options = {name: value for name, value in asdict(task.options).items() if not is_secret(name)}
        try:
            options = json.loads(json.dumps(options, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ValueError(f"the options of task {task.name!r} cannot be written as JSON: {error}") from error
        return cls(spec, options, str(tokenizer.name_or_path), fingerprint_of(tokenizer))

    def to_config(self) -> dict[str, Any]:
        """Return our entry in vLLM's additional_config."""
        return asdict(self)

    @classmethod
    def from_config(cls, additional_config: Any) -> ServedTask | None:
        """Read a server's additional_config; None if it has no entry of ours, ValueError if the entry is malformed."""
        if not isinstance(additional_config, Mapping) or CONFIG_KEY not in additional_config:
            return None
        entry = additional_config[CONFIG_KEY]
        types = {"task": str, "options": dict, "tokenizer": str, "fingerprint": str}
        is_entry = isinstance(entry, Mapping) and set(entry) == set(types)
        if not is_entry or not all(isinstance(entry[name], kind) for name, kind in types.items()):
            raise ValueError(
                f"the server's additional_config[{CONFIG_KEY!r}] must hold {', '.join(types)} as trl-grpo-tasks serve "
                f"writes them, but it is {json.dumps(entry, default=repr)[:200]}; start the server with this version "
                "of trl-grpo-tasks serve"
            )
        return cls(**entry)

    def build(self) -> tuple[Task, Constraint, Any]:
        """Create the task with its options, load the tokenizer, and return both, with the constraint between them."""
        from ..models.loading import load_tokenizer

        try:
            task = get_task(self.task, self.options)
        except TypeError as error:
            raise ValueError(f"task {self.task!r} cannot be created with these options: {error}") from error
        tokenizer = load_tokenizer(self.tokenizer)
        if fingerprint_of(tokenizer) != self.fingerprint:
            raise ValueError(f"the tokenizer of {self.tokenizer} has changed since the server was started; restart it")
        return task, OneTurn(tokenizer, task.constraint(tokenizer)), tokenizer

    def difference(self, own: ServedTask) -> str | None:
        """Name the first difference between this server and a run's `own` task; None if they agree.

        Task files are compared by file name, because their folders differ from machine to machine.
        """
        if _name_of(self.task) != _name_of(own.task):
            return f"the server samples for task {self.task!r}, and this run trains task {own.task!r}"
        for name in dict.fromkeys([*own.options, *self.options]):
            theirs, ours = self.options.get(name, _MISSING), own.options.get(name, _MISSING)
            if theirs != ours:
                return f"option --{name} of the task is {_shown(theirs)} on the server and {_shown(ours)} in this run"
        if self.fingerprint != own.fingerprint:
            return (
                f"the server's tokenizer, {self.tokenizer}, has another vocabulary, other special tokens or other "
                f"merges than this run's, {own.tokenizer}"
            )
        return None


def fingerprint_of(tokenizer: Any) -> str:
    """Return a hash of what constraints depend on: the bytes of each token, the end-of-sequence token, the special
    tokens, and how text is split into tokens. It does not depend on where the tokenizer was loaded from."""
    vocabulary = Vocabulary.of(tokenizer)
    texts = [spelling.decode(errors="ignore") for spelling in vocabulary.bytes_of if spelling]
    text = "".join(texts[:: len(texts) // _ENCODED_TOKENS + 1])
    facts = {
        "bytes": [spelling and spelling.hex() for spelling in vocabulary.bytes_of],
        "eos": vocabulary.eos,
        "special": sorted((id, tokenizer.convert_ids_to_tokens(id)) for id in special_ids(tokenizer)),
        "first": [vocabulary.strips_leading_space, sorted(vocabulary.not_first)],
        "encoded": tokenizer.encode(text, add_special_tokens=False, verbose=False),
    }
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def served_here() -> tuple[Task, Constraint] | None:
    """Return the task and the constraint of the server that this process belongs to; None outside `trl-grpo-tasks
    serve`."""
    config = os.environ.get(SERVED_VARIABLE)
    return None if config is None else _served_from(config)


@cache
def _served_from(config: str) -> tuple[Task, Constraint]:
    served = ServedTask.from_config(json.loads(config))
    if served is None:
        raise ValueError(f"the environment variable {SERVED_VARIABLE} holds no entry {CONFIG_KEY!r}: {config[:200]}")
    return served.build()[:2]


def check_row(params: Any) -> None:
    """Raise ValueError if the row of a request (vLLM's SamplingParams) is not the JSON text of an object, or if the
    task of this server refuses it or its constraint cannot start on it. A request without a row is not constrained."""
    text = (params.extra_args or {}).get(ROW)
    if text is None:
        return
    try:
        row = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{ROW!r} must be the JSON text of an object, but it cannot be read: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{ROW!r} must be the JSON text of an object, but it is that of a {type(row).__name__}")
    with _checking:
        served = served_here()
        if served is None:
            return
        task, constraint = served
        try:
            task.row_from({name: value for name, value in row.items() if name != EARLIER_TURNS})
            state = constraint.start(row | {LIMIT: params.max_tokens})
            if state is not None:
                state.mask()
        except Exception as error:  # the row comes from outside, so that a task's code can fail in any way
            raise ValueError(
                f"the constraint cannot start on this row ({type(error).__name__}: {error}); rows must be those of "
                "the task that the server was started with"
            ) from error


def _name_of(task: str) -> str:
    return Path(task).name if task.endswith(".py") else task


def _shown(value: Any) -> str:
    if value is _MISSING:
        return "missing"
    return "not set" if value is None else json.dumps(value)
