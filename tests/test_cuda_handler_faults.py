"""Any call of a training on CudaHandler may fail, the driver's or cuBLAS's."""

from __future__ import annotations

import gc
import itertools
import warnings

import numpy as np
import pytest

import brainstorm_dbuf as dbuf
from brainstorm_dbuf import held_memory
from binding_tools import unraisable_errors
from coded import workers
from faulty import IN_SUITE, TRAININGS, counts_of_a_training, live_in_both, some_of

pytestmark = [
    pytest.mark.timeout(60 if IN_SUITE else 3600),
    pytest.mark.usefixtures("kernels"),
]

# In the suite each call fails first, in the middle and last, each in another training.
IN_THE_SUITE = {
    ("mlp with dropout", "automatic"): 0,
    ("convolution", "worker"): 1,
    ("lstm with a mask", "ahead"): 2,
}
CASES = list(
    IN_THE_SUITE
    if IN_SUITE
    else itertools.product(
        [name for kind, name in TRAININGS if kind == "cuda"],
        ["automatic", "ahead", "worker"],
    )
)

# Calls that are made up for, or after which nothing is left to be done nor anybody to
# be told: an event or a handle of cuBLAS that goes with its context, what is asked
# quickly before it is asked properly.
OVERLOOKED = {
    "cuCtxGetCurrent",
    "cuCtxPopCurrent",
    "cuCtxPushCurrent",
    "cuEventDestroy",
    "cuEventQuery",
    "cuEventRecord",
    "cublasDestroy_v2",
}
# Calls that free something, which may stay where they are refused.
FREES = ("Destroy", "Free", "Unload", "Unregister", "Release", "cuCtx")


@pytest.fixture(autouse=True)
def any_size(monkeypatch):
    monkeypatch.setattr(held_memory, "REGION_MIN_BYTES", 0)


def nths(name, way, count):
    if not IN_SUITE:
        return some_of(count, 1)
    place = IN_THE_SUITE[name, way]
    return [(0, count // 2, count - 1)[place]]


def the_name_in_errors(entry):
    return entry.removesuffix("_v2")


@pytest.mark.parametrize("name, way", CASES, indirect=["way"])
def test_each_call_that_fails_once_is_an_error_or_made_up_for(name, way, fake, driver):
    training = TRAININGS["cuda", name]
    training(driver)  # what is made once
    expected, counts = counts_of_a_training(training, driver)
    assert set(counts) >= {"cuLaunchKernel", "cuModuleLoadData", "cublasSgemm_v2"}
    failed = 0
    for entry, count in counts.items():
        for nth in nths(name, way, count):
            failed += fail_once(entry, nth, training, expected, fake, driver)
    print(f"{failed} calls failed")


def fail_once(entry, nth, training, expected, fake, driver):
    fake.reset()
    driver.context = fake.create_context()
    before = live_in_both(fake)
    what = f"{entry} number {nth}"
    is_blas = entry.startswith("cublas")
    code = 13 if is_blas else 999
    error = None
    made = fake.calls(entry)
    with unraisable_errors() as reported, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fake.fail(entry, nth, code)
        try:
            weights = training(driver)
        except dbuf.CudaError as caught:
            error = caught.with_traceback(None)
            error.__context__ = None
        gc.collect()
        has_failed = fake.calls(entry) - made > nth
        fake.heal()
    assert workers() == [], what
    assert fake.current_context() == driver.context, what
    if error is not None:
        assert error.call == the_name_in_errors(entry), what
        assert error.name == (
            "CUBLAS_STATUS_EXECUTION_FAILED" if is_blas else "CUDA_ERROR_UNKNOWN"
        ), what
    else:
        assert np.array_equal(weights, expected), what
        told = reported or said or entry in OVERLOOKED
        assert told or not has_failed, f"{what} failed and nobody said so"
    assert len(reported) <= 1, (what, reported)
    if entry in ("cuCtxGetCurrent", "cuCtxPopCurrent"):
        end_push(before[0]["contexts"], fake)
    after = live_in_both(fake)
    assert after[0] == before[0], what
    kept = sum(after[1][kind] - before[1][kind] for kind in KINDS)
    assert kept <= any(word in entry for word in FREES), (what, after[1])
    again = training(driver)
    assert np.array_equal(again, expected), what
    assert live_in_both(fake)[0] == before[0], what
    return has_failed


def end_push(count, fake):
    """Let go of a context that could not be popped: it counts as current, is held."""
    if dbuf.live_objects()["contexts"] > count:
        context = dbuf.Context.primary()
        fake.push_context(context.handle)
        context.pop()


def first_product():
    handler = dbuf.CudaHandler(seed=1)
    handler.dot_mm(handler.ones((3, 3)), handler.ones((3, 3)), handler.zeros((3, 3)))


def test_a_context_that_cannot_be_made_current_is_named_wherever_it_is(fake, driver):
    """Also while cuBLAS is set up."""
    first_product()
    gc.collect()
    before = fake.calls("cuCtxPushCurrent")
    first_product()
    count = fake.calls("cuCtxPushCurrent") - before
    for nth in range(count):
        fake.fail("cuCtxPushCurrent", nth, 999)
        with unraisable_errors() as reported:
            try:
                first_product()
            except dbuf.CudaError as error:
                reported.append((error.call, error.name))
            gc.collect()
        fake.heal()
        assert reported in ([], [("cuCtxPushCurrent", "CUDA_ERROR_UNKNOWN")]), nth


def test_memory_that_cublas_does_not_get_is_short_memory(fake, driver):
    fake.fail("cublasCreate_v2", code=3)
    with pytest.raises(dbuf.CudaMemoryError, match="CUBLAS_STATUS_ALLOC_FAILED"):
        first_product()


KINDS = (
    "contexts",
    "streams",
    "events",
    "device_blocks",
    "pinned_blocks",
    "registered",
    "modules",
    "blas_handles",
)
