"""Keep a stream busy for a while, so that a race that is usually hidden is lost.

On the stand-in driver the work is a pause; on a GPU it is a row of large copies within
the device, whose time is measured first. Both may be queued from any thread.
"""

from __future__ import annotations

import ctypes
import math
import os
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


def driver_entry(path, name, version, *argtypes):
    """Return a function of the driver library, found as every binding finds it."""
    library = ctypes.CDLL(path)
    find = library.cuGetProcAddress_v2
    find.argtypes = [
        ctypes.c_char_p,
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.c_int,
        ctypes.c_uint64,
        ctypes.c_void_p,
    ]
    address = ctypes.c_void_p()
    assert find(name.encode(), address, version, 0, None) == 0
    return ctypes.CFUNCTYPE(ctypes.c_int, *argtypes)(address.value)


class RealSlow:
    """Copies of one large block to another; they take about 2 ms each on an H200.

    Made by the driver itself, so that the binding keeps no account of them.
    """

    def __init__(self):
        self._blocks = dbuf.mem_alloc(BLOCK_BYTES), dbuf.mem_alloc(BLOCK_BYTES)
        self._call = driver_entry(
            os.environ.get("BRAINSTORM_DBUF_LIBCUDA", "libcuda.so.1"),
            "cuMemcpyDtoDAsync",
            3020,
            ctypes.c_uint64,
            ctypes.c_uint64,
            ctypes.c_size_t,
            ctypes.c_void_p,
        )
        with dbuf.Stream() as stream:
            self._copy(stream)
            stream.synchronize()
            started = time.perf_counter()
            for _ in range(5):
                self._copy(stream)
            stream.synchronize()
            self._ms_a_copy = (time.perf_counter() - started) * 1000 / 5

    def __call__(self, stream, ms):
        for _ in range(math.ceil(ms / self._ms_a_copy)):
            self._copy(stream)

    def _copy(self, stream):
        dest, source = self._blocks
        handle = None if stream is None else stream.handle
        # In the context that is current in this thread.
        assert self._call(int(dest), int(source), BLOCK_BYTES, handle) == 0

    def close(self):
        dbuf.Context.current().synchronize()
        for block in self._blocks:
            block.free()
        self._blocks = ()


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
