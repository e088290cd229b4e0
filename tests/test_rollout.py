"""Rollouts: greedy as `generate`, sampled from the scored distribution, right under any constraint."""

import copy
import os
import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, GemmaConfig, LlamaConfig, Qwen2Config

from tests.training import toy_trainer
from trl_grpo_tasks.constraints import ChoiceTreeConstraint, Grammar, GrammarConstraint, OneSpelling
from trl_grpo_tasks.constraints.base import replay
from trl_grpo_tasks.constraints.table import MaskTable
from trl_grpo_tasks.models import make_tokenizer
from trl_grpo_tasks.rollout import Decoder, rollout, why_not
from trl_grpo_tasks.rollout import compiled as compiled_module
from trl_grpo_tasks.rollout.compiled import CompiledParts
from trl_grpo_tasks.rollout.support import without_adapter
from trl_grpo_tasks.rollout.weights import CastWeights

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


class Replayed(Decoder):
    """What a GPU does, without one: passes of a few sizes, at fixed addresses, that are run again and again."""

    def __init__(self, model):
        super().__init__(model, captures=True)

    def _captured(self, count, width, length):
        if (count, width, length) not in self._graphs:
            entry = torch.zeros(count, 2 + width, dtype=torch.int64)
            graph = type("Graph", (), {"replay": lambda _: self._forward(entry, length)})()
            self._graphs[count, width, length] = (graph, entry)
        return self._graphs[count, width, length]


MODELS = {"llama": tiny(LlamaConfig), "qwen2": tiny(Qwen2Config), "gemma": tiny(GemmaConfig)}
PROMPTS = [[5, 6, 7], [5, 6, 7], [9], [5, 6, 7, 8, 9, 10, 11], [9]]
REPLAYED = {family: Replayed(model) for family, model in MODELS.items()}  # kept from test to test, as in a run


@pytest.mark.parametrize("decoders", [{}, REPLAYED], ids=["plain", "replayed"])
@pytest.mark.parametrize("family", MODELS)
def test_greedy_is_what_generate_gives(family, decoders):
    model = MODELS[family]
    ours = rollout(model, PROMPTS, max_new_tokens=20, eos_token_ids=[EOS], temperature=0,
                   decoder=decoders.get(family))  # fmt: skip
    for prompt, ids in zip(PROMPTS, ours.completion_ids, strict=True):
        given = torch.tensor([prompt])
        out = model.generate(input_ids=given, attention_mask=torch.ones_like(given), do_sample=False,
                             max_new_tokens=20, eos_token_id=EOS, pad_token_id=0)[0, len(prompt) :]  # fmt: skip
        assert ids == out.tolist()


@pytest.mark.skipif("REAL_MODEL" not in os.environ, reason="REAL_MODEL names no folder of a pretrained model")
def test_greedy_on_a_real_model():
    """`REAL_MODEL=folder pytest -k real_model`: chat prompts of different length, left-padded in one batch."""
    model = AutoModelForCausalLM.from_pretrained(os.environ["REAL_MODEL"], dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(os.environ["REAL_MODEL"], padding_side="left")
    questions = [
        "Name three colours.",
        "What is the capital of France?",
        "Name three colours.",
        "Count to ten, please.",
    ]
    chats = [[{"role": "user", "content": question}] for question in questions]
    given = tokenizer.apply_chat_template(chats, add_generation_prompt=True, padding=True, return_tensors="pt",
                                          return_dict=True)  # fmt: skip
    theirs = model.generate(**given, do_sample=False, max_new_tokens=40)[:, given["input_ids"].shape[1] :]
    prompts = [ids[mask.bool()].tolist() for ids, mask in zip(*given.values(), strict=True)]
    end = model.generation_config.eos_token_id
    for decoder in (Decoder(model), Replayed(model)):
        ours = rollout(model, prompts, max_new_tokens=40, eos_token_ids=[end], temperature=0, decoder=decoder)
        for ids, expected in zip(ours.completion_ids, theirs.tolist(), strict=True):
            assert ids == expected[: len(ids)] and (ids[-1] == end or len(ids) == 40)


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
    "spelt": OneSpelling(
        TOKENIZER,
        GrammarConstraint(TOKENIZER, lambda row: Grammar.regex(row["pattern"]) if row["pattern"] else None),
    ),
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
    st.booleans(),
)
def test_any_batch_under_any_constraint(kind, patterns, length, temperature, seed, is_replayed):
    """Every token was allowed, masks are those of a replay, log-probs those of a plain forward pass."""
    model, table = MODELS["llama"], MaskTable(len(TOKENIZER) + 3)
    rows = [{"pattern": pattern} for pattern in patterns]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(rows))]
    torch.manual_seed(seed)
    out = rollout(model, prompts, max_new_tokens=length, eos_token_ids=[EOS], temperature=temperature,
                  constraint=CONSTRAINTS[kind], rows=rows, table=table,
                  decoder=REPLAYED["llama"] if is_replayed else None)  # fmt: skip
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


class Fickle:
    """Takes back some of what was written, at random, a limited number of times a row."""

    def __init__(self, seed, times):
        self._random, self._left, self.asked = random.Random(seed), {}, set()
        self._times = times

    def keep(self, i, ids, ended):
        assert ended == (ids[-1] == EOS)
        self.asked.add((i, tuple(ids)))
        if self._left.setdefault(i, self._times) and self._random.random() < 0.4:
            self._left[i] -= 1
            return self._random.randint(0, len(ids))
        return None


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([None, *sorted(CONSTRAINTS)]),
    st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=6),
    st.integers(1, 25),
    st.integers(0, 10**6),
    st.booleans(),
    st.integers(0, 8),
)
def test_what_an_editor_takes_back_leaves_no_trace(kind, patterns, length, seed, is_replayed, times):
    """Whatever is cut, and how often: masks are those of a replay, log-probs those of a plain forward pass."""
    model, table = MODELS["llama"], MaskTable(len(TOKENIZER) + 3)
    rows = [{"pattern": pattern} for pattern in patterns]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(rows))]
    constrained = {"constraint": CONSTRAINTS[kind], "rows": rows, "table": table} if kind else {}
    torch.manual_seed(seed)
    editor = Fickle(seed, times)
    out = rollout(model, prompts, max_new_tokens=length, eos_token_ids=[EOS], editor=editor, **constrained,
                  decoder=REPLAYED["llama"] if is_replayed else None)  # fmt: skip
    for i, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        ids, masks, logps = out.completion_ids[i], out.masks[i], out.logps[i]
        assert len(ids) == len(masks) == len(logps) and (i, tuple(ids)) in editor.asked
        assert 1 <= len(ids) <= length and (len(ids) == length or ids[-1] == EOS) and EOS not in ids[:-1]
        if kind:
            assert masks == [table.number_of(mask) for mask in replay(CONSTRAINTS[kind], row, ids)]
        with torch.no_grad():
            wanted = dense_logps(model, prompt, ids, masks, table, 1.0)
        assert logps == pytest.approx(wanted, abs=1e-4)


class Refusing:
    """Rejection sampling: a text that `is_good` does not like is drawn again, from its first token that may differ."""

    def __init__(self, is_good):
        self._is_good = is_good

    def keep(self, i, ids, ended):
        return 0 if ended and not self._is_good(TOKENIZER.decode(ids, skip_special_tokens=True)) else None


@pytest.mark.parametrize("decoders", [{}, REPLAYED], ids=["plain", "replayed"])
def test_an_editor_that_rejects_samples_the_conditional_distribution(decoders):
    """Chi-square over the four of six answers that are not rejected."""
    model, table = MODELS["qwen2"], MaskTable(len(TOKENIZER) + 3)
    constraint = GrammarConstraint(TOKENIZER, Grammar.regex("a[0-2]x|ab[01]|b"))
    good = ["a0x", "a2x", "ab0", "b"]
    torch.manual_seed(2)
    out = rollout(model, [PROMPTS[0]] * 3000, max_new_tokens=8, eos_token_ids=[EOS], constraint=constraint,
                  rows=[{}] * 3000, table=table, editor=Refusing(good.__contains__),
                  decoder=decoders.get("qwen2"))  # fmt: skip
    counts = Counter(map(tuple, out.completion_ids))
    weight = {}
    for ids in counts:
        masks = [table.number_of(mask) for mask in replay(constraint, {}, list(ids))]
        with torch.no_grad():
            weight[ids] = float(np.exp(sum(dense_logps(model, PROMPTS[0], list(ids), masks, table, 1.0))))
    assert {TOKENIZER.decode(ids, skip_special_tokens=True) for ids in counts} == set(good)
    share = 3000 / sum(weight.values())
    # some answers have two spellings in tokens
    chi2 = sum((counts[ids] - share * w) ** 2 / (share * w) for ids, w in weight.items() if share * w >= 5)
    assert len(counts) >= 4 and chi2 < 3.3 * len(counts) + 12


def test_forced_tokens_and_shared_prompts_save_forward_passes():
    constraint = GrammarConstraint(TOKENIZER, Grammar.regex(r"ccdde[0-9]ccdde[0-9]ccdde"))
    out = rollout(MODELS["llama"], [PROMPTS[3]] * 8, max_new_tokens=30, eos_token_ids=[EOS], constraint=constraint,
                  rows=[{}] * 8, table=MaskTable(len(TOKENIZER) + 3))  # fmt: skip
    assert all(len(ids) == 18 for ids in out.completion_ids)
    # the prompt, the first run of forced tokens, and a digit with the run after it; the last run ends the text
    assert out.forward_passes == 3


def test_passes_have_few_sizes_and_rows_that_finished_leave():
    """A run's worth of rollouts: what is captured once serves all, as long as nothing grows."""
    constraint = GrammarConstraint(TOKENIZER, Grammar.regex(r"[a-e]{1,40}"))
    decoder = Replayed(MODELS["llama"])
    seen = []
    for seed in range(12):
        torch.manual_seed(seed)
        rollout(MODELS["llama"], PROMPTS * 3, max_new_tokens=40, eos_token_ids=[EOS], constraint=constraint,
                rows=[{}] * 15, table=MaskTable(len(TOKENIZER) + 3), decoder=decoder)  # fmt: skip
        seen.append(set(decoder._graphs))
    assert seen[-1] == seen[5]
    assert {count for count, _, _ in seen[-1]} <= {1, 2, 4, 8, 15} and len({count for count, _, _ in seen[-1]}) >= 3
    assert {length for _, _, length in seen[-1]} == {256}


def adapted_model(seed=0):
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "v_proj", "down_proj"]
    model = get_peft_model(tiny(LlamaConfig, seed), LoraConfig(r=3, lora_alpha=5, target_modules=targets)).eval()
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    return model


def test_parts_in_fewer_kernels_compute_the_same_and_leave_the_model_as_it_was(monkeypatch):
    monkeypatch.setattr(compiled_module.torch, "compile", lambda function, **_: function)  # what it changes is torch's
    model = adapted_model()
    ids = torch.randint(1, 20, (3, 7))
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        parts = CompiledParts(without_adapter(model))
        with parts.used():
            adapted = [part for part in model.modules() if "lora_A" in dict(part.named_children())]
            assert len(adapted) == 6 and all("forward" in vars(part) for part in adapted)
            torch.testing.assert_close(model(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-5)
    assert not any("forward" in vars(part) for part in model.modules())


def test_weights_that_autocast_would_cast_are_cast_once_and_put_back():
    model = adapted_model()
    weights = {name: weight.clone() for name, weight in model.named_parameters()}
    decoder = Decoder(model)
    for _ in range(2):  # in between, training changes weights
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = rollout(model, PROMPTS, max_new_tokens=6, eos_token_ids=[EOS], decoder=decoder)
        for prompt, ids, logps in zip(PROMPTS, out.completion_ids, out.logps, strict=True):
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                wanted = dense_logps(model, prompt, ids, [0] * len(ids), None, 1.0)
            assert logps == pytest.approx(wanted, abs=0.15)  # bf16, and logits of about 10
        for name, weight in model.named_parameters():
            assert weight.dtype == torch.float32 and torch.equal(weight, weights[name])
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.mul_(0.5)
                weights[name] = weight.clone()


@torch.no_grad()
def test_folded_adapters_compute_the_same_and_leave_the_model_as_it_was():
    model = adapted_model()
    layers = [part for part in model.modules() if "lora_A" in dict(part.named_children())]
    cast = CastWeights(without_adapter(model), torch.float64)  # a type that rounds nothing
    for _ in range(2):
        before = {name: weight.clone() for name, weight in model.named_parameters()}
        rows = [torch.randn(2, layer.in_features) for layer in layers]
        expected = [layer(x) for layer, x in zip(layers, rows, strict=True)]
        with cast.used():
            assert len(layers) == 6 and all(layer.base_layer.weight.dtype == torch.float64 for layer in layers)
            for layer, x, wanted in zip(layers, rows, expected, strict=True):
                torch.testing.assert_close(layer(x.double()).float(), wanted, atol=1e-5, rtol=1e-5)
        assert not any("forward" in vars(part) for part in model.modules())
        assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
        for name, weight in model.named_parameters():
            if "lora" in name:
                weight.mul_(1.5)  # training goes on


def test_weights_that_are_in_the_type_of_autocast_already():
    model = copy.deepcopy(MODELS["llama"]).to(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = rollout(model, PROMPTS, max_new_tokens=3, eos_token_ids=[EOS], temperature=0)
        assert all(len(ids) == 3 or ids[-1] == EOS for ids in out.completion_ids)
    assert all(weight.dtype == torch.bfloat16 for weight in model.parameters())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captured passes need a GPU")
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-3), (torch.bfloat16, 0.15)])
def test_captured_passes_of_any_width_score_as_plain_ones_do(dtype, near):
    model = copy.deepcopy(MODELS["llama"]).to("cuda", dtype)
    constraint = GrammarConstraint(TOKENIZER, Grammar.regex(r"([a-e]cde){2}[0-9]ccddeccddeccddecc[a-e]{1,9}"))
    decoder = Decoder(model)
    for _ in range(3):
        table = MaskTable(model.config.vocab_size)
        out = rollout(model, PROMPTS, max_new_tokens=40, eos_token_ids=[EOS], constraint=constraint,
                      rows=[{}] * len(PROMPTS), table=table, decoder=decoder)  # fmt: skip
        for prompt, ids, logps, masks in zip(PROMPTS, out.completion_ids, out.logps, out.masks, strict=True):
            with torch.no_grad():
                wanted = dense_logps(copy.deepcopy(model).cpu().float(), prompt, ids, masks, table, 1.0)
            assert logps == pytest.approx(wanted, abs=near)


def test_attention_kernels_that_are_known_to_be_wrong_are_left_out():
    torch.backends.cuda.enable_cudnn_sdp(True)
    Decoder(MODELS["llama"])
    assert not torch.backends.cuda.cudnn_sdp_enabled()


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

    from trl_grpo_tasks import exact

    kept = []

    def keeping(*args, **kwargs):
        kept.append(rollout(*args, **kwargs))
        return kept[-1]

    monkeypatch.setattr(exact, "rollout", keeping)
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


# ---- vLLM: what can be tested without it


class Engine:
    """Stands in for TRL's VLLMGeneration: samples under the grammar it was handed, and says how likely tokens were."""

    def __init__(self, model, tokenizer):
        self.model, self.tokenizer, self.generation_kwargs = model, tokenizer, {}

    def sync_weights(self):
        pass

    def generate(self, prompts, **_):
        grammar = Grammar.ebnf(self.generation_kwargs["structured_outputs"]["grammar"])
        out = rollout(self.model, prompts, max_new_tokens=5, eos_token_ids=[self.tokenizer.eos_token_id],
                      constraint=GrammarConstraint(self.tokenizer, grammar), rows=[{}] * len(prompts),
                      table=MaskTable(self.model.get_output_embeddings().weight.shape[0]))  # fmt: skip
        return None, out.completion_ids, [[[logp] for logp in logps] for logps in out.logps], None


def with_engine(trainer, constraint):
    trainer.vllm_generation = Engine(trainer.model, trainer.processing_class)
    trainer.use_vllm, trainer._last_loaded_step = True, -1
    trainer._set_up_constraint(constraint)
    return trainer


def test_vllm_samples_under_the_grammar_and_scoring_replays_the_masks(tiny_path, tmp_path):
    trainer = toy_trainer(tiny_path, tmp_path, constrain=True, max_steps=1)
    constraint = GrammarConstraint(trainer.processing_class, Grammar.regex("[ab]{1,2}|c"))
    with_engine(trainer, constraint)
    trainer.model.train()
    output = trainer._generate_and_score_completions([trainer.train_dataset[i] for i in (0, 0, 0, 0, 3, 3, 3, 3)])
    scored = trainer._score(output, of_reference=False)
    is_real = output["completion_mask"].bool()
    assert (output["mask_numbers"][is_real] != 0).all()
    torch.testing.assert_close(scored[is_real], output["sampling_per_token_logps"][is_real], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.regex(r"(ab|c)+[0-9]{2}(x|\(\))?"),
        Grammar.json_schema({"type": "object", "properties": {"a": {"enum": [1, 10, "ab"]}}, "required": ["a"]}),
        Grammar.ebnf('root ::= "a" root "b" | [c-e]'),
    ],
    ids=lambda grammar: grammar.kind,
)
def test_what_vllm_is_handed_is_the_same_language(grammar):
    tokenizer = make_tokenizer([*'0123456789abcdex,(){}":', " ", "10", "ab"], 64)
    ours = GrammarConstraint(tokenizer, grammar)
    theirs = GrammarConstraint(tokenizer, Grammar.ebnf(ours.for_vllm()["grammar"]))
    generator = np.random.default_rng(0)
    for _ in range(10):
        a, b = ours.start({}), theirs.start({})
        for _ in range(30):
            assert np.array_equal(a.mask(), b.mask())
            allowed = np.flatnonzero(np.unpackbits(a.mask().view(np.uint8), bitorder="little"))
            token = int(generator.choice(allowed))
            a.accept(token)
            b.accept(token)
            if a.finished:
                break


def test_what_cannot_be_handed_to_vllm_is_refused(tiny_path, tmp_path):
    trainer = toy_trainer(tiny_path, tmp_path, constrain=True, max_steps=1)
    by_row = GrammarConstraint(trainer.processing_class, lambda row: Grammar.regex(row["letter"]))
    with pytest.raises(ValueError, match=r"from row to row.*leave use_vllm off"):
        with_engine(trainer, by_row)
    tree = ChoiceTreeConstraint(trainer.processing_class, lambda row: 0, lambda node: [("a", None)])
    with pytest.raises(ValueError, match="not a grammar"):
        with_engine(trainer, tree)
