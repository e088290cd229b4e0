"""Time per rollout and its training with --rollouts_ahead 0, 1 and 2, against a server with a CPU core of its own.

    python benchmarks/rollouts_ahead.py [--iterations 1 2 4] [--ahead 0 1 2] [--shape tiny] [--length 48]

The server speaks vLLM's interface and samples with our rollouts, without a constraint; weights go through a folder.
Trainer and server have one thread and one core each, so that their times do not depend on each other. Each rollout is
trained on for some `iterations`, which makes training longer than generation or shorter. `period s` is the time from
one rollout to the next: median (smallest-largest) of --rollouts, after warm-up. `generation s` is the server's part of
it; `training s` is the rest of the period without rollouts ahead. `speed-up` is the period without rollouts ahead
divided by this one, and `possible` is the sum of the two times divided by the longer one. Needs two cores.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

import httpx
import torch
from harness import SHAPES, Report, character_tokenizer, config_of, free_port, random_model, run_table, table_parser
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerCallback

from trl_grpo_tasks.rollout import Decoder, rollout

COLUMNS = {
    "iterations": "iterations",
    "ahead": "ahead",
    "period s": "period_s",
    "generation s": "generation_s",
    "training s": "training_s",
    "speed-up": "speed_up",
    "possible": "possible",
    "staleness": "staleness",
}
WARM_UP = 3  # rollouts; with 2 ahead, the first three are sampled at once
PROMPTS, GROUP = 4, 8


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        return serve(int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    parser = table_parser(__doc__, __file__)
    parser.add_argument("--iterations", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--ahead", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--shape", default="tiny", choices=list(SHAPES))
    parser.add_argument("--length", type=int, default=48, help="tokens per completion")
    parser.add_argument("--rollouts", type=int, default=12, help="that are measured per row")
    options = parser.parse_args()
    cells = [{"iterations": n, "ahead": ahead} for n in options.iterations for ahead in options.ahead]
    run_table("rollouts_ahead", cells, options, COLUMNS, compared)


def compared(row: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare a row with the one of as many iterations without rollouts ahead, which comes before it."""
    same = [one for one in [*rows, row] if one["iterations"] == row["iterations"] and one["ahead"] == 0]
    if not same or "period_s" not in row or "period_s" not in same[0]:
        return {}
    period, generation = (statistics.median(same[0][name]) for name in ("period_s", "generation_s"))
    training = period - generation
    return {
        "training_s": training,
        "speed_up": period / statistics.median(row["period_s"]),
        "possible": period / max(generation, training),
    }


def measure(report: Report, options: Any, iterations: int, ahead: int) -> None:
    """Measure one row."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise RuntimeError("trainer and server need a core each")
    os.sched_setaffinity(0, {cores[0]})
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(options.shape, "float32")
        random_model(config).save_pretrained(f"{folder}/model")
        character_tokenizer(config.vocab_size, ends=False).save_pretrained(f"{folder}/model")
        port = free_port()
        command = [sys.executable, __file__, "--serve", str(port), f"{folder}/model", "0"]
        server = subprocess.Popen(command, preexec_fn=lambda: os.sched_setaffinity(0, {cores[-1]}))
        try:
            trainer, starts = make_trainer(folder, port, options, iterations, ahead)
            trainer.train()
            generation = httpx.get(f"http://127.0.0.1:{port}/seconds").json()["seconds"]
        finally:
            server.kill()
    periods = [later - start for start, later in itertools.pairwise(starts)][WARM_UP:]
    staleness = [line["rollout/staleness"] for line in trainer.state.log_history if "rollout/staleness" in line]
    report(
        {"period_s": periods, "generation_s": generation[WARM_UP:], "staleness": staleness[-1] if staleness else 0.0}
    )


def make_trainer(folder: str, port: int, options: Any, iterations: int, ahead: int) -> tuple[Any, list[float]]:
    """Return a trainer and the list that gets the time at which each rollout starts."""
    from datasets import Dataset
    from trl.generation import vllm_client, vllm_generation

    from trl_grpo_tasks import TaskGRPOConfig, TaskGRPOTrainer

    for module in (vllm_client, vllm_generation):  # the server is none of vLLM's
        module.is_vllm_available = lambda *_, **__: True
    args = TaskGRPOConfig(
        output_dir=f"{folder}/run", use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, save_strategy="no",
        logging_steps=1, gradient_checkpointing=False, learning_rate=1e-5, num_generations=GROUP,
        per_device_train_batch_size=PROMPTS * GROUP, max_completion_length=options.length, num_iterations=iterations,
        max_steps=iterations * (WARM_UP + options.rollouts + 1), use_vllm=True, vllm_mode="server",
        vllm_server_base_url=f"http://127.0.0.1:{port}", vllm_weights_folder=f"{folder}/weights",
        rollouts_ahead=ahead,
    )  # fmt: skip
    prompts = [f"{'question ' * 4}{number}" for number in range(256)]
    starts: list[float] = []

    class Starts(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % iterations == 0:
                starts.append(time.perf_counter())

    trainer = TaskGRPOTrainer(
        f"{folder}/model",
        reward_funcs=lambda completions, **_: [text.count("a") / 10 for text in completions],
        args=args,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        callbacks=[Starts()],
    )
    return trainer, starts


def serve(port: int, model: str, seed: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="float32", trust_remote_code=False).eval()
    http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    Handler.model, Handler.decoder, ends = loaded, Decoder(loaded), loaded.generation_config.eos_token_id
    Handler.ends = [] if ends is None else [ends] if isinstance(ends, int) else ends
    http.serve_forever()


class Handler(BaseHTTPRequestHandler):
    """The part of vLLM's interface that TRL uses, with weights through a folder."""

    model: Any
    decoder: Any
    ends: list[int]
    lock = Lock()
    seconds: list[float] = []  # of each rollout

    def do_GET(self) -> None:
        config = {"model_config": {"logprobs_mode": "processed_logprobs"}}
        self.reply({"data": [{"id": "model"}], "vllm_config": config, "seconds": self.seconds})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
        with self.lock:
            if self.path == "/v1/completions":
                return self.complete(body)
            if self.path == "/collective_rpc":
                for file in Path(body["kwargs"]["weights_path"]).iterdir():
                    self.model.load_state_dict(load_file(file), strict=False)
        self.reply({"success": True})

    def complete(self, body: dict[str, Any]) -> None:
        start = time.perf_counter()
        prompts = [ids for ids in body["prompt"] for _ in range(body["n"])]
        sampling = {
            "max_new_tokens": body["max_tokens"],
            "temperature": body["temperature"],
            "eos_token_ids": self.ends,
        }
        done = rollout(self.model, prompts, decoder=self.decoder, **sampling)
        self.seconds.append(time.perf_counter() - start)
        choices = [
            {
                "prompt_token_ids": prompt,
                "token_ids": ids,
                "logprobs": {"tokens": [f"token_id:{token}" for token in ids], "token_logprobs": logps,
                             "top_logprobs": [None] * len(ids)},
            }
            for prompt, ids, logps in zip(prompts, done.completion_ids, done.logps, strict=True)
        ]  # fmt: skip
        self.reply({"choices": choices})

    def reply(self, content: dict[str, Any]) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, *_: Any) -> None:
        pass


if __name__ == "__main__":
    main()
