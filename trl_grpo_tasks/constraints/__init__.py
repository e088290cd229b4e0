"""Constraints on generated text: grammars and choice trees behind one interface.

Importing this package loads neither torch nor xgrammar.
"""

from .base import Constraint, State, pack, pack_ids, replay, unpack, words_for
from .choices import ChoiceTreeConstraint
from .grammar import Grammar, GrammarConstraint
from .spelling import OneSpelling
from .vocabulary import Vocabulary, token_bytes

__all__ = [
    "ChoiceTreeConstraint",
    "Constraint",
    "Grammar",
    "GrammarConstraint",
    "OneSpelling",
    "State",
    "Vocabulary",
    "pack",
    "pack_ids",
    "replay",
    "token_bytes",
    "unpack",
    "words_for",
]
