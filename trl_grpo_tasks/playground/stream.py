"""Sampling of one completion, token by token, with the distribution that each token was drawn from.

The distribution is that of rollouts: the same masks, temperature and sampling filters, applied by the same code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..constraints.base import only_token
from ..constraints.recording import DeviceMasks
from ..constraints.sharding import output_size
from ..constraints.table import MaskTable
from ..evaluation.sampler import CompletionSampler, prompt_ids
from ..models.masked_policy import MaskedPolicy
from ..task import Row

ALTERNATIVES = 8  # the likeliest tokens that are reported for each position


@dataclass(frozen=True)
class Step:
    """One sampled token.

    Attributes:
        token: The token as text; special tokens appear by name.
        written: The completion so far, as it would be scored.
        probability: The probability that the token was drawn with; 1 if no other token was allowed.
        allowed: The number of tokens that the constraint allows here; without one, all outputs of the model.
        kept: The number of allowed tokens that the sampling filters keep.
        outputs: The number of outputs of the model.
        alternatives: The likeliest tokens with their probabilities, in descending order.
    """

    token: str
    written: str
    probability: float
    allowed: int
    kept: int
    outputs: int
    alternatives: list[tuple[str, float]]

    @property
    def is_forced(self) -> bool:
        """Whether no other token was allowed."""
        return self.allowed == 1


def stream(sampler: CompletionSampler, row: Row, seed: int) -> Iterator[Step]:
    """Sample a completion of `row` and yield its tokens as they are drawn; the same seed gives the same tokens.

    With temperature 0, the likeliest token is taken, and the probabilities are those at temperature 1.
    """
    generator = torch.Generator(sampler.model.device).manual_seed(seed)
    if sampler.policy is not None:
        return _filled(sampler, sampler.policy, row, generator)
    return _continued(sampler, row, generator)


@torch.no_grad()
def _continued(sampler: CompletionSampler, row: Row, generator: torch.Generator) -> Iterator[Step]:
    """The tokens of a causal model."""
    model, tokenizer, constraint, filters = sampler.model, sampler.tokenizer, sampler.constraint, sampler.filters
    state = None if constraint is None else constraint.start(row)
    table = MaskTable(output_size(model))
    masks, eos_ids = DeviceMasks(table, model.device), sampler.eos_ids()
    (prompt,) = prompt_ids(tokenizer, [row["prompt"]])
    ids: list[int] = []
    unread, cache = list(prompt), None
    while len(ids) < sampler.max_length:
        words = None if state is None else state.mask()
        token = None if words is None else only_token(words)
        if token is not None:  # the model is not needed
            probability, allowed, kept, likeliest = 1.0, 1, 1, [(token, 1.0)]
        else:
            # A model without a KV cache reads the whole text again.
            read = torch.tensor([unread if cache is not None else [*prompt, *ids]], device=model.device)
            output = model(input_ids=read, past_key_values=cache, use_cache=True)
            unread, cache = [], getattr(output, "past_key_values", None)
            logits_1_V = output.logits[:, -1].float() / (sampler.temperature or 1.0)
            if words is not None:
                masks.fill([table.number_of(words)]).apply(logits_1_V)
            allowed = int((logits_1_V > -torch.inf).sum())
            if filters:
                logits_1_V = logits_1_V.masked_fill(~filters.kept(logits_1_V), -torch.inf)
            kept = int((logits_1_V > -torch.inf).sum())
            probs_V = logits_1_V.softmax(1)[0]
            if sampler.temperature == 0:
                token = int(probs_V.argmax())
            else:
                token = int(torch.multinomial(probs_V, 1, generator=generator))
            probability, likeliest = float(probs_V[token]), _likeliest(probs_V)
        ids.append(token)
        unread.append(token)
        if state is not None:
            state.accept(token)
        written = sampler.text_of(row, prompt, ids)
        alternatives = [(tokenizer.decode([one]), p) for one, p in likeliest]
        yield Step(tokenizer.decode([token]), written, probability, allowed, kept, table.vocab_size, alternatives)
        # A constraint may continue after an end token, with feedback and another turn.
        if token in eos_ids and (state is None or state.finished):
            return


@torch.no_grad()
def _filled(sampler: CompletionSampler, policy: MaskedPolicy, row: Row, generator: torch.Generator) -> Iterator[Step]:
    """The fills of a masked language model, in the order in which it makes them."""
    name_of = sampler.tokenizer.convert_ids_to_tokens
    (prompt,) = policy.prompt_ids([row["prompt"]])
    mask = sampler.tokenizer.mask_token_id
    ids = [mask] * prompt.count(mask)
    for step in policy.steps(sampler.model, [prompt], generator):
        for (_, place), token, logps_V in zip(step.places, step.tokens, step.logps_N_V, strict=True):
            ids[place] = token
            probs_V = logps_V.exp()
            yield Step(
                name_of(token),
                policy.text_of(ids),
                float(probs_V[token]),
                policy.allowed,
                int((logps_V > -torch.inf).sum()),
                len(probs_V),
                [(name_of(one), p) for one, p in _likeliest(probs_V)],
            )


def _likeliest(probs_V: torch.Tensor) -> list[tuple[int, float]]:
    top = probs_V.topk(min(ALTERNATIVES, len(probs_V)))
    return [(token, p) for token, p in zip(top.indices.tolist(), top.values.tolist(), strict=True) if p > 0]
