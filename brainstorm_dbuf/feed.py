"""The data path: next, stage, copy, hand over, step, give back.

    your iterator --next()--> stage + copy ------> hand over ----> step
    (worker thread)           into a back buffer   to the network  (trainer's thread)

:class:`Feed` owns the back buffers for the whole of a training. :class:`Pass` is one
pass over an iterator (an epoch): a worker thread runs one minibatch ahead of the one in
the network, so it calls ``next`` for minibatch k + 1 once minibatch k has been handed
over, or is about to be since the trainer waits for it, while the network trains on k.
(With ``depth`` back buffers it runs at most ``depth - 1`` ahead, with one buffer one.)

A worker costs a hand-off between threads for each minibatch. Where preparing one takes
less of the host's time, the trainer's thread prepares it itself: for a device it queues
the copy of minibatch k + 1 before it starts step k, so the copy runs during the step all
the same. Of data that lie still in memory it queues as many as there are back buffers,
since nobody can tell how far ``next`` has gone: the link has work also where a step is
late. On the host, and for the smallest minibatches everywhere, there is nothing to gain,
and they go straight into the network. Each pass starts that way, and starts its worker
once its minibatches, with those of the passes before, have shown that it pays. Small
minibatches so cost what they cost in brainstorm's own loop.

Threads. The trainer's thread alone touches the network. The worker owns the iterator
from its start to its end, holds no lock while it runs the user's code, and passes on
whatever happens, an error too, in the order of the minibatches.
"""

from __future__ import annotations

import contextvars
import gc
import inspect
import os
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from . import _cuda, held_memory, one_hot, switching
from .access import access_for
from .copy_clock import CopyClock, link_rate
from .held_memory import HeldMemory
from .input_layer import Batch, DoubleBufferedInput
from .stats import FeedStats, FeedWarning
from .timings import BatchTimes

# A worker is worth its hand-off (20 microseconds, several times that where the trainer's
# own Python code holds the interpreter) when a minibatch takes longer to prepare. Some in
# a row must show it, since one may be slow by accident; very slow ones count fourfold.
# Each pass wants to see it again, in two minibatches or in one that is very slow: beside
# a worker the clock also counts the time that the worker waits for the interpreter.
WORTH_A_WORKER_SECONDS = 300e-6
SLOW_IN_A_ROW = 8
SEEN_BEFORE = 6
VERY_SLOW = 20

# How long the end of training waits for a `next` that is still running.
UNBLOCK_AFTER_SECONDS = 1.0
GIVE_UP_AFTER_SECONDS = 10.0
# After Ctrl-C the user waits.
GIVE_UP_AFTER_INTERRUPT_SECONDS = 0.2


class Feed:
    """Back buffers and the passes that fill them. A context manager.

    Args:
        handler: the handler of the network that is fed.
        depth: number of back buffers, at least 1.
        lends: the minibatches are lent as arrays (see :meth:`lend`) instead of handed
            over, so one more back buffer is needed: the one that is lent.
        stats: counts to go on with, timed if they have ``timings``; new ones, not timed,
            if None.
        page_lock_limit: the largest share of the machine's memory that data of the
            iterators may be page-locked in, where they lie.

    Attributes:
        works: whether this kind of handler can be double-buffered; where it cannot, a
            warning has said so and the feed takes brainstorm's own path.
        stats: what was done.

    Raises:
        ValueError, TypeError: ``depth`` is not a positive integer.
    """

    # Another one, as the passes are, where a profiler listens (nvtx_ranges).
    input_class: type[DoubleBufferedInput] = DoubleBufferedInput

    def __init__(
        self,
        handler: Any,
        depth: int = 2,
        lends: bool = False,
        stats: FeedStats | None = None,
        page_lock_limit: float = held_memory.DEFAULT_LIMIT,
    ) -> None:
        self.ahead = max(1, check_depth(depth) - 1)
        self.stats = FeedStats() if stats is None else stats
        self.timings = self.stats.timings
        self._access = access_for(handler)
        self.handler = handler
        self.works = self._access is not None
        self._slow_in_a_row = 0
        self._has_had_worker = False
        self._open: set[Pass] = set()
        self._pid = os.getpid()
        if self._access is None:
            self.stats.note_fallback(
                f"{type(handler).__name__} is not a handler that can be "
                "double-buffered: minibatches take brainstorm's own path"
            )
            return
        if self.timings is not None and self._access.queues_copies:
            self._access.copy_clock = CopyClock(
                self._access.context, self._access.copy_stream
            )
        self._held = (
            HeldMemory(
                self._access.context,
                self._access.copy_stream,
                page_lock_limit,
                self.stats,
            )
            if self._access.queues_copies and page_lock_limit > 0
            else None
        )
        self.input_layer = self.input_class(
            handler, self._access, depth + lends, self.stats, self._held, lends
        )

    def __enter__(self) -> Feed:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: object,
    ) -> None:
        try:
            self.close(_is_interrupt(exc_type))
        except _cuda.CudaError as another:
            if not _says_as_much(error, another):
                raise

    def close(self, interrupted: bool = False) -> None:
        """End all passes, give the back buffers and streams back. Twice is harmless.

        A pass may still be open: an error in the step leaves the generator that runs
        it suspended for as long as somebody holds the traceback.
        """
        access, self._access = self._access, None
        # A forked child has neither the worker nor the driver: it leaves them alone.
        if access is None or os.getpid() != self._pid:
            return
        for open_pass in list(self._open):
            open_pass.close(interrupted)
        self.input_layer.close()
        if self._held is not None:
            # Also after an interrupt: no copy may read memory that is being let go.
            self.input_layer.wait_put()
            self._held.close()
        try:
            if access.queues_copies and self.timings is not None and not interrupted:
                self.timings.link_bytes_per_second = link_rate(
                    access.context, access.copy_stream
                )
        finally:
            access.close()

    def minibatches(
        self, source: Any, iterator: Iterable[Any] | None = None
    ) -> Iterable[Any]:
        """Return the minibatches of a data iterator as this feed takes them best.

        Args:
            source: the data iterator.
            iterator: what calling it has returned, if it was called.
        """
        if self._held is not None:
            self._held.hold(source)
        if self._access.unpacks and one_hot.can_stay_indices(source):
            return one_hot.unexpanded(source, self.handler)
        return source(self.handler) if iterator is None else iterator

    def running(self) -> AbstractContextManager[Any]:
        """Return the context in which the handler's steps run during a pass."""
        return self._access.running()

    def new_pass(
        self, iterator: Iterable[Any], names: frozenset[str] | None = None
    ) -> Pass:
        return Pass(self, iterator, names)

    def begin_pass(self, new_pass: Pass) -> None:
        self._open.add(new_pass)
        self._slow_in_a_row = min(self._slow_in_a_row, SEEN_BEFORE)

    def before_worker(self) -> None:
        """Leave a worker no garbage that must not be dropped on its thread.

        Networks are cycles: an earlier one goes when Python collects them, on whichever
        thread that happens.
        """
        if not self._has_had_worker and not self._access.frees_on_any_thread:
            gc.collect()
        self._has_had_worker = True

    @property
    def context(self) -> AbstractContextManager[Any]:
        """The CUDA context that the worker makes current while it runs; or nothing."""
        return self._access.context

    @property
    def pays(self) -> bool:
        """Whether a worker thread is worth its hand-offs."""
        return self._slow_in_a_row >= SLOW_IN_A_ROW

    def note_preparation(
        self, batch: Batch, fetching: float, staging: float, is_first: bool
    ) -> None:
        """Learn from how long the preparation of one minibatch took.

        The first of a pass counts for its staging only, and says nothing against a
        worker: fetching it includes what the iterator does once, such as shuffling.
        """
        # Arrays that lie on the device already leave nothing to prefetch.
        seconds = 0.0 if batch.kind.on_device else staging + fetching * (not is_first)
        if seconds > WORTH_A_WORKER_SECONDS or not is_first:
            self.note_seconds(seconds)

    def note_seconds(self, seconds: float) -> None:
        """Learn from how many seconds of the host one minibatch took."""
        if seconds > WORTH_A_WORKER_SECONDS * VERY_SLOW:
            self._slow_in_a_row += 4
        elif seconds > WORTH_A_WORKER_SECONDS:
            self._slow_in_a_row += 1
        else:
            self._slow_in_a_row = 0

    def run_network(
        self, net: Any, iterator: Iterable[Any], all_inputs: bool = True
    ) -> Iterator[int]:
        """Feed ``net`` one minibatch after another; yield the number of each.

        The step is what the caller does between two values. Has brainstorm's signature
        and meaning (``brainstorm.training.utils.run_network``).
        """
        if net.handler is not self.handler or not self.works:
            for number, data in enumerate(iterator):
                net.provide_external_data(data, all_inputs=all_inputs)
                yield number
            return
        timings = self.timings
        names = frozenset(net.layers["Input"].out_shapes)
        with self.new_pass(iterator, names) as batches:
            number = 0
            for batch in batches:  # next, stage, copy
                self.input_layer.hand_over(batch, net, all_inputs)
                batches.handed_over()  # the slot is free: next may run for k + 1
                if timings is not None:
                    timings.begin_step()
                yield number  # the step
                if timings is not None:
                    timings.end_step()
                number += 1
                for _ in batches.straight_into(net):  # small ones
                    yield number
                    number += 1

    def lend(self, iterator: Iterable[Any]) -> Iterator[dict[str, Any]]:
        """Yield each minibatch as a dict of the handler's own arrays."""
        timings = self.timings
        with self.new_pass(iterator) as batches:
            for batch in batches:
                lent = self.input_layer.lend(batch)
                # Arrays that are lent as they were given are the iterator's to use
                # again once `next` is called.
                stays_as_given = batch.slot is None
                if not stays_as_given:
                    batches.handed_over()
                if timings is not None:
                    timings.begin_step()
                try:
                    yield lent
                    if timings is not None:
                        timings.end_step()
                finally:
                    # The worker may wait for this slot, also when the pass ends here.
                    del lent
                    self.input_layer.take_back(batch)
                if stays_as_given:
                    batches.handed_over()


class Pass:
    """One pass over an iterator: an iterator of :class:`Batch`, and a context manager.

    After each minibatch the consumer calls :meth:`handed_over`; leaving the context
    ends the pass wherever it is.
    """

    def __init__(
        self,
        feed: Feed,
        iterator: Iterable[Any],
        names: frozenset[str] | None = None,
    ) -> None:
        self._feed = feed
        self._names = names
        self._source: Iterator[Any] = iter(iterator)
        self._fetch = self._source.__next__
        # The slot into which the last minibatch may still be on its way, straight from
        # the iterator's own arrays; used by the thread that calls `next`.
        self._in_flight: Any = None
        # The last slot that was copied to straight from where the data lie.
        self._last_direct: Any = None
        self._is_first = True
        # A minibatch that was fetched already, and how many seconds that took.
        self._given: tuple[Any, float] | None = None
        # How many copies the trainer's thread may queue ahead of the step: of minibatches
        # like the last one, if that went through a back buffer.
        self._queues_ahead = 0
        self._worker: threading.Thread | None = None
        self._pid = os.getpid()
        self._ended = False
        # Guarded by the condition: minibatches the worker may still fetch, those that
        # are ready, whether the pass is over, whether the trainer waits for one, and
        # whether the permit for its hand-over has been given already.
        self._changed = threading.Condition()
        self._permits = 0
        self._ready: deque[Batch | _End] = deque()
        self._stopped = False
        self._is_awaited = False
        self._is_permitted = False
        # Set when the worker has let go of the iterator.
        self._left = threading.Event()
        self._context = feed.context
        self._running = feed.running()

    def __enter__(self) -> Pass:
        self._running.__enter__()
        self._feed.begin_pass(self)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: object,
    ) -> None:
        try:
            self.close(_is_interrupt(exc_type))
        except _cuda.CudaError as another:
            if not _says_as_much(error, another):
                raise

    # ---------------------------- the trainer's thread ---------------------------- #

    def __iter__(self) -> Pass:
        return self

    def __next__(self) -> Batch:
        timings = self._feed.timings
        if timings is None:
            return self._take()
        started = time.perf_counter()
        batch = self._take()
        timings.begin_update(batch.times, started, time.perf_counter())
        return batch

    def _take(self) -> Batch:
        if self._ended:
            raise StopIteration
        if self._worker is None and not self._ready:
            return self._prepare_here()
        with self._changed:
            while not self._ready:
                self._is_awaited = True
                self._changed.wait()
            self._is_awaited = False
            item = self._ready.popleft()
        if isinstance(item, Batch):
            self._feed.stats.batches += 1
            self._feed.stats.prefetched += 1
            return item
        self._ended = True
        if item.error is None:
            raise StopIteration
        try:
            raise item.error
        finally:
            # The error's traceback refers to this frame: no cycle is left behind.
            del item

    def handed_over(self) -> None:
        """The last minibatch is with the network: the next one may be fetched."""
        if self._worker is not None:
            with self._changed:
                self._permits += not self._is_permitted
                self._is_permitted = False
                self._changed.notify_all()
        elif self._feed.pays:
            # It begins where everything that was fetched has been handed over.
            if not self._ready:
                self._start_worker()
        elif self._queues_ahead and not self._feed.input_layer.puts():
            while len(self._ready) < self._queues_ahead:
                self._prepare_ahead()

    def straight_into(self, net: Any) -> Iterator[None]:
        """Put minibatches that are as the last one into the network, one a value.

        Ends with the first that is different, which comes next then, and where a worker
        pays. An update of a small network takes less time than Python's way through the
        back buffers and back, were it not for this.
        """
        put, feed = self._feed.input_layer.put, self._feed
        clock, fetch, stats = time.perf_counter, self._fetch, feed.stats
        timings = feed.timings
        if self._worker is not None or self._ready or not feed.input_layer.puts():
            return
        while not feed.pays:
            started = clock()
            try:
                data = fetch()
            except StopIteration:
                self._ended = True
                return
            if timings is not None:
                fetched = clock()
            if not put(data, net):
                self._given = data, clock() - started
                return
            ended = clock()
            feed.note_seconds(ended - started)
            stats.batches += 1
            if timings is not None:
                nbytes = feed.input_layer.put_nbytes
                times = BatchTimes(False, started, fetched, ended, nbytes)
                timings.begin_update(times, started, ended)
                timings.begin_step()
            del data
            yield
            if timings is not None:
                timings.end_step()

    def _prepare_here(self) -> Batch:
        try:
            batch = self._prepare(inline=True)
        except BaseException:
            self._ended = True
            raise
        self._feed.stats.batches += 1
        return batch

    def _prepare_ahead(self) -> None:
        """Prepare the next minibatch now; whatever happens shows when its turn comes."""
        try:
            self._ready.append(self._prepare(inline=True))
            return
        except StopIteration:
            self._ready.append(_End())
        except KeyboardInterrupt:
            # Ctrl-C waits for no step, and no hook that stops training may lose it.
            raise
        except BaseException as error:
            self._ready.append(_End(error))
        self._queues_ahead = 0

    def _start_worker(self) -> None:
        self._feed.before_worker()
        # The worker sees the trainer's context variables and, which is one of them only
        # since NumPy 2, NumPy's error state.
        worker = threading.Thread(
            target=contextvars.copy_context().run,
            args=(self._work, np.geterr()),
            name="brainstorm-dbuf feed",
            daemon=True,
        )
        # Nothing is ready and everything fetched has been handed over.
        self._permits = self._feed.ahead
        # Known before it runs: Ctrl-C may come while it is being started.
        self._worker = worker
        switching.begin(worker)
        try:
            worker.start()
        except RuntimeError as error:
            switching.end(worker)
            self._worker = None
            self._feed.stats.note_fallback(
                f"no worker thread ({error}): nothing is prefetched for now"
            )
            return
        self._feed.stats.workers += 1

    def close(self, interrupted: bool = False) -> None:
        """End the pass wherever it is. Twice is harmless."""
        if self not in self._feed._open or os.getpid() != self._pid:
            return
        self._feed._open.discard(self)
        self._ended = True
        try:
            has_left = self._worker is None or self._leave(self._worker, interrupted)
            self._drop_ready()
            if not has_left:
                return
            # After the pass the data are their owner's again. (An interrupt waits for
            # no device.)
            if not interrupted:
                if self._last_direct is not None:
                    self._last_direct.wait_copied()
                self._feed.input_layer.wait_put()
            if inspect.isgenerator(self._source):
                self._source.close()
        finally:
            self._running.__exit__(None, None, None)

    def _drop_ready(self) -> None:
        """Give back the slots of minibatches that nobody takes any more."""
        while self._ready:
            item = self._ready.popleft()
            if isinstance(item, Batch) and item.slot is not None:
                self._feed.input_layer.give_back(item.slot)

    def _is_stopped(self) -> bool:
        return self._stopped

    def _leave(self, worker: threading.Thread, interrupted: bool) -> bool:
        """Stop the worker; False if its `next` has not returned in time."""
        try:
            return self._join(worker, interrupted)
        finally:
            switching.end(worker)

    def _join(self, worker: threading.Thread, interrupted: bool) -> bool:
        """Wait for the worker to end; False if its `next` has not returned in time."""
        if sys.is_finalizing():
            # The program ends, and no other thread runs any more.
            return False
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._feed.input_layer.wake()
        if interrupted:
            self._left.wait(GIVE_UP_AFTER_INTERRUPT_SECONDS)
        elif not self._left.wait(UNBLOCK_AFTER_SECONDS):
            self._unblock()
            self._left.wait(GIVE_UP_AFTER_SECONDS - UNBLOCK_AFTER_SECONDS)
        if self._left.is_set():
            worker.join()
            return True
        if not interrupted:
            warnings.warn(
                "the data iterator is still inside next() "
                f"{GIVE_UP_AFTER_SECONDS:g} s after training stopped; its thread ends "
                "when that call returns",
                FeedWarning,
                stacklevel=4,
            )
        return False

    def _unblock(self) -> None:
        """Close an iterator that has a `close` of its own and may wait for it."""
        close = getattr(self._source, "close", None)
        if close is not None and not inspect.isgenerator(self._source):
            close()

    # --------------------- whichever thread has the iterator ---------------------- #

    def _prepare(self, inline: bool) -> Batch:
        """Fetch the next minibatch, stage it, queue its copy.

        Raises:
            StopIteration: there is none. Else whatever the iterator raised.
        """
        # The iterator may use its arrays again once `next` is called.
        if self._in_flight is not None:
            self._in_flight.wait_copied()
            self._in_flight = None
        if self._given is None:
            started = time.perf_counter()
            data = self._fetch()
            fetched = time.perf_counter()
            fetching = fetched - started
        else:
            data, fetching = self._given
            self._given = None
            fetched = time.perf_counter()
        batch = self._feed.input_layer.stage(
            data, self._names, inline, self._is_stopped
        )
        staged = time.perf_counter()
        staging = staged - fetched
        self._queues_ahead = 0
        if batch.slot is not None:
            lies_still = batch.slot.lies_still
            self._queues_ahead = self._feed.input_layer.most_ahead if lies_still else 1
            staging -= batch.slot.reserve_seconds
            if batch.slot.direct:
                self._last_direct = batch.slot
            if batch.slot.source_in_use:
                self._in_flight = batch.slot
        self._feed.note_preparation(batch, fetching, staging, self._is_first)
        if self._feed.timings is not None:
            self._time(batch, inline, fetched - fetching, fetched, staged)
        self._is_first = False
        return batch

    def _time(
        self,
        batch: Batch,
        inline: bool,
        started: float,
        fetched: float,
        staged: float,
    ) -> None:
        slot, nbytes = batch.slot, 0
        if slot is not None:
            nbytes = slot.filled_nbytes
        elif not self._feed.input_layer.queues_copies:
            nbytes = sum(array.nbytes for array in batch.data.values())
        batch.times = BatchTimes(not inline, started, fetched, staged, nbytes)
        if slot is not None and slot.timer is not None:
            slot.timer.times = batch.times

    # ------------------------------ the worker's thread --------------------------- #

    def _work(self, error_state: dict[str, Any]) -> None:
        end = _End()
        np.seterr(**error_state)
        try:
            # As in the trainer's thread: the iterator may allocate page-locked memory.
            with self._context:
                try:
                    self._fetch_all()
                except BaseException as error:
                    end.error = error
        except BaseException as error:
            # Of the context; what has ended the pass before counts.
            if end.error is None:
                end.error = error
        self._publish(end)
        # The error's traceback refers to this frame: no cycle is left behind.
        del end
        self._left.set()

    def _fetch_all(self) -> None:
        while self._may_fetch():
            try:
                batch = self._prepare(inline=False)
            except StopIteration:
                break
            stays_as_given = batch.slot is None
            self._publish(batch)
            del batch
            if stays_as_given:
                self._wait_handed_over()

    def _may_fetch(self) -> bool:
        """Wait for a permit; False when the pass is over."""
        with self._changed:
            while not self._permits and not self._stopped:
                self._changed.wait()
            self._permits -= 1
            return not self._stopped

    def _wait_handed_over(self) -> None:
        """Wait until every minibatch published so far has been handed over."""
        with self._changed:
            while self._permits < self._feed.ahead and not self._stopped:
                self._changed.wait()

    def _publish(self, item: Batch | _End) -> None:
        with self._changed:
            self._ready.append(item)
            if self._is_awaited and isinstance(item, Batch) and item.slot is not None:
                # The trainer takes it now, so `next` need not wait until it has it: a
                # tenth of a millisecond where the minibatches are the bound.
                self._is_awaited = False
                self._is_permitted = True
                self._permits += 1
            self._changed.notify_all()


class _End:
    """The end of a pass, and the error that ended it."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


def _is_interrupt(exc_type: type[BaseException] | None) -> bool:
    return exc_type is not None and issubclass(exc_type, KeyboardInterrupt)


def _says_as_much(error: BaseException | None, another: _cuda.CudaError) -> bool:
    """Say whether the error that ends a pass says all that the one after it does.

    Where the context is lost each call fails, with the same words.
    """
    return isinstance(error, _cuda.CudaError) and error.code == another.code


def check_depth(depth: int) -> int:
    """Return ``depth``.

    Raises:
        TypeError: it is not an integer.
        ValueError: it is less than 1.
    """
    if isinstance(depth, bool) or not isinstance(depth, int):
        raise TypeError(f"depth: expected a positive integer, got {depth!r}")
    if depth < 1:
        raise ValueError(
            f"depth: expected at least 1 back buffer, got {depth} "
            "(double_buffering=False trains without)"
        )
    return depth
