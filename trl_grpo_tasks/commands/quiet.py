"""Silences third-party libraries on the console."""

from __future__ import annotations


def quiet_third_party_logging() -> None:
    """Silence progress bars of short operations and messages about optional kernels."""
    import logging

    # This must precede any import of bitsandbytes, which reports missing optional kernels when it is imported.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import datasets
    from transformers.utils import logging as transformers_logging

    datasets.disable_progress_bars()
    transformers_logging.disable_progress_bar()
    # A warning about checkpoints that are less than a second apart.
    logging.getLogger("transformers.trainer_utils").addFilter(lambda record: "mtime may not" not in str(record.msg))
