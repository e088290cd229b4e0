"""Gaps of a model's tokens: any family of encoders, whatever its mask token and its way to split words."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.encoders import FAMILIES, save_encoder
from tests.support.exhaustive import exhaustive_but
from tests.support.training import config
from trl_grpo_tasks import TaskGRPOTrainer
from trl_grpo_tasks.commands.check import check_task
from trl_grpo_tasks.models.loading import load_model, load_tokenizer
from trl_grpo_tasks.models.masked_policy import MaskedPolicy
from trl_grpo_tasks.registry import get_task
from trl_grpo_tasks.tasks.infill import data, fills, masking

CORPUS = [*data.read_passages(None, "text")[:60], "A café, naïve and déjà vu: she understood “nothing” — or did she?"]


@pytest.fixture(scope="session", params=exhaustive_but(["bert", "modernbert", "albert"], FAMILIES))
def encoder(request, tmp_path_factory, judges_path):
    """The folder of a tiny encoder, and a task with gaps of its tokens."""
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "corpus.txt").write_text("\n\n".join(CORPUS), encoding="utf-8")
    path = save_encoder(folder / "model", request.param, CORPUS)
    options = {"corpus": str(folder / "corpus.txt"), "tokens_of": path, "text_length": 24, "span_lengths": [2, 4],
               "judge": str(judges_path / "judge"), "held_out_judge": str(judges_path / "held_out")}  # fmt: skip
    return path, get_task("infill", options)


def test_prompts_are_read_as_the_original_tokens_with_masks(encoder):
    """The oracle is the model's tokenizer: it splits the prompt into the row's pieces, except for the masks."""
    path, task = encoder
    tokenizer = load_tokenizer(path)
    policy = MaskedPolicy(tokenizer, load_model(path, policy="masked").config)
    rows = task.dataset("train", 200, 0)
    for row in rows:
        ids = policy.prompt_ids([row["prompt"]])[0]
        wanted = [tokenizer.mask_token if i in row["places"] else piece for i, piece in enumerate(row["pieces"])]
        assert tokenizer.convert_ids_to_tokens(ids)[1:-1] == wanted and len(wanted) <= 24
        gold = policy.ids_of(task.gold(row))
        assert policy.text_of(gold) == task.gold(row) and len(gold) == len(row["places"])
        assert task.filled(row, task.gold(row)) == tokenizer.convert_tokens_to_string(row["pieces"])
        score = task.score(row, task.gold(row))
        assert score.success and score.components == {"agreement": 1, "restored": 1}
    assert {row["schedule"] for row in rows} == set(masking.SCHEDULES)
    assert any(len(run) > 1 for row in rows for run in masking.runs(row["places"])), "no gap of several tokens"


def test_words_are_masked_as_a_whole(encoder):
    path, task = encoder
    tokenizer = load_tokenizer(path)
    several = 0
    for row in task.dataset("train", 200, 1):
        text = tokenizer.convert_tokens_to_string(row["pieces"])
        word_of = tokenizer(text, add_special_tokens=False).word_ids()
        if row["schedule"] == "words" and len(word_of) == len(row["pieces"]):
            masked = {word_of[place] for place in row["places"]}
            assert row["places"] == [place for place, word in enumerate(word_of) if word in masked]
            several += len(row["places"]) > len(masked)
    assert several, "no word of several tokens was masked"


def test_greedy_fills_are_the_argmax_of_the_plain_model(encoder):
    path, task = encoder
    tokenizer, model = load_tokenizer(path), load_model(path, policy="masked").eval()
    policy = MaskedPolicy(tokenizer, model.config, 0)
    prompts = [row["prompt"] for row in task.dataset("test", 8, 0)]
    filled = policy.fill(model, policy.prompt_ids(prompts)).ids
    named = {number: token for token, number in tokenizer.get_vocab().items()}
    allowed = [i for i, token in named.items() if i not in tokenizer.all_special_ids and " " not in token]
    for prompt, found in zip(prompts, filled, strict=True):
        inputs = tokenizer(prompt, return_tensors="pt")
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[0]
        at_masks = logits[inputs["input_ids"][0] == tokenizer.mask_token_id]
        assert found == [allowed[i] for i in at_masks[:, allowed].argmax(1).tolist()]
        text = policy.text_of(found)
        assert policy.ids_of(text) == found and len(text.split(" ")) == len(found)


def test_every_family_can_be_trained(encoder, tmp_path):
    path, task = encoder
    options = {"max_steps": 1, "beta": 0.1, "train_rows": 16, "fill_steps": 2, "guard": "restored"}
    trainer = TaskGRPOTrainer(path, args=config(tmp_path, **options), task=task)
    trainer.train()
    (line,) = [line for line in trainer.state.log_history if "reward" in line]
    assert line["rewards/valid/mean"] == 1 and line["reward_std"] > 0
    assert line["sampling/logp_difference_max"] < 1e-4


def test_the_contract_and_the_context_of_every_family(encoder):
    path, task = encoder
    check_task(task)
    model = load_model(path, policy="masked")
    policy = MaskedPolicy(load_tokenizer(path), model.config)
    mask = load_tokenizer(path).mask_token
    assert len(policy.prompt_ids([mask * 62])[0]) == 64
    policy.fill(model, policy.prompt_ids([mask * 62]))
    with pytest.raises(ValueError, match="65 tokens is longer than the model's context of 64"):
        policy.prompt_ids([mask * 63])


def test_a_users_text_is_split_as_the_model_splits_it(encoder):
    path, task = encoder
    tokenizer = load_tokenizer(path)
    for text in ("she was _ __ here", f"she was {tokenizer.mask_token} _{tokenizer.mask_token} here"):
        row = task.row_of(text)
        ids = tokenizer(row["prompt"])["input_ids"]
        assert ids == tokenizer(text.replace("_", tokenizer.mask_token))["input_ids"]
        assert ids.count(tokenizer.mask_token_id) == len(row["places"]) == 3
    with pytest.raises(ValueError, match="write one _ for each missing token"):
        task.row_of("she was here")


@settings(max_examples=30)
@given(completion=st.text(max_size=60))
def test_any_completion_gets_a_score(encoder, completion):
    _, task = encoder
    row = task.row_of("she _ here _")
    for text in (completion, f"{completion.replace(' ', '')} x"):
        score = task.score(row, text)
        assert score is not None and (task.filled(row, text) is None) == (not score.valid)


def test_whole_gaps_are_counted():
    row = {"pieces": ["a", "b", "c", "d", "e"], "places": [0, 1, 3], "policy": "masked"}
    assert [fills.restored(row, found) for found in (["a b", "d"], ["a x", "d"], ["x b", "x"])] == [1, 0.5, 0]
    assert fills.agreement(row, ["a x", "d"]) == pytest.approx(2 / 3)


def test_models_without_a_mask_token_are_reported(tiny_path):
    with pytest.raises(ValueError, match="its tokenizer has no mask token; choose a masked language model"):
        get_task("infill", {"tokens_of": tiny_path}).dataset("train", 1, 0)


def test_a_vocabulary_that_does_not_suit_the_corpus_is_reported(tmp_path):
    path = save_encoder(tmp_path / "model", "bert", CORPUS)
    (tmp_path / "text.txt").write_text(
        "漢字 漢字 漢字 漢字 漢字 漢字 漢字\n\n仮名 仮名 仮名 仮名 仮名 仮名 仮名", encoding="utf-8"
    )
    with pytest.raises(ValueError, match="cannot be written in its tokens with masks"):
        get_task("infill", {"tokens_of": path, "corpus": str(tmp_path / "text.txt")}).dataset("train", 1, 0)


def test_spans_have_the_given_lengths():
    """Where a text has room for one span only, its gap has the given length."""
    for length in (1, 4):
        ratio = length / 64
        task = get_task("infill", {"masking": ["spans"], "span_lengths": [length, length], "mask_ratios": [ratio]})
        rows = [row for row in task.dataset("train", 50, 0) if round(ratio * len(row["pieces"])) == length]
        whole = [row["places"] for row in rows if len(masking.runs(row["places"])) == 1]
        assert len(whole) > len(rows) / 2 and all(len(places) == length for places in whole)
