"""Train a judge on real and corrupted text, print its accuracy on held-out text, and save it.

trl-grpo-tasks tool infill prepare-judge --output_dir my_judge --corpus my_texts.txt

A judge that is no better than chance is not saved.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields

from ...task import nearest
from .task import InfillOptions, InfillTask

OPTIONS = ("corpus", "text_column", "text_length", "test_fraction", "tokens_of", "judge_steps", "judge_width")


def main(arguments: Sequence[str]) -> int:
    """Train a judge on real and corrupted text, and save it."""
    parser = argparse.ArgumentParser(
        "trl-grpo-tasks tool infill prepare-judge",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--output_dir", required=True, metavar="DIR", help="folder of the judge")
    parser.add_argument("--held_out", action="store_true", help="train on the other half of the text: a second judge")
    parser.add_argument("--seed", type=int, default=42, metavar="N", help="seed of the training (default: 42)")
    for option in fields(InfillOptions):
        if option.name in OPTIONS:
            kind = type(option.default) if isinstance(option.default, int | float) else str
            parser.add_argument(f"--{option.name}", type=kind, metavar="VALUE", help=option.metadata["help"])
    given, unknown = parser.parse_known_args(arguments)
    if unknown:
        known = [f"--{name}" for name in vars(given)]
        raise ValueError(f"unknown option {unknown[0]}{nearest(unknown[0], known)}; options are: {', '.join(known)}")
    named = {name: value for name in OPTIONS if (value := getattr(given, name)) is not None}
    from transformers.utils import logging

    logging.disable_progress_bar()
    InfillTask(InfillOptions(**named)).train_judge(given.output_dir, given.held_out, given.seed)
    print(f"judge: {given.output_dir}")
    return 0
