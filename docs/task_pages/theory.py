"""Generated blocks of the page of task theory: an example, the words of the language, groups, starts and scores."""

from __future__ import annotations

import re

from trl_grpo_tasks import get_task

from .blocks import code, codes, fenced, first_row, score_line, table


def example() -> str:
    task, row = first_row("theory", lambda row: row["gold"].count("FERMION") == 1)
    gold = task.gold(row)
    found = task.score(row, gold)
    return "\n\n".join(
        [
            "The prompt, which the model continues. It is one line; the line breaks are added here:",
            fenced(_broken(row["prompt"])),
            "A completion that succeeds, and its score:",
            fenced(_broken(gold.strip())),
            fenced(score_line(found)),
        ]
    )


def _broken(text: str) -> str:
    """A theory with a line for each of its parts."""
    starts = "SYMMETRY_BREAKING|SCALAR multiplet_\\d+ REP|MULTIPLETS|FERMION|INTERACTIONS|BARE_MASS|YUKAWA|END"
    return re.sub(rf" (?={starts})", "\n", text)


_STRUCTURE = {
    "BOS": "beginning of a theory",
    "GAUGE_GROUPS": "begins the list of gauge groups",
    "NUM_GAUGE": "a count follows: the number of gauge groups",
    "GROUP": "an id (`group_1`) and a group (`SU_3`) follow",
    "SYMMETRY_BREAKING": "begins the list of scalar fields with a vacuum expectation value (vev)",
    "NUM_VEVS": "a count follows: the number of these scalars",
    "SCALAR": "declares a scalar multiplet; in a Yukawa term: the scalar itself couples",
    "REP": "the id of a non-abelian group and a representation follow",
    "CHARGE": "the id of a U(1) and a charge follow",
    "VEV": "a group, a component of its representation and a value follow: the direction and size of the vev",
    "MASS": "a mass follows: that of a scalar multiplet",
    "MULTIPLETS": "begins the list of the other multiplets",
    "NUM_MULTIPLETS": "a count follows: the number of these multiplets",
    "FERMION": "declares a multiplet of left-handed Weyl fermions",
    "GENERATIONS": "a count follows: the number of copies of the multiplet",
    "INTERACTIONS": "begins the list of terms that gauge symmetry allows",
    "BARE_MASS": "two fermion multiplets and a mass follow",
    "YUKAWA": "two fermion multiplets, a scalar (`SCALAR` or `CONJUGATE`) and a coupling follow",
    "CONJUGATE": "in a Yukawa term: the conjugate of the scalar couples",
    "END": "end of a theory",
}


def words() -> str:
    from trl_grpo_tasks.tasks.theory import words

    structure = table(["word", "meaning"], [(code(word), _STRUCTURE[word]) for word in words.STRUCTURE])
    kinds = [
        ("counts", words.COUNT_WORDS, "0 to 12"),
        ("gauge groups", words.GROUPS, "the groups that can be written"),
        ("group ids", [f"group_{n}" for n in range(1, words.MAX_GROUPS + 1)], "names of the groups, in order"),
        ("multiplet ids", [words.multiplet_word(n) for n in range(1, words.MAX_VEVS + words.MAX_MULTIPLETS + 1)],
         "names of the multiplets, in order"),
        ("representations", words.KINDS, "see the next table"),
        ("components", words.COMPONENT_WORDS, "components of a representation, for vevs"),
        ("charges", words.CHARGE_WORDS, "rational charges under a U(1)"),
        ("vevs", words.VEV_WORDS, "in GeV"),
        ("masses", words.MASS_WORDS, "in GeV"),
        ("couplings", words.YUKAWA_WORDS, "one Yukawa coupling for all generations: `y_5e-1` is 0.5"),
        ("hierarchical couplings", words.HIERARCHY_WORDS,
         f"the coupling of the last generation; each earlier one is smaller by a factor of {words.HIERARCHY:g}"),
    ]  # fmt: skip
    written = [*words.STRUCTURE, *(word for _, some, _ in kinds for word in some)]
    if sorted(written) != sorted(words.VOCABULARY):
        raise ValueError(f"the page would miss words: {sorted(set(words.VOCABULARY) ^ set(written))}")
    rest = table(["kind", "words", "meaning"], [(kind, _shortened(list(some)), what) for kind, some, what in kinds])
    limits = (
        f"Limits: {words.MAX_GROUPS} groups, {words.MAX_VEVS} scalars with a vev, {words.MAX_MULTIPLETS} further "
        f"multiplets, {words.MAX_GENERATIONS} generations of each."
    )
    return f"The language has {len(words.VOCABULARY)} words.\n\n{structure}\n\n{rest}\n\n{limits}"


def _shortened(some: list[str]) -> str:
    """Up to eleven words in full, more as a range."""
    return codes(some) if len(some) <= 11 else f"{code(some[0])} to {code(some[-1])} ({len(some)})"


def groups() -> str:
    from trl_grpo_tasks.tasks.theory.groups import irrep
    from trl_grpo_tasks.tasks.theory.tensors import reps_of
    from trl_grpo_tasks.tasks.theory.words import GROUPS, group_name

    rows: list[tuple[str, str]] = []
    for word in GROUPS:
        group = group_name(word)
        if group == "U(1)":
            rows.append((f"`{word}` = {group}", "charges instead of representations"))
            continue
        reps = [f"`{kind}` ({irrep(group, rep).dimension})" for kind, rep in reps_of(group).items()]
        rows.append((f"`{word}` = {group}", ", ".join(reps)))
    return table(["group", "representations (dimension)"], rows)


_STARTS = {
    "standard_model": "the Standard Model, and how many multiplets there are in all; the model adds 1 to "
    "`--new_multiplets` fermion multiplets and all couplings",
    "one_given": "the same, with the first of the new multiplets given",
    "groups": "gauge groups, scalars with vevs and the number of multiplets; all fermions are to be found",
    "scratch": "the first few words only",
}


def starts() -> str:
    from trl_grpo_tasks.tasks.theory.data import STARTS

    rows = [(code(name), _STARTS[name]) for name in STARTS]
    return table(["`--start`", "what the prompt gives"], [*rows, ("`mixed`", "all of these in turn")])


def named() -> str:
    from trl_grpo_tasks.tasks.theory.examples import NAMES, named

    names: dict[str, list[str]] = {}
    for name in NAMES:
        names.setdefault(" x ".join(group.group for group in named(name).groups), []).append(name)
    return table(["gauge groups", "theories"], [(groups, codes(some)) for groups, some in names.items()])


_THEORY_COMPONENTS = {
    "anomalies": "mean over all anomaly conditions (1 if there are none): 1 where the coefficient x is exactly zero, "
    "otherwise -ln(1 + abs(x))",
    "exotics": "for each charged or coloured state outside the Standard Model that is lighter than "
    "`--threshold_gev`: minus the square of its distance from that threshold in powers of ten",
    "standard_model": "minus the share of quarks and charged leptons that are missing",
    "perturbativity": "minus the number of Yukawa couplings that are sqrt(4 pi) or larger",
    "length": "penalty for more than `--max_words` words",
    "solved": "1 for success, otherwise 0",
    "distinct": "for a success: 1 divided by how many completions of the same prompt found the same theory",
}


def components() -> str:
    from trl_grpo_tasks.tasks.theory.reward import WORST

    best = {"anomalies": 1, "solved": 1, "distinct": 1}
    rows = []
    for name, weight in get_task("theory").weights.items():
        between = f"{WORST.get(name, 0):g} {'or' if name in ('length', 'solved') else 'to'} {best.get(name, 0)}"
        rows.append((code(name), f"{weight:g}", _THEORY_COMPONENTS[name], between))
    return table(["component", "weight", "value", "range"], rows)


def goals() -> str:
    from trl_grpo_tasks.tasks.theory.reward import GOALS

    return table(["level", "components that count"], [(code(name), codes(some)) for name, some in GOALS.items()])
