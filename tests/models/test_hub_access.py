"""Without a network: one request, one line, and then only the cache is asked; a push says what is really wrong."""

import httpx2
import huggingface_hub
import pytest
from huggingface_hub.errors import LocalTokenNotFoundError, OfflineModeIsEnabled

from trl_grpo_tasks.commands.hub import create_repository
from trl_grpo_tasks.models.loading import prepare_model
from trl_grpo_tasks.report.run_folder import local_run

CLOSED = "http://127.0.0.1:9"  # nothing listens there


@pytest.fixture
def no_network(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", CLOSED)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def test_a_hub_model_without_a_network_is_refused_without_retries(no_network, capsys, caplog, tmp_path):
    assert local_run("owner/name") == "owner/name"
    with pytest.raises(ValueError, match=r"--model owner/name: .* the Hub cannot be reached .*; connect"):
        prepare_model("owner/name", None, tmp_path)
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and f"{CLOSED} cannot be reached" in out and "only models in the cache" in out
    assert "Retry" not in caplog.text


def test_a_push_without_a_network_does_not_ask_to_log_in(monkeypatch):
    def refuse(error):
        def create_repo(*args, **kwargs):
            raise error

        monkeypatch.setattr(huggingface_hub, "create_repo", create_repo)
        with pytest.raises(ValueError) as refused:
            create_repository("me/run", None, "--push_to_hub", ", or train without --push_to_hub")
        return str(refused.value)

    for error in (httpx2.ConnectError("no route"), OfflineModeIsEnabled("offline"), httpx2.ReadTimeout("slow")):
        message = refuse(error)
        assert "cannot be reached: connect to the network" in message and "log in" not in message
        assert message.endswith("if it is set, or train without --push_to_hub")
    assert "log in with `hf auth login`" in refuse(LocalTokenNotFoundError("no token"))
