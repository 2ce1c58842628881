"""Arrays on their way to the device, through a ring of page-locked memory."""

from __future__ import annotations

import gc
import threading
import time
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import brainstorm_dbuf as dbuf
from binding_tools import (  # noqa: F401
    MIB,
    leak_check,
    modes,
    read,
    set_mode,
    source_of,
    stream,
)
from brainstorm_dbuf import _cuda

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("leak_check")]

PLACE = 512 * 1024
THREADS = [1, 2, 5]
# Elements of float32: one piece, at its most, then pieces, the last of any size; twice
# around the ring.
SIZES = [1, 1000, PLACE // 4 - 1, PLACE // 4, PLACE // 4 + 1, 5 * PLACE // 8, 2 * PLACE]


def new_ring(places=4, nbytes=PLACE):
    memory = dbuf.pagelocked_empty(places * nbytes, "u1")
    memory[...] = 0xEE
    return _cuda.StagingRing(memory, places)


@pytest.fixture
def ring(request, stream):
    made = new_ring()
    yield made
    made.close()
    request.node.funcargs.pop("ring", None)
    del made


def carried(ring, src, stream, dtype="f4", threads=0):
    """Return what has arrived on the device."""
    dest = dbuf.mem_alloc(src.size * np.dtype(dtype).itemsize)
    ring.memcpy_htod_async(dest, src, dtype, stream, threads)
    return read(dest, dtype).reshape(src.shape)


@pytest.mark.parametrize("size", SIZES)
def test_every_element_arrives(size, driver, ring, stream):
    for mode in modes(driver):
        set_mode(driver, mode)
        for threads in THREADS:
            src = source_of(size, seed=threads)
            arrived = carried(ring, src, stream, threads=threads)
            np.testing.assert_array_equal(arrived, src)


@pytest.mark.parametrize("size", [5 * PLACE // 8, 3 * PLACE])
def test_an_array_may_begin_anywhere_in_its_memory(size, driver, ring, stream):
    memory = np.zeros(4 * size + 64, np.uint8)
    for offset in (0, 4, 17, 60):
        src = memory[offset : offset + 4 * size].view("f4")
        src[...] = source_of(size) + offset
        assert np.array_equal(carried(ring, src, stream), src)


def test_arrays_follow_each_other_through_the_ring(driver, stream):
    ring = new_ring(places=3, nbytes=64)
    sizes = np.random.default_rng(0).integers(0, 60, 200)
    for mode in modes(driver):
        set_mode(driver, mode)
        sources = [source_of(size, seed=k) for k, size in enumerate(sizes)]
        dests = [dbuf.mem_alloc(src.nbytes) for src in sources]
        for dest, src in zip(dests, sources):
            own = src.copy()
            ring.memcpy_htod_async(dest, own, None, stream)
            own[...] = -1
        for dest, src in zip(dests, sources):
            np.testing.assert_array_equal(read(dest), src)


@pytest.mark.parametrize("dest", ["f4", None])
@pytest.mark.parametrize("dtype", ["f8", "f2", "u1", "i2", ">f4", ">i8", "?"])
def test_dtypes_are_cast_or_moved_as_they_are(dtype, dest, driver, ring, stream):
    for size in (1000, MIB + 5):
        src = source_of(size, dtype)
        expected = src.astype(dest or np.dtype(dtype).newbyteorder("="))
        memory = dbuf.mem_alloc(expected.nbytes)
        ring.memcpy_htod_async(memory, src, dest, stream)
        np.testing.assert_array_equal(read(memory, expected.dtype), expected)


def test_strides_of_any_kind_are_gathered(driver, ring, stream):
    whole = source_of(3 * MIB).reshape(3, 2, 512, 1024)
    for src in (
        whole[:, :, ::2],
        whole.transpose(3, 0, 1, 2),
        whole[..., ::-1],
        whole[:, 1],
        np.broadcast_to(whole[0, 0, 0], (1024, 1024)),
    ):
        np.testing.assert_array_equal(carried(ring, src, stream, threads=3), src)


def test_any_array_arrives_through_any_ring(driver, stream):
    @settings(deadline=None)
    @given(
        st.integers(1, 5),
        st.integers(64, 300),
        st.integers(0, 999),
        st.sampled_from(["f4", "f8", "u1", "i2", ">f4"]),
        st.sampled_from(["f4", "f8", None]),
        st.integers(1, 4),
    )
    def each(places, nbytes, size, dtype, dest, threads):
        ring = new_ring(places, nbytes)
        src = source_of(2 * size, dtype)[::2]
        expected = src.astype(dest or src.dtype.newbyteorder("="))
        memory = dbuf.mem_alloc(expected.nbytes)
        for _ in range(2):
            ring.memcpy_htod_async(memory, src, dest, stream, threads)
        np.testing.assert_array_equal(read(memory, expected.dtype), expected)

    each()


def test_what_numpy_has_to_cast_arrives_too(driver, ring, stream):
    for size in (1000, MIB):
        src = source_of(size).astype(np.longdouble)
        np.testing.assert_array_equal(carried(ring, src, stream), src)
        arrived = carried(ring, source_of(size), stream, "i4")
        np.testing.assert_array_equal(arrived, source_of(size))


def test_nothing_at_all_is_nothing(fake, ring, stream):
    calls = fake.calls("cuMemcpyHtoDAsync")
    ring.memcpy_htod_async(dbuf.mem_alloc(16), np.empty((0, 3)), "f4", stream)
    assert fake.calls("cuMemcpyHtoDAsync") == calls


@pytest.mark.parametrize("threads", THREADS)
def test_pieces_of_a_place_are_copied(threads, fake, ring, stream):
    for quarters, copies in ((1, 1), (4, 1), (5, 2), (20, 5)):
        before = fake.calls("cuMemcpyHtoDAsync")
        carried(ring, source_of(quarters * PLACE // 16), stream, threads=threads)
        assert fake.calls("cuMemcpyHtoDAsync") - before == copies


@pytest.mark.parametrize("threads", THREADS)
def test_a_place_is_not_filled_before_its_last_copy_is_done(threads, driver, stream):
    """The ring is short and the device slow: without waiting, most would be wrong."""
    ring = new_ring(places=2, nbytes=64)
    src = np.arange(16 * 50, dtype=np.float32)
    other = dbuf.pagelocked_zeros(MIB)
    busy = dbuf.mem_alloc(other.nbytes)
    for mode in modes(driver):
        set_mode(driver, mode)
        dest = dbuf.mem_alloc(src.nbytes)
        dbuf.memcpy_htod_async(busy, other, stream)
        ring.memcpy_htod_async(dest, src, None, stream, threads)
        np.testing.assert_array_equal(read(dest), src)


@pytest.mark.parametrize("threads", THREADS)
def test_copies_are_queued_while_the_rest_is_being_gathered(threads, fake, stream):
    src = source_of(8 * MIB, "f8")  # 64 pieces
    ring = new_ring(places=16)
    dest = dbuf.mem_alloc(src.size * 4)
    before = fake.calls("cuMemcpyHtoDAsync")
    seen, done = set(), threading.Event()

    def watch():
        while not done.is_set():
            seen.add(fake.calls("cuMemcpyHtoDAsync") - before)
            time.sleep(0.0002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(5):
        ring.memcpy_htod_async(dest, src, "f4", stream, threads)
        stream.synchronize()
    done.set()
    watcher.join()
    # Somewhere between none and all of one run.
    assert any(count % 64 for count in seen), seen


def test_threads_take_turns(driver, ring, stream):
    sources = [source_of(3 * PLACE // 4, seed=k) for k in range(4)]
    dests = [dbuf.mem_alloc(src.nbytes) for src in sources]
    context = dbuf.Context.current()

    def work(dest, src):
        with context:
            for _ in range(5):
                ring.memcpy_htod_async(dest, src, None, stream, 2)

    threads = [threading.Thread(target=work, args=each) for each in zip(dests, sources)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for dest, src in zip(dests, sources):
        np.testing.assert_array_equal(read(dest), src)


@pytest.mark.parametrize("call", ["cuMemcpyHtoDAsync", "cuEventRecord"])
@pytest.mark.parametrize("nth", [0, 1, 3])
def test_a_call_that_fails_is_an_error_and_the_ring_goes_on(
    nth, call, fake, ring, stream
):
    fake.mode("late")
    src = source_of(6 * PLACE // 4)
    dest = dbuf.mem_alloc(src.nbytes)
    fake.fail(call, nth)
    with pytest.raises(dbuf.CudaError, match=call) as caught:
        ring.memcpy_htod_async(dest, src, None, stream, 2)
    assert caught.value.call == call
    del caught
    np.testing.assert_array_equal(carried(ring, src, stream), src)


def test_a_wait_that_fails_is_an_error_and_the_ring_goes_on(fake, ring, stream):
    fake.mode("late")
    src = source_of(6 * PLACE // 4)
    dest = dbuf.mem_alloc(src.nbytes)
    # The two last pieces wait for the two first.
    fake.fail("cuEventSynchronize", 0)
    with pytest.raises(dbuf.CudaError, match="cuEventSynchronize"):
        ring.memcpy_htod_async(dest, src, None, stream, 2)
    np.testing.assert_array_equal(carried(ring, src, stream), src)


@pytest.mark.parametrize("large", [False, True])
def test_what_numpy_warns_of_is_warned_of_and_has_arrived(large, driver, ring, stream):
    src = np.full(MIB if large else 10, 1e300)
    with pytest.warns(RuntimeWarning, match="overflow"):
        arrived = carried(ring, src, stream, threads=2)
    assert (arrived == np.inf).all()
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("error")
        carried(ring, src, stream)
    with np.errstate(over="raise"), pytest.raises(FloatingPointError):
        carried(ring, src, stream)


def test_what_is_in_flight_outlives_the_ring(driver, stream):
    if driver.fake is not None:
        driver.fake.mode("late")
    src = source_of(PLACE)
    for end in (_cuda.StagingRing.close, lambda ring: None):
        ring, dest = new_ring(places=8), dbuf.mem_alloc(src.nbytes)
        ring.memcpy_htod_async(dest, src, None, stream)
        end(ring)
        del ring
        gc.collect()
        np.testing.assert_array_equal(read(dest), src)


def test_a_closed_ring_holds_nothing_and_takes_nothing(driver, stream):
    ring = new_ring()
    assert (ring.nbytes, ring.place_nbytes, ring.closed) == (4 * PLACE, PLACE, False)
    assert "4 places of 524288 bytes" in repr(ring)
    ring.close()
    ring.close()
    assert (ring.nbytes, ring.closed, repr(ring)) == (0, True, "<StagingRing closed>")
    with pytest.raises(ValueError, match="StagingRing is closed"):
        ring.memcpy_htod_async(dbuf.mem_alloc(8), np.zeros(2), None, stream)


def test_bad_arguments_are_refused_before_anything_is_done(driver, ring, stream):
    src = source_of(8)
    dest = dbuf.mem_alloc(32)
    dbuf.memset_d8(dest, 0, 32)
    closed = dbuf.Stream()
    closed.close()
    for arguments, error, text in (
        ((dbuf.mem_alloc(31), src, "f4", stream), ValueError, "dest has 31"),
        ((dest, src, "f4", closed), ValueError, "closed"),
        ((dest, [1.0], "f4", stream), TypeError, "src must be a numpy array"),
        ((dest, src, "f4", stream, -1), ValueError, "threads"),
        ((dest, src, "no such", stream), TypeError, "no such"),
        ((dest, src, "c8", stream), TypeError, "dtype: expected numbers"),
        ((dest, src, ">f4", stream), TypeError, "dtype: expected numbers"),
        ((dest, np.zeros(8, "O"), None, stream), TypeError, "dtype: expected numbers"),
        ((dest,), TypeError, "src"),
        ((object(), src), TypeError, "dest"),
    ):
        with pytest.raises(error, match=text):
            ring.memcpy_htod_async(*arguments)
        assert not read(dest).any()


def test_more_than_there_can_be_does_not_fit(driver, ring, stream):
    dest = dbuf.mem_alloc(32)
    dbuf.memset_d8(dest, 0, 32)
    # The last two have 2^64 bytes, and 32 more, as float64.
    for size in (2**40, 2**61, 2**61 + 4):
        src = np.broadcast_to(np.uint8(1), size)
        with pytest.raises(ValueError, match="dest has 32"):
            ring.memcpy_htod_async(dest, src, "f8", stream)
    assert not read(dest).any()


def test_pieces_are_waited_for_without_the_interpreter(fake, stream):
    ring = new_ring(places=1, nbytes=64)
    src, dest = source_of(32), dbuf.mem_alloc(128)
    counter, done = [0], threading.Event()

    def count():
        while not done.is_set():
            counter[0] += 1
            time.sleep(0.001)

    other = threading.Thread(target=count)
    other.start()
    fake.spin(stream.handle, 200)
    before = counter[0]
    ring.memcpy_htod_async(dest, src, None, stream)
    counted = counter[0] - before
    done.set()
    other.join()
    assert counted > 20
    np.testing.assert_array_equal(read(dest), src)


def test_what_python_runs_for_a_copy_may_use_the_ring(driver, ring, stream):
    src = np.full(10, 1e300)
    inner, outer = (dbuf.mem_alloc(40) for _ in range(2))
    context = dbuf.Context.current()

    def copy_another(*_):
        ring.memcpy_htod_async(inner, source_of(10), None, stream)

    class Asked:
        @property
        def dtype(self):
            copy_another()
            return np.dtype("f4")

    def work():
        with context, np.errstate(over="call", call=copy_another):
            ring.memcpy_htod_async(outer, src, Asked(), stream)

    # It would wait for itself without end.
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    np.testing.assert_array_equal(read(inner), source_of(10))
    assert (read(outer) == np.inf).all()


# ------------------------------------------------------------ several arrays in one place


def test_arrays_arrive_packed_whatever_they_are(driver, stream):
    """In rings of two places, so that each is used again."""
    array = st.tuples(
        st.integers(0, 300),
        st.sampled_from(["f4", "f8", "u1", "i2", ">f4", "g"]),
        st.sampled_from(["f4", "f8", "u1", None]),
        st.integers(0, 70),
        st.booleans(),
    )

    @settings(deadline=None)
    @given(st.lists(st.lists(array, min_size=1, max_size=6), min_size=1, max_size=4))
    def each(copies):
        ring = new_ring(2, 32768)
        expected = []
        for arrays in copies:
            srcs, offsets, dtypes, parts, end = [], [], [], [], 0
            for size, dtype, dest, gap, is_strided in arrays:
                dest = dest or ("f4" if dtype == "g" else None)
                src = source_of((1 + is_strided) * size, dtype)[:: 1 + is_strided]
                part = src.astype(dest or src.dtype.newbyteorder("="))
                srcs.append(src), offsets.append(end + gap), dtypes.append(dest)
                parts.append((end + gap, part))
                end += gap + part.nbytes
            memory = dbuf.mem_alloc(max(end, 1))
            ring.memcpy_htod_packed_async(memory, srcs, offsets, dtypes, stream)
            expected.append((memory, parts))
        for memory, parts in expected:
            arrived = read(memory, "u1")
            for offset, part in parts:
                got = arrived[offset : offset + part.nbytes]
                assert got.tobytes() == part.tobytes()

    each()


def test_packed_arrays_are_one_copy(fake, ring, stream):
    dest, src = dbuf.mem_alloc(4096), source_of(8)
    calls = fake.calls()
    ring.memcpy_htod_packed_async(
        dest, [src] * 4, [0, 64, 100, 4064], ["f4"] * 4, stream
    )
    made = fake.calls() - calls
    assert made["cuMemcpyHtoDAsync"] == made["cuEventRecord"] == 1
    ring.memcpy_htod_packed_async(dest, [], [], [], stream)
    ring.memcpy_htod_packed_async(dest, [src[:0]], [0], [None], stream)
    assert fake.calls("cuMemcpyHtoDAsync") == calls["cuMemcpyHtoDAsync"] + 1


def test_a_place_is_not_packed_before_its_last_copy_is_done(driver, stream):
    if driver.fake is not None:
        driver.fake.mode("late")
    ring = new_ring(places=2, nbytes=1 << 16)
    copies = []
    for k in range(5):
        srcs = [source_of(8000, seed=2 * k), source_of(8000, seed=2 * k + 1)]
        dest = dbuf.mem_alloc(64000)
        ring.memcpy_htod_packed_async(dest, srcs, [0, 32000], [None, None], stream)
        copies.append((dest, np.concatenate(srcs)))
    for dest, expected in copies:
        np.testing.assert_array_equal(read(dest), expected)


@pytest.mark.parametrize("call", ["cuMemcpyHtoDAsync", "cuEventRecord", "cuEventQuery"])
def test_a_packed_copy_that_fails_is_an_error_and_the_ring_goes_on(
    call, fake, ring, stream
):
    fake.mode("late")
    src = source_of(100)
    dest = dbuf.mem_alloc(2 * src.nbytes)
    arguments = dest, [src, src], [0, src.nbytes], ["f4", "f4"], stream
    for _ in range(5):  # the first wait for no place
        ring.memcpy_htod_packed_async(*arguments)
    fake.fail(call)
    with pytest.raises(dbuf.CudaError, match=call):
        ring.memcpy_htod_packed_async(*arguments)
    ring.memcpy_htod_packed_async(*arguments)
    np.testing.assert_array_equal(read(dest), np.tile(src, 2))


def test_what_numpy_warns_of_in_a_packed_copy_is_warned_of(driver, ring, stream):
    dest, src = dbuf.mem_alloc(80), np.full(10, 1e300)
    with pytest.warns(RuntimeWarning, match="overflow"):
        ring.memcpy_htod_packed_async(
            dest, [np.ones(10), src], [0, 40], ["f4", "f4"], stream
        )
    assert read(dest).tolist() == [1] * 10 + [np.inf] * 10


def test_a_bad_argument_among_packed_ones_is_named_and_nothing_is_done(
    driver, ring, stream
):
    src, dest = source_of(8), dbuf.mem_alloc(64)
    dbuf.memset_d8(dest, 0, 64)
    good = {
        "dest": dest,
        "srcs": [src, src],
        "offsets": [0, 32],
        "dtypes": ["f4", "f4"],
    }
    for wrong, error, text in (
        ({"dest": dbuf.mem_alloc(63)}, ValueError, "dest has 63"),
        (
            {"srcs": [src, [1.0]]},
            TypeError,
            r"srcs\[1\] must be a numpy array, not list",
        ),
        ({"srcs": 5}, TypeError, "srcs must be a sequence, got int"),
        ({"srcs": [src]}, ValueError, "must be as many, got 1, 2 and 2"),
        ({"offsets": [0, -1]}, ValueError, r"offsets\[1\]"),
        ({"offsets": [0, "x"]}, TypeError, r"offsets\[1\]"),
        ({"offsets": [0, 31]}, ValueError, r"offsets\[1\] is 31, but .* at byte 32"),
        ({"offsets": [32, 0]}, ValueError, r"offsets\[1\] is 0, but .* at byte 64"),
        ({"offsets": [0, PLACE]}, ValueError, "end at byte 524320, a place has 524288"),
        ({"offsets": [0, 2**63 - 1]}, ValueError, "end at byte 9223372036854775839"),
        ({"dtypes": ["f4", "no such"]}, TypeError, "no such"),
        ({"dtypes": ["f4", "c8"]}, TypeError, "dtype: expected numbers"),
    ):
        with pytest.raises(error, match=text):
            ring.memcpy_htod_packed_async(**{**good, **wrong}, stream=stream)
        assert not read(dest).any()
    ring.close()
    with pytest.raises(ValueError, match="StagingRing is closed"):
        ring.memcpy_htod_packed_async(**good)


def test_an_array_may_be_resized_while_packed_arguments_are_read(driver, ring, stream):
    """By code that another argument runs: what is copied is as it is then."""
    src, dest = source_of(1 << 16), dbuf.mem_alloc(64)

    class Resizing:
        @property
        def dtype(self):
            src.resize(4, refcheck=False)
            return np.dtype("f4")

    ring.memcpy_htod_packed_async(
        dest, [src, source_of(4)], [0, 16], ["f4", Resizing()], stream
    )
    np.testing.assert_array_equal(
        read(dest)[:8], [*source_of(1 << 16)[:4], *source_of(4)]
    )


def test_memory_that_cannot_be_a_ring_is_refused(driver, stream):
    good = dbuf.pagelocked_empty(1024, "u1")
    read_only = dbuf.pagelocked_empty(1024, "u1")
    read_only.flags.writeable = False
    for arguments, error, text in (
        (([1],), TypeError, "memory must be a numpy array"),
        ((np.zeros(1024),), ValueError, "made by pagelocked_empty"),
        ((good[::2],), ValueError, "C-contiguous"),
        ((read_only,), ValueError, "writable"),
        ((good[:0],), ValueError, "with elements"),
        ((good[1:],), ValueError, "multiple of 64"),
        ((good, 0), ValueError, "places: expected from 1 to 64"),
        ((good, 65), ValueError, "places: expected from 1 to 64"),
        ((good, 17), ValueError, "of at least 64 bytes each"),
        ((good, 2, 3), TypeError, "context"),
    ):
        with pytest.raises(error, match=text):
            _cuda.StagingRing(*arguments)
