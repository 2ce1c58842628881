"""Every end of training: exhausted, stopped early, abandoned, interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

import brainstorm_dbuf as dbuf
import brainstorm as bs
from brainstorm.data_iterators import Flip, Minibatches
from brainstorm_dbuf import access, feed, minibatch
from coded import From, Job, batch, coded, codes, stop_at, workers
from conftest import KIND, SUBPROCESS_PATH
from parity import force_worker

pytestmark = [pytest.mark.timeout(10), pytest.mark.usefixtures("nothing_left")]


# ------------------------------------------------------ exhausted and empty (23)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_every_epoch_has_exactly_its_minibatches(count, depth, kind, driver, way):
    job = Job(kind, driver, epochs=3, depth=depth).train(coded(count))
    assert job.seen == codes(*range(count)) * 3
    assert job.stats.batches == 3 * count


@pytest.mark.parametrize("length", [None, 0, 1, 2, 5])
def test_the_length_an_iterator_claims_changes_nothing(length, kind, driver, way):
    iterator = From(lambda: (batch(k) for k in range(3)), length)
    assert Job(kind, driver, epochs=2).train(iterator).seen == codes(0, 1, 2) * 2


def test_an_empty_iterator_ends_as_in_brainstorm_with_a_clearer_message(
    kind, driver, way
):
    for double_buffering in (False, True):
        for make_pass in (lambda: iter(()), lambda: []):
            job = Job(kind, driver, double_buffering)
            with pytest.raises(AssertionError) as caught:
                job.train(From(make_pass))
            assert job.seen == []
    assert "yielded no minibatch" in str(caught.value)
    assert job.stats.workers == 0
    del caught
    job.train_again()


def test_an_epoch_that_is_empty_after_a_full_one_says_so(kind, driver, way):
    passes = iter([2, 0])
    job = Job(kind, driver, epochs=2)
    with pytest.raises(AssertionError, match="yielded no minibatch"):
        job.train(From(lambda: (batch(k) for k in range(next(passes)))))
    assert job.seen == codes(0, 1)
    job.train_again()


def finished_loops(job, count):
    """Return iterators over a pass that has come to its end."""
    prefetched = dbuf.Prefetch(coded(count))(job.net.handler)
    loop = dbuf.run_network(job.net, coded(count)())
    arrays = [job.net.handler.get_numpy_copy(d["default"]) for d in prefetched]
    assert [array.flat[0] for array in arrays] == list(range(count))
    assert list(loop) == list(range(count))
    return [prefetched, loop]


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_a_finished_pass_stays_finished(count, kind, driver, way):
    job = Job(kind, driver)
    for finished in finished_loops(job, count):
        for _ in range(3):
            with pytest.raises(StopIteration):
                next(finished)
    assert workers() == []


def test_a_finished_pass_of_the_feed_stays_finished(kind, driver, way):
    job = Job(kind, driver)
    with feed.Feed(job.net.handler) as the_feed:
        with feed.Pass(the_feed, coded(3)(), frozenset(["default", "targets"])) as one:
            for item in one:
                the_feed.input_layer.hand_over(item, job.net)
                one.handed_over()
            for _ in range(3):
                with pytest.raises(StopIteration):
                    next(one)
        assert workers() == []


def test_a_generator_that_raises_stop_iteration_is_a_runtime_error(kind, driver, way):
    def make_pass():
        yield batch(0)
        yield batch(1)
        raise StopIteration

    for double_buffering in (False, True):
        job = Job(kind, driver, double_buffering)
        with pytest.raises(RuntimeError, match="generator raised StopIteration"):
            job.train(From(make_pass))
        assert job.seen == codes(0, 1)
    job.train_again()


def test_a_lists_iterator_and_a_generator_are_passes_alike(kind, driver, way):
    for make_pass in (
        lambda: [batch(k) for k in range(4)],
        lambda: tuple(batch(k) for k in range(4)),
        lambda: map(batch, range(4)),
    ):
        assert Job(kind, driver).train(From(make_pass)).seen == codes(0, 1, 2, 3)


# -------------------------------------------------------------- stopping early (24)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_error_at_the_hand_over_waits_for_no_back_buffer(
    depth, kind, driver, way, monkeypatch
):
    """The worker may be a minibatch ahead by then, and have no slot for it."""
    fetched = []

    def make_pass():
        for k in range(10):
            fetched.append(k)
            time.sleep(0.02 * (k > 0))  # the trainer waits for it
            yield batch(k, features=2 if k == 2 else 3)

    def check_shapes(*args):
        time.sleep(0.1 * (len(fetched) > 2))  # the worker comes to wait for a slot
        check(*args)

    check = minibatch.check_shapes
    monkeypatch.setattr(minibatch, "check_shapes", check_shapes)
    net = Job(kind, driver).net
    with feed.Feed(net.handler, depth) as the_feed:
        started = time.perf_counter()
        with pytest.raises(ValueError, match="default"):
            list(the_feed.run_network(net, make_pass()))
        assert time.perf_counter() - started < 0.9
        assert list(the_feed.run_network(net, coded(5)())) == list(range(5))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_passes_that_are_left_take_no_back_buffer_along(depth, kind, driver, way):
    net = Job(kind, driver).net
    with feed.Feed(net.handler, depth) as the_feed:
        for _ in range(2 * depth + 1):
            one = the_feed.run_network(net, coded(10)())
            next(one)
            time.sleep(0.02)  # the next ones are prepared
            started = time.perf_counter()
            one.close()
            assert time.perf_counter() - started < 0.9
        assert list(the_feed.run_network(net, coded(5)())) == list(range(5))


class Counted:
    """A pass that counts what was fetched and in which state it ended."""

    def __init__(self, count=10, seconds=0.0):
        self.fetched = 0
        self.closed = 0
        self.count = count
        self.seconds = seconds

    def __call__(self):
        try:
            for k in range(self.count):
                self.fetched += 1
                if k and self.seconds:
                    time.sleep(self.seconds)
                yield batch(k)
        finally:
            self.closed += 1


def wait_until(happened):
    """Wait until it has happened, then a moment for what must not happen."""
    deadline = time.monotonic() + 5
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.01)


@pytest.mark.parametrize("depth, ahead", [(1, 1), (2, 1), (3, 2), (5, 4)])
def test_a_stopped_training_has_fetched_at_most_depth_minus_one_more(
    depth, ahead, kind, driver, way
):
    made = Counted()
    job = Job(kind, driver, depth=depth, hooks=[stop_at(2)])
    # The worker gets all the time it wants before the stop, and some more.
    job.stepper.also = lambda step: wait_until(
        lambda: way != "worker" or made.fetched >= step + 1 + ahead
    )
    job.train(From(made))
    assert job.seen == codes(0, 1)
    assert workers() == []
    assert 2 <= made.fetched <= 2 + ahead
    if way == "worker":
        assert made.fetched == 2 + ahead
    assert made.closed == 1
    job.train_again()


def test_stopping_waits_for_the_next_that_is_running(driver, monkeypatch):
    force_worker(monkeypatch)
    made = Counted(seconds=3.0)
    job = Job("numpy", driver, hooks=[stop_at(1)])
    job.stepper.also = lambda step: time.sleep(0.05)
    started = time.monotonic()
    job.train(From(made))
    assert 2.5 < time.monotonic() - started < 6.0
    assert job.seen == codes(0)
    assert workers() == []
    assert made.closed == 1
    assert made.fetched == 2


def test_an_interrupt_ahead_of_a_step_that_stops_training_is_not_lost(
    kind, driver, monkeypatch
):
    """On a device the trainer's thread is in `next` for k + 1 before the step on k."""
    monkeypatch.setattr(access, "MOST_PUT_BYTES", 0)

    def make_pass():
        yield batch(0)
        raise KeyboardInterrupt

    job = Job(kind, driver, hooks=[stop_at(1)])
    if kind == "numpy":
        assert job.train(From(make_pass)).seen == codes(0)
    else:
        with pytest.raises(KeyboardInterrupt):
            job.train(From(make_pass))
        assert job.seen == []
    job.train_again()


class Blocking:
    """Its `next` blocks after the first minibatch until its own `close` is called."""

    def __init__(self, obeys=True):
        self.is_closed = threading.Event()
        self.release = threading.Event()
        self.obeys = obeys
        self.first = True

    def __iter__(self):
        return self

    def __next__(self):
        if self.first:
            self.first = False
            return batch(0)
        self.release.wait(20)
        raise StopIteration

    def close(self):
        self.is_closed.set()
        if self.obeys:
            self.release.set()


def test_an_iterator_that_blocks_until_it_is_closed_is_closed(
    kind, driver, monkeypatch
):
    force_worker(monkeypatch)
    monkeypatch.setattr(feed, "UNBLOCK_AFTER_SECONDS", 0.1)
    blocking = Blocking()
    job = Job(kind, driver, hooks=[stop_at(1)])
    job.train(From(lambda: blocking))
    assert blocking.is_closed.is_set()
    assert job.seen == codes(0)
    assert workers() == []
    job.train_again()


def test_an_iterator_that_never_returns_is_given_up_with_a_warning(
    kind, driver, monkeypatch
):
    force_worker(monkeypatch)
    monkeypatch.setattr(feed, "UNBLOCK_AFTER_SECONDS", 0.1)
    monkeypatch.setattr(feed, "GIVE_UP_AFTER_SECONDS", 0.3)
    blocking = Blocking(obeys=False)
    job = Job(kind, driver, hooks=[stop_at(1)])
    with pytest.warns(dbuf.FeedWarning, match=r"still inside next\(\) 0.3 s"):
        job.train(From(lambda: blocking))
    assert job.seen == codes(0)
    (left,) = workers()
    assert left.daemon
    job.train_again()
    # Its thread ends when the call returns, and keeps nothing.
    blocking.release.set()
    left.join(5)
    assert workers() == []


def test_a_broken_loop_ends_its_worker(kind, driver, way):
    made = Counted()
    job = Job(kind, driver)
    for number in dbuf.run_network(job.net, From(made)()):
        if number == 2:
            break
    assert job.stepper is not None and workers() == []
    assert made.closed == 1
    assert made.fetched <= 4

    made = Counted()
    for number, _ in enumerate(dbuf.Prefetch(From(made))(job.net.handler)):
        if number == 2:
            break
    del _
    assert workers() == []
    assert made.closed == 1
    assert made.fetched <= 4


def test_dropping_a_half_used_loop_ends_its_worker(kind, driver, way):
    job = Job(kind, driver)
    made = Counted()
    prefetched = dbuf.Prefetch(From(made))(job.net.handler)
    for _ in range(3):
        next(prefetched)
    del prefetched
    assert workers() == []
    assert made.closed == 1

    made = Counted()
    loop = dbuf.run_network(job.net, From(made)())
    for _ in range(3):
        next(loop)
    del loop
    assert workers() == []
    assert made.closed == 1


def test_a_generator_is_closed_also_where_the_user_holds_it(kind, driver, way):
    made = Counted()
    generator = made()
    job = Job(kind, driver, hooks=[stop_at(2)])
    job.train(From(lambda: generator))
    assert job.seen == codes(0, 1)
    assert made.closed == 1


def test_a_loop_dropped_before_it_began_has_called_nothing(kind, driver, way):
    made = Counted()
    job = Job(kind, driver)
    dbuf.run_network(job.net, From(made)())
    dbuf.Prefetch(From(made))(job.net.handler)
    assert made.fetched == made.closed == 0
    assert workers() == []


def test_a_generator_is_closed_after_a_minibatch_that_was_no_good(kind, driver, way):
    closed = []

    def make_pass():
        try:
            yield batch(0)
            yield {"default": "abc"}
        finally:
            closed.append(True)

    with pytest.raises(TypeError):
        Job(kind, driver).train(From(make_pass))
    assert closed == [True]


def test_flip_has_flipped_at_most_one_image_more_than_was_trained(kind, driver, way):
    """Flip changes the user's own array."""
    images = np.arange(10 * 2 * 2.0).reshape(1, 10, 1, 2, 2)
    before = images.copy()
    data = {"default": images, "targets": np.zeros((1, 10, 1))}
    iterator = Flip(Minibatches(1, shuffle=False, **data), {"default": 1.0})

    def net():
        return bs.tools.create_net_from_spec("classification", (1, 2, 2), 2, "F3")

    job = Job(kind, driver, hooks=[stop_at(1)], net=net)
    job.stepper.look = lambda: None
    job.stepper.also = lambda step: wait_until(
        lambda: way != "worker" or not np.array_equal(images[:, 1], before[:, 1])
    )
    job.train(iterator)
    del job.stepper.look
    flipped = [not np.array_equal(images[:, i], before[:, i]) for i in range(10)]
    assert flipped in ([True] + [False] * 9, [True, True] + [False] * 8)
    if way == "worker":
        assert flipped.count(True) == 2


def test_no_thread_can_be_started(kind, driver, monkeypatch):
    force_worker(monkeypatch)

    def start(self):
        raise RuntimeError("can't start new thread")

    job = Job(kind, driver, epochs=2)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.warns(dbuf.FeedWarning, match="can't start new thread") as warned:
            job.train(coded(4))
    assert len(warned) == 1
    assert job.seen == codes(0, 1, 2, 3) * 2
    assert job.stats.prefetched == job.stats.workers == 0
    job.train_again()


# ---------------------------------------------------------- counting threads (40)


def count_starts(monkeypatch):
    started = []
    start = threading.Thread.start

    def counting(self):
        started.append(self)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", counting)
    return started


def test_a_worker_is_started_at_most_once_an_epoch(kind, driver, monkeypatch):
    force_worker(monkeypatch)
    started = count_starts(monkeypatch)
    job = Job(kind, driver, epochs=3).train(coded(50))
    assert len(started) == 3 == job.stats.workers
    assert job.seen == codes(*range(50)) * 3


def test_small_minibatches_start_hardly_a_thread(driver, monkeypatch):
    """5,000 minibatches (1, 1, 4): the shim itself sees that a worker costs more."""
    started = count_starts(monkeypatch)
    data = np.zeros((1, 5000, 4), np.float32)
    targets = np.zeros((1, 5000, 1), np.float32)
    net = bs.tools.create_net_from_spec("classification", (4,), 2, "F2")
    iterator = Minibatches(1, default=data, targets=targets)
    for _ in range(3):
        numbers = list(dbuf.run_network(net, iterator()))
        assert numbers == list(range(5000))
    assert len(started) <= 3


def test_slow_minibatches_get_a_worker_by_themselves(kind, driver, monkeypatch):
    started = count_starts(monkeypatch)

    def make_pass():
        for k in range(30):
            time.sleep(0.005)
            yield batch(k)

    job = Job(kind, driver, epochs=2).train(From(make_pass))
    assert job.seen == codes(*range(30)) * 2
    assert len(started) == job.stats.workers == 2
    assert job.stats.prefetched >= 2 * 10


# ------------------------------------------------------------------- signals (26)


PROLOGUE = """
    import os, signal, sys, threading, time
    import numpy as np
    import brainstorm_dbuf as dbuf
    import brainstorm as bs
    from types import SimpleNamespace
    from fake_cuda.control import FakeCuda
    from brainstorm_dbuf import feed
    from coded import *

    # What a shell starts in the background ignores Ctrl-C, and hands that down.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    kind, way = sys.argv[1:]
    if way == "worker":
        feed.WORTH_A_WORKER_SECONDS = -1.0
        feed.SLOW_IN_A_ROW = 1
    driver = None
    if kind == "device":
        fake = FakeCuda(os.environ["BRAINSTORM_DBUF_LIBCUDA"])
        driver = SimpleNamespace(fake=fake, context=fake.create_context())

    sent = []

    def interrupt(after, number=signal.SIGINT, times=1, gap=0.02):
        def send():
            time.sleep(after)
            for _ in range(times):
                sent.append(time.monotonic())
                os.kill(os.getpid(), number)
                time.sleep(gap)
        thread = threading.Thread(target=send, name="sender", daemon=True)
        thread.start()
        return thread

    def slow_pass(seconds, at=1, and_interrupt=True):
        for k in range(4):
            if k == at:
                if and_interrupt:
                    interrupt(0.1)
                time.sleep(seconds)
            yield batch(k)

    def slow_step(number):
        if number == 2:
            interrupt(0.1)
            time.sleep(2.0)

    def check_interrupted(job, iterator):
        interrupts = 0
        try:
            job.train(iterator)
        except KeyboardInterrupt:
            interrupts += 1
            assert time.monotonic() - sent.pop() < 1.0
        assert interrupts == 1
        time.sleep(0.05)
        job.net.save_as_hdf5(os.path.join(os.environ["FOLDER"], "net.hdf5"))
        job.train_again()
        print("trained again", flush=True)
"""


def script(body, tmp_path, kind, way, status=0, timeout=30):
    """Run a script after the PROLOGUE; return its output. stderr must be empty."""
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            "-c",
            textwrap.dedent(PROLOGUE) + textwrap.dedent(body),
            kind,
            way,
        ],
        env={
            **os.environ,
            "PYTHONPATH": SUBPROCESS_PATH,
            "FOLDER": str(tmp_path),
        },
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == status, done.stdout + done.stderr
    if status == 0:
        assert done.stderr == ""
    return done.stdout, done.stderr


WAYS = [("numpy", "automatic"), ("numpy", "worker"), ("device", "worker")]
WAYS = WAYS if KIND == "fake" else WAYS[:2]
by_signal = pytest.mark.parametrize("kind, way", WAYS)


@pytest.mark.timeout(30)
@by_signal
def test_ctrl_c_reaches_the_trainer_at_once(tmp_path, kind, way):
    """Also when the worker is in a `next`, and stays there when the program ends."""
    out, _ = script(
        """
        job = Job(kind, driver, also=slow_step)
        check_interrupted(job, coded(5))
        assert job.seen == codes(0, 1, 2)
        assert workers() == []
        if kind == "device":
            def step(number):
                if number == 2:
                    fake.hold(300)
                slow_step(number)

            job = Job(kind, driver, also=step)
            check_interrupted(job, coded(5))
            fake.hold(0)
            assert workers() == []
        job = Job(kind, driver)
        check_interrupted(job, From(lambda: slow_pass(5.0)))
        """,
        tmp_path,
        kind,
        way,
    )
    assert out.count("trained again") == (3 if kind == "device" else 2)
    assert (tmp_path / "net.hdf5").exists()


@pytest.mark.timeout(30)
@by_signal
def test_ctrl_c_twice_in_a_moment(tmp_path, kind, way):
    """The second one may come anywhere, in the clean-up of the first too."""
    script(
        """
        for gap in (0.0, 0.0003, 0.001, 0.004, 0.04):
            sent.clear()
            job = Job(kind, driver)
            sender = interrupt(0.1, times=2, gap=gap)
            interrupts = 0
            try:
                try:
                    job.train(From(lambda: slow_pass(0.4, and_interrupt=False)))
                except KeyboardInterrupt:
                    interrupts += 1
                    assert time.monotonic() - sent[0] < 1.0
                    sender.join()
                    time.sleep(0.01)
            except KeyboardInterrupt:
                interrupts += 1
            assert interrupts, "the interrupt was lost"
            sender.join()
            time.sleep(0.01)
            job.train_again()
        """,
        tmp_path,
        kind,
        way,
    )


@pytest.mark.timeout(30)
@by_signal
def test_ctrl_c_that_nobody_catches_ends_the_program(tmp_path, kind, way):
    _, err = script(
        """
        job = Job(kind, driver)
        job.train(From(lambda: slow_pass(5.0)))
        """,
        tmp_path,
        kind,
        way,
        status=-signal.SIGINT,
    )
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert "Fatal" not in err and "Exception ignored" not in err


@pytest.mark.timeout(30)
@by_signal
def test_sigquit_stops_after_the_step_and_the_program_goes_on(tmp_path, kind, way):
    out, _ = script(
        """
        def quit_at_1(number):
            if number == 1:
                os.kill(os.getpid(), signal.SIGQUIT)

        job = Job(kind, driver, also=quit_at_1)
        job.trainer.add_hook(bs.hooks.StopOnSigQuit(timescale="update"))
        job.train(coded(10))
        assert job.seen == codes(0, 1), job.seen
        assert workers() == []
        job.train_again()
        print("went on")
        """,
        tmp_path,
        kind,
        way,
    )
    assert "went on" in out


@pytest.mark.timeout(30)
@by_signal
@pytest.mark.parametrize("ending, status", [("pass", 0), ("sys.exit(3)", 3)])
def test_the_program_may_end_in_the_middle_of_a_pass(
    ending, status, tmp_path, kind, way
):
    out, err = script(
        f"""
        job = Job(kind, driver)
        loop = dbuf.run_network(job.net, slow_pass(0.5, at=3, and_interrupt=False))
        other = dbuf.Prefetch(coded(9))(job.net.handler)
        for _ in range(3):
            next(loop)
            next(other)
        print("half way", flush=True)
        {ending}
        """,
        tmp_path,
        kind,
        way,
        status=status,
    )
    assert out == "half way\n"
    assert err == ""
