"""What the feed must know of a handler: where its arrays live and who orders the work.

One small object a handler:

* :class:`HostAccess` for handlers whose arrays are NumPy's: only a dtype.
* :class:`CudaAccess` for handlers whose arrays lie on a CUDA device: dtype, context,
  compute stream, how to reach an array's memory and how to make one of its arrays over
  memory of ours. It owns the stream that minibatches are copied on, and the
  page-locked memory that they go through.

:func:`access_for` chooses by the handler's type, its base classes included; another
package makes its handler known by ``access_for.register(ItsHandler)``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from . import _cuda
from .back_buffers import DeviceSlot, HostSlot, Place
from .copy_clock import CopyClock
from .held_memory import HeldMemory

# What the staging ring is made of: few places, to stay in the processor's caches, and
# large ones, for the full rate of the link, but several for one array.
STAGING_PLACES = 16
MOST_PLACE_BYTES = 4 << 20
LEAST_PLACE_BYTES = 64 << 10

# Up to here, what a back buffer costs (a copy on the device, and the streams' waiting for
# each other) is more than the time on the link that it hides.
MOST_PUT_BYTES = 1 << 20

# Up to here the driver writes an array to the device by itself, with the commands.
MOST_SET_BYTES = 64 << 10

# No wider than float32, and all numbers of them exact or rounded once.
_NARROW = frozenset(map(np.dtype, ("?", "i1", "u1", "i2", "u2", "i4", "u4", "f2")))


class HostAccess:
    """A handler whose arrays are NumPy arrays; no CUDA anywhere."""

    # A copy to a back buffer takes the time of the thread that makes it. So what the
    # trainer's own thread fetched goes straight into the network.
    queues_copies = False

    # Nothing is cast after it was copied.
    unpacks: frozenset[np.dtype] = frozenset()

    frees_on_any_thread = True

    def __init__(self, dtype: Any) -> None:
        self.dtype = np.dtype(dtype)
        self.context: AbstractContextManager[Any] = nullcontext()
        self.running: Callable[[], AbstractContextManager[Any]] = nullcontext

    def new_slot(self, held: None = None, lends: bool = False) -> HostSlot:
        return HostSlot(self)

    def is_own_array(self, array: Any) -> bool:
        """NumPy arrays may be changed by their owner: they are always gathered."""
        return False

    def can_put(self, fronts: Collection[np.ndarray]) -> bool:
        """Whether :meth:`put` is better than a back buffer: always, on the host."""
        return True

    def nbytes(self, array: np.ndarray) -> int:
        """Bytes of an array of the handler's dtype."""
        return array.nbytes

    def sets(self, fronts: Collection[np.ndarray]) -> bool:
        """Whether ``set_from_numpy`` is the best way to put: always, on the host."""
        return True

    def set_from_numpy(self, front: np.ndarray, array: np.ndarray) -> None:
        """Gather and cast ``array`` into the network's array ``front``."""
        if front.flags.c_contiguous:
            _cuda.stage(front, array)
        else:
            np.copyto(front, array, casting="unsafe")

    def close(self) -> None:
        pass


class CudaAccess:
    """A handler whose arrays lie on a CUDA device.

    Args:
        dtype: the handler's element type.
        context: the context in which the handler's arrays live.
        compute_stream: the stream on which the handler's work is ordered.
        array_type: the handler's array class.
        address: returns the device address of an array of that class.
        wrap: ``wrap(owner, offset, shape)`` returns an array of that class at the
            address ``int(owner) + offset`` and keeps ``owner`` alive.
        set_from_numpy: the handler's own, which casts and copies.
        running: makes a context manager that is open during each pass.
        unpacks: dtypes that the handler casts to its own on the device.
        unpack: ``unpack(arrays, addresses, dtypes)`` queues on the compute stream how
            arrays of the handler's become what lies at the addresses: numbers of its
            dtype or one of these, or for None indices of one-hot rows.
        frees_on_any_thread: whether an array may be dropped on a thread that is not the
            one that made it.
    """

    # A copy to a back buffer is queued and runs by itself, whichever thread queued it;
    # the one out of it may still be queued when the minibatch has been handed over.
    queues_copies = True

    def __init__(
        self,
        dtype: Any,
        context: _cuda.Context,
        compute_stream: _cuda.Stream,
        array_type: type,
        address: Callable[[Any], int],
        wrap: Callable[[Any, int, tuple[int, ...]], Any],
        set_from_numpy: Callable[[Any, np.ndarray], None],
        running: Callable[[], AbstractContextManager[Any]] = nullcontext,
        unpacks: frozenset[np.dtype] = frozenset(),
        unpack: Callable[[Sequence[Any], Sequence[int], Sequence[Any]], None]
        | None = None,
        frees_on_any_thread: bool = True,
    ) -> None:
        self.dtype = np.dtype(dtype)
        self.frees_on_any_thread = frees_on_any_thread
        self.unpacks = unpacks
        self.unpack = unpack
        self.context = context
        self.compute_stream = compute_stream
        self.copy_stream = _cuda.Stream(context)
        # Where the feed is timed; from then on new slots time their copies.
        self.copy_clock: CopyClock | None = None
        # Owned, from the first minibatch that is staged.
        self.staging: _cuda.StagingRing | None = None
        self.wrap = wrap
        self._array_type = array_type
        self.address = address
        self.set_from_numpy = set_from_numpy
        self.running = running

    def new_slot(
        self, held: HeldMemory | None = None, lends: bool = False
    ) -> DeviceSlot:
        return DeviceSlot(self, held, lends)

    def is_own_array(self, array: Any) -> bool:
        """Say whether ``array`` lies on the device already."""
        return isinstance(array, self._array_type)

    def can_put(self, fronts: Collection[Any]) -> bool:
        """Whether :meth:`put` is better than a back buffer: for small arrays.

        Raises:
            CudaMemoryError: it would be, but page-locked memory ran short.
        """
        sizes = list(map(self.nbytes, fronts))
        if sum(sizes) > MOST_PUT_BYTES or not all(map(is_contiguous, fronts)):
            return False
        if not self.sets(fronts):
            self.reserve_staging(sizes)
        return True

    def sets(self, fronts: Collection[Any]) -> bool:
        """Whether ``set_from_numpy`` is the best way to put: for very small arrays."""
        return all(self.nbytes(front) <= MOST_SET_BYTES for front in fronts)

    def put(self, front: Any, array: np.ndarray) -> None:
        """Gather and cast ``array``, and queue its copy to the network's ``front``."""
        if self.nbytes(array) <= MOST_SET_BYTES:
            self.set_from_numpy(front, array)
        else:
            self.staging.memcpy_htod_async(
                self._end(front), array, self.dtype, self.compute_stream
            )

    def put_as_it_lies(self, front: Any, array: np.ndarray) -> None:
        """Queue the copy of page-locked rows of the handler's dtype to ``front``."""
        _cuda.memcpy_htod_rows_async(self._end(front), array, self.compute_stream)

    def get_as_it_lies(self, array: Any, into: np.ndarray) -> None:
        """Queue the copy of the handler's array to page-locked memory of its dtype."""
        _cuda.memcpy_dtoh_async(into, self._end(array), self.compute_stream)

    def nbytes(self, array: Any) -> int:
        """Bytes of an array once it is of the handler's dtype."""
        return math.prod(array.shape) * self.dtype.itemsize

    def _end(self, front: Any) -> Any:
        """Return an array as the binding takes it; of one of ours it knows the size."""
        return front if isinstance(front, _cuda.DeviceArray) else self.address(front)

    def copy_to_fronts(
        self, fronts: Sequence[Any], sources: Sequence[int], places: Sequence[Place]
    ) -> None:
        """Queue copies of what lies at ``sources`` into the network's arrays.

        Args:
            fronts: of the handler's dtype.
            sources: addresses.
            places: as what it lies there.
        """
        if self.unpack is not None:
            self.unpack(fronts, sources, [place.packed for place in places])
            return
        for front, source, place in zip(fronts, sources, places):
            self._copy_to_front(front, source, place.nbytes)

    def _copy_to_front(self, front: Any, source: int, nbytes: int) -> None:
        """Queue a copy of ``nbytes`` at ``source`` into the network's array ``front``.

        An input that shares its buffer with other layers' outputs is a slice of their
        common feature axis: its rows are copied with a pitch.
        """
        address = self.address(front)
        row, pitch = _rows(front.shape, front.strides, self.dtype.itemsize)
        if row == pitch:
            _cuda.memcpy_dtod_async(address, source, nbytes, self.compute_stream)
        else:
            _cuda.memcpy_dtod_2d_async(
                address, pitch, source, row, row, nbytes // row, self.compute_stream
            )

    def reserve_staging(self, sizes: list[int]) -> None:
        """Have a staging ring for minibatches of arrays of these sizes in bytes.

        One of up to a few times the largest place takes no more than half of the ring,
        so that nobody waits there while the minibatch before is on the link.

        Raises:
            CudaMemoryError: page-locked memory ran short.
        """
        place = max(sum(sizes) // 6, min(max(sizes), MOST_PUT_BYTES))
        place = min(max(place, LEAST_PLACE_BYTES), MOST_PLACE_BYTES)
        if self.staging is not None and self.staging.place_nbytes >= place:
            return
        place = 1 << (place - 1).bit_length()
        try:
            memory = _cuda.pagelocked_empty(
                STAGING_PLACES * place, np.uint8, context=self.context
            )
        except MemoryError:
            if self.staging is None:
                raise
            return  # the smaller one serves too, in more pieces
        # One that another thread is using lives until that is done.
        self.staging = _cuda.StagingRing(memory, STAGING_PLACES, self.context)

    def close(self) -> None:
        if self.staging is not None:
            self.staging.close()
        self.copy_stream.close()


@functools.singledispatch
def access_for(handler: Any) -> HostAccess | CudaAccess | None:
    """Return how to reach ``handler``'s arrays, None for a handler not known here.

    Must be called in the thread that trains: a handler that has no context of its own
    is taken to use the one that is current there.
    """
    return None


@functools.lru_cache(maxsize=256)
def _rows(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int
) -> tuple[int, int]:
    """Return (bytes in one contiguous row, bytes from row to row) of a front.

    The axes of an array that brainstorm cut out of a buffer merge into rows of one
    length at one distance; a contiguous array is a single row.
    """
    axis = len(shape)
    length = itemsize
    while axis and (shape[axis - 1] == 1 or strides[axis - 1] == length):
        axis -= 1
        length *= shape[axis]
    if axis == 0:
        return length, length
    pitch = strides[axis - 1]
    span = pitch
    for k in range(axis - 1, -1, -1):
        if shape[k] != 1 and strides[k] != span:
            raise ValueError(
                f"an input of the network has shape {shape} and strides {strides}, "
                "which are not rows at one distance"
            )
        span *= shape[k]
    return length, pitch


def is_contiguous(array: Any) -> bool:
    """Say whether the elements of a device array lie side by side, in C order."""
    distance = array.dtype.itemsize
    for size, stride in zip(reversed(array.shape), reversed(array.strides)):
        if size != 1 and stride != distance:
            return 0 in array.shape
        distance *= size
    return True


def host_access(handler: Any) -> HostAccess:
    return HostAccess(handler.dtype)


def pycuda_access(handler: Any) -> CudaAccess:
    """Reach a PyCudaHandler's arrays, in the context current in this thread."""
    import pycuda.driver
    from pycuda.gpuarray import GPUArray

    from .pycuda_pool import pooled_temporaries

    owner = pycuda.driver.Context.get_current()
    if owner is None:
        raise RuntimeError(
            "PyCudaHandler: no CUDA context is current in this thread; train in the "
            "thread that imported pycuda.autoinit, or push its context first"
        )
    context = _cuda.Context.from_handle(_cuda.Context.current().handle, owner)

    def wrap(owner: Any, offset: int, shape: tuple[int, ...]) -> Any:
        return GPUArray(shape, handler.dtype, gpudata=int(owner) + offset, base=owner)

    return CudaAccess(
        handler.dtype,
        context,
        # PyCUDA's kernels and cuBLAS's calls run on the legacy NULL stream.
        _cuda.Stream.legacy(context),
        GPUArray,
        lambda array: int(array.ptr),
        wrap,
        handler.set_from_numpy,
        pooled_temporaries,
        # PyCUDA leaks what is dropped where its context is not current.
        frees_on_any_thread=False,
    )


def cuda_access(handler: Any) -> CudaAccess:
    """Reach a CudaHandler's arrays, which know their context and stream."""

    def wrap(owner: Any, offset: int, shape: tuple[int, ...]) -> Any:
        return handler.wrap(owner, int(owner) + offset, shape)

    return CudaAccess(
        handler.dtype,
        handler.context,
        handler.stream,
        handler.array_type,
        lambda array: array.ptr,
        wrap,
        handler.set_from_numpy,
        unpacks=_NARROW,
        unpack=handler.unpack,
    )


def _register_brainstorm_handlers() -> None:
    from brainstorm.handlers import NumpyHandler
    from brainstorm.optional import has_pycuda

    access_for.register(NumpyHandler, host_access)
    if has_pycuda:
        from brainstorm.handlers import PyCudaHandler

        access_for.register(PyCudaHandler, pycuda_access)


_register_brainstorm_handlers()
