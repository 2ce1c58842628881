"""CudaHandler's widen, one_hot and unpack: each result has NumPy's own bits."""

from __future__ import annotations

import gc
import inspect
import re
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import brainstorm_dbuf as dbuf
from conftest import KIND, live_objects
from layouts import (
    Layout,
    assert_same_bits,
    buffer_of,
    layouts,
    on_one_handler,
    shapes,
    whole,
)

pytestmark = [pytest.mark.timeout(600)]

DTYPES = ["bool", "i1", "u1", "i2", "u2", "i4", "u4", "f2", "f4"]
shifts = st.one_of(st.just(0), st.integers(0, 17))


class Source:
    """The bytes of an array on the device, `shift` bytes into memory of their own."""

    def __init__(self, cuda, array, shift=0):
        nbytes = array.nbytes
        with cuda.context:
            self.memory = dbuf.mem_alloc(max(1, shift + nbytes))
            self.address = int(self.memory) + shift
            if nbytes:
                dbuf.memcpy_htod(self.address, np.ascontiguousarray(array).ravel())
            # From ordinary memory the copy may land later than the call returns.
            cuda.context.synchronize()


def floats(array):
    """Return NumPy's cast to float32; a bool is true whatever its byte but zero."""
    if array.dtype == bool:
        array = array.view(np.uint8) != 0
    with np.errstate(all="ignore"):
        return array.astype(np.float32)


def of_bits(seed, shape, dtype):
    """Return an array of random bits: all kinds of numbers that the dtype has."""
    rnd = np.random.default_rng(seed)
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return rnd.integers(0, 256, nbytes, np.uint8).view(dtype).reshape(shape)


def check_widen(cuda, array, layout=None, shift=0):
    """Widen into a layout; what lies around it must be as it was."""
    layout = whole(array.shape) if layout is None else layout
    before = buffer_of(layout, np.full(array.shape, np.nan, np.float32))
    buffer = cuda.create_from_numpy(before)
    source = Source(cuda, array, shift)
    assert cuda.widen(layout.cut(buffer), source.address, array.dtype) is None
    assert_same_bits(cuda.get_numpy_copy(buffer), buffer_of(layout, floats(array)))


def check_one_hot(cuda, indices, columns, layout=None, shift=0):
    shape = (*indices.shape, columns)
    layout = whole(shape) if layout is None else layout
    before = buffer_of(layout, np.full(shape, np.nan, np.float32))
    buffer = cuda.create_from_numpy(before)
    source = Source(cuda, indices.astype(np.int32), shift)
    assert cuda.one_hot(layout.cut(buffer), source.address) is None
    expected = floats(indices[..., None] == np.arange(columns))
    assert_same_bits(cuda.get_numpy_copy(buffer), buffer_of(layout, expected))


# ------------------------------------------------------------------------------- widen


@pytest.mark.parametrize("dtype", DTYPES)
def test_elements_are_cast_as_by_numpy_wherever_they_lie(dtype, cuda):
    @on_one_handler
    @given(st.data())
    def run(data):
        shape = data.draw(shapes)
        array = of_bits(data.draw(st.integers(0, 1 << 32)), shape, dtype)
        check_widen(cuda, array, data.draw(layouts(shape)), data.draw(shifts))

    run()


@pytest.mark.parametrize("shift", [0, 1, 8])
def test_every_float16_is_numpys_to_the_last_bit(shift, cuda):
    """Subnormals, infinities and NaNs of either kind with all their payloads."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    check_widen(cuda, halves, shift=shift)
    table = halves.reshape(256, 256)
    check_widen(cuda, table, Layout(table.shape, (0, 4), (0, 4)), shift)
    check_widen(cuda, table, Layout(table.shape, (0, 1), (0, 2)), shift)


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2"])
def test_every_narrow_integer_is_exact(dtype, cuda):
    bits = 8 * np.dtype(dtype).itemsize
    check_widen(cuda, np.arange(1 << bits).astype(f"u{bits // 8}").view(dtype))


@pytest.mark.parametrize("dtype", ["i4", "u4"])
@pytest.mark.parametrize("shift", [0, 2, 4])
def test_what_float32_cannot_hold_is_rounded_to_the_nearest_even(dtype, shift, cuda):
    info = np.iinfo(dtype)
    near = [0, info.min, info.max]
    for power in range(24, 33):
        ulp = 1 << max(power - 24, 0)
        for last in (0, 1, 2, 3):
            tie = (1 << power) + last * ulp + ulp // 2
            near += [s * (tie + d) for s in (1, -1) for d in (-1, 0, 1)]
            below = (1 << power) - last * ulp - ulp // 4
            near += [s * (below + d) for s in (1, -1) for d in (-1, 0, 1)]
    near = [value for value in near if info.min <= value <= info.max]
    array = np.array(near, dtype)
    inexact = array.astype(np.float32).astype(np.float64) != array
    assert inexact.sum() > 100
    check_widen(cuda, array, shift=shift)


@pytest.mark.parametrize("shift", [0, 1])
def test_any_byte_but_zero_is_true(shift, cuda):
    array = np.arange(256, dtype=np.uint8)
    buffer, source = cuda.zeros((256,)), Source(cuda, array, shift)
    cuda.widen(buffer, source.address, bool)
    assert_same_bits(cuda.get_numpy_copy(buffer), floats(array != 0))


# Rows of the output, as an Input's buffer may have them: a slice of features, a range of
# steps, images in a slice of features (several axes to a row), a piece of each axis.
PITCHED = {
    "fours": Layout((3, 5, 32), (0, 0, 4), (0, 0, 8)),
    "odd features": Layout((3, 5, 33), (0, 0, 4), (0, 0, 8)),
    "an odd pitch": Layout((3, 5, 32), (0, 0, 4), (0, 0, 7)),
    "an odd start": Layout((3, 5, 32), (0, 0, 3), (0, 0, 9)),
    "one feature": Layout((7, 9, 1), (0, 0, 2), (0, 0, 3)),
    "steps": Layout((3, 5, 31), (2, 0, 0), (1, 0, 0)),
    "few long rows": Layout((2, 4000), (0, 8), (0, 4)),
    "few long odd rows": Layout((3, 4001), (0, 8), (0, 4)),
    "rows of many axes": Layout((4, 3, 2, 8), (0, 1, 0, 0), (0, 2, 0, 0)),
    "a piece of each axis": Layout((3, 4, 5), (1, 1, 1), (1, 1, 1)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", PITCHED)
def test_only_the_rows_of_a_view_are_written(place, dtype, cuda):
    layout = PITCHED[place]
    size = np.dtype(dtype).itemsize
    for shift in (0, 1, size, 4 * size):
        check_widen(cuda, of_bits(shift, layout.shape, dtype), layout, shift)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 1023, 1024, 1027])
def test_the_last_elements_of_a_row_are_neither_left_nor_overrun(n, cuda):
    for dtype in DTYPES:
        array = of_bits(n, (n,), dtype)
        for offset in (0, 1):
            check_widen(cuda, array, Layout((n,), (0,), (0,), offset))


def test_images_in_a_slice_of_features_take_no_copy(cuda):
    """Their last axis alone is no row at one distance, the last three together are."""
    hub = cuda.create_from_numpy(np.full((6, 3 * 4 * 5 + 7), np.nan, np.float32))
    images = hub[:, 3 : 3 + 60].reshape((2, 3, 3, 4, 5))
    array = of_bits(0, images.shape, "u1")
    source = Source(cuda, array)
    held = cuda.pool_info()
    cuda.widen(images, source.address, "u1")
    assert cuda.pool_info() == held
    got = cuda.get_numpy_copy(hub)
    assert_same_bits(got[:, 3:63].copy(), floats(array).reshape(6, 60))
    assert np.isnan(got[:, :3]).all() and np.isnan(got[:, 63:]).all()


@pytest.mark.parametrize("dtype", ["u1", "i4", "f2"])
def test_more_elements_than_all_threads_hold_at_once(dtype, cuda):
    """Threads take several pieces, and the loops over the grid come round again."""
    n = ((1 << 19) if KIND == "fake" else (9 << 20)) + 3
    array = of_bits(1, (n,), dtype)
    check_widen(cuda, array)
    check_widen(cuda, array, Layout((n,), (0,), (0,), 1))
    many_rows = array[: n // 31 * 31].reshape(-1, 31)
    check_widen(cuda, many_rows, Layout(many_rows.shape, (0, 1), (0, 0)))


def test_an_array_without_axes_takes_one_element(cuda):
    device = cuda.zeros((1,))
    source = Source(cuda, np.array([7], np.uint16))
    cuda.widen(device.reshape(()), source.address, "u2")
    assert device.get().tolist() == [7]


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4), (2, 0, 3)])
def test_nothing_is_done_for_an_empty_array(shape, cuda):
    empty = cuda.zeros(shape)
    assert cuda.widen(empty, 0, "u1") is None
    assert cuda.one_hot(empty, 0) is None
    with pytest.raises(TypeError, match="^widen: dtype must be "):
        cuda.widen(empty, 0, "f8")


SPELLINGS = [np.uint8, np.dtype(np.uint8), "uint8", "u1", "B", b"u1", "|u1", ">u1"]


@pytest.mark.parametrize("dtype", SPELLINGS, ids=repr)
def test_a_dtype_is_given_as_numpy_takes_it(dtype, cuda):
    source, out = Source(cuda, np.array([200, 3], np.uint8)), cuda.zeros((2,))
    cuda.widen(out, source.address, dtype)
    assert out.get().tolist() == [200, 3]


def test_a_source_is_whatever_has_an_address_as_its_index(cuda):
    source = Source(cuda, np.array([1, 0], np.int32))
    for address in (source.memory, source.address, np.uint64(source.address)):
        out, rows = cuda.zeros((2,)), cuda.zeros((2, 2))
        cuda.widen(out, address, "i4")
        cuda.one_hot(rows, address)
        assert out.get().tolist() == [1, 0]
        assert rows.get().tolist() == [[0, 1], [1, 0]]


# ----------------------------------------------------------------------------- one_hot


@on_one_handler
@given(data=st.data())
def test_rows_are_one_at_their_index_and_zero_elsewhere(cuda, data):
    rows = data.draw(
        st.one_of(
            st.lists(st.integers(0, 5), min_size=0, max_size=4).map(tuple),
            st.sampled_from([(257,), (31, 9), (1000,), (2, 3, 171)]),
        )
    )
    sizes = [10, 31, 32, 33, 100, 128, 205]
    columns = data.draw(st.one_of(st.integers(1, 9), st.sampled_from(sizes)))
    rnd = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    indices = rnd.integers(0, columns, rows)
    place = data.draw(layouts((*rows, columns)))
    check_one_hot(cuda, indices, columns, place, data.draw(shifts))


@pytest.mark.parametrize("columns", [1, 3, 4, 8, 12, 127])
@pytest.mark.parametrize("offset", [0, 1])
def test_an_index_out_of_range_leaves_a_row_of_zeros(columns, offset, cuda):
    ends = [-1, columns, -columns, -(1 << 31), (1 << 31) - 1]
    indices = np.array([0, *ends, columns - 1, -2, -3, -4, columns + 1, columns + 3])
    place = Layout((len(indices), columns), (0, 0), (0, 0), offset)
    check_one_hot(cuda, indices, columns, place)
    cuda.synchronize()  # no complaint is left behind


@pytest.mark.parametrize("columns", [1003, 50_000])
def test_rows_may_be_long(columns, cuda):
    indices = np.array([0, columns - 1, columns // 2, 1])
    check_one_hot(cuda, indices, columns)
    check_one_hot(cuda, indices[:1], columns)
    shape = (4, columns)
    check_one_hot(cuda, indices, columns, Layout(shape, (0, 4), (0, 8)))


def test_more_rows_than_all_threads_hold_at_once(cuda):
    rows = ((1 << 15) if KIND == "fake" else (1 << 20)) + 5
    indices = np.random.default_rng(0).integers(0, 12, rows)
    check_one_hot(cuda, indices, 12)
    check_one_hot(cuda, indices, 13, Layout((rows, 13), (0, 1), (0, 1)))


def test_one_hot_needs_an_axis_for_its_columns(cuda):
    scalar = cuda.zeros((1,)).reshape(())
    with pytest.raises(ValueError, match=r"^one_hot: dest has shape \(\), expected "):
        cuda.one_hot(scalar, Source(cuda, np.zeros(1, np.int32)).address)


# --------------------------------------------------------------- arguments, both of them

OTHER_DTYPES = ["f8", "i8", "u8", "c8", "S1", "U1", "m8[s]", "V1", "O"]
OTHER_DTYPES += [np.dtype(d).newbyteorder() for d in ("i2", "u2", "i4", "u4", "f2")]
OTHER_DTYPES += ["(2,)u1", "u1,u1", None, "no such", "i4,,", 3, slice(3), int, float]


@pytest.mark.parametrize("dtype", OTHER_DTYPES, ids=repr)
def test_any_other_dtype_is_refused_by_name(dtype, cuda):
    source, out = Source(cuda, np.zeros(64, np.uint8)), cuda.ones((2,))
    with pytest.raises(TypeError) as caught:
        cuda.widen(out, source.address, dtype)
    expected = r"^widen: dtype must be bool, int8, .* or float32 in native byte order, "
    assert re.match(expected + r"got .+$", str(caught.value))
    assert out.get().tolist() == [1, 1]


CALLS = {
    "widen": lambda cuda, dest, source: cuda.widen(dest, source, "u1"),
    "one_hot": lambda cuda, dest, source: cuda.one_hot(dest, source),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_dest_of_another_kind_is_refused_by_name(name, cuda):
    source = Source(cuda, np.zeros(4, np.int32))
    integers = cuda.as_array(
        SimpleNamespace(
            __cuda_array_interface__={
                "shape": (1, 1),
                "typestr": "<i4",
                "data": (source.address, False),
                "version": 3,
            }
        )
    )
    for wrong in (np.ones((1, 1), np.float32), None, source.address):
        with pytest.raises(
            TypeError, match=f"^{name}: dest must be a DeviceArray, got"
        ):
            CALLS[name](cuda, wrong, source.address)
    with pytest.raises(TypeError, match=f"^{name}: dest .*float32, has int32"):
        CALLS[name](cuda, integers, source.address)


@pytest.mark.parametrize("name", CALLS)
def test_a_source_that_is_no_address_is_refused_by_name(name, cuda):
    dest = cuda.ones((1, 2))
    for wrong in ("address", None, 1.5, np.zeros(2, np.uint8)):
        with pytest.raises(
            TypeError, match=f"^{name}: source must be a device address"
        ):
            CALLS[name](cuda, dest, wrong)
    for wrong in (-1, 1 << 64, 0):
        with pytest.raises(
            ValueError, match=f"^{name}: source {wrong} is not an addre"
        ):
            CALLS[name](cuda, dest, wrong)
    assert dest.get().tolist() == [[1, 1]]


NAMED = {
    "widen": {"dest": (2,), "source": None, "dtype": "i4"},
    "one_hot": {"dest": (2, 2), "source": None},
}


@pytest.mark.parametrize("name", NAMED)
def test_arguments_may_be_named(name, cuda):
    operation, source = getattr(cuda, name), Source(cuda, np.array([1, 0], np.int32))
    assert list(inspect.signature(operation).parameters) == list(NAMED[name])
    dest = cuda.zeros(NAMED[name]["dest"])
    given = {**NAMED[name], "dest": dest, "source": source.address}
    operation(**given)
    assert dest.get().sum() == dest.ndim
    with pytest.raises(TypeError, match=f"{name}.*missing"):
        operation(dest)
    with pytest.raises(TypeError, match=f"{name}.*unknown"):
        operation(**given, unknown=1)


# ------------------------------------------------------- all inputs of a minibatch at once


def draw_input(cuda, data):
    """Draw an input: (dest, its buffer, what that becomes, where it comes from, dtype)."""
    shape, dtype = data.draw(shapes), data.draw(st.sampled_from([None, *DTYPES]))
    if dtype is None:
        columns = data.draw(st.integers(1, 9))
        array = np.arange(int(np.prod(shape)), dtype=np.int32) % (columns + 1)
        array = array.reshape(shape)
        values = floats(array[..., None] == np.arange(columns))
    else:
        array = of_bits(data.draw(st.integers(0, 1 << 32)), shape, dtype)
        values = floats(array)
    layout = data.draw(layouts(values.shape))
    untouched = buffer_of(layout, np.full(values.shape, np.nan, np.float32))
    buffer = cuda.create_from_numpy(untouched)
    source = Source(cuda, array, data.draw(shifts))
    return layout.cut(buffer), buffer, buffer_of(layout, values), source, dtype


def test_all_inputs_of_a_minibatch_at_once(cuda):
    """Of any dtypes, layouts and number."""

    @on_one_handler
    @given(st.data())
    def run(data):
        count = data.draw(st.integers(1, 20))
        inputs = [draw_input(cuda, data) for _ in range(count)]
        dests, buffers, expected, sources, dtypes = zip(*inputs)
        cuda.unpack(dests, [source.address for source in sources], dtypes)
        for buffer, values in zip(buffers, expected):
            assert_same_bits(cuda.get_numpy_copy(buffer), values)

    run()


def test_what_is_refused_among_many_is_named_and_nothing_is_done(cuda):
    source = Source(cuda, np.arange(4, dtype=np.uint8)).address
    dests = [cuda.ones((2,)), cuda.ones((2,)), cuda.ones((2,))]
    scalar = dests[2].reshape((1, 2))[0, :1].reshape(())

    def refused(error, words, dests=dests, sources=(source,) * 3, dtypes=("u1",) * 3):
        with pytest.raises(error, match="^unpack: " + words):
            cuda.unpack(dests, sources, dtypes)

    refused(TypeError, r"dests\[2\] must be a DeviceArray", [*dests[:2], None])
    refused(ValueError, r"dests\[2\] has shape \(\), expected", [*dests[:2], scalar],
            dtypes=("u1", "u1", None))  # fmt: skip
    refused(
        TypeError, r"sources\[1\] must be a device address", sources=(source, "x", 1)
    )
    refused(ValueError, r"sources\[1\] 0 is not an address", sources=(source, 0, 1))
    refused(TypeError, r"dtypes\[1\] must be bool, .* got dtype\('float64'\)",
            dtypes=("u1", "f8", "u1"))  # fmt: skip
    refused(TypeError, "dests must be a sequence, got NoneType", None)
    refused(TypeError, "dtypes must be a sequence, got int", dtypes=1)
    refused(ValueError, "dests, sources and dtypes must be as many, got 3, 2 and 3",
            sources=(source,) * 2)  # fmt: skip
    assert [dest.get().tolist() for dest in dests] == [[1, 1]] * 3


def test_nothing_is_done_for_no_inputs_and_for_empty_ones(cuda):
    assert cuda.unpack([], [], []) is None
    source, out = Source(cuda, np.array([3], np.uint8)), cuda.zeros((1,))
    empty = cuda.zeros((0, 4))
    cuda.unpack([empty, out, empty], [0, source.address, 0], [None, "u1", "f4"])
    assert out.get().tolist() == [3]


# ------------------------------------------------------------------- on the stand-in only

QUEUED = {
    **CALLS,
    "unpack": lambda cuda, dest, source: cuda.unpack([dest], [source], ["u1"]),
}


@pytest.mark.parametrize("count", [1, 8, 9, 17])
def test_a_launch_takes_eight_inputs(count, fake, cuda):
    source, dest = Source(cuda, np.zeros(4, np.uint8)), cuda.zeros((4,))
    calls = fake.calls("cuLaunchKernel")
    cuda.unpack([dest] * count, [source.address] * count, ["u1"] * count)
    assert fake.calls("cuLaunchKernel") - calls == -(-count // 8)


@pytest.mark.parametrize("name", QUEUED)
def test_it_is_queued_and_nothing_waits(name, fake, cuda):
    source = Source(cuda, np.array([1], np.int32))
    dest = cuda.zeros((1, 3))
    syncs, calls = fake.host_syncs(), fake.calls("cuLaunchKernel")
    QUEUED[name](cuda, dest[:, :1], source.address)
    assert fake.host_syncs() == syncs
    assert fake.calls("cuLaunchKernel") == calls + 1


@pytest.mark.parametrize("name", QUEUED)
@pytest.mark.parametrize("call, times", [("cuMemAlloc", 2), ("cuLaunchKernel", 1)])
def test_a_failed_driver_call_comes_out_and_leaves_nothing(
    name, call, times, fake, cuda
):
    """Where the rows are at no one distance, it goes by way of memory of its own."""
    gc.collect()
    cuda.trim_pool()
    before = live_objects()
    source = Source(cuda, np.zeros(24, np.int32))
    for nth in range(8):
        cuda.trim_pool()
        dest = cuda.ones((3, 4, 3))[:, :2, :2]
        fake.fail(call, nth=nth, code=2, times=times)
        try:
            QUEUED[name](cuda, dest, source.address)
        except dbuf.CudaError as error:
            assert call in str(error)
        else:
            break
        QUEUED[name](cuda, dest, source.address)
    assert 0 < nth < 7
    del source, dest
    gc.collect()
    cuda.trim_pool()
    assert live_objects() == before
