"""Device memory, page-locked arrays, registered arrays."""

import copy
import gc
import pickle

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from binding_tools import (  # noqa: F401
    MIB,
    device_array,
    foreign_view,
    in_thread,
    leak_check,
    pinned,
    read,
)
from brainstorm_dbuf import _cuda, errors

pytestmark = pytest.mark.usefixtures("leak_check")

# ---- Device memory ----


def test_device_memory_is_an_address_with_a_size(driver):
    memory = _cuda.mem_alloc(64)
    assert memory.nbytes == 64
    assert memory.ptr == int(memory) == memory.__index__() > 0
    assert memory.context == _cuda.Context.current()
    assert "64 bytes" in repr(memory)
    assert memory.__cuda_array_interface__ == {
        "shape": (64,),
        "typestr": "|u1",
        "data": (memory.ptr, False),
        "strides": None,
        "version": 3,
    }


def test_device_memory_is_freed_once_and_named_when_used_after(driver):
    memory, array = _cuda.mem_alloc(16), pinned([1, 2, 3, 4])
    memory.free()
    memory.free()
    assert memory.closed and "freed" in repr(memory)
    for use in (
        lambda: memory.ptr,
        lambda: int(memory),
        lambda: memory.__cuda_array_interface__,
        lambda: _cuda.memcpy_htod(memory, array),
        lambda: _cuda.memcpy_dtoh(array, memory),
        lambda: _cuda.memcpy_htod_async(memory, array, _cuda.Stream()),
        lambda: _cuda.memset_d8(memory, 0, 4),
    ):
        with pytest.raises(ValueError, match="DeviceMemory is closed"):
            use()


def test_device_memory_is_freed_with_its_last_reference(fake):
    before = fake.live()["device_bytes"]
    memory = _cuda.mem_alloc(1000)
    assert _cuda.live_objects()["device_bytes"] == 1000
    assert fake.live()["device_bytes"] == before + 1000
    del memory
    assert fake.live()["device_bytes"] == before
    assert _cuda.live_objects()["device_bytes"] == 0


def test_no_bytes_of_device_memory_make_no_driver_call(driver):
    memory = in_thread(_cuda.mem_alloc, 0)
    assert memory.ptr == 0 and memory.nbytes == 0 and memory.context is None
    memory.free()


@pytest.mark.parametrize("nbytes", [-1, 1 << 63, -(1 << 70), 1 << 70])
def test_impossible_sizes_are_refused(driver, nbytes):
    with pytest.raises(ValueError, match="nbytes must be from 0"):
        _cuda.mem_alloc(nbytes)


def test_sizes_must_be_integers(driver):
    with pytest.raises(TypeError):
        _cuda.mem_alloc(1.5)


def test_too_much_device_memory_is_a_memory_error_that_says_how_much(driver):
    with pytest.raises(errors.CudaMemoryError, match="bytes asked for, .* are free") as e:
        _cuda.mem_alloc(1 << 60)
    assert isinstance(e.value, MemoryError)
    assert e.value.call == "cuMemAlloc" and e.value.code == 2
    free, total = _cuda.mem_get_info()
    assert 0 < free <= total


def test_a_new_block_is_not_cleared_behind_the_callers_back(fake):
    # On the NULL stream that would not be ordered with the copy (case 07).
    fake.mode("late")
    stream = _cuda.Stream()
    source = pinned(np.ones(1000))
    memory = _cuda.mem_alloc(4000)
    _cuda.memcpy_htod_async(memory, source, stream)
    fake.drain(0)
    stream.synchronize()
    assert (read(memory) == 1).all()
    assert not [name for name in fake.calls() if "Memset" in name]


# ---- Page-locked arrays ----


def test_a_page_locked_array_is_float32_in_c_order_by_default(driver):
    array = _cuda.pagelocked_empty((2, 3))
    assert type(array) is np.ndarray
    assert array.dtype == np.float32 and array.shape == (2, 3)
    assert array.flags.c_contiguous and array.flags.writeable and array.flags.aligned
    assert array.base.nbytes == 24
    assert array.base.ptr == array.ctypes.data
    assert array.base.context == _cuda.Context.current()
    assert "24 bytes" in repr(array.base)
    array[...] = 7
    assert array.sum() == 42


SHAPES = [5, (5,), [2, 3], (), (1,), (0,), 0, (0, 3), (3, 0), (2, 0, 2), np.int64(4)]
DTYPES = ["f4", "u1", "f8", "c16", "?", "U3", "M8[s]", "i4,f8", ">f4"]


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_page_locked_array_has_the_shape_dtype_and_order_asked_for(
    driver, order, dtype
):
    for shape in SHAPES:
        array = _cuda.pagelocked_empty(shape, dtype, order)
        like = np.empty(shape, dtype, order)
        assert array.shape == like.shape
        assert array.dtype == like.dtype
        assert array.size == 0 or array.strides == like.strides
        zeros = _cuda.pagelocked_zeros(shape, dtype, order)
        assert zeros.shape == like.shape
        assert zeros.tobytes() == bytes(like.nbytes)


def test_a_subarray_dtype_adds_its_axes(driver):
    array = _cuda.pagelocked_zeros((2,), "(3,)f4")
    assert array.shape == (2, 3) and array.dtype == np.float32
    assert array.base.nbytes == 24


def test_no_bytes_of_page_locked_memory_make_no_driver_call(fake):
    before = fake.calls()
    array = _cuda.pagelocked_empty((0, 3))
    assert array.shape == (0, 3) and array.base.nbytes == 0
    assert _cuda.is_pagelocked(array)
    del array
    assert fake.calls() == before
    assert in_thread(_cuda.pagelocked_empty, 0).base.context is None


@pytest.mark.parametrize(
    "shape",
    [-1, (2, -3), (0, -1), (1 << 62, 4), (1 << 40, 1 << 40), 1 << 70, (1 << 62,)],
)
def test_impossible_shapes_are_refused(driver, shape):
    with pytest.raises(ValueError):
        _cuda.pagelocked_empty(shape)


@pytest.mark.parametrize("shape", [None, "x", 1.5, (1, 2.5), (1, None)])
def test_shapes_must_be_integers(driver, shape):
    with pytest.raises(TypeError):
        _cuda.pagelocked_empty(shape)


@pytest.mark.parametrize("dtype", [object, "O,f4", [("a", "f4"), ("b", object)]])
def test_objects_cannot_be_page_locked(driver, dtype):
    with pytest.raises(TypeError, match="pointers"):
        _cuda.pagelocked_empty(4, dtype)
    with pytest.raises(TypeError, match="pointers"):
        _cuda.pagelocked_empty_like(np.empty(4, dtype))
    with pytest.raises(TypeError, match="pointers"):
        _cuda.register_host_memory(np.empty(4, dtype))


def test_a_dtype_must_be_one_and_have_a_size(driver):
    with pytest.raises(TypeError):
        _cuda.pagelocked_empty(4, "nonsense")
    with pytest.raises(ValueError, match="no size"):
        _cuda.pagelocked_empty(4, "S0")
    with pytest.raises(ValueError, match="no size"):
        _cuda.pagelocked_empty(4, "V0")


def test_order_and_flags_are_checked(driver):
    with pytest.raises(ValueError, match="order must be"):
        _cuda.pagelocked_empty(4, "f4", "K")
    with pytest.raises(TypeError, match="order must be"):
        _cuda.pagelocked_empty(4, "f4", 0)
    with pytest.raises(ValueError, match="mem_flags"):
        _cuda.pagelocked_empty(4, "f4", "C", 8)
    with pytest.raises(ValueError, match="mem_flags"):
        _cuda.pagelocked_empty(4, "f4", "C", -1)
    flags = _cuda.HOST_ALLOC_PORTABLE | _cuda.HOST_ALLOC_DEVICEMAP
    assert _cuda.pagelocked_empty(4, mem_flags=flags).shape == (4,)
    assert (_cuda.HOST_ALLOC_PORTABLE, _cuda.HOST_ALLOC_DEVICEMAP) == (1, 2)
    assert _cuda.HOST_ALLOC_WRITECOMBINED == 4


@pytest.mark.parametrize(
    "like",
    [
        np.zeros((2, 3), "f8"),
        np.zeros((2, 3), "u1", "F"),
        np.zeros((4, 6))[::2, ::2],
        np.array(3.0, "f4"),
        np.zeros((0, 2)),
    ],
)
def test_empty_like_takes_shape_dtype_and_order(driver, like):
    array = _cuda.pagelocked_empty_like(like)
    assert array.shape == like.shape and array.dtype == like.dtype
    fortran = like.flags.f_contiguous and not like.flags.c_contiguous
    assert array.flags.f_contiguous if fortran else array.flags.c_contiguous
    with pytest.raises(TypeError, match="numpy array"):
        _cuda.pagelocked_empty_like([1, 2])


def test_page_locked_memory_lives_as_long_as_a_view(driver):
    array = pinned(np.arange(10))
    view = array[2:4].reshape(2, 1).T
    del array
    gc.collect()
    assert view.tolist() == [[2, 3]]
    assert _cuda.live_objects()["page_locked_bytes"] == 40
    del view
    assert _cuda.live_objects()["page_locked_bytes"] == 0


def test_too_much_page_locked_memory_is_a_memory_error(fake):
    fake.set_limits(pinned_bytes=100)
    kept = _cuda.pagelocked_empty(20)
    with pytest.raises(errors.CudaMemoryError, match="84 bytes .* 80 bytes held"):
        _cuda.pagelocked_empty(21)
    assert kept.nbytes == 80


@pytest.mark.parametrize(
    "how", [lambda a: pickle.loads(pickle.dumps(a)), copy.deepcopy, copy.copy, np.copy]
)
def test_a_copied_page_locked_array_is_an_ordinary_one(driver, how):
    array = pinned([1, 2, 3])
    other = how(array)
    assert other.tolist() == [1, 2, 3]
    assert not _cuda.is_pagelocked(other)
    assert _cuda.is_pagelocked(array)


def test_page_locked_memory_is_freed_on_any_thread(driver):
    arrays = [pinned(np.arange(4)) for _ in range(3)]
    in_thread(arrays.clear)
    assert _cuda.live_objects()["page_locked_blocks"] == 0


# ---- Registered arrays ----


def test_a_registered_array_is_a_view_of_the_same_memory(driver):
    array = np.arange(MIB, dtype="f4").reshape(4, -1)
    view = _cuda.register_host_memory(array)
    assert view.ctypes.data == array.ctypes.data
    assert view.shape == array.shape and view.dtype == array.dtype
    assert view.base.array is array
    assert view.base.registered and view.base.nbytes == array.nbytes
    assert view.base.ptr == array.ctypes.data
    assert _cuda.is_pagelocked(view) and _cuda.is_pagelocked(view[1:, ::2])
    assert _cuda.is_pagelocked(array)  # the same pages
    assert _cuda.live_objects()["registered"] == 1
    del view
    assert _cuda.live_objects()["registered"] == 0
    assert not _cuda.is_pagelocked(array)


def test_unregistering_leaves_an_ordinary_array(driver):
    view = _cuda.register_host_memory(np.ones(1000, "f4"))
    memory, stream = _cuda.mem_alloc(4000), _cuda.Stream()
    _cuda.memcpy_htod_async(memory, view, stream)
    view.base.unregister()  # waits for the copy
    view.base.unregister()
    assert (view == 1).all() and not view.base.registered
    assert "unregistered" in repr(view.base)
    assert (read(memory) == 1).all()
    with pytest.raises(ValueError, match="not page-locked"):
        _cuda.memcpy_htod_async(memory, view, stream)


def test_a_registered_array_keeps_its_order_and_may_be_read_only(driver):
    fortran = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    assert _cuda.register_host_memory(fortran).flags.f_contiguous
    fixed = np.arange(6.0)
    fixed.flags.writeable = False
    assert not _cuda.register_host_memory(fixed).flags.writeable


def test_only_one_piece_of_memory_can_be_registered(driver):
    with pytest.raises(ValueError, match="neither C- nor F-contiguous"):
        _cuda.register_host_memory(np.zeros((4, 4))[:, ::2])
    with pytest.raises(TypeError, match="numpy array"):
        _cuda.register_host_memory(b"1234")
    with pytest.raises(ValueError, match="flags"):
        _cuda.register_host_memory(np.zeros(4), 16)


def test_registering_twice_is_an_error_that_leaves_the_first(driver):
    array = np.zeros(1000)
    view = _cuda.register_host_memory(array)
    with pytest.raises(errors.CudaError, match="ALREADY_REGISTERED"):
        _cuda.register_host_memory(array)
    assert view.base.registered


def test_registering_nothing_makes_no_driver_call(driver):
    view = in_thread(_cuda.register_host_memory, np.zeros((0, 3)))
    assert view.shape == (0, 3) and view.base.context is None
    view.base.unregister()


# ---- is_pagelocked ----


def test_is_pagelocked_looks_at_the_memory_itself(driver):
    array = pinned(np.arange(100))
    assert _cuda.is_pagelocked(array)
    assert _cuda.is_pagelocked(array[::-3])
    assert _cuda.is_pagelocked(array.view("u1"))
    assert not _cuda.is_pagelocked(np.zeros(4))
    assert not _cuda.is_pagelocked(np.zeros(0))
    assert _cuda.is_pagelocked(np.ndarray(100, "f4", memoryview(array)))
    assert _cuda.is_pagelocked(foreign_view(array))  # asks the driver
    assert not _cuda.is_pagelocked(foreign_view(np.zeros(4)))
    with pytest.raises(TypeError, match="numpy array"):
        _cuda.is_pagelocked(b"1234")


def test_is_pagelocked_does_not_trust_a_view_that_leaves_its_base(fake):
    array = pinned(np.arange(10))
    wide = as_strided(array, (1 << 20,), (4,))
    assert not _cuda.is_pagelocked(wide)


def test_is_pagelocked_needs_no_context_in_the_thread(driver):
    array, kept = pinned([1]), _cuda.Context.current()
    assert in_thread(_cuda.is_pagelocked, array)
    assert not in_thread(_cuda.is_pagelocked, np.zeros(4))
    del kept
