"""DeviceArray: views, reshapes, exchange with other libraries, memory and its pool."""

from __future__ import annotations

import copy
import ctypes
import gc
import operator
import os
import pickle
import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import brainstorm_dbuf as dbuf
from binding_tools import Interface, in_thread
from brainstorm_dbuf import _cuda
from conftest import live_objects
from layouts import (
    assert_equal_numbers,
    assert_same_bits,
    buffer_of,
    layouts,
    on_one_handler,
    values,
)

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("nothing_left")]

few = st.lists(st.integers(0, 4), max_size=4).map(tuple)


def pair(handler, shape):
    """Return the same numbers on the host and on the device, all different."""
    host = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)
    return host, handler.create_from_numpy(host)


def assert_same_view(device, host, device_base, host_base):
    """Compare shape, strides, place in the memory and elements."""
    assert device.shape == host.shape
    assert device.ndim == host.ndim and device.size == host.size
    assert device.nbytes == host.nbytes
    if host.size:
        start = device.ptr - device_base.ptr
        assert start == host.ctypes.data - host_base.ctypes.data
        for n, mine, numpys in zip(host.shape, device.strides, host.strides):
            assert n == 1 or mine == numpys
    np.testing.assert_array_equal(device.get(), host)


# ----------------------------------------------------------------- attributes and views


def test_an_array_knows_its_shape_and_place(cuda):
    array = cuda.zeros((2, 3, 4))
    assert type(array) is cuda.array_type is _cuda.DeviceArray
    assert array.shape == (2, 3, 4) and type(array.shape) is tuple
    assert (array.ndim, array.size, array.nbytes, array.itemsize) == (3, 24, 96, 4)
    assert array.strides == (48, 16, 4)
    assert array.dtype == np.float32 and isinstance(array.dtype, np.dtype)
    assert len(array) == 2
    assert isinstance(array.ptr, int) and array.ptr % 256 == 0
    for name in ("shape", "strides", "ptr", "dtype", "ndim", "size"):
        with pytest.raises(AttributeError):
            setattr(array, name, getattr(array, name))
    with pytest.raises(TypeError):
        len(cuda.zeros(()))
    with pytest.raises(TypeError):
        type(array)()


@st.composite
def indices(draw):
    one = st.one_of(
        st.integers(-5, 5),
        st.builds(
            slice, st.none() | st.integers(-6, 6), st.none() | st.integers(-6, 6)
        ),
        st.builds(
            slice,
            st.none() | st.integers(-6, 6),
            st.none() | st.integers(-6, 6),
            st.sampled_from([None, 1]),
        ),
        st.builds(np.int64, st.integers(-4, 4)),
        st.just(Ellipsis),
    )
    key = draw(st.one_of(one, st.lists(one, max_size=5).map(tuple)))
    return key


@on_one_handler
@given(shape=few, key=indices(), again=indices())
def test_an_index_gives_the_view_that_numpy_gives(cuda, shape, key, again):
    host, device = pair(cuda, shape)
    view, expected = device, host
    for k in (key, again):
        try:
            wanted = expected[k]
        except IndexError:
            with pytest.raises(IndexError):
                view[k]
            return
        view, expected = view[k], np.asarray(wanted)
        if not np.shares_memory(expected, host) and expected.size:
            # NumPy gives an element by itself as a number.
            assert view.shape == ()
            assert view.get() == expected
            return
        assert_same_view(view, expected, device, host)


def test_what_no_view_can_be_made_of_is_refused(cuda):
    array = cuda.zeros((3, 4))
    for key in (
        [0, 1],
        np.array([0, 1]),
        np.zeros((3, 4), bool),
        None,
        "a",
        1.0,
        slice(None, None, -1),
        slice(1.0, 2),
        (0, [1]),
        array,
        True,
    ):
        with pytest.raises((TypeError, IndexError, ValueError)):
            array[key]
    for key in (3, -4, (0, 4), (0, 0, 0), (..., ...), 10**30):
        with pytest.raises(IndexError):
            array[key]


def reshaped_by_numpy(array, shape):
    """Return a view of another shape, None if NumPy would have to copy."""
    new = array.reshape(shape)
    return new if new.size == 0 or np.shares_memory(new, array) else None


@on_one_handler
@given(data=st.data(), shape=few, key=indices())
def test_a_reshape_is_numpys_where_that_makes_no_copy(cuda, data, shape, key):
    host, device = pair(cuda, shape)
    try:
        host_view, device_view = host[key], device[key]
    except IndexError:
        return
    if not isinstance(host_view, np.ndarray):
        return
    # A rearrangement of the factors of the size, or anything else.
    wanted = []
    rest = host_view.size
    while rest > 1 and data.draw(st.booleans()):
        divisors = [d for d in range(1, rest + 1) if rest % d == 0]
        wanted.append(data.draw(st.sampled_from(divisors)))
        rest //= wanted[-1]
    wanted.append(rest)
    if data.draw(st.booleans()):
        wanted[data.draw(st.integers(0, len(wanted) - 1))] = -1
    if data.draw(st.integers(0, 9)) == 0:
        wanted = data.draw(st.lists(st.integers(-1, 4), max_size=4))
    try:
        expected = reshaped_by_numpy(host_view, tuple(wanted))
    except ValueError:
        expected = None
    for arguments in ((tuple(wanted),), (list(wanted),), tuple(wanted)):
        if not wanted and not arguments:
            arguments = ((),)
        if expected is None:
            with pytest.raises(ValueError) as caught:
                device_view.reshape(*arguments)
            assert str(host_view.shape) in str(caught.value)
        else:
            new = device_view.reshape(*arguments)
            assert_same_view(new, expected, device, host)


def test_the_reshapes_of_brainstorms_buffers(cuda):
    hub_host, hub = pair(cuda, (7 * 3 * 10,))
    hub_host, hub = hub_host.reshape(7, 3, 10), hub.reshape((7, 3, 10))
    for cut in (np.s_[0:6, :, 2:8], np.s_[0:None, :, 4:10], np.s_[0:-1, :, 0:4]):
        mine, numpys = hub[cut], hub_host[cut]
        t, b, f = numpys.shape
        assert_same_view(
            mine.reshape((t * b, f)), numpys.reshape(t * b, f), hub, hub_host
        )
        assert_same_view(
            mine.reshape((t, b, f // 2, 2)), numpys.reshape(t, b, -1, 2), hub, hub_host
        )
        flat = mine.reshape((t * b, f // 2, 2)).reshape((t * b, -1))
        np.testing.assert_array_equal(flat.get(), numpys.reshape(t * b, f))
        with pytest.raises(ValueError, match="copy"):
            mine.reshape((t * b * f,))
    assert cuda.ones((1,)).reshape(()).shape == ()
    assert cuda.ones(()).reshape((1, 1)).shape == (1, 1)


def test_impossible_reshapes_are_refused(cuda):
    array = cuda.zeros((2, 3))
    for shape in ((5,), (2, 4), (-1, -1), (-1, 4), (-2, 3), (0, -1), (1,) * 9):
        with pytest.raises(ValueError):
            array.reshape(shape)
    for shape in ("ab", 1.5, (2.0, 3), None, ("2", 3)):
        with pytest.raises(TypeError):
            array.reshape(shape)
    with pytest.raises(ValueError):
        cuda.zeros((0, 2)).reshape((0, -1))


@on_one_handler
@given(shape=few, key=indices())
def test_a_repr_never_fails_and_has_the_shape(cuda, shape, key):
    device = cuda.zeros(shape)
    try:
        view = device[key]
    except IndexError:
        view = device
    text = repr(view)
    assert "DeviceArray" in text and str(view.shape) in text and "float32" in text
    assert str(view)


# ----------------------------------------------------------------- to and from the host


def test_numpy_converts_it(cuda):
    host, device = pair(cuda, (2, 3, 4))
    for view, expected in ((device, host), (device[:, 1:, :2], host[:, 1:, :2])):
        for array in (np.asarray(view), np.array(view), view.get(), view.__array__()):
            assert type(array) is np.ndarray and array.dtype == np.float32
            assert array.flags.c_contiguous and array.flags.writeable
            assert_same_bits(array, np.ascontiguousarray(expected))
        wide = np.asarray(view, dtype=np.float64)
        assert wide.dtype == np.float64
        np.testing.assert_array_equal(wide, expected)
        np.testing.assert_array_equal(view.__array__(np.int32), expected)
    assert float(np.asarray(device[1, 2, 3])) == host[1, 2, 3]
    with pytest.raises(ValueError):
        device.__array__(copy=False)
    np.asarray(device)[...] = -1  # a copy of its own
    assert_same_bits(device.get(), host)


def test_an_array_is_set_from_numpy(cuda):
    array = cuda.zeros((4, 5))
    for array_like in (
        np.arange(20.0).reshape(4, 5),
        np.arange(20, dtype=np.int64).reshape(5, 4).T,
        np.ones((4, 5), bool),
        np.full((4, 5), 2.5, np.float16),
        np.arange(40, dtype=np.float32).reshape(4, 10)[:, ::-2],
    ):
        array.set(array_like)
        np.testing.assert_array_equal(array.get(), array_like.astype(np.float32))
    array[1:3, 1:4].set(np.full((2, 3), 9.0))
    expected = array_like.astype(np.float32)
    expected[1:3, 1:4] = 9
    np.testing.assert_array_equal(array.get(), expected)
    for wrong in (np.zeros((5, 4)), np.zeros(3), np.zeros((1, 4, 5, 2))):
        with pytest.raises(ValueError) as caught:
            array.set(wrong)
        assert str(wrong.shape) in str(caught.value)
        assert str(array.shape) in str(caught.value)
    for wrong in ("text", None, object(), np.array(["a"] * 20).reshape(4, 5)):
        with pytest.raises((TypeError, ValueError)):
            array.set(wrong)
    np.testing.assert_array_equal(array.get(), expected)


def test_items_are_assigned_or_refused_but_never_half(cuda):
    host, device = pair(cuda, (3, 4))
    other = cuda.ones((3, 2))
    for key, value, numpys in (
        (..., 2.0, 2.0),
        (np.s_[:, 1], -1, -1),
        (np.s_[:, 1:3], other, np.ones((3, 2))),
        (np.s_[1], np.arange(4.0), np.arange(4.0)),
    ):
        try:
            device[key] = value
        except TypeError:
            continue
        host[key] = numpys
        np.testing.assert_array_equal(device.get(), host)
    with pytest.raises(TypeError):
        del device[0]


def test_a_copy_is_contiguous_and_apart(cuda):
    host, device = pair(cuda, (3, 4, 5))
    for view, expected in ((device, host), (device[:, 1:3, 2:], host[:, 1:3, 2:])):
        again = view.copy()
        assert type(again) is type(view) and again.shape == view.shape
        assert again.strides == np.ascontiguousarray(expected).strides
        np.testing.assert_array_equal(again.get(), expected)
        cuda.fill(again, -1)
        assert_same_bits(device.get(), host)
    assert cuda.zeros((0, 3)).copy().shape == (0, 3)


def test_it_is_not_pickled_nor_deeply_copied(cuda):
    array = cuda.ones((2,))
    for attempt in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError):
            attempt(array)


# -------------------------------------------------------------------------- arithmetic

OPERATORS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "+=": operator.iadd,
    "-=": operator.isub,
    "*=": operator.imul,
    "/=": operator.itruediv,
}
NUMBERS = [2, -1, 0, 0.5, 1 / 3, np.inf, True, np.float32(0.1), np.int64(3)]


def placed_pair(data, handler, shape):
    """Return the same numbers in a larger array's memory, host and device."""
    layout = data.draw(layouts(shape))
    buffer = buffer_of(layout, data.draw(values(shape)))
    return layout.cut(buffer), layout.cut(handler.create_from_numpy(buffer))


@on_one_handler
@given(symbol=st.sampled_from(list(OPERATORS)), data=st.data())
def test_arithmetic_is_numpys(cuda, symbol, data):
    operate, in_place = OPERATORS[symbol], symbol.endswith("=")
    shape = data.draw(st.lists(st.integers(0, 4), max_size=4).map(tuple))
    host, device = placed_pair(data, cuda, shape)
    kind = data.draw(st.sampled_from(["number", "array", "itself", "reflected"]))
    if kind == "itself":
        other = other_device = None
    elif kind == "array":
        size = [data.draw(st.sampled_from([n, 1])) for n in shape]
        other, other_device = placed_pair(
            data, cuda, tuple(size[data.draw(st.integers(0, len(size))) :])
        )
    else:
        other = other_device = data.draw(st.sampled_from(NUMBERS))
    if kind == "itself":
        left, right, device_left, device_right = host, host, device, device
    elif kind == "reflected" and not in_place:
        left, right, device_left, device_right = other, host, other, device
    else:
        left, right, device_left, device_right = host, other, device, other_device
    if not in_place and data.draw(st.booleans()):
        left, right, device_left, device_right = right, left, device_right, device_left
    with np.errstate(all="ignore"):
        expected = np.asarray(operate(left, right), np.float32)
    result = operate(device_left, device_right)
    assert type(result) is cuda.array_type
    assert (result is device) == in_place
    assert_equal_numbers(result.get(), expected)
    if not in_place:
        assert_equal_numbers(device.get(), host)


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, -1, 0.5, -0.5, 1.7, np.float32(0.5)])
def test_a_power_is_numpys(exponent, cuda):
    host = np.array([[0.1, 1, 2.5], [1e-3, 7, 1e4]], np.float32)
    for cut in (np.s_[:], np.s_[:, 1:]):
        result = cuda.create_from_numpy(host)[cut] ** exponent
        np.testing.assert_allclose(result.get(), host[cut] ** exponent, rtol=1e-6)
    odd = np.array([-2, -0.0, np.inf, -np.inf, np.nan], np.float32)
    with np.errstate(all="ignore"):
        expected = odd**exponent
    result = (cuda.create_from_numpy(odd) ** exponent).get()
    np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_arithmetic_with_anything_else_is_refused(cuda):
    array = cuda.ones((2, 3))
    others = [None, "x", [1], 1j, object(), np.ones((2, 3), np.float32)]
    for operate in [*OPERATORS.values(), operator.pow]:
        for other in others:
            with pytest.raises(TypeError):
                operate(array, other)
            if not isinstance(other, (str, list)) or operate is not operator.iadd:
                with pytest.raises(TypeError):
                    operate(other, array)
    for wrong in (cuda.ones((3, 2)), cuda.ones((2,)), cuda.ones((2, 3, 4))):
        for operate in OPERATORS.values():
            with pytest.raises(ValueError) as caught:
                operate(array, wrong)
            assert str(wrong.shape) in str(caught.value)
            assert str(array.shape) in str(caught.value)
    row = cuda.ones((1, 3))
    with pytest.raises(ValueError):
        row += array
    with pytest.raises(TypeError):
        np.add(array, array)
    with pytest.raises(ValueError):  # partly over itself
        array = cuda.ones((4, 3))[:3]
        array += cuda.wrap(array, array.ptr + 12, (3, 3))


# --------------------------------------------------------------------- other libraries


def test_the_cuda_array_interface_is_complete(cuda):
    array = cuda.ones((3, 4))
    interface = array.__cuda_array_interface__
    assert interface["shape"] == (3, 4) and interface["typestr"] == "<f4"
    assert interface["data"] == (array.ptr, False) and interface["version"] == 3
    assert interface.get("strides") is None
    assert interface["stream"] == cuda.stream.handle
    part = array[:, 1:3].__cuda_array_interface__
    assert part["shape"] == (3, 2) and part["strides"] == (16, 4)
    assert part["data"] == (array.ptr + 4, False)
    assert cuda.zeros((0, 3)).__cuda_array_interface__["shape"] == (0, 3)


def test_the_bindings_copies_take_it(cuda):
    host, device = pair(cuda, (3, 4))
    cuda.synchronize()
    back = np.empty((3, 4), np.float32)
    dbuf.memcpy_dtoh(back, device)
    assert_same_bits(back, host)
    dbuf.memcpy_htod(device, host + 1)
    cuda.context.synchronize()  # the handler's stream waits for no NULL stream
    assert_same_bits(device.get(), host + 1)
    with pytest.raises((ValueError, TypeError)):
        dbuf.memcpy_dtoh(back[:, :2].copy(), device[:, :2])


def test_memory_of_another_library_is_used_where_it_lies(cuda):
    with cuda.context:
        memory = dbuf.mem_alloc(48)
        dbuf.memcpy_htod(memory, np.arange(12, dtype=np.float32))
        cuda.context.synchronize()  # the handler's stream waits for no NULL stream
    array = cuda.as_array(Interface(memory, (3, 4)))
    assert type(array) is cuda.array_type and array.ptr == int(memory)
    np.testing.assert_array_equal(array.get(), np.arange(12.0).reshape(3, 4))
    cuda.mult_st(2, array, array)
    back = np.empty(12, np.float32)
    cuda.synchronize()
    dbuf.memcpy_dtoh(back, memory)
    np.testing.assert_array_equal(back, 2 * np.arange(12))
    part = cuda.as_array(Interface(memory, (3, 2), strides=(16, 4)))
    np.testing.assert_array_equal(part.get(), back.reshape(3, 4)[:, :2])
    integers = cuda.as_array(Interface(memory, (12,), "<i4"))
    assert integers.dtype == np.int32
    np.testing.assert_array_equal(integers.get(), back.view(np.int32))
    with pytest.raises(TypeError, match="abs_t: a .*int32"):
        cuda.abs_t(integers, cuda.ones((12,)))
    del array, part, integers


def test_an_array_over_memory_of_ours_keeps_its_owner(cuda):
    with cuda.context:
        memory = dbuf.mem_alloc(64)
    before = live_objects()["device_memory"]
    array = cuda.wrap(memory, int(memory) + 16, (2, 3))
    address = int(memory)
    del memory
    gc.collect()
    assert live_objects()["device_memory"] == before
    view = array[1]
    del array
    cuda.fill(view, 5)
    assert (view.get() == 5).all() and view.ptr == address + 16 + 12
    del view
    gc.collect()
    assert live_objects()["device_memory"] == before - 1


def test_what_does_not_fit_is_refused_at_the_door(cuda):
    with cuda.context:
        memory = dbuf.mem_alloc(48)
    for wrong in (
        Interface(memory, (3, 4), "<f8"),
        Interface(memory, (3, 4), "|u1"),
        Interface(memory, (3, 4), ">f4"),
        Interface(memory, (3, 4), strides=(-16, 4)),
        Interface(memory, (3, 4), strides=(16, 3)),
        Interface(memory, (3, 4), strides=(16,)),
        Interface(memory, (-3, 4)),
        Interface(memory, "ab"),
        Interface(0, (3, 4)),
        Interface(memory, (3, 4), mask=object()),
        np.ones(3, np.float32),
        object(),
        None,
    ):
        with pytest.raises((TypeError, ValueError, BufferError)) as caught:
            cuda.as_array(wrong)
        assert str(caught.value)
    for arguments in (
        (memory, int(memory), (-1,)),
        (memory, int(memory), "ab"),
        (memory, "address", (1,)),
        (memory, -1, (1,)),
        (memory, 0, (1,)),
    ):
        with pytest.raises((TypeError, ValueError, OverflowError)):
            cuda.wrap(*arguments)


def capsule_name(capsule):
    name = ctypes.pythonapi.PyCapsule_GetName
    name.restype, name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    return name(capsule).decode()


def test_dlpack_exports_the_memory(cuda):
    array = cuda.ones((3, 4))
    assert array.__dlpack_device__() == (2, 0)
    assert capsule_name(array.__dlpack__()) == "dltensor"
    assert capsule_name(array.__dlpack__(max_version=(1, 0))) in (
        "dltensor",
        "dltensor_versioned",
    )
    for stream in (None, 1, 2, -1, cuda.stream.handle):
        array.__dlpack__(stream=stream)
    with pytest.raises((BufferError, ValueError, TypeError)):
        array.__dlpack__(stream="one")
    with pytest.raises(BufferError):
        array.__dlpack__(dl_device=(1, 0))
    # One that nobody takes keeps the memory until it goes.
    capsule = array.__dlpack__()
    pointer = array.ptr
    del array
    gc.collect()
    others = [cuda.zeros((3, 4)) for _ in range(4)]
    assert pointer not in [other.ptr for other in others]
    del capsule


def test_dlpack_imports_without_a_copy(cuda):
    host, device = pair(cuda, (3, 4))
    other = dbuf.CudaHandler()
    for view, expected in ((device, host), (device[:, 1:3], host[:, 1:3])):
        theirs = other.from_dlpack(view)
        assert theirs.ptr == view.ptr and theirs.shape == view.shape
        np.testing.assert_array_equal(theirs.get(), expected)
    del view, device
    gc.collect()
    more = [cuda.zeros((3, 4)) for _ in range(4)]
    assert (theirs.get() == expected).all()  # still alive
    other.fill(theirs, 1)
    assert (theirs.get() == 1).all()
    assert all((array.get() == 0).all() for array in more)
    for wrong in (object(), None, np.ones(3, np.float32)):
        with pytest.raises((TypeError, ValueError, BufferError, AttributeError)):
            cuda.from_dlpack(wrong)


def test_what_the_consumer_sees_has_been_computed(cuda):
    """Both ways of exporting order the consumer's work after what is queued here."""
    source = cuda.ones((1000,))
    other = dbuf.CudaHandler()
    for take in (other.as_array, other.from_dlpack):
        cuda.mult_st(3, cuda.ones((1000,)), source)
        theirs = take(source)
        out = other.zeros((1000,))
        other.copy_to(theirs, out)
        assert (out.get() == 3).all()
        cuda.fill(source, 1)


@pytest.mark.gpu
def test_torch_shares_memory_with_it(cuda):
    torch = pytest.importorskip("torch")
    exchange_with(
        cuda,
        (lambda view: torch.as_tensor(view, device="cuda"), torch.from_dlpack),
        lambda array: array.cpu().numpy(),
        torch.cuda.synchronize,
    )


@pytest.mark.gpu
def test_cupy_shares_memory_with_it(cuda):
    cupy = pytest.importorskip("cupy")
    exchange_with(
        cuda,
        (cupy.asarray, cupy.from_dlpack),
        lambda array: array.get(),
        lambda: cupy.cuda.Device().synchronize(),
    )


def exchange_with(cuda, takes, to_host, wait):
    """Hand views over, let the other library change them, and take them back.

    Both libraries make the primary context current in place of this thread's own, which
    PyCUDA's later tests need.
    """
    with cuda.context:
        exchange(cuda, takes, to_host, wait)


def exchange(cuda, takes, to_host, wait):
    host, device = pair(cuda, (3, 4))
    for cut in (np.s_[:], np.s_[:, 1:3]):
        view, expected = device[cut], host[cut]
        for take in takes:
            theirs = take(view)
            np.testing.assert_array_equal(to_host(theirs), expected)
            theirs += 1
            wait()
            expected += 1
            np.testing.assert_array_equal(view.get(), expected)
            for again in (cuda.from_dlpack(theirs), cuda.as_array(theirs)):
                assert again.ptr == view.ptr and again.strides == view.strides
                cuda.add_st(1, again, again)
                cuda.synchronize()
                expected += 1
                np.testing.assert_array_equal(to_host(theirs), expected)
            del theirs, again
    np.testing.assert_array_equal(device.get(), host)


# --------------------------------------------------------------------------- lifetimes


def test_views_outlive_their_base_and_the_handler(cuda):
    handler = dbuf.CudaHandler()
    base = handler.create_from_numpy(np.arange(12.0).reshape(3, 4))
    view = base[1:, 2:].reshape((2, 1, 2))[1]
    del base, handler
    gc.collect()
    assert view.get().tolist() == [[10, 11]]
    assert np.asarray(view.copy()).tolist() == [[10, 11]]
    view.set(np.ones((1, 2)))
    assert view.get().tolist() == [[1, 1]]


def test_the_memory_goes_back_when_all_is_gone(kernels, driver):
    gc.collect()
    context = dbuf.Context.primary()
    before = live_objects()
    free = dbuf._cuda.mem_get_info(context)[0]
    handler = dbuf.CudaHandler()
    arrays = [handler.zeros((1000, k)) for k in range(1, 9)]
    handler.dot_mm(arrays[0], arrays[0], handler.zeros((1, 1)), transa=True)
    arrays[0].get()
    view = arrays[3][5]
    del handler, arrays
    gc.collect()
    assert live_objects()["device_bytes"] > before["device_bytes"]
    del view
    gc.collect()
    assert live_objects() == before
    if driver.fake is not None:
        assert dbuf._cuda.mem_get_info(context)[0] == free


def test_a_block_is_handed_out_again_at_once(cuda):
    """Whatever used it is queued before whatever will."""
    first = cuda.ones((1000,))
    pointer = first.ptr
    cuda.mult_st(2, first, first)
    del first
    second = cuda.zeros((1000,))
    assert second.ptr == pointer
    assert (second.get() == 0).all()


def test_nothing_is_allocated_or_freed_in_the_steady_state(cuda, fake):
    def work():
        a = cuda.ones((30, 20))
        b = cuda.create_from_numpy(np.ones((20, 10)))
        c = cuda.allocate((30, 10))
        cuda.dot_mm(a, b, c)
        cuda.add_mv(c, cuda.ones((1, 10)), c)
        cuda.set_from_numpy(c[:, 2:5], np.ones((30, 3)))
        total = cuda.zeros(())
        cuda.sum_t(c, None, total)
        d = c.copy()
        assert cuda.is_fully_finite(d)
        return cuda.get_numpy_copy(total), d[3:].get(), c[:, 1:].get()

    first = work()
    calls = fake.calls()
    for _ in range(20):
        for mine, expected in zip(work(), first):
            assert_same_bits(mine, expected)
    used = fake.calls() - calls
    for name in used:
        assert "Alloc" not in name and "Free" not in name, name
        assert name not in ("cuMemHostRegister", "cuStreamCreate", "cuEventCreate")
        assert name not in ("cuCtxSynchronize", "cublasCreate_v2", "cuModuleLoadData")


def test_arrays_are_freed_in_any_thread(cuda):
    arrays = [cuda.ones((100,)) for _ in range(20)]
    views = [array[k:] for k, array in enumerate(arrays)]
    held = live_objects()["device_bytes"]

    def drop():
        arrays.clear()
        while views:
            assert (views.pop().get() == 1).all()

    threads = [threading.Thread(target=drop) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    again = [cuda.zeros((100,)) for _ in range(20)]
    assert live_objects()["device_bytes"] == held
    assert all((array.get() == 0).all() for array in again)


def test_any_thread_computes_whatever_its_context(cuda, driver):
    """A bare thread has no context current, the main thread another one."""

    def compute():
        out = cuda.zeros((10, 10))
        cuda.dot_add_mm(cuda.ones((10, 10)), cuda.ones((10, 10)), out)
        cuda.tanh(out, out)
        return out.get()

    here = compute()
    assert_same_bits(in_thread(compute), here)
    if driver.fake is not None:
        assert driver.fake.current_context() == driver.context


def test_two_threads_share_a_handler(cuda):
    errors = []

    def work(seed):
        try:
            rnd = np.random.default_rng(seed)
            for _ in range(30):
                n = int(rnd.integers(1, 60))
                a = rnd.standard_normal((n, n)).astype(np.float32)
                x, y = cuda.create_from_numpy(a), cuda.zeros((n, n))
                cuda.dot_mm(x, x, y)
                cuda.add_tt(x, y, y)
                np.testing.assert_allclose(y.get(), a @ a + a, rtol=1e-3, atol=1e-3)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_threads_make_a_handlers_first_product_at_once(kernels):
    """cuBLAS is set up at the first product, and once."""
    before = live_objects()

    def first_product(handler, barrier, results):
        a, out = handler.ones((4, 4)), handler.zeros((4, 4))
        barrier.wait()
        handler.dot_mm(a, a, out)
        results.append(out.get())

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(5):
            shared = dbuf.CudaHandler(), threading.Barrier(6), []
            threads = [
                threading.Thread(target=first_product, args=shared) for _ in range(6)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(shared[2]) == 6 and all((r == 4).all() for r in shared[2])
            del shared, threads, thread
            gc.collect()
            assert live_objects() == before
    finally:
        sys.setswitchinterval(interval)


def test_a_failed_allocation_lets_the_pool_go_first(cuda, fake):
    big, other = 1 << 20, (1 << 20) + 300_000
    cuda.trim_pool()
    held = cuda.pool_info()["bytes_held"]
    array = cuda.zeros((big,))
    del array  # 4 MiB that only the pool has
    fake.fail("cuMemAlloc")
    array = cuda.ones((other,))
    assert (array[-3:].get() == 1).all()
    # The driver had to be asked twice, and the pool has nothing left of the first one.
    assert cuda.pool_info()["bytes_held"] - held < 4 * (big + other)


def test_out_of_memory_is_an_error_after_which_all_goes_on(cuda, fake):
    kept = cuda.ones((100,))
    held = live_objects()["device_bytes"]
    fake.fail("cuMemAlloc", times=2)
    with pytest.raises(dbuf.CudaMemoryError) as caught:
        cuda.zeros((5000, 7))
    assert isinstance(caught.value, MemoryError)
    assert "140000" in str(caught.value) or "bytes" in str(caught.value)
    assert live_objects()["device_bytes"] <= held
    fake.fail("cuMemAlloc", times=2)
    with pytest.raises(dbuf.CudaMemoryError):
        kept.reshape((10, 10)).copy().copy()
        cuda.create_from_numpy(np.zeros(9000))
    fake.set_limits(device_bytes=64 << 20)
    with pytest.raises(dbuf.CudaMemoryError):
        cuda.zeros((1 << 30,))
    assert (kept.get() == 1).all()
    assert (cuda.ones((5000,)).get() == 1).all()


@pytest.mark.parametrize("call", ["cuLaunchKernel", "cuStreamSynchronize"])
def test_a_driver_call_that_fails_is_an_error_that_names_the_operation(
    call, cuda, fake
):
    a, out = cuda.ones((10,)), cuda.zeros((10,))
    held = live_objects()
    fake.fail(call, code=1)
    with pytest.raises(dbuf.CudaError) as caught:
        cuda.add_tt(a, a, out)
        out.get()
    assert caught.value.call == call
    assert "add_tt" in str(caught.value) or call == "cuStreamSynchronize"
    cuda.add_tt(a, a, out)
    assert (out.get() == 2).all()
    assert live_objects() == held


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_may_not_compute_and_harms_nothing(cuda, fake):
    array, view, square = cuda.ones((10,)), cuda.ones((4, 4))[1:], cuda.ones((2, 2))
    attempts = {
        "zeros": lambda: cuda.zeros((9,)),
        "ones": lambda: cuda.ones((9,)),
        "add_tt": lambda: cuda.add_tt(array, array, array),
        "dot_mm": lambda: cuda.dot_mm(square, square, array[:4].reshape((2, 2))),
        "get": lambda: array.get(),
        "set": lambda: array.set(np.ones(10)),
        "copy": lambda: array.copy(),
        "create_from_numpy": lambda: cuda.create_from_numpy(np.ones(3)),
        "synchronize": lambda: cuda.synchronize(),
        "another handler": lambda: dbuf.CudaHandler(),
    }
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            wrong = []
            for name, attempt in attempts.items():
                try:
                    attempt()
                except dbuf.ForkError:
                    pass
                except BaseException as error:
                    wrong.append(f"{name}: {error!r}")
                else:
                    wrong.append(f"{name}: no error")
            attempts.clear()
            shape = view[1].shape, view.reshape((12,)).shape, len(array)
            if shape != ((4,), (12,), 10):
                wrong.append(f"shapes: {shape}")
            del array, view
            gc.collect()
            os.write(writer, "\n".join(wrong).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        wrong = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    assert wrong == ""
    assert fake.child_calls() == 0
    assert (array.get() == 1).all() and (view.get() == 1).all()
