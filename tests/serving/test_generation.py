"""The trainer's side of vLLM with stand-ins for the engine and the server; tests/vllm has the real ones."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from tests.support.toy import LettersConstraint, ToyTask
from tests.support.training import toy_trainer
from trl_grpo_tasks.constraints import ChoiceTreeConstraint, Grammar, GrammarConstraint
from trl_grpo_tasks.constraints.base import replay
from trl_grpo_tasks.constraints.filters import SamplingFilters
from trl_grpo_tasks.constraints.rebuilt import replay_all
from trl_grpo_tasks.constraints.table import MaskTable
from trl_grpo_tasks.models.loading import load_tokenizer
from trl_grpo_tasks.rollout import rollout
from trl_grpo_tasks.serving.generation import Sampled, VLLMRequests
from trl_grpo_tasks.serving.served_task import CONFIG_KEY, ServedTask

ROWS = [{"letter": "a"}, {"letter": "b"}, {"letter": "ä\n"}]


class Params:
    """As vLLM's SamplingParams: `clone` copies."""

    def __init__(self, extra_args=None):
        self.extra_args, self.max_tokens = extra_args, 5

    def clone(self):
        return Params(self.extra_args)


class Colocated:
    """TRL's VLLMGeneration with an engine that answers with the letter of each request's row."""

    mode, logprobs, tensor_parallel_size, max_completion_length = "colocate", 0, 1, 20

    def __init__(self, values=((-0.5,),), tokens=((7,),)):
        self.values, self.tokens, self.seen = values, tokens, []
        self.llm = SimpleNamespace(generate=self.engine_generate)

    def engine_generate(self, prompts, sampling_params, use_tqdm):
        self.seen = [params.extra_args for params in sampling_params] if isinstance(sampling_params, list) else []
        return prompts

    def generate(self, prompts, num_generations=1):
        self.llm.generate(prompts, sampling_params=Params(), use_tqdm=False)
        count = len(prompts)
        return prompts, [[7]] * count, [list(self.values)] * count, [list(self.tokens)] * count


class Served(Colocated):
    """TRL's VLLMGeneration with a server; prompts are sent once per group."""

    mode = "server"

    def __init__(self, group, info=None):
        super().__init__()
        self.group, self.accelerator = group, SimpleNamespace(is_main_process=True)
        self.vllm_client = SimpleNamespace(generate=self.client_generate, get_server_info=lambda: info)

    def client_generate(self, prompts, n, generation_kwargs=None):
        (prompt,) = prompts
        row = json.loads(generation_kwargs["vllm_xargs"]["row"])
        self.seen.append((prompt, row))
        answers = [[ord(row["letter"][0]), i] for i in range(n)]
        return {"prompt_ids": [prompt], "completion_ids": answers, "logprobs": [[[-1.0], [-2.0]]] * n,
                "logprob_token_ids": [[[1], [2]]] * n}  # fmt: skip

    def generate(self, prompts, num_generations=1):
        out = self.vllm_client.generate(prompts=prompts[:: self.group], n=self.group, generation_kwargs={"seed": 1})
        return prompts, out["completion_ids"], out["logprobs"], out["logprob_token_ids"]


def test_each_prompt_of_a_colocated_engine_has_its_row():
    generation = Colocated()
    requests = VLLMRequests(generation, "1", top_k=0, vocab_size=50)
    sampled = requests.sample(ROWS, lambda: generation.generate([[1], [2], [3]]), 1)
    assert [json.loads(extra["row"]) for extra in generation.seen] == ROWS
    assert sampled == Sampled([[7]] * 3, [[-0.5]] * 3, None)


def test_each_group_of_a_server_has_its_row_in_order():
    generation = Served(group=2)
    requests = VLLMRequests(generation, "", top_k=0, vocab_size=50)
    rows = [row for row in ROWS for _ in range(2)]
    prompts = [[i] for i in range(3) for _ in range(2)]
    sampled = requests.sample(rows, lambda: generation.generate(prompts), 2)
    assert sorted(generation.seen, key=str) == sorted(zip([[0], [1], [2]], ROWS, strict=True), key=str)
    assert sampled.completion_ids == [[ord(row["letter"][0]), i] for row in ROWS for i in range(2)]
    assert sampled.logps == [[-1.0, -2.0]] * 6


@pytest.mark.parametrize("lowest", [-math.inf, -9999.0, None], ids=["engine", "server", "NaN"])
def test_kept_tokens_are_read_from_the_returned_log_probs(lowest):
    generation = Colocated(values=[(-0.2, -1.7, lowest)], tokens=[(4, 7, 9)])
    requests = VLLMRequests(generation, "1", top_k=2, vocab_size=500)
    assert generation.logprobs > 2
    sampled = requests.sample(None, lambda: generation.generate([[1]]), 1)
    assert sampled == Sampled([[7]], [[-1.7]], [[[4, 7]]])
    assert generation.seen == []


def test_kept_tokens_that_vllm_did_not_all_return_are_an_error():
    values = [tuple(-float(i) for i in range(66))]
    generation = Colocated(values, [tuple(range(66))])
    requests = VLLMRequests(generation, "1", top_k=1, vocab_size=500)
    with pytest.raises(RuntimeError, match="set a larger top_k"):
        requests.sample(None, lambda: generation.generate([[1]]), 1)
    small = Colocated(values, [tuple(range(66))])  # all outputs of the model are returned
    assert len(VLLMRequests(small, "1", 30, 66).sample(None, lambda: small.generate([[1]]), 1).kept[0][0]) == 66


def test_rows_must_be_json():
    requests = VLLMRequests(Colocated(), "1", top_k=0, vocab_size=50)
    with pytest.raises(ValueError, match="cannot be sent to vLLM"):
        requests.sample([{"a": object()}], lambda: None, 1)


# ---- a server must sample as the run needs it


@pytest.fixture
def tokenizer(tiny_path):
    return load_tokenizer(tiny_path)


def problem_with(task, tokenizer, **changes):
    own = ServedTask.of(ToyTask(), tokenizer).to_config()
    model = {"logprobs_mode": "processed_logprobs", "max_model_len": 64} | changes.pop("model_config", {})
    info = {"additional_config": {CONFIG_KEY: own}, "model_config": model} | changes
    VLLMRequests(Served(1, info), "", 0, 50).sample_under(LettersConstraint(tokenizer), tokenizer, task)


def test_a_server_with_the_same_task_is_accepted(tokenizer):
    problem_with(ToyTask(), tokenizer)


@pytest.mark.parametrize(
    ("task", "changes", "message"),
    [
        (None, {}, "vllm_mode='colocate'"),
        (ToyTask(), {"additional_config": {}}, "trl-grpo-tasks serve"),
        (ToyTask(), {"model_config": {"logprobs_mode": "raw_logprobs"}}, "raw_logprobs"),
        (ToyTask(), {"model_config": {"max_model_len": 20}}, "max_completion_length=20 does not fit"),
        (ToyTask(), {"additional_config": {CONFIG_KEY: {"task": "brick", "options": {}, "tokenizer": "t",
                                                        "fingerprint": "f"}}}, "task 'brick'"),
    ],
)  # fmt: skip
def test_another_server_is_refused(tokenizer, task, changes, message):
    with pytest.raises(ValueError, match=message):
        problem_with(task, tokenizer, **changes)


# ---- masks of vLLM's completions


def test_replayed_masks_are_those_of_each_completion(tiny_path):
    tokenizer = load_tokenizer(tiny_path)
    tree = ChoiceTreeConstraint(tokenizer, lambda row: 3, lambda n: [("", None)] if n == 0 else
                                [("a", n - 1), ("bcd", n - 1)])  # fmt: skip
    grammar = GrammarConstraint(tokenizer, lambda row: row["p"] and Grammar.regex(row["p"]))
    ids = tokenizer.convert_tokens_to_ids
    end = [tokenizer.eos_token_id]
    texts = ["aaa", "abcda", "abcdbcd", "aa", "bcdaa"]
    cases = [
        (tree, [{}] * len(texts), [ids(list(text)) + end * (text != "aa") for text in texts]),
        (grammar, [{"p": "[ab]{2}cd"}, {"p": None}, {"p": "[ab]{2}cd"}], [ids([*"abcd"]) + end, [3, 4], ids([*"aa"])]),
    ]
    for constraint, rows, completions in cases:
        table = MaskTable(len(tokenizer) + 3)
        numbers = replay_all(constraint, rows, completions, table)
        assert numbers == [
            [table.number_of(mask) for mask in replay(constraint, row, one)]
            for row, one in zip(rows, completions, strict=True)
        ]
    for wrong in (ids([*"abc"]) + end, ids([*"ba"])):
        with pytest.raises(ValueError, match="not allowed"):
            replay_all(tree, [{}, {}], [cases[0][2][1], wrong], MaskTable(len(tokenizer)))


class OwnSampler:
    """Answers with completions of our rollouts in place of vLLM's."""

    def __init__(self, trainer, constraint, filters):
        self.trainer, self.constraint, self.filters = trainer, constraint, filters

    def mask_milliseconds(self):
        return 1.5

    def sample(self, rows, generate, group):
        model, table = self.trainer.model, MaskTable(self.trainer.generation.output_size())
        prompts = self.trainer._tokenizer([example["prompt"] for example in self.trainer.latest_rollout.examples])
        out = rollout(model, prompts["input_ids"], max_new_tokens=5, eos_token_ids=self.trainer.eos_token_ids,
                      constraint=self.constraint, rows=rows, table=table, filters=self.filters)  # fmt: skip
        kept = [[table.ids(number).tolist() for number in row] for row in out.masks] if self.filters else None
        return Sampled(out.completion_ids, out.logps, kept)


@pytest.mark.parametrize("filters", [SamplingFilters(), SamplingFilters(top_k=3)], ids=["", "top_k"])
def test_completions_are_scored_under_the_masks_they_were_sampled_under(tiny_path, tmp_path, filters):
    trainer = toy_trainer(tiny_path, tmp_path, constrain=True, max_steps=1, top_k=filters.top_k)
    constraint = LettersConstraint(trainer._tokenizer)
    trainer.generation.vllm, trainer.generation.uses_engine = OwnSampler(trainer, constraint, filters), False
    trainer.model.train()
    output = trainer._generate_and_score_completions([trainer.train_dataset[i] for i in (0, 0, 0, 0, 3, 3, 3, 3)])
    scored = trainer.scoring.logps(output, of_reference=False)
    is_real = output["completion_mask"].bool()
    assert (output["mask_numbers"][is_real] != 0).all()
    torch.testing.assert_close(scored[is_real], output["sampling_per_token_logps"][is_real], atol=1e-4, rtol=0)
    assert trainer._metrics["train"]["perf/vllm_mask_ms"] == [1.5]


def test_completions_outside_the_constraint_are_an_error(tiny_path, tmp_path):
    trainer = toy_trainer(tiny_path, tmp_path, constrain=True, max_steps=1)
    letters = LettersConstraint(trainer._tokenizer, most=5)
    trainer.generation.vllm, trainer.generation.uses_engine = OwnSampler(trainer, letters, SamplingFilters()), False
    trainer.model.train()
    with pytest.raises(RuntimeError, match="vLLM did not sample under the constraint"):
        for _ in range(20):
            trainer._generate_and_score_completions([trainer.train_dataset[0]] * 8)
