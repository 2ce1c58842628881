"""Share the interpreter between trainer and worker in small portions.

A thread that wants the interpreter asks the one that has it to let go after
``sys.getswitchinterval()``, 5 ms by default. Both sides here hold it for some
microseconds between calls that release it (BLAS, random numbers, copies, the driver): a
worker that waits 5 ms after each of these is late for the next step.
"""

from __future__ import annotations

import sys
import threading

INTERVAL_SECONDS = 2e-5

_lock = threading.Lock()
# How many workers are running, and the interval that held before the first. Guarded by
# the lock; of the module, since the interval is one of the whole process.
_workers = 0
_before = 0.0


def begin() -> None:
    """A worker starts: shorten the interval, if it is longer."""
    global _workers, _before
    with _lock:
        if _workers == 0:
            _before = sys.getswitchinterval()
            sys.setswitchinterval(min(_before, INTERVAL_SECONDS))
        _workers += 1


def end() -> None:
    """A worker has ended: put the interval back after the last one."""
    global _workers
    with _lock:
        _workers -= 1
        if _workers == 0:
            sys.setswitchinterval(_before)
