"""Synthetic run folders of every kind: finished, still training, without evaluation, evaluation only."""

import json
import math
import struct
import zlib
from contextlib import contextmanager

from tests.support.toy import ToyTask
from trl_grpo_tasks.evaluation.samples import Evaluation, Sample
from trl_grpo_tasks.evaluation.summary import summarise

COMMAND = "train.py --task tests.support.toy --config 'my recipe.yaml'"


def png(red, side=24):
    """A PNG file: a square of one colour."""

    def chunk(kind, content):
        check = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)

    lines = (b"\0" + bytes((red, 90, 160)) * side) * side
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")


class PngTask(ToyTask):
    def render(self, row, completion):
        return png(sum(completion.encode()) % 256)


class BrokenTask(ToyTask):
    """A task whose `render` raises for completions with a c and returns None for those with a d."""

    def render(self, row, completion):
        if "c" in completion:
            raise RuntimeError("no <b>ink</b> left")
        return None if "d" in completion else super().render(row, completion)


def rows(count):
    """Rows with different prompts."""
    return [{"prompt": f"{'abcd'[i % 4]}{i}x", "letter": "abcd"[i % 4], "level": "1"} for i in range(count)]


def evaluation(name, task, completions_P_G, given=None):
    """An evaluation of these completions of `given` rows, or of rows of the toy task."""
    samples = []
    for row, completions in zip(given or rows(len(completions_P_G)), completions_P_G, strict=True):
        for text in completions:
            score = task.score(row, text)
            samples.append(Sample(row, text, len(text), score.as_dict(), score.reason, cut_off=False))
    metrics, intervals = summarise(samples, len(completions_P_G[0]))
    return Evaluation(name, metrics, samples, intervals)


def bad_and_gold(task, given):
    """Two evaluations of held-out rows of any task, of bad and of gold answers."""
    answers = {"before": task.bad, "GRPO": task.gold}
    return [evaluation(name, task, [(answer(row),) for row in given], given) for name, answer in answers.items()]


def before_and_after(task=None, count=12):
    """Two evaluations in which a third of the rows improve, a sixth get worse, and the others score the same."""
    task = task or ToyTask()
    wrong = [("x", f"{i % 7}", "bad", "y") for i in range(count)]
    right = [(row["letter"], row["letter"] * 2, row["letter"] * 3, "z") for row in rows(count)]
    first = [right[i] if i % 6 == 5 else wrong[i] for i in range(count)]
    second = [right[i] if i % 3 == 0 else wrong[i][::-1] for i in range(count)]
    return [evaluation("before", task, first), evaluation("GRPO", task, second)]


def metric_lines(steps):
    lines = []
    for step in range(1, steps + 1):
        rise = 1 - math.exp(-step / 20)
        lines.append(
            {
                "step": step, "reward": rise, "rewards/success/mean": rise / 2, "rewards/valid/mean": 1.0,
                "rewards/match/mean": rise + 0.1 * math.sin(step), "kl": 0.01 * step, "entropy": 2 - rise,
                "completions/mean_length": 5.0, "completions/max_length": 8.0,
                "completions/min_length": 1.0 + step % 2,
                "constraint/allowed_mass": 0.9 + 0.1 * rise, "groups_without_signal": 1 - rise, "beta": 0.04 / step,
                "curriculum/level": float(step > 9), "pass@8": rise, "loss": float("nan"),
            }
        )  # fmt: skip
    return lines


def write_run(folder, *, evaluations=(), steps=40, finished=True, settings=True, results="results.json"):
    """Write the files of a run with these evaluations and `steps` logged steps."""
    folder.mkdir(parents=True, exist_ok=True)
    if evaluations:
        content = {"task": "toy", "version": "1", "evaluations": [one.as_dict() for one in evaluations]}
        (folder / results).write_text(json.dumps(content))
    lines = metric_lines(steps)
    if lines:
        (folder / "training_metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        times = [{"step": n, "step_time": 2.0 + n % 3, "perf/reward_seconds": 0.01 / n} for n in range(1, steps + 1)]
        times += [{"step": steps, "train_runtime": 150.0}] if finished else []
        (folder / "performance.jsonl").write_text("".join(json.dumps(line) + "\n" for line in times))
    if settings:
        content = {
            "command": COMMAND,
            "task": {"name": "toy", "version": "1", "options": {}},
            "run": {"task": "tests.support.toy", "cold_start_steps": 0},
            "model": {"name": "tiny", "use_peft": False, "parameters": 12345},
            "machine": "cpu, fp32",
            "versions": {"trl": "1.16.0"},
            "training": {"max_steps": 40, "learning_rate": 0.001, "constrain": True},
        }
        (folder / "settings.json").write_text(json.dumps(content))
    return folder


@contextmanager
def edited(path):
    """The content of a JSON file, which is written back at the end."""
    content = json.loads(path.read_text())
    yield content
    path.write_text(json.dumps(content))
