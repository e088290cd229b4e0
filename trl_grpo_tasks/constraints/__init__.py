"""Constraints on generated text: grammars and choice trees behind one interface.

Importing this package loads neither torch nor xgrammar.
"""

from .base import Constraint, State, pack, pack_ids, replay, unpack, words_for
from .choices import ChoiceTreeConstraint
from .grammar import Grammar, GrammarConstraint
from .spelling import OneSpelling
from .think import ThinkThen, split_thought
from .vocabulary import Vocabulary, token_bytes

__all__ = [
    "ChoiceTreeConstraint",
    "Constraint",
    "Grammar",
    "GrammarConstraint",
    "OneSpelling",
    "State",
    "ThinkThen",
    "Vocabulary",
    "pack",
    "pack_ids",
    "replay",
    "split_thought",
    "token_bytes",
    "unpack",
    "words_for",
]
