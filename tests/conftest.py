"""One driver for the whole test process: the stand-in (default) or the real one.

A process opens the CUDA driver once, so the choice is made here, before anything is
imported that could open it. ``BRAINSTORM_DBUF_TEST_DRIVER=real`` takes the real one:
the tests that look into the stand-in are skipped then, those that need a GPU run.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
import threading
from types import SimpleNamespace

import pytest

from fake_cuda import build, control

KIND = os.environ.get("BRAINSTORM_DBUF_TEST_DRIVER", "fake")
if KIND not in ("fake", "real"):
    raise pytest.UsageError(
        f"BRAINSTORM_DBUF_TEST_DRIVER: expected fake or real, got {KIND!r}"
    )
if KIND == "fake":
    # The stand-in is driver and cuBLAS in one; its kernels are ours, built for the CPU.
    os.environ["BRAINSTORM_DBUF_LIBCUDA"] = str(build.build_library())
    os.environ["BRAINSTORM_DBUF_LIBCUBLAS"] = os.environ["BRAINSTORM_DBUF_LIBCUDA"]
    if build.why_no_kernels() is None:
        os.environ["FAKE_CUDA_KERNELS"] = str(build.build_kernels())

import brainstorm_dbuf as dbuf  # noqa: E402
from brainstorm_dbuf import _cuda, access, switching  # noqa: E402
from brainstorm_dbuf.compat import pycuda_guard  # noqa: E402

# What a program of its own must have on its path to see what the tests see.
SUBPROCESS_PATH = os.pathsep.join(
    [
        os.path.dirname(os.path.dirname(dbuf.__file__)),
        os.path.dirname(__file__),
        *filter(None, sys.path),
    ]
)

# The handlers that tests of training run on.
ON_DEVICE = "device" if KIND == "fake" else "pycuda"
HANDLERS = ["numpy", ON_DEVICE, "cuda"]
WORKER_NAME = "brainstorm-dbuf feed"

NEEDS_FAKE = "looks into the stand-in driver"
NEEDS_REAL = "needs a real CUDA device (make gpu-test)"
NEEDS_NO_SANITIZER = "writes where it may not, which a sanitizer ends the process for"
UNDER_ASAN = "libasan" in os.environ.get("LD_PRELOAD", "")  # by tests/sanitize.py


def pytest_collection_modifyitems(items):
    for item in items:
        if KIND == "real" and "fake" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.skip(reason=NEEDS_FAKE))
        if KIND == "fake" and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=NEEDS_REAL))
        if UNDER_ASAN and item.get_closest_marker("stray_write"):
            item.add_marker(pytest.mark.skip(reason=NEEDS_NO_SANITIZER))
    # The longest first, lest one process run them while the others have nothing left.
    items.sort(key=lambda item: item.path.name != "test_sanitize.py")


HAS_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    item.stash[HAS_FAILED] = item.stash.get(HAS_FAILED, False) or report.failed
    return report


@pytest.fixture(scope="module", autouse=True)
def _quick_collections():
    """The tests collect garbage often: leave out what lives on from earlier modules.

    The imports have made much of it, pytest and hypothesis keep more for each test.
    """
    gc.collect()
    gc.freeze()


@functools.cache
def _fake_library():
    return control.FakeCuda(os.environ["BRAINSTORM_DBUF_LIBCUDA"])


def why_no_pycuda():
    """Return why PyCudaHandler cannot be used here, None if it can."""
    try:
        import brainstorm  # noqa: F401
    except ImportError as error:
        return str(error)
    return pycuda_guard.problem()


@functools.cache
def why_no_cuda_handler():
    """Return why CudaHandler cannot be used here, None if it can."""
    if KIND == "fake" and build.why_no_kernels() is not None:
        return f"CudaHandler: {build.why_no_kernels()}"
    try:
        _cuda.HandlerCore(device=-1)  # refused, but only by what has kernels
    except (ValueError, dbuf.CudaError):
        return None
    except RuntimeError as error:
        return str(error)


@contextlib.contextmanager
def _real_context():
    """Give the handle of the context in which PyCudaHandler's arrays live.

    PyCUDA makes its own at `import pycuda.autoinit` (which brainstorm does), current in
    the importing thread from then on; another one must not be pushed on top of it. No
    object of ours is kept for it, since what a test has left is looked for later.
    Without PyCUDA it is the primary context.
    """
    if why_no_pycuda() is None:
        import pycuda.autoinit

        current = pycuda.autoinit.cuda.Context.get_current()
        assert current == pycuda.autoinit.context
        yield dbuf.Context.current().handle
    else:
        with dbuf.Context.primary(0) as context:
            yield context.handle


def _forget_failures():
    """Let go of what the traceback of the last failure still holds, for a debugger."""
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):
        vars(sys).pop(name, None)


@contextlib.contextmanager
def a_driver():
    """Give the driver of this process, with a context current in this thread."""
    if KIND == "real":
        with _real_context() as context:
            yield SimpleNamespace(kind="real", fake=None, context=context)
            gc.collect()
        return
    fake = _fake_library()
    fake.reset()
    dbuf.device_count()  # the binding remembers it, and a test may have had more
    fake.reset()
    # As PyCUDA does: a context of its own, current in the thread that trains.
    context = fake.create_context()
    yield SimpleNamespace(kind="fake", fake=fake, context=context)
    gc.collect()
    assert not any(fake.damage().values()), fake.damage()


@pytest.fixture
def driver():
    """A driver with a context current in this thread; ``fake`` steers the stand-in.

    After the test nothing of ours may be left in it.
    """
    _forget_failures()
    gc.collect()
    with a_driver() as driver:
        yield driver


@pytest.fixture
def fake(driver):
    """The stand-in driver's controls, with a context current in this thread."""
    return driver.fake


def skip_without(kind):
    """Skip a test where a kind of handler cannot be made."""
    reasons = {"pycuda": why_no_pycuda, "cuda": why_no_cuda_handler}
    reason = reasons[kind]() if kind in reasons else None
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(params=HANDLERS)
def kind(request, driver):
    """The kind of handler to train on, for parity.make_handler."""
    skip_without(request.param)
    return request.param


@pytest.fixture
def kernels(driver):
    """CudaHandlers can be made; none is there yet."""
    skip_without("cuda")


@pytest.fixture
def cuda(request, driver, kernels):
    """A seeded CudaHandler."""
    from parity import make_handler

    yield make_handler("cuda", driver)
    # pytest would keep it for longer than `nothing_left` waits.
    request.node.funcargs.pop("cuda", None)


@pytest.fixture(params=["automatic", "ahead", "worker"])
def way(request, monkeypatch):
    """How minibatches are prepared: as it pays, which is straight into the network for
    small ones; by the trainer's thread ahead of each step; or by a worker, whatever the
    size."""
    if request.param == "ahead":
        if "kind" in request.fixturenames:
            if request.getfixturevalue("kind") == "numpy":
                pytest.skip("only what goes to a device is queued ahead")
        monkeypatch.setattr(access, "MOST_PUT_BYTES", 0)
    if request.param == "worker":
        from parity import force_worker

        force_worker(monkeypatch)
    return request.param


@pytest.fixture(params=["ahead", "worker"])
def slot_way(request, monkeypatch):
    """As `way`, where each minibatch for a device goes through a back buffer."""
    monkeypatch.setattr(access, "MOST_PUT_BYTES", 0)
    if request.param == "worker":
        from parity import force_worker

        force_worker(monkeypatch)
    return request.param


def live_objects():
    """Return the counts of what a test must leave as it was.

    The real driver's context outlives the test, and with it the events that its ledger
    of the NULL stream keeps to use again.
    """
    counts = dbuf.live_objects()
    if KIND == "real":
        del counts["contexts"], counts["fences"]
    return counts


@pytest.fixture
def nothing_left(request, driver):
    """After the test there is no thread, driver object or memory that it has made."""
    gc.collect()
    before = live_objects()
    yield
    if request.node.stash.get(HAS_FAILED, False):
        return  # its traceback holds what it had
    gc.collect()
    assert [t for t in threading.enumerate() if t.name == WORKER_NAME] == []
    assert not switching._workers
    if KIND == "real":
        # What is in flight is let go when the context is waited for.
        dbuf.Context.current().synchronize()
    assert live_objects() == before
    if driver.fake is not None:
        live = driver.fake.live()
        assert live.pop("contexts") == 1
        assert not any(live.values()), live
