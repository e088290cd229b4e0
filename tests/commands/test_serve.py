"""The command serve: the command line of vLLM that it becomes, and what it refuses before anything slow starts."""

import json
import os
import shlex
import socket
import sys
from importlib.metadata import PackageNotFoundError

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from tests.support.adapters import save_adapter
from tests.support.gguf_file import write_gguf
from tests.support.run_folders import edited
from tests.support.toy import ToyTask
from trl_grpo_tasks.commands import serve as command
from trl_grpo_tasks.commands.arguments import parse
from trl_grpo_tasks.commands.main import main
from trl_grpo_tasks.commands.serve import check_passed, server_command, split_words
from trl_grpo_tasks.models.ready import ready_model
from trl_grpo_tasks.models.tiny import save_tiny
from trl_grpo_tasks.registry import get_task
from trl_grpo_tasks.serving.served_task import PROCESSOR, SERVED_VARIABLE, ServedTask


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """vLLM seems to be installed, the current folder is empty, and no server is started."""
    monkeypatch.setattr(command, "version", lambda package: {"vllm": "0.31.0+cpu"}[package])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(os, "execve", lambda *words: pytest.fail("a server was started"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def started(monkeypatch):
    """What would have been executed: (words, environment)."""
    seen = []
    monkeypatch.setattr(os, "execve", lambda program, words, environment: seen.append((words, environment)))
    return seen


def value_of(words, option):
    (at,) = [at for at, word in enumerate(words) if word == option]
    return words[at + 1]


def refusal(capsys, *words):
    assert main(["serve", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    return err


# ---- the command line


def test_the_server_has_the_processor_the_task_and_what_trl_needs(started, capsys):
    words = "serve tiny --task brick --max_bricks 7 --attach false -- --dtype float32 --enforce-eager"
    main(words.split())
    ((served, environment),) = started
    assert served[0] == sys.executable and served[1:4] == ["-m", "vllm.entrypoints.cli.main", "serve"]
    assert os.path.isfile(os.path.join(served[4], "model.safetensors")) and os.path.isabs(served[4])
    assert value_of(served, "--host") == "127.0.0.1" and value_of(served, "--port") == "8000"
    assert value_of(served, "--logits-processors") == PROCESSOR
    assert value_of(served, "--logprobs-mode") == "processed_logprobs" and value_of(served, "--max-logprobs") == "-1"
    assert served[-3:] == ["--dtype", "float32", "--enforce-eager"]
    config = json.loads(value_of(served, "--additional-config"))
    assert environment["VLLM_SERVER_DEV_MODE"] == "1" and json.loads(environment[SERVED_VARIABLE]) == config
    assert environment["PATH"] == os.environ["PATH"]
    record = ServedTask.from_config(config)
    assert record.task == "brick" and record.tokenizer == served[4]
    assert record.options["max_bricks"] == 7 and record.options["attach"] is False
    assert record.build()[1].start({"world": 8, "prompt": "x"}).mask().any()
    assert capsys.readouterr().out.count("\n") == 1


@pytest.mark.parametrize("has_gpu", [True, False])
def test_weights_are_transferred_between_gpus_only(has_gpu, monkeypatch, tiny_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    words, *_ = server_command(get_task("tests.support.toy"), tiny_path, "127.0.0.1", 8000, [])
    assert ("--weight-transfer-config" in words) == has_gpu
    if has_gpu:
        assert json.loads(value_of(words, "--weight-transfer-config")) == {"backend": "nccl"}


RECIPE = {"task": "brick", "brick_levels": ["small", "room"], "max_bricks": 80, "attach": False, "world_dim": None,
          "model_name_or_path": "tiny", "max_steps": 3, "output_dir": "run", "constrain": True}  # fmt: skip
OPTIONS = "--max_bricks 9 --attach false --world_dim 8 --brick_levels small room"


@pytest.mark.parametrize("words", [f"tiny --task brick {OPTIONS}", "--config mine.yaml --max_bricks 9"])
def test_the_printed_command_trains_the_same_task_with_the_server(started, capsys, tmp_path, words):
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(RECIPE))
    main(["serve", *words.split(), "--port", "8123"])
    typed = shlex.split(capsys.readouterr().out.partition("train with: ")[2])
    assert typed[:2] == ["trl-grpo-tasks", "train"]
    task, _, args, model = parse(typed[2:])
    assert task.options.max_bricks == 9 and task.options.brick_levels == ["small", "room"]
    ((served, _),) = started
    record = ServedTask.from_config(json.loads(value_of(served, "--additional-config")))
    tokenizer = ready_model(model.model_name_or_path, task, [], "run", seed=args.seed).tokenizer
    assert record.difference(ServedTask.of(task, tokenizer)) is None
    assert args.constrain and args.use_vllm and args.vllm_mode == "server"
    assert (args.vllm_server_host, args.vllm_server_port) == ("127.0.0.1", 8123)
    assert args.max_steps == 3 or "--config" not in words


def test_a_server_on_all_addresses_is_reached_by_the_name_of_the_machine(started, capsys):
    main(["serve", "tiny", "--task", "brick", "--host", "0.0.0.0"])
    assert value_of(started[0][0], "--host") == "0.0.0.0"
    assert f"--vllm_server_host {socket.gethostname()} " in capsys.readouterr().out


def test_a_task_file_is_served_by_its_full_path(my_task, started):
    my_task.write_text(my_task.read_text().replace("word_length", "length_of_words"))  # nothing by the template's name
    main(["serve", "tiny", "--task", "my_task.py", "--length_of_words", "3"])
    ((words, _),) = started
    record = ServedTask.from_config(json.loads(value_of(words, "--additional-config")))
    assert record.task == str(my_task) and record.options["length_of_words"] == 3
    own = ServedTask.of(get_task("my_task.py", record.options), ready_model("tiny", get_task("my_task.py"), [], "run",
                                                                            seed=1).tokenizer)  # fmt: skip
    assert record.difference(own) is None


def test_a_gguf_file_is_served_with_the_tokenizer_of_a_run(tmp_path):
    file = tmp_path / "small.gguf"
    write_gguf(file)
    task = get_task("tests.support.toy")
    words, *_ = server_command(task, str(file), "127.0.0.1", 8000, [])
    record = ServedTask.from_config(json.loads(value_of(words, "--additional-config")))
    run = ready_model(str(file), task, [], tmp_path / "run", seed=5)
    assert words[4] != run.path and os.path.isfile(os.path.join(words[4], "model.safetensors"))
    assert record.difference(ServedTask.of(task, run.tokenizer)) is None


@pytest.mark.parametrize("option", command.REFUSED)
def test_each_refused_option_says_why(option):
    with pytest.raises(ValueError) as error:
        check_passed([option, "x"])
    assert str(error.value) == f"{option} after --: {command.REFUSED[option]}"


def test_words_after_two_dashes_are_passed_on():
    assert split_words(["brick", "--port", "1", "--", "-h", "--", "x"])[1] == ["-h", "--", "x"]
    assert split_words(["brick", "--port", "1", "--"]) == split_words(["brick", "--port", "1"])
    check_passed(
        ["--max-model-len", "-1", "-tp", "2", "--tokenizer-mode", "auto", "--gpu_memory_utilization=0.8", "--"]
    )
    check_passed(["--compilation-config.mode", "3", "--model-impl", "vllm", "--hf-overrides.model", "x"])


# ---- refusals


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--speculative-config {}", "--speculative-config after --: constraints do not work with speculative"),
        ("--speculative-config.method ngram", "speculative decoding"),
        ("--specul {}", "speculative decoding"),
        ("-sc {}", "-sc after --: constraints do not work with speculative decoding"),
        ("--spec-tokens=3", "speculative decoding"),
        ("--logits_processors a:B", "only the constraint's own is run"),
        ("--dtype auto --port 1", "--port after --: give it before --"),
    ],
)
def test_options_of_vllm_that_collide_are_refused(words, message, capsys):
    assert message in refusal(capsys, "tiny", "--task", "brick", "--", *words.split())


@pytest.mark.parametrize("installed", ["0.24.0", "0.30.0", "0.31.1+cpu"])
def test_supported_versions_of_vllm(installed, monkeypatch):
    monkeypatch.setattr(command, "version", lambda package: installed)
    command.check_vllm()


@pytest.mark.parametrize("installed", ["0.23.9", "0.32.0", "1.0", "nightly"])
def test_other_versions_of_vllm(installed, monkeypatch):
    monkeypatch.setattr(command, "version", lambda package: installed)
    with pytest.raises(ValueError, match=rf"vLLM {installed} is installed .supported are 0\.24 to 0\.31"):
        command.check_vllm()


def test_without_vllm_the_message_says_what_to_install(monkeypatch, capsys):
    def missing(package):
        raise PackageNotFoundError(package)

    monkeypatch.setattr(command, "version", missing)
    assert "vLLM is not installed" in refusal(capsys, "tiny", "--task", "brick")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("tiny", "tiny is not the folder of a run; name the task too: trl-grpo-tasks serve tiny --task TASK"),
        ("brick --model tiny", "serve takes the model first: trl-grpo-tasks serve tiny --task brick"),
        ("tiny --task mine.py", "mine.py' does not exist"),
        ("--task brick", "give RUN_OR_MODEL"),
        ("--config brick/nothing", "--config brick/nothing: there is no recipe of this name"),
        ("tiny --task brick --max_brick 3", "unknown option --max_brick; did you mean --max_bricks?"),
        ("./missing --task brick", "--model ./missing: this path does not exist"),
        ("tiny --task infill", "task 'infill' trains a masked language model with these options, and vLLM runs only"),
    ],
)
def test_mistakes_are_refused_in_one_line(words, message, capsys):
    assert message in refusal(capsys, *words.split())


def test_a_task_without_a_constraint_is_served_for_repairs(tiny_path, monkeypatch, started, capsys):
    monkeypatch.setattr(ToyTask, "constraint", lambda self, tokenizer: None)
    main(["serve", tiny_path, "--task", "tests.support.toy"])
    typed = capsys.readouterr().out
    assert len(started) == 1 and "--repair_turns 2 --use_vllm" in typed and "--constrain" not in typed


def test_an_adapter_is_served_merged(tiny_path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    adapter = save_adapter(tiny_path, tmp_path / "adapter")
    command, *_ = server_command(get_task("tests.support.toy"), str(tmp_path / "adapter"), "0.0.0.0", 8000, [])
    served = command[command.index("serve") + 1]
    assert served == str(tmp_path / "outputs" / "serve" / "toy" / "merged")
    ids = torch.tensor([[3, 4, 5]])
    model = AutoModelForCausalLM.from_pretrained(served)
    torch.testing.assert_close(model(ids).logits, adapter.eval()(ids).logits, atol=1e-5, rtol=1e-5)


def test_a_model_with_too_few_outputs_is_refused(tmp_path, capsys):
    task = get_task("tests.support.toy")
    save_tiny(task.tiny(), tmp_path / "small")
    with edited(tmp_path / "small" / "config.json") as config:
        config["vocab_size"] = 5
    said = refusal(capsys, str(tmp_path / "small"), "--task", "tests.support.toy")
    assert "the model has only 5 outputs" in said
