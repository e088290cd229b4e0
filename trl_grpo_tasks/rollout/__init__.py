"""Fast rollouts for groups of completions that share a prompt: TRL's distribution with fewer and faster passes.

support.py decides which models and trainers are supported, batch.py generates completions, decoder.py runs the model.
"""

from .batch import NO_FILTERS, Editor, Rollout, rollout
from .decoder import Decoder
from .support import unsupported_reason, unsupported_reason_in

__all__ = ["NO_FILTERS", "Decoder", "Editor", "Rollout", "rollout", "unsupported_reason", "unsupported_reason_in"]
