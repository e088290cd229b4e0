"""Makes the pictures of the README and of the documentation.

    make demo && python docs/make_pictures.py strip    # docs/images/before_after.png, from the run in outputs/demo
    python docs/make_pictures.py tasks                 # docs/images/tasks.png, from runs of the recipes
                                                       # tasks machine, theory and infill
    python docs/make_pictures.py constraints           # docs/images/constraints.png, about five minutes
    python docs/make_pictures.py playground            # docs/images/playground.png, from the run in outputs/demo; it
                                                       # needs playwright and Chromium

`strip` and `tasks` show held-out rows before and after GRPO. They are not cherry-picked: improved, worse and unchanged
rows appear in proportion, each kind at least once, each row with its median sample. `strip` frames successes in green
and failures in red.

`constraints` trains the task that `trl-grpo-tasks new` writes, from the same cold start, with the same seeds and under
the same grammar: once with the grammar in sampling and scoring, as in this package, and once in sampling only, as with
a logits processor added to TRL's trainer.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.ticker import PercentFormatter
from PIL import Image, ImageDraw, ImageFont

from trl_grpo_tasks import TaskGRPOConfig, TaskGRPOTrainer
from trl_grpo_tasks.commands.quiet import quiet_third_party_logging
from trl_grpo_tasks.commands.task_template import MyTask
from trl_grpo_tasks.models.tiny import save_tiny
from trl_grpo_tasks.report.gallery import Pair, choose, pairs, prompt_of
from trl_grpo_tasks.report.page import task_of
from trl_grpo_tasks.tasks.infill.render import picture
from trl_grpo_tasks.tasks.machine import simulate
from trl_grpo_tasks.tasks.theory.breaking import vacuum
from trl_grpo_tasks.tasks.theory.language import parse
from trl_grpo_tasks.tasks.theory.masses import fermion_sectors, scalar_sectors
from trl_grpo_tasks.tasks.theory.render import draw_spectrum
from trl_grpo_tasks.training.cold_start import cold_start
from trl_grpo_tasks.training.record import RolloutRecord

IMAGES = Path(__file__).parent / "images"
# Pixels: width and height of a picture, left margin for row names, height of a text line, gap between pictures.
SIDE, HIGH, MARGIN, LINE, GAP = 230, 207, 84, 16, 8
GREEN, RED, FRAME = "#1a7f37", "#cf222e", 4  # of a success and of a failure; pixels
SEEDS = (0, 1, 2)
BONUSES = (0.0, 0.05)
REQUEST = "a street lamp, reach 2, 6 high, pole 4 thick, with 1000 g on the top"


def strip(run_dir: str, columns: int = 5) -> None:
    task = task_of(run_dir)
    before, after = json.loads(Path(run_dir, "results.json").read_text())["evaluations"]
    shown = choose(pairs(before, after), columns)
    captions = [_wrapped(prompt_of(pair.before), 36) for pair in shown]
    sheet = Image.new("RGB", (MARGIN + columns * SIDE, 2 * HIGH + (max(map(len, captions)) + 1) * LINE + 4), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(12)
    for row, name in enumerate((before["name"], after["name"])):
        pen.text((8, row * HIGH + HIGH // 2), name, "black", font)
    for column, (pair, caption) in enumerate(zip(shown, captions, strict=True)):
        left = MARGIN + column * SIDE
        for row, sample in enumerate((pair.before, pair.after)):
            drawn = Image.open(io.BytesIO(task.render(sample["row"], sample["completion"])))
            width, height = drawn.size  # crop the text below the structure, which would be too small to read
            drawn = drawn.crop((0, 0, width, round(0.88 * height))).resize((SIDE, HIGH - 2 * FRAME))
            sheet.paste(drawn, (left, row * HIGH + 2 * FRAME))  # labels of weights stand at the upper edge
            _frame(pen, font, left, row * HIGH, sample["score"])
        successes = "success {:.0%} -> {:.0%}".format(*pair.successes)
        for line, text in enumerate([*caption, successes]):
            pen.text((left + 4, 2 * HIGH + 4 + line * LINE), text, "black", font)
    _save(sheet, "before_after.png")


def _frame(pen: ImageDraw.ImageDraw, font: Any, left: int, top: int, score: dict[str, Any]) -> None:
    """A green or red frame around a structure, and its verdict in a corner."""
    info = score["info"]
    words = "success" if score["success"] else f"wrong shape, IoU {info.get('iou', 0):.2f}"
    if not score["success"] and not info.get("stable"):
        words = "falls"
    colour = GREEN if score["success"] else RED
    pen.rectangle((left + 2, top + 2, left + SIDE - 3, top + HIGH - 3), outline=colour, width=FRAME)
    bottom = top + HIGH - 3
    pen.rectangle((left + 2, bottom - 22, left + 18 + pen.textlength(words, font), bottom), fill=colour)
    pen.text((left + 10, bottom - 18), words, "white", font)


def tasks(outputs: str = "outputs") -> None:
    """A car, the paths of all cars, the masses of a theory, filled texts: before GRPO above, after GRPO below."""
    panels = []
    for name, draw in (("machine", _cars), ("machine", _paths), ("theory", _masses), ("infill", _fills)):
        folder = Path(outputs, name)
        before, after = json.loads((folder / "results.json").read_text())["evaluations"]
        found = pairs(before, after)
        panels.append(draw(task_of(folder), found, before["metrics"], after["metrics"]))
        print(f"{name}: {len(found)} rows", flush=True)
    width = MARGIN + sum(images[0].width + GAP for images, _ in panels)
    sheet = Image.new("RGB", (width, 2 * (HIGH + GAP) + 2 * LINE + 4), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(12)
    for row, name in enumerate((before["name"], after["name"])):
        pen.text((8, row * (HIGH + GAP) + HIGH // 2), name, "black", font)
    left = MARGIN
    for images, lines in panels:
        for row, image in enumerate(images):
            sheet.paste(image, (left, row * (HIGH + GAP)))
        for line, text in enumerate(lines):
            pen.text((left + 4, 2 * (HIGH + GAP) + line * LINE), text, "black", font)
        left += images[0].width + GAP
    _save(sheet, "tasks.png")


Panel = tuple[list[Image.Image], list[str]]  # the pictures before and after, and the lines of text below them


def _cars(task: Any, found: list[Pair], before: Any, after: Any) -> Panel:
    (pair,) = choose(found, 1)
    images = []
    for sample in (pair.before, pair.after):
        drawn = Image.open(io.BytesIO(task.render(sample["row"], sample["completion"]))).convert("RGB")
        pen = ImageDraw.Draw(drawn)
        pen.rectangle((0, 0, 200, 30), drawn.getpixel((300, 5)))  # cover the text, which would be too small to read
        images.append(drawn.resize((round(HIGH * drawn.width / drawn.height), HIGH), Image.Resampling.LANCZOS))
    metres = [sample["score"]["components"]["distance"] for sample in (pair.before, pair.after)]
    return images, ["machine: a car and its path", "{:.0f} m -> {:.0f} m".format(*metres)]


def _paths(task: Any, found: list[Pair], before: Any, after: Any) -> Panel:
    paths = [
        [simulate(s["completion"], "car").path for s in samples if s["score"]["valid"]]
        for samples in zip(*((pair.before, pair.after) for pair in found), strict=True)
    ]
    far = max((abs(path[:, :2]).max() for group in paths for path in group), default=1.0)
    images = []
    for group, colour in zip(paths, ("#cf222e", "#1a7f37"), strict=True):
        figure, axes = _small_figure(2.6)
        for path in group:
            axes.plot(path[:, 1] - path[0, 1], path[:, 0] - path[0, 0], color=colour, linewidth=1)
        axes.set(xlim=(-0.2 * far, 1.05 * far), ylim=(-0.5 * far, 0.5 * far), xlabel="metres forward")
        images.append(_image(figure))
    return images, [f"the cars of {len(found)} prompts, from above",
                    f"on average {before['distance']:.1f} m -> {after['distance']:.1f} m"]  # fmt: skip


def _masses(task: Any, found: list[Pair], before: Any, after: Any) -> Panel:
    (pair,) = choose(found, 1)
    images = []
    for sample in (pair.before, pair.after):
        theory = parse(f"{sample['row']['prompt']} {sample['completion']}")
        left_over = vacuum(theory)
        figure, axes = _small_figure(3.3)
        draw_spectrum(axes, [*fermion_sectors(theory, left_over), *scalar_sectors(theory, left_over)])
        axes.set_ylabel("mass in GeV", fontsize=7)
        axes.tick_params(axis="x", labelsize=6)
        score = sample["score"]
        verdict = "success: no light exotics, no anomalies" if score["success"] else score["reason"].split(" (")[0]
        axes.set_title(verdict, fontsize=8)
        images.append(_image(figure))
    return images, ["theory: masses of its fields, massless at the bottom",
                    f"success {before['success']:.1%} -> {after['success']:.1%} of all samples"]  # fmt: skip


def _fills(task: Any, found: list[Pair], before: Any, after: Any) -> Panel:
    shown = choose(found, 4)
    images = []
    for samples in zip(*((pair.before, pair.after) for pair in shown), strict=True):
        lines = [line for s in samples for line in task.coloured(s["row"], s["completion"])]
        drawn = Image.open(io.BytesIO(picture(lines))).convert("RGB")
        images.append(drawn.resize((round(HIGH * drawn.width / drawn.height), HIGH), Image.Resampling.LANCZOS))
    return images, ["infill: gaps, from red to green by how real the judge finds them",
                    f"judge {before['judge']:.2f} -> {after['judge']:.2f} on all held-out texts"]  # fmt: skip


def _small_figure(inches: float) -> tuple[Any, Any]:
    figure, axes = plt.subplots(figsize=(inches, HIGH / 100), dpi=100, layout="constrained")
    axes.tick_params(labelsize=7)
    axes.xaxis.label.set_fontsize(7)
    return figure, axes


def _image(figure: Any) -> Image.Image:
    drawn = io.BytesIO()
    figure.savefig(drawn)
    plt.close(figure)
    return Image.open(drawn).convert("RGB")


def _wrapped(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


class SamplingOnly(TaskGRPOTrainer):
    """A trainer that uses the grammar in sampling only."""

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():  # for constraint/allowed_mass, which is measured while scoring under the masks
            super()._get_per_token_logps_and_entropies(*args, **kwargs)
        with self.scoring.under(RolloutRecord(self.mode)):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)


def constraints(steps: int = 120) -> None:
    task = MyTask()
    figure, axes = plt.subplots(1, len(BONUSES), figsize=(9, 3.2), sharey=True, layout="constrained")
    with tempfile.TemporaryDirectory() as folder:
        save_tiny(task.tiny(), f"{folder}/tiny", 0)
        start = cold_start(
            f"{folder}/tiny", task, task.dataset("train", 512, 0), f"{folder}/start", steps=150, learning_rate=1e-3,
            batch_size=32, seed=0, **_on_cpu(),
        )  # fmt: skip
        for bonus, axis in zip(BONUSES, axes, strict=True):
            for trainer_class, colour, name in (
                (TaskGRPOTrainer, "#1a7f37", "in sampling and scoring (here)"),
                (SamplingOnly, "#cf222e", "in sampling only"),
            ):
                for seed in SEEDS:
                    logs = _train(trainer_class, start, task, f"{folder}/run", steps, bonus, seed)
                    mass = [(log["step"], log["constraint/allowed_mass"]) for log in logs]
                    axis.plot(*zip(*mass, strict=True), color=colour, label=name if seed == SEEDS[0] else None)
                    print(f"entropy bonus {bonus}, grammar {name}, seed {seed}: allowed mass {mass[-1][1]:.2f}, "
                          f"reward {sum(log['reward'] for log in logs[-3:]) / 3:.2f}", flush=True)  # fmt: skip
            axis.set(title=f"entropy bonus {bonus}" if bonus else "no entropy bonus", xlabel="step")
            axis.yaxis.set_major_formatter(PercentFormatter(1))
    axes[0].set_ylabel("probability that the unmasked\nmodel gives to allowed tokens")
    axes[0].legend(title="the grammar is used", loc="lower left", fontsize=8)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=110)
    _save(Image.open(drawn), "constraints.png")


def _train(trainer_class: Any, model: str, task: MyTask, folder: str, steps: int, bonus: float, seed: int) -> Any:
    args = TaskGRPOConfig(
        output_dir=folder, max_steps=steps, constrain=True, entropy_coef=bonus, beta=0.0, learning_rate=1e-3,
        lr_scheduler_type="constant", num_generations=8, per_device_train_batch_size=64, max_completion_length=12,
        rollout="fast", reward_workers=0, train_rows=512, seed=seed, logging_steps=8, save_strategy="no",
        report_to="none", disable_tqdm=True, **_on_cpu(),
    )  # fmt: skip
    trainer = trainer_class(model, args=args, task=task)
    trainer.train()
    return [log for log in trainer.state.log_history if "reward" in log]


def _on_cpu() -> dict[str, Any]:
    return {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "dataloader_pin_memory": False}


def playground(run_dir: str) -> None:
    """The page of `play` after a request, in a headless browser."""
    from playwright.sync_api import sync_playwright

    from trl_grpo_tasks.playground.models import Models, initial_model
    from trl_grpo_tasks.playground.page import launch, make_page

    with (
        tempfile.TemporaryDirectory() as folder,
        Models(run_dir, task_of(run_dir), initial_model(run_dir), folder) as models,
        sync_playwright() as started,
    ):
        page = make_page(models)
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1280, "height": 1225})
        tab.set_default_timeout(120_000)
        tab.goto(launch(page, "127.0.0.1", None))
        tab.wait_for_selector("#verdict-after .verdict").evaluate("one => one.classList.add('earlier')")
        tab.fill("#request textarea", REQUEST)
        tab.click("#ask")
        tab.wait_for_selector("#verdict-after .verdict:not(.earlier)")
        _save(Image.open(io.BytesIO(tab.screenshot())), "playground.png")
        browser.close()
        page.close()


def _save(picture: Image.Image, name: str) -> None:
    IMAGES.mkdir(exist_ok=True)
    picture.convert("RGB").quantize(256).save(IMAGES / name, optimize=True)
    print(IMAGES / name, (IMAGES / name).stat().st_size // 1000, "kB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", choices=["strip", "tasks", "constraints", "playground"])
    parser.add_argument("--run_dir", default="outputs/demo", help="for strip and playground: the folder of a run")
    chosen = parser.parse_args()
    quiet_third_party_logging()
    of_run = {"strip": strip, "playground": playground}
    if chosen.picture in of_run:
        of_run[chosen.picture](chosen.run_dir)
    else:
        {"tasks": tasks, "constraints": constraints}[chosen.picture]()
