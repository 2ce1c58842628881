"""Copies of rows to the device from where they lie."""

from __future__ import annotations

import gc
import mmap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import brainstorm_dbuf as dbuf
from binding_tools import (  # noqa: F401
    foreign_view,
    leak_check,
    modes,
    pinned,
    read,
    set_mode,
    source_of,
    stream,
)
from brainstorm_dbuf import _cuda

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("leak_check")]


def moved(src, stream):
    dest = dbuf.mem_alloc(src.nbytes)
    _cuda.memcpy_htod_rows_async(dest, src, stream)
    return read(dest, src.dtype).reshape(src.shape)


@pytest.mark.parametrize("dtype", ["f4", "u1", "f8"])
def test_minibatches_of_sequences_are_moved_as_they_lie(dtype, driver, stream):
    data = pinned(source_of(5 * 40 * 30, dtype).reshape(5, 40, 30), dtype)
    for mode in modes(driver):
        set_mode(driver, mode)
        for part in (
            data,
            data[:3, 7:11],
            data[:, :40],
            data[:1, 3:5],
            data[2:3],
            data[::2, :7],
            data[:, ::4],
            data[:, :, 3:9],
        ):
            np.testing.assert_array_equal(moved(part, stream), part)


@st.composite
def parts(draw):
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    index = [
        slice(
            draw(st.integers(0, n)),
            draw(st.integers(0, n)),
            draw(st.sampled_from([1, 2, -1])),
        )
        for n in shape
    ]
    return tuple(shape), tuple(index), draw(st.permutations(range(len(shape))))


def test_any_part_of_an_array_is_moved_or_refused(driver, stream):
    @settings(deadline=None)
    @given(parts())
    def each(part):
        shape, index, order = part
        whole = pinned(np.arange(int(np.prod(shape))).reshape(shape))
        src = whole[index].transpose(order)
        width = _cuda.row_bytes(src)
        if src.size == 0:
            assert width == 0 and moved(src, stream).size == 0
        elif width:
            assert src.nbytes % width == 0
            np.testing.assert_array_equal(moved(src, stream), src)
            assert width == src.nbytes or not src.flags.c_contiguous
        else:
            assert not src.flags.c_contiguous
            with pytest.raises(ValueError, match="not rows of one length"):
                moved(src, stream)

    each()


def test_a_row_is_as_long_as_memory_goes_on(driver):
    data = np.zeros((5, 40, 30), np.float32)
    for part, width in (
        (data, data.nbytes),
        (data[:, :7], 7 * 120),
        (data[0, 3:5], 240),
        (data[:, ::2], 120),
        (data[..., 3:9], 24),
        (data[..., ::2], 4),
        (data[:3, 5:7, 1:], 0),
        (data[::-1, :7], 0),
        (data.T, 0),
        (np.broadcast_to(data[0], (5, 40, 30)), 0),
        (data[:0], 0),
    ):
        assert _cuda.row_bytes(part) == width
    with pytest.raises(TypeError, match="numpy array"):
        _cuda.row_bytes([1])


def test_rows_too_far_apart_for_the_copy_engine_are_moved_one_by_one(
    driver, fake, stream
):
    pitch = (1 << 31) + 4096
    memory = mmap.mmap(-1, pitch + 4096)
    whole = np.frombuffer(memory, np.uint8)
    locked = dbuf.register_host_memory(whole)
    rows = np.lib.stride_tricks.as_strided(locked, (2, 300), (pitch, 1))
    rows[...] = np.arange(600, dtype=np.uint8).reshape(2, 300)
    before = fake.calls("cuMemcpy2DAsync")
    np.testing.assert_array_equal(moved(rows, stream), rows)
    assert fake.calls("cuMemcpy2DAsync") == before
    del rows, locked, whole


def test_a_dropped_source_of_rows_lives_until_it_has_been_moved(driver, stream):
    if driver.fake is not None:
        driver.fake.mode("late")
    src = pinned(source_of(5 * 40 * 30).reshape(5, 40, 30))
    expected = src[:, 3:9].copy()
    dest = dbuf.mem_alloc(expected.nbytes)
    _cuda.memcpy_htod_rows_async(dest, src[:, 3:9], stream)
    del src
    gc.collect()
    np.testing.assert_array_equal(read(dest).reshape(expected.shape), expected)


def test_rows_are_refused_where_they_cannot_be_moved(driver, stream):
    src = pinned(np.zeros((4, 6, 8)))
    half = np.zeros((4, 6, 8), np.float32)
    dest = dbuf.mem_alloc(4 * 2 * 32)
    for arguments, error, text in (
        ((dest, half[:, :2], stream), ValueError, "src is not page-locked"),
        ((dest, src[:, :3], stream), ValueError, "dest has 256 .* needs 384"),
        ((dest, src[:, :2, 1:], stream), ValueError, r"not rows.*shape \(4, 2, 7\)"),
        ((dest, pinned(half, ">f4")[:, :2], stream), TypeError, "byte order"),
        ((dest, [[1.0]], stream), TypeError, "src must be a numpy array, not list"),
        ((dest, b"1234", stream), TypeError, "src must be a numpy array, not bytes"),
        ((dest,), TypeError, "src"),
    ):
        with pytest.raises(error, match=text):
            _cuda.memcpy_htod_rows_async(*arguments)


def test_rows_of_somebody_elses_page_locked_memory(driver, stream):
    src = foreign_view(pinned(source_of(960))).reshape(4, 6, 40)
    np.testing.assert_array_equal(moved(src[:, 1:3], stream), src[:, 1:3])


def test_a_copy_of_rows_that_fails_is_an_error(fake, stream):
    src = pinned(source_of(960).reshape(4, 6, 40))
    fake.fail("cuMemcpy2DAsync")
    with pytest.raises(dbuf.CudaError, match="4 rows of 320 bytes"):
        moved(src[:, 1:3], stream)
    np.testing.assert_array_equal(moved(src[:, 1:3], stream), src[:, 1:3])
