"""Fast rollouts for groups of completions that share a prompt: TRL's distribution with fewer and faster passes.

support.py decides which models and trainers are supported, engine.py generates completions, decoder.py runs the model.
"""

from .batch import Editor, Rollout
from .decoder import Decoder
from .engine import NO_FILTERS, rollout
from .support import unsupported_reason, unsupported_reason_in

__all__ = ["NO_FILTERS", "Decoder", "Editor", "Rollout", "rollout", "unsupported_reason", "unsupported_reason_in"]
