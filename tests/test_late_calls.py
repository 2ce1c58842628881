"""Driver calls that are late: the numbers stay the same, other threads go on."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import warnings

import numpy as np
import pytest

import brainstorm_dbuf as dbuf
from brainstorm_dbuf import _cuda, feed, held_memory
from coded import From, Job, batch, codes, workers
from conftest import KIND, skip_without
from faulty import (
    COUNT,
    IN_SUITE,
    TRAININGS,
    Told,
    counts_of_a_training,
    live_in_both,
    some_of,
)

pytestmark = [
    pytest.mark.timeout(60 if IN_SUITE else 3600),
    pytest.mark.skipif(KIND == "real", reason="needs the stand-in driver"),
]

# Calls that never wait, for the device or for another call's work: they look something
# up, or put something into a queue. Some 150 ns each, so that letting go of the
# interpreter and getting it back, which takes as long, would double them.
NEVER_WAIT = {
    "cuCtxGetCurrent",
    "cuCtxGetDevice",
    "cuCtxPopCurrent",
    "cuCtxPushCurrent",
    "cuCtxSetCurrent",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDriverGetVersion",
    "cuEventCreate",
    "cuEventDestroy",
    "cuEventQuery",
    "cuEventRecord",
    "cuMemGetAddressRange",
    "cuPointerGetAttribute",
    "cuStreamQuery",
    "cuStreamWaitEvent",
}
# Calls that wait where some 1,000 pieces of work are queued in a stream: until there
# are so many that it might be, the interpreter is kept for small ones, for the same
# reason.
WAIT_IN_A_FULL_QUEUE = {
    "cuLaunchKernel",
    "cuMemcpyDtoDAsync",
    "cuMemcpyHtoDAsync",
    "cuMemsetD32Async",
    "cublasSgemm_v2",
    "cublasSgemmStridedBatched",
}
KEEPS = NEVER_WAIT | WAIT_IN_A_FULL_QUEUE
# All others that a training makes: each lets go of the interpreter wherever it is.
MAY_WAIT = {
    "cuCtxSynchronize",
    "cuDevicePrimaryCtxRelease",
    "cuDevicePrimaryCtxRetain",
    "cuEventSynchronize",
    "cuMemAlloc",
    "cuMemFree",
    "cuMemFreeHost",
    "cuMemHostAlloc",
    "cuMemHostRegister",
    "cuMemHostUnregister",
    "cuMemcpy2DAsync",
    "cuMemcpyDtoHAsync",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy",
    "cuStreamSynchronize",
    "cublasCreate_v2",
    "cublasDestroy_v2",
    "cublasSetMathMode",
    "cublasSetStream_v2",
    "cublasSetWorkspace_v2",
}

CASES = [
    ("device", "growing", "worker"),
    ("device", "held", "ahead"),
    ("cuda", "held", "ahead"),
    ("cuda", "mlp with dropout", "automatic"),
    ("cuda", "lstm with a mask", "worker"),
]
if not IN_SUITE:
    ALL_WAYS = ["automatic", "ahead", "worker"]
    CASES = [(*training, way) for training in TRAININGS for way in ALL_WAYS]


@pytest.fixture(autouse=True)
def any_size(monkeypatch):
    monkeypatch.setattr(held_memory, "REGION_MIN_BYTES", 0)


@pytest.fixture
def interruptible():
    """Ctrl-C raises KeyboardInterrupt, which a shell's background jobs turn off.

    It is lost where it comes out of what Python calls around a garbage collection, as
    hypothesis has it.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    called, gc.callbacks[:] = gc.callbacks[:], []
    yield
    gc.callbacks[:] = called
    signal.signal(signal.SIGINT, before)


def calls_to_delay(kind, name, driver):
    """Yield (training, its weights, entry, number) for the calls to try."""
    skip_without(kind)
    training = TRAININGS[kind, name]
    training(driver)
    expected, counts = counts_of_a_training(training, driver)
    unknown = set(counts) - KEEPS - MAY_WAIT - {"cuInit"}
    assert not unknown, f"say whether these may wait: {unknown}"
    for entry, count in counts.items():
        # All of the few that may wait: they are made in several places.
        few = entry in MAY_WAIT and count <= 4
        for nth in range(count) if few else some_of(count, 1):
            yield training, expected, entry, nth


@pytest.mark.parametrize("kind, name, way", CASES, indirect=["way"])
def test_a_late_call_changes_no_number_and_other_threads_go_on(
    kind, name, way, fake, driver
):
    tried = 0
    for training, expected, entry, nth in calls_to_delay(kind, name, driver):
        what = f"{entry} number {nth}"
        before, late = live_in_both(fake), fake.delays()
        fake.delay(entry, nth, ms=15 if entry in KEEPS else 3_000)
        with Told(fake, fake.end_delays):
            weights = training(driver)
            gc.collect()
        now = fake.delays()
        fake.end_delays(forget=True)
        assert np.array_equal(weights, expected), what
        assert workers() == [] and live_in_both(fake) == before, what
        if entry not in KEEPS:
            kept = now["not let go"] - late["not let go"]
            assert not kept, f"{what}: nobody else could run"
        tried += now["begun"] - late["begun"]
    print(f"{tried} calls were late")


@pytest.mark.parametrize("kind, name, way", CASES, indirect=["way"])
def test_ctrl_c_in_a_late_call_ends_training_when_it_returns(
    kind, name, way, fake, driver, interruptible
):
    def interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        fake.end_delays()

    tried = 0
    for training, expected, entry, nth in calls_to_delay(kind, name, driver):
        if entry in KEEPS:
            continue
        what = f"{entry} number {nth}"
        before, late = live_in_both(fake), fake.delays()
        fake.delay(entry, nth, ms=3_000)
        interrupted = False
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                with Told(fake, interrupt) as told:
                    training(driver)
                    gc.collect()
            except KeyboardInterrupt as error:
                interrupted = True
                error.__traceback__ = error.__context__ = None
        fake.end_delays(forget=True)
        assert interrupted == told.saw, what
        assert fake.delays()["not let go"] == late["not let go"], what
        wait_until(lambda: workers() == [])
        assert live_in_both(fake) == before, what
        assert fake.current_context() == driver.context, what
        assert np.array_equal(training(driver), expected), what
        tried += interrupted
    print(f"{tried} late calls interrupted")


@pytest.mark.parametrize("of_a_handler", [False, True])
def test_others_go_on_while_it_is_asked_how_much_memory_there_is(
    of_a_handler, fake, driver, request
):
    """As the error does that says what ran short."""
    allocate = dbuf.mem_alloc
    if of_a_handler:
        request.getfixturevalue("kernels")
        handler = dbuf.CudaHandler(seed=1)
        allocate = lambda nbytes: handler.allocate((nbytes // 4,))  # noqa: E731
    fake.set_limits(device_bytes=1 << 20)
    fake.delay("cuMemGetInfo", ms=3_000)
    with Told(fake, fake.end_delays) as told:
        with pytest.raises(dbuf.CudaMemoryError, match="are free"):
            allocate(1 << 30)
    assert told.saw and not fake.delays()["not let go"]
    fake.delay("cuMemGetInfo", ms=3_000)
    with Told(fake, fake.end_delays) as told:
        assert _cuda.mem_get_info()[1] == 1 << 20
    assert told.saw


def wait_until(is_so, seconds=10):
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.001)


# Calls of the worker, whose `next` plans that it is late.
OF_THE_WORKER = ["cuMemcpyHtoDAsync", "cuEventRecord", "cuMemAlloc"]


@pytest.fixture
def with_worker(monkeypatch):
    from brainstorm_dbuf import access
    from parity import force_worker

    monkeypatch.setattr(access, "MOST_PUT_BYTES", 0)
    force_worker(monkeypatch)


def a_pass_whose_call_is_late(fake, entry, stepped, late_at=3):
    """Larger minibatches from there on, so that memory is wanted too.

    A worker first lets the steps before it end, which add to ``stepped``: by then the
    trainer has made its own calls, some of which keep the interpreter.
    """

    def make_pass():
        for k in range(COUNT):
            if k == late_at:
                if threading.current_thread() in workers():
                    wait_until(lambda: len(stepped) == late_at)
                fake.delay(entry, ms=20_000)
            yield batch(k, samples=9000 if k >= late_at else 2)

    return From(make_pass)


@pytest.mark.parametrize("entry", OF_THE_WORKER)
def test_ctrl_c_does_not_wait_for_a_late_call_of_the_worker(
    entry, fake, driver, with_worker, interruptible, nothing_left
):
    job = Job("device", driver)
    job.net.provide_external_data(batch(0, samples=9000))
    started = time.monotonic()
    with Told(fake, lambda: os.kill(os.getpid(), signal.SIGINT)) as told:
        with pytest.raises(KeyboardInterrupt) as caught:
            job.train(a_pass_whose_call_is_late(fake, entry, job.seen))
    del caught
    assert told.saw and time.monotonic() - started < 5
    assert fake.delays()["now"] == 1 and len(workers()) == 1
    fake.end_delays()
    wait_until(lambda: workers() == [])
    job.train_again()


@pytest.mark.parametrize("entry", OF_THE_WORKER)
@pytest.mark.parametrize("of_the_worker", [True, False])
def test_another_thread_that_closes_the_feed_does_not_wait_for_a_late_call(
    of_the_worker, entry, fake, driver, monkeypatch, request, nothing_left
):
    """The call takes longer than the feed waits."""
    monkeypatch.setattr(feed, "UNBLOCK_AFTER_SECONDS", 0.05)
    monkeypatch.setattr(feed, "GIVE_UP_AFTER_SECONDS", 0.2)
    if of_the_worker:
        request.getfixturevalue("with_worker")
    job = Job("device", driver)
    job.net.provide_external_data(batch(0, samples=9000))
    feeds, seen, ended = [], [], []

    def consume():
        fake.push_context(driver.context)
        try:
            with dbuf.feed.Feed(job.net.handler) as a_feed:
                feeds.append(a_feed)
                source = a_pass_whose_call_is_late(fake, entry, seen)
                for number in a_feed.run_network(job.net, source(), True):
                    seen.append(number)
        except BaseException as error:
            ended.append(type(error))
        else:
            ended.append(None)

    consumer = threading.Thread(target=consume, daemon=True)
    consumer.start()
    wait_until(lambda: fake.delays()["now"])
    started = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dbuf.FeedWarning)
        feeds.pop().close()
    assert time.monotonic() - started < 5
    assert fake.delays()["now"] == 1, "it did wait"
    fake.end_delays()
    consumer.join(10)
    assert not consumer.is_alive()
    wait_until(lambda: workers() == [])
    print(ended, seen)
    job.train_again()
    assert job.seen == codes(0, 1, 2)
