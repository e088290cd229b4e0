"""Pictures of a theory: its field content as a table and its mass spectrum."""

from __future__ import annotations

import html
import io
import math
from collections import Counter
from typing import Any

from ...task import Score
from .breaking import vacuum
from .groups import irrep, is_barred
from .masses import Sector, fermion_sectors, scalar_sectors
from .theory import Number, Theory

_COLOURS = {1: "tab:blue", 3: "tab:red", 8: "tab:purple"}


def content_table(theory: Theory) -> list[list[str]]:
    """Return the field content as rows of a table: a header, then one row per multiplet."""
    lines = [["field", "kind", *(f"{group.id}: {group.group}" for group in theory.groups), "copies"]]
    for scalar in theory.scalars:
        vev = "" if scalar.vev is None else f", vev {scalar.vev.value:g} GeV"
        lines.append([scalar.name, f"scalar{vev}", *_cells(theory, scalar.numbers), "1"])
    for fermion in theory.fermions:
        lines.append([fermion.name, "fermion", *_cells(theory, fermion.numbers), str(fermion.generations)])
    return lines


def picture(theory: Theory, score: Score | None = None) -> bytes:
    """Return a PNG with the field content and the spectrum side by side."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures of theories need matplotlib: pip install 'trl_grpo_tasks[theory]'") from error
    table = content_table(theory)
    figure = Figure(figsize=(11, max(4.0, 0.32 * len(table) + 1)), layout="constrained")
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
    """Draw one column per colour and charge and one line per mass, with its value in GeV.

    Massless states have a line of their own below the others.
    """
    masses = [mass for sector in sectors for mass in sector.masses if mass > 0]
    lowest, highest = min([threshold, *masses]), max([threshold, *masses])
    decades = math.log10(highest / lowest) + 1
    massless = lowest / 10 ** (0.12 * decades)
    for column, sector in enumerate(sectors):
        style = "--" if sector.kind == "scalar" else "-"
        labelled = -math.inf  # power of ten of the label below
        values = Counter(f"{mass:.0f}" if 1e3 <= mass < 1e5 else f"{mass:.3g}" for mass in sector.masses)
        for value, count in values.items():  # lightest first
            mass = float(value) or massless
            axes.plot([column - 0.42, column - 0.08], [mass] * 2, style, color=_COLOURS[sector.colour])
            if math.log10(mass) - labelled > 0.025 * decades:  # labels that would overlap are left out
                axes.text(column - 0.05, mass, value + (f" x{count}" if count > 1 else ""), fontsize=6, va="center")
                labelled = math.log10(mass)
    axes.axhline(threshold, color="grey", linewidth=0.8, linestyle=":")
    axes.set_yscale("log")
    axes.set_ylim(massless / 10 ** (0.06 * decades), highest * 10 ** (0.06 * decades))
    step = max(1, math.ceil(decades / 10))
    powers = range(math.ceil(math.log10(lowest)), math.floor(math.log10(highest)) + 1, step)
    ticks = {massless: "massless"} if any(sector.massless for sector in sectors) else {}
    ticks |= {10.0**power: f"$10^{{{power}}}$" for power in powers}
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.minorticks_off()
    axes.set_ylabel("mass in GeV")
    axes.set_xlim(-0.6, len(sectors) - 0.4)
    axes.set_xticks(range(len(sectors)))
    axes.set_xticklabels([f"{s.kind}\n{s.colour}, Q={s.charge}" for s in sectors], fontsize=7)


def to_html(prompt: str, completion: str, reason: str) -> str:
    """Return a text that is not a theory, with the reason, as HTML."""
    shown = completion if len(completion) < 4000 else completion[:4000] + " ..."
    return (
        f"<p>{html.escape(reason)}</p><pre style='white-space: pre-wrap'>{html.escape(prompt)}"
        f"<b>{html.escape(shown.encode(errors='replace').decode())}</b></pre>"
    )


def _cells(theory: Theory, numbers: tuple[Number, ...]) -> list[str]:
    """Name representations by their dimensions (3, 3bar, 24); charges are unchanged (1/6)."""
    pairs = [(group.group, number) for group, number in zip(theory.groups, numbers, strict=True)]
    return [
        f"{irrep(group, n).dimension}{'bar' * is_barred(group, n)}" if isinstance(n, tuple) else str(n)
        for group, n in pairs
    ]
