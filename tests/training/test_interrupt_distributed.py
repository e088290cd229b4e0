"""A signal that reaches one of several processes (gloo) stops all of them, with a checkpoint."""

import json
import signal

import pytest

from tests.commands.test_train import metrics, words
from tests.support.forked import Processes
from trl_grpo_tasks.commands import train as run
from trl_grpo_tasks.models import checkpoints

SCRIPT = """
import json, sys, time
from pathlib import Path
from accelerate import PartialState
from tests.training.test_callbacks import Signals
from trl_grpo_tasks.commands import train as run

words, number, folder = json.loads(sys.argv[1])
make_trainer = run._make_trainer

def make_and_interrupt(*args):
    trainer = make_trainer(*args)
    if PartialState().is_last_process:
        trainer.add_callback(Signals(2, number))
    return trainer

run._make_trainer = make_and_interrupt
code = run.main(words)
Path(folder, f"status-{PartialState().process_index}.json").write_text(json.dumps(code))
PartialState().wait_for_everyone()  # the launcher ends the others as soon as one has ended
if PartialState().is_main_process:
    time.sleep(1)  # so it is killed; what it has printed must have left its buffers
sys.exit(code)
"""


@pytest.mark.exhaustive
def test_a_signal_to_one_process_stops_all(tmp_path, capsys):
    """The checkpoint is in the middle of a rollout's second pass. One process goes on from it."""
    processes, number = 2, signal.SIGTERM
    options = {"max_steps": 6, "save_steps": 100, "num_iterations": 2, "replay_size": 4, "num_generations": 2}
    options |= {"eval_before_and_after": False, "resume_from_checkpoint": "auto", "reward_workers": 1}
    options["constrain"] = True
    folder = tmp_path / "run"
    started = words(folder, **options, per_device_train_batch_size=12 // processes)
    (tmp_path / "run.py").write_text(SCRIPT)
    running = Processes(tmp_path / "run.py", [started, number, str(tmp_path)], processes)
    assert running.wait(300) == 128 + number
    out, err = running.out.read_text(), running.err.read_text()
    assert out.count("no complete checkpoint in") == 1
    assert err.count(f"stopped after step 3; {folder / 'checkpoint-3'} is complete; to resume:") == 1
    statuses = [json.loads((tmp_path / f"status-{i}.json").read_text()) for i in range(processes)]
    assert statuses == [128 + number] * processes
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-3"]
    assert checkpoints.is_complete(folder / "checkpoint-3")
    assert run.main(words(folder, **options, per_device_train_batch_size=12)) == 0
    said = f"checkpoint-3 was written by {processes} processes and is resumed by 1: rollouts under way are dropped"
    assert said in capsys.readouterr().out
    assert [line["step"] for line in metrics(folder)] == [1, 2, 3, 4, 5, 6]
