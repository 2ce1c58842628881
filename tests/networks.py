"""Small brainstorm networks and data for the tests, one of each kind."""

from __future__ import annotations

import numpy as np

import brainstorm_dbuf  # noqa: F401  (before brainstorm)
import brainstorm as bs
from brainstorm.data_iterators import Minibatches

STEPS, SAMPLES, FEATURES, CLASSES = 5, 22, 6, 3


def from_spec(spec, shape=(FEATURES,), mask_name=None):
    def make():
        return bs.tools.create_net_from_spec(
            "classification", shape, CLASSES, spec, mask_name=mask_name
        )

    return make


def two_inputs():
    """'default' and 'other' meet in one layer's input; 'targets' beside them."""
    inp = bs.layers.Input(
        out_shapes={
            "default": ("T", "B", FEATURES),
            "other": ("T", "B", 2),
            "targets": ("T", "B", 1),
        }
    )
    hidden = bs.layers.FullyConnected(5, name="Hidden", activation="tanh")
    out = bs.layers.FullyConnected(CLASSES, name="Out", activation="linear")
    loss = bs.layers.SoftmaxCE(name="Output")
    inp - "default" >> hidden >> out
    inp - "other" >> out
    out >> "default" - loss
    inp - "targets" >> "targets" - loss
    loss - "loss" >> bs.layers.Loss()
    return _initialized(bs.Network.from_layer(inp))


def input_beside_a_layer():
    """One layer's input is 'default' next to another layer's output."""
    inp = bs.layers.Input(
        out_shapes={"default": ("T", "B", FEATURES), "targets": ("T", "B", 1)}
    )
    hidden = bs.layers.Recurrent(4, name="Hidden")
    out = bs.layers.FullyConnected(CLASSES, name="Out", activation="linear")
    loss = bs.layers.SoftmaxCE(name="Output")
    inp - "default" >> hidden >> out
    inp - "default" >> out
    out >> "default" - loss
    inp - "targets" >> "targets" - loss
    loss - "loss" >> bs.layers.Loss()
    return _initialized(bs.Network.from_layer(inp))


def _initialized(net):
    net.output_name = "Output.outputs.predictions"
    net.initialize(bs.initializers.Gaussian(0.3))
    return net


NETWORKS = {
    "mlp with dropout": from_spec("D.2 F8 D F5"),
    "batch normalisation": from_spec("F8 B F5"),
    "convolution": from_spec("C4:3p1 P2s2 F5", shape=(4, 4, 2)),
    "lstm with a mask": from_spec("L6", mask_name="mask"),
    "recurrent": from_spec("R6 F4"),
    "two inputs": two_inputs,
    "an input beside a layer": input_beside_a_layer,
}


def data_for(name, rnd, steps=STEPS, samples=SAMPLES):
    """Return the named arrays for one of NETWORKS; dtypes differ on purpose."""
    shape = (4, 4, 2) if name == "convolution" else (FEATURES,)
    data = {
        "default": rnd.standard_normal((steps, samples, *shape)),
        "targets": rnd.integers(0, CLASSES, (steps, samples, 1)),
    }
    if name == "two inputs":
        data["other"] = rnd.standard_normal((steps, samples, 2)).astype(np.float32)
    if name == "lstm with a mask":
        lengths = rnd.integers(1, steps + 1, samples)
        data["mask"] = (np.arange(steps)[:, None] < lengths)[:, :, None]
    return data


def minibatches(name, rnd, size=4, **sizes):
    """Ragged: the last minibatch is shorter, with a mask T varies too."""
    return Minibatches(size, shuffle=True, **data_for(name, rnd, **sizes))
