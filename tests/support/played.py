"""Run folders for the playground: brick with two untrained tiny models, before and after; infill with one."""

import itertools
import json
from pathlib import Path

from trl_grpo_tasks.models.tiny import save_tiny
from trl_grpo_tasks.registry import get_task

MOST_TOKENS = 48


def save_run(folder, **training):
    """Write the folder; the models differ by their seeds."""
    folder = Path(folder)
    spec = get_task("brick").tiny()
    save_tiny(spec, folder, seed=1)
    save_tiny(spec, folder / "cold_start", seed=2)
    settings = {
        "command": "train.py --output_dir /home/somebody/secret",
        "run": {"task": "brick"},
        "task": {"name": "brick", "options": {}},
        "model": {"name": "tiny"},
        "training": {"max_completion_length": MOST_TOKENS, "temperature": 0.9, **training},
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    (folder / "training_args.bin").write_bytes(b"")
    return str(folder)


def save_infill_run(folder):
    """Write the folder of a run of task infill, with an untrained model and two small judges."""
    folder = Path(folder)
    options = {"corpus": str(folder / "corpus.txt"), "text_length": 16, "judge_width": 16, "tiny_width": 16}
    options |= {"judge_steps": 150, "tiny_layers": 1, "tiny_heads": 2, "judges_folder": str(folder / "judges")}
    folder.mkdir()
    words = (("old", "red", "big"), ("cat", "hat", "mat"), ("hill", "mill"))
    texts = ("the {} {} of the {}".format(*chosen) for chosen in itertools.product(*words))
    (folder / "corpus.txt").write_text("\n\n".join(texts))
    task = get_task("infill", options)
    task.prepare(0, lambda *said: None)
    save_tiny(task.tiny(), folder / "run", seed=1)
    settings = {"run": {"task": "infill"}, "task": {"name": "infill", "options": options}, "model": {"name": "tiny"}}
    (folder / "run" / "settings.json").write_text(json.dumps(settings))
    (folder / "run" / "training_args.bin").write_bytes(b"")
    return str(folder / "run")
