"""Rotary embeddings whose frequencies depend on the length of the text (types `dynamic` and `longrope`).

Up to a limit the frequencies are constant. Beyond it they change for all positions, so that the log-probs of a
completion that crosses the limit differ between sampling, which sees a prefix, and scoring, which sees the full text.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ..constraints.base import attribute_set


def length_limit(model: Any) -> int | None:
    """Return the number of tokens up to which the frequencies of a model are constant, or None without a limit."""
    config = model.config.get_text_config()
    parameters = config.rope_parameters
    limits = []
    for rope in [parameters] if "rope_type" in parameters else parameters.values():  # Gemma 3: by layer type
        if rope["rope_type"] == "longrope":
            limits.append(rope["original_max_position_embeddings"])
        elif "dynamic" in rope["rope_type"]:
            limits.append(config.max_position_embeddings)
    return min(limits, default=None)


@contextmanager
def constant_frequencies(backbone: Any) -> Iterator[None]:
    """Within this context, a model uses the frequencies of texts up to the limit, for texts of any length.

    Otherwise transformers compares the largest position with the limit in each pass, which waits for the GPU and
    cannot be captured in a CUDA graph.
    """
    rotary = backbone.rotary_emb
    kinds = rotary.rope_type
    by_layer = isinstance(kinds, dict)
    names = [f"{layer}_inv_freq" for layer in kinds] if by_layer else ["inv_freq"]
    values = {name: getattr(rotary, name.replace("inv_freq", "original_inv_freq")) for name in names}
    values["rope_type"] = dict.fromkeys(kinds, "default") if by_layer else "default"
    with ExitStack() as restored:
        for name, value in values.items():
            restored.enter_context(attribute_set(rotary, name, value))
        yield
