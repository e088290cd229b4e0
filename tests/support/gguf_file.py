"""A small real GGUF file: a one-layer Llama with a byte-level BPE tokenizer in its metadata."""

import numpy as np

HIDDEN, HEADS, LAYERS, INNER, CONTEXT = 32, 2, 1, 48, 64
MERGES = [("a", "b"), ("c", "d"), ("ab", "cd"), ("Ġ", "a")]


def byte_letters() -> list[str]:
    """The 256 characters that represent bytes in GPT-2's vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]


def write_gguf(path, seed=0) -> None:
    import gguf

    tokens = [*byte_letters(), *("".join(pair) for pair in MERGES), "<|endoftext|>"]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("small")
    writer.add_vocab_size(len(tokens))
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 1) + [3])
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(len(tokens) - 1)
    writer.add_eos_token_id(len(tokens) - 1)
    rng = np.random.default_rng(seed)

    def tensor(name, *shape):
        values = np.ones(shape) if "norm" in name else rng.normal(0, 0.2, shape)
        writer.add_tensor(f"{name}.weight", values.astype(np.float32))

    tensor("token_embd", len(tokens), HIDDEN)
    tensor("output_norm", HIDDEN)
    tensor("output", len(tokens), HIDDEN)
    for layer in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            tensor(f"blk.{layer}.{name}", HIDDEN, HIDDEN)
        tensor(f"blk.{layer}.ffn_gate", INNER, HIDDEN)
        tensor(f"blk.{layer}.ffn_up", INNER, HIDDEN)
        tensor(f"blk.{layer}.ffn_down", HIDDEN, INNER)
        tensor(f"blk.{layer}.attn_norm", HIDDEN)
        tensor(f"blk.{layer}.ffn_norm", HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
