"""A run folder of task brick for the playground: two untrained tiny models, before and after."""

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
