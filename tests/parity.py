"""Train the same network with and without double buffering and compare everything."""

from __future__ import annotations

import contextlib
import gc
import random
import time
from dataclasses import dataclass, field

import numpy as np
import pytest

import brainstorm_dbuf as dbuf
import brainstorm as bs
from brainstorm.data_iterators import DataIterator
from brainstorm.handlers import NumpyHandler

SEED = 20151017


class Oracle(NumpyHandler):
    """NumpyHandler with the activation that CudaHandler has beyond it."""

    def __init__(self, dtype=np.float32):
        super().__init__(dtype, seed=SEED)
        self.act_func["el"] = self.el
        self.act_func_deriv["el"] = self.el_deriv
        self.inplace_act_func["el"] = lambda x: self.el(x, x)
        self.inplace_act_func_deriv["el"] = lambda y, dy: self.el_deriv(y, y, dy, dy)

    def el(self, x, y):
        y[:] = np.where(x > 0, x, np.expm1(x))

    def el_deriv(self, x, y, dy, dx):
        dx[:] = dy * np.where(y > 0, 1, y + 1)


@dataclass
class Run:
    weights: np.ndarray
    logs: dict
    losses: list = field(default_factory=list)
    stats: object = None


class Delayed(DataIterator):
    """Sleep a random time before each minibatch of another iterator."""

    def __init__(self, iterator, seed, most=0.002):
        self.iter = iterator
        self.data_shapes, self.length = iterator.data_shapes, iterator.length
        self._random = random.Random(seed)
        self._most = most

    def __call__(self, handler=None):
        for data in self.iter(handler):
            time.sleep(self._random.random() * self._most)
            yield data


class Recorder(bs.training.MomentumStepper):
    """A stepper that notes the loss of each step and may sleep around it."""

    def __init__(self, losses, seed=None, **kwargs):
        super().__init__(0.05, 0.9, **kwargs)
        self.losses = losses
        self.random = None if seed is None else random.Random(seed)

    def run(self):
        if self.random is not None:
            time.sleep(self.random.random() * 0.002)
        super().run()
        self.losses.append(dict(self.net.get_loss_values()))


def make_handler(kind, driver):
    """Return a seeded handler.

    'numpy', 'device' (NumPy in the stand-in driver's memory), 'pycuda' or 'cuda'.
    """
    if kind == "numpy":
        return NumpyHandler(np.float32, seed=SEED)
    if kind == "cuda":
        return dbuf.CudaHandler(seed=SEED)
    if kind == "device":
        from device_handler import DeviceHandler

        fake, context = driver.fake, driver.context
        return DeviceHandler(lambda: fake.drain(0, context), seed=SEED)
    from brainstorm.handlers import PyCudaHandler

    return PyCudaHandler(seed=SEED)


def train(
    make_net,
    make_iterator,
    handler,
    double_buffering,
    epochs=3,
    hooks=(),
    delays=None,
    depth=2,
    named=lambda: {},
):
    """Build everything from the same seeds, train, return what came of it."""
    bs.global_rnd.set_seed(SEED)
    losses = []
    net = make_net()
    net.set_handler(handler)
    iterator = make_iterator()
    if delays is not None:
        iterator = Delayed(iterator, delays)
    trainer = dbuf.Trainer(
        Recorder(losses, delays),
        verbose=False,
        double_buffering=double_buffering,
        depth=depth,
    )
    trainer.train_scorers = [bs.scorers.Accuracy(out_name="Output.outputs.predictions")]
    trainer.add_hook(bs.hooks.StopAfterEpoch(epochs))
    for make_hook in hooks:
        trainer.add_hook(make_hook())
    trainer.train(net, iterator, **named())
    return Run(net.get("parameters"), trainer.logs, losses, trainer.feed_stats)


@contextlib.contextmanager
def skip_what_pycuda_cannot(kind):
    """Skip a test where brainstorm's own run fails on PyCUDA.

    PyCUDA reshapes no slice of features, and launches no kernel over nothing, which an
    LSTM wants for a minibatch of one time step.
    """
    try:
        yield
    except Exception as error:
        if kind != "pycuda":
            raise
        reason = f"brainstorm's own run fails on PyCUDA: {error}"
    else:
        return
    pytest.skip(reason)


def assert_same(plain, buffered):
    assert plain.losses == buffered.losses
    assert np.array_equal(plain.weights, buffered.weights)
    assert_same_logs(plain.logs, buffered.logs)


def assert_same_logs(a, b, path=""):
    assert type(a) is type(b), path
    if isinstance(a, dict):
        assert list(a) == list(b), path
        for key in a:
            assert_same_logs(a[key], b[key], f"{path}.{key}")
    else:
        np.testing.assert_array_equal(a, b, err_msg=path)


def poison_back_buffers(monkeypatch):
    """Fill each back buffer with NaN before a minibatch comes into it."""
    from brainstorm_dbuf import back_buffers

    host_fill, device_fill = back_buffers.HostSlot.fill, back_buffers.DeviceSlot.fill

    def poisoned_host_fill(self, *arguments):
        self._leave_to_holders()
        self._block.fill(0xFF)
        host_fill(self, *arguments)

    def poisoned_device_fill(self, *arguments):
        self._leave_to_holders()
        self.wait_copied()
        if self._access.staging is not None:
            self._access.copy_stream.synchronize()
            for memory in gc.get_referents(self._access.staging):
                if isinstance(memory, np.ndarray):
                    memory.fill(0xFF)
        if self._memory is not None and self._memory.nbytes:
            stream = self._access.copy_stream
            if self._last_consumed is not None:
                stream.wait_event(self._last_consumed)
            dbuf.memset_d8_async(self._memory, 0xFF, self._memory.nbytes, stream)
        device_fill(self, *arguments)

    monkeypatch.setattr(back_buffers.HostSlot, "fill", poisoned_host_fill)
    monkeypatch.setattr(back_buffers.DeviceSlot, "fill", poisoned_device_fill)


def force_worker(monkeypatch):
    """Start the worker after the first minibatch of each pass, however small."""
    from brainstorm_dbuf import feed

    monkeypatch.setattr(feed, "WORTH_A_WORKER_SECONDS", -1.0)
    monkeypatch.setattr(feed, "SLOW_IN_A_ROW", 1)
