"""Hooks for brainstorm's trainers that show what the feed does."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

from brainstorm.hooks import Hook

from . import timeline
from .stats import FeedStats
from .timings import BatchTimes, FeedSummary, summarize

# What MonitorFeed logs: the name, and how it comes from a summary.
_LOGGED = {
    "next_ms": lambda summary: summary.next * 1e3,
    "staging_ms": lambda summary: summary.staging * 1e3,
    "copy_ms": lambda summary: summary.copy * 1e3,
    "waiting_ms": lambda summary: summary.waiting * 1e3,
    "step_ms": lambda summary: summary.step * 1e3,
    "gigabytes_per_second": lambda summary: summary.bytes_per_second / 1e9,
}


class FeedHook(Hook):
    """A hook that :class:`brainstorm_dbuf.Trainer` lets look into its feed.

    The trainer times its feed if it has such a hook, sets ``feed_stats`` before training,
    and calls :meth:`end_feed` when training has ended without an error. In any other
    trainer, or with ``double_buffering=False``, ``feed_stats`` stays None.
    """

    __undescribed__ = {"feed_stats"}

    feed_stats: FeedStats | None = None

    def end_feed(self) -> None:
        """Training has ended, and the feed is closed."""


class MonitorFeed(FeedHook):
    """Log where the time of training goes: means over the minibatches since the last log.

    The log has, in milliseconds of a minibatch, ``next_ms`` (the iterator),
    ``staging_ms``, ``copy_ms`` (to the device, by its own events), ``waiting_ms`` (of the
    trainer for data) and ``step_ms``, and ``gigabytes_per_second`` across the link while
    copies ran. NaN stands for what there was not. After training it prints the verdict
    (``feed_stats.verdict``).

    Args:
        name, timescale, interval, verbose: as in every hook of brainstorm's.
    """

    __undescribed__ = {"_logged"}

    def start(self, net: Any, stepper: Any, verbose: bool, iterators: Any) -> None:
        super().start(net, stepper, verbose, iterators)
        # The number of the first minibatch that is not logged yet.
        self._logged = 0

    def __call__(
        self, epoch_nr: int, update_nr: int, net: Any, stepper: Any, logs: Any
    ) -> dict[str, float]:
        summary = self._summary()
        return OrderedDict((name, of(summary)) for name, of in _LOGGED.items())

    def _summary(self) -> FeedSummary:
        if self.feed_stats is None or self.feed_stats.timings is None:
            return FeedSummary()
        timings = self.feed_stats.timings
        since, self._logged = self._logged, timings.batches
        return summarize([t for t in timings.records if t.number >= since])

    def end_feed(self) -> None:
        self.message(self.feed_stats.verdict)


class SaveFeedTimeline(FeedHook):
    """Draw when each part of the feed was at work on some minibatches.

    A lane for each of iterator, staging, copy, waiting and step; what lies one above the
    other ran at the same time. Written once, when training has ended.

    Args:
        filename: what to write: ``.json`` is a trace for Perfetto or chrome://tracing;
            every other ending is a picture by matplotlib (``.png``, ``.svg``, ...).
        batches: how many minibatches to show.
        first: the number of the first; None for some from the middle of the training (or
            of as much of it as is kept), if possible with a worker thread. Where there
            are too few minibatches behind it, the last ones are shown.
        name, verbose: as in every hook of brainstorm's.

    Raises:
        ValueError: ``batches`` is less than 1, or ``first`` less than 0.
        ImportError: before training begins: a picture needs matplotlib, which is missing.
        FileNotFoundError: before training begins: there is no such folder.
    """

    __default_values__ = {"batches": 6, "first": None}

    def __init__(
        self,
        filename: str,
        batches: int = 6,
        first: int | None = None,
        name: str | None = None,
        verbose: bool | None = None,
    ) -> None:
        super().__init__(name, "epoch", 1, verbose)
        if batches < 1:
            raise ValueError(f"batches: expected at least 1, got {batches}")
        if first is not None and first < 0:
            raise ValueError(f"first: expected at least 0, got {first}")
        self.filename = str(filename)
        self.batches = batches
        self.first = first

    def start(self, net: Any, stepper: Any, verbose: bool, iterators: Any) -> None:
        super().start(net, stepper, verbose, iterators)
        self.check()

    def check(self) -> None:
        """See that the file can be written, as it is done before training begins."""
        folder = Path(self.filename).parent
        if not folder.is_dir():
            raise FileNotFoundError(f"filename: there is no folder {str(folder)!r}")
        timeline.check_can_write(self.filename)

    def __call__(
        self, epoch_nr: int, update_nr: int, net: Any, stepper: Any, logs: Any
    ) -> None:
        """Nothing is logged."""

    def end_feed(self) -> None:
        timings = self.feed_stats.timings
        records = list(timings.records)
        if self.first is not None:
            shown = [times for times in records if times.number >= self.first]
        else:
            shown = records[self._middle(records) :]
        if len(shown) < self.batches:
            shown = records[-self.batches :]
        shown = shown[: self.batches]
        if not shown:
            self.message(f"{self.filename} is not written: no minibatch was trained")
            return
        timeline.write(self.filename, shown, self.feed_stats.verdict)
        self.message(f"{self.filename} shows {len(shown)} minibatches")

    def _middle(self, records: list[BatchTimes]) -> int:
        """Return where to begin in the middle: best within a pass, with its worker."""
        middle = len(records) // 2
        for begin in range(middle, len(records) - self.batches + 1):
            if all(times.by_worker for times in records[begin : begin + self.batches]):
                return begin
        return middle
