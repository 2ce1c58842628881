"""What an update is made of, by the handler's operations.

Two passes. In the first the clock on the wall runs around each call: what the host takes
to issue the operation, or to wait where it brings values back. In the second a CUDA
event is recorded before and after each call, while copies queued before hold the stream
up: the operations then follow each other without a gap, and the time between two events
is the device's, not that of a host which is late.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

HELD_BYTES = 128 << 20


@dataclass
class Op:
    calls: float = 0  # an update
    host_us: float = 0
    device_us: float = 0


@dataclass
class Profile:
    ops: dict[str, Op] = field(default_factory=lambda: defaultdict(Op))
    host_us: float = 0  # of an update, the clocks around its operations included
    device_us: float = 0  # from the first operation's start to the last one's end


class OpClock:
    """A handler's operations with a clock around each call from outside.

    To be put around the handler before a network gets it.
    """

    def __init__(self, handler: Any) -> None:
        self.handler = handler
        self._inside = False
        self._around: Callable[..., Any] = _just_call
        for name in dir(type(handler)):
            method = getattr(handler, name, None)
            if not name.startswith("_") and callable(method):
                if not isinstance(method, type):
                    setattr(handler, name, self._clocked(name, method))
        # brainstorm looks activation functions up in tables.
        for table in [v for v in vars(handler).values() if isinstance(v, dict)]:
            for key, function in table.items():
                if getattr(function, "__self__", None) is handler:
                    table[key] = self._clocked(function.__name__, function)

    def _clocked(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def clocked(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return method(*args, **kwargs)
            self._inside = True
            try:
                return self._around(name, method, args, kwargs)
            finally:
                self._inside = False

        return clocked

    def profile(
        self, train: Callable[[], Any], update: Callable[[], Any], updates: int
    ) -> Profile:
        """Return means over `updates`: of `update` on the host, `train` on the device.

        `update` is `train` and reading the loss, for which the host waits.
        """
        result = Profile()
        for _ in range(3):
            update()
        self._profile_host(result, update, updates)
        self._profile_device(result, train, min(updates, 5))
        result.ops = dict(result.ops)
        return result

    def _profile_host(
        self, result: Profile, update: Callable[[], Any], updates: int
    ) -> None:
        def around(name, method, args, kwargs):
            started = time.perf_counter_ns()
            try:
                return method(*args, **kwargs)
            finally:
                op = result.ops[name]
                op.host_us += (time.perf_counter_ns() - started) / 1e3 / updates
                op.calls += 1 / updates

        self._around = around
        started = time.perf_counter_ns()
        for _ in range(updates):
            update()
        result.host_us = (time.perf_counter_ns() - started) / 1e3 / updates
        self._around = _just_call

    def _profile_device(
        self, result: Profile, train: Callable[[], Any], updates: int
    ) -> None:
        import brainstorm_dbuf as dbuf
        import numpy as np

        stream = self.handler.stream
        spare: list[Any] = []
        recorded: list[tuple[str, Any, Any]] = []

        def event():
            made = spare.pop() if spare else dbuf.Event(stream.context, timing=True)
            return made.record(stream)

        def around(name, method, args, kwargs):
            started = event()
            try:
                return method(*args, **kwargs)
            finally:
                recorded.append((name, started, event()))

        with stream.context:
            source = dbuf.pagelocked_empty(HELD_BYTES, np.uint8)
            memory = dbuf.mem_alloc(HELD_BYTES)
            copy_seconds = []
            for _ in range(3):
                started = time.perf_counter()
                dbuf.memcpy_htod_async(memory, source, stream)
                stream.synchronize()
                copy_seconds.append(time.perf_counter() - started)
        # Twice what the host has taken: recording events takes time too.
        copies = 1 + int(2e-6 * result.host_us / statistics.median(copy_seconds))

        for number in range(1 + updates):
            for _ in range(copies):
                dbuf.memcpy_htod_async(memory, source, stream)
            self._around = around
            train()
            self._around = _just_call
            stream.synchronize()
            for name, started, ended in recorded if number else ():  # first: warm-up
                result.ops[name].device_us += (
                    started.elapsed_time(ended) * 1e3 / updates
                )
            if number and recorded:
                result.device_us += (
                    recorded[0][1].elapsed_time(recorded[-1][2]) * 1e3 / updates
                )
            for _, started, ended in recorded:
                spare += [started, ended]
            recorded.clear()


def _just_call(name, method, args, kwargs):
    return method(*args, **kwargs)


def table(profile: Profile) -> str:
    """Return the profile as lines of text, the longest operation first."""
    lines = [f"{'operation':<28}{'calls':>7}{'host us':>11}{'device us':>11}"]
    ops = sorted(profile.ops.items(), key=lambda item: -_longest(item[1]))
    for name, op in ops:
        lines.append(f"{name:<28}{op.calls:7.0f}{op.host_us:11.1f}{op.device_us:11.1f}")
    host = profile.host_us - sum(op.host_us for op in profile.ops.values())
    device = profile.device_us - sum(op.device_us for op in profile.ops.values())
    lines.append(f"{'between operations':<28}{'':>7}{host:11.1f}{device:11.1f}")
    lines.append(
        f"{'an update':<28}{'':>7}{profile.host_us:11.1f}{profile.device_us:11.1f}"
    )
    return "\n".join(lines)


def _longest(op: Op) -> float:
    return max(op.host_us, op.device_us)
