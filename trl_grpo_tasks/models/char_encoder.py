"""Conversion of .pt checkpoints of bidirectional nanoGPT encoders over characters to ordinary model folders.

A checkpoint is a dictionary, as nanoGPT saves it, with

- `model`: the weights. A generator has `lm_head`; a judge has `sequence_head` and, with a CLS token, `cls_embedding`;
- `model_args`: `block_size`, `vocab_size`, `n_layer`, `n_head`, `n_embd`, `mode`, and `cls_token_id` of a judge. Of
  its `attention_type` and `position_encoding`, only "bidirectional" and "rotary" are supported;
- `config["meta"]`: `itos`, the character of each token id, and `mask_token_id`. If it is missing there, it is read
  from the file meta.pkl beside the checkpoint.

Files are read without running code: objects other than tensors and plain Python values are refused.

The folder holds a EuroBERT that computes the same function. It differs from nanoGPT in three ways that weights can
make up for:

- RMSNorm instead of LayerNorm: they agree on vectors with mean 0, so the mean is removed from whatever is added to the
  residual stream, and the bias of a norm moves into the linear layers that read it;
- gated MLPs: the gates are constant, 1;
- a GELU before a judge's score: gelu(z) - gelu(-z) = z.

The input and output embeddings of a generator are tied in nanoGPT. Here they are trained separately, because only the
input has its mean removed.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..failures import first_line
from ..task import MASK_TOKEN

GENERATOR, JUDGE = "language_model", "sequence_scorer"  # values of `mode`
SIZES = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")
# Of each argument, the only value that is supported, and the one that is meant if there is none.
SUPPORTED = {"attention_type": ("bidirectional", "causal"), "position_encoding": ("rotary", "absolute")}
IGNORED = re.compile(r"critic_head\.|sequence_head\.temperature$")  # neither fills nor scores
NORM_EPS, ROPE_BASE = 1e-5, 10_000.0
PAD, CLS = "<pad>", "<cls>"


def convert_pt(file: Path, folder: str | Path, mode: str) -> None:
    """Convert a checkpoint of this mode to a model folder; ValueError if it is not one, or not a supported one."""
    from transformers import EuroBertConfig, EuroBertForMaskedLM, EuroBertForSequenceClassification

    checkpoint = _read(file)
    args = _checked_args(checkpoint, file, mode)
    vocab_size, width = args["vocab_size"], args["n_embd"]
    cls_id = args.get("cls_token_id") if mode == JUDGE else None
    with _reporting(file):
        weights = _weights(checkpoint["model"], args["n_layer"], cls_id, mode)
        if (found := tuple(weights["model.embed_tokens.weight"].shape)) != (vocab_size + 1, width):
            raise RuntimeError(f"embeddings of {found[0] - 1} tokens with {found[1:]} numbers")
    tokenizer = _tokenizer(_meta(checkpoint, file), file, args, cls_id, mode)
    config = EuroBertConfig(
        vocab_size=vocab_size + 1,  # padding gets a token of its own
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=args["n_layer"],
        num_attention_heads=args["n_head"],
        max_position_embeddings=args["block_size"],
        hidden_act="gelu",
        rms_norm_eps=NORM_EPS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_BASE},
        attention_bias=True,
        mlp_bias=True,
        pad_token_id=vocab_size,
        bos_token_id=None,
        eos_token_id=None,
        mask_token_id=vocab_size if tokenizer.mask_token_id is None else tokenizer.mask_token_id,
        classifier_pooling="bos",
        num_labels=1,
    )
    model = (EuroBertForMaskedLM if mode == GENERATOR else EuroBertForSequenceClassification)(config)
    with _reporting(file):
        model.load_state_dict({name: value.float() for name, value in weights.items()})
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def _reporting(file: Path) -> Iterator[None]:
    """Raise ValueError for any error of weights that are missing, left over, or of other shapes."""
    try:
        yield
    except (KeyError, RuntimeError, AttributeError, IndexError, TypeError, ValueError) as error:
        raise ValueError(
            f"{file}: the weights are not those of an encoder with these model_args ({type(error).__name__}: "
            f"{first_line(error)[:200]})"
        ) from error


def _read(file: Path) -> dict[str, Any]:
    """Return the content of a checkpoint. The class of its `mode` is read as text, and no other class is read."""
    try:
        with torch.serialization.safe_globals([(str, "model.ModelMode")]):
            found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises arbitrary errors for a truncated file
        unsafe = re.search(r"GLOBAL (\S+)", str(error))
        if unsafe is None:
            raise ValueError(
                f"{file} cannot be read as a PyTorch file ({type(error).__name__}: {first_line(error)[:200]}); it may "
                "be incomplete, so save or copy it again"
            ) from error
        raise ValueError(
            f"{file} holds an object of {unsafe[1]}, which is not loaded, because that could run code; save tensors, "
            "numbers, texts, lists and dictionaries only"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(found.get(key), dict) for key in ("model", "model_args")):
        raise ValueError(f"{file} must be a dictionary with 'model', the weights, and 'model_args'")
    return found


def _checked_args(checkpoint: dict[str, Any], file: Path, mode: str) -> dict[str, Any]:
    args = checkpoint["model_args"]
    for name in SIZES:
        if type(args.get(name)) is not int or args[name] < 1:
            raise ValueError(f"{file}: model_args[{name!r}] must be a number above 0, got {args.get(name)!r}")
    if args["n_embd"] % (2 * args["n_head"]):
        raise ValueError(f"{file}: n_embd {args['n_embd']} must be a multiple of twice n_head {args['n_head']}")
    if (found := args.get("mode", GENERATOR)) != mode:
        uses = {GENERATOR: "a generator, for --model", JUDGE: "a judge, for --judge"}
        raise ValueError(f"{file} has the mode {found!r}, but {mode!r} is needed ({uses[mode]})")
    for name, (supported, default) in SUPPORTED.items():
        if (found := args.get(name, default)) != supported:
            raise ValueError(f"{file}: {name} {found!r} is not supported; only {supported!r} is")
    return args


# ---- characters


def _meta(checkpoint: dict[str, Any], file: Path) -> dict[str, Any]:
    settings = checkpoint.get("config")
    meta = settings.get("meta") if isinstance(settings, dict) else None
    beside = file.with_name("meta.pkl")
    if meta is None and beside.is_file():
        try:
            meta = _PlainUnpickler(beside.open("rb")).load()
        except Exception as error:  # pickle raises arbitrary errors for a file that is none
            raise ValueError(f"{beside} cannot be read ({type(error).__name__}: {first_line(error)[:200]})") from error
    if not isinstance(meta, dict) or not isinstance(meta.get("itos"), dict):
        raise ValueError(
            f"{file} does not say which characters its tokens are: neither config['meta'] nor a file meta.pkl beside "
            "it has a dictionary 'itos'"
        )
    return meta


class _PlainUnpickler(pickle.Unpickler):
    """Reads plain values only: without any class or function, a pickle cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it holds an object of {module}.{name}, which is not loaded")


def _tokenizer(meta: dict[str, Any], file: Path, args: dict[str, Any], cls_id: int | None, mode: str) -> Any:
    """Return a tokenizer with one token per character. Characters that it does not know are read as padding."""
    from tokenizers import Regex, Tokenizer, processors
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    size = args["vocab_size"]
    named: dict[Any, str] = {}
    if mode == GENERATOR:
        named = {meta.get("mask_token_id"): MASK_TOKEN}
    elif cls_id is not None:
        named = {cls_id: CLS}
    for number, token in named.items():
        if type(number) is not int or not 0 <= number < size:
            raise ValueError(f"{file}: the id of {token} must be a number below {size}, got {number!r}")
    characters = {
        i: text
        for i, text in meta["itos"].items()
        if isinstance(text, str) and len(text) == 1 and not 0xD800 <= ord(text) < 0xE000  # surrogates are no text
    }
    tokens = [named.get(i) or characters.get(i) or f"<{i}>" for i in range(size)] + [PAD]
    if not characters or len(set(tokens)) < len(tokens):
        raise ValueError(f"{file}: 'itos' of its meta must map token ids to different characters")
    backend = Tokenizer(WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=PAD))
    backend.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = Fuse()
    if cls_id is not None:
        backend.post_processor = processors.TemplateProcessing(single=f"{CLS} $A", special_tokens=[(CLS, cls_id)])
    roles = {MASK_TOKEN: "mask_token", CLS: "cls_token", PAD: "pad_token"}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **{roles[token]: token for token in (*named.values(), PAD)},
        extra_special_tokens=[token for token in tokens if len(token) > 1 and token not in roles],
        model_max_length=args["block_size"],
        clean_up_tokenization_spaces=False,
    )


# ---- weights


def _weights(state: dict[str, torch.Tensor], layers: int, cls_id: int | None, mode: str) -> dict[str, torch.Tensor]:
    """Return the weights of the EuroBERT; KeyError if a weight is missing or left over."""
    named = {name.removeprefix("_orig_mod."): value for name, value in state.items()}  # which torch.compile adds
    state = {name: value.double() for name, value in named.items() if not IGNORED.match(name)}
    embeddings = state.pop("transformer.wte.weight")
    output = state.pop("lm_head.weight") if mode == GENERATOR else embeddings
    if cls_id is not None and "cls_embedding" in state:
        embeddings = embeddings.index_copy(0, torch.tensor([cls_id]), state.pop("cls_embedding")[None])
    weights = {"model.embed_tokens.weight": _padded(embeddings - embeddings.mean(1, keepdim=True))}

    def norm(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        weight = state.pop(f"{name}.weight")
        return weight, state.pop(f"{name}.bias", torch.zeros_like(weight))

    def linear(name: str, shift: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The weight and bias of a layer that reads what has `shift` removed, or that adds to the residual stream."""
        weight = state.pop(f"{name}.weight")
        bias = state.pop(f"{name}.bias", weight.new_zeros(len(weight)))
        if shift is None:
            return weight - weight.mean(0), bias - bias.mean()
        return weight, bias + weight @ shift

    for i in range(layers):
        old, new = f"transformer.h.{i}", f"model.layers.{i}"
        weights[f"{new}.input_layernorm.weight"], shift = norm(f"{old}.ln_1")
        weight, bias = linear(f"{old}.attn.c_attn", shift)
        made = dict(zip(("q_proj", "k_proj", "v_proj"), zip(weight.chunk(3), bias.chunk(3), strict=True), strict=True))
        made = {f"self_attn.{name}": both for name, both in made.items()}
        made["self_attn.o_proj"] = linear(f"{old}.attn.c_proj")
        weights[f"{new}.post_attention_layernorm.weight"], shift = norm(f"{old}.ln_2")
        made["mlp.gate_proj"] = weight, bias = linear(f"{old}.mlp.c_fc", shift)
        made["mlp.up_proj"] = torch.zeros_like(weight), torch.ones_like(bias)
        made["mlp.down_proj"] = linear(f"{old}.mlp.c_proj")
        for name, (weight, bias) in made.items():
            weights[f"{new}.{name}.weight"], weights[f"{new}.{name}.bias"] = weight, bias
    weights["model.norm.weight"], shift = norm("transformer.ln_f")
    if mode == GENERATOR:
        weights["lm_head.weight"], weights["lm_head.bias"] = _padded(output), _padded(output @ shift)
    else:
        scale, offset = state.pop("sequence_head.A"), state.pop("sequence_head.B")
        direction_D = state.pop("sequence_head.base_predictor.weight")[0] * scale
        offset = offset[0] + direction_D @ shift
        width = len(direction_D)
        # The judge says how unreal a text is, so that the score here is its complement: sigmoid(-z) = 1 - sigmoid(z).
        dense, biases = direction_D.new_zeros(width, width), direction_D.new_zeros(width)
        dense[0], dense[1], biases[0], biases[1] = direction_D, -direction_D, offset, -offset
        signs = direction_D.new_zeros(1, width)
        signs[0, 0], signs[0, 1] = -1.0, 1.0
        weights |= {"dense.weight": dense, "dense.bias": biases, "classifier.weight": signs}
        weights["classifier.bias"] = direction_D.new_zeros(1)
    if state:
        raise KeyError(f"unknown weights {', '.join(sorted(state)[:4])}")
    return weights


def _padded(values: torch.Tensor) -> torch.Tensor:
    """Append zeros for the padding token."""
    return torch.cat([values, values.new_zeros(1, *values.shape[1:])])
