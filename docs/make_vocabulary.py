"""Generates the tables and examples of the task pages (docs/tasks/*.md) from the code.

    python docs/make_vocabulary.py            # rewrites the pages
    python docs/make_vocabulary.py --check    # exits with 1 if a page is out of date

A page marks each generated block with two HTML comments, `<!-- generated: NAME -->` and `<!-- end -->`. This script
replaces what is between them; the rest of the page is written by hand. tests/test_task_pages.py checks that the pages
are up to date.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import yaml

import trl_grpo_tasks
from trl_grpo_tasks import get_task

RECIPES = Path(trl_grpo_tasks.__file__).parent / "recipes"
PAGES = Path(__file__).parent / "tasks"
SEED = 42
_BLOCK = re.compile(r"(<!-- generated: ([\w.]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a page is out of date")
    check = parser.parse_args(arguments).check
    outdated = []
    for page in sorted(PAGES.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        new = updated(text)
        if new != text:
            outdated.append(page.name)
            if not check:
                page.write_text(new, encoding="utf-8")
    print(f"{'out of date' if check else 'rewritten'}: {', '.join(outdated) or 'none'}")
    return int(check and bool(outdated))


def updated(text: str) -> str:
    """The text of a page with its generated blocks made again."""
    return _BLOCK.sub(lambda match: f"{match[1]}\n{BLOCKS[match[2]]().strip()}\n\n{match[3]}", text)


def block_names(text: str) -> list[str]:
    """The names of the generated blocks of a page."""
    return [match[2] for match in _BLOCK.finditer(text)]


# ---- Markdown


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(value: Any) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")


def code(value: Any) -> str:
    return f"`{value}`"


def codes(values: Iterable[Any]) -> str:
    return " ".join(map(code, values))


def fenced(text: str, language: str = "text") -> str:
    fence = "````" if "```" in text else "```"
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def compact(values: Iterable[Any]) -> str:
    """The values of a parameter in rising order, runs of whole numbers as a range: 4-8, 10."""
    found = list(values)
    if not all(isinstance(value, int) for value in found):
        return ", ".join(map(str, found))
    runs: list[list[int]] = []
    for value in sorted(found):
        if runs and runs[-1][-1] == value - 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def description(of: Any) -> str:
    """A docstring as one paragraph, in Markdown."""
    return " ".join((of.__doc__ or "").split())


def options(name: str) -> str:
    """Every option of a task with its default and what --help says."""
    rows = []
    for field in fields(get_task(name).Options):
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        rows.append((code(f"--{field.name}"), code(_shown(default)), field.metadata["help"]))
    return table(["option", "default", "meaning"], rows)


# Recipes whose results are on the results page, and what was changed there.
_MEASURED = {
    "brick/demo": "yes",
    "brick/tiny_cpu": "yes",
    "brick/pivot": "yes",
    "brick/paper": "scaled down",
    "brick/single_gpu": "with weights from a GGUF file",
    "theory/tiny_cpu": "yes",
    "theory/tiny_gpu": "yes",
    "theory/colab_t4": "memory and time only, on an H200",
    "theory/paper": "221 of its steps, and with changed options",
    "machine/tiny_cpu": "yes",
    "machine/paper": "scaled down",
    "machine/colab_t4": "memory and time only, on an H200",
    "machine/single_gpu": "with weights from a GGUF file, in batches of 8",
    "infill/tiny_cpu": "yes",
    "infill/multi_step": "with another cold start",
    "infill/single_gpu": "yes",
    "infill/paper": "scaled down",
    "prompts/tiny_cpu": "yes",
    "prompts/colab_t4": "memory and time only, on an H200",
    "prompts/paper": "scaled down",
    "prompts/single_gpu": "with weights from a GGUF file",
}
_HARDWARE = {
    "tiny_cpu": "2 CPU cores",
    "tiny_gpu": "1 GPU",
    "demo": "2 CPU cores",
    "colab_t4": "GPU with 15 GB",
    "single_gpu": "1 GPU",
    "multi_gpu": "8 GPUs",
    "machine/paper": "8 GPUs",
    "machine/authors": "8 GPUs",
}


def recipes(task: str) -> str:
    """The recipes of a task: for which hardware, with which model, and whether they were run."""
    rows = []
    for file in sorted((RECIPES / task).glob("*.yaml")):
        recipe = yaml.safe_load(file.read_text(encoding="utf-8"))
        name = f"{task}/{file.stem}"
        hardware = _HARDWARE.get(name) or _HARDWARE.get(file.stem, "see the recipe")
        model = code(recipe["model_name_or_path"]) if "model_name_or_path" in recipe else "embedded, or `--model`"
        weights = " (LoRA)" if recipe.get("use_peft") else ""
        steps = recipe.get("max_steps") or f"{recipe['num_train_epochs']} epochs"
        rows.append((code(name), hardware, model + weights, steps, _MEASURED.get(name, "no")))
    return table(["recipe", "hardware", "model", "GRPO steps", "measured"], rows)


def _shown(default: Any) -> str:
    """A default as one would type it."""
    if isinstance(default, list):
        return " ".join(map(str, default)) or "none"
    return str(default).lower() if default is None or isinstance(default, bool) else str(default)


def first_row(name: str, choose: Callable[[Any], bool] = lambda row: True, **given: Any) -> tuple[Any, Any]:
    """A task, and the first of its test rows that fits."""
    task = get_task(name, given)
    return task, next(row for row in task.dataset("test", 64, SEED) if choose(row))


def score_line(score: Any) -> str:
    parts = ", ".join(f"{name} {value:.3g}" for name, value in score.components.items())
    return f"success: {str(score.success).lower()}; total {score.total:.3g}; {parts}"


# ---- brick


def brick_example() -> str:
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


def brick_parts() -> str:
    from trl_grpo_tasks.tasks.brick.kit import KIT

    rows = []
    for part in KIT.parts:
        written = [f"{h}x{w}" for h, w in KIT.sizes if KIT.part_of[h, w] == part]
        rows.append((f"{part.short} x {part.long}", f"{part.mass_kg * 1000:g}", codes(written)))
    return table(["part (cells)", "mass in g", "sizes as written"], rows)


def brick_levels() -> str:
    from trl_grpo_tasks.tasks.brick.captions import choices
    from trl_grpo_tasks.tasks.brick.levels import LEVELS

    rows = []
    for name, level in LEVELS.items():
        requests = list(level.requests())
        held_out = sum(request.is_held_out for request in requests)
        carries = "yes" if level.grams else "no"
        rows.append((code(name), f"{level.world}", len(level.grids), carries, f"{len(requests):,}", f"{held_out:,}",
                     f"{len(choices(name)):,}"))  # fmt: skip
    header = ["level", "side of the world", "categories", "weights to carry", "requests", "of these held out"]
    return table([*header, "captions"], rows)


def brick_categories() -> str:
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


def brick_values() -> str:
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


def brick_words() -> str:
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


# ---- theory


def theory_example() -> str:
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


def theory_words() -> str:
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
    rest = table(["kind", "words", "meaning"], [(kind, codes(some), what) for kind, some, what in kinds])
    limits = (
        f"Limits: {words.MAX_GROUPS} groups, {words.MAX_VEVS} scalars with a vev, {words.MAX_MULTIPLETS} further "
        f"multiplets, {words.MAX_GENERATIONS} generations of each."
    )
    return f"The language has {len(words.VOCABULARY)} words.\n\n{structure}\n\n{rest}\n\n{limits}"


def theory_groups() -> str:
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
    "extra_u1": "the Standard Model under one more U(1) (a mixture of B-L and hypercharge), which needs neutral "
    "fermions to cancel its anomalies",
    "groups": "gauge groups, scalars with vevs and the number of multiplets; all fermions are to be found",
    "scratch": "the first few words only",
}


def theory_starts() -> str:
    from trl_grpo_tasks.tasks.theory.data import STARTS

    rows = [(code(name), _STARTS[name]) for name in STARTS]
    return table(["`--start`", "what the prompt gives"], [*rows, ("`mixed`", "all of these in turn")])


def theory_named() -> str:
    from trl_grpo_tasks.tasks.theory.examples import NAMES, named

    rows = []
    for name in NAMES:
        theory = named(name)
        groups = " x ".join(group.group for group in theory.groups)
        rows.append((code(name), groups, len(theory.fermions), len(theory.scalars)))
    return table(["theory", "gauge groups", "fermion multiplets", "scalar multiplets"], rows)


_THEORY_COMPONENTS = {
    "anomalies": "mean over all anomaly conditions: 1 where the coefficient x is exactly zero, otherwise "
    "-ln(1 + abs(x))",
    "exotics": "for each charged or coloured state outside the Standard Model that is lighter than "
    "`--threshold_gev`: minus the square of its distance from that threshold in powers of ten",
    "standard_model": "minus the share of quarks and charged leptons that are missing",
    "perturbativity": "minus the number of Yukawa couplings that are sqrt(4 pi) or larger",
    "length": "penalty for more than `--max_words` words",
    "solved": "1 for success, otherwise 0",
    "distinct": "for a success: 1 divided by how many completions of the same prompt found the same theory",
}


def theory_components() -> str:
    from trl_grpo_tasks.tasks.theory.reward import WORST

    best = {"anomalies": 1, "solved": 1, "distinct": 1}
    rows = []
    for name, weight in get_task("theory").weights.items():
        between = f"{WORST.get(name, 0):g} {'or' if name in ('length', 'solved') else 'to'} {best.get(name, 0)}"
        rows.append((code(name), f"{weight:g}", _THEORY_COMPONENTS[name], between))
    return table(["component", "weight", "value", "range"], rows)


def theory_goals() -> str:
    from trl_grpo_tasks.tasks.theory.reward import GOALS

    return table(["level", "components that count"], [(code(name), codes(some)) for name, some in GOALS.items()])


# ---- machine


def machine_example() -> str:
    from trl_grpo_tasks.tasks.machine.data import gold_machines

    task, row = first_row("machine", lambda row: row["trial"] == "car" and row["level"] == "small")
    gold = task.gold(row)
    # As recorded: what a simulation gives here depends, in its last digits, on the processor.
    metres = next(entry["score"] for entry in gold_machines()["car"]["small"] if entry["machine"] == gold)
    return "\n\n".join(
        [
            "The prompt (a chat message of the user):",
            fenced(row["prompt"][-1]["content"]),
            f"An answer that succeeds: a car that drives {metres:.1f} m. It is one line; line breaks are added here:",
            fenced(gold.replace("},{", "},\n {"), "json"),
        ]
    )


_JOINTS = {
    "": "rigid",
    "spin": "spins about its own z axis",
    "bend": "bends up and down, about its own x axis",
    "turn": "turns left and right, about its own y axis",
    "ball": "swings every way",
    "slide": "slides along its own z axis",
}


BOULDER = "36"


def machine_blocks() -> str:
    from trl_grpo_tasks.tasks.machine.blocks import BLOCKS as TYPES
    from trl_grpo_tasks.tasks.machine.blocks import PROMPT_BLOCKS

    rows = []
    for kind, block in TYPES.items():
        size = "two ends" if block.two_ended else " x ".join(f"{side:g}" for side in block.size)
        joint = "two ends" if block.two_ended else "none: it is loose" if kind == BOULDER else _JOINTS[block.joint]
        rows.append((code(kind), block.name, size, f"{block.mass:g}", len(block.faces), joint, block.drive or "-",
                     "yes" if kind in PROMPT_BLOCKS else "", block.words))  # fmt: skip
    header = ["`id`", "block", "size (x, y, z) in m", "kg", "faces", "joint to its parent", "drive", "default"]
    return table([*header, "meaning, as in the manual"], rows)


_MEASURES = {
    "distance": "metres between the start and the end position of the start block",
    "forward": "metres forward, 0 for machines that roll back",
    "throw": "highest point of the boulder times its distance, if the boulder rises 3 m",
    "over_wall": "as for `catapult`, if the boulder lands behind the wall",
    "rings": "up to ten points, shared by the rings; the closer to the middle of a ring, the more",
}


def machine_trials() -> str:
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
        rows.append((code(trial.name), trial.words, place, _MEASURES[trial.score], f"{trial.goal:g}",
                     f"{trial.seconds:g} s"))  # fmt: skip
    header = ["trial", "what the machine does", "scene", "score", "success from", "duration"]
    found = table(header, rows)
    ways = {len(trial.requests) for trial in TRIALS.values()}
    if len(ways) != 1:
        raise ValueError("trials have different numbers of wordings: say so here")
    return (
        f"{found}\n\nEach trial has {ways.pop()} wordings of its request; the last {TEST_VARIANTS} of each appear in "
        f"the test split only. For `car` they are:\n\n" + "\n".join(f"- {text}" for text in TRIALS["car"].requests)
    )


def machine_levels() -> str:
    from trl_grpo_tasks.tasks.machine.designs import LEVELS

    rows = [(code(name), f"{least} to {most}", most) for name, (least, most) in LEVELS.items()]
    return table(["level", "blocks of the gold machines", "most blocks allowed"], rows)


# ---- infill


def infill_example() -> str:
    task, row = first_row("infill", lambda row: row["schedule"] == "words")
    causal = get_task("infill", {"policy": "causal"})
    other = next(row for row in causal.dataset("test", 64, SEED) if row["schedule"] == "words")
    return "\n\n".join(
        [
            "A masked policy reads a text with mask tokens, and writes one token per mask:",
            fenced(row["prompt"]),
            fenced(task.gold(row)),
            "The filled text, which is what judges read:",
            fenced(task.filled(row, task.gold(row))),
            "A causal policy (`--policy causal`) reads the same text as a chat message, and writes a line per gap:",
            fenced(other["prompt"][-1]["content"]),
            fenced(causal.gold(other)),
        ]
    )


def infill_masking() -> str:
    from trl_grpo_tasks.tasks.infill.masking import SCHEDULES, SPAN_LENGTHS

    meaning = {
        "characters": "single characters, anywhere",
        "spans": "runs of {} to {} characters, or as `--span_lengths` says".format(*SPAN_LENGTHS),
        "words": "whole words with their punctuation",
        "ends": "the beginning of the text, its end, or both",
    }
    rows = []
    for name in SCHEDULES:
        task = get_task("infill", {"masking": [name], "policy": "causal"})
        row = next(row for row in task.dataset("test", 64, SEED) if row["level"] == "0.2")
        rows.append((code(name), meaning[name], code(row["prompt"][-1]["content"].split("\n")[1])))
    return table(["`--masking`", "gaps", "example"], rows)


def infill_corpus() -> str:
    from trl_grpo_tasks.tasks.infill.data import alphabet, cut, read_passages

    passages = read_passages(None, "text")
    parts = cut(passages, get_task("infill").options.test_fraction)
    letters = "".join(letter for letter in alphabet(passages) if letter != " ")
    rows = [
        ("passages", *(f"{len(parts[split]):,}" for split in ("train", "test"))),
        ("characters", *(f"{sum(map(len, parts[split])):,}" for split in ("train", "test"))),
    ]
    return (
        table(["built-in corpus", "train", "test"], rows)
        + f"\n\nIts alphabet has {len(letters) + 1} characters: the space and\n\n"
        + fenced(letters)
    )


# ---- prompts


def prompts_examples() -> str:
    parts = []
    for kind in _generators():
        task, row = first_row("prompts", lambda row: row["level"] == "2", generator=kind, allow_code_execution=True)
        parts.append(f"`{kind}`, level 2:\n\n{fenced(row['prompt'][-1]['content'])}\n\n{fenced(task.gold(row))}")
    return "\n\n".join(parts)


def _generators() -> Any:
    from trl_grpo_tasks.tasks.prompts.generators import GENERATORS

    return GENERATORS


_LEVELS = {
    "arithmetic": "1: one-digit sums; 2: one-digit differences; 3: two digits plus or minus one digit; "
    "4: two digits with two digits, and products; 5: two operations",
    "word_problems": "1: one step with + or -; 2: one step with * or /; 3: two steps",
    "code": "1: one expression; 2: a short function; 3: a loop or a small algorithm",
    "schema": "1: flat objects; 2: lists, choices and booleans; 3: nested objects",
}


def prompts_generators() -> str:
    rows = []
    for name, generator in _generators().items():
        rewards = ", ".join(f"{code(reward)} {weight:g}" for reward, weight in generator.rewards.items())
        rows.append((code(name), generator.levels, _LEVELS[name], rewards))
    deepest = max(generator.levels for generator in _generators().values())
    rows.append(("`mixed`", deepest, "all generators in turn, each with the levels it has", "of each generator"))
    return table(["generator", "levels", "problems by level", "rewards and weights"], rows)


def prompts_templates() -> str:
    from trl_grpo_tasks.tasks.prompts.generators import CODE_TESTS, EXERCISES, FAMILIES, WORD_PROBLEMS

    stories = table(
        ["level", "word problem", "steps"], [(n, code(text), code(steps)) for n, text, steps in WORD_PROBLEMS]
    )
    programs = table(
        ["level", "function", "what it does"],
        [(item.level, code(f"{item.name}({item.argument})"), code(item.task)) for item in EXERCISES],
    )
    shapes = table(
        ["level", "sentence", "properties"],
        [(level, code(text), codes(shape.schema["properties"])) for level, text, shape in FAMILIES],
    )
    return (
        f"Word problems (`a` and `b` are up to 99, `c` and `d` up to 9, `r` is the result of the step before):\n\n"
        f"{stories}\n\n"
        f"Programs ({len(EXERCISES)} functions; `$k`, `$m` and `$c` are drawn for each problem; {CODE_TESTS} tests "
        f"each, of which the prompt shows one):\n\n{programs}\n\n"
        f"JSON:\n\n{shapes}"
    )


_OTHERWISE = {
    "numeric": "0",
    "exact": "0",
    "tests": "the share of tests that pass",
    "json": "0.5 with other text around it, 0 if it is no JSON",
    "schema": "0.5 with other text around it, otherwise 0",
    "fields": "the share of values that are right; half of that with other text around the JSON",
    "xml": "0.5 with other text around it; for a broken document, half of the share of the text before the first "
    "error, times the share of its elements that are closed by then",
    "xml_schema": "half of the share of elements without an error; half of that with other text around the XML; 0 if "
    "it is not well-formed",
    "regex": "0",
    "tags": "half of the share of well-written tags; 0.5 if the order is wrong or there is text outside",
    "length": "falls linearly to 0 at no words or at twice the target",
    "keywords": "the share of rules that are kept",
    "novelty": "1 minus the similarity to the most similar other completion (runs of four characters)",
    "reward_model": "the model's score, for every row; not limited to 0 to 1",
    "judge": "the weighted mean of the grades, 0 for the worst; a completion without grades is not scored",
}
_ROLES = {
    "checks": "decides success",
    "rules": "decides success where no reward of the first kind is used",
    "group": "never decides success; depends on the other completions of the prompt",
    "judge": "never decides success; computed by a model",
}


def prompts_rewards() -> str:
    from trl_grpo_tasks.tasks.prompts.reward import REWARDS

    rows = []
    for name, reward in REWARDS.items():
        options = {"reward_model": "`--reward_model`", "judge": "`--judge_url`; `rubric` or `--judge_rubric`"}
        needs = options.get(name) or codes(reward.columns) or "-"
        rows.append((code(name), needs, reward.full_marks, _OTHERWISE[name], _ROLES[reward.role]))
    rows.append(("`module:function`", "-", "your function returns 1 or more", "what it returns", _ROLES["rules"]))
    return table(["reward", "column it needs", "full credit (1)", "otherwise", "role"], rows)


_COLUMNS = {
    "answer": ("text or number; a worked solution that ends in `#### 42` works too", "`numeric`, `exact`"),
    "tolerance": ("largest difference that still counts as equal", "`numeric`"),
    "tests": ("list of Python statements that raise on failure, such as `assert f(2) == 4`", "`tests`"),
    "schema": ("JSON schema, as an object or as text", "`schema`, the constraint"),
    "fields": ("the expected values of a JSON object", "`fields`"),
    "xml_schema": ("text of an XSD or RELAX NG schema that refers to no other file; needs the extra `xml`",
                   "`xml_schema`"),
    "pattern": ("regular expression for the whole answer", "`regex`, the constraint"),
    "tags": ('tag names in order, such as `["think", "answer"]`', "`tags`"),
    "target_length": ("number of words; `--target_length` sets it for all rows", "`length`"),
    "keywords": ("words that must appear", "`keywords`"),
    "forbidden": ("words that must not appear", "`keywords`"),
    "rubric": ("text, or criteria with weights and a scale ([format](#an-llm-as-a-judge)); `--judge_rubric` sets it "
               "for all rows", "`judge`"),
    "rewards": ('`{"name": weight}`, `["name", "name=weight"]` or the text `name name=weight`; `reward` works too; '
                "`--rewards` applies to rows without it", "every row"),
    "gold": ("an answer that succeeds; `answer` is used where it is missing",
             "a cold start and `trl-grpo-tasks check`; training itself does not need it"),
    "level": ("level of the row, if every row has one: sorted as numbers, or in order of appearance",
              "the curriculum"),
}  # fmt: skip


def prompts_columns() -> str:
    from trl_grpo_tasks.tasks.prompts.data import COLUMNS

    first = ("`prompt`", "text, or chat messages of which the last is the user's; `--prompt_column` renames it",
             "every row")  # fmt: skip
    return table(["column", "content", "read by"], [first, *((code(name), *_COLUMNS[name]) for name in COLUMNS)])


_PROMPTS_FILE = {
    "prompts": [
        {"prompt": "A pen costs 3 coins. What do 14 pens cost?", "answer": 42, "rewards": {"numeric": 1.0}},
        {
            "prompt": "Name a city and its country as JSON.",
            "gold": '{"city": "Oslo", "country": "Norway"}',
            "schema": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "country": {"type": "string"}},
                "required": ["city", "country"],
            },
            "rewards": ["schema"],
        },
        {
            "prompt": "Describe the sea.",
            "keywords": ["salt", "wave"],
            "target_length": 50,
            "rewards": "keywords length=0.5",
        },
    ]
}


def prompts_file() -> str:
    entries = ",\n  ".join(json.dumps(entry) for entry in _PROMPTS_FILE["prompts"])
    return fenced(f'{{"prompts": [\n  {entries}\n]}}', "json")


BLOCKS: dict[str, Callable[[], str]] = {
    "brick.example": brick_example,
    "brick.parts": brick_parts,
    "brick.levels": brick_levels,
    "brick.categories": brick_categories,
    "brick.values": brick_values,
    "brick.words": brick_words,
    "brick.recipes": lambda: recipes("brick"),
    "brick.options": lambda: options("brick"),
    "theory.example": theory_example,
    "theory.words": theory_words,
    "theory.groups": theory_groups,
    "theory.starts": theory_starts,
    "theory.named": theory_named,
    "theory.components": theory_components,
    "theory.goals": theory_goals,
    "theory.recipes": lambda: recipes("theory"),
    "theory.options": lambda: options("theory"),
    "machine.example": machine_example,
    "machine.blocks": machine_blocks,
    "machine.trials": machine_trials,
    "machine.levels": machine_levels,
    "machine.recipes": lambda: recipes("machine"),
    "machine.options": lambda: options("machine"),
    "infill.example": infill_example,
    "infill.masking": infill_masking,
    "infill.corpus": infill_corpus,
    "infill.recipes": lambda: recipes("infill"),
    "infill.options": lambda: options("infill"),
    "prompts.examples": prompts_examples,
    "prompts.rewards": prompts_rewards,
    "prompts.columns": prompts_columns,
    "prompts.file": prompts_file,
    "prompts.generators": prompts_generators,
    "prompts.templates": prompts_templates,
    "prompts.recipes": lambda: recipes("prompts"),
    "prompts.options": lambda: options("prompts"),
}


if __name__ == "__main__":
    sys.exit(main())
