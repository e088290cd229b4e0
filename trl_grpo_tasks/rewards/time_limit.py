"""A wall-clock limit on a piece of Python, which also interrupts a regular expression of the `re` module."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the body of the `with` once it has run for `seconds`.

    The limit is an alarm signal, and Python handles signals in the main thread. In another thread the body is not
    limited here: reward workers score in their main thread, and `--reward_timeout` ends them from outside.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    running = True

    def stop(*_: object) -> None:
        if running:
            raise TimeoutError(f"took longer than {seconds:g} s")

    started = time.monotonic()
    handler = signal.signal(signal.SIGALRM, stop)
    # Again every tenth of a second: an exception that is raised while an object is deleted is lost.
    delay, interval = signal.setitimer(signal.ITIMER_REAL, seconds, 0.1)
    try:
        try:
            yield
        finally:
            running = False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if handler is None else handler)
        if delay:  # the alarm of somebody else, of which the time here is taken off
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, delay - (time.monotonic() - started)), interval)
