"""Models from a Hub id, a local folder, a GGUF file, or `tiny`: a small Llama (or ModernBERT) made on the spot for a
task.

Whatever it comes from, TRL gets a Hub id or a folder: it loads the reference model from there a second time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError

from .checkpoints import OtherOriginError, newest_complete
from .failures import first_line
from .files import model_file_in, write_whole
from .task import MASK_TOKEN, Task, TinySpec

TINY = "tiny"
MERGED_FOLDER = "merged"  # of a run's folder
ORIGIN_FILE = "made_from.json"  # in a folder that a run made itself, written last: from what it was made
# For models that have no chat template of their own: a line a message, and the end of the text after an answer.
PLAIN_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% else %}{{ '\\n' }}{% endif %}{% endfor %}"
)


def prepare_model(name: str | None, task: Task, output_dir: str | Path, seed: int = 0) -> str:
    """A Hub id or folder that transformers can load, for whatever the user named; None is `tiny`."""
    folder = Path(output_dir) / "base_model"
    if name is None or name == TINY:
        spec = task.tiny()
        if spec is None:
            raise ValueError(f"task {task.name!r} has no embedded tiny model; give --model_name_or_path")
        origin = {"task": task.name, "seed": seed, **asdict(spec), "tokens": list(spec.tokens)}
        if not is_made_from(folder, origin):
            with making(folder, origin):
                save_tiny(spec, folder, seed)
        return str(folder)
    if name.endswith(".gguf"):
        file = Path(name).expanduser()
        if not file.is_file():
            raise ValueError(f"model file {name!r} does not exist")
        origin = {"file": file.name, "bytes": file.stat().st_size}  # which may have moved with the run
        if not is_made_from(folder, origin):
            with making(folder, origin):
                convert_gguf(file, folder)
        return str(folder)
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    path = Path(name).expanduser()
    if looks_local and not path.is_dir():
        raise ValueError(f"model folder {name!r} does not exist; give a folder, a .gguf file, a Hub id, or 'tiny'")
    if path.is_dir() and model_file_in(path) is None:
        raise ValueError(f"model folder {name!r} holds neither config.json nor adapter_config.json")
    if path.is_dir() and not any(file.suffix in (".safetensors", ".bin") for file in path.iterdir()):
        raise ValueError(f"model folder {name!r} holds no weights (.safetensors or .bin)")
    return str(path) if path.is_dir() else name


def is_made_from(folder: str | Path, origin: dict[str, Any]) -> bool:
    """Whether `folder` is complete and was made from this. OtherOriginError where it was made from something else, and
    checkpoints beside it are of a run that began with it."""
    found, wanted = origin_of(folder), json.loads(json.dumps(origin))
    if found not in (None, wanted) and newest_complete(Path(folder).parent)[0]:
        changed = [name for name in wanted if found.get(name) != wanted[name]]
        raise OtherOriginError(
            f"the run in {Path(folder).parent} began with {folder}, which was made with another "
            f"{', '.join(changed)}: go on with the options it had, or choose another --output_dir"
        )
    return found == wanted


def origin_of(folder: str | Path) -> Any:
    note = Path(folder) / ORIGIN_FILE
    return json.loads(note.read_text(encoding="utf-8")) if note.is_file() else None


@contextmanager
def making(folder: str | Path, origin: dict[str, Any]) -> Iterator[None]:
    """Around the writing of `folder`: the note of its origin goes first and comes last."""
    note = Path(folder) / ORIGIN_FILE
    note.unlink(missing_ok=True)
    yield
    write_whole(note, json.dumps(origin, indent=1))


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
        raise ValueError(f"the task wants {wanted}, and {path} is {names[0]}; give another --model_name_or_path")
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


def save_tiny(spec: TinySpec, folder: str | Path, seed: int = 0) -> None:
    """A freshly initialised Llama, or ModernBERT where masks are filled, with a tokenizer over `spec.tokens`, saved
    like any model."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, ModernBertForMaskedLM, set_seed

    tokenizer = make_tokenizer(spec.tokens, spec.context, fills=spec.policy == "masked")
    set_seed(seed)
    if spec.policy == "masked":
        model = ModernBertForMaskedLM(encoder_config(spec, tokenizer))
    else:
        config = LlamaConfig(
            intermediate_size=3 * spec.hidden_size,
            num_key_value_heads=spec.heads,
            tie_word_embeddings=False,
            **_shape(spec, tokenizer),
        )
        model = LlamaForCausalLM(config)
        model.generation_config = GenerationConfig(
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def encoder_config(spec: TinySpec, tokenizer: Any, **more: Any) -> Any:
    """The configuration of a small ModernBERT: every layer looks at the whole text."""
    from transformers import ModernBertConfig

    return ModernBertConfig(
        intermediate_size=2 * spec.hidden_size,
        global_attn_every_n_layers=1,
        cls_token_id=None,
        sep_token_id=None,
        **_shape(spec, tokenizer),
        **more,
    )


def _shape(spec: TinySpec, tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "max_position_embeddings": spec.context,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def make_tokenizer(tokens: Any, context: int, fills: bool = False) -> Any:
    """A tokenizer that cuts text into the longest of `tokens` that match and puts it together again exactly; with a
    mask token where a model `fills` masks."""
    from tokenizers import Regex, Tokenizer, decoders
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<eos>", "<unk>", *([MASK_TOKEN] if fills else [])]
    # The newline ends a chat message in the template.
    ordered = list(dict.fromkeys([*special, "\n", *tokens]))
    clash = set(special) & set(tokens)
    if clash or "" in ordered:
        raise ValueError(f"tiny model: tokens must not be empty or one of {special}")
    backend = Tokenizer(WordLevel({token: i for i, token in enumerate(ordered)}, unk_token="<unk>"))
    longest_first = sorted(ordered[len(special) :], key=len, reverse=True)
    pattern = "|".join(re.escape(token) for token in longest_first)
    backend.pre_tokenizer = Split(Regex(pattern), behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        **({"mask_token": MASK_TOKEN} if fills else {}),
        model_max_length=context,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = PLAIN_CHAT_TEMPLATE
    return tokenizer


def convert_gguf(file: Path, folder: str | Path) -> None:
    """A GGUF file as an ordinary folder, dequantised. transformers marks such a model as quantised and then refuses to
    save it, so the weights go into a fresh model of the same configuration."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        config = AutoConfig.from_pretrained(**where)
        tokenizer = AutoTokenizer.from_pretrained(**where)
    except ImportError:
        raise
    except Exception as error:  # the reader has no error of its own for a file that ends too soon
        raise ValueError(
            f"model file {file} cannot be read ({type(error).__name__}: {first_line(error)[:200]}); it may be "
            "incomplete: download or copy it again"
        ) from error
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def is_bf16_fast() -> bool:
    """Whether this machine is fast in bf16: NVIDIA GPUs from Ampere on and other accelerators that say so. CPUs are
    not: without special units they emulate it, up to forty times slower, and with them casting eats the gain for
    models small enough to train there."""
    if torch.cuda.is_available():
        return torch.version.hip is not None or torch.cuda.get_device_capability()[0] >= 8
    return hasattr(torch, "xpu") and torch.xpu.is_available()
