"""Writes .pt checkpoints of small bidirectional nanoGPT encoders, and computes what they compute."""

import math
import sys
import types
from enum import Enum

import torch
from torch.nn import functional

CHARACTERS = "\n !',.?" + "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
WIDTH, LAYERS, HEADS, CONTEXT = 16, 2, 2, 48


class ModelMode(Enum):
    """As in those files: the mode is an object of a class in a module `model`, which is not installed here."""

    LANGUAGE_MODEL = "language_model"
    SEQUENCE_SCORER = "sequence_scorer"


def random_weights(mode, bias=True, seed=0, cls=True):
    """A state dict with norms far from the identity, so that a mistake in their conversion shows."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape, scale=0.3, around=0.0):
        return around + scale * torch.randn(*shape, generator=generator)

    vocabulary = len(CHARACTERS) + 2
    state = {"transformer.wte.weight": drawn(vocabulary, WIDTH, scale=1.0, around=0.5)}

    def layer(name, out, width):
        state[f"{name}.weight"] = drawn(out, width)
        if bias:
            state[f"{name}.bias"] = drawn(out, around=0.2)

    def norm(name):
        state[f"{name}.weight"] = drawn(WIDTH, around=1.0)
        if bias:
            state[f"{name}.bias"] = drawn(WIDTH)

    for i in range(LAYERS):
        norm(f"transformer.h.{i}.ln_1")
        layer(f"transformer.h.{i}.attn.c_attn", 3 * WIDTH, WIDTH)
        layer(f"transformer.h.{i}.attn.c_proj", WIDTH, WIDTH)
        norm(f"transformer.h.{i}.ln_2")
        layer(f"transformer.h.{i}.mlp.c_fc", 4 * WIDTH, WIDTH)
        layer(f"transformer.h.{i}.mlp.c_proj", WIDTH, 4 * WIDTH)
    norm("transformer.ln_f")
    if mode is ModelMode.LANGUAGE_MODEL:
        state["lm_head.weight"] = state["transformer.wte.weight"]  # tied
        state["critic_head.weight"] = drawn(1, WIDTH)
    else:
        state["sequence_head.base_predictor.weight"] = drawn(1, WIDTH)
        state |= {"sequence_head.A": drawn(1, around=1.5), "sequence_head.B": drawn(1)}
        state["sequence_head.temperature"] = torch.zeros(1)
        if cls:
            state["cls_embedding"] = drawn(WIDTH, scale=1.0)
    return state


def write_pt(path, mode="language_model", bias=True, seed=0, cls=True, with_meta=True, **changed):
    """Write a checkpoint as nanoGPT does, with an optimizer, and return its weights."""
    mode = ModelMode(mode)
    state = random_weights(mode, bias, seed, cls)
    size = len(CHARACTERS)
    args = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH, "block_size": CONTEXT, "vocab_size": size + 2,
            "bias": bias, "dropout": 0.1, "attention_type": "bidirectional", "position_encoding": "rotary",
            "mode": mode, "cls_token_id": size + 1 if cls else None}  # fmt: skip
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter])
    parameter.sum().backward()
    optimizer.step()
    checkpoint = {"model": {f"_orig_mod.{name}": value for name, value in state.items()},
                  "optimizer": optimizer.state_dict(), "model_args": args | changed, "iter_num": 3,
                  "best_val_loss": torch.tensor(1.5), "config": {"batch_size": 4}}  # fmt: skip
    if with_meta:
        checkpoint["config"]["meta"] = meta()
    module = types.ModuleType("model")  # only while the file is written
    module.ModelMode = ModelMode
    ModelMode.__module__, ModelMode.__qualname__ = "model", "ModelMode"
    sys.modules["model"] = module
    try:
        torch.save(checkpoint, path)
    finally:
        del sys.modules["model"]
    return state


def meta():
    itos = dict(enumerate([*CHARACTERS, "[MASK]", "[PAD]"]))
    return {"vocab_size": len(itos), "mask_token_id": len(CHARACTERS), "pad_token_id": len(CHARACTERS) + 1,
            "itos": itos, "stoi": {text: i for i, text in itos.items()}}  # fmt: skip


def hidden_states(state, ids, cls_id=None):
    """What the encoder computes for one sequence, position by position and head by head, in float64."""
    state = {name: value.double() for name, value in state.items()}

    def norm(x, name):
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return scaled * state[f"{name}.weight"] + state.get(f"{name}.bias", 0)

    def layer(x, name):
        return x @ state[f"{name}.weight"].T + state.get(f"{name}.bias", 0)

    def rotated(x, place):
        half = len(x) // 2
        angles = torch.tensor([place / 10000 ** (2 * i / len(x)) for i in range(half)], dtype=torch.double)
        first, second = x[:half], x[half:]
        return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()])

    x = torch.stack([state["transformer.wte.weight"][i] for i in ids])
    if cls_id is not None and "cls_embedding" in state:
        x[[i for i, token in enumerate(ids) if token == cls_id]] = state["cls_embedding"]
    size = WIDTH // HEADS
    for i in range(LAYERS):
        read = norm(x, f"transformer.h.{i}.ln_1")
        queries, keys, values = layer(read, f"transformer.h.{i}.attn.c_attn").split(WIDTH, 1)
        heads = []
        for h in range(HEADS):
            part = slice(h * size, (h + 1) * size)
            q = torch.stack([rotated(row, place) for place, row in enumerate(queries[:, part])])
            k = torch.stack([rotated(row, place) for place, row in enumerate(keys[:, part])])
            heads.append((q @ k.T / math.sqrt(size)).softmax(1) @ values[:, part])
        x = x + layer(torch.cat(heads, 1), f"transformer.h.{i}.attn.c_proj")
        inner = functional.gelu(layer(norm(x, f"transformer.h.{i}.ln_2"), f"transformer.h.{i}.mlp.c_fc"))
        x = x + layer(inner, f"transformer.h.{i}.mlp.c_proj")
    return norm(x, "transformer.ln_f")


def judge_score(state, ids, cls_id):
    """How real a judge finds a sequence: the complement of what its head computes at the first position."""
    if cls_id is not None:
        ids = [cls_id, *ids]
    first = hidden_states(state, ids, cls_id)[0]
    value = first @ state["sequence_head.base_predictor.weight"][0].double()
    return 1 - torch.sigmoid(value * state["sequence_head.A"].double() + state["sequence_head.B"].double()).item()
