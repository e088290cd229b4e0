"""--offload_reference: where the weights of the reference are, and that results do not depend on it."""

import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback

from tests.support.exhaustive import exhaustive_but
from tests.support.training import parameters, toy_trainer
from trl_grpo_tasks.training.reference import Offloaded

RUN = {"beta": 0.1, "max_steps": 3, "constrain": True, "save_strategy": "steps", "save_steps": 1}
EMA, PERIODIC = {"reference_mode": "ema", "ema_alpha": 0.7}, {"reference_mode": "periodic", "reference_update_freq": 2}
HALF = {"model_init_kwargs": {"dtype": "bfloat16"}}


def addresses(model):
    return [weight.data_ptr() for weight in model.parameters()]


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(1))

    def forward(self, ids):
        return self.head(self.embedding(ids)) * self.scale


def test_weights_are_copies_while_they_are_used():
    model, ids = Tied(), torch.tensor([1, 4])
    wanted = model(ids)
    offloaded, kept = Offloaded(model), addresses(model)
    for _ in range(2):
        with offloaded.on_device():
            used = addresses(model)
            assert len(used) == 2 and not set(used) & set(kept)
            assert model.head.weight is model.embedding.weight, "tied weights are copied once"
            assert torch.equal(model(ids), wanted)
        assert addresses(model) == kept
    with pytest.raises(RuntimeError, match="out of memory"), offloaded.on_device():
        raise RuntimeError("out of memory")
    assert addresses(model) == kept and torch.equal(model(ids), wanted)


class Places(TrainerCallback):
    """Compares the addresses of the reference's weights while it computes and after each step with the first ones."""

    def __init__(self, trainer):
        self._model, self._kept, self.uses = trainer.ref_model, addresses(trainer.ref_model), []
        trainer.ref_model.model.register_forward_pre_hook(self._note)
        trainer.add_callback(self)

    def _note(self, *_):
        used = tuple(addresses(self._model))
        assert not set(used) & set(self._kept)
        self.uses.append(used)

    def on_step_end(self, *_, **__):
        assert addresses(self._model) == self._kept


@pytest.mark.parametrize(
    "options", exhaustive_but([EMA], [EMA, EMA | HALF, PERIODIC, {"share_prompts": True}]), ids=str
)
def test_a_run_is_the_same_and_so_is_a_resumed_one(tiny_path, tmp_path, options):
    plain = toy_trainer(tiny_path, tmp_path / "plain", **(RUN | options))
    plain.train()
    wanted, metrics = parameters(plain), (tmp_path / "plain" / "training_metrics.jsonl").read_text()
    reference = [p.detach().clone() for p in plain.ref_model.parameters()]

    def check(trainer):
        assert all(p.equal(wanted[name]) for name, p in parameters(trainer).items())
        assert all(map(torch.equal, trainer.ref_model.parameters(), reference))

    offloaded = toy_trainer(tiny_path, tmp_path / "offloaded", offload_reference=True, **(RUN | options))
    places = Places(offloaded)
    offloaded.train()
    check(offloaded)
    assert (tmp_path / "offloaded" / "training_metrics.jsonl").read_text() == metrics
    assert len(places.uses) == 3, "once per rollout"
    for folder in ("offloaded", "plain"):
        resumed = toy_trainer(tiny_path, tmp_path / folder, offload_reference=True, **(RUN | options))
        resumed.train(resume_from_checkpoint=str(tmp_path / folder / "checkpoint-2"))
        check(resumed)
        assert (tmp_path / folder / "training_metrics.jsonl").read_text() == metrics


def test_an_adapter_has_no_reference_to_offload(tiny_path, tmp_path, capsys):
    def trained(**options):
        adapter = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
        trainer = toy_trainer(tiny_path, tmp_path, peft_config=adapter, beta=0.1, max_steps=1, **options)
        trainer.train()
        return parameters(trainer)

    wanted = trained()
    assert "offload_reference" not in capsys.readouterr().out
    assert all(value.equal(wanted[name]) for name, value in trained(offload_reference=True).items())
    assert "offload_reference has no effect: the reference of an adapter" in capsys.readouterr().out
