"""The stand-in driver keeps CUDA's rules and runs work as late as they allow.

These tests call its entry points straight through ctypes, as a C program would.
"""

from __future__ import annotations

import ctypes
import faulthandler
import itertools
import os
import resource
import shutil
import threading
import time
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path

import numpy as np
import pytest
from fake_cuda import FakeCuda, build_kernels, build_library, why_no_kernels
from hypothesis import given, settings
from hypothesis import strategies as st

SUCCESS = 0
INVALID_VALUE = 1
OUT_OF_MEMORY = 2
NOT_INITIALIZED = 3
NO_DEVICE = 100
INVALID_DEVICE = 101
INVALID_CONTEXT = 201
NO_BINARY_FOR_GPU = 209
INVALID_HANDLE = 400
NOT_FOUND = 500
NOT_READY = 600
CONTEXT_IS_DESTROYED = 709
ALREADY_REGISTERED = 712
NOT_REGISTERED = 713
COOPERATIVE_LAUNCH_TOO_LARGE = 720

NULL, LEGACY, PER_THREAD = 0, 1, 2
BLOCKING, NON_BLOCKING = 0, 1
DISABLE_TIMING = 2

HANDLE = ADDRESS = DEVICE_ADDRESS = c_void_p
OUT = c_void_p

# name: (version of the ABI, arguments)
SIGNATURES = {
    "cuInit": (2000, (c_uint,)),
    "cuDriverGetVersion": (2020, (POINTER(c_int),)),
    "cuGetErrorName": (6000, (c_int, POINTER(c_char_p))),
    "cuGetErrorString": (6000, (c_int, POINTER(c_char_p))),
    "cuDeviceGetCount": (2000, (POINTER(c_int),)),
    "cuDeviceGet": (2000, (POINTER(c_int), c_int)),
    "cuDeviceGetName": (2000, (c_char_p, c_int, c_int)),
    "cuDeviceTotalMem": (3020, (POINTER(c_size_t), c_int)),
    "cuDeviceGetAttribute": (2000, (POINTER(c_int), c_int, c_int)),
    "cuDeviceGetPCIBusId": (4010, (c_char_p, c_int, c_int)),
    "cuDevicePrimaryCtxRetain": (7000, (POINTER(c_void_p), c_int)),
    "cuDevicePrimaryCtxRelease": (11000, (c_int,)),
    "cuCtxGetCurrent": (4000, (POINTER(c_void_p),)),
    "cuCtxSetCurrent": (4000, (HANDLE,)),
    "cuCtxPushCurrent": (4000, (HANDLE,)),
    "cuCtxPopCurrent": (4000, (POINTER(c_void_p),)),
    "cuCtxGetDevice": (2000, (POINTER(c_int),)),
    "cuCtxSynchronize": (2000, ()),
    "cuCtxCreate": (3020, (POINTER(c_void_p), c_uint, c_int)),
    "cuCtxDestroy": (4000, (HANDLE,)),
    "cuStreamCreateWithPriority": (5050, (POINTER(c_void_p), c_uint, c_int)),
    "cuStreamDestroy": (4000, (HANDLE,)),
    "cuStreamQuery": (2000, (HANDLE,)),
    "cuStreamSynchronize": (2000, (HANDLE,)),
    "cuStreamWaitEvent": (3020, (HANDLE, HANDLE, c_uint)),
    "cuStreamGetPriority": (5050, (HANDLE, POINTER(c_int))),
    "cuStreamGetFlags": (5050, (HANDLE, POINTER(c_uint))),
    "cuStreamGetCtx": (9020, (HANDLE, POINTER(c_void_p))),
    "cuEventCreate": (2000, (POINTER(c_void_p), c_uint)),
    "cuEventDestroy": (4000, (HANDLE,)),
    "cuEventRecord": (2000, (HANDLE, HANDLE)),
    "cuEventQuery": (2000, (HANDLE,)),
    "cuEventSynchronize": (2000, (HANDLE,)),
    "cuEventElapsedTime": (2000, (POINTER(c_float), HANDLE, HANDLE)),
    "cuMemAlloc": (3020, (POINTER(c_void_p), c_size_t)),
    "cuMemFree": (3020, (DEVICE_ADDRESS,)),
    "cuMemGetAddressRange": (3020, (OUT, OUT, DEVICE_ADDRESS)),
    "cuMemGetInfo": (3020, (POINTER(c_size_t), POINTER(c_size_t))),
    "cuMemHostAlloc": (2020, (POINTER(c_void_p), c_size_t, c_uint)),
    "cuMemFreeHost": (2000, (ADDRESS,)),
    "cuMemHostRegister": (6050, (ADDRESS, c_size_t, c_uint)),
    "cuMemHostUnregister": (4000, (ADDRESS,)),
    "cuPointerGetAttribute": (4000, (OUT, c_int, DEVICE_ADDRESS)),
    "cuMemcpyHtoD": (3020, (DEVICE_ADDRESS, ADDRESS, c_size_t)),
    "cuMemcpyHtoDAsync": (3020, (DEVICE_ADDRESS, ADDRESS, c_size_t, HANDLE)),
    "cuMemcpyDtoH": (3020, (ADDRESS, DEVICE_ADDRESS, c_size_t)),
    "cuMemcpyDtoHAsync": (3020, (ADDRESS, DEVICE_ADDRESS, c_size_t, HANDLE)),
    "cuMemcpyDtoD": (3020, (DEVICE_ADDRESS, DEVICE_ADDRESS, c_size_t)),
    "cuMemcpyDtoDAsync": (3020, (DEVICE_ADDRESS, DEVICE_ADDRESS, c_size_t, HANDLE)),
    "cuMemcpy2DAsync": (3020, (OUT, HANDLE)),
    "cuMemsetD8": (3020, (DEVICE_ADDRESS, ctypes.c_ubyte, c_size_t)),
    "cuMemsetD16": (3020, (DEVICE_ADDRESS, ctypes.c_ushort, c_size_t)),
    "cuMemsetD32": (3020, (DEVICE_ADDRESS, c_uint, c_size_t)),
    "cuMemsetD8Async": (3020, (DEVICE_ADDRESS, ctypes.c_ubyte, c_size_t, HANDLE)),
    "cuMemsetD16Async": (3020, (DEVICE_ADDRESS, ctypes.c_ushort, c_size_t, HANDLE)),
    "cuMemsetD32Async": (3020, (DEVICE_ADDRESS, c_uint, c_size_t, HANDLE)),
    "cuMemHostGetDevicePointer": (3020, (POINTER(c_void_p), ADDRESS, c_uint)),
    "cuModuleLoadData": (2000, (POINTER(c_void_p), c_void_p)),
    "cuModuleUnload": (2000, (HANDLE,)),
    "cuModuleGetFunction": (2000, (POINTER(c_void_p), HANDLE, c_char_p)),
    "cuFuncGetAttribute": (2020, (POINTER(c_int), c_int, HANDLE)),
    "cuFuncSetAttribute": (9000, (HANDLE, c_int, c_int)),
    "cuLaunchKernel": (4000, (HANDLE, *[c_uint] * 7, HANDLE, c_void_p, c_void_p)),
    "cuLaunchCooperativeKernel": (9000, (HANDLE, *[c_uint] * 7, HANDLE, c_void_p)),
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": (
        6050, (POINTER(c_int), HANDLE, c_int, c_size_t),
    ),
}  # fmt: skip
# Entry points that work without a current context.
FREE_OF_CONTEXT = {
    name
    for name in SIGNATURES
    if name.startswith(("cuInit", "cuDriver", "cuGet", "cuDevice"))
} | {"cuCtxGetCurrent", "cuCtxSetCurrent", "cuCtxPushCurrent", "cuCtxCreate"}
FREE_OF_CONTEXT |= {"cuCtxDestroy", "cuPointerGetAttribute"}


class Rows(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = [
        (f"{end}{name}", kind)
        for end in ("src", "dst")
        for name, kind in (
            ("XInBytes", c_size_t),
            ("Y", c_size_t),
            ("MemoryType", c_int),
            ("Host", c_void_p),
            ("Device", c_void_p),
            ("Array", c_void_p),
            ("Pitch", c_size_t),
        )
    ] + [("WidthInBytes", c_size_t), ("Height", c_size_t)]


HOST, DEVICE = 1, 2


class Driver:
    """The entry points of one library, found as the binding finds them.

    ``d.cuX(...)`` returns the code; the short methods below insist on success.
    """

    def __init__(self, fake: FakeCuda):
        self.fake = fake
        self.find = fake.library.cuGetProcAddress_v2
        self.find.argtypes = (
            c_char_p, POINTER(c_void_p), c_int, ctypes.c_uint64, POINTER(c_int),
        )  # fmt: skip
        for name, (version, arguments) in SIGNATURES.items():
            code, address, status = self.look_up(name, version)
            assert (code, status) == (SUCCESS, 0) and address, name
            setattr(self, name, ctypes.CFUNCTYPE(c_int, *arguments)(address))

    def look_up(self, name, version, flags=0):
        address, status = c_void_p(1), c_int(-1)
        code = self.find(name.encode(), byref(address), version, flags, byref(status))
        return code, address.value, status.value

    def ok(self, name, *arguments):
        code = getattr(self, name)(*arguments)
        assert code == SUCCESS, f"{name}: {code}"

    def new(self, name, *arguments):
        out = c_void_p()
        self.ok(name, byref(out), *arguments)
        return out.value

    def stream(self, flags=NON_BLOCKING, priority=0):
        return self.new("cuStreamCreateWithPriority", flags, priority)

    def event(self, flags=DISABLE_TIMING):
        return self.new("cuEventCreate", flags)

    def alloc(self, nbytes):
        return self.new("cuMemAlloc", nbytes)

    def device(self, count=4):
        """Return a device block of int32 and the array over it."""
        address = self.alloc(4 * count)
        return address, view(address, count)

    def pinned(self, count=4):
        """Return an int32 array in page-locked memory."""
        return view(self.new("cuMemHostAlloc", 4 * count, 0), count)

    def set(self, address, value, count=4, stream=NULL):
        self.ok("cuMemsetD32Async", address, value, count, stream)

    def htod(self, address, array, stream=NULL):
        self.ok("cuMemcpyHtoDAsync", address, at(array), array.nbytes, stream)

    def record(self, event, stream=NULL):
        self.ok("cuEventRecord", event, stream)

    def wait(self, stream, event):
        self.ok("cuStreamWaitEvent", stream, event, 0)

    def sync(self, stream=NULL):
        self.ok("cuStreamSynchronize", stream)


def view(address, count):
    return np.ctypeslib.as_array((c_int * count).from_address(address))


def at(array):
    return array.ctypes.data


@pytest.fixture(scope="session")
def library():
    return build_library()


@pytest.fixture(scope="session")
def session_driver(library):
    driver = Driver(FakeCuda(library))
    assert driver.cuInit(0) == SUCCESS
    return driver


@pytest.fixture
def bare(session_driver):
    """The driver in its first state, with no context current."""
    session_driver.fake.reset()
    yield session_driver
    session_driver.fake.reset()


@pytest.fixture
def d(bare):
    """The driver with a context made and current."""
    bare.context = bare.new("cuCtxCreate", 0, 0)
    return bare


@pytest.fixture
def fake(bare):
    return bare.fake


def in_thread(function):
    """Run a function in a new thread; return what it returns, raise what it raises."""
    result = []

    def run():
        try:
            result.append((function(), None))
        except BaseException as error:
            result.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert not thread.is_alive(), "the call hangs"
    value, error = result[0]
    if error is not None:
        raise error
    return value


# --- the library ---


def test_building_twice_gives_the_same_file(tmp_path):
    first = build_library(tmp_path)
    stamp = first.stat().st_mtime_ns
    assert build_library(tmp_path) == first
    assert first.stat().st_mtime_ns == stamp


def test_an_old_driver_lacks_the_lookup_function(tmp_path):
    old = FakeCuda(build_library(tmp_path, defines=["FAKE_CUDA_OLD_DRIVER"]))
    assert not hasattr(old.library, "cuGetProcAddress_v2")


def test_only_the_lookup_function_is_exported(library):
    exported = ctypes.CDLL(str(library))
    assert hasattr(exported, "cuGetProcAddress_v2")
    for name in ("cuInit", "cuMemAlloc_v2", "fake_cuInit"):
        assert not hasattr(exported, name)


def test_every_entry_point_is_tested_here(fake):
    assert set(fake.entries) == set(SIGNATURES)


@pytest.mark.parametrize(
    "name, version, status",
    [
        ("cuMemAlloc", 3020, 0),
        ("cuMemAlloc", 13000, 0),
        ("cuMemAlloc", 2000, 2),  # the 32-bit one
        ("cuMemAlloc_v2", 3020, 1),
        ("cuNoSuchThing", 13000, 1),
        ("cuCtxCreate", 13000, 2),  # other arguments since 11.4
        ("cuCtxSynchronize", 13000, 2),
        ("cuDevicePrimaryCtxRelease", 7000, 2),
    ],
)
def test_looking_up_a_name_takes_the_version_into_account(bare, name, version, status):
    code, address, found = bare.look_up(name, version)
    assert (code, found) == (SUCCESS, status)
    assert bool(address) == (status == 0)


def test_a_hidden_entry_point_is_not_found(bare, fake):
    fake.hide("cuMemHostRegister")
    assert bare.look_up("cuMemHostRegister", 6050) == (SUCCESS, None, 1)
    fake.hide("cuMemHostRegister", False)
    assert bare.look_up("cuMemHostRegister", 6050)[1]


def test_the_driver_version_can_be_chosen(bare, fake):
    version = c_int()
    bare.ok("cuDriverGetVersion", byref(version))
    assert version.value == 13000
    fake.set_driver_version(10020)
    bare.ok("cuDriverGetVersion", byref(version))
    assert version.value == 10020
    assert bare.look_up("cuDevicePrimaryCtxRelease", 11000) == (SUCCESS, None, 2)


def test_nothing_works_before_init_and_init_needs_a_device(library, tmp_path):
    # Another file is another library, with a state of its own.
    other = Driver(FakeCuda(shutil.copy(library, tmp_path / "other.so")))
    count = c_int(-1)
    assert other.cuDeviceGetCount(byref(count)) == NOT_INITIALIZED
    assert other.cuMemAlloc(byref(c_void_p()), 4) == NOT_INITIALIZED
    other.ok("cuDriverGetVersion", byref(count))
    other.fake.set_device_count(0)
    assert other.cuInit(0) == NO_DEVICE
    assert other.cuDeviceGetCount(byref(count)) == NOT_INITIALIZED
    other.fake.set_device_count(2)
    assert other.cuInit(1) == INVALID_VALUE
    other.ok("cuInit", 0)
    other.ok("cuDeviceGetCount", byref(count))
    assert count.value == 2
    other.fake.reset()
    other.ok("cuDeviceGetCount", byref(count))
    assert count.value == 1


def test_errors_have_their_names_and_texts(bare):
    text = c_char_p()
    bare.ok("cuGetErrorName", OUT_OF_MEMORY, byref(text))
    assert text.value == b"CUDA_ERROR_OUT_OF_MEMORY"
    bare.ok("cuGetErrorString", OUT_OF_MEMORY, byref(text))
    assert text.value == b"out of memory"
    assert bare.cuGetErrorName(123456, byref(text)) == INVALID_VALUE
    assert text.value is None


def test_devices_tell_about_themselves(bare, fake):
    fake.set_device_count(2)
    device, value, total = c_int(), c_int(), c_size_t()
    text = ctypes.create_string_buffer(64)
    bare.ok("cuDeviceGet", byref(device), 1)
    assert bare.cuDeviceGet(byref(device), 2) == INVALID_DEVICE
    bare.ok("cuDeviceGetName", text, 64, 1)
    assert text.value == b"Fake CUDA device 1"
    bare.ok("cuDeviceGetPCIBusId", text, 64, 1)
    assert text.value == b"0000:02:00.0"
    assert bare.cuDeviceGetPCIBusId(text, 5, 1) == INVALID_VALUE
    bare.ok("cuDeviceTotalMem", byref(total), 1)
    assert total.value == 8 << 30
    bare.ok("cuDeviceGetAttribute", byref(value), 75, 0)
    assert value.value == 9
    for attribute, expected in ((76, 0), (16, 4), (95, 1), (97, 227 << 10)):
        bare.ok("cuDeviceGetAttribute", byref(value), attribute, 0)
        assert value.value == expected
    assert bare.cuDeviceGetAttribute(byref(value), 0, 0) == INVALID_VALUE


# --- contexts ---


def call_with_nothing(driver, name):
    """Call an entry point with zeros and empty places to write to."""
    arguments = []
    for kind in SIGNATURES[name][1]:
        if kind in (c_int, c_uint, c_size_t, ctypes.c_ubyte, ctypes.c_ushort):
            arguments.append(kind(0))
        elif kind is c_char_p:
            arguments.append(ctypes.create_string_buffer(64))
        elif kind in (c_void_p,):
            arguments.append(None)
        else:
            arguments.append(byref(kind._type_()))
    return getattr(driver, name)(*arguments)


@pytest.mark.parametrize("name", sorted(set(SIGNATURES) - FREE_OF_CONTEXT))
def test_without_a_current_context_the_call_is_refused(bare, name):
    assert call_with_nothing(bare, name) == INVALID_CONTEXT


def test_a_context_is_current_only_in_the_thread_that_pushed_it(d, fake):
    assert fake.current_context() == d.context
    assert in_thread(fake.current_context) is None
    address = d.alloc(16)
    assert in_thread(lambda: d.cuMemFree(address)) == INVALID_CONTEXT

    def push_and_free():
        d.ok("cuCtxPushCurrent", d.context)
        return d.cuMemFree(address)

    assert in_thread(push_and_free) == SUCCESS


def test_contexts_are_a_stack(d, fake):
    second = d.new("cuCtxCreate", 0, 0)
    assert fake.current_context() == second
    assert d.new("cuCtxPopCurrent") == second
    assert d.new("cuCtxGetCurrent") == d.context
    d.ok("cuCtxSetCurrent", second)  # replaces the top
    assert d.new("cuCtxPopCurrent") == second
    assert d.cuCtxPopCurrent(byref(c_void_p())) == INVALID_CONTEXT
    d.ok("cuCtxSetCurrent", None)
    d.ok("cuCtxSetCurrent", second)
    d.ok("cuCtxSetCurrent", None)  # pops
    assert d.new("cuCtxGetCurrent") is None


def test_a_destroyed_context_is_known_as_such(d):
    stream, event, address = d.stream(), d.event(), d.alloc(16)
    other = d.new("cuCtxCreate", 0, 0)
    ready, go = threading.Event(), threading.Event()

    def use_it_after_its_end():
        d.ok("cuCtxPushCurrent", d.context)
        ready.set()
        assert go.wait(10)
        return d.cuCtxSynchronize(), d.new("cuCtxPopCurrent")

    def main():
        assert ready.wait(10)
        d.ok("cuCtxDestroy", d.context)
        go.set()

    helper = threading.Thread(target=main)
    helper.start()
    assert in_thread(use_it_after_its_end) == (CONTEXT_IS_DESTROYED, d.context)
    helper.join()
    assert d.cuCtxPushCurrent(d.context) == INVALID_CONTEXT
    assert d.cuCtxDestroy(d.context) == INVALID_CONTEXT
    assert d.new("cuCtxGetCurrent") == other
    assert d.cuStreamSynchronize(stream) == INVALID_HANDLE
    assert d.cuEventQuery(event) == INVALID_HANDLE
    assert d.cuMemFree(address) == INVALID_VALUE
    live = d.fake.live()
    assert live.pop("contexts") == 1
    assert not any(live.values())


def test_destroying_the_current_context_pops_it(d, fake):
    second = d.new("cuCtxCreate", 0, 0)
    d.ok("cuCtxDestroy", second)
    assert fake.current_context() == d.context


def test_the_primary_context_lives_while_it_is_retained(bare, fake):
    first = bare.new("cuDevicePrimaryCtxRetain", 0)
    assert bare.new("cuDevicePrimaryCtxRetain", 0) == first
    assert bare.cuCtxDestroy(first) == INVALID_CONTEXT
    bare.ok("cuCtxPushCurrent", first)
    bare.alloc(16)
    bare.ok("cuDevicePrimaryCtxRelease", 0)
    assert fake.live()["contexts"] == 1
    bare.ok("cuDevicePrimaryCtxRelease", 0)
    assert not any(fake.live().values())
    assert bare.cuCtxSynchronize() == CONTEXT_IS_DESTROYED
    assert bare.cuDevicePrimaryCtxRelease(0) == INVALID_CONTEXT
    assert bare.new("cuDevicePrimaryCtxRetain", 0) != first


def test_each_device_has_its_own_contexts(bare, fake):
    fake.set_device_count(2)
    first = bare.new("cuDevicePrimaryCtxRetain", 0)
    second = bare.new("cuDevicePrimaryCtxRetain", 1)
    assert first != second
    device = c_int()
    for handle, expected in ((first, 0), (second, 1)):
        bare.ok("cuCtxPushCurrent", handle)
        bare.ok("cuCtxGetDevice", byref(device))
        assert device.value == expected
    assert bare.cuCtxCreate(byref(c_void_p()), 0, 2) == INVALID_DEVICE


def two_devices(d, fake):
    """Return a context of another device, made but not current."""
    fake.set_device_count(2)
    other = d.new("cuCtxCreate", 0, 1)
    d.new("cuCtxPopCurrent")
    return other


def test_memory_is_counted_and_limited_by_device(d, fake):
    other = two_devices(d, fake)
    fake.set_limits(device_bytes=100)
    d.alloc(60)
    assert d.cuMemAlloc(byref(c_void_p()), 60) == OUT_OF_MEMORY
    d.ok("cuCtxPushCurrent", other)
    there = d.alloc(60)  # of memory of its own
    d.pinned(2)
    d.stream()
    free, total = c_size_t(), c_size_t()
    d.ok("cuMemGetInfo", byref(free), byref(total))
    assert (free.value, total.value) == (40, 100)
    d.new("cuCtxPopCurrent")
    expected = {"retains": 0, "contexts": 1, "streams": 0, "pinned_bytes": 0}
    assert fake.live_on(0) == {**expected, "device_bytes": 60}
    expected |= {"streams": 1, "pinned_bytes": 8}
    assert fake.live_on(1) == {**expected, "device_bytes": 60}
    d.ok("cuMemFree", there)
    d.new("cuDevicePrimaryCtxRetain", 1)
    d.ok("cuDevicePrimaryCtxRelease", 1)
    assert fake.live_on(1) == {**expected, "device_bytes": 0, "retains": 1}


def test_copies_and_memsets_do_not_reach_another_devices_memory(d, fake):
    other = two_devices(d, fake)
    here, array = d.alloc(16), np.zeros(4, "i4")
    d.ok("cuCtxPushCurrent", other)
    there = d.alloc(16)
    rows = Rows(0, 0, 2, None, here, None, 8, 0, 0, 2, None, there, None, 8, 8, 2)
    for code in (
        d.cuMemcpyHtoD(here, at(array), 16),
        d.cuMemcpyDtoHAsync(at(array), here, 16, NULL),
        d.cuMemcpyDtoD(there, here, 16),
        d.cuMemcpyDtoDAsync(here, there, 16, NULL),
        d.cuMemcpy2DAsync(byref(rows), NULL),
        d.cuMemsetD32(here, 0, 4),
    ):
        assert code == INVALID_VALUE
    d.htod(there, array)


@pytest.mark.parametrize("portable", [0, 1])
def test_memory_registered_for_one_device_is_pageable_for_the_other(d, fake, portable):
    other = two_devices(d, fake)
    array = np.zeros(1024, "i4")
    d.ok("cuMemHostRegister", at(array), array.nbytes, portable)
    d.ok("cuCtxPushCurrent", other)
    address, target = d.device()
    d.htod(address, array[:4])
    array[:] = 5
    d.sync()
    assert target[0] == (5 if portable else 0)


def test_no_time_is_told_between_events_of_two_devices(d, fake):
    other = two_devices(d, fake)
    start = d.event(0)
    d.record(start)
    d.sync()
    d.ok("cuCtxPushCurrent", other)
    end = d.event(0)
    d.record(end)
    d.sync()
    assert d.cuEventElapsedTime(byref(c_float()), start, end) == INVALID_HANDLE


def test_the_control_makes_pushes_pops_and_ends_contexts(fake):
    handle = fake.create_context()
    assert fake.current_context() == handle
    assert fake.pop_context() == handle
    assert fake.current_context() is None
    fake.push_context(handle)
    fake.destroy_context(handle)
    assert fake.current_context() is None
    with pytest.raises(RuntimeError, match="201"):
        fake.push_context(handle)
    assert fake.calls() == {}


def test_work_on_another_contexts_stream_is_refused(d):
    stream, event, address = d.stream(), d.event(), d.alloc(16)
    d.new("cuCtxCreate", 0, 0)
    assert d.cuMemsetD8Async(address, 0, 16, stream) == INVALID_HANDLE
    assert d.cuEventRecord(event, NULL) == INVALID_HANDLE  # NULL is the new context's
    d.record(event, stream)
    d.wait(NULL, event)  # this is what events are good for
    d.sync(stream)
    assert d.cuEventQuery(event) == SUCCESS


# --- late: nothing runs before someone waits for it ---


def test_an_async_copy_reads_its_pinned_source_when_it_runs(d):
    source, stream = d.pinned(), d.stream()
    address, target = d.device()
    source[:] = 1
    d.htod(address, source, stream)
    assert (target == -1).all()
    source[:] = 2
    d.sync(stream)
    assert (target == 2).all()


def test_an_async_copy_takes_a_pageable_source_at_the_call_but_arrives_late(d):
    source, stream = np.ones(4, np.int32), d.stream()
    address, target = d.device()
    d.htod(address, source, stream)
    source[:] = 2
    assert (target == -1).all()
    d.sync(stream)
    assert (target == 1).all()


def test_an_async_copy_to_pinned_memory_arrives_late(d):
    target, stream = d.pinned(), d.stream()
    address, source = d.device()
    source[:] = 5
    d.ok("cuMemcpyDtoHAsync", at(target), address, 16, stream)
    assert (target == -1).all()
    d.sync(stream)
    assert (target == 5).all()


def test_an_async_copy_to_pageable_memory_is_done_on_return(d):
    target, stream = np.zeros(4, np.int32), d.stream()
    address, _ = d.device()
    d.set(address, 5, stream=stream)
    d.ok("cuMemcpyDtoHAsync", at(target), address, 16, stream)
    assert (target == 5).all()


def test_sync_copies_with_the_host_are_done_on_return(d):
    address, device = d.device()
    array = np.arange(4, dtype=np.int32)
    d.set(address, 9)
    d.ok("cuMemcpyHtoD", address, at(array), 16)
    assert (device == array).all()
    back = np.zeros(4, np.int32)
    d.ok("cuMemcpyDtoH", at(back), address, 16)
    assert (back == array).all()


def test_sync_copies_and_memsets_within_the_device_are_not_waited_for(d, fake):
    first, a = d.device()
    second, b = d.device()
    d.ok("cuMemsetD32", first, 3, 4)
    d.ok("cuMemcpyDtoD", second, first, 16)
    assert (a == -1).all() and (b == -1).all()
    assert fake.pending() == 2
    d.sync()
    assert (b == 3).all()


def test_a_staged_copy_takes_the_bytes_and_arrives_late(d, fake):
    fake.set_staged_htod()
    address, target = d.device()
    before, earlier = d.device()
    array = np.ones(4, np.int32)
    d.set(before, 7)
    d.ok("cuMemcpyHtoD", address, at(array), 16)
    array[:] = 2
    assert (earlier == 7).all()  # the stream was waited for
    assert (target == -1).all()
    d.sync()
    assert (target == 1).all()
    pinned = d.pinned()
    pinned[:] = 4
    d.ok("cuMemcpyHtoD", address, at(pinned), 16)
    assert (target == 4).all()


def test_queries_run_nothing(d, fake):
    stream, event = d.stream(), d.event()
    address, target = d.device()
    d.set(address, 1, stream=stream)
    d.record(event, stream)
    for _ in range(20):
        assert d.cuStreamQuery(stream) == NOT_READY
        assert d.cuEventQuery(event) == NOT_READY
    assert (target == -1).all()
    d.ok("cuEventSynchronize", event)
    assert d.cuStreamQuery(stream) == d.cuEventQuery(event) == SUCCESS
    assert (target == 1).all()


def test_only_what_is_waited_for_runs(d, fake):
    stream, other, event = d.stream(), d.stream(), d.event()
    (a, first), (b, second), (c, third) = (d.device() for _ in range(3))
    d.set(a, 1, stream=stream)
    d.record(event, stream)
    d.set(b, 1, stream=stream)
    d.set(c, 1, stream=other)
    d.ok("cuEventSynchronize", event)
    assert (first[0], second[0], third[0]) == (1, -1, -1)
    d.sync(stream)
    assert (first[0], second[0], third[0]) == (1, 1, -1)
    d.ok("cuCtxSynchronize")
    assert third[0] == 1
    assert fake.pending() == 0


ALLOCATIONS = {
    "cuMemAlloc": lambda d, address, pinned: d.alloc(4),
    "cuMemFree": lambda d, address, pinned: d.ok("cuMemFree", address),
    "cuMemHostAlloc": lambda d, address, pinned: d.pinned(1),
    "cuMemFreeHost": lambda d, address, pinned: d.ok("cuMemFreeHost", pinned),
}


@pytest.mark.parametrize("name", ALLOCATIONS)
def test_allocating_and_freeing_wait_for_the_whole_context(d, fake, name):
    address, pinned = d.alloc(4), at(d.pinned(1))
    target, here = d.device()
    d.set(target, 1, stream=d.stream())
    fake.create_context()
    far, there = d.device()
    d.set(far, 1, stream=d.stream())
    d.new("cuCtxPopCurrent")
    before = fake.host_syncs()
    ALLOCATIONS[name](d, address, pinned)
    assert (here == 1).all()
    assert (there == -1).all()  # the other context goes on by itself
    assert fake.host_syncs() == before + 1


@pytest.mark.parametrize(
    "name", ["cuStreamDestroy", "cuEventDestroy", "create", "info"]
)
def test_other_calls_wait_for_nothing(d, fake, name):
    stream, event = d.stream(), d.event()
    address, target = d.device()
    d.set(address, 1, stream=stream)
    d.record(event, stream)
    if name == "create":
        d.stream()
        d.event()
    elif name == "info":
        d.ok("cuMemGetInfo", byref(c_size_t()), byref(c_size_t()))
    else:
        d.ok(name, stream if "Stream" in name else event)
    assert fake.pending() == 2
    assert (target == -1).all()


def test_copies_and_memsets_of_nothing_need_nothing(d, fake):
    d.ok("cuMemcpyHtoD", None, None, 0)
    d.ok("cuMemcpyDtoHAsync", None, None, 0, NULL)
    d.ok("cuMemsetD8", None, 0, 0)
    d.ok("cuMemcpy2DAsync", byref(Rows(Height=3)), NULL)
    assert fake.pending() == fake.host_syncs() == 0


# --- the NULL stream and the others ---


@pytest.mark.parametrize("null", [NULL, LEGACY])
def test_null_stream_work_waits_for_blocking_streams_but_not_for_others(d, null):
    blocking, free = d.stream(BLOCKING), d.stream(NON_BLOCKING)
    (a, first), (b, second), (c, third) = (d.device() for _ in range(3))
    d.set(a, 1, stream=blocking)
    d.set(b, 1, stream=free)
    d.set(c, 1, stream=null)
    event = d.event()
    d.record(event, null)
    d.ok("cuEventSynchronize", event)
    assert (first[0], second[0], third[0]) == (1, -1, 1)


def test_blocking_streams_wait_for_earlier_null_stream_work_and_others_do_not(d):
    blocking, free = d.stream(BLOCKING), d.stream(NON_BLOCKING)
    (a, first), (b, second), (c, third) = (d.device() for _ in range(3))
    d.set(a, 1, stream=NULL)
    d.set(b, 1, stream=free)
    d.sync(free)
    assert (first[0], second[0]) == (-1, 1)
    d.set(c, 1, stream=blocking)
    d.sync(blocking)
    assert (first[0], third[0]) == (1, 1)


def test_blocking_streams_are_not_ordered_with_each_other(d):
    one, two = d.stream(BLOCKING), d.stream(BLOCKING)
    (a, first), (b, second) = d.device(), d.device()
    d.set(a, 1, stream=one)
    d.set(b, 1, stream=two)
    d.sync(two)
    assert (first[0], second[0]) == (-1, 1)


def test_null_stream_work_orders_blocking_streams_through_itself(d):
    one, two = d.stream(BLOCKING), d.stream(BLOCKING)
    (a, first), (b, second), (c, third) = (d.device() for _ in range(3))
    d.set(a, 1, stream=one)
    d.set(b, 1, stream=NULL)
    d.set(c, 1, stream=two)
    d.sync(two)
    assert (first[0], second[0], third[0]) == (1, 1, 1)


def test_a_wait_in_the_null_stream_holds_up_blocking_streams(d):
    blocking, free, event = d.stream(BLOCKING), d.stream(NON_BLOCKING), d.event()
    (a, first), (b, second) = d.device(), d.device()
    d.set(a, 1, stream=free)
    d.record(event, free)
    d.wait(NULL, event)
    d.set(b, 1, stream=blocking)
    d.sync(blocking)
    assert (first[0], second[0]) == (1, 1)


def test_the_null_stream_is_ready_only_when_the_blocking_streams_are(d):
    blocking, free = d.stream(BLOCKING), d.stream(NON_BLOCKING)
    address, target = d.device()
    d.set(address, 1, stream=free)
    assert d.cuStreamQuery(NULL) == SUCCESS
    d.set(address, 2, stream=blocking)
    assert d.cuStreamQuery(NULL) == NOT_READY
    d.sync(NULL)
    assert target[0] == 2
    assert d.cuStreamQuery(free) == NOT_READY


def test_null_streams_of_two_contexts_are_strangers(d, fake):
    address, first = d.device()
    d.set(address, 1)
    fake.create_context()
    other, second = d.device()
    d.set(other, 1)
    d.sync()
    assert (first[0], second[0]) == (-1, 1)


def test_each_thread_has_a_blocking_default_stream_of_its_own(d):
    (a, first), (b, second) = d.device(), d.device()

    def in_other_thread():
        d.ok("cuCtxPushCurrent", d.context)
        d.set(a, 1, stream=PER_THREAD)

    in_thread(in_other_thread)
    d.set(b, 1, stream=PER_THREAD)
    d.sync(PER_THREAD)
    assert (first[0], second[0]) == (-1, 1)
    d.sync(NULL)
    assert first[0] == 1
    d.ok("cuCtxDestroy", d.context)


def test_work_of_a_destroyed_stream_keeps_its_place(d):
    gone = d.stream(BLOCKING)
    (a, first), (b, second) = d.device(), d.device()
    d.set(a, 1, stream=gone)
    d.ok("cuStreamDestroy", gone)
    d.set(b, 1, stream=NULL)
    assert first[0] == -1
    d.sync(NULL)
    assert (first[0], second[0]) == (1, 1)


# --- events ---


def test_an_event_captures_the_stream_at_the_call(d):
    stream, event = d.stream(), d.event()
    (a, first), (b, second) = d.device(), d.device()
    d.set(a, 1, stream=stream)
    d.record(event, stream)
    d.set(b, 1, stream=stream)
    d.ok("cuEventSynchronize", event)
    assert (first[0], second[0]) == (1, -1)


def test_a_wait_captures_the_event_at_the_call(d):
    one, two, three, event = d.stream(), d.stream(), d.stream(), d.event()
    (a, first), (b, second), (c, third) = (d.device() for _ in range(3))
    d.set(a, 1, stream=one)
    d.record(event, one)
    d.wait(three, event)
    d.set(b, 1, stream=two)
    d.record(event, two)  # changes nothing for the wait above
    d.set(c, 1, stream=three)
    d.sync(three)
    assert (first[0], second[0], third[0]) == (1, -1, 1)
    assert d.cuEventQuery(event) == NOT_READY


def test_recording_again_makes_a_done_event_not_ready(d):
    event = d.event()
    d.record(event)
    d.ok("cuEventSynchronize", event)
    d.record(event)
    assert d.cuEventQuery(event) == NOT_READY


def test_a_never_recorded_event_is_done_and_holds_nothing_up(d):
    stream, other, event = d.stream(), d.stream(), d.event()
    (a, first), (b, second) = d.device(), d.device()
    assert d.cuEventQuery(event) == SUCCESS
    d.ok("cuEventSynchronize", event)
    d.wait(stream, event)
    d.set(a, 1, stream=other)
    d.record(event, other)  # after the wait: too late
    d.set(b, 1, stream=stream)
    d.sync(stream)
    assert (first[0], second[0]) == (-1, 1)


def test_a_wait_outlives_its_event(d):
    one, two, event = d.stream(), d.stream(), d.event()
    address, target = d.device()
    d.set(address, 1, stream=one)
    d.record(event, one)
    d.wait(two, event)
    d.ok("cuEventDestroy", event)
    d.sync(two)
    assert target[0] == 1


def test_a_chain_of_waits_is_followed_to_its_start(d, fake):
    cells = [d.device(1) for _ in range(2000)]
    streams, event = [d.stream() for _ in range(5)], d.event()
    for i, (address, _) in enumerate(cells):
        stream = streams[i % 5]
        d.wait(stream, event)
        d.set(address, i, 1, stream)
        d.record(event, stream)
    d.ok("cuEventSynchronize", event)
    assert [int(cell[0]) for _, cell in cells] == list(range(2000))
    assert fake.pending() == 0


def test_elapsed_time_asks_for_two_recorded_finished_timing_events(d, fake):
    stream, ms = d.stream(), c_float()
    start, end, plain = d.event(0), d.event(0), d.event(DISABLE_TIMING)
    assert d.cuEventElapsedTime(byref(ms), start, end) == INVALID_HANDLE
    d.record(start, stream)
    assert d.cuEventElapsedTime(byref(ms), start, end) == INVALID_HANDLE
    fake.spin(stream, 20)
    d.record(end, stream)
    d.record(plain, stream)
    assert d.cuEventElapsedTime(byref(ms), start, plain) == INVALID_HANDLE
    assert d.cuEventElapsedTime(byref(ms), start, end) == NOT_READY
    d.sync(stream)
    d.ok("cuEventElapsedTime", byref(ms), start, end)
    assert ms.value == pytest.approx(20, abs=0.01)
    d.ok("cuEventElapsedTime", byref(ms), end, start)
    assert ms.value == pytest.approx(-20, abs=0.01)


def test_wrong_flags_are_refused(d):
    out = byref(c_void_p())
    assert d.cuStreamCreateWithPriority(out, 2, 0) == INVALID_VALUE
    assert d.cuEventCreate(out, 8) == INVALID_VALUE
    assert d.cuMemHostAlloc(out, 4, 8) == INVALID_VALUE
    assert d.cuStreamWaitEvent(d.stream(), d.event(), 2) == INVALID_VALUE


def test_a_stream_knows_its_priority_flags_and_context(d):
    value, flags = c_int(), c_uint()
    for asked, given in ((-1, -1), (-99, -5), (7, 0)):
        d.ok("cuStreamGetPriority", d.stream(BLOCKING, asked), byref(value))
        assert value.value == given
    stream = d.stream(NON_BLOCKING)
    d.ok("cuStreamGetFlags", stream, byref(flags))
    assert flags.value == NON_BLOCKING
    context = c_void_p()
    d.fake.create_context()
    d.ok("cuStreamGetCtx", stream, byref(context))
    assert context.value == d.context


# --- the modes against a model of the rules ---

STREAMS = 5  # NULL, two blocking, two non-blocking
EVENTS = 3
OPERATIONS = st.one_of(
    st.tuples(st.just("set"), st.integers(0, STREAMS - 1)),
    st.tuples(st.just("set"), st.integers(0, STREAMS - 1)),
    st.tuples(
        st.sampled_from(["record", "wait"]),
        st.integers(0, STREAMS - 1),
        st.integers(0, EVENTS - 1),
    ),
    st.tuples(st.just("sync stream"), st.integers(0, STREAMS - 1)),
    st.tuples(st.just("sync event"), st.integers(0, EVENTS - 1)),
    st.tuples(st.sampled_from(["sync context", "allocate", "query"])),
)
PROGRAMS = st.lists(OPERATIONS, min_size=1, max_size=40)


class Model:
    """What must have run by when, by sets of numbers of memsets and nothing else."""

    def __init__(self):
        self.streams = [frozenset()] * STREAMS  # what the stream's next work waits for
        self.events = [frozenset()] * EVENTS
        self.before = {}  # memset: all that must run before it
        self.done = frozenset()  # what must have run by now

    def ordered_before(self, stream):
        if stream == 0:
            return self.streams[0] | self.streams[1] | self.streams[2]
        if stream in (1, 2):
            return self.streams[stream] | self.streams[0]
        return self.streams[stream]

    def apply(self, operation):
        kind, *numbers = operation
        if kind == "set":
            number = len(self.before)
            self.before[number] = self.ordered_before(numbers[0])
            self.streams[numbers[0]] = self.before[number] | {number}
        elif kind == "record":
            stream, event = numbers
            self.streams[stream] = self.events[event] = self.ordered_before(stream)
        elif kind == "wait":
            stream, event = numbers
            self.streams[stream] = self.ordered_before(stream) | self.events[event]
        elif kind == "sync stream":
            stream = numbers[0]
            self.done |= self.ordered_before(0) if stream == 0 else self.streams[stream]
        elif kind == "sync event":
            self.done |= self.events[numbers[0]]
        elif kind in ("sync context", "allocate"):
            self.done |= frozenset(self.before)


class Program:
    """The same operations given to the driver; each memset has a cell of its own."""

    def __init__(self, driver, size):
        self.driver = driver
        self.streams = [NULL, *(driver.stream(flags) for flags in (0, 0, 1, 1))]
        self.events = [driver.event() for _ in range(EVENTS)]
        self.address, self.cells = driver.device(max(size, 1))
        self.issued = 0

    def apply(self, operation):
        d = self.driver
        kind, *numbers = operation
        if kind == "set":
            d.set(self.address + 4 * self.issued, 1, 1, self.streams[numbers[0]])
            self.issued += 1
        elif kind == "record":
            d.record(self.events[numbers[1]], self.streams[numbers[0]])
        elif kind == "wait":
            d.wait(self.streams[numbers[0]], self.events[numbers[1]])
        elif kind == "sync stream":
            d.sync(self.streams[numbers[0]])
        elif kind == "sync event":
            d.ok("cuEventSynchronize", self.events[numbers[0]])
        elif kind == "sync context":
            d.ok("cuCtxSynchronize")
        elif kind == "allocate":
            d.alloc(4)
        else:
            for stream in self.streams:
                d.cuStreamQuery(stream)

    def done(self):
        return frozenset(np.flatnonzero(self.cells == 1).tolist())


def start_program(driver, program, mode, seed=0):
    driver.fake.reset()
    driver.new("cuCtxCreate", 0, 0)
    running = Program(driver, len(program))
    driver.fake.mode(mode, seed)
    return running, Model()


def run_late(driver, program):
    running, model = start_program(driver, program, "late")
    for operation in program:
        running.apply(operation)
        model.apply(operation)
        assert running.done() == model.done, program


SOME = (0, 1, 3)  # NULL, a blocking and a non-blocking stream
ISSUES = [
    operation
    for stream in SOME
    for operation in (("set", stream), ("record", stream, 0), ("wait", stream, 0))
]
WAITS = [*(("sync stream", stream) for stream in SOME), ("sync event", 0)]


@pytest.mark.parametrize("last", WAITS)
def test_late_is_exact_in_every_short_program(session_driver, last):
    for issues in itertools.product(ISSUES, repeat=3):
        if any(operation[0] == "set" for operation in issues):
            run_late(session_driver, [*issues, last])


@settings(max_examples=300, deadline=None)
@given(program=PROGRAMS)
def test_late_runs_exactly_what_the_rules_demand(session_driver, program):
    run_late(session_driver, program)


@settings(max_examples=300, deadline=None)
@given(program=PROGRAMS, seed=st.integers(0, 2**64 - 1))
def test_random_runs_what_is_demanded_and_only_in_legal_order(
    session_driver, program, seed
):
    running, model = start_program(session_driver, program, "random", seed)
    before = frozenset()
    for operation in program:
        running.apply(operation)
        model.apply(operation)
        done = running.done()
        assert done >= model.done
        assert done >= before
        assert all(done >= model.before[number] for number in done)
        before = done


@settings(max_examples=50, deadline=None)
@given(program=PROGRAMS)
def test_eager_runs_everything_at_once(session_driver, program):
    running, _ = start_program(session_driver, program, "eager")
    for operation in program:
        running.apply(operation)
        assert len(running.done()) == running.issued
        assert session_driver.fake.pending() == 0


def random_run(d, seed):
    """Return after how many queries each of 20 independent memsets had run."""
    d.fake.reset()
    d.new("cuCtxCreate", 0, 0)
    streams = [d.stream() for _ in range(20)]
    address, cells = d.device(20)
    d.fake.mode("random", seed)
    for i, stream in enumerate(streams):
        d.set(address + 4 * i, 1, 1, stream)
    seen = []
    for _ in range(1000):
        seen.append(tuple(cells == 1))
        d.cuCtxGetCurrent(byref(c_void_p()))
    assert all(seen[-1])  # any driver call lets something run, in the end everything
    return seen


def test_random_runs_do_not_keep_to_the_order_of_issue(d):
    early = 0
    for seed in range(20):
        early += any(
            list(done) != sorted(done, reverse=True) for done in random_run(d, seed)
        )
    assert early >= 10


def test_in_random_runs_a_stream_may_fall_far_behind_another(d):
    """Each of two streams is 15 items ahead of the other at some time in some run."""
    ahead = []
    for seed in range(30):
        d.fake.reset()
        d.new("cuCtxCreate", 0, 0)
        streams = [d.stream(), d.stream()]
        address, cells = d.device(100)
        d.fake.mode("random", seed)
        for i in range(50):
            d.set(address + 4 * i, 1, 1, streams[0])
            d.set(address + 200 + 4 * i, 1, 1, streams[1])
            ahead.append(np.sum(cells[:50] == 1) - np.sum(cells[50:] == 1))
    assert max(ahead) >= 15
    assert min(ahead) <= -15


def test_a_random_run_repeats_itself_with_its_seed_and_differs_with_others(d):
    assert random_run(d, 1) == random_run(d, 1)
    assert len({tuple(random_run(d, seed)) for seed in range(8)}) == 8


def test_turning_to_eager_runs_what_is_pending(d, fake):
    address, target = d.device()
    d.set(address, 1, stream=d.stream())
    fake.mode("eager")
    assert (target == 1).all()
    with pytest.raises(ValueError, match="sometimes"):
        fake.mode("sometimes")


def test_a_slot_that_is_refilled_too_early_shows_at_once(d):
    """The race this stand-in is there for: the hand-over is not waited for."""
    copy, slot = d.stream(), d.pinned()
    back, _ = d.device()
    front, seen = d.device()
    copied, consumed = d.event(), d.event()

    def feed(number, careful):
        if careful:
            d.ok("cuEventSynchronize", copied)  # before the host writes the slot
            d.wait(copy, consumed)  # before the copy writes the back buffer
        slot[:] = number
        d.htod(back, slot, copy)
        d.record(copied, copy)
        if careful:
            d.wait(NULL, copied)
        d.ok("cuMemcpyDtoDAsync", front, back, 16, NULL)
        d.record(consumed, NULL)

    def read():
        d.sync(NULL)
        return seen.tolist()

    feed(1, careful=False)
    assert read() == [-1] * 4  # not there yet: the copy stream was not waited for
    d.sync(copy)
    feed(2, careful=True)
    assert read() == [2] * 4
    feed(3, careful=True)
    feed(4, careful=True)
    assert read() == [4] * 4


# --- time ---


def test_spinning_work_takes_its_time_and_overlaps_other_streams(d, fake):
    one, two = d.stream(), d.stream()
    begin = time.perf_counter()
    fake.spin(one, 60)
    fake.spin(two, 60)
    assert time.perf_counter() - begin < 0.05
    d.ok("cuCtxSynchronize")
    assert 0.06 <= time.perf_counter() - begin < 0.115


def test_held_copies_take_their_time(d, fake):
    stream, free = d.stream(), d.stream()
    address, target = d.device()
    fake.hold(40, stream)
    d.set(address, 1, stream=stream)
    fake.hold(0, stream)
    d.set(address, 2, stream=free)
    begin = time.perf_counter()
    d.sync(free)
    assert time.perf_counter() - begin < 0.03
    d.sync(stream)
    assert 0.04 <= time.perf_counter() - begin < 0.5
    assert target[0] == 1
    fake.hold(20)
    d.set(address, 3, stream=free)
    begin = time.perf_counter()
    d.sync(free)
    assert time.perf_counter() - begin >= 0.02


def test_other_threads_go_on_while_one_waits(d, fake):
    stream, other = d.stream(), d.stream()
    address, target = d.device()
    fake.spin(stream, 300)

    def wait():
        d.ok("cuCtxPushCurrent", d.context)
        d.sync(stream)
        return time.perf_counter()

    ended = []
    thread = threading.Thread(target=lambda: ended.append(wait()))
    thread.start()
    time.sleep(0.05)
    d.set(address, 1, stream=other)
    d.sync(other)
    finished = time.perf_counter()
    assert target[0] == 1
    thread.join()
    assert finished < ended[0]


def test_eager_time_passes_by_itself(d, fake):
    stream, event = d.stream(), d.event()
    fake.mode("eager")
    fake.spin(stream, 30)
    fake.spin(stream, 30)
    d.record(event, stream)
    assert d.cuEventQuery(event) == NOT_READY
    time.sleep(0.07)
    assert d.cuEventQuery(event) == SUCCESS  # the second began when the first was done


def test_draining_a_stream_runs_its_work_and_counts_nothing(d, fake):
    blocking, free = d.stream(BLOCKING), d.stream()
    (a, first), (b, second) = d.device(), d.device()
    d.set(a, 1, stream=blocking)
    d.set(b, 1, stream=free)
    calls, syncs = fake.calls(), fake.host_syncs()
    fake.drain()
    assert (first[0], second[0]) == (1, -1)
    in_thread(lambda: fake.drain(free, context=d.context))
    assert second[0] == 1
    assert (fake.calls(), fake.host_syncs()) == (calls, syncs)
    with pytest.raises(RuntimeError, match="201"):
        in_thread(fake.drain)


# --- memory ---


def test_new_and_freed_memory_is_nan(d):
    address = d.alloc(4 * 1000)
    data = np.ctypeslib.as_array((c_float * 1000).from_address(address))
    assert np.isnan(data).all()
    data[:] = 1
    d.ok("cuMemFree", address)
    assert np.isnan(data).all()
    assert address % 256 == 0


def test_addresses_outside_live_blocks_are_refused(d):
    address, _ = d.device(4)
    host = np.zeros(8, np.int32)
    assert d.cuMemcpyHtoD(address, at(host), 20) == INVALID_VALUE
    assert d.cuMemcpyHtoD(address + 4, at(host), 16) == INVALID_VALUE
    assert d.cuMemcpyHtoD(address - 4, at(host), 4) == INVALID_VALUE
    assert d.cuMemcpyHtoD(at(host), at(host), 4) == INVALID_VALUE
    assert d.cuMemcpyHtoD(address, address, 4) == INVALID_VALUE
    assert d.cuMemcpyHtoD(address, None, 4) == INVALID_VALUE
    assert d.cuMemsetD32(address + 2, 0, 1) == INVALID_VALUE
    assert d.cuMemFree(address + 4) == INVALID_VALUE
    d.ok("cuMemFree", address)
    assert d.cuMemcpyHtoD(address, at(host), 4) == INVALID_VALUE
    assert d.cuMemFree(address) == INVALID_VALUE
    assert d.cuMemAlloc(byref(c_void_p()), 0) == INVALID_VALUE


def test_a_range_that_is_only_partly_page_locked_is_refused(d):
    address, _ = d.device(8)
    array = np.zeros(16, np.int32)
    d.ok("cuMemHostRegister", at(array) + 16, 16, 0)
    for first, count in ((0, 5), (4, 5), (7, 2)):
        assert d.cuMemcpyHtoD(address, at(array[first:]), 4 * count) == INVALID_VALUE
    d.ok("cuMemcpyHtoD", address, at(array), 16)
    d.ok("cuMemcpyHtoD", address, at(array[4:]), 16)
    assert d.cuMemHostRegister(at(array), 64, 0) == ALREADY_REGISTERED
    assert d.cuMemHostUnregister(at(array)) == NOT_REGISTERED
    d.ok("cuMemHostUnregister", at(array) + 16)


def test_registered_memory_is_read_late_like_pinned_memory(d, fake):
    array, stream = np.ones(4, np.int32), d.stream()
    address, target = d.device()
    d.ok("cuMemHostRegister", at(array), 16, 0)
    assert fake.live()["registered_bytes"] == 16
    d.htod(address, array, stream)
    array[:] = 2
    d.sync(stream)
    assert target[0] == 2


def test_unregistering_under_a_copy_is_a_fault(d, fake):
    array, stream = np.ones(4, np.int32), d.stream()
    address, target = d.device()
    d.ok("cuMemHostRegister", at(array), 16, 0)
    d.htod(address, array, stream)
    d.ok("cuMemHostUnregister", at(array))
    target[:] = 0
    d.sync(stream)
    assert fake.damage() == {"faults": 1, "damaged_zones": 0, "late_writes": 0}
    assert (target == -1).all()


def test_freeing_memory_that_another_contexts_work_uses_is_a_fault(d, fake):
    address, _ = d.device()
    fake.create_context()
    d.set(address, 1)
    d.new("cuCtxPopCurrent")
    d.ok("cuMemFree", address)  # waits for its own context only
    fake.mode("eager")
    assert fake.damage()["faults"] == 1


def test_the_kind_and_range_of_memory_can_be_asked_for(d):
    address, _ = d.device()
    pinned = d.pinned()
    kind, base, size = c_uint(), c_void_p(), c_size_t()
    for pointer, expected in ((address + 15, DEVICE), (at(pinned) + 15, HOST)):
        d.ok("cuPointerGetAttribute", byref(kind), 2, pointer)
        assert kind.value == expected
    assert d.cuPointerGetAttribute(byref(kind), 2, address + 16) == INVALID_VALUE
    context = c_void_p()
    d.ok("cuPointerGetAttribute", byref(context), 1, address)
    assert context.value == d.context
    d.ok("cuMemGetAddressRange", byref(base), byref(size), address + 7)
    assert (base.value, size.value) == (address, 16)
    d.ok("cuMemGetAddressRange", byref(base), None, address)
    assert d.cuMemGetAddressRange(None, None, at(pinned)) == NOT_FOUND


def test_memsets_write_elements_of_their_width(d):
    address, data = d.device(2)
    raw = data.view(np.uint8)
    d.ok("cuMemsetD16Async", address, 0x1234, 3, NULL)
    d.ok("cuMemsetD8Async", address + 6, 0x56, 2, NULL)
    d.sync()
    assert raw.tolist() == [0x34, 0x12] * 3 + [0x56] * 2
    d.ok("cuMemsetD16", address, 1, 1)
    d.ok("cuMemsetD8", address + 2, 2, 1)
    d.ok("cuMemsetD32", address + 4, 0x01020304, 1)
    d.sync()
    assert raw.tolist() == [1, 0, 2, 0x12, 4, 3, 2, 1]


def test_copies_of_rows_move_rows_between_pitches(d):
    address, data = d.device(24)
    other, target = d.device(24)
    data[:] = np.arange(24)
    rows = Rows(
        srcMemoryType=DEVICE, srcDevice=address, srcPitch=24, srcXInBytes=4, srcY=1,
        dstMemoryType=DEVICE, dstDevice=other, dstPitch=16, dstXInBytes=8,
        WidthInBytes=8, Height=3,
    )  # fmt: skip
    d.ok("cuMemcpy2DAsync", byref(rows), NULL)
    assert (target == -1).all()
    d.sync()
    assert (target[:12].reshape(3, 4)[:, 2:] == data.reshape(4, 6)[1:, 1:3]).all()
    assert (target[12:] == -1).all()
    rows.dstPitch = 15  # narrower than the row with its offset
    assert d.cuMemcpy2DAsync(byref(rows), NULL) == INVALID_VALUE
    rows.dstPitch, rows.srcY = 16, 2  # one row too far down
    assert d.cuMemcpy2DAsync(byref(rows), NULL) == INVALID_VALUE
    rows.srcY, rows.srcMemoryType = 1, 3  # an array of CUDA's own
    assert d.cuMemcpy2DAsync(byref(rows), NULL) == INVALID_VALUE


def test_rows_further_apart_than_the_device_allows_are_refused(d, fake):
    fake.set_max_pitch(24)
    value = c_int()
    d.ok("cuDeviceGetAttribute", byref(value), 11, 0)
    assert value.value == 24
    source, (address, target) = d.pinned(14), d.device(4)
    source[:] = np.arange(14)
    rows = Rows(
        srcMemoryType=HOST, srcHost=at(source), srcPitch=24,
        dstMemoryType=DEVICE, dstDevice=address, dstPitch=8,
        WidthInBytes=8, Height=2,
    )  # fmt: skip
    d.ok("cuMemcpy2DAsync", byref(rows), NULL)
    d.sync()
    assert target.tolist() == [0, 1, 6, 7]
    rows.srcPitch = 28
    assert d.cuMemcpy2DAsync(byref(rows), NULL) == INVALID_VALUE
    rows.srcPitch, rows.dstPitch = 24, 28
    assert d.cuMemcpy2DAsync(byref(rows), NULL) == INVALID_VALUE


def test_rows_of_which_only_some_are_page_locked_are_refused(d):
    source, (address, _) = d.pinned(12), d.device(6)
    rows = Rows(
        srcMemoryType=HOST, srcHost=at(source) + 8, srcPitch=16,
        dstMemoryType=DEVICE, dstDevice=address, dstPitch=8,
        WidthInBytes=8, Height=3,
    )  # fmt: skip
    d.ok("cuMemcpy2DAsync", byref(rows), NULL)
    rows.srcXInBytes = 4
    assert d.cuMemcpy2DAsync(byref(rows), NULL) == INVALID_VALUE
    d.sync()


def test_rows_whose_source_goes_too_early_are_a_fault(d, fake):
    array = np.zeros(12, np.int32)
    d.ok("cuMemHostRegister", at(array), 48, 0)
    address, target = d.device(6)
    rows = Rows(
        srcMemoryType=HOST, srcHost=at(array), srcPitch=16,
        dstMemoryType=DEVICE, dstDevice=address, dstPitch=8,
        WidthInBytes=8, Height=3,
    )  # fmt: skip
    d.ok("cuMemcpy2DAsync", byref(rows), NULL)
    d.ok("cuMemHostUnregister", at(array))
    d.sync()
    assert fake.damage()["faults"] == 1
    assert (target == -1).all()  # poison


@pytest.mark.parametrize("pinned", [False, True])
def test_copies_of_rows_from_the_host_follow_the_rules_of_their_source(d, pinned):
    source = d.pinned(12) if pinned else np.empty(12, np.int32)
    source[:] = np.arange(12)
    expected = source.reshape(3, 4)[:, :2].copy()
    address, target = d.device(6)
    rows = Rows(
        srcMemoryType=HOST, srcHost=at(source), srcPitch=16,
        dstMemoryType=DEVICE, dstDevice=address, dstPitch=8,
        WidthInBytes=8, Height=3,
    )  # fmt: skip
    d.ok("cuMemcpy2DAsync", byref(rows), NULL)
    source[:] = 99
    d.sync()
    expected = np.full((3, 2), 99) if pinned else expected
    assert (target.reshape(3, 2) == expected).all()


def test_limits_make_allocations_fail_and_show_in_the_memory_info(d, fake):
    out = byref(c_void_p())
    fake.set_limits(device_bytes=1000, pinned_bytes=100)
    first = d.alloc(600)
    assert d.cuMemAlloc(out, 401) == OUT_OF_MEMORY
    free, total = c_size_t(), c_size_t()
    d.ok("cuMemGetInfo", byref(free), byref(total))
    assert (free.value, total.value) == (400, 1000)
    d.ok("cuMemFree", first)
    d.alloc(1000)
    d.pinned(20)
    assert d.cuMemHostAlloc(out, 21, 0) == OUT_OF_MEMORY
    array = np.zeros(21, np.uint8)
    assert d.cuMemHostRegister(at(array), 21, 0) == OUT_OF_MEMORY
    d.ok("cuMemHostRegister", at(array), 20, 0)
    fake.set_limits()
    d.ok("cuMemHostAlloc", out, 1000, 0)


@pytest.mark.stray_write
@pytest.mark.parametrize("kind", ["device", "pinned"])
def test_writing_outside_a_block_is_found(d, fake, kind):
    address = d.alloc(16) if kind == "device" else at(d.pinned())
    assert fake.damage()["damaged_zones"] == 0
    ctypes.memset(address + 16, 0, 1)
    assert fake.damage()["damaged_zones"] == 1
    ctypes.memset(address - 1, 0, 1)
    assert fake.damage()["damaged_zones"] == 2
    d.ok("cuMemFree" if kind == "device" else "cuMemFreeHost", address)
    assert fake.damage()["damaged_zones"] == 2
    fake.reset()
    assert not any(fake.damage().values())


def test_writing_to_freed_memory_is_found(d, fake):
    address = d.alloc(16)
    d.ok("cuMemFree", address)
    ctypes.memset(address + 3, 0, 1)
    assert fake.damage()["late_writes"] == 1
    for _ in range(5000):  # it is found as well once the block is given back
        d.ok("cuMemFree", d.alloc(16))
    assert fake.damage()["late_writes"] == 1


# --- failures and counts ---


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_nth_call_of_each_name_can_be_made_to_fail(d, fake, name):
    for _ in range(3):  # enough to pop
        d.ok("cuCtxPushCurrent", d.context)
    before = fake.calls(name)
    fake.fail(name, nth=1, code=719)
    first = call_with_nothing(d, name)
    live, current = fake.live(), fake.current_context()
    assert call_with_nothing(d, name) == 719
    assert (fake.live(), fake.current_context()) == (live, current)
    assert call_with_nothing(d, name) == first != 719
    assert fake.calls(name) == before + 3


def test_failures_can_be_planned_in_rows_and_reset(d, fake):
    fake.fail("cuMemAlloc", times=2)
    fake.fail("cuMemAlloc", nth=3, code=1)
    codes = [d.cuMemAlloc(byref(c_void_p()), 4) for _ in range(5)]
    assert codes == [OUT_OF_MEMORY, OUT_OF_MEMORY, SUCCESS, INVALID_VALUE, SUCCESS]
    assert fake.live()["device_blocks"] == 2
    fake.fail("cuMemAlloc")
    fake.reset()
    fake.create_context()
    d.alloc(4)
    with pytest.raises(ValueError, match="cuNoSuchThing"):
        fake.fail("cuNoSuchThing")


def test_failures_that_have_happened_make_room_for_others(d, fake):
    address = c_void_p()
    fake.fail("cuMemAlloc", nth=1000, code=1)
    for _ in range(1000):
        fake.fail("cuMemAlloc")
        assert d.cuMemAlloc(byref(address), 4) == OUT_OF_MEMORY
    assert d.cuMemAlloc(byref(address), 4) == INVALID_VALUE
    with pytest.raises(RuntimeError, match="too many"):
        for _ in range(1000):
            fake.fail("cuMemAlloc", nth=1000)


def test_a_failed_call_does_nothing(d, fake):
    address, target = d.device()
    fake.fail("cuMemFree", code=719)
    assert d.cuMemFree(address) == 719
    d.ok("cuMemFree", address)
    assert fake.live()["device_blocks"] == 0


def test_failures_can_be_taken_back(d, fake):
    fake.fail("cuMemAlloc", times=100)
    fake.lose_context()
    fake.heal()
    d.alloc(4)


def test_a_lost_context_fails_each_call_but_those_that_need_none(d, fake):
    d.ok("cuStreamQuery", NULL)
    fake.lose_context(after=2, code=719)
    address, stream = d.alloc(4), c_void_p()
    d.ok("cuStreamQuery", NULL)
    assert fake.lost_calls() == 0
    assert d.cuMemFree(address) == 719
    assert d.cuStreamCreateWithPriority(byref(stream), 0, 0) == 719
    assert d.cuStreamQuery(NULL) == 719
    d.ok("cuInit", 0)
    assert fake.live()["device_blocks"] == 1 and fake.lost_calls() == 3
    fake.heal()
    d.ok("cuMemFree", address)


def test_a_delayed_call_waits_before_it_does_anything_while_others_go_on(d, fake):
    fake.delay("cuMemAlloc", nth=1, ms=10_000)
    d.alloc(4)
    assert fake.delays() == {"now": 0, "begun": 0, "not let go": 0}

    def allocate():
        d.ok("cuCtxPushCurrent", d.context)
        d.alloc(8)

    thread = threading.Thread(target=allocate)
    thread.start()
    while not fake.delays()["now"]:
        time.sleep(0.001)
    assert fake.live()["device_blocks"] == 1
    d.alloc(4)
    fake.end_delays()
    thread.join()
    assert fake.live()["device_blocks"] == 3
    assert fake.delays() == {"now": 0, "begun": 1, "not let go": 0}


def test_a_delayed_call_goes_on_by_itself_when_its_time_is_over(d, fake):
    fake.delay("cuMemAlloc", ms=30)
    fake.delay("cuMemFree")
    started = time.monotonic()
    address = d.alloc(4)
    assert time.monotonic() - started >= 0.03
    fake.end_delays(forget=True)
    d.ok("cuMemFree", address)
    assert fake.delays() == {"now": 0, "begun": 1, "not let go": 1}


def test_calls_are_counted_by_name(d, fake):
    before = fake.calls("cuStreamQuery")
    d.ok("cuStreamQuery", NULL)
    d.ok("cuStreamQuery", NULL)
    assert fake.calls("cuStreamQuery") == before + 2
    assert fake.calls() == {"cuCtxCreate": 1, "cuStreamQuery": 2}
    with pytest.raises(ValueError, match="cuNoSuchThing"):
        fake.calls("cuNoSuchThing")


def test_live_objects_are_counted_by_kind(d, fake):
    stream, event = d.stream(), d.event()
    address, pinned, array = d.alloc(100), d.pinned(5), np.zeros(3, np.int32)
    d.ok("cuMemHostRegister", at(array), 12, 0)
    assert fake.live() == {
        "contexts": 1, "streams": 1, "events": 1, "device_blocks": 1,
        "device_bytes": 100, "pinned_blocks": 1, "pinned_bytes": 20,
        "registered": 1, "registered_bytes": 12, "modules": 0, "blas_handles": 0,
    }  # fmt: skip
    d.ok("cuStreamDestroy", stream)
    d.ok("cuEventDestroy", event)
    d.ok("cuMemFree", address)
    d.ok("cuMemFreeHost", at(pinned))
    d.ok("cuMemHostUnregister", at(array))
    d.ok("cuCtxDestroy", d.context)
    assert not any(fake.live().values())


def test_calls_that_make_the_host_wait_are_counted(d, fake):
    stream, event, pinned = d.stream(), d.event(), d.pinned()
    address, _ = d.device()
    pageable = np.zeros(4, np.int32)
    before = fake.host_syncs()
    d.htod(address, pinned, stream)
    d.htod(address, pageable, stream)
    d.record(event, stream)
    d.wait(NULL, event)
    d.ok("cuMemcpyDtoDAsync", address, address, 16, NULL)
    d.ok("cuMemcpyDtoHAsync", at(pinned), address, 16, stream)
    d.cuEventQuery(event)
    d.cuStreamQuery(stream)
    assert fake.host_syncs() == before
    d.sync(stream)
    d.ok("cuEventSynchronize", event)
    d.ok("cuCtxSynchronize")
    d.ok("cuMemcpyHtoD", address, at(pageable), 16)
    d.ok("cuMemcpyDtoH", at(pageable), address, 16)
    d.ok("cuMemcpyDtoHAsync", at(pageable), address, 16, stream)
    d.ok("cuMemFree", address)
    assert fake.host_syncs() == before + 7


def test_a_destroyed_stream_is_refused_everywhere(d):
    stream, event, pinned = d.stream(), d.event(), d.pinned()
    address, _ = d.device()
    d.ok("cuStreamDestroy", stream)
    d.stream()  # its handle is another one
    assert d.cuStreamDestroy(stream) == INVALID_HANDLE
    assert d.cuStreamQuery(stream) == INVALID_HANDLE
    assert d.cuStreamSynchronize(stream) == INVALID_HANDLE
    assert d.cuStreamGetFlags(stream, byref(c_uint())) == INVALID_HANDLE
    assert d.cuStreamWaitEvent(stream, event, 0) == INVALID_HANDLE
    assert d.cuEventRecord(event, stream) == INVALID_HANDLE
    assert d.cuMemcpyHtoDAsync(address, at(pinned), 16, stream) == INVALID_HANDLE
    assert d.cuMemsetD8Async(address, 0, 16, stream) == INVALID_HANDLE
    for default in (NULL, LEGACY, PER_THREAD):
        assert d.cuStreamDestroy(default) == INVALID_HANDLE


def test_a_destroyed_event_is_refused_everywhere(d):
    event, other = d.event(0), d.event(0)
    d.ok("cuEventDestroy", event)
    d.event()
    assert d.cuEventDestroy(event) == INVALID_HANDLE
    assert d.cuEventQuery(event) == INVALID_HANDLE
    assert d.cuEventSynchronize(event) == INVALID_HANDLE
    assert d.cuEventRecord(event, NULL) == INVALID_HANDLE
    assert d.cuStreamWaitEvent(NULL, event, 0) == INVALID_HANDLE
    assert d.cuEventElapsedTime(byref(c_float()), other, event) == INVALID_HANDLE


def test_handles_of_another_kind_are_refused(d):
    stream, event = d.stream(), d.event()
    assert d.cuStreamQuery(event) == INVALID_HANDLE
    assert d.cuEventQuery(stream) == INVALID_HANDLE
    assert d.cuCtxPushCurrent(stream) == INVALID_CONTEXT
    for garbage in (3, 0xDEADBEEF, stream + 1, stream + 6400):
        assert d.cuStreamQuery(garbage) == INVALID_HANDLE


# --- reset, fork, threads ---


def test_a_reset_forgets_everything(d, fake):
    stream, pinned = d.stream(), d.pinned()
    address, target = d.device()
    fake.set_limits(device_bytes=100)
    fake.mode("random", 3)
    d.htod(address, pinned, stream)
    fake.reset()
    assert fake.current_context() is None
    assert fake.calls() == {}
    assert fake.pending() == fake.host_syncs() == 0
    assert not any(fake.live().values())
    assert d.cuCtxPushCurrent(d.context) == INVALID_CONTEXT
    assert fake.create_context() != d.context
    assert d.stream() != stream
    assert d.cuStreamQuery(stream) == INVALID_HANDLE
    assert d.cuMemFree(address) == INVALID_VALUE
    pinned[:] = 0  # an array that outlived its memory harms nobody
    assert not any(fake.damage().values())
    d.alloc(1000)


def test_a_reset_is_fast(d, fake):
    begin = time.perf_counter()
    for _ in range(200):
        fake.create_context()
        for _ in range(5):
            d.set(d.alloc(4096), 1, 4, d.stream())
            d.event()
        fake.reset()
    assert time.perf_counter() - begin < 2


def test_a_reset_lets_waiting_threads_go(d, fake):
    stream = d.stream()
    fake.spin(stream, 60_000)
    started = threading.Event()

    def wait():
        d.ok("cuCtxPushCurrent", d.context)
        started.set()
        return d.cuStreamSynchronize(stream)

    def reset_soon():
        assert started.wait(10)
        time.sleep(0.05)
        fake.reset()

    thread = threading.Thread(target=reset_soon)
    thread.start()
    assert in_thread(wait) == SUCCESS
    thread.join()


def test_calls_in_a_forked_child_are_refused_and_seen_by_the_parent(d, fake):
    calls = fake.calls()
    child = os.fork()
    if child == 0:
        codes = [call_with_nothing(d, name) for name in SIGNATURES]
        os._exit(set(codes) != {NOT_INITIALIZED})
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert fake.child_calls() == len(SIGNATURES)
    assert fake.calls() == calls
    fake.reset()
    assert fake.child_calls() == 0


def test_a_fork_while_another_thread_is_in_the_driver_does_not_hang(d, fake):
    stop = threading.Event()

    def busy():
        d.ok("cuCtxPushCurrent", d.context)
        while not stop.is_set():
            d.ok("cuMemFree", d.alloc(1 << 16))

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        for _ in range(20):
            child = os.fork()
            if child == 0:
                fake.pending()  # the lock may have been taken at the fork
                os._exit(d.cuCtxSynchronize())
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert status == NOT_INITIALIZED
    finally:
        stop.set()
        thread.join()
    assert fake.child_calls() == 20


@pytest.mark.parametrize("mode", ["late", "random", "eager"])
def test_many_threads_may_use_the_driver_at_once(d, fake, mode):
    fake.mode(mode, 5)
    failures = []

    def work(number):
        d.ok("cuCtxPushCurrent", d.context)
        stream, event = d.stream(number % 2), d.event()
        source, target = d.pinned(64), d.pinned(64)
        address = d.alloc(256)
        for round_ in range(60):
            source[:] = 1000 * number + round_
            d.htod(address, source, stream)
            if round_ % 10 == 0:
                d.ok("cuMemFree", d.alloc(64))
            d.ok("cuMemcpyDtoHAsync", at(target), address, 256, stream)
            d.record(event, stream)
            d.ok("cuEventSynchronize", event)
            if not (target == 1000 * number + round_).all():
                failures.append((number, round_))
        d.ok("cuMemFreeHost", at(source))
        d.ok("cuMemFreeHost", at(target))
        d.ok("cuMemFree", address)
        d.ok("cuEventDestroy", event)
        d.ok("cuStreamDestroy", stream)
        d.ok("cuCtxPopCurrent", byref(c_void_p()))

    def guarded(number):
        try:
            work(number)
        except AssertionError as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    live = fake.live()
    assert live.pop("contexts") == 1
    assert not any(live.values())
    assert not any(fake.damage().values())


# --- kernels ---

SAMPLES = Path(__file__).parent / "fake_cuda" / "sample_kernels.cu"
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class Kernels:
    """The sample kernels, loaded in the driver's current context."""

    def __init__(self, driver):
        self.driver = driver
        self.module = driver.new("cuModuleLoadData", b"any bytes")

    def function(self, name):
        return self.driver.new("cuModuleGetFunction", self.module, name.encode())

    def call(self, name, grid, block, *values, shared=0, stream=NULL, together=False):
        """Launch a kernel and return the code; values are ctypes objects."""
        function = name if isinstance(name, int) else self.function(name)
        places = (c_void_p * len(values))(*map(ctypes.addressof, values))
        shape = [*grid, *[1] * (3 - len(grid)), *block, *[1] * (3 - len(block))]
        if together:
            launch, rest = self.driver.cuLaunchCooperativeKernel, (places,)
        else:
            launch, rest = self.driver.cuLaunchKernel, (places, None)
        return launch(function, *shape, shared, stream, *rest)

    def __call__(self, *arguments, **options):
        assert self.call(*arguments, **options) == SUCCESS


@pytest.fixture(scope="session")
def kernels_library():
    reason = why_no_kernels(SAMPLES)
    if reason is not None:
        pytest.skip(reason)
    return build_kernels(kernels=SAMPLES, names=SAMPLES.with_suffix(".h"))


@pytest.fixture
def k(d, fake, kernels_library):
    fake.set_kernels(kernels_library)
    return Kernels(d)


def of(address):
    return c_void_p(address)


def device_floats(d, array):
    """Return a device block with a copy of the array, and the array over it."""
    address = d.alloc(array.nbytes)
    here = np.ctypeslib.as_array((c_float * array.size).from_address(address))
    here[:] = array.ravel()
    return address, here


def test_building_the_kernels_twice_gives_the_same_file(kernels_library, tmp_path):
    arguments = {"kernels": SAMPLES, "names": SAMPLES.with_suffix(".h")}
    stamp = kernels_library.stat().st_mtime_ns
    assert build_kernels(**arguments) == kernels_library
    assert kernels_library.stat().st_mtime_ns == stamp


def test_without_a_compiler_for_the_kernels_there_is_a_reason(monkeypatch, tmp_path):
    assert "no such.cu" in why_no_kernels("no such.cu")
    monkeypatch.setenv("CXX", "no-such-compiler -O3")
    assert "no-such-compiler" in why_no_kernels(SAMPLES)
    with pytest.raises(FileNotFoundError, match="no-such-compiler"):
        build_kernels(tmp_path, SAMPLES)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no C++ compiler" in why_no_kernels(SAMPLES)


def test_the_environment_names_the_kernels_else_no_module_loads(
    d, fake, kernels_library, monkeypatch
):
    monkeypatch.delenv("FAKE_CUDA_KERNELS", raising=False)
    assert d.cuModuleLoadData(byref(c_void_p()), b"") == NO_BINARY_FOR_GPU
    monkeypatch.setenv("FAKE_CUDA_KERNELS", os.fspath(kernels_library))
    Kernels(d)
    fake.set_kernels("no such file")
    assert d.cuModuleLoadData(byref(c_void_p()), b"") == NO_BINARY_FOR_GPU


def test_modules_and_functions_are_known_by_their_handles(d, fake, k):
    assert d.cuModuleLoadData(byref(c_void_p()), None) == INVALID_VALUE
    function = k.function("add_value")
    out = c_void_p()
    assert d.cuModuleGetFunction(byref(out), k.module, b"nothing") == NOT_FOUND
    assert d.cuModuleGetFunction(byref(out), function, b"sum") == INVALID_HANDLE
    assert fake.live()["modules"] == 1
    other = fake.create_context()
    address = d.alloc(4)
    value = (of(address), c_int(1), c_int(1))
    assert k.call(function, (1,), (1,), *value) == INVALID_HANDLE
    assert d.cuModuleUnload(k.module) == INVALID_HANDLE
    fake.destroy_context(other)
    d.ok("cuModuleUnload", k.module)
    assert d.cuModuleUnload(k.module) == INVALID_HANDLE
    assert k.call(function, (1,), (1,), *value) == INVALID_HANDLE
    assert fake.live()["modules"] == 0


def test_modules_go_with_their_context(d, fake, k):
    d.ok("cuCtxDestroy", d.context)
    assert fake.live()["modules"] == 0


@pytest.mark.parametrize(
    "grid, block, shared, code",
    [
        ((1,), (1024,), 0, SUCCESS),
        ((1,), (1025,), 0, INVALID_VALUE),
        ((1,), (32, 33), 0, INVALID_VALUE),
        ((1,), (1, 1, 65), 0, INVALID_VALUE),
        ((0,), (1,), 0, INVALID_VALUE),
        ((1, 0), (1,), 0, INVALID_VALUE),
        ((1,), (1, 1, 0), 0, INVALID_VALUE),
        ((100000, 1), (1,), 0, SUCCESS),
        ((1, 65535), (1,), 0, SUCCESS),
        ((1, 65536), (1,), 0, INVALID_VALUE),
        ((1, 1, 65536), (1,), 0, INVALID_VALUE),
        ((1,), (1,), 48 << 10, SUCCESS),
        ((1,), (1,), (48 << 10) + 1, INVALID_VALUE),
    ],
)
def test_launches_beyond_the_limits_are_refused(d, k, grid, block, shared, code):
    assert k.call("idle", grid, block, c_int(0), shared=shared) == code


def test_more_dynamic_shared_memory_must_be_asked_for(d, k):
    function, value = k.function("idle"), c_int()
    most = 227 << 10
    assert d.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED, most + 1) == INVALID_VALUE
    d.ok("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED, most)
    d.ok("cuFuncGetAttribute", byref(value), MAX_DYNAMIC_SHARED, function)
    assert value.value == most
    k(function, (1,), (1,), c_int(0), shared=most)
    assert k.call(function, (1,), (1,), c_int(0), shared=most + 1) == INVALID_VALUE
    d.ok("cuDeviceGetAttribute", byref(value), 97, 0)  # what may be asked for
    assert value.value == most
    blocks = d.cuOccupancyMaxActiveBlocksPerMultiprocessor
    assert blocks(byref(value), function, 256, most) == SUCCESS
    assert value.value == 2
    assert blocks(byref(value), function, 256, most + 1) == SUCCESS
    assert value.value == 0


def test_launches_that_lack_parameters_or_come_in_the_old_form_are_refused(d, k):
    function = k.function("idle")
    shape = (1, 1, 1, 1, 1, 1, 0, NULL)
    extra = (c_void_p * 1)()
    assert d.cuLaunchKernel(function, *shape, None, None) == INVALID_VALUE
    assert d.cuLaunchKernel(function, *shape, None, extra) == INVALID_VALUE


def test_page_locked_memory_has_a_device_pointer(d):
    pinned, array = d.pinned(), np.zeros(3, np.int32)
    assert d.new("cuMemHostGetDevicePointer", at(pinned) + 4, 0) == at(pinned) + 4
    out = c_void_p()
    assert d.cuMemHostGetDevicePointer(byref(out), at(array), 0) == INVALID_VALUE
    d.ok("cuMemHostRegister", at(array), array.nbytes, 0)
    assert d.new("cuMemHostGetDevicePointer", at(array), 0) == at(array)
    assert d.cuMemHostGetDevicePointer(byref(out), d.alloc(4), 0) == INVALID_VALUE


# --- kernels run as late as other work ---


def test_a_kernel_runs_late_and_keeps_its_place_in_the_stream(d, fake, k):
    stream = d.stream()
    address, here = d.device()
    d.set(address, 1, stream=stream)
    k("add_value", (1,), (4,), of(address), c_int(5), c_int(3), stream=stream)
    d.set(address, 9, 1, stream=stream)
    assert (here == -1).all()
    assert fake.pending() == 3
    d.sync(stream)
    assert here.tolist() == [9, 6, 6, 1]


@pytest.mark.parametrize("ordered", [True, False])
def test_events_order_a_kernel_after_another_streams_copy(d, k, ordered):
    first, second, event = d.stream(), d.stream(), d.event()
    source = d.pinned()
    address, here = d.device()
    source[:] = 10
    here[:] = 0
    d.htod(address, source, first)
    d.record(event, first)
    if ordered:
        d.wait(second, event)
    k("add_value", (1,), (4,), of(address), c_int(5), c_int(4), stream=second)
    d.sync(second)
    assert (here == (15 if ordered else 5)).all()


def test_a_kernel_that_is_given_another_devices_memory_is_a_fault(d, fake, k):
    address, here = d.device()
    here[:] = 0
    fake.set_device_count(2)
    d.new("cuCtxCreate", 0, 1)
    there = Kernels(d)
    there("add_value", (1,), (4,), of(address), c_int(5), c_int(4))
    d.sync()
    assert fake.damage()["faults"] == 1
    assert (here == 0).all()


def test_parameters_are_copied_at_the_launch(d, k):
    address, here = d.device()
    here[:] = 0
    pointer, value, count = of(address), c_int(5), c_int(4)
    k("add_value", (1,), (4,), pointer, value, count)
    pointer.value, value.value, count.value = 0, 7, 1
    d.sync()
    assert (here == 5).all()


class Scaling(ctypes.Structure):
    _fields_ = [("first", ctypes.c_char), ("factor", ctypes.c_double), ("count", c_int)]


def test_parameters_of_all_sizes_arrive(d, k):
    address, here = device_floats(d, np.arange(8, dtype=np.float32))
    offsets = (c_float * 4)(1, 2, 3, 4)
    rest = (of(address), ctypes.c_bool(True), offsets, ctypes.c_longlong(100))
    k("scale_all", (1,), (8,), Scaling(b"x", 1.5, 7), *rest)
    d.sync()
    expected = 3 * np.arange(8) + np.tile([101, 102, 103, 104], 2)
    assert here[:7].tolist() == expected[:7].tolist()
    assert here[7] == 7


def test_kernels_may_use_page_locked_memory_and_null(d, fake, k):
    pinned = d.pinned()
    pinned[:] = 1
    k("add_value", (1,), (4,), of(at(pinned)), c_int(1), c_int(4))
    k("add_value", (1,), (4,), of(None), c_int(1), c_int(0))
    end = d.device()[0] + 16
    k("add_value", (1,), (4,), of(end), c_int(1), c_int(0))  # nothing, at its end
    d.sync()
    assert (pinned == 2).all()
    assert fake.damage()["faults"] == 0


def test_a_kernel_whose_memory_is_gone_is_a_fault(d, fake, k):
    stream = d.stream()
    array = np.zeros(4, np.int32)  # pageable
    address, _ = d.device()
    d.ok("cuMemFree", address)
    for number, wrong in enumerate((address, at(array))):
        k("add_value", (1,), (4,), of(wrong), c_int(1), c_int(4), stream=stream)
        d.sync(stream)
        assert fake.damage()["faults"] == number + 1
    assert (array == 0).all()
    assert fake.damage()["late_writes"] == 0


def test_a_kernel_whose_module_is_gone_is_a_fault(d, fake, k):
    address, here = d.device()
    k("add_value", (1,), (4,), of(address), c_int(1), c_int(4))
    d.ok("cuModuleUnload", k.module)
    d.sync()
    assert (here == -1).all()
    assert fake.damage()["faults"] == 1


@pytest.mark.stray_write
def test_a_kernel_that_writes_beyond_its_memory_is_found_out(d, fake, k):
    address, _ = d.device()
    k("add_value", (1,), (8,), of(address), c_int(1), c_int(5))
    d.sync()
    assert fake.damage()["damaged_zones"] == 1


def test_launches_can_be_made_to_fail_and_are_counted(d, fake, k):
    fake.fail("cuLaunchKernel", 1, code=719)
    codes = [k.call("idle", (1,), (1,), c_int(0)) for _ in range(3)]
    assert codes == [SUCCESS, 719, SUCCESS]
    assert fake.calls("cuLaunchKernel") == 3
    assert fake.pending() == 2


# --- what kernels can do ---


def test_every_thread_of_every_block_runs_once_at_its_place(d, k):
    address, here = d.device(12 * 30)
    k("places", (3, 2, 2), (5, 3, 2), of(address))
    d.sync()
    expected = 1000 * np.arange(12)[:, None] + np.arange(30)
    assert (here.reshape(12, 30) == expected).all()


@pytest.mark.parametrize("mode", ["late", "random"])
@pytest.mark.parametrize("block", [32, 96, 1024])
@pytest.mark.parametrize("grid", [1, 5])
def test_shuffles_barriers_and_shared_memory_give_the_right_sum(
    d, fake, k, mode, block, grid
):
    fake.mode(mode, block)
    values = np.random.default_rng(1).integers(-50, 50, 3000).astype(np.float32)
    address, _ = device_floats(d, values)
    total, result = device_floats(d, np.zeros(1, np.float32))
    number, count = d.device(1)
    count[0] = 0
    arguments = of(address), c_int(values.size), of(total), of(number)
    k("sum", (grid,), (block,), *arguments)
    d.sync()
    assert result[0] == values.sum()
    assert count[0] == values.size


@pytest.mark.parametrize("count", [1, 7, 32, 250])
def test_dynamic_shared_memory_is_each_blocks_own(d, fake, k, count):
    address, here = d.device(3 * count)
    here[:] = np.arange(3 * count)
    k("reverse", (3,), (count,), of(address), shared=4 * count)
    d.sync()
    expected = np.arange(3 * count).reshape(3, count)[:, ::-1]
    assert (here.reshape(3, count) == expected).all()


def test_lanes_exchange_what_they_have(d, k):
    address, here = d.device(8 * 32)
    k("warp_things", (1,), (32,), of(address))
    d.sync()
    lane = np.arange(32)
    out = here.reshape(8, 32)
    assert (out[0] == 5).all()
    assert (out[1] == np.where(lane < 3, lane, lane - 3)).all()
    assert (out[2] == np.where(lane % 8 > 4, lane, lane + 3)).all()
    assert (out[3] == lane ^ 7).all()
    assert (out[4] == lane // 8 * 8 + 1).all()
    assert (out[5] == sum(1 << i for i in range(0, 31, 3)) | 1 << 30).all()
    assert (out[6] == 2).all()
    assert (out[7] == 2 * (lane ^ 1) + 1).all()


def test_atomics_see_every_thread(d, k):
    address, here = d.device(5)
    here[:] = 0, 0, 7, 0, 0
    k("count_atomically", (7,), (100,), of(address))
    d.sync()
    assert here.tolist() == [699, 700, 8, 9, -699]


@pytest.mark.parametrize("mode", ["late", "random"])
def test_all_blocks_of_a_cooperative_launch_meet(d, fake, k, mode):
    fake.mode(mode, 3)
    source, x = d.device(8 * 50)
    target, out = d.device(8)
    x[:] = np.random.default_rng(2).permutation(8 * 50)
    k("grid_maximum", (8,), (50,), of(source), of(target), shared=200, together=True)
    d.sync()
    assert (out == 399).all()


def test_a_cooperative_launch_must_fit_on_the_device(d, fake, k):
    arguments = ("idle", (9,), (32,), c_int(0))
    assert k.call(*arguments, together=True) == COOPERATIVE_LAUNCH_TOO_LARGE
    assert k.call(*arguments) == SUCCESS


@pytest.mark.parametrize(
    "name, block, shared, words",
    [
        ("left_behind", 64, 0, "warp do not meet: 1 have ended; 31 are at __syncthr"),
        ("left_behind", 65, 0, "block do not meet: 1 have ended; 64 are at __syncthr"),
        ("two_places", 32, 0, "8 are at __syncthreads; 24 are at __syncwarp"),
        ("half_a_warp", 32, 0, "masks of part of a warp are not emulated"),
        ("beyond_shared", 32, 128, "wrote beyond its dynamic shared memory"),
        ("grid_maximum", 32, 128, "GRID_SYNC needs a cooperative launch"),
        ("deep", 1, 0, "stack overflowed"),
    ],
)
def test_a_kernel_with_a_mistake_ends_the_process_and_is_named(
    library, kernels_library, tmp_path, name, block, shared, words
):
    copy = shutil.copy(library, tmp_path / "copy.so")  # not yet used in this process
    with open(tmp_path / "stderr", "w+") as stderr:
        child = os.fork()
        if child == 0:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            faulthandler.disable()
            os.dup2(stderr.fileno(), 2)
            driver = Driver(FakeCuda(copy))
            driver.ok("cuInit", 0)
            driver.fake.create_context()
            driver.fake.set_kernels(kernels_library)
            address, here = driver.device(1000)
            here[:] = 1
            twice = [of(address)] * (2 if name == "grid_maximum" else 1)
            Kernels(driver)(name, (2,), (block,), *twice, shared=shared)
            driver.cuCtxSynchronize()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -6
        stderr.seek(0)
        text = stderr.read()
    assert f"cuda_on_cpu: kernel {name}, block (0, 0, 0): " in text
    assert words in text


# --- random numbers ---

ONES = 2**64 - 1


@pytest.mark.parametrize(
    "counter, key, numbers",
    [
        # From the authors of the algorithm: kat_vectors of Random123, philox4x32 10.
        ((0, 0), 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((ONES, ONES), ONES, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x85A308D3243F6A88, 0x0370734413198A2E),
            0x299F31D0A4093822,
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_published_numbers(d, k, counter, key, numbers):
    address, here = d.device(4)
    values = map(ctypes.c_uint64, (*counter, key))
    k("philox_block", (1,), (1,), *values, of(address))
    d.sync()
    assert [f"{n:08x}" for n in here.view(np.uint32)] == numbers.split()


def draw(d, k, seed, subsequence, offset):
    (numbers, a), (normals, b), (uniforms, c) = (d.device(12) for _ in range(3))
    places = map(ctypes.c_uint64, (seed, subsequence, offset))
    k("random_numbers", (1,), (1,), *places, of(numbers), of(normals), of(uniforms))
    d.sync()
    return a.view(np.uint32), b.view(np.float32), c.view(np.float32)


def test_curand_starts_at_seed_subsequence_and_offset(d, k):
    first, _, _ = draw(d, k, 0, 0, 0)
    assert [f"{n:08x}" for n in first[:2]] == ["6627e8d5", "e169c58d"]
    address, here = d.device(4)
    seed, subsequence = 0x123456789ABCDEF0, 0xFEDCBA9876543210
    expected = []
    for place in range(5, 9):
        values = map(ctypes.c_uint64, (place, subsequence, seed))
        k("philox_block", (1,), (1,), *values, of(address))
        d.sync()
        expected += here.view(np.uint32).tolist()
    for offset in range(4):
        numbers, _, _ = draw(d, k, seed, subsequence, 20 + offset)
        assert numbers.tolist() == expected[offset : offset + 12]


def test_curand_makes_normals_and_uniforms_of_these_numbers(d, k):
    numbers, normals, uniforms = draw(d, k, 42, 7, 3)
    exact = (numbers.astype(np.float64) + 0.5) / 2**32
    radius = np.sqrt(-2 * np.log(exact[::2]))
    angle = 2 * np.pi * exact[1::2]
    expected = np.stack([radius * np.sin(angle), radius * np.cos(angle)], 1).ravel()
    np.testing.assert_allclose(normals, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(uniforms, exact, rtol=1e-6)


# --- cuBLAS ---

BLAS_SUCCESS = 0
BLAS_NOT_INITIALIZED = 1
BLAS_ALLOC_FAILED = 3
BLAS_INVALID_VALUE = 7
BLAS_EXECUTION_FAILED = 13
BLAS_NOT_SUPPORTED = 15

PRODUCT = (HANDLE, c_int, c_int, c_int, c_int, c_int)
CUBLAS_SIGNATURES = {
    "cublasCreate_v2": (POINTER(c_void_p),),
    "cublasDestroy_v2": (HANDLE,),
    "cublasGetVersion_v2": (HANDLE, POINTER(c_int)),
    "cublasSetStream_v2": (HANDLE, HANDLE),
    "cublasSetWorkspace_v2": (HANDLE, c_void_p, c_size_t),
    "cublasSetMathMode": (HANDLE, c_int),
    "cublasSetPointerMode_v2": (HANDLE, c_int),
    "cublasSgemm_v2": (
        *PRODUCT, c_void_p, c_void_p, c_int, c_void_p, c_int,
        c_void_p, c_void_p, c_int,
    ),
    "cublasSgemv_v2": (
        HANDLE, c_int, c_int, c_int, c_void_p, c_void_p, c_int, c_void_p, c_int,
        c_void_p, c_void_p, c_int,
    ),
    "cublasSgemmStridedBatched": (
        *PRODUCT, c_void_p, c_void_p, c_int, ctypes.c_longlong, c_void_p, c_int,
        ctypes.c_longlong, c_void_p, c_void_p, c_int, ctypes.c_longlong, c_int,
    ),
    "cublasGemmEx": (
        *PRODUCT, c_void_p, c_void_p, c_int, c_int, c_void_p, c_int, c_int,
        c_void_p, c_void_p, c_int, c_int, c_int, c_int,
    ),
}  # fmt: skip


class Blas:
    """The functions of cuBLAS, and a handle for the current context.

    The methods take NumPy matrices: they are copied to the device column by column,
    with ``room`` elements of nothing between their columns.
    """

    def __init__(self, driver, fake):
        self.driver = driver
        library = ctypes.CDLL(fake.path)
        for name, arguments in CUBLAS_SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = c_int, arguments
            setattr(self, name[len("cublas") :].removesuffix("_v2"), function)
        self.text = library.cublasGetStatusString
        self.text.restype = c_char_p
        handle = c_void_p()
        assert self.Create(byref(handle)) == BLAS_SUCCESS
        self.handle = handle.value

    def matrix(self, array, room=0):
        """Return the address and leading dimension of a copy, and the array over it."""
        rows, columns = array.shape
        address, here = device_floats(
            self.driver, np.full((columns, rows + room), np.nan, np.float32)
        )
        here = here.reshape(columns, rows + room).T[:rows]
        here[:] = array
        return address, rows + room, here


@pytest.fixture
def blas(d, fake):
    return Blas(d, fake)


@pytest.fixture
def rng():
    return np.random.default_rng(5)


def test_every_function_of_cublas_is_tested_here(fake):
    assert set(fake.cublas_entries) == set(CUBLAS_SIGNATURES)


def test_a_handle_needs_a_context_and_is_counted(d, fake, blas):
    assert fake.live()["blas_handles"] == 1
    version = c_int()
    assert blas.GetVersion(blas.handle, byref(version)) == BLAS_SUCCESS
    assert version.value == 130000
    d.new("cuCtxPopCurrent")
    assert blas.Create(byref(c_void_p())) == BLAS_NOT_INITIALIZED
    assert blas.Destroy(blas.handle) == BLAS_NOT_INITIALIZED
    d.ok("cuCtxPushCurrent", d.context)
    assert blas.Destroy(blas.handle) == BLAS_SUCCESS
    assert blas.Destroy(blas.handle) == BLAS_NOT_INITIALIZED
    assert fake.live()["blas_handles"] == 0


def test_handles_go_with_their_context(d, fake, blas):
    d.ok("cuCtxDestroy", d.context)
    assert fake.live()["blas_handles"] == 0


def test_statuses_have_their_texts(blas):
    assert b"not initialized" in blas.text(BLAS_NOT_INITIALIZED)
    assert blas.text(12345) == b"unknown status"


def test_settings_are_checked(d, blas):
    h, workspace = blas.handle, d.alloc(1024)
    assert blas.SetWorkspace(h, workspace, 1024) == BLAS_SUCCESS
    assert blas.SetWorkspace(h, workspace + 16, 512) == BLAS_INVALID_VALUE
    assert blas.SetMathMode(h, 3) == BLAS_SUCCESS
    assert blas.SetMathMode(h, 1024) == BLAS_INVALID_VALUE
    assert blas.SetPointerMode(h, 2) == BLAS_INVALID_VALUE
    assert blas.SetStream(h, 12345) == BLAS_INVALID_VALUE


@pytest.mark.parametrize("room", [0, 3])
@pytest.mark.parametrize("trans_b", [0, 1, 2])
@pytest.mark.parametrize("trans_a", [0, 1, 2])
@pytest.mark.parametrize("size", [(1, 1, 1), (4, 8, 3), (5, 7, 9), (1, 6, 30)])
@pytest.mark.parametrize("function", ["Sgemm", "GemmEx"])
def test_a_product_is_that_of_numpy(
    d, fake, blas, rng, function, size, trans_a, trans_b, room
):
    m, n, depth = size
    a, b = rng.normal(size=(m, depth)), rng.normal(size=(depth, n))
    c = rng.normal(size=(m, n))
    alpha, beta = c_float(1.5), c_float(-0.5)
    a_at, lda, _ = blas.matrix(a.T if trans_a else a, room)
    b_at, ldb, _ = blas.matrix(b.T if trans_b else b, 2 * room)
    c_at, ldc, result = blas.matrix(c, room)
    kind = (0,) if function == "GemmEx" else ()
    rest = (77, -1) if function == "GemmEx" else ()
    status = getattr(blas, function)(
        blas.handle, trans_a, trans_b, m, n, depth, byref(alpha), a_at, *kind, lda,
        b_at, *kind, ldb, byref(beta), c_at, *kind, ldc, *rest,
    )  # fmt: skip
    assert status == BLAS_SUCCESS
    alpha.value = beta.value = 99  # taken at the call
    np.testing.assert_array_equal(result, c.astype(np.float32))  # not yet
    d.sync()
    np.testing.assert_allclose(result, 1.5 * a @ b - 0.5 * c, rtol=1e-5, atol=1e-6)
    assert not any(fake.damage().values())


@pytest.mark.parametrize("steps", [(1, 1), (2, 3), (-1, 1), (-2, -3)])
@pytest.mark.parametrize("trans", [0, 1])
@pytest.mark.parametrize("size", [(1, 1), (6, 9)])
def test_a_product_with_a_vector_is_that_of_numpy(d, blas, rng, size, trans, steps):
    a = rng.normal(size=size)
    given = a.T if trans else a
    x, y = rng.normal(size=given.shape[1]), rng.normal(size=given.shape[0])
    a_at, lda, _ = blas.matrix(a, 2)

    def strided(vector, step):
        spread = np.full(vector.size * abs(step), np.nan, np.float32)
        spread[:: abs(step)] = vector[:: 1 if step > 0 else -1]
        address, here = device_floats(d, spread)
        return address, here[:: abs(step)][:: 1 if step > 0 else -1]

    (x_at, _), (y_at, result) = strided(x, steps[0]), strided(y, steps[1])
    status = blas.Sgemv(
        blas.handle, trans, *size, byref(c_float(2)), a_at, lda, x_at, steps[0],
        byref(c_float(3)), y_at, steps[1],
    )  # fmt: skip
    assert status == BLAS_SUCCESS
    d.sync()
    np.testing.assert_allclose(result, 2 * given @ x + 3 * y, rtol=1e-5, atol=1e-5)


def test_a_batch_of_products_steps_through_its_matrices(d, blas, rng):
    a, b = rng.normal(size=(4, 5, 3)), rng.normal(size=(3, 2))
    a_at, _ = device_floats(d, a.transpose(0, 2, 1).astype(np.float32))
    b_at, _ = device_floats(d, b.T.astype(np.float32))
    c_at, c = device_floats(d, np.full(40, np.nan, np.float32))
    one, zero = c_float(1), c_float(0)  # what beta = 0 multiplies is not read
    status = blas.SgemmStridedBatched(
        blas.handle, 0, 0, 5, 2, 3, byref(one), a_at, 5, 15, b_at, 3, 0,
        byref(zero), c_at, 5, 10, 4,
    )  # fmt: skip
    assert status == BLAS_SUCCESS
    d.sync()
    result = c.reshape(4, 2, 5).transpose(0, 2, 1)
    np.testing.assert_allclose(result, a @ b, rtol=1e-5, atol=1e-6)


def gemm(blas, m=2, n=2, k=2, lda=2, ldb=2, ldc=2, trans=(0, 0), **places):
    """Call Sgemm with these numbers, and ones where places are not given."""
    here = {name: blas.matrix(np.ones((2, 2)))[0] for name in "abc"} | places
    one = c_float(1)
    alpha, beta = (here.get(name, byref(one)) for name in ("alpha", "beta"))
    return blas.Sgemm(
        blas.handle, *trans, m, n, k, alpha, here["a"], lda, here["b"], ldb, beta,
        here["c"], ldc,
    )  # fmt: skip


@pytest.mark.parametrize(
    "wrong",
    [
        {"m": -1}, {"n": -1}, {"k": -1}, {"trans": (3, 0)}, {"trans": (0, -1)},
        {"lda": 1}, {"ldb": 1}, {"ldc": 1}, {"m": 0, "lda": 0},
        {"k": 3, "ldb": 2}, {"k": 3, "trans": (1, 0), "ldb": 3},
        {"alpha": None}, {"beta": None},
    ],
)  # fmt: skip
def test_wrong_numbers_are_refused(d, fake, blas, wrong):
    assert gemm(blas, **wrong) == BLAS_INVALID_VALUE
    assert fake.pending() == 0


def test_other_types_and_missing_increments_are_refused(d, blas):
    a, one = d.alloc(64), byref(c_float(1))
    start = (blas.handle, 0, 0, 2, 2, 2, one, a)
    for types in ((2, 0, 0, 68), (0, 2, 0, 68), (0, 0, 2, 68), (0, 0, 0, 70)):
        a_type, b_type, c_type, compute = types
        status = blas.GemmEx(
            *start, a_type, 2, a, b_type, 2, one, a, c_type, 2, compute, -1
        )
        assert status == BLAS_NOT_SUPPORTED
    for steps in ((0, 1), (1, 0)):
        status = blas.Sgemv(
            blas.handle, 0, 2, 2, one, a, 2, a, steps[0], one, a, steps[1]
        )
        assert status == BLAS_INVALID_VALUE


def test_products_of_nothing_need_nothing(d, fake, blas):
    assert gemm(blas, m=0, a=None, b=None, c=None) == BLAS_SUCCESS
    assert fake.pending() == 0
    c_at, _, c = blas.matrix(np.ones((2, 2)))
    two = c_float(2)
    assert gemm(blas, k=0, a=None, b=None, c=c_at, beta=byref(two)) == BLAS_SUCCESS
    d.sync()
    assert (c == 2).all()


def test_scalars_on_the_device_are_read_when_the_product_runs(d, blas):
    scalars, here = device_floats(d, np.array([1, 0], np.float32))
    c_at, _, c = blas.matrix(np.full((2, 2), np.nan))
    assert blas.SetPointerMode(blas.handle, 1) == BLAS_SUCCESS
    assert gemm(blas, c=c_at, alpha=scalars, beta=scalars + 4) == BLAS_SUCCESS
    here[0] = 10
    d.sync()
    assert (c == 20).all()


def test_a_product_takes_its_turn_in_the_stream_that_was_set(d, fake, blas):
    stream, other = d.stream(), d.stream()
    assert blas.SetStream(blas.handle, stream) == BLAS_SUCCESS
    c_at, _, c = blas.matrix(np.zeros((2, 2)))
    assert gemm(blas, c=c_at) == BLAS_SUCCESS
    d.sync(other)
    d.sync(NULL)
    assert (c == 0).all()
    d.sync(stream)
    assert (c == 2).all()
    d.ok("cuStreamDestroy", stream)
    assert gemm(blas) == BLAS_EXECUTION_FAILED


def test_a_product_whose_memory_is_gone_is_a_fault(d, fake, blas):
    short = d.alloc(12)
    for wrong in ({"a": short}, {"b": short}, {"c": short}, {"a": at(np.ones(4))}):
        before = fake.damage()["faults"]
        assert gemm(blas, **wrong) == BLAS_SUCCESS
        d.sync()
        assert fake.damage()["faults"] == before + 1
    assert fake.damage()["damaged_zones"] == 0


def test_the_workspace_is_written_to_until_another_stream_is_set(d, blas):
    workspace, here = d.device(64)
    here[:] = 0
    assert blas.SetWorkspace(blas.handle, workspace, 256) == BLAS_SUCCESS
    assert gemm(blas) == BLAS_SUCCESS
    d.sync()
    assert (here == -1).all()
    here[:] = 0
    assert blas.SetStream(blas.handle, NULL) == BLAS_SUCCESS
    assert gemm(blas) == BLAS_SUCCESS
    d.sync()
    assert (here == 0).all()


def test_calls_of_cublas_are_counted_and_can_be_made_to_fail(d, fake, blas):
    fake.fail("cublasSgemm_v2", 1, code=BLAS_EXECUTION_FAILED)
    fake.fail("cublasCreate_v2")
    statuses = [gemm(blas) for _ in range(3)]
    assert statuses == [BLAS_SUCCESS, BLAS_EXECUTION_FAILED, BLAS_SUCCESS]
    assert blas.Create(byref(c_void_p())) == BLAS_ALLOC_FAILED
    assert fake.calls("cublasSgemm_v2") == 3
    assert fake.live()["blas_handles"] == 1


def test_products_are_not_too_slow(d, blas):
    m, n, depth = 100, 1000, 1000
    a_at, lda, _ = blas.matrix(np.ones((m, depth)))
    b_at, ldb, _ = blas.matrix(np.ones((depth, n)))
    c_at, ldc, c = blas.matrix(np.zeros((m, n)))
    assert gemm(
        blas, m, n, depth, lda, ldb, ldc, a=a_at, b=b_at, c=c_at
    ) == BLAS_SUCCESS  # fmt: skip
    begin = time.perf_counter()
    d.sync()
    assert time.perf_counter() - begin < 1
    assert (c == depth).all()
