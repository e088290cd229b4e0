"""Weights for a vLLM server through files instead of NCCL.

TRL sends weights over NCCL, which needs a GPU of its own on either side and a network between them. Files need only a
folder that both can read: for a server on the same GPU or on a CPU, or for machines that share a file system.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import save_file
from trl.generation.vllm_client import VLLMClient

_FILE_BYTES = 4 << 30  # tensors are collected up to this size and then written


class FolderClient(VLLMClient):
    """TRL's client of a vLLM server, which sends weights through a folder."""

    def __init__(self, folder: str, **kwargs: Any):
        self._folder = Path(folder).absolute()
        super().__init__(**kwargs)

    def init_communicator(self, device: Any = 0) -> None:
        """Only check that the folder can be written to: there is no connection."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self._folder):
            pass

    def update_named_params(self, metadata: Any, named_params: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Write the weights, let the server read them, and delete them."""
        self.load(self.write(named_params))

    def write(self, named_params: Iterator[tuple[str, torch.Tensor]]) -> tempfile.TemporaryDirectory[str]:
        """Write the weights to a new folder, for `load`."""
        written = tempfile.TemporaryDirectory(dir=self._folder, prefix="weights-")
        try:
            Path(written.name).chmod(0o755)  # the server may run as another user
            for number, tensors in enumerate(_parts(named_params)):
                save_file(tensors, f"{written.name}/model-{number:05d}.safetensors")
        except BaseException:
            written.cleanup()
            raise
        return written

    def load(self, written: tempfile.TemporaryDirectory[str]) -> None:
        """Let the server read weights that `write` wrote, and delete them."""
        with written as folder:
            self.read(folder)

    def read(self, folder: str) -> None:
        """Let the server read the weights in a folder."""
        body: dict[str, Any] = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        answer = httpx.post(f"{self.base_url}/collective_rpc", json=body, timeout=None)
        if answer.status_code != 200:
            raise RuntimeError(
                f"the vLLM server could not read the weights in {folder} (status {answer.status_code}: "
                f"{answer.text[:500]}); vllm_weights_folder must be a folder that the server can read"
            )


def _parts(named_params: Iterator[tuple[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    """Collect copies of the tensors into dictionaries of limited size. Adapters are merged while this iterates."""
    part: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in named_params:
        part[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += part[name].nbytes
        if size >= _FILE_BYTES:
            yield part
            part, size = {}, 0
    if part:
        yield part
