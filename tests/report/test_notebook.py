"""What a notebook shows: one figure that is redrawn, the report in a frame, completions as pictures."""

import html
import json
from types import SimpleNamespace

import IPython.display
import pytest

from trl_grpo_tasks.report.notebook import RewardCurve, draw_curves, show, show_report

PNG = b"\x89PNG\r\n"


@pytest.fixture
def shown(monkeypatch):
    """What was displayed, and what replaced it."""
    displayed = []

    def display(thing, display_id=None):
        displayed.append(("new", thing))
        return SimpleNamespace(update=lambda other: displayed.append(("update", other)))

    monkeypatch.setattr(IPython.display, "display", display)
    return displayed


def write_metrics(folder, steps):
    lines = [{"step": step, "reward": step / 10, "rewards/success/mean": 0.5} for step in steps]
    (folder / "training_metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def log(curve, folder, is_main=True):
    state = SimpleNamespace(is_world_process_zero=is_main, max_steps=10)
    curve.on_log(SimpleNamespace(output_dir=str(folder)), state, None, logs={})


def test_the_figure_is_drawn_once_and_then_replaced(tmp_path, shown):
    curve = RewardCurve(every=0)
    write_metrics(tmp_path, [1])
    log(curve, tmp_path)
    write_metrics(tmp_path, [1, 2, 3])
    log(curve, tmp_path)
    assert [kind for kind, _ in shown] == ["new", "update"]
    first, second = (picture.data for _, picture in shown)
    assert first.startswith(PNG) and second.startswith(PNG) and first != second


def test_the_figure_is_not_redrawn_all_the_time_nor_by_every_process(tmp_path, shown):
    write_metrics(tmp_path, [1])
    curve = RewardCurve(every=1000)
    log(curve, tmp_path)
    log(curve, tmp_path)
    log(RewardCurve(), tmp_path, is_main=False)
    assert len(shown) == 1
    state = SimpleNamespace(is_world_process_zero=True, max_steps=10)
    curve.on_train_end(SimpleNamespace(output_dir=str(tmp_path)), state, None)
    assert len(shown) == 2


def test_metrics_that_a_run_does_not_have_leave_their_lines_empty(tmp_path):
    (tmp_path / "training_metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    assert draw_curves(tmp_path, 10).startswith(PNG)


def test_the_report_is_in_the_frame_as_it_is_in_the_file(tmp_path):
    page = '<!doctype html><p class="a">5 < 6 & "so" on</p>'
    (tmp_path / "report.html").write_text(page)
    framed = show_report(tmp_path).data
    assert html.unescape(framed.split('srcdoc="')[1].split('"')[0]) == page


def test_a_completion_is_shown_as_the_task_draws_it(shown):
    drawn = {"png": PNG, "html": "<b>5</b>"}
    task = SimpleNamespace(render=lambda row, completion: drawn[completion])
    show(task, {}, "png")
    show(task, {}, "html")
    assert [type(thing).__name__ for _, thing in shown] == ["Image", "HTML"]
