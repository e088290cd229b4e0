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


def cartan_values(group, dynkin):
    """The values of a basis of diagonal generators on each component: x_i - x_{i+1} for SU(N)."""
    if group == "SO(10)":
        return so10_weights(dynkin)
    if group == "E6":
        return e6_weights(dynkin)
    return [tuple(w[i] - w[i + 1] for i in range(len(w) - 1)) for w in rep_weights(int(group[3:-1]), dynkin)]


def so10_weights(dynkin):
    """Twice the weights in an orthonormal basis: signs for spinors, +-e_i for the vector, +-e_i +- e_j for a 45."""
    signs = list(itertools.product((1, -1), repeat=5))
    place = list(dynkin).index(1) if any(dynkin) else None
    if place is None:
        return [(0,) * 5]
    if place in (3, 4):  # an even number of minus signs for 16, an odd one for 16bar
        return [one for one in signs if (one.count(-1) % 2 == 0) == (place == 4)]
    unit = [tuple(2 * sign * (i == j) for j in range(5)) for i in range(5) for sign in (1, -1)]
    if place == 0:
        return unit
    pairs = [tuple(map(sum, zip(a, b, strict=True))) for a, b in itertools.combinations(unit, 2)]
    return [pair for pair in pairs if any(pair)] + [(0,) * 5] * 5


def e6_weights(dynkin):
    """Weights under SU(3) x SU(3) x SU(3): 27 = (3, 3bar, 1) + (1, 3, 3bar) + (3bar, 1, 3), 78 = three octets and
    (3, 3, 3) with its conjugate."""
    if not any(dynkin):
        return [(0,) * 6]
    three = cartan_values("SU(3)", (1, 0))
    bar = [tuple(-x for x in w) for w in three]
    eight, one = cartan_values("SU(3)", (1, 1)), [(0, 0)]
    contents = {
        0: [(three, bar, one), (one, three, bar), (bar, one, three)],
        5: [(bar, three, one), (one, bar, three), (three, one, bar)],
        1: [(eight, one, one), (one, eight, one), (one, one, eight), (three,) * 3, (bar,) * 3],
    }[list(dynkin).index(1)]
    return [sum(parts, ()) for content in contents for parts in itertools.product(*content)]


def diagonal_generators(theory):
    """A basis of diagonal generators of every group; the charge for a U(1)."""
    names = []
    for g, group in enumerate(theory.groups):
        rank = {"U(1)": 1, "SO(10)": 5, "E6": 6}.get(group.group) or int(group.group[3:-1]) - 1
        names += [(g, i) for i in range(rank)]
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
                parts.append(cartan_values(group.group, number))
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
