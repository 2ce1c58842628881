"""Exceptions of the CUDA binding.

They are ordinary Python classes, so that they pickle by name and read well in a
traceback; the C extension imports them once and raises them.
"""

from __future__ import annotations

__all__ = ["CudaError", "CudaMemoryError", "DriverError", "ForkError"]


# After these no CUDA call of the process works: "the process must be terminated and
# relaunched" (CUDA Driver API, CUresult); context_is_lost in src/cuda/error.c.
_LOST = frozenset({226, 700, 702, 710, *range(714, 720), 721, 911})


class CudaError(RuntimeError):
    """A CUDA driver call failed.

    Attributes:
        call: the driver function, for instance ``"cuMemcpyHtoDAsync"``.
        code: the driver's number (``CUresult``); 0 where no call was made.
        name: the driver's name for it, for instance ``"CUDA_ERROR_INVALID_CONTEXT"``.
        detail: what was asked for (sizes, device), or how to put it right.
    """

    def __init__(self, call: str, code: int, name: str, detail: str = "") -> None:
        super().__init__(call, code, name, detail)
        self.call = call
        self.code = code
        self.name = name
        self.detail = detail

    @property
    def context_is_lost(self) -> bool:
        """Whether no CUDA call of this process works any more: start it again."""
        return self.code in _LOST

    def __str__(self) -> str:
        number = f" ({self.code})" if self.code else ""
        tail = f": {self.detail}" if self.detail else ""
        return f"{self.call} failed: {self.name}{number}{tail}"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.args == other.args  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((type(self), self.args))


class CudaMemoryError(CudaError, MemoryError):
    """Device or page-locked memory ran out.

    ``CUDA_ERROR_OUT_OF_MEMORY``, or cuBLAS's ``CUBLAS_STATUS_ALLOC_FAILED``.
    """


class DriverError(CudaError):
    """The CUDA driver is missing, too old, or has no such device."""


class ForkError(CudaError):
    """CUDA was used in a process forked after the driver had been opened."""
