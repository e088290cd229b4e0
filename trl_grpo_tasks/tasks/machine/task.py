"""The machine task: write a machine as a construction tree; physics measures how far it drives or throws."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from ...task import Row, Score, Task, TinySpec, check_choice, option
from . import data, requests
from .blocks import BLOCKS, PROMPT_BLOCKS
from .designs import LEVELS
from .prompts import VARIANTS, manual, question
from .reading import block_ends
from .results import Result
from .simulator import simulate
from .tree import ROOT, Block, ConstructionTree, block_json
from .trials import SCORINGS, TRIALS, get_trial, task_score

if TYPE_CHECKING:
    from ...constraints.base import Constraint

GRAMMARS = ("tree", "schema")


@dataclass(frozen=True)
class MachineOptions:
    """Options of the machine task: trials, scoring rules, constraint, allowed blocks, and the embedded model."""

    trials: list[str] = field(
        default_factory=lambda: ["car", "catapult"],
        metadata={"help": f"What the machines must do, one or more of: {', '.join(TRIALS)}."},
    )
    scoring: str = option(
        "paper",
        "'paper': the boulder must rise 3 m above its start; its distance is measured where it lands. 'authors': it "
        "must reach a height of 3 m; its distance is measured after 5 s.",
    )
    breakage: bool = option(False, "End the run when the load on a joint exceeds its strength. Takes twice the time.")
    grammar: str = option(
        "tree",
        "With --constrain: 'tree' allows only machines that can be built, 'schema' any JSON of the right shape.",
    )
    blocks: list[str] = field(
        default_factory=lambda: list(PROMPT_BLOCKS),
        metadata={"help": f"Allowed block types. All types: {' '.join(BLOCKS)}."},
    )
    manual: bool = option(False, "Add a system message that explains the format and the blocks.")
    tiny_width: int = option(128, "Hidden size of the embedded model.")
    tiny_layers: int = option(4, "Number of layers of the embedded model.")

    def __post_init__(self) -> None:
        for trial in self.trials:
            check_choice("trials", trial, TRIALS)
        if not self.trials or len(set(self.trials)) < len(self.trials):
            raise ValueError(f"--trials {' '.join(self.trials)}: name at least one of {' '.join(TRIALS)}, each once")
        for kind in self.blocks:
            check_choice("blocks", kind, BLOCKS)
        check_choice("scoring", self.scoring, SCORINGS)
        check_choice("grammar", self.grammar, GRAMMARS)
        if self.tiny_width % 32 or self.tiny_width < 32 or self.tiny_layers < 1:
            raise ValueError(
                f"--tiny_width {self.tiny_width} must be a multiple of 32, --tiny_layers {self.tiny_layers} above 0"
            )


class MachineTask(Task):
    """Generates a machine as JSON and scores it in a physics simulation.

    The reward is R_valid * R_task: 0 for machines that cannot be built or simulated, otherwise metres for cars, height
    times distance for catapults, and up to ten points for rings.
    """

    name: ClassVar[str] = "machine"
    version: ClassVar[str] = "1"
    description: ClassVar[str] = "Cars and catapults from blocks, written as JSON and scored by a physics simulation"
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
        """Return rows with a prompt, a level, a trial, the maximum number of blocks, and a `gold` machine."""
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

    def row_of(self, text: str) -> dict[str, Any]:
        """Return the row of a request in words, such as "a small catapult" or "a car of at most 16 blocks"."""
        return requests.row_of(text, self.options.trials, ["0", *self.options.blocks], self.options.manual)

    def score(self, row: Row, completion: str) -> Score | None:
        """Score a machine. Returns None if the simulation exceeded its wall-clock limit: the outcome is unknown."""
        tree, problems = _read(row, completion)
        if problems:
            return self._failed("; ".join(problems), {"problems": problems[:20]})
        return self._scored(row, tree, self._run(row, tree))

    def prefix_scores(self, row: Row, completion: str) -> list[tuple[int, float]]:
        """Return 1 after each block with which the machine can be built so far, 0 from the first problem on.

        The blocks are those of the first list. The last score is that of the whole answer, which may be another list.
        """
        pairs: list[tuple[int, float]] = []
        sound = True
        start, ends = block_ends(completion)
        for count, end in enumerate(ends, 1):
            if sound:
                tree, problems = _read(row, completion[start:end] + "]")
                sound = not problems if count > 1 else tree.blocks == (ROOT,)  # the start block alone is no machine
            pairs.append((end, float(sound)))
        return [*pairs, (len(completion), float(not _read(row, completion)[1]))]

    def _scored(self, row: Row, tree: ConstructionTree, result: Result) -> Score | None:
        if result.timed_out:
            return None
        if not result.valid:
            return self._failed(result.reason, {})
        trial = get_trial(row["trial"])
        value, why = task_score(trial, result, self.options.scoring)
        success = value >= trial.goal
        reason = why or ("" if success else f"the score is {value:.2f}; success needs {trial.goal:g}")
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
        """Return a machine that can be built but does not move: one block on the start block."""
        return ConstructionTree((ROOT, Block("15", 0, 4))).to_json()

    def canonical(self, row: Row, completion: str) -> str:
        """Return the machine as JSON, without any text around it."""
        tree, problems = _read(row, completion)
        return super().canonical(row, completion) if problems else tree.to_json()

    def constraint(self, tokenizer: Any) -> Constraint:
        from ...constraints import OneSpelling
        from .constraint import machine_constraint, schema_constraint

        make = machine_constraint if self.options.grammar == "tree" else schema_constraint
        most = max(most for _, most in LEVELS.values())
        return OneSpelling(tokenizer, make(tokenizer, self.options.blocks, most))

    def tiny(self) -> TinySpec:
        """Return a small Llama with four tokens per block (type, number, parent, face) and words for prompts."""
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
        # Words keep their commas: a comma token would also begin a block, and no token continues such a block.
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

    def exports(self, row: Row, completion: str) -> dict[str, str | bytes]:
        """Return the picture and, if the machine can be built, its JSON, MuJoCo XML, and a film of the run."""
        from .render import animation
        from .scene import to_xml

        files = super().exports(row, completion)
        tree, problems = _read(row, completion)
        if problems:
            return files
        trial = get_trial(row["trial"])
        files |= {
            "machine.json": tree.to_json() + "\n",
            "paper.json": tree.to_paper_json() + "\n",
            "machine.xml": to_xml(tree, trial.scene, loads=self.options.breakage),
        }
        result = self._run(row, tree, record=True)
        return files | ({"film.gif": animation(result, trial, caption=row["trial"])} if result.valid else {})

    def _run(self, row: Row, tree: ConstructionTree, record: bool = False) -> Result:
        # The authors measure at the end of the run; the paper measures where a boulder lands.
        to_the_end = self.options.scoring == "authors"
        return simulate(tree, row["trial"], breakage=self.options.breakage, to_the_end=to_the_end, record=record)

    def _failed(self, reason: str, info: dict[str, Any]) -> Score:
        return self.make_score(dict.fromkeys(self.weights, 0.0), False, False, reason, {"r_valid": 0.0, **info})


def _read(row: Row, completion: str) -> tuple[ConstructionTree, list[str]]:
    tree = ConstructionTree.parse(completion)
    problems = tree.validate()
    most = row.get("max_blocks")
    if most and len(tree.blocks) > most:
        problems.append(f"the machine has {len(tree.blocks)} blocks; the prompt allows at most {most}")
    return tree, problems
