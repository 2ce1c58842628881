"""brainstorm's three example networks: their shapes, and synthetic data of these.

What the examples do beside training the network (mnist_pi's bound on the weights of its
last layer, monitoring, saving) is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ExampleNetwork:
    name: str
    spec: str  # as brainstorm's create_net_from_spec takes it
    shape: tuple[int, ...]  # of a minibatch: steps, samples, features
    classes: int
    learning_rate: float
    limit: float  # CudaHandler's time of an update in parts of PyTorch's
    one_hot: bool = False

    def minibatch(self) -> dict[str, np.ndarray]:
        rnd = np.random.default_rng(0)
        samples = self.shape[:2]
        if self.one_hot:
            symbols = rnd.integers(0, self.shape[2], samples)
            inputs = np.eye(self.shape[2], dtype=np.float32)[symbols]
        else:
            inputs = rnd.random(self.shape, dtype=np.float32)
        targets = rnd.integers(0, self.classes, (*samples, 1)).astype(np.float32)
        return {"default": inputs, "targets": targets}


FULL = {
    network.name: network
    for network in (
        ExampleNetwork(
            "mnist_pi", "D.2 F1200 D F1200 D", (1, 100, 784), 10, 0.1, limit=0.6
        ),
        ExampleNetwork(
            "cifar10_cnn",
            "C32:5p2 P3s2 C32:5p2 P3s2 C64:5p2 P3s2 F64",
            (1, 100, 32, 32, 3),
            10,
            0.01,
            limit=1.0,
        ),
        ExampleNetwork(
            "hutter_lstm", "L1000", (100, 100, 205), 205, 0.01, limit=1.0, one_hot=True
        ),
    )
}

# The same kinds of layers, small enough for NumpyHandler, and no dropout: what they lose
# must be the same on every handler.
SMALL = {
    network.name: network
    for network in (
        ExampleNetwork("mnist_pi", "F33 F20", (1, 21, 50), 10, 0.1, limit=0.6),
        ExampleNetwork(
            "cifar10_cnn",
            "C6:5p2 P3s2 C5:5p2 P3s2 C7:5p2 P3s2 F9",
            (1, 11, 20, 20, 3),
            10,
            0.01,
            limit=1.0,
        ),
        ExampleNetwork(
            "hutter_lstm", "L19", (12, 10, 15), 15, 0.01, limit=1.0, one_hot=True
        ),
    )
}
