"""NVTX ranges around the stages of the feed, for a profiler such as Nsight Systems.

The ranges are of the domain ``brainstorm_dbuf``, in the thread that does the work, and
have the names of the timings: ``next``, ``staging`` with ``copy`` in it (a minibatch is
gathered, and its copies to the device queued), ``hand-over``, ``waiting`` (the trainer,
for a worker) and ``step``. Where a small minibatch goes straight into the network,
``staging`` is all of that.

The feed itself knows nothing of them. Where a profiler listens, :func:`new_feed` makes
another one, whose parts are the usual ones with ranges around them; everywhere else the
usual one, which then costs what it costs without this module.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any

from .back_buffers import DeviceSlot
from .feed import Feed, Pass
from .held_memory import DEFAULT_LIMIT
from .input_layer import Batch, DoubleBufferedInput
from .stats import FeedStats

DOMAIN = "brainstorm_dbuf"

# What a profiler sets in the program that it starts: the library that NVTX is to load.
LISTENER = "NVTX_INJECTION64_PATH"

# Names and, for tools that show it, a colour each (ARGB).
COLORS = {
    "next": 0xFF1F77B4,
    "staging": 0xFFFF7F0E,
    "copy": 0xFF9467BD,
    "hand-over": 0xFF8C564B,
    "waiting": 0xFFD62728,
    "step": 0xFF2CA02C,
}


class Range:
    """A range with one name: a context manager for any thread, to enter many times."""

    __slots__ = ("_push", "_pop", "_attributes")

    def __init__(self, domain: Any, attributes: Any) -> None:
        self._push, self._pop = domain.push_range, domain.pop_range
        self._attributes = attributes

    def __enter__(self) -> None:
        self._push(self._attributes)

    def __exit__(self, *exc_info: object) -> None:
        self._pop()


def check_nvtx(nvtx: bool | None) -> bool | None:
    """Return the option ``nvtx``.

    Raises:
        TypeError: it is neither True, False nor None.
        ImportError: it is True, and the package is missing.
    """
    if nvtx is not None and not isinstance(nvtx, bool):
        raise TypeError(f"nvtx: expected True, False or None, got {nvtx!r}")
    if nvtx:
        _package()
    return nvtx


def new_feed(
    handler: Any,
    depth: int = 2,
    lends: bool = False,
    stats: FeedStats | None = None,
    page_lock_limit: float = DEFAULT_LIMIT,
    nvtx: bool | None = None,
) -> Feed:
    """Make a :class:`Feed`, with ranges where a profiler listens.

    Args:
        handler, depth, lends, stats, page_lock_limit: as in :class:`Feed`.
        nvtx: whether to look for a profiler; None for where the environment names one
            (``NVTX_INJECTION64_PATH``). If the package is missing there, a note in the
            statistics says so.

    Raises:
        ImportError: ``nvtx`` is True, and the package is missing. Else as in
            :class:`Feed`.
    """
    stats = FeedStats() if stats is None else stats
    ranges = None
    if nvtx or (nvtx is None and os.environ.get(LISTENER)):
        try:
            ranges = ranges_if_heard()
        except ImportError as error:
            if nvtx:
                raise
            stats.note(f"a profiler listens ({LISTENER}), but {error}")
    if ranges is None:
        return Feed(handler, depth, lends, stats, page_lock_limit)
    return RangedFeed(handler, depth, lends, stats, page_lock_limit, ranges)


class RangedFeed(Feed):
    """A feed with ranges around its stages."""

    def __init__(
        self,
        handler: Any,
        depth: int,
        lends: bool,
        stats: FeedStats,
        page_lock_limit: float,
        ranges: dict[str, Range],
    ) -> None:
        self.ranges = ranges
        super().__init__(handler, depth, lends, stats, page_lock_limit)
        if self.works:
            self.input_layer.ranges = ranges

    def new_pass(
        self, iterator: Iterable[Any], names: frozenset[str] | None = None
    ) -> Pass:
        return RangedPass(self, iterator, names)

    def run_network(
        self, net: Any, iterator: Iterable[Any], all_inputs: bool = True
    ) -> Iterator[int]:
        return self._with_steps(super().run_network(net, iterator, all_inputs))

    def lend(self, iterator: Iterable[Any]) -> Iterator[dict[str, Any]]:
        return self._with_steps(super().lend(iterator))

    def _with_steps(self, items: Generator[Any, None, None]) -> Iterator[Any]:
        """Yield them, each within a range that ends when the next one is asked for."""
        step = self.ranges["step"]
        try:
            for item in items:
                try:
                    with step:
                        yield item
                finally:
                    # What was lent must be let go before the next one is prepared.
                    del item
        finally:
            items.close()


class RangedPass(Pass):
    """A pass with ranges around ``next`` and around waiting for the worker."""

    def __init__(
        self,
        feed: RangedFeed,
        iterator: Iterable[Any],
        names: frozenset[str] | None = None,
    ) -> None:
        super().__init__(feed, iterator, names)
        self._waiting = feed.ranges["waiting"]
        self._fetch = _within(feed.ranges["next"], self._fetch)

    def _take(self) -> Batch:
        if self._worker is None:
            return super()._take()
        with self._waiting:
            return super()._take()


class RangedInput(DoubleBufferedInput):
    """An Input layer with ranges around staging, copy and hand-over."""

    ranges: dict[str, Range]

    def stage(self, *args: Any) -> Batch:
        with self.ranges["staging"]:
            return super().stage(*args)

    def put(self, data: Mapping[str, Any], net: Any) -> bool:
        with self.ranges["staging"]:
            return super().put(data, net)

    def hand_over(self, batch: Batch, net: Any, all_inputs: bool = True) -> None:
        with self.ranges["hand-over"]:
            super().hand_over(batch, net, all_inputs)

    def lend(self, batch: Batch) -> dict[str, Any]:
        with self.ranges["hand-over"]:
            return super().lend(batch)

    def _new_slot(self) -> Any:
        slot = super()._new_slot()
        return RangedSlot(slot, self.ranges["copy"]) if self.queues_copies else slot


class RangedSlot:
    """A back buffer on a device, with a range around what queues its copies."""

    def __init__(self, slot: DeviceSlot, copy: Range) -> None:
        self._slot = slot
        self.fill = _within(copy, slot.fill)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._slot, name)


RangedFeed.input_class = RangedInput


def _within(around: Range, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        with around:
            return function(*args)

    return call


def _package() -> Any:
    try:
        import nvtx
    except ImportError as error:
        raise ImportError(
            f"NVTX ranges need the package nvtx ({error}): pip install "
            '"brainstorm-dbuf[nvtx]"'
        ) from None
    if not hasattr(nvtx, "get_domain"):
        raise ImportError("NVTX ranges need the package nvtx 0.2.13 or newer")
    return nvtx


def ranges_if_heard() -> dict[str, Range] | None:
    """Return a range for each name, or None where nobody listens."""
    nvtx = _package()
    if not nvtx.enabled():
        return None
    domain = nvtx.get_domain(DOMAIN)
    ranges = {}
    for name, color in COLORS.items():
        attributes = domain.get_event_attributes(message=name, color=color)
        if attributes is None:
            # The package's stand-in for a domain, where no profiler has been found.
            return None
        ranges[name] = Range(domain, attributes)
    return ranges
