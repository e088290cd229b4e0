"""An evaluation shared by several processes (gloo) gives the same samples as a single process, bit for bit."""

import json
from pathlib import Path

from tests.evaluation.test_evaluate import ROWS, TASK
from tests.support.forked import launch
from trl_grpo_tasks.evaluation.evaluate import KeptSamples, evaluate
from trl_grpo_tasks.models.loading import load_model, load_tokenizer
from trl_grpo_tasks.rewards.executor import RewardExecutor

OPTIONS = {"num_samples": 4, "max_completion_length": 5, "batch_size": 5, "seed": 3}

# Evaluates 24 samples in batches of 5, and then resumes from a file with 10 of them, so that 14 are left.
SCRIPT = """
import json, sys
from pathlib import Path
from accelerate import PartialState
from tests.evaluation.test_evaluate_distributed import evaluated
model, folder = json.loads(sys.argv[1])
state = PartialState(cpu=True)
for name, kept in (("anew", None), ("kept", folder + "/samples.jsonl")):
    evaluation, written = evaluated(model, kept)
    Path(folder, f"{name}-{state.process_index}.json").write_text(json.dumps([evaluation.as_dict(), written]))
"""


def evaluated(model_path, kept=None):
    """Evaluate the toy task; return the evaluation and the number of completions that this process scored."""
    written = []

    class Counting(RewardExecutor):
        def submit(self, rows, completions):
            written.append(len(completions))
            return super().submit(rows, completions)

    model, tokenizer = load_model(model_path), load_tokenizer(model_path)
    with Counting(TASK) as executor:
        kept = None if kept is None else KeptSamples(Path(kept), {"seed": 3})
        return evaluate("a", model, tokenizer, TASK, ROWS, executor=executor, kept=kept, **OPTIONS), sum(written)


def timeless(evaluation):
    return evaluation | {"metrics": {k: v for k, v in evaluation["metrics"].items() if k != "seconds"}}


def test_processes_share_the_rows_and_change_nothing(tiny_path, tmp_path):
    processes = 3
    file = tmp_path / "samples.jsonl"
    whole, written = evaluated(tiny_path, file)
    assert written == 24
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:10]))  # two batches of a single process, from which several processes resume
    launch(SCRIPT, processes, [tiny_path, str(tmp_path)], tmp_path / "launched")
    for name, total in (("anew", 24), ("kept", 14)):
        done = [json.loads((tmp_path / f"{name}-{i}.json").read_text()) for i in range(processes)]
        assert sum(count for _, count in done) == total and all(4 <= count < total for _, count in done)
        for evaluation, _ in done:
            assert timeless(evaluation) == timeless(json.loads(json.dumps(whole.as_dict())))
    assert len(file.read_text().splitlines()) == 24
