"""Where the time of a training goes: one record a minibatch, their means, a verdict.

Off unless asked for (``dbuf.Trainer(..., timed=True)``, ``dbuf.Prefetch(..., timed=True)``
or one of the hooks that need it). The host's times are those of ``time.perf_counter``;
the time of a copy is between two events of the device.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter

# Of longer trainings the last minibatches are kept.
RECORDS_KEPT = 4096

# The first minibatches of a feed page-lock, allocate, and start the worker.
NOT_COUNTED = 8

# A trainer that waits less than this share of its time is not held up.
HELD_UP = 0.05

_UNKNOWN = math.nan

# A link that copies for this share of the time is what training waits for, also where
# the trainer itself does not wait: it queues the next step, and the device waits.
BUSY = 0.9


class BatchTimes:
    """The times of one minibatch, in seconds of ``time.perf_counter``.

    Attributes:
        number: the minibatch's, from 0 on, in all passes of the feed.
        by_worker: whether a worker thread prepared it.
        next_begin, next_end: the iterator's ``next``.
        staged: the end of staging, which begins at ``next_end``.
        nbytes: what was staged, or crosses the link to the device.
        copy_begin, copy_end: the copy to the device; NaN where there is none, or the
            device had not told yet when it was asked.
        wait_begin, wait_end: the trainer's wait for it; where the trainer's own thread
            prepared it just then, that is within.
        step_begin, step_end: the step on it, with everything that the training loop
            and its hooks do until they ask for the next.
    """

    __slots__ = (
        "number",
        "by_worker",
        "next_begin",
        "next_end",
        "staged",
        "nbytes",
        "copy_begin",
        "copy_end",
        "wait_begin",
        "wait_end",
        "step_begin",
        "step_end",
    )

    def __init__(
        self,
        by_worker: bool,
        next_begin: float,
        next_end: float,
        staged: float,
        nbytes: int,
    ) -> None:
        # The others once they are known: this is made for every minibatch.
        self.by_worker = by_worker
        self.next_begin = next_begin
        self.next_end = next_end
        self.staged = staged
        self.nbytes = nbytes
        self.copy_begin = self.copy_end = _UNKNOWN

    @property
    def next_seconds(self) -> float:
        return self.next_end - self.next_begin

    @property
    def staging_seconds(self) -> float:
        return self.staged - self.next_end

    @property
    def copy_seconds(self) -> float:
        return self.copy_end - self.copy_begin

    @property
    def wait_seconds(self) -> float:
        """The trainer's wait, without what its own thread did meanwhile."""
        wait = self.wait_end - self.wait_begin
        if not self.by_worker and self.next_begin >= self.wait_begin:
            wait -= self.staged - self.next_begin
        return max(wait, 0.0)

    @property
    def step_seconds(self) -> float:
        return self.step_end - self.step_begin

    @property
    def update_seconds(self) -> float:
        """All of it: wait, hand-over, what is prepared ahead meanwhile, step."""
        return self.step_end - self.wait_begin


@dataclass
class FeedSummary:
    """Means over minibatches, in seconds each.

    Attributes:
        batches: how many they are of; the first few of a feed are not counted.
        update: from the trainer's asking for a minibatch to its asking for the next;
            what hooks do after an epoch is no part of it.
        next, staging: the iterator, and the host's part of bringing data to where the
            network takes them.
        copy: the copies to the device; NaN where there were none.
        waiting: the trainer's wait for data.
        step: the step and the hooks.
        prepared_by_trainer: the share of minibatches that its own thread prepared.
        bytes_per_second: what crossed the link, while copies ran; NaN without them.
        link_bytes_per_second: what the link carries, measured; NaN where it was not.
    """

    batches: int = 0
    update: float = math.nan
    next: float = math.nan
    staging: float = math.nan
    copy: float = math.nan
    waiting: float = math.nan
    step: float = math.nan
    prepared_by_trainer: float = math.nan
    bytes_per_second: float = math.nan
    link_bytes_per_second: float = math.nan

    @property
    def held_up(self) -> float:
        """The share of an update in which the trainer waits for data or prepares them."""
        own = self.prepared_by_trainer * (self.next + self.staging)
        return (self.waiting + own) / self.update

    @property
    def bound(self) -> str:
        """What the training waits for: iterator, staging, link or compute.

        Empty where no minibatch was counted.
        """
        if self.batches == 0:
            return ""
        copy = 0.0 if math.isnan(self.copy) else self.copy
        # Of a minibatch that is staged, pieces are copied while others are staged.
        if copy < 1.1 * self.staging:
            copy = 0.0
        if copy >= BUSY * self.update:
            return "link"
        # Beside a worker a longer step hides all of it, but for the first minibatches.
        is_hidden = self.prepared_by_trainer < 0.5 and self.step > max(
            self.next + self.staging, copy
        )
        if self.held_up < HELD_UP or is_hidden:
            return "compute"
        stages = {"iterator": self.next, "staging": self.staging, "link": copy}
        return max(stages, key=stages.__getitem__)

    @property
    def verdict(self) -> str:
        """One line: what holds the training back, and what to do about it."""
        if self.batches == 0:
            return "feed: too few minibatches to say what holds training back"
        held_up = (
            f"data hold the trainer up for {min(self.held_up, 1.0):.0%} of an update of "
            f"{_time(self.update)}"
        )
        what, advice = {
            "compute": (
                f"the step takes {_time(self.step)}, {held_up}",
                "a quicker feed would change little",
            ),
            "iterator": (
                f"next() takes {_time(self.next)} a minibatch, {held_up}",
                "do less in the iterator, or do it once before training",
            ),
            "staging": (
                f"staging takes {_time(self.staging)} a minibatch, {held_up}",
                "an iterator that holds its arrays (Minibatches) as float32 or narrower "
                "needs none on a device",
            ),
            "link": (
                f"the copy takes {_time(self.copy)} ({self._rate()}) of an update of "
                f"{_time(self.update)}",
                "data held as narrower numbers (uint8, float16) cross as they are",
            ),
        }[self.bound]
        return f"feed: bound by {_THE.get(self.bound, self.bound)}: {what}; {advice}"

    def _rate(self) -> str:
        rate = f"{self.bytes_per_second / 1e9:.1f}"
        if not math.isnan(self.link_bytes_per_second):
            rate += f" of {self.link_bytes_per_second / 1e9:.1f}"
        return f"{rate} GB/s"


_THE = {"iterator": "the iterator", "link": "the link"}


class FeedTimings:
    """The records of a feed. Written by its threads, one minibatch in one at a time.

    Attributes:
        records: the last :data:`RECORDS_KEPT` minibatches whose step has ended.
        link_bytes_per_second: the link's rate, measured when the feed ended; NaN where
            there is no device.
    """

    def __init__(self) -> None:
        self.records: deque[BatchTimes] = deque(maxlen=RECORDS_KEPT)
        self.link_bytes_per_second = math.nan
        self._count = 0
        self._current: BatchTimes | None = None

    def begin_update(
        self, times: BatchTimes, wait_begin: float, wait_end: float
    ) -> None:
        """The trainer has a minibatch that it has waited for."""
        times.wait_begin, times.wait_end = wait_begin, wait_end
        self._current = times

    def begin_step(self) -> None:
        self._current.step_begin = perf_counter()

    def end_step(self) -> None:
        times = self._current
        times.step_end = perf_counter()
        times.number = self._count
        self._count += 1
        self.records.append(times)

    @property
    def batches(self) -> int:
        """How many minibatches there were."""
        return self._count

    def summary(self, since: int = NOT_COUNTED) -> FeedSummary:
        """Return the means over the records from minibatch number ``since`` on."""
        return summarize(
            [times for times in self.records if times.number >= since],
            self.link_bytes_per_second,
        )


def summarize(
    records: Iterable[BatchTimes], link_bytes_per_second: float = math.nan
) -> FeedSummary:
    """Return the means over some records."""
    records = list(records)
    if not records:
        return FeedSummary(link_bytes_per_second=link_bytes_per_second)
    count = len(records)

    def mean(name: str) -> float:
        return sum(getattr(times, name) for times in records) / count

    copied = [times for times in records if not math.isnan(times.copy_seconds)]
    copying = sum(times.copy_seconds for times in copied)
    own = sum(not times.by_worker for times in records) / count
    return FeedSummary(
        batches=count,
        update=mean("update_seconds"),
        next=mean("next_seconds"),
        staging=mean("staging_seconds"),
        copy=copying / len(copied) if copied else math.nan,
        waiting=mean("wait_seconds"),
        step=mean("step_seconds"),
        prepared_by_trainer=own,
        bytes_per_second=(
            sum(times.nbytes for times in copied) / copying if copying else math.nan
        ),
        link_bytes_per_second=link_bytes_per_second,
    )


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"
