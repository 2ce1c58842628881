"""A context is current per thread: what a plain thread meets, and what the feed does.

The failure that began it all: the thread that fetched the next minibatch copied it to
the device, and got "invalid device context" (case 01).
"""

from __future__ import annotations

import ctypes
import gc
import threading

import numpy as np
import pytest

import brainstorm_dbuf as dbuf
import brainstorm as bs
from binding_tools import in_thread, pinned
from brainstorm_dbuf import feed
from coded import From, Job, batch, coded, coded_net, codes, the_value, workers
from conftest import KIND, ON_DEVICE, skip_without, why_no_pycuda
from parity import SEED, force_worker
from slow_stream import driver_entry

pytestmark = [pytest.mark.timeout(20), pytest.mark.usefixtures("nothing_left")]

INVALID_CONTEXT = 201

if KIND == "fake":
    from device_handler import DeviceHandler

    class PlainHandler(DeviceHandler):
        """Copies as PyCUDA does: in whichever context is current in this thread."""

        __undescribed__ = {"drain", "context", "copy"}

        def __init__(self, drain, copy):
            super().__init__(drain, seed=SEED)
            self.copy = copy

        def set_from_numpy(self, mem, arr):
            arr = np.ascontiguousarray(arr, np.float32)
            address = mem.__array_interface__["data"][0]
            code = self.copy(address, arr.ctypes.data, arr.nbytes)
            if code:
                raise RuntimeError(f"cuMemcpyHtoD failed: CUDA error {code}")


def test_a_plain_second_thread_cannot_feed_a_network(driver, fake, monkeypatch):
    force_worker(monkeypatch)
    copy = driver_entry(
        fake.path,
        "cuMemcpyHtoD",
        3020,
        ctypes.c_uint64,
        ctypes.c_void_p,
        ctypes.c_size_t,
    )
    net = coded_net()
    net.set_handler(PlainHandler(lambda: fake.drain(0, driver.context), copy))
    net.provide_external_data(batch(0))
    with pytest.raises(RuntimeError, match=f"CUDA error {INVALID_CONTEXT}"):
        in_thread(net.provide_external_data, batch(1))
    # The same through the feed, which copies in a thread of its own.
    seen = []
    for _ in dbuf.run_network(net, iter([batch(2), batch(3)])):
        assert seen or len(workers()) == 1
        seen.append(the_value(net.get_input("default")))
    assert seen == [2, 3]


@pytest.mark.gpu
def test_a_plain_second_thread_cannot_feed_a_network_through_pycuda(
    driver, monkeypatch
):
    force_worker(monkeypatch)
    if why_no_pycuda() is not None:
        pytest.skip(why_no_pycuda())
    from brainstorm.handlers import PyCudaHandler
    from pycuda.driver import Context, LogicError

    owner = Context.get_current()
    net = coded_net()
    net.set_handler(PyCudaHandler(seed=SEED))
    net.provide_external_data(batch(0))
    with pytest.raises(LogicError, match="invalid device context"):
        in_thread(net.provide_external_data, batch(1))
    seen = []
    for _ in dbuf.run_network(net, iter([batch(2), batch(3)])):
        assert seen or len(workers()) == 1
        seen.append(the_value(net.get_input("default")))
    assert seen == [2, 3]
    assert Context.get_current() == owner


def test_an_earlier_network_is_not_left_for_the_worker_to_collect(
    driver, monkeypatch
):
    """PyCUDA warns of what is dropped on another thread, and leaks it."""
    skip_without(ON_DEVICE)
    force_worker(monkeypatch)
    dropped_on = []

    class Cycle:
        def __init__(self):
            self.itself = self
            self.net = Job(ON_DEVICE, driver).net

        def __del__(self):
            dropped_on.append(threading.current_thread())

    def minibatches():
        for k in range(6):
            if workers() == [threading.current_thread()]:
                gc.collect()  # as it may happen at any time
                collected.append(k)
            yield batch(k)

    collected = []
    job = Job(ON_DEVICE, driver)
    gc.collect()
    gc.disable()
    try:
        Cycle()
        job.train(From(minibatches))
    finally:
        gc.enable()
    assert collected
    assert job.seen == codes(*range(6))
    assert dropped_on == [threading.current_thread()]


def current_handle():
    """Return the handle of this thread's current context, None if there is none."""
    try:
        return dbuf.Context.current().handle
    except dbuf.CudaError as error:
        assert error.name == "CUDA_ERROR_INVALID_CONTEXT"
        return None


def test_a_bare_thread_is_told_that_no_context_is_current(driver):
    memory, source = dbuf.mem_alloc(12), pinned([1, 2, 3])
    stream = dbuf.Stream()

    def copy(dest, stream):
        with pytest.raises(dbuf.CudaError) as caught:
            dbuf.memcpy_htod_async(dest, source, stream)
        return str(caught.value)

    # The real driver knows the context of a handle without one being current.
    for handle in [None] if driver.fake is None else [None, stream.handle]:
        message = in_thread(copy, int(memory), handle)
        assert "CUDA_ERROR_INVALID_CONTEXT" in message
        assert "no context is current in this thread" in message
        assert "with context:" in message
    assert in_thread(current_handle) is None
    # An object of ours knows its context, and puts back what was current before.
    assert in_thread(lambda: (dbuf.memcpy_htod_async(memory, source, stream), 1)[1])
    assert in_thread(
        lambda: (dbuf.memcpy_htod_async(memory, source, stream), current_handle())[1]
    ) is None
    stream.synchronize()
    back = np.zeros(3, np.float32)
    dbuf.memcpy_dtoh(back, memory)
    assert back.tolist() == [1, 2, 3]
    assert current_handle() == driver.context


def test_the_feed_leaves_every_threads_context_alone(
    kind, driver, way, monkeypatch
):
    seen, ended = [], []
    work = feed.Pass._work

    def work_and_look(*arguments):
        work(*arguments)
        ended.append(current_handle())

    monkeypatch.setattr(feed.Pass, "_work", work_and_look)

    def make_pass():
        try:
            for k in range(3):
                seen.append((threading.current_thread(), current_handle()))
                yield batch(k)
        finally:
            seen.append((threading.current_thread(), current_handle()))

    def look(number):
        assert current_handle() == driver.context

    job = Job(kind, driver, also=look, epochs=2)
    assert current_handle() == driver.context
    job.train(From(make_pass))
    assert current_handle() == driver.context
    assert job.seen == codes(0, 1, 2) * 2
    main = threading.current_thread()
    assert {handle for thread, handle in seen if thread is main} == {driver.context}
    # The worker has the trainer's context while it runs, and none when it ends.
    others = [handle for thread, handle in seen if thread is not main]
    of_kind = {"numpy": None, "cuda": job.net.handler}.get(kind, driver)
    handle = getattr(of_kind, "context", None)
    assert set(others) <= {getattr(handle, "handle", handle)}
    # All but the first `next` of each epoch; a worker also sees the end.
    assert len(others) == (6 if way == "worker" else 0)
    assert ended == [None] * (2 if way == "worker" else 0)


def test_an_iterator_may_have_a_context_of_its_own_in_the_worker(
    fake, driver, monkeypatch
):
    force_worker(monkeypatch)

    def make_pass():
        yield batch(0)  # the first `next` runs in the trainer's thread
        assert fake.current_context() == driver.context
        other = fake.create_context()
        try:
            for k in range(1, 4):
                assert fake.current_context() == other
                yield batch(k)
        finally:
            assert fake.current_context() == other
            fake.destroy_context(other)

    job = Job("device", driver).train(From(make_pass))
    assert job.seen == codes(0, 1, 2, 3)
    assert fake.current_context() == driver.context


def test_an_iterator_may_allocate_page_locked_memory_in_the_worker(kind, driver, way):
    def make_pass():
        for k in range(4):
            arrays = batch(k)
            for name, array in arrays.items():
                arrays[name] = job.net.handler.pagelocked_empty(array.shape)
                arrays[name][...] = array
            if kind != "numpy":
                dbuf.pagelocked_zeros(3)
            yield arrays

    job = Job(kind, driver)
    assert job.train(From(make_pass)).seen == codes(0, 1, 2, 3)


def test_training_in_another_thread_uses_that_threads_context(fake, driver, way):
    """The feed adopts the context of whoever trains, and never makes a second one."""
    from device_handler import DeviceHandler

    def train():
        other = fake.create_context()
        try:
            handler = DeviceHandler(lambda: fake.drain(0, other), seed=SEED)
            bs.global_rnd.set_seed(SEED)
            net = coded_net()
            net.set_handler(handler)
            before = fake.calls("cuCtxCreate") + fake.calls("cuDevicePrimaryCtxRetain")
            seen = []
            for _ in dbuf.run_network(net, coded(4)()):
                seen.append(the_value(net.get_input("default")))
            after = fake.calls("cuCtxCreate") + fake.calls("cuDevicePrimaryCtxRetain")
            assert before == after
            assert fake.current_context() == other
            return seen
        finally:
            del net, handler
            fake.destroy_context(other)

    assert in_thread(train) == [0, 1, 2, 3]
    assert current_handle() == driver.context


def test_without_a_current_context_training_says_so_and_may_start_later(fake, driver):
    from device_handler import DeviceHandler

    job = Job("device", driver)
    context = fake.pop_context()
    assert fake.current_context() is None
    try:
        with pytest.raises(dbuf.CudaError, match="no context is current") as caught:
            job.train(coded(3))
        with pytest.raises(dbuf.CudaError, match="no context is current"):
            DeviceHandler(lambda: None)
    finally:
        fake.push_context(context)
    assert job.seen == [] and workers() == []
    del caught
    job.train_again()
