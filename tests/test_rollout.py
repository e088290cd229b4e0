"""Rollouts: greedy as `generate`, sampled from the scored distribution, right under any constraint."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, GemmaConfig, LlamaConfig, Qwen2Config

from tests.training import toy_trainer
from trl_grpo_tasks.constraints import ChoiceTreeConstraint, Grammar, GrammarConstraint
from trl_grpo_tasks.constraints.base import replay
from trl_grpo_tasks.constraints.table import MaskTable
from trl_grpo_tasks.models import make_tokenizer
from trl_grpo_tasks.rollout import rollout, why_not

TOKENIZER = make_tokenizer([*"0123456789abcdex,()", "10", "12", "x1", "ab"], 64)
EOS = TOKENIZER.eos_token_id


def tiny(config_class, seed=0, **special):
    torch.manual_seed(seed)
    sizes = {"vocab_size": len(TOKENIZER) + 3, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
             "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0,
             "eos_token_id": EOS}  # fmt: skip
    model = AutoModelForCausalLM.from_config(config_class(**sizes, **special))
    for p in model.parameters():  # random weights are too flat to tell one token from another
        p.data.mul_(4)
    return model.eval()


MODELS = {"llama": tiny(LlamaConfig), "qwen2": tiny(Qwen2Config), "gemma": tiny(GemmaConfig)}
PROMPTS = [[5, 6, 7], [5, 6, 7], [9], [5, 6, 7, 8, 9, 10, 11], [9]]


@pytest.mark.parametrize("family", MODELS)
def test_greedy_is_what_generate_gives(family):
    model = MODELS[family]
    ours = rollout(model, PROMPTS, max_new_tokens=20, eos_token_ids=[EOS], temperature=0)
    for prompt, ids in zip(PROMPTS, ours.completion_ids, strict=True):
        given = torch.tensor([prompt])
        out = model.generate(input_ids=given, attention_mask=torch.ones_like(given), do_sample=False,
                             max_new_tokens=20, eos_token_id=EOS, pad_token_id=0)[0, len(prompt) :]  # fmt: skip
        assert ids == out.tolist()


def dense_logps(model, prompt, ids, masks, table, temperature):
    """Log-probs of a completion by one plain forward pass and a masked softmax in float64."""
    logits = model(input_ids=torch.tensor([prompt + ids])).logits[0].double() / temperature
    out = []
    for t, (token, number) in enumerate(zip(ids, masks, strict=True)):
        words = table.words([number])[0] if table is not None else None
        step = logits[len(prompt) + t - 1]
        if words is not None:
            bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: len(step)].astype(bool)
            step = step.masked_fill(~torch.from_numpy(bits), -torch.inf)
        out.append(step.log_softmax(0)[token].item())
    return out


def brick_choices(node):
    kind, lines = node
    if kind == "line":
        more = (
            [(f"{a}x{b} (".replace(" ", ""), ("at", lines)) for a in (1, 2) for b in (1, 10, 12)] if lines < 3 else []
        )
        return more + ([("", None)] if lines else [])
    return [(f"{n},0)", ("line", lines + 1)) for n in range(12)]


CONSTRAINTS = {
    "regex": GrammarConstraint(TOKENIZER, lambda row: Grammar.regex(row["pattern"]) if row["pattern"] else None),
    "tree": ChoiceTreeConstraint(TOKENIZER, lambda row: ("line", 0) if row["pattern"] else None, brick_choices),
}
PATTERNS = [r"abcde[0-9]{2}abcde(x|\(\))", r"(ab,)+", r"[a-e]{1,30}", None, r"abcde"]


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(sorted(CONSTRAINTS)),
    st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=6),
    st.integers(1, 25),
    st.sampled_from([0.7, 1.0, 1.4]),
    st.integers(0, 10**6),
)
def test_any_batch_under_any_constraint(kind, patterns, length, temperature, seed):
    """Every token was allowed, masks are those of a replay, log-probs those of a plain forward pass."""
    model, table = MODELS["llama"], MaskTable(len(TOKENIZER) + 3)
    rows = [{"pattern": pattern} for pattern in patterns]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(rows))]
    torch.manual_seed(seed)
    out = rollout(model, prompts, max_new_tokens=length, eos_token_ids=[EOS], temperature=temperature,
                  constraint=CONSTRAINTS[kind], rows=rows, table=table)  # fmt: skip
    for row, prompt, ids, masks, logps in zip(rows, prompts, out.completion_ids, out.masks, out.logps, strict=True):
        expected = [table.number_of(mask) for mask in replay(CONSTRAINTS[kind], row, ids)]
        assert masks == expected
        assert 1 <= len(ids) <= length and (len(ids) == length or ids[-1] == EOS) and EOS not in ids[:-1]
        with torch.no_grad():
            wanted = dense_logps(model, prompt, ids, masks, table, temperature)
        assert logps == pytest.approx(wanted, abs=1e-4)
        forced = [t for t, number in enumerate(masks) if table.counts(np.array([number]))[0] == 1]
        assert all(logps[t] == 0 for t in forced)


def test_samples_follow_the_exact_distribution():
    """Chi-square over all completions of a constrained task with six answers."""
    model, table = MODELS["qwen2"], MaskTable(len(TOKENIZER) + 3)
    constraint = GrammarConstraint(TOKENIZER, Grammar.regex("a[0-2]x|ab[01]|b"))
    torch.manual_seed(1)
    out = rollout(model, [PROMPTS[0]] * 3000, max_new_tokens=8, eos_token_ids=[EOS], constraint=constraint,
                  rows=[{}] * 3000, table=table)  # fmt: skip
    counts: dict[tuple, int] = {}
    exact: dict[tuple, float] = {}
    for ids, masks in zip(out.completion_ids, out.masks, strict=True):
        key = tuple(ids)
        counts[key] = counts.get(key, 0) + 1
        if key not in exact:
            with torch.no_grad():
                exact[key] = float(np.exp(sum(dense_logps(model, PROMPTS[0], ids, masks, table, 1.0))))
    assert {TOKENIZER.decode(key, skip_special_tokens=True) for key in counts} <= {
        "a0x",
        "a1x",
        "a2x",
        "ab0",
        "ab1",
        "b",
    }
    expected = {key: 3000 * p for key, p in exact.items() if 3000 * p >= 5}
    chi2 = sum((counts[key] - e) ** 2 / e for key, e in expected.items())
    assert len(expected) >= 4 and chi2 < 3.3 * len(expected) + 12


def test_forced_tokens_and_shared_prompts_save_forward_passes():
    constraint = GrammarConstraint(TOKENIZER, Grammar.regex(r"ccdde[0-9]ccdde[0-9]ccdde"))
    out = rollout(MODELS["llama"], [PROMPTS[3]] * 8, max_new_tokens=30, eos_token_ids=[EOS], constraint=constraint,
                  rows=[{}] * 8, table=MaskTable(len(TOKENIZER) + 3))  # fmt: skip
    assert all(len(ids) == 18 for ids in out.completion_ids)
    # the prompt, the first run of forced tokens, and a digit with the run after it; the last run ends the text
    assert out.forward_passes == 3


def test_models_it_does_not_know_are_named():
    from transformers import GPT2Config, MistralConfig

    assert why_not(MODELS["llama"]) is None
    gpt2 = AutoModelForCausalLM.from_config(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20))
    assert "'gpt2'" in why_not(gpt2)
    assert "sliding" in why_not(tiny(MistralConfig, sliding_window=4))


# ---- in the trainer


@pytest.mark.parametrize("options", [{"constrain": True}, {}, {"constrain": True, "gradient_checkpointing": True}])
@pytest.mark.parametrize("peft", [False, True], ids=["full", "lora"])
def test_what_was_sampled_is_what_is_scored(tiny_path, tmp_path, monkeypatch, options, peft):
    from peft import LoraConfig

    from trl_grpo_tasks import trainer as trainer_module

    kept = []

    def keeping(*args, **kwargs):
        kept.append(rollout(*args, **kwargs))
        return kept[-1]

    monkeypatch.setattr(trainer_module, "rollout", keeping)
    adapter = LoraConfig(r=2, target_modules=["q_proj", "v_proj"]) if peft else None
    settings = {"rollout": "fast", "temperature": 0.8, "steps_per_generation": 2, "num_iterations": 2, "max_steps": 3}
    trainer = toy_trainer(tiny_path, tmp_path, peft_config=adapter, **settings, **options)
    trainer.train()
    trainer.model.train()
    trainer.model.gradient_checkpointing_disable()
    output = trainer._generate_and_score_completions([trainer.train_dataset[i] for i in (0, 0, 0, 0, 3, 3, 3, 3)])
    for row, logps in enumerate(kept[-1].logps):
        assert output["old_per_token_logps"][row, : len(logps)].tolist() == pytest.approx(logps, abs=1e-4)
        assert output["completion_ids"][row, : len(logps)].tolist() == kept[-1].completion_ids[row]


@pytest.mark.parametrize("options", [{"top_k": 5}, {"generation_kwargs": {"num_beams": 1}}])
def test_what_it_cannot_do_is_left_to_trl_with_a_line_why(tiny_path, tmp_path, capsys, options):
    trainer = toy_trainer(tiny_path, tmp_path, rollout="fast", max_steps=1, **options)
    said = capsys.readouterr().out
    assert said.count("rollouts are TRL's: ") == 1 and next(iter(options)) in said
    trainer.train()
