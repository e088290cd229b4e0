"""Rollouts on a GPU, with kernels and captured passes, against plain forward passes and `generate`."""

import copy
from collections import Counter

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.support.families import FAMILIES
from tests.support.quantised import needs_bitsandbytes, quantization
from tests.support.rollouts import EOS, MODELS, TOKENIZER, dense_logps
from trl_grpo_tasks.constraints import Grammar, GrammarConstraint
from trl_grpo_tasks.constraints.base import replay
from trl_grpo_tasks.constraints.filters import SamplingFilters
from trl_grpo_tasks.constraints.table import MaskTable
from trl_grpo_tasks.rollout import Decoder, engine, rollout

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

VOCABULARY = len(TOKENIZER) + 3
LONG = [5 + i % 13 for i in range(150)]  # fills two pages of the cache and a part of the third
PROMPTS = [[9], [5, 6, 7], LONG[:65], [5, 6, 7], LONG, LONG, [9], LONG[:64], LONG, [5 + i % 7 for i in range(130)]]
FORCED = GrammarConstraint(TOKENIZER, Grammar.regex(r"([a-e]cde){2}[0-9]ccddeccddeccddecc[a-e]{1,9}"))
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCABULARY, "pad_token_id": 0,
         "eos_token_id": EOS}  # fmt: skip
# Mean and largest error of a log-prob. In half precision, an expert may be chosen that is a near tie in float32.
NEAR = {torch.float32: (1e-4, 1e-3), torch.float16: (0.01, 0.05), torch.bfloat16: (0.04, 0.25)}


@pytest.fixture(autouse=True)
def without_compilation(request, monkeypatch):
    """Compilation takes seconds per model, so that few cases are compiled."""
    if "compiled" not in request.node.name:
        monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")


def make_model(family, dtype=torch.float32):
    """A model whose next token is uncertain, but not so sharp that rounding decides."""
    config_class, options = FAMILIES[family]
    if "moe_intermediate_size" in options:
        options = options | {"moe_intermediate_size": 32}  # bf16 experts need multiples of 8
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_class(**SIZES | options))
    for name, weight in model.named_parameters():
        if "sinks" in name:
            torch.nn.init.normal_(weight)
        elif weight.dim() > 1:
            weight.data.mul_(16 if "lm_head" in name else 4)
    return model.eval().to("cuda", dtype)


def check(reference, prompts, out, length, near, table=None, constraint=None):
    """Rows are complete, masks are those of a replay, and log-probs those of plain passes of `reference`."""
    mean, largest = near
    errors = []
    for prompt, ids, masks, logps in zip(prompts, out.completion_ids, out.masks, out.logps, strict=True):
        assert 1 <= len(ids) <= length and (len(ids) == length or ids[-1] == EOS) and EOS not in ids[:-1]
        if constraint is not None:
            assert masks == [table.number_of(mask) for mask in replay(constraint, {}, ids)]
        with torch.no_grad():
            wanted = dense_logps(reference, prompt, ids, masks, table, 0.8)
        errors += [abs(logp - other) for logp, other in zip(logps, wanted, strict=True)]
    assert sum(errors) / len(errors) < mean and max(errors) < largest


def check_rollouts(model, near, constraint=None, times=2, reference=None, **options):
    """Check several rollouts of one decoder, between which weights change as in training."""
    decoder, length = Decoder(model), 30
    for seed in range(times):
        table = MaskTable(VOCABULARY)
        if constraint is not None:
            options |= {"constraint": constraint, "rows": [{}] * len(PROMPTS), "table": table}
        elif "filters" in options:
            options |= {"table": table}
        torch.manual_seed(seed)
        out = rollout(model, PROMPTS, max_new_tokens=length, eos_token_ids=[EOS], temperature=0.8, decoder=decoder,
                      **options)  # fmt: skip
        plain = reference or copy.deepcopy(model).cpu().float()
        check(plain, PROMPTS, out, length, near, options.get("table"), constraint)
        if reference is None:
            with torch.no_grad():
                for weight in model.parameters():
                    weight.mul_(0.95)


KINDS = {
    "free": {},
    "compiled": {},
    "constraint": {"constraint": FORCED},
    "compiled constraint": {"constraint": FORCED},
    "refill": {"batch_size": 3},
    "refill under a constraint": {"batch_size": 3, "constraint": FORCED},
    "filters": {"filters": SamplingFilters(top_k=5)},
}
CASES = [
    *(("llama", torch.float32, kind) for kind in ("free", "constraint", "refill", "filters")),
    ("llama", torch.float32, "refill under a constraint"),
    ("llama", torch.bfloat16, "compiled"),
    *(("llama", dtype, kind) for dtype in (torch.bfloat16, torch.float16) for kind in ("constraint", "refill")),
    ("llama-biased", torch.float16, "free"),
    ("gemma2", torch.float32, "compiled constraint"),
    *((family, dtype, "refill") for family in ("gemma2", "gemma3_text") for dtype in (torch.float32, torch.bfloat16)),
    ("gpt_oss", torch.float32, "free"),  # not captured
    ("gpt_oss", torch.float32, "constraint"),
    ("qwen3_moe", torch.float32, "refill"),  # not captured
    ("qwen3_moe", torch.bfloat16, "free"),
    ("mixtral-sliding", torch.bfloat16, "constraint"),
]


@pytest.mark.parametrize(("family", "dtype", "kind"), CASES, ids=lambda value: str(value).removeprefix("torch."))
def test_log_probs_equal_a_forward_pass(family, dtype, kind):
    mean, largest = NEAR[dtype]
    is_moe = "moe" in family or "mixtral" in family
    near = (mean, 3.0) if is_moe and dtype != torch.float32 else (mean, largest)
    check_rollouts(make_model(family, dtype), near, **KINDS[kind])


@pytest.mark.parametrize(
    ("targets", "dtype", "kind"),
    [
        ("all-linear", torch.bfloat16, "compiled"),
        ("all-linear", torch.bfloat16, "refill under a constraint"),
        ("all-linear", torch.float16, "constraint"),
        (["q_proj", "v_proj"], torch.bfloat16, "constraint"),
        (["q_proj", "v_proj"], torch.float16, "refill"),
    ],
    ids=str,
)
def test_adapters_under_autocast(targets, dtype, kind):
    torch.manual_seed(0)
    model = get_peft_model(make_model("llama"), LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    with torch.autocast("cuda", dtype):
        check_rollouts(model.eval(), NEAR[dtype], **KINDS[kind])


@needs_bitsandbytes
@pytest.mark.parametrize("kind", ["free", "refill under a constraint"])
def test_adapters_of_4bit_weights(kind, tmp_path):
    make_model("llama").save_pretrained(tmp_path)
    config = quantization(4, bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_quant_type="nf4")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=config, dtype=torch.bfloat16, device_map={"": 0}
    )
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).eval()
    check_rollouts(model, NEAR[torch.bfloat16], reference=model, **KINDS[kind])


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text", "gpt_oss", "qwen3_moe", "mistral-sliding"])
@pytest.mark.parametrize("batch_size", [3, None])
def test_greedy_equals_generate(family, batch_size):
    model = make_model(family)
    out = rollout(model, PROMPTS, max_new_tokens=20, eos_token_ids=[EOS], temperature=0, batch_size=batch_size)
    for prompt, ids in zip(PROMPTS, out.completion_ids, strict=True):
        given = torch.tensor([prompt], device="cuda")
        theirs = model.generate(input_ids=given, attention_mask=torch.ones_like(given), do_sample=False,
                                max_new_tokens=20, eos_token_id=EOS, pad_token_id=0)  # fmt: skip
        assert ids == theirs[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", ["free", "constraint"])
def test_samples_follow_the_exact_distribution(kind):
    """Chi-squared test over pairs of tokens; without a constraint, all rows share one captured step."""
    model, count, table = copy.deepcopy(MODELS["qwen2"]).cuda(), 3000, MaskTable(VOCABULARY)
    constraint = GrammarConstraint(TOKENIZER, Grammar.regex("[0-9a-e]{2,9}"))
    options = {"constraint": constraint, "rows": [{}] * count, "table": table} if kind == "constraint" else {}
    torch.manual_seed(0)
    out = rollout(model, [[5, 6, 7]] * count, max_new_tokens=2, eos_token_ids=[EOS], **options)
    counts = Counter(map(tuple, out.completion_ids))
    masks = dict(zip(map(tuple, out.completion_ids), out.masks, strict=True))
    with torch.no_grad():
        logps = {ids: sum(dense_logps(MODELS["qwen2"], [5, 6, 7], list(ids), masks[ids],
                                      table if options else None, 1.0)) for ids in counts}  # fmt: skip
    expected = {ids: count * torch.tensor(logp).exp().item() for ids, logp in logps.items()}
    likely = [ids for ids in counts if expected[ids] >= 5]
    rest = count - sum(expected[ids] for ids in likely)
    chi2 = sum((counts[ids] - expected[ids]) ** 2 / expected[ids] for ids in likely)
    if rest > 5:
        chi2 += (count - sum(counts[ids] for ids in likely) - rest) ** 2 / rest
    assert len(likely) >= 5 and chi2 < len(likely) + 5 * (2 * len(likely)) ** 0.5


@pytest.mark.parametrize("count", [2, 3])
def test_groups_of_constrained_rows(count, monkeypatch):
    monkeypatch.setattr(engine, "group_count", lambda *_: count)
    check_rollouts(make_model("llama"), NEAR[torch.float32], FORCED, batch_size=6)


def test_little_memory(monkeypatch):
    """With pages for about three rows, all rows are completed."""
    monkeypatch.setattr(Decoder, "_free_memory", lambda _: int(3.5 * 192 * 2 * 2 * 2 * 16 * 4 / 0.8))
    check_rollouts(make_model("llama"), NEAR[torch.float32])
    check_rollouts(make_model("llama"), NEAR[torch.float32], FORCED)


def test_nothing_is_left_of_a_rollout():
    """The cache is freed; weights that were copied for autocast are freed or stay within their bound."""
    model = make_model("llama")
    decoder, before = Decoder(model), None
    for _ in range(3):
        rollout(model, PROMPTS, max_new_tokens=2000, eos_token_ids=[EOS], decoder=decoder, batch_size=2)
        torch.cuda.synchronize()
        if before is not None:
            assert torch.cuda.memory_allocated() <= before
        before = torch.cuda.memory_allocated()
