"""Gradients and deltas set to zero in one go.

brainstorm sets them to zero before each backward pass, one array after another. They
lie side by side at the end of a network's flat buffer, so one fill does it: on a GPU an
operation costs its launch, and these arrays are many.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import types
from collections.abc import Iterator
from typing import Any

from brainstorm.structure.buffers import BufferManager


class QuickClearing:
    """What stands in for the method ``clear_backward_buffers`` of one BufferManager."""

    def __init__(self, manager: BufferManager) -> None:
        self._manager = manager
        # The arrays that `_part` was cut for.
        self._buffers: list[Any] | None = None
        # All of the flat buffer that is backward only; None if that is nothing.
        self._part: Any = None

    def __call__(self) -> None:
        manager = self._manager
        if manager.buffers is not self._buffers:
            self._part = _backward_part(manager)
            self._buffers = manager.buffers
        if self._part is not None:
            manager.handler.fill(self._part, 0.0)


def _backward_part(manager: BufferManager) -> Any:
    sizes = [math.prod(array.shape) for array in manager.buffers]
    forward = itertools.takewhile(lambda hub: not hub.is_backward_only, manager.hubs)
    start, end = sum(sizes[: len(list(forward))]), sum(sizes)
    return manager.full_buffer[start:end] if start < end else None


@contextlib.contextmanager
def quick_clearing(net: Any) -> Iterator[None]:
    """Let ``net`` clear its gradients and deltas in one operation, to the same zeros.

    Within another one for the same network it changes nothing, nor where the manager of
    its buffers has a ``clear_backward_buffers`` of somebody else's.
    """
    manager = net._buffer_manager
    plain = types.MethodType(BufferManager.clear_backward_buffers, manager)
    # brainstorm sorts them so.
    come_last = [hub.is_backward_only for hub in manager.hubs]
    if manager.clear_backward_buffers != plain or come_last != sorted(come_last):
        yield
        return
    quick = manager.clear_backward_buffers = QuickClearing(manager)
    try:
        yield
    finally:
        if manager.clear_backward_buffers is quick:
            del manager.clear_backward_buffers
