"""What a feed did: counts, bytes and the fallbacks it took."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

from .timings import FeedTimings


class FeedWarning(UserWarning):
    """Double buffering is not doing what was asked for; the message says why."""


@dataclass
class FeedStats:
    """Counts of one feed, from its start on.

    Attributes:
        batches: minibatches handed to the network.
        prefetched: those of them that were prepared before their turn: by a worker
            thread, or by a copy to the device that was queued ahead of the step.
        direct: those of them that were copied straight from page-locked arrays.
        workers: threads started.
        page_locked_bytes: the page-locked memory that minibatches are staged in.
        page_locked_in_place: the most memory of the iterator's own that was page-locked
            where it lies, in bytes.
        back_buffer_bytes: the most memory held by one back buffer (on the device, where
            the handler computes there).
        fallbacks: what was done instead of double buffering, and why.
        notes: what else a user may want to know.
        timings: where the time went, a :class:`FeedTimings`; None unless asked for.
    """

    batches: int = 0
    prefetched: int = 0
    direct: int = 0
    workers: int = 0
    page_locked_bytes: int = 0
    page_locked_in_place: int = 0
    back_buffer_bytes: int = 0
    fallbacks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    timings: FeedTimings | None = None

    @property
    def verdict(self) -> str:
        """One line: what holds the training back, and what to do about it."""
        if self.timings is None:
            return "feed: not timed (timed=True, or a hook such as MonitorFeed)"
        return self.timings.summary().verdict

    def note_staged(self, slot: Any) -> None:
        self.direct += slot.direct
        self.back_buffer_bytes = max(self.back_buffer_bytes, slot.nbytes)
        self.page_locked_bytes = max(self.page_locked_bytes, slot.page_locked_nbytes)

    def note(self, what: str) -> None:
        """Remember, once."""
        if what not in self.notes:
            self.notes.append(what)

    def note_fallback(self, reason: str) -> None:
        """Remember and warn, once a reason."""
        if reason not in self.fallbacks:
            self.fallbacks.append(reason)
            warnings.warn(reason, FeedWarning, stacklevel=3)
