"""The machine task: write a machine as a construction tree; physics measures how far it drives or throws."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

from ...task import Row, Score, Task, TinySpec, check_choice, check_one_of, check_text, check_whole, option
from . import data, requests
from .blocks import BLOCKS, PROMPT_BLOCKS
from .designs import LEVELS
from .prompts import manual, question
from .reading import MOST_BLOCKS, block_ends
from .reasoning import reasoned_answer
from .results import Result
from .simulator import PERTURBED_DT, simulate, simulate_each
from .starts import perturbed_starts
from .tree import ROOT, Block, ConstructionTree, block_json
from .trials import SCORINGS, TRIALS, Trial, load_trials, task_score

if TYPE_CHECKING:
    from ...constraints.base import Constraint

GRAMMARS = ("tree", "schema")
PERTURBED_SCORES = ("mean", "min")
MOST_PERTURBATIONS = 64


@dataclass(frozen=True)
class MachineOptions:
    """Options of the machine task: trials, scoring rules, constraint, allowed blocks, and the embedded model."""

    trials: list[str] = field(
        default_factory=lambda: ["car", "catapult"],
        metadata={
            "help": f"What the machines must do, one or more of: {', '.join(TRIALS)}; or YAML or JSON files with "
            "trials of your own."
        },
    )
    scoring: str = option(
        "paper",
        "'paper': a throw scores height times distance, if the boulder rises 3 m above its start. 'authors', as in "
        "the published code: (1 + rise) times distance, if it reaches 3 m and lands away from the start block.",
    )
    perturbations: int = option(
        0, "Score each machine from this many perturbed starts instead of once; four cost twice as much. 0: off."
    )
    perturbed_score: str = option("mean", "With --perturbations: the mean or the min of the scores.")
    breakage: bool = option(False, "End the run when the load on a joint exceeds its strength. Takes twice the time.")
    grammar: str = option(
        "tree",
        "With --constrain: 'tree' allows only machines that can be built, 'schema' any JSON of the right shape.",
    )
    blocks: list[str] = field(
        default_factory=lambda: list(PROMPT_BLOCKS),
        metadata={"help": f"Allowed block types. All types: {' '.join(BLOCKS)}."},
    )
    wheels_on_wheels: bool = option(
        True, "Allow wheels that sit on wheels, directly or through other blocks; they turn faster."
    )
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
        if not 0 <= self.perturbations <= MOST_PERTURBATIONS:
            raise ValueError(f"--perturbations {self.perturbations} must be from 0 to {MOST_PERTURBATIONS}")
        check_choice("perturbed_score", self.perturbed_score, PERTURBED_SCORES)
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
        "max_steps": 50,
    }
    Options: ClassVar[type] = MachineOptions
    tools: ClassVar[Mapping[str, Any]] = {
        "show": "trl_grpo_tasks.tasks.machine.show:main",
        "survey": "trl_grpo_tasks.tasks.machine.survey:main",
        "make-gold": "trl_grpo_tasks.tasks.machine.make_gold:main",
    }

    def __init__(self, options: Any = None):
        super().__init__(options)
        self._chosen = load_trials(self.options.trials)
        self.trials = TRIALS | self._chosen  # built-in ones too, so that rows of other runs can be scored
        self._perturbed_totals: dict[tuple[str, str], float] = {}

    def dataset(self, split: str, size: int | None, seed: int) -> list[dict[str, Any]]:
        """Return rows with a prompt, a level, a trial, the most blocks allowed, the demanded score, and a `gold`
        machine."""
        options = self.options
        return data.rows(
            list(self._chosen.values()),
            split,
            size,
            seed,
            kinds=["0", *options.blocks],
            with_manual=options.manual,
            reasoning=options.reasoning,
            unbroken=options.breakage,
            wheels_on_wheels=options.wheels_on_wheels,
            passes=self._passes if options.perturbations else None,
        )

    def row_of(self, text: str) -> dict[str, Any]:
        """Return the row of a request in words, such as "a small catapult" or "a car of at most 16 blocks"."""
        options = self.options
        kinds = ["0", *options.blocks]
        message = manual(kinds, options.wheels_on_wheels, options.reasoning) if options.manual else ""
        return requests.row_of(text, self._chosen, message, options.reasoning)

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
        return self._scored(row, tree, self._perturbed_runs(row, tree) or [self._run(row, tree)])

    def prefix_scores(self, row: Row, completion: str) -> list[tuple[int, float]]:
        """Return 1 after each block with which the machine can be built so far, 0 from the first problem on.

        The blocks are those of the first list. The last score is that of the whole answer, which may be another list.
        """
        pairs: list[tuple[int, float]] = []
        sound = True
        start, ends = block_ends(completion)
        for count, end in enumerate(ends, 1):
            if sound:
                tree, problems = self._read(row, completion[start:end] + "]")
                sound = not problems if count > 1 else tree.blocks == (ROOT,)  # the start block alone is no machine
            pairs.append((end, float(sound)))
        return [*pairs, (len(completion), float(not self._read(row, completion)[1]))]

    def _scored(self, row: Row, tree: ConstructionTree, results: Sequence[Result]) -> Score | None:
        """Score the runs of a machine. A run that is not valid scores 0; the machine is valid if one of them is."""
        if any(result.timed_out for result in results):
            return None
        valid = [result for result in results if result.valid]
        if not valid:
            return self._failed(results[0].reason, {})
        trial = self.trials[row["trial"]]
        values = [
            task_score(trial, result, self.options.scoring) if result.valid else (0.0, result.reason)
            for result in results
        ]
        scores = [value for value, _ in values]
        score = fmean(scores) if self.options.perturbed_score == "mean" else min(scores)
        goal = row.get("goal", trial.goal)
        success = score >= goal
        missed = min(values)[1] or f"the score is {score:.2f}; success needs {goal:g}"
        throws = [vars(throw) | {"landing": list(throw.landing)} for throw in valid[0].throws]
        info = {
            "r_valid": 1.0,
            "r_task": score,
            "seconds": valid[0].seconds,
            "extent": list(tree.extent()),
            "throws": throws,
            "broken": valid[0].broken,
        }
        if self.options.perturbations:
            info["perturbed_scores"] = scores
        components = {
            "score": score,
            "distance": fmean(_thrown(result) if trial.throws else result.distance for result in valid),
            "height": fmean(max((throw.height for throw in result.throws), default=0.0) for result in valid),
            "blocks": float(len(tree.blocks)),
        }
        return self.make_score(components, True, success, "" if success else missed, info)

    def gold(self, row: Row) -> str:
        if not row.get("gold"):
            raise ValueError(
                f"no known machine of at most {row['max_blocks']} blocks scores {row['goal']:g} at {row['trial']!r}; "
                "lower the goal, or pass --cold_start_steps 0"
            )
        tree, problems = self._read(row, row["gold"])
        return reasoned_answer(tree) if self.options.reasoning and not problems else row["gold"]

    def bad(self, row: Row) -> str:
        """Return a machine that can be built but does not move: one block on the start block."""
        return ConstructionTree((ROOT, Block("15", 0, 4))).to_json()

    def canonical(self, row: Row, completion: str) -> str:
        """Return the machine as JSON, without any text around it."""
        tree, problems = self._read(row, completion)
        return super().canonical(row, completion) if problems else tree.to_json()

    def constraint(self, tokenizer: Any) -> Constraint | None:
        """Return the constraint of --grammar; None with --reasoning, whose text no constraint leaves free."""
        if self.options.reasoning:
            return None
        from ...constraints import OneSpelling
        from .constraint import machine_constraint, schema_constraint

        options = self.options
        most = max(most for _, most in LEVELS.values())
        if options.grammar == "schema":
            return OneSpelling(tokenizer, schema_constraint(tokenizer, options.blocks, most))
        return OneSpelling(tokenizer, machine_constraint(tokenizer, options.blocks, most, options.wheels_on_wheels))

    def tiny(self) -> TinySpec | None:
        """Return a small Llama with four tokens per block (type, number, parent, face) and words for prompts; None
        with --reasoning, for which it has no words."""
        if self.options.reasoning:
            return None
        most = max(most for _, most in LEVELS.values())
        numbers = [str(n) for n in range(most)]
        tokens = ["[" + block_json(0, ROOT), "]"]
        tokens += [f',{{"id":"{kind}","order_id":' for kind in BLOCKS if kind != "0"]
        tokens += [f'{n},"parent{end}":' for n in numbers for end in ("", "_a", "_b")]
        tokens += [f'{n},"bp_id{end}":' for n in numbers for end in ("", "_a", "_b")]
        tokens += [f"{face}}}" for face in range(13)]
        texts = []
        for trial in self.trials.values():
            texts += [question(trial, n, most, trial.goal) for n in range(len(trial.requests))]
            texts += [question(trial, 0, n, goal) for n in range(data.LEAST_BLOCKS, most + 1) for goal in trial.goals]
        if self.options.manual:
            texts.append(manual(["0", *self.options.blocks], self.options.wheels_on_wheels))
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

        tree, problems = self._read(row, completion)
        if problems:
            return picture(None, None, problems)
        result = self._run(row, tree, record=True)
        score = self._scored(row, tree, self._perturbed_runs(row, tree) or [result])
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

    def _perturbed_runs(self, row: Row, tree: ConstructionTree) -> list[Result]:
        """Return the runs from perturbed starts, none without --perturbations."""
        starts = perturbed_starts(tree, self.options.perturbations)
        return list(simulate_each(tree, self.trials[row["trial"]], starts, PERTURBED_DT, self.options.breakage))

    def _passes(self, trial: Trial, machine: str, goal: float) -> bool:
        """Return whether a gold machine also reaches the goal from perturbed starts."""
        key = trial.name, machine
        if key not in self._perturbed_totals:
            score = self.score({"trial": trial.name}, machine)
            self._perturbed_totals[key] = 0.0 if score is None else score.components["score"]
        return self._perturbed_totals[key] >= goal

    def _read(self, row: Row, completion: str) -> tuple[ConstructionTree, list[str]]:
        tree = ConstructionTree.parse(completion)
        problems = tree.validate()
        most = row.get("max_blocks")
        if most and len(tree.blocks) > most:
            problems.append(f"the machine has {len(tree.blocks)} blocks; the prompt allows at most {most}")
        if not self.options.wheels_on_wheels:
            problems += [f"wheel {i} sits on wheel {j}, which is not allowed" for i, j in tree.carried_wheels()]
        return tree, problems

    def _failed(self, reason: str, info: dict[str, Any]) -> Score:
        return self.make_score(dict.fromkeys(self.weights, 0.0), False, False, reason, {"r_valid": 0.0, **info})


def _thrown(result: Result) -> float:
    return max((throw.distance for throw in result.throws), default=0.0)
