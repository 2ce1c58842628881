"""Copies and fills: what moves, what is refused, and that refusing makes no call."""

import array
import gc
import sys

import numpy as np
import pytest

from binding_tools import (  # noqa: F401
    MIB,
    Interface,
    device_array,
    in_thread,
    leak_check,
    pinned,
    read,
)
from brainstorm_dbuf import _cuda, errors

pytestmark = pytest.mark.usefixtures("leak_check")

MODES = [("late", 0), ("eager", 0), ("random", 1), ("random", 2)]
BASE = np.arange(24).reshape(4, 3, 2)
BIG = np.arange(96).reshape(8, 4, 3)
IMAGES = np.arange(24).reshape(1, 2, 3, 2, 2)


@pytest.fixture(params=MODES, ids=lambda mode: "-".join(map(str, mode)))
def each_mode(request, driver):
    if driver.fake:
        driver.fake.mode(*request.param)
    elif request.param != MODES[0]:
        pytest.skip("the real driver has one mode")


@pytest.fixture
def no_driver_copies(driver):
    """Fail a test that lets the driver copy or fill anything."""

    def moves():
        calls = driver.fake.calls() if driver.fake else {}
        return {k: n for k, n in calls.items() if "Memcpy" in k or "Memset" in k}

    before = moves()
    yield
    assert moves() == before


# ---- Bytes arrive ----


@pytest.mark.parametrize("nbytes", [1, 3, 4, 64, 1000, MIB - 1, MIB, 3 * MIB + 5])
def test_bytes_go_to_the_device_and_back(driver, each_mode, nbytes):
    rng = np.random.default_rng(nbytes)
    source = pinned(rng.integers(0, 256, nbytes), "u1")
    out = pinned(np.zeros(nbytes), "u1")
    memory, copied = _cuda.mem_alloc(nbytes), _cuda.mem_alloc(nbytes)
    stream = _cuda.Stream()
    _cuda.memcpy_htod_async(memory, source, stream)
    _cuda.memcpy_dtod_async(copied, memory, nbytes, stream)
    _cuda.memcpy_dtoh_async(out, copied, stream)
    stream.synchronize()
    assert np.array_equal(source, out)
    _cuda.memcpy_htod(copied, source[::-1].copy())
    _cuda.memcpy_dtod(memory, copied, nbytes)
    _cuda.memcpy_dtoh(out, memory)
    assert np.array_equal(source[::-1], out)


@pytest.mark.parametrize(
    "source",
    [
        np.arange(4, dtype="f4"),
        np.arange(4, dtype="f4").reshape(2, 2),
        np.float32(1),
        np.array(2, "f4"),
        b"12345678",
        bytearray(b"12345678"),
        memoryview(b"12345678"),
        array.array("d", [1, 2, 3]),
        np.ones(4, dtype="i4,f8"),
        np.array(["ab", "c"]),
        np.array([True, False]),
        np.arange(8, dtype="f4")[4:],
        np.arange(6, dtype="f4").reshape(1, 2, 3)[:, 1:],
        np.zeros((1, 5))[:, ::1],
    ],
)
def test_any_contiguous_buffer_is_a_source(driver, source):
    expected = memoryview(source).tobytes()
    memory = _cuda.mem_alloc(len(expected))
    _cuda.memcpy_htod(memory, source)
    assert read(memory, "u1").tobytes() == expected


def test_writable_buffers_are_filled(driver):
    memory = device_array([1, 2], "u1")
    buffer = bytearray(2)
    _cuda.memcpy_dtoh(buffer, memory)
    assert buffer == b"\1\2"
    part = np.zeros(4, "u1")
    _cuda.memcpy_dtoh(part[1:3], memory)
    assert part.tolist() == [0, 1, 2, 0]


def test_a_copy_moves_the_host_ends_bytes_only(driver):
    memory = device_array(np.zeros(4))
    _cuda.memcpy_htod(memory, np.ones(2, "f4"))
    assert read(memory).tolist() == [1, 1, 0, 0]
    assert read(memory, count=2).tolist() == [1, 1]


def test_every_kind_of_device_end_is_taken(driver):
    class Allocation:  # as PyCUDA's DeviceAllocation: only int()
        def __int__(self):
            return memory.ptr

    memory = _cuda.mem_alloc(32)
    ends = (memory, memory.ptr, Allocation(), Interface(memory, (2, 4)), np.uintp(memory))
    for number, end in enumerate(ends):
        source = pinned(np.full(8, number))
        _cuda.memcpy_htod(end, np.zeros(8, "f4"))
        _cuda.memcpy_htod_async(end, source)
        out = pinned(np.zeros(8))
        _cuda.memcpy_dtoh_async(out, end)
        _cuda.Context.current().synchronize()
        assert (out == number).all()


def test_an_address_inside_a_block_has_the_rest_of_it(driver):
    memory = device_array(np.zeros(8))
    _cuda.memcpy_htod(memory.ptr + 16, np.ones(4, "f4"))
    assert read(memory).tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    with pytest.raises(ValueError, match="dest has 12 bytes, the copy needs 16"):
        _cuda.memcpy_htod(memory.ptr + 20, np.ones(4, "f4"))


def test_a_size_is_optional_where_both_ends_have_one(driver):
    source, dest = device_array([1, 2, 3]), device_array([0, 0, 0, 9])
    _cuda.memcpy_dtod(dest, source)
    assert read(dest).tolist() == [1, 2, 3, 9]
    _cuda.memcpy_dtod_async(dest, Interface(source, (2,)), stream=_cuda.Stream.legacy())
    with pytest.raises(TypeError, match="needs size: src is an address"):
        _cuda.memcpy_dtod(dest, source.ptr)
    with pytest.raises(TypeError, match="needs size: dest is an address"):
        _cuda.memcpy_dtod_async(dest.ptr, source)


def test_a_copy_onto_itself_is_harmless(driver):
    memory = device_array([1, 2, 3])
    _cuda.memcpy_dtod(memory, memory)
    assert read(memory).tolist() == [1, 2, 3]


def test_rows_are_copied_with_their_pitches(driver, each_mode):
    source = device_array(np.arange(24).reshape(4, 6))
    dest = device_array(np.zeros((4, 5)))
    stream = _cuda.Stream()
    _cuda.memcpy_dtod_2d_async(dest, 20, source, 24, 12, 4, stream)
    stream.synchronize()
    expected = np.zeros((4, 5))
    expected[:, :3] = np.arange(24).reshape(4, 6)[:, :3]
    assert read(dest).reshape(4, 5).tolist() == expected.tolist()
    _cuda.memcpy_dtod_2d_async(dest, 20, source, 24, 0, 4, stream)
    _cuda.memcpy_dtod_2d_async(dest, 20, source, 24, 12, 0, stream)


@pytest.mark.parametrize(
    "dest_pitch, src_pitch, width, height, message",
    [
        (8, 24, 12, 2, "dest_pitch 8 is less than the width 12"),
        (24, 8, 12, 2, "src_pitch 8 is less than the width 12"),
        (24, 24, 12, 5, "dest has 96 bytes, the copy needs 108"),
        (12, 24, 12, 5, "src has 96 bytes, the copy needs 108"),
        (1 << 62, 24, 12, 9, "too many"),
        (24, 1 << 62, 12, 9, "dest has 96|too many"),
        (24, 24, -1, 1, "width must be"),
    ],
)
def test_rows_that_do_not_fit_are_refused(
    driver, no_driver_copies, dest_pitch, src_pitch, width, height, message
):
    memory = _cuda.mem_alloc(96)
    with pytest.raises(ValueError, match=message):
        _cuda.memcpy_dtod_2d_async(
            memory, dest_pitch, memory, src_pitch, width, height, _cuda.Stream()
        )


# ---- Fills ----


@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("form", ["", "_async"])
def test_memory_is_filled_with_elements(driver, each_mode, bits, form):
    fill = getattr(_cuda, f"memset_d{bits}{form}")
    stream = [_cuda.Stream()] if form else []
    memory = device_array(np.zeros(16), "u1")
    value = (1 << bits) - 2
    fill(memory, value, 3, *stream)
    for each in stream:
        each.synchronize()
    expected = np.zeros(128 // bits, f"u{bits // 8}")
    expected[:3] = value
    assert np.array_equal(read(memory, expected.dtype), expected)
    fill(memory, 1, 0, *stream)


@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("form", ["", "_async"])
def test_fills_that_do_not_fit_are_refused(driver, no_driver_copies, bits, form):
    fill = getattr(_cuda, f"memset_d{bits}{form}")
    memory = _cuda.mem_alloc(16)
    elements = 128 // bits
    with pytest.raises(ValueError, match="dest has 16 bytes"):
        fill(memory, 0, elements + 1)
    with pytest.raises(ValueError, match="does not fit"):
        fill(memory, 1 << bits, 1)
    with pytest.raises(ValueError, match="not an address"):
        fill(memory, -1, 1)
    with pytest.raises(ValueError, match="count must be"):
        fill(memory, 0, -1)
    with pytest.raises(ValueError, match="too big|dest has"):
        fill(memory, 0, (1 << 63) - 1)
    if bits > 8:
        with pytest.raises(ValueError, match="not a multiple"):
            fill(memory.ptr + 1, 0, 1)


# ---- Refusals: order, type, size ----


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize(
    "source",
    [
        BASE.transpose(1, 0, 2),
        np.asfortranarray(BASE.transpose(1, 0, 2)),
        BIG[:, 1:3],
        BIG[::2],
        BIG[::-1],
        IMAGES.transpose(0, 1, 3, 4, 2),
    ],
    ids=["transposed", "fortran", "columns", "every-second", "reversed", "images"],
)
def test_a_source_in_another_order_is_refused_with_its_strides(
    driver, no_driver_copies, source, dtype
):
    source = source.astype(dtype, order="K")
    if source.flags.c_contiguous:  # astype has made it so: cut it again
        source = np.repeat(source, 2, axis=0)[::2]
    memory = _cuda.mem_alloc(MIB)
    for copy in (
        lambda: _cuda.memcpy_htod(memory, source),
        lambda: _cuda.memcpy_htod_async(memory, source),
        lambda: _cuda.memcpy_dtoh(source, memory),
        lambda: _cuda.memcpy_dtoh_async(source, memory),
    ):
        with pytest.raises(ValueError, match="not C-contiguous") as caught:
            copy()
        assert str(source.shape) in str(caught.value)
        assert str(source.strides) in str(caught.value)


def test_a_buffer_in_another_order_is_refused(driver, no_driver_copies):
    memory = _cuda.mem_alloc(64)
    with pytest.raises(ValueError, match=r"not C-contiguous: shape \(2,\)"):
        _cuda.memcpy_htod(memory, memoryview(b"1234")[::2])


@pytest.mark.parametrize("dtype", [">f4", ">f8", ">i4", ">U3", ">M8[s]", "i4,>f4"])
def test_the_other_byte_order_is_refused_by_name(driver, no_driver_copies, dtype):
    source = np.zeros(4, dtype)
    memory = _cuda.mem_alloc(64)
    ends = [source, memoryview(source)] if "M8" not in dtype else [source]
    for end in ends:
        for copy in (
            lambda: _cuda.memcpy_htod(memory, end),
            lambda: _cuda.memcpy_htod_async(memory, end),
            lambda: _cuda.memcpy_dtoh(end, memory),
        ):
            with pytest.raises(TypeError, match="byte order"):
                copy()


def test_the_other_byte_order_of_a_field_is_refused(driver, no_driver_copies):
    field = np.zeros(4, "i4,>f4")["f1"].copy()
    with pytest.raises(TypeError, match=">f4.*byte order"):
        _cuda.memcpy_htod(_cuda.mem_alloc(64), field)


@pytest.mark.parametrize("dtype", [object, "O,f4"])
def test_objects_are_never_moved(driver, no_driver_copies, dtype):
    objects = np.zeros(2, dtype)
    memory = _cuda.mem_alloc(64)
    for end in (objects, memoryview(objects)):
        for copy in (_cuda.memcpy_htod, _cuda.memcpy_htod_async):
            with pytest.raises(TypeError, match="pointers"):
                copy(memory, end)
        with pytest.raises(TypeError, match="pointers"):
            _cuda.memcpy_dtoh(end, memory)


def test_field_names_do_not_look_like_formats(driver):
    source = memoryview(np.zeros(2, [("O>", "f4"), ("!", "i4")]))
    _cuda.memcpy_htod(_cuda.mem_alloc(16), source)


@pytest.mark.parametrize("end", [[1, 2], None, 1.5, "text", 3, object()])
def test_what_is_no_buffer_is_no_host_end(driver, no_driver_copies, end):
    memory = _cuda.mem_alloc(64)
    with pytest.raises(TypeError, match=f"src must be a numpy .* {type(end).__name__}"):
        _cuda.memcpy_htod(memory, end)
    with pytest.raises(TypeError, match="dest must be a numpy array"):
        _cuda.memcpy_dtoh(end, memory)


@pytest.mark.parametrize(
    "end", [[1, 2], None, 1.5, np.float32(4), "text", np.zeros(4), True, object()]
)
def test_what_is_no_address_is_no_device_end(driver, no_driver_copies, end):
    source = np.zeros(1, "f4")
    for copy in (
        lambda: _cuda.memcpy_htod(end, source),
        lambda: _cuda.memcpy_dtoh(source, end),
        lambda: _cuda.memcpy_dtod(end, end, 4),
        lambda: _cuda.memset_d8(end, 0, 4),
    ):
        with pytest.raises(TypeError, match="must be memory on the device"):
            copy()


def test_an_address_that_the_driver_does_not_know_is_refused(driver, no_driver_copies):
    with pytest.raises(errors.CudaError, match="knows no device memory at 0x10"):
        _cuda.memcpy_htod(16, b"1234")
    with pytest.raises(ValueError, match="not an address"):
        _cuda.memcpy_htod(-1, b"1234")
    with pytest.raises(ValueError, match="not an address"):
        _cuda.memcpy_htod(1 << 64, b"1234")


def test_sizes_are_checked_on_both_ends(driver, no_driver_copies):
    small, large = _cuda.mem_alloc(12), _cuda.mem_alloc(32)
    array = pinned(np.zeros(4))
    stream = _cuda.Stream()
    for copy, message in (
        (lambda: _cuda.memcpy_htod(small, array), "dest has 12 .* needs 16"),
        (lambda: _cuda.memcpy_htod_async(small, array, stream), "dest has 12"),
        (lambda: _cuda.memcpy_dtoh(array, small), "src has 12 bytes"),
        (lambda: _cuda.memcpy_dtoh_async(array, small, stream), "src has 12"),
        (lambda: _cuda.memcpy_dtod(small, large), "dest has 12 .* needs 32"),
        (lambda: _cuda.memcpy_dtod(small, large, 13), "dest has 12 .* needs 13"),
        (lambda: _cuda.memcpy_dtod(large, small, 13), "src has 12 .* needs 13"),
        (lambda: _cuda.memcpy_dtod_async(large, small, 13, stream), "src has 12"),
        (lambda: _cuda.memcpy_dtod(large, small, -1), "size must be"),
        (lambda: _cuda.memcpy_dtod(large, small, 1 << 64), "size must be"),
    ):
        with pytest.raises(ValueError, match=message):
            copy()


def test_a_read_only_end_is_not_written_to(driver, no_driver_copies):
    memory = _cuda.mem_alloc(16)
    fixed = np.zeros(4, "f4")
    fixed.flags.writeable = False
    for end in (fixed, bytes(16)):
        with pytest.raises(ValueError, match="dest is read-only"):
            _cuda.memcpy_dtoh(end, memory)
    locked = Interface(memory, (4,), read_only=True)
    for copy in (
        lambda: _cuda.memcpy_htod(locked, fixed),
        lambda: _cuda.memcpy_dtod(locked, memory),
        lambda: _cuda.memset_d8(locked, 0, 4),
    ):
        with pytest.raises(ValueError, match="dest is read-only"):
            copy()


@pytest.mark.parametrize("source", [np.zeros(4, "f4"), b"1234", bytearray(4)])
def test_pageable_memory_is_refused_by_an_asynchronous_copy(
    driver, no_driver_copies, source
):
    memory = _cuda.mem_alloc(16)
    with pytest.raises(ValueError, match="src is not page-locked") as caught:
        _cuda.memcpy_htod_async(memory, source, _cuda.Stream())
    for name in ("memcpy_htod", "pagelocked_empty", "register_host_memory"):
        assert name in str(caught.value)
    if isinstance(source, np.ndarray):
        with pytest.raises(ValueError, match="dest is not page-locked.*memcpy_dtoh"):
            _cuda.memcpy_dtoh_async(source, memory)


def test_memory_half_page_locked_is_refused(fake, no_driver_copies):
    whole = np.zeros(4096, "u1")
    half = _cuda.register_host_memory(whole[:2048])
    with pytest.raises(ValueError, match="not page-locked"):
        _cuda.memcpy_htod_async(_cuda.mem_alloc(4096), whole)
    del half


def test_a_foreign_view_of_page_locked_memory_is_accepted(driver):
    source = pinned([1, 2, 3])
    memory, stream = _cuda.mem_alloc(12), _cuda.Stream()
    _cuda.memcpy_htod_async(memory, memoryview(source), stream)
    stream.synchronize()
    assert read(memory).tolist() == [1, 2, 3]


# ---- The array interface ----


@pytest.mark.parametrize(
    "more, error, message",
    [
        ({"strides": (16, 8)}, ValueError, "not C-contiguous: shape .2, 2.*16, 8"),
        ({"strides": (4, 8)}, ValueError, "not C-contiguous"),
        ({"strides": (-8, 4)}, ValueError, "not C-contiguous"),
        ({"strides": (8,)}, TypeError, "no valid shape and strides"),
        ({"strides": [8, 4]}, TypeError, "no valid shape and strides"),
        ({"strides": (8, None)}, TypeError, "."),
        ({"mask": object()}, TypeError, "masked"),
        ({"typestr": "|O"}, TypeError, "pointers"),
        ({"typestr": "nonsense"}, TypeError, "."),
        ({"shape": [2, 2]}, TypeError, "no valid shape"),
        ({"shape": (2, -2)}, ValueError, "a dimension must be"),
        ({"shape": (1 << 40, 1 << 40)}, ValueError, "too big"),
        ({"data": None}, TypeError, "no valid shape, typestr and data"),
        ({"data": (1,)}, TypeError, "no valid shape, typestr and data"),
        ({"data": ("x", False)}, TypeError, "."),
        ({"data": (-1, False)}, ValueError, "not an address"),
    ],
)
def test_a_bad_array_interface_is_refused(
    driver, no_driver_copies, more, error, message
):
    memory = _cuda.mem_alloc(16)
    end = Interface(memory, (2, 2))
    end.__cuda_array_interface__.update(more)
    with pytest.raises(error, match=message):
        _cuda.memcpy_dtoh(np.zeros(4, "f4"), end)


def test_a_good_array_interface_may_have_strides(driver):
    memory = device_array([1, 2, 3, 4])
    out = np.zeros(4, "f4")
    for shape, strides in (((2, 2), (8, 4)), ((4, 1), (4, 99)), ((1, 4), (0, 4))):
        _cuda.memcpy_dtoh(out, Interface(memory, shape, strides=strides))
        assert out.tolist() == [1, 2, 3, 4]


def test_an_interface_that_is_no_dict_or_raises_is_refused(driver):
    class NoDict:
        __cuda_array_interface__ = 1

    class Broken:
        @property
        def __cuda_array_interface__(self):
            raise KeyError("mine")

    with pytest.raises(TypeError, match="no dict"):
        _cuda.memcpy_htod(NoDict(), b"1")
    with pytest.raises(KeyError, match="mine"):
        _cuda.memcpy_htod(Broken(), b"1")


# ---- Contexts ----


def two_contexts():
    """Return (memory of the current context, Context of another, its memory)."""
    other = _cuda.Context.primary(0)
    return _cuda.mem_alloc(16), other, _cuda.mem_alloc(16, other)


def test_ends_of_two_contexts_are_refused(fake, no_driver_copies):
    here, other, there = two_contexts()
    stream = _cuda.Stream(other)
    array = pinned(np.zeros(4))
    for copy in (
        lambda: _cuda.memcpy_dtod(here, there),
        lambda: _cuda.memcpy_dtod_async(here, there, 16),
        lambda: _cuda.memcpy_dtod_2d_async(here, 4, there, 4, 4, 4),
        lambda: _cuda.memcpy_htod_async(here, array, stream),
        lambda: _cuda.memcpy_dtoh_async(array, here, stream),
        lambda: _cuda.memcpy_dtod_async(here, here, 16, stream),
        lambda: _cuda.memset_d8_async(here, 0, 16, stream),
        lambda: _cuda.memcpy_htod_async(here, array, stream.handle),
    ):
        with pytest.raises(ValueError, match="of different contexts: <Context .*<Con"):
            copy()


def test_work_runs_in_the_context_of_its_ends(fake):
    _, other, there = two_contexts()
    before = fake.current_context()
    _cuda.memset_d32(there, 7, 4)
    out = np.zeros(4, "u4")
    _cuda.memcpy_dtoh(out, there)
    assert out.tolist() == [7, 7, 7, 7]
    assert fake.current_context() == before

    def bare():
        stream = _cuda.Stream(other)
        _cuda.memcpy_htod_async(there, _cuda.pagelocked_zeros(4, context=other), stream)
        stream.record(_cuda.Event(other)).synchronize()
        stream.close()
        return fake.current_context()

    assert in_thread(bare) is None
    assert read(there, "u4").tolist() == [0, 0, 0, 0]


def test_an_address_is_taken_to_be_of_the_streams_context(fake):
    other = _cuda.Context.primary(0)
    memory = _cuda.mem_alloc(16, other)
    stream = _cuda.Stream(other)
    source = pinned([1, 2, 3, 4])  # page-locked memory is one for all contexts
    _cuda.memcpy_htod_async(memory.ptr, source, stream)
    stream.synchronize()
    with other:
        assert read(memory).tolist() == [1, 2, 3, 4]


# ---- Nothing to copy ----


def test_no_bytes_are_copied_at_once(driver, no_driver_copies):
    memory, nothing = _cuda.mem_alloc(16), _cuda.mem_alloc(0)
    stream = _cuda.Stream()
    for empty in (np.zeros(0), np.zeros((0, 3)), _cuda.pagelocked_empty((3, 0)), b""):
        for dest in (memory, nothing, 0, memory.ptr, Interface(nothing, (0, 3))):
            _cuda.memcpy_htod(dest, empty)
            _cuda.memcpy_htod_async(dest, empty, stream)
        if isinstance(empty, np.ndarray):
            _cuda.memcpy_dtoh(empty, memory)
            _cuda.memcpy_dtoh_async(empty, nothing, stream)
    _cuda.memcpy_dtod(memory, memory, 0)
    _cuda.memcpy_dtod_async(nothing, nothing)
    _cuda.memset_d32(nothing, 1, 0)
    stream.record().synchronize()


def test_no_bytes_need_neither_driver_nor_context(driver):
    in_thread(_cuda.memcpy_htod_async, 0, np.zeros((0, 3)))


def test_an_empty_copy_with_a_strided_interface_is_empty(driver):
    memory = _cuda.mem_alloc(16)
    _cuda.memcpy_htod(Interface(memory, (0, 3), strides=(99, 1)), np.zeros((0, 3), "f4"))


# ---- Element types: bytes are counted, never elements ----


@pytest.mark.parametrize("dtype", ["f8", "f2", "u1", "?", "i8", "c16", "S5", "i4,f8"])
def test_the_length_of_a_copy_is_in_bytes(driver, dtype):
    source = np.zeros(3, dtype)
    memory = _cuda.mem_alloc(source.nbytes)
    _cuda.memcpy_htod(memory, source)
    with pytest.raises(ValueError, match=f"dest has {source.nbytes} bytes"):
        _cuda.memcpy_htod(memory, np.zeros(4, dtype))


def test_a_pyramid_of_copies_leaves_nothing_behind(driver):
    memory = _cuda.mem_alloc(4 * MIB)
    stream = _cuda.Stream()
    for count in (1, 10, 100):
        for _ in range(count):
            _cuda.memcpy_htod_async(memory, pinned([1]), stream)
    stream.close()
    gc.collect()
    assert _cuda.live_objects()["in_flight"] == 0


# ---- References ----


def test_neither_success_nor_refusal_leaks_a_reference(driver):
    memory, other = _cuda.mem_alloc(64), _cuda.mem_alloc(64)
    array, plain = pinned(np.zeros(4)), np.zeros(4, "f4")
    large, strided = np.zeros(99, "f4"), np.zeros((4, 4), "f4")[:, ::2]
    swapped, objects = np.zeros(2, ">f4"), np.zeros(2, object)
    interface, wrong = Interface(memory, (2, 2)), Interface(memory, (2, 2), "|O")
    buffer, stream, event = bytearray(16), _cuda.Stream(), _cuda.Event().record()
    context = _cuda.Context.current()
    shape, dtype = (3, 2), np.dtype("i4,f8")

    def attempt(function, *args, **kwargs):
        try:
            function(*args, **kwargs)
        except (ValueError, TypeError, errors.CudaError):
            pass

    def everything():
        hosts = (array, plain, large, strided, swapped, objects, buffer, None, [1])
        devices = (memory, interface, wrong, memory.ptr, 16, None, plain)
        for host in hosts:
            for device in devices:
                attempt(_cuda.memcpy_htod, device, host)
                attempt(_cuda.memcpy_dtoh, host, device)
                for on in (stream, None, stream.handle, event, "x"):
                    attempt(_cuda.memcpy_htod_async, device, host, on)
                    attempt(_cuda.memcpy_dtoh_async, host, device, stream=on)
            for call in (
                _cuda.pagelocked_empty_like,
                _cuda.register_host_memory,
                _cuda.is_pagelocked,
            ):
                attempt(call, host)
        for device in devices:
            for size in (16, 999, None, -1, "x"):
                attempt(_cuda.memcpy_dtod, other, device, size)
                attempt(_cuda.memcpy_dtod_async, device, other, size, stream)
                attempt(_cuda.memset_d8_async, device, 1, size, stream)
                attempt(_cuda.memset_d16, device, 1, size)
                attempt(_cuda.memcpy_dtod_2d_async, other, 8, device, 8, 4, size, stream)
        for order in ("C", "F", "K", 1):
            for kind in (dtype, objects.dtype, "S0", "nonsense"):
                attempt(_cuda.pagelocked_empty, shape, kind, order, context=context)
                attempt(_cuda.pagelocked_zeros, (-1, 2), kind, order, 9)
        for on in (stream, None, stream.handle, event, "x", 2):
            attempt(event.record, on)
            attempt(stream.record, on)
            attempt(stream.wait_event, on)
            attempt(event.elapsed_time, on)
            attempt(_cuda.Stream.from_handle, on, event, context)
            attempt(_cuda.Context.from_handle, on, event)
        attempt(stream.wait_event, event)
        attempt(_cuda.Context.from_handle, context.handle, event)
        context.synchronize()
        stream.synchronize()
        gc.collect()

    watched = [
        memory, other, array, array.base, plain, large, strided, swapped, objects,
        interface, wrong, buffer, stream, event, context, shape, dtype, objects.dtype,
        swapped.dtype, None,
    ]  # fmt: skip
    everything()
    before = [sys.getrefcount(thing) for thing in watched]
    for _ in range(3):
        everything()
    after = [sys.getrefcount(thing) for thing in watched]
    grown = [(a - b, thing) for a, b, thing in zip(after, before, watched) if a > b + 2]
    assert not grown
