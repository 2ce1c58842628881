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
# The workers that are running, and the interval that held before the first. Guarded by
# the lock; of the module, since the interval is one of the whole process.
_workers: set[threading.Thread] = set()
_before = 0.0


def begin(worker: threading.Thread) -> None:
    """A worker starts: shorten the interval, if it is longer."""
    global _before
    with _lock:
        if not _workers:
            _before = sys.getswitchinterval()
        _workers.add(worker)
        sys.setswitchinterval(min(_before, INTERVAL_SECONDS))


def end(worker: threading.Thread) -> None:
    """A worker has ended: put the interval back after the last one.

    Harmless for one that has not begun, since Ctrl-C may come while it is being started.
    """
    with _lock:
        if worker in _workers:
            _workers.remove(worker)
            if not _workers:
                sys.setswitchinterval(_before)
