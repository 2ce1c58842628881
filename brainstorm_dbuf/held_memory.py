"""Memory that data iterators hold: page-locked where it lies, once for a whole training.

A copy to the device from page-locked memory runs by itself at the rate of the link. The
minibatches of an iterator that holds its arrays are slices of them, so page-locking the
arrays once (25 GB/s) makes every slice ready to be copied, without a byte moved by the
host. It is done when the first slice of an array comes that could be copied as it is:
arrays that some wrapper casts or changes are left alone.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np

from . import _cuda, iterators
from .stats import FeedStats

DEFAULT_LIMIT = 0.5

# Smaller pieces may share a page with others: the C library maps none by itself below
# 32 MiB (M_MMAP_THRESHOLD), and the driver refuses a copy from memory that is partly
# page-locked.
REGION_MIN_BYTES = 32 << 20

# Asking the driver whether memory is page-locked costs about as much as copying this.
DIRECT_COPY_MIN_BYTES = 64 * 1024

# The copy engine takes some time for each row: shorter ones are better gathered.
ROW_MIN_BYTES = 256

_PAGE = os.sysconf("SC_PAGE_SIZE")

# All regions that are page-locked by any feed: they share what they lock.
_locked_regions: weakref.WeakSet[Region] = weakref.WeakSet()
_lock = threading.Lock()


class Region:
    """One piece of memory with held arrays in it.

    Attributes:
        low, high: addresses of its first byte and of the one behind its last.
        lies_still: whether nobody writes into it while minibatches are fetched.
    """

    def __init__(self, low: int, high: int, lies_still: bool, writable: bool) -> None:
        self.low = low
        self.high = high
        self.lies_still = lies_still
        self._writable = writable
        # Owned, perhaps with other feeds' regions: a view whose base undoes the
        # page-locking when it goes.
        self._locked: np.ndarray | None = None
        # Kept alive for as long as the memory may be page-locked.
        self.owners: list[np.ndarray] = []
        self._refused = False
        # Whether its arrays are page-locked by somebody who keeps them so.
        self.is_locked_by_owner = False

    @property
    def nbytes(self) -> int:
        return self.high - self.low

    @property
    def locked_bytes(self) -> int:
        return 0 if self._locked is None else self.nbytes

    def is_same(self, other: Region) -> bool:
        return (self.low, self.high) == (other.low, other.high)

    def lock(self, context: _cuda.Context, limit: float, stats: FeedStats) -> bool:
        """Page-lock the memory unless that was refused before; say whether it is."""
        if self._locked is None and not self._refused:
            self._refused = True
            with _lock:
                self._lock_once(context, limit, stats)
        return self._locked is not None

    def _lock_once(
        self, context: _cuda.Context, limit: float, stats: FeedStats
    ) -> None:
        others = [region for region in _locked_regions if region._locked is not None]
        for other in others:
            if self.is_same(other):
                self._locked = other._locked
                _locked_regions.add(self)
                return
            if self.low < other.high and other.low < self.high:
                return  # another feed's, which may let it go at any time
        if any(map(_cuda.is_pagelocked, self.owners)):
            self.is_locked_by_owner = True
            return
        pieces = {(region.low, region.high) for region in others}
        allowed = limit * memory_size() - sum(high - low for low, high in pieces)
        if self.nbytes > allowed:
            stats.note(
                f"{self.nbytes} bytes of data are over the limit for page-locking in "
                "place (page_lock_limit): they are staged"
            )
            return
        try:
            self._locked = self._register(context)
        except _cuda.CudaError as error:
            if error.context_is_lost:
                raise
            stats.note_fallback(
                f"data could not be page-locked where they lie ({error}): they are "
                "staged"
            )
        else:
            _locked_regions.add(self)

    def _register(self, context: _cuda.Context) -> np.ndarray:
        memory = (ctypes.c_uint8 * self.nbytes).from_address(self.low)
        memory.owners = list(self.owners)  # until it is page-locked no more
        view = np.frombuffer(memory, np.uint8)
        # Feeds of other devices share it.
        flags = _cuda.HOST_REGISTER_PORTABLE
        if self._writable:
            return _cuda.register_host_memory(view, flags, context=context)
        view.flags.writeable = False
        try:
            # Memory mapped for reading only cannot be page-locked otherwise.
            read_only = flags | _cuda.HOST_REGISTER_READ_ONLY
            return _cuda.register_host_memory(view, read_only, context=context)
        except _cuda.CudaError:
            # Not every device has that; memory may be writable behind such an array.
            return _cuda.register_host_memory(view, flags, context=context)

    def unlock(self) -> None:
        _locked_regions.discard(self)
        self._locked = None


class HeldMemory:
    """The memory that the iterators of one feed hold.

    Used by the thread that has the iterator, closed when no thread has.

    Args:
        context: in which memory is page-locked.
        copy_stream: on which minibatches are copied out of it.
        limit: the largest share of the machine's memory that may be page-locked.
        stats: where it is counted and noted.
    """

    def __init__(
        self,
        context: _cuda.Context,
        copy_stream: _cuda.Stream,
        limit: float,
        stats: FeedStats,
    ) -> None:
        self._context = context
        self._copy_stream = copy_stream
        self._limit = limit
        self._stats = stats
        self._held: list[np.ndarray] = []
        # By address; they never overlap.
        self._regions: list[Region] = []
        self._starts: list[int] = []

    def hold(self, iterator: Any) -> None:
        """Look at the arrays of the iterator that the next minibatches come from."""
        held, lies_still = iterators.data_of(iterator)
        if len(held) == len(self._held) and all(map(_is, held, self._held)):
            for region in self._regions:
                region.lies_still = lies_still
            return
        regions = list(_regions_of(held, lies_still))
        kept = []
        for region in regions:
            known = self._find(region.low)
            if known is not None and known.is_same(region):
                known.owners, known.lies_still = region.owners, region.lies_still
                region = known
            kept.append(region)
        gone = [region for region in self._regions if region not in kept]
        self._unlock(gone)
        self._held, self._regions = held, kept
        self._starts = [region.low for region in kept]

    def find(self, array: np.ndarray) -> Region | None:
        """Return the region that an array lies in, its memory page-locked if possible."""
        if not self._regions:
            return None
        low, high = _cuda.extent(array)
        region = self._find(low)
        return region if region is not None and high <= region.high else None

    def lies_ready(self, array: np.ndarray) -> bool:
        """Say whether an array that lies still can be copied from where it lies."""
        if not self._regions or not is_row_like(array):
            return False
        region = self.find(array)
        return region is not None and region.lies_still and self.lock(region)

    def lock(self, region: Region) -> bool:
        """Say whether a region is page-locked by now."""
        if region.locked_bytes:
            return True
        locked = region.lock(self._context, self._limit, self._stats)
        self._stats.page_locked_in_place = max(
            self._stats.page_locked_in_place, self.locked_bytes
        )
        return locked

    @property
    def locked_bytes(self) -> int:
        return sum(region.locked_bytes for region in self._regions)

    def close(self) -> None:
        self._unlock(self._regions)
        self._held, self._regions, self._starts = [], [], []

    def _find(self, address: int) -> Region | None:
        number = bisect.bisect_right(self._starts, address)
        return self._regions[number - 1] if number else None

    def _unlock(self, regions: list[Region]) -> None:
        if any(region.locked_bytes for region in regions):
            # A copy out of it may be queued.
            self._copy_stream.synchronize()
        for region in regions:
            region.unlock()


def is_row_like(array: np.ndarray) -> bool:
    """Say whether the copy engine would take an array, and quicker than it is staged."""
    return (
        array.nbytes >= DIRECT_COPY_MIN_BYTES
        and _cuda.row_bytes(array) >= ROW_MIN_BYTES
    )


@functools.cache
def memory_size() -> int:
    """Return how many bytes of memory this process may use, at most."""
    total = os.sysconf("SC_PHYS_PAGES") * _PAGE
    for path in (
        "/sys/fs/cgroup/memory.max",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    ):
        try:
            with open(path) as file:
                total = min(total, int(file.read()))
        except (OSError, ValueError):
            continue  # no such file, or it says "max"
    return total


def _regions_of(arrays: list[np.ndarray], lies_still: bool) -> Iterator[Region]:
    """Yield the memory that arrays are views of; what shares a page is one region.

    All of it: a copy from memory that is partly page-locked is refused by the driver
    (cuMemHostRegister), and others may have views of it. So not where most of it is
    nobody's here.
    """
    roots: dict[int, tuple[np.ndarray, list[np.ndarray]]] = {}
    for array in arrays:
        root = array
        while isinstance(root.base, np.ndarray):
            root = root.base
        roots.setdefault(id(root), (root, []))[1].append(array)
    spans = sorted(
        ((*_cuda.extent(root), root, held) for root, held in roots.values()),
        key=_low_and_high,
    )
    region: Region | None = None
    for low, high, root, held in spans:
        wanted = sum(array.nbytes for array in held)
        if high - low < REGION_MIN_BYTES or high - low > 2 * wanted or low == high:
            continue
        if region is not None and low // _PAGE <= (region.high - 1) // _PAGE:
            region.high = max(region.high, high)
            region._writable &= root.flags.writeable
        else:
            if region is not None:
                yield region
            region = Region(low, high, lies_still, root.flags.writeable)
        region.owners += [root, *held]
    if region is not None:
        yield region


def _low_and_high(span: tuple[int, int, Any, Any]) -> tuple[int, int]:
    return span[:2]


def _is(a: Any, b: Any) -> bool:
    return a is b


def check_limit(limit: float) -> float:
    """Return ``limit``.

    Raises:
        TypeError: it is not a number.
        ValueError: it is not from 0 to 1.
    """
    if isinstance(limit, bool) or not isinstance(limit, (int, float)):
        raise TypeError(
            f"page_lock_limit: expected a share of memory from 0 to 1, got {limit!r}"
        )
    if not 0 <= limit <= 1:
        raise ValueError(
            f"page_lock_limit: expected a share of memory from 0 to 1, got {limit!r}"
        )
    return limit
