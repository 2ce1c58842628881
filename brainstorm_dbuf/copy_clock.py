"""The times of copies to the device, by its own events, on the host's clock."""

from __future__ import annotations

import math
from time import perf_counter

import numpy as np

from . import _cuda
from .timings import BatchTimes

# Large enough for the link's full rate (it is reached at some megabytes).
PROBE_BYTES = 16 << 20
PROBES = 5


class CopyClock:
    """Where the host's clock stood when the copy stream passed an event.

    Elapsed times between events are single precision milliseconds
    (``cuEventElapsedTime``): after an hour the place of a copy among the host's times is
    right to a quarter of one, its length always.
    """

    def __init__(self, context: _cuda.Context, stream: _cuda.Stream) -> None:
        self.context = context
        self._event = _cuda.Event(context, timing=True).record(stream)
        self._event.synchronize()
        self._seconds = perf_counter()

    def seconds(self, event: _cuda.Event) -> float:
        return self._seconds + self._event.elapsed_time(event) / 1e3


class CopyTimer:
    """Times the copies of one back buffer, one minibatch after another."""

    def __init__(self, clock: CopyClock) -> None:
        self._clock = clock
        self._begin = _cuda.Event(clock.context, timing=True)
        self._end = _cuda.Event(clock.context, timing=True)
        # Of the minibatch whose copies were timed last, until they are told.
        self.times: BatchTimes | None = None

    def begin(self, stream: _cuda.Stream) -> None:
        self.tell()
        self._begin.record(stream)

    def end(self, stream: _cuda.Stream) -> None:
        self._end.record(stream)

    def tell(self) -> None:
        """Put down when the last copies ran, if they are done."""
        times, self.times = self.times, None
        if times is not None and self._end.query():
            times.copy_begin = self._clock.seconds(self._begin)
            length = self._begin.elapsed_time(self._end) / 1e3
            times.copy_end = times.copy_begin + length


def link_rate(context: _cuda.Context, stream: _cuda.Stream) -> float:
    """Return what the link carries to the device from page-locked memory, in bytes/s.

    The best of some copies; NaN where memory for them is short.
    """
    try:
        source = _cuda.pagelocked_empty(PROBE_BYTES, np.uint8, context=context)
        dest = _cuda.mem_alloc(PROBE_BYTES, context)
    except MemoryError:
        return math.nan
    begin, end = (_cuda.Event(context, timing=True) for _ in range(2))
    milliseconds = []
    for _ in range(PROBES):
        begin.record(stream)
        _cuda.memcpy_htod_async(dest, source, stream)
        end.record(stream)
        end.synchronize()
        milliseconds.append(begin.elapsed_time(end))
    # The stand-in for a device may take no time at all.
    return PROBE_BYTES / min(milliseconds) * 1e3 if min(milliseconds) else math.nan
