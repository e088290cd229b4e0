"""The `Task` interface, which every task implements, and functions that find a task by name, file or module.

A task is a domain whose answers a program can check: it provides prompts, and it scores completions.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from .constraints.base import Constraint
    from .rollout import Editor


Row = Mapping[str, Any]
POLICIES = ("causal", "masked")
MASK_TOKEN = "<mask>"  # the mask token of the tiny model, for tasks with policy "masked"


@dataclass(frozen=True)
class Score:
    """The result of scoring one completion. Create it with `Task.make_score`, which computes `total`.

    Attributes:
        components: Named parts of the reward.
        total: The reward: the weighted sum of `components`.
        valid: Whether the completion is well-formed, so that it can be judged on its merits.
        success: Whether the completion solves the row.
        reason: Why the completion is not valid or not a success, for people to read.
        info: Further facts about the completion, for people to read. Evaluations average those in `Task.facts`.
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
    """Declare a field of a task's `Options` with its default value and its help text on the command line."""
    return field(default=default, metadata={"help": help, **more})


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'brick'?)` for an error about an unknown name, or "" if no known name is similar."""
    near = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """Raise ValueError if the value of the option `name` is not one of its choices."""
    if value not in choices:
        raise ValueError(f"unknown --{name} {value!r}{nearest(value, choices)}; choose from: {', '.join(choices)}")


def printable(text: str) -> str:
    """Escape control characters in text from a model or a file, so that it is safe to print to a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def describe_error(error: Exception, path: str | Path) -> str:
    """Describe an error raised by a task's code in one line, with the innermost line number in the file `path`."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    if isinstance(error, SyntaxError):
        lines, error = [error.lineno], SyntaxError(f"{error.msg}: {(error.text or '').strip()}")
    return f"{type(error).__name__}: {error}{f' (line {lines[-1]})' if lines else ''}"


def check_whole(row: Row, name: str, least: int, most: int) -> None:
    """Raise ValueError unless the entry `name` of a row is a whole number from `least` to `most`."""
    value = row.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"the {name!r} of a row must be a whole number from {least} to {most}, not {value!r:.60}")


def check_one_of(row: Row, name: str, choices: Collection[str]) -> None:
    """Raise ValueError unless the entry `name` of a row is one of `choices`."""
    value = row.get(name)
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"the {name!r} of a row must be one of {', '.join(choices)}, not {value!r:.60}")


def check_text(row: Row, name: str) -> None:
    """Raise ValueError unless the entry `name` of a row is a text, or None, or missing."""
    if not isinstance(row.get(name), str | None):
        raise ValueError(f"the {name!r} of a row must be a text, not {row[name]!r:.60}")


def checked_row(task: Task, given: Row) -> dict[str, Any]:
    """Return the row that a user wrote, completed by `Task.row_from`; ValueError if the task cannot use it."""
    row = task.row_from(given)
    try:
        task.unverifiable(row)
        task.canonical(row, "")
    except Exception as error:  # the row comes from the user, so that a task's code can fail in any way
        raise ValueError(
            f"task {task.name!r} cannot use this row ({type(error).__name__}: {error}); give a row like those of its "
            "data set"
        ) from error
    return row


class UnfinishedTaskError(NotImplementedError, ValueError):
    """A task lacks a required method. Being a ValueError too, it is printed in one line, without a traceback."""


class NoAnswerError(ValueError):
    """A task knows no answer of the kind that was asked for, gold or bad, to a row."""


@dataclass(frozen=True)
class NoOptions:
    """The `Options` of a task without options."""


@dataclass(frozen=True)
class TinySpec:
    """The tiny model of a task, which `--model tiny` creates: its vocabulary, its size and its policy kind.

    `tokens` are strings. Text is split greedily into the longest matching tokens, so the vocabulary may contain both
    single characters and whole words.
    """

    tokens: Sequence[str]
    hidden_size: int = 128
    layers: int = 4
    heads: int = 4
    context: int = 512
    policy: str = "causal"


def weighted_total(score: Score, weights: Mapping[str, float]) -> float:
    """Return the reward of a score: the weighted sum of its components and, where they have a weight, of its flags."""
    flags = {"valid": float(score.valid), "success": float(score.success)}
    parts = score.components | {name: value for name, value in flags.items() if name in weights}
    return math.fsum(weights[name] * value for name, value in parts.items())


class Task:
    """Base class of tasks. A subclass must define `dataset`, `score`, `gold` and `bad`; other methods are optional.

    Class attributes:
        name: The task's name.
        version: Change it whenever a score can change; cached scores are kept per version.
        description: One line.
        weights: Component name -> weight in the total.
        levels: Names of the curriculum levels, from easy to hard. If given, each row has a `level`.
        facts: Keys of `Score.info` whose means are shown in evaluations.
        watched: Components that training may log but not weight, so that they stay independent measures.
        policy: "causal", or "masked" for masked language models: prompts contain mask tokens, and a completion is the
            text that replaces them, one token per mask.
        defaults: Training options that suit the task. Recipes and command-line options override them.
        tiny_defaults: Further training options that apply only to the embedded tiny model.
        fixed_options: Options that must have the same values when a run is resumed.
        Options: A dataclass whose fields become command-line options; see `option`.
        editors: Names of the task's editors, which --editor chooses from.
        redundant_editors: Editors that delete only what the constraint never allows.
        tools: Tool name -> "module:function", or a function of a list of words, for `trl-grpo-tasks task NAME TOOL`.
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
    fixed_options: Sequence[str] = ()
    editors: Sequence[str] = ()
    redundant_editors: Sequence[str] = ()
    tools: ClassVar[Mapping[str, str | Callable[[list[str]], int | None]]] = {}
    Options: ClassVar[type] = NoOptions

    # What was passed to `get_task`, by which a worker process loads the same task; None if the task was constructed
    # directly.
    spec: str | None = None

    def __init__(self, options: Any = None):
        self.options = self.Options() if options is None else options

    def dataset(self, split: str, size: int | None, seed: int) -> list[dict[str, Any]]:
        """Return `size` rows of the split "train" or "test" (fewer if there are not so many), or all rows if `size`
        is None.

        Each row has a `prompt`: a list of chat messages, or text that the model continues. Rows must be serialisable
        as JSON. The same seed gives the same rows, and the two splits share no request. Nothing may be downloaded
        unless the user named a dataset on the Hub.
        """
        raise UnfinishedTaskError(f"task {self.name!r} must define dataset(split, size, seed)")

    def score(self, row: Row, completion: str) -> Score | None:
        """Score one completion. This must be a pure function that raises no exception, whatever the model wrote.

        Malformed text gets a Score with valid=False and a reason. None means that the completion could not be scored
        (for example, because a solver crashed); such completions are left out, they do not count as 0. So are those
        with a component that does not lie within -1e9 and 1e9.
        """
        raise UnfinishedTaskError(f"task {self.name!r} must define score(row, completion)")

    def gold(self, row: Row) -> str:
        """Return a completion of `row` that succeeds; NoAnswerError if none is known."""
        raise UnfinishedTaskError(f"task {self.name!r} must define gold(row)")

    def bad(self, row: Row) -> str:
        """Return a completion of `row` that does not succeed; NoAnswerError if none is known."""
        raise UnfinishedTaskError(f"task {self.name!r} must define bad(row)")

    def request(self, row: Row) -> str:
        """Return a key that is equal for rows that ask the same, whatever gold and bad answers they hold.

        Splits share no request, nor do the rows that choose a model and those that are reported. Intervals resample
        requests, and archives and stores of successes count the answers to a request. The key is the prompt, because a
        model cannot tell rows with equal prompts apart. Define it for rows that ask for more than the prompt says.
        """
        return json.dumps(row["prompt"], ensure_ascii=False, sort_keys=True)

    def constraint(self, tokenizer: Any) -> Constraint | None:
        """Return the constraint on completions, compiled for `tokenizer`, or None if the task has none."""
        return None

    def tiny(self) -> TinySpec | None:
        """Describe the tiny model of this task; None if the task only works with pretrained models."""
        return None

    def render(self, row: Row, completion: str) -> str | bytes:
        """Draw a completion for reports: PNG bytes, or HTML as a string."""
        import html

        prompt = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
        return f"<pre>{html.escape(str(prompt))} &rarr; <b>{html.escape(completion)}</b></pre>"

    def editor(self, name: str, rows: Sequence[Row], tokenizer: Any) -> Editor:
        """The editor of this name, which may delete generated tokens of these rows in evaluations and `generate`."""
        raise UnfinishedTaskError(f"task {self.name!r} must define editor(name, rows, tokenizer)")

    def row_of(self, text: str) -> dict[str, Any]:
        """Make a row from the user's own text, for `solve` and `generate`; no known answer is required.

        ValueError, with what can be asked, for a text that is not understood. If the row has an `interpretation`, one
        line that says how the text was understood, both commands show it.
        """
        raise ValueError(
            f"task {self.name!r} cannot make a row from text; define row_of(text), which returns a row as in dataset"
        )

    def row_from(self, given: Row) -> dict[str, Any]:
        """Return a row that somebody wrote in the form of `dataset`; ValueError if it is none.

        `solve`, the playground and servers call it. Rows may come from strangers, so it must refuse whatever would
        take much time or memory, as `row_of` does for texts.
        """

        """Return a row that the user wrote in the form of `dataset`; ValueError if it is none. See `checked_row`."""
        prompt = given.get("prompt")
        parts = prompt if isinstance(prompt, list) else []
        is_chat = all(isinstance(part, Mapping) and isinstance(part.get("content"), str) for part in parts)
        if not (isinstance(prompt, str) or (parts and is_chat)):
            raise ValueError(f"a row needs a 'prompt', which is text or chat messages, but it has {prompt!r:.60}")
        return dict(given)

    def unverifiable(self, row: Row) -> str:
        """Return why no answer to this row can be a success, such as an unknown right answer; "" if one can.

        `solve` then ranks answers by their scores, says that they cannot be judged, and never calls one a success.
        """
        return ""

    def canonical(self, row: Row, completion: str) -> str:
        """Return a normal form that is equal for equivalent completions; evaluations and archives count distinct
        answers by it."""
        return completion.strip()

    def feedback(self, row: Row, score: Score) -> str:
        """Return what the model is told after an answer that failed with this score, for `--repair_turns`.

        It must not contain the expected answer, which the model would learn to copy.
        """
        return score.reason

    def relabel(self, row: Row, completion: str) -> Row | tuple[Row, str] | None:
        """Return another training row that this completion, which fails for `row`, may solve; None if there is none.

        If only a part of the completion solves it, return the row and that part as text. `--relabel` scores the answer
        with the new row and stores it if it is a success. The row must be one that `dataset` could return for the
        training split: a row of the test split would spoil evaluations.
        """
        return None

    def exports(self, row: Row, completion: str) -> dict[str, str | bytes]:
        """Return the files to save with a completion, beside its text: file name -> content."""
        picture = self.render(row, completion)
        return {"sample.html" if isinstance(picture, str) else "sample.png": picture}

    @classmethod
    def user_options(cls, options: Mapping[str, Any]) -> list[str]:
        """Return the names of those `options` whose values name code to run or permit it to run, name files to write,
        or name servers to ask.

        For safety, such options are only accepted from the user, never from the files of a run folder.
        """
        return []

    def prepare(self, seed: int, say: Any = print) -> None:
        """Create or check what `judges` needs; called once before training or evaluation. ValueError if impossible."""

    def judges(self) -> dict[str, Any]:
        """Return frozen reward models, which score in batches on the accelerator: component name -> judge.

        A judge is a model id, a folder or a loaded sequence-classification model, which scores prompt and completion
        during training; or a `FrozenJudge`, which scores a text that the task builds from them, in evaluations too.
        The names of judges must also be in `weights`.
        """
        return {}

    def api_judge(self) -> Any:
        """Return the `ApiJudge` that grades completions over a network, the same object each time; None without one.

        The reward executor asks it in threads of its own process and adds its component to the scores. Its name must
        also be in `weights`.
        """
        return None

    def group_components(
        self, rows: Sequence[Row], completions: Sequence[str], scores: Sequence[Score | None]
    ) -> dict[str, list[float | None]]:
        """Return components that depend on the whole group of completions of one prompt, such as novelty.

        `scores` are the results of `score`. The return value has one number per completion for each component name.
        """
        return {}

    def prefix_scores(self, row: Row, completion: str) -> list[tuple[int, float]] | None:
        """Return scores of growing parts of a completion, for `step_credit`; None if it could not be scored.

        Each pair is the number of characters after which a step is complete, and a score of the text up to there, from
        0 to 1. Both may depend only on that text, never on what follows. The last pair is (length of the completion,
        score of the whole answer); a step that is complete at the end has a pair of its own before it. Like `score`,
        this must be a pure function that raises no exception.
        """
        return None

    def defines(self, method: str) -> bool:
        """Whether this task has its own version of an optional method, such as "prefix_scores"."""
        return getattr(type(self), method) is not getattr(Task, method)

    def make_score(
        self,
        components: Mapping[str, float],
        valid: bool,
        success: bool,
        reason: str = "",
        info: Mapping[str, Any] | None = None,
    ) -> Score:
        """Create a Score whose total is the weighted sum of `components`."""
        if unknown := [name for name in components if name not in self.weights]:
            raise ValueError(f"component {unknown[0]!r} has no weight; weights are: {', '.join(self.weights)}")
        total = math.fsum(self.weights[name] * value for name, value in components.items())
        return Score(dict(components), total, valid, success, reason, dict(info or {}))


def rows_of(
    task: Task, split: str, size: int | None, seed: int, given: Any = None, say: Callable[[str], Any] | None = None
) -> list[dict[str, Any]]:
    """Return the rows of a split, or the rows `given` instead; ValueError if there are none.

    If the task has fewer than `size`, `say` is called with a line for people to read.
    """
    rows = task.dataset(split, size, seed) if given is None else list(given)
    if not rows:
        raise ValueError(f"task {task.name!r} has no rows in its {split!r} split")
    if say is not None and given is None and size is not None and len(rows) < size:
        say(f"The {split} split has {len(rows)} rows with these options, not the {size} asked for: all are used.")
    return rows


def one_per_request(task: Task, rows: Iterable[Row]) -> list[Row]:
    """Return the first row of each request, in the order of the rows."""
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(task.request(row), row)
    return list(first.values())


def short_hash(text: str) -> str:
    """Return 16 hexadecimal digits that stand for a text in files."""
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]


def describe_rows(rows: int, requests: int) -> str:
    """Return "64 held-out rows", with the number of different requests where it differs."""
    different = f" ({requests} different request{'s' * (requests > 1)})" if requests != rows else ""
    return f"{rows} held-out rows{different}"


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
