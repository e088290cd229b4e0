"""Does a brick structure stand? How much of what its studs can bear does it need, and which bricks give way?

`analyse(structure)` finds the load factor: the least t for which every brick can be in exact balance with no friction
above t times what a stud bears. The structure stands if t < 1. The number is unique, whatever the solver. Other modes:
"feasible" asks the same program whether a balance exists at t = 1 (more friction never hurts, so that is t <= 1), and
"published" is the analysis of StableLego and BrickGPT, for comparing with the papers. Its weighted objective may
prefer a brick out of balance to a small friction, so it calls a few structures unstable that stand; and its scores are
not unique, so that solvers may differ in them.

A brick that no studs connect to the ground is a proof of instability. For all others a balance exists at some load:
without a limit on friction a single stud passes on any force and moment.

`prefix_stability(structure)` gives the load factor after every brick.
"""

from .balance import Analysis, Load, analyse
from .prefix import prefix_stability
from .solvers import SolverError

__all__ = ["Analysis", "Load", "SolverError", "analyse", "prefix_stability"]
