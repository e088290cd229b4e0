"""The prompts task: prompts from a file, the Hub or a generator, scored by rewards that each row chooses."""

from __future__ import annotations

import functools
import logging
import string
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ...adapters.row_files import check_split, cut, draw, without_prompts_of
from ...constraints import split_thought
from ...task import NoAnswerError, Row, Score, Task, TinySpec, printable
from . import data, generators, in_words, reward
from .llm_reward import check_question, make_judge
from .options import PromptsOptions, check_options
from .reward import REWARDS
from .verdict import CannotJudgeError, Verdict

if TYPE_CHECKING:
    from ...constraints.base import Constraint
    from ...rewards.llm_judge import LLMJudge

logger = logging.getLogger(__name__)


class PromptsTask(Task):
    """Scores answers by the rewards that their rows choose.

    A row's weight for a reward scales that component; the unscaled values are in `Score.info`.
    """

    name: ClassVar[str] = "prompts"
    version: ClassVar[str] = "3"
    description: ClassVar[str] = "Your own prompts, or arithmetic, word problems, code and JSON, with rewards per row"
    defaults: ClassVar[Mapping[str, Any]] = {"max_completion_length": 256, "num_generations": 8, "temperature": 1.0}
    tiny_defaults: ClassVar[Mapping[str, Any]] = {
        "generator_levels": ["1", "2"],
        "train_rows": 2000,
        "eval_rows": 100,
        "samples": 8,
        "cold_start_steps": 200,
        "cold_start_batch_size": 64,
        "cold_start_learning_rate": 3e-3,
        "num_generations": 16,
        "per_device_train_batch_size": 256,
        "max_steps": 120,
        "own_successes": 4096,
        "own_successes_fraction": 0.5,
    }
    Options: ClassVar[type] = PromptsOptions

    def __init__(self, options: Any = None):
        super().__init__(options)
        check_options(self.options)
        try:
            given = data.parse_rewards(self.options.rewards)
        except ValueError as error:
            raise ValueError(f"--rewards {error}") from error
        if self.options.reward_model:
            given.setdefault("reward_model", 1.0)
        elif "reward_model" in given:
            raise ValueError("reward 'reward_model' needs a model: pass --reward_model with a Hub id or a folder")
        if self.options.think:
            self.thought_markers = (self.options.think_marker,)
            self.facts = ("has_thought", "thought_characters", "answer_characters")
        length = self.options.target_length
        self._own_columns: dict[str, Any] = {"target_length": length} if length else {}  # of rows without them
        self._functions = [name for name in given if name not in REWARDS]
        self._default_rewards = {name: 1.0 for name in given if name != "reward_model"}
        self._rows: dict[str, list[dict[str, Any]]] | None = None
        self._numbered: list[dict[str, Any]] = []  # the rows that a request can name by number
        if self.options.prompts_file:
            self._rows = self._read_rows(self.options.prompts_file)
            known = [row for rows in self._rows.values() for row in rows]
            self.levels = _levels(known)
        else:
            wanted = [str(level) for level in self.options.generator_levels]
            self.levels = [x for x in generators.levels_of(self.options.generator) if x in wanted or not wanted]
            known = self._generated("train", 4 * len(self.levels), 0)
        used = dict.fromkeys(name for row in known for name in row["rewards"])
        if self.options.reward_model:
            used["reward_model"] = None
        self.weights: dict[str, float] = {name: given.get(name, 1.0) for name in used}
        self._token_rewards: dict[str, Callable[..., list[float | None]]] = {}
        self._judges = self._find_judges(used)
        self._api_judge = make_judge(self.options, self._known_row) if self.options.judge_url else None

    def dataset(self, split: str, size: int | None, seed: int) -> list[dict[str, Any]]:
        """Return rows of one split; fewer than `size` if the file or generator has fewer."""
        check_split(split)
        if self._rows is None:
            return self._generated(split, size, seed)
        return draw(self._rows, split, size, seed)

    def row_of(self, text: str) -> dict[str, Any]:
        """Return the row that the text names (see `requests.find_row`), or a row with the text as prompt.

        Rows that can be named are those of the file, or the held-out problems of the generator.
        A new prompt keeps those rewards of --rewards that need no column. If there are none, it cannot be judged.
        """
        if not self._numbered:
            self._numbered = self._generated("test", None, 0)
        source = "the file" if self.options.prompts_file else "the held-out problems"
        found = in_words.find_row(text, self._numbered, source)
        if found is not None:
            return found
        if not text.strip():
            raise ValueError("the prompt is empty; write what the model is to answer")
        given = {"prompt": text, **self._own_columns}
        kept = {
            name: weight
            for name, weight in self._default_rewards.items()
            if name not in REWARDS or given.keys() >= set(REWARDS[name].columns)
        }
        told = f"a new prompt, judged by {', '.join(kept)}" if kept else "a new prompt"
        return self._finished_row({**given, "rewards": kept, "interpretation": told}, "the request")

    def row_from(self, given: Row) -> dict[str, Any]:
        return dict(self._known_row(super().row_from(given)))

    def unverifiable(self, row: Row) -> str:
        if any(name in self._judges for name in row["rewards"]):
            return ""
        return "no reward of this row checks the answer; give a row with an answer, tests or a schema"

    def score(self, row: Row, completion: str) -> Score | None:
        """Score a completion by the rewards of its row; None if a reward could not be computed.

        Exceptions of user-defined rewards propagate to the caller, which reports them and skips the completion.
        """
        row = self._known_row(row)
        weights, info = row["rewards"], {}
        judged = [name for name in weights if name in self._judges]
        if self.options.think:
            thought, answer = split_thought(completion, [self.options.think_marker])
            info = {
                "has_thought": bool(answer is not None and thought.strip()),
                "thought_characters": len(thought),
                "answer_characters": len(answer or ""),
            }
            if answer is None:
                reason = f"there is no answer after {self.options.think_marker!r}"
                return self.make_score(dict.fromkeys(judged, 0.0), False, False, reason, info)
            completion = answer
        try:
            verdicts = {name: self._judges[name](row, completion) for name in judged}
        except CannotJudgeError as error:
            logger.warning("a completion could not be scored: %s", printable(str(error)))
            return None
        deciding = [name for name in verdicts if name in REWARDS and REWARDS[name].role == "checks"] or list(verdicts)
        valid = bool(completion.strip()) and all(verdict.readable for verdict in verdicts.values())
        success = valid and bool(deciding) and all(verdicts[name].value >= 1 for name in deciding)
        reason = "; ".join(f"{name}: {verdict.reason}" for name, verdict in verdicts.items() if verdict.reason)
        if not completion.strip():
            reason = "the answer is empty"
        elif not deciding:
            reason = "no reward of this row checks the answer"
        return self.make_score(
            {name: weights[name] * verdict.value for name, verdict in verdicts.items()},
            valid=valid,
            success=success,
            reason=reason,
            info=info | {"raw": {name: verdict.value for name, verdict in verdicts.items()}},
        )

    def gold(self, row: Row) -> str:
        """Return the row's `gold` or `answer`; raises NoAnswerError if it has neither."""
        gold = row.get("gold") or row.get("answer")
        if gold is None:
            raise NoAnswerError("this row has no known good answer; add a column 'gold' (or 'answer')")
        if not self.options.think:
            return gold
        # A gold answer may hold a thought, before the marker or before the `####` of the word problems.
        thought, answer = split_thought(gold, [self.options.think_marker])
        if answer is None:
            thought, answer = split_thought(gold, ["####"])
        if answer is None:
            from .constraint import row_grammar

            thought, answer = "", f" {gold}" if row_grammar(row) is None else gold
        return f"{thought}{self.options.think_marker}{answer}"

    def feedback(self, row: Row, score: Score) -> str:
        return reward.without_expected(score.reason)

    def bad(self, row: Row) -> str:
        evasion = f"{self.options.think_marker if self.options.think else ''}I do not know."
        score = self.score(row, evasion)
        return "" if score is None or score.success else evasion  # an empty answer never succeeds

    def group_components(
        self, rows: Sequence[Row], completions: Sequence[str], scores: Sequence[Score | None]
    ) -> dict[str, list[float | None]]:
        """Return the novelty of each completion within its group, for rows that choose it."""
        if "novelty" not in self.weights:
            return {}
        values = reward.novelty([self._answer(completion) for completion in completions])
        weights = [row["rewards"].get("novelty") for row in rows]
        return {"novelty": [None if w is None else w * value for w, value in zip(weights, values, strict=True)]}

    @classmethod
    def user_options(cls, options: Mapping[str, Any]) -> list[str]:
        rewards = data.parse_rewards(options.get("rewards") or [])
        found = ["rewards"] if any(name not in REWARDS for name in rewards) else []
        # A judge is sent the prompts and the key, so only the user may say where it is.
        return [*found, *(name for name in ("allow_code_execution", "judge_url") if options.get(name))]

    def judges(self) -> dict[str, Any]:
        """The reward model, and rewards over token ids: TRL computes both, in training only."""
        models = {"reward_model": self.options.reward_model} if self.options.reward_model else {}
        return {**models, **self._token_rewards}

    def prepare(self, seed: int, say: Any = print) -> None:
        """Check that the LLM judge can be reached, if there is one."""
        if self._api_judge is not None:
            self._api_judge.api.check()

    def llm_judge(self) -> LLMJudge | None:
        return self._api_judge

    def constraint(self, tokenizer: Any) -> Constraint | None:
        """The JSON schema or regular expression of each row that has one; None if no row has.

        With --think, a free thought and the marker precede the answer, and numeric answers are numbers.
        """
        from ...constraints import OneSpelling, ThinkThen
        from .constraint import answer_grammar, format_constraint, row_grammar

        if self._rows is None:
            rows = self._generated("train", 8 * len(self.levels), 0)
        else:
            rows = [row for rows in self._rows.values() for row in rows]
        if self.options.think:
            answers = OneSpelling(tokenizer, format_constraint(tokenizer, rows, answer_grammar))
            return ThinkThen(tokenizer, answers, self.options.think_marker, most_tokens=self.options.think_tokens)
        if all(row_grammar(row) is None for row in rows):
            return None
        return OneSpelling(tokenizer, format_constraint(tokenizer, rows))

    def tiny(self) -> TinySpec:
        """Return a model with the pieces of the question as tokens for arithmetic, else with single characters."""
        characters = set(self.options.system_prompt or "")
        if self.options.think:
            characters |= {*self.options.think_marker, " "}
        if self._rows is None and self.options.generator == "arithmetic":
            return TinySpec([*generators.ARITHMETIC_TOKENS, *sorted(characters - set("0123456789-()"))])
        characters |= {*string.printable[:-5], "\n"}
        for row in [row for rows in (self._rows or {}).values() for row in rows]:
            characters.update(
                *(message["content"] for message in row["prompt"]), row.get("gold") or row.get("answer") or ""
            )
        return TinySpec(sorted(characters), context=2048)

    def render(self, row: Row, completion: str) -> str:
        from .render import to_html

        return to_html(row, completion, self.score(row, completion), self.thought_markers)

    def exports(self, row: Row, completion: str) -> dict[str, str | bytes]:
        """Return the card, and the program or the JSON value of the answer where the row's rewards ask for one."""
        from .render import answer_files

        return super().exports(row, completion) | answer_files(self._known_row(row), self._answer(completion))

    def canonical(self, row: Row, completion: str) -> str:
        return self._answer(completion).strip()

    def _answer(self, completion: str) -> str:
        """Return the part of a completion that is scored: with --think, what follows the marker."""
        return (split_thought(completion, [self.options.think_marker])[1] or "") if self.options.think else completion

    # ---- building rows

    def _read_rows(self, source: str) -> dict[str, list[dict[str, Any]]]:
        options = self.options
        parts = data.read_source(source, options.prompt_column)
        ready = {key: [self._ready_row(row, place) for place, row in placed] for key, placed in parts.items()}
        self._numbered = [row for rows in ready.values() for row in rows]
        if "all" in ready:
            return cut(ready["all"], options.test_fraction)
        return {"train": without_prompts_of(ready["train"], ready["test"]), "test": ready["test"]}

    def _ready_row(self, row: Mapping[str, Any], place: str) -> dict[str, Any]:
        cleaned = data.clean_row(row, place, self.options.prompt_column, self.options.answer_column, self._own_columns)
        if "reward_model" in cleaned.get("rewards", ()):
            raise ValueError(
                f"{place}: a row cannot choose 'reward_model', which scores every row; use --reward_model and, "
                "for its weight, --rewards reward_model=0.5"
            )
        if not cleaned.get("rewards"):
            if not self._default_rewards and not self.options.reward_model:
                raise ValueError(
                    f"{place}: the row has no reward; add a column 'rewards', or pass --rewards for all rows"
                )
            cleaned["rewards"] = dict(self._default_rewards)
        return self._finished_row(cleaned, place)

    def _generated(self, split: str, size: int | None, seed: int) -> list[dict[str, Any]]:
        options = self.options
        rows = generators.generate(options.generator, self.levels, split, size, seed, options.test_fraction)
        own = self._own_columns | ({"rewards": self._default_rewards} if self._default_rewards else {})
        return [self._finished_row({**row, **own}, f"generator {options.generator!r}") for row in rows]

    def _finished_row(self, row: dict[str, Any], place: str) -> dict[str, Any]:
        data.check_row(row, place, self._functions)
        if "tests" in row["rewards"] and not self.options.allow_code_execution:
            raise ValueError(
                f"{place}: reward 'tests' runs model-written programs; read the security note in the README of the "
                "prompts task, then pass --allow_code_execution"
            )
        if "judge" in row["rewards"]:
            check_question(row, self.options, place)
        return {**row, "prompt": data.messages(row["prompt"], self.options.system_prompt, place)}

    def _known_row(self, row: Row) -> Row:
        """Return the row in the form that `dataset` gives, with every column checked.

        A row from elsewhere may be as in a prompts file or as `dataset` gives it. It may choose rewards that no row of
        this task has, but not user-defined functions, because resolving those would run their code.
        """
        if isinstance(row.get("rewards"), Mapping) and isinstance(row.get("prompt"), list):
            cleaned = data.clean_row(row, "the row", "prompt", "answer", {})
            row = self._finished_row({"rewards": {}, **cleaned}, "the row")
        else:
            row = self._ready_row(row, "the row")
        if new := [name for name in row["rewards"] if name not in self.weights]:
            if unknown := [name for name in new if name not in REWARDS or name == "reward_model"]:
                raise ValueError(f"the row's reward {unknown[0]!r} is not enabled for this task; name it in --rewards")
            self._judges.update(self._find_judges(dict.fromkeys(new)))
            self.weights.update(dict.fromkeys(new, 1.0))
        return row

    def _find_judges(self, names: Mapping[str, Any]) -> dict[str, Callable[[Row, str], Verdict]]:
        judges: dict[str, Callable[[Row, str], Verdict]] = {}
        for name in names:
            if name not in REWARDS:
                function = data.user_reward(name)
                if reward.reads_tokens(function):
                    self._token_rewards[name] = reward.over_tokens(function, name)
                else:
                    judges[name] = functools.partial(reward.call_user_reward, function, name)
            elif (judge := REWARDS[name].judge) is not None:
                judges[name] = judge
        if "tests" in judges:
            options = self.options
            check_sandbox(options.require_sandbox)
            judges["tests"] = functools.partial(
                reward.tests,
                timeout=options.sandbox_timeout,
                memory_mb=options.sandbox_memory_mb,
                require_sandbox=options.require_sandbox,
            )
        return judges


def check_sandbox(required: bool) -> None:
    """Check which layers of the sandbox are available, with a warning if one is missing.

    Raises ValueError if `required` and a layer is missing.
    """
    from ...rewards.sandbox import SandboxError, missing_layers

    try:
        missing = missing_layers()
    except SandboxError as error:
        missing = str(error)
        logger.warning("programs cannot be run on this machine: %s", error)
    if required and missing:
        raise ValueError(
            f"--require_sandbox: this machine lacks layers of the sandbox: {missing}. Use a machine whose kernel "
            "provides them (a container must allow namespaces), or omit --require_sandbox"
        )


def _levels(rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the levels of a file in which every row has one: in numerical order, or in order of appearance."""
    if not all("level" in row for row in rows):
        return ()
    names = list(dict.fromkeys(row["level"] for row in rows))
    return tuple(sorted(names, key=float) if all(name.replace(".", "", 1).isdecimal() for name in names) else names)
