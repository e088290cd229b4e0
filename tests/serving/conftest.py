"""Trainers whose vLLM is a stand-in."""

from contextlib import ExitStack

import pytest

from tests.support import vllm_stand_in
from tests.support.training import toy_trainer
from trl_grpo_tasks.models.loading import load_tokenizer


@pytest.fixture
def serve(tiny_path, monkeypatch):
    """Start a server under the constraint of a task."""
    vllm_stand_in.install(monkeypatch)
    with ExitStack() as stack:
        tokenizer = load_tokenizer(tiny_path)
        yield lambda task: stack.enter_context(vllm_stand_in.serving(monkeypatch, tiny_path, task, tokenizer))


@pytest.fixture
def make(serve, tiny_path, tmp_path):
    """Make a trainer with vLLM in this mode, and return it with the engine that samples for it."""

    def made(mode, task, **options):
        options |= {"use_vllm": True, "vllm_mode": mode}
        server = serve(task) if mode == "server" else None
        if server is not None:
            options |= {"vllm_server_base_url": server.url, "vllm_weights_folder": str(tmp_path / "weights")}
        trainer = toy_trainer(tiny_path, tmp_path, task, **options)
        trainer.model.train()
        return trainer, trainer.vllm_generation.llm if server is None else server.engine

    return made
