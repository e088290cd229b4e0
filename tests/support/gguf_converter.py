"""A stand-in for llama.cpp's converter, with its command line: converts a Llama folder to a GGUF file in float32.

It shares no code with the package. Real conversions are tested where LLAMA_CPP is set.
"""

import argparse
import json
from pathlib import Path

import gguf
from safetensors.numpy import load_file

LAYER = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def interleaved(weight, heads):
    """llama.cpp rotates neighbouring pairs of a head, transformers the two halves of it."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def convert(folder, file):
    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    vocabulary = tokenizer["model"]["vocab"] | {one["content"]: one["id"] for one in tokenizer["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.get)
    special = {one["content"] for one in tokenizer["added_tokens"]}
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_vocab_size(len(tokens))
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_bos_token_id(config["bos_token_id"])
    for name, weight in load_file(folder / "model.safetensors").items():
        name = name.removesuffix(".weight")
        if name in WHOLE:
            writer.add_tensor(f"{WHOLE[name]}.weight", weight)
            continue
        _, _, layer, part = name.split(".", 3)
        if part.endswith(("q_proj", "k_proj")):
            weight = interleaved(weight, heads if part.endswith("q_proj") else kv_heads)
        writer.add_tensor(f"blk.{layer}.{LAYER[part]}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--outfile", type=Path)
    parser.add_argument("--outtype", choices=["f32"])
    options = parser.parse_args()
    convert(options.model, options.outfile)
