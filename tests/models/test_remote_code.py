"""Python code that comes with a model is neither run nor asked about."""

import ast
import json

import pytest

from tests.support.paths import ROOT
from trl_grpo_tasks.models.gguf import convert_gguf
from trl_grpo_tasks.models.loading import load_model, load_tokenizer, model_config
from trl_grpo_tasks.rewards.classifier import check_judge, load_judge

CODE = """
from pathlib import Path
Path({marker!r}).write_text("ran")
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast
class Config(LlamaConfig): model_type = "hostile"
class Model(LlamaForCausalLM): config_class = Config
class Judge(LlamaForSequenceClassification): config_class = Config
class Tokenizer(PreTrainedTokenizerFast): pass
"""
CLASSES = {
    "AutoConfig": "hostile.Config",
    "AutoModelForCausalLM": "hostile.Model",
    "AutoModelForMaskedLM": "hostile.Model",
    "AutoModelForSequenceClassification": "hostile.Judge",
    "AutoTokenizer": ["hostile.Tokenizer", None],
}


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """A model folder that needs code of its own, which leaves a file; questions to the user are answered with yes."""
    folder, marker = tmp_path / "model", tmp_path / "marker"
    folder.mkdir()
    (folder / "hostile.py").write_text(CODE.format(marker=str(marker)))
    described = {"model_type": "hostile", "architectures": ["Model"], "auto_map": CLASSES}
    (folder / "config.json").write_text(json.dumps(described))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Tokenizer", "auto_map": CLASSES}))
    (folder / "adapter").mkdir()
    adapter = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(folder)}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(adapter))
    questions = []
    monkeypatch.setattr("builtins.input", lambda question="": questions.append(question) or "y")
    yield str(folder)
    assert not questions and not marker.exists()


@pytest.mark.parametrize(
    "load",
    [
        load_model,
        lambda path: load_model(path, policy="masked"),
        lambda path: load_model(path, trust_remote_code=True),
        lambda path: load_model(f"{path}/adapter"),
        lambda path: load_model(f"{path}/adapter", policy="masked"),
        model_config,
        lambda path: model_config(f"{path}/adapter"),
        load_tokenizer,
        lambda path: load_tokenizer(f"{path}/adapter"),
        check_judge,
        load_judge,
    ],
    ids=["model", "masked", "asked for", "adapter", "masked adapter", "config", "config of an adapter", "tokenizer",
         "tokenizer of an adapter", "config of a judge", "judge"],
)  # fmt: skip
def test_a_model_with_code_of_its_own_is_refused(hostile, load):
    with pytest.raises(ValueError, match=r"needs Python code of its own, which is never run here .*choose a model"):
        load(hostile)


def test_code_beside_a_gguf_file_is_not_run(hostile, tmp_path):
    file = tmp_path / "model" / "small.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="cannot be read"):
        convert_gguf(file, tmp_path / "converted")


def test_every_auto_class_is_used_without_remote_code():
    """Calls either go through `files.from_pretrained` or pass trust_remote_code=False."""
    seen = 0
    for path in [*(ROOT / "trl_grpo_tasks").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        code = path.read_text(encoding="utf-8")
        if "from_pretrained" not in code and "from_config" not in code:
            continue
        for node in ast.walk(ast.parse(code)):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            owner = ast.unparse(node.func.value)
            if node.func.attr in ("from_pretrained", "from_config") and "auto" in owner.lower():
                values = [ast.unparse(word.value) for word in node.keywords if word.arg == "trust_remote_code"]
                through = path.name == "files.py" and owner == "auto_class"
                assert values == ["False"] or through, f"{path}:{node.lineno}"
                seen += 1
    assert seen >= 5
