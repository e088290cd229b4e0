"""`--task reasoning_gym:NAME`: the data sets of reasoning-gym, with their own scorers; NAME+NAME is a mixture."""

from __future__ import annotations

import math
import string
from copy import deepcopy
from dataclasses import dataclass
from operator import add
from typing import Any

from ..task import NoAnswerError, Row, Score, Task, TinySpec, check_choice, nearest, option
from . import is_held_out, library_version
from .expressions import refuse_code, unsafe_reason
from .reasoning_gym_data import STREAM, UNSTABLE, GymData, answer_of, levels_of, read_config

ROWS = 500  # of a split, if no number is asked for: reasoning-gym's own default
MISSES = 200  # questions of the other split in a row, after which a data set has no more for this one
LONGEST = 20_000  # characters of an answer; some scorers take minutes for more
TINY_LENGTH = 400  # characters of a question and its answer that the tiny model has room for
PLAIN = "none"
EXPECTED = "; one right answer is "  # in a reason, before the answer


@dataclass(frozen=True)
class GymOptions:
    """Options of the tasks of reasoning-gym."""

    gym_config: str | None = option(
        None, "Configuration of the data set as JSON, such as '{\"min_terms\": 3}'; of a mixture: {data set: {...}}."
    )
    gym_levels: int = option(0, "Levels of the data set's curriculum, from easy to hard. 0: no curriculum.")
    gym_prompt: str = option(
        PLAIN, "System prompt of reasoning-gym, such as default or direct, which asks for <answer> tags. none: no one."
    )


class GymTask(Task):
    """One data set of reasoning-gym, or a mixture whose rows alternate.

    A row names the data set, its seed and its index, from which the scorer's entry is made again: JSON cannot hold the
    entries of all data sets.
    """

    weights = {"answer": 1.0}
    defaults = {"max_completion_length": 256}
    tiny_defaults = {"cold_start_steps": 300, "max_steps": 150, "learning_rate": 5e-4, "num_generations": 8,
                     "per_device_train_batch_size": 64, "max_completion_length": 32}  # fmt: skip
    Options = GymOptions
    names: tuple[str, ...]

    def __init__(self, options: Any = None):
        super().__init__(options)
        from reasoning_gym.utils import SYSTEM_PROMPTS

        check_choice("gym_prompt", self.options.gym_prompt, (PLAIN, *SYSTEM_PROMPTS))
        self._system = SYSTEM_PROMPTS.get(self.options.gym_prompt)
        most = min(len(levels_of(name)) for name in self.names)
        if not 0 <= self.options.gym_levels <= most:
            raise ValueError(f"--gym_levels {self.options.gym_levels} must be from 0 to {most}, the number of levels "
                             f"of the curriculum of {' and '.join(self.names)}")  # fmt: skip
        self.levels = [str(level) for level in range(self.options.gym_levels)]
        levels: list[str | None] = [*self.levels] or [None]
        self._sources = [(name, level) for level in levels for name in self.names]
        self._data = GymData(read_config(self.options.gym_config, self.names))
        for source in self._sources:  # a wrong configuration is reported before anything slow starts
            self._data.data_set(*source, 0)

    def dataset(self, split: str, size: int | None, seed: int) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        sources = list(self._sources)
        index = misses = 0
        while len(rows) < (size or ROWS) and sources:
            name, level = sources[len(rows) % len(sources)]
            start = (seed + index // STREAM * 7919) * STREAM  # streams of different seeds share no index
            entry = self._data.entry(index % STREAM, name, level, start)
            index += 1
            answer = answer_of(entry)
            # The question decides to which split it belongs, whatever the seed. Integrals that sympy cannot solve have
            # themselves as their answer; those are left out, and questions whose answer is no text at all.
            usable = answer is None or (answer.strip() and not unsafe_reason(name, answer))
            if is_held_out(entry["question"]) == (split == "test") and usable:
                messages = [{"role": "system", "content": self._system}] if self._system else []
                row = {"prompt": [*messages, {"role": "user", "content": entry["question"]}], "data_set": name,
                       "seed": start, "index": (index - 1) % STREAM, "answer": answer}  # fmt: skip
                more = {"level": level} if level is not None else {}
                rows.append(row | more | ({"entry": entry} if name in UNSTABLE else {}))
                misses = 0
            elif (misses := misses + 1) == MISSES:
                sources.remove((name, level))
                misses = 0
        return rows

    def score(self, row: Row, completion: str) -> Score | None:
        from reasoning_gym.utils import extract_answer

        answer = extract_answer(completion)
        if answer is None and not self._system:
            answer = completion.strip()
        if not answer:
            return self._invalid("there is no <answer>...</answer>" if self._system else "the answer is empty")
        longest = max(LONGEST, len(row["answer"] or ""))  # hard levels of a few data sets have longer answers
        if len(answer) > longest:
            return self._invalid(f"the answer has {len(answer)} characters, more than {longest}")
        name, key = row["data_set"], (row["data_set"], row.get("level"), row["seed"])
        if reason := unsafe_reason(name, answer):
            return self._invalid(reason)
        entry = deepcopy(row.get("entry") or self._data.entry(row["index"], *key))  # a scorer may change it
        if answer_of(entry) != row["answer"]:
            return None  # the row was made by another version of the data set
        try:
            value = float(self._data.data_set(*key).score_answer(answer, entry))
        except Exception as error:  # noqa: BLE001 - scorers were not written for any text
            return self._invalid(f"the scorer of {name} raised {type(error).__name__}: {error}"[:200])
        if not math.isfinite(value):
            return self._invalid(f"the scorer of {name} returned {value}")
        success = value >= 1
        reason = "" if success else f"{name} scores the answer {value:.3g}{EXPECTED}{row['answer']!r}"
        return self.make_score({"answer": value}, True, success, reason[:300], {"answer": answer})

    def feedback(self, row: Row, score: Score) -> str:
        return score.reason.partition(EXPECTED)[0]

    def _invalid(self, reason: str) -> Score:
        return self.make_score({"answer": 0.0}, False, False, reason)

    def gold(self, row: Row) -> str:
        if row["answer"] is None:
            raise NoAnswerError(
                f"reasoning-gym gives no answer to questions of {row['data_set']}, only a scorer; train a pretrained "
                "model, without --cold_start_steps"
            )
        return f"<answer>{row['answer']}</answer>" if self._system else row["answer"]

    def bad(self, row: Row) -> str:
        return ""

    def tiny(self) -> TinySpec | None:
        rows = self.dataset("train", 32 * max(1, len(self.levels)) * len(self.names), 0)
        texts = [row["prompt"][-1]["content"] for row in rows]
        answers = [row["answer"] or "x" * TINY_LENGTH for row in rows]  # a cold start needs answers
        if self._system or max(map(len, map(add, texts, answers))) > TINY_LENGTH:
            return None
        # The words of a question's template are one token each; everything else is spelled.
        words = [set(text.split()) for text in texts]
        of = {name: [w for w, row in zip(words, rows, strict=True) if row["data_set"] == name] for name in self.names}
        template = set().union(*(set.intersection(*own) for own in of.values()))
        characters = {*string.printable[:95], "\n", *"".join(texts + answers)}
        return TinySpec([*sorted(characters), *sorted(word for word in template if len(word) > 1)])


def task_class(names: str) -> type[Task]:
    """The task of a data set of reasoning-gym, or of several with + between their names."""
    installed = library_version("reasoning_gym", "reasoning_gym")
    from reasoning_gym.factory import DATASETS

    known = sorted(set(DATASETS) - {"composite"})  # a mixture is written with + here
    given = tuple(names.split("+"))
    for name in given:
        if name not in known:
            raise ValueError(f"reasoning-gym has no data set {name!r}{nearest(name, known)}; its data sets are: "
                             f"{', '.join(known)}; write NAME+NAME for a mixture")  # fmt: skip
    if len(set(given)) < len(given):
        raise ValueError(f"reasoning_gym:{names} names a data set twice; name each one once")
    refuse_code()
    described = {
        "names": given,
        "name": f"reasoning_gym_{'_'.join(given)}",
        "version": f"1+{installed}",
        "description": f"Questions of reasoning-gym: {', '.join(given)}.",
    }
    return type("ReasoningGymTask", (GymTask,), described)
