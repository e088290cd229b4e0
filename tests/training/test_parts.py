"""The objects that a trainer owns work without one: each gets only what it uses of it."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from transformers import TrainerState
from trl.trainer.utils import add_fused_lm_head

from tests.support.toy import LETTERS, LettersConstraint, ToyTask
from tests.support.training import config
from trl_grpo_tasks.constraints import unpack
from trl_grpo_tasks.models import checkpoints
from trl_grpo_tasks.models.loading import load_model, load_tokenizer
from trl_grpo_tasks.rewards.components import TaskRewards
from trl_grpo_tasks.training.checkpoint import Checkpoints
from trl_grpo_tasks.training.generation import Generation
from trl_grpo_tasks.training.record import RolloutRecord
from trl_grpo_tasks.training.rewarding import Rewarding
from trl_grpo_tasks.training.scoring import Scoring

ROWS = ['{"prompt": "a1x", "letter": "a", "level": "1"}', '{"prompt": "b1x", "letter": "b", "level": "1"}']
EXAMPLES = [{"prompt": f"{row[12:15]}", "row": row} for row in ROWS for _ in range(2)]  # two groups of two


def host(args, **more):
    common = {"accelerator": Accelerator(cpu=True), "task": ToyTask(), "mode": "train", "group_size": 2}
    common["state"] = TrainerState()
    metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    return SimpleNamespace(
        args=args, _metrics=metrics, latest_rollout=RolloutRecord("train", EXAMPLES), **common, **more
    )


def sampled(tiny_path, folder):
    """A host with a rollout, its model, and the objects that made the rollout and score it."""
    args = config(folder, constrain=True, rollout="fast", temperature=0.7)
    tokenizer, model = load_tokenizer(tiny_path), load_model(tiny_path)
    add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy"))
    made = host(
        args, model=model, model_wrapped=model, ref_model=None, temperature=0.7, num_generations=2, is_sharded=False,
        generation_config=model.generation_config, generation_kwargs={}, max_completion_length=5, use_vllm=False,
        train_dataset=EXAMPLES, eos_token_ids=[tokenizer.eos_token_id], tools=None, rollout_func=None, _is_vlm=False,
        aux_loss_enabled=False, _tokenizer=tokenizer, is_fsdp_enabled=False,
    )  # fmt: skip
    generation = Generation(made, LettersConstraint(tokenizer), is_masked=False, engine_key=None)
    scoring = Scoring(made, generation)
    prompts = [tokenizer(example["prompt"])["input_ids"] for example in EXAMPLES]
    ids, logps = generation.sample(prompts, generate=None)
    return made, generation, scoring, prompts, ids, logps


def test_generation_samples_under_its_constraint(tiny_path, tmp_path):
    made, generation, _, _, ids, logps = sampled(tiny_path, tmp_path)
    texts = [made._tokenizer.decode(one, skip_special_tokens=True) for one in ids]
    assert len(texts) == 4 and all(text and set(text) <= set(LETTERS) for text in texts)
    assert [len(one) for one in logps] == [len(one) for one in ids]
    generation.record([example["prompt"] for example in EXAMPLES], ([], ids, None, texts, logps))
    assert made.latest_rollout.completions == texts


def test_scoring_is_of_the_distribution_that_was_sampled_from(tiny_path, tmp_path):
    made, generation, scoring, prompts, ids, sampling_logps = sampled(tiny_path, tmp_path)
    width, record = max(map(len, ids)), made.latest_rollout
    pairs = zip(prompts, ids, strict=True)
    input_ids = torch.tensor([prompt + one + [0] * (width - len(one)) for prompt, one in pairs])
    attention = torch.tensor([[1] * (3 + len(one)) + [0] * (width - len(one)) for one in ids])

    def score(model, input_ids, attention_mask, keep, **_):
        labels = input_ids.masked_fill(attention_mask == 0, -100)
        labels[:, :-keep] = -100
        out = model(input_ids=input_ids, attention_mask=attention_mask, labels=labels, fused_lm_head=True)
        return out.log_probs[:, -keep:], out.entropy[:, -keep:], None

    with scoring.under(record), torch.no_grad():
        logps, entropies, _ = scoring.logps_and_entropies(
            score, made.model, input_ids, attention, width, compute_entropy=True
        )
    with torch.no_grad():
        logits = made.model(input_ids=input_ids, attention_mask=attention, fused_lm_head=False).logits.double() / 0.7
    for b, one in enumerate(ids):
        state = generation.constraint.start({})
        for t, token in enumerate(one):
            allowed = torch.from_numpy(unpack(state.mask(), generation.constraint.vocab_size))
            row = logits[b, 2 + t, : len(allowed)].masked_fill(~allowed, -torch.inf).log_softmax(0)
            assert logps[b, t].item() == pytest.approx(row[token].item(), abs=1e-5)
            assert logps[b, t].item() == pytest.approx(sampling_logps[b][t], abs=1e-4)
            known = row[allowed]
            assert entropies[b, t].item() == pytest.approx(-(known.exp() * known).sum().item(), abs=1e-5)
            state.accept(token)
    assert record.logps_B_T.equal(logps)


def test_rewarding_turns_scores_into_advantages(tmp_path):
    args = config(tmp_path, advantage_estimator="mean", advantage_clip=0.4)
    made = host(args, reward_func_names=[], reward_weights=None, _logs={"advantages": []})
    made._log_completion_extra = made._log_metric = lambda *_: None
    rewards = TaskRewards(made.task, args)
    rewarding = Rewarding(made, rewards)
    record = made.latest_rollout
    record.completions = ["a", "c", "ba", "bb"]  # match: 1, 0; 0.5, 1
    rewarding.begin()

    def compute():  # as TRL does: a column per reward function
        given = {"completions": record.completions, "log_extra": None, "log_metric": None}
        return torch.tensor([function(prompts=None, **given) for function in rewards.functions()]).T

    rewarding.collect(EXAMPLES, record.completions, compute)
    rewards.executor.close()
    assert made.reward_func_names == rewards.names
    assert rewarding.component("match").tolist() == [1, 0, 0.5, 1]
    totals = [1 + 0.1 * 7 / 8, 0.1 * 7 / 8, 0.5 + 0.1 * 6 / 8, 1 + 0.1 * 6 / 8]
    assert rewarding.totals().tolist() == pytest.approx(totals)
    output = {"advantages": torch.zeros(4), "completion_mask": torch.ones(4, 2, dtype=torch.long)}
    rewarding.set_advantages(output)
    assert output["advantages"].tolist() == pytest.approx([0.4, -0.4, -0.25, 0.25]), "0.5 is clipped"
    rewarding.log_groups()
    metrics = made._metrics["train"]
    assert metrics["advantage_clipped_fraction"] == [0.5] and metrics["groups_without_signal"] == [0]
    assert metrics["pass@1"] == [0.5] and metrics["pass@2"] == [1.0]


class Part:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def checkpointed(folder, value):
    """A host after `value` batches, with a part of each kind."""
    parts = {True: {"common": Part(value)}, False: {"own": Part(-value)}}
    masks = SimpleNamespace(state_of_masks=lambda batches: {}, load_masks=lambda state, batches: None)
    made = host(
        config(folder, steps_per_generation=2),
        extras={}, generation=masks, parts=lambda is_common: parts[is_common], is_deepspeed_enabled=False,
        is_fsdp_enabled=False, is_sharded=False, num_iterations=1, updated_at=value, _step=value,
        _buffered_inputs=[{"ids": torch.arange(value)}], _globalstep_last_logged=value, _tr_loss=torch.tensor(1.5),
    )  # fmt: skip
    made._metrics["train"]["loss"].append(float(value))
    return made, parts


def test_checkpoints_restore_what_they_saved(tmp_path):
    folder = tmp_path / "checkpoint-3"
    made, _ = checkpointed(tmp_path, 3)
    Checkpoints(made).save(folder, lambda: folder.mkdir(exist_ok=True))
    assert checkpoints.is_complete(folder)
    other, parts = checkpointed(tmp_path, 5)
    Checkpoints(other).load_state(str(folder))
    assert (parts[True]["common"].value, parts[False]["own"].value) == (3, -3)
    assert (other._step, other.updated_at, other._metrics["train"]["loss"]) == (3, 3, [3.0])
    assert other._buffered_inputs[0]["ids"].equal(torch.arange(3))


def test_a_checkpoint_that_cannot_be_written_is_removed(tmp_path, capsys):
    folder = tmp_path / "checkpoint-3"
    made, _ = checkpointed(tmp_path, 3)
    written = Checkpoints(made)

    def full():
        folder.mkdir(exist_ok=True)
        raise OSError(28, "No space left on device")

    written.save(folder, full)
    assert not folder.exists() and "No space left" in capsys.readouterr().out and written.failure is not None
