"""The section "How to use it" of a model card: code for transformers, Solver, vLLM and Ollama that fits the run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..models.loading import MERGED_FOLDER, TINY
from ..redact import is_secret
from ..registry import find_task_class, is_safe_by_name
from ..task import Task
from .run_folder import RunFolder, sampling_of

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM takes as max_lora_rank


@dataclass
class Published:
    """A model as others load it, and the run that it comes from.

    Attributes:
        name: Its repository on the Hub, or its folder.
        adapter_of: The base model, if it is an adapter; `is_base_on_hub` tells whether others can load that.
        has_merged: Whether the merged weights are in a subfolder beside the adapter.
        prompt: A prompt of the run's last evaluation; None without an evaluation.
    """

    name: str
    run: RunFolder
    task: Task
    adapter_of: str | None
    is_base_on_hub: bool
    has_merged: bool
    prompt: Any

    @property
    def training(self) -> Mapping[str, Any]:
        return self.run.settings.get("training", {})

    @property
    def length(self) -> int:
        return sampling_of(self.run.settings).get("max_completion_length", 256)

    @property
    def sampling(self) -> dict[str, Any]:
        """The temperature and the sampling filters of the run."""
        used = {"temperature": 1.0} | sampling_of(self.run.settings)
        filters = {name: used[name] for name in ("top_k", "top_p", "min_p") if used.get(name)}
        return {"temperature": used["temperature"], **filters}

    @property
    def is_constrained(self) -> bool:
        return bool(self.training.get("constrain"))


def usage(model: Published) -> str:
    """Return the section, with one part for each program that can run the model."""
    is_masked = model.task.policy == "masked"
    parts = {
        "With transformers": _masked(model) if is_masked else _transformers(model),
        "With trl_grpo_tasks": _solver(model),
    }
    if not is_masked and (model.adapter_of is None or model.is_base_on_hub):
        parts["With vLLM"] = _vllm(model)
        if model.run.settings.get("model", {}).get("name") != TINY:  # llama.cpp does not know its tokenizer
            parts["With Ollama"] = _ollama(model)
    shown = "\n".join(f"### {title}\n\n{text}" for title, text in parts.items())
    return f"## How to use it\n\n{_notes(model)}{shown}"


def changed_options(run: RunFolder, task: Task) -> dict[str, Any]:
    """Return the options of the run's task that differ from their defaults."""
    options, defaults = run.settings.get("task", {}).get("options", {}), task.Options()
    return {name: value for name, value in options.items() if value != getattr(defaults, name, None)}


def _notes(model: Published) -> str:
    notes = []
    if model.is_constrained:
        notes.append(
            "The model was trained and evaluated under the task's constraint. Only the code that imports "
            "trl_grpo_tasks applies it."
        )
    if (turns := model.training.get("repair_turns", 1)) > 1:
        notes.append(
            f"The model was trained to answer in up to {turns} turns, with the verifier's reason fed back after a "
            "failure. Only `Solver`, with the folder of the run, feeds it back; otherwise the first answer is written."
        )
    if model.adapter_of and model.has_merged:
        notes.append(
            "The adapter merged with its base model, which needs neither peft nor the base model: "
            f'`AutoModelForCausalLM.from_pretrained("{model.name}", subfolder="{MERGED_FOLDER}")`.'
        )
    elif model.adapter_of and not model.is_base_on_hub:
        notes.append(
            f"The adapter needs a base model that is not on the Hub (local folder `{Path(model.adapter_of).name}`). "
            "For others, push the merged weights: `trl-grpo-tasks push RUN_DIR --merged`."
        )
    return "".join(f"{note}\n\n" for note in notes)


def _transformers(model: Published) -> str:
    kind, imports = "AutoModelForCausalLM", ["from transformers import AutoModelForCausalLM, AutoTokenizer"]
    if model.adapter_of is not None:
        kind = "AutoPeftModelForCausalLM"
        imports = [f"from peft import {kind}", "from transformers import AutoTokenizer"]
    inputs = 'tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True, return_tensors="pt")'
    if model.prompt is None or isinstance(model.prompt, str):
        inputs = 'tokenizer(prompt, return_tensors="pt")'
    # Filters that are not given would be those of the model's generation_config.
    how = {"do_sample": True, "top_k": 0, "top_p": 1.0, **model.sampling}
    if how["temperature"] == 0:
        how = {"do_sample": False}
    return _python(
        *imports,
        "",
        f"tokenizer = AutoTokenizer.from_pretrained({_literal(model.name)})",
        f"model = {kind}.from_pretrained({_literal(model.name)})",
        f"prompt = {_literal('...' if model.prompt is None else model.prompt)}",
        f"inputs = {inputs}",
        f"output = model.generate(**inputs, {_keywords(how)}, max_new_tokens={model.length})",
        'print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
    )


def _masked(model: Published) -> str:
    load = f"AutoModelForMaskedLM.from_pretrained({_literal(model.adapter_of or model.name)})"
    if model.adapter_of is not None:
        load = f"PeftModel.from_pretrained({load}, {_literal(model.name)})"
    steps = model.training.get("fill_steps") or 1
    note = "" if steps == 1 else f"The model was trained to fill in {steps} steps; this code fills in one.\n\n"
    return note + _python(
        "import torch",
        *["from peft import PeftModel"] * (model.adapter_of is not None),
        "from transformers import AutoModelForMaskedLM, AutoTokenizer",
        "",
        f"tokenizer = AutoTokenizer.from_pretrained({_literal(model.name)})",
        f"model = {load}.eval()",
        f"text = {'tokenizer.mask_token' if model.prompt is None else _literal(model.prompt)}",
        'inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)',
        "with torch.no_grad():",
        "    logits = model(**inputs).logits",
        'fills = logits[inputs["input_ids"] == tokenizer.mask_token_id].argmax(-1)',
        "print([tokenizer.decode([fill]) for fill in fills.tolist()])",
    )


def _solver(model: Published) -> str:
    """The repository holds settings.json, from which `Solver` takes a built-in task, its options and the sampling."""
    spec, options = _spec(model), changed_options(model.run, model.task)
    is_known = is_safe_by_name(spec) and not find_task_class(spec).user_options(options)
    source = f"{_literal(model.name)}{'' if is_known else ', task'}"
    return "This samples until the task's verifier accepts an answer:\n\n" + _python(
        f"from trl_grpo_tasks import Solver{'' if is_known else ', get_task'}",
        "",
        *[_task(model)] * (not is_known),
        f"with Solver.from_pretrained({source}) as solver:",
        '    row = solver.task.dataset("test", 1, 0)[0]  # or a text, if the task understands texts',
        "    solution = solver(row, samples=16)",
        "    print(solution.solved, solution.answers[0].completion)",
    )


def _vllm(model: Published) -> str:
    """Prompts are encoded by our own function, so that vLLM gets the tokens that the model was trained with."""
    constrained = model.is_constrained
    engine, adapter = [_literal(model.name)], model.adapter_of is not None
    if model.adapter_of is not None:
        engine = [_literal(model.adapter_of), "enable_lora=True", *_lora_rank(model.run.path)]
    if constrained:
        engine += ["logits_processors=[PROCESSOR]", "additional_config={CONFIG_KEY: served.to_config()}"]
    params = _keywords({**model.sampling, "max_tokens": model.length})
    return _python(
        *["import json", ""] * constrained,
        *["from huggingface_hub import snapshot_download"] * adapter,
        "from trl_grpo_tasks import get_task",
        "from trl_grpo_tasks.evaluation.sampler import prompt_ids",
        "from trl_grpo_tasks.models.loading import load_tokenizer",
        *["from trl_grpo_tasks.serving.served_task import CONFIG_KEY, PROCESSOR, ServedTask"] * constrained,
        "from vllm import LLM, SamplingParams",
        *["from vllm.lora.request import LoRARequest"] * adapter,
        "",
        _task(model),
        f"tokenizer = load_tokenizer({_literal(model.name)})",
        *["served = ServedTask.of(task, tokenizer)  # the constraint, which runs inside vLLM"] * constrained,
        f"llm = LLM({', '.join(engine)})",
        'row = task.dataset("test", 1, 0)[0]',
        'prompt = {"prompt_token_ids": prompt_ids(tokenizer, [row["prompt"]])[0]}',
        f"params = SamplingParams({params}, stop_token_ids=[tokenizer.eos_token_id]"
        + (', extra_args={"row": json.dumps(row)})' if constrained else ")"),
        *[f'adapter = LoRARequest("adapter", 1, snapshot_download({_literal(model.name)}))'] * adapter,
        f"print(llm.generate(prompt, params{', lora_request=adapter' * adapter})[0].outputs[0].text)",
    )


def _lora_rank(folder: Path) -> list[str]:
    """vLLM's option for adapters of a rank above 16, its default. Before the end of a run the rank is not known."""
    config = folder / "adapter_config.json"
    rank = json.loads(config.read_text())["r"] if config.is_file() else 0
    return [f"max_lora_rank={next((one for one in LORA_RANKS if one >= rank), rank)}"] * (rank > 16)


def _ollama(model: Published) -> str:
    folder = shlex.quote(Path(model.name).name)
    return (
        "The second command needs llama.cpp's converter; without one, it prints how to get it.\n\n"
        f"```bash\nhf download {shlex.quote(model.name)} --local-dir {folder}\n"
        f"trl-grpo-tasks export {folder} --gguf\n"
        f"ollama create {folder.lower()} -f {folder}/gguf/Modelfile\n"
        f"ollama run {folder.lower()}\n```\n"
    )


def _spec(model: Published) -> str:
    """The task as `get_task` takes it; the path of a task file is left out, because it is that of another machine."""
    spec = model.run.task_spec or model.task.name
    return Path(spec).name if spec.endswith(".py") else spec


def _task(model: Published) -> str:
    options = {k: v for k, v in changed_options(model.run, model.task).items() if not is_secret(k)}
    return f"task = get_task({_literal(_spec(model))}{f', {options!r}' if options else ''})"


def _literal(value: Any) -> str:
    """Text, or a list of messages, as a Python literal in one line."""
    return json.dumps(value, ensure_ascii=False)


def _keywords(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def _python(*lines: str) -> str:
    return "```python\n" + "\n".join(lines) + "\n```\n"
