"""Tests against a real vLLM on the CPU. They need vllm-cpu, which has its own environment: `make test-vllm`.

The ordinary test run does not collect them. Engines run in the process of the test, one after the other. To start one
takes most of the time, so that tests share engines and servers; tests/serving states the rest with a stand-in.
"""

import importlib.util

import pytest

from tests.support import vllm_cpu
from tests.support.toy import ToyTask

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    vllm_cpu.set_up()


@pytest.fixture(params=[1, 2], ids=["V1", "V2"])
def runner(request):
    """The model runner of engines that the test creates: 1 or 2."""
    with vllm_cpu.use_runner(request.param):
        yield request.param


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    """A one-layer Llama over the letters of the toy task, with two end-of-sequence ids, saved as a folder."""
    return vllm_cpu.save_model(ToyTask(), tmp_path_factory.mktemp("model"))
