"""Checkpoints of bidirectional nanoGPT encoders: the folder computes what the file computes; no code is run."""

import pickle
import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.pt_file import CHARACTERS, CONTEXT, hidden_states, judge_score, meta, write_pt
from trl_grpo_tasks.models.char_encoder import GENERATOR, JUDGE, convert_pt
from trl_grpo_tasks.models.loading import load_model, load_tokenizer
from trl_grpo_tasks.models.masked_policy import MaskedPolicy
from trl_grpo_tasks.rewards.classifier import load_judge

MASK = len(CHARACTERS)
TEXTS = ["To be, or not to be", "a", "What's in a name?" * 2]


def ids_of(text):
    return [CHARACTERS.index(character) for character in text]


@pytest.mark.parametrize("bias", [True, False])
def test_a_generator_has_the_logits_of_its_file(tmp_path, bias):
    state = write_pt(tmp_path / "ckpt.pt", bias=bias)
    convert_pt(tmp_path / "ckpt.pt", tmp_path / "model", GENERATOR)
    model = load_model(str(tmp_path / "model"), policy="masked").eval()
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    prompts = [text[:2] + "<mask><mask>" + text[2:] for text in TEXTS]
    policy = MaskedPolicy(tokenizer, model.config)
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="right")
    assert [ids.count(MASK) for ids in policy.prompt_ids(prompts)] == [2, 2, 2] and policy.allowed == len(CHARACTERS)
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    for row, text in zip(logits, TEXTS, strict=True):
        ids = [*ids_of(text[:2]), MASK, MASK, *ids_of(text[2:])]
        oracle = hidden_states(state, ids) @ state["lm_head.weight"].double().T
        torch.testing.assert_close(row[: len(ids), :-1].double(), oracle, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("bias", "cls"), [(True, True), (False, False)])
def test_a_judge_has_the_scores_of_its_file(tmp_path, bias, cls):
    state = write_pt(tmp_path / "judge.pt", "sequence_scorer", bias=bias, cls=cls)
    convert_pt(tmp_path / "judge.pt", tmp_path / "judge", JUDGE)
    model, tokenizer = load_judge(str(tmp_path / "judge"))
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True, return_token_type_ids=False)
    with torch.no_grad():
        scores = model(**batch).logits[:, 0].sigmoid().tolist()
    oracle = [judge_score(state, ids_of(text), MASK + 1 if cls else None) for text in TEXTS]
    assert scores == pytest.approx(oracle, abs=1e-5) and max(oracle) - min(oracle) > 0.01


def test_meta_beside_the_file_is_read_if_the_file_has_none(tmp_path):
    write_pt(tmp_path / "ckpt.pt", with_meta=False)
    with pytest.raises(ValueError, match="does not say which characters its tokens are"):
        convert_pt(tmp_path / "ckpt.pt", tmp_path / "model", GENERATOR)
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta()))
    convert_pt(tmp_path / "ckpt.pt", tmp_path / "model", GENERATOR)
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    assert tokenizer.convert_tokens_to_ids(["<mask>", "A"]) == [MASK, CHARACTERS.index("A")]


class Hostile:
    def __reduce__(self):
        return (exec, ("raise SystemExit('code of a file was run')",))


def test_no_code_of_a_file_is_run(tmp_path):
    torch.save({"model": {}, "model_args": Hostile()}, tmp_path / "ckpt.pt")
    with pytest.raises(ValueError, match=r"holds an object of \S*exec, which is not loaded, because that could run"):
        convert_pt(tmp_path / "ckpt.pt", tmp_path / "model", GENERATOR)
    write_pt(tmp_path / "ckpt.pt", with_meta=False)
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"itos": Hostile()}))
    with pytest.raises(ValueError, match=r"meta.pkl cannot be read \(UnpicklingError: it holds an object of \S*exec"):
        convert_pt(tmp_path / "ckpt.pt", tmp_path / "model", GENERATOR)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"attention_type": "causal"}, "attention_type 'causal' is not supported; only 'bidirectional' is"),
        ({"position_encoding": "absolute"}, "position_encoding 'absolute' is not supported; only 'rotary' is"),
        ({"n_head": 3}, "n_embd 16 must be a multiple of twice n_head 3"),
        ({"block_size": None}, r"model_args\['block_size'\] must be a number above 0, got None"),
        ({"n_layer": 3}, r"not those of an encoder with these model_args \(KeyError"),
        ({"n_layer": 1}, "unknown weights transformer.h.1"),
        ({"n_embd": 32}, r"not those of an encoder with these model_args \(RuntimeError"),
        ({"vocab_size": 20}, r"model_args \(RuntimeError: embeddings of 61 tokens"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, changed, words):
    write_pt(tmp_path / "ckpt.pt", **changed)
    with pytest.raises(ValueError, match=words):
        convert_pt(tmp_path / "ckpt.pt", tmp_path / "model", GENERATOR)


def test_a_generator_is_no_judge(tmp_path):
    write_pt(tmp_path / "ckpt.pt")
    with pytest.raises(ValueError, match="has the mode 'language_model', but 'sequence_scorer' is needed"):
        convert_pt(tmp_path / "ckpt.pt", tmp_path / "model", JUDGE)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"not a checkpoint", pickle.dumps([1, 2])])
def test_other_files_are_reported(tmp_path, content):
    (tmp_path / "ckpt.pt").write_bytes(content)
    with pytest.raises(ValueError, match="cannot be read as a PyTorch file"):
        convert_pt(tmp_path / "ckpt.pt", tmp_path / "model", GENERATOR)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.floats(0, 0.99), place=st.floats(0, 0.99), byte=st.integers(0, 255))
def test_damaged_files_never_end_in_another_error(tmp_path, cut, place, byte):
    """A file that was cut off, or in which a byte was changed, is converted or refused with a ValueError."""
    file = tmp_path / "ckpt.pt"
    write_pt(file)
    whole = file.read_bytes()
    spot = int(place * len(whole))
    for damaged in (whole[: int(cut * len(whole))], whole[:spot] + bytes([byte]) + whole[spot + 1 :]):
        file.write_bytes(damaged)
        try:
            convert_pt(file, tmp_path / "model", GENERATOR)
        except ValueError as error:
            assert re.match(rf"{re.escape(str(file))}|'itos'", str(error))


def test_characters_that_are_not_in_the_alphabet_are_reported(tmp_path):
    write_pt(tmp_path / "ckpt.pt")
    convert_pt(tmp_path / "ckpt.pt", tmp_path / "model", GENERATOR)
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    policy = MaskedPolicy(tokenizer, load_model(str(tmp_path / "model"), policy="masked").config)
    with pytest.raises(ValueError, match=r"no token for these characters of the prompts: '5' 'é'; choose"):
        policy.prompt_ids(["fine <mask>", "at 5 o<mask>clock é"])
    with pytest.raises(ValueError, match=f"context of {CONTEXT}"):
        policy.prompt_ids(["<mask>" * (CONTEXT + 1)])
