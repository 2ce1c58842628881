"""Back buffers: where a minibatch waits until the network takes it.

A slot holds one whole minibatch, all of its inputs side by side in one block, so it
grows only when a larger minibatch comes than ever before. There are two kinds:

* :class:`HostSlot`, for a handler whose arrays are NumPy's: one block of memory.
* :class:`DeviceSlot`, for a handler whose arrays lie on a CUDA device: a device block,
  to which minibatches are gathered and cast on their way through a ring of page-locked
  memory. What lies in page-locked memory already is copied from there. Narrow numbers
  cross the link as they are, where the handler can widen them on the device. There, too,
  the smallest inputs stay on the host until the hand-over. Small ones share a copy.

Ownership and order. A slot belongs to one thread at a time: whoever claimed it fills
it, then passes it on with the minibatch; the trainer hands its contents over to the
network and gives it back. On the device two events order the copies, so nobody has to
wait on the host: ``copied`` (the slot is full) and ``consumed`` (its contents have
been taken and the next minibatch may come).
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import time
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from . import _cuda
from .copy_clock import CopyTimer
from .held_memory import HeldMemory, Region, is_row_like
from .one_hot import OneHotIndices

# Every input starts on a boundary that suits vector loads and the copy engine.
ALIGNMENT = 256

# Up to here an input waits in page-locked memory, and the kernel that hands it over reads
# it across the link. A copy of its own would keep the link idle for the time in which
# half a megabyte crosses: the copy engine takes that long to change over.
MOST_READ_BYTES = 16 << 10

# Inputs up to so many bytes in all cross the link in one copy. Each of its own would cost
# that change-over again.
MOST_TOGETHER_BYTES = 512 << 10


class Place:
    """Where one input lies within a slot, and as what.

    Attributes:
        shape: of the input as the network takes it.
        dtype: of what lies there: the handler's own, or what the handler makes it from.
        is_one_hot: whether there is one index for each row of ``shape[-1]`` features.
        packed: the dtype of what lies there, None for indices of one-hot rows.
        may_wait: whether it may stay on the host until the hand-over.
        offset: in bytes, from the start of the slot's block.
    """

    __slots__ = (
        "name",
        "shape",
        "dtype",
        "is_one_hot",
        "packed",
        "may_wait",
        "nbytes",
        "offset",
    )

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: np.dtype,
        is_one_hot: bool = False,
    ) -> None:
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self.is_one_hot = is_one_hot
        self.packed = None if is_one_hot else dtype
        self.may_wait = False
        self.nbytes = math.prod(self.held_shape) * dtype.itemsize
        self.offset = 0

    @property
    def end(self) -> int:
        """In bytes, from the start of the slot's block."""
        return self.offset + self.nbytes

    @property
    def held_shape(self) -> tuple[int, ...]:
        """The shape of what lies there."""
        return (*self.shape[:-1], 1) if self.is_one_hot else self.shape


def _nbytes_of(place: Place) -> int:
    return place.nbytes


def lay_out(places: Iterable[Place], start: int = 0) -> int:
    """Put places one after another; return the end in bytes."""
    end = start
    for place in places:
        place.offset = end
        end += -(-place.nbytes // ALIGNMENT) * ALIGNMENT
    return end


class HostSlot:
    """A minibatch in ordinary memory, of the handler's dtype, C-contiguous."""

    page_locked_nbytes = 0
    timer = None

    def __init__(self, access: Any) -> None:
        self._dtype = access.dtype
        self._block = np.empty(0, np.uint8)
        self._places: list[Place] = []
        self.direct = self.source_in_use = self.lies_still = False
        # What the last `fill` spent on getting memory, in seconds.
        self.reserve_seconds = 0.0

    @property
    def nbytes(self) -> int:
        return self._block.nbytes

    @property
    def filled_nbytes(self) -> int:
        """Bytes of the minibatch."""
        return sum(place.nbytes for place in self._places)

    def fill(self, arrays: Mapping[str, np.ndarray], kind: Any = None) -> None:
        """Gather and cast ``arrays`` into this slot.

        Raises:
            MemoryError: a larger block was needed and could not be had.
        """
        self._places = [
            Place(name, array.shape, self._dtype) for name, array in arrays.items()
        ]
        needed = lay_out(self._places)
        self._leave_to_holders()
        if needed > self._block.nbytes:
            self._block = np.empty(needed, np.uint8)
        for place in self._places:
            _cuda.stage(self._view(place), arrays[place.name])

    def hand_over(self, fronts: Mapping[str, np.ndarray]) -> None:
        """Copy the inputs named in ``fronts`` into those arrays of the network."""
        for place in self._places:
            front = fronts.get(place.name)
            if front is not None:
                np.copyto(front, self._view(place))

    def lend(self) -> dict[str, np.ndarray]:
        """Return the inputs as arrays over this slot's memory.

        They stay right for as long as somebody holds them: a block that is still
        looked at when the next minibatch comes is left to its holders.
        """
        return {place.name: self._view(place) for place in self._places}

    def take_back(self) -> None:
        """End :meth:`lend`."""

    def _leave_to_holders(self) -> None:
        """Give the block up if somebody still looks at what was lent.

        Not before the next minibatch comes: a loop lets go of its last one only then.
        """
        if _is_held(self._block):
            self._block = np.empty(0, np.uint8)

    def read_back(self) -> dict[str, np.ndarray]:
        """Return copies of the inputs."""
        return {place.name: self._view(place).copy() for place in self._places}

    def wait_copied(self) -> None:
        """Nothing is in flight: :meth:`fill` returns when all bytes are there."""

    def close(self) -> None:
        """Nobody reads it any more."""

    def _view(self, place: Place) -> np.ndarray:
        return np.ndarray(place.shape, self._dtype, self._block, place.offset)


class DeviceSlot:
    """A minibatch on its way to the device, and there.

    Args:
        access: how to reach the handler's arrays.
        held: the memory that the iterators hold, if it may be page-locked in place.
        lends: whether the slot is lent as arrays; then it has room for them.
    """

    def __init__(
        self, access: Any, held: HeldMemory | None = None, lends: bool = False
    ) -> None:
        self._access = access
        self._held = held
        self._lends = lends
        self._dtype = access.dtype
        # Owned. Freeing it waits for the device.
        self._memory: _cuda.DeviceMemory | None = None
        # What the arrays that were lent keep alive; it may be gone.
        self._loan: weakref.ref[_Loan] | None = None
        # Owned: where the inputs lie that wait on the host. Minibatches take its halves
        # in turn: the one before may not have been handed over yet.
        self._host: np.ndarray | None = None
        self._half_nbytes = 0
        self._half = 0
        # Whether those of this minibatch do.
        self._waits = False
        self._copied = _cuda.Event(access.context, blocking_sync=True)
        # Recorded once what takes the last minibatch of each half is queued.
        self._consumed = (_cuda.Event(access.context), _cuda.Event(access.context))
        self._last_consumed: _cuda.Event | None = None
        # Owned, where the feed is timed.
        clock = access.copy_clock
        self.timer = None if clock is None else CopyTimer(clock)
        self._places: list[Place] = []
        # What of them may wait on the host; what goes through the staging ring together,
        # these included, and without them where they wait; what goes there by itself;
        # what is copied from where it lies.
        self._small: list[Place] = []
        self._together = self._rest = _Together([])
        self._staged: list[Place] = []
        self._direct: list[Place] = []
        # Those with something in them, in the order of `_places`, and where each lies:
        # on the device, or with what waits on the host in its first or second half.
        self._filled: list[Place] = []
        self._sources: list[list[int]] = []
        # Views of what waits on the host, for each half, in the order of `_small`.
        self._on_host: list[list[np.ndarray]] = []
        # The kind of minibatch that all this was planned for, if it holds for the next.
        self._kind: Any = None
        # Where inputs that the handler has to unpack lie when they are lent.
        self._unpacked: dict[str, Place] = {}
        # Whether copies are queued straight from arrays that their owner may use again.
        self.source_in_use = False
        # What the last `fill` spent on getting memory, in seconds.
        self.reserve_seconds = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of device memory held."""
        return 0 if self._memory is None else self._memory.nbytes

    @property
    def filled_nbytes(self) -> int:
        """Bytes of the minibatch, as it crosses the link."""
        return sum(place.nbytes for place in self._places)

    @property
    def page_locked_nbytes(self) -> int:
        """Bytes of the staging ring, which all slots of the feed share."""
        staging = self._access.staging
        return 0 if staging is None else staging.nbytes

    @property
    def direct(self) -> bool:
        """Whether `fill` has queued copies straight from the user's own arrays."""
        return bool(self._direct)

    @property
    def lies_still(self) -> bool:
        """Whether `fill` has queued copies from data that nobody writes to."""
        return bool(self._direct) and not self.source_in_use

    def fill(
        self, arrays: Mapping[str, np.ndarray | OneHotIndices], kind: Any = None
    ) -> None:
        """Bring ``arrays`` to the device: queue their copies, staged where need be.

        Arrays that are page-locked already and need no cast are copied straight from
        where they lie. If ``source_in_use`` is true afterwards, their owner must not
        change them before :meth:`wait_copied` returns.

        Args:
            arrays: the inputs.
            kind: the same object for minibatches of plain arrays with the same names,
                shapes and dtypes, else a new one; None where that is not known.

        Raises:
            CudaMemoryError: page-locked or device memory ran short.
        """
        self.reserve_seconds = 0.0
        self.source_in_use = False
        self._leave_to_holders()
        if kind is None or kind is not self._kind or not self._lie_as_before(arrays):
            arrays = self._plan(arrays)
            self._kind = kind
        stream = self._access.copy_stream
        if self._last_consumed is not None:
            stream.wait_event(self._last_consumed)
        self._half ^= 1
        if self.timer is not None:
            self.timer.begin(stream)
        # First what keeps the link busy while the rest is being gathered.
        for place in self._direct:
            _cuda.memcpy_htod_rows_async(
                self._address(place), arrays[place.name], stream
            )
        self._waits = bool(self._small) and self._is_consumed()
        if self._waits:
            for place, view in zip(self._small, self._on_host[self._half]):
                _cuda.stage(view, arrays[place.name])
        staging = self._access.staging
        together = self._rest if self._waits else self._together
        if together.places:
            together.stage(arrays, int(self._memory), staging, stream)
        for place in self._staged:
            staging.memcpy_htod_async(
                self._address(place), arrays[place.name], place.dtype, stream
            )
        if self.timer is not None:
            self.timer.end(stream)
        self._copied.record(stream)

    def _plan(
        self, arrays: Mapping[str, np.ndarray | OneHotIndices]
    ) -> dict[str, np.ndarray]:
        """Decide where each input goes and how; return where they come from."""
        self._kind = None
        sources, staged, direct = {}, [], []
        for name, array in arrays.items():
            place, source = self._place(name, array)
            sources[name] = source
            (direct if self._lies_ready(source, place) else staged).append(place)
        empty = [place for place in staged if not place.nbytes]
        # The smallest first: those share a copy, and the first of these may wait on the
        # host, at the same offsets there.
        staged = sorted((place for place in staged if place.nbytes), key=_nbytes_of)
        self._places = [*staged, *empty, *direct]
        end = lay_out(self._places)
        shared = [place for place in staged if place.end <= MOST_TOGETHER_BYTES]
        alone = staged[len(shared) :]
        small = [place for place in shared if self._may_wait(place)]
        if self._lends:
            self._unpacked = {
                place.name: Place(place.name, place.shape, self._dtype)
                for place in self._places
                if place.dtype != self._dtype
            }
            end = lay_out(self._unpacked.values(), end)
        self._small, self._direct = [], []
        together = _Together(shared)
        self._reserve(end, [together.nbytes, *map(_nbytes_of, alone)] if staged else [])
        self._reserve_host(lay_out(small))
        self._small, self._staged, self._direct = small, alone, direct
        self._together, self._rest = together, _Together(shared[len(small) :])
        self._find_places()
        return sources

    def _find_places(self) -> None:
        """Note where the inputs lie, which is the same for minibatches of one kind."""
        self._filled = [place for place in self._places if place.nbytes]
        self._on_host = [
            [self._view_on_host(place, half) for place in self._small]
            for half in range(2)
        ]
        on_device = [self._address(place) for place in self._filled]
        rest = on_device[len(self._small) :]
        self._sources = [on_device] + [
            [*(view.ctypes.data for view in views), *rest] for views in self._on_host
        ]

    def _may_wait(self, place: Place) -> bool:
        """Note and say whether an input may stay on the host until the hand-over."""
        place.may_wait = (
            place.nbytes <= MOST_READ_BYTES
            and self._access.unpack is not None
            and not self._lends
        )
        return place.may_wait

    def _lie_as_before(self, arrays: Mapping[str, np.ndarray]) -> bool:
        """Say whether what was copied from where it lies can be so again."""
        return all(
            self._lies_ready(arrays[place.name], place) for place in self._direct
        )

    def hand_over(self, fronts: Mapping[str, Any]) -> None:
        """Queue the copy of the inputs named in ``fronts`` into those arrays.

        Everything happens on the handler's compute stream, so the kernels that are
        queued next read the new minibatch and those queued before read the old one.
        """
        self._access.compute_stream.wait_event(self._copied)
        sources = self._sources[1 + self._half if self._waits else 0]
        taken = [
            (fronts[place.name], source, place)
            for place, source in zip(self._filled, sources)
            if place.name in fronts
        ]
        if taken:
            self._access.copy_to_fronts(*zip(*taken))
        self._record_consumed()

    def lend(self) -> dict[str, Any]:
        """Return the inputs as the handler's own arrays over this slot's memory.

        Work that is queued on the compute stream from now on finds them filled. They
        stay right for as long as somebody holds them: memory that is still looked at
        when the next minibatch comes is left to its holders.
        """
        compute = self._access.compute_stream
        compute.wait_event(self._copied)
        loan = _Loan(self._memory, self._consumed[self._half], compute)
        self._loan = weakref.ref(loan)
        arrays = {}
        for place in self._places:
            lent = self._unpacked.get(place.name, place)
            arrays[place.name] = self._access.wrap(loan, lent.offset, lent.shape)
        packed = [place for place in self._filled if place.name in self._unpacked]
        if packed:
            self._access.copy_to_fronts(
                [arrays[place.name] for place in packed],
                [self._address(place) for place in packed],
                packed,
            )
        return arrays

    def take_back(self) -> None:
        """End :meth:`lend`: what was queued until now still reads this minibatch."""
        self._record_consumed()

    def _leave_to_holders(self) -> None:
        """As :meth:`HostSlot._leave_to_holders`."""
        if self._loan is not None and self._loan() is not None:
            self._memory = self._kind = None
        self._loan = None

    def read_back(self) -> dict[str, np.ndarray]:
        """Return copies of the inputs, in ordinary host memory."""
        self.wait_copied()
        arrays = {}
        for place in self._places:
            array = np.empty(place.held_shape, place.dtype)
            if self._waits_on_host(place):
                array[...] = self._view_on_host(place, self._half)
            elif place.nbytes:
                _cuda.memcpy_dtoh(array, self._address(place))
            if place.is_one_hot:
                array = OneHotIndices(array, place.shape[-1]).expand()
            arrays[place.name] = array.astype(self._dtype, copy=False)
        return arrays

    def wait_copied(self) -> None:
        """Wait until the copies that :meth:`fill` queued are done."""
        if self._copied.recorded and not self._copied.query():
            self._copied.synchronize()

    def close(self) -> None:
        """Wait until nobody reads the inputs that wait on the host any more."""
        if self._host is not None:
            self._wait_consumed()
        if self.timer is not None:
            self.timer.tell()

    def _place(
        self, name: str, array: np.ndarray | OneHotIndices
    ) -> tuple[Place, np.ndarray]:
        """Return as what an input crosses the link, and the array that it comes from."""
        if isinstance(array, OneHotIndices):
            return Place(name, array.shape, array.indices.dtype, True), array.indices
        crosses_as_it_is = array.dtype in self._access.unpacks
        dtype = array.dtype if crosses_as_it_is else self._dtype
        return Place(name, array.shape, dtype), array

    def _record_consumed(self) -> None:
        """This minibatch is taken once what is queued on the compute stream has run."""
        self._last_consumed = self._consumed[self._half]
        self._last_consumed.record(self._access.compute_stream)

    def _is_consumed(self) -> bool:
        """Say whether what lay in this half is taken, as far as the host knows."""
        event = self._consumed[self._half]
        return not event.recorded or event.query()

    def _wait_consumed(self) -> None:
        for event in self._consumed:
            if event.recorded and not event.query():
                event.synchronize()

    def _waits_on_host(self, place: Place) -> bool:
        return place.may_wait and self._waits

    def _view_on_host(self, place: Place, half: int) -> np.ndarray:
        offset = half * self._half_nbytes + place.offset
        return np.ndarray(place.held_shape, place.dtype, self._host, offset)

    def _address(self, place: Place) -> int:
        return int(self._memory) + place.offset

    def _lies_ready(self, array: np.ndarray, place: Place) -> bool:
        """Say whether an array can be copied from where it lies."""
        if array.dtype != place.dtype or not is_row_like(array):
            return False
        region = self._held and self._held.find(array)
        if region is None:
            is_ready = self._is_pagelocked(array)
        else:
            is_ready = self._lock(region) or (
                region.is_locked_by_owner and self._is_pagelocked(array)
            )
        if not is_ready:
            return False
        if region is None or not region.lies_still:
            self.source_in_use = True
        return True

    def _is_pagelocked(self, array: np.ndarray) -> bool:
        return _cuda.is_pagelocked(array, context=self._access.context)

    def _lock(self, region: Region) -> bool:
        started = time.perf_counter()
        locked = self._held.lock(region)
        self.reserve_seconds += time.perf_counter() - started
        return locked

    def _reserve(self, nbytes: int, staged_sizes: list[int]) -> None:
        """Make room; a larger block replaces one that is too small.

        The old one goes first, so the two never exist side by side. What is queued is
        safe: freeing memory waits for the device.
        """
        started = time.perf_counter()
        if staged_sizes:
            self._access.reserve_staging(staged_sizes)
        if nbytes > self.nbytes:
            if self.nbytes:
                # Until a copy is known to be done it holds both of its ends.
                self._access.copy_stream.synchronize()
            self._memory = None
            self._memory = _cuda.mem_alloc(nbytes, self._access.context)
        self.reserve_seconds += time.perf_counter() - started

    def _reserve_host(self, nbytes: int) -> None:
        """Make room for the inputs that wait on the host."""
        started = time.perf_counter()
        if nbytes > self._half_nbytes:
            self._wait_consumed()
            self._host, self._half_nbytes = None, 0
            self._host = _cuda.pagelocked_empty(
                2 * nbytes, np.uint8, context=self._access.context
            )
            self._half_nbytes = nbytes
        self.reserve_seconds += time.perf_counter() - started


class _Together:
    """Inputs that are gathered side by side, to cross the link in one copy."""

    __slots__ = ("places", "nbytes", "_start", "_offsets", "_dtypes")

    def __init__(self, places: list[Place]) -> None:
        self.places = places
        self._start = places[0].offset if places else 0
        self._offsets = [place.offset - self._start for place in places]
        self._dtypes = [place.dtype for place in places]
        self.nbytes = places[-1].end - self._start if places else 0

    def stage(
        self,
        arrays: Mapping[str, np.ndarray],
        address: int,
        staging: _cuda.StagingRing,
        stream: _cuda.Stream,
    ) -> None:
        """Queue the copy to a block at ``address``."""
        if len(self.places) == 1 or self.nbytes > staging.place_nbytes:
            # No larger ring could be had: each by itself.
            for place in self.places:
                staging.memcpy_htod_async(
                    address + place.offset, arrays[place.name], place.dtype, stream
                )
            return
        staging.memcpy_htod_packed_async(
            address + self._start,
            [arrays[place.name] for place in self.places],
            self._offsets,
            self._dtypes,
            stream,
        )


class _Loan:
    """What lent arrays hold: an address, and the device memory behind it.

    The memory itself is held by copies in flight as well, so its references do not
    tell whether anybody still looks at it.
    """

    __slots__ = ("memory", "_consumed", "_stream", "__weakref__")

    def __init__(
        self,
        memory: _cuda.DeviceMemory | None,
        consumed: _cuda.Event,
        stream: _cuda.Stream,
    ) -> None:
        self.memory = memory
        self._consumed = consumed
        self._stream = stream

    def __int__(self) -> int:
        return 0 if self.memory is None else int(self.memory)

    def __del__(self) -> None:
        # Who has held it until now may have read it after take_back(). Where the driver
        # is gone, nobody can write to it either.
        with contextlib.suppress(_cuda.CudaError, ValueError):
            self._consumed.record(self._stream)


def _is_held(owner: object) -> bool:
    """Say whether anybody but the slot's attribute refers to ``owner``."""
    return sys.getrefcount(owner) > _references_of_a_lone_object()


@functools.cache
def _references_of_a_lone_object() -> int:
    """Count what `_is_held` sees of an object that one attribute refers to.

    Measured, not known: how many references a call itself adds differs between
    Python versions.
    """

    def count(owner: object) -> int:
        return sys.getrefcount(owner)

    class Slot:
        block = None

    slot = Slot()
    slot.block = object()
    return count(slot.block)
