"""Small brainstorm networks and data for the tests, one of each kind."""

from __future__ import annotations

import numpy as np

import brainstorm_dbuf  # noqa: F401  (before brainstorm)
import brainstorm as bs
from brainstorm import layers
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


# Casts of data_for's arrays: all of the handler's own dtype, or as narrow as may be.
CASTS = {
    None: lambda array: array,
    "float32": lambda array: array.astype(np.float32),
    "narrow": lambda array: (
        (array * 20).astype(np.int8) if array.dtype.kind == "f" else array.astype("u1")
    ),
}


def minibatches(name, rnd, size=4, cast=None, **sizes):
    """Ragged: the last minibatch is shorter, with a mask T varies too."""
    data = data_for(name, rnd, **sizes)
    named = {name: CASTS[cast](array) for name, array in data.items()}
    return Minibatches(size, shuffle=True, **named)


# ------------------------------------------------- every type of layer, by itself


class LayerNet:
    """A small network around one layer, and data for it.

    Before the layer are others, so that the deltas of its inputs count as well.
    """

    def __init__(self, build, targets, **weights):
        self.build, self.targets, self.weights = build, targets, weights

    def make(self, seed=0):
        """Return the network with weights from that seed."""
        inp = layers.Input(
            out_shapes={
                "default": ("T", "B", 4),
                "targets": ("T", "B", *self.targets),
                "mask": ("T", "B", 1),
            }
        )
        self.build(inp)
        net = bs.Network.from_layer(inp)
        gaussian = bs.initializers.Gaussian(0.5)
        weights = {"Middle": {**self.weights, "default": gaussian}}
        net.initialize(
            {"default": gaussian, **(weights if self.weights else {})}, seed=seed
        )
        return net

    def data(self, rnd, steps=5, samples=3):
        """Return data; the targets are both numbers, class and yes or no: 0 or 1."""
        lengths = rnd.integers(1, steps + 1, samples)
        return {
            "default": rnd.standard_normal((steps, samples, 4)),
            "targets": rnd.integers(0, 2, (steps, samples, *self.targets)),
            "mask": (np.arange(steps)[:, None] < lengths)[:, :, None],
        }


def _first(inp, size, activation="tanh", name="First"):
    first = layers.FullyConnected(size, name=name, activation=activation)
    inp - "default" >> first
    return first


def _loss(layer, output="loss", importance=1.0, name=None):
    layer - output >> layers.Loss(importance=importance, name=name)


def _through(make, size=5, out=(5,), **weights):
    """default -> FullyConnected -> the layer -> SquaredError."""

    def build(inp):
        middle = make()
        error = layers.SquaredError(name="Error")
        _first(inp, size) >> middle >> "default" - error
        inp - "targets" >> "targets" - error
        inp - "mask" >> layers.NoOp(name="Unused")
        _loss(error)

    return LayerNet(build, out, **weights)


def _between(make, names, out=(5,)):
    """A layer with several inputs, each from a FullyConnected of its own."""

    def build(inp):
        middle = make()
        for k, name in enumerate(names):
            _first(inp, 5, name=f"First{k}") >> name - middle
        error = layers.SquaredError(name="Error")
        middle >> "default" - error
        inp - "targets" >> "targets" - error
        inp - "mask" >> layers.NoOp(name="Unused")
        _loss(error)

    return LayerNet(build, out)


def _against_targets(make, output="loss", targets=(3,), activation="tanh"):
    """A layer that compares with the targets itself."""

    def build(inp):
        middle = make()
        _first(inp, 3, activation) >> "default" - middle
        inp - "targets" >> "targets" - middle
        inp - "mask" >> layers.NoOp(name="Unused")
        _loss(middle, output)

    return LayerNet(build, targets)


def _masked(inp):
    mask, error = layers.Mask(name="Middle"), layers.SquaredError(name="Error")
    _first(inp, 5) >> "default" - mask
    inp - "mask" >> "mask" - mask
    mask >> "default" - error
    inp - "targets" >> "targets" - error
    _loss(error)


def _decayed(make):
    def build(inp):
        decay, error = make(), layers.SquaredError(name="Error")
        first = _first(inp, 5)
        first >> decay
        first >> "default" - error
        inp - "targets" >> "targets" - error
        inp - "mask" >> layers.NoOp(name="Unused")
        _loss(error, name="Main")
        _loss(decay, importance=0.3, name="Decay")

    return LayerNet(build, (5,))


def _shared_hub(make, **weights):
    """Layers whose inputs are the outputs of several, side by side in one buffer."""

    def build(inp):
        first, middle = _first(inp, 3), make()
        out = layers.FullyConnected(2, name="Out", activation="linear")
        error = layers.SquaredError(name="Error")
        inp - "default" >> middle
        first >> middle
        first >> out
        middle >> out >> "default" - error
        inp - "targets" >> "targets" - error
        inp - "mask" >> layers.NoOp(name="Unused")
        _loss(error)

    return LayerNet(build, (2,), **weights)


IMAGE = (4, 5, 3)
ACTIVATIONS = ("linear", "rel", "sigmoid", "tanh")

LAYERS = {
    "BatchNorm": _through(lambda: layers.BatchNorm(name="Middle")),
    "BatchNorm of images": _through(
        lambda: layers.BatchNorm(name="Middle"), IMAGE, IMAGE
    ),
    "BinomialCrossEntropy": _against_targets(
        lambda: layers.BinomialCrossEntropy(name="Middle"),
        "default",
        activation="sigmoid",
    ),
    "Clockwork": _through(
        lambda: layers.Clockwork(5, name="Middle"), timing=[1, 1, 2, 3, 4]
    ),
    "ClockworkLstm": _through(
        lambda: layers.ClockworkLstm(5, name="Middle"), timing=[1, 1, 2, 3, 4]
    ),
    **{
        f"Convolution2D {activation}": _through(
            lambda activation=activation: layers.Convolution2D(
                2, (3, 2), padding=1, activation=activation, name="Middle"
            ),
            IMAGE,
            (4, 6, 2),
        )
        for activation in ACTIVATIONS
    },
    "Convolution2D with strides": _through(
        lambda: layers.Convolution2D(
            4, (2, 3), stride=(2, 1), activation="tanh", name="Middle"
        ),
        IMAGE,
        (2, 3, 4),
    ),
    "DeltasScaling": _through(lambda: layers.DeltasScaling(-0.7, name="Middle")),
    "Dropout": _through(lambda: layers.Dropout(0.4, name="Middle")),
    **{
        f"Elementwise {activation}": _through(
            lambda activation=activation: layers.Elementwise(activation, name="Middle")
        )
        for activation in ACTIVATIONS
    },
    **{
        f"FullyConnected {activation}": _through(
            lambda activation=activation: layers.FullyConnected(
                (2, 3), activation=activation, name="Middle"
            ),
            (3, 2),
            (2, 3),
        )
        for activation in ACTIVATIONS
    },
    "Highway": _between(lambda: layers.Highway(name="Middle"), ("H", "T", "x")),
    "L1Decay": _decayed(lambda: layers.L1Decay(name="Middle")),
    "L2Decay": _decayed(lambda: layers.L2Decay(name="Middle")),
    **{
        f"Lstm {activation}": _through(
            lambda activation=activation: layers.Lstm(
                5, activation=activation, name="Middle"
            )
        )
        for activation in ("tanh", "rel")
    },
    "Mask": LayerNet(_masked, (5,)),
    "Merge": _between(
        lambda: layers.Merge(name="Middle"), ("inputs_1", "inputs_2"), (10,)
    ),
    "NoOp": _through(lambda: layers.NoOp(name="Middle")),
    **{
        f"Pooling2D {kind}": _through(
            lambda kind=kind: layers.Pooling2D(
                (2, 3), kind, stride=(1, 2), padding=1, name="Middle"
            ),
            IMAGE,
            (5, 3, 3),
        )
        for kind in ("max", "avg")
    },
    **{
        f"Recurrent {activation}": _through(
            lambda activation=activation: layers.Recurrent(
                5, activation=activation, name="Middle"
            )
        )
        for activation in ACTIVATIONS
    },
    "SigmoidCE": _against_targets(lambda: layers.SigmoidCE(name="Middle")),
    "SoftmaxCE": _against_targets(
        lambda: layers.SoftmaxCE(name="Middle"), targets=(1,)
    ),
    "SquaredDifference": _between(
        lambda: layers.SquaredDifference(name="Middle"), ("inputs_1", "inputs_2")
    ),
    "SquaredError": _against_targets(lambda: layers.SquaredError(name="Middle")),
    "a hub of several sources": _shared_hub(
        lambda: layers.FullyConnected(4, activation="tanh", name="Middle")
    ),
    "an Lstm in a hub of several sources": _shared_hub(
        lambda: layers.Lstm(4, name="Middle")
    ),
    "a Recurrent in a hub of several sources": _shared_hub(
        lambda: layers.Recurrent(4, name="Middle")
    ),
    "a Clockwork in a hub of several sources": _shared_hub(
        lambda: layers.Clockwork(4, name="Middle"), timing=[1, 2, 2, 3]
    ),
    "a ClockworkLstm in a hub of several sources": _shared_hub(
        lambda: layers.ClockworkLstm(4, name="Middle"), timing=[1, 2, 2, 3]
    ),
}
