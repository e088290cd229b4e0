"""Failures that the user can fix are reported in one line without a traceback: damaged files, full disk, pickles."""

import errno
import os
import resource
import shutil
import unicodedata

import pytest
import torch
from PIL import ImageFont
from safetensors import SafetensorError
from safetensors.torch import save_file

from tests.commands.test_train import train, words
from tests.support.gguf_file import write_gguf
from tests.support.prompt_files import make
from trl_grpo_tasks.commands import main as cli
from trl_grpo_tasks.commands import train as run
from trl_grpo_tasks.commands.task_template import MyTask
from trl_grpo_tasks.failures import is_write_failure, known_failure
from trl_grpo_tasks.models.checkpoints import mark_complete
from trl_grpo_tasks.models.gguf import convert_gguf
from trl_grpo_tasks.models.tiny import save_tiny
from trl_grpo_tasks.tasks.brick.drawing import render


def only_line(capsys, longest=1000):
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and len(line) < longest
    return line


# ---- files that are damaged


def one_line(caught):
    return len(str(caught.value).splitlines()) == 1


def test_a_damaged_parquet_file(tmp_path):
    """Half of it, a length of the footer that is wrong, or a footer or pages that are."""
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", "b"], "answer": ["1", "2"]}), path)
    whole = path.read_bytes()
    end, footer = len(whole) - 8, int.from_bytes(whole[-8:-4], "little")
    damaged = [whole[: len(whole) // 2]]
    for start, stop in ((end - footer, end), (4, 40), (end, end + 4)):
        damaged.append(whole[:start] + bytes(byte ^ 0xA5 for byte in whole[start:stop]) + whole[stop:])
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"^rows.parquet is not a Parquet file, or is damaged: .+") as caught:
            make(prompts_file=str(path), rewards=["numeric"])
        assert one_line(caught)


def test_a_truncated_gguf_file(tmp_path):
    write_gguf(tmp_path / "whole.gguf")
    whole = (tmp_path / "whole.gguf").read_bytes()
    for kept in (10, 100, 3000, 50_000, -100):
        (tmp_path / "half.gguf").write_bytes(whole[:kept])
        with pytest.raises(ValueError, match=r"half.gguf cannot be read \(\w+: .+\); it may be incomplete") as caught:
            convert_gguf(tmp_path / "half.gguf", tmp_path / "out")
        assert one_line(caught) and not (tmp_path / "out").exists()


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdef", "bcdefg", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_steps: " + "[" * 20_000 + "]" * 20_000, "is nested too deeply"),
        ("\n".join(" " * depth + "a:" for depth in range(3000)), "is nested too deeply"),
        (f"{BOMB}max_steps: *g", "holds more than 10,000 values"),
        ("max_steps: &a [*a]", "holds more than 10,000 values"),
        (f"task: prompts\nmax_steps: {list(range(5000))}", "max_steps: [0, 1, 2, 3"),
    ],
    ids=["deep lists", "deep mappings", "an alias bomb", "a list in itself", "a long list"],
)
def test_a_recipe_that_is_too_much(tmp_path, capsys, text, message):
    (tmp_path / "recipe.yaml").write_text(text)
    assert run.main(["--config", str(tmp_path / "recipe.yaml"), "--output_dir", str(tmp_path / "run")]) == 2
    assert message in only_line(capsys)


# ---- a full disk


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_full_disk_is_recognised_in_an_error_of_pytorch():
    with pytest.raises(RuntimeError) as caught:
        torch.save({"a": torch.zeros(100_000)}, "/dev/full")
    assert "a file could not be read or written" in known_failure(caught.value) and is_write_failure(caught.value)


def test_a_limit_on_file_sizes_is_recognised_in_an_error_of_safetensors(tmp_path):
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(SafetensorError) as caught:
            save_file({"weights": torch.zeros(10_000)}, tmp_path / "model.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert "File too large" in known_failure(caught.value) and is_write_failure(caught.value)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG, errno.ESTALE])
def test_failures_of_the_file_system_are_recognised_by_their_number(number):
    """As Python raises them, and as safetensors does, directly and as the cause of another error."""
    reason = os.strerror(number)
    of_safetensors = SafetensorError(f"Error while serializing: I/O error: {reason} (os error {number})")
    for error in (OSError(number, reason), of_safetensors):
        wrapped = RuntimeError("the model could not be saved")
        wrapped.__cause__ = error
        for one in (error, wrapped):
            assert is_write_failure(one) and reason in known_failure(one) and "--resume_from" in known_failure(one)


def test_errors_of_code_are_no_failures_of_the_file_system():
    bug = TypeError("unsupported operand")
    bug.__context__ = FileNotFoundError(errno.ENOENT, "No such file")  # raised where another error was handled
    damaged = SafetensorError("Error while deserializing header: incomplete metadata")
    assert not any(is_write_failure(error) or known_failure(error) for error in (bug, damaged, ValueError("os error")))


def test_other_errors_keep_their_traceback(tmp_path, monkeypatch):
    assert known_failure(RuntimeError("shape mismatch")) is None and known_failure(OSError(2, "no such file")) is None

    def broken(*_):
        raise RuntimeError("shape mismatch")

    monkeypatch.setattr(run, "run_training", broken)
    with pytest.raises(RuntimeError, match="shape mismatch"):
        run.main(words(tmp_path / "run"))


# ---- pickles with objects other than weights


class Planted:
    """Creates a folder when it is unpickled, as evidence that its code ran."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stopped") / "run"
    train(folder, eval_before_and_after=False, max_steps=1)
    return folder


@pytest.mark.parametrize("name", ["optimizer.pt", "rng_state.pth", "task_state_0.pt", "task_state_common.pt"])
def test_a_pickle_in_a_checkpoint(tmp_path, capsys, stopped, name):
    shutil.copytree(stopped, tmp_path / "run")
    torch.save({"a": Planted(tmp_path / "it_ran")}, tmp_path / "run" / "checkpoint-1" / name)
    mark_complete(tmp_path / "run" / "checkpoint-1")  # whoever plants a file can write its hash too
    again = words(tmp_path / "run", eval_before_and_after=False, max_steps=2)
    assert run.main([*again, "--resume_from_checkpoint"]) == 1
    said = only_line(capsys)
    assert f"checkpoint-1/{name} was not loaded: it contains Python objects other than weights" in said
    assert not (tmp_path / "it_ran").exists()


@pytest.mark.parametrize("command", ["eval", "solve"])
def test_a_pickle_in_a_model(tmp_path, capsys, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    save_tiny(MyTask().tiny(), tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Planted(tmp_path / "it_ran")}, tmp_path / "model" / "pytorch_model.bin")
    task = ["--task", "trl_grpo_tasks.commands.task_template"]
    more = {
        "eval": ["--model", "model", "--output_dir", "out", "--use_cpu", "true", "--report_to", "none"],
        "solve": ["model", "--text", "abc"],
    }
    assert cli.main([command, *more[command], *task]) == 1
    assert "pytorch_model.bin was not loaded" in only_line(capsys) and not (tmp_path / "it_ran").exists()


# ---- captions


def test_a_caption_of_combining_marks_is_cut_before_it_is_drawn(monkeypatch):
    """Unicode normalisation of combining marks takes quadratic time."""
    lengths, real = [], unicodedata.normalize
    monkeypatch.setattr(
        render.unicodedata, "normalize", lambda form, text: (lengths.append(len(text)), real(form, text))[1]
    )
    font = ImageFont.load_default(20)
    assert render._wrapped("a" + "\u0301\u0316" * 5_000, 600, font, 3) == ["a"]
    rows = render._wrapped("word " * 1_000, 600, font, 3)
    assert len(rows) == 3 and rows[-1].endswith(" ...") and max(lengths) <= 1000
