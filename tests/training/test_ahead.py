"""Generation ahead of training with a stand-in for the server; tests/vllm has a real one. Distributed: see the end."""

import json
import threading
from contextlib import ExitStack

import pytest
import torch
from requests.adapters import HTTPAdapter
from transformers import TrainerCallback
from trl.trainer.utils import RepeatSampler

from tests.support import forked, vllm_stand_in
from tests.support.exhaustive import exhaustive_but
from tests.support.observed import logged, logps_under, observe, rows_of
from tests.support.toy import ToyTask
from tests.support.toy_environment import EchoTask
from tests.support.training import config, toy_trainer
from trl_grpo_tasks.models.loading import load_tokenizer
from trl_grpo_tasks.serving import ServerError
from trl_grpo_tasks.training.extras.ahead import InOrder, batches_until, planned

SERVER = {"use_vllm": True, "vllm_mode": "server"}
UNEVEN = {"steps_per_generation": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
PROMPTS = 2  # of each rollout


@pytest.fixture
def make(tiny_path, tmp_path, monkeypatch):
    """Make a trainer with a server of its own. `trainer.seen` has its rollouts: see `observe`."""
    vllm_stand_in.install(monkeypatch)
    with ExitStack() as stack:

        def made(ahead, name="run", **options):
            tokenizer = load_tokenizer(tiny_path)
            server = stack.enter_context(vllm_stand_in.serving(monkeypatch, tiny_path, ToyTask(), tokenizer))
            options = {"vllm_server_base_url": server.url, "vllm_weights_folder": str(tmp_path / "weights")} | options
            trainer = toy_trainer(tiny_path, tmp_path / name, rollouts_ahead=ahead, **SERVER | options)
            trainer.server, trainer.seen = server, observe(trainer)
            return trainer

        yield made


def test_with_weights_that_stay_a_run_is_that_without(make):
    """The same rows, and each answer goes to its own prompts. One request per rollout: without a constraint."""

    def trained(ahead):
        trainer = make(ahead, f"run{ahead}", learning_rate=0.0, max_steps=8, num_iterations=2, **UNEVEN)
        trainer.train()
        return trainer

    plain, *ahead = map(trained, (0, 1, 2))
    assert "ahead" not in plain.extras
    for trainer in ahead:
        assert rows_of(trainer.seen) == rows_of(plain.seen) and len(plain.seen) == 2
        for ours, wanted in zip(trainer.seen, plain.seen, strict=True):
            assert ours["record"].completion_ids == wanted["record"].completion_ids
            assert ours["record"].sampling_logps == wanted["record"].sampling_logps
            assert ours["output"]["advantages"].equal(wanted["output"]["advantages"])
        assert logged(trainer, "loss") == logged(plain, "loss")


@pytest.mark.parametrize(("ahead", "options"), exhaustive_but([(2, {})], [(2, {}), (1, UNEVEN)]))
def test_log_probs_are_those_of_the_weights_that_sampled_and_importance_weights_correct_for_them(make, ahead, options):
    trainer = make(ahead, constrain=True, max_steps=8, temperature=0.8, beta=0.1, top_k=3,
                   vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_max=1.2,
                   eval_strategy="steps", eval_steps=3, eval_on_start=True, **options)  # fmt: skip
    trainer.train()
    seen = trainer.seen
    first_seen = {one["step"]: one["model"] for one in seen}
    moved = []
    for n, one in enumerate(seen):
        sampler = first_seen[seen[max(n - ahead, 0)]["step"]]
        expected = logps_under(sampler, one, trainer.temperature)
        current = logps_under(one["model"], one, trainer.temperature)
        for b, (logps, new) in enumerate(zip(expected, current, strict=True)):
            assert one["record"].sampling_logps[b] == pytest.approx(logps, abs=1e-5)
            ratios = (torch.tensor(new) - torch.tensor(logps)).exp()
            moved.append(ratios)
            found = one["output"]["importance_sampling_ratio"][b, : len(logps)]
            torch.testing.assert_close(found, ratios.clamp(max=1.2).float(), atol=1e-4, rtol=1e-4)
            old = one["output"]["old_per_token_logps"][b, : len(logps)].tolist()
            assert old == pytest.approx(new, abs=1e-4), "those of training, which the correction needs"
    moved = torch.cat(moved)
    assert (moved > 1.25).any() and (moved < 0.9).any(), "the weights moved between sampling and training"
    per_rollout = 2 if options else 1
    staleness = [float(per_rollout * min(n, ahead)) for n in range(len(seen))]
    assert logged(trainer, "rollout/staleness") == logged(trainer, "rollout/staleness_max") == staleness
    assert all(value >= 0 for value in logged(trainer, "perf/rollout_wait_seconds"))
    assert len(logged(trainer, "perf/rollout_wait_seconds")) == len(seen)


class Meeting(TrainerCallback):
    """Lets the server answer requests of the second rollout only when the first step is done, and the step end only
    when they have arrived."""

    def __init__(self, engine):
        self.arrived, self.trained, self.met = threading.Event(), threading.Event(), []
        self.generate, engine.generate = engine.generate, self.delayed
        self.engine = engine

    def delayed(self, prompts, params):
        if len(self.engine.requests) >= PROMPTS:
            self.arrived.set()
            self.met.append(self.trained.wait(60))
        return self.generate(prompts, params)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.met.append(self.arrived.wait(60))
            self.trained.set()


def test_the_next_rollout_is_generated_during_training(make):
    trainer = make(1, max_steps=3)
    meeting = Meeting(trainer.server.engine)
    trainer.add_callback(meeting)
    trainer.train()
    assert meeting.met == [True] * len(meeting.met) and len(meeting.met) >= 2


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


def test_what_is_in_flight_when_training_stops_early_is_dropped_aloud(make, capsys):
    trainer = make(2, max_steps=9)
    trainer.add_callback(StopAt(2))
    trainer.train()
    assert "2 rollouts requested ahead: dropped, because training ends" in capsys.readouterr().out
    trainer.train()  # again, from the first row
    assert rows_of(trainer.seen)[2:] == rows_of(trainer.seen)[:2]


@pytest.mark.parametrize(("ahead", "step"), exhaustive_but([(2, 3)], [(1, 2), (2, 3)]))
def test_a_resumed_run_trains_on_the_same_rows(make, tmp_path, capsys, ahead, step):
    """After a rollout, or within one. Nine steps are five rollouts, of which each epoch has three."""
    options = UNEVEN | {"max_steps": 9, "save_strategy": "steps", "save_steps": 1, "constrain": True}
    whole = make(ahead, **options)
    whole.train()
    assert len(whole.seen) == 5 and len(set(map(tuple, rows_of(whole.seen)))) > 3
    again = make(ahead, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{step}"))
    assert rows_of(again.seen) == rows_of(whole.seen)[-(-step // 2) :]
    for trainer in (whole, again):
        assert len(trainer.server.engine.requests) == PROMPTS * len(trainer.seen), "none beyond the end"
    assert "dropped" not in capsys.readouterr().out
    assert logged(again, "rollout/staleness")[-1] == 2.0 * ahead


@pytest.mark.parametrize(
    ("kind", "message"), [("refused", "400, .*no room"), ("gone", "Connection"), ("weights", "disconnected")]
)
def test_a_failure_ahead_is_raised_where_its_rollout_is_needed(make, kind, message):
    trainer = make(1, max_steps=4)
    engine, client = trainer.server.engine, trainer.vllm_generation.vllm_client
    client.session.mount("http://", HTTPAdapter())  # without TRL's retries, which take a minute
    sampled = fail(engine, "generate", 3, ValueError("no room") if kind == "refused" else OSError())
    if kind == "weights":
        fail(engine, "load_weights", 2, OSError())
    with pytest.raises(ServerError, match=f"request to the vLLM server failed .*{message}.* --resume_from_checkpoint"):
        trainer.train()
    assert len(trainer.seen) == 2
    assert len(sampled) == (2 if kind == "weights" else 3), "nothing with weights that the server has not read"


def fail(engine, name, number, error):
    """Make a method raise an error from its call of this number on. Return the list of its calls."""
    call, calls = getattr(engine, name), []

    def counted(*args):
        calls.append(args)
        if len(calls) >= number:
            raise error  # ValueError is answered with status 400; others end the connection
        return call(*args)

    setattr(engine, name, counted)
    return calls


def test_another_order_than_that_of_the_sampler_is_refused(make):
    trainer = make(1, max_steps=4, constrain=True)
    load = trainer.get_train_dataloader

    def reversed_loader():
        loader = load()
        return list(loader)[::-1]

    trainer.get_train_dataloader = reversed_loader
    with pytest.raises(RuntimeError, match="the data loader does not follow TRL's sampler; set rollouts_ahead=0"):
        trainer.train()


def test_stale_completions_are_no_reason_for_a_hint_but_wrong_ones_are(make, capsys):
    trainer = make(1, max_steps=4, constrain=True)
    trainer.train()
    assert max(logged(trainer, "sampling/logp_difference_mean")) > 0.01
    assert "hint: log-probs of the rollout" not in capsys.readouterr().out
    wrong = make(1, "wrong", max_steps=1, constrain=True)
    wrong.server.engine.load_weights = lambda weights: None
    with torch.no_grad():
        for weight in wrong.model.parameters():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(7)) * 0.3)
    wrong.train()
    assert "hint: log-probs of the rollout" in capsys.readouterr().out


# ---- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_vllm": False}, "set use_vllm=True and vllm_mode='server', or rollouts_ahead=0"),
        ({"vllm_mode": "colocate"}, "set use_vllm=True and vllm_mode='server'"),
        ({"vllm_importance_sampling_correction": False}, "set it to True, or rollouts_ahead=0"),
        ({"rollouts_ahead": 2}, "rollouts_ahead=2 needs vllm_weights_folder"),
        ({"curriculum": True}, "does not work with curriculum"),
        ({"rollouts_ahead": -1}, "rollouts_ahead=-1 must be at least 0"),
    ],
)
def test_options_that_cannot_work(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **{"rollouts_ahead": 1} | SERVER | options)


def test_conversations_are_refused_before_a_model_is_loaded(tmp_path):
    for task, options in ((EchoTask(), {}), (ToyTask(), {"repair_turns": 2, "max_completion_length": 24})):
        with pytest.raises(ValueError, match=r"several turns \(repair_turns, environments\); set it to 0"):
            toy_trainer("no model", tmp_path, task, rollouts_ahead=1, **SERVER, **options)


# ---- parts


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_plan_is_what_the_sampler_yields(shuffle):
    sampler = RepeatSampler(range(7), mini_repeat_count=2, batch_size=3, repeat_count=2, shuffle=shuffle, seed=5)
    plan = planned(sampler, 1)
    rollouts = []
    for _ in range(3):
        indexes = list(sampler)
        rollouts += [indexes[start : start + 6 : 2] for start in range(0, len(indexes), 12)]
    assert [next(plan) for _ in range(5)] == rollouts[1:] and len(rollouts) == 6


@pytest.mark.parametrize(("per_epoch", "per_step"), [(6, 1), (6, 2), (7, 2), (1, 4), (6, 4)])
def test_batches_of_steps_are_counted_as_transformers_takes_them(per_epoch, per_step):
    taken, steps = [0], 0
    for _ in range(3):
        left = per_epoch
        while left:
            taken.append(taken[-1] + min(per_step, left))
            left -= min(per_step, left)
            steps += 1
    assert [batches_until(step, per_epoch, per_step) for step in range(steps + 1)] == taken


def test_calls_are_in_order_and_end_with_the_first_that_fails():
    calls, made, gate = InOrder(), [], threading.Event()

    def call(number):
        assert threading.current_thread().daemon, "a call that never ends does not keep the process"
        gate.wait(60)
        made.append(number)
        return 12 // number

    answers = [calls.submit(lambda number=number: call(number)) for number in (3, 2, 0, 1)]
    dropped = calls.submit(lambda: call(5))
    assert dropped.cancel()
    gate.set()
    assert [answer.result(60) for answer in answers[:2]] == [4, 6]
    for answer in answers[2:]:
        with pytest.raises(ZeroDivisionError):
            answer.result(60)
    assert made == [3, 2, 0]


# ---- several processes

SCRIPT = """
import json, sys
import pytest
from tests.support import vllm_stand_in
vllm_stand_in.install(pytest.MonkeyPatch())
from tests.support.training import toy_trainer
from tests.support.observed import logged, observe, rows_of
model, output_dir, options = json.loads(sys.argv[1])
trainer = toy_trainer(model, output_dir, constrain=True, max_steps=5, per_device_train_batch_size=4, rollouts_ahead=1,
                      **options)
trainer.seen = observe(trainer)
trainer.train()
ids = [one["record"].completion_ids for one in trainer.seen]
found = {"process": trainer.accelerator.process_index, "rows": rows_of(trainer.seen), "ids": ids,
         "staleness": logged(trainer, "rollout/staleness"), "ratio": logged(trainer, "sampling/logp_difference_max")}
print("\\n" + json.dumps(found), flush=True)
"""


def test_two_processes_share_one_plan(tiny_path, tmp_path, monkeypatch):
    """A group of four completions is that of one process."""
    vllm_stand_in.install(monkeypatch)
    with vllm_stand_in.serving(monkeypatch, tiny_path, ToyTask(), load_tokenizer(tiny_path)) as server:
        options = SERVER | {"vllm_server_base_url": server.url, "vllm_weights_folder": str(tmp_path / "weights")}
        options |= {"eval_strategy": "steps", "eval_steps": 2}
        out, _ = forked.launch(SCRIPT, 2, [tiny_path, str(tmp_path / "run"), options], tmp_path / "run", timeout=100)
        prompts = [tuple(prompt) for prompt, params in server.engine.requests]
    found = [json.loads(line) for line in out.splitlines() if line.startswith('{"process"')]
    one, other = sorted(found, key=lambda each: each["process"])
    assert one["staleness"] == [0.0, 1.0, 1.0, 1.0, 1.0] and other["staleness"] == []
    sampler = RepeatSampler(range(6), mini_repeat_count=4, batch_size=2, seed=42)
    rows = [row["prompt"] for row in ToyTask().dataset("train", 6, 0)]
    order = [rows[i] for i in (*sampler, *sampler)]
    order = [order[start : start + 8] for start in range(0, 40, 8)]
    assert [mine + theirs for mine, theirs in zip(one["rows"], other["rows"], strict=True)] == order
    assert one["ratio"][0] < 1e-5 and one["ratio"][-1] > 1e-3
    assert len(prompts) == 5 * PROMPTS + 2 * 6, "of five rollouts and two evaluations"
