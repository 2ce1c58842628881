"""The message that ranks add up: gradients, and behind them a slot for each rank.

A slot is three numbers. Each rank writes its own and leaves the others zero, so that
the sum which averages the gradients also tells every rank of every other.

* :class:`HostMessage` for gradients that are NumPy's.
* :class:`StagedMessage` for gradients on a CUDA device, through page-locked memory.
* :class:`DeviceMessage` for them where they lie, added up by NCCL or by an MPI that
  takes device memory.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from . import _cuda
from .access import CudaAccess, access_for

SLOT = 3

# The numbers that NCCL has given them in nccl.h.
NCCL_FLOAT32, NCCL_SUM = 7, 0


def world() -> Any:
    """Return ``MPI.COMM_WORLD``.

    Raises ImportError that says what to install where there is no mpi4py, or no MPI.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            f"DataParallel trains on the ranks of an MPI by mpi4py, which cannot be "
            f"used ({error}): pip install 'brainstorm-dbuf[mpi]', beside the machine's "
            "own MPI or the package mpich"
        ) from error
    return MPI.COMM_WORLD


def is_nccl(comm: Any) -> bool:
    """Say whether it is a communicator of NCCL, as CuPy has them."""
    return hasattr(comm, "allReduce") and hasattr(comm, "rank_id")


def place_in(comm: Any) -> tuple[int, int]:
    """Return (rank, number of ranks) of this process in a communicator.

    Raises TypeError where it is none.
    """
    if is_nccl(comm):
        return comm.rank_id(), comm.size()
    if not hasattr(comm, "Allreduce"):
        raise TypeError(
            "comm: expected a communicator of mpi4py or cupy.cuda.nccl, got "
            f"{type(comm).__name__}"
        )
    return comm.Get_rank(), comm.Get_size()


class Message(Protocol):
    """What :func:`message_for` returns.

    Attributes:
        slots: of all ranks, of shape (ranks, 3): after :meth:`sum` what they wrote.
    """

    slots: np.ndarray

    def load(self, array: Any, factor: float) -> None:
        """Put ``array`` times ``factor`` into the message."""

    def clear(self) -> None:
        """Put zeros there."""

    def sum(self) -> None:
        """Add up the messages of all ranks; each has the sum then."""

    def unload(self, array: Any, factor: float) -> None:
        """Set ``array`` to what the message holds times ``factor``."""

    def close(self) -> None:
        """Give back what it holds."""


def message_for(handler: Any, comm: Any, cuda_aware: bool, size: int) -> Message:
    """Return a message for flat arrays of a handler's.

    Args:
        handler: a brainstorm handler.
        comm: a communicator of mpi4py or of ``cupy.cuda.nccl``.
        cuda_aware: whether the MPI takes device memory.
        size: of the arrays.

    Raises:
        TypeError: nothing is known of this kind of handler, or it has no device memory
            and ``comm`` is NCCL's.
        CudaMemoryError: page-locked or device memory ran short.
    """
    access = access_for(handler)
    if access is None:
        raise TypeError(
            f"DataParallel: the gradients of a {type(handler).__name__} cannot be "
            "reached; brainstorm_dbuf.access_for.register makes a handler known"
        )
    if not isinstance(access, CudaAccess):
        if is_nccl(comm):
            raise TypeError(
                "comm: a communicator of NCCL needs a handler whose arrays lie on a "
                f"CUDA device, got {type(handler).__name__}"
            )
        return HostMessage(comm, size, access.dtype)
    if is_nccl(comm) or cuda_aware:
        return DeviceMessage(comm, size, handler, access)
    return StagedMessage(comm, size, handler, access)


class HostMessage:
    """In ordinary memory, for the arrays of NumpyHandler."""

    def __init__(self, comm: Any, size: int, dtype: np.dtype) -> None:
        self._comm = comm
        ranks = place_in(comm)[1]
        self._all = self._allocate(size + SLOT * ranks, dtype)
        self._values = self._all[:size]
        self.slots = self._all[size:].reshape(ranks, SLOT)

    def _allocate(self, size: int, dtype: np.dtype) -> np.ndarray:
        return np.zeros(size, dtype)

    def load(self, array: Any, factor: float) -> None:
        np.multiply(array, factor, out=self._values)

    def clear(self) -> None:
        self._values.fill(0)

    def sum(self) -> None:
        _add_up(self._comm, self._all)

    def unload(self, array: Any, factor: float) -> None:
        np.multiply(self._values, factor, out=array)

    def close(self) -> None:
        pass


class StagedMessage(HostMessage):
    """In page-locked memory, for arrays on a device; they are scaled there."""

    def __init__(self, comm: Any, size: int, handler: Any, access: CudaAccess) -> None:
        self._handler, self._access = handler, access
        super().__init__(comm, size, access.dtype)

    def _allocate(self, size: int, dtype: np.dtype) -> np.ndarray:
        return _cuda.pagelocked_zeros(size, dtype, context=self._access.context)

    def load(self, array: Any, factor: float) -> None:
        self._handler.mult_st(factor, array, array)
        self._access.get_as_it_lies(array, self._values)
        self._access.compute_stream.synchronize()

    def unload(self, array: Any, factor: float) -> None:
        self._access.put_as_it_lies(array, self._values)
        self._handler.mult_st(factor, array, array)

    def close(self) -> None:
        self._access.close()


class DeviceMessage:
    """In the memory of the device; only the slots come to the host."""

    def __init__(self, comm: Any, size: int, handler: Any, access: CudaAccess) -> None:
        self._comm, self._handler, self._access = comm, handler, access
        self.slots = np.zeros((place_in(comm)[1], SLOT), access.dtype)
        self._all = handler.allocate((size + self.slots.size,))
        self._values = self._all[:size] if size else None
        self._tail = self._all[size:]

    def load(self, array: Any, factor: float) -> None:
        self._handler.mult_st(factor, array, self._values)

    def clear(self) -> None:
        self._handler.fill(self._values, 0.0)

    def sum(self) -> None:
        self._handler.set_from_numpy(self._tail, self.slots.ravel())
        stream = self._access.compute_stream
        address = self._access.address(self._all)
        if is_nccl(self._comm):
            with self._access.context:
                self._comm.allReduce(
                    address,
                    address,
                    self._all.size,
                    NCCL_FLOAT32,
                    NCCL_SUM,
                    stream.handle,
                )
        else:
            stream.synchronize()  # MPI knows of no streams
            _add_up(self._comm, _as_mpi_takes_it(address, self._all))
        self.slots[...] = self._handler.get_numpy_copy(self._tail).reshape(
            self.slots.shape
        )

    def unload(self, array: Any, factor: float) -> None:
        self._handler.mult_st(factor, self._values, array)

    def close(self) -> None:
        self._access.close()


def _as_mpi_takes_it(address: int, array: Any) -> list[Any]:
    from mpi4py import MPI

    memory = MPI.memory.fromaddress(address, array.size * array.dtype.itemsize)
    return [memory, array.size, MPI.FLOAT]


def _add_up(comm: Any, array: Any) -> None:
    from mpi4py import MPI

    comm.Allreduce(MPI.IN_PLACE, array)
