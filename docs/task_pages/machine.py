"""Generated blocks of the page of task machine: an example, blocks, trials and levels."""

from __future__ import annotations

from .blocks import code, fenced, first_row, table


def example() -> str:
    from trl_grpo_tasks.tasks.machine.data import gold_machines

    task, row = first_row("machine", lambda row: row["trial"] == "car" and row["level"] == "small")
    gold = task.gold(row)
    # As recorded: what a simulation gives here depends, in its last digits, on the processor.
    metres = next(known.score for known in gold_machines()["car"] if known.machine == gold)
    return "\n\n".join(
        [
            "The prompt (a chat message of the user):",
            fenced(row["prompt"][-1]["content"]),
            f"An answer that succeeds: a car that gets {metres:.1f} m away. It is one line; breaks are added here:",
            fenced(gold.replace("},{", "},\n {"), "json"),
        ]
    )


def blocks() -> str:
    from trl_grpo_tasks.tasks.machine.blocks import BLOCKS as TYPES
    from trl_grpo_tasks.tasks.machine.blocks import PROMPT_BLOCKS

    rows = [
        (code(kind), block.name, f"{block.mass:g}", "yes" if kind in PROMPT_BLOCKS else "", block.words)
        for kind, block in TYPES.items()
    ]
    return table(["`id`", "block", "kg", "default", "meaning, as in the manual"], rows)


_MEASURES = {
    "distance": "metres between the start and the end position of the start block",
    "forward": "metres forward, 0 for machines that roll back",
    "throw": "highest point of the boulder times its distance, if the boulder rises 3 m",
    "over_wall": "as for `catapult`, if the boulder lands behind the wall",
    "rings": "up to ten points, shared by the rings; the closer to the middle of a ring, the more",
}


def trials() -> str:
    from trl_grpo_tasks.tasks.machine.prompts import TEST_VARIANTS
    from trl_grpo_tasks.tasks.machine.trials import TRIALS

    rows = []
    for trial in TRIALS.values():
        scene = trial.scene
        place = "flat ground"
        if scene.bumps:
            place = f"{len(scene.bumps)} bumps, the highest {max(height for _, height in scene.bumps):g} m"
        elif scene.slope:
            place = f"slope of {scene.slope:g} degrees"
        elif scene.wall:
            place = f"wall {scene.wall[1]:g} m high at {scene.wall[0]:g} m"
        elif scene.rings:
            place = "; ".join(f"ring at {at:g} m, {height:g} m high, radius {radius:g} m" for at, height, radius in
                              scene.rings)  # fmt: skip
        rows.append((code(trial.name), trial.words, place, _MEASURES[trial.score],
                     f"{min(trial.goals):g} to {max(trial.goals):g}", f"{trial.seconds:g} s"))  # fmt: skip
    header = ["trial", "what the machine does", "scene", "score", "demanded scores", "duration"]
    ways = {len(trial.requests) for trial in TRIALS.values()}
    if len(ways) != 1:
        raise ValueError("trials have different numbers of wordings: say so here")
    return (
        f"{table(header, rows)}\n\nEach trial has {ways.pop()} wordings of its request, such as "
        f"*{TRIALS['car'].requests[0]}* The last {TEST_VARIANTS} of each appear in the test split only."
    )


def levels() -> str:
    from trl_grpo_tasks.tasks.machine.data import LEAST_BLOCKS
    from trl_grpo_tasks.tasks.machine.designs import LEVELS

    rows = [(code(name), f"{max(least, LEAST_BLOCKS)} to {most}") for name, (least, most) in LEVELS.items()]
    return table(["level", "most blocks allowed"], rows)


def requests() -> str:
    from trl_grpo_tasks.registry import get_task
    from trl_grpo_tasks.tasks.machine.data import gold_machines
    from trl_grpo_tasks.tasks.machine.trials import TRIALS

    rows = []
    for name in TRIALS:
        task = get_task("machine", {"trials": [name]})
        splits = [len({task.request(row) for row in task.dataset(split, None, 0)}) for split in ("train", "test")]
        rows.append((code(name), *splits, len(gold_machines()[name])))
    return table(["trial", "training requests", "test requests", "gold machines"], rows)
