"""Silences third-party libraries on the console."""

from __future__ import annotations

from functools import partial

# Warnings of libraries, by logger, about what we do on purpose: checkpoints that are less than a second apart, tokens
# of an encoder that has no end of a text, and a model that is loaded with the options that TRL would load it with.
ON_PURPOSE = {
    "transformers.trainer_utils": ("mtime may not", "new PAD/BOS/EOS tokens"),
    "trl.trainer.grpo_trainer": ("your model is already instantiated",),
}


def quiet_third_party_logging() -> None:
    """Silence progress bars of short operations and warnings about what we do on purpose."""
    import logging

    import datasets
    from transformers.utils import logging as transformers_logging

    datasets.disable_progress_bars()
    transformers_logging.disable_progress_bar()
    for name, phrases in ON_PURPOSE.items():
        lacks = partial(lambda phrases, record: not any(phrase in str(record.msg) for phrase in phrases), phrases)
        logging.getLogger(name).addFilter(lacks)
