"""vLLM on a CPU, for tests: TRL and vLLM with the patches without which they need a GPU.

`set_up` must run before vLLM is imported. It changes the following:

- Environment variables: float32 models, a small KV cache, no compilation, no pinned threads (the default pins all
  processes to the same core), engines in the process of the test.
- Options of the engine: TRL has no arguments for `dtype` (vLLM would load float32 weights as bfloat16, which some CPUs
  do not have) and `enforce_eager`.
- Weights stay as they are: on a CPU vLLM packs the weights of linear layers and deletes the parameters, so that TRL's
  weight sync into a colocated engine fails. A server needs no patch, because it packs weights again when it reloads
  them.
- Triton has a backend for the CPU, which is its interpreter: without such a backend vLLM does not use Triton, in which
  Model Runner V2 is written. `use_runner` chooses between the two model runners.
"""

import functools
import gc
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx

from tests.support.paths import ROOT
from tests.support.server_process import free_port
from trl_grpo_tasks.models.tiny import save_tiny

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "TRITON_INTERPRET": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
ENGINE_OPTIONS = {"dtype": "float32", "enforce_eager": True}
END_OF_TURN = "<turn>"
PORT = "PORT"
WHERE = ["--host", "127.0.0.1", "--port", PORT]


def set_up() -> None:
    """Patch Triton, vLLM and TRL so that colocated engines run, and take new weights, on a CPU."""
    os.environ.update(ENVIRONMENT)
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)
    import torch
    from trl.generation import vllm_generation
    from vllm.model_executor.layers import utils
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.HAS_TRITON = False

    def keep_weight(layer, remove_weight):
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = keep_weight
    vllm_generation.LLM = functools.partial(vllm_generation.LLM, **ENGINE_OPTIONS)


@contextmanager
def use_runner(version: int):
    """Make engines that are created here use Model Runner V1 or V2, and release what engines keep in the process."""
    from vllm import envs
    from vllm.distributed import cleanup_dist_env_and_memory

    before = dict(os.environ)
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(version - 1)
    try:
        yield
    finally:
        gc.collect()
        cleanup_dist_env_and_memory()
        envs.disable_envs_cache()
        # TRL sets RANK, WORLD_SIZE and others, which later trainers would take for a distributed run.
        os.environ.clear()
        os.environ.update(before)


def save_model(task, folder, seed: int = 1) -> str:
    """Save the tiny model of `task` with heads of a size that vLLM supports, and two end-of-sequence ids.

    The second id is that of `END_OF_TURN`, a special token. As in many instruct models, only the generation
    configuration has it, and the model has more outputs than the tokenizer has tokens.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    spec = task.tiny()
    save_tiny(replace(spec, tokens=[*spec.tokens, END_OF_TURN], hidden_size=64, heads=2), folder, seed)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": [END_OF_TURN]})
    tokenizer.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(len(tokenizer) + 3)
    model.save_pretrained(folder)
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(END_OF_TURN)]
    GenerationConfig(eos_token_id=ends, pad_token_id=tokenizer.pad_token_id, do_sample=True).save_pretrained(folder)
    return str(folder)


SERVER_OPTIONS = ["--dtype", "float32", "--enforce-eager"]
PLAIN_OPTIONS = [*SERVER_OPTIONS, "--max-logprobs", "-1", "--logprobs-mode", "processed_logprobs"]


def serve_plain(model: str, *options: str) -> list[str]:
    """The words after `python` that start a server without a constraint."""
    return ["-m", "vllm.entrypoints.cli.main", "serve", model, *WHERE, *PLAIN_OPTIONS, *options]


def serve_task(task: str, model: str, *task_options: str, options=()) -> list[str]:
    """The words after `python` that start a server under the constraint of a task."""
    words = ["-m", "trl_grpo_tasks.commands.main", "serve", model, "--task", task, *WHERE, *task_options]
    return [*words, "--", *SERVER_OPTIONS, *options]


@contextmanager
def serving(words, log: Path, timeout=280):
    """Run a server as a subprocess and yield its address. `words` are those after `python`, with PORT for the port."""
    port = free_port()
    server = start(words, log, port)
    try:
        wait_for(server, log, port, timeout)
        yield f"http://127.0.0.1:{port}"
    finally:
        end(server)


def start(words, log: Path, port: int) -> subprocess.Popen:
    """Start a server as `serving` does, and leave waiting for it, and its end, to the caller."""
    environment = os.environ | ENVIRONMENT | {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *(str(port) if word == PORT else word for word in words)]
    with log.open("w") as out:
        options = {"stdout": out, "stderr": subprocess.STDOUT, "cwd": log.parent, "start_new_session": True}
        return subprocess.Popen(command, env=environment, **options)


def wait_for(server: subprocess.Popen, log: Path, port: int, timeout=280) -> None:
    """Wait until a server answers."""
    deadline = time.monotonic() + timeout
    while not _is_up(f"http://127.0.0.1:{port}"):
        assert server.poll() is None, f"the server ended:\n{log.read_text()[-4000:]}"
        assert time.monotonic() < deadline, f"no server after {timeout} s:\n{log.read_text()[-4000:]}"
        time.sleep(0.2)


def kill(server: subprocess.Popen) -> None:
    """Kill a server with its engine, which is a process of its own."""
    os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def end(server: subprocess.Popen) -> None:
    server.terminate()
    try:
        server.wait(30)
    except subprocess.TimeoutExpired:
        kill(server)


def _is_up(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False
