"""Coded minibatches, a small network for them and a stepper that notes what it saw.

Every element of minibatch k's `default` is k and every element of its `targets` is
k + 1000, so a swap, a stale or a half-copied minibatch shows at once.
"""

from __future__ import annotations

import threading

import numpy as np

import brainstorm_dbuf as dbuf
import brainstorm as bs
from brainstorm.data_iterators import DataIterator
from conftest import WORKER_NAME
from parity import Run, SEED, make_handler

FEATURES = 3


def batch(k, steps=1, samples=2, features=FEATURES, dtype=np.float32):
    """Return coded minibatch k, of shape (steps, samples, features)."""
    shape = (steps, samples, features)
    return {
        "default": np.full(shape, k, dtype),
        "targets": np.full((steps, samples, FEATURES), k + 1000, dtype),
    }


def codes(*numbers):
    """Return what a Recorder notes of these minibatches."""
    return [(k, k + 1000) for k in numbers]


class From(DataIterator):
    """A data iterator whose pass is what a function returns."""

    def __init__(self, make_pass, length=None, names=("default", "targets")):
        super().__init__({name: (1, 2, FEATURES) for name in names}, length)
        self.make_pass = make_pass

    def __call__(self, handler=None):
        return self.make_pass()


def coded(count, **shape):
    """Return an iterator over coded minibatches 0 to count - 1."""
    return From(lambda: (batch(k, **shape) for k in range(count)), count)


def coded_net(*features):
    """Return a network with one layer, whose gradient depends on the input."""
    inp = bs.layers.Input(
        out_shapes={
            "default": ("T", "B", *(features or (FEATURES,))),
            "targets": ("T", "B", FEATURES),
        }
    )
    out = bs.layers.FullyConnected(FEATURES, name="Out", activation="linear")
    error = bs.layers.SquaredError(name="Error")
    inp - "default" >> out
    out >> "default" - error
    inp - "targets" >> "targets" - error
    error - "loss" >> bs.layers.Loss()
    net = bs.Network.from_layer(inp)
    net.output_name = "Out.outputs.default"
    net.initialize(bs.initializers.Gaussian(0.1))
    return net


class Recorder(bs.training.SgdStepper):
    """Notes (default, targets) of each step before and after it; may do more."""

    __undescribed__ = {"seen", "losses", "also"}

    def __init__(self, also=None):
        super().__init__(learning_rate=1e-7)
        self.seen = []
        self.losses = []
        self.also = also

    def run(self):
        before = self.look()
        if self.also is not None:
            self.also(len(self.seen))
        super().run()
        assert self.look() == before
        self.seen.append(before)
        self.losses.append(self.net.get_loss_values()["total_loss"])

    def look(self):
        return tuple(the_value(self.net.get_input(n)) for n in ("default", "targets"))


def the_value(array):
    """Return the one value that all elements of an array have, None if it is empty."""
    values = np.unique(array)
    assert len(values) <= 1, f"a mixture of minibatches: {values}"
    return float(values[0]) if len(values) else None


class Job:
    """A network, a trainer and what was seen; the same from the same seed."""

    def __init__(
        self,
        kind,
        driver,
        double_buffering=True,
        epochs=1,
        depth=2,
        hooks=(),
        also=None,
        net=coded_net,
    ):
        bs.global_rnd.set_seed(SEED)
        self.net = net()
        self.net.set_handler(make_handler(kind, driver))
        self.stepper = Recorder(also)
        self.trainer = dbuf.Trainer(
            self.stepper,
            verbose=False,
            double_buffering=double_buffering,
            depth=depth,
        )
        self.trainer.add_hook(bs.hooks.StopAfterEpoch(epochs))
        for hook in hooks:
            self.trainer.add_hook(hook)

    @property
    def seen(self):
        return self.stepper.seen

    @property
    def stats(self):
        return self.trainer.feed_stats

    def train(self, iterator, **named):
        self.trainer.train(self.net, iterator, **named)
        return self

    def train_again(self):
        """Train on coded minibatches 0, 1, 2 as if nothing had happened before."""
        self.stepper.seen.clear()
        self.stepper.also = None
        self.trainer.hooks.clear()
        epoch = self.trainer.current_epoch_nr + 1
        self.trainer.add_hook(bs.hooks.StopAfterEpoch(epoch))
        self.train(coded(3))
        assert self.seen == codes(0, 1, 2)

    def result(self):
        """Return what parity.assert_same compares."""
        return Run(
            self.net.get("parameters"),
            self.trainer.logs,
            [self.seen, self.stepper.losses],
            self.stats,
        )


class Hook(bs.hooks.Hook):
    """Call a function of the update's number after each update."""

    __undescribed__ = {"function"}

    def __init__(self, function, name="test hook", **kwargs):
        super().__init__(name, timescale="update", **kwargs)
        self.function = function

    def __call__(self, epoch_nr, update_nr, net, stepper, logs):
        # brainstorm calls its hooks once before the first update.
        return self.function(update_nr) if update_nr else None


def stop_at(update):
    """Return a hook that stops training after that update."""

    def stop(update_nr):
        if update_nr == update:
            raise StopIteration

    return Hook(stop, "stop")


def workers():
    """Return the feeds' threads that are alive."""
    return [t for t in threading.enumerate() if t.name == WORKER_NAME]
