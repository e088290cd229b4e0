"""The final model in a run folder, which `push` uploads and `export-model` converts."""

from __future__ import annotations

from pathlib import Path

from ..files import model_file_in
from ..models.masked_policy import ADAPTER_FILE
from .help_screens import PROGRAM
from .lock import running_process

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", ADAPTER_FILE)
WEIGHT_FILES = ("config.json", "generation_config.json", "model*.safetensors", "model*.safetensors.index.json",
                "pytorch_model*.bin", "pytorch_model*.bin.index.json")  # fmt: skip
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
                   "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model",
                   "sentencepiece.bpe.model", "chat_template.jinja")  # fmt: skip


def check_final_model(run_dir: str | Path) -> Path:
    """Return the path of a run folder; ValueError unless it holds a model that is not being trained."""
    folder = Path(run_dir)
    if not folder.is_dir():
        raise ValueError(f"{run_dir}: folder not found; give the folder of a run")
    if (process := running_process(folder, "train")) is not None:
        raise ValueError(f"{run_dir} is still being trained ({process}); wait until the run has ended")
    has_weights = any(folder.glob("*model*.safetensors")) or any(folder.glob("*model*.bin"))
    if model_file_in(folder) is None or not has_weights:
        raise ValueError(
            f"{run_dir} holds no final model: a run writes it when it ends; resume the run with "
            f"--resume_from_checkpoint, or look where it stands: {PROGRAM} report --status {run_dir}"
        )
    return folder


def model_files(folder: Path, is_adapter: bool) -> list[Path]:
    """Return the files of the model or adapter and of the tokenizer in a folder."""
    patterns = (*(ADAPTER_FILES if is_adapter else WEIGHT_FILES), *TOKENIZER_FILES)
    return sorted(path for pattern in patterns for path in folder.glob(pattern) if path.is_file())
