"""A change of T or B that costs next to nothing.

brainstorm cuts all of a network's arrays anew out of one flat buffer whenever T or B
changes, and sends every parameter to the host and back. Yet the parameters lie at the
start of the flat buffer: they move only where a minibatch is larger than any before and
the buffer is allocated anew. So here nothing is sent; a new buffer gets the parameters
from the old one by a copy on the device. How each array is cut is worked out once, and
the arrays of a size that was there before are put back.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import types
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

from brainstorm.structure.buffer_structure import BufferStructure
from brainstorm.structure.buffer_views import BufferView
from brainstorm.structure.buffers import BufferManager

# As many sizes are kept; the one that was not used for longest goes first.
SIZES_KEPT = 64


class Places:
    """Where the hubs lie in the flat buffer for one size.

    brainstorm's `get_total_size_slices_and_shapes` without NumPy, whose calls for a few
    numbers each take longer than cutting the arrays.

    Attributes:
        total: how many elements they are together.
    """

    def __init__(self, hubs: list[Any], size: tuple[int, int]) -> None:
        self._shapes = [hub.get_shape(*size) for hub in hubs]
        sizes = (int(math.prod(shape)) for shape in self._shapes)
        self._ends = list(itertools.accumulate(sizes, initial=0))
        self.total = self._ends[-1]

    def cut(self, full_buffer: Any) -> list[Any]:
        return [
            full_buffer[start:end].reshape(shape)
            for start, end, shape in zip(self._ends, self._ends[1:], self._shapes)
        ]


class Piece(NamedTuple):
    """Where one array lies: some of the features of a hub, in a shape of their own."""

    hub: int
    index: tuple[slice, ...]
    feature_shape: tuple[int, ...]
    is_whole_hub: bool

    @classmethod
    def of(cls, layout: dict[str, Any], hubs: list[Any]) -> Piece:
        structure = BufferStructure.from_layout(layout)
        hub = hubs[layout["@hub"]]
        start, stop = layout["@slice"]
        beyond = hub.context_size - structure.context_size
        steps = slice(0, -beyond if beyond else None)
        index = (steps, slice(None), slice(start, stop))[2 - structure.buffer_type :]
        shape = tuple(structure.feature_shape)
        is_whole_hub = (start, stop, beyond, shape) == (0, hub.size, 0, (hub.size,))
        return cls(layout["@hub"], index, shape, is_whole_hub)

    def cut(self, hub_arrays: list[Any]) -> Any:
        """As `BufferStructure.create_from_buffer_hub` does."""
        if self.is_whole_hub:
            return hub_arrays[self.hub]
        array = hub_arrays[self.hub][self.index]
        return array.reshape(array.shape[: len(self.index) - 1] + self.feature_shape)


class Plan:
    """What the nodes of one tree of views hold, and how it is cut."""

    def __init__(self, manager: BufferManager) -> None:
        # The pieces, each once: a layer's inputs are another one's outputs.
        self._pieces: list[Piece] = []
        self._numbers: dict[str, int] = {}
        # The nodes, and which pieces or other nodes are in each; its full buffer.
        self._nodes: list[tuple[BufferView, list[int | BufferView], int | None]] = []
        self._add_node(manager.layout, manager.views, manager.hubs)
        # These hubs come first, and their size is always the same.
        still = itertools.takewhile(lambda hub: hub.btype == 0, manager.hubs)
        self._still = len(list(still))

    def _add_node(self, layout: dict[str, Any], view: BufferView, hubs: Any) -> None:
        children: list[int | BufferView] = []
        for name, child in zip(view._buffer_names, view):
            if layout[name]["@type"] == "BufferView":
                self._add_node(layout[name], child, hubs)
                children.append(child)
            else:
                children.append(self._number(Piece.of(layout[name], hubs)))
        full = self._number(Piece.of(layout, hubs)) if "@slice" in layout else None
        self._nodes.append((view, children, full))

    def _number(self, piece: Piece) -> int:
        # By its repr, since a slice has no hash before Python 3.12.
        number = self._numbers.setdefault(repr(piece), len(self._pieces))
        if number == len(self._pieces):
            self._pieces.append(piece)
        return number

    def cut(self, hub_arrays: list[Any], other: Cut | None) -> Cut:
        """Cut all arrays; what does not depend on the size comes from another cut."""
        if other is None:
            arrays = [piece.cut(hub_arrays) for piece in self._pieces]
        else:
            arrays = [
                array if piece.hub < self._still else piece.cut(hub_arrays)
                for piece, array in zip(self._pieces, other.arrays)
            ]
        contents = [
            (
                view,
                [arrays[child] if type(child) is int else child for child in children],
                None if full is None else arrays[full],
            )
            for view, children, full in self._nodes
        ]
        return Cut(hub_arrays, arrays, contents)


class Cut(NamedTuple):
    """The arrays of one size."""

    hub_arrays: list[Any]
    arrays: list[Any]
    contents: list[tuple[BufferView, list[Any], Any]]

    def put_into(self, manager: BufferManager) -> None:
        manager.buffers = self.hub_arrays
        # As BufferView.adjust does, without its look at the names of every child.
        for view, children, full in self.contents:
            view[:] = children
            view.__dict__.update(zip(view._buffer_names, children))
            view._full_buffer = full


class QuickResize:
    """What stands in for the method ``resize`` of one BufferManager."""

    def __init__(self, manager: BufferManager) -> None:
        self._manager = manager
        self._plan: Plan | None = None
        self._cuts: OrderedDict[tuple[int, int], Cut] = OrderedDict()
        # The flat buffer of the cuts, and the one that the parameters are in: a new one
        # only once they have been copied.
        self._full_buffer = self._home = manager.full_buffer

    def __call__(self, time_size: int, batch_size: int) -> BufferView:
        manager, size = self._manager, (time_size, batch_size)
        if size == (manager.time_size, manager.batch_size):
            return manager.views
        if manager.views is None:
            # Another handler: brainstorm makes a new tree.
            self._forget()
            BufferManager.resize(manager, time_size, batch_size)
            return manager.views
        # First of all, as brainstorm does, whatever happens then.
        manager.time_size, manager.batch_size = size
        if self._full_buffer is not manager.full_buffer:
            # brainstorm has allocated it, and the parameters are in it.
            self._forget()
            self._full_buffer = self._home = manager.full_buffer
        if self._plan is None:
            self._plan = Plan(manager)
        cut = self._cuts.get(size) or self._cut(size, self._plan)
        parameters = manager.views.parameters
        cut.put_into(manager)
        if self._home is not manager.full_buffer:
            if math.prod(parameters.shape):
                manager.handler.copy_to(parameters, manager.views.parameters)
            self._home = manager.full_buffer
        self._keep(size, cut)
        return manager.views

    def _cut(self, size: tuple[int, int], plan: Plan) -> Cut:
        """Cut the flat buffer for a size, or a new one if it is too small."""
        manager = self._manager
        places = Places(manager.hubs, size)
        if places.total > manager.size:
            manager.full_buffer = manager.handler.allocate((places.total,))
            manager.size = places.total
            self._cuts.clear()
            self._full_buffer = manager.full_buffer
        other = next(iter(self._cuts.values()), None)
        return plan.cut(places.cut(manager.full_buffer), other)

    def _keep(self, size: tuple[int, int], cut: Cut) -> None:
        self._cuts[size] = cut
        self._cuts.move_to_end(size)
        if len(self._cuts) > SIZES_KEPT:
            self._cuts.popitem(last=False)

    def _forget(self) -> None:
        self._plan = self._full_buffer = self._home = None
        self._cuts.clear()


@contextlib.contextmanager
def quick_resizing(net: Any) -> Iterator[None]:
    """Let ``net`` change its T and B quickly, with brainstorm's own arrays and values.

    Within another one for the same network it changes nothing, nor where the manager of
    its buffers has a ``resize`` of somebody else's.
    """
    manager = net._buffer_manager
    plain = types.MethodType(BufferManager.resize, manager)
    if manager.resize != plain or not _parameters_come_first(manager.hubs):
        yield
        return
    quick = manager.resize = QuickResize(manager)
    try:
        yield
    finally:
        if manager.resize is quick:
            del manager.resize


def _parameters_come_first(hubs: list[Any]) -> bool:
    """Say whether no hub whose size depends on T or B lies before the parameters.

    brainstorm sorts them so; were it otherwise, they would move with the size.
    """
    kinds = [(hub.is_backward_only, hub.btype) for hub in hubs]
    return kinds == sorted(kinds)
