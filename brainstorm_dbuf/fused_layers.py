"""Passes of some of brainstorm's layers as single calls, where the handler has them.

A recurrent layer makes some forty small operations a time step, and to issue them takes
longer than to compute them; so do those of small layers at the end of a network. So when
a network gets a CudaHandler, its layers of the types in `PASSES` get passes that are one
call into C each (src/handler/recurrent.c, lstm.c, fully_connected.c, softmax_ce.c). They
work on the same parameters, buffers and saved files and leave the same values in all of
them: those of recurrent layers but for rounding, the others to the bit. Nothing is
changed for layers of other types, derived ones included, or with
``CudaHandler(fused=False)``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import attrgetter
from types import MethodType, ModuleType
from typing import Any

from . import _cuda

Pass = Callable[..., None]

# What the C side knows; other functions that were added to a handler's act_func run in
# the layer's own pass.
ACTIVATIONS = frozenset({"tanh", "sigmoid", "rel", "el", "linear"})


def _has_run(layer: Any, operation: str, views: tuple[Any, ...]) -> bool:
    """Run a pass by the handler's operation; return whether it could."""
    run = getattr(layer.handler, operation)
    if not hasattr(layer, "activation"):
        return run(*views)
    return layer.activation in ACTIVATIONS and run(layer.activation, *views)


def _passes(operations: str, forward: str, backward: str) -> dict[str, Pass]:
    """Return the passes that a handler's `<operations>_forward` and `_backward` make.

    They take the layer's activation, if it has one, and its views at the paths in
    ``forward`` and ``backward``. They carry the names of the methods they stand for, so
    that copies and pickles of a layer find their own.
    """
    forward_views = attrgetter(*forward.split())
    backward_views = attrgetter(*backward.split())

    def forward_pass(self: Any, buffers: Any, training_pass: bool = True) -> None:
        if not _has_run(self, operations + "_forward", forward_views(buffers)):
            type(self).forward_pass(self, buffers, training_pass)

    def backward_pass(self: Any, buffers: Any) -> None:
        if not _has_run(self, operations + "_backward", backward_views(buffers)):
            type(self).backward_pass(self, buffers)

    return {"forward_pass": forward_pass, "backward_pass": backward_pass}


_X_Y = "inputs.default outputs.default "
_ALL = _X_Y + "input_deltas.default output_deltas.default parameters gradients"
_LSTM, _RECURRENT = (
    _passes(operations, _X_Y + "parameters internals", _ALL + " internals")
    for operations in ("lstm", "recurrent")
)
_FULLY_CONNECTED = _passes("fully_connected", _X_Y + "parameters", _ALL)
_SOFTMAX_CE = _passes(
    "softmax_ce",
    "inputs.default inputs.targets outputs.predictions outputs.loss",
    "outputs.predictions inputs.targets input_deltas.default output_deltas.loss "
    "internals.t_bin",
)

# By module and name, since brainstorm need not be imported here.
PASSES = {
    ("brainstorm.layers.clockwork_layer", "ClockworkLayerImpl"): _RECURRENT,
    ("brainstorm.layers.clockwork_lstm_layer", "ClockworkLstmLayerImpl"): _LSTM,
    ("brainstorm.layers.fully_connected_layer", "FullyConnectedLayerImpl"): (
        _FULLY_CONNECTED
    ),
    ("brainstorm.layers.lstm_layer", "LstmLayerImpl"): _LSTM,
    ("brainstorm.layers.recurrent_layer", "RecurrentLayerImpl"): _RECURRENT,
    ("brainstorm.layers.softmax_ce_layer", "SoftmaxCELayerImpl"): _SOFTMAX_CE,
}


def fuse(layer: Any, handler: Any) -> None:
    """Give `layer` the passes that suit `handler`: fused ones, or else its class's own.

    Passes that somebody else has put on the layer itself stay.
    """
    cls = type(layer)
    passes = PASSES.get((cls.__module__, cls.__name__))
    if passes is None:
        return
    has_fused = isinstance(handler, _cuda.HandlerCore) and getattr(
        handler, "fused", True
    )
    for name, function in passes.items():
        own = vars(layer).get(name)
        # A pickle has brought a layer its class's own in place of the fused one.
        ours = (function, getattr(cls, name))
        if own is not None and getattr(own, "__func__", None) not in ours:
            continue
        if has_fused:
            setattr(layer, name, MethodType(function, layer))
        elif own is not None:
            delattr(layer, name)


def install(base_layer: ModuleType) -> None:
    """Make `Layer.set_handler` in ``brainstorm.layers.base_layer`` call `fuse`."""
    plain = base_layer.Layer.set_handler

    @functools.wraps(plain)
    def set_handler(self: Any, new_handler: Any) -> None:
        plain(self, new_handler)
        fuse(self, new_handler)

    base_layer.Layer.set_handler = set_handler
