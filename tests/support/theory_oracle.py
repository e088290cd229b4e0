"""Anomalies of theories of SO(10) or E6 with U(1) groups, by sums over single states.

Every field is expanded into states with weights: the values of all diagonal generators. Anomalies are then traces over
products of three generators.
"""

import itertools
from collections import Counter
from math import prod


def weights_of(group, number):
    """The values of the diagonal generators on each component; the charge for a U(1)."""
    if group == "U(1)":
        return [(number,)]
    place = list(number).index(1) if any(number) else None
    return so10_weights(place) if group == "SO(10)" else e6_weights(place)


def so10_weights(place):
    """Twice the weights in an orthonormal basis: signs for spinors, +-e_i for the vector, +-e_i +- e_j for a 45."""
    if place is None:
        return [(0,) * 5]
    if place in (3, 4):  # an even number of minus signs for 16, an odd one for 16bar
        signs = itertools.product((1, -1), repeat=5)
        return [one for one in signs if (one.count(-1) % 2 == 0) == (place == 4)]
    unit = [tuple(2 * sign * (i == j) for j in range(5)) for i in range(5) for sign in (1, -1)]
    if place == 0:
        return unit
    pairs = [tuple(map(sum, zip(a, b, strict=True))) for a, b in itertools.combinations(unit, 2)]
    return [pair for pair in pairs if any(pair)] + [(0,) * 5] * 5


def e6_weights(place):
    """Weights under SU(3) x SU(3) x SU(3): 27 = (3, 3bar, 1) + (1, 3, 3bar) + (3bar, 1, 3), 78 = three octets and
    (3, 3, 3) with its conjugate."""
    one, three = [(0, 0)], [(1, 0), (-1, 1), (0, -1)]
    bar = [(-a, -b) for a, b in three]
    roots = [(a + c, b + d) for (a, b), (c, d) in itertools.product(three, bar)]
    eight = [root for root in roots if any(root)] + one * 2
    contents = {
        None: [(one,) * 3],
        0: [(three, bar, one), (one, three, bar), (bar, one, three)],
        5: [(bar, three, one), (one, bar, three), (three, one, bar)],
        1: [(eight, one, one), (one, eight, one), (one, one, eight), (three,) * 3, (bar,) * 3],
    }[place]
    return [sum(parts, ()) for content in contents for parts in itertools.product(*content)]


def is_anomaly_free(theory):
    """Whether all cubic and gravitational traces vanish."""
    count = Counter()  # each left-handed state, as the values of all diagonal generators, with its multiplicity
    for fermion in theory.fermions:
        parts = [weights_of(group.group, n) for group, n in zip(theory.groups, fermion.numbers, strict=True)]
        for chosen in itertools.product(*parts):
            count[sum(chosen, ())] += fermion.generations
    copies, generators = list(count.values()), list(zip(*count, strict=True))
    linear = [sum(map(prod, zip(copies, one, strict=True))) for one in generators]
    triples = itertools.combinations_with_replacement(generators, 3)
    return not any(linear) and not any(sum(map(prod, zip(copies, *three, strict=True))) for three in triples)
