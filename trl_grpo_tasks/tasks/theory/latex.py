"""Export of theories to LaTeX: a document without packages, with the field content and the anomaly conditions."""

from __future__ import annotations

from .anomalies import anomalies
from .render import latex_table, latex_text
from .theory import Theory


def write_latex(theory: Theory, name: str = "Theory") -> str:
    """Return the text of the document. Conditions that are not satisfied are marked."""
    groups = {group.id: f"{group.group}_{{{latex_text(group.id)}}}" for group in theory.groups}
    rows = [
        f"${_condition(condition, groups)}$ & ${value}$ & {'not satisfied' if value else 'satisfied'} \\\\"
        for condition, value in anomalies(theory).items()
    ]
    conditions = ["There are none: these groups have neither cubic nor global anomalies."]
    if rows:
        conditions = [
            "Each coefficient must vanish. Mixed ones are sums of index times charge.",
            "",
            "\\medskip\\noindent",
            "\\begin{tabular}{lrl}",
            "\\hline",
            "condition & coefficient & \\\\",
            "\\hline",
            *rows,
            "\\hline",
            "\\end{tabular}",
        ]
    return "\n".join(
        [
            "\\documentclass{article}",
            "\\begin{document}",
            f"\\section*{{{latex_text(name)}}}",
            "\\subsection*{Fields}",
            "All fermions are left-handed Weyl fermions.",
            "",
            "\\medskip\\noindent",
            latex_table(theory).rstrip(),
            "\\subsection*{Anomaly conditions}",
            *conditions,
            "\\end{document}",
            "",
        ]
    )


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
