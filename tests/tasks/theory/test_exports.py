"""Files of theories for other programs: LaTeX by its structure, and the files of an answer."""

import re
from dataclasses import replace
from fractions import Fraction

import pytest

from tests.support.sarah_files import read_theory
from tests.tasks.theory.test_task import make, prompt_of
from trl_grpo_tasks.tasks.theory import examples, sarah
from trl_grpo_tasks.tasks.theory.latex import write_latex


def check_latex(text):
    """Braces, environments and dollars are balanced, and special characters are escaped outside formulas."""
    depth = 0
    for brace in re.findall(r"(?<!\\)[{}]", text):
        depth += 1 if brace == "{" else -1
        assert depth >= 0
    assert depth == 0
    opened = []
    for kind, name in re.findall(r"\\(begin|end)\{(\w+)\}", text):
        if kind == "begin":
            opened.append(name)
        else:
            assert opened.pop() == name
    assert not opened and text.startswith("\\documentclass") and text.rstrip().endswith("\\end{document}")
    for line in text.splitlines():
        parts = re.split(r"(?<!\\)\$", line)
        assert len(parts) % 2 == 1, line
        assert not re.search(r"(?<!\\)[_^#%]", "".join(parts[::2])), line


def tables(text):
    """The cells of each table, whose number per line is that of its columns."""
    found = []
    for columns, body in re.findall(r"\\begin\{tabular\}\{([lcr]+)\}(.*?)\\end\{tabular\}", text, re.DOTALL):
        lines = [[cell.strip() for cell in line.removesuffix("\\\\").split("&")]
                 for line in body.split("\n") if "&" in line]  # fmt: skip
        assert all(len(line) == len(columns) for line in lines)
        found.append(lines)
    return found


@pytest.mark.parametrize("name", ["standard_model", "seesaw_1", "su5", "two_higgs_doublets"])
def test_latex(name):
    theory = examples.named(name)
    text = write_latex(theory, name)
    check_latex(text)
    (head, *fields), (_, *conditions) = tables(text)
    assert [line[0].replace("\\_", "_") for line in fields] == [f.name for f in (*theory.scalars, *theory.fermions)]
    assert head[2:-1] == [f"${group.group}_{{{group.id}}}$" for group in theory.groups]
    assert conditions and all(line[1:] == ["$0$", "satisfied"] for line in conditions)


def test_latex_of_the_standard_model_is_what_textbooks_say():
    text = write_latex(examples.named("standard_model"))
    (_, *fields), (_, *conditions) = tables(text)
    by_name = {line[0]: line[2:] for line in fields}
    assert by_name["Q"] == ["$3$", "$2$", "$1/6$", "3"]
    assert by_name["uc"] == ["$\\overline{3}$", "$1$", "$-2/3$", "3"]
    assert by_name["L"] == ["$1$", "$2$", "$-1/2$", "3"] and by_name["ec"] == ["$1$", "$1$", "$1$", "3"]
    assert [line[0] for line in conditions] == [
        "$[SU(3)_{c}]^{3}$", "$[SU(3)_{c}]^{2}\\,U(1)_{Y}$", "$[SU(2)_{L}]^{2}\\,U(1)_{Y}$",
        "$\\mathrm{Witten}\\ SU(2)_{L}$", "$[\\mathrm{grav}]^{2}\\,U(1)_{Y}$", "$U(1)_{Y}\\,U(1)_{Y}\\,U(1)_{Y}$",
    ]  # fmt: skip


def test_latex_of_a_theory_with_anomalies():
    theory = examples.named("standard_model")
    rest = replace(theory, fermions=tuple(f for f in theory.fermions if f.name != "ec"), terms=())
    (*_, gravity, cubic) = tables(write_latex(rest))[1]
    # Without the three right-handed electrons of charge 1, the sums of Y and of Y^3 are -3.
    assert gravity[1:] == cubic[1:] == [f"${Fraction(-3)}$", "not satisfied"]


def test_files_of_a_theory_without_conditions():
    prompt, completion = prompt_of("so10", 0)
    files = make().exports({"prompt": prompt}, completion)
    assert set(files) == {"sample.png", "sarah.txt", "theory.tex"}
    assert "written for SU(N) and U(1), not for SO(10)" in files["sarah.txt"]
    check_latex(files["theory.tex"])
    (_, *fields), *rest = tables(files["theory.tex"])
    assert "$10$" in {line[2] for line in fields} and not rest and "There are none" in files["theory.tex"]


def test_files_of_an_answer():
    prompt, completion = prompt_of("seesaw_1", 2)
    files = make().exports({"prompt": prompt}, completion)
    assert set(files) == {"sample.png", "sarah.m", "theory.tex"}
    check_latex(files["theory.tex"])
    fields = [f.name for f in read_theory(files["sarah.m"]).fermions]
    assert len(fields) == len(examples.named("seesaw_1").fermions)
    in_latex = [sarah.symbol(line[0].replace("\\_", "_")) for line in tables(files["theory.tex"])[0][1:]]
    assert in_latex[-len(fields) :] == fields
    assert set(make().exports({"prompt": prompt}, "nonsense")) == {"sample.html"}
