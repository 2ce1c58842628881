"""Staging beside the copy, and copies of rows from where they lie."""

from __future__ import annotations

import gc
import mmap
import threading
import time
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import brainstorm_dbuf as dbuf
from binding_tools import MIB, foreign_view, leak_check, pinned, read  # noqa: F401
from brainstorm_dbuf import _cuda

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("leak_check")]

CHUNK = 2 * MIB
THREADS = [1, 2, 5]
# Elements of float32: one copy, at its most, then pieces, the last of any size.
SIZES = [1, 1000, MIB - 1, MIB, MIB + 1, 5 * CHUNK // 4 + 17, 6 * CHUNK // 4]


@pytest.fixture
def stream(request, leak_check):  # noqa: F811
    with dbuf.Stream() as made:
        yield made
    # pytest would keep it for longer than leak_check waits.
    request.node.funcargs.pop("stream", None)
    del made


def modes(driver):
    return [None] if driver.fake is None else ["late", "random", "eager"]


def set_mode(driver, mode):
    if mode is not None:
        driver.fake.mode(mode)


def source_of(size, dtype="f4", seed=0):
    rnd = np.random.default_rng(seed)
    return rnd.integers(0, 100, size).astype(dtype)


def staged(src, stream, dtype="f4", threads=0):
    """Return what has arrived on the device."""
    dest = dbuf.mem_alloc(src.size * np.dtype(dtype).itemsize)
    staging = dbuf.pagelocked_empty(src.shape, dtype)
    staging.view("u1")[...] = 0xEE
    _cuda.stage_htod_async(dest, src, staging, stream, threads)
    del staging
    gc.collect()
    return read(dest, dtype).reshape(src.shape)


# ---------------------------------------------------------------- stage_htod_async


@pytest.mark.parametrize("size", SIZES)
def test_every_element_arrives(size, driver, stream):
    for mode in modes(driver):
        set_mode(driver, mode)
        for threads in THREADS:
            src = source_of(size, seed=threads)
            np.testing.assert_array_equal(staged(src, stream, threads=threads), src)


@pytest.mark.parametrize("dest", ["f4", None])
@pytest.mark.parametrize("dtype", ["f8", "f2", "u1", "i2", ">f4", ">i8", "?"])
def test_dtypes_are_cast_or_moved_as_they_are(dtype, dest, driver, stream):
    dest = dest or np.dtype(dtype).newbyteorder("=")
    for size in (1000, 3 * MIB + 5):
        src = source_of(size, dtype)
        expected = src.astype(dest)
        np.testing.assert_array_equal(staged(src, stream, dest), expected)


def test_strides_of_any_kind_are_gathered(driver, stream):
    whole = source_of(12 * MIB).reshape(3, 2, 1024, 2048)
    for src in (
        whole[:, :, ::2],
        whole.transpose(3, 0, 1, 2),
        whole[..., ::-1],
        whole[:, 1],
        np.broadcast_to(whole[0, 0, 0], (1024, 2048)),
    ):
        np.testing.assert_array_equal(staged(src, stream, threads=3), src)


def test_what_numpy_has_to_copy_arrives_too(driver, stream):
    for size in (1000, 3 * MIB):
        src = source_of(size).astype(np.longdouble)
        np.testing.assert_array_equal(staged(src, stream), src)
    # The source is a part of the page-locked array itself.
    staging = pinned(source_of(3 * MIB))
    expected = staging[::-1].copy()
    dest = dbuf.mem_alloc(staging.nbytes)
    _cuda.stage_htod_async(dest, staging[::-1], staging, stream)
    np.testing.assert_array_equal(read(dest), expected)


def test_nothing_at_all_is_nothing(driver, fake, stream):
    calls = fake.calls("cuMemcpyHtoDAsync")
    dest, staging = dbuf.mem_alloc(16), dbuf.pagelocked_empty((0, 3))
    _cuda.stage_htod_async(dest, np.empty((0, 3)), staging, stream)
    assert fake.calls("cuMemcpyHtoDAsync") == calls


@pytest.mark.parametrize("threads", THREADS)
def test_pieces_of_two_mebibytes_are_copied(threads, fake, stream):
    for mebibytes, copies in ((1, 1), (3, 1), (4, 2), (13, 7)):
        before = fake.calls("cuMemcpyHtoDAsync")
        staged(source_of(mebibytes * MIB // 4), stream, threads=threads)
        assert fake.calls("cuMemcpyHtoDAsync") - before == copies


@pytest.mark.parametrize("threads", THREADS)
def test_copies_are_queued_while_the_rest_is_being_gathered(threads, fake, stream):
    src = source_of(32 * MIB, "f8")  # 64 pieces
    dest, staging = dbuf.mem_alloc(src.size * 4), dbuf.pagelocked_empty(src.shape)
    before = fake.calls("cuMemcpyHtoDAsync")
    seen, done = set(), threading.Event()

    def watch():
        while not done.is_set():
            seen.add(fake.calls("cuMemcpyHtoDAsync") - before)
            time.sleep(0.0002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(5):
        _cuda.stage_htod_async(dest, src, staging, stream, threads)
        stream.synchronize()
    done.set()
    watcher.join()
    # Somewhere between none and all of one run.
    assert any(count % 64 for count in seen), seen


@pytest.mark.parametrize("nth", [0, 1, 3])
def test_a_copy_that_fails_is_an_error_and_both_ends_outlive_the_others(
    nth, fake, stream
):
    fake.mode("late")
    src = source_of(4 * CHUNK // 4)
    dest, staging = dbuf.mem_alloc(src.nbytes), dbuf.pagelocked_empty(src.shape)
    fake.fail("cuMemcpyHtoDAsync", nth)
    with pytest.raises(dbuf.CudaError, match="cuMemcpyHtoDAsync") as caught:
        _cuda.stage_htod_async(dest, src, staging, stream, 2)
    assert caught.value.call == "cuMemcpyHtoDAsync"
    del caught, staging
    gc.collect()
    arrived = read(dest)[: nth * CHUNK // 4]
    np.testing.assert_array_equal(arrived, src[: nth * CHUNK // 4])
    np.testing.assert_array_equal(staged(src, stream), src)


@pytest.mark.parametrize("large", [False, True])
def test_what_numpy_warns_of_is_warned_of_and_has_arrived(large, driver, stream):
    src = np.full(3 * MIB if large else 10, 1e300)
    with pytest.warns(RuntimeWarning, match="overflow"):
        arrived = staged(src, stream, threads=2)
    assert (arrived == np.inf).all()
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("error")
        staged(src, stream)
    with np.errstate(over="raise"), pytest.raises(FloatingPointError):
        staged(src, stream)


def test_bad_arguments_are_refused_before_anything_is_done(driver, stream):
    src, staging = source_of(8), dbuf.pagelocked_zeros(8)
    dest = dbuf.mem_alloc(32)
    closed = dbuf.Stream()
    closed.close()
    read_only = dbuf.pagelocked_zeros(8)
    read_only.flags.writeable = False
    for arguments, error, text in (
        ((dest, src, np.zeros(8, "f4"), stream), ValueError, "staging is not page-l"),
        ((dest, src, dbuf.pagelocked_zeros(9), stream), ValueError, "staging has the"),
        ((dest, src, read_only, stream), ValueError, "staging is not writable"),
        ((dest, src, dbuf.pagelocked_zeros((8, 2))[:, 0], stream), ValueError, "C-con"),
        ((dbuf.mem_alloc(31), src, staging, stream), ValueError, "dest has 31"),
        ((dest, src, staging, closed), ValueError, "closed"),
        ((dest, [1.0], staging, stream), TypeError, "src must be a numpy array"),
        ((dest, src, staging, stream, -1), ValueError, "threads"),
        ((dest, src), TypeError, "staging"),
        ((object(), src, staging), TypeError, "dest"),
    ):
        with pytest.raises(error, match=text):
            _cuda.stage_htod_async(*arguments)
        assert not staging.any()


# ------------------------------------------------------------ memcpy_htod_rows_async


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


# --------------------------------------------------------------------- has_signature


def test_a_minibatch_that_looks_the_same_has_the_signature():
    arrays = {"a": np.zeros((1, 2, 3), "f4"), "b": np.zeros((1, 2), ">i8")}
    seen = tuple((name, a.shape, a.dtype) for name, a in arrays.items())
    same = {"a": np.ones((1, 4, 3), "<f4")[:, ::2], "b": np.ones((1, 2), ">i8")}
    assert _cuda.has_signature(arrays, seen) and _cuda.has_signature(same, seen)

    class Sub(np.ndarray):
        pass

    class Dict(dict):
        pass

    for other in (
        {**arrays, "c": np.zeros(1)},
        {"a": arrays["a"]},
        {"b": arrays["b"], "a": arrays["a"]},
        {"a": arrays["a"], "c": arrays["b"]},
        {**arrays, "a": np.zeros((1, 2, 4), "f4")},
        {**arrays, "a": np.zeros((1, 2), "f4")},
        {**arrays, "a": np.zeros((1, 2, 3), "f8")},
        {**arrays, "b": np.zeros((1, 2), "<i8")},
        {**arrays, "a": arrays["a"].view(Sub)},
        {**arrays, "a": [1.0]},
        {**arrays, "a": None},
        Dict(arrays),
        None,
        [arrays],
    ):
        assert not _cuda.has_signature(other, seen)
    assert _cuda.has_signature({}, ())


@pytest.mark.parametrize(
    "wrong", [None, [], ((),), (("a", (1,)),), (("a", [1], np.dtype("f4")),), ("abc",)]
)
def test_what_is_no_signature_is_refused(wrong):
    with pytest.raises(TypeError, match="signature"):
        _cuda.has_signature({"a": np.zeros(1, "f4")}, wrong)
    with pytest.raises(TypeError):
        _cuda.has_signature({})
