"""The handler operations that double buffering needs, as methods of brainstorm's handlers.

``handler.pagelocked_empty(shape)`` and ``handler.set_from_numpy_async(mem, arr,
stream)``, with plain equivalents on NumpyHandler, so that a script can use them
whatever its handler.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from . import _cuda


def install(handlers: ModuleType) -> None:
    """Add the operations to the handlers in ``brainstorm.handlers``."""
    from brainstorm.optional import has_pycuda

    handlers.NumpyHandler.pagelocked_empty = pagelocked_empty_plain
    handlers.NumpyHandler.set_from_numpy_async = set_from_numpy_plain
    if has_pycuda:
        handlers.PyCudaHandler.pagelocked_empty = pagelocked_empty
        handlers.PyCudaHandler.set_from_numpy_async = set_from_numpy_async
        handlers.PyCudaHandler.copy_to = _checked(handlers.PyCudaHandler.copy_to)


def pagelocked_empty(self: Any, shape: int | tuple[int, ...]) -> np.ndarray:
    """Allocate a page-locked host array of the handler's dtype, arbitrary content.

    Copies between it and the device run asynchronously and at the full rate of the link.

    Args:
        shape: shape of the array.

    Raises:
        CudaMemoryError: page-locked memory ran short.
    """
    return _cuda.pagelocked_empty(shape, self.dtype)


def set_from_numpy_async(self: Any, mem: Any, arr: np.ndarray, stream: Any) -> None:
    """Queue a copy of ``arr`` into the device array ``mem`` on ``stream``.

    ``arr`` is converted to the handler's dtype and C order. Where that needs no
    conversion and ``arr`` is page-locked it is copied from where it lies and must not
    be changed before the stream has come past; any other is gathered first, into
    page-locked memory that lives until then.

    Args:
        mem: C-contiguous device array of the handler.
        arr: NumPy array of the same shape.
        stream: a stream of this package or of PyCUDA, any object with
            ``__cuda_stream__``, a handle, or None for the legacy default stream.

    Raises:
        ValueError: the shapes differ.
        TypeError: ``arr`` is no NumPy array.
    """
    _check_shapes(mem, arr)
    ready = (
        arr.dtype == self.dtype and arr.flags.c_contiguous and _cuda.is_pagelocked(arr)
    )
    if not ready:
        staged = self.pagelocked_empty(arr.shape)
        np.copyto(staged, arr, casting="unsafe")
        arr = staged
    # PyCUDA's streams have only a handle.
    if not hasattr(stream, "__cuda_stream__"):
        stream = getattr(stream, "handle", stream)
    _cuda.memcpy_htod_async(mem, arr, stream)


def pagelocked_empty_plain(self: Any, shape: int | tuple[int, ...]) -> np.ndarray:
    """Allocate a host array of the handler's dtype; without a GPU no page is locked."""
    return np.empty(shape, self.dtype)


def set_from_numpy_plain(
    self: Any, mem: np.ndarray, arr: np.ndarray, stream: Any = None
) -> None:
    """Copy ``arr`` into ``mem``, at once; ``stream`` is not used.

    Raises:
        ValueError: the shapes differ.
    """
    _check_shapes(mem, arr)
    self.set_from_numpy(mem, arr)


def _check_shapes(mem: Any, arr: Any) -> None:
    if not isinstance(arr, np.ndarray):
        raise TypeError(
            f"arr: expected a NumPy array of shape {tuple(mem.shape)}, got "
            f"{type(arr).__name__}"
        )
    if tuple(mem.shape) != tuple(arr.shape):
        raise ValueError(
            f"Shape of destination ({tuple(mem.shape)}) != Shape of source "
            f"({tuple(arr.shape)})"
        )


def _checked(copy_to: Any) -> Any:
    """Make PyCudaHandler's `copy_to` refuse what it would read past its end.

    It copies as many bytes as the destination has, whatever the source is.
    """

    def checked(self: Any, src: Any, dest: Any) -> None:
        if src.nbytes != dest.nbytes or src.dtype != dest.dtype:
            raise ValueError(
                f"copy_to: the source has shape {tuple(src.shape)} and dtype "
                f"{src.dtype}, the destination {tuple(dest.shape)} and {dest.dtype}"
            )
        copy_to(self, src, dest)

    checked.__name__ = copy_to.__name__
    checked.__doc__ = copy_to.__doc__
    return checked
