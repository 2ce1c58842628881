"""Keep a stream busy for a while, so that a race that is usually hidden is lost.

On the stand-in driver the work is a pause; on a GPU it is a row of large copies within
the device, whose time is measured first. Both may be queued from any thread.
"""

from __future__ import annotations

import math
import time

import pytest

import brainstorm_dbuf as dbuf

BLOCK_BYTES = 4 << 30


class FakeSlow:
    def __init__(self, fake, context):
        self._fake, self._context = fake, context

    def __call__(self, stream, ms):
        handle = 0 if stream is None else stream.handle
        self._fake.spin(handle, ms, self._context)


class RealSlow:
    """Copies of one large block to another; they take about 2 ms each on an H200."""

    def __init__(self):
        self._blocks = dbuf.mem_alloc(BLOCK_BYTES), dbuf.mem_alloc(BLOCK_BYTES)
        self._stream = dbuf.Stream()
        self._copy(self._stream)
        self._stream.synchronize()
        started = time.perf_counter()
        for _ in range(5):
            self._copy(self._stream)
        self._stream.synchronize()
        self._ms_a_copy = (time.perf_counter() - started) * 1000 / 5

    def __call__(self, stream, ms):
        for _ in range(math.ceil(ms / self._ms_a_copy)):
            self._copy(stream)

    def _copy(self, stream):
        dest, source = self._blocks
        dbuf.memcpy_dtod_async(dest, source, BLOCK_BYTES, stream)

    def close(self):
        self._stream.close()
        for block in self._blocks:
            block.free()


@pytest.fixture
def slow(driver):
    """Return a function that queues so many milliseconds of work on a stream.

    The stream is one of ours, or None for the NULL stream.
    """
    if driver.fake is not None:
        yield FakeSlow(driver.fake, driver.context)
        return
    made = RealSlow()
    yield made
    made.close()
