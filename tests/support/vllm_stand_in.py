"""A stand-in for vLLM without vLLM: its engine runs a tiny model under the real logits processor, as Model Runner V1
does, and its server answers as `trl-grpo-tasks serve` does. TRL's own code for both is used as it is."""

import json
import os
import sys
import threading
from contextlib import contextmanager
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType, SimpleNamespace

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from trl.generation import vllm_client, vllm_generation

from trl_grpo_tasks.serving.served_task import CONFIG_KEY, SERVED_VARIABLE, ServedTask


class SamplingParams:
    def __init__(self, **options):
        defaults = {"n": 1, "temperature": 1.0, "top_k": 0, "max_tokens": 16, "logprobs": None, "extra_args": None}
        self.__dict__.update(defaults | options)

    def clone(self):
        return SamplingParams(**vars(self))


class Engine:
    """vLLM's LLM: it samples all requests together, without a cache. `requests` are those it was sent."""

    def __init__(self, model, max_num_seqs=64, seed=0, additional_config=None, logits_processors=None, **_):
        from trl_grpo_tasks.serving.processor import Processor

        self.model, self.requests = AutoModelForCausalLM.from_pretrained(model).eval(), []
        self.generator = torch.Generator().manual_seed(seed)  # that of all processes of an engine
        self.ends = {self.model.generation_config.eos_token_id}
        config = SimpleNamespace(
            speculative_config=None,
            additional_config=additional_config,
            model_config=SimpleNamespace(get_vocab_size=lambda: self.model.config.vocab_size),
            scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
        )
        self.processor = None if additional_config is None else Processor(config, torch.device("cpu"), False)
        runner = SimpleNamespace(model_runner=SimpleNamespace(model=self))
        self.llm_engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=runner))

    def load_weights(self, weights):
        own = self.model.state_dict()
        for name, value in weights:
            own[name].copy_(value)

    def reset_prefix_cache(self):
        pass

    @torch.no_grad()
    def generate(self, prompts, sampling_params, use_tqdm=False):
        assert prompts, "vLLM is not called without requests"
        if not isinstance(sampling_params, list):
            sampling_params = [sampling_params] * len(prompts)
        live, answers, prompts = {}, [], [prompt["prompt_token_ids"] for prompt in prompts]
        for prompt, params in zip(prompts, sampling_params, strict=True):
            self.requests.append((prompt, params))
            if self.processor is not None:
                self.processor.validate_params(params)
            answers.append(SimpleNamespace(prompt_token_ids=prompt, outputs=[]))
            for _ in range(params.n):
                live[len(live)] = SimpleNamespace(prompt=prompt, params=params, token_ids=[], logprobs=[])
                answers[-1].outputs.append(live[len(live) - 1])
        count = len(live)
        added = [(place, one.params, one.prompt, one.token_ids) for place, one in live.items()]
        update = SimpleNamespace(batch_size=count, removed=[], added=added, moved=[])
        while live:
            logits = torch.zeros(count, self.model.config.vocab_size)
            for place, one in live.items():
                logits[place] = self.model(torch.tensor([one.prompt + one.token_ids])).logits[0, -1].float()
            if self.processor is not None:
                self.processor.update_state(update)
                logits = self.processor.apply(logits)
            ended = []
            for place, one in live.items():
                self.sample(one, logits[place])
                if one.token_ids[-1] in self.ends or len(one.token_ids) == one.params.max_tokens:
                    one.finish_reason = "stop" if one.token_ids[-1] in self.ends else "length"
                    ended.append(place)
            live = {place: one for place, one in live.items() if place not in ended}
            update = SimpleNamespace(batch_size=count, removed=ended, added=[], moved=[])
        if self.processor is not None:
            self.processor.update_state(update)
        return answers

    def sample(self, one, logits):
        logits = logits / (one.params.temperature or 1.0)
        if 0 < one.params.top_k < len(logits):
            logits = logits.masked_fill(logits < logits.topk(one.params.top_k).values[-1], -torch.inf)
        logps = logits.log_softmax(0)
        token = (
            int(torch.multinomial(logps.exp(), 1, generator=self.generator))
            if one.params.temperature
            else int(logps.argmax())
        )
        shown = [token, *logps.topk(min(one.params.logprobs or 0, len(logps))).indices.tolist()]
        one.token_ids.append(token)
        one.logprobs.append(
            {t: SimpleNamespace(logprob=logps[t].item(), rank=int((logps > logps[t]).sum()) + 1) for t in shown}
        )


def install(monkeypatch):
    """Make TRL and this package find this vLLM."""
    for name in ("vllm", "vllm.logger", "vllm.v1", "vllm.v1.sample", "vllm.v1.sample.logits_processor"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm.logger"].init_logger = lambda name: SimpleNamespace(info=lambda *_: None)
    sys.modules["vllm.v1.sample.logits_processor"].LogitsProcessor = type("LogitsProcessor", (), {})
    sys.modules["vllm.v1.sample.logits_processor"].MoveDirectionality = Enum("MoveDirectionality", "SWAP ONE_WAY")
    monkeypatch.delitem(sys.modules, "trl_grpo_tasks.serving.processor", raising=False)
    for module in (vllm_generation, vllm_client):
        monkeypatch.setattr(module, "is_vllm_available", lambda *_, **__: True)
    monkeypatch.setattr(vllm_generation, "LLM", Engine, raising=False)
    monkeypatch.setattr(vllm_generation, "SamplingParams", SamplingParams, raising=False)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):  # which TRL sets
        value = os.environ.get(name)
        monkeypatch.setenv(name, value or "")
        if value is None:
            monkeypatch.delenv(name)


@contextmanager
def serving(monkeypatch, model, task, tokenizer):
    """A server of `model` under the constraint of `task`, with its address as `url` and its `engine`. Rows are checked
    as in the front-end process of a real one."""
    config = {CONFIG_KEY: ServedTask.of(task, tokenizer).to_config()}
    monkeypatch.setenv(SERVED_VARIABLE, json.dumps(config))
    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.engine, http.config, http.lock = Engine(model, additional_config=config), config, threading.Lock()
    threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield SimpleNamespace(url=f"http://127.0.0.1:{http.server_address[1]}", engine=http.engine, http=http)
    finally:
        http.shutdown()
        http.server_close()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        config = {"logprobs_mode": "processed_logprobs", "max_model_len": 64}
        whole = {"vllm_config": {"additional_config": self.server.config, "model_config": config}}
        self.reply({"data": [{"id": "model"}], **whole})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
        with self.server.lock:
            if self.path == "/v1/completions":
                return self.complete(body)
            if self.path == "/collective_rpc":
                for file in os.scandir(body["kwargs"]["weights_path"]):
                    self.server.engine.load_weights(load_file(file.path).items())
        self.reply({"success": True})

    def complete(self, body):
        names = ("n", "temperature", "top_k", "max_tokens", "logprobs")
        params = SamplingParams(**{name: body[name] for name in names if name in body})
        params.extra_args = body.get("vllm_xargs")
        choices = []
        try:
            answers = self.server.engine.generate([{"prompt_token_ids": ids} for ids in body["prompt"]], params)
        except ValueError as error:
            return self.reply({"message": str(error)}, 400)
        for answer in answers:
            for one in answer.outputs:
                steps = [{f"token_id:{t}": max(each.logprob, -9999.0) for t, each in step.items()}
                         for step in one.logprobs]  # fmt: skip
                tokens = [f"token_id:{token}" for token in one.token_ids]
                own = [step[token] for step, token in zip(steps, tokens, strict=True)]
                choices.append(
                    {
                        "token_ids": one.token_ids,
                        "prompt_token_ids": answer.prompt_token_ids,
                        "finish_reason": one.finish_reason,
                        "logprobs": {"tokens": tokens, "token_logprobs": own, "top_logprobs": steps},
                    }
                )
        self.reply({"choices": choices})

    def reply(self, content, status=200):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, *_):
        pass
