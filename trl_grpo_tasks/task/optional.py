"""What a task may define besides the methods of `Task`, by purpose. Everything here has a default."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from .score import Row, Score, TinySpec, UnfinishedTaskError
from .thoughts import fold_thought

if TYPE_CHECKING:
    from ..rollout import Editor


class OptionalMethods:
    """Attributes and methods that a task may override.

    Class attributes:
        levels: Names of the curriculum levels, from easy to hard. If given, each row has a `level`.
        facts: Keys of `Score.info` whose means are shown in evaluations.
        watched: Components that training may log but not weight, so that they stay independent measures.
        policy: "causal", or "masked" for masked language models: prompts contain mask tokens, and a completion is the
            text that replaces them, one token per mask.
        thought_markers: Texts that end a thought (see `ThinkThen`), which is folded away where answers are shown.
        defaults: Training options that suit the task. Recipes and command-line options override them.
        tiny_defaults: Further training options that apply only to the embedded tiny model.
        fixed_options: Options that must have the same values when a run is resumed.
        editors: Names of the task's editors, which --editor chooses from.
        redundant_editors: Editors that delete only what the constraint never allows.
        tools: Tool name -> "module:function", or a function of a list of words, for `trl-grpo-tasks tool TASK TOOL`.
    """

    name: ClassVar[str]
    levels: Sequence[str] = ()
    facts: Sequence[str] = ()
    watched: Sequence[str] = ()
    policy: str = "causal"
    thought_markers: Sequence[str] = ()
    defaults: ClassVar[Mapping[str, Any]] = {}
    tiny_defaults: ClassVar[Mapping[str, Any]] = {}
    fixed_options: Sequence[str] = ()
    editors: Sequence[str] = ()
    redundant_editors: Sequence[str] = ()
    tools: ClassVar[Mapping[str, str | Callable[[list[str]], int | None]]] = {}

    # ---- training

    def tiny(self) -> TinySpec | None:
        """Describe the tiny model of this task; None if the task only works with pretrained models."""
        return None

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

    def group_components(
        self, rows: Sequence[Row], completions: Sequence[str], scores: Sequence[Score | None]
    ) -> dict[str, list[float | None]]:
        """Return components that depend on the whole group of completions of one prompt, such as novelty.

        `scores` are the results of `score`. The return value has one number per completion for each component name.
        """
        return {}

    # ---- judges

    def prepare(self, seed: int, say: Any = print) -> None:
        """Create or check what `judges` needs; called once before training or evaluation. ValueError if impossible."""

    def judges(self) -> dict[str, Any]:
        """Return frozen reward models, which score in batches on the accelerator: component name -> judge.

        A judge is a model id, a folder or a loaded sequence-classification model, which scores prompt and completion
        during training; or a `FrozenClassifier`, which scores a text that the task builds from them, in evaluations
        too. The names of judges must also be in `weights`.
        """
        return {}

    def llm_judge(self) -> Any:
        """Return the `LLMJudge` that grades completions over a network, the same object each time; None without one.

        The reward executor asks it in threads of its own process and adds its component to the scores. Its name must
        also be in `weights`.
        """
        return None

    # ---- requests of users: `solve`, the playground and servers

    def row_of(self, text: str) -> dict[str, Any]:
        """Make a row from the user's own text, for `solve` and `play`; no known answer is required.

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

    def editor(self, name: str, rows: Sequence[Row], tokenizer: Any) -> Editor:
        """The editor of this name, which may delete generated tokens of these rows in evaluations and `solve`."""
        raise UnfinishedTaskError(f"task {self.name!r} must define editor(name, rows, tokenizer)")

    @classmethod
    def user_options(cls, options: Mapping[str, Any]) -> list[str]:
        """Return the names of those `options` whose values name code to run or permit it to run, name files to write,
        or name servers to ask.

        For safety, such options are only accepted from the user, never from the files of a run folder.
        """
        return []

    # ---- what is counted and shown

    def request(self, row: Row) -> str:
        """Return a key that is equal for rows that ask the same, whatever gold and bad answers they hold.

        Splits share no request, nor do the rows that choose a model and those that are reported. Intervals resample
        requests, and the store of successes counts the answers to a request. The key is the prompt, because a
        model cannot tell rows with equal prompts apart. Define it for rows that ask for more than the prompt says.
        """
        return json.dumps(row["prompt"], ensure_ascii=False, sort_keys=True)

    def canonical(self, row: Row, completion: str) -> str:
        """Return a normal form that is equal for equivalent completions; evaluations and the
        store of successes count distinct answers by it."""
        return completion.strip()

    def render(self, row: Row, completion: str) -> str | bytes:
        """Draw a completion for reports: PNG bytes, or HTML as a string."""
        prompt = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
        thought, answer = fold_thought(completion, self.thought_markers, html.escape)
        return f"<pre>{html.escape(str(prompt))} &rarr; {thought}<b>{html.escape(answer)}</b></pre>"

    def exports(self, row: Row, completion: str) -> dict[str, str | bytes]:
        """Return the files to save with a completion, beside its text: file name -> content."""
        picture = self.render(row, completion)
        return {"sample.html" if isinstance(picture, str) else "sample.png": picture}
