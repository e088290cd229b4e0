"""The recording logits processor: which tokens it allows, what it records, and that batches match single states."""

import numpy as np
import pytest
import torch

from trl_grpo_tasks.constraints import ChoiceTreeConstraint, Grammar, GrammarConstraint
from trl_grpo_tasks.constraints.base import replay, unpack
from trl_grpo_tasks.constraints.filters import SamplingFilters
from trl_grpo_tasks.constraints.recording import RecordingProcessor, generating_with
from trl_grpo_tasks.constraints.table import FREE, MaskTable
from trl_grpo_tasks.models.tiny import make_tokenizer

TOKENIZER = make_tokenizer([*"0123456789-x", "10", "12", "x1"], 64)


def tree_choices(node):
    return [("", None)] if node == 3 else [(f"{n}x", node + 1) for n in (1, 10, 12)]


CONSTRAINTS = {
    "regex": GrammarConstraint(TOKENIZER, lambda row: Grammar.regex(row["pattern"]) if row["pattern"] else None),
    "tree": ChoiceTreeConstraint(TOKENIZER, lambda row: 0 if row["pattern"] else None, tree_choices),
}
ROWS = [{"pattern": p} for p in (r"(1[02]?x){3}", r"(1[02]?x){3}", None, r"-?[0-9]{1,3}", "")]
WIDE_MODEL = len(TOKENIZER) + 45  # models often have more outputs than their tokenizer has tokens


@pytest.mark.parametrize("kind", CONSTRAINTS)
@pytest.mark.parametrize("seed", range(2))
def test_batches_agree_with_single_states_and_masks_are_recorded(kind, seed):
    constraint, table = CONSTRAINTS[kind], MaskTable(WIDE_MODEL)
    processor = RecordingProcessor(ROWS, 1.0, SamplingFilters(), constraint, table)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(len(ROWS), 2, dtype=torch.long)
    ended = [False] * len(ROWS)
    written = [[] for _ in ROWS]
    for _ in range(12):
        scores = processor(ids, torch.randn(len(ROWS), WIDE_MODEL, generator=generator))
        tokens = torch.multinomial(scores.softmax(1), 1, generator=generator)
        for i, token in enumerate(tokens[:, 0].tolist()):
            if ended[i]:
                tokens[i] = TOKENIZER.pad_token_id
                continue
            written[i].append(token)
            ended[i] = token == TOKENIZER.eos_token_id
        ids = torch.cat([ids, tokens], 1)
    for row, tokens, numbers in zip(ROWS, written, processor.masks, strict=True):
        if not row["pattern"]:
            assert set(numbers) == {FREE}
            continue
        for mask, number in zip(replay(constraint, row, tokens), numbers, strict=False):
            expected = np.zeros(WIDE_MODEL, dtype=bool)
            expected[: len(TOKENIZER)] = unpack(mask, len(TOKENIZER))
            assert (unpack(table.words([number])[0], WIDE_MODEL) == expected).all()
        assert set(numbers[len(tokens) :]) <= {FREE}
    assert any(ended)


def one_row_processor():
    rows = [{"pattern": "1x"}]
    return RecordingProcessor(rows, 1.0, SamplingFilters(), CONSTRAINTS["regex"], MaskTable(WIDE_MODEL))


def test_disallowed_token_and_beam_search_are_errors():
    processor = one_row_processor()
    processor(torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, WIDE_MODEL))
    bad = torch.tensor([[0, TOKENIZER.convert_tokens_to_ids("x")]])
    with pytest.raises(ValueError, match="not allowed"):
        processor(bad, torch.zeros(1, WIDE_MODEL))
    with pytest.raises(RuntimeError, match="beam search"):
        processor(bad.repeat(2, 1), torch.zeros(2, WIDE_MODEL))


def test_generate_and_generation_config_are_restored():
    from transformers import GenerationConfig

    own = GenerationConfig(no_repeat_ngram_size=2, eos_token_id=7, top_k=3)

    class Model:
        generation_config = own

        def generate(self, logits_processor=None):
            return logits_processor, self.generation_config

    model, processor = Model(), one_row_processor()
    for expected in (None, "own"):
        if expected == "own":
            model.generate = lambda logits_processor=None: (logits_processor, model.generation_config)
        with generating_with(model, processor):
            used, config = model.generate()
            assert used == [processor] and config.eos_token_id == 7
            assert config.no_repeat_ngram_size is None and config.top_k is None
        assert model.generate() == (None, own) and ("generate" in vars(model)) == (expected == "own")
