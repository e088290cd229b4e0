"""The playground of a model as a Hugging Face Space, written by `trl-grpo-tasks play --space`."""

import os
import tempfile
from pathlib import Path
from typing import Any

os.chdir(Path(__file__).parent)

from trl_grpo_tasks.playground.models import Models  # noqa: E402 - the package lies beside this file
from trl_grpo_tasks.playground.page import launch, make_page  # noqa: E402
from trl_grpo_tasks.registry import get_task  # noqa: E402
from trl_grpo_tasks.training.repair import with_repair_of  # noqa: E402

SPEC = "SPEC"
OPTIONS: dict[str, Any] = {}
MODEL = "MODEL"  # a folder beside this file, or an id on the Hub
BEFORE: str | None = None  # the model before training
SETTINGS: dict[str, Any] = {}  # of the run, as far as they decide how answers are sampled
SAMPLING: dict[str, Any] = {}

if __name__ == "__main__":  # not in the reward workers, which import this file
    TASK = with_repair_of(get_task(SPEC, OPTIONS), SETTINGS)
    with tempfile.TemporaryDirectory() as folder, Models(MODEL, TASK, BEFORE, folder, **SAMPLING) as models:
        page = make_page(models)
        launch(page, host=None, port=None)  # Spaces set both in the environment
        page.block_thread()
