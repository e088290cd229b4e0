"""Small models, a decoder that works on the CPU as on a GPU, and independently computed log-probs."""

import ctypes
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GemmaConfig, LlamaConfig, Qwen2Config

from trl_grpo_tasks.models.tiny import make_tokenizer
from trl_grpo_tasks.rollout import Decoder, cache, decoder

TOKENIZER = make_tokenizer([*"0123456789abcdex,()", "10", "12", "x1", "ab"], 64)
EOS = TOKENIZER.eos_token_id


def tiny(config_class, seed=0, **special):
    torch.manual_seed(seed)
    sizes = {"vocab_size": len(TOKENIZER) + 3, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
             "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0,
             "eos_token_id": EOS}  # fmt: skip
    model = AutoModelForCausalLM.from_config(config_class(**sizes | special))
    for p in model.parameters():  # random weights are too flat to tell one token from another
        p.data.mul_(4)
    return model.eval()


class Paged(Decoder):
    """A decoder that does on the CPU what it does on a GPU: a paged cache, fused projections and captured passes.

    Plain torch operations replace the kernels. A captured pass is run again instead of replayed, with the same input
    and output tensors. Pages are small, so that short prompts fill several.
    """

    page = 4

    def __init__(self, model, **options):
        super().__init__(model, kernels=True, **options)
        self.is_asynchronous = True
        self._graphs.capture = capture

    @contextmanager
    def running(self, *args, **kwargs):
        kernels = pytest.importorskip("trl_grpo_tasks.rollout.kernels")
        kernels.paged_attention.register_kernel("cpu", reference_attention)
        kernels.adapted_linear.register_kernel("cpu", reference_linear)
        with ExitStack() as stack:
            stack.enter_context(patch.object(cache, "PAGE", self.page))
            stack.enter_context(patch.object(decoder, "PAGE", self.page))
            stack.enter_context(patch.object(kernels, "sample", reference_sample))
            stack.enter_context(super().running(*args, **kwargs))
            yield

    def generate(self, *args):
        read = super().generate(*args)().copy()  # on a GPU, the copy to the CPU is queued before the next steps
        return lambda: read

    def _frees_copies(self, weights):
        return False  # as for a model that is small beside the memory of its GPU


def capture(function):
    """Stands in for the capture of a CUDA graph: a replay calls the function again."""
    result = function()

    class Graph:
        def replay(self):
            again = function()
            if result is not None:
                result.copy_(again)

    return Graph(), result


def reference_attention(query, key, value, where, addresses, pages, sinks, scale, window, softcap, is_prefill):
    """Attention over a paged cache on the CPU, in float64. The cache is found through its addresses."""
    (row_T, position_T), size = where[0, 0], cache.PAGE
    kv_heads, width = key.shape[1:]
    is_real = row_T >= 0
    rows, positions = row_T[is_real], position_T[is_real]
    out = torch.zeros_like(query)
    if not len(rows):
        return out
    used = -(-int(positions.max() + 1) // size)
    page_T_P = pages[rows, :used].long()
    stored = []
    for address, new in zip(addresses.tolist(), (key, value), strict=True):
        slots = (int(pages.max()) + 1) * size
        memory = (ctypes.c_byte * (slots * kv_heads * width * new.element_size())).from_address(address)
        buffer = torch.frombuffer(memory, dtype=new.dtype).view(slots // size, size, kv_heads, width)
        buffer[pages[rows, positions // size].long(), positions % size] = new[is_real]
        stored.append(buffer[page_T_P].flatten(1, 2).double())
    grouped = query[is_real].double().unflatten(1, (kv_heads, -1))
    scores = torch.einsum("tkgd,tlkd->tkgl", grouped, stored[0]) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    behind = positions[:, None] - torch.arange(used * size)
    attends = (behind >= 0) & (behind < (window or used * size))
    scores = scores.masked_fill(~attends[:, None, None], -torch.inf)
    if sinks is not None:
        sink = sinks.double().view(1, kv_heads, -1, 1).expand(len(rows), -1, -1, 1)
        scores = torch.cat([scores, sink], dim=3)
    weights = scores.softmax(3)[..., : used * size]
    values = stored[1].masked_fill(~attends[:, :, None, None], 0)  # unused parts of pages may hold anything
    out[is_real] = torch.einsum("tkgl,tlkd->tkgd", weights, values).flatten(1, 2).to(out.dtype)
    return out


def reference_linear(x, weight, bias, down, up, ends):
    """A linear layer with adapters on the CPU, in float64."""
    assert not up.shape[1] % len(ends), "the kernel takes parts of one rank"
    out = x.double() @ weight.double().T + (x.double() @ down.double().T).to(x.dtype).double() @ up.double().T
    return (out if bias is None else out + bias.double()).to(x.dtype)


def reference_sample(logits, masks=None, scale=1.0, softcap=None, is_greedy=False, seeds=None):
    """One token per row, and the tokens with their log-probs, in float64; seeds are ignored."""
    logits = logits.double() * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits)
    if masks is not None:
        words, index = masks
        logits = logits.masked_fill(~allowed_bits(words[index], logits.shape[1]), -torch.inf)
    logps = logits.log_softmax(1)
    tokens = logps.argmax(1) if is_greedy else torch.multinomial(logps.exp(), 1)[:, 0]
    return tokens, torch.stack((tokens.double(), logps.gather(1, tokens[:, None])[:, 0]))


def allowed_bits(words, size):
    """Packed masks (rows, words) of 32 bits as booleans (rows, size)."""
    return ((words[:, :, None] >> torch.arange(32)) & 1).bool().flatten(1)[:, :size]


MODELS = {"llama": tiny(LlamaConfig), "qwen2": tiny(Qwen2Config), "gemma": tiny(GemmaConfig)}
PROMPTS = [[5, 6, 7], [5, 6, 7], [9], [5, 6, 7, 8, 9, 10, 11], [9]]
PAGED = {family: Paged(model) for family, model in MODELS.items()}  # kept from test to test, as in a run


def dense_logps(model, prompt, ids, masks, table, temperature):
    """Log-probs of a completion by one plain forward pass and a masked softmax in float64."""
    given = torch.tensor([prompt + ids], device=model.device)
    logits = model(input_ids=given).logits[0].cpu().double() / temperature
    out = []
    for t, (token, number) in enumerate(zip(ids, masks, strict=True)):
        words = table.words([number])[0] if table is not None else None
        step = logits[len(prompt) + t - 1]
        if words is not None:
            bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: len(step)].astype(bool)
            step = step.masked_fill(~torch.from_numpy(bits), -torch.inf)
        out.append(step.log_softmax(0)[token].item())
    return out
