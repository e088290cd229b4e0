"""A toy task and one-layer models, made on the spot: no test downloads anything."""

import gc
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.support.isolation import SCRATCH
from tests.support.sandboxed import children_of
from tests.support.toy import ToyTask
from tests.support.toy_fill import save_bert
from tests.support.wild import TASK_FILE
from trl_grpo_tasks.models.tiny import encoder_config, make_tokenizer, save_tiny
from trl_grpo_tasks.registry import get_task
from trl_grpo_tasks.rewards import sandbox
from trl_grpo_tasks.rewards.sandbox import sandbox_layers

# On a busy machine examples take long; what a test states does not depend on it.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")
LONGEST = ("tests/test_readme.py", "tests/training/test_sharded.py")  # one process runs a file, so these start first
torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when the kernels are imported, and runs them on the CPU


def pytest_unconfigure():
    gc.unfreeze()  # otherwise libraries report leaks at the end
    shutil.rmtree(SCRATCH, ignore_errors=True)


def pytest_addoption(parser):
    parser.addoption("--reverse", action="store_true", help="run the tests in the opposite order")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--reverse"):
        items.reverse()
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


def pytest_collection_finish():
    # Every run of a trainer collects garbage, which takes most of a second with the objects of all imported modules.
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory):
    """A one-layer Llama over the letters of the toy task, saved as a folder."""
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(ToyTask().tiny(), folder, seed=1)
    return str(folder)


@pytest.fixture(scope="session")
def bert_path(tmp_path_factory):
    """A one-layer BERT over five letters, with two outputs that belong to no token, saved as a folder."""
    return save_bert(tmp_path_factory.mktemp("bert"), vocab_size=12)


@pytest.fixture(scope="session")
def judges_path(tmp_path_factory):
    """A folder with two untrained judges of task infill: to train one that is better than chance takes minutes."""
    from transformers import ModernBertForSequenceClassification, set_seed

    folder = tmp_path_factory.mktemp("judges")
    spec = get_task("infill", {"text_length": 128, "tiny_width": 16, "tiny_layers": 1, "tiny_heads": 2}).tiny()
    tokenizer = make_tokenizer(spec.tokens, spec.context)
    for seed, name in enumerate(("judge", "held_out")):
        set_seed(seed)
        model = ModernBertForSequenceClassification(encoder_config(spec, tokenizer, num_labels=2))
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture
def task_file(tmp_path):
    """The path of a task that does what the completion says."""
    path = tmp_path / "wild_task.py"
    path.write_text(TASK_FILE)
    return str(path)


@pytest.fixture
def wild(task_file):
    """That task."""
    return get_task(task_file)


# ---- the sandbox


@pytest.fixture
def nothing_is_left(monkeypatch, tmp_path):
    """No folder, no process and no zombie after a test of the sandbox (`tmp_path`: pytest has made its own)."""
    sandbox_layers()
    before = children_of(os.getpid())
    scratch = Path(tempfile.mkdtemp())
    scratch.chmod(0o755)  # pytest's own folders cannot be entered by another user
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    yield
    left = list(scratch.iterdir())
    shutil.rmtree(scratch)
    assert left == []
    assert children_of(os.getpid()) <= before


@pytest.fixture(params=["as probed", "without namespaces"])
def each_way(request, monkeypatch):
    """Every layer of this machine, and what is left of them where namespaces and a change of user are refused."""
    if request.param == "without namespaces":
        kept = {
            name: reason if name in ("landlock", "seccomp") else "left out"
            for name, reason in sandbox_layers().items()
        }
        monkeypatch.setattr(sandbox, "_probed_layers", lambda: kept)
    return request.param
