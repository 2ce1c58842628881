"""Calls of the binding whose n-th allocation fails: a program of its own.

    python memory_attack.py MOST [NAME...]

For each call below (all, or those whose names contain one of NAME..., and none of
-NAME...) the n-th allocation of memory on the host fails, by itself and with all that
follow, for n = 0, 1, 2, ... until there is none left; at most MOST of them a call, then
spread over its allocations. Which call it is is written to standard error before it
begins. On the stand-in driver only.

A call must raise MemoryError, or what it would have raised anyway; where it does not
need what it did not get, its result and the arrays must be as ever. Then it works, and
afterwards nothing of ours is left alive, nothing damaged or reported as unraisable.
"""

from __future__ import annotations

import _imp
import contextlib
import ctypes
import gc
import importlib.util
import os
import pickle
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import traceback
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np

import conftest  # noqa: F401  (first: it chooses the driver)
import brainstorm_dbuf as dbuf
from brainstorm_dbuf import _cpuop, _cuda
from fake_cuda import control

SOURCE = Path(__file__).with_name("failing_allocator.c")
KIB, MIB = 1 << 10, 1 << 20
ALL = 1 << 40
MOST_ALLOCATIONS = 10000  # of any call
ADDRESS = re.compile("0x[0-9a-f]+")
# How pickle and NumPy's macro for its API say that memory was short.
NOT_OURS = ["errors' failed", "multiarray failed to import"]
MODES = {"alone": 1, "and all after it": ALL}


def build_allocator(folder: Path) -> Path:
    """Compile failing_allocator.c and return its path."""
    library = folder / "failing_allocator.so"
    command = shlex.split(os.environ.get("CC", "cc"))
    command += "-std=c11 -O1 -Wall -Wextra -Werror -fPIC -shared".split()
    command += [f"-I{sysconfig.get_path('include')}", "-o", str(library), str(SOURCE)]
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    subprocess.run(command, check=True, env=environment)
    return library


class Allocator:
    """failing_allocator.c, from Python."""

    def __init__(self, path):
        library = ctypes.PyDLL(str(path))
        self._call = library.call_without_memory
        self._call.restype = ctypes.py_object
        self._call.argtypes = [ctypes.py_object] * 3 + [ctypes.c_long] * 2
        self._count = library.allocations
        self._count.restype = ctypes.c_long

    def call(self, function, first=ALL, times=0):
        """Call a partial; return its result."""
        kwargs = function.keywords or None
        return self._call(function.func, function.args, kwargs, first, times)

    def count(self):
        """Return how many allocations the last call has asked for."""
        return self._count()


# ---- The calls ----

CALLS = {}


def call(name):
    """Name a function that takes the Bench and gives (partial, look).

    look, of the result, gives what must be as ever; None if that is the result's type.
    """

    def add(prepare):
        assert name not in CALLS
        CALLS[name] = prepare
        return prepare

    return add


def add(name, prepare):
    call(name)(prepare)


def same(value):
    """Of results that compare."""
    return value


def bytes_of(*arrays):
    """Return a look at arrays, of the host or the device, whatever is returned."""

    def look(result):
        _cuda.Context.current().synchronize()
        return [np.asarray(array).tobytes() for array in arrays]

    return look


def memory_of(memory):
    """Return a look at device memory."""

    def look(result):
        _cuda.Context.current().synchronize()
        array = np.empty(memory.nbytes, "u1")
        _cuda.memcpy_dtoh(array, memory)
        return array.tobytes()

    return look


def zeroed(nbytes):
    memory = _cuda.mem_alloc(nbytes)
    _cuda.memset_d8(memory, 0, nbytes)
    _cuda.Context.current().synchronize()  # what follows is on a stream of its own
    return memory


def pinned(values, dtype="f4"):
    values = np.asarray(values, dtype)
    array = _cuda.pagelocked_empty(values.shape, dtype)
    array[...] = values
    return array


def interface(array, **more):
    return SimpleNamespace(
        owner=array, __cuda_array_interface__={**array.__cuda_array_interface__, **more}
    )


def plain(function, *args, look=None, **kwargs):
    return lambda b: (partial(function, *args, **kwargs), look)


# Objects and what they say of themselves.
add("driver_version", plain(_cuda.driver_version, look=same))
add("device_count", plain(_cuda.device_count, look=same))
add("sysinfo", plain(_cuda.sysinfo, look=same))
add("live_objects", plain(_cuda.live_objects))
add("Device", plain(_cuda.Device, 0, look=same))
add("Device, wrong", plain(_cuda.Device, 7))
add("Device.attribute", lambda b: (partial(_cuda.Device(0).attribute, 16), same))
add("Context.current", plain(_cuda.Context.current, look=same))
add("Context.primary", plain(_cuda.Context.primary, 1))
add(
    "Context.from_handle",
    lambda b: (partial(_cuda.Context.from_handle, b.handle, owner=b), repr),
)
add("Context, new handle", plain(_cuda.Context.from_handle, 0x1230))
add("Context.synchronize", lambda b: (b.busy().context.synchronize, None))
add("Context.push", lambda b: (b.context.push, lambda r: b.context.pop()))
add("Context.__enter__", lambda b: (b.context.__enter__, lambda r: b.context.pop()))
add("Stream", plain(_cuda.Stream))
add("Stream, options", plain(_cuda.Stream, None, non_blocking=False, priority=-1))
add("Stream.legacy", plain(_cuda.Stream.legacy))
add(
    "Stream.from_handle",
    lambda b: (partial(_cuda.Stream.from_handle, b.stream.handle, owner=b), None),
)
add("Stream.record", lambda b: (b.stream.record, None))
add(
    "Stream.wait_event",
    lambda b: (partial(b.stream.wait_event, b.stream.record()), None),
)
add("Stream.synchronize", lambda b: (b.busy().synchronize, None))
add("Stream.query", lambda b: (b.stream.query, None))
add("Stream.close", lambda b: (b.busy().close, None))
add("Stream, protocol", lambda b: (partial(b.stream.__cuda_stream__), same))
add("Event", plain(_cuda.Event, timing=True, blocking_sync=True))
add("Event.record", lambda b: (partial(_cuda.Event().record, b.stream), None))
add(
    "Event.record, handle",
    lambda b: (partial(_cuda.Event().record, b.stream.handle), None),
)
add(
    "Event.record, protocol",
    lambda b: (
        partial(
            _cuda.Event().record,
            SimpleNamespace(__cuda_stream__=b.stream.__cuda_stream__),
        ),
        None,
    ),
)
add("Event.elapsed_time", lambda b: (partial(b.timed().elapsed_time, b.timed()), None))
add(
    "Event.elapsed_time, unrecorded",
    lambda b: (partial(b.timed().elapsed_time, _cuda.Event(timing=True)), None),
)
add("Event.synchronize", lambda b: (b.busy().record().synchronize, None))


# Properties and repr of each kind of object, one by one.
def objects(b):
    ring = _cuda.StagingRing(_cuda.pagelocked_empty((64,)), 4)
    return {
        "Device": b.device,
        "Context": b.context,
        "Stream": b.stream,
        "Event": b.stream.record(),
        "DeviceMemory": b.memory,
        "PageLockedMemory": b.locked.base,
        "RegisteredMemory": b.registered.base,
        "StagingRing": ring,
        "DeviceArray": b.engine.zeros((2, 3))[:, 1:],
    }


def add_properties():
    for kind in objects_there():
        described = vars(getattr(_cuda, kind))
        for name, value in described.items():
            if hasattr(value, "__set__") and not callable(value):
                prepare = lambda b, k=kind, n=name: (
                    partial(getattr, objects(b)[k], n),
                    None,
                )
                add(f"{kind}.{name}", prepare)
        add(f"repr of {kind}", lambda b, k=kind: (partial(repr, objects(b)[k]), None))
        add(f"hash of {kind}", lambda b, k=kind: (partial(hash, objects(b)[k]), None))
        add(
            f"pickle {kind}",
            lambda b, k=kind: (partial(pickle.dumps, objects(b)[k]), None),
        )


def objects_there():
    return [
        "Device",
        "Context",
        "Stream",
        "Event",
        "DeviceMemory",
        "PageLockedMemory",
        "RegisteredMemory",
        "StagingRing",
        "DeviceArray",
    ]


def closed(thing):
    """Return a closed object of a kind."""
    getattr(thing, "free" if isinstance(thing, _cuda.DeviceMemory) else "close")()
    return thing


add("Stream, closed", lambda b: (closed(_cuda.Stream()).synchronize, None))
add("Event, closed", lambda b: (closed(_cuda.Event()).query, None))
add("DeviceMemory, closed", lambda b: (partial(int, closed(_cuda.mem_alloc(4))), None))
add(
    "StagingRing, closed",
    lambda b: (
        partial(
            closed(_cuda.StagingRing(_cuda.pagelocked_empty(64), 4)).memcpy_htod_async,
            b.memory,
            np.zeros(2),
        ),
        None,
    ),
)

# Memory.
add("mem_alloc", plain(_cuda.mem_alloc, 64))
add("mem_alloc, index", plain(_cuda.mem_alloc, np.int64(64)))
add("mem_alloc, too much", plain(_cuda.mem_alloc, 1 << 50))
add("mem_get_info", plain(_cuda.mem_get_info))
add("DeviceMemory.free", lambda b: (_cuda.mem_alloc(64).free, None))


def shape_of(result):
    return result.shape, result.dtype, result.flags.c_contiguous


add("pagelocked_empty", plain(_cuda.pagelocked_empty, (4, 2), "f4", look=shape_of))
add(
    "pagelocked_empty, dtype",
    plain(_cuda.pagelocked_empty, [3, 2], "i2", order="F", mem_flags=1, look=shape_of),
)
add(
    "pagelocked_empty, fields",
    plain(
        _cuda.pagelocked_empty, 3, np.dtype([("a", "f4"), ("b", "i2")]), look=shape_of
    ),
)
add("pagelocked_empty, none", plain(_cuda.pagelocked_empty, (0, 2), look=shape_of))
add("pagelocked_empty, objects", plain(_cuda.pagelocked_empty, 2, "O"))
add("pagelocked_empty, shape", plain(_cuda.pagelocked_empty, (2, -1)))
add("pagelocked_empty, big", plain(_cuda.pagelocked_empty, (1 << 46,)))
add("pagelocked_zeros", plain(_cuda.pagelocked_zeros, 5, look=np.ndarray.tobytes))
add(
    "pagelocked_empty_like",
    plain(
        _cuda.pagelocked_empty_like,
        np.zeros((2, 3, 4)).transpose(2, 0, 1),
        look=lambda a: (a.shape, a.strides, a.dtype),
    ),
)
add(
    "register_host_memory",
    lambda b: (
        partial(_cuda.register_host_memory, np.ones((3, 4))),
        np.ndarray.tobytes,
    ),
)
add(
    "RegisteredMemory.unregister",
    lambda b: (_cuda.register_host_memory(np.zeros(9)).base.unregister, None),
)
add("is_pagelocked", lambda b: (partial(_cuda.is_pagelocked, b.locked[1:]), same))
add("is_pagelocked, not", plain(_cuda.is_pagelocked, np.zeros(4), look=same))
add("extent", plain(_cuda.extent, np.zeros((4, 4))[::-1, ::2]))
add("row_bytes", plain(_cuda.row_bytes, np.zeros((4, 4))[:, :2], look=same))
add(
    "has_signature",
    plain(
        _cuda.has_signature,
        {"a": np.zeros((2, 1000)), "b": np.zeros(3)},
        (("a", (2, 1000), np.dtype("f8")), ("b", (3,), np.dtype("f8"))),
        look=same,
    ),
)

# Copies: each destination kind, source kind and stream kind.
SOURCES = {
    "array": lambda b: np.arange(64, dtype="f4"),
    "page-locked": lambda b: pinned(np.arange(64)),
    "registered": lambda b: b.registered[:64],
    "large": lambda b: b.large,
    "bytes": lambda b: bytes(range(256)),
    "memoryview": lambda b: memoryview(np.arange(64, dtype="f4")),
    "swapped": lambda b: np.arange(64, dtype=">f4"),
    "columns": lambda b: np.zeros((64, 2), "f4")[:, 0],
    "list": lambda b: [1, 2],
}
STREAMS = {
    "Stream": lambda b: b.stream,
    "busy": lambda b: b.busy(),
    "NULL": lambda b: None,
    "handle": lambda b: b.stream.handle,
    "protocol": lambda b: SimpleNamespace(__cuda_stream__=b.stream.__cuda_stream__),
    "own Stream": lambda b: _cuda.Stream(),
    "object": lambda b: object(),
}
ENDS = {
    "memory": lambda m: m,
    "address": int,
    "interface": interface,
    "strided": lambda m: interface(m, shape=(4, 4), strides=(4096, 1)),
    "reversed": lambda m: interface(m, strides=(-1,)),
    "masked": lambda m: interface(m, mask=m),
    "read-only": lambda m: interface(m, data=(int(m), True)),
    "doubles": lambda m: interface(m, shape=(8,), typestr="<f8"),
    "object": lambda m: object(),
}


def add_copies():
    for source, make in SOURCES.items():

        def htod(b, make=make):
            memory = zeroed(MIB)
            return partial(_cuda.memcpy_htod, memory, make(b)), memory_of(memory)

        add(f"memcpy_htod, {source}", htod)
    for source, make in SOURCES.items():
        for kind, stream in STREAMS.items():
            if kind not in ("Stream", "NULL") and source not in (
                "page-locked",
                "array",
            ):
                continue

            def htod_async(b, make=make, stream=stream):
                memory = zeroed(MIB)
                copy = partial(_cuda.memcpy_htod_async, memory, make(b), stream(b))
                return copy, memory_of(memory)

            add(f"memcpy_htod_async, {source}, {kind}", htod_async)
    for end, wrap in ENDS.items():

        def to_end(b, wrap=wrap):
            memory = zeroed(16)
            source = pinned([1, 2, 3, 4])
            if wrap is int:
                source = source[:4]
            copy = partial(_cuda.memcpy_htod_async, wrap(memory), source, b.stream)
            return copy, memory_of(memory)

        def from_end(b, wrap=wrap):
            memory = zeroed(16)
            _cuda.memset_d8(memory, 7, 16)
            dest = pinned([0, 0, 0, 0])
            copy = partial(_cuda.memcpy_dtoh_async, dest, wrap(memory), b.stream)
            return copy, lambda r: (memory_of(memory)(r), dest.tobytes())

        def between(b, wrap=wrap):
            memory, other = zeroed(16), zeroed(16)
            _cuda.memset_d8(memory, 7, 16)
            copy = partial(_cuda.memcpy_dtod_async, wrap(other), wrap(memory), 16)
            return copy, memory_of(other)

        def set_end(b, wrap=wrap):
            memory = zeroed(16)
            copy = partial(_cuda.memset_d16_async, wrap(memory), 7, 2, b.stream)
            return copy, memory_of(memory)

        def set_now(b, wrap=wrap):
            memory = zeroed(16)
            return partial(_cuda.memset_d32, wrap(memory), 7, 2), memory_of(memory)

        def rows(b, wrap=wrap):
            memory, source = zeroed(16), pinned(np.arange(8).reshape(2, 4))[:, :2]
            copy = partial(_cuda.memcpy_htod_rows_async, wrap(memory), source, b.stream)
            return copy, memory_of(memory)

        def rows_2d(b, wrap=wrap):
            memory, other = zeroed(16), zeroed(16)
            _cuda.memset_d8(memory, 7, 16)
            copy = partial(
                _cuda.memcpy_dtod_2d_async, wrap(other), 8, wrap(memory), 4, 4, 2
            )
            return copy, memory_of(other)

        add(f"memcpy_htod_async to {end}", to_end)
        add(f"memcpy_dtoh_async from {end}", from_end)
        add(f"memcpy_dtod_async of {end}", between)
        add(f"memcpy_dtod_2d_async of {end}", rows_2d)
        add(f"memset_d16_async of {end}", set_end)
        add(f"memset_d32 of {end}", set_now)
        add(f"memcpy_htod_rows_async to {end}", rows)


def staged(src, dtype=None, of="ring", **more):
    def prepare(b):
        source = src(b)
        wanted = source.dtype.newbyteorder("=") if dtype is None else np.dtype(dtype)
        memory = zeroed(max(source.size * wanted.itemsize, 1))
        ring = b.ring if of == "ring" else _cuda.StagingRing(pinned(np.zeros(64)), 4)
        copy = partial(ring.memcpy_htod_async, memory, source, dtype, b.stream, **more)
        return copy, memory_of(memory)

    return prepare


RNG = np.random.default_rng(0)
VALUES = RNG.integers(0, 100, (40, 30))
add(
    "StagingRing",
    lambda b: (partial(_cuda.StagingRing, _cuda.pagelocked_empty((64,)), 4), None),
)
add("StagingRing, not locked", plain(_cuda.StagingRing, np.zeros(64), 4))
add(
    "StagingRing.close",
    lambda b: (_cuda.StagingRing(_cuda.pagelocked_empty((64,)), 4).close, None),
)
add("staging", staged(lambda b: VALUES.astype("f4")))
add("staging, cast", staged(lambda b: VALUES.astype("f8"), "f4"))
add("staging, dtype by name", staged(lambda b: VALUES.astype("i2"), "float32"))
add("staging, swapped", staged(lambda b: VALUES.astype(">i4")))
add("staging, strided cast", staged(lambda b: VALUES.astype("f8").T[::2], "f4"))
add("staging, by NumPy", staged(lambda b: VALUES.astype("S3"), "f4"))
add("staging, of long double", staged(lambda b: VALUES.astype("g"), "f4"))
add("staging, threads", staged(lambda b: np.ones(600000), "f4", threads=3))
add("staging, a small ring", staged(lambda b: VALUES.astype("f8"), "f4", of="small"))
add("staging, nothing", staged(lambda b: np.zeros((0, 3))))


def packed(count):
    def prepare(b):
        sources = [VALUES.astype(dtype) for dtype in ("f4", "f8", "i2")][:count]
        dtypes = ["f4", np.dtype("f4"), "i2"][:count]
        memory = zeroed(16 * KIB)
        args = memory, sources, [0, 5000, 10000][:count], dtypes, b.stream
        return partial(b.ring.memcpy_htod_packed_async, *args), memory_of(memory)

    return prepare


add("staging, packed", packed(3))
add("staging, packed, one", packed(1))
add("staging, packed, none", packed(0))


def stage(make, dtype="f4", **more):
    def prepare(b):
        source = make()
        dest = np.zeros(source.shape, dtype)
        return partial(_cuda.stage, dest, source, **more), bytes_of(dest)

    return prepare


add("stage", stage(lambda: VALUES.astype("f4")))
add("stage, cast", stage(lambda: VALUES.astype("f8").T))
add("stage, by NumPy", stage(lambda: VALUES.astype("S3")))
add("stage, of long double", stage(lambda: VALUES.astype("g")))
add("stage, swapped", stage(lambda: VALUES.astype(">u2")))
add("stage, threads", stage(lambda: np.ones(600000), threads=3))
add("stage, wrong", plain(_cuda.stage, np.zeros(3), np.zeros(4)))
add("stage, broadcast", stage(lambda: np.broadcast_to(VALUES[0], (4, 30))))

# ---- The handler ----


def floats(b, shape, seed=1):
    values = np.random.default_rng(seed).integers(1, 9, shape).astype("f4")
    return b.engine.create_from_numpy(values)


def operation(name, *args, cut=False, **kwargs):
    """A handler's operation: tuples are the shapes of its arrays."""

    def prepare(b):
        arrays = []

        def made(value):
            if not isinstance(value, Shape):
                return value
            shape = tuple(value)
            if cut and len(shape) > 1:
                wide = floats(b, (*shape[:-1], shape[-1] + 1), len(arrays))
                array = wide[..., :-1]
            else:
                array = floats(b, shape, len(arrays))
            arrays.append(array)
            return array

        given = [made(value) for value in args]
        function = getattr(_cuda.HandlerCore(5), name)
        return partial(function, *given, **kwargs), bytes_of(*arrays)

    return prepare


class Shape(tuple):
    """Of an array to be made."""


S = Shape((2, 3))
V, ROW, COLUMN = Shape((3,)), Shape((1, 3)), Shape((2, 1))
IMAGE, WINDOWS, ARGMAX = Shape((1, 4, 4, 2)), Shape((1, 2, 2, 2)), Shape((1, 2, 2, 2))
FILTERS, MAPS = Shape((3, 2, 2, 2)), Shape((1, 3, 3, 3))
OPERATIONS = {
    **{name: (S, S) for name in "abs_t log_t sign_t sqrt_t copy_to softmax_m".split()},
    **{name: (S, S) for name in "el rel sigmoid tanh".split()},
    **{name + "_deriv": (S, S, S, S) for name in "el rel sigmoid tanh".split()},
    **{name: (S, S, S) for name in "add_tt subtract_tt mult_tt mult_add_tt".split()},
    **{name: (S, S, S) for name in "divide_tt modulo_tt".split()},
    **{name: (S, S, S) for name in "add_into_if copy_to_if".split()},
    **{name: (S, ROW, S) for name in "add_mv subtract_mv mult_mv divide_mv".split()},
    "mult_add_mv": (S, ROW, S),
    **{name: (2.0, S, S) for name in "add_st mult_st mult_add_st".split()},
    "clip_t": (S, 2.0, 4.0, S),
    "fill": (S, 2.5),
    "fill_if": (S, 2.5, S),
    "fill_gaussian": (0.0, 1.0, S),
    "generate_probability_mask": (S, 0.5),
    "sum_t": (S, 0, V),
    "broadcast_t": (COLUMN, 1, S),
    "is_fully_finite": (S,),
    "binarize_v": (Shape((2, 1)), Shape((2, 9))),
    "index_m_by_v": (Shape((2, 9)), Shape((2, 1)), Shape((2, 1))),
    "merge_tt": (S, COLUMN, Shape((2, 4))),
    "split_add_tt": (Shape((2, 4)), S, COLUMN),
    "dot_mm": (S, Shape((3, 4)), Shape((2, 4))),
    "dot_add_mm": (S, Shape((4, 3)), Shape((2, 4)), False, True),
    "avgpool2d_forward_batch": (IMAGE, (2, 2), WINDOWS, 0, (2, 2)),
    "avgpool2d_backward_batch": (IMAGE, (2, 2), WINDOWS, 0, (2, 2), IMAGE, WINDOWS),
    "maxpool2d_forward_batch": (IMAGE, (2, 2), WINDOWS, 0, (2, 2), ARGMAX),
    "conv2d_forward_batch": (IMAGE, FILTERS, V, MAPS, 0, (1, 1)),
    "conv2d_backward_batch": (IMAGE, FILTERS, 0, (1, 1), IMAGE, MAPS, FILTERS, V),
}


def add_operations():
    for name, args in OPERATIONS.items():
        add(f"handler.{name}", operation(name, *args))
        add(f"handler.{name}, cut", operation(name, *args, cut=True))
        wrong = [Shape((5, 7)) if isinstance(a, Shape) else a for a in args[:-1]]
        last = Shape((2, 2, 2)) if isinstance(args[-1], Shape) else args[-1]
        add(f"handler.{name}, wrong", operation(name, *wrong, last))


@call("handler.maxpool2d_backward_batch")
def _(b):
    h = b.engine
    image, argmax = floats(b, IMAGE), h.zeros(ARGMAX)
    windows = h.zeros(WINDOWS)
    h.maxpool2d_forward_batch(image, (2, 2), windows, 0, (2, 2), argmax)
    deltas, out = h.zeros(IMAGE), floats(b, WINDOWS, 3)
    args = (image, (2, 2), windows, 0, (2, 2), argmax, deltas, out)
    return partial(h.maxpool2d_backward_batch, *args), bytes_of(deltas)


def got(array):
    return np.asarray(array).tobytes()


add("HandlerCore", lambda b: (partial(_cuda.HandlerCore, 7, 0, True), None))
add("HandlerCore, a new engine", plain(_cuda.HandlerCore, 7, 1))
add("HandlerCore, wrong", plain(_cuda.HandlerCore, 7, 9))
for name in ("zeros", "ones", "allocate"):
    look = got if name != "allocate" else lambda array: array.shape
    add(
        f"handler.{name}",
        lambda b, n=name, k=look: (partial(getattr(b.engine, n), (5, 300)), k),
    )
add("handler.zeros, a new size", lambda b: (partial(b.engine.zeros, 100003), got))
add("handler.zeros, too much", lambda b: (partial(b.engine.zeros, 1 << 44), None))
add("handler.zeros, list", lambda b: (partial(b.engine.zeros, [2, np.int8(3)]), got))
add("handler.zeros, text", lambda b: (partial(b.engine.zeros, "ab"), None))
add(
    "handler.create_from_numpy",
    lambda b: (partial(b.engine.create_from_numpy, VALUES), got),
)
add(
    "handler.create_from_numpy, int",
    lambda b: (partial(b.engine.create_from_numpy, VALUES.astype("i4").T), got),
)
add(
    "handler.get_numpy_copy",
    lambda b: (partial(b.engine.get_numpy_copy, floats(b, S)), got),
)
add("handler.pool_info", lambda b: (b.engine.pool_info, None))
add("handler.trim_pool", lambda b: (b.engine.trim_pool, None))
add("handler.synchronize", lambda b: (b.engine.synchronize, None))


@call("handler.set_from_numpy")
def _(b):
    array = b.engine.zeros((40, 30))
    return partial(b.engine.set_from_numpy, array, VALUES), bytes_of(array)


@call("handler.set_from_numpy, cut")
def _(b):
    array = b.engine.zeros((40, 31))
    return partial(b.engine.set_from_numpy, array[:, 1:], VALUES), bytes_of(array)


@call("handler.widen")
def _(b):
    source, array = floats(b, 12), b.engine.zeros((3, 3))
    return partial(b.engine.widen, array, source.ptr, "u1"), bytes_of(array)


@call("handler.widen, wrong")
def _(b):
    array = b.engine.zeros((3, 3))
    return partial(b.engine.widen, array, array.ptr, "c16"), bytes_of(array)


@call("handler.unpack")
def _(b):
    sources = floats(b, 12), b.engine.zeros(3)
    arrays = b.engine.zeros((3, 3)), b.engine.zeros((3, 3))
    args = arrays, [source.ptr for source in sources], ["u1", None]
    return partial(b.engine.unpack, *args), bytes_of(*arrays)


@call("handler.one_hot")
def _(b):
    source, array = b.engine.zeros(3), b.engine.zeros((3, 3))
    return partial(b.engine.one_hot, array, source.ptr), bytes_of(array)


add(
    "handler.wrap",
    lambda b: (partial(b.engine.wrap, b, b.memory.ptr, (2, 3)), lambda a: a.shape),
)
add(
    "handler.as_array",
    lambda b: (partial(b.engine.as_array, interface(floats(b, S))), got),
)
add(
    "handler.as_array, strided",
    lambda b: (
        partial(b.engine.as_array, interface(floats(b, Shape((4, 5)))[::2, 1:3])),
        got,
    ),
)
add(
    "handler.as_array, masked",
    lambda b: (partial(b.engine.as_array, interface(floats(b, S), mask=b)), None),
)
add(
    "handler.as_array, doubles",
    lambda b: (
        partial(b.engine.as_array, interface(floats(b, S), typestr="<f8")),
        None,
    ),
)
add("handler.as_array, none", lambda b: (partial(b.engine.as_array, 3), None))
add(
    "handler.from_dlpack",
    lambda b: (partial(b.engine.from_dlpack, floats(b, Shape((4, 5)))[::2, 1:3]), got),
)
add("handler.from_dlpack, none", lambda b: (partial(b.engine.from_dlpack, 3), None))
add(
    "handler.from_dlpack, host",
    lambda b: (partial(b.engine.from_dlpack, np.zeros(3, "f4")), None),
)
add("DeviceArray.__dlpack__", lambda b: (partial(floats(b, S).__dlpack__), None))
add(
    "DeviceArray.__dlpack__, all",
    lambda b: (
        partial(
            floats(b, S).__dlpack__,
            stream=-1,
            max_version=(1, 0),
            dl_device=(2, 0),
            copy=False,
        ),
        None,
    ),
)
add(
    "DeviceArray.__dlpack_device__",
    lambda b: (partial(floats(b, S).__dlpack_device__), same),
)
add("DeviceArray.get", lambda b: (floats(b, S).get, got))
add("DeviceArray.get, cut", lambda b: (floats(b, Shape((4, 5)))[:, ::2].get, got))
add("DeviceArray.copy", lambda b: (floats(b, Shape((4, 5)))[:, ::2].copy, got))
add(
    "DeviceArray.__array__",
    lambda b: (partial(floats(b, S).__array__, "f8", copy=True), got),
)
add("DeviceArray.reshape", lambda b: (partial(floats(b, S).reshape, 3, -1), got))
add("DeviceArray.reshape, wrong", lambda b: (partial(floats(b, S).reshape, 4), None))
KEYS = {
    "integer": 1,
    "slices": (slice(None, None, 2), slice(1, 2)),
    "ellipsis": (..., 0),
    "too many": (0, 0, 0),
    "outside": 9,
    "list": [1],
}


def add_keys():
    import operator

    for name, key in KEYS.items():
        add(
            f"DeviceArray[{name}]",
            lambda b, key=key: (partial(operator.getitem, floats(b, S), key), got),
        )

        def set_item(b, key=key):
            array = floats(b, S)
            return partial(operator.setitem, array, key, 2.0), bytes_of(array)

        def set_array(b, key=key):
            array = floats(b, S)
            return partial(operator.setitem, array, key, np.ones(1)), bytes_of(array)

        add(f"DeviceArray[{name}] = number", set_item)
        add(f"DeviceArray[{name}] = array", set_array)
    for name in "add sub mul truediv iadd isub imul itruediv pow".split():
        function = getattr(operator, name)
        for kind, other in {
            "array": lambda b: floats(b, S, 5),
            "row": lambda b: floats(b, V, 5),
            "number": lambda b: 2.0,
            "wrong": lambda b: floats(b, Shape((5,)), 5),
            "text": lambda b: "x",
        }.items():
            add(
                f"DeviceArray {name} {kind}",
                lambda b, f=function, o=other: (partial(f, floats(b, S), o(b)), got),
            )


# Layers whose passes are single calls: how the handler's operations are called.
FUSED = {
    "Recurrent": "recurrent",
    "Lstm": "lstm",
    "Clockwork": "recurrent",
    "ClockworkLstm": "lstm",
    "FullyConnected": "fully_connected",
    "SoftmaxCE": "softmax_ce",
}


def pass_arguments(kind, direction):
    """The arguments that a network's pass gives the handler."""
    import brainstorm as bs

    handler = dbuf.CudaHandler(1)
    inp = bs.layers.Input(
        out_shapes={"default": ("T", "B", 4), "targets": ("T", "B", 1)}
    )
    if kind == "SoftmaxCE":
        layer = bs.layers.SoftmaxCE(name="Layer")
        inp - "targets" >> "targets" - layer
        inp - "default" >> "default" - layer
        layer - "loss" >> bs.layers.Loss()
    else:
        layer = getattr(bs.layers, kind)(3, name="Layer")
        inp >> layer >> bs.layers.Loss()
    net = bs.Network.from_layer(inp)
    net.set_handler(handler)
    net.buffer = net._buffer_manager.resize(2, 2)
    full = net._buffer_manager.full_buffer
    values = np.random.default_rng(0).standard_normal(full.shape)
    handler.set_from_numpy(full, values.astype("f4"))
    given = []
    name = f"{FUSED[kind]}_{direction}"
    setattr(handler, name, lambda *args: given.append(args) or True)
    views = net.buffer.Layer
    getattr(net.layers["Layer"], f"{direction}_pass")(views)
    return getattr(_cuda.HandlerCore(1), name), given[0], full, net


def add_passes():
    for kind in FUSED:
        for direction in ("forward", "backward"):

            def prepare(b, kind=kind, direction=direction):
                function, args, full, net = pass_arguments(kind, direction)
                look = bytes_of(full)
                return partial(function, *args), lambda r: (net is None, look(r))

            add(f"handler, {kind} {direction}", prepare)


# ---- What the errors are made of ----

ERRORS = [
    lambda: _cuda.CudaError("cuCall", 7, "CUDA_ERROR_NAME", "detail"),
    lambda: _cuda.CudaMemoryError("cuCall", 2, "CUDA_ERROR_OUT_OF_MEMORY", "detail"),
    lambda: _cuda.DriverError("dlopen", 0, "DRIVER_NOT_FOUND"),
]
for number, make in enumerate(ERRORS):
    for protocol in (2, 5):
        add(
            f"pickle error {number}, {protocol}",
            lambda b, make=make, p=protocol: (
                partial(pickle.dumps, make(), p),
                lambda r: pickle.loads(r).args,
            ),
        )
        add(
            f"unpickle error {number}, {protocol}",
            lambda b, make=make, p=protocol: (
                partial(pickle.loads, pickle.dumps(make(), p)),
                same,
            ),
        )
    add(f"str of error {number}", lambda b, make=make: (partial(str, make()), same))


def failing(name, code, prepare):
    """A call in which the driver fails as well."""

    def both(b):
        made = prepare(b)
        b.fake.fail(name, 0, code)
        return made

    return both


for code in (2, 719):
    add(f"mem_alloc fails with {code}", failing("cuMemAlloc", code, CALLS["mem_alloc"]))
    add(
        f"Stream fails with {code}",
        failing("cuStreamCreateWithPriority", code, CALLS["Stream"]),
    )
    add(
        f"memcpy_htod fails with {code}",
        failing(
            "cuMemcpyHtoD",
            code,
            lambda b: (partial(_cuda.memcpy_htod, b.memory, b"1"), None),
        ),
    )
    add(
        f"a launch fails with {code}",
        failing("cuLaunchKernel", code, operation("add_tt", S, S, S)),
    )
    add(
        f"a copy through the ring fails with {code}",
        failing("cuMemcpyHtoDAsync", code, staged(lambda b: VALUES.astype("f8"), "f4")),
    )

# ---- _cpuop ----


def on_cpu(name, *args):
    def prepare(b):
        arrays = []

        def made(value):
            if not isinstance(value, Shape):
                return value
            arrays.append(RNG.integers(0, 3, value).astype("f4") * 0 + 1)
            return arrays[-1]

        given = [made(value) for value in args]
        return partial(getattr(_cpuop, name), *given), bytes_of(*arrays)

    return prepare


FLAT = (Shape((1, 32)), 4, 4, 2, 2, 2, 0, 0, 0, 0, 2, 2, Shape((4, 8)))
add("_cpuop.im2col", on_cpu("im2col", *FLAT))
add("_cpuop.col2im", on_cpu("col2im", FLAT[-1], *FLAT[1:-1], FLAT[0]))
POOL = (IMAGE, (2, 2), WINDOWS, 0, (2, 2))
add("_cpuop.maxpool_forward", on_cpu("maxpool_forward", *POOL, ARGMAX))
add(
    "_cpuop.maxpool_backward", on_cpu("maxpool_backward", *POOL, ARGMAX, IMAGE, WINDOWS)
)
add("_cpuop.avgpool_forward", on_cpu("avgpool_forward", *POOL))
add("_cpuop.avgpool_backward", on_cpu("avgpool_backward", *POOL, IMAGE, WINDOWS))
add(
    "_cpuop.avgpool_forward, list",
    on_cpu("avgpool_forward", IMAGE, [2, np.int64(2)], WINDOWS, 0, [2, 2]),
)
add(
    "_cpuop.avgpool_forward, wrong",
    on_cpu("avgpool_forward", IMAGE, (9, 9), WINDOWS, 0, (2, 2)),
)
add(
    "_cpuop._crop_images",
    lambda b: (
        partial(
            _cpuop._crop_images,
            np.ones((1, 2, 4, 4, 1), "f4"),
            2,
            2,
            np.zeros(2, "i8"),
            np.zeros(2, "i8"),
            np.zeros((1, 2, 2, 2, 1), "f4"),
        ),
        None,
    ),
)


# ---- The modules ----


def executed(module):
    def prepare(b):
        spec = importlib.util.spec_from_file_location(module.__name__, module.__file__)
        made = importlib.util.module_from_spec(spec)
        return partial(_imp.exec_dynamic, made), lambda r: sorted(vars(made))

    return prepare


def created(module):
    def prepare(b):
        spec = importlib.util.spec_from_file_location(module.__name__, module.__file__)
        return partial(_imp.create_dynamic, spec), None

    return prepare


for module in (_cuda, _cpuop):
    short = module.__name__.rpartition(".")[2]
    add(f"make module {short}", created(module))
    add(f"execute module {short}", executed(module))

add_properties()
add_copies()
add_operations()
add_keys()
add_passes()


# ---- The attack ----


class Fault(AssertionError):
    """A call did what no call may do."""


class Bench:
    """What the calls may use."""

    def __init__(self, allocator):
        self.allocator = allocator
        self.fake = control.FakeCuda(os.environ["BRAINSTORM_DBUF_LIBCUDA"])
        self.fake.reset()
        self.fake.set_device_count(2)
        self.fake.set_limits(64 * MIB, 64 * MIB)
        self.core = _cuda.HandlerCore(3)
        self.engine = self.core
        self.engine.context.push()
        self.context = _cuda.Context.current()
        self.handle = self.context.handle
        self.device = _cuda.Device(0)
        self.stream = _cuda.Stream()
        self.memory = _cuda.mem_alloc(MIB)
        self.locked = _cuda.pagelocked_zeros(16)
        self.large = _cuda.pagelocked_zeros(200 * KIB)
        self.registered = _cuda.register_host_memory(np.arange(4096, dtype="f4"))
        self.ring = _cuda.StagingRing(_cuda.pagelocked_empty((16 * KIB,)), 4)
        self.failures = 0
        gc.collect()
        gc.freeze()

    def busy(self):
        """A stream with copies in flight."""
        stream = _cuda.Stream()
        for source in (self.large, self.locked):
            _cuda.memcpy_htod_async(self.memory, source, stream)
        return stream

    def timed(self):
        event = _cuda.Event(timing=True).record(self.stream)
        event.synchronize()
        return event

    def settle(self):
        """Return the counts of all there is, once nothing is in flight."""
        self.stream.synchronize()
        self.context.synchronize()
        with contextlib.suppress(IndexError):
            self.engine.synchronize()
        gc.collect()
        self.engine.trim_pool()
        ours = {k: n for k, n in _cuda.live_objects().items() if k != "fences"}
        # Ledgers keep events to use them again.
        theirs = {k: n for k, n in self.fake.live().items() if k != "events"}
        return ours, theirs, self.fake.damage(), self.fake.current_context()

    def outcome(self, prepare, first=ALL, times=0):
        """Return (what was raised, what it looks like, allocations).

        A call that had no memory is made again with it; a Fault if that raises.
        """
        function, look = prepare(self)
        if not isinstance(function, partial):
            function = partial(function)
        error, result, count = self.call(function, first, times)
        seen = None
        if error is None:
            seen = type(result) if look is None else look(result)
        elif error[0] is MemoryError:
            error_with_memory, result, _ = self.call(function)
            if error_with_memory is None and look is not None:
                look(result)
            elif error_with_memory is not None:
                error = *error, *error_with_memory
        return error, seen, count

    def call(self, function, first=ALL, times=0):
        """Return (what was raised, result, allocations)."""
        error = result = None
        try:
            result = self.allocator.call(function, first, times)
        except Exception as caught:
            error = type(caught), str(caught)
            traceback.clear_frames(caught.__traceback__)
            caught.__traceback__ = None
        return error, result, self.allocator.count()

    def attack(self, name, most):
        """Return the number of allocations of a call; raise Fault."""
        prepare = CALLS[name]
        reported = []
        sys.unraisablehook = lambda info: reported.append(repr(info.exc_value))
        for _ in range(2):  # the first one makes what is kept for the next
            error, seen, count = self.outcome(prepare)
        before = self.settle()
        for mode, times in MODES.items():
            number, step = 0, 1
            while True:
                raised, result, asked = self.outcome(prepare, number, times)
                fault = self.judge(name, error, seen, raised, result)
                had_memory = asked <= number
                if fault is None and had_memory and not alike(raised, error):
                    fault = f"{raised} although there was memory"
                after = self.settle()
                if fault is None and after != before:
                    fault = f"{before} has become {after}"
                if fault is None and reported:
                    fault = f"unraisable: {reported}"
                if fault is None and number > MOST_ALLOCATIONS:
                    fault = "there is no end to them"
                if fault is not None:
                    raise Fault(f"{name}: allocation {number} fails {mode}: {fault}")
                if had_memory:
                    break
                self.failures += 1
                if number == 0 and count > most:
                    step = -(-count // most)
                number += step

    def judge(self, name, error, seen, raised, result):
        """Return what is wrong with an outcome, where `error` and `seen` are right."""
        if raised is None:
            if error is not None:
                return f"no error, instead of {error}"
            return None if result == seen else f"wrong result {result!r:.300}"
        if issubclass(raised[0], MemoryError):
            if raised[2:] and "fails with" not in name and not alike(raised[2:], error):
                return f"{raised[2:]} afterwards, instead of {error}"
            return None
        if alike(raised, error) or any(word in raised[1] for word in NOT_OURS):
            return None
        return f"{raised} instead of {error}"


def alike(error, other):
    """Whether two errors are the same but for the addresses in their texts."""
    if error is None or other is None:
        return error is other
    return error[0] is other[0] and ADDRESS.sub("", error[1]) == ADDRESS.sub(
        "", other[1]
    )


def is_wanted(name, parts):
    """Whether a name has one of the parts, and none of those with a - before it."""
    without = [part[1:] for part in parts if part.startswith("-")]
    of = [part for part in parts if not part.startswith("-")]
    return not any(part in name for part in without) and (
        not of or any(part in name for part in of)
    )


def main(most, *names):
    with tempfile.TemporaryDirectory() as folder:
        bench, calls, faults = Bench(Allocator(build_allocator(Path(folder)))), 0, 0
    for name in CALLS:
        if not is_wanted(name, names):
            continue
        os.write(2, f"{name}\n".encode())
        calls += 1
        try:
            bench.attack(name, int(most))
        except Fault as fault:
            faults += 1
            print(f"FAULT {fault}", flush=True)
    print(f"{calls} calls, {bench.failures} failures, {faults} faults", flush=True)
    return faults > 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
