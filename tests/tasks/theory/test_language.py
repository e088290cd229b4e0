"""The language of theories: words, round trips and errors; canonical forms; export to other programs."""

import itertools
import random
import re
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.walks import random_text
from trl_grpo_tasks.tasks.theory import anomalies, canonical, examples, render, words
from trl_grpo_tasks.tasks.theory.constraint import after_prompt, choices
from trl_grpo_tasks.tasks.theory.language import LanguageError, parse, relabelled, write
from trl_grpo_tasks.tasks.theory.reward import judge
from trl_grpo_tasks.tasks.theory.terms import with_all_terms
from trl_grpo_tasks.tasks.theory.theory import Fermion, GaugeGroup, Scalar, Theory, conjugate_number
from trl_grpo_tasks.tasks.theory.words import VOCABULARY


def random_walk(prompt, rng):
    """A random completion of a prompt."""
    return random_text(choices, after_prompt(prompt), rng)


PROMPTS = ["BOS", "BOS GAUGE_GROUPS NUM_GAUGE num_2", "BOS GAUGE_GROUPS NUM_GAUGE num_3 GROUP group_1 SU_3"]
random_theories = st.builds(
    lambda seed, prompt: prompt + random_walk(prompt, random.Random(seed)),
    st.integers(0, 10**6),
    st.sampled_from(PROMPTS),
)
theories_in_sarah = random_theories.filter(lambda text: not {"SO_10", "E_6"} & set(text.split()))
IN_SARAH = [name for name in examples.NAMES if name not in ("so10", "e6")]


def test_no_word_is_a_prefix_of_another():
    assert len(set(VOCABULARY)) == len(VOCABULARY)
    assert not [(a, b) for a, b in itertools.permutations(VOCABULARY, 2) if b.startswith(a)]
    assert all(re.fullmatch(r"\S+", word) for word in VOCABULARY)


@pytest.mark.parametrize("name", examples.NAMES)
def test_named_theories_succeed_and_round_trip(name):
    theory = examples.named(name)
    text = write(theory)
    assert set(text.split()) <= set(VOCABULARY)
    assert parse(text) == relabelled(theory)
    assert write(parse(text)) == text
    assert judge(theory, len(text.split()), 400).problems == {}


@settings(max_examples=30)
@given(text=random_theories)
def test_random_theories_round_trip(text):
    theory = parse(text)
    assert write(theory) == text
    assert parse(write(theory)) == theory == relabelled(theory)
    assert with_all_terms(theory) == theory  # nothing that gauge symmetry allows was left out


def test_a_real_scalar_has_no_second_coupling_by_its_conjugate():
    fermions = {"E": ("singlet fund -1/2", 1), "F": ("singlet fund 1/2", 1)}
    theory = examples.make(examples.SM_GROUPS, {"S": ("singlet adjoint 0", 1000)}, fermions, {})
    assert [(term.scalar, term.conjugate) for term in theory.terms] == [(None, False), ("S", False)]


SM = write(examples.named("standard_model"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("BOS ", "", "word 1: expected BOS; found 'GAUGE_GROUPS'"),
        (" END", "", "expected END; found the end of the text"),
        (" END", " END END", "expected nothing after END"),
        ("NUM_GAUGE num_3", "NUM_GAUGE num_4", "expected GROUP; found 'SYMMETRY_BREAKING'"),
        ("NUM_GAUGE num_3", "NUM_GAUGE num_5", "expected num_1, num_2, num_3, num_4; found 'num_5'"),
        ("NUM_MULTIPLETS num_5", "NUM_MULTIPLETS num_4", "expected INTERACTIONS; found 'FERMION'"),
        ("FERMION multiplet_03", "FERMION multiplet_07", "expected multiplet_03; found 'multiplet_07'"),
        ("YUKAWA multiplet_02 multiplet_03", "YUKAWA multiplet_02 multiplet_09", "multiplet_02, .*'multiplet_09'"),
        ("YUKAWA multiplet_02 multiplet_03", "YUKAWA multiplet_03 multiplet_02", "expected multiplet_03, "),
        ("multiplet_03 SCALAR", "multiplet_03 CONJUGATE", "not gauge invariant"),
        (" END", " BARE_MASS multiplet_02 multiplet_02 m_300GeV END", "mass term .* is not gauge invariant"),
        ("CONJUGATE multiplet_01 h_2e-2", "SCALAR multiplet_02 h_2e-2", "expected multiplet_01; found 'multiplet_02'"),
        ("q_1/6", "q_1/7", "found 'q_1/7'"),
        ("component_02", "component_03", "expected component_01, component_02; found"),
        ("GENERATIONS num_3", "GENERATIONS num_5", "found 'num_5'"),
        ("MASS m_125GeV", "MASS m_0GeV", "found 'm_0GeV'"),
        ("h_1e0", "1.0", "found '1.0'"),
        ("antifund REP group_2 singlet CHARGE group_3 q_1/3", "antifund REP group_2 singlet CHARGE group_3 q_-2/3",
         "multiplet_04 repeats multiplet_03"),
    ],
)  # fmt: skip
def test_invalid_texts_are_reported_with_the_word(old, new, message):
    assert old in SM
    with pytest.raises(LanguageError, match=message):
        parse(SM.replace(old, new, 1))


def test_a_repeated_term_is_reported():
    end = SM.index("INTERACTIONS") + len("INTERACTIONS")
    first = SM[end : SM.index(" YUKAWA", end + 5)]
    with pytest.raises(LanguageError, match="occurs twice"):
        parse(SM[:end] + first + SM[end:])


def test_values_without_a_word_are_reported():
    theory = examples.named("standard_model")
    with pytest.raises(ValueError, match="no word 'm_126GeV' for this mass; words are: m_0GeV, m_10GeV"):
        write(replace(theory, scalars=(replace(theory.scalars[0], mass=126.0),)))
    with pytest.raises(ValueError, match="no word 'SU_6' for this group"):
        write(Theory((GaugeGroup("g", "SU(6)"),), (Fermion("f", ((1, 0, 0, 0, 0),)),)))
    with pytest.raises(ValueError, match=r"Yukawa couplings \[0.1, 0.2, 0.3\]"):
        write(replace(theory, terms=(replace(theory.terms[0], values=(0.1, 0.2, 0.3)),)))


def test_hierarchical_couplings():
    assert words.yukawa_values("h_1e0", 3) == (1e-4, 1e-2, 1.0)
    assert words.yukawa_values("y_5e-1", 2) == (0.5, 0.5)
    assert "h_1e0" not in words.yukawa_words(1)  # it would say the same as y_1e0
    assert words.yukawa_word((1.0,)) == "y_1e0"


# ---- canonical forms


def renamed(theory, seed):
    """The same theory written differently: order of fields and groups, conjugations, scales, split generations."""
    rng = random.Random(seed)
    order = rng.sample(range(len(theory.groups)), len(theory.groups))
    flips = [rng.random() < 0.5 for _ in theory.groups]
    scales = [Fraction(rng.choice((1, 2, 3)), rng.choice((1, 2, 5))) for _ in theory.groups]

    def numbers(old, conjugate=False):
        new = []
        for i in order:
            number = old[i] if isinstance(old[i], tuple) else old[i] * scales[i]
            new.append(conjugate_number(theory.groups[i].group, number) if flips[i] != conjugate else number)
        return tuple(new)

    fermions = []
    for fermion in rng.sample(theory.fermions, len(theory.fermions)):
        parts = (
            [1, fermion.generations - 1] if fermion.generations > 1 and rng.random() < 0.5 else [fermion.generations]
        )
        fermions += [Fermion(f"f{len(fermions) + n}", numbers(fermion.numbers), part) for n, part in enumerate(parts)]
    scalars = [
        Scalar(f"s{n}", numbers(s.numbers, rng.random() < 0.5), s.mass, s.vev)
        for n, s in enumerate(rng.sample(theory.scalars, len(theory.scalars)))
    ]
    groups = tuple(GaugeGroup(f"g{n}", theory.groups[i].group) for n, i in enumerate(order))
    return Theory(groups, tuple(fermions), tuple(scalars))


@settings(max_examples=40)
@given(name=st.sampled_from(examples.NAMES), seed=st.integers(0, 10**6))
def test_the_same_theory_written_differently_is_recognised(name, seed):
    theory = examples.named(name)
    other = renamed(theory, seed)
    assert canonical.canonical(other) == canonical.canonical(theory)
    assert canonical.rediscovered(canonical.digest(other)) == name
    assert not any(anomalies(other).values())


def test_different_theories_differ():
    digests = {canonical.digest(examples.named(name)) for name in examples.NAMES}
    assert len(digests) == len(examples.NAMES)
    theory = examples.named("seesaw_1")
    changes = [
        replace(theory, fermions=theory.fermions[:-1]),
        replace(theory, fermions=(*theory.fermions[:-1], replace(theory.fermions[-1], generations=2))),
        replace(theory, fermions=(*theory.fermions, Fermion("x", ((1, 1), (0,), Fraction(0))))),
        replace(theory, scalars=(replace(theory.scalars[0], vev=None),)),
    ]
    # One field alone conjugated is another theory: this one has an anomaly.
    numbers = theory.fermions[0].numbers
    flipped = replace(theory.fermions[0], numbers=(conjugate_number("SU(3)", numbers[0]), *numbers[1:]))
    changes.append(replace(theory, fermions=(flipped, *theory.fermions[1:])))
    found = {canonical.digest(replace(one, terms=())) for one in changes}
    assert len(found) == len(changes) and canonical.digest(theory) not in found


def test_values_do_not_make_a_new_theory():
    text = write(examples.named("vectorlike_top"))
    assert canonical.digest(parse(text)) == canonical.digest(parse(text.replace("m_1000GeV", "m_300GeV")))


# ---- tables


def test_tables_and_pictures():
    theory = examples.named("seesaw_1")
    table = render.content_table(theory)
    assert table[0] == ["field", "kind", "c: SU(3)", "L: SU(2)", "Y: U(1)", "copies"]
    assert ["uc", "fermion", "3bar", "1", "-2/3", "3"] in table
    assert [line[-2] for line in render.content_table(examples.named("so10"))[1:]] == ["45", "16", "10", "16"]
    assert render.picture(theory).startswith(b"\x89PNG")
    unbroken = replace(theory, scalars=(replace(theory.scalars[0], vev=None),), terms=())
    assert render.picture(unbroken).startswith(b"\x89PNG")
