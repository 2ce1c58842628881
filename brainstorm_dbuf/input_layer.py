"""The double-buffered Input layer: a ring of back buffers behind the network's inputs.

brainstorm's Input layer has one buffer an input, the front, which its consumers read
where it lies. This companion of it owns the back buffers, one slot a minibatch, and
hands a minibatch over by copying its slot to the front: on a device that costs about a
fortieth of the copy from the host, and no view of brainstorm's buffers has to change.

A minibatch that cannot wait in a slot (its arrays lie on the device already, or memory
ran short) stays as the iterator gave it, and goes to the network brainstorm's own way.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

from . import _cuda, minibatch
from .access import CudaAccess, HostAccess, is_contiguous
from .back_buffers import DeviceSlot, HostSlot
from .held_memory import HeldMemory
from .minibatch import Kind
from .one_hot import OneHotIndices, expanded
from .stats import FeedStats
from .timings import BatchTimes


class Batch:
    """A minibatch on its way to the network."""

    __slots__ = ("kind", "slot", "data", "times")

    def __init__(
        self,
        kind: Kind,
        slot: HostSlot | DeviceSlot | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> None:
        self.kind = kind
        # Until the hand-over: either the slot it lies in, which it has claimed, or
        # the arrays that the iterator yielded.
        self.slot = slot
        self.data = data
        # Where the feed is timed.
        self.times: BatchTimes | None = None


class DoubleBufferedInput:
    """The back buffers of one feed.

    Args:
        handler: the handler of the network that is fed.
        access: how to reach the handler's arrays.
        slots: how many back buffers there may be.
        stats: where bytes and fallbacks are counted.
        held: the memory that the iterators hold, if it may be page-locked in place.
        lends: whether minibatches are lent as arrays.
    """

    def __init__(
        self,
        handler: Any,
        access: HostAccess | CudaAccess,
        slots: int,
        stats: FeedStats,
        held: HeldMemory | None = None,
        lends: bool = False,
    ) -> None:
        self._handler = handler
        self._held = held
        self._lends = lends
        self._access = access
        self.queues_copies = access.queues_copies
        self._stats = stats
        # Minibatches mostly come as the one before: what was found out about that one
        # (names asked for, kind), and what its kind was compared with.
        self._names: frozenset[str] | None = None
        self._kind: Kind | None = None
        self._fits: tuple[Kind, Any, bool] | None = None
        # What `puts` has found out; None: nothing, since the last kind was another one.
        self._puts: bool | None = False
        # Then: the network's inputs in the order of its arrays, and whether each is so
        # small that the handler's own copy is best.
        self._inputs: tuple[str, ...] = ()
        self._sets = False
        # Whether there was no memory for `put`.
        self._is_short = False
        # What `put` brings to the network, in bytes.
        self.put_nbytes = 0
        # Whether `put` has queued copies from where the iterator's data lie.
        self._reads_data = False
        self._lock = threading.Condition()
        # Guarded by the lock: the slots nobody has claimed, and how many there are.
        self._free: deque[HostSlot | DeviceSlot] = deque()
        self._slots = 0
        self._allowed = slots
        # Set when the feed ends, so that a thread that is late keeps nothing alive.
        self._closed = False

    def close(self) -> None:
        with self._lock:
            self._closed = True
            slots = list(self._free)
            self._free.clear()
            self._slots = self._allowed = 0
            self._lock.notify_all()
        for slot in slots:
            slot.close()

    # ------------------------------ before the step ------------------------------ #

    @property
    def most_ahead(self) -> int:
        """How many minibatches can wait in back buffers.

        Beside the one that is lent, and the one before, which may still be held.
        """
        beside = self._allowed - self._lends
        return max(beside - self._lends, min(beside, 1))

    def stage(
        self,
        data: Mapping[str, Any],
        names: frozenset[str] | None,
        inline: bool,
        is_over: Callable[[], bool],
    ) -> Batch:
        """Put a minibatch into a back buffer and queue its copy to the device.

        Runs on any thread. A minibatch that needs no back buffer, or gets none, stays
        as it was given: one with arrays on the device, or on the host one that the
        trainer's own thread fetched (``inline``).

        Args:
            data: what the iterator yielded.
            names: the network's inputs; other entries are left alone. None for all.
            inline: this is the thread that hands minibatches over.
            is_over: whether nobody wants it any more, so that it need not wait for a
                back buffer. Asked again after :meth:`wake`.

        Raises:
            TypeError, ValueError: ``data`` is no minibatch; the message names the input.
        """
        kind = self._kind
        if (
            kind is not None
            and names is self._names
            and _cuda.has_signature(data, kind.signature)
        ):
            arrays = kind.used(data)
        else:
            kind, arrays = self._look_at(data, names)
            if kind.signature is not None:
                self._names, self._kind = names, kind
        if kind.on_device or (inline and not self._access.queues_copies):
            return Batch(kind, data=arrays)
        while (slot := self._claim(is_over, may_wait=not inline)) is not None:
            try:
                slot.fill(arrays, kind)
            except MemoryError as error:
                self._step_down(error)
            except BaseException:
                self.give_back(slot)
                raise
            else:
                self._stats.note_staged(slot)
                return Batch(kind, slot)
        return Batch(kind, data=arrays)

    def _look_at(
        self, data: Mapping[str, Any], names: frozenset[str] | None
    ) -> tuple[Kind, dict[str, Any]]:
        """Check a minibatch and return its kind and the arrays that are used."""
        time_size, batch_size = minibatch.time_and_batch_size(data)
        on_device = False
        arrays = {}
        for name, array in data.items():
            if names is not None and name not in names:
                continue
            if self._access.is_own_array(array):
                on_device = True
                self._check_device_array(name, array)
            elif not isinstance(array, OneHotIndices):
                array = minibatch.as_numbers(name, array, self._access.dtype)
            arrays[name] = array
        shapes = {name: tuple(array.shape) for name, array in arrays.items()}
        seen = minibatch.signature(data)
        return Kind(time_size, batch_size, tuple(data), shapes, on_device, seen), arrays

    def _check_device_array(self, name: str, array: Any) -> None:
        """brainstorm copies the bytes of a device array without a look at it."""
        if array.dtype != self._access.dtype or not is_contiguous(array):
            raise ValueError(
                f"input {name!r}: expected a C-contiguous device array of "
                f"{self._access.dtype}, got one of {array.dtype} with shape "
                f"{tuple(array.shape)} and strides {tuple(array.strides)}"
            )

    def _claim(
        self, is_over: Callable[[], bool], may_wait: bool
    ) -> HostSlot | DeviceSlot | None:
        """Return a new slot, a free one, or None where there is memory for none.

        Who gives slots back must not wait for one: None where there were more once.
        """
        with self._lock:
            while (
                self._slots
                and self._slots == self._allowed
                and not self._free
                and not is_over()
            ):
                if not may_wait:
                    return None
                self._lock.wait()
            if is_over():
                return None
            # The copy out of a slot just given back may not have run: filling that one
            # again would wait for it, another one does not.
            is_whole_ring = self._slots == self._allowed
            if self._free and (is_whole_ring or not self._access.queues_copies):
                return self._free.popleft()
            if self._closed or not self._allowed:
                return None
            self._slots += 1
        try:
            return self._new_slot()
        except BaseException:
            with self._lock:
                self._slots -= 1
            raise

    def _new_slot(self) -> HostSlot | DeviceSlot:
        return self._access.new_slot(self._held, self._lends)

    def _step_down(self, error: MemoryError) -> None:
        """Go on with one back buffer less: the one that was to grow is let go."""
        with self._lock:
            self._slots -= 1
            self._allowed = self._slots
            left = self._allowed
        what = (
            f"double buffering goes on with {left} back buffer{'s' * (left > 1)}"
            if left
            else "minibatches now take brainstorm's own path, nothing is prefetched"
        )
        self._stats.note_fallback(
            f"memory for a back buffer ran short ({error}): {what}"
        )

    # -------------------------------- at the step -------------------------------- #

    def hand_over(self, batch: Batch, net: Any, all_inputs: bool = True) -> None:
        """Make ``batch`` the network's current minibatch. The trainer's thread only.

        Raises:
            KeyError: an input is missing and ``all_inputs`` is true.
            ValueError: an input has another shape than the network expects.
        """
        kind = batch.kind
        slot, data, batch.slot, batch.data = batch.slot, batch.data, None, None
        try:
            self._check_fit(kind, net, all_inputs)
            if slot is not None and net.handler is not self._handler:
                # A hook has given the network another handler during the pass.
                data = slot.read_back()
            if data is None:
                net.buffer = net._buffer_manager.resize(kind.time_size, kind.batch_size)
                slot.hand_over(self._fronts(kind, net))
        finally:
            # Also where it does not fit: the pass ends, the feed may go on.
            if slot is not None:
                self.give_back(slot)
        if data is not None:
            net.provide_external_data(expanded(data), all_inputs=all_inputs)

    def _check_fit(self, kind: Kind, net: Any, all_inputs: bool) -> None:
        if self._fits != (kind, net, all_inputs):
            self._fits = self._puts = None
            structures = net.layers["Input"].out_shapes
            expected = {
                name: structure.get_shape(kind.time_size, kind.batch_size)
                for name, structure in structures.items()
            }
            minibatch.check_shapes(expected, kind.shapes, kind.given, all_inputs)
            self._fits = (kind, net, all_inputs)

    def puts(self) -> bool:
        """Whether :meth:`put` is for minibatches as the last that was handed over."""
        if self._puts is None:
            kind, net, _ = self._fits
            fronts = self._fronts(kind, net).values()
            self._puts = (
                kind.signature is not None
                and net.handler is self._handler
                and self._can_put(fronts)
            )
            self._sets = self._puts and self._access.sets(fronts)
            self._inputs = tuple(net.buffer.Input.outputs.keys())
            self.put_nbytes = sum(map(self._access.nbytes, fronts))
        return self._puts

    def _can_put(self, fronts: Collection[Any]) -> bool:
        if self._is_short:
            return False
        try:
            return self._access.can_put(fronts)
        except MemoryError as error:
            self._is_short = True
            if self._allowed:  # else it was said already that there are none
                self._stats.note(
                    f"page-locked memory ran short ({error}): small minibatches go "
                    "through back buffers"
                )
            return False

    def _fronts(self, kind: Kind, net: Any) -> dict[str, Any]:
        fronts = net.buffer.Input.outputs
        return {name: fronts[name] for name in kind.shapes}

    def put(self, data: Mapping[str, Any], net: Any) -> bool:
        """Copy a minibatch straight into the network, if it is as the last.

        What :meth:`stage` and :meth:`hand_over` do, for small minibatches, with nothing
        in between. Return whether it was done.
        """
        kind, fits = self._kind, self._fits
        if (
            kind is None
            or fits is None
            or fits[0] is not kind
            or fits[1] is not net
            or net.handler is not self._handler
            or not _cuda.has_signature(data, kind.signature)
        ):
            return False
        net.buffer = net._buffer_manager.resize(kind.time_size, kind.batch_size)
        outputs = net.buffer.Input.outputs
        if self._sets:
            set_from_numpy, shapes = self._access.set_from_numpy, kind.shapes
            for name, front in zip(self._inputs, outputs):
                if name in shapes:
                    set_from_numpy(front, data[name])
            return True
        direct = False
        for name in kind.shapes:
            array = data[name]
            if (
                self._held is not None
                and array.dtype == self._access.dtype
                and self._held.lies_ready(array)
            ):
                # Known before it is queued: another input may fail after it.
                self._reads_data = direct = True
                self._access.put_as_it_lies(outputs[name], array)
            else:
                self._access.put(outputs[name], array)
        if direct:
            self._stats.direct += 1
        return True

    def wait_put(self) -> None:
        """Wait until the iterator's data are read no more by what :meth:`put` queued."""
        if self._reads_data:
            self._reads_data = False
            self._access.compute_stream.synchronize()

    def lend(self, batch: Batch) -> dict[str, Any]:
        """Return the minibatch as a dict of the handler's own arrays."""
        return expanded(batch.data) if batch.slot is None else batch.slot.lend()

    def take_back(self, batch: Batch) -> None:
        """End :meth:`lend` and give the slot back."""
        if batch.slot is not None:
            batch.slot.take_back()
            self.give_back(batch.slot)

    # ------------------------------- after the step ------------------------------ #

    def wake(self) -> None:
        """Have those that wait for a slot ask again whether anybody wants it."""
        with self._lock:
            self._lock.notify_all()

    def give_back(self, slot: HostSlot | DeviceSlot) -> None:
        """Return a slot to the ring."""
        with self._lock:
            if not self._closed:
                self._free.append(slot)
            self._lock.notify()
