"""The option vllm_weights_folder; test_servers.py sends weights to servers, tests/vllm to a real one."""

import pytest
import torch

from tests.support.training import config
from trl_grpo_tasks.serving import weights


def test_the_folder_is_for_a_server(tmp_path):
    server = {"use_vllm": True, "vllm_mode": "server"}
    assert config(tmp_path, vllm_weights_folder="w", **server).vllm_weights_folder == "w"
    for options in ({}, {"use_vllm": True, "vllm_mode": "colocate"}):
        with pytest.raises(ValueError, match="vllm_mode='server'"):
            config(tmp_path, vllm_weights_folder="w", **options)


def test_tensors_are_written_in_parts_of_limited_size(monkeypatch):
    monkeypatch.setattr(weights, "_FILE_BYTES", 90)
    tensor = torch.arange(24.0).view(4, 6)
    given = {"a": tensor.T, "b": tensor[:1], "c": tensor[:, :1], "d": torch.zeros(40)}
    parts = list(weights._parts(iter(given.items())))
    assert [list(part) for part in parts] == [["a"], ["b", "c", "d"]]
    merged = {name: value for part in parts for name, value in part.items()}
    assert all(value.equal(given[name]) and value.is_contiguous() for name, value in merged.items())
    tensor += 1  # an adapter that is taken out again
    assert not merged["a"].equal(given["a"])
