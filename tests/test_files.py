"""Files are written completely or not at all, and never through a link."""

import os
import threading

import pytest

from trl_grpo_tasks.files import not_through_a_link, write_atomically


def test_several_writers_and_a_reader_see_only_whole_files(tmp_path):
    path = tmp_path / "report.html"
    texts = [letter * 50_000 for letter in "abcd"]
    path.write_text(texts[0])
    failures, seen = [], set()

    def write(text):
        try:
            for _ in range(50):
                write_atomically(path, text)
        except OSError as error:
            failures.append(error)

    writers = [threading.Thread(target=write, args=[text]) for text in texts]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        seen.add(path.read_text())
    assert not failures and seen <= set(texts)
    assert path.read_text() in texts and list(tmp_path.iterdir()) == [path], "no temporary file is left"


def test_a_link_is_replaced_and_its_target_stays(tmp_path):
    victim, run = tmp_path / "victim", tmp_path / "run"
    victim.write_text("mine")
    run.mkdir()
    for name in ("report.html", "report.tmp", "report.html.tmp", ".report.html.tmp"):
        (run / name).symlink_to(victim)
    write_atomically(run / "report.html", "a page")
    assert victim.read_text() == "mine"
    assert (run / "report.html").read_text() == "a page" and not (run / "report.html").is_symlink()


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "settings.json"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(OSError("no")))
    with pytest.raises(OSError, match="no"):
        write_atomically(path, b"new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_files_have_the_permissions_of_the_users_umask(tmp_path):
    earlier = os.umask(0o027)
    try:
        write_atomically(tmp_path / "file", "text")
    finally:
        os.umask(earlier)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


def test_nothing_is_appended_through_a_link(tmp_path):
    victim = tmp_path / "victim"
    (tmp_path / "log").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic link"), open(tmp_path / "log", "a", opener=not_through_a_link):
        pass
    assert not victim.exists()
