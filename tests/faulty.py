"""Trainings for a driver whose calls fail, are late, or are refused memory.

Each makes all it needs from the same seeds, handler included, so that two of them give
the same weights to the bit.
"""

from __future__ import annotations

import gc
import mmap
import os
import threading
import time

import numpy as np

import brainstorm_dbuf as dbuf
from brainstorm.data_iterators import Minibatches
from coded import FEATURES, From, Job, batch, codes
from networks import NETWORKS, minibatches
from parity import make_handler, train

# How thorough: some of the calls in the suite, all of them by hand, with
# BRAINSTORM_DBUF_TEST_EXAMPLES=100000.
EXAMPLES = int(os.environ.get("BRAINSTORM_DBUF_TEST_EXAMPLES", "25"))
IN_SUITE = EXAMPLES <= 25
COUNT = 6


def some_of(count, quick):
    """Return the calls to try of so many: first, second, last, others between them.

    In the suite ``quick`` of them, by hand more. Of one, the middle one.
    """
    wanted = max(1, quick * EXAMPLES // 25)
    if wanted >= count:
        return list(range(count))
    if wanted == 1:
        return [count // 2]
    spread = {round(k * (count - 1) / (wanted - 1)) for k in range(wanted)}
    return sorted(spread | {1} if wanted > 3 else spread)


def small_pass():
    return (batch(k) for k in range(COUNT))


def large_pass():
    """Minibatches copied from where they lie, then larger ones that are not."""
    arrays = {
        name: dbuf.pagelocked_empty((1, 6000, FEATURES))
        for name in ("default", "targets")
    }
    for k in range(COUNT):
        arrays["default"][...], arrays["targets"][...] = k, k + 1000
        yield arrays if k < 4 else batch(k, samples=9000)


def growing_pass():
    return (batch(k, samples=100 * (k + 1)) for k in range(COUNT))


def held_data():
    """Sequences whose slices are copied from where they lie, as rows."""
    arrays = {}
    for name in ("default", "targets"):
        memory = mmap.mmap(-1, 2 * COUNT * 3000 * FEATURES * 4)
        array = np.frombuffer(memory, np.float32).reshape(2, -1, FEATURES)
        array[...] = np.repeat(np.arange(COUNT), 3000)[None, :, None]
        arrays[name] = array
    arrays["targets"] += 1000
    return Minibatches(3000, shuffle=False, **arrays)


# What is trained on.
PASSES = {
    "small": lambda: From(small_pass),
    "direct": lambda: From(large_pass),
    "growing": lambda: From(growing_pass),
    "held": held_data,
}


# ------------------------------------------------------------------- whole trainings


def on_coded_minibatches(kind, make_iterator):
    def training(driver):
        job = Job(kind, driver)
        job.train(make_iterator())
        assert job.seen == codes(*range(COUNT))
        return job.net.get("parameters")

    return training


def on_cuda(name):
    def training(driver):
        run = train(
            NETWORKS[name],
            lambda: minibatches(name, np.random.default_rng(1), size=8),
            make_handler("cuda", driver),
            double_buffering=True,
            epochs=1,
        )
        return run.weights

    return training


# By kind of handler and what is trained; of each the way that minibatches are prepared.
TRAININGS = {
    ("device", "small"): on_coded_minibatches("device", PASSES["small"]),
    ("device", "direct"): on_coded_minibatches("device", PASSES["direct"]),
    ("device", "growing"): on_coded_minibatches("device", PASSES["growing"]),
    ("device", "held"): on_coded_minibatches("device", PASSES["held"]),
    ("cuda", "held"): on_coded_minibatches("cuda", PASSES["held"]),
    ("cuda", "mlp with dropout"): on_cuda("mlp with dropout"),
    ("cuda", "convolution"): on_cuda("convolution"),
    ("cuda", "lstm with a mask"): on_cuda("lstm with a mask"),
}


class Told(threading.Thread):
    """Sees, beside a training, that a call is late; then does something about it.

    It can only do so if the call has let go of the interpreter.

    Attributes:
        saw: whether a call was late for three looks in a row.
    """

    def __init__(self, fake, then):
        super().__init__(name="told", daemon=True)
        self.fake, self.then = fake, then
        self.saw = self.ended = False

    def run(self):
        looks = 0
        while not self.ended and looks < 3:
            time.sleep(0.0005)
            looks += bool(self.fake.delays()["now"])
        if looks:
            self.saw = True
            self.then()

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *exc_info):
        self.ended = True
        self.join(30)
        assert not self.is_alive()


def counts_of_a_training(training, driver):
    """Return its weights, and the calls that it makes, by entry, with its end."""
    fake = driver.fake
    gc.collect()
    before = fake.calls()
    weights = training(driver)
    gc.collect()
    return weights, fake.calls() - before


def live_in_both(fake):
    """Return what there is of ours, by our own count and by the driver's."""
    gc.collect()
    return dbuf.live_objects(), fake.live()
