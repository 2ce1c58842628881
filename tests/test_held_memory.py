"""Data that an iterator holds are page-locked in place, and nothing else changes."""

from __future__ import annotations

import gc
import mmap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import brainstorm_dbuf as dbuf
import brainstorm as bs
from brainstorm.data_iterators import (
    AddGaussianNoise,
    DataIterator,
    Flip,
    Minibatches,
    Undivided,
)
from brainstorm_dbuf import access, back_buffers, feed, held_memory
from brainstorm_dbuf._cuda import extent
from brainstorm_dbuf.held_memory import HeldMemory
from brainstorm_dbuf.input_layer import DoubleBufferedInput
from brainstorm_dbuf.iterators import held_arrays, source_of
from coded import FEATURES, From, Hook, Job, batch, coded_net, codes, stop_at
from conftest import HANDLERS, skip_without
from parity import make_handler, poison_back_buffers

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_left")]


@pytest.fixture(autouse=True)
def any_size(monkeypatch):
    monkeypatch.setattr(held_memory, "REGION_MIN_BYTES", 0)
    monkeypatch.setattr(access, "MOST_PUT_BYTES", 0)


# A minibatch's arrays are just large enough to be copied from where they lie.
SAMPLES = 16384 // FEATURES + 1
COUNT = 5


@pytest.fixture(params=[kind for kind in HANDLERS if kind != "numpy"])
def device(request, driver):
    """A kind of handler whose arrays lie on the device."""
    skip_without(request.param)
    return request.param


def data(count=COUNT, steps=1, dtype=np.float32, samples=SAMPLES):
    """Return arrays whose minibatch k is coded as k."""
    numbers = np.repeat(np.arange(count), samples).astype(dtype)
    shape = (steps, count * samples, FEATURES)
    named = {"default": pages(shape, dtype), "targets": pages(shape, dtype)}
    named["default"][...] = numbers[None, :, None]
    named["targets"][...] = numbers[None, :, None] + 1000
    return named


def pages(shape, dtype=np.float32):
    """Return an array of zeros that shares no page with others."""
    memory = mmap.mmap(-1, int(np.prod(shape)) * np.dtype(dtype).itemsize)
    return np.frombuffer(memory, dtype).reshape(shape)


def minibatches(named, shuffle=False):
    return Minibatches(SAMPLES, shuffle=shuffle, **named)


def run(device, driver, iterator, epochs=2, **options):
    job = Job(device, driver, epochs=epochs)
    for name, value in options.items():
        setattr(job.trainer, name, value)
    return job.train(iterator)


def registrations(driver):
    return driver.fake.calls("cuMemHostRegister") if driver.fake is not None else None


# ------------------------------------------------------------------- while training


@pytest.mark.parametrize("mode", ["late", "random", "eager"])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("most_put", [0, 1 << 20])
def test_data_of_minibatches_are_page_locked_once(
    most_put, steps, mode, device, driver, monkeypatch
):
    """Whether they go through a back buffer or straight into the network."""
    monkeypatch.setattr(access, "MOST_PUT_BYTES", most_put)
    # What is late since other programs run makes no minibatch slow.
    monkeypatch.setattr(feed, "WORTH_A_WORKER_SECONDS", 0.05)
    poison_back_buffers(monkeypatch)
    if driver.fake is not None:
        driver.fake.mode(mode)
    named = data(steps=steps)
    job = run(device, driver, minibatches(named))
    assert job.seen == codes(*range(COUNT)) * 2
    assert job.stats.direct == 2 * COUNT
    total = sum(array.nbytes for array in named.values())
    assert job.stats.page_locked_in_place == total
    if not most_put:
        assert job.stats.page_locked_bytes == 0  # nothing was staged
    assert job.stats.fallbacks == [] and job.stats.workers == 0
    if driver.fake is not None:
        assert registrations(driver) == 2
    for array in named.values():
        assert not dbuf.is_pagelocked(array)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("changes", [False, True])
def test_data_that_lie_still_are_queued_as_far_ahead_as_there_are_back_buffers(
    changes, depth, device, driver, monkeypatch
):
    """Where an iterator writes to its data, one minibatch: they are the user's."""
    fill = back_buffers.DeviceSlot.fill
    filled, ahead = [], []

    def noted_fill(self, *arguments):
        fill(self, *arguments)
        filled.append(id(self))

    monkeypatch.setattr(back_buffers.DeviceSlot, "fill", noted_fill)
    # However busy this machine is, no worker.
    monkeypatch.setattr(feed, "WORTH_A_WORKER_SECONDS", 10.0)
    iterator = minibatches(data(count=8))
    if changes:
        iterator = From(lambda: iter(list(minibatches(data(count=8))(None))))
    job = Job(device, driver, depth=depth, also=lambda _: ahead.append(len(filled)))
    job.train(iterator)
    assert job.seen == codes(*range(8))
    most = 1 if changes else depth
    assert ahead == [min(8, step + 1 + most) for step in range(8)]
    assert len(set(filled)) == depth


@pytest.mark.parametrize("lends", [False, True])
@pytest.mark.parametrize("slots", [0, 1, 2])
def test_with_memory_for_fewer_back_buffers_fewer_are_ahead(slots, lends, fake, driver):
    named = data(count=8)
    job = Job("device", driver, depth=3)
    job.stepper.start(job.net)
    job.net.provide_external_data(next(minibatches(named)(None)))
    slot = sum(array.nbytes for array in named.values()) // 8
    fake.set_limits(
        device_bytes=fake.live()["device_bytes"] + slots * (slot + 2048) + 512
    )
    with pytest.warns(dbuf.FeedWarning, match="ran short") as caught:
        if lends:
            with dbuf.Prefetch(minibatches(named), depth=2) as prefetch:
                for lent in prefetch(job.net.handler):
                    job.net.provide_external_data(lent)
                    del lent
                    job.stepper.run()
            stats = prefetch.stats
        else:
            job.train(minibatches(named))
            stats = job.stats
    fake.set_limits()
    assert job.seen == codes(*range(8))
    assert len(caught) == len(stats.fallbacks) == 1
    # With one that is lent, the next minibatch meets a thread that must not wait.
    assert stats.direct == (0, 8 - lends, 8)[slots]


def test_shuffled_data_train_to_the_same_weights(device, driver):
    weights = []
    for double_buffering in (False, True):
        job = Job(device, driver, double_buffering, epochs=3)
        job.train(minibatches(data(), shuffle=True))
        weights.append((job.net.get("parameters"), job.seen))
    assert np.array_equal(weights[0][0], weights[1][0])
    assert weights[0][1] == weights[1][1]


def test_an_undivided_data_set_is_page_locked_too(device, driver):
    named = data(count=1)
    job = run(device, driver, Undivided(**named), epochs=3)
    assert job.seen == codes(0) * 3
    assert job.stats.direct == 3
    assert registrations(driver) in (2, None)


def test_prefetch_keeps_them_page_locked_from_pass_to_pass(device, driver):
    named = data()
    handler = make_handler(device, driver)
    with dbuf.Prefetch(minibatches(named)) as iterator:
        for _ in range(3):
            for k, batch in enumerate(iterator(handler)):
                assert (handler.get_numpy_copy(batch["default"]) == k).all()
        assert all(map(dbuf.is_pagelocked, named.values()))
        assert iterator.stats.direct == 3 * COUNT
    assert not any(map(dbuf.is_pagelocked, named.values()))
    assert registrations(driver) in (2, None)
    del batch


def test_run_network_finds_the_data_behind_a_pass(device, driver):
    named = data()
    job = Job(device, driver)
    iterator = minibatches(named)
    for k, _ in enumerate(dbuf.run_network(job.net, iterator(job.net.handler))):
        assert (job.net.get_input("default") == k).all()
        assert all(map(dbuf.is_pagelocked, named.values()))
    assert k == COUNT - 1 and not any(map(dbuf.is_pagelocked, named.values()))


def test_which_data_iterator_a_pass_belongs_to():
    iterator = minibatches(data())

    def generator(self):
        yield self

    class Own(Minibatches):
        def __call__(self, handler=None):
            return super().__call__(handler)

    begun = iterator()
    next(begun)
    assert source_of(iterator()) is iterator
    noisy = AddGaussianNoise(iterator, {"default": 1.0})
    assert source_of(noisy()) is noisy
    own = Own(SAMPLES, **data())
    for other in (begun, generator(iterator), own(), iter([]), [], None):
        assert source_of(other) is None


def test_small_data_are_left_alone(device, driver):
    job = run(device, driver, Minibatches(2, shuffle=False, **data(samples=2)))
    assert job.seen == codes(*range(COUNT)) * 2
    assert job.stats.page_locked_in_place == 0 and registrations(driver) in (0, None)


def test_data_that_are_cast_on_the_host_are_left_alone(device, driver):
    job = run(device, driver, minibatches(data(dtype=np.float64)))
    assert job.seen == codes(*range(COUNT)) * 2
    assert job.stats.direct == 0 and registrations(driver) in (0, None)


def test_what_a_wrapper_changes_is_left_alone_and_what_it_passes_on_is_not(
    device, driver
):
    named = data()
    iterator = AddGaussianNoise(minibatches(named), {"default": 0.0})
    job = run(device, driver, iterator)
    assert job.seen == codes(*range(COUNT)) * 2
    assert job.stats.page_locked_in_place == named["targets"].nbytes
    assert registrations(driver) in (1, None)


def test_data_that_the_user_has_page_locked_are_used_as_they_are(device, driver):
    named = {}
    for name, array in data().items():
        named[name] = dbuf.pagelocked_empty(array.shape)
        named[name][...] = array
    job = run(device, driver, minibatches(named))
    assert job.seen == codes(*range(COUNT)) * 2
    assert job.stats.direct == 2 * COUNT
    assert job.stats.page_locked_in_place == 0 and job.stats.fallbacks == []
    assert registrations(driver) in (0, None)


def test_arrays_over_the_same_memory_are_page_locked_once(device, driver):
    whole = pages((1, 2 * COUNT * SAMPLES, FEATURES))
    for k in range(2 * COUNT):
        whole[:, k * SAMPLES : (k + 1) * SAMPLES] = k
    half = COUNT * SAMPLES
    # They overlap in all but one minibatch.
    named = {"default": whole[:, :half], "targets": whole[:, SAMPLES : half + SAMPLES]}
    job = Job(device, driver)
    job.stepper.run = lambda: job.seen.append(job.stepper.look())
    job.train(minibatches(named))
    assert job.seen == [(k, k + 1) for k in range(COUNT)]
    assert registrations(driver) in (1, None)
    assert job.stats.page_locked_in_place == whole.nbytes


def test_views_of_other_parts_of_the_memory_can_still_be_copied(device, driver):
    """The driver refuses a copy from memory that is page-locked in part only."""
    whole = {name: pages((1, 2 * COUNT * SAMPLES, FEATURES)) for name in data()}
    half = COUNT * SAMPLES
    for name, array in data().items():
        whole[name][:, :half] = whole[name][:, half:] = array
    named = {name: array[:, :half] for name, array in whole.items()}
    looks = []
    memory = dbuf.mem_alloc(next(iter(whole.values())).nbytes)

    def look(update):
        for array in whole.values():
            dbuf.memcpy_htod(memory, array)
        looks.append(update)

    job = Job(device, driver, hooks=[Hook(look)]).train(minibatches(named))
    assert job.seen == codes(*range(COUNT)) and len(looks) == COUNT
    assert job.stats.direct == COUNT
    # Where most of it is nobody's here, it is left alone.
    few = {name: array[:, :SAMPLES] for name, array in whole.items()}
    job = Job(device, driver).train(minibatches(few))
    assert job.seen == codes(0) and job.stats.direct == 0
    dbuf.Context.current().synchronize()
    del memory, look, job


def test_small_pieces_may_share_pages_and_are_left_alone(device, driver, monkeypatch):
    monkeypatch.setattr(held_memory, "REGION_MIN_BYTES", 32 << 20)
    job = run(device, driver, minibatches(data()))
    assert job.seen == codes(*range(COUNT)) * 2
    assert job.stats.direct == 0 and registrations(driver) in (0, None)


@pytest.mark.parametrize("mode", ["late", "random", "eager"])
def test_feeds_over_the_same_data_share_what_they_lock(mode, device, driver):
    if driver.fake is not None:
        driver.fake.mode(mode)
    named = data()
    handler = make_handler(device, driver)
    first, second = (dbuf.Prefetch(minibatches(named)) for _ in range(2))
    for _ in first(handler):
        pass
    seen = []
    for k, batch in enumerate(second(handler)):
        if k == 1:
            first.close()  # its page-locking is still the other one's
        assert all(map(dbuf.is_pagelocked, named.values()))
        seen.append(float(handler.get_numpy_copy(batch["default"]).max()))
        del batch
    assert seen == [float(k) for k in range(COUNT)]
    assert second.stats.direct == COUNT and registrations(driver) in (2, None)
    second.close()
    assert not any(map(dbuf.is_pagelocked, named.values()))


@pytest.mark.parametrize("mode", ["late", "random", "eager"])
def test_after_a_pass_the_data_are_the_users_again(mode, device, driver):
    if driver.fake is not None:
        driver.fake.mode(mode)
    named = data()
    handler = make_handler(device, driver)
    with dbuf.Prefetch(minibatches(named)) as iterator:
        arrays = [
            handler.allocate(named["default"][:, :SAMPLES].shape) for _ in "12345"
        ]
        for array, batch in zip(arrays, iterator(handler)):
            handler.copy_to(batch["default"], array)
            del batch
        for array in named.values():
            array += 100
        for k, array in enumerate(arrays):
            assert (handler.get_numpy_copy(array) == k).all()
    arrays.clear()
    del array


def test_arrays_on_one_page_are_page_locked_together(device, driver):
    whole = pages((2 * COUNT * SAMPLES * FEATURES + 1,))
    half = COUNT * SAMPLES * FEATURES
    named = data()
    for k, (name, array) in enumerate(named.items()):
        flat = whole[k * (half + 1) : k * (half + 1) + half]
        flat[...] = array.reshape(-1)
        named[name] = flat.reshape(array.shape)
    job = run(device, driver, minibatches(named))
    assert job.seen == codes(*range(COUNT)) * 2
    assert registrations(driver) in (1, None)
    assert job.stats.page_locked_in_place == whole.nbytes


def test_read_only_arrays_and_mapped_files(device, driver, tmp_path):
    named = data()
    named["default"].flags.writeable = False
    named["targets"].tofile(tmp_path / "targets")
    shape = named["targets"].shape
    named["targets"] = np.memmap(tmp_path / "targets", np.float32, "r", shape=shape)
    job = run(device, driver, minibatches(named))
    assert job.seen == codes(*range(COUNT)) * 2
    if driver.fake is not None:
        assert job.stats.direct == 2 * COUNT
    # A driver may refuse to page-lock a file mapped for reading: then it is staged.
    assert job.stats.direct in (2 * COUNT, 0) or job.stats.fallbacks


def test_data_that_were_exchanged_are_let_go(device, driver):
    iterator = minibatches(data())
    job = Job(device, driver, epochs=1)
    locked = []

    class Exchange(bs.hooks.Hook):
        def __call__(self, *args, **kwargs):
            held = list(iterator.data.values())
            locked.append([dbuf.is_pagelocked(array) for array in held + former])
            former[:] = held
            iterator.data = data()

    former = []
    job.trainer.hooks.clear()
    job.trainer.add_hook(Exchange("exchange", "epoch", 1))
    job.trainer.add_hook(bs.hooks.StopAfterEpoch(3))
    job.train(iterator)
    assert job.seen == codes(*range(COUNT)) * 3
    # Before the first epoch, and after each: those just used, those before.
    assert locked == [[False] * 2, *([[True] * 2 + [False] * 2] * 3)]
    former.clear()
    job.trainer.hooks.clear()


# ----------------------------------------------------------------- who may write there


class Scribbles(Minibatches):
    """Writes into its data behind the network's back, as its own code may."""

    def __call__(self, handler=None):
        for batch in super().__call__(handler):
            yield batch
            for array in batch.values():
                array += 10000


@pytest.mark.parametrize("mode", ["late", "random", "eager"])
def test_a_subclass_may_write_into_its_data_once_it_goes_on(mode, device, driver):
    if driver.fake is not None:
        driver.fake.mode(mode)
    job = run(device, driver, Scribbles(SAMPLES, shuffle=False, **data()), epochs=1)
    assert job.seen == codes(*range(COUNT))
    assert job.stats.direct == COUNT


def images():
    return coded_net(16, 16, 8)


def test_flip_writes_into_the_data_and_is_waited_for(device, driver):
    results = []
    for double_buffering in (False, True):
        rnd = np.random.default_rng(0)
        pictures = rnd.random((1, 60, 16, 16, 8), np.float32)
        targets = rnd.random((1, 60, FEATURES), np.float32)
        inner = Minibatches(12, shuffle=False, default=pictures, targets=targets)
        bs.global_rnd.set_seed(1)
        iterator = Flip(inner, {"default": 0.5})
        job = Job(device, driver, double_buffering, epochs=3, net=images)
        job.stepper.look = lambda job=job: job.net.get_input("default").tobytes()
        job.train(iterator)
        results.append((job.seen, job.net.get("parameters").tobytes()))
    assert results[0] == results[1]
    assert job.stats.direct == 15


# ----------------------------------------------------------------------- the limit


def test_a_limit_of_0_stages_everything(device, driver):
    job = run(device, driver, minibatches(data()), page_lock_limit=0)
    assert job.seen == codes(*range(COUNT)) * 2
    assert job.stats.direct == 0 and job.stats.page_locked_in_place == 0
    assert registrations(driver) in (0, None) and job.stats.notes == []


def test_what_is_over_the_limit_is_staged_and_the_rest_is_not(
    device, driver, monkeypatch
):
    named = data()
    room = named["default"].nbytes
    monkeypatch.setattr(held_memory, "memory_size", lambda: 2 * room)
    job = run(device, driver, minibatches(named))
    assert job.seen == codes(*range(COUNT)) * 2
    assert job.stats.page_locked_in_place == room
    assert job.stats.fallbacks == []
    assert len(job.stats.notes) == 1 and "page_lock_limit" in job.stats.notes[0]


@pytest.mark.parametrize("wrong", [-0.1, 1.1, float("nan"), "0.5", None, True])
def test_a_limit_that_is_no_share_is_refused(wrong):
    stepper = bs.training.SgdStepper(0.1)
    for make in (
        lambda: dbuf.Trainer(stepper, page_lock_limit=wrong),
        lambda: dbuf.Prefetch(minibatches(data(1)), page_lock_limit=wrong),
    ):
        with pytest.raises((TypeError, ValueError), match="page_lock_limit: expected"):
            make()


def test_the_limit_is_described_and_old_descriptions_have_the_usual_one():
    trainer = dbuf.Trainer(bs.training.SgdStepper(0.1), page_lock_limit=0.25)
    description = bs.describable.get_description(trainer)
    assert description["page_lock_limit"] == 0.25
    again = bs.describable.create_from_description(description)
    assert again.page_lock_limit == 0.25
    del description["page_lock_limit"]
    again = bs.describable.create_from_description(description)
    assert again.page_lock_limit == held_memory.DEFAULT_LIMIT


def test_where_the_driver_refuses_the_data_are_staged(device, driver, fake):
    fake.fail("cuMemHostRegister", times=100)
    with pytest.warns(dbuf.FeedWarning, match="could not be page-locked"):
        job = run(device, driver, minibatches(data()))
    assert job.seen == codes(*range(COUNT)) * 2
    assert job.stats.direct == 0
    assert fake.calls("cuMemHostRegister") == 2  # asked once for each


def test_an_error_and_an_early_stop_leave_nothing_page_locked(device, driver):
    named = data()
    iterator = minibatches(named)

    def fails(update):
        raise OSError("gone")

    job = Job(device, driver, hooks=[Hook(fails)])
    with pytest.raises(OSError):
        job.train(iterator)
    job.trainer.hooks.clear()
    job.trainer.add_hook(stop_at(job.trainer.current_update_nr + 2))
    job.train(iterator)
    gc.collect()
    assert not any(map(dbuf.is_pagelocked, named.values()))
    job.trainer.hooks.clear()


# ---------------------------------------------------------------------- the pieces


@given(st.data())
def test_the_extent_of_an_array_is_all_its_bytes(data):
    shape = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    whole = np.zeros(shape, data.draw(st.sampled_from(["u1", "f4", "f8"])))
    index = tuple(
        slice(
            data.draw(st.integers(0, n)),
            data.draw(st.integers(0, n)),
            data.draw(st.sampled_from([1, 2, -1, -2])),
        )
        for n in shape
    )
    part = whole[index]
    low, high = extent(part)
    assert high - low >= part.nbytes
    if part.size:
        part[...] = 1
        start = whole.__array_interface__["data"][0]
        touched = np.flatnonzero(np.frombuffer(whole, np.uint8)) + start
        assert low <= touched[0] and touched[-1] < high
        first = whole.__array_interface__["data"][0]
        assert first <= low and high <= first + whole.nbytes
        # Not one element more on either side.
        assert touched[0] - low < whole.itemsize
        assert high - touched[-1] <= whole.itemsize


def test_another_packages_iterator_can_make_its_arrays_known(device, driver):
    class Slices(DataIterator):
        def __init__(self, named):
            super().__init__({name: a.shape for name, a in named.items()}, COUNT)
            self.arrays = named

        def __call__(self, handler=None):
            for k in range(COUNT):
                part = slice(k * SAMPLES, (k + 1) * SAMPLES)
                yield {name: array[:, part] for name, array in self.arrays.items()}

    job = run(device, driver, Slices(data()))
    assert job.stats.direct == 0
    held_arrays.register(Slices, lambda iterator: list(iterator.arrays.values()))
    job = run(device, driver, Slices(data()))
    assert job.seen == codes(*range(COUNT)) * 2
    assert job.stats.direct == 2 * COUNT


def test_a_wrapper_says_that_it_leaves_arrays_alone_a_subclass_says_it_anew(driver):
    class Wrapper(DataIterator):
        def __init__(self, iterator):
            super().__init__(iterator.data_shapes, iterator.length)
            self.iter = iterator

    class Quiet(Wrapper):
        leaves_arrays_alone = True

    class Louder(Quiet):
        pass

    context = dbuf.Context.current()
    stream = dbuf.Stream(context)
    named = data()
    found = []
    for wrap in (Wrapper, Quiet, Louder):
        held = HeldMemory(context, stream, 0.5, dbuf.FeedStats())
        held.hold(wrap(minibatches(named)))
        found.append(held.find(named["default"]).lies_still)
        held.close()
    assert found == [False, True, False]
    stream.close()
    del held


def test_a_wrapper_that_comes_later_is_noticed(driver):
    context = dbuf.Context.current()
    stream = dbuf.Stream(context)
    iterator = minibatches(data())
    held = HeldMemory(context, stream, 0.5, dbuf.FeedStats())
    found = []
    for source in (iterator, Flip(iterator, {}), iterator):
        held.hold(source)
        found.append(held.find(iterator.data["default"]).lies_still)
    assert found == [True, False, True]
    held.close()
    stream.close()
    del held


def test_memory_is_found_by_address(driver):
    context = dbuf.Context.current()
    stream = dbuf.Stream(context)
    named = data()
    held = HeldMemory(context, stream, 0.5, dbuf.FeedStats())
    held.hold(minibatches(named))
    for array in named.values():
        region = held.find(array[:, 3:7])
        assert (region.low, region.high) == extent(array) and region.lies_still
    assert held.find(np.zeros(4)) is None
    held.hold(From(lambda: iter(())))
    assert held.find(named["default"]) is None
    held.close()
    stream.close()
    del held, region


def test_the_memory_of_this_machine_is_known():
    assert 1 << 26 < held_memory.memory_size() < 1 << 50


def test_what_was_queued_is_waited_for_where_another_input_fails(
    device, driver, monkeypatch
):
    """The data are their owner's again, however the pass has ended."""

    def fails(*_):
        raise OSError("no put")

    monkeypatch.setattr(access, "MOST_PUT_BYTES", 1 << 20)
    monkeypatch.setattr(access, "MOST_SET_BYTES", 0)
    queued = []
    net = Job(device, driver).net
    with feed.Feed(net.handler) as the_feed:
        reach = the_feed._access
        the_feed._held.lies_ready = lambda a: a.flat[0] == 1
        reach.put_as_it_lies = lambda *_: queued.append(1)
        reach.put = fails
        waited = []
        reach.compute_stream = Waited(reach.compute_stream, waited)
        with pytest.raises(OSError, match="no put"):
            list(the_feed.run_network(net, [batch(k) for k in range(3)]))
        assert (queued, waited) == ([1], [1])


class Waited:
    """A stream that notes when it is waited for."""

    def __init__(self, stream, waited):
        self._stream, self._waited = stream, waited

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def synchronize(self):
        self._waited.append(1)
        self._stream.synchronize()


def test_after_an_interrupt_memory_is_let_go_once_no_copy_reads_it(
    device, driver, monkeypatch
):
    """What was put into the network is copied on the compute stream."""
    monkeypatch.setattr(access, "MOST_PUT_BYTES", 1 << 20)
    layers, reads_data = [], []
    own_put, own_close = DoubleBufferedInput.put, HeldMemory.close

    def put(self, *arguments):
        own_put(self, *arguments)
        layers.append(self)
        assert self._reads_data
        raise KeyboardInterrupt

    def close(self):
        reads_data.append(layers.pop()._reads_data)
        own_close(self)

    monkeypatch.setattr(HeldMemory, "close", close)
    monkeypatch.setattr(DoubleBufferedInput, "put", put)
    with pytest.raises(KeyboardInterrupt):
        Job(device, driver).train(minibatches(data()))
    assert reads_data == [False]
