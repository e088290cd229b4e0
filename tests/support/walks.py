"""Completions under a constraint: random ones, and whether one is allowed."""

import numpy as np

from trl_grpo_tasks.constraints import unpack


def allowed_tokens(state, size):
    """The ids of the tokens that may follow."""
    return np.flatnonzero(unpack(state.mask(), size)).tolist()


def random_text(choices, options, rng):
    """A random text of a choice tree, from these options on."""
    text, node = rng.choice(options)
    while node is not None:
        literal, node = rng.choice(choices(node))
        text += literal
    return text


def random_tokens(constraint, row, rng, avoided=None, most=10**6):
    """At most `most` tokens of a random completion; the token `avoided` is only chosen where no other is allowed."""
    state, tokens = constraint.start(row), []
    while not state.finished and len(tokens) < most:
        allowed = allowed_tokens(state, constraint.vocab_size)
        tokens.append(rng.choice([token for token in allowed if token != avoided] or allowed))
        state.accept(tokens[-1])
    return tokens


def allows(constraint, row, tokens):
    """Whether these tokens are a whole completion; every mask must agree with what `accept` does."""
    state = constraint.start(row)
    for token in tokens:
        is_allowed = token in allowed_tokens(state, constraint.vocab_size)
        try:
            state.accept(token)
        except ValueError:
            assert not is_allowed
            return False
        assert is_allowed
    return state.finished
