"""Prefetch: a data iterator that prepares another one's minibatches ahead of their use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from brainstorm.data_iterators import DataIterator

from .feed import Feed, check_depth
from .held_memory import DEFAULT_LIMIT, check_limit
from .nvtx_ranges import check_nvtx, new_feed
from .stats import FeedStats
from .timings import FeedTimings


class Prefetch(DataIterator):
    """Run another data iterator one minibatch ahead, in a thread of its own.

    Works wherever brainstorm takes a data iterator: ``Trainer.train``, the hooks,
    ``tools.evaluate`` and ``tools.extract``. Its minibatches are arrays of the
    handler's own type and dtype; on a CUDA device they have been copied there by an
    asynchronous copy that ran during the step before. Values and order are those of
    ``iterator``.

    The back buffers are kept from one pass to the next; :meth:`close`, or the end of
    a ``with`` block, gives them back, as does dropping the object.

    Args:
        iterator: the data iterator to run ahead.
        depth: number of back buffers; ``depth - 1`` minibatches are prepared ahead
            (with 1, one).
        page_lock_limit: the largest share of the machine's memory, from 0 to 1, that
            data which ``iterator`` holds may be page-locked in, where they lie; 0 for
            none.
        timed: whether to note where the time goes (``stats.timings``).
        nvtx: whether a profiler that listens sees a range around each stage (the package
            nvtx); None for where the environment names one, as Nsight Systems does.

    Attributes:
        iter: ``iterator``.
        data_shapes, length: those of ``iterator``.
        stats: a :class:`FeedStats`, what was done.

    Raises:
        ValueError, TypeError: ``depth`` is not a positive integer, or
            ``page_lock_limit`` not from 0 to 1.
        ImportError: ``nvtx`` is True, and the package is missing.
    """

    __undescribed__ = {"stats", "_idle"}
    __default_values__ = {
        "page_lock_limit": DEFAULT_LIMIT,
        "timed": False,
        "nvtx": None,
    }

    def __init__(
        self,
        iterator: DataIterator,
        depth: int = 2,
        page_lock_limit: float = DEFAULT_LIMIT,
        timed: bool = False,
        nvtx: bool | None = None,
    ) -> None:
        # The base class would draw a seed from brainstorm's global random state, and
        # every later draw of the program would differ. This class draws nothing.
        self.iter = iterator
        self.depth = check_depth(depth)
        self.page_lock_limit = check_limit(page_lock_limit)
        self.timed = timed
        self.nvtx = check_nvtx(nvtx)
        self.data_shapes = iterator.data_shapes
        self.length = iterator.length
        self.__init_from_description__({})

    def __init_from_description__(self, description: dict[str, Any]) -> None:
        self.stats = self._new_stats()
        self._idle: Feed | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy makes back buffers of its own.
        return {**self.__dict__, "stats": self._new_stats(), "_idle": None}

    def _new_stats(self) -> FeedStats:
        return FeedStats(timings=FeedTimings() if self.timed else None)

    def __call__(self, handler: Any = None) -> Iterator[dict[str, Any]]:
        feed = self._take(handler)
        try:
            if feed.works:
                yield from feed.lend(feed.minibatches(self.iter))
            else:
                yield from self.iter(handler)
        except BaseException as error:
            feed.close(isinstance(error, KeyboardInterrupt))
            raise
        self._keep(feed)

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the back buffers back; the next pass makes new ones."""
        feed, self._idle = self._idle, None
        if feed is not None:
            feed.close()

    def _take(self, handler: Any) -> Feed:
        """Return a feed that no other pass is using."""
        feed, self._idle = self._idle, None
        if feed is not None and feed.handler is handler:
            return feed
        if feed is not None:
            feed.close()
        return new_feed(
            handler,
            self.depth,
            lends=True,
            stats=self.stats,
            page_lock_limit=self.page_lock_limit,
            nvtx=self.nvtx,
        )

    def _keep(self, feed: Feed) -> None:
        if self._idle is None:
            self._idle = feed
        else:
            feed.close()
