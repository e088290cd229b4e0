"""Small models of every supported family, decoders that work as on a GPU, and independently computed log-probs."""

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GemmaConfig, LlamaConfig, Qwen2Config

from trl_grpo_tasks.models.tiny import make_tokenizer
from trl_grpo_tasks.rollout import Decoder

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


class Replayed(Decoder):
    """A decoder that emulates CUDA graphs on the CPU: passes of a few fixed sizes with reused input buffers."""

    def __init__(self, model):
        super().__init__(model, kernels=None)

    def _captured(self, count, width, length):
        if (count, width, length) not in self._graphs:
            entry = torch.zeros(count, 2 + width, dtype=torch.int64)
            graph = type("Graph", (), {"replay": lambda _: self._forward(entry, length)})()
            self._graphs[count, width, length] = (graph, entry)
        return self._graphs[count, width, length]


MODELS = {"llama": tiny(LlamaConfig), "qwen2": tiny(Qwen2Config), "gemma": tiny(GemmaConfig)}
PROMPTS = [[5, 6, 7], [5, 6, 7], [9], [5, 6, 7, 8, 9, 10, 11], [9]]
REPLAYED = {family: Replayed(model) for family, model in MODELS.items()}  # kept from test to test, as in a run


def dense_logps(model, prompt, ids, masks, table, temperature):
    """Log-probs of a completion by one plain forward pass and a masked softmax in float64."""
    logits = model(input_ids=torch.tensor([prompt + ids])).logits[0].double() / temperature
    out = []
    for t, (token, number) in enumerate(zip(ids, masks, strict=True)):
        words = table.words([number])[0] if table is not None else None
        step = logits[len(prompt) + t - 1]
        if words is not None:
            bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: len(step)].astype(bool)
            step = step.masked_fill(~torch.from_numpy(bits), -torch.inf)
        out.append(step.log_softmax(0)[token].item())
    return out
