"""Faster rollouts for groups that share a prompt and a constraint: the same distribution, fewer and faster passes.

support.py says where they are known to be right, batch.py writes completions, decoder.py runs the model.
"""

from .batch import NO_FILTERS, Editor, Rollout, rollout
from .decoder import Decoder
from .support import unsupported_reason, unsupported_reason_in

__all__ = ["NO_FILTERS", "Decoder", "Editor", "Rollout", "rollout", "unsupported_reason", "unsupported_reason_in"]
