"""A change of T or B that costs next to nothing.

brainstorm cuts all of a network's arrays anew out of one flat buffer whenever T or B
changes, and sends every parameter to the host and back. Where the flat buffer stays,
which is always but when a minibatch is larger than any before, the parameters stay where
they are: they lie at its start. So nothing needs to be sent, and the arrays of a size
that was there before can be put back instead of being cut again.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from brainstorm.structure import buffers
from brainstorm.structure.buffer_views import BufferView

# As many sizes are kept; the one that was not used for longest goes first.
SIZES_KEPT = 64


class Cut:
    """The arrays of one size: those of the hubs, and what each node of the views holds."""

    def __init__(self, manager: Any) -> None:
        self.full_buffer = manager.full_buffer
        self.views = manager.views
        self.buffers = manager.buffers
        self._nodes = [
            (node, tuple(node), node._full_buffer) for node in _nodes(manager.views)
        ]

    def belongs_to(self, manager: Any) -> bool:
        """Say whether it was cut out of what the manager has now."""
        return self.full_buffer is manager.full_buffer and self.views is manager.views

    def put_back(self, manager: Any) -> None:
        manager.buffers = self.buffers
        for node, leaves, full in self._nodes:
            node[:] = leaves
            node.__dict__.update(zip(node._buffer_names, leaves))
            node._full_buffer = full


class QuickResize:
    """What stands in for the method ``resize`` of one BufferManager."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._cuts: OrderedDict[tuple[int, int], Cut] = OrderedDict()

    def __call__(self, time_size: int, batch_size: int) -> Any:
        manager, size = self._manager, (time_size, batch_size)
        if size == (manager.time_size, manager.batch_size):
            return manager.views
        cut = self._cuts.get(size)
        if cut is not None and cut.belongs_to(manager):
            cut.put_back(manager)
            manager.time_size, manager.batch_size = size
        elif manager.views is None or not self._cut_anew(time_size, batch_size):
            self._cuts.clear()
            buffers.BufferManager.resize(manager, time_size, batch_size)
        self._keep(size)
        return manager.views

    def _cut_anew(self, time_size: int, batch_size: int) -> bool:
        """Cut the flat buffer for another size; return False where it is too small."""
        manager = self._manager
        total, slices, shapes = buffers.get_total_size_slices_and_shapes(
            manager.hubs, time_size, batch_size
        )
        if total > manager.size:
            return False
        manager.time_size, manager.batch_size = time_size, batch_size
        manager.buffers = [
            manager.full_buffer[where].reshape(shape)
            for where, shape in zip(slices, shapes)
        ]
        manager.views = buffers.create_buffer_views_from_layout(
            manager.layout, manager.buffers, manager.hubs, existing_view=manager.views
        )
        return True

    def _keep(self, size: tuple[int, int]) -> None:
        cut = self._cuts.get(size)
        if cut is None or not cut.belongs_to(self._manager):
            self._cuts[size] = Cut(self._manager)
        self._cuts.move_to_end(size)
        if len(self._cuts) > SIZES_KEPT:
            self._cuts.popitem(last=False)


@contextlib.contextmanager
def quick_resizing(net: Any) -> Iterator[None]:
    """Let ``net`` change its T and B quickly; its arrays and values are brainstorm's own.

    Within another one for the same network it changes nothing.
    """
    manager = net._buffer_manager
    if not _parameters_come_first(manager.hubs) or "resize" in vars(manager):
        yield
        return
    manager.resize = QuickResize(manager)
    try:
        yield
    finally:
        del manager.resize


def _parameters_come_first(hubs: list[Any]) -> bool:
    """Say whether no hub whose size depends on T or B lies before the parameters.

    brainstorm sorts them so; were it otherwise, they would move with the size.
    """
    kinds = [(hub.is_backward_only, hub.btype) for hub in hubs]
    return kinds == sorted(kinds)


def _nodes(view: BufferView) -> Iterator[BufferView]:
    yield view
    for child in view:
        if isinstance(child, BufferView):
            yield from _nodes(child)
