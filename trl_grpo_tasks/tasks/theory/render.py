"""Pictures of a theory: its field content as a table (PNG and LaTeX) and its mass spectrum."""

from __future__ import annotations

import html
import io
from fractions import Fraction
from typing import Any

from ...task import Score
from .breaking import vacuum
from .groups import conjugate, irrep, reality
from .masses import Sector, fermion_sectors, scalar_sectors
from .theory import Number, Theory

_COLOURS = {1: "tab:blue", 3: "tab:red", 8: "tab:purple"}
_LOWEST_GEV = 1e-6


def content_table(theory: Theory) -> list[list[str]]:
    """Return the field content as rows of a table: a header, then one row per multiplet."""
    lines = [["field", "kind", *(f"{group.id}: {group.group}" for group in theory.groups), "copies"]]
    for scalar in theory.scalars:
        vev = "" if scalar.vev is None else f", vev {scalar.vev.value:g} GeV"
        lines.append([scalar.name, f"scalar{vev}", *_cells(theory, scalar.numbers), "1"])
    for fermion in theory.fermions:
        lines.append([fermion.name, "fermion", *_cells(theory, fermion.numbers), str(fermion.generations)])
    return lines


def rep_name(group: str, number: Number) -> str:
    """Name a representation by its dimension (3, 3bar, 24); a charge is unchanged (1/6)."""
    if isinstance(number, Fraction):
        return str(number)
    barred = not reality(group, number) and number < conjugate(group, number)
    return f"{irrep(group, number).dimension}{'bar' if barred else ''}"


def latex_table(theory: Theory) -> str:
    """Return the field content as a LaTeX table that needs no package."""
    header, *lines = content_table(theory)
    groups = [f"${group.group}_{{{latex_text(group.id)}}}$" for group in theory.groups]
    rows = [" & ".join([header[0], header[1], *groups, header[-1]])]
    for name, kind, *cells, copies in lines:
        shown = [f"$\\overline{{{cell[:-3]}}}$" if cell.endswith("bar") else f"${cell}$" for cell in cells]
        rows.append(" & ".join([latex_text(name), kind, *shown, copies]))
    columns = "ll" + "c" * len(theory.groups) + "r"
    body = " \\\\\n".join(rows[1:])
    return (
        f"\\begin{{tabular}}{{{columns}}}\n\\hline\n{rows[0]} \\\\\n\\hline\n{body} \\\\\n\\hline\n\\end{{tabular}}\n"
    )


def picture(theory: Theory, score: Score | None = None) -> bytes:
    """Return a PNG with the field content and the spectrum side by side."""
    figure_class = _figure_class()
    table = content_table(theory)
    figure = figure_class(figsize=(11, max(4.0, 0.32 * len(table) + 1)), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.2])
    left.axis("off")
    drawn = left.table(cellText=table[1:], colLabels=table[0], loc="upper center", cellLoc="center")
    drawn.auto_set_font_size(False)
    drawn.set_fontsize(8)
    drawn.auto_set_column_width(list(range(len(table[0]))))
    left_over = vacuum(theory)
    if left_over.charge is None:
        right.axis("off")
        right.text(0.5, 0.5, f"no SU(3) x U(1): {left_over.unbroken} generators are unbroken", ha="center")
    else:
        draw_spectrum(right, [*fermion_sectors(theory, left_over), *scalar_sectors(theory, left_over)])
    if score is not None:
        verdict = "success" if score.success else score.reason
        name = score.info.get("named")
        figure.suptitle(f"{name}: {verdict}" if name else verdict, fontsize=10, wrap=True)
    target = io.BytesIO()
    figure.savefig(target, format="png", dpi=90)
    return target.getvalue()


def draw_spectrum(axes: Any, sectors: list[Sector], threshold: float = 100.0) -> None:
    """Draw one column per colour and charge and one line per state; massless states are at the bottom."""
    for column, sector in enumerate(sectors):
        counts: dict[float, int] = {}
        for mass in sector.masses:
            shown = max(mass, _LOWEST_GEV)
            counts[shown] = counts.get(shown, 0) + 1
        for mass, count in counts.items():
            style = "--" if sector.kind == "scalar" else "-"
            axes.plot([column - 0.35, column + 0.35], [mass] * 2, style, color=_COLOURS[sector.colour])
            if count > 1:
                axes.text(column + 0.38, mass, f"x{count}", fontsize=7, va="center")
    axes.axhline(threshold, color="grey", linewidth=0.8, linestyle=":")
    axes.set_yscale("log")
    axes.set_ylim(_LOWEST_GEV / 2, None)
    axes.set_ylabel(f"mass in GeV (massless states at {_LOWEST_GEV:g})")
    axes.set_xticks(range(len(sectors)))
    axes.set_xticklabels([f"{s.kind}\n{s.colour}, Q={s.charge}" for s in sectors], fontsize=7)


def spectrum_picture(sectors: list[Sector], threshold: float = 100.0) -> bytes:
    """Return a PNG of the spectrum alone."""
    figure = _figure_class()(figsize=(max(4.0, 1.1 * len(sectors)), 4), layout="constrained")
    draw_spectrum(figure.subplots(), sectors, threshold)
    target = io.BytesIO()
    figure.savefig(target, format="png", dpi=90)
    return target.getvalue()


def to_html(prompt: str, completion: str, reason: str) -> str:
    """Return a text that is not a theory, with the reason, as HTML."""
    shown = completion if len(completion) < 4000 else completion[:4000] + " ..."
    return (
        f"<p>{html.escape(reason)}</p><pre style='white-space: pre-wrap'>{html.escape(prompt)}"
        f"<b>{html.escape(shown.encode(errors='replace').decode())}</b></pre>"
    )


def _cells(theory: Theory, numbers: tuple[Number, ...]) -> list[str]:
    return [rep_name(group.group, number) for group, number in zip(theory.groups, numbers, strict=True)]


def latex_text(text: str) -> str:
    """Return a text with underscores escaped; names of fields and groups have no other special characters."""
    return text.replace("_", "\\_")


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures of theories need matplotlib: pip install 'trl_grpo_tasks[theory]'") from error
    return Figure
