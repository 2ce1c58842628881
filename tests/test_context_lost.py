"""A context that is lost, as after a fault of a kernel: every later call fails."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import warnings

import numpy as np
import pytest

import brainstorm_dbuf as dbuf
from binding_tools import unraisable_errors
from brainstorm_dbuf import held_memory
from coded import workers
from conftest import KIND, SUBPROCESS_PATH, skip_without
from faulty import EXAMPLES, IN_SUITE, TRAININGS, counts_of_a_training, some_of

pytestmark = [
    pytest.mark.timeout(60 if IN_SUITE else 3600),
    pytest.mark.skipif(KIND == "real", reason="needs the stand-in driver"),
]

WAYS = ["automatic", "ahead", "worker"]
CASES = [
    (*training, way)
    for number, training in enumerate(TRAININGS)
    for way in ([WAYS[number % 3]] if IN_SUITE else WAYS)
]
WHAT_TO_DO = "end the program and start it again"

# The codes of which the driver's manual says that the process must be started again.
LOST = [700, 702, 710, 714, 715, 716, 717, 718, 719]


@pytest.fixture(autouse=True)
def any_size(monkeypatch):
    monkeypatch.setattr(held_memory, "REGION_MIN_BYTES", 0)


@pytest.mark.parametrize("kind, name, way", CASES, indirect=["way"])
def test_a_lost_context_ends_training_with_one_error_that_says_what_to_do(
    kind, name, way, fake, driver
):
    skip_without(kind)
    training = TRAININGS[kind, name]
    training(driver)
    before = fake.all_calls()
    expected, _ = counts_of_a_training(training, driver)
    count = fake.all_calls() - before
    tried = some_of(count, 8)
    for nth in tried:
        lose(nth, training, expected, fake, driver)
    print(f"lost at {len(tried)} of {count} calls")


def lose(nth, training, expected, fake, driver):
    gc.collect()
    fake.reset()
    driver.context = fake.create_context()
    before = dbuf.live_objects()
    what = f"lost at call {nth}"
    error, weights = None, None
    with unraisable_errors() as reported, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fake.lose_context(nth)
        try:
            weights = training(driver)
        except dbuf.CudaError as caught:
            error = caught.with_traceback(None)
            error.__context__ = None
        gc.collect()
        is_lost = fake.lost_calls() > 0
        fake.heal()
    assert workers() == [], what
    if error is not None:
        assert is_lost
        assert error.code == 700 and WHAT_TO_DO in str(error), (what, str(error))
        assert not isinstance(error, MemoryError)
    else:
        # Only what ends the training, and has nobody to tell, came to know it.
        assert np.array_equal(weights, expected), what
    assert len(reported) <= 1 and said == [], (what, reported, said)
    assert dbuf.live_objects() == before, what
    # Were it there again, nothing of ours would be in the way.
    fake.reset()
    driver.context = fake.create_context()
    assert np.array_equal(training(driver), expected), what
    gc.collect()
    assert dbuf.live_objects() == before, what


@pytest.mark.parametrize("code", LOST)
def test_each_code_after_which_no_call_works_says_what_to_do(code, fake):
    with dbuf.Stream() as stream:
        fake.fail("cuStreamSynchronize", code=code)
        with pytest.raises(dbuf.CudaError, match=WHAT_TO_DO) as caught:
            stream.synchronize()
        assert caught.value.code == code and caught.value.context_is_lost
        fake.fail("cuStreamSynchronize", code=709)
        with pytest.raises(dbuf.CudaError) as caught:
            stream.synchronize()
        assert WHAT_TO_DO not in str(caught.value)
        assert not caught.value.context_is_lost


def test_data_that_are_not_page_locked_for_that_reason_are_not_staged(fake, driver):
    fake.fail("cuMemHostRegister", code=700)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(dbuf.CudaError, match="cuMemHostRegister.*" + WHAT_TO_DO):
            TRAININGS["device", "held"](driver)


@pytest.mark.parametrize("entry", ["cublasCreate_v2", "cublasSgemm_v2"])
def test_cublas_does_not_know_of_it_but_its_error_does(entry, fake, kernels):
    handler = dbuf.CudaHandler(seed=1)
    a = handler.ones((3, 3))
    fake.fail(entry, code=13)
    fake.fail("cuStreamQuery", code=719)
    with pytest.raises(dbuf.CudaError, match=WHAT_TO_DO) as caught:
        handler.dot_mm(a, a, handler.zeros((3, 3)))
    error = caught.value
    assert (error.call, error.code) == (entry.removesuffix("_v2"), 719)
    assert "CUBLAS_STATUS_EXECUTION_FAILED" in str(error) and error.context_is_lost


SCRIPT = """
    import os, sys
    import brainstorm_dbuf as dbuf
    from types import SimpleNamespace
    from fake_cuda.control import FakeCuda
    from brainstorm_dbuf import access, feed, held_memory
    from faulty import TRAININGS

    kind, name, way, nth = sys.argv[1:]
    held_memory.REGION_MIN_BYTES = 0
    if way != "automatic":
        access.MOST_PUT_BYTES = 0
    if way == "worker":
        feed.WORTH_A_WORKER_SECONDS = -1.0
        feed.SLOW_IN_A_ROW = 1
    fake = FakeCuda(os.environ["BRAINSTORM_DBUF_LIBCUDA"])
    driver = SimpleNamespace(fake=fake, context=fake.create_context())
    fake.lose_context(int(nth))
    TRAININGS[kind, name](driver)
    print("trained")
"""


# Of the calls of a training, that come before the context is lost.
SHARES = [0.5] if IN_SUITE else list(np.linspace(0, 1, min(EXAMPLES // 25, 25)))
PROGRAMS = [
    ("device", "small", "worker"),
    ("device", "held", "ahead"),
    ("cuda", "lstm with a mask", "worker"),
    ("cuda", "mlp with dropout", "automatic"),
]


@pytest.mark.parametrize("kind, name, way", PROGRAMS)
@pytest.mark.parametrize("share", SHARES)
def test_a_program_whose_context_is_lost_ends_with_that_error(
    share, kind, name, way, fake, driver, request
):
    skip_without(kind)
    before = fake.all_calls()
    counts_of_a_training(TRAININGS[kind, name], driver)
    nth = int(share * (fake.all_calls() - before))
    done = subprocess.run(
        [
            sys.executable,
            "-X",
            "dev",
            "-W",
            "error",
            "-c",
            textwrap.dedent(SCRIPT),
            kind,
            name,
            way,
            str(nth),
        ],
        env={**os.environ, "PYTHONPATH": SUBPROCESS_PATH},
        capture_output=True,
        text=True,
        timeout=30,
    )
    what = f"lost at call {nth}: {done.stdout}{done.stderr}"
    if done.stdout == "trained\n":  # it came to nothing but the end
        assert done.returncode == 0 and share > 0.5, what
        return
    assert done.returncode == 1, what
    lines = done.stderr.splitlines()
    assert "CudaError: cu" in lines[-1] and WHAT_TO_DO in lines[-1], what
    # Something may have been freed before it was known.
    assert done.stderr.count("Exception ignored") <= 1, what
    assert "another exception" not in done.stderr, what
