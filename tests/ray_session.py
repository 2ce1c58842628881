"""What the tests of Ray Data run: ``python ray_session.py FILE KINDS``.

In one Ray, and a process of its own, so that Ray's threads and warnings do not outlive
it. What was seen is written to FILE as JSON, where test_ray.py looks. KINDS are those
of the handlers.
"""

from __future__ import annotations

import gc
import json
import shutil
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import ray
import ray.data

import brainstorm_dbuf as dbuf
import brainstorm as bs
from brainstorm.data_iterators import Minibatches
from brainstorm.handlers import NumpyHandler
from brainstorm_dbuf import feed

SAMPLES, SIZE, FEATURES, CLASSES = 130, 20, 6, 3
WAIT_SECONDS = 15.0


def raw():
    """Return the data set: bytes, and what class they are of."""
    rnd = np.random.default_rng(2)
    return (
        rnd.integers(0, 256, (SAMPLES, FEATURES), np.uint8),
        rnd.integers(0, CLASSES, SAMPLES),
    )


def dataset(check=lambda number: None, samples=SAMPLES):
    """Return it as Ray's, in 13 blocks and more, worked on by its workers."""
    images, classes = raw()

    def load(batch):
        rows = batch["id"] % SAMPLES
        for number in batch["id"]:
            check(number)
        return {"default": np.float32(images[rows]) / 255, "targets": classes[rows]}

    blocks = samples // 10
    return ray.data.range(samples, override_num_blocks=blocks).map_batches(load)


def in_memory():
    images, classes = raw()
    data = {
        "default": np.float32(images[None]) / 255,
        "targets": classes[None, :, None],
    }
    return Minibatches(SIZE, shuffle=False, **data)


def from_ray(data):
    return dbuf.FromIterable(data.iter_batches(batch_size=SIZE), has_time=False)


class Steps(bs.training.MomentumStepper):
    """Counts its steps."""

    count = 0

    def run(self):
        super().run()
        self.count += 1


class StopAtUpdate(bs.hooks.Hook):
    def __init__(self, update):
        super().__init__(timescale="update")
        self.update = update

    def __call__(self, epoch_nr, update_nr, net, stepper, logs):
        if update_nr == self.update:
            raise StopIteration


class Job:
    def __init__(self, kind, trainer=dbuf.Trainer, epochs=2, hooks=()):
        bs.global_rnd.set_seed(4)
        self.net = bs.tools.create_net_from_spec(
            "classification", FEATURES, CLASSES, "F8"
        )
        self.net.set_handler(
            dbuf.CudaHandler(seed=1) if kind == "cuda" else NumpyHandler(np.float32)
        )
        self.trainer = trainer(Steps(0.3, 0.9), verbose=False)
        for hook in (*hooks, bs.hooks.StopAfterEpoch(epochs)):
            self.trainer.add_hook(hook)

    def train(self, iterator):
        self.trainer.train(self.net, iterator)
        return self.net.get("parameters").tolist()


def parity(kind):
    plain = Job(kind, bs.Trainer).train(in_memory())
    job = Job(kind)
    weights = job.train(from_ray(dataset()))
    stats = job.trainer.feed_stats
    return {
        "equal": weights == plain,
        "minibatches": stats.batches,
        "prefetched": stats.prefetched,
    }


def failing(kind):
    def check(number):
        if number == 70:
            raise OSError("no such file")

    job = Job(kind)
    # Nothing is fetched to see the shapes: what fails, fails in training.
    iterator = dbuf.FromIterable(
        dataset(check).iter_batches(batch_size=SIZE),
        has_time=False,
        data_shapes={"default": (1, SIZE, FEATURES), "targets": (1, SIZE, 1)},
    )
    try:
        job.train(iterator)
    except ray.exceptions.RayTaskError as error:
        outcome = str(error)
    else:
        outcome = "nothing was raised"
    trained = job.trainer.stepper.count
    job.trainer.hooks["StopAfterEpoch"].max_epochs = 2
    job.train(from_ray(dataset()))
    again = job.trainer.stepper.count - trained
    return {
        "outcome": outcome,
        "trained": trained,
        "again": again,
        "left": what_is_left(),
    }


def stopped(kind):
    # All of it would take 100 seconds.
    data = dataset(lambda number: time.sleep(0.005), samples=20_000)
    job = Job(kind, hooks=[StopAtUpdate(3)])
    job.train(from_ray(data))
    return {"trained": job.trainer.stepper.count, "left": what_is_left()}


def ragged(kind):
    rows = [{"default": np.ones(1 + k % 2), "targets": k} for k in range(4)]
    try:
        from_ray(ray.data.from_items(rows))
    except TypeError as error:
        return str(error)


def what_is_left():
    """Return the threads and busy workers that do not end in some seconds.

    Of a pass that was not gone through to its end Ray leaves the thread that it fetches
    blocks by parked, and on Python 3.10 the next garbage collection ends the others,
    whoever iterates.
    """
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        gc.collect()
        threads = {t.name for t in threading.enumerate()} - STANDING - {"Prefetcher"}
        is_idle = ray.available_resources().get("CPU") == 1.0
        if (is_idle and not threads) or time.monotonic() > deadline:
            return sorted(threads) + ["a busy worker"] * (not is_idle)
        time.sleep(0.05)


if __name__ == "__main__":
    where, *kinds = sys.argv[1:]
    feed.WORTH_A_WORKER_SECONDS, feed.SLOW_IN_A_ROW = -1.0, 1
    folder = tempfile.mkdtemp(prefix="ray")  # short: there are sockets in it
    try:
        ray.init(
            num_cpus=1,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=100 << 20,
            _temp_dir=folder,
        )
        with warnings.catch_warnings():
            # It warns of settings of its own, which nobody has made.
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            context = ray.data.DataContext.get_current()
        # Else blocks come in the order in which the workers are done.
        context.execution_options.preserve_order = True
        context.enable_progress_bars = False
        STANDING = {thread.name for thread in threading.enumerate()}
        cases = (parity, failing, stopped, ragged)
        seen = {f"{case.__name__} {k}": case(k) for k in kinds for case in cases}
        Path(where).write_text(json.dumps(seen))
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
