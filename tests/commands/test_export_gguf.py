"""`trl-grpo-tasks export-model`: the converted model is the model of the run; what is printed without a converter."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.adapters import save_adapter
from tests.support.commands import refused, said
from tests.support.gguf_file import write_gguf
from tests.support.paths import ROOT
from tests.support.run_folders import before_and_after, edited, write_run
from trl_grpo_tasks.models.gguf import convert_gguf
from trl_grpo_tasks.models.loading import load_model

CONVERTER = ROOT / "tests" / "support" / "gguf_converter.py"


@pytest.fixture(scope="module")
def llama_path(tmp_path_factory):
    """A small Llama with a byte-level BPE tokenizer, as a model folder."""
    folder = tmp_path_factory.mktemp("llama")
    write_gguf(folder / "small.gguf")
    convert_gguf(folder / "small.gguf", folder / "model")
    return folder / "model"


@pytest.fixture
def run(tmp_path, llama_path):
    shutil.copytree(llama_path, tmp_path / "My_Run")
    return write_run(tmp_path / "My_Run", evaluations=before_and_after())


@pytest.fixture
def adapter_run(tmp_path, llama_path):
    save_adapter(llama_path, tmp_path / "adapter")
    return write_run(tmp_path / "adapter", evaluations=before_and_after())


@pytest.fixture
def no_converter(monkeypatch, tmp_path):
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "none"))


def check_same(file, run, tmp_path):
    """Our reader of GGUF files finds the weights, the log-probs and the tokens of the run's model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    convert_gguf(file, tmp_path / "back")
    back, model = AutoModelForCausalLM.from_pretrained(tmp_path / "back"), load_model(str(run))
    ids = AutoTokenizer.from_pretrained(run)("abcd a cab", return_tensors="pt").input_ids
    assert AutoTokenizer.from_pretrained(tmp_path / "back")("abcd a cab").input_ids == ids[0].tolist()
    with torch.no_grad():
        assert torch.allclose(back(ids).logits.log_softmax(-1), model(ids).logits.log_softmax(-1), atol=1e-5)


@pytest.mark.parametrize("kind", ["run", "adapter_run"])
def test_the_file_holds_the_model_of_the_run(kind, request, tmp_path, capsys, monkeypatch):
    run = request.getfixturevalue(kind)
    monkeypatch.setenv("LLAMA_CPP", str(CONVERTER))
    code, out, err = said(capsys, "export-model", run, "--type", "f32")
    file = run / "gguf" / f"{run.name}-f32.gguf"
    assert code == 0 and "error" not in err and f"{file}: 0." in out and f"create {run.name.lower()} -f" in out
    assert sorted(path.name for path in file.parent.iterdir()) == ["Modelfile", file.name]
    check_same(file, run, tmp_path)


@pytest.mark.skipif("LLAMA_CPP" not in os.environ, reason="set LLAMA_CPP to a folder with llama.cpp's source")
def test_the_converter_of_llama_cpp(tmp_path, capsys):
    """With GPT-2's vocabulary from llama.cpp's source: the converter takes only tokenizers that it knows."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    run = write_run(tmp_path / "run", evaluations=before_and_after())
    vocabulary = {"gguf_file": "ggml-vocab-gpt-2.gguf"}
    tokenizer = AutoTokenizer.from_pretrained(Path(os.environ["LLAMA_CPP"]) / "models", **vocabulary)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=2, initializer_range=0.2, **sizes, **ends)
    LlamaForCausalLM(config).save_pretrained(run)
    tokenizer.save_pretrained(run)
    assert said(capsys, "export-model", run, "--type", "f32")[0] == 0
    check_same(run / "gguf" / "run-f32.gguf", run, tmp_path)


def test_without_a_converter_the_printed_commands_convert_the_model(adapter_run, tmp_path, capsys, no_converter):
    code, out, err = said(capsys, "export-model", adapter_run, "--type", "f32", "--out", tmp_path / "out")
    assert code == 3 and err == "" and "git clone --depth 1 https://github.com/ggml-org/llama.cpp" in out
    (command,) = [shlex.split(line) for line in out.splitlines() if "--outfile" in line]
    assert command[:2] == ["python", "llama.cpp/convert_hf_to_gguf.py"]
    subprocess.run([sys.executable, str(CONVERTER), *command[2:]], check=True, timeout=120)
    check_same(tmp_path / "out" / "adapter-f32.gguf", adapter_run, tmp_path)


def test_a_converter_on_the_path_that_fails(run, tmp_path, capsys, monkeypatch, no_converter):
    program = tmp_path / "none" / "convert_hf_to_gguf.py"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nraise SystemExit('no such architecture')\n")
    program.chmod(0o755)
    code, _, err = said(capsys, "export-model", run)
    assert code == 1 and f"converter failed (no such architecture); to see more: {program} {run} --outfile" in err
    assert [path.name for path in (run / "gguf").iterdir()] == ["Modelfile"]


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_the_modelfile_samples_and_formats_prompts_as_the_run_did(run, capsys, no_converter, kind):
    from transformers import AutoTokenizer

    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "b"}]
    if kind == "chat":
        with edited(run / "results.json") as results:
            for sample in (sample for one in results["evaluations"] for sample in one["samples"]):
                sample["row"]["prompt"] = prompt
    tokenizer = AutoTokenizer.from_pretrained(run)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
    tokenizer.save_pretrained(run)
    assert said(capsys, "export-model", run)[0] == 3
    text = (run / "gguf" / "Modelfile").read_text()
    assert text.startswith("FROM ./My_Run-q8_0.gguf\nPARAMETER temperature 1.0\n")
    assert "PARAMETER top_k 0\n" in text and 'PARAMETER stop "<|endoftext|>"\n' in text
    template = text.split('TEMPLATE """')[1].removesuffix('"""\n')
    expected = tokenizer.apply_chat_template(prompt, tokenize=False) if kind == "chat" else "b"
    assert template.replace("{{ .Prompt }}", "b") == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("TINY",), "has the tokenizer of a tiny model, which llama.cpp does not know"),
        (("BERT",), "is a masked language model, with which llama.cpp cannot generate"),
        (("RUN", "--type", "q8"), "unknown --type 'q8'"),
        (("RUN",), "there is no convert_hf_to_gguf.py"),
    ],
)
def test_wrong_options(run, tiny_path, bert_path, tmp_path, capsys, monkeypatch, words, message):
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path))
    places = {"RUN": run, "TINY": tiny_path, "BERT": bert_path}
    assert message in refused(capsys, "export-model", *(places.get(word, word) for word in words))
