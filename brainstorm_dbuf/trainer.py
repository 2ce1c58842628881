"""The double-buffering trainer and the feeder of brainstorm's training loop."""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import brainstorm
from brainstorm.data_iterators import DataIterator

from .clearing import quick_clearing
from .data_parallel import in_lockstep
from .feed import check_depth
from .held_memory import DEFAULT_LIMIT, check_limit
from .iterators import source_of
from .nvtx_ranges import check_nvtx, new_feed
from .prefetch import Prefetch
from .randomness import shared_random_draws
from .resizing import quick_resizing
from .stats import FeedStats
from .timings import FeedTimings


class DoubleBufferedTrainer(brainstorm.Trainer):
    """A ``brainstorm.Trainer`` that prepares the next minibatch during each step.

    Losses, logs and weights are bit-equal to brainstorm's own wherever brainstorm's
    own run repeats itself. With ``double_buffering=False`` it is brainstorm's trainer.

    Args:
        stepper: a ``brainstorm.training`` stepper.
        verbose: as in brainstorm.
        double_buffering: whether to prepare minibatches ahead.
        depth: number of back buffers; ``depth - 1`` minibatches are prepared ahead
            (with 1, one).
        page_lock_limit: the largest share of the machine's memory, from 0 to 1, that
            data which the iterator holds may be page-locked in, where they lie; 0 for
            none.
        timed: whether to note where the time goes (``feed_stats.timings``); a hook that
            shows it, such as ``dbuf.hooks.MonitorFeed``, has it noted too.
        nvtx: whether a profiler that listens sees a range around each stage (the package
            nvtx); None for where the environment names one, as Nsight Systems does.

    Attributes:
        feed_stats: a :class:`FeedStats`, what the last :meth:`train` did.

    Raises:
        ValueError, TypeError: ``depth`` is not a positive integer, or
            ``page_lock_limit`` not from 0 to 1.
        ImportError: ``nvtx`` is True, and the package is missing.
    """

    __undescribed__ = {"feed_stats": None}
    __default_values__ = {
        "double_buffering": True,
        "depth": 2,
        "page_lock_limit": DEFAULT_LIMIT,
        "timed": False,
        "nvtx": None,
    }

    def __init__(
        self,
        stepper: Any,
        verbose: bool = True,
        double_buffering: bool = True,
        depth: int = 2,
        page_lock_limit: float = DEFAULT_LIMIT,
        timed: bool = False,
        nvtx: bool | None = None,
    ) -> None:
        super().__init__(stepper, verbose)
        self.double_buffering = double_buffering
        self.depth = check_depth(depth)
        self.page_lock_limit = check_limit(page_lock_limit)
        self.timed = timed
        self.nvtx = check_nvtx(nvtx)
        self.feed_stats: FeedStats | None = None

    @in_lockstep
    def train(
        self, net: Any, training_data_iter: DataIterator, **named_data_iters: Any
    ) -> None:
        """Train ``net`` as ``brainstorm.Trainer.train`` does, with a feed beside it.

        Raises:
            AssertionError: an epoch had no minibatch. Else whatever the iterator, a
                hook or the step raised, after all earlier minibatches were trained.
        """
        self.feed_stats = None
        watchers = [hook for hook in self.hooks.values() if hasattr(hook, "feed_stats")]
        for hook in watchers:
            hook.feed_stats = None
        if not self.double_buffering:
            super().train(net, training_data_iter, **named_data_iters)
            return
        depth, limit = self.depth, self.page_lock_limit
        if isinstance(training_data_iter, Prefetch):
            depth = training_data_iter.depth
            limit = training_data_iter.page_lock_limit
            training_data_iter = training_data_iter.iter
        self.feed_stats = FeedStats()
        for hook in watchers:
            hook.feed_stats = self.feed_stats
        iterators = {**named_data_iters, "training_data_iter": training_data_iter}
        reason = shared_random_draws(training_data_iter, self.hooks.values(), iterators)
        if reason is not None:
            self.feed_stats.note_fallback(reason)
            with quick_resizing(net), quick_clearing(net):
                super().train(net, training_data_iter, **named_data_iters)
            return
        if self.timed or watchers:
            self.feed_stats.timings = FeedTimings()
        with (
            new_feed(
                net.handler,
                depth,
                stats=self.feed_stats,
                page_lock_limit=limit,
                nvtx=self.nvtx,
            ) as feed,
            quick_resizing(net),
            quick_clearing(net),
        ):

            def feeder(net: Any, iterator: Iterable[Any], all_inputs: bool) -> Any:
                if feed.works and net.handler is feed.handler:
                    iterator = feed.minibatches(training_data_iter, iterator)
                return feed.run_network(net, iterator, all_inputs)

            last: list[Generator[int, None, None]] = []
            plain = inspect.unwrap(brainstorm.Trainer.train)
            train = _with_feeder(plain, feeder, last)
            try:
                train(self, net, training_data_iter, **named_data_iters)
            finally:
                # Not left to the loop, which would drop it: an interrupt that comes
                # while a generator is dropped is lost.
                for epoch in last:
                    epoch.close()
        for hook in watchers:
            hook.end_feed()


def run_network(
    net: Any, iterator: Iterable[dict[str, Any]], all_inputs: bool = True
) -> Iterator[int]:
    """Feed ``net`` the minibatches of ``iterator``, preparing the next during each step.

    The drop-in for ``brainstorm.training.utils.run_network``: yields the number of each
    minibatch once ``net`` holds it.

    Args:
        net: a brainstorm network.
        iterator: minibatches, dicts of arrays of shape (T, B, ...).
        all_inputs: whether every input of the network must be in each of them.
    """
    with (
        new_feed(net.handler) as feed,
        quick_resizing(net),
        quick_clearing(net),
    ):
        source = source_of(iterator)
        if feed.works and source is not None:
            iterator = feed.minibatches(source, iterator)
        yield from feed.run_network(net, iterator, all_inputs)


def _with_feeder(
    train: types.FunctionType,
    feeder: Callable[..., Generator[int, None, None]],
    last: list[Generator[int, None, None]],
) -> types.FunctionType:
    """Return brainstorm's own training loop with another ``run_network`` in it.

    Its module knows the feeder by a global name. A function over the same code and
    its own copy of these names leaves the module, and every other trainer, as is. What
    the loop iterates over is left in ``last``.
    """

    def run_network(net: Any, iterator: Iterable[Any], all_inputs: bool = True) -> Any:
        last[:] = [checked(feeder(net, iterator, all_inputs))]
        return last[0]

    def checked(numbers: Generator[int, None, None]) -> Any:
        number = None
        with contextlib.closing(numbers):
            for number in numbers:
                yield number
        if number is None:
            raise AssertionError(
                "the data iterator yielded no minibatch: there is nothing to train on"
            )

    return types.FunctionType(
        train.__code__,
        {**train.__globals__, "run_network": run_network},
        train.__name__,
        train.__defaults__,
        train.__closure__,
    )
