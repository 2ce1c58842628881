"""What trainer and worker say to each other is right in whichever order it happens."""

from __future__ import annotations

import contextlib
import warnings
from collections import deque

import pytest

import brainstorm_dbuf as dbuf
from brainstorm_dbuf import back_buffers, feed, input_layer
from coded import batch, coded_net, the_value
from interleave import EXAMPLES, Deadlock, explore
from parity import force_worker, make_handler

pytestmark = pytest.mark.timeout(600 if EXAMPLES > 25 else 60)

COUNT = 4
# By hand more: BRAINSTORM_DBUF_TEST_EXAMPLES=100 for 3 of them, 1000 for 4.
PREEMPTIONS = 2 if EXAMPLES < 100 else 3 if EXAMPLES < 1000 else 4
DEPTHS = [1, 2, 3]


class Stop(Exception):
    """The iterator's own error, or the step's."""


class Play:
    """One run of a feed: what is fetched, trained and raised; and what must hold."""

    def __init__(self, scheduler, net, depth):
        self.scheduler, self.net, self.depth = scheduler, net, depth
        self.fetched = self.trained = 0
        self.is_closed = False
        self.feed = feed.Feed(net.handler, depth)

    def lends(self):
        self.feed.close()
        self.feed = feed.Feed(self.net.handler, self.depth, lends=True)

    def minibatches(self, count=COUNT, error=None, odd=None):
        """Yield coded minibatches in one pair of arrays that is used again."""
        arrays = batch(0)
        try:
            for k in range(count):
                self.scheduler.point(f"next {k}")
                arrays["default"][...], arrays["targets"][...] = k, k + 1000
                self.fetched += 1
                yield batch(k, samples=3, features=5) if k == odd else arrays
                arrays["default"].fill(-1)
            self.scheduler.point("no next")
            if error is not None:
                raise error
        finally:
            self.is_closed = True

    def train(self, minibatches, until=None, error=None, first=0):
        """Train; leave, or raise the error, in the step number ``until``."""
        loop = self.feed.run_network(self.net, minibatches)
        try:
            for number in loop:
                self.look(number + first)
                if number == until:
                    if error is not None:
                        raise error
                    break
        finally:
            loop.close()
        assert self.is_closed

    def look(self, number):
        for _ in range(2):
            inputs = [self.net.get_input(name) for name in ("default", "targets")]
            assert [the_value(a) for a in inputs] == [number, number + 1000]
            assert number == self.trained
            assert self.fetched <= self.trained + 1 + max(1, self.depth - 1)
            self.scheduler.point(f"step {number}")
        self.trained += 1

    def end(self, trained=COUNT):
        """Close the feed, with every slot back in its ring."""
        ring = self.feed.input_layer
        assert len(ring._free) == ring._slots <= self.depth + ring._lends
        self.feed.close()
        assert self.trained == trained
        assert not self.feed._open


def normal(play):
    play.train(play.minibatches())
    play.end()


def two_passes(play):
    play.train(play.minibatches(2))
    play.trained = play.fetched = 0
    play.train(play.minibatches(2))
    play.end(2)


def raise_in_next(play):
    with pytest.raises(Stop) as caught:
        play.train(play.minibatches(3, error := Stop()))
    assert caught.value is error
    play.end(3)


def leave_at(number):
    def leave(play):
        play.train(play.minibatches(), until=number)
        play.end(number + 1)

    leave.__name__ = f"leave_at_{number}"
    return leave


def raise_in_step(play):
    with pytest.raises(Stop):
        play.train(play.minibatches(), until=1, error=Stop())
    play.end(2)


def does_not_fit(play):
    """The worker may wait for the very slot whose hand-over fails."""
    with pytest.raises(ValueError, match="default"):
        play.train(play.minibatches(odd=2))
    play.end(2)


def leave_and_train_again(play):
    """A slot that the first pass has kept would be missing in the second."""
    play.train(play.minibatches(), until=1)
    play.trained = play.fetched = 0
    play.train(play.minibatches(3))
    play.end(3)


def close_the_feed(play):
    """As where an error holds the loop: the feed ends before the loop does."""
    loop = play.feed.run_network(play.net, play.minibatches())
    play.look(next(loop))
    play.look(next(loop))
    play.feed.close()
    assert play.is_closed and play.trained == 2
    loop.close()


def lend(play, count=3):
    """Also the first one, and others that lie in the iterator's own arrays."""
    play.lends()
    for number, data in enumerate(play.feed.lend(play.minibatches(count))):
        assert the_value(data["default"]) == number == play.trained
        play.scheduler.point(f"step {number}")
        assert the_value(data["targets"]) == number + 1000
        play.trained += 1
        del data
    play.end(count)


def leave_what_is_lent(play):
    play.lends()
    loop = play.feed.lend(play.minibatches())
    for number in range(2):
        data = next(loop)
        play.scheduler.point(f"step {number}")
        assert the_value(data["default"]) == number
        play.trained += 1
        del data
    loop.close()
    assert play.is_closed
    play.end(2)


def close_the_feed_that_has_lent(play):
    play.lends()
    with contextlib.closing(play.feed.lend(play.minibatches())) as loop:
        for number in range(2):
            assert the_value(next(loop)["default"]) == number
            play.scheduler.point(f"step {number}")
        play.feed.close()
        assert play.is_closed


def short_of_memory(act, *fills):
    """Minibatches then wait for their turn as the iterator gave them."""

    def run_short(play):
        made, fill = [], back_buffers.HostSlot.fill

        def short(slot, arrays, kind=None):
            made.append(slot)
            if len(made) in fills:
                raise MemoryError("planned")
            fill(slot, arrays, kind)

        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore", dbuf.FeedWarning)
            patch.setattr(back_buffers.HostSlot, "fill", short)
            act(play)

    run_short.__name__ = f"{act.__name__} short of memory {fills}"
    return run_short


def beside_a_monitor(play):
    """Another feed's pass, with a worker of its own, within a step of this one."""
    loop = play.feed.run_network(play.net, play.minibatches(3))
    for number in loop:
        play.look(number)
        if number == 1:
            with feed.Feed(play.net.handler, play.depth, lends=True) as other:
                seen = [
                    the_value(data["default"])
                    for data in other.lend(batch(k + 50) for k in range(3))
                ]
            assert seen == [50, 51, 52]
    play.end(3)


class Blocking:
    """Its third `next` returns once it is closed."""

    def __init__(self, scheduler):
        self.closed = scheduler.Event()
        self.count = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.count += 1
        if self.count > 2:
            self.closed.wait()
            raise StopIteration
        return batch(self.count - 1)

    def close(self):
        self.closed.set()


def blocked_in_next(play):
    source = Blocking(play.scheduler)
    loop = play.feed.run_network(play.net, source)
    for _ in range(2):
        the_value(play.net.get_input("default"))
        play.trained = next(loop) + 1
    loop.close()
    play.end(2)


def interrupted(play):
    with pytest.raises(KeyboardInterrupt):
        with play.feed:
            loop = play.feed.run_network(play.net, play.minibatches())
            for number in loop:
                play.look(number)
    assert play.trained <= COUNT and not play.feed._open


PLAYS = [
    normal,
    two_passes,
    raise_in_next,
    leave_at(0),
    leave_at(1),
    leave_at(2),
    raise_in_step,
    does_not_fit,
    leave_and_train_again,
    close_the_feed,
    lend,
    leave_what_is_lent,
    *(short_of_memory(normal, *fills) for fills in ((1,), (2,), (1, 2))),
    short_of_memory(leave_at(1), 1, 2),
    *(
        short_of_memory(close_the_feed_that_has_lent, *fills)
        for fills in ((), (1,), (2,))
    ),
    short_of_memory(lend, 1),
    short_of_memory(lend, 1, 2),
]


@pytest.fixture
def net(driver, monkeypatch, nothing_left):
    """A network whose feeds have a worker from the second minibatch on."""
    force_worker(monkeypatch)
    net = coded_net()
    net.set_handler(make_handler("numpy", driver))
    return net


def explored(net, monkeypatch, act, depth, preemptions=PREEMPTIONS, **how):
    def run(scheduler):
        for module in (feed, input_layer):
            monkeypatch.setattr(module, "threading", scheduler)
        act(Play(scheduler, net, depth))

    return explore(run, preemptions, **how)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("act", PLAYS, ids=lambda act: act.__name__)
def test_every_interleaving_gives_each_minibatch_once_and_ends(
    act, depth, net, monkeypatch, record_property
):
    count = explored(net, monkeypatch, act, depth)
    record_property("interleavings", count)
    print(f"{act.__name__}, depth {depth}: {count} interleavings")
    assert count > 10


def test_a_monitor_with_a_worker_of_its_own(net, monkeypatch):
    preemptions = PREEMPTIONS - 1
    count = explored(net, monkeypatch, beside_a_monitor, 2, preemptions)
    print(f"beside a monitor: {count} interleavings")
    assert count > 30


@pytest.mark.parametrize("depth", DEPTHS)
def test_an_iterator_that_blocks_until_it_is_closed(depth, net, monkeypatch):
    count = explored(net, monkeypatch, blocked_in_next, depth, timeouts="last")
    print(f"blocked in next, depth {depth}: {count} interleavings")
    assert count > 10


@pytest.mark.parametrize("depth", DEPTHS)
def test_after_an_interrupt_anywhere_the_worker_ends_by_itself(depth, net, monkeypatch):
    """Also where it is given up: its `next` then ends after the feed is closed."""
    total = 0
    for where in range(40):
        try:
            total += explored(
                net,
                monkeypatch,
                interrupted,
                depth,
                PREEMPTIONS - 1,
                timeouts="any",
                interrupt=where,
            )
        except pytest.fail.Exception:
            break  # there are no more points than that
    print(f"interrupted, depth {depth}: {total} interleavings at {where} points")
    assert where > 15 and total > 100


# ------------------------------------------------------------- the search can fail

# The worker waits for the one slot there is, which nobody gives back any more.
LENT = short_of_memory(close_the_feed_that_has_lent, 2)


@pytest.mark.parametrize(
    "silent, act",
    [
        ("_publish", normal),
        ("handed_over", normal),
        ("give_back", normal),
        ("_join", leave_at(1)),
        ("wake", LENT),
    ],
    ids=lambda what: what if isinstance(what, str) else what.__name__,
)
def test_each_notification_that_is_left_out_is_found_as_a_deadlock(
    silent, act, net, monkeypatch
):
    with pytest.raises(Deadlock, match="nobody can go on: .*trainer") as caught:
        for depth in DEPTHS:
            explored(net, monkeypatch, act, depth, silent=(silent,))
    assert "worker 1" in str(caught.value)
    del caught


def test_a_stop_that_is_told_before_it_holds_is_found(net, monkeypatch):
    """The worker looks, nobody wants to stop; it is woken; and only then it waits."""
    wake = input_layer.DoubleBufferedInput.wake
    join = feed.Pass._join

    def join_late(self, worker, interrupted):
        wake(self._feed.input_layer)
        monkeypatch.setattr(input_layer.DoubleBufferedInput, "wake", lambda self: None)
        try:
            return join(self, worker, interrupted)
        finally:
            monkeypatch.setattr(input_layer.DoubleBufferedInput, "wake", wake)

    monkeypatch.setattr(feed.Pass, "_join", join_late)
    with pytest.raises(Deadlock, match="worker 1 at wait in _claim"):
        for depth in DEPTHS:
            explored(net, monkeypatch, LENT, depth)


def test_a_worker_that_does_not_wait_for_what_stays_as_given_is_found(net, monkeypatch):
    monkeypatch.setattr(feed.Pass, "_wait_handed_over", lambda self: None)
    with pytest.raises(AssertionError):
        explored(net, monkeypatch, short_of_memory(normal, 1), 3)


def test_a_minibatch_that_overtakes_another_is_found(net, monkeypatch):
    class Stack(deque):
        popleft = deque.pop

    monkeypatch.setattr(feed, "deque", Stack)
    with pytest.raises(AssertionError):
        explored(net, monkeypatch, normal, 3)
