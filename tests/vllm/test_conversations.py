"""Conversations with a real vLLM: masks are those of fresh states, log-probs those of a forward pass."""

import pytest
from transformers import AutoModelForCausalLM

from tests.support.enumerated import assert_recorded
from tests.support.observed import logged
from tests.support.toy_environment import EchoTask
from tests.support.toy_repair import AdvisingToy
from tests.support.training import toy_trainer
from tests.support.vllm_cpu import serve_task, serving
from trl_grpo_tasks import Solver
from trl_grpo_tasks.rewards.repair import RepairTask
from trl_grpo_tasks.serving import weights

VLLM = {"use_vllm": True, "num_generations": 8, "max_steps": 2}
REPAIR = VLLM | {"repair_turns": 3, "constrain": True, "max_completion_length": 36}
CASES = {
    "environment": (EchoTask, VLLM | {"max_completion_length": 16}),
    "repair": (AdvisingToy, REPAIR),
    "free text": (AdvisingToy, REPAIR | {"constrain": False}),
    "filters": (AdvisingToy, REPAIR | {"top_k": 2, "temperature": 0.7}),
}


def check(trainer):
    trainer.model.train()
    inputs = [trainer.train_dataset[i] for i in (0, 3) for _ in range(8)]
    assert_recorded(trainer, trainer._generate_and_score_completions(inputs))
    record, constraint = trainer.latest_rollout, trainer.generation.constraint
    assert max(len(constraint.turns_of(*pair)) for pair in zip(record.rows, record.completion_ids, strict=True)) > 1
    trainer.train()
    differences = logged(trainer, "sampling/logp_difference_max")
    assert len(differences) == 2 and max(differences) < 2e-5


@pytest.mark.parametrize(("runner", "kind"), [(1, "repair"), (2, "environment"), (2, "filters")], indirect=["runner"])
def test_a_colocated_engine_samples_conversations(runner, model_path, tmp_path, kind):
    task, options = CASES[kind]
    check(toy_trainer(model_path, tmp_path, task(), **options, vllm_mode="colocate", vllm_max_model_length=64))


@pytest.fixture(scope="module")
def address(model_path, tmp_path_factory):
    """The address of a server of the task that is repaired; for that of an environment see tests/serving."""
    log = tmp_path_factory.mktemp("server") / "log"
    with serving(serve_task(AdvisingToy.spec, model_path), log) as address:
        yield address


@pytest.mark.parametrize("kind", ["free text", "filters"])
def test_a_server_samples_conversations(address, model_path, tmp_path, kind):
    where = {"vllm_mode": "server", "vllm_server_base_url": address, "vllm_weights_folder": str(tmp_path / "weights")}
    check(toy_trainer(model_path, tmp_path / "run", AdvisingToy(), **CASES[kind][1], **where))


def test_the_likeliest_conversation_of_a_server_is_that_of_our_rollouts(address, model_path, tmp_path):
    task = RepairTask(AdvisingToy(), 2, 0.9, True)
    client = weights.FolderClient(str(tmp_path), base_url=address)  # the server may have those of a run
    client.init_communicator()
    client.update_model_params(AutoModelForCausalLM.from_pretrained(model_path))
    client.reset_prefix_cache()
    options = {"max_completion_length": 24, "reward_workers": 1, "temperature": 0.0, "constrain": True}
    rows, found = task.dataset("train", 4, 0), []
    for url in (None, address):
        with Solver.from_pretrained(model_path, task, **options, vllm_server_url=url) as solver:
            found.append([solver.sample(row, 1)[0].completion for row in rows])
    assert found[0] == found[1]
