"""Conversion of GGUF files to ordinary model folders."""

from __future__ import annotations

from pathlib import Path

import torch

from ..failures import first_line
from ..files import from_pretrained


def convert_gguf(file: Path, folder: str | Path) -> None:
    """Convert a GGUF file to an ordinary, dequantised model folder.

    transformers marks a model loaded from GGUF as quantised and refuses to save it, so the weights are copied to a new
    model of the same configuration.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from ..constraints.sharding import loading_whole_models

    folder_of_file, options = str(file.parent), {"gguf_file": file.name}
    try:
        with loading_whole_models():
            loaded = from_pretrained(AutoModelForCausalLM, folder_of_file, **options, dtype=torch.float32)
        config = from_pretrained(AutoConfig, folder_of_file, **options)
        tokenizer = from_pretrained(AutoTokenizer, folder_of_file, **options)
    except ImportError:
        raise
    except Exception as error:  # the GGUF reader raises arbitrary errors for a truncated file
        raise ValueError(
            f"model file {file} cannot be read ({type(error).__name__}: {first_line(error)[:200]}); it may be "
            "incomplete, so download or copy it again"
        ) from error
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
