"""A run with a cold start that is pushed to a Hub gives others the same log-probs, and is used by its Hub id."""

import json
import subprocess
import sys

import pytest
from safetensors.torch import load

from tests.commands.test_hub import ABOUT, SECRET, TOKENIZER, environment
from tests.commands.test_train import LORA, words
from tests.support import forked
from tests.support.adapters import save_adapter
from tests.support.hub_server import COMMIT, Hub
from tests.support.paths import ROOT
from tests.support.quantised import save_sharp
from trl_grpo_tasks.commands.task_template import MyTask
from trl_grpo_tasks.models.tiny import save_tiny

pytestmark = pytest.mark.exhaustive
ADAPTER = {"adapter_config.json", "adapter_model.safetensors"}
LOG_PROBS = "print(json.dumps(model.eval()(torch.tensor([[3, 4, 5, 6, 7, 8]])).logits.log_softmax(-1).tolist()))"
TRAIN = f"""
import json, sys, torch
from trl_grpo_tasks.commands.train import parse, prepare, run_training
parsed = parse(sys.argv[1:])
model = run_training(*parsed, prepare(*parsed)).trainer.model
{LOG_PROBS}
"""
LOAD = f"""
import json, sys, torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM
for auto, name in ((AutoPeftModelForCausalLM, "user/letters"), (AutoModelForCausalLM, "user/base")):
    model = auto.from_pretrained(name, dtype="float32")
    {LOG_PROBS}
assert "trl_grpo_tasks" not in sys.modules and "trl" not in sys.modules
"""
PREPARE = """
import sys
from trl_grpo_tasks.commands.task_template import MyTask
from trl_grpo_tasks.models.ready import ready_model
for name in sys.argv[1:]:
    print(ready_model(name, MyTask(), [], "outputs", seed=0).path)
"""


@pytest.fixture
def base_files(tmp_path):
    save_tiny(MyTask().tiny(), tmp_path / "plain")
    save_sharp(str(tmp_path / "plain"), tmp_path / "base")  # so that an adapter changes log-probs visibly
    return {path.name: path.read_bytes() for path in (tmp_path / "base").iterdir()}


def run(hub, folder, code, *arguments, python=forked.python, **variables):
    folder.mkdir(exist_ok=True)
    env = environment(hub.url, folder) | {"HF_TOKEN": SECRET, "PYTHONPATH": str(ROOT)} | variables
    done = python("-c", code, *arguments, env=env, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def new_interpreter(*words, **options):
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=240, **options)


def difference(one, other):
    flat = [[value for row in json.loads(text)[0] for value in row] for text in (one, other)]
    return max(abs(a - b) for a, b in zip(*flat, strict=True))


def test_others_load_the_adapter_that_was_pushed_and_get_the_same_log_probs(base_files, tmp_path):
    options = {"model_name_or_path": "user/base", "push_to_hub": True, "hub_model_id": "user/letters", **LORA}
    options |= {"cold_start_steps": 6, "cold_start_learning_rate": 1e-2, "max_steps": 2, "beta": 0.1}
    with Hub(SECRET) as hub:
        hub.repos["user/base"] = base_files
        trained = run(hub, tmp_path / "ours", TRAIN, *words("run", **options))[-1]
        *_, loaded, base = run(hub, tmp_path / "theirs", LOAD, python=new_interpreter, PYTHONPATH="")
        pushed = dict(hub.repos["user/letters"])
        # Rewards of one step may all be equal; gold answers always change the adapter.
        further = {"model_name_or_path": "user/letters", "cold_start_steps": 2, "max_steps": 1}
        run(hub, tmp_path / "theirs", TRAIN, *words("further", **further, cold_start_learning_rate=1e-2))
        command = "from trl_grpo_tasks.commands.train import main\nassert main() == 0"
        evaluated = words("evaluated", model_name_or_path="user/letters", eval_only="true")
        run(hub, tmp_path / "theirs", command, *evaluated)
    assert set(pushed) == ADAPTER | TOKENIZER | ABOUT
    assert difference(trained, loaded) < 1e-4 and difference(trained, base) > 0.01
    assert "base_model: user/base" in pushed["README.md"].decode()
    folder = tmp_path / "theirs" / "further"
    for config in (pushed["adapter_config.json"], (folder / "adapter_config.json").read_bytes()):
        assert json.loads(config)["base_model_name_or_path"] == "user/base"
    first, second = pushed["adapter_model.safetensors"], (folder / "adapter_model.safetensors").read_bytes()
    first, second = load(first), load(second)
    assert first.keys() == second.keys() and any(not second[name].equal(value) for name, value in first.items())
    assert (tmp_path / "theirs" / "evaluated" / "evaluation.json").is_file()


def test_an_adapter_on_the_hub_is_a_local_folder_also_offline(base_files, tmp_path):
    save_adapter(tmp_path / "base", tmp_path / "adapter", "user/base")
    with Hub(SECRET) as hub:
        hub.repos["user/base"] = base_files
        hub.repos["user/adapter"] = {path.name: path.read_bytes() for path in (tmp_path / "adapter").iterdir()}
        online = run(hub, tmp_path / "ours", PREPARE, "user/adapter", "user/base")
        asked = [request for request in hub.requests if "adapter_config.json" in request and "user/base" in request]
        hub.refuse = "."
        offline = run(hub, tmp_path / "ours", PREPARE, "user/adapter", "user/base", HF_HUB_OFFLINE="1")
    folder, name = online
    assert name == "user/base" and folder.endswith(f"models--user--adapter/snapshots/{COMMIT}")
    assert offline == online
    assert len(asked) <= 1, "an ordinary model costs at most one request"
