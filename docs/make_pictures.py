"""The pictures of the README, made again from nothing but the toolkit:

    make demo && python docs/make_pictures.py strip            # docs/images/before_after.png, from outputs/demo
    python docs/make_pictures.py constraints                   # docs/images/constraints.png, about five minutes

`strip` shows held-out rows before and after GRPO. Rows that got better, got worse and stayed are shown as often as
they are among all, each by its middle sample: nobody picked them.

`constraints` trains the task that `trl-grpo-tasks new` writes, from the same cold start, with the same seeds, under
the same grammar: once as this toolkit does it, and once with the grammar in sampling only, which is what a logits
processor added to TRL's trainer gives.
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.ticker import PercentFormatter
from PIL import Image, ImageDraw, ImageFont

from trl_grpo_tasks import TaskGRPOConfig, TaskGRPOTrainer
from trl_grpo_tasks.coldstart import cold_start
from trl_grpo_tasks.models import save_tiny
from trl_grpo_tasks.report import task_of
from trl_grpo_tasks.report.gallery import choose, pairs, prompt_of
from trl_grpo_tasks.skeleton import MyTask

IMAGES = Path(__file__).parent / "images"
SIDE, HIGH, MARGIN, LINE = 230, 207, 84, 16  # pixels of the strip: a picture, the names of the rows, a line of text
SEEDS = (0, 1, 2)
BONUSES = (0.0, 0.05)


def strip(run_dir: str, columns: int = 5) -> None:
    task = task_of(run_dir)
    before, after = json.loads(Path(run_dir, "results.json").read_text())["evaluations"]
    shown = choose(pairs(before, after), columns)
    sheet = Image.new("RGB", (MARGIN + columns * SIDE, 2 * HIGH + 3 * LINE + 4), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(12)
    for row, name in enumerate((before["name"], after["name"])):
        pen.text((8, row * HIGH + HIGH // 2), name, "black", font)
    for column, pair in enumerate(shown):
        left = MARGIN + column * SIDE
        for row, sample in enumerate((pair.before, pair.after)):
            drawn = Image.open(io.BytesIO(task.render(sample["row"], sample["completion"])))
            width, height = drawn.size  # without what is written below the structure: it could not be read here
            sheet.paste(drawn.crop((0, 0, width, round(0.9 * height))).resize((SIDE, HIGH)), (left, row * HIGH))
        successes = "success {:.0%} -> {:.0%}".format(*pair.successes)
        for line, text in enumerate([*_wrapped(prompt_of(pair.before), 36)[:2], successes]):
            pen.text((left + 4, 2 * HIGH + 4 + line * LINE), text, "black", font)
    _save(sheet, "before_after.png")


def _wrapped(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


class SamplingOnly(TaskGRPOTrainer):
    """The grammar in sampling, and nowhere else."""

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():  # for constraint/allowed_mass, which is measured while scoring under the masks
            super()._get_per_token_logps_and_entropies(*args, **kwargs)
        masks, self._masks = self._masks, None
        try:
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)
        finally:
            self._masks = masks


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


def _save(picture: Image.Image, name: str) -> None:
    IMAGES.mkdir(exist_ok=True)
    picture.convert("RGB").quantize(256).save(IMAGES / name, optimize=True)
    print(IMAGES / name, (IMAGES / name).stat().st_size // 1000, "kB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", choices=["strip", "constraints"])
    parser.add_argument("--run_dir", default="outputs/demo", help="for strip: the folder of a run")
    chosen = parser.parse_args()
    strip(chosen.run_dir) if chosen.picture == "strip" else constraints()
