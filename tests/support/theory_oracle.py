"""An independent implementation of anomaly checks for tests of the task theory: sums over single states.

Every field is expanded into states with weights: the values of all diagonal generators. Anomalies are then traces over
products of three generators, for any groups.
"""

import itertools
from collections import Counter
from fractions import Fraction


def rep_weights(n, dynkin):
    """The weights of a representation of SU(N) in terms of the entries of diag(x_1 ... x_N), from tensor indices."""
    rank = n - 1
    if not any(dynkin):
        return [(0,) * n]
    unit = [tuple(int(i == j) for j in range(n)) for i in range(n)]
    if sum(dynkin) == 1:
        rows = list(dynkin).index(1) + 1  # an antisymmetric tensor with this number of indices
        return [tuple(map(sum, zip(*chosen, strict=True))) for chosen in itertools.combinations(unit, rows)]
    adjoint = [0] * rank
    adjoint[0] += 1
    adjoint[-1] += 1
    if list(dynkin) == adjoint:
        roots = [tuple(a - b for a, b in zip(x, y, strict=True)) for x, y in itertools.permutations(unit, 2)]
        return roots + [(0,) * n] * rank
    raise AssertionError(f"the oracle does not know {dynkin}")


def diagonal_generators(theory):
    """A basis of diagonal generators: x_i - x_{i+1} for each SU(N), the charge for each U(1)."""
    names = []
    for g, group in enumerate(theory.groups):
        n = 1 if group.group == "U(1)" else int(group.group[3:-1])
        names += [(g, i) for i in range(max(1, n - 1))]
    return names


def states(theory):
    """Each left-handed state, as the values of all diagonal generators, with its multiplicity."""
    count = Counter()
    for fermion in theory.fermions:
        parts = []
        for group, number in zip(theory.groups, fermion.numbers, strict=True):
            if group.group == "U(1)":
                parts.append([(number,)])
            else:
                weights = rep_weights(int(group.group[3:-1]), number)
                parts.append([tuple(w[i] - w[i + 1] for i in range(len(w) - 1)) for w in weights])
        for chosen in itertools.product(*parts):
            count[tuple(value for part in chosen for value in part)] += fermion.generations
    return count


def is_anomaly_free(theory):
    """All cubic and gravitational traces vanish, and no SU(2) has an odd number of doublets (in the sense of 2T)."""
    count = states(theory)
    generators = diagonal_generators(theory)
    size = len(generators)
    for place in range(size):
        if sum(n * state[place] for state, n in count.items()):
            return False
    for i, j, k in itertools.combinations_with_replacement(range(size), 3):
        if sum(n * state[i] * state[j] * state[k] for state, n in count.items()):
            return False
    for g, group in enumerate(theory.groups):
        if group.group == "SU(2)":
            place = generators.index((g, 0))  # twice T3: 2T = sum of T3 squared times 2
            if Fraction(sum(n * state[place] ** 2 for state, n in count.items()), 2) % 2:
                return False
    return True
