"""Tiny masked language models of several families, with tokenizers of their own kind trained on a few passages."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
FAMILIES = ("bert", "distilbert", "roberta", "modernbert", "albert")


def save_encoder(folder, family, passages, vocab_size=260):
    """Save an untrained encoder of a family; return its folder."""
    import torch
    import transformers as hf

    torch.manual_seed(1)
    if family in ("bert", "distilbert"):
        tokenizer = hf.BertTokenizer(vocab=_trained("wordpiece", passages, vocab_size)["model"]["vocab"])
    elif family == "roberta":
        state = _trained("bytes", passages, vocab_size + 256)["model"]
        tokenizer = hf.RobertaTokenizer(vocab=state["vocab"], merges=[tuple(pair) for pair in state["merges"]])
    else:
        kind = "bytes" if family == "modernbert" else "unigram"
        state = _trained(kind, passages, vocab_size + 256 * (kind == "bytes"))
        tokenizer = hf.PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(json.dumps(state)), cls_token="[CLS]", sep_token="[SEP]",
            pad_token="[PAD]", unk_token="[UNK]", mask_token=hf.AddedToken("[MASK]", lstrip=True, special=True),
        )  # fmt: skip
        if family == "modernbert":  # its vocabulary has runs of spaces, which are not special tokens
            tokenizer.add_tokens(["  ", "    "])
    size = {"vocab_size": len(tokenizer) + 3, "pad_token_id": tokenizer.pad_token_id, "initializer_range": 0.3}
    config = {
        "bert": lambda: hf.BertConfig(**size, **SIZES, max_position_embeddings=64),
        "distilbert": lambda: hf.DistilBertConfig(**size, dim=16, n_layers=1, n_heads=2, hidden_dim=32,
                                                  max_position_embeddings=64),
        "roberta": lambda: hf.RobertaConfig(**size, **SIZES, max_position_embeddings=65 + tokenizer.pad_token_id),
        "modernbert": lambda: hf.ModernBertConfig(**size, **SIZES, max_position_embeddings=64,
                                                  cls_token_id=tokenizer.cls_token_id,
                                                  sep_token_id=tokenizer.sep_token_id),
        "albert": lambda: hf.AlbertConfig(**size, **SIZES, embedding_size=8, max_position_embeddings=64),
    }[family]()  # fmt: skip
    Path(folder).mkdir(parents=True, exist_ok=True)
    hf.AutoModelForMaskedLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def _trained(kind, passages, vocab_size):
    """The state of a tokenizer trained on passages: word pieces, BPE over bytes, or a unigram model."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    if kind == "wordpiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=special, show_progress=False)
    elif kind == "bytes":
        special += ["<s>", "</s>", "<pad>", "<unk>", "<mask>"]
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, show_progress=False,
                                      initial_alphabet=pre_tokenizers.ByteLevel.alphabet())  # fmt: skip
    else:
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=vocab_size, special_tokens=special, unk_token="[UNK]",
                                          show_progress=False)  # fmt: skip
    tokenizer.train_from_iterator(passages, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    )
    return json.loads(tokenizer.to_str())
