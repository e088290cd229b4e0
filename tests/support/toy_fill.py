"""The toy task for masked models: fill every gap with the first letter of the text (a to e)."""

from pathlib import Path

from trl_grpo_tasks.task import Task

LETTERS = "abcde"
MASK = "[MASK]"


class FillTask(Task):
    name, version, description = "fill", "1", "Fill gaps with the first letter."
    weights = {"match": 1.0}
    levels = ("1", "2")
    policy = "masked"
    spec = "tests.support.toy_fill"

    def dataset(self, split, size, seed):
        letters = LETTERS[:3] if split == "train" else LETTERS[3:]
        texts = [(letter, gaps) for letter in letters for gaps in (1, 3)]
        rows = [
            {
                "prompt": f"{letter} {' '.join([MASK] * gaps)} e",
                "letter": letter,
                "gaps": gaps,
                "level": str(1 + (gaps > 1)),
            }
            for letter, gaps in texts
        ]
        return [rows[i % len(rows)] for i in range(size or len(rows))]

    def score(self, row, completion):
        right = sum(a == row["letter"] for a in completion) / row["gaps"]
        fits = len(completion) == row["gaps"]
        return self.make_score({"match": right if fits else 0.0}, fits, fits and right == 1.0)

    def gold(self, row):
        return row["letter"] * row["gaps"]

    def bad(self, row):
        return "?"


def save_bert(folder, seed=1, vocab_size=10, **options):
    """Save a one-layer BERT over five letters with a BERT tokenizer ([CLS] before, [SEP] after, no end token).

    With `vocab_size` above 10, the model has outputs without a token.
    """
    import torch
    from transformers import BertConfig, BertForMaskedLM, BertTokenizer

    Path(folder).mkdir(parents=True, exist_ok=True)
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", MASK, *LETTERS]
    tokenizer = BertTokenizer(vocab={token: i for i, token in enumerate(tokens)}, model_max_length=16)
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertForMaskedLM(
        BertConfig(vocab_size=vocab_size, max_position_embeddings=16, initializer_range=0.2, **(sizes | options))
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
