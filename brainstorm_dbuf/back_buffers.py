"""Back buffers: where a minibatch waits until the network takes it.

A slot holds one whole minibatch, all of its inputs side by side in one block, so it
grows only when a larger minibatch comes than ever before. There are two kinds:

* :class:`HostSlot`, for a handler whose arrays are NumPy's: one block of memory.
* :class:`DeviceSlot`, for a handler whose arrays lie on a CUDA device: a page-locked
  block that minibatches are gathered and cast into, and a device block that it is
  copied to.

Ownership and order. A slot belongs to one thread at a time: whoever claimed it fills
it, then passes it on with the minibatch; the trainer hands its contents over to the
network and gives it back. On the device two events order the copies, so nobody has to
wait on the host: ``copied`` (the slot is full) and ``consumed`` (its contents have
been taken and the next minibatch may come).
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from . import _cuda

# Every input starts on a boundary that suits vector loads and the copy engine.
ALIGNMENT = 256

# Asking the driver whether memory is page-locked costs about as much as copying this.
DIRECT_COPY_MIN_BYTES = 64 * 1024


class Place:
    """Where one input lies within a slot."""

    __slots__ = ("name", "offset", "shape", "nbytes")

    def __init__(self, name: str, offset: int, shape: tuple[int, ...], nbytes: int):
        self.name = name
        self.offset = offset
        self.shape = shape
        self.nbytes = nbytes


def lay_out(
    arrays: Iterable[tuple[str, np.ndarray]], itemsize: int, start: int = 0
) -> tuple[list[Place], int]:
    """Place arrays one after another; return the places and the end in bytes."""
    places = []
    end = start
    for name, array in arrays:
        nbytes = array.size * itemsize
        places.append(Place(name, end, array.shape, nbytes))
        end += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return places, end


class HostSlot:
    """A minibatch in ordinary memory, of the handler's dtype, C-contiguous."""

    def __init__(self, access: Any) -> None:
        self._dtype = access.dtype
        self._block = np.empty(0, np.uint8)
        self._places: list[Place] = []
        self.direct = False
        # What the last `fill` spent on getting memory, in seconds.
        self.reserve_seconds = 0.0

    @property
    def nbytes(self) -> int:
        return self._block.nbytes

    def fill(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Gather and cast ``arrays`` into this slot.

        Raises:
            MemoryError: a larger block was needed and could not be had.
        """
        self._places, needed = lay_out(arrays.items(), self._dtype.itemsize)
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
        looked at is left to its holders, see :meth:`take_back`.
        """
        return {place.name: self._view(place) for place in self._places}

    def take_back(self) -> None:
        """End :meth:`lend`."""
        if _is_held(self._block):
            self._block = np.empty(0, np.uint8)

    def read_back(self) -> dict[str, np.ndarray]:
        """Return copies of the inputs."""
        return {place.name: self._view(place).copy() for place in self._places}

    def wait_copied(self) -> None:
        """Nothing is in flight: :meth:`fill` returns when all bytes are there."""

    def _view(self, place: Place) -> np.ndarray:
        return np.ndarray(place.shape, self._dtype, self._block, place.offset)


class DeviceSlot:
    """A minibatch on its way to the device, and there."""

    def __init__(self, access: Any) -> None:
        self._access = access
        self._dtype = access.dtype
        # Owned. The page-locked block may be dropped while a copy out of it is in
        # flight (the copy holds it); freeing device memory waits for the device.
        self._staging: np.ndarray | None = None
        self._memory: _cuda.DeviceMemory | None = None
        # What the arrays that are lent keep alive.
        self._loan: _Loan | None = None
        self._copied = _cuda.Event(access.context, blocking_sync=True)
        self._consumed = _cuda.Event(access.context)
        self._places: list[Place] = []
        # True while `fill` has queued copies straight from the user's own arrays.
        self.direct = False
        # What the last `fill` spent on getting memory, in seconds.
        self.reserve_seconds = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of device memory held."""
        return 0 if self._memory is None else self._memory.nbytes

    @property
    def page_locked_nbytes(self) -> int:
        return 0 if self._staging is None else self._staging.nbytes

    def fill(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Gather and cast ``arrays`` into page-locked memory and queue their copy.

        Arrays that are page-locked already and need no cast are copied straight from
        where they lie; then ``direct`` is true, and their owner must not change them
        before :meth:`wait_copied` returns.

        Raises:
            CudaMemoryError: page-locked or device memory ran short.
        """
        direct = [item for item in arrays.items() if self._lies_ready(item[1])]
        taken = {name for name, _ in direct}
        staged = [item for item in arrays.items() if item[0] not in taken]
        staged_places, staged_end = lay_out(staged, self._dtype.itemsize)
        direct_places, end = lay_out(direct, self._dtype.itemsize, staged_end)
        self._reserve(staged_end, end)
        self._places = staged_places + direct_places
        self.direct = bool(direct)

        stream = self._access.copy_stream
        if self._consumed.recorded:
            stream.wait_event(self._consumed)
        if staged_end:
            self._wait_staging_is_free()
            for place in staged_places:
                view = np.ndarray(
                    place.shape, self._dtype, self._staging, place.offset
                )
                _cuda.stage(view, arrays[place.name])
            _cuda.memcpy_htod_async(
                self._memory, self._staging[:staged_end], stream
            )
        for place in direct_places:
            _cuda.memcpy_htod_async(
                int(self._memory) + place.offset, arrays[place.name], stream
            )
        self._copied.record(stream)

    def hand_over(self, fronts: Mapping[str, Any]) -> None:
        """Queue the copy of the inputs named in ``fronts`` into those arrays.

        Everything happens on the handler's compute stream, so the kernels that are
        queued next read the new minibatch and those queued before read the old one.
        """
        compute = self._access.compute_stream
        compute.wait_event(self._copied)
        for place in self._places:
            front = fronts.get(place.name)
            if front is not None and place.nbytes:
                self._access.copy_to_front(
                    front, int(self._memory) + place.offset, place.nbytes
                )
        self._consumed.record(compute)

    def lend(self) -> dict[str, Any]:
        """Return the inputs as the handler's own arrays over this slot's memory.

        Work that is queued on the compute stream from now on finds them filled.
        """
        self._access.compute_stream.wait_event(self._copied)
        self._loan = _Loan(self._memory)
        return {
            place.name: self._access.wrap(self._loan, place.offset, place.shape)
            for place in self._places
        }

    def take_back(self) -> None:
        """End :meth:`lend`: what was queued until now still reads this minibatch."""
        self._consumed.record(self._access.compute_stream)
        if _is_held(self._loan):
            self._memory = None
        self._loan = None

    def read_back(self) -> dict[str, np.ndarray]:
        """Return copies of the inputs, in ordinary host memory."""
        self.wait_copied()
        arrays = {}
        for place in self._places:
            array = arrays[place.name] = np.empty(place.shape, self._dtype)
            if place.nbytes:
                _cuda.memcpy_dtoh(array, int(self._memory) + place.offset)
        return arrays

    def wait_copied(self) -> None:
        """Wait until the copies that :meth:`fill` queued are done."""
        if self._copied.recorded and not self._copied.query():
            self._copied.synchronize()

    # Waiting here is rare: the slot was used a whole ring of minibatches ago.
    _wait_staging_is_free = wait_copied

    def _lies_ready(self, array: np.ndarray) -> bool:
        return (
            array.nbytes >= DIRECT_COPY_MIN_BYTES
            and array.dtype == self._dtype
            and array.flags.c_contiguous
            and _cuda.is_pagelocked(array)
        )

    def _reserve(self, staging_bytes: int, device_bytes: int) -> None:
        """Make room; a larger block replaces one that is too small.

        The old one goes first, so the two never exist side by side. What is queued is
        safe: freeing memory waits for the device.
        """
        self.reserve_seconds = 0.0
        if staging_bytes <= self.page_locked_nbytes and device_bytes <= self.nbytes:
            return
        started = time.perf_counter()
        context = self._access.context
        if self.nbytes:
            # Until a copy is known to be done it holds both of its ends.
            self._access.copy_stream.synchronize()
        if staging_bytes > self.page_locked_nbytes:
            self._staging = None
            self._staging = _cuda.pagelocked_empty(
                staging_bytes, np.uint8, context=context
            )
        if device_bytes > self.nbytes:
            self._memory = None
            self._memory = _cuda.mem_alloc(device_bytes, context)
        self.reserve_seconds = time.perf_counter() - started


class _Loan:
    """What lent arrays hold: an address, and the device memory behind it.

    The memory itself is held by copies in flight as well, so its references do not
    tell whether anybody still looks at it.
    """

    __slots__ = ("memory",)

    def __init__(self, memory: _cuda.DeviceMemory | None) -> None:
        self.memory = memory

    def __int__(self) -> int:
        return 0 if self.memory is None else int(self.memory)


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
