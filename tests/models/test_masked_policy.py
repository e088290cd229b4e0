"""Masked language models as policies: they match a dense float64 computation and train like causal models."""

import itertools
import json
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from scipy.stats import chisquare

from tests.support.exhaustive import exhaustive_but
from tests.support.toy_fill import LETTERS, MASK, FillTask
from tests.support.training import parameters, resumed, toy_trainer
from trl_grpo_tasks.constraints.filters import SamplingFilters
from trl_grpo_tasks.constraints.table import MaskTable, pad_mask_numbers
from trl_grpo_tasks.models.loading import check_policy, load_model, load_tokenizer
from trl_grpo_tasks.models.masked_policy import MaskedPolicy, set_fill_steps

FIRST_LETTER = 5  # ids 0 to 4 are special tokens


@pytest.fixture(scope="session")
def bert(bert_path):
    """The tokenizer and two float64 copies of the model: one under test, one for the oracle."""
    models = [load_model(bert_path, policy="masked").double().eval() for _ in range(2)]
    return load_tokenizer(bert_path), *models


def fill_trainer(path, output_dir, **options):
    return toy_trainer(path, output_dir, task=FillTask(), **options)


def rollout_of(trainer, prompt, fills):
    """The inputs that TRL passes to the loss for these fills of a prompt; like in TRL, the prompt is left-padded."""
    pad = trainer._tokenizer.pad_token_id
    ids = trainer._tokenizer(prompt)["input_ids"]
    batch, width = len(fills), max(map(len, fills)) + 1
    return {
        "prompt_ids": torch.tensor([[pad, pad, *ids]] * batch),
        "prompt_mask": torch.tensor([[0, 0, *[1] * len(ids)]] * batch),
        "completion_ids": torch.tensor([[*fill, *[pad] * (width - len(fill))] for fill in fills]),
        "completion_mask": torch.tensor([[1] * len(fill) + [0] * (width - len(fill)) for fill in fills]),
    }


def scored(trainer, rollout, **more):
    return trainer._get_per_token_logps_and_entropies(
        trainer.model,
        torch.cat([rollout["prompt_ids"], rollout["completion_ids"]], 1),
        torch.cat([rollout["prompt_mask"], rollout["completion_mask"]], 1),
        rollout["completion_ids"].shape[1],
        compute_entropy=True,
        **more,
    )


def dense_logps(model, ids, temperature, fill=(), steps=1):
    """The oracle: log-probs of the letters at each mask, from a softmax over the letters only. With several steps, a
    mask has a row of its own, in which the masks of earlier steps are filled."""
    masked_positions = [place for place, token in enumerate(ids) if token == 4]
    texts = torch.tensor(ids).repeat(len(masked_positions), 1)
    for number, text in enumerate(texts):
        for other, place in enumerate(masked_positions):
            if other % steps < number % steps:
                text[place] = fill[other]
    logits = model(input_ids=texts, attention_mask=torch.ones_like(texts)).logits
    letters = logits[range(len(texts)), masked_positions, FIRST_LETTER : FIRST_LETTER + 5].double()
    return (letters / temperature).log_softmax(-1)


@pytest.mark.parametrize("steps", [1, 3])
def test_policy_and_expected_update_are_exact(bert_path, tmp_path, steps):
    """For all 125 fills of three masks with five letters, probabilities sum to 1, log-probs and entropies match a
    dense float64 softmax, and the gradient of the loss equals the gradient of the expected reward."""
    options = {"temperature": 0.8, "loss_type": "dr_grpo", "max_completion_length": 4, "num_generations": 8}
    trainer = fill_trainer(bert_path, tmp_path, fill_steps=steps, **options)
    model = trainer.model.double()
    row = json.loads(trainer.train_dataset[1]["row"])
    fills = [list(f) for f in itertools.product(range(FIRST_LETTER, FIRST_LETTER + 5), repeat=3)]
    rollout = rollout_of(trainer, row["prompt"], fills)
    logps, entropies, _ = scored(trainer, rollout)
    assert logps.dtype == torch.float64 and not logps[:, 3].any()
    ids = trainer._tokenizer(row["prompt"])["input_ids"]
    dense = torch.stack([dense_logps(model, ids, 0.8, fill, steps) for fill in fills])
    letters = torch.tensor(fills) - FIRST_LETTER
    expected = dense.gather(2, letters[:, :, None])[:, :, 0]
    torch.testing.assert_close(logps[:, :3], expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(entropies[:, :3], -(dense.exp() * dense).sum(2), atol=1e-12, rtol=0)
    bias = model.cls.predictions.bias
    (ours,) = torch.autograd.grad(entropies[:, :3].sum(), bias, retain_graph=True)
    (oracle,) = torch.autograd.grad(-(dense.exp() * dense).sum(), bias, retain_graph=True)
    torch.testing.assert_close(ours, oracle, atol=1e-10, rtol=1e-8)
    probabilities = logps.sum(1).exp()
    assert probabilities.sum().item() == pytest.approx(1, abs=1e-12)

    task, letters = FillTask(), ["".join(LETTERS[i - FIRST_LETTER] for i in fill) for fill in fills]
    rewards = torch.tensor([task.score(row, text).total for text in letters], dtype=torch.float64)
    names, weights = zip(*model.named_parameters(), strict=True)
    exact = torch.autograd.grad((expected.sum(1).exp() * rewards).sum(), weights, allow_unused=True)
    # The loss is a mean over 125 x max_completion_length tokens; each fill weighs its probability times its reward.
    rollout["advantages"] = (probabilities.detach() * rewards) * len(fills) * 4
    trainer.current_gradient_accumulation_steps = 1
    model.train()
    model.zero_grad()
    trainer._compute_loss(model, rollout | {"num_items_in_batch": torch.tensor(500)}).backward()
    for name, weight, gradient in zip(names, weights, exact, strict=True):
        if gradient is not None:
            torch.testing.assert_close(-weight.grad, gradient, atol=1e-10, rtol=1e-8, msg=name)
    # Special tokens and outputs without a token are not part of the policy and get no gradient.
    moved = bias.grad
    assert not moved[:FIRST_LETTER].any() and not moved[FIRST_LETTER + 5 :].any() and moved[FIRST_LETTER:10].all()


@settings(max_examples=20)
@given(
    texts=st.lists(st.text(alphabet="abcde_", min_size=1, max_size=8).filter(lambda t: "_" in t), min_size=1),
    temperature=st.floats(0.3, 2.0),
    top_p=st.sampled_from([1.0, 0.9, 0.5]),
    steps=st.integers(1, 4),
)
def test_scored_log_probs_equal_sampled_log_probs(bert, texts, temperature, top_p, steps):
    """For random texts and settings, scoring returns the log-probs of the sampling distribution; with top_p, it is the
    distribution over the nucleus."""
    tokenizer, model, oracle = bert
    model.forward = type(model).forward.__get__(model)  # removes wrappers from earlier examples
    set_fill_steps(model, steps)
    policy = MaskedPolicy(tokenizer, model.config, temperature, SamplingFilters(top_p=top_p))
    prompts = [" ".join(text).replace("_", MASK) for text in texts]
    torch.manual_seed(0)
    prompt_ids = policy.prompt_ids(prompts)
    table = MaskTable(model.config.vocab_size)
    fills = policy.fill(model, prompt_ids, table)
    policy.add_to(model)
    width, pad = max(map(len, prompt_ids)), tokenizer.pad_token_id
    length = max(map(len, fills.ids))
    rows = [
        [pad] * (width - len(p)) + p + f + [pad] * (length - len(f))
        for p, f in zip(prompt_ids, fills.ids, strict=True)
    ]
    attended = [
        [0] * (width - len(p)) + [1] * len(p + f) + [0] * (length - len(f))
        for p, f in zip(prompt_ids, fills.ids, strict=True)
    ]
    ids, attended = torch.tensor(rows), torch.tensor(attended)
    labels = ids.masked_fill(attended == 0, -100)
    labels[:, :width] = -100
    with policy.masks(pad_mask_numbers(fills.masks), table):
        output = model(input_ids=ids, attention_mask=attended, labels=labels, fused_lm_head=True)
    for number, (prompt, fill) in enumerate(zip(prompt_ids, fills.ids, strict=True)):
        dense = dense_logps(oracle, prompt, temperature, fill, steps).detach()
        if top_p < 1:
            for gap in dense:
                order = gap.argsort(descending=True)
                kept, mass = [], 0.0
                while mass < top_p:
                    kept.append(order[len(kept)].item())
                    mass += gap[kept[-1]].exp().item()
                gap[[i not in kept for i in range(5)]] = -torch.inf
            dense = dense.log_softmax(1)
        wanted = dense[range(len(fill)), [i - FIRST_LETTER for i in fill]]
        got = output.log_probs[number, width : width + len(fill)]
        torch.testing.assert_close(got, wanted, atol=1e-9, rtol=0)
        torch.testing.assert_close(torch.tensor(fills.logps[number]), wanted, check_dtype=False, atol=1e-5, rtol=0)


def test_fills_of_one_and_two_steps_follow_the_exact_distribution(bert_path):
    """Pairs of letters are counted and compared with the product of conditional probabilities (chi-squared test)."""
    tokenizer, model = load_tokenizer(bert_path), load_model(bert_path, policy="masked").eval()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(8)  # so that the second letter depends on the first
    ids = tokenizer(f"a {MASK} {MASK}")["input_ids"]
    pairs = list(itertools.product(range(FIRST_LETTER, FIRST_LETTER + 5), repeat=2))
    joint = {}
    for steps in (1, 2):
        dense = [dense_logps(model, ids, 0.8, pair, steps).detach() for pair in pairs]
        logps = [(d[0, a - FIRST_LETTER] + d[1, b - FIRST_LETTER]) for d, (a, b) in zip(dense, pairs, strict=True)]
        joint[steps] = torch.stack(logps).exp().numpy()
        assert joint[steps].sum() == pytest.approx(1)
    assert abs(joint[2] - joint[1]).max() > 0.02
    for steps in (1, 2):
        set_fill_steps(model, steps)
        torch.manual_seed(3)
        drawn = Counter(map(tuple, MaskedPolicy(tokenizer, model.config, 0.8).fill(model, [ids] * 20000).ids))
        counts = [drawn[pair] for pair in pairs]
        assert chisquare(counts, 20000 * joint[steps]).pvalue > 0.01, steps
        assert chisquare(counts, 20000 * joint[3 - steps]).pvalue < 1e-6, steps
    greedy = MaskedPolicy(tokenizer, model.config, 0).fill(model, [ids]).ids[0]
    first = FIRST_LETTER + int(dense_logps(model, ids, 1.0)[0].argmax())
    assert greedy == [first, FIRST_LETTER + int(dense_logps(model, ids, 1.0, [first, 0], 2)[1].argmax())]


def test_one_step_is_the_default_and_steps_are_for_masked_models(bert_path, tiny_path, tmp_path):
    tokenizer, model = load_tokenizer(bert_path), load_model(bert_path, policy="masked").eval()
    ids = tokenizer(f"a {MASK} {MASK} {MASK}")["input_ids"]
    fills = []
    for steps in (None, 1):
        set_fill_steps(model, steps)
        torch.manual_seed(0)
        fills.append(MaskedPolicy(tokenizer, model.config, 0.8).fill(model, [ids] * 20))
    assert fills[0] == fills[1]
    with pytest.raises(ValueError, match="fill_steps=0 must be at least 1"):
        fill_trainer(bert_path, tmp_path, fill_steps=0)
    with pytest.raises(ValueError, match=r"fill_steps=2 is for masked language models, .* causal; remove it"):
        toy_trainer(tiny_path, tmp_path, fill_steps=2)


def test_invalid_prompts_and_options_are_rejected(bert_path, tmp_path):
    tokenizer, model = load_tokenizer(bert_path), load_model(bert_path, policy="masked")
    policy = MaskedPolicy(tokenizer, model.config)
    with pytest.raises(ValueError, match=r"19 tokens is longer than the model's context of 16"):
        policy.prompt_ids([" ".join(["a"] * 16 + [MASK])])
    with pytest.raises(ValueError, match=r"no mask token '\[MASK\]', so there is nothing to fill"):
        policy.prompt_ids(["a b c"])
    with pytest.raises(ValueError, match="needs prompts that are strings"):
        policy.prompt_ids([[{"role": "user", "content": "a"}]])
    assert policy.fill(model, policy.prompt_ids([f"z {MASK} é"])).ids[0][0] >= FIRST_LETTER, "unknown characters"
    for option in ("constrain", "mask_truncated_completions"):
        with pytest.raises(ValueError, match=f"{option}=True"):
            fill_trainer(bert_path, tmp_path, **{option: True})


def test_models_of_the_wrong_kind_are_rejected(bert_path, tiny_path, tmp_path):
    with pytest.raises(ValueError, match="LlamaForCausalLM is not a masked language model"):
        fill_trainer(tiny_path, tmp_path)
    with pytest.raises(ValueError, match=r"needs a masked language model .* is LlamaForCausalLM"):
        check_policy(tiny_path, "masked")
    with pytest.raises(ValueError, match=r"needs a causal language model, but .* is BertForMaskedLM"):
        check_policy(bert_path, "causal")


LEARNING = {
    "two iterations of two steps, top_p": {"num_iterations": 2, "fill_steps": 2, "top_p": 0.9},
    "lora, ema": {"peft": True, "reference_mode": "ema"},
}


@pytest.mark.parametrize("case", LEARNING)
def test_masked_policy_learns(bert_path, tmp_path, case):
    options = {"beta": 0.1} | LEARNING[case]
    if options.pop("peft", False):
        options["peft_config"] = LoraConfig(r=4, target_modules=["query", "value", "dense"], task_type="CAUSAL_LM")
    rate = 3e-2 if "peft_config" in options else 1e-2
    trainer = fill_trainer(bert_path, tmp_path, max_steps=30, temperature=1.0, per_device_train_batch_size=48,
                           num_generations=8, learning_rate=rate, **options)  # fmt: skip
    before = parameters(trainer)
    trainer.train()
    logs = [line for line in trainer.state.log_history if "reward" in line]
    assert logs[-1]["reward"] > logs[0]["reward"] + 0.2
    assert logs[0]["kl"] == pytest.approx(0, abs=1e-6) and any(line["kl"] > 1e-4 for line in logs)
    assert 0 < logs[0]["entropy"] < torch.log(torch.tensor(5.0)) and logs[0]["completions/clipped_ratio"] == 0
    assert all(line["kl_penalty"] == pytest.approx(0.1 * line["kl"], rel=1e-4, abs=1e-9) for line in logs)
    assert all(line["logp_mean"] < 0 and abs(line["advantage_mean"]) < 1e-3 for line in logs)
    moved = [name for name, p in trainer.model.named_parameters() if not p.equal(before[name])]
    assert moved and ("peft_config" not in options or all("lora" in name for name in moved))
    if "peft_config" not in options and options.get("reference_mode") is None:
        assert all(p.equal(before[n]) for n, p in trainer.ref_model.named_parameters()), "a static reference moved"


@pytest.mark.parametrize("peft", exhaustive_but([False], [False, True]), ids=["full", "lora"])
def test_resumed_run_matches_bit_for_bit(bert_path, tmp_path, peft):
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 1, "beta": 0.1, "num_iterations": 2,
               "steps_per_generation": 2, "gradient_accumulation_steps": 1, "top_p": 0.9, "fill_steps": 2,
               "guard": "success", "guard_floor": 0.9, "reference_mode": "ema"}  # fmt: skip

    def make():
        adapter = LoraConfig(r=2, target_modules=["query", "value"]) if peft else None
        return fill_trainer(bert_path, tmp_path, **options, peft_config=adapter)

    *_, (_, again) = resumed(make, tmp_path, (1, 2, 3, 5))
    again.save_model(str(tmp_path / "saved"))
    loaded = load_model(str(tmp_path / "saved"), policy="masked")
    assert loaded.config.fill_steps == 2, "the saved model forgot how it was trained"
    assert load_model(str(tmp_path / "checkpoint-5"), policy="masked").config.fill_steps == 2
    ids = again.generation.masked_policy.prompt_ids([f"a {MASK} {MASK} e"])
    greedy = MaskedPolicy(again._tokenizer, loaded.config, 0)
    assert greedy.fill(loaded.eval(), ids).ids == greedy.fill(again.model.eval(), ids).ids
