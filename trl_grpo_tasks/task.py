"""Task: the one contract between a pack (a domain whose answers a program can check) and everything else."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import math
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from .constraints.base import Constraint
    from .rollout import Editor

# The packs that come with the toolkit. A new one is a folder under tasks/ and one line here.
TASKS: dict[str, str] = {
    "brick": "trl_grpo_tasks.tasks.brick",
    "infill": "trl_grpo_tasks.tasks.infill",
    "machine": "trl_grpo_tasks.tasks.machine",
    "prompts": "trl_grpo_tasks.tasks.prompts",
    "theory": "trl_grpo_tasks.tasks.theory",
}

Row = Mapping[str, Any]
POLICIES = ("causal", "masked")
MASK_TOKEN = "<mask>"  # of the embedded model that fills masks


@dataclass(frozen=True)
class Score:
    """What a task says of one completion. `total` is the weighted sum of `components`; `Task.make_score` adds it up.

    `reason` says in words why a completion is not valid or not a success; `info` holds facts for people to read.
    """

    components: dict[str, float]
    total: float
    valid: bool
    success: bool
    reason: str = ""
    info: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def option(default: Any, help: str, **more: Any) -> Any:
    """A field of a task's `Options`: its default, and what --help says."""
    return field(default=default, metadata={"help": help, **more})


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'brick'?)` for an error about an unknown name, or nothing where no known one is near."""
    near = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """ValueError for a value of an option that is none of its choices."""
    if value not in choices:
        raise ValueError(f"unknown --{name} {value!r}{nearest(value, choices)}; choose from: {', '.join(choices)}")


def printable(text: str) -> str:
    """Text from a model or a file in one line that is safe to print: control characters, which a terminal would obey,
    are shown as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def describe_error(error: Exception, path: str | Path) -> str:
    """An error of a task's own code in a line, with the last line of its file that had part in it."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    if isinstance(error, SyntaxError):
        lines, error = [error.lineno], SyntaxError(f"{error.msg}: {(error.text or '').strip()}")
    return f"{type(error).__name__}: {error}{f' (line {lines[-1]})' if lines else ''}"


class UnfinishedTaskError(NotImplementedError, ValueError):
    """A task lacks a method that every task has. Said in a line, like other mistakes of the user."""


@dataclass(frozen=True)
class NoOptions:
    """The options of a task that has none."""


@dataclass(frozen=True)
class TinySpec:
    """The embedded model of a pack: the tokens it reads and writes, how large it is, and of which policy kind.

    `tokens` are strings; text is cut into the longest ones that match, so single characters and whole words mix.
    """

    tokens: Sequence[str]
    hidden_size: int = 128
    layers: int = 4
    heads: int = 4
    context: int = 512
    policy: str = "causal"


class Task:
    """A domain whose answers a program can check. Subclass it; everything below that raises must be given.

    Class attributes: `name`, `version` (bump it whenever a score can change: scores are cached by it), `description`
    (one line), `weights` (component name -> weight in the total), `levels` (names, easy to hard; rows then carry a
    `level`), `facts` (keys of `Score.info` whose means evaluations show), `watched` (components that must not be
    weighted: training may log them and no more), `policy` ("causal", or "masked": prompts are texts with mask tokens,
    a completion is what stands in their place, one token each), `defaults` (training options that suit the pack,
    below any recipe or flag), `tiny_defaults` (more of them that apply only to the embedded tiny model), `Options` (a
    dataclass whose fields become command-line flags), `editors` (names that `editor` knows, chosen by --editor),
    `redundant_editors` (those that only delete what the constraint never allows), `tools` (tool name ->
    "module:function" or a function that takes a list of words, for `trl-grpo-tasks task NAME TOOL`).
    """

    name: ClassVar[str]
    version: ClassVar[str]
    description: ClassVar[str]
    weights: Mapping[str, float]
    levels: Sequence[str] = ()
    facts: Sequence[str] = ()
    watched: Sequence[str] = ()
    policy: str = "causal"
    defaults: ClassVar[Mapping[str, Any]] = {}
    tiny_defaults: ClassVar[Mapping[str, Any]] = {}
    editors: Sequence[str] = ()
    redundant_editors: Sequence[str] = ()
    tools: ClassVar[Mapping[str, str | Callable[[list[str]], int | None]]] = {}
    Options: ClassVar[type] = NoOptions

    # How a worker process finds this task again: what was given to `get_task`; None for a task made by hand.
    spec: str | None = None

    def __init__(self, options: Any = None):
        self.options = self.Options() if options is None else options

    def dataset(self, split: str, size: int | None, seed: int) -> list[dict[str, Any]]:
        """`size` rows (None: as many as there are) of "train" or "test", each with a `prompt`: a list of chat
        messages, or text that the model continues. Rows hold what JSON can hold. The same seed gives the same rows;
        the two splits never share one; nothing is downloaded unless the user named a Hub data set."""
        raise UnfinishedTaskError(f"task {self.name!r} must define dataset(split, size, seed)")

    def score(self, row: Row, completion: str) -> Score | None:
        """Judge one completion. Pure, and never an exception for what a model may write: bad text is a Score with
        valid=False and a reason. None means that it could not be judged (a solver that died), which is not 0."""
        raise UnfinishedTaskError(f"task {self.name!r} must define score(row, completion)")

    def gold(self, row: Row) -> str:
        """A completion of `row` that succeeds."""
        raise UnfinishedTaskError(f"task {self.name!r} must define gold(row)")

    def bad(self, row: Row) -> str:
        """A completion of `row` that does not succeed."""
        raise UnfinishedTaskError(f"task {self.name!r} must define bad(row)")

    def constraint(self, tokenizer: Any) -> Constraint | None:
        """What may be written next for a given row, compiled for `tokenizer`, or None."""
        return None

    def tiny(self) -> TinySpec | None:
        """The embedded model of this pack, or None where a pack is only for pretrained ones."""
        return None

    def render(self, row: Row, completion: str) -> str | bytes:
        """What a person would rather look at than read: PNG bytes, or HTML as text."""
        import html

        prompt = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
        return f"<pre>{html.escape(str(prompt))} &rarr; <b>{html.escape(completion)}</b></pre>"

    def editor(self, name: str, rows: Sequence[Row], tokenizer: Any) -> Editor:
        """The editor of this name, which may delete generated tokens of these rows in evaluations and `generate`."""
        raise UnfinishedTaskError(f"task {self.name!r} must define editor(name, rows, tokenizer)")

    def row_of(self, text: str) -> dict[str, Any]:
        """A row for a text of one's own, for `trl-grpo-tasks generate`: what can be judged without an answer."""
        raise ValueError(
            f"task {self.name!r} makes no rows from a text; define row_of(text), which gives a row as dataset does"
        )

    def canonical(self, row: Row, completion: str) -> str:
        """The same text for completions that are the same answer, by which evaluations count different ones."""
        return completion.strip()

    def exports(self, row: Row, completion: str) -> dict[str, str | bytes]:
        """File name -> content: what a person takes away of a completion, beside its text."""
        picture = self.render(row, completion)
        return {"sample.html" if isinstance(picture, str) else "sample.png": picture}

    @classmethod
    def code_options(cls, options: Mapping[str, Any]) -> list[str]:
        """The names of those of `options` whose values name or permit code to run. They are taken from the user only,
        never from the folder of a run."""
        return []

    def prepare(self, seed: int, say: Any = print) -> None:
        """Called once before a run or an evaluation: make or check what `judges` needs. ValueError where it cannot."""

    def judges(self) -> dict[str, Any]:
        """Frozen models scored in batches on the accelerator: component name -> model id, folder, or a loaded
        sequence-classification model, which judge prompt and completion; or a `FrozenJudge`, which judges the text
        that the task makes of them, in evaluations too. Their components also appear in `weights`."""
        return {}

    def group_components(
        self, rows: Sequence[Row], completions: Sequence[str], scores: Sequence[Score | None]
    ) -> dict[str, list[float | None]]:
        """Components that depend on the whole group (novelty, say), for the completions of one prompt together.
        `scores` are what `score` said of each."""
        return {}

    def make_score(
        self,
        components: Mapping[str, float],
        valid: bool,
        success: bool,
        reason: str = "",
        info: Mapping[str, Any] | None = None,
    ) -> Score:
        """A Score whose total is the weighted sum of `components`."""
        if unknown := [name for name in components if name not in self.weights]:
            raise ValueError(f"component {unknown[0]!r} has no weight; weights are: {', '.join(self.weights)}")
        total = math.fsum(self.weights[name] * value for name, value in components.items())
        return Score(dict(components), total, valid, success, reason, dict(info or {}))


def get_task(spec: str, options: Any = None) -> Task:
    """The task named `spec`: a name from `TASKS`, a path to a .py file, or an importable module.

    `options` is an instance of the task's `Options`, a mapping of its fields, or None for the defaults.
    """
    task_class = find_task_class(spec)
    if options is None or isinstance(options, Mapping):
        options = task_class.Options(**(options or {}))
    elif not is_dataclass(options):
        raise TypeError(
            f"options of task {spec!r} must be a mapping or {task_class.Options.__name__}, got {options!r}"
        )
    task = task_class(options)
    task.spec = spec
    return task


def rows_of(task: Task, split: str, size: int | None, seed: int, given: Any = None) -> list[dict[str, Any]]:
    """The rows of a split, or those that are `given` in their stead; ValueError where there are none."""
    rows = task.dataset(split, size, seed) if given is None else list(given)
    if not rows:
        raise ValueError(f"task {task.name!r} has no rows in its {split!r} split")
    return rows


class EditorError(ValueError):
    """The editor cannot be used with this model."""


def check_editor(task: Task, name: str | None, constrain: bool) -> None:
    """Raise ValueError if the task has no such editor, or if the constraint makes it redundant."""
    if name is None:
        return
    if name not in task.editors:
        known = f"editors of task {task.name!r} are: {', '.join(task.editors)}" if task.editors else (
            f"task {task.name!r} has no editors")  # fmt: skip
        raise ValueError(f"unknown --editor {name!r}{nearest(name, task.editors)}; {known}")
    if constrain and name in task.redundant_editors:
        raise ValueError(
            f"--editor {name} is redundant with --constrain: the constraint never allows what this editor deletes; "
            "give --constrain false, or another editor"
        )


def find_task_class(spec: str) -> type[Task]:
    """The Task subclass behind a name, a .py file or a module."""
    module = _load_module(spec)
    found = (
        [module.TASK]
        if hasattr(module, "TASK")
        else [
            value
            for value in vars(module).values()
            if inspect.isclass(value) and issubclass(value, Task) and value.__module__ == module.__name__
        ]
    )
    if len(found) != 1:
        names = ", ".join(cls.__name__ for cls in found) or "none"
        raise ValueError(
            f"task {spec!r}: the module must define one subclass of Task, or TASK = TheOne where there are several; "
            f"found: {names}"
        )
    if not isinstance(getattr(found[0], "name", None), str):
        raise ValueError(f'task {spec!r}: class {found[0].__name__} needs a name, such as name = "my_task"')
    return found[0]


def import_from_here() -> None:
    """Let the user name a module in the current folder, as `python -m` would; installed modules take precedence."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def _load_module(spec: str) -> Any:
    if spec in TASKS:
        return importlib.import_module(TASKS[spec])
    import_from_here()
    if spec.endswith(".py"):
        path = Path(spec).expanduser().resolve()
        if not path.is_file():
            raise ValueError(f"task file {spec!r} does not exist (looked at {path})")
        name = f"_task_file_{path.stem}"
        loader = importlib.util.spec_from_file_location(name, path)
        assert loader is not None and loader.loader is not None  # a .py path always has a loader
        module = importlib.util.module_from_spec(loader)
        sys.modules[name] = module  # dataclasses look their module up there
        try:
            loader.loader.exec_module(module)
        except ImportError:
            raise  # it says itself what is missing
        except Exception as error:
            raise ValueError(f"task file {spec!r} cannot be read: {describe_error(error, path)}") from error
        return module
    if "." in spec:
        if importlib.util.find_spec(spec.split(".")[0]) is None:
            raise ValueError(
                f"task module {spec!r} cannot be found; is its package installed or its folder on the path?"
            )
        return importlib.import_module(spec)
    raise ValueError(
        f"unknown task {spec!r}{nearest(spec, TASKS)}; tasks are: {', '.join(sorted(TASKS))}; "
        "or give a path to a .py file, or a module such as my_package.my_task"
    )
