"""The model card: the metadata header for the Hub, the results of the run, and a code example that runs as is."""

import ast
import importlib
import itertools
import json
import re
import shutil

import pytest
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from PIL import Image

from tests.support.adapters import save_adapter
from tests.support.run_folders import BrokenTask, PngTask, before_and_after, edited, evaluation, write_run
from tests.support.toy import ToyTask
from trl_grpo_tasks.commands.task_template import MyTask
from trl_grpo_tasks.models.tiny import save_tiny
from trl_grpo_tasks.report.card import write_card


def load(path):
    """Load the card as the Hub's client does, and check that its header survives YAML unchanged."""
    card = ModelCard.load(path)
    assert ModelCard(str(card)).data.to_dict() == card.data.to_dict()
    return card


def test_the_card_of_a_run_with_pictures(tmp_path):
    folder = write_run(tmp_path / "run", evaluations=before_and_after())
    with edited(folder / "settings.json") as settings:
        settings["model"]["name"] = "Qwen/Qwen2.5-0.5B-Instruct"
    card = load(write_card(folder, PngTask(), "user/letters"))
    assert card.data.library_name == "transformers" and card.data.base_model == "Qwen/Qwen2.5-0.5B-Instruct"
    assert {"trl", "grpo", "trl-grpo-tasks", "toy"} <= set(card.data.tags) and card.data.model_name == "letters"
    metrics = json.loads((folder / "results.json").read_text())["evaluations"][1]["metrics"]
    found = {result.metric_name: result.metric_value for result in card.data.eval_results}
    assert found["success"] == pytest.approx(metrics["success"], abs=1e-4) and "pass@4" in found
    assert found.keys() == metrics.keys() - {"seconds", "unscored", "pass@1", "max@1"}
    assert re.search(rf"\| success \| {1 / 8:.3f} \[0.000, 0.\d+\] \| {metrics['success']:.3f} \[", card.text)
    assert "48 samples of 12 held-out prompts, sampled under the task's constraint" in card.text
    assert "Columns: before: the model before training; GRPO: the trained model." in card.text
    assert "](samples.png)" in card.text and Image.open(folder / "samples.png").size == (4 * 320, 2 * 320)
    assert "`learning_rate` | `0.001`" in card.text and "and under its licence" in card.text
    assert "train.py --task tests.support.toy" in card.text


def test_samples_as_text_where_there_are_no_pictures(tmp_path):
    card = load(write_card(write_run(tmp_path, evaluations=before_and_after()), ToyTask()))
    assert "samples.png" not in card.text and not (tmp_path / "samples.png").exists()
    assert card.text.count("~~~~text") == 6 and card.data.base_model is None
    assert "no other model's licence applies" in card.text


def test_one_evaluation_has_a_picture_with_one_line_and_none_has_no_results(tmp_path):
    card = load(write_card(write_run(tmp_path / "none", steps=0), ToyTask(), "user/letters"))
    assert card.data.eval_results is None and "## Results" not in card.text and "## How to use it" in card.text
    folder = write_run(tmp_path, evaluations=before_and_after()[:1])
    assert "Held-out prompts. For each prompt, the median" in load(write_card(folder, PngTask())).text
    assert Image.open(folder / "samples.png").size == (4 * 320, 320)


def test_unscored_samples_and_a_task_that_cannot_render(tmp_path):
    made = before_and_after()
    for one in made:
        one.metrics = dict.fromkeys(one.metrics, float("nan"))
        for sample in one.samples:
            sample.score = None
    card = load(write_card(write_run(tmp_path, evaluations=made), BrokenTask()))
    assert card.data.eval_results is None and "nan" not in card.text.split()


# ---- how to use it


def snippet(card):
    """The code for transformers, which comes first."""
    return re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)[0]


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_the_snippet_runs_for_whole_weights(tmp_path, capsys, kind):
    task = ToyTask() if kind == "text" else MyTask()
    folder = tmp_path / "model"
    save_tiny(task.tiny(), folder, seed=1)
    row = task.dataset("test", 1, 0)[0]
    made = evaluation("GRPO", ToyTask(), [("a", "b")])
    for sample in made.samples:
        sample.row = row
    write_run(folder, evaluations=[made])
    code = snippet(load(write_card(folder, task, str(folder))))
    assert ("apply_chat_template" in code) == (kind == "chat")
    exec(code, {})
    assert capsys.readouterr().out.endswith("\n")


def test_the_snippet_runs_for_an_adapter(tmp_path, tiny_path, capsys):
    folder = write_run(tmp_path / "adapter", evaluations=before_and_after())
    save_adapter(tiny_path, folder)
    card = load(write_card(folder, ToyTask(), str(folder)))
    assert card.data.library_name == "peft" and card.data.base_model is None and "lora" in card.data.tags
    assert "needs a base model that is not on the Hub" in card.text
    exec(snippet(card), {})
    assert capsys.readouterr().out.endswith("\n")
    with edited(folder / "adapter_config.json") as config:
        config["base_model_name_or_path"] = "org/base"
    card = load(write_card(folder, ToyTask(), "user/letters"))
    assert card.data.base_model == "org/base" and "An adapter for [org/base]" in card.text
    assert "not on the Hub" not in card.text


HOSTILE = "# Evil\n\n[click](http://evil.example) <img src=x onerror=alert(1)>\n\n| a | b |\n|---|---|\n"


@pytest.mark.parametrize("fence", ["~~~~\n---\nlicense: mit", "`" * 9, "~~~~\r\n", "> ~~~~~~~~"])
def test_what_a_model_wrote_is_text_and_not_markdown(tmp_path, fence):
    """An independent Markdown parser finds no heading, link, image or HTML in text of a model or a row."""
    made = before_and_after(count=3)
    text = f"{fence}\n{HOSTILE}{fence}\n"
    for sample in made[1].samples:
        sample.row["prompt"], sample.completion = f"{HOSTILE} ``x`` {fence}", text
        sample.reason, sample.score["success"] = f"*why* `` ``` {HOSTILE}", False
    write_run(tmp_path, evaluations=made)
    with edited(tmp_path / "settings.json") as settings:
        settings["command"] += f" --system_prompt '{text}```\n# Evil'"
        settings["training"]["component_weights"] = {f"a`|b\n{HOSTILE}": 1.0}
    card = write_card(tmp_path, ToyTask()).read_text()
    assert ModelCard(card).data.license is None
    card = card.split("---\n", 2)[2]
    tokens = MarkdownIt("commonmark").enable("table").parse(card)
    headings = [after.content for token, after in itertools.pairwise(tokens) if token.type == "heading_open"]
    programs = ["With transformers", "With trl_grpo_tasks", "With vLLM"]
    parts = [tmp_path.name, "Results", "Samples", "How to use it", *programs, "Training", "Licence", "Citation"]
    assert headings == parts
    inline = [child for token in tokens for child in token.children or ()]
    links = {token.attrs["href"] for token in inline if token.type == "link_open"}
    assert links == {"https://github.com/huggingface/trl"}
    assert not [token for token in [*tokens, *inline] if token.type in ("html_block", "html_inline", "image")]
    shown = [token.content for token in tokens if token.type == "fence" and token.info == "text"]
    assert len(shown) == 6 and all(one == text.replace("\r\n", "\n") + "\n" for one in shown[1::2])
    assert sum(token.type == "table_open" for token in tokens) == 2
    reasons = [token.content for token in inline if token.type == "code_inline" and "*why*" in token.content]
    assert reasons == [" ".join(f"*why* `` ``` {HOSTILE}".split())] * 3


# ---- which programs, and with what


def parts_of(card):
    """The parts of the section on use: title -> text."""
    section = card.text.split("## How to use it\n")[1].split("\n## ")[0]
    return dict(re.findall(r"### (.*?)\n\n(.*?)(?=\n### |\Z)", section, re.DOTALL))


def run_with(folder, **training):
    write_run(folder, evaluations=before_and_after())
    with edited(folder / "settings.json") as settings:
        settings["model"]["name"] = "org/base"
        settings["training"] |= training
    return folder


def check_code(text):
    """The code compiles, and what it imports from this package exists."""
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("trl_grpo_tasks"):
            module = importlib.import_module(node.module)
            assert all(hasattr(module, name.name) for name in node.names)
    return code


@pytest.mark.parametrize("constrain", [True, False])
def test_code_for_vllm_has_the_processor_only_under_a_constraint(tmp_path, constrain):
    folder = run_with(tmp_path / "run", constrain=constrain, top_k=5, temperature=0.7, max_completion_length=9)
    parts = parts_of(load(write_card(folder, ToyTask(), "user/letters")))
    code = check_code(parts["With vLLM"])
    assert ("logits_processors=[PROCESSOR]" in code) == ('extra_args={"row"' in code) == constrain
    assert "temperature=0.7, top_k=5, max_tokens=9" in code and 'LLM("user/letters"' in code
    assert "do_sample=True, top_k=5, top_p=1.0, temperature=0.7, max_new_tokens=9" in parts["With transformers"]
    ollama = "trl-grpo-tasks export-model letters\nollama create letters -f letters/gguf/Modelfile"
    assert ollama in parts["With Ollama"]
    assert 'task = get_task("tests.support.toy")' in check_code(parts["With trl_grpo_tasks"])


@pytest.mark.parametrize(("rank", "option"), [(16, ""), (20, ", max_lora_rank=32")])
def test_vllm_loads_an_adapter_on_its_base_model(tmp_path, rank, option):
    folder = run_with(tmp_path / "run", constrain=False)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base", "r": rank}))
    code = check_code(parts_of(load(write_card(folder, ToyTask(), "user/letters")))["With vLLM"])
    assert f'llm = LLM("org/base", enable_lora=True{option})' in code and "lora_request=adapter" in code
    merged = load(write_card(folder, ToyTask(), "user/letters", merged=True))
    assert 'LLM("user/letters")' in parts_of(merged)["With vLLM"] and merged.data.library_name == "transformers"


def test_the_code_for_a_masked_language_model_runs(tmp_path, bert_path, capsys):
    class Fills(ToyTask):
        policy = "masked"

    shutil.copytree(bert_path, tmp_path / "run")
    folder = run_with(tmp_path / "run", fill_steps=3, constrain=False)
    results = (folder / "results.json").read_text()
    (folder / "results.json").write_text(re.sub(r'"prompt": "[^"]*"', '"prompt": "a [MASK] [MASK]"', results))
    card = load(write_card(folder, Fills(), str(folder)))
    parts = parts_of(card)
    assert list(parts) == ["With transformers", "With trl_grpo_tasks"] and card.data.pipeline_tag == "fill-mask"
    assert "trained to fill in 3 steps; this code fills in one" in parts["With transformers"]
    exec(snippet(card), {})
    assert len(ast.literal_eval(capsys.readouterr().out)) == 2


def test_secrets_of_a_task_are_not_in_the_code_and_repair_is_explained(tmp_path):
    folder = run_with(tmp_path / "run", repair_turns=3)
    with edited(folder / "settings.json") as settings:
        settings["task"]["options"] = {"api_key": "...", "size": 3, "is_big": True}
    card = load(write_card(folder, ToyTask(), "user/letters"))
    assert "get_task(\"tests.support.toy\", {'size': 3, 'is_big': True})" in card.text
    assert "answer in up to 3 turns" in card.text
