"""Tiny models, model folders, GGUF files, tokenizers, and the cold start."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.gguf_file import write_gguf
from tests.support.tokenizer_makes import byte_level, word_level
from tests.support.toy import ToyTask
from trl_grpo_tasks.commands.task_template import MyTask
from trl_grpo_tasks.constraints.vocabulary import Vocabulary
from trl_grpo_tasks.evaluation.evaluate import evaluate
from trl_grpo_tasks.models.loading import end_of_answer, load_model, load_tokenizer, model_config, prepare_model
from trl_grpo_tasks.models.precision import fast_half_precision, is_bf16_fast
from trl_grpo_tasks.models.tiny import make_tokenizer, save_tiny
from trl_grpo_tasks.rewards.executor import RewardExecutor
from trl_grpo_tasks.task import Task, TinySpec
from trl_grpo_tasks.training.cold_start import cold_start, gold_dataset

TOKENS = [*"abcrik", "ab", "abc", " ", "  ", "brick", ".", "*", "(", "é", "\\", "\U0001f9f1"]
TOKENIZER = make_tokenizer(TOKENS, context=32)


# ---- the tokenizer of a tiny model


def longest_matches(text: str) -> list[str]:
    """The oracle: split a text greedily into the longest matching tokens."""
    pieces = []
    while text:
        pieces.append(max((token for token in [*TOKENS, "\n"] if text.startswith(token)), key=len))
        text = text[len(pieces[-1]) :]
    return pieces


@given(st.lists(st.sampled_from([*TOKENS, "\n"]), max_size=30).map("".join))
@settings(max_examples=200)
def test_text_is_tokenized_greedily_and_decoded_without_loss(text):
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.convert_ids_to_tokens(ids) == longest_matches(text)
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.decode([*ids, TOKENIZER.eos_token_id], skip_special_tokens=True) == text


def test_unknown_characters_keep_their_position():
    ids = TOKENIZER.encode("a??b")
    assert ids[0] == TOKENIZER.convert_tokens_to_ids("a") and ids[-1] == TOKENIZER.convert_tokens_to_ids("b")
    assert set(ids[1:-1]) == {TOKENIZER.unk_token_id}


@pytest.mark.parametrize("tokens", [["a", ""], ["a", "<eos>"], ["<pad>"]])
def test_invalid_tokens_are_rejected(tokens):
    with pytest.raises(ValueError, match="must not be empty or one of"):
        make_tokenizer(tokens, 8)


def test_the_chat_template_ends_answers():
    question = [{"role": "user", "content": "ab"}]
    answer = [{"role": "assistant", "content": "b"}]
    asked = TOKENIZER.apply_chat_template(question, add_generation_prompt=True, return_dict=True)["input_ids"]
    whole = TOKENIZER.apply_chat_template(question + answer, return_dict=True)["input_ids"]
    assert whole[: len(asked)] == asked and TOKENIZER.decode(asked) == "ab\n"
    assert whole[len(asked) :] == [TOKENIZER.convert_tokens_to_ids("b"), TOKENIZER.eos_token_id]


# ---- sources of models


def test_tiny_is_built_once_and_again_if_it_would_differ(tmp_path):
    folder = prepare_model(None, ToyTask(), tmp_path, seed=3)
    weights = (Path(folder) / "model.safetensors").read_bytes()
    assert prepare_model("tiny", ToyTask(), tmp_path, seed=3) == folder
    assert (Path(folder) / "model.safetensors").read_bytes() == weights
    prepare_model("tiny", ToyTask(), tmp_path, seed=4)
    assert (Path(folder) / "model.safetensors").read_bytes() != weights
    (Path(folder) / "made_from.json").unlink()  # it is incomplete
    prepare_model("tiny", MyTask(), tmp_path)
    assert AutoModelForCausalLM.from_pretrained(folder).config.hidden_size == 64


CHAT = "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"


def chat_tokenizer(template):
    tokenizer = make_tokenizer(TOKENS, context=32)
    tokenizer.add_tokens(["<|start|>", "<|end|>"], special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


def test_eos_token_is_the_one_that_the_chat_template_uses(tmp_path):
    """Base models and some GGUF files name an eos_token that differs from the one that ends an answer in a chat."""
    tokenizer = chat_tokenizer(CHAT)
    tokenizer.eos_token = "<|start|>"
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.eos_token == "<|end|>" and loaded.pad_token == tokenizer.pad_token
    assert Vocabulary.of(loaded).eos == loaded.convert_tokens_to_ids("<|end|>")


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHAT, "<|end|>"),
        (CHAT.replace("<|end|>", " <|end|>|"), "<|end|>"),
        (CHAT.replace("<|end|>", ""), None),
        ("{{ raise_exception('roles must alternate') }}", None),
        (None, None),
    ],
)
def test_end_of_answer_is_read_from_the_chat_template(template, end):
    assert end_of_answer(chat_tokenizer(template)) == end


def test_missing_models_are_reported(tmp_path, monkeypatch):
    def refused(*_, **__):
        raise ConnectionError("nobody listens")

    class Large(Task):
        name = "large"

    for name in ("./none", "/none/such", "~/none/such", "a/b/c"):
        with pytest.raises(ValueError, match=f"--model {name}: .* does not exist"):
            prepare_model(name, ToyTask(), tmp_path)
    with pytest.raises(ValueError, match=r"holds neither config[.]json nor adapter_config[.]json"):
        prepare_model(str(tmp_path), ToyTask(), tmp_path)
    with pytest.raises(ValueError, match=r"--model none.gguf: this path does not exist"):
        prepare_model("none.gguf", ToyTask(), tmp_path)
    with pytest.raises(ValueError, match="has no embedded tiny model with these options; give --model"):
        prepare_model(None, Large(), tmp_path)
    with pytest.raises(ValueError, match=r"--model owner/name: there is no such folder, .* HF_HUB_OFFLINE is set; co"):
        prepare_model("owner/name", ToyTask(), tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("trl_grpo_tasks.models.loading.use_cache_if_unreachable", lambda: None)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", refused)
    assert prepare_model("owner/name", ToyTask(), tmp_path) == "owner/name"  # the Hub is asked later
    assert list(tmp_path.iterdir()) == []


def test_a_gguf_file_becomes_a_folder_with_the_same_logits(tmp_path):
    write_gguf(tmp_path / "small.gguf")
    folder = prepare_model(str(tmp_path / "small.gguf"), ToyTask(), tmp_path / "run")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), load_tokenizer(folder)
    direct = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="small.gguf", dtype=torch.float32)
    text = "abcd é a ab"
    ids = tokenizer(text, return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == text and tokenizer.tokenize("abcd a") == ["abcd", "Ġa"]
    assert torch.equal(model(ids).logits, direct(ids).logits) and model(ids).logits.std() > 0.1
    assert model.config._name_or_path == folder, "TRL loads the reference model from this path"
    assert (tokenizer.eos_token_id, tokenizer.pad_token) == (260, "<|endoftext|>") and tokenizer.chat_template
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(again(ids).logits, model(ids).logits)
    write_gguf(tmp_path / "other.gguf", seed=1)
    prepare_model(str(tmp_path / "other.gguf"), ToyTask(), tmp_path / "run")
    assert not torch.equal(AutoModelForCausalLM.from_pretrained(folder)(ids).logits, model(ids).logits)


def test_adapter_without_a_tokenizer_uses_that_of_its_base_model(tmp_path, tiny_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": tiny_path}))
    assert load_tokenizer(str(tmp_path)).get_vocab() == load_tokenizer(tiny_path).get_vocab()


@pytest.mark.parametrize(("tokenizer", "cleans"), [(byte_level(), False), (word_level(), True)], ids=["bpe", "words"])
def test_spaces_are_not_cleaned_up_where_transformers_would_only_warn(tokenizer, cleans, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"clean_up_tokenization_spaces": True}))
    loaded, plain = load_tokenizer(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
    assert (loaded.clean_up_tokenization_spaces, plain.clean_up_tokenization_spaces) == (cleans, True)
    ids = loaded.encode("10 ,1", add_special_tokens=False)
    assert loaded.decode(ids) == plain.decode(ids) == ("10,1" if cleans else "10 ,1")


def test_half_precision_is_bf16_on_recent_gpus_and_fp16_on_others(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert fast_half_precision() is None and not is_bf16_fast()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    # P40, V100, T4, A100, H100
    for capability, half in (
        ((6, 1), None), ((7, 0), "fp16"), ((7, 5), "fp16"), ((8, 0), "bf16"), ((9, 0), "bf16")
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        assert fast_half_precision() == half and is_bf16_fast() == (half == "bf16")


# ---- cold start

SETTINGS = {"bf16": False, "use_cpu": True, "dataloader_pin_memory": False, "gradient_checkpointing": False, "seed": 0}


def success_of(folder, task, rows):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), load_tokenizer(str(folder))
    with RewardExecutor(task) as executor:
        return evaluate("", model, tokenizer, task, rows, executor=executor, max_completion_length=6).metrics


def test_the_cold_start_teaches_the_answers_in_a_chat_and_to_end_them(tmp_path, capsys):
    task = ToyTask()
    rows = [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in task.dataset("train", None, 0)]
    save_tiny(TinySpec(task.tiny().tokens, hidden_size=32, layers=1, heads=2, context=64), tmp_path / "base", seed=1)
    before = success_of(tmp_path / "base", task, rows)
    options = {"steps": 40, "learning_rate": 1e-2, "batch_size": 12, **SETTINGS}
    folder = cold_start(str(tmp_path / "base"), task, rows, tmp_path / "cold", **options)
    lines = capsys.readouterr().out.splitlines()
    losses = [float(line.split("loss ")[1].split()[0]) for line in lines if line.startswith("cold start")]
    after = success_of(folder, task, rows)
    assert losses[-1] < 0.3 * losses[0]
    assert before["success"] < 0.5 and after["success"] > 0.9
    assert after["tokens"] == pytest.approx(2, abs=0.2) and after["cut_off"] == 0, "one letter and the end token"
    weights = (Path(folder) / "model.safetensors").read_bytes()
    assert cold_start(str(tmp_path / "base"), task, rows, folder, **options) == folder
    assert (Path(folder) / "model.safetensors").read_bytes() == weights and not capsys.readouterr().out
    cold_start(str(tmp_path / "base"), task, rows, folder, **(options | {"steps": 2}))
    assert (Path(folder) / "model.safetensors").read_bytes() != weights, "other options make another model"


def test_only_the_answer_counts_in_the_cold_start(tiny_path, tmp_path):
    from trl import SFTConfig, SFTTrainer

    task = ToyTask()
    rows = task.dataset("train", 4, 0)
    args = SFTConfig(output_dir=str(tmp_path), report_to="none", per_device_train_batch_size=4, **SETTINGS)
    trainer = SFTTrainer(tiny_path, args=args, train_dataset=gold_dataset(task, rows))
    batch = next(iter(trainer.get_train_dataloader()))
    tokenizer = trainer.processing_class
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        counted = ids[labels != -100].tolist()
        assert len(counted) == 2 and counted[-1] == tokenizer.eos_token_id
        prompt = ids[(labels == -100) & (ids != tokenizer.pad_token_id)].tolist()
        assert tokenizer.decode(prompt)[0] == tokenizer.decode(counted[:1]), "the first letter of the prompt"
        assert labels[labels != -100].tolist() == counted


def test_a_cold_start_with_an_adapter_saves_it_for_the_base_model(tiny_path, tmp_path):
    from peft import LoraConfig

    task, rows = ToyTask(), ToyTask().dataset("train", None, 0)
    options = {"steps": 4, "learning_rate": 1e-2, "batch_size": 6, **SETTINGS}
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    folder = Path(cold_start(tiny_path, task, rows, tmp_path / "cold", peft_config=config, **options))
    assert not (folder / "model.safetensors").exists() and not (folder / "training_args.bin").exists()
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == tiny_path
    first = load_file(folder / "adapter_model.safetensors")
    assert all(value.any() for value in first.values()), "the adapter learned nothing"
    again = Path(cold_start(str(folder), task, rows, tmp_path / "again", **options))
    second = load_file(again / "adapter_model.safetensors")
    assert first.keys() == second.keys() and all(not second[name].equal(value) for name, value in first.items())
    assert json.loads((again / "adapter_config.json").read_text())["base_model_name_or_path"] == tiny_path
    config = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    cold_start(tiny_path, task, rows, folder, peft_config=config, **options)
    smaller = load_file(folder / "adapter_model.safetensors")
    assert all(2 in value.shape for value in smaller.values()), "an adapter of another rank must not be reused"


def test_an_adapter_records_and_uses_the_revision_of_its_base_model(tiny_path, tmp_path, monkeypatch):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", revision="abc")
    get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_path), config).save_pretrained(tmp_path)
    asked = []
    for kind in (AutoConfig, AutoModelForCausalLM, AutoTokenizer):
        real = kind.from_pretrained
        monkeypatch.setattr(
            kind, "from_pretrained", lambda *a, _real=real, **k: (asked.append(k.get("revision")), _real(*a, **k))[1]
        )
    model_config(str(tmp_path), "adapter-revision")
    load_model(str(tmp_path), revision="adapter-revision")
    load_tokenizer(str(tmp_path), "adapter-revision")
    assert set(asked) == {"abc"}
