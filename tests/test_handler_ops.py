"""handler.pagelocked_empty and set_from_numpy_async, on each kind of handler."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import numpy as np
import pytest

import brainstorm_dbuf as dbuf
from brainstorm.handlers import NumpyHandler
from brainstorm_dbuf import handler_ops
from binding_tools import Interface, leak_check, pinned  # noqa: F401
from conftest import KIND, why_no_pycuda
from slow_stream import slow  # noqa: F401

pytestmark = [pytest.mark.timeout(20), pytest.mark.usefixtures("leak_check")]

SHAPE = (4, 3, 2)
VALUES = np.arange(24, dtype=np.float32).reshape(SHAPE)


class Device:
    """The two operations as PyCudaHandler gets them, over memory of ours."""

    pagelocked_empty = handler_ops.pagelocked_empty
    set_from_numpy_async = handler_ops.set_from_numpy_async
    dtype = np.float32

    def allocate(self, shape, **more):
        memory = dbuf.mem_alloc(int(np.prod(shape)) * 4)
        array = Interface(memory, tuple(shape), **more)
        array.shape = tuple(shape)
        return array

    def get_numpy_copy(self, array):
        dbuf.Context.current().synchronize()
        values = np.empty(array.shape, np.float32)
        dbuf.memcpy_dtoh(values, array.owner)
        return values


def numpy_handler():
    return NumpyHandler(np.float32, seed=1)


def pycuda_handler():
    if why_no_pycuda() is not None:
        pytest.skip(why_no_pycuda())
    from brainstorm.handlers import PyCudaHandler

    return PyCudaHandler(seed=1)


MAKERS = {"numpy": numpy_handler, "memory of ours": Device}
if KIND == "real":
    MAKERS["pycuda"] = pycuda_handler


@pytest.fixture(params=MAKERS)
def handler(request, driver):
    return MAKERS[request.param]()


@pytest.fixture(params=list(MAKERS)[1:])
def device(request, driver):
    return MAKERS[request.param]()


SOURCES = {
    "float32": lambda: VALUES.copy(),
    "float64": lambda: VALUES.astype(np.float64),
    "integers": lambda: VALUES.astype(np.uint8),
    "the other byte order": lambda: VALUES.astype(">f4"),
    "Fortran order": lambda: np.asfortranarray(VALUES),
    "transposed": lambda: np.ascontiguousarray(VALUES.transpose(1, 0, 2)).transpose(
        1, 0, 2
    ),
    "every second": lambda: np.repeat(VALUES, 2, axis=0)[::2],
    "page-locked": lambda: pinned(VALUES),
    "page-locked float64": lambda: pinned(VALUES, np.float64),
    "page-locked, transposed": lambda: pinned(VALUES.transpose(1, 0, 2)).transpose(
        1, 0, 2
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_an_array_is_set_from_numpy_whatever_its_order_and_type(name, handler, slow):
    mem = handler.allocate(SHAPE)
    with dbuf.Stream() as stream:
        slow(stream, 30)
        source = SOURCES[name]()
        handler.set_from_numpy_async(mem, source, stream)
        if not name == "page-locked":
            source[...] = 77  # it was gathered at once
        del source
        gc.collect()
        others = [pinned(np.full(SHAPE, 9)) for _ in range(5)]
        stream.synchronize()
        del others
    np.testing.assert_array_equal(handler.get_numpy_copy(mem), VALUES)


@pytest.mark.parametrize("shape", [7, (7,), (2, 3), (0, 3), ()])
def test_a_page_locked_array_has_the_shape_and_the_handlers_dtype(shape, handler):
    array = handler.pagelocked_empty(shape)
    assert array.shape == (np.empty(shape).shape)
    assert array.dtype == np.float32
    array[...] = 3
    assert array.flags.c_contiguous
    if not isinstance(handler, NumpyHandler) and array.nbytes:
        assert dbuf.is_pagelocked(array)


def test_a_page_locked_array_is_sent_without_another_copy_on_the_host(device):
    mem, source = device.allocate(SHAPE), device.pagelocked_empty(SHAPE)
    source[...] = VALUES
    before = dbuf.live_objects()["page_locked_blocks"]
    with dbuf.Stream() as stream:
        device.set_from_numpy_async(mem, source, stream)
        assert dbuf.live_objects()["page_locked_blocks"] == before
        device.set_from_numpy_async(mem, VALUES, stream)
        assert dbuf.live_objects()["page_locked_blocks"] == before + 1
    assert dbuf.live_objects()["page_locked_blocks"] == before


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 3), (24,), (1, 3, 2), (3, 4, 2), ()])
def test_another_shape_is_refused_as_set_from_numpy_does(shape, handler):
    mem = handler.allocate(SHAPE)
    handler.set_from_numpy(mem, VALUES) if hasattr(handler, "set_from_numpy") else None
    with pytest.raises(ValueError) as caught:
        handler.set_from_numpy_async(mem, np.zeros(shape), None)
    assert str(SHAPE) in str(caught.value) and str(shape) in str(caught.value)


@pytest.mark.parametrize("name", ["ours", "None", "handle", "foreign", "like PyCUDA's"])
def test_streams_of_every_kind_are_taken(name, device):
    mem = device.allocate(SHAPE)
    dbuf.Context.current().synchronize()  # PyCUDA fills it on the default stream
    with dbuf.Stream() as stream:
        stream_of_any_kind = {
            "ours": stream,
            "None": None,
            "handle": stream.handle,
            "foreign": Foreign(stream),
            "like PyCUDA's": SimpleNamespace(handle=stream.handle),
        }[name]
        device.set_from_numpy_async(mem, VALUES, stream_of_any_kind)
        stream.synchronize()
    np.testing.assert_array_equal(device.get_numpy_copy(mem), VALUES)


class Foreign:
    def __init__(self, stream):
        self.__cuda_stream__ = stream.__cuda_stream__


@pytest.mark.parametrize("make", [numpy_handler, Device])
def test_nothing_may_be_set(make, driver):
    handler = make()
    mem = handler.allocate((0, 3))
    handler.set_from_numpy_async(mem, np.empty((0, 3)), None)


def test_a_device_array_with_gaps_is_refused(driver):
    device = Device()
    mem = device.allocate(SHAPE, strides=(48, 16, 8))
    with pytest.raises(ValueError, match="contiguous"):
        device.set_from_numpy_async(mem, VALUES, None)


def test_too_little_page_locked_memory_is_a_memory_error(fake):
    device = Device()
    mem = device.allocate(SHAPE)
    fake.set_limits(pinned_bytes=50)
    with pytest.raises(dbuf.CudaMemoryError):
        device.pagelocked_empty(SHAPE)
    with pytest.raises(MemoryError):
        device.set_from_numpy_async(mem, VALUES, None)
    fake.set_limits()
    device.set_from_numpy_async(mem, VALUES, None)
    np.testing.assert_array_equal(device.get_numpy_copy(mem), VALUES)


@pytest.mark.gpu
def test_streams_of_pycuda_are_taken(driver):
    handler = pycuda_handler()
    from pycuda.driver import Stream

    mem, stream = handler.allocate(SHAPE), Stream()
    for source in (VALUES, VALUES.astype(np.float64), pinned(VALUES)):
        handler.fill(mem, 0)
        handler.set_from_numpy_async(mem, source, stream)
        stream.synchronize()
        np.testing.assert_array_equal(handler.get_numpy_copy(mem), VALUES)
    dbuf.Context.current().synchronize()


@pytest.mark.gpu
def test_copy_to_of_pycuda_refuses_what_does_not_fit(driver):
    handler = pycuda_handler()
    from pycuda import gpuarray

    dest = handler.allocate(SHAPE)
    for source in (handler.allocate((4, 3)), gpuarray.zeros((3, 2, 2), np.float64)):
        with pytest.raises(ValueError, match="copy_to"):
            handler.copy_to(source, dest)
