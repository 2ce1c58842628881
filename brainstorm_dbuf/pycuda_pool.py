"""Keep PyCudaHandler from freeing device memory while minibatches are copied.

PyCudaHandler makes and drops small temporaries in many of its operations. Each drop is
a ``cuMemFree``, which waits for everything in the context, the copy of the next
minibatch included: nothing would overlap. While a feed runs the temporaries come from a
pool of blocks that are used again, so nothing is allocated or freed in the steady state.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def pooled_temporaries() -> Iterator[None]:
    """Serve the temporaries of brainstorm's PyCudaHandler and of scikit-cuda from a pool.

    Not for two threads at once: the allocators are module globals of those packages.
    """
    import skcuda.misc
    from brainstorm.handlers import pycuda_handler
    from pycuda import gpuarray
    from pycuda.tools import DeviceMemoryPool

    if isinstance(pycuda_handler.gpuarray, _PooledGpuarray):
        # A feed within a feed (a monitor that evaluates): the outer one's pool serves.
        yield
        return
    pool = DeviceMemoryPool()
    skcuda_allocator = skcuda.misc._global_cublas_allocator
    pycuda_handler.gpuarray = _PooledGpuarray(gpuarray, pool)
    skcuda.misc._global_cublas_allocator = pool.allocate
    try:
        yield
    finally:
        skcuda.misc._global_cublas_allocator = skcuda_allocator
        pycuda_handler.gpuarray = gpuarray
        # What is still in use goes straight to the driver when it is dropped.
        pool.stop_holding()


class _PooledGpuarray(types.ModuleType):
    """pycuda.gpuarray as PyCudaHandler sees it, allocating from a pool."""

    def __init__(self, gpuarray: types.ModuleType, pool: Any) -> None:
        super().__init__(gpuarray.__name__)
        self._gpuarray = gpuarray
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gpuarray, name)

    def zeros(self, shape: Any, dtype: Any) -> Any:
        return self._gpuarray.zeros(shape, dtype, allocator=self._pool.allocate)

    def empty(self, shape: Any, dtype: Any) -> Any:
        return self._gpuarray.empty(shape, dtype, allocator=self._pool.allocate)
