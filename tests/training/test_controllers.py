"""Adaptive KL, replay, curriculum, moving references: formulas and what they do to a run."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.support.toy import ToyTask
from tests.support.training import toy_trainer
from tests.training.test_resampling import CORRECTED, PER_SEQUENCE, make
from trl_grpo_tasks.training.callbacks import Hints
from trl_grpo_tasks.training.extras.adaptive_kl import AdaptiveKL
from trl_grpo_tasks.training.extras.curriculum import Curriculum
from trl_grpo_tasks.training.extras.moving_reference import MovingReference, average_product
from trl_grpo_tasks.training.extras.replay import ReplayBuffer, probabilities_and_weights
from trl_grpo_tasks.training.groups import StoredGroup

# ---- adaptive KL


@pytest.mark.parametrize(("kl", "exponential"), [(0.1, 0.1012882), (0.055, 0.1006420), (0.0, 0.0987282)])
def test_adaptive_kl_vectors(kl, exponential):
    """The factor is exp(x); the published rule has 1 + x, which for small batches is the same up to x ** 2 / 2."""
    controller = AdaptiveKL(0.1, target=0.05)
    controller.observe(kl)
    assert controller.update(64) == pytest.approx(exponential, abs=1e-7)
    assert controller.update(64) == pytest.approx(exponential, abs=1e-7)  # nothing new was measured


def test_a_large_batch_changes_beta_by_a_fifth_at_most():
    """The linear rule has a negative factor for n > 5 * horizon, which threw beta down to its floor."""
    controller = AdaptiveKL(0.04, target=0.05)
    for kl, n, beta in ((0.0, 1000, 0.8187308), (1.0, 8192, 1.0), (1.0, 10**6, 1 / 0.8187308)):
        controller.observe(kl)
        assert controller.update(n) == pytest.approx(0.04 * beta), "a step up undoes a step down"


def test_beta_follows_the_measured_kl(tiny_path, tmp_path):
    trainer = toy_trainer(tiny_path, tmp_path, beta=0.1, kl_target=1e-6, max_steps=4)
    trainer.train()
    betas = [line["beta"] for line in trainer.state.log_history if "beta" in line]
    # After the first step there is no divergence yet, so beta falls by a factor of exp(0.2 * 8 / 1000); then it rises.
    factor = 1.0016013
    assert betas == pytest.approx([0.1 / factor, 0.1, 0.1 * factor])
    assert trainer.beta == betas[-1]


# ---- replay


def test_replay_vectors():
    probabilities, weights = probabilities_and_weights([0.51, 2.01, 0.01, 1.01], 0.6, 0.4)
    assert probabilities == pytest.approx([0.205, 0.4668, 0.0194, 0.3089], abs=1e-4)
    assert weights == pytest.approx([0.3892, 0.28, 1, 0.3303], abs=1e-4)


def stored(step, priority=1.0):
    logps = {"old_per_token_logps": [torch.zeros(1)]}
    return StoredGroup("{}", torch.tensor([1]), [torch.tensor([2])], logps, torch.zeros(1), priority, step)


def test_replay_drops_the_old_and_draws_without_repetition():
    buffer = ReplayBuffer(capacity=3, max_age=5)
    for step in range(5):
        buffer.add(stored(step))
    assert len(buffer) == 3
    buffer.drop_older(8)
    assert sorted(group.step for group, _ in buffer.sample(10)) == [3, 4]
    assert ReplayBuffer(3, 5).sample(2) == []


@pytest.mark.parametrize(
    "rollout",
    [
        {"advantages": torch.zeros(2, 3), "old_per_token_logps": 0},  # with gamma
        {"advantages": torch.zeros(2), "old_per_token_logps": 0, "mask_numbers": 0},
        {"advantages": torch.zeros(2), "old_per_token_logps": 0, "importance_sampling_ratio": 0},
    ],
    ids=lambda rollout: list(rollout)[-1],
)
def test_groups_are_dropped_if_a_run_is_resumed_with_other_options(rollout):
    buffer = ReplayBuffer(capacity=3, max_age=5)
    buffer.add(stored(0))
    buffer.drop_unlike({"advantages": torch.zeros(2), "old_per_token_logps": 0})
    assert len(buffer) == 1
    buffer.drop_unlike(rollout)
    assert len(buffer) == 0


def test_replay_prefers_large_advantages_and_resumes():
    buffer = ReplayBuffer(capacity=2, max_age=5, alpha=1.0)
    buffer.add(stored(0, 0.9))
    buffer.add(stored(1, 0.1))
    draws = [buffer.sample(1)[0][0].step for _ in range(400)]
    assert 320 < draws.count(0) < 395
    again = ReplayBuffer(capacity=2, max_age=5, alpha=1.0)
    again.load_state_dict(buffer.state_dict())
    assert [buffer.sample(1)[0][0].step for _ in range(20)] == [again.sample(1)[0][0].step for _ in range(20)]


def test_a_fraction_of_a_group_is_carried_over_and_resumed():
    """One process with one group that never has signal: of 12 rollouts a quarter is replayed, also across a resume."""
    buffer, again = ReplayBuffer(4, 5), ReplayBuffer(4, 5)
    replaced = []
    for _ in range(6):
        replaced.append(len(buffer.allot([True], [4], 0.25)))
    again.load_state_dict(buffer.state_dict())
    for _ in range(6):
        replaced.append(len(again.allot([True], [4], 0.25)))
    assert replaced == [0, 0, 0, 1] * 3
    tenths = ReplayBuffer(4, 5)
    assert sum(len(tenths.allot([True], [4], 0.1)) for _ in range(100)) == 10, "rounding must not lose a group"


def test_the_processes_share_what_may_be_replaced():
    """Four processes with two groups each, half of which may be replaced; process 2 has nothing stored."""
    buffer = ReplayBuffer(4, 5)
    is_empty = [True, True, False, True, True, True, True, True]
    rounds = [buffer.allot(is_empty, [9, 9, 0, 1], 0.5) for _ in range(4)]
    assert all(len(set(chosen)) == 4 and {4, 5, 2}.isdisjoint(chosen) for chosen in rounds)
    assert all(len({6, 7} & set(chosen)) == 1 for chosen in rounds), "process 3 has one group to offer"
    assert buffer.allot([False] * 8, [9] * 4, 0.5) == []
    assert len(buffer.allot([True] * 8, [9] * 4, 0.5)) == 4, "what could not be used does not pile up"


def test_replay_buffers_share_out_what_another_number_of_them_held():
    held = [ReplayBuffer(capacity=4, max_age=9), ReplayBuffer(capacity=4, max_age=9)]
    for step in range(7):
        held[step % 2].add(stored(step, 0.5))
    states = [buffer.state_dict() for buffer in held]
    for count in (1, 3):
        steps = []
        for index in range(count):
            buffer = ReplayBuffer(capacity=7, max_age=9, seed=index)
            buffer.load_state_dict(buffer.share_out(states, index, count))
            steps.append([group["step"] for group in buffer.state_dict()["groups"]])
        assert sorted(step for one in steps for step in one) == list(range(7))
        assert max(map(len, steps)) - min(map(len, steps)) <= 1
        assert all(one == sorted(one) for one in steps), "the oldest are dropped first"


@pytest.mark.parametrize("options", [{}, {"constrain": True}, CORRECTED, PER_SEQUENCE],
                         ids=["free", "constrained", "corrected", "corrected per sequence"])  # fmt: skip
def test_groups_without_signal_give_way_to_stored_ones(tiny_path, tmp_path, options):
    """First a rollout with signal in both groups, then one with none: half of it is replayed, ratios and all."""
    texts = ["a", "bb", "ab", "ccc", "c", "b", "dcc", "a"]
    options = options | {"replay_size": 4, "beta": 0.1, "advantage_estimator": "mean"}
    trainer = make(tiny_path, tmp_path, [*texts, *["b"] * 8], **options)
    examples = [trainer.train_dataset[0]] * 4 + [trainer.train_dataset[4]] * 4
    with torch.no_grad():
        kept = {key: value.clone() for key, value in trainer._generate_and_score_completions(examples).items()}
        for p in trainer.model.parameters():  # the policy moves on
            p.add_(0.05 * torch.randn_like(p))
        second = trainer._generate_and_score_completions(examples)
    metrics = trainer._metrics["train"]
    assert metrics["replay/replaced_groups"] == [0.0, 1.0] and metrics["replay/size"] == [2.0, 2.0]
    source = slice(0, 4) if torch.equal(second["prompt_ids"][0], kept["prompt_ids"][0]) else slice(4, 8)
    scores = [ToyTask().score(json.loads(examples[source.start]["row"]), text) for text in texts[source]]
    assert metrics["replay/mean_reward"] == [pytest.approx(sum(score.total for score in scores) / 4)]
    assert metrics["replay/success"] == [sum(score.success for score in scores) / 4]
    # The reference has not moved, so its log-probs are what they were.
    names = {"completion_ids", "old_per_token_logps", "ref_per_token_logps"}
    names |= kept.keys() & {"importance_sampling_ratio", "sampling_per_token_logps"}
    for j, n in enumerate(kept["completion_mask"][source].sum(1).tolist()):
        for name in names:
            torch.testing.assert_close(second[name][j, :n], kept[name][source][j, :n], atol=1e-5, rtol=1e-5, msg=name)
        if "constrain" in options:
            numbers = second["mask_numbers"][j]
            assert (trainer.generation.tables["train"].counts(numbers[:n].numpy()) <= 5).all()
            assert not numbers[n:].any()
    assert "vllm_importance_sampling_mode" not in options or (kept["importance_sampling_ratio"] != 1).any()
    weights = second["advantages"][:4] / kept["advantages"][source]
    weights = weights[~weights.isnan()]  # an advantage of exactly 0 says nothing about its weight
    assert (weights > 0).all() and weights.max() - weights.min() < 1e-5 and weights.max() < 1
    lengths = second["completion_mask"].sum(1)
    assert second["num_items_in_batch"] == lengths.sum() and second["completion_ids"].shape[1] == max(lengths) == 4
    # And it trains: the loss of the replayed batch has a gradient although the fresh one had no signal.
    trainer._compute_loss(trainer.model, second).backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in trainer.model.parameters())
    logps = trainer.scoring.logps(second, of_reference=False)[second["completion_mask"].bool()].detach()
    assert metrics["logp_mean"][-1] == pytest.approx(logps.mean().item(), rel=1e-5)


# ---- curriculum

ROWS = [{"level": "1"}, {"level": "2"}, {"level": "3"}] * 5


def test_curriculum_advances_and_falls_back():
    curriculum = Curriculum(ROWS, ("1", "2", "3"), window=4, advance=0.75, fall_back=0.25, review=0.0)
    assert {ROWS[curriculum.select(i, 0)]["level"] for i in range(15)} == {"1"}
    curriculum.observe(["1"] * 3, [1, 1, 1])
    assert curriculum.level == 0  # not enough seen
    curriculum.observe(["1"], [float("nan")])
    assert curriculum.level == 0
    curriculum.observe(["1", "2"], [0, 0])  # a row of another level does not count
    assert curriculum.level == 1
    assert {ROWS[curriculum.select(i, 3)]["level"] for i in range(15)} == {"2"}
    curriculum.observe(["2"] * 4, [0, 0, 0, 1])
    assert curriculum.level == 0
    again = Curriculum(ROWS, ("1", "2", "3"), window=4)
    again.load_state_dict(curriculum.state_dict())
    assert again.level == 0


def test_curriculum_reviews_lower_levels_and_agrees_across_processes():
    curriculum = Curriculum(ROWS, ("1", "2", "3"), review=0.5)
    curriculum.level = 2
    levels = [ROWS[curriculum.select(i, 7)]["level"] for i in range(300)]
    assert 90 < levels.count("3") < 210 and {"1", "2"} <= set(levels)
    assert levels == [ROWS[curriculum.select(i, 7)]["level"] for i in range(300)]


def test_curriculum_refuses_rows_without_a_level():
    with pytest.raises(ValueError, match="row 0 has level None"):
        Curriculum([{}], ("1",))
    with pytest.raises(ValueError, match="no training row of level 2"):
        Curriculum([{"level": "1"}], ("1", "2"))


def test_curriculum_chooses_the_rows_of_a_run(tiny_path, tmp_path):
    trainer = toy_trainer(tiny_path, tmp_path, curriculum=True, curriculum_window=1000)
    trainer.model.train()
    trainer._generate_and_score_completions([trainer.train_dataset[1]] * 4 + [trainer.train_dataset[3]] * 4)
    assert {json.loads(example["row"])["level"] for example in trainer.latest_rollout.examples} == {"1"}
    assert len({example["row"] for example in trainer.latest_rollout.examples[:4]}) == 1, "a group stays one prompt"


# ---- moving references


@pytest.mark.parametrize(("rank", "outputs"), [(4, 7), (8, 3)], ids=["low rank", "more than the layer has"])
def test_the_average_of_adapters_is_the_nearest_of_their_rank(rank, outputs):
    generator = torch.Generator().manual_seed(0)
    a_ref, a = torch.randn(2, rank, 9, generator=generator)
    b_ref, b = torch.randn(2, outputs, rank, generator=generator)
    new_a, new_b = average_product(a_ref, b_ref, a, b, keep=0.9)
    u, s, vh = torch.linalg.svd(0.9 * b_ref @ a_ref + 0.1 * b @ a, full_matrices=False)
    assert new_a.shape == a.shape and new_b.shape == b.shape
    torch.testing.assert_close(new_b @ new_a, (u[:, :rank] * s[:rank]) @ vh[:rank], atol=1e-5, rtol=1e-5)
    same_a, same_b = average_product(a, b, a, b, keep=0.3)
    torch.testing.assert_close(same_b @ same_a, b @ a, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mode", ["ema", "periodic"])
def test_the_reference_of_full_weights_moves(tiny_path, tmp_path, mode):
    options = {"reference_mode": mode, "ema_alpha": 0.75, "reference_update_freq": 2}
    trainer = toy_trainer(tiny_path, tmp_path, beta=0.1, max_steps=1, **options)
    start = {n: p.detach().clone() for n, p in trainer.ref_model.named_parameters()}
    trainer.model.train()
    trainer.start_iteration()  # before the first rollout: nothing to follow yet
    expected = start
    for step in range(1, 4):
        with torch.no_grad():
            for p in trainer.model.parameters():
                p.add_(0.1)
        policy = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
        trainer.state.global_step = step
        trainer.start_iteration()
        trainer.start_iteration()  # a second rollout within one step moves nothing
        if mode == "ema":
            expected = {n: 0.75 * expected[n] + 0.25 * policy[n] for n in expected}
        elif step % 2 == 0:
            expected = policy
        for name, p in trainer.ref_model.named_parameters():
            torch.testing.assert_close(p.detach(), expected[name], msg=f"{name} at step {step}")


def test_an_average_of_half_precision_weights_does_not_stand_still():
    """1,000 steps at alpha 0.99 close all of a 1% gap but 0.99 ** 1000; bfloat16 alone would round each step away."""
    policy, ref = torch.nn.Linear(3, 2).to(torch.bfloat16), torch.nn.Linear(3, 2).to(torch.bfloat16)
    for model, value in ((policy, 1.0), (ref, 0.9921875)):
        for p in model.parameters():
            torch.nn.init.constant_(p, value)
    reference = MovingReference("ema", policy, ref, 0.99, 1)
    for _ in range(50):
        reference.update()
    exact = 1 - 0.0078125 * 0.99**50  # half of the gap, which bfloat16 has no number for
    for value in reference.state_dict()["weights"].values():
        torch.testing.assert_close(value, torch.full_like(value, exact, dtype=torch.float32), atol=1e-6, rtol=0)
    resumed_ref = torch.nn.Linear(3, 2).to(torch.bfloat16)
    resumed = MovingReference("ema", policy, resumed_ref, 0.99, 1)
    resumed.load_state_dict(reference.state_dict())
    for _ in range(950):
        reference.update()
        resumed.update()
    for p, again in zip(ref.parameters(), resumed_ref.parameters(), strict=True):
        assert torch.equal(p, torch.ones_like(p)) and torch.equal(p, again)
    for value, again in zip(*(r.state_dict()["weights"].values() for r in (reference, resumed)), strict=True):
        assert torch.equal(value, again), "the float32 average is not in the checkpoint"


@pytest.mark.parametrize("mode", ["static", "ema", "periodic"])
def test_the_reference_of_an_embedding_adapter_is_whole_and_moves(tiny_path, tmp_path, mode):
    """PEFT names it `lora_embedding_A.default`, without a `.weight`; TRL does not copy it into "ref" either."""
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_path), LoraConfig(r=2, target_modules=["embed_tokens", "v_proj"])
    )
    weights = dict(model.named_parameters())
    (a_name,) = [name for name in weights if name.endswith("lora_embedding_A.default")]
    a, b = weights[a_name], weights[a_name.replace("embedding_A", "embedding_B")]
    torch.nn.init.normal_(a)  # as after an earlier training
    model.save_pretrained(tmp_path / "adapter")
    options = {"reference_mode": mode, "ema_alpha": 0.5, "reference_update_freq": 1}
    trainer = toy_trainer(str(tmp_path / "adapter"), tmp_path / "run", beta=0.1, max_steps=1, **options)
    weights = dict(trainer.model.named_parameters())
    assert torch.equal(weights[a_name], a) and weights[a_name].requires_grad
    a, b = weights[a_name], weights[a_name.replace("embedding_A", "embedding_B")]
    ref_a, ref_b = (weights[n] for n in (a_name.replace(".default", ".ref"), a_name.replace("A.default", "B.ref")))
    assert torch.equal(a, ref_a) and torch.equal(b, ref_b) and not ref_a.requires_grad
    if mode == "static":
        return
    before = ref_b @ ref_a
    with torch.no_grad():
        a.add_(torch.randn(a.shape, generator=torch.Generator().manual_seed(0)))
    trainer.extras["reference"].state.update()
    expected = 0.5 * before + 0.5 * b @ a if mode == "ema" else b @ a
    torch.testing.assert_close(ref_b @ ref_a, expected, atol=1e-5, rtol=1e-5)
    assert {a_name.replace(".default", ".ref")} <= set(trainer.extras["reference"].state.state_dict()["weights"])


# ---- hints


def hints_and_said(**args):
    """A function that passes logs to hints, and the list of what these say."""
    said, state = [], SimpleNamespace(is_world_process_zero=True)
    hints, args = Hints(patience=3, say=said.append), SimpleNamespace(kl_target=None, **args)

    def log(*lines):
        for logs in lines:
            hints.on_log(args, state, None, logs=logs)

    return log, said


def test_hints_say_what_to_change():
    log, said = hints_and_said()
    bad = {"reward": 0.0, "frac_reward_zero_std": 1.0, "rewards/valid/mean": 0.0, "kl": 50.0}
    bad["completions/clipped_ratio"] = 1.0
    log(bad, bad, bad)
    assert len(said) == 4 and all(line.startswith("hint: ") and "\n" not in line for line in said)
    said.clear()
    for share in (0.84, 0.99, 0.9):  # not all groups, but most
        log({"reward": 0.0, "groups_without_signal": share, "reward_failures": 0.5})
    assert len(said) == 2 and "90% of the groups" in said[0] and "50% of the completions could not" in said[1]
    log(*[{"reward": 1.0, "groups_without_signal": 0.95, "rewards/success/mean": 0.97}] * 3)
    assert len(said) == 2, "a model that has mastered the task needs no hint"
    log(bad, bad, bad)
    said[:] = said[-4:]
    log(*[{"reward": 1.0, "grad_norm": float("nan")}] * 2)
    assert len(said) == 5 and "not finite" in said.pop()
    log({"reward": 1.0, "frac_reward_zero_std": 0.5, "rewards/valid/mean": 1.0}, bad, bad)
    assert len(said) == 4, "a good log starts the count again"


def test_fp16_skips_steps_whose_gradient_is_not_finite_and_only_many_of_them_are_a_problem():
    log, said = hints_and_said(fp16=True)
    infinite = {"reward": 1.0, "grad_norm": math.inf}
    log(infinite, infinite | {"grad_norm": math.nan}, infinite | {"grad_norm": 0.5}, infinite, infinite)
    assert not said, "the scale is found by trial"
    log(infinite)
    assert len(said) == 1 and said[0].startswith("hint: the gradient has not been finite for 3 logs")
