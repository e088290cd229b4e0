"""TRL with vLLM on a CPU, without a constraint: log-probs equal those of a forward pass, also for new weights."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.observed import logged
from tests.support.toy import ToyTask
from tests.support.training import parameters, toy_trainer
from tests.support.vllm_cpu import serve_plain, serving
from trl_grpo_tasks.serving import weights


@pytest.fixture(scope="module")
def server(model_path, tmp_path_factory):
    """The address of a server of that model, without a constraint."""
    log = tmp_path_factory.mktemp("server") / "log"
    with serving(serve_plain(model_path), log) as address:
        yield address


def test_a_colocated_engine_samples_from_the_weights_of_each_step(runner, model_path, tmp_path):
    """The weights of the last step are not sent, so that the differences are large there."""
    trainer = toy_trainer(model_path, tmp_path, max_steps=3, use_vllm=True, vllm_mode="colocate",
                          vllm_max_model_length=32)  # fmt: skip
    generation, before = trainer.vllm_generation, parameters(trainer)
    worker = generation.llm.llm_engine.model_executor.driver_worker
    assert worker.use_v2_model_runner == (runner == 2)
    sync = generation.sync_weights
    generation.sync_weights = lambda: None if trainer.state.global_step == 2 else sync()
    trainer.train()
    assert all((before[name] != weight).any() for name, weight in parameters(trainer).items())
    *differences, last = logged(trainer, "sampling/logp_difference_max")
    assert len(differences) == 2 and max(differences) < 1e-5 and last > 1e-3


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_log_probs_of_a_server_after_a_reload_equal_those_of_a_forward_pass(
    server, model_path, tmp_path, noise, monkeypatch
):
    model = AutoModelForCausalLM.from_pretrained(model_path)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight += noise * torch.randn_like(weight)
    monkeypatch.setattr(weights, "_FILE_BYTES", 10_000)  # several files
    client = weights.FolderClient(str(tmp_path), base_url=server)
    client.init_communicator()
    client.update_model_params(model)
    client.reset_prefix_cache()
    assert not list(tmp_path.iterdir())
    prompts = [model.config.eos_token_id + i for i in range(1, len(ToyTask().tiny().tokens))]
    answer = client.generate([[prompt] for prompt in prompts], n=2, max_tokens=6, temperature=0.7)
    model = model.double()
    for i, (ids, logprobs) in enumerate(zip(answer["completion_ids"], answer["logprobs"], strict=True)):
        tokens = torch.tensor([[prompts[i // 2], *ids]])
        with torch.no_grad():
            expected = (model(tokens).logits[0, :-1] / 0.7).log_softmax(-1)
        at = expected[torch.arange(len(ids)), tokens[0, 1:]]
        torch.testing.assert_close(torch.tensor(logprobs)[:, 0].double(), at, atol=1e-5, rtol=0)


def test_a_folder_that_the_server_cannot_read_is_an_error(server, tmp_path, monkeypatch):
    client = weights.FolderClient(str(tmp_path), base_url=server)
    monkeypatch.setattr(weights, "save_file", lambda tensors, path: None)  # as on another file system
    with pytest.raises(RuntimeError, match="a folder that the server can read"):
        client.update_named_params([], iter([("a", torch.zeros(2))]))
