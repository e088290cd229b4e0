"""Simulate one machine, print its scores or why it is not valid, and write it in other formats.

trl-grpo-tasks tool machine show my_machine.txt --trial catapult --gif throw.gif --xml machine.xml

The file holds what a model wrote, or is a machine that Besiege saved (.bsg). "-" reads standard
input, "gold" takes the best known machine, and the output folder of a run the best machine of its
last evaluation. MuJoCo's viewer shows XML:
python -m mujoco.viewer --mjcf=machine.xml
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ...report.run_folder import RunFolder
from ...task import printable
from .bsg import from_bsg, to_bsg
from .data import gold_machines
from .render import animation, picture
from .scene import to_xml
from .simulator import simulate
from .tree import ConstructionTree
from .trials import SCORINGS, TRIALS, load_trials, task_score


def main(arguments: Sequence[str]) -> int:
    """Simulate one machine; print its scores, and write pictures or other formats."""
    parser = argparse.ArgumentParser(
        "trl-grpo-tasks tool machine show",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", help="a text with a machine in it, a .bsg file, -, gold, or a run's folder")
    parser.add_argument("--trial", default="car", metavar="NAME", help=f"{', '.join(TRIALS)}, or one of --trials")
    parser.add_argument("--trials", nargs="+", default=[], metavar="FILE", help="YAML or JSON files with more trials")
    for kind in ("png", "gif", "xml", "json", "bsg"):
        parser.add_argument(f"--{kind}", type=Path, metavar="FILE", help=f"write this {kind.upper()} file")
    options = parser.parse_args(arguments)
    trials = TRIALS | load_trials(options.trials)
    if options.trial not in trials:
        parser.error(f"unknown --trial {options.trial!r}; trials are: {', '.join(trials)}")
    trial = trials[options.trial]
    if options.file == "gold":
        if trial.name not in TRIALS:
            parser.error(f"there is no stored machine for --trial {trial.name}; name a file or a run")
        text = max(gold_machines()[trial.name], key=lambda gold: gold.score).machine
    elif Path(options.file).is_dir():
        evaluation = RunFolder.read(options.file).latest_evaluation
        if evaluation is None:
            parser.error(f"{options.file} contains no results.json; name the folder of a run that was evaluated")
        samples = (sample for sample in evaluation["samples"] if sample["score"] is not None)
        tried = [sample for sample in samples if sample["row"]["trial"] == options.trial]
        if not tried:
            parser.error(f"the last evaluation of {options.file} has no machine for --trial {options.trial}")
        text = max(tried, key=lambda sample: sample["score"]["total"])["completion"]
    else:
        text = sys.stdin.read() if options.file == "-" else Path(options.file).read_text()
    if options.file.endswith(".bsg"):
        try:
            tree = from_bsg(text)
        except ValueError as error:
            print(f"{options.file} cannot be read: {printable(str(error))}")
            return 1
    else:
        tree = ConstructionTree.parse(text)
    result = simulate(tree, trial, record=True, to_the_end=True)
    if not result.valid:
        print(f"not valid: {printable(result.reason)}")
        return 1
    scores = {scoring: task_score(trial, result, scoring) for scoring in SCORINGS}
    print(f"{len(tree.blocks)} blocks, {' x '.join(f'{side:g}' for side in tree.extent())} m")
    for scoring, (score, why) in scores.items():
        print(f"score ({scoring}): {score:.2f}{' - ' + why if why else ''}")
    written: dict[str, Callable[[], str | bytes]] = {
        "png": lambda: picture(result, trial, [f"{trial.name}: {scores['paper'][0]:.2f}"]),
        "gif": lambda: animation(result, trial, caption=trial.name),
        "xml": lambda: to_xml(tree, trial.scene),
        "json": lambda: tree.to_json() + "\n",
        "bsg": lambda: to_bsg(tree),
    }
    for kind, content in written.items():
        if (path := getattr(options, kind)) is not None:
            made = content()
            path.write_bytes(made.encode() if isinstance(made, str) else made)
    return 0
