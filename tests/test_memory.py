"""What the feed asks of the driver, how much it holds, what it does with too little."""

from __future__ import annotations

import ctypes
import gc
import threading
import warnings
import weakref

import numpy as np
import pytest

import brainstorm_dbuf as dbuf
import brainstorm as bs
from binding_tools import pinned
from brainstorm.data_iterators import Minibatches
from brainstorm_dbuf import access, held_memory
from brainstorm_dbuf.access import LEAST_PLACE_BYTES, STAGING_PLACES
from coded import FEATURES, From, Hook, Job, batch, coded, codes, workers
from parity import assert_same, force_worker, make_handler

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_left")]

MODES = ["late", "random", "eager"]

# Page-locked bytes for small minibatches, however many back buffers there are.
RING = STAGING_PLACES * LEAST_PLACE_BYTES

# ----------------------------------------------------- driver calls in the steady state

# What an update may ask of the driver: nothing that allocates, frees or waits.
STEADY = {
    "cuCtxGetCurrent",
    "cuCtxPopCurrent",
    "cuCtxPushCurrent",
    "cuEventQuery",
    "cuEventRecord",
    "cuMemGetAddressRange",
    "cuMemcpy2DAsync",
    "cuMemcpyDtoDAsync",
    "cuMemcpyHtoDAsync",
    "cuPointerGetAttribute",
    "cuStreamWaitEvent",
}
# Small copies share events that tell when they are done; there are a few of them.
STEADY_AT_FIRST = STEADY | {"cuEventCreate"}


@pytest.fixture
def through_ring(monkeypatch):
    """What is put into the network goes through the feed, not by the handler's copy."""
    monkeypatch.setattr(access, "MOST_SET_BYTES", 0)


def calls_of_updates(fake, driver, iterator, first, mode="late", depth=2, **options):
    """Return the calls between update ``first`` and the last one, and the waits."""
    counts = []

    def look(number):
        counts.append((fake.calls(), fake.host_syncs()))

    fake.mode(mode, 3)
    job = Job("device", driver, also=look, depth=depth, **options)
    job.train(iterator)
    assert job.seen == codes(*range(len(counts) // job.trainer.current_epoch_nr)) * (
        job.trainer.current_epoch_nr
    )
    (calls, waits), (last_calls, last_waits) = counts[first], counts[-1]
    made = last_calls - calls
    updates = len(counts) - 1 - first
    assert made["cuMemcpyHtoDAsync"] >= updates - 2, "nothing was copied"
    return made, last_waits - waits, updates


# What the worker may have ahead has to fit into the ring, or it waits there. Those of
# 50,000 are too large to be put: else a worker that begins late wants a slot of its own.
@pytest.mark.parametrize(
    "samples, depth", [(2, 2), (2, 3), (50_000, 2), (50_000, 3), (100_000, 2)]
)
@pytest.mark.parametrize("mode", MODES)
def test_from_the_third_minibatch_on_an_update_neither_allocates_nor_waits(
    samples, mode, depth, fake, driver, way, through_ring
):
    count = 40 if samples == 2 else 12
    made, waits, _ = calls_of_updates(
        fake, driver, coded(count, samples=samples), 2, mode, depth
    )
    assert set(made) <= STEADY_AT_FIRST, made
    assert waits == 0


def test_an_update_makes_a_handful_of_calls(fake, driver, way, through_ring):
    made, waits, updates = calls_of_updates(fake, driver, coded(300), 100)
    assert set(made) <= STEADY, made
    assert waits == 0
    per_update = {name: count / updates for name, count in made.items()}
    # One copy to the device of both inputs if they wait in a back buffer, else one for
    # each, with an event that says when its page-locked memory is free again; and one
    # within the device for each that waits.
    through_slots = way != "automatic"
    copies = 1 if through_slots else 2
    assert per_update["cuMemcpyHtoDAsync"] == pytest.approx(copies, abs=0.02)
    assert per_update["cuEventRecord"] <= copies + 0.2 + 2 * through_slots
    assert per_update["cuEventQuery"] <= copies + 0.2 + 2 * through_slots
    assert per_update.get("cuMemcpyDtoDAsync", 0) == pytest.approx(
        2 * through_slots, abs=0.02
    )
    assert per_update.get("cuStreamWaitEvent", 0) <= 2.02 * through_slots


@pytest.mark.parametrize("depth", [2, 3])
def test_later_epochs_ask_for_no_memory_either(depth, fake, driver, way, through_ring):
    made, waits, _ = calls_of_updates(
        fake, driver, coded(5), 5 * depth + 1, depth=depth, epochs=depth + 4
    )
    assert set(made) <= STEADY_AT_FIRST, made
    assert waits == 0


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("lies_still", [False, True])
def test_brainstorms_own_trainer_allocates_nothing_for_a_prefetch(
    lies_still, depth, fake, driver, way, monkeypatch
):
    """Its loop holds a minibatch until it has the next one."""
    monkeypatch.setattr(held_memory, "REGION_MIN_BYTES", 0)
    if lies_still:
        numbers = np.arange(12, dtype=np.float32).reshape(1, 12, 1)
        arrays = {"default": numbers, "targets": numbers + 1000}
        rows = 16384 // FEATURES + 1  # enough to be copied from where they lie
        arrays = {
            name: np.repeat(np.repeat(array, rows, 1), FEATURES, 2)
            for name, array in arrays.items()
        }
        iterator = Minibatches(rows, shuffle=False, **arrays)
    else:
        iterator = coded(12)
    job, counts = Job("device", driver), []
    trainer = bs.Trainer(job.stepper, verbose=False)
    trainer.add_hook(bs.hooks.StopAfterEpoch(3))
    job.stepper.also = lambda step: counts.append(fake.calls("cuMemAlloc"))
    with dbuf.Prefetch(iterator, depth) as prefetch:
        trainer.train(job.net, prefetch)
        assert job.seen == codes(*range(12)) * 3
        assert prefetch.stats.direct == (36 if lies_still else 0)
    assert counts[-1] == counts[12 if way == "worker" else 6]


def page_locked_source(count, size=12000):
    arrays = {
        name: dbuf.pagelocked_empty((1, size, FEATURES))
        for name in ("default", "targets")
    }
    for k in range(count):
        arrays["default"][...], arrays["targets"][...] = k, k + 1000
        yield arrays


def test_a_copy_from_the_iterators_own_array_is_waited_for_only_while_it_runs(
    fake, driver, way
):
    """Rule 5: `next` comes after the copy; if that is done, asking is enough."""
    iterator = From(lambda: page_locked_source(12))
    made, waits, updates = calls_of_updates(fake, driver, iterator, 2, "eager")
    assert set(made) <= STEADY_AT_FIRST, made
    assert waits == 0
    made, waits, updates = calls_of_updates(fake, driver, iterator, 2, "late")
    assert set(made) <= STEADY_AT_FIRST | {"cuEventSynchronize"}, made
    assert waits == made["cuEventSynchronize"] <= updates + 1


def test_ragged_minibatches_grow_the_slots_and_no_more(fake, driver, way):
    """Sizes 1 to 20: once the largest has come, nothing is asked for any more."""
    sizes = [*range(1, 21), *range(19, 0, -1)]
    blocks = []

    def make_pass():
        return (batch(k, samples=100 * size) for k, size in enumerate(sizes))

    def look(number):
        blocks.append(fake.live())

    job = Job("device", driver, also=look, epochs=2)
    job.net.provide_external_data(batch(0, samples=2000))
    own = fake.live()["device_blocks"]
    job.train(From(make_pass))
    assert job.seen == codes(*range(len(sizes))) * 2
    largest = 20 * 100 * FEATURES * 4 * 2 + 512
    for live in blocks:
        assert live["device_blocks"] <= own + 2
        assert live["pinned_bytes"] == job.stats.page_locked_bytes
    # At rest: two slots, both of the size of the largest minibatch.
    assert job.stats.back_buffer_bytes <= largest
    assert job.stats.page_locked_bytes == RING
    second = blocks[len(sizes) + 20 :]
    for kind in ("device_bytes", "pinned_bytes", "events", "streams"):
        assert len({live[kind] for live in second}) == 1, kind


# ------------------------------------------------------------------------ many epochs


def resident_mib():
    # What threads have freed stays with the allocator's arenas otherwise.
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20


class Interrupted(Exception):
    pass


@pytest.mark.slow
def test_three_hundred_epochs_leave_nothing_behind(kind, driver, monkeypatch):
    """Of 3 minibatches, up to 1 MiB; every 10th ends early, every 20th in an error."""
    force_worker(monkeypatch)
    job = Job(kind, driver)
    job.trainer.hooks.clear()
    sizes = [*range(1, 21), *range(19, 0, -1)]
    samples = (1 << 20) // 4 // FEATURES // 20
    arrays = [np.zeros((1, 20 * samples, FEATURES), np.float32) for _ in range(2)]
    state = {"epoch": 0}

    class Data:
        """What an iterator yields, so that it can be watched."""

    watched = weakref.WeakSet()

    def make_pass():
        state["epoch"] += 1
        state["update"] = 0
        size = sizes[state["epoch"] % len(sizes)] * samples
        data = Data()
        watched.add(data)
        for _ in range(3):
            yield {"default": arrays[0][:, :size], "targets": arrays[1][:, :size]}
        del data

    def disturb(update_nr):
        state["update"] += 1
        if state["update"] == 2 and state["epoch"] % 20 == 0:
            raise Interrupted
        if state["update"] == 1 and state["epoch"] % 10 == 0:
            raise StopIteration

    job.trainer.add_hook(Hook(disturb, "disturb"))
    job.stepper.look = lambda: None
    at_start = None
    resident = []
    threads = threading.active_count()
    while state["epoch"] < 300:
        try:
            job.train(From(make_pass))
        except Interrupted:
            pass
        gc.collect()
        assert threading.active_count() == threads
        assert workers() == [] and not watched
        # A handler's own stream lives on, and holds its last copies' ends till it is
        # waited for.
        if isinstance(job.net.handler, dbuf.CudaHandler):
            job.net.handler.stream.synchronize()
        now = dbuf.live_objects()
        if driver.fake is not None:
            now["driver"] = driver.fake.live()
        # The network's own buffers grow until the largest minibatch has come.
        if state["epoch"] >= 40:
            at_start = at_start or now
            assert now == at_start
            resident.append(resident_mib())
    assert state["epoch"] == 300
    third = len(resident) // 3
    # How much the allocator keeps of what threads have freed varies.
    assert min(resident[-third:]) - max(resident[:third]) < 5


def test_a_dropped_network_and_trainer_take_all_with_them(kind, driver, way):
    job = Job(kind, driver, epochs=2).train(coded(4))
    alive = [weakref.ref(thing) for thing in (job.net, job.trainer, job.net.handler)]
    job.stepper.net = None
    del job
    gc.collect()
    assert [ref() for ref in alive] == [None] * 3


# -------------------------------------------------------------------- too little memory

SLOT = 512  # bytes of device memory in a slot for coded minibatches


def trained_once(driver, depth):
    """Return a job whose network has all its memory, so that only slots are to come."""
    job = Job("device", driver, depth=depth)
    job.net.provide_external_data(batch(0))
    return job


def train_with_warnings(job, count=6):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job.train(coded(count))
    assert all(w.category is dbuf.FeedWarning for w in caught), caught
    return [str(w.message) for w in caught]


def plain_result(driver, count=6):
    return Job("device", driver, double_buffering=False).train(coded(count)).result()


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("slots", [0, 1, 2, 3])
def test_with_memory_for_fewer_slots_there_are_fewer_and_one_warning(
    slots, depth, fake, driver, slot_way
):
    plain = plain_result(driver)
    job = trained_once(driver, depth)
    fake.set_limits(device_bytes=fake.live()["device_bytes"] + slots * SLOT + 10)
    messages = train_with_warnings(job)
    assert_same(plain, job.result())
    assert job.seen == codes(*range(6))
    if slots >= depth:
        assert messages == [] and job.stats.fallbacks == []
    else:
        assert messages == job.stats.fallbacks and len(messages) == 1
        assert "ran short" in messages[0] and "CUDA_ERROR_OUT_OF_MEMORY" in messages[0]
        if slots:
            assert f"{slots} back buffer" in messages[0]
            assert job.stats.prefetched
        else:
            assert "brainstorm's own path" in messages[0]
            assert job.stats.back_buffer_bytes == 0
    fake.set_limits()
    job.train_again()
    assert job.stats.fallbacks == []


@pytest.mark.parametrize("call", ["cuMemHostAlloc", "cuMemAlloc"])
@pytest.mark.parametrize("nth", range(6))
def test_any_allocation_may_fail_once(nth, call, fake, driver, way):
    """Minibatches grow, so there are several allocations."""
    sizes = [2, 2, 200, 200, 400, 400, 2]

    def make_pass():
        return (batch(k, samples=size) for k, size in enumerate(sizes))

    plain = Job("device", driver, False).train(From(make_pass)).result()
    job = Job("device", driver)
    job.net.provide_external_data(batch(0, samples=400))
    made = fake.calls(call)
    fake.fail(call, nth)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job.train(From(make_pass))
    failed = fake.calls(call) - made > nth
    assert_same(plain, job.result())
    assert job.seen == codes(*range(len(sizes)))
    assert len(caught) == failed == len(job.stats.fallbacks)
    fake_left(fake, call, nth - (fake.calls(call) - made))
    job.train_again()


def fake_left(fake, call, left):
    """Use up a failure that is still planned, by calls that the test can spare."""
    for _ in range(left + 1):
        try:
            if call == "cuMemAlloc":
                dbuf.mem_alloc(4)
            else:
                dbuf.pagelocked_empty(4)
        except MemoryError:
            pass


@pytest.mark.parametrize("depth", [1, 3])
def test_without_page_locked_memory_minibatches_take_brainstorms_own_path(
    depth, fake, driver, way
):
    plain = plain_result(driver)
    job = trained_once(driver, depth)
    fake.set_limits(pinned_bytes=RING - 1)
    messages = train_with_warnings(job)
    assert_same(plain, job.result())
    assert messages == job.stats.fallbacks and len(messages) == 1
    assert "ran short" in messages[0] and "brainstorm's own path" in messages[0]
    assert job.stats.page_locked_bytes == 0
    fake.set_limits()
    job.train_again()
    assert job.stats.fallbacks == []


def test_a_staging_ring_that_cannot_grow_serves_as_it_is(fake, driver, way):
    sizes = [2, 2, 2, 20_000, 20_000, 2]

    def make_pass():
        return (batch(k, samples=size) for k, size in enumerate(sizes))

    job = trained_once(driver, 2)
    fake.set_limits(pinned_bytes=RING + 10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        job.train(From(make_pass))
    assert job.seen == codes(*range(len(sizes)))
    assert job.stats.page_locked_bytes == RING and job.stats.fallbacks == []


def test_a_slot_that_cannot_grow_is_given_up(fake, driver, slot_way):
    """All its memory is gone by then, so the plain path is what is left."""

    def make_pass():
        for k in range(8):
            if k == 4:
                fake.fail("cuMemAlloc", 0, times=100)
            yield batch(k, samples=400 if k >= 4 else 2)

    job = Job("device", driver)
    job.net.provide_external_data(batch(0, samples=400))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job.train(From(make_pass))
    assert job.seen == codes(*range(8))
    # Two slots were given up, one after the other.
    assert [str(w.message) for w in caught] == job.stats.fallbacks
    assert "1 back buffer" in job.stats.fallbacks[0]
    assert "brainstorm's own path" in job.stats.fallbacks[-1]
    assert len(job.stats.fallbacks) == 2
    fake.fail("cuMemAlloc", 0, times=0)


def test_a_prefetch_with_no_memory_lends_what_it_was_given(fake, driver, way):
    handler = make_handler("device", driver)
    fake.set_limits(pinned_bytes=100)
    iterator = dbuf.Prefetch(coded(4), depth=3)
    with pytest.warns(dbuf.FeedWarning, match="ran short") as caught:
        seen = [data["default"].max() for data in iterator(handler)]
    assert seen == [0, 1, 2, 3]
    assert len(caught) == 1
    iterator.close()


def test_page_locked_data_needs_no_page_locked_memory_of_the_feed(fake, driver, way):
    job = Job("device", driver)
    sources = [
        {
            name: pinned(np.full((1, 12000, FEATURES), k + base))
            for name, base in (("default", 0), ("targets", 1000))
        }
        for k in range(5)
    ]
    fake.set_limits(pinned_bytes=fake.live()["pinned_bytes"])
    job.train(From(lambda: iter(sources)))
    assert job.seen == codes(0, 1, 2, 3, 4)
    assert job.stats.fallbacks == [] and job.stats.page_locked_bytes == 0
    # The shorter way into the network would need some.
    noted = ["small minibatches go through back buffers" in n for n in job.stats.notes]
    assert noted == [True] * (way == "automatic")


def test_no_memory_anywhere_on_the_device_is_brainstorms_own_error(fake, driver, way):
    job = Job("device", driver)
    fake.set_limits(device_bytes=fake.live()["device_bytes"])
    # brainstorm's own buffers do not fit either.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dbuf.FeedWarning)
        with pytest.raises(dbuf.CudaMemoryError) as caught:
            job.train(coded(3))
    assert "cuMemAlloc" in str(caught.value)
    del caught
    fake.set_limits()
    # brainstorm's network has lost its buffers, another one has not.
    Job("device", driver).train_again()
