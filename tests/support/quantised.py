"""bitsandbytes on the CPU: whether it works here, and the configurations that the command line makes."""

import pytest
import torch


def bitsandbytes_works():
    try:
        import bitsandbytes

        bitsandbytes.functional.quantize_4bit(torch.ones(64, 64))
    except (ImportError, RuntimeError, AttributeError):
        return False
    return True


needs_bitsandbytes = pytest.mark.skipif(not bitsandbytes_works(), reason="bitsandbytes cannot run on this CPU")


def save_sharp(tiny_path, folder):
    """The tiny model with a larger LM head: that of a new model is so small that the layers below change little."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_path)
    model.lm_head.weight.data *= 20
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_path).save_pretrained(folder)
    return str(folder)


def quantization(bits, **options):
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(**{f"load_in_{bits}bit": True}, **options)
