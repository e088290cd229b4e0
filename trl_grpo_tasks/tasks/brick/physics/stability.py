"""Stability analysis of brick structures: is a structure stable, how close to failure is it, and where does it fail?

`analyse(structure)` computes the load factor: the smallest t for which every brick can be in static equilibrium with
no friction above t times what a stud can bear. The structure is stable if t < 1. The value is unique and does not
depend on the solver. There are two other modes. "feasible" asks whether an equilibrium exists at t = 1, which means
t <= 1 because more friction capacity never hurts. "published" is the analysis of StableLego and BrickGPT, for
comparison with the papers. Its weighted objective may prefer an unbalanced brick to a small friction, so it calls a
few stable structures unstable; its scores are not unique, so solvers may disagree on them.

A brick that no studs connect to the ground makes the structure unstable. Every connected structure has an equilibrium
at some load factor, because with unlimited friction a single stud can transfer any force and moment.
"""

from .balance import Analysis, Load, analyse
from .solvers import SolverError

__all__ = ["Analysis", "Load", "SolverError", "analyse"]
