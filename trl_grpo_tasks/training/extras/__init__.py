"""The optional features of training, in the order in which the trainer calls them."""

from __future__ import annotations

from .adaptive_kl import AdaptiveKLExtra
from .ahead import AheadExtra
from .base import Extra
from .best_model import BestModelExtra
from .curriculum import CurriculumExtra
from .discount import DiscountExtra
from .guard import GuardExtra
from .moving_reference import MovingReferenceExtra
from .own_successes import OwnSuccessesExtra
from .replay import ReplayExtra
from .resampling import ResamplingExtra
from .thought import ThoughtExtra
from .turn_credit import TurnCreditExtra

EXTRAS: tuple[type[Extra], ...] = (
    MovingReferenceExtra,
    AdaptiveKLExtra,
    CurriculumExtra,
    GuardExtra,
    DiscountExtra,
    TurnCreditExtra,
    ThoughtExtra,
    OwnSuccessesExtra,
    ResamplingExtra,
    ReplayExtra,
    BestModelExtra,
    AheadExtra,
)
