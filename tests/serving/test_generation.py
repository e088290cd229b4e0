"""The trainer's side of vLLM with stand-ins for the engine and the server; tests/vllm has the real ones."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset

from tests.support.toy import LettersConstraint, ToyTask
from tests.support.training import config
from trl_grpo_tasks import TaskGRPOTrainer
from trl_grpo_tasks.constraints import Grammar, GrammarConstraint
from trl_grpo_tasks.models.loading import load_tokenizer
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


# ---- constraints of a colocated engine


def test_a_constraint_of_your_own_without_a_task(serve, tiny_path, tmp_path):
    """Rows are the entries of the data set."""
    letters = LettersConstraint(load_tokenizer(tiny_path), most=2)
    args = config(tmp_path, constrain=True, use_vllm=True, vllm_mode="colocate", max_steps=1)
    rows = Dataset.from_dict({"prompt": ["a1x", "b2x"] * 4, "more": [1, None] * 4})
    rewards = {"reward_funcs": lambda completions, **_: [float(len(text)) for text in completions]}
    trainer = TaskGRPOTrainer(tiny_path, args=args, constraint=letters, train_dataset=rows, **rewards)
    trainer.train()
    (line,) = [line for line in trainer.state.log_history if "loss" in line]
    assert line["sampling/logp_difference_max"] < 1e-5 and line["completions/max_length"] <= 3
    assert line["constraint/allowed_tokens"] > 1 and line["perf/vllm_mask_ms"] > 0


def test_completions_outside_the_constraint_are_an_error(make):
    from trl_grpo_tasks.serving.processor import COLOCATED, Sampling

    trainer, _ = make("colocate", ToyTask(), constrain=True)
    (key,), tokenizer = COLOCATED, trainer._tokenizer
    COLOCATED[key] = Sampling(LettersConstraint(tokenizer, most=5), tokenizer.eos_token_id)
    with pytest.raises(RuntimeError, match="vLLM did not sample under the constraint"):
        for _ in range(20):
            trainer._generate_and_score_completions([trainer.train_dataset[0]] * 8)


def test_speculative_decoding_is_refused(serve):
    from trl_grpo_tasks.serving.processor import Processor

    with pytest.raises(ValueError, match="remove --speculative-config"):
        Processor(SimpleNamespace(speculative_config={"method": "ngram"}), torch.device("cpu"), False)


def test_events_of_asynchronous_scheduling(serve, tiny_path):
    """A real vLLM on a CPU schedules synchronously. With asynchronous scheduling, the last token of a completion is -1
    until `apply`, requests move within the batch, and a request runs once more after its end."""
    from trl_grpo_tasks.serving.processor import COLOCATED, MoveDirectionality, Processor, Sampling

    tokenizer = load_tokenizer(tiny_path)
    vocabulary = len(tokenizer)
    grammars = GrammarConstraint(tokenizer, lambda row: Grammar.regex(row["pattern"]))
    COLOCATED["events"] = Sampling(grammars, tokenizer.eos_token_id)
    config = SimpleNamespace(
        speculative_config=None,
        additional_config={CONFIG_KEY: {"key": "events"}},
        model_config=SimpleNamespace(get_vocab_size=lambda: vocabulary),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
    )
    processor = Processor(config, torch.device("cpu"), False)
    ids = tokenizer.convert_tokens_to_ids
    rows, outputs = [{"pattern": "ab"}, {"pattern": "cd"}], [[], []]
    added = [(i, Params(extra_args={"row": json.dumps(rows[i])}), [1], outputs[i]) for i in range(2)]

    def batch(size, **events):
        return SimpleNamespace(batch_size=size, **events)

    processor.update_state(batch(2, removed=[], added=added, moved=[]))

    def allowed():
        logits = processor.apply(torch.zeros(2, vocabulary))
        return [torch.nonzero(row == 0).flatten().tolist() for row in logits]

    def sample(first, second):
        for output in outputs:
            output.append(-1)
        processor.update_state(None)
        for output, token in zip(outputs, (first, second), strict=True):
            output[-1] = token

    assert allowed() == [[ids("a")], [ids("c")]]
    sample(ids("a"), ids("c"))
    processor.update_state(batch(2, removed=[], added=[], moved=[(0, 1, MoveDirectionality.SWAP)]))
    assert allowed() == [[ids("d")], [ids("b")]]
    sample(ids("b"), ids("d"))
    assert allowed() == [[tokenizer.eos_token_id]] * 2
    sample(tokenizer.eos_token_id, tokenizer.eos_token_id)
    assert allowed() == [list(range(vocabulary))] * 2  # vLLM discards what is sampled here
    processor.update_state(batch(1, removed=[0], added=[], moved=[(1, 0, MoveDirectionality.ONE_WAY)]))
    sample(5, 5)
    again = [(1, Params(extra_args={"row": json.dumps(rows[0])}), [1], [ids("a")])]  # after a preemption
    processor.update_state(batch(2, removed=[], added=again, moved=[]))
    assert allowed()[1] == [ids("b")]
