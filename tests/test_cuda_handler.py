"""CudaHandler as a handler: its interface, description, seeds, errors at the door."""

from __future__ import annotations

import gc
import inspect
import json
import os
import subprocess
import sys
import textwrap
import threading
import weakref

import numpy as np
import pytest

import brainstorm_dbuf as dbuf
import brainstorm as bs
from brainstorm.describable import create_from_description, get_description
from brainstorm.handlers import NumpyHandler
from brainstorm.handlers.base_handler import Handler
from binding_tools import unraisable_errors
from brainstorm_dbuf import _cuda
from conftest import KIND, SUBPROCESS_PATH, live_objects, why_no_cuda_handler
from networks import NETWORKS, data_for

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_left")]

OPERATIONS = sorted(
    name
    for name, value in vars(Handler).items()
    if getattr(value, "__isabstractmethod__", False)
)


@pytest.fixture
def no_handler_yet(driver):
    """Skip where there can be none, but make none."""
    if why_no_cuda_handler() is not None:
        pytest.skip(why_no_cuda_handler())


# --------------------------------------------------------------------------- interface


def test_it_is_a_brainstorm_handler(cuda):
    assert isinstance(cuda, Handler) and type(cuda) is dbuf.CudaHandler
    assert dbuf.CudaHandler.__mro__[1] is _cuda.HandlerCore
    assert not getattr(dbuf.CudaHandler, "__abstractmethods__", None)
    assert cuda.dtype is np.float32 or cuda.dtype == np.float32
    assert cuda.array_type is _cuda.DeviceArray
    assert isinstance(cuda.EMPTY, cuda.array_type) and cuda.EMPTY.size == 0
    assert isinstance(cuda.context, dbuf.Context)
    assert isinstance(cuda.stream, dbuf.Stream)
    assert cuda.stream.context == cuda.context
    assert cuda.stream.handle not in (0, 1, 2)
    assert cuda.device in (0, dbuf.Device(0))
    assert cuda.tf32 is False and cuda.fused is True
    assert "CudaHandler" in dbuf.__all__ and "CudaHandler" in dir(dbuf)
    assert "CudaHandler" in repr(cuda)


def test_its_signature(cuda):
    signature = inspect.signature(dbuf.CudaHandler)
    assert {n: p.default for n, p in signature.parameters.items()} == {
        "seed": None,
        "device": 0,
        "tf32": False,
        "fused": True,
    }


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_has_brainstorms_arguments(name, cuda):
    """By position as in brainstorm's base class, by name as in NumpyHandler."""
    mine = inspect.signature(getattr(cuda, name)).parameters
    base = inspect.signature(getattr(Handler, name)).parameters
    numpys = inspect.signature(getattr(NumpyHandler, name)).parameters
    count = len(base) - 1
    assert len(mine) == count == len(numpys) - 1
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in mine.values())
    named = [list(mine), list(base)[1:], list(numpys)[1:]]
    assert named[0] in named[1:]
    defaults = [p.default for p in mine.values()]
    assert defaults == [p.default for p in list(base.values())[1:]]
    assert getattr(cuda, name).__doc__


def test_the_activations_are_all_there(cuda):
    own = NumpyHandler(np.float32)
    dictionaries = (
        "act_func",
        "act_func_deriv",
        "inplace_act_func",
        "inplace_act_func_deriv",
    )
    x = np.array([-2, -0.5, 0, 0.5, 2], np.float32)
    y, dy = np.array([0.1, -0.2, 0.5, 0, 1], np.float32), x[::-1].copy()
    for name in dictionaries:
        mine, brainstorms = getattr(cuda, name), getattr(own, name)
        assert set(mine) == set(brainstorms) | {"el"}
        for activation in brainstorms:
            arrays = {
                "act_func": (x, np.zeros(5, np.float32)),
                "act_func_deriv": (x, y, dy, np.zeros(5, np.float32)),
                "inplace_act_func": (x,),
                "inplace_act_func_deriv": (y, dy),
            }[name]
            device = [cuda.create_from_numpy(array) for array in arrays]
            host = [array.copy() for array in arrays]
            mine[activation](*device)
            brainstorms[activation](*host)
            for a, b in zip(device, host):
                np.testing.assert_allclose(a.get(), b, rtol=1e-6, err_msg=activation)
    out = cuda.create_from_numpy(x)
    cuda.inplace_act_func["el"](out)
    expected = np.where(x > 0, x, np.expm1(x))
    np.testing.assert_allclose(out.get(), expected, rtol=1e-6)
    deltas = cuda.ones((5,))
    cuda.inplace_act_func_deriv["el"](out, deltas)
    expected = np.where(expected > 0, 1, expected + 1)
    np.testing.assert_allclose(deltas.get(), expected, rtol=1e-6)
    other = cuda.zeros((5,))
    cuda.act_func_deriv["el"](cuda.ones((5,)), out, cuda.ones((5,)), other)
    np.testing.assert_allclose(other.get(), expected, rtol=1e-6)


def test_the_feed_finds_its_context_and_stream(cuda):
    access = dbuf.access_for(cuda)
    assert access.context == cuda.context
    assert access.compute_stream.handle == cuda.stream.handle
    assert access.copy_stream.handle != cuda.stream.handle
    array = cuda.ones((2, 3))
    assert access.is_own_array(array) and not access.is_own_array(np.ones(3))
    access.close()


def test_the_operations_of_double_buffering(cuda):
    batch = cuda.pagelocked_empty((3, 4))
    assert batch.shape == (3, 4) and batch.dtype == np.float32
    assert dbuf.is_pagelocked(batch)
    batch[...] = np.arange(12).reshape(3, 4)
    memory = cuda.zeros((3, 4))
    cuda.synchronize()
    with dbuf.Stream(cuda.context) as stream:
        cuda.set_from_numpy_async(memory, batch, stream)
        stream.synchronize()
        np.testing.assert_array_equal(memory.get(), batch)
        cuda.set_from_numpy_async(memory, np.ones((3, 4)), stream=cuda.stream)
        assert (memory.get() == 1).all()
        with pytest.raises(ValueError):
            cuda.set_from_numpy_async(memory, np.ones((4, 3)), stream)
        with pytest.raises(TypeError):
            cuda.set_from_numpy_async(memory, [1.0], stream)
        hub = cuda.zeros((3, 6))
        try:  # a slice of a hub is done right or refused
            cuda.set_from_numpy_async(hub[:, 1:5], batch, cuda.stream)
        except (ValueError, TypeError):
            assert not hub.get().any()
        else:
            np.testing.assert_array_equal(hub.get()[:, 1:5], batch)
            assert not hub.get()[:, [0, 5]].any()
        cuda.stream.synchronize()  # what was in flight on it is let go


def test_synchronize_waits_for_what_is_queued(cuda, driver):
    out = cuda.ones((1000,))
    for _ in range(50):
        cuda.mult_add_st(1, out, out)
        cuda.mult_st(0.5, out, out)
    assert cuda.synchronize() is None
    assert cuda.stream.query()
    if driver.fake is not None:
        assert driver.fake.pending() == 0


def test_operations_leave_the_callers_context_alone(cuda, driver):
    before = dbuf.Context.current().handle
    cuda.add_tt(cuda.ones((3,)), cuda.ones((3,)), cuda.ones((3,)))
    cuda.ones((3,)).get()
    cuda.synchronize()
    dbuf.CudaHandler()
    gc.collect()
    assert dbuf.Context.current().handle == before


# ------------------------------------------------------------------------ descriptions


def test_it_is_describable(cuda):
    for handler in (cuda, dbuf.CudaHandler(), dbuf.CudaHandler(seed=3, tf32=True)):
        description = get_description(handler)
        assert description["@type"] == "CudaHandler"
        again = create_from_description(json.loads(json.dumps(description)))
        assert type(again) is dbuf.CudaHandler
        assert again.tf32 == handler.tf32 and again.fused is True
        assert get_description(again) == description
        assert (again.ones((2,)).get() == 1).all()
        assert "el" in again.act_func and again.EMPTY.size == 0
        assert "stream" not in description and "context" not in description


@pytest.mark.parametrize("name", NETWORKS)
def test_a_saved_network_loads_with_it(name, cuda, tmp_path):
    bs.global_rnd.set_seed(1)
    net = NETWORKS[name]()
    net.set_handler(cuda)
    data = data_for(name, np.random.default_rng(0))

    def results(network):
        network.provide_external_data(data)
        network.forward_pass()
        return network.get("Output.outputs.predictions")

    net.save_as_hdf5(str(tmp_path / "net.hdf5"))
    again = bs.Network.from_hdf5(str(tmp_path / "net.hdf5"))
    assert type(again.handler) is dbuf.CudaHandler and again.handler is not cuda
    np.testing.assert_array_equal(again.get("parameters"), net.get("parameters"))
    assert get_description(again) == get_description(net)
    np.testing.assert_array_equal(results(again), results(net))
    # And back to a machine without a GPU.
    again.set_handler(NumpyHandler(np.float32))
    np.testing.assert_allclose(results(again), results(net), rtol=1e-4, atol=1e-6)


# ------------------------------------------------------------------------------- seeds


def draws(handler):
    mask, noise = handler.zeros((40, 30)), handler.zeros((1001,))
    for _ in range(2):
        handler.generate_probability_mask(mask, 0.4)
        handler.fill_gaussian(1.0, 2.0, noise)
    return np.concatenate([mask.get().ravel(), noise.get()])


def test_a_seed_fixes_the_random_numbers(cuda):
    first = draws(dbuf.CudaHandler(seed=5))
    np.testing.assert_array_equal(draws(dbuf.CudaHandler(seed=5)), first)
    np.testing.assert_array_equal(draws(dbuf.CudaHandler(5)), first)
    assert (draws(dbuf.CudaHandler(seed=6)) != first).any()


def test_without_a_seed_it_comes_from_brainstorms_global_one(cuda):
    seen = []
    for seed in (1, 1, 2):
        bs.global_rnd.set_seed(seed)
        seen.append(draws(dbuf.CudaHandler()))
        seen.append(draws(dbuf.CudaHandler()))
    np.testing.assert_array_equal(seen[0], seen[2])
    np.testing.assert_array_equal(seen[1], seen[3])
    for other in (seen[1], seen[4]):
        assert (seen[0] != other).any()


# ------------------------------------------------------------------------------ errors


def test_wrong_arguments_are_refused(cuda):
    before = live_objects()
    for arguments in (
        {"seed": "one"},
        {"seed": 1.5},
        {"device": "cuda:0"},
        {"device": None},
        {"tf32": "yes please"},
        {"unknown": 1},
    ):
        try:
            dbuf.CudaHandler(**arguments)
        except (TypeError, ValueError):
            continue
        assert arguments == {"tf32": "yes please"}  # truth will do
    for device in (99, -1):
        with pytest.raises((dbuf.CudaError, ValueError)):
            dbuf.CudaHandler(device=device)
    gc.collect()
    assert live_objects() == before


def test_a_core_that_was_never_set_up_says_so(cuda):
    bare = dbuf.CudaHandler.__new__(dbuf.CudaHandler)
    for attempt in (
        lambda: bare.zeros((1,)),
        lambda: bare.add_tt(1, 2, 3),
        lambda: bare.synchronize(),
        lambda: bare.stream,
    ):
        with pytest.raises(RuntimeError, match="__init__"):
            attempt()


def test_setting_it_up_twice_leaves_no_array_without_its_engine(cuda):
    handler = dbuf.CudaHandler(seed=1)
    array = handler.ones((3,))
    try:
        handler.__init__(seed=2)
    except (RuntimeError, TypeError):
        pass
    assert (array.get() == 1).all()
    assert (handler.ones((3,)).get() == 1).all()


READS = {
    "get": lambda handler, array: array.get(),
    "get_numpy_copy": lambda handler, array: handler.get_numpy_copy(array),
    "asarray": lambda handler, array: np.asarray(array),
    "is_fully_finite": lambda handler, array: handler.is_fully_finite(array),
    "synchronize": lambda handler, array: handler.synchronize(),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("name", ["binarize_v", "index_m_by_v"])
def test_an_index_out_of_range_is_raised_where_the_host_next_reads(name, read, cuda):
    v = cuda.create_from_numpy(np.array([[0], [7], [1]], np.float32))
    if name == "binarize_v":
        cuda.binarize_v(v, cuda.zeros((3, 4)))
    else:
        cuda.index_m_by_v(cuda.ones((3, 4)), v, cuda.zeros((3, 1)))
    other = cuda.ones((2,))
    with pytest.raises(IndexError, match=name):
        READS[read](cuda, other)
    READS[read](cuda, other)  # said once
    assert (other.get() == 1).all()


@pytest.mark.parametrize(
    "call",
    [
        "cuInit",
        "cuDevicePrimaryCtxRetain",
        "cuStreamCreateWithPriority",
        "cuMemHostAlloc",
        "cuModuleLoadData",
        "cuModuleGetFunction",
        "cuDeviceGetAttribute",
    ],
)
def test_a_set_up_that_fails_half_way_leaves_nothing(call, fake, no_handler_yet):
    before = live_objects()
    calls = fake.calls(call)
    fake.fail(call, code=999)
    try:
        handler = dbuf.CudaHandler()
    except dbuf.CudaError as error:
        assert error.code == 999 and call in str(error)
        assert fake.calls(call) == calls + 1
    else:
        assert fake.calls(call) == calls, "the failure was overlooked"
        del handler
    gc.collect()
    assert live_objects() == before


@pytest.mark.parametrize(
    "call", ["cublasCreate_v2", "cublasSetStream_v2", "cublasSgemm_v2", "cuMemAlloc"]
)
def test_a_product_that_fails_is_an_error_and_the_next_one_works(call, cuda, fake):
    a, out = cuda.ones((4, 4)), cuda.zeros((4, 4))
    if call == "cublasSgemm_v2":
        cuda.dot_mm(a, a, out)
    fake.fail(call, code=3 if call.startswith("cublas") else 2, times=2)
    for _ in range(2 if call.startswith("cublas") else 1):
        with pytest.raises(dbuf.CudaError) as caught:
            cuda.dot_mm(a, a, out)
        if call.startswith("cublas"):
            assert "CUBLAS_STATUS_ALLOC_FAILED" in str(caught.value)
    cuda.dot_mm(a, a, out)
    assert (out.get() == 4).all()


def use_everything():
    """Make a handler and use it for a bit of everything, until all is gone again."""
    handler = dbuf.CudaHandler(seed=1)
    a = handler.create_from_numpy(np.ones((6, 5)))
    out, row = handler.zeros((6, 6)), handler.zeros((6,))
    handler.dot_mm(a, a, out, transb=True)
    handler.sum_t(out, 0, row)
    handler.fill_gaussian(0.0, 1.0, out)
    handler.softmax_m(out[:, 1:4], out[:, 1:4].copy())
    other = dbuf.CudaHandler(seed=2)
    other.from_dlpack(a).get()
    other.as_array(row).get()
    with dbuf.Stream(handler.context) as stream:
        handler.set_from_numpy_async(a, np.ones((6, 5)), stream)
        stream.synchronize()
    handler.set_from_numpy(out[:, 2:4], np.ones((6, 2)))
    assert handler.is_fully_finite(out)
    handler.synchronize()


# Calls after which nothing is left to be done, nor anybody to be told.
OVERLOOKED = ("cuCtxPopCurrent", "cuEventDestroy", "cublasDestroy_v2")


@pytest.mark.timeout(120)
def test_whatever_driver_call_fails_nothing_is_lost(fake, no_handler_yet):
    use_everything()
    gc.collect()
    before, calls = live_objects(), fake.calls()
    use_everything()
    gc.collect()
    calls = fake.calls() - calls
    assert live_objects() == before and calls["cublasSgemm_v2"] == 1
    for name, count in calls.items():
        for nth in sorted({*range(min(count, 4)), count // 2, count - 1}):
            fake.reset()
            fake.create_context()
            fake.fail(name, nth, code=13 if name.startswith("cublas") else 999)
            with unraisable_errors() as reported:
                try:
                    use_everything()
                except dbuf.CudaError as error:
                    reported.append((error.call, error.name))
                    error.__traceback__ = None
                gc.collect()
            assert live_objects() == before, (name, nth, reported)
            assert reported or name in OVERLOOKED, (name, nth)
    fake.reset()
    fake.create_context()
    use_everything()


def run_program(body, **environment):
    return subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", textwrap.dedent(body)],
        env={**os.environ, "PYTHONPATH": SUBPROCESS_PATH, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.skipif(KIND != "fake", reason="hides the driver")
def test_without_a_driver_there_is_one_clear_error(cuda, tmp_path):
    done = run_program(
        """
        import sys
        sys.modules["pycuda"] = None
        import brainstorm_dbuf as dbuf
        import brainstorm
        for _ in range(2):
            try:
                dbuf.CudaHandler()
            except dbuf.DriverError as error:
                print(type(error).__name__, error)
        """,
        BRAINSTORM_DBUF_LIBCUDA=str(tmp_path / "no driver"),
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and lines[0] == lines[1]
    assert lines[0].startswith("DriverError ")


@pytest.mark.skipif(KIND != "fake", reason="hides the devices")
def test_without_a_device_there_is_one_clear_error(cuda):
    done = run_program(
        """
        import os, sys
        sys.modules["pycuda"] = None
        from fake_cuda.control import FakeCuda
        FakeCuda(os.environ["BRAINSTORM_DBUF_LIBCUDA"]).set_device_count(0)
        import brainstorm_dbuf as dbuf
        import brainstorm
        try:
            dbuf.CudaHandler()
        except dbuf.DriverError as error:
            print(error)
        """
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert "cuInit" in done.stdout


def test_without_cublas_all_but_products_works_and_they_say_what_is_missing(
    cuda, tmp_path
):
    done = run_program(
        """
        import sys
        sys.modules["pycuda"] = None
        import brainstorm_dbuf as dbuf
        import brainstorm
        handler = dbuf.CudaHandler()
        a, out = handler.ones((3, 3)), handler.zeros((3, 3))
        handler.add_tt(a, a, out)
        for product in (handler.dot_mm, handler.dot_add_mm, handler.dot_mm):
            try:
                product(a, a, out)
            except Exception as error:
                print(type(error).__name__, error)
        print(out.get().sum())
        """,
        BRAINSTORM_DBUF_LIBCUBLAS=str(tmp_path / "no cublas"),
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    *errors, total = done.stdout.splitlines()
    assert total == "18.0" and len(errors) == 3
    for error in errors:
        assert "pip install brainstorm-dbuf[cuda]" in error
        assert "no cublas" in error


ENDINGS = {
    "end": "",
    "exit": "sys.exit(0)",
    "handler first": "del handler",
    "arrays first": "del a, out, view",
    "a cycle": "handler.me = handler; del handler",
    "in a module that goes last": "sys.kept = dict(globals())",
    "a thread still computes": """
        def work():
            while True:
                handler.add_tt(a, a, out)
                out.get()
        threading.Thread(target=work, daemon=True).start()
        time.sleep(0.1)
    """,
    "a forked child": """
        child = os.fork()
        if child == 0:
            del view
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
    """,
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_programs_with_a_handler_end_quietly(ending, cuda):
    body = """
        import os, sys, threading, time, warnings
        sys.modules["pycuda"] = None
        warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork")
        import brainstorm_dbuf as dbuf
        import brainstorm
        handler = dbuf.CudaHandler(seed=1)
        a, out = handler.ones((5, 5)), handler.zeros((5, 5))
        view = out[2:]
        handler.dot_mm(a, a, out)
        handler.add_tt(a, out, out)
    """
    done = run_program(textwrap.dedent(body) + textwrap.dedent(ENDINGS[ending]))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_reading_lets_go_of_what_earlier_copies_held(cuda):
    array, source = cuda.zeros((4,)), cuda.pagelocked_empty((4,))
    source[:] = 3
    held = weakref.ref(source)
    cuda.set_from_numpy_async(array, source, cuda.stream)
    del source
    assert (array.get() == 3).all()
    gc.collect()
    assert held() is None
    assert dbuf.live_objects()["in_flight"] == 0


def test_a_closed_compute_stream_is_refused_by_name(kernels):
    handler = dbuf.CudaHandler(seed=1)
    array, other = handler.ones((3,)), handler.ones((1, 1))
    handler.stream.close()
    for attempt in (
        lambda: handler.add_tt(array, array, array),
        lambda: handler.zeros((2,)),
        lambda: array.get(),
        lambda: array.__dlpack__(),
        lambda: handler.dot_mm(array.reshape((1, 3)), array.reshape((3, 1)), other),
    ):
        with pytest.raises(ValueError, match="closed"):
            attempt()
    del handler, array, other, attempt
    gc.collect()
    assert (dbuf.CudaHandler(seed=1).ones((2,)).get() == 1).all()


def test_page_locked_memory_needs_no_current_context(cuda):
    """As in a script, where nobody has made one current."""
    seen = []

    def script():
        with pytest.raises(dbuf.CudaError):
            dbuf.Context.current()
        array = cuda.zeros((3,))
        locked = cuda.pagelocked_empty((3,))
        locked[:] = 2
        for values in (locked, np.full(3, 5.0)):
            cuda.set_from_numpy_async(array, values, None)
            seen.append(array.get().tolist())
        assert dbuf.is_pagelocked(locked)

    thread = threading.Thread(target=script)
    thread.start()
    thread.join()
    assert seen == [[2, 2, 2], [5, 5, 5]]
