"""A checkpoint whose files are not as they were written is not resumed."""

import os

import pytest

from trl_grpo_tasks.models import checkpoints


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint with files of several processes, one of them in a folder, as FSDP and DeepSpeed write them."""
    folder = tmp_path / "checkpoint-3"
    checkpoints.mark_incomplete(folder)
    (folder / "optimizer_0").mkdir()
    for name in ("trainer_state.json", "task_state_0.pt", "task_state_1.pt", "optimizer_0/__1_0.distcp", "empty"):
        (folder / name).write_bytes(b"" if name == "empty" else os.urandom(1000))
    checkpoints.mark_complete(folder)
    return folder


def flip_bit(path):
    content = bytearray(path.read_bytes())
    content[500] ^= 1
    path.write_bytes(content)


def test_files_as_they_were_written_are_no_damage(checkpoint):
    assert checkpoints.damage(checkpoint) is None and checkpoints.is_complete(checkpoint)
    (checkpoint / "latest_universal").write_text("a file that a later conversion adds")
    assert checkpoints.damage(checkpoint) is None


@pytest.mark.parametrize("name", ["trainer_state.json", "task_state_1.pt", "optimizer_0/__1_0.distcp"])
@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: os.truncate(path, 999), "has 999 bytes instead of 1,000"),
        (flip_bit, "has changed since it was written"),
    ],
    ids=["missing", "truncated", "flipped"],
)
def test_every_file_is_checked(checkpoint, name, harm, said):
    harm(checkpoint / name)
    assert checkpoints.damage(checkpoint) == f"{name} {said}"
    assert checkpoints.newest_intact(checkpoint.parent) == (None, {checkpoint: f"{name} {said}"})


def test_a_file_that_changes_between_two_checks_is_noticed(checkpoint):
    assert checkpoints.damage(checkpoint) is None
    path = checkpoint / "task_state_0.pt"
    flip_bit(path)
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))  # clocks of file systems may tick only every few milliseconds
    assert checkpoints.damage(checkpoint) == "task_state_0.pt has changed since it was written"


UNREADABLE = "its list of files, complete, cannot be read"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", UNREADABLE),
        ("[]", UNREADABLE),
        ('{"files": []}', UNREADABLE),
        ('{"files": {"a": 3}}', UNREADABLE),
        ('{"files": {"a": ["x", "y"]}}', UNREADABLE),
        ('{"files": {"/dev/zero": [0, "0"]}}', "/dev/zero is missing"),  # it is not read for ever
        ("", "it was written by an earlier version, which recorded no hashes; resume it with that version"),
    ],
)
def test_a_list_of_files_that_is_of_no_use_is_damage(checkpoint, text, said):
    (checkpoint / "complete").write_text(text)
    assert checkpoints.damage(checkpoint) == said


@pytest.mark.parametrize("state_files", [0, 2])
def test_a_checkpoint_that_was_killed_while_it_was_written_is_incomplete(tmp_path, state_files):
    folder = tmp_path / "checkpoint-4"
    checkpoints.mark_incomplete(folder)
    (folder / "trainer_state.json").write_text("{}")
    for number in range(state_files):
        (folder / f"task_state_{number}.pt").touch()
    assert checkpoints.damage(folder) == "it was not written completely" and not checkpoints.is_complete(folder)
    if state_files:  # whether or not its marker was lost
        (folder / "incomplete").unlink()
        assert checkpoints.damage(folder) == "it was not written completely"


def test_a_checkpoint_of_plain_trl_has_nothing_to_check(tmp_path):
    (tmp_path / "trainer_state.json").write_text("{}")
    assert checkpoints.damage(tmp_path) is None


def test_a_superseded_checkpoint_is_only_resumed_by_name(checkpoint):
    checkpoints.mark_superseded(checkpoint)
    assert checkpoints.newest_complete(checkpoint.parent) is None
    found, skipped = checkpoints.newest_intact(checkpoint.parent)
    assert found is None and "resumed from an earlier checkpoint" in skipped[checkpoint]
    assert checkpoints.damage(checkpoint) is None
    flip_bit(checkpoint / "task_state_0.pt")
    assert checkpoints.damage(checkpoint) == "task_state_0.pt has changed since it was written"
