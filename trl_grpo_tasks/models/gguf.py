"""Conversion of GGUF files to ordinary model folders."""

from __future__ import annotations

from pathlib import Path

import torch

from ..failures import first_line


def convert_gguf(file: Path, folder: str | Path) -> None:
    """A GGUF file as an ordinary folder, dequantised. transformers marks such a model as quantised and then refuses to
    save it, so the weights go into a fresh model of the same configuration."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        config = AutoConfig.from_pretrained(**where)
        tokenizer = AutoTokenizer.from_pretrained(**where)
    except ImportError:
        raise
    except Exception as error:  # the reader has no error of its own for a file that ends too soon
        raise ValueError(
            f"model file {file} cannot be read ({type(error).__name__}: {first_line(error)[:200]}); it may be "
            "incomplete: download or copy it again"
        ) from error
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
