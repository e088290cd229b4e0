"""Loading of models from a Hub id, a folder, a .gguf or .pt file, or `tiny`, a small untrained model of a task.

All sources are converted to a Hub id or a folder, because TRL loads the reference model from it a second time.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError

from ..failures import first_line
from ..files import MODEL_FILES, check_local_path, from_pretrained, model_file_in, write_atomically
from ..task import Task
from .char_encoder import GENERATOR, convert_pt
from .checkpoints import DifferentStartError, newest_complete
from .gguf import convert_gguf
from .hub_access import use_cache_if_unreachable
from .quantised import keep_weights_unpacked
from .tiny import PLAIN_CHAT_TEMPLATE, save_tiny

TINY = "tiny"
ADAPTER_CONFIG, TOKENIZER_CONFIG = "adapter_config.json", "tokenizer_config.json"
ADAPTER_PATTERNS = ("adapter_*", "*.json", "*.jinja", "*.model", "*.txt")  # files of an adapter and its tokenizer
MERGED_FOLDER = "merged"  # subfolder of a run for the model with the adapter merged in
ORIGIN_FILE = "made_from.json"  # describes what a generated model folder was built from; written last


def prepare_model(
    name: str | None, task: Task, output_dir: str | Path, seed: int = 0, revision: str | None = None
) -> str:
    """Return a Hub id or folder for the model that the user named; None means `tiny`.

    It is the id of a full model on the Hub, or the folder of a full model or adapter.
    """
    folder = Path(output_dir) / "base_model"
    if name is None or name == TINY:
        spec = task.tiny()
        if spec is None:
            raise ValueError(f"task {task.name!r} has no embedded tiny model with these options; give --model")
        origin = {"task": task.name, "seed": seed, **asdict(spec), "tokens": list(spec.tokens)}
        if not is_made_from(folder, origin):
            with building(folder, origin):
                save_tiny(spec, folder, seed)
        return str(folder)
    check_local_path(name, "--model")
    path = Path(name).expanduser()
    if path.suffix in (".gguf", ".pt"):
        return converted(path, folder, convert_gguf if path.suffix == ".gguf" else partial(convert_pt, mode=GENERATOR))
    if path.is_file():
        raise ValueError(f"--model {name} is a file; give a folder, a .gguf or .pt file, a Hub id, or tiny")
    if not path.is_dir():
        use_cache_if_unreachable()
        check_cached(name, revision)
        path = Path(_downloaded_adapter(name, revision) or name)
    if path.is_dir() and model_file_in(path) is None:
        raise ValueError(f"model folder {name!r} holds neither config.json nor adapter_config.json")
    if path.is_dir() and not any(file.suffix in (".safetensors", ".bin") for file in path.iterdir()):
        raise ValueError(f"model folder {name!r} holds no weights (.safetensors or .bin)")
    return str(path) if path.is_dir() else name


def converted(file: Path, folder: str | Path, convert: Callable[[Path, str | Path], None]) -> str:
    """Return `folder`, into which a model file is converted unless it was before."""
    origin = {"file": file.name, "bytes": file.stat().st_size}  # no path: the file may move together with the run
    if not is_made_from(folder, origin):
        with building(folder, origin):
            convert(file, folder)
    return str(folder)


def check_cached(name: str, revision: str | None = None) -> None:
    """Raise ValueError if the Hub is not asked (it cannot be reached, or HF_HUB_OFFLINE is set) and its cache does not
    hold the model `name`."""
    from huggingface_hub import constants, try_to_load_from_cache

    if not constants.HF_HUB_OFFLINE:
        return
    if not any(isinstance(try_to_load_from_cache(name, file, revision=revision), str) for file in MODEL_FILES):
        raise ValueError(
            f"--model {name}: there is no such folder, the model is not in the cache of the Hub, and the Hub cannot "
            "be reached or HF_HUB_OFFLINE is set; connect to the network, unset HF_HUB_OFFLINE, or give a local folder"
        )


def _downloaded_adapter(name: str, revision: str | None) -> str | None:
    """Return the local folder of an adapter on the Hub, downloaded if it is not in the cache; None for other models.

    ValueError if it is an adapter and cannot be downloaded.
    """
    from huggingface_hub import hf_hub_download, snapshot_download

    try:
        hf_hub_download(name, ADAPTER_CONFIG, revision=revision)
    except (OSError, ValueError):  # no adapter, or no access to the Hub: loading says which
        return None
    try:
        return snapshot_download(name, revision=revision, allow_patterns=[*ADAPTER_PATTERNS])
    except OSError as error:
        raise ValueError(f"the adapter {name} could not be downloaded from the Hub: {first_line(error)}") from error


def is_made_from(folder: str | Path, origin: dict[str, Any]) -> bool:
    """Whether `folder` is complete and was built from `origin`.

    Raises DifferentStartError if it was built from something else and the checkpoints beside it depend on it.
    """
    found, wanted = origin_of(folder), json.loads(json.dumps(origin))
    if found not in (None, wanted) and newest_complete(Path(folder).parent):
        changed = [name for name in wanted if found.get(name) != wanted[name]]
        raise DifferentStartError(
            f"the run in {Path(folder).parent} started from {folder}, which was built with a different "
            f"{', '.join(changed)}; resume with the original options, or choose another --output_dir"
        )
    return found == wanted


def origin_of(folder: str | Path) -> Any:
    """Return the description of what a generated folder was built from, or None if there is none."""
    note = Path(folder) / ORIGIN_FILE
    return json.loads(note.read_text(encoding="utf-8")) if note.is_file() else None


@contextmanager
def building(folder: str | Path, origin: dict[str, Any]) -> Iterator[None]:
    """Mark `folder` as incomplete while this context writes it, and record its origin afterwards."""
    note = Path(folder) / ORIGIN_FILE
    note.unlink(missing_ok=True)
    yield
    write_atomically(note, json.dumps(origin, indent=1))


def is_tiny(folder: str | Path) -> bool:
    """Whether `prepare_model` built the model in this folder as the embedded tiny model of a task."""
    return "task" in (origin_of(folder) or {})


def is_adapter(path: str | Path) -> bool:
    """Whether a local folder holds a PEFT adapter."""
    return (Path(path) / ADAPTER_CONFIG).is_file()


def load_model(path: str, policy: str = "causal", quantization_config: Any = None, **kwargs: Any) -> Any:
    """Load the model of a Hub id or folder, or an adapter with its base model. `kwargs` are those of from_pretrained.

    To train a model, use `load_for_training`.
    """
    from ..constraints.sharding import loading_whole_models

    if quantization_config is not None:  # given as None, it would hide that stored weights are quantised
        kwargs["quantization_config"] = quantization_config
    source, revision = full_model_of(path, kwargs.pop("revision", None))
    with loading_whole_models():
        model = from_pretrained(_auto_class(policy), source, revision=revision, **kwargs)
    keep_weights_unpacked(model)
    return _with_adapter_of(path, model) if is_adapter(path) else model


def load_for_training(model: Any, args: Any, quantization_config: Any = None) -> Any:
    """Load the model at a Hub id or folder as TRL would load it; anything but text is returned as it is.

    An adapter is loaded on its base model, to be trained further, which TRL cannot do.
    """
    from accelerate.utils import set_seed
    from trl.trainer.utils import create_model_from_path

    set_seed(args.seed)
    if not isinstance(model, str):
        return model
    init = dict(args.model_init_kwargs or {})
    if quantization_config is not None:
        init["quantization_config"] = quantization_config
    if args.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
        init["device_map"] = None
    init.setdefault("trust_remote_code", args.trust_remote_code)
    source, init["revision"] = full_model_of(model, init.get("revision"))
    loaded = create_model_from_path(source, **init)
    if not is_adapter(model):
        return loaded
    return _with_adapter_of(model, loaded, is_trainable=True, **adapter_dtype(args))


def adapter_dtype(args: Any) -> dict[str, bool]:
    """Return the option of PEFT that keeps an adapter in the dtype of its base model, which ZeRO-3 needs."""
    is_zero3 = args.deepspeed_plugin is not None and args.deepspeed_plugin.zero_stage == 3
    return {"autocast_adapter_dtype": False} if is_zero3 else {}


def _with_adapter_of(path: str, base: Any, **kwargs: Any) -> Any:
    """Return the base model with the adapter in a folder on top."""
    from peft import PeftModel

    from .masked_policy import load_fill_steps

    load_fill_steps(base, path)
    if (Path(path) / TOKENIZER_CONFIG).is_file():
        tokens = len(load_tokenizer(path))
        if tokens > base.config.get_text_config().vocab_size:  # the adapter was trained with tokens of its own
            base.resize_token_embeddings(tokens)
    return PeftModel.from_pretrained(base, path, **kwargs)


def empty_model(config: Any, policy: str) -> Any:
    """Return a model of this configuration on the meta device, which allocates no memory for weights."""
    from ..constraints.sharding import loading_whole_models

    with torch.device("meta"), loading_whole_models():
        return _auto_class(policy).from_config(config, trust_remote_code=False)


def _auto_class(policy: str) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    return AutoModelForMaskedLM if policy == "masked" else AutoModelForCausalLM


def model_config(path: str, revision: str | None = None) -> Any:
    """Return the configuration of the model at `path`, for an adapter that of its base model."""
    from transformers import AutoConfig

    source, revision = full_model_of(path, revision)
    return from_pretrained(AutoConfig, source, revision=revision)


def check_policy(path: str, policy: str, revision: str | None = None) -> Any:
    """Return the configuration of the model at `path`. Raises ValueError if the model does not fit the policy kind."""
    config = model_config(path, revision)
    names = config.architectures or ["a model without a head"]
    fills = names[0].endswith("ForMaskedLM")
    if fills != (policy == "masked"):
        wanted = "a masked language model (...ForMaskedLM)" if policy == "masked" else "a causal language model"
        raise ValueError(f"the task needs {wanted}, but {path} is {names[0]}; choose another --model")
    return config


def full_model_of(path: str, revision: str | None = None) -> tuple[str, str | None]:
    """Return the folder or Hub id of the full model at `path` (for an adapter, its base model) and its revision."""
    if not is_adapter(path):
        return path, revision
    config = json.loads((Path(path) / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    return config["base_model_name_or_path"], config.get("revision")


def merged_folder(adapter: str | Path, policy: str = "causal", beside: str | Path | None = None) -> Path:
    """Return the folder of an adapter merged into its base model, which is made unless it is there and complete.

    It is in the folder `beside`; by default, in that of the adapter. ValueError if the base model is missing or stored
    quantised.
    """
    adapter = Path(adapter)
    folder = Path(beside or adapter) / MERGED_FOLDER
    (weights,) = adapter.glob("adapter_model.*")
    with open(weights, "rb") as file:
        origin = {"adapter_sha256": hashlib.file_digest(file, "sha256").hexdigest()}
    if origin_of(folder) != origin:
        base, _ = full_model_of(str(adapter))
        check_local_path(base, "the base model of the adapter,")
        if getattr(model_config(str(adapter)), "quantization_config", None) is not None:
            raise ValueError(
                f"the weights of {base} are stored quantised, so that an adapter cannot be merged into them"
            )
        with building(folder, origin):
            save_merged(adapter, folder, policy)
    return folder


def save_merged(adapter: str | Path, folder: str | Path, policy: str = "causal") -> None:
    """Save the base model of an adapter with the adapter merged in, as an ordinary model folder.

    The base model is loaded in its stored precision, without any quantization that was used for training only.
    """
    merged = load_model(str(adapter), policy=policy, dtype="auto").merge_and_unload()
    merged.save_pretrained(folder)
    load_tokenizer(str(adapter)).save_pretrained(folder)


def init_kwargs(model_args: Any) -> dict[str, Any]:
    """Return TRL's model options as keyword arguments for from_pretrained."""
    kwargs: dict[str, Any] = {"revision": model_args.model_revision, "dtype": model_args.dtype or "float32"}
    if model_args.attn_implementation:
        kwargs["attn_implementation"] = model_args.attn_implementation
    return kwargs


def load_tokenizer(model: str, revision: str | None = None) -> Any:
    """Load the tokenizer of a model, with a chat template and the right end-of-sequence token.

    An adapter without a tokenizer uses that of its base model. A tokenizer without a chat template gets a plain one.
    `eos_token` is set to the token that ends an answer in the chat template: base models and some GGUF files name
    another token, which the model would never generate after an answer.
    """
    from transformers import AutoTokenizer

    source = model
    if is_adapter(model) and not (Path(model) / TOKENIZER_CONFIG).is_file():
        source, revision = full_model_of(model)
    try:
        tokenizer = from_pretrained(
            AutoTokenizer, source, revision=revision, padding_side="left", truncation_side="left"
        )
    except OSError as error:
        not_local = "" if Path(source).is_dir() else "there is no such folder here, and from the Hub: "
        raise ValueError(
            f"the tokenizer of model {source!r} cannot be loaded: {not_local}{str(error).splitlines()[0]}"
        ) from error
    if type(getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)).__name__ == "BPE":
        tokenizer.clean_up_tokenization_spaces = False  # which transformers ignores for BPE, with a warning
    tokenizer.chat_template = tokenizer.chat_template or PLAIN_CHAT_TEMPLATE
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.eos_token = end_of_answer(tokenizer) or tokenizer.eos_token
    return tokenizer


def set_template_variables(tokenizer: Any, variables: Mapping[str, Any] | None) -> None:
    """Make `variables`, such as {"enable_thinking": False}, the defaults of the tokenizer's chat template.

    They become part of the template, which is saved with the model: whoever makes a prompt or feedback with this
    tokenizer writes what training wrote. Variables that are passed to `apply_chat_template` come before them.
    """
    arguments = inspect.signature(type(tokenizer).apply_chat_template).parameters
    for name in variables or {}:
        if name in arguments or not name.isidentifier():
            raise ValueError(
                f"chat_template_kwargs: {name!r} is not a variable of a chat template; give variables that the "
                'template of the model reads, such as {"enable_thinking": false}'
            )
    # The line break after a block is removed by the environment of chat templates.
    head = "".join(
        f"{{% if {name} is not defined %}}{{% set {name} = {value!r} %}}{{% endif %}}\n"
        for name, value in (variables or {}).items()
    )
    given = tokenizer.chat_template
    templates = given if isinstance(given, dict) else {"": given}  # by name, if there are several
    headed = {name: text if text.startswith(head) else head + text for name, text in templates.items()}
    tokenizer.chat_template = headed if isinstance(given, dict) else headed[""]


def end_of_answer(tokenizer: Any) -> str | None:
    """Return the special token that the chat template writes after an answer, or None if it writes none."""
    answer = "4217"
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except (TemplateError, ValueError):  # the template rejects these messages, or there is no template
        return None
    after = text.rpartition(answer)[2].lstrip()
    return max((token for token in tokenizer.get_added_vocab() if after.startswith(token)), key=len, default=None)
