"""The handlers that compute on a GPU, by the names the benchmarks know them by."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import brainstorm_dbuf as dbuf

SEED = 1


def gpu_handler(name: str) -> Callable[[], Any]:
    """Return what makes a handler, with its CUDA context current in this thread.

    What a benchmark allocates beside the handler then lies in the same context. Raises
    ImportError or RuntimeError with the reason where such a handler cannot be used.
    """
    return GPU_HANDLERS[name]()


def _cuda() -> Callable[[], Any]:
    dbuf.CudaHandler(seed=SEED)
    dbuf.Context.primary().push()
    return functools.partial(dbuf.CudaHandler, seed=SEED)


def _pycuda() -> Callable[[], Any]:
    problem = dbuf.compat.pycuda_problem()
    if problem is not None:
        raise ImportError(problem)
    from brainstorm.handlers import PyCudaHandler

    return functools.partial(PyCudaHandler, seed=SEED)


GPU_HANDLERS = {"cuda": _cuda, "pycuda": _pycuda}
