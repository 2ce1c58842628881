"""One slot by itself: what it holds, and what may run before what."""

from __future__ import annotations

import gc

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import brainstorm_dbuf as dbuf
from brainstorm_dbuf import access as access_module
from brainstorm_dbuf import back_buffers, held_memory
from brainstorm_dbuf.access import CudaAccess, HostAccess
from brainstorm_dbuf.one_hot import OneHotIndices
from binding_tools import foreign_view, pinned
from conftest import live_objects
from slow_stream import slow  # noqa: F401

pytestmark = pytest.mark.timeout(20)

# At least as large as what is copied straight from page-locked memory.
LARGE = held_memory.DIRECT_COPY_MIN_BYTES // 4


class Front:
    """An array of a network: float32 on the device, perhaps a slice of a larger one."""

    def __init__(self, shape, whole=None, start=0):
        """``whole`` is how many features a row of the buffer has, from ``start`` on."""
        self.shape = shape = tuple(shape)
        self.whole = shape[-1] if whole is None else whole
        rows = int(np.prod(shape[:-1]))
        self.buffer_shape = (*shape[:-1], self.whole)
        self.part = slice(start, start + shape[-1])
        self.memory = dbuf.mem_alloc(rows * self.whole * 4)
        self.strides = np.empty(self.buffer_shape, np.float32).strides
        self.ptr = int(self.memory) + 4 * start
        if self.memory.nbytes:
            dbuf.memset_d32(self.memory, 0, self.memory.nbytes // 4)
            dbuf.Context.current().synchronize()

    def everything(self):
        """Return the whole buffer, once the device is idle."""
        dbuf.Context.current().synchronize()
        array = np.empty(self.buffer_shape, np.float32)
        dbuf.memcpy_dtoh(array, self.memory)
        return array

    def values(self):
        return self.everything()[..., self.part]


class Lent:
    def __init__(self, owner, offset, shape):
        self.owner, self.offset, self.shape = owner, offset, shape


@pytest.fixture
def access(driver):
    gc.collect()
    before = live_objects()
    context = dbuf.Context.current()
    made = CudaAccess(
        np.float32,
        context,
        dbuf.Stream.legacy(context),
        Front,
        lambda front: front.ptr,
        Lent,
        lambda front, array: None,
    )
    yield made
    made.close()
    vars(made).clear()  # pytest holds the object itself
    del made, context
    gc.collect()
    dbuf.Context.current().synchronize()
    assert live_objects() == before


def full(value, shape=(2, 3, 4), dtype=np.float32):
    return {"default": np.full(shape, value, dtype)}


def hand_over(slot, front):
    slot.hand_over({"default": front})


def drain(driver, access, first):
    """Run all that is queued, one of the two streams before the other."""
    if driver.fake is not None:
        streams = {"copy": access.copy_stream.handle, "compute": 0}
        driver.fake.drain(streams.pop(first))
        driver.fake.drain(*streams.values())
    dbuf.Context.current().synchronize()


drained_first = pytest.mark.parametrize("first", ["copy", "compute"])

# ------------------------------------------------------------------------- in order


@drained_first
def test_a_refill_comes_after_the_hand_over_that_is_still_queued(
    first, driver, access, slow
):
    slot, front = access.new_slot(), Front((2, 3, 4))
    slow(None, 100)
    slot.fill(full(1))
    hand_over(slot, front)
    slot.fill(full(2))
    drain(driver, access, first)
    assert (front.values() == 1).all()
    hand_over(slot, front)
    drain(driver, access, first)
    assert (front.values() == 2).all()


@drained_first
def test_a_hand_over_comes_after_the_copy_that_is_still_queued(
    first, driver, access, slow
):
    slot, front = access.new_slot(), Front((2, 3, 4))
    slot.fill(full(0))  # makes room, which waits for the device
    slow(access.copy_stream, 100)
    slot.fill(full(1))
    hand_over(slot, front)
    drain(driver, access, first)
    assert (front.values() == 1).all()


@drained_first
def test_page_locked_memory_is_not_written_to_while_its_copy_is_queued(
    first, driver, access, slow
):
    slots = [access.new_slot(), access.new_slot()]
    fronts = [Front((2, 3, 4)) for _ in range(6)]
    for slot in slots:
        slot.fill(full(0))
    slow(access.copy_stream, 100)
    for k, front in enumerate(fronts):
        slots[k % 2].fill(full(k))
        hand_over(slots[k % 2], front)
    drain(driver, access, first)
    for k, front in enumerate(fronts):
        assert (front.values() == k).all()


@drained_first
def test_a_slot_that_grows_keeps_what_is_still_queued(first, driver, access, slow):
    slot = access.new_slot()
    fronts = [Front((2, 3, 4 * (k + 1))) for k in range(4)]
    for k, front in enumerate(fronts):
        slow(access.copy_stream, 20)
        slow(None, 20)
        slot.fill(full(k, front.shape))
        hand_over(slot, front)
    drain(driver, access, first)
    for k, front in enumerate(fronts):
        assert (front.values() == k).all()
    assert slot.nbytes >= 2 * 3 * 16 * 4


@drained_first
def test_what_was_lent_is_read_before_the_slot_is_filled_again(
    first, driver, access, slow
):
    slot, seen = access.new_slot(), Front((2, 3, 4))
    slow(None, 100)
    slot.fill(full(1))
    lent = slot.lend()["default"]
    dbuf.memcpy_dtod_async(seen.ptr, int(lent.owner) + lent.offset, 96)
    del lent
    slot.take_back()
    slot.fill(full(2))
    drain(driver, access, first)
    assert (seen.values() == 1).all()


@drained_first
def test_what_a_loop_reads_of_its_last_minibatch_is_still_that(
    first, driver, access, slow
):
    """It lets go of a minibatch after the slot was taken back, and may read it then."""
    slot, seen = access.new_slot(), Front((2, 3, 4))
    slot.fill(full(1))
    lent = slot.lend()["default"]
    slot.take_back()
    slow(None, 100)
    dbuf.memcpy_dtod_async(seen.ptr, int(lent.owner) + lent.offset, 96)
    before = slot.nbytes
    del lent
    slot.fill(full(2))
    assert slot.nbytes == before
    drain(driver, access, first)
    assert (seen.values() == 1).all()


def test_a_new_slot_is_never_cleared_on_another_stream(driver, access, slow):
    """The first slot is in use, the NULL stream is busy, a second one is made (07)."""
    used, front, other = access.new_slot(), Front((2, 3, 4)), Front((2, 3, 4))
    used.fill(full(7))
    hand_over(used, front)
    slow(None, 50)
    before = driver.fake.calls() if driver.fake is not None else None
    slot = access.new_slot()
    slot.fill(full(1))
    if driver.fake is not None:
        made = driver.fake.calls() - before
        assert not [name for name in made if "Memset" in name]
        driver.fake.drain(access.copy_stream.handle)
        driver.fake.drain(0)
    hand_over(slot, other)
    assert (other.values() == 1).all()
    assert (front.values() == 7).all()


def test_a_dropped_slot_waits_for_what_is_queued(driver, access, slow):
    slot, front = access.new_slot(), Front((2, 3, LARGE))
    slot.fill(full(3, front.shape))
    slow(access.copy_stream, 30)
    slot.fill(full(4, front.shape))
    slow(None, 30)
    hand_over(slot, front)
    del slot
    gc.collect()
    assert (front.values() == 4).all()


# -------------------------------------------------------------- page-locked sources


def test_page_locked_arrays_are_copied_from_where_they_lie(driver, access, slow):
    slot, front = access.new_slot(), Front((1, 2, LARGE))
    source = pinned(np.full((1, 2, LARGE), 5))
    slot.fill({"default": source})
    assert slot.direct
    assert slot.page_locked_nbytes == 0
    slow(access.copy_stream, 50)
    slot.fill({"default": source})
    # As the feed does before it calls `next` again.
    slot.wait_copied()
    source[...] = 6
    hand_over(slot, front)
    assert (front.values() == 5).all()


def test_a_dropped_source_lives_until_it_has_been_copied(driver, access, slow):
    slot, front = access.new_slot(), Front((1, 2, LARGE))
    slot.fill(full(0, front.shape))
    slow(access.copy_stream, 50)
    source = pinned(np.full(front.shape, 7))
    slot.fill({"default": source})
    assert slot.direct
    del source
    gc.collect()
    others = [pinned(np.full(front.shape, 9)) for _ in range(5)]
    hand_over(slot, front)
    assert (front.values() == 7).all()
    del others


def large(value):
    return np.full((1, 2, LARGE), value, np.float32)


READY = {
    "page-locked": lambda: pinned(large(5)),
    "a part of a page-locked array": lambda: pinned([large(0), large(5)])[1],
    "registered": lambda: dbuf.register_host_memory(large(5)),
    "every second sample": lambda: pinned(np.full((1, 4, LARGE), 5))[:, ::2],
    "some samples of a sequence": lambda: pinned(np.full((2, 5, LARGE), 5))[:, 1:3],
    "page-locked by somebody else": (
        lambda: foreign_view(pinned(large(5))).reshape(1, 2, LARGE)
    ),
}
NOT_READY = {
    "ordinary": lambda: large(5),
    "small": lambda: pinned(np.full((1, 2, 3), 5)),
    "float64": lambda: pinned(large(5), np.float64),
    "the other byte order": lambda: pinned(large(5), ">f4"),
    "Fortran order": lambda: dbuf.pagelocked_empty(
        (1, 2, LARGE), np.float32, order="F"
    ),
    "every second": lambda: pinned(np.full((1, 2, 2 * LARGE), 5))[..., ::2],
    "a few bytes of each row": (lambda: pinned(np.full((2, LARGE, 10), 5))[..., :3]),
    "backwards": lambda: pinned(large(5))[:, ::-1],
    "half of it ordinary": lambda: foreign_view(
        pinned(np.full((1, 2, LARGE), 5))
    ).reshape(1, 2, LARGE)[..., ::2],
}


@pytest.mark.parametrize("name", READY)
def test_what_is_page_locked_and_needs_no_cast_is_not_staged(name, access):
    slot, source = access.new_slot(), READY[name]()
    front = Front(source.shape)
    slot.fill({"default": source})
    assert slot.direct and slot.page_locked_nbytes == 0
    hand_over(slot, front)
    assert (front.values() == 5).all()


@pytest.mark.parametrize("name", NOT_READY)
def test_anything_else_is_gathered_first(name, access):
    slot, source = access.new_slot(), NOT_READY[name]()
    source[...] = 5
    front = Front(source.shape)
    slot.fill({"default": source})
    assert not slot.direct
    source[...] = 6
    hand_over(slot, front)
    assert (front.values() == 5).all()


def test_some_inputs_may_be_ready_and_others_not(access, slow):
    slot = access.new_slot()
    arrays = {
        "small": np.full((1, 2, 1), 1, np.int64),
        "ready": pinned(large(2)),
        "ordinary": large(3).astype(np.float64),
        "also ready": dbuf.register_host_memory(large(4)),
        "none": np.empty((1, 0, 3)),
    }
    fronts = {name: Front(array.shape) for name, array in arrays.items()}
    for _ in range(3):
        slow(access.copy_stream, 10)
        slot.fill(arrays)
        assert slot.direct
        slot.wait_copied()
        slot.hand_over(fronts)
    for value, name in enumerate(list(arrays)[:4], 1):
        assert (fronts[name].values() == value).all()
    back = slot.read_back()
    assert list(back) == ["small", "ordinary", "none", "ready", "also ready"]
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array)


# ----------------------------------------------------- inputs that wait on the host


@pytest.fixture
def reach(cuda):
    reach = access_module.access_for(cuda)
    yield reach
    reach.close()


def fronts_of(cuda, arrays):
    return {name: cuda.zeros(array.shape) for name, array in arrays.items()}


def test_the_smallest_inputs_need_no_copy_of_their_own(cuda, reach, driver, slow):
    slot = reach.new_slot()
    for value in range(3):
        arrays = {
            "targets": np.full((2, 5, 1), value, np.float64),
            "large": pinned(large(value)),
            "bytes": np.full((2, 5, 3), value + 10, np.uint8),
            "rows": expandable(np.full((2, 5, 1), value), 4),
            "too large": np.full((1, back_buffers.MOST_READ_BYTES, 1), value, np.int16),
        }
        fronts = fronts_of(cuda, arrays)
        before = copies_of(driver)
        slow(reach.copy_stream, 10)
        slot.fill(arrays)
        if driver.fake is not None:
            assert copies_of(driver) - before == 2
        # Their owner may use them again at once, as any that are not `source_in_use`.
        arrays["targets"][...] = arrays["bytes"][...] = 99
        slot.hand_over(fronts)
        assert (fronts["targets"].get() == value).all()
        assert (fronts["large"].get() == value).all()
        assert (fronts["bytes"].get() == value + 10).all()
        assert (fronts["rows"].get() == np.eye(4)[value]).all()
        assert (fronts["too large"].get() == value).all()
        back = slot.read_back()
        assert (back["targets"] == value).all() and (back["bytes"] == value + 10).all()
    slot.close()


def copies_of(driver):
    calls = ("cuMemcpyHtoDAsync", "cuMemcpy2DAsync")
    return driver.fake and sum(map(driver.fake.calls, calls))


def expandable(indices, size):
    return OneHotIndices(indices.astype(np.int32), size)


def test_an_input_that_waits_is_not_overwritten_before_it_is_read(cuda, reach, slow):
    slot, taken = reach.new_slot(), []
    for value in range(4):
        arrays = {"targets": np.full((1, 7, 2), value + 1, np.float32)}
        slot.fill(arrays)
        taken.append(fronts_of(cuda, arrays)["targets"])
        slow(reach.compute_stream, 20)
        slot.hand_over({"targets": taken[-1]})
    assert [front.get().max() for front in taken] == [1, 2, 3, 4]
    assert [front.get().min() for front in taken] == [1, 2, 3, 4]
    slot.close()


def test_closing_waits_for_who_reads_what_waits_on_the_host(cuda, reach, slow):
    slot = reach.new_slot()
    arrays = {"targets": np.ones((1, 7, 2), np.float32)}
    fronts = fronts_of(cuda, arrays)
    slot.fill(arrays)
    slow(reach.compute_stream, 30)
    slot.hand_over(fronts)
    assert not slot._is_consumed()
    slot.close()
    assert slot._is_consumed()


def test_more_small_inputs_get_a_larger_place(cuda, reach, slow):
    slot = reach.new_slot()
    for samples in (1, 2000, 3, 4000):
        arrays = {"targets": np.full((1, samples, 1), samples, np.float32)}
        fronts = fronts_of(cuda, arrays)
        slot.fill(arrays)
        slow(reach.compute_stream, 10)
        slot.hand_over(fronts)
        assert (fronts["targets"].get() == samples).all()
    slot.close()


# -------------------------------------------------------------------------- fronts


@pytest.mark.parametrize("whole, start", [(4, 0), (5, 0), (5, 1), (64, 60)])
@pytest.mark.parametrize("shape", [(2, 3, 4), (1, 3, 4), (2, 1, 4), (1, 1, 4), (3, 4)])
def test_a_front_may_be_a_slice_of_features(shape, whole, start, access):
    slot, front = access.new_slot(), Front(shape, whole, start)
    values = np.arange(1, np.prod(shape) + 1, dtype=np.float32).reshape(shape)
    slot.fill({"default": values})
    hand_over(slot, front)
    expected = np.zeros(front.buffer_shape, np.float32)
    expected[..., front.part] = values
    np.testing.assert_array_equal(front.everything(), expected)


def test_only_the_inputs_that_are_asked_for_are_handed_over(access):
    slot, front = access.new_slot(), Front((1, 2, 3))
    slot.fill({"default": np.ones((1, 2, 3)), "other": np.ones((1, 2, 5))})
    slot.hand_over({"default": front})
    slot.hand_over({})
    assert (front.values() == 1).all()


@hypothesis.given(
    st.lists(st.integers(1, 4), min_size=0, max_size=5),
    st.integers(1, 6),
    st.integers(0, 3),
    st.integers(0, 3),
)
@hypothesis.settings(deadline=None, max_examples=300)
def test_rows_reach_every_element_of_a_slice_of_features(leading, width, left, right):
    buffer = np.zeros((*leading, left + width + right), np.float32)
    front = buffer[..., left : left + width]
    row, pitch = access_module._rows(front.shape, front.strides, 4)
    assert row % 4 == 0 and pitch >= row and front.nbytes % row == 0
    start = front.__array_interface__["data"][0] - buffer.ctypes.data
    flat = buffer.reshape(-1).view(np.uint8)
    for k in range(front.nbytes // row):
        flat[start + k * pitch : start + k * pitch + row] = 1
    assert (front.view(np.uint32) == 0x01010101).all()
    assert np.count_nonzero(flat) == front.nbytes
    if left + right == 0:
        assert row == pitch == front.nbytes


@hypothesis.given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.data())
@hypothesis.settings(deadline=None, max_examples=300)
def test_rows_of_any_slice_are_right_or_refused(shape, data):
    buffer = np.zeros(shape, np.float32)
    cut = []
    for length in shape:
        start = data.draw(st.integers(0, length - 1))
        cut.append(slice(start, data.draw(st.integers(start + 1, length))))
    front = buffer[tuple(cut)]
    try:
        row, pitch = access_module._rows(front.shape, front.strides, 4)
    except ValueError as error:
        assert str(front.shape) in str(error) and str(front.strides) in str(error)
        return
    start = front.__array_interface__["data"][0] - buffer.ctypes.data
    flat = buffer.reshape(-1).view(np.uint8)
    for k in range(front.nbytes // row):
        flat[start + k * pitch : start + k * pitch + row] = 1
    assert (front.view(np.uint32) == 0x01010101).all()
    assert np.count_nonzero(flat) == front.nbytes


@pytest.mark.parametrize(
    "front",
    [
        np.zeros((2, 3, 4), np.float32)[:, :2, :3],
        np.zeros((2, 3, 4), np.float32).transpose(2, 0, 1),
        np.zeros((2, 3, 4), np.float32)[:, :, ::2],
        np.asfortranarray(np.zeros((2, 3, 4), np.float32)),
    ],
    ids=["two gaps", "transposed", "every second", "Fortran order"],
)
def test_a_front_that_is_not_rows_at_one_distance_is_refused(front):
    # Rows of one element are fine, as long as all have one distance.
    if front.strides == (48, 16, 8):
        assert access_module._rows(front.shape, front.strides, 4) == (4, 8)
        return
    with pytest.raises(ValueError, match="rows at one distance"):
        access_module._rows(front.shape, front.strides, 4)


# ------------------------------------------------------------------- slots on the host


def test_a_host_slot_gathers_casts_and_hands_over():
    slot = HostAccess(np.float32).new_slot()
    source = np.arange(24.0).reshape(4, 3, 2).transpose(1, 0, 2)
    slot.fill({"a": source, "b": np.ones((1, 2, 3), bool)})
    front = np.empty(source.shape, np.float32)
    expected = source.copy()
    source[...] = -1
    slot.hand_over({"a": front})
    np.testing.assert_array_equal(front, expected)
    assert (slot.read_back()["b"] == 1).all()
    assert slot.direct is False


@pytest.mark.parametrize("sizes", [[1, 5, 2, 9, 9, 3], [9, 1, 5], [0, 1, 0]])
def test_a_slot_has_the_size_of_its_largest_minibatch(sizes, access):
    slots = HostAccess(np.float32).new_slot(), access.new_slot()
    for slot in slots:
        for k, size in enumerate(sizes):
            slot.fill(full(k, (1, size, 100)))
            assert slot.nbytes >= size * 400
            assert (slot.read_back()["default"] == k).all()
        assert slot.nbytes <= max(sizes) * 400 + back_buffers.ALIGNMENT


def test_inputs_lie_side_by_side_on_their_boundaries():
    shapes = {"a": (1, 3), "b": (0, 3), "c": (5, 100)}
    dtype = np.dtype(np.float32)
    places = [back_buffers.Place(name, shape, dtype) for name, shape in shapes.items()]
    end = back_buffers.lay_out(places)
    assert [(p.name, p.offset, p.nbytes) for p in places] == [
        ("a", 0, 12),
        ("b", 256, 0),
        ("c", 256, 2000),
    ]
    assert end == 256 + 2048


def test_a_minibatch_without_inputs_of_the_network_can_be_put(access):
    assert access.can_put([])
