"""CudaHandler: brainstorm's handler operations on one CUDA device, in C.

The operations are methods of ``_cuda.HandlerCore`` (src/handler), each one call into C
that checks its arguments and queues kernels on the handler's compute stream. Nothing
waits for the device but what brings values to the host.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from brainstorm.handlers.base_handler import Handler
from brainstorm.randomness import global_rnd

from . import _cuda, handler_ops
from .access import access_for, cuda_access


class CudaHandler(_cuda.HandlerCore, Handler):
    """A brainstorm handler that computes on a CUDA device.

    >>> network.set_handler(dbuf.CudaHandler())

    Args:
        seed: of the random numbers (dropout, Gaussian noise), from 0 to 2**64 - 1. Two
            runs with one seed are equal to the bit. None draws one from brainstorm's
            generator, as NumpyHandler does.
        device: ordinal of the device.
        tf32: let matrix products round their factors to TF32 (10 bits of mantissa), on
            devices that have it: faster, less exact. Default is full float32.
        fused: compute the passes of recurrent layers by kernels made for them, with the
            same results within rounding, and those of FullyConnected and SoftmaxCE in one
            call each, with the same bits, rather than operation by operation.

    Raises:
        DriverError: there is no usable driver or no device.
        RuntimeError: this package was built without a CUDA compiler.
        ValueError: ``device`` does not exist; it says which there are.
        CudaError: the driver failed.
    """

    __undescribed__ = {"EMPTY", "context", "stream"}

    array_type = _cuda.DeviceArray
    dtype = np.float32

    set_from_numpy_async = handler_ops.set_from_numpy_async

    def __init__(
        self,
        seed: int | None = None,
        device: int = 0,
        tf32: bool = False,
        fused: bool = True,
    ) -> None:
        if seed is None:
            seed = global_rnd.generate_seed()
        _cuda.HandlerCore.__init__(self, _seed(seed), device, tf32)
        Handler.__init__(self)
        self.fused = fused
        self.inplace_act_func["el"] = lambda x: self.el(x, x)
        self.inplace_act_func_deriv["el"] = lambda y, dy: self.el_deriv(y, y, dy, dy)
        self.act_func["el"] = self.el
        self.act_func_deriv["el"] = self.el_deriv

    def pagelocked_empty(self, shape: int | tuple[int, ...]) -> np.ndarray:
        """Allocate a page-locked host array of float32, arbitrary content.

        Copies between it and the device run asynchronously and at the full rate of the
        link. No context need be current: it is made in the handler's.

        Args:
            shape: shape of the array.

        Raises:
            CudaMemoryError: page-locked memory ran short.
        """
        return _cuda.pagelocked_empty(shape, self.dtype, context=self.context)

    @property
    def EMPTY(self) -> _cuda.DeviceArray:
        """An array without elements."""
        return self.allocate((0,))

    def __describe__(self) -> dict[str, Any]:
        return {
            "@type": type(self).__name__,
            "device": self.device,
            "tf32": self.tf32,
            "fused": self.fused,
        }

    def __init_from_description__(self, description: dict[str, Any]) -> None:
        self.__init__(
            device=description["device"],
            tf32=description["tf32"],
            fused=description["fused"],
        )


access_for.register(CudaHandler, cuda_access)


def _seed(seed: Any) -> int:
    value = operator.index(seed)
    if not 0 <= value < 1 << 64:
        raise ValueError(f"seed: expected 0 to 2**64 - 1, got {seed!r}")
    return value
