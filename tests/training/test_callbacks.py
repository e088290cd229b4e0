"""What a person sees of a run: a short console, Ctrl-C that loses nothing, and how to go on."""

import io
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from transformers import TrainerCallback

from tests.commands.test_train import ROOT, assert_same_weights, metrics, train, words
from tests.support.training import toy_trainer
from trl_grpo_tasks.commands import interrupt, main
from trl_grpo_tasks.commands import train as run
from trl_grpo_tasks.commands.generate import describe_sample
from trl_grpo_tasks.commands.interrupt import StoppedError, exit_status, saved_when_interrupted
from trl_grpo_tasks.evaluation.samples import Sample
from trl_grpo_tasks.models import checkpoints
from trl_grpo_tasks.training.callbacks import Console, MetricsFile


@pytest.mark.exhaustive
def test_the_console_says_little_and_what_matters(tmp_path):
    """In a process of its own, as a user would see it. No bars, no warnings, no word of what is optional."""
    command = [sys.executable, str(ROOT / "train.py")]
    command += words(tmp_path / "run", cold_start_steps=3, save_total_limit=1)
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"COLUMNS": "100"})
    assert done.returncode == 0 and done.stderr == "", done.stderr
    out = [line for line in done.stdout.splitlines() if not line.startswith("[INFO] Running in WANDB")]
    assert out[0].startswith("task my_task 1, model tiny, fp32 on cpu, output in ")
    coming = "cold start of 3 steps, then GRPO for 3 steps, 8 completions per rollout, 4 per prompt"
    assert out[1] == f"{coming}; 4 held-out rows before and after"
    lines = [line for line in out if re.match(r"GRPO \d", line)]
    assert [line.split("  ")[0] for line in lines] == [f"GRPO {n}/3" for n in (1, 2, 3)]
    assert all(re.search(r"  reward \S+ .*  loss \S+  pg_loss \S+  ", line) for line in lines)
    assert sum(line.startswith("cold start ") and "/3" in line for line in out) == 3
    assert out[-1] == f"report: {tmp_path}/run/report.html" and "cold start" in done.stdout
    assert len(out) < 40


@pytest.mark.parametrize("is_there", [True, False])
def test_metrics_are_not_written_through_a_link(tmp_path, is_there):
    victim, run = tmp_path / "victim", tmp_path / "run"
    if is_there:
        victim.write_text("mine\n")
    run.mkdir()
    (run / "training_metrics.jsonl").symlink_to(victim)
    file, args = MetricsFile(), SimpleNamespace(output_dir=run)
    for step in (0, 1):  # a new run, and one that is resumed
        state = SimpleNamespace(is_world_process_zero=True, global_step=step)
        file.on_train_begin(args, state, None)
        file.on_log(args, state, None, logs={"reward": 1.0})
    assert victim.read_text() == "mine\n" if is_there else not victim.exists()
    lines = (run / "training_metrics.jsonl").read_text().splitlines()
    assert lines == ['{"step": 0, "reward": 1.0}', '{"step": 1, "reward": 1.0}']


class Terminal(io.StringIO):
    def isatty(self):
        return True


def console_after(seconds_of_steps, args, monkeypatch):
    """The console of a run of 40 steps whose first steps took so long."""
    now = iter(itertools.accumulate(seconds_of_steps))
    monkeypatch.setattr("trl_grpo_tasks.training.callbacks.time.monotonic", lambda: next(now))
    console = Console("GRPO", ("reward", "rewards/success/mean"))
    state = SimpleNamespace(is_world_process_zero=True, max_steps=40, global_step=0)
    console.on_train_begin(args, state, None)
    for state.global_step in range(1, len(seconds_of_steps) + 1):
        console.on_step_end(args, state, None)
    return console, state


@pytest.mark.parametrize("watched", [True, False])
def test_a_bar_where_somebody_watches_and_the_time_it_will_take(monkeypatch, capsys, watched):
    """Steps of 4 seconds after two that start things up; no estimate before there are some of them."""
    screen = Terminal() if watched else io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    args = SimpleNamespace(gradient_accumulation_steps=1)
    console, state = console_after([100, 30, 4, 4], args, monkeypatch)
    console.on_log(args, state, None, logs={"reward": 0.5})
    assert capsys.readouterr().out.splitlines() == ["GRPO 4/40  reward 0.5"]
    console, state = console_after([100, 30, 4, 4, 4], args, monkeypatch)
    console.on_log(args, state, None, logs={"reward": 0.5, "rewards/success/mean": 0.25, "loss": 3.0})
    console.on_log(args, state, None, logs={"loss": 3.0})
    console.on_train_end(args, state, None)
    left = "" if watched else "  (2.3 min left)"
    assert capsys.readouterr().out.splitlines() == [
        "GRPO: 4 s per step, about 2.3 min for 35 more",
        f"GRPO 5/40  reward 0.5  success 0.25{left}",
    ]
    assert ("/40 [" in screen.getvalue()) == watched


def test_an_estimate_is_of_steps_that_generate_and_of_those_that_do_not(monkeypatch, capsys):
    """Of four steps, which are two iterations over two batches, the first takes 20 seconds and the others 4."""
    args = SimpleNamespace(gradient_accumulation_steps=2, num_iterations=2, steps_per_generation=4)
    console_after([100, 4, 4, 4, 20, 4, 4], args, monkeypatch)
    assert capsys.readouterr().out == ""
    console_after([100, 4, 4, 4, 20, 4, 4, 4], args, monkeypatch)
    assert capsys.readouterr().out == "GRPO: 8 s per step, about 4.3 min for 32 more\n"


def test_everything_on_request(tmp_path, capsys):
    train(tmp_path, verbose=True, eval_before_and_after=False)
    out = capsys.readouterr().out
    assert "GRPO 1/3" not in out and "'frac_reward_zero_std'" in out


# ---- Ctrl-C


@pytest.mark.exhaustive
def test_ctrl_c_saves_the_step_and_the_run_goes_on_bit_for_bit(tmp_path, capsys):
    """The signal goes to the whole group, reward workers and all, as a terminal sends it."""
    options = {"max_steps": 12, "save_steps": 100, "logging_steps": 2, "reward_workers": 1, "beta": 0.02}
    options |= {"eval_before_and_after": False, "replay_size": 4, "num_iterations": 2}
    train(tmp_path / "whole", **options)
    command = [sys.executable, str(ROOT / "train.py"), *words(tmp_path / "stopped", **options)]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1,
                               start_new_session=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})  # fmt: skip
    for line in running.stdout:
        if line.startswith("GRPO 2/12"):
            break
    os.killpg(running.pid, signal.SIGINT)
    out, err = running.communicate(timeout=120)
    assert running.returncode == 130 and "Traceback" not in err
    assert "stopping after this step, which is saved first" in out
    step = int(re.match(r"stopped after step (\d+); ", err)[1])
    assert 2 <= step < 12 and f"{tmp_path / 'stopped' / f'checkpoint-{step}'} is complete; to resume:\n" in err
    python, script, *resume = shlex.split(err.splitlines()[-1])
    assert (python, script, resume[-1]) == ("python", "train.py", "--resume_from_checkpoint")
    assert run.main(resume) == 0
    assert metrics(tmp_path / "stopped") == metrics(tmp_path / "whole")
    assert_same_weights(tmp_path / "stopped", tmp_path / "whole")


def test_ctrl_c_twice_stops_at_once(tiny_path, tmp_path):
    trainer = toy_trainer(tiny_path, tmp_path, max_steps=4)
    trainer.add_callback(Signals(2, signal.SIGINT, signal.SIGINT))
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as caught, saved_when_interrupted(trainer):
        trainer.train()
    assert not isinstance(caught.value, StoppedError) and signal.getsignal(signal.SIGINT) is before
    assert trainer.state.global_step == 2 and not list(tmp_path.glob("checkpoint-*"))


class Signals(TrainerCallback):
    """Sends signals to its own process as a step begins."""

    def __init__(self, step, *numbers):
        self.step, self.numbers = step, numbers

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            for number in self.numbers:
                signal.raise_signal(number)


@pytest.mark.parametrize("numbers", [(signal.SIGTERM,), (signal.SIGTERM, signal.SIGTERM), (signal.SIGINT,)])
def test_a_signal_ends_training_with_a_checkpoint(tiny_path, tmp_path, numbers):
    """SIGTERM may be sent twice, by Slurm and by a launcher; it is then the same one."""
    trainer = toy_trainer(tiny_path, tmp_path, max_steps=4)
    trainer.add_callback(Signals(1, *numbers))
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(StoppedError) as caught, saved_when_interrupted(trainer):
        trainer.train()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert caught.value.step == 2 and exit_status(caught.value) == 128 + numbers[0]
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    assert checkpoints.is_complete(tmp_path / "checkpoint-2")


def test_sigterm_elsewhere_is_as_ctrl_c(tmp_path, monkeypatch, capsys):
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(run, "evaluate_model", lambda *_: signal.raise_signal(signal.SIGTERM))
    assert run.main(words(tmp_path)) == 143
    assert "stopped before the first checkpoint" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_after_the_last_step_ends_the_run(tiny_path, tmp_path):
    trainer = toy_trainer(tiny_path, tmp_path, max_steps=1)
    with pytest.raises(KeyboardInterrupt) as caught, saved_when_interrupted(trainer):
        trainer.train()
        signal.raise_signal(signal.SIGTERM)
    assert not isinstance(caught.value, StoppedError) and exit_status(caught.value) == 143


def test_what_a_launcher_repeats_is_the_same_signal(monkeypatch):
    """Ctrl-C in a terminal reaches a process and its launcher, which passes it on."""
    clock = iter([100.0, 100.2, 110.0])
    monkeypatch.setattr(interrupt, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    accelerator = SimpleNamespace(num_processes=2, is_main_process=False)
    callback = interrupt._SaveAndStop(SimpleNamespace(accelerator=accelerator))
    callback.ask(signal.SIGINT, None)
    callback.ask(signal.SIGINT, None)
    with pytest.raises(KeyboardInterrupt):
        callback.ask(signal.SIGINT, None)
    assert callback.number == signal.SIGINT


def test_the_command_that_goes_on_is_the_one_that_was_typed(monkeypatch):
    typed = ["x/train.py", "--resume_from_checkpoint", "a b/checkpoint-2", "--task", "my task", "--hub_token=hf_x"]
    monkeypatch.setattr(sys, "argv", typed)
    args = SimpleNamespace(world_size=2)
    asked = "accelerate launch train.py --task 'my task' --hub_token=... --resume_from_checkpoint"
    assert run.typed_command(args, resuming=True) == asked
    for flag in ("--resume_from_checkpoint", "--resume-from-checkpoint", "--resume-from-checkpoint=auto"):
        monkeypatch.setattr(sys, "argv", ["bin/trl-grpo-tasks", "train", flag, "--task", "a"])
        assert run.typed_command(args, resuming=True) == "trl-grpo-tasks train --task a --resume_from_checkpoint"
    monkeypatch.setattr(sys, "argv", [main.__file__, "train", "--task", "a"])  # python -m trl_grpo_tasks.commands.main
    asked = "-m trl_grpo_tasks.commands.main train --task a"
    assert run.typed_command(args) == f"accelerate launch {asked}"
    assert run.typed_command(SimpleNamespace(world_size=1)) == f"python {asked}"


# ---- what a model wrote cannot control the terminal

ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\r"


@pytest.mark.parametrize("judged", [True, False])
def test_what_is_said_of_a_sample_has_no_control_characters(judged):
    score = {"success": False, "valid": True, "info": {f"fact{ESCAPES}": ESCAPES, "n": 1.5}} if judged else None
    said = describe_sample(Sample({}, f"answer{ESCAPES}", 3, score, f"no: {ESCAPES}\n"))
    assert said.isprintable() and "no: \\x1b]0;owned\\x07\\x1b[2J\\x9b31m\\u202e\\r\\n" in said


def test_completions_that_are_printed_have_no_control_characters(tiny_path, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    trainer = toy_trainer(tiny_path, tmp_path, max_steps=1, log_completions=True)
    trainer._logs["prompt"].append([{"role": "user", "content": f"ask{ESCAPES}\nmore"}])
    trainer._logs["completion"].append(f"tell{ESCAPES}")
    trainer._logs["advantages"].append(0.0)
    for values in trainer._logs["rewards"].values():
        values.append(0.0)
    trainer.log({"loss": 0.0})
    out = capsys.readouterr().out
    assert "ask\\x1b" in out and "tell\\x1b" in out
    assert not set(ESCAPES) & {c for c in out if not c.isprintable()}
