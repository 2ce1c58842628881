"""What the tests of the binding share."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from brainstorm_dbuf import _cuda
from conftest import live_objects

MIB = 1 << 20
# How much longer programs may take under a sanitizer (tests/sanitize.py).
SLOWER = 8 if "FAKE_CUDA_SANITIZE" in os.environ else 1

# Garbage is collected around each test: leave out what the imports have made.
gc.collect()
gc.freeze()


@pytest.fixture
def leak_check(driver):
    """Fail a test after which more, or fewer, of our objects are alive than before."""
    gc.collect()
    before = live_objects()
    yield
    gc.collect()
    if driver.kind == "real":
        # What is in flight is let go when the context is waited for.
        _cuda.Context.current().synchronize()
    assert live_objects() == before


@pytest.fixture
def stream(request, leak_check):
    """A stream that is closed, and let go, before leak_check looks."""
    with _cuda.Stream() as made:
        yield made
    # pytest would keep it for longer than leak_check waits.
    request.node.funcargs.pop("stream", None)
    del made


def modes(driver):
    """When the stand-in driver runs what is queued; the real one knows by itself."""
    return [None] if driver.fake is None else ["late", "random", "eager"]


def set_mode(driver, mode):
    if mode is not None:
        driver.fake.mode(mode)


def source_of(size, dtype="f4", seed=0):
    """Return whole numbers below 100, which every dtype has."""
    rnd = np.random.default_rng(seed)
    return rnd.integers(0, 100, size).astype(dtype)


def read(memory, dtype="float32", count=None):
    """Return a copy of device memory as an ordinary array, once the context is idle."""
    _cuda.Context.current().synchronize()
    size = np.dtype(dtype).itemsize
    array = np.empty(memory.nbytes // size if count is None else count, dtype)
    _cuda.memcpy_dtoh(array, memory)
    return array


def device_array(values, dtype="float32"):
    """Return device memory that holds the values."""
    array = np.ascontiguousarray(values, dtype)
    memory = _cuda.mem_alloc(array.nbytes)
    _cuda.memcpy_htod(memory, array)
    # From ordinary memory it may still be on its way, and a stream need not wait for it.
    _cuda.Context.current().synchronize()
    return memory


def pinned(values, dtype="float32"):
    """Return a page-locked array that holds the values."""
    values = np.asarray(values, dtype)
    array = _cuda.pagelocked_empty(values.shape, dtype)
    array[...] = values
    return array


def foreign_view(array):
    """Return an array over the same memory that does not lead back to its owner."""
    bytes_there = (ctypes.c_char * array.nbytes).from_address(array.ctypes.data)
    bytes_there.owner = array
    return np.frombuffer(bytes_there, array.dtype)


def in_thread(function, *args):
    """Run a function in a bare thread; return its result or raise its error."""
    outcome = {}

    def target():
        try:
            outcome["result"] = function(*args)
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=target)
    thread.start()
    thread.join(30)
    assert not thread.is_alive(), "the thread hangs"
    error = outcome.pop("error", None)
    if error is not None:
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame
    return outcome.pop("result")


@contextlib.contextmanager
def unraisable_errors():
    """Collect the errors that deallocs report, as (call, name)."""
    reported = []
    hook = sys.unraisablehook
    sys.unraisablehook = lambda info: reported.append(
        (info.exc_value.call, info.exc_value.name)
    )
    try:
        yield reported
    finally:
        sys.unraisablehook = hook


def run_script(script, *args, env=None, timeout=30):
    """Run a Python script text under -X dev, warnings being errors."""
    return subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", script, *args],
        env=env,
        timeout=timeout * SLOWER,
        capture_output=True,
        text=True,
    )


class Interface:
    """An object of another library: memory on the device, by the array interface."""

    def __init__(self, owner, shape, typestr="<f4", read_only=False, **more):
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": typestr,
            "data": (int(owner), read_only),
            "version": 3,
            **more,
        }
