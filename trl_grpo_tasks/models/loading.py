"""Models from a Hub id, a local folder, a GGUF file, or `tiny`: a small Llama (or ModernBERT) made on the spot for a
task.

Whatever it comes from, TRL gets a Hub id or a folder: it loads the reference model from there a second time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError

from ..files import MODEL_FILES, check_local_path, model_file_in, write_atomically
from ..task import Task
from .checkpoints import DifferentStartError, newest_complete
from .gguf import convert_gguf
from .tiny import PLAIN_CHAT_TEMPLATE, save_tiny

TINY = "tiny"
MERGED_FOLDER = "merged"  # of a run's folder
ORIGIN_FILE = "made_from.json"  # in a folder that a run made itself, written last: from what it was made


def prepare_model(
    name: str | None, task: Task, output_dir: str | Path, seed: int = 0, revision: str | None = None
) -> str:
    """A Hub id or folder that transformers can load, for whatever the user named; None is `tiny`."""
    folder = Path(output_dir) / "base_model"
    if name is None or name == TINY:
        spec = task.tiny()
        if spec is None:
            raise ValueError(f"task {task.name!r} has no embedded tiny model; give --model")
        origin = {"task": task.name, "seed": seed, **asdict(spec), "tokens": list(spec.tokens)}
        if not is_made_from(folder, origin):
            with building(folder, origin):
                save_tiny(spec, folder, seed)
        return str(folder)
    check_local_path(name, "--model")
    if name.endswith(".gguf"):
        file = Path(name).expanduser()
        origin = {"file": file.name, "bytes": file.stat().st_size}  # which may have moved with the run
        if not is_made_from(folder, origin):
            with building(folder, origin):
                convert_gguf(file, folder)
        return str(folder)
    path = Path(name).expanduser()
    if path.is_file():
        raise ValueError(f"--model {name} is a file; give a folder, a .gguf file, a Hub id, or tiny")
    if not path.is_dir():
        check_cached(name, revision)
    if path.is_dir() and model_file_in(path) is None:
        raise ValueError(f"model folder {name!r} holds neither config.json nor adapter_config.json")
    if path.is_dir() and not any(file.suffix in (".safetensors", ".bin") for file in path.iterdir()):
        raise ValueError(f"model folder {name!r} holds no weights (.safetensors or .bin)")
    return str(path) if path.is_dir() else name


def check_cached(name: str, revision: str | None = None) -> None:
    """Raise ValueError if the Hub must not be asked (HF_HUB_OFFLINE) and the cache does not hold the model `name`."""
    from huggingface_hub import constants, try_to_load_from_cache

    if not constants.HF_HUB_OFFLINE:
        return
    if not any(isinstance(try_to_load_from_cache(name, file, revision=revision), str) for file in MODEL_FILES):
        raise ValueError(
            f"--model {name}: there is no such folder, the model is not in the cache of the Hub, and HF_HUB_OFFLINE "
            "forbids a download; unset HF_HUB_OFFLINE, or give a local folder"
        )


def is_made_from(folder: str | Path, origin: dict[str, Any]) -> bool:
    """Whether `folder` is complete and was built from `origin`. Raises DifferentStartError where it was built from
    something else and checkpoints beside it belong to a run that started from it."""
    found, wanted = origin_of(folder), json.loads(json.dumps(origin))
    if found not in (None, wanted) and newest_complete(Path(folder).parent)[0]:
        changed = [name for name in wanted if found.get(name) != wanted[name]]
        raise DifferentStartError(
            f"the run in {Path(folder).parent} began with {folder}, which was made with another "
            f"{', '.join(changed)}: go on with the options it had, or choose another --output_dir"
        )
    return found == wanted


def origin_of(folder: str | Path) -> Any:
    note = Path(folder) / ORIGIN_FILE
    return json.loads(note.read_text(encoding="utf-8")) if note.is_file() else None


@contextmanager
def building(folder: str | Path, origin: dict[str, Any]) -> Iterator[None]:
    """Around the writing of `folder`: the note of its origin goes first and comes last."""
    note = Path(folder) / ORIGIN_FILE
    note.unlink(missing_ok=True)
    yield
    write_atomically(note, json.dumps(origin, indent=1))


def is_adapter(path: str | Path) -> bool:
    return (Path(path) / "adapter_config.json").is_file()


def load_model(path: str, trainable: bool = False, policy: str = "causal", **kwargs: Any) -> Any:
    """The model, or the adapter on its model, of a Hub id or folder; `kwargs` are those of from_pretrained."""
    if is_adapter(path) and policy == "masked":
        from peft import PeftModel

        base = load_model(_base_of(path), policy=policy, **kwargs)
        return PeftModel.from_pretrained(base, path, is_trainable=trainable)
    if is_adapter(path):
        from peft import AutoPeftModelForCausalLM

        return AutoPeftModelForCausalLM.from_pretrained(path, is_trainable=trainable, **kwargs)
    return _kind_of(policy).from_pretrained(path, **kwargs)


def without_weights(config: Any, policy: str) -> Any:
    """The model of a configuration, on the device that has no memory."""
    with torch.device("meta"):
        return _kind_of(policy).from_config(config)


def _kind_of(policy: str) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    return AutoModelForMaskedLM if policy == "masked" else AutoModelForCausalLM


def check_policy(path: str, policy: str, revision: str = "main") -> Any:
    """The configuration of the model at `path`; ValueError where it is no model of that policy kind."""
    from transformers import AutoConfig
    from transformers.utils.peft_utils import find_adapter_config_file

    adapter = find_adapter_config_file(path, revision=revision)  # in a folder, or on the Hub
    if adapter is None:
        config = AutoConfig.from_pretrained(path, revision=revision)
    else:
        config = AutoConfig.from_pretrained(json.loads(Path(adapter).read_text())["base_model_name_or_path"])
    names = config.architectures or ["a model without a head"]
    fills = names[0].endswith("ForMaskedLM")
    if fills != (policy == "masked"):
        wanted = "a masked language model (...ForMaskedLM)" if policy == "masked" else "a causal language model"
        raise ValueError(f"the task wants {wanted}, and {path} is {names[0]}; give another --model")
    return config


def _base_of(adapter: str) -> str:
    return json.loads((Path(adapter) / "adapter_config.json").read_text())["base_model_name_or_path"]


def save_merged(adapter: str | Path, folder: str | Path) -> None:
    """The model of an adapter with the adapter's weights merged in, as an ordinary folder. Its base is loaded in the
    precision it is kept in: what was quantised for training alone is not."""
    merged = load_model(str(adapter), dtype="auto").merge_and_unload()
    merged.save_pretrained(folder)
    load_tokenizer(str(adapter)).save_pretrained(folder)


def init_kwargs(model_args: Any) -> dict[str, Any]:
    """TRL's model flags as keyword arguments of from_pretrained."""
    kwargs: dict[str, Any] = {"revision": model_args.model_revision, "dtype": model_args.dtype or "float32"}
    if model_args.attn_implementation:
        kwargs["attn_implementation"] = model_args.attn_implementation
    return kwargs


def load_tokenizer(model: str, revision: str = "main") -> Any:
    """The tokenizer of a model. An adapter that was saved without one has that of its base model; one without a chat
    template gets a plain one. `eos_token` is what ends an answer in a chat: those of base models, and of some GGUF
    files, name another, for which a constraint would wait in vain."""
    from transformers import AutoTokenizer

    source = model
    if is_adapter(model) and not (Path(model) / "tokenizer_config.json").is_file():
        source = _base_of(model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source, revision=revision, padding_side="left", truncation_side="left"
        )
    except OSError as error:
        nowhere = "" if Path(source).is_dir() else "there is no such folder here, and from the Hub: "
        raise ValueError(
            f"the tokenizer of model {source!r} cannot be loaded: {nowhere}{str(error).splitlines()[0]}"
        ) from error
    tokenizer.chat_template = tokenizer.chat_template or PLAIN_CHAT_TEMPLATE
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.eos_token = end_of_answer(tokenizer) or tokenizer.eos_token
    return tokenizer


def end_of_answer(tokenizer: Any) -> str | None:
    """The special token that the chat template writes after an answer; None where it writes none."""
    answer = "4217"
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except (TemplateError, ValueError):  # templates may refuse what they were not made for; ValueError: there is none
        return None
    after = text.rpartition(answer)[2].lstrip()
    return max((token for token in tokenizer.get_added_vocab() if after.startswith(token)), key=len, default=None)
