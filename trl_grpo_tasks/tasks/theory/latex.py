"""Export of theories to LaTeX: a document without packages, with the field content and the anomaly conditions."""

from __future__ import annotations

from .anomalies import anomalies
from .render import content_table
from .theory import Theory


def write_latex(theory: Theory, name: str = "Theory") -> str:
    """Return the text of the document. Conditions that are not satisfied are marked."""
    groups = {group.id: f"{group.group}_{{{_escaped(group.id)}}}" for group in theory.groups}
    rows = [
        [f"${_condition(condition, groups)}$", f"${value}$", "not satisfied" if value else "satisfied"]
        for condition, value in anomalies(theory).items()
    ]
    conditions = "There are none: these groups have neither cubic nor global anomalies."
    if rows:
        table = _table("lrl", ["condition", "coefficient", ""], rows)
        conditions = f"Each coefficient must vanish. Mixed ones are sums of index times charge.\n\n{table}"
    return f"""\\documentclass{{article}}
\\begin{{document}}
\\section*{{{_escaped(name)}}}
\\subsection*{{Fields}}
All fermions are left-handed Weyl fermions.

{_field_table(theory)}
\\subsection*{{Anomaly conditions}}
{conditions}
\\end{{document}}
"""


def _field_table(theory: Theory) -> str:
    header, *lines = content_table(theory)
    groups = [f"${group.group}_{{{_escaped(group.id)}}}$" for group in theory.groups]
    rows = []
    for name, kind, *cells, copies in lines:
        shown = [f"$\\overline{{{cell[:-3]}}}$" if cell.endswith("bar") else f"${cell}$" for cell in cells]
        rows.append([_escaped(name), kind, *shown, copies])
    return _table("ll" + "c" * len(groups) + "r", [header[0], header[1], *groups, header[-1]], rows)


def _table(columns: str, header: list[str], rows: list[list[str]]) -> str:
    head, *body = (" & ".join(row).rstrip() + " \\\\" for row in (header, *rows))
    lines = ["\\hline", head, "\\hline", *body, "\\hline", "\\end{tabular}"]
    return "\n".join(["\\medskip\\noindent", f"\\begin{{tabular}}{{{columns}}}", *lines])


def _escaped(text: str) -> str:
    """Return a text with underscores escaped; names of fields and groups have no other special characters."""
    return text.replace("_", "\\_")


def _condition(name: str, groups: dict[str, str]) -> str:
    """Return the formula of a condition of `anomalies`, such as c^2*Y, grav^2*Y or witten:L.

    >>> _condition("c^2*Y", {"c": "SU(3)_{c}", "Y": "U(1)_{Y}"})
    '[SU(3)_{c}]^{2}\\\\,U(1)_{Y}'
    """
    if name.startswith("witten:"):
        return f"\\mathrm{{Witten}}\\ {groups[name.removeprefix('witten:')]}"
    factors = []
    for factor in name.split("*"):
        id, _, power = factor.partition("^")
        shown = "\\mathrm{grav}" if id == "grav" else groups[id]
        factors.append(f"[{shown}]^{{{power}}}" if power else shown)
    return "\\,".join(factors)
