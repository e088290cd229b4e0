"""A real vLLM engine with our logits processor: its samples and log-probs are those of the model under the masks."""

import json
from collections import Counter

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError

from tests.support.rollouts import dense_logps
from tests.support.vllm_cpu import END_OF_TURN, ENGINE_OPTIONS, use_runner
from trl_grpo_tasks.constraints import ChoiceTreeConstraint, Grammar, GrammarConstraint, OneSpelling, ThinkThen
from trl_grpo_tasks.constraints.base import replay
from trl_grpo_tasks.constraints.budget import within
from trl_grpo_tasks.constraints.table import MaskTable
from trl_grpo_tasks.serving.processor import COLOCATED, Processor, Sampling
from trl_grpo_tasks.serving.served_task import CONFIG_KEY, PROCESSOR

PROMPT = [5, 6, 7]


def grammar_of(row):
    return None if row.get("pattern") is None else Grammar.regex(row["pattern"])


def constraints(tokenizer):
    grammar = GrammarConstraint(tokenizer, grammar_of)
    tree = ChoiceTreeConstraint(
        tokenizer, lambda row: row["depth"], lambda n: [("", None)] if n == 0 else [("a", n - 1), ("bcd", n - 1)]
    )
    return {
        "grammar": grammar,
        "one spelling": OneSpelling(tokenizer, grammar),
        "choices": tree,
        "thought": ThinkThen(tokenizer, OneSpelling(tokenizer, grammar), "cd", most_tokens=9),
    }


ROWS = {
    "grammar": [{"pattern": "[ab]{2,20}cdcd"}, {"pattern": None}, {"pattern": "(ab|cd){1,9}"}, {}],
    "one spelling": [{"pattern": "[abcd]{1,20}"}, {"pattern": "a(bcd){3,9}a"}],
    "choices": [{"depth": 9}, {"depth": 3}],
    "thought": [{"pattern": "[abcd]{1,20}"}, {"pattern": "a(bcd){3,9}a"}],
}


class Engine:
    """An engine with one runner, and the model that it serves. It has a cache for few requests, so that vLLM preempts
    some and computes them again later, and reads prompts in parts."""

    def __init__(self, model_path):
        self.tokenizer = AutoTokenizer.from_pretrained(model_path)
        self.model = AutoModelForCausalLM.from_pretrained(model_path)
        self.ends = {self.tokenizer.eos_token_id, self.tokenizer.convert_tokens_to_ids(END_OF_TURN)}
        settings = {"max_model_len": 64, "logprobs_mode": "processed_logprobs", "max_logprobs": -1, "seed": 0}
        settings |= {"max_num_seqs": 6, "num_gpu_blocks_override": 10, "block_size": 32}
        settings |= {"enable_prefix_caching": False, "max_num_batched_tokens": 16, "enable_chunked_prefill": True}
        settings |= {"logits_processors": [PROCESSOR], "additional_config": {CONFIG_KEY: {"key": "engine"}}}
        self.processors, make = [], Processor.__init__
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Processor, "__init__", lambda one, *args: self.processors.append(one) or make(one, *args))
            self.llm = LLM(model_path, **(ENGINE_OPTIONS | settings))

    def under(self, constraint):
        """Sample under this constraint from now on. A processor keeps its first one: an engine has one trainer."""
        COLOCATED["engine"] = Sampling(constraint, self.tokenizer.eos_token_id)
        for processor in self.processors:
            processor._states = None
            processor._live.clear()
        return self

    def generate(self, rows, prompts=None, **options):
        options = {"max_tokens": 30, "temperature": 0.8, "logprobs": 0} | options
        params = [
            SamplingParams(**options, extra_args=None if row is None else {"row": json.dumps(row)}) for row in rows
        ]
        prompts = prompts or [PROMPT] * len(rows)
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [output.outputs[0] for output in outputs]


@pytest.fixture(scope="module", params=[1, 2], ids=["V1", "V2"])
def engine(request, model_path):
    with use_runner(request.param):
        made = Engine(model_path)
        worker = made.llm.llm_engine.model_executor.driver_worker
        assert worker.use_v2_model_runner == (request.param == 2) and made.processors
        made.runner = request.param
        del worker
        yield made
        COLOCATED.clear()
        made.llm, made.processors = None, []  # pytest still refers to `made`


def check(engine, constraint, rows, outputs, prompts=None, temperature=0.8):
    """Completions are allowed and complete, and their log-probs are those of the model under the masks."""
    table = MaskTable(engine.model.config.vocab_size)
    for i, (row, output) in enumerate(zip(rows, outputs, strict=True)):
        ids = list(output.token_ids)
        masks = [None] * len(ids) if row is None else replay(constraint, row, ids)
        numbers = [table.number_of(mask) for mask in masks]
        is_free = row is None or constraint.start(row) is None
        ends = engine.ends if is_free else {engine.tokenizer.eos_token_id}
        assert (ids[-1] in ends) == (output.finish_reason == "stop") and not ends & set(ids[:-1])
        logps = [step[token].logprob for step, token in zip(output.logprobs, ids, strict=True)]
        prompt = PROMPT if prompts is None else prompts[i]
        with torch.no_grad():
            expected = dense_logps(engine.model, prompt, ids, numbers, table, temperature)
        assert logps == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("kind", ROWS)
def test_completions_are_sampled_under_their_own_constraints(engine, kind):
    constraint = constraints(engine.tokenizer)[kind]
    rows = [*ROWS[kind] * 4, None]  # more than fit at a time; the last has no constraint
    check(engine, constraint, rows, engine.under(constraint).generate(rows))


def test_completions_end_within_the_limit_of_their_request(engine):
    """As a server samples: the limit is that of the request, and a trainer scores under the same masks."""
    unlimited = constraints(engine.tokenizer)["thought"]
    rows = [{"pattern": "[abcd]{1,20}"}, {"pattern": "(ab|cd){2,9}"}] * 8
    outputs = engine.under(within(unlimited, None)).generate(rows, max_tokens=8)
    assert {output.finish_reason for output in outputs} == {"stop"}
    check(engine, within(unlimited, 8), rows, outputs)


def test_a_request_that_is_interrupted_goes_on_where_it_was(engine, monkeypatch):
    from vllm.v1.core.sched.scheduler import Scheduler

    preempted = []
    original = Scheduler._preempt_request
    monkeypatch.setattr(Scheduler, "_preempt_request", lambda *a, **k: preempted.append(1) or original(*a, **k))
    constraint = constraints(engine.tokenizer)["choices"]
    rows = [{"depth": 60}] * 6
    check(engine, constraint, rows, engine.under(constraint).generate(rows, max_tokens=58))
    assert preempted


def test_long_prompts_are_read_in_parts(engine):
    constraint = constraints(engine.tokenizer)["grammar"]
    rows = ROWS["grammar"] * 2
    prompts = [[5 + (i + k) % 4 for k in range(3 + 5 * (i % 3))] for i in range(len(rows))]
    check(engine, constraint, rows, engine.under(constraint).generate(rows, prompts), prompts)


def test_samples_follow_the_exact_distribution(engine):
    """Chi-squared test over whole completions of up to three tokens. V2 is interpreted here, and slow."""
    constraint, count = constraints(engine.tokenizer)["grammar"], 3000 if engine.runner == 1 else 300
    rows = [{"pattern": "[abc]{1,2}d?"}] * count
    outputs = engine.under(constraint).generate(rows, max_tokens=4)
    counts = Counter(tuple(output.token_ids) for output in outputs)
    table = MaskTable(engine.model.config.vocab_size)
    expected = {}
    for ids in counts:
        masks = [table.number_of(mask) for mask in replay(constraint, rows[0], ids)]
        with torch.no_grad():
            expected[ids] = count * np.exp(sum(dense_logps(engine.model, PROMPT, list(ids), masks, table, 0.8)))
    likely = [ids for ids in counts if expected[ids] >= 5]
    chi2 = sum((counts[ids] - expected[ids]) ** 2 / expected[ids] for ids in likely)
    assert len(likely) > 8 and sum(expected.values()) > 0.95 * count
    assert chi2 < len(likely) + 5 * (2 * len(likely)) ** 0.5


def test_a_bad_row_never_ends_the_engine(engine):
    """The first two are refused before they reach the engine. The constraint cannot start on the third."""
    constraint = constraints(engine.tokenizer)["choices"]
    engine.under(constraint)
    params = [SamplingParams(max_tokens=9, extra_args={"row": row}) for row in ("no JSON", "[1]", "{}")]
    for refused in params[:2]:
        with pytest.raises((ValueError, VLLMValidationError), match="JSON text of an object"):
            engine.llm.generate([{"prompt_token_ids": PROMPT}], refused, use_tqdm=False)
    (output,) = engine.llm.generate([{"prompt_token_ids": PROMPT}], params[2], use_tqdm=False)
    assert list(output.outputs[0].token_ids) == [engine.tokenizer.eos_token_id]
    check(engine, constraint, ROWS["choices"], engine.generate(ROWS["choices"]))
