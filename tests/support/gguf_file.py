"""A small real GGUF file: a one-layer Llama with a byte-level BPE tokenizer in its metadata."""

from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.gguf_converter import convert

MERGES = [("a", "b"), ("c", "d"), ("ab", "cd"), ("Ġ", "a")]
END = "<|endoftext|>"


def write_gguf(path, seed=0) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())  # the 256 characters that represent bytes
    tokens = [*letters, *("".join(pair) for pair in MERGES), END]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=len(tokens), hidden_size=32, num_attention_heads=2, num_hidden_layers=1,
                         intermediate_size=48, max_position_embeddings=64, rms_norm_eps=1e-5, initializer_range=0.2,
                         bos_token_id=len(tokens) - 1, eos_token_id=len(tokens) - 1)  # fmt: skip
    with TemporaryDirectory() as folder:
        PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=END, eos_token=END).save_pretrained(folder)
        LlamaForCausalLM(config).save_pretrained(folder)
        convert(Path(folder), path)
