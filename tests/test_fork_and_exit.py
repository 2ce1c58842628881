"""Whole programs with the feed's objects in them: how they end, fork and spawn."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from conftest import KIND, SUBPROCESS_PATH

pytestmark = pytest.mark.timeout(60)


PROLOGUE = """
    import gc, os, sys, threading, time, warnings
    sys.modules["pycuda"] = None  # its imports warn, and it has its own ways to end
    import numpy as np
    import brainstorm_dbuf as dbuf
    import brainstorm as bs
    from types import SimpleNamespace
    from brainstorm_dbuf import feed
    from coded import *
    from parity import make_handler

    kind = sys.argv[1]
    feed.WORTH_A_WORKER_SECONDS = -1.0
    feed.SLOW_IN_A_ROW = 1
    driver = fake = None
    if kind == "device":
        from fake_cuda.control import FakeCuda
        fake = FakeCuda(os.environ["BRAINSTORM_DBUF_LIBCUDA"])
        driver = SimpleNamespace(fake=fake, context=fake.create_context())
"""

# The feed's objects as globals of the program, each used once.
OBJECTS = """
    job = Job(kind, driver, depth=3)
    job.train(coded(4))
    handler = job.net.handler
    prefetch = dbuf.Prefetch(coded(4))
    for lent in prefetch(handler):
        pass
    half_way = dbuf.run_network(job.net, coded(9)())
    half_lent = dbuf.Prefetch(coded(9))(handler)
    for _ in range(2):
        next(half_way)
        last = next(half_lent)
    if kind != "numpy":
        context = dbuf.Context.current()
        stream, event = dbuf.Stream(), dbuf.Event()
        source = dbuf.pagelocked_zeros(1 << 16)
        memory = dbuf.mem_alloc(source.nbytes)
        dbuf.memcpy_htod_async(memory, source, stream)
        event.record(stream)
"""

ENDINGS = {
    "end": "",
    "loops dropped first": "del half_way, half_lent",
    "network dropped first": "del job, handler",
    "prefetch dropped first": "del prefetch, lent, last",
    "stream dropped first": "stream = event = None",
    "memory dropped first": "memory = source = None",
    "a reference cycle": """
        class Holder: pass
        holder = Holder()
        holder.everything = [dict(globals()), holder]
        for name in ("job", "handler", "prefetch", "lent", "last", "half_way",
                     "half_lent", "stream", "event", "source", "memory", "context"):
            globals().pop(name, None)
        del holder
    """,
    "kept by a module that goes last": "sys.kept = dict(globals())",
    "a copy still queued": """
        if fake:
            fake.hold(20)
        for _ in range(3):
            next(half_way)
        sys.exit(3)
    """,
    "an error in a step": """
        def fail(number):
            if number == 2:
                raise KeyError("mine")
        job.stepper.also = fail
        job.trainer.hooks.clear()
        job.seen.clear()
        try:
            job.train(coded(9))
        except KeyError as error:
            kept = error  # and with it the frames of the loop
    """,
    "a thread still trains": """
        def train_on():
            if fake:
                fake.push_context(driver.context)
            other = Job(kind, driver, epochs=10**9)
            other.train(coded(100))
        threading.Thread(target=train_on, daemon=True).start()
        time.sleep(0.2)
    """,
}
ON_DEVICE = {
    "context popped first": "del context; fake.pop_context()",
    "context destroyed first": """
        del half_way, half_lent
        fake.destroy_context(driver.context)
    """,
    "context destroyed under all of it": "fake.destroy_context(driver.context)",
}


def program(body, kind, status=0, timeout=30, objects=True):
    """Run a program under -X dev, warnings being errors; nothing may come on stderr."""
    parts = (PROLOGUE, OBJECTS if objects else "", body)
    done = subprocess.run(
        [
            sys.executable,
            "-X",
            "dev",
            "-W",
            "error",
            "-c",
            "\n".join(textwrap.dedent(part) for part in parts),
            kind,
        ],
        env={**os.environ, "PYTHONPATH": SUBPROCESS_PATH},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert (done.returncode, done.stderr) == (status, ""), done.stdout + done.stderr
    return done.stdout


# PyCUDA has its own ways to end and to fork; the binding's tests do both on a GPU.
KINDS = ["numpy", "device"] if KIND == "fake" else ["numpy"]
ENDINGS_BY_KIND = [("device", ending) for ending in ENDINGS if KIND == "fake"] + [
    ("numpy", "end"),
    ("numpy", "a reference cycle"),
    ("numpy", "an error in a step"),
    ("numpy", "a thread still trains"),
]


@pytest.mark.parametrize("kind, ending", ENDINGS_BY_KIND)
def test_a_program_ends_cleanly_whatever_goes_first(kind, ending, driver):
    program(ENDINGS[ending], kind, status=3 if "sys.exit(3)" in ENDINGS[ending] else 0)


@pytest.mark.parametrize("ending", ON_DEVICE)
def test_a_program_ends_cleanly_whatever_becomes_of_its_context(ending, fake):
    program(ON_DEVICE[ending], "device")


# --------------------------------------------------------------------------- fork (04)

FORK = """
    # Newer Pythons warn of a fork beside threads, which is what this is about.
    warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)

    def in_child():
        if kind != "numpy":
            try:
                dbuf.pagelocked_empty((4,))
            except dbuf.ForkError as error:
                assert "spawn" in str(error), error
            else:
                sys.exit("no error")

    def fork_at_2(number):
        if number == 2:
            assert len(workers()) == 1
            sys.stdout.flush()
            children.append((os.fork(), time.monotonic()))
            if children[-1][0] == 0:
                in_child()
                end_of_child()

    def end_of_child():
        raise SystemExit(0)  # through the trainer's loop and the feed

    def wait_for_children():
        for pid, started in children:
            while (done := os.waitpid(pid, os.WNOHANG)) == (0, 0):
                assert time.monotonic() - started < 10, "the child hangs"
                time.sleep(0.005)
            assert done[1] == 0, done
        assert fake is None or fake.child_calls() == 0, fake.child_calls()

    children = []
    job = Job(kind, driver, also=fork_at_2, epochs=2)
"""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "end",
    [
        "pass",
        """
        def end_of_child():
            global job
            job = None
            gc.collect()
            raise SystemExit(0)
        """,
        """
        def end_of_child():
            for name in list(globals()):
                if name not in ("gc", "sys"):
                    del globals()[name]
            gc.collect()
            sys.exit(0)
        """,
        """
        def end_of_child():
            try:
                raise KeyError("caught by nobody in the loop")
            finally:
                os._exit(0)
        """,
    ],
    ids=["through the loop", "net dropped", "all dropped", "at once"],
)
def test_a_child_forked_in_mid_epoch_leaves_the_driver_alone(kind, end, driver):
    program(
        textwrap.dedent(FORK)
        + textwrap.dedent(end)
        + textwrap.dedent("""
        job.train(coded(5))
        wait_for_children()
        assert job.seen == codes(0, 1, 2, 3, 4) * 2
        job.stepper.also = None
        job.train_again()
        """),
        kind,
        objects=False,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_an_iterator_may_fork_in_the_worker(kind, driver):
    """As multiprocessing's fork does, in a data iterator with processes of its own."""
    program(
        textwrap.dedent(FORK)
        + textwrap.dedent("""
        from multiprocessing import get_context

        def double(k, pipe):
            pipe.send(k)

        def multiprocess():
            for k in range(5):
                ours, theirs = get_context("fork").Pipe()
                process = get_context("fork").Process(target=double, args=(k, theirs))
                process.start()
                assert ours.poll(10), "the child hangs"
                value = ours.recv()
                process.join()
                assert process.exitcode == 0
                ours.close()
                theirs.close()
                yield batch(value)

        job = Job(kind, driver, epochs=2)
        job.train(From(multiprocess))
        assert job.seen == codes(0, 1, 2, 3, 4) * 2
        assert fake is None or fake.child_calls() == 0, fake.child_calls()
        """),
        kind,
        objects=False,
    )


SPAWN = """
import multiprocessing, os, sys
sys.argv.append("numpy") if len(sys.argv) < 2 else None
{prologue}

def train(number):
    job = Job(kind, driver).train(coded(number))
    return job.seen == codes(*range(number))

if __name__ == "__main__":
    def spawn_at_1(number):
        if number == 1:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                results.append(pool.map(train, [3]))
                pool.close()
                pool.join()

    results = []
    job = Job(kind, driver, also=spawn_at_1).train(coded(4))
    assert job.seen == codes(0, 1, 2, 3)
    assert results == [[True]], results
"""


@pytest.mark.parametrize("kind", KINDS)
def test_a_spawned_child_trains_with_a_driver_of_its_own(kind, driver, tmp_path):
    path = tmp_path / "spawning.py"  # a child imports its main module from a file
    path.write_text(SPAWN.format(prologue=textwrap.dedent(PROLOGUE)))
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", str(path), kind],
        env={**os.environ, "PYTHONPATH": SUBPROCESS_PATH},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
