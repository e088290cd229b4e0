"""A small LoRA adapter, saved as a run saves one."""

from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer


def save_adapter(base, folder, name=None):
    """Save an adapter of the model in `base` that changes its answers, with its tokenizer, and return the model.
    `name` is what the adapter calls its base, if that is not the folder."""
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    model.peft_config["default"].base_model_name_or_path = name or str(base)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return model
