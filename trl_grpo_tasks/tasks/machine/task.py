"""The machine task: write a machine as a construction tree; physics measures how far it drives or throws."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ...task import Row, Score, Task, TinySpec, check_choice, check_one_of, check_text, check_whole, option
from . import data, in_words
from .blocks import BLOCKS, PROMPT_BLOCKS
from .designs import LEVELS, MOST_ASKED
from .prompts import manual, question
from .reading import MOST_BLOCKS
from .reasoning import reasoned_answer
from .results import Result
from .simulator import simulate
from .tree import ROOT, Block, ConstructionTree, block_json
from .trials import SCORINGS, TRIALS, load_trials, task_score

if TYPE_CHECKING:
    from ...constraints.base import Constraint


@dataclass(frozen=True)
class MachineOptions:
    """Options of the machine task: trials, scoring rules, constraint, allowed blocks, and the embedded model."""

    trials: list[str] = option(
        ["car", "catapult"],
        f"What the machines must do, one or more of: {', '.join(TRIALS)}; or YAML or JSON files with trials of your "
        "own.",
    )
    scoring: str = option(
        "paper",
        "'paper': a throw scores height times distance, if the boulder rises 3 m above its start. 'authors', as in "
        "the published code: (1 + rise) times distance, if it reaches 3 m and lands away from the start block.",
    )
    breakage: bool = option(False, "End the run when the load on a joint exceeds its strength. Takes twice the time.")
    blocks: list[str] = option([*PROMPT_BLOCKS], f"Allowed block types. All types: {' '.join(BLOCKS)}.")
    manual: bool = option(False, "Add a system message that explains the format and the blocks.")
    reasoning: bool = option(
        False,
        "Ask for an explanation before the JSON, as in the published gold answers. Needs --constrain false and a "
        "pretrained model.",
    )
    tiny_width: int = option(128, "Hidden size of the embedded model.")
    tiny_layers: int = option(4, "Number of layers of the embedded model.")

    def __post_init__(self) -> None:
        load_trials(self.trials)
        if not self.trials:
            raise ValueError(f"--trials: name at least one of {' '.join(TRIALS)}, or a file")
        for kind in self.blocks:
            check_choice("blocks", kind, BLOCKS)
        check_choice("scoring", self.scoring, SCORINGS)
        if self.tiny_width % 32 or self.tiny_width < 32 or self.tiny_layers < 1:
            raise ValueError(
                f"--tiny_width {self.tiny_width} must be a multiple of 32, --tiny_layers {self.tiny_layers} above 0"
            )


class MachineTask(Task):
    """Generates a machine as JSON and scores it in a physics simulation.

    The reward is R_valid * R_task: 0 for machines that cannot be built or simulated, otherwise metres for cars, height
    times distance for catapults, and up to ten points for rings. A success reaches the score that the row demands.
    """

    name: ClassVar[str] = "machine"
    version: ClassVar[str] = "3"
    description: ClassVar[str] = "Cars and catapults from blocks, written as JSON and scored by a physics simulation"
    weights: Mapping[str, float] = {"score": 1.0, "distance": 0.0, "height": 0.0, "blocks": 0.0}
    levels: Sequence[str] = tuple(LEVELS)
    defaults: ClassVar[Mapping[str, Any]] = {
        "constrain": True,
        "max_completion_length": 1168,
        "num_generations": 16,
        "per_device_train_batch_size": 16,
        "temperature": 1.0,
        "cold_start_steps": 400,  # no pretrained model knows the blocks
    }
    tiny_defaults: ClassVar[Mapping[str, Any]] = {
        "trials": ["car"],
        "max_completion_length": 144,
        "cold_start_steps": 120,
        "cold_start_batch_size": 16,
        "per_device_train_batch_size": 64,
        "max_steps": 30,
    }
    Options: ClassVar[type] = MachineOptions
    tools: ClassVar[Mapping[str, Any]] = {
        "show": "trl_grpo_tasks.tasks.machine.show:main",
        "make-gold": "trl_grpo_tasks.tasks.machine.make_gold:main",
    }

    def __init__(self, options: Any = None):
        super().__init__(options)
        self._chosen = load_trials(self.options.trials)
        self.trials = TRIALS | self._chosen  # built-in ones too, so that rows of other runs can be scored
        self._kinds = ["0", *self.options.blocks]
        self._message = manual(self._kinds, self.options.reasoning) if self.options.manual else ""

    def dataset(self, split: str, size: int | None, seed: int) -> list[dict[str, Any]]:
        """Return rows with a prompt, a level, a trial, the most blocks allowed, the demanded score, and a `gold`
        machine."""
        how = self._kinds, self._message, self.options.reasoning, self.options.breakage
        return data.rows(list(self._chosen.values()), split, size, seed, *how)

    def row_of(self, text: str) -> dict[str, Any]:
        """Return the row of a request in words, such as "a small catapult" or "a car of at most 16 blocks"."""
        return in_words.row_of(text, self._chosen, self._message, self.options.reasoning)

    def row_from(self, given: Row) -> dict[str, Any]:
        """Return a row with a trial, which may limit the number and the kinds of blocks."""
        row = super().row_from(given)
        check_one_of(row, "trial", self.trials)
        if row.get("max_blocks") is not None:
            check_whole(row, "max_blocks", 2, MOST_BLOCKS)
        goal = row.get("goal", 0.0)
        if not isinstance(goal, int | float) or not math.isfinite(goal):
            raise ValueError(f"the 'goal' of a row must be a number, the score that is demanded, not {goal!r:.60}")
        kinds = row.get("blocks") or []
        if not isinstance(kinds, list) or not all(isinstance(kind, str) and kind in BLOCKS for kind in kinds):
            raise ValueError(f"the 'blocks' of a row must be a list of some of {', '.join(BLOCKS)}, not {kinds!r:.60}")
        check_text(row, "gold")
        return row

    def score(self, row: Row, completion: str) -> Score | None:
        """Score a machine. Returns None if the simulation exceeded its wall-clock limit: the outcome is unknown."""
        tree, problems = self._read(row, completion)
        if problems:
            return self._failed("; ".join(problems), {"problems": problems[:20]})
        return self._scored(row, tree, self._run(row, tree))

    def _scored(self, row: Row, tree: ConstructionTree, result: Result) -> Score | None:
        if not result.valid:
            return None if result.timed_out else self._failed(result.reason, {})
        trial = self.trials[row["trial"]]
        score, missed = task_score(trial, result, self.options.scoring)
        goal = row.get("goal", trial.goal)
        info = {
            "r_valid": 1.0,
            "r_task": score,
            "seconds": result.seconds,
            "extent": list(tree.extent()),
            "throws": [vars(throw) | {"landing": list(throw.landing)} for throw in result.throws],
            "broken": result.broken,
        }
        thrown = max((throw.distance for throw in result.throws), default=0.0)
        height = max((throw.height for throw in result.throws), default=0.0)
        distance = thrown if trial.throws else result.distance
        components = {"score": score, "distance": distance, "height": height, "blocks": float(len(tree.blocks))}
        missed = "" if score >= goal else missed or f"the score is {score:.2f}; success needs {goal:g}"
        return self.make_score(components, True, score >= goal, missed, info)

    def gold(self, row: Row) -> str:
        if not row.get("gold"):
            raise ValueError(
                f"no known machine of at most {row['max_blocks']} blocks scores {row['goal']:g} at {row['trial']!r}; "
                "lower the goal, or pass --cold_start_steps 0"
            )
        if not self.options.reasoning:
            return row["gold"]
        tree, problems = self._read(row, row["gold"])
        return row["gold"] if problems else reasoned_answer(tree)

    def bad(self, row: Row) -> str:
        """Return a machine that can be built but does not move: one block on the start block."""
        return ConstructionTree((ROOT, Block("15", 0, 4))).to_json()

    def canonical(self, row: Row, completion: str) -> str:
        """Return the machine as JSON, without any text around it."""
        tree, problems = self._read(row, completion)
        return super().canonical(row, completion) if problems else tree.to_json()

    def constraint(self, tokenizer: Any) -> Constraint | None:
        """Return the constraint to machines that can be built; None with --reasoning, whose text it does not allow."""
        if self.options.reasoning:
            return None
        from ...constraints import OneSpelling
        from .constraint import machine_constraint

        return OneSpelling(tokenizer, machine_constraint(tokenizer, self.options.blocks, MOST_ASKED))

    def tiny(self) -> TinySpec | None:
        """Return a small Llama with four tokens per block (type, number, parent, face) and words for prompts; None
        with --reasoning, for which it has no words."""
        if self.options.reasoning:
            return None
        numbers = [str(n) for n in range(MOST_ASKED)]
        tokens = ["[" + block_json(0, ROOT), "]"]
        tokens += [f',{{"id":"{kind}","order_id":' for kind in BLOCKS if kind != "0"]
        tokens += [f'{n},"parent{end}":' for n in numbers for end in ("", "_a", "_b")]
        tokens += [f'{n},"bp_id{end}":' for n in numbers for end in ("", "_a", "_b")]
        tokens += [f"{face}}}" for face in range(13)]
        texts = [self._message]
        for trial in self.trials.values():
            texts += [question(trial, n, MOST_ASKED, trial.goal) for n in range(len(trial.requests))]
            sizes = range(data.LEAST_BLOCKS, MOST_ASKED + 1)
            texts += [question(trial, 0, n, goal) for n in sizes for goal in trial.goals]
        # Words keep their commas: a comma token would also begin a block, and no token continues such a block.
        tokens += sorted({word for text in texts for word in re.findall(r" ?\S+|\s", text)})
        width, context = self.options.tiny_width, 2048 if self.options.manual else 512
        return TinySpec(list(dict.fromkeys(tokens)), width, self.options.tiny_layers, width // 32, context)

    def render(self, row: Row, completion: str) -> bytes:
        from .render import picture

        tree, problems = self._read(row, completion)
        if problems:
            return picture(None, None, problems)
        result = self._run(row, tree, record=True)
        score = self._scored(row, tree, result)
        total = "" if score is None else f", score {score.total:.2f}"
        title = f"{row['trial']}, {len(tree.blocks)} blocks{total}"
        return picture(result, self.trials[row["trial"]], [title, result.reason])

    def exports(self, row: Row, completion: str) -> dict[str, str | bytes]:
        """Return the picture and, if the machine can be built, its JSON, MuJoCo XML, .bsg file, and a film."""
        from .bsg import to_bsg
        from .render import animation
        from .scene import to_xml

        files = super().exports(row, completion)
        tree, problems = self._read(row, completion)
        if problems:
            return files
        trial = self.trials[row["trial"]]
        files |= {
            "machine.json": tree.to_json() + "\n",
            "paper.json": tree.to_paper_json() + "\n",
            "machine.xml": to_xml(tree, trial.scene, loads=self.options.breakage),
            "machine.bsg": to_bsg(tree),
        }
        result = self._run(row, tree, record=True)
        return files | ({"film.gif": animation(result, trial, caption=row["trial"])} if result.valid else {})

    def _run(self, row: Row, tree: ConstructionTree, record: bool = False) -> Result:
        return simulate(tree, self.trials[row["trial"]], breakage=self.options.breakage, record=record)

    def _read(self, row: Row, completion: str) -> tuple[ConstructionTree, list[str]]:
        tree = ConstructionTree.parse(completion)
        problems = tree.validate()
        most = row.get("max_blocks")
        if most and len(tree.blocks) > most:
            problems.append(f"the machine has {len(tree.blocks)} blocks; the prompt allows at most {most}")
        return tree, problems

    def _failed(self, reason: str, info: dict[str, Any]) -> Score:
        return self.make_score(dict.fromkeys(self.weights, 0.0), False, False, reason, {"r_valid": 0.0, **info})
