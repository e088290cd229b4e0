"""MachineTask: write a machine as a construction tree; physics says how far it drives or throws."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from ...task import Row, Score, Task, TinySpec, check_choice, option
from . import data
from .blocks import BLOCKS, PROMPT_BLOCKS
from .designs import LEVELS
from .prompts import VARIANTS, manual, question
from .results import Result
from .simulator import simulate
from .tree import ROOT, Block, ConstructionTree, block_json
from .trials import SCORINGS, TRIALS, get_trial, task_score

if TYPE_CHECKING:
    from ...constraints.base import Constraint

GRAMMARS = ("tree", "schema")


@dataclass(frozen=True)
class MachineOptions:
    """What machines are asked to do, and how they are judged."""

    trials: list[str] = field(
        default_factory=lambda: ["car", "catapult"], metadata={"help": f"What machines do: {', '.join(TRIALS)}."}
    )
    scoring: str = option(
        "paper",
        "paper: a boulder must rise 3 m above its start and is measured where it lands. authors: it must be 3 m high, "
        "and is measured where it is after 5 s.",
    )
    breakage: bool = option(False, "End a run where the load on a joint is more than it bears. Twice as slow.")
    grammar: str = option(
        "tree",
        "With --constrain: 'tree' allows only machines that can be built, 'schema' any JSON of the right shape.",
    )
    blocks: list[str] = field(
        default_factory=lambda: list(PROMPT_BLOCKS),
        metadata={"help": f"Types of blocks that may be used. All: {' '.join(BLOCKS)}."},
    )
    manual: bool = option(False, "Explain the format and the blocks in a system message.")
    tiny_width: int = option(128, "Width of the embedded model.")
    tiny_layers: int = option(4, "Layers of the embedded model.")

    def __post_init__(self) -> None:
        for trial in self.trials:
            check_choice("trials", trial, TRIALS)
        if not self.trials or len(set(self.trials)) < len(self.trials):
            raise ValueError(f"--trials {' '.join(self.trials)}: give some of {' '.join(TRIALS)}, each once")
        for kind in self.blocks:
            check_choice("blocks", kind, BLOCKS)
        check_choice("scoring", self.scoring, SCORINGS)
        check_choice("grammar", self.grammar, GRAMMARS)
        if self.tiny_width % 32 or self.tiny_width < 32 or self.tiny_layers < 1:
            raise ValueError(
                f"--tiny_width {self.tiny_width} must be a multiple of 32, --tiny_layers {self.tiny_layers} above 0"
            )


class MachineTask(Task):
    """The reward is R_valid * R_task: 0 for what cannot be built or simulated, else metres for cars, height times
    distance for catapults, up to ten points for rings."""

    name: ClassVar[str] = "machine"
    version: ClassVar[str] = "1"
    description: ClassVar[str] = "Cars and catapults from blocks, written as JSON and judged by physics"
    weights: Mapping[str, float] = {"score": 1.0, "distance": 0.0, "height": 0.0, "blocks": 0.0}
    levels: Sequence[str] = tuple(LEVELS)
    defaults: ClassVar[Mapping[str, Any]] = {
        "constrain": True,
        "max_completion_length": 1168,
        "num_generations": 16,
        "per_device_train_batch_size": 16,
        "temperature": 1.0,
    }
    Options: ClassVar[type] = MachineOptions
    tools: ClassVar[Mapping[str, Any]] = {
        "show": "trl_grpo_tasks.tasks.machine.show:main",
        "survey": "trl_grpo_tasks.tasks.machine.survey:main",
        "make-gold": "trl_grpo_tasks.tasks.machine.make_gold:main",
    }

    def dataset(self, split: str, size: int | None, seed: int) -> list[dict[str, Any]]:
        """Rows with a prompt, a level, a trial, the most blocks, and a `gold` machine."""
        options = self.options
        return data.rows(
            options.trials,
            split,
            size,
            seed,
            kinds=["0", *options.blocks],
            with_manual=options.manual,
            unbroken=options.breakage,
        )

    def score(self, row: Row, completion: str) -> Score | None:
        """None where the simulation took too long by the clock: then nothing is known of the machine."""
        tree, problems = _read(row, completion)
        if problems:
            return self._failed("; ".join(problems), {"problems": problems[:20]})
        return self._scored(row, tree, self._run(row, tree))

    def _scored(self, row: Row, tree: ConstructionTree, result: Result) -> Score | None:
        if result.timed_out:
            return None
        if not result.valid:
            return self._failed(result.reason, {})
        trial = get_trial(row["trial"])
        value, why = task_score(trial, result, self.options.scoring)
        success = value >= trial.goal
        reason = why or ("" if success else f"the score is {value:.2f}; success begins at {trial.goal:g}")
        throws = [vars(throw) | {"landing": list(throw.landing)} for throw in result.throws]
        info = {
            "r_valid": 1.0,
            "r_task": value,
            "seconds": result.seconds,
            "extent": list(tree.extent()),
            "throws": throws,
            "broken": result.broken,
        }
        components = {
            "score": value,
            "distance": max((throw.distance for throw in result.throws), default=0.0)
            if trial.throws
            else result.distance,
            "height": max((throw.height for throw in result.throws), default=0.0),
            "blocks": float(len(tree.blocks)),
        }
        return self.make_score(components, True, success, reason, info)

    def gold(self, row: Row) -> str:
        return row["gold"]

    def bad(self, row: Row) -> str:
        """A block on a block: it can be built, and does nothing."""
        return ConstructionTree((ROOT, Block("15", 0, 4))).to_json()

    def canonical(self, row: Row, completion: str) -> str:
        """The machine as JSON, without what was said around it."""
        tree, problems = _read(row, completion)
        return super().canonical(row, completion) if problems else tree.to_json()

    def constraint(self, tokenizer: Any) -> Constraint:
        from ...constraints import OneSpelling
        from .constraint import machine_constraint, schema_constraint

        make = machine_constraint if self.options.grammar == "tree" else schema_constraint
        most = max(most for _, most in LEVELS.values())
        return OneSpelling(tokenizer, make(tokenizer, self.options.blocks, most))

    def tiny(self) -> TinySpec:
        """Four tokens a block: its type, its number, its parent, its face. Prompts are cut into words."""
        most = max(most for _, most in LEVELS.values())
        numbers = [str(n) for n in range(most)]
        tokens = ["[" + block_json(0, ROOT), "]"]
        tokens += [f',{{"id":"{kind}","order_id":' for kind in BLOCKS if kind != "0"]
        tokens += [f'{n},"parent{end}":' for n in numbers for end in ("", "_a", "_b")]
        tokens += [f'{n},"bp_id{end}":' for n in numbers for end in ("", "_a", "_b")]
        tokens += [f"{face}}}" for face in range(13)]
        texts = [
            question(trial, n, m) for trial in TRIALS for n in range(len(VARIANTS[trial])) for _, m in LEVELS.values()
        ]
        if self.options.manual:
            texts.append(manual(["0", *self.options.blocks]))
        # Words keep their commas: a comma by itself would also begin a block, of which no other token is the rest.
        words = sorted({word for text in texts for word in re.findall(r" ?\S+|\s", text)})
        options = self.options
        heads = options.tiny_width // 32
        context = 2048 if options.manual else 512
        return TinySpec(
            list(dict.fromkeys([*tokens, *words])), options.tiny_width, options.tiny_layers, heads, context
        )

    def render(self, row: Row, completion: str) -> bytes:
        from .render import picture

        tree, problems = _read(row, completion)
        if problems:
            return picture(None, None, problems)
        result = self._run(row, tree, record=True)
        score = self._scored(row, tree, result)
        total = "" if score is None else f", score {score.total:.2f}"
        return picture(
            result, get_trial(row["trial"]), [f"{row['trial']}, {len(tree.blocks)} blocks{total}", result.reason]
        )

    def _run(self, row: Row, tree: ConstructionTree, record: bool = False) -> Result:
        # The authors measure at the end of the run, the paper where a boulder lands.
        to_the_end = self.options.scoring == "authors"
        return simulate(tree, row["trial"], breakage=self.options.breakage, to_the_end=to_the_end, record=record)

    def _failed(self, reason: str, info: dict[str, Any]) -> Score:
        return self.make_score(dict.fromkeys(self.weights, 0.0), False, False, reason, {"r_valid": 0.0, **info})


def _read(row: Row, completion: str) -> tuple[ConstructionTree, list[str]]:
    tree = ConstructionTree.parse(completion)
    problems = tree.validate()
    most = row.get("max_blocks")
    if most and len(tree.blocks) > most:
        problems.append(f"the machine has {len(tree.blocks)} blocks; at most {most} were asked for")
    return tree, problems
