"""Generated blocks of the page of task brick: an example, parts, levels, categories and words."""

from __future__ import annotations

from collections.abc import Sequence

from .blocks import code, codes, compact, description, fenced, first_row, score_line, table


def example() -> str:
    task, row = first_row("brick", lambda row: row["loads"], brick_levels=["carry"])
    gold, bad = task.gold(row), task.bad(row)
    return "\n\n".join(
        [
            "The prompt (a chat message of the user):",
            fenced(row["prompt"][-1]["content"]),
            "An answer that succeeds (the gold answer of this row), and its score:",
            fenced(gold),
            fenced(score_line(task.score(row, gold))),
            "An answer that fails (the negative example of this row), its score and the reason:",
            fenced(bad),
            fenced(f"{score_line(task.score(row, bad))}\n{task.score(row, bad).reason}"),
        ]
    )


def parts() -> str:
    from trl_grpo_tasks.tasks.brick.kit import KIT

    rows = []
    for part in KIT.parts:
        written = [f"{h}x{w}" for h, w in KIT.sizes if KIT.part_of[h, w] == part]
        rows.append((f"{part.short} x {part.long}", f"{part.mass_kg * 1000:g}", codes(written)))
    return table(["part (cells)", "mass in g", "sizes as written"], rows)


def levels() -> str:
    from trl_grpo_tasks.tasks.brick.captions import choices
    from trl_grpo_tasks.tasks.brick.levels import LEVELS

    rows = []
    for name, level in LEVELS.items():
        requests = list(level.requests())
        captions = [request for request, _ in choices(name)]
        carries = "yes" if level.grams else "no"
        counts = [(len(few), sum(request.is_held_out for request in few)) for few in (requests, captions)]
        split = [f"{total - held_out:,} / {held_out:,}" for total, held_out in counts]
        rows.append((code(name), level.world, len(level.grids), carries, *split))
    header = ["level", "side of the world", "categories", "weights to carry", "structures: training / held out"]
    return table([*header, "captions: training / held out"], rows)


def categories() -> str:
    from trl_grpo_tasks.tasks.brick.catalogue import CATEGORIES
    from trl_grpo_tasks.tasks.brick.levels import LEVELS

    rows = []
    for name, category in CATEGORIES.items():
        levels = ", ".join(level for level, entry in LEVELS.items() if name in entry.grids)
        what = description(category.build) or NO_DOCSTRING[name]
        fine = codes(category.fine) or "-"
        support = code(category.support) if category.support else "-"
        rows.append((name, what, codes(category.main), fine, support, category.place or "-", levels))
    header = ["category", "shape", "main parameters", "fine parameters", "support", "weight", "levels"]
    return table(header, rows)


NO_DOCSTRING = {"table": "A plate on four legs `leg` thick, with a frame under it where it is wide."}


def values() -> str:
    from trl_grpo_tasks.tasks.brick.levels import LEVELS

    parts = []
    for name, level in LEVELS.items():
        rows = []
        for category, grid in level.grids.items():
            values = "; ".join(f"{parameter} {compact(values)}" for parameter, values in grid.items())
            first = next(iter(grid))  # weights depend on the first parameter
            carried_at: dict[str, list[int]] = {}
            for value, weights in level.grams.get(category, {}).items():
                if value in grid[first]:
                    carried_at.setdefault(_grams(weights), []).append(value)
            carried = "; ".join(f"{first} {compact(values)}: {grams}" for grams, values in carried_at.items())
            rows.append((category, values, carried) if level.grams else (category, values))
        header = ["category", "parameter values", *(["weights in g"] if level.grams else [])]
        parts.append(f"Level `{name}`, world of {level.world} x {level.world} x {level.world} cells:\n\n"
                     + table(header, rows))  # fmt: skip
    return "\n\n".join(parts)


def _grams(weights: Sequence[tuple[int, ...]]) -> str:
    return ", ".join(" and ".join(map(str, few)) for few in weights)


def words() -> str:
    from trl_grpo_tasks.tasks.brick.captions import CAPTION_WORDS, DETAILS, PHRASES, caption, choices

    words = [word for word in CAPTION_WORDS if not word.isdigit() and word != ","]
    named = [(code(name), "its value" if phrase == "{}" else phrase.format("N")) for name, phrase in PHRASES.items()]
    phrases = table(["parameter", "in a caption"], named)
    request = next(request for request, detail in choices("small") if detail == 1 and request.category == "table")
    examples = table(["detail", "caption"], [(n, caption("small", request, n, None)) for n in DETAILS])
    return (
        f"The same request at the three levels of detail:\n\n{examples}\n\n"
        f"How parameters are named:\n\n{phrases}\n\n"
        f"Captions use these {len(words)} words, besides numbers and commas: {', '.join(words)}."
    )
