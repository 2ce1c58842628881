"""What the machine can do, measured from C (feed_floor.c): the bounds of a feed."""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable

import brainstorm_dbuf as dbuf
import numpy as np
from in_c import build_c, driver_entry

# As in feed_floor.c.
CHUNK = 2 << 20
RING = 4

# Beyond, a pass is shorter pieces: the rate does not change any more.
LARGEST_COPY = 256 << 20

_pointer = ctypes.c_void_p
_number = ctypes.c_ulonglong
_size = ctypes.c_size_t
_int = ctypes.c_int


class _Driver(ctypes.Structure):
    _fields_ = [
        (name, _pointer)
        for name in (
            "context",
            "stream",
            "set_current",
            "synchronize",
            "copy",
            "copy_2d",
            "record",
            "wait",
        )
    ]


_ENTRIES = {
    "set_current": ("cuCtxSetCurrent", 4000),
    "synchronize": ("cuStreamSynchronize", 2000),
    "copy": ("cuMemcpyHtoDAsync", 3020),
    "copy_2d": ("cuMemcpy2DAsync", 3020),
    "record": ("cuEventRecord", 2000),
    "wait": ("cuEventSynchronize", 2000),
}


class Floor:
    """Rates of this machine; of its device too if there is a CUDA context.

    All methods return the seconds of one minibatch; `passes` are made in a row.

    Args:
        context: the CUDA context to measure in, current in this thread; or None.
        nbytes: the largest minibatch in float32.
        threads: the most threads that :meth:`pipeline` will be asked for.
    """

    def __init__(self, context: dbuf.Context | None, nbytes: int, threads: int) -> None:
        self._library = build_c(
            "feed_floor.c",
            ("floor_link", "floor_rows", "floor_stage", "floor_pipeline"),
            "-O3",
            "-march=native",
            "-pthread",
        )
        self._driver = None
        if context is None:
            self.dest = np.zeros(nbytes, np.uint8)
            return
        chunks = threads * RING
        self.dest = dbuf.pagelocked_zeros(
            max(min(nbytes, LARGEST_COPY), chunks * CHUNK), np.uint8, context=context
        )
        self._device = dbuf.mem_alloc(max(nbytes, self.dest.nbytes), context)
        self._stream = dbuf.Stream(context)
        self._events = [dbuf.Event(context) for _ in range(chunks)]
        self._event_handles = (_pointer * chunks)(*(e.handle for e in self._events))
        entries = {name: driver_entry(*asked) for name, asked in _ENTRIES.items()}
        self._driver = _Driver(context.handle, self._stream.handle, **entries)

    def link(self, nbytes: int, passes: int) -> float:
        """Page-locked memory to the device."""
        piece = min(nbytes, LARGEST_COPY, self.dest.nbytes)
        pieces = max(1, round(passes * nbytes / piece))
        seconds = self._call(
            "floor_link",
            ctypes.byref(self._driver),
            _number(int(self._device)),
            _pointer(self.dest.ctypes.data),
            _size(piece),
            _int(pieces),
        )
        return seconds * nbytes / piece

    def rows(self, row: int, passes: int) -> tuple[float, int]:
        """Every other row of page-locked memory; returns the bytes of a pass too."""
        rows = self.dest.nbytes // (2 * row)
        seconds = self._call(
            "floor_rows",
            ctypes.byref(self._driver),
            _number(int(self._device)),
            _pointer(self.dest.ctypes.data),
            _size(row),
            _size(rows),
            _int(passes),
        )
        return seconds, rows * row

    def stage(self, batches: list[np.ndarray], threads: int, passes: int) -> float:
        """Ordinary memory, float32 or float64, to (page-locked) memory."""
        nbytes = 4 * batches[0].size
        assert nbytes <= self.dest.nbytes
        return self._call(
            "floor_stage",
            _pointer(self.dest.ctypes.data),
            *_source(batches),
            _int(threads),
            _int(passes),
        )

    def pipeline(self, batches: list[np.ndarray], threads: int, passes: int) -> float:
        """Ordinary memory, float32 or float64, to the device, in chunks."""
        assert threads * RING <= len(self._events)
        return self._call(
            "floor_pipeline",
            ctypes.byref(self._driver),
            _number(int(self._device)),
            _pointer(self.dest.ctypes.data),
            self._event_handles,
            *_source(batches),
            _int(threads),
            _int(passes),
        )

    def _call(self, name: str, *arguments: object) -> float:
        nanoseconds = getattr(self._library, name)(*arguments)
        if nanoseconds < 0:
            raise RuntimeError(f"{name}: the driver refused, or no thread started")
        return nanoseconds * 1e-9


def median(measure: Callable[[int], float], seconds: float = 0.06) -> float:
    """Return the median of three of `measure(passes)`, each about so long."""
    once = measure(1)
    passes = max(1, min(10_000, int(seconds / once)))
    return statistics.median(measure(passes) for _ in range(3))


def _source(batches: list[np.ndarray]) -> tuple[object, ...]:
    """Return the arguments that tell of minibatches that lie one behind the other."""
    first = batches[0]
    assert first.flags.c_contiguous and first.dtype in (np.float32, np.float64)
    step = batches[-1].ctypes.data - first.ctypes.data
    assert step == (len(batches) - 1) * first.nbytes
    return (
        _pointer(first.ctypes.data),
        _size(4 * first.size),
        _int(len(batches)),
        _int(first.dtype == np.float64),
    )
