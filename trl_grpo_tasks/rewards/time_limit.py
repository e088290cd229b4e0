"""A wall-clock limit for a block of Python code, which also interrupts regular expressions of the `re` module."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the body of the `with` statement once it has run for `seconds`.

    The limit uses the signal SIGALRM, which Python only handles in the main thread; in other threads the body is not
    limited. Reward workers score in their main thread, and `--reward_timeout` ends them from outside in any case.
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
    # The alarm repeats every 0.1 s, because an exception raised while an object is being deleted is lost.
    delay, interval = signal.setitimer(signal.ITIMER_REAL, seconds, 0.1)
    try:
        try:
            yield
        finally:
            running = False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if handler is None else handler)
        if delay:  # restore the alarm that other code had set, minus the time spent here
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, delay - (time.monotonic() - started)), interval)
