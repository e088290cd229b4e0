"""The context manager `time_limit`, with which rewards limit their own time."""

from __future__ import annotations

import re
import signal
import threading
import time

import pytest

from trl_grpo_tasks.rewards.time_limit import time_limit


@pytest.mark.parametrize(
    "endless",
    [lambda: re.search("^(a+)+$", "a" * 60 + "!"), lambda: [None for _ in iter(int, 1)], lambda: time.sleep(1000)],
)
def test_code_that_takes_too_long_is_interrupted(endless):
    with pytest.raises(TimeoutError, match=r"took longer than 0\.05 s"), time_limit(0.05):
        endless()


@pytest.fixture
def no_alarm():
    """Suspend the alarm of pytest-timeout."""
    handler = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    timer = signal.setitimer(signal.ITIMER_REAL, 0)
    yield
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, *timer)


def test_fast_code_is_not_interrupted_and_no_alarm_is_left(no_alarm):
    for _ in range(100):
        with time_limit(0.05):
            pass
    time.sleep(0.1)
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL and signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_an_alarm_set_by_other_code_still_fires(no_alarm):
    rang = threading.Event()
    signal.signal(signal.SIGALRM, lambda *_: rang.set())
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    with time_limit(30):
        time.sleep(0.2)
    assert rang.wait(30)


def test_another_thread_is_not_limited_and_does_not_fail():
    done = []

    def work():
        with time_limit(0.01):
            time.sleep(0.05)
        done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]
