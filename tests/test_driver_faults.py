"""Any driver call may fail at any time: a clear error, nothing left, on it goes."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import warnings

import pytest

import brainstorm_dbuf as dbuf
from brainstorm_dbuf import held_memory
from binding_tools import unraisable_errors
from coded import From, Job, batch, codes, workers
from conftest import KIND, SUBPROCESS_PATH
from faulty import COUNT, IN_SUITE, PASSES, small_pass, some_of
from parity import force_worker, make_handler

pytestmark = pytest.mark.timeout(30 if IN_SUITE else 3600)

# Driver calls of a training, and whether there must be an error where one fails. The
# others may be made up for, or come where nobody is left to be told.
MUST_RAISE = {
    "cuMemGetAddressRange",
    "cuMemcpy2DAsync",
    "cuMemcpyDtoDAsync",
    "cuMemcpyHtoDAsync",
    "cuStreamCreateWithPriority",
    "cuStreamWaitEvent",
}
MAY_RAISE = {
    "cuCtxGetCurrent",
    "cuCtxGetDevice",
    "cuCtxPopCurrent",
    "cuCtxPushCurrent",
    "cuEventCreate",
    "cuEventDestroy",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuDeviceGetAttribute",
    "cuMemAlloc",
    "cuMemFree",
    "cuMemFreeHost",
    "cuMemHostAlloc",
    "cuMemHostRegister",
    "cuMemHostUnregister",
    "cuMemGetInfo",
    "cuPointerGetAttribute",
    "cuStreamDestroy",
    "cuStreamQuery",
    "cuStreamSynchronize",
}
ENTRIES = sorted(MUST_RAISE | MAY_RAISE)


@pytest.fixture(autouse=True)
def any_size(monkeypatch):
    monkeypatch.setattr(held_memory, "REGION_MIN_BYTES", 0)


def prepare(driver, depth=2):
    """Return a job whose network has all its memory: what fails is the feed's."""
    job = Job("device", driver, depth=depth)
    job.net.provide_external_data(batch(0, samples=9000))
    return job


@pytest.fixture(scope="module")
def counted():
    """How often each entry is called in a training, by pass, way and depth."""
    return {}


def calls_of(counted, fake, driver, name, key):
    if key not in counted:
        job = prepare(driver)
        before = fake.calls()
        job.train(PASSES[name]())
        assert job.seen == codes(*range(COUNT))
        counted[key] = fake.calls() - before
        unknown = set(counted[key]) - set(ENTRIES)
        assert not unknown, f"say whether these must raise: {unknown}"
    return counted[key]


@pytest.mark.parametrize("code", [2, 999])
@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_call_that_fails_once_is_an_error_or_made_up_for(
    entry, name, code, fake, driver, way, counted
):
    count = calls_of(counted, fake, driver, name, (name, way))[entry]
    for nth in some_of(count, 4):
        fail_once(entry, nth, code, name, fake, driver)


def fail_once(entry, nth, code, name, fake, driver):
    gc.collect()
    ours, theirs = dbuf.live_objects(), fake.live()
    job = prepare(driver)
    prepared, prepared_theirs = dbuf.live_objects(), fake.live()
    made = fake.calls(entry)
    error = None
    with unraisable_errors() as reported, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fake.fail(entry, nth, code)
        try:
            job.train(PASSES[name]())
        except dbuf.CudaError as caught:
            error = caught.with_traceback(None)
            error.__context__ = None
        failed = fake.calls(entry) - made > nth
        gc.collect()
    # Threads are never quite the same: use up a failure that is still to come.
    while fake.calls(entry) - made <= nth:
        spend(entry, driver)
    what = f"{entry} number {nth}"
    assert workers() == []
    assert fake.current_context() == driver.context
    assert all(w.category is dbuf.FeedWarning for w in said), what
    if error is not None:
        assert failed
        assert (error.call, error.code) == (entry, code), what
        assert job.seen == codes(*range(len(job.seen))), what
    else:
        assert job.seen == codes(*range(COUNT)), what
        # A call that says that memory ran short is a reason to step down.
        if failed and entry in MUST_RAISE:
            assert code == 2 and said, f"{what} failed and nobody said so"
    own_allocation = entry == "cuMemAlloc" or (
        entry == "cuMemHostAlloc" and name in ("small", "growing")
    )
    if code == 2 and own_allocation and failed:
        assert error is None and len(said) == len(job.stats.fallbacks) == 1, what
    assert len(reported) <= 1
    # What the driver refused to destroy, or to make the context current for, is all that
    # may be left of it.
    kept = sum(
        fake.live()[kind] - prepared_theirs[kind]
        for kind in ("events", "streams", "device_blocks", "pinned_blocks")
    )
    refusals = ("Destroy", "Free", "Unregister", "cuCtx")
    assert kept <= any(refusal in entry for refusal in refusals), what
    assert dbuf.live_objects() == prepared, what
    job.train_again()
    assert dbuf.live_objects() == prepared, what
    del job
    gc.collect()
    left = dbuf.live_objects()
    if entry in ("cuCtxPopCurrent", "cuCtxGetCurrent"):
        # A context that could not be popped counts as current, and is held.
        assert left["contexts"] - ours["contexts"] in (0, 1), what
        left["contexts"] = ours["contexts"]
    assert left == ours, what
    assert fake.live()["contexts"] == theirs["contexts"]


def spend(entry, driver):
    """Make a planned failure happen where it does not matter."""
    try:
        with warnings.catch_warnings(), unraisable_errors():
            warnings.simplefilter("ignore")
            for name in PASSES:
                prepare(driver).train(PASSES[name]())
    except dbuf.CudaError:
        pass
    gc.collect()


@pytest.mark.parametrize("entry", ["cuMemcpyHtoDAsync", "cuStreamWaitEvent"])
@pytest.mark.parametrize("depth", [1, 3])
def test_a_failure_ends_training_at_once_whatever_the_depth(
    entry, depth, fake, driver, slot_way, nothing_left
):
    """The worker may be waiting for the very slot whose hand-over failed."""
    for nth in range(COUNT):
        job = prepare(driver, depth)
        fake.fail(entry, nth, 999)
        with pytest.raises(dbuf.CudaError, match=entry) as caught:
            job.train(From(small_pass))
        del caught
        assert workers() == []
        job.train_again()
        del job


@pytest.mark.parametrize("nth", range(6))
def test_a_failure_in_a_prefetch_comes_out_of_the_loop(
    nth, fake, driver, way, nothing_left
):
    handler = make_handler("device", driver)
    iterator = dbuf.Prefetch(From(small_pass))
    for entry in ("cuMemcpyHtoDAsync", "cuStreamWaitEvent"):
        fake.fail(entry, nth, 999)
        seen = []
        with pytest.raises(dbuf.CudaError, match=entry) as caught:
            for data in iterator(handler):
                handler.drain()
                seen.append(float(data["default"].max()))
                del data
        del caught
        assert seen == [float(k) for k in range(len(seen))]
        assert workers() == []
        assert [float(d["default"].max()) for d in drained(iterator, handler)] == [
            float(k) for k in range(COUNT)
        ]
    iterator.close()


def drained(iterator, handler):
    for data in iterator(handler):
        handler.drain()
        yield data


def test_an_iterators_error_counts_also_where_its_worker_cannot_end_well(
    fake, driver, monkeypatch, nothing_left
):
    force_worker(monkeypatch)
    error = ZeroDivisionError("of the iterator")

    def make_pass():
        for k in range(4):
            yield batch(k)
        fake.fail("cuCtxPopCurrent", 0, 999)
        raise error

    job = Job("device", driver)
    with pytest.raises(ZeroDivisionError) as caught:
        job.train(From(make_pass))
    assert caught.value is error and job.seen == codes(0, 1, 2, 3)
    assert job.stats.workers == 1 and fake.calls("cuCtxPopCurrent") == 1
    del caught
    error.__traceback__ = None
    # A context that could not be popped counts as current, and is held.
    context = dbuf.Context.current()
    fake.push_context(context.handle)
    context.pop()


def test_a_driver_that_fails_from_now_on_ends_training(fake, driver, way):
    """As after a fault of a kernel: every later call says the same."""
    broken = [name for name in fake.entries if name not in ("cuInit", "cuGetErrorName")]
    job = prepare(driver)

    def make_pass():
        for k in range(COUNT):
            if k == 3:
                for name in broken:
                    fake.fail(name, 0, 700, times=10_000)
            yield batch(k)

    with unraisable_errors():
        with pytest.raises(dbuf.CudaError) as caught:
            job.train(From(make_pass))
        assert caught.value.code == 700
        assert job.seen == codes(*range(len(job.seen))) and len(job.seen) >= 2
        del caught
        assert workers() == []
        del job
        gc.collect()


# ---------------------------------------------------------------- no driver, an old one


PROLOGUE = """
    import sys, threading
    sys.modules["pycuda"] = None  # it opens the real driver, and its imports warn
    import numpy as np
    import brainstorm_dbuf as dbuf
    import brainstorm as bs
    from brainstorm.handlers import NumpyHandler
    from brainstorm_dbuf import _cuda, access

    assert not _cuda.sysinfo()["is_open"]
    from networks import NETWORKS, minibatches

    def train(handler):
        net = NETWORKS["recurrent"]()
        net.set_handler(handler)
        trainer = dbuf.Trainer(bs.training.SgdStepper(0.01), verbose=False)
        trainer.add_hook(bs.hooks.StopAfterEpoch(2))
        trainer.train(net, minibatches("recurrent", np.random.default_rng(1)))
        assert len(trainer.logs["rolling_training"]["total_loss"]) == 2

    class GpuHandler(NumpyHandler):
        pass

    @access.access_for.register(GpuHandler)
    def gpu_access(handler):
        context = _cuda.Context.current()
        return access.CudaAccess(np.float32, context, *[None] * 5)

    def data():
        return minibatches("recurrent", np.random.default_rng(1))

    def expect_error():
        for use in (
            lambda: train(GpuHandler(np.float32)),
            lambda: next(dbuf.Prefetch(data())(GpuHandler(np.float32))),
            dbuf.device_count,
            lambda: dbuf.pagelocked_empty(4),
        ):
            try:
                use()
            except dbuf.DriverError as error:
                print(error)
            else:
                sys.exit("no error")
        assert threading.active_count() == 1

    train(NumpyHandler(np.float32))
    assert NumpyHandler(np.float32).pagelocked_empty((2, 3)).shape == (2, 3)
    assert not _cuda.sysinfo()["is_open"]
"""


def script(body, library):
    done = subprocess.run(
        [
            sys.executable,
            "-X",
            "dev",
            "-W",
            "error",
            "-c",
            textwrap.dedent(PROLOGUE) + textwrap.dedent(body),
        ],
        env={
            **os.environ,
            "PYTHONPATH": SUBPROCESS_PATH,
            "BRAINSTORM_DBUF_LIBCUDA": str(library),
            "BRAINSTORM_DBUF_TEST_DRIVER": "real",  # conftest: choose no library
        },
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout.splitlines()


def test_without_a_driver_numpy_trains_and_the_device_says_what_is_missing(tmp_path):
    missing = tmp_path / "libcuda.so.1"
    lines = script("expect_error()\ntrain(NumpyHandler(np.float32))", missing)
    assert len(lines) == 4
    for line in lines:
        assert "DRIVER_NOT_FOUND" in line and str(missing) in line


@pytest.mark.skipif(KIND == "real", reason="needs the stand-in driver")
@pytest.mark.parametrize("version", [0, 3020, 9000])
def test_a_driver_that_is_too_old_is_named_as_that(version):
    lines = script(
        f"""
        import os
        from fake_cuda import FakeCuda
        fake = FakeCuda(os.environ["BRAINSTORM_DBUF_LIBCUDA"])
        fake.set_driver_version({version})
        expect_error()
        fake.set_driver_version(13000)
        fake.create_context()
        assert dbuf.device_count() == 1
        train(NumpyHandler(np.float32))
        """,
        os.environ["BRAINSTORM_DBUF_LIBCUDA"],
    )
    for line in lines:
        assert "DRIVER_TOO_OLD" in line and "older than CUDA 12" in line
