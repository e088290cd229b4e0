"""Generated blocks of the page of task brick: an example, parts, levels, categories and captions."""

from __future__ import annotations

from .blocks import code, codes, fenced, first_row, score_line, table


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
    from trl_grpo_tasks.tasks.brick.data.captions import choices
    from trl_grpo_tasks.tasks.brick.data.catalogue import LEVELS

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
    from trl_grpo_tasks.tasks.brick.data.catalogue import LEVELS

    levels_with: dict[tuple[str, ...], list[str]] = {}
    for name, level in LEVELS.items():
        levels_with.setdefault(tuple(sorted(level.grids)), []).append(name)
    return table(["levels", "categories"], [(codes(names), ", ".join(some)) for some, names in levels_with.items()])


def captions() -> str:
    from trl_grpo_tasks.tasks.brick.data.captions import DETAILS, caption, choices

    request = next(request for request, detail in choices("small") if detail == 1 and request.category == "table")
    return table(["detail", "caption"], [(n, caption("small", request, n, None)) for n in DETAILS])
