"""Train on real handwritten digits, plain and double-buffered, and compare.

The 1,797 digits that scikit-learn ships go through brainstorm's own augmenting iterators
(Pad, RandomCrop, AddGaussianNoise) into a small convolutional network, once with
brainstorm's own loop and once with the next minibatch prepared during each step. Ends
with status 1 if the weights differ or the accuracy is too low.

    python examples/digits.py
    python examples/digits.py --handler cuda
    python examples/digits.py --handler pycuda
    python examples/digits.py --data mnist.hdf5 --epochs 2
    python examples/digits.py --timeline feed.png     # needs matplotlib; or feed.json
"""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
import time

# BLAS takes all cores and spins on them between products; one is the worker's.
os.environ.setdefault("OPENBLAS_NUM_THREADS", str(max(1, (os.cpu_count() or 2) // 2)))

import brainstorm_dbuf as dbuf

import brainstorm as bs
import numpy as np
from brainstorm.data_iterators import (
    AddGaussianNoise,
    DataIterator,
    Minibatches,
    Pad,
    RandomCrop,
)
from brainstorm.handlers import NumpyHandler

CLASSES = 10


def main() -> int:
    options = parse_options()
    train_set, test_set, source = load(options.data)
    handlers = {"numpy": lambda: NumpyHandler(np.float32, seed=options.seed)}
    if options.handler == "cuda":
        handlers["cuda"] = make_cuda_handler(options.seed)
    if options.handler == "pycuda":
        handlers["pycuda"] = make_pycuda_handler(options.seed)
    make_handler = handlers[options.handler]

    images = train_set["default"].shape[1]
    print(
        f"{images:,} training and {test_set['default'].shape[1]:,} test images "
        f"{train_set['default'].shape[2:]} from {source}; "
        f"{type(make_handler()).__name__}, minibatches of {options.batch_size}, "
        f"{options.epochs} epochs"
    )
    runs = {}
    for name, double_buffering in (("plain", False), ("double-buffered", True)):
        runs[name] = Run(options, train_set, make_handler()).train(
            name, double_buffering
        )
    plain, buffered = runs["plain"], runs["double-buffered"]

    iterator_time = time_iterator(options, train_set)
    step_time = time_steps(options, train_set, make_handler())
    bound = max(iterator_time, step_time)
    accuracy = score(buffered.net, test_set)
    identical = np.array_equal(
        plain.net.get("parameters"), buffered.net.get("parameters")
    )

    print()
    print(f"plain            {plain.epoch_time:7.3f} s an epoch")
    print(f"double-buffered  {buffered.epoch_time:7.3f} s an epoch")
    print(
        f"bound            {bound:7.3f} s an epoch: the longer of iterator "
        f"{iterator_time:.3f} s and step {step_time:.3f} s"
    )
    print(f"speed-up         {plain.epoch_time / buffered.epoch_time:7.2f}")
    print(f"weights          {'identical' if identical else 'DIFFERENT'}")
    print(f"test accuracy    {accuracy:7.4f}")
    print(textwrap.fill(buffered.verdict, 88))
    if options.timeline:
        print(f"{options.timeline} shows some minibatches on their way")
    if not identical:
        print("FAILED: weights differ", file=sys.stderr)
    if accuracy < options.min_accuracy:
        print(
            f"FAILED: test accuracy {accuracy:.4f} is under {options.min_accuracy}",
            file=sys.stderr,
        )
    return int(not identical or accuracy < options.min_accuracy)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--handler", choices=("numpy", "cuda", "pycuda"), default="numpy"
    )
    parser.add_argument(
        "--data",
        metavar="FILE.hdf5",
        help="a data set in brainstorm's HDF5 format (training and test groups with "
        "default and targets) instead of scikit-learn's digits",
    )
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--seed", type=int, default=20151017)
    parser.add_argument("--min-accuracy", type=float, default=0.93)
    parser.add_argument(
        "--timeline", metavar="FILE", help="draw when each part of the feed was at work"
    )
    return parser.parse_args()


# ---------------------------------- the data ---------------------------------- #


def load(path: str | None) -> tuple[dict, dict, str]:
    """Return training and test set as brainstorm takes them: (T, N, ...), T = 1."""
    if path is None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        # Drawn three times as large, so that a shift by a pixel is a small one.
        images = np.kron(digits.images / 16.0, np.ones((3, 3)))[None, ..., None]
        targets = digits.target[None, :, None]
        order = np.random.RandomState(0).permutation(len(digits.target))
        train, test = order[:1500], order[1500:]
        return (
            {"default": images[:, train], "targets": targets[:, train]},
            {"default": images[:, test], "targets": targets[:, test]},
            "scikit-learn",
        )
    import h5py

    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise SystemExit(f"--data {path}: {error}") from None
    with file:
        group = file["normalized_split"] if "normalized_split" in file else file
        missing = [name for name in ("training", "test") if name not in group]
        if missing:
            raise SystemExit(
                f"{path}: no group {' and no group '.join(missing)} in {group.name!r}; "
                f"found {sorted(group)}"
            )
        sets = [
            {name: group[part][name][:] for name in ("default", "targets")}
            for part in ("training", "test")
        ]
    return sets[0], sets[1], path


def augmented(options: argparse.Namespace, data: dict) -> DataIterator:
    """Return the training iterator: shuffled minibatches, shifted and noisy images."""
    iterator = Minibatches(options.batch_size, shuffle=True, **data)
    if data["default"].ndim == 5:
        height, width = data["default"].shape[2:4]
        iterator = Pad(iterator, {"default": 2})
        iterator = RandomCrop(iterator, {"default": (height, width)})
    return AddGaussianNoise(iterator, {"default": 0.05})


# --------------------------------- the training -------------------------------- #


class Run:
    """One network with its iterator, built from the same seeds each time."""

    def __init__(self, options: argparse.Namespace, data: dict, handler) -> None:
        bs.global_rnd.set_seed(options.seed)
        self.options = options
        self.net = bs.tools.create_net_from_spec(
            "classification",
            data["default"].shape[2:],
            CLASSES,
            "F256 F128",
        )
        self.net.set_handler(handler)
        self.iterator = augmented(options, data)
        self.epoch_time = 0.0
        self.verdict = ""

    def train(self, name: str, double_buffering: bool) -> Run:
        trainer = dbuf.Trainer(
            bs.training.MomentumStepper(0.1, 0.9),
            verbose=False,
            double_buffering=double_buffering,
            timed=True,
        )
        if double_buffering and self.options.timeline:
            trainer.add_hook(dbuf.hooks.SaveFeedTimeline(self.options.timeline))
        clock = EpochClock(name, self.options.epochs)
        trainer.add_hook(clock)
        trainer.add_hook(bs.hooks.StopAfterEpoch(self.options.epochs))
        trainer.train(self.net, self.iterator)
        self.epoch_time = float(np.median(clock.times))
        if double_buffering:
            self.verdict = trainer.feed_stats.verdict
        return self


class EpochClock(bs.hooks.Hook):
    """Time each epoch and show how far training has come."""

    def __init__(self, label: str, epochs: int) -> None:
        super().__init__()
        self.label, self.epochs = label, epochs
        self.times: list[float] = []
        self._started = 0.0

    def __call__(self, epoch_nr, update_nr, net, stepper, logs):
        now = time.perf_counter()
        if epoch_nr:
            self.times.append(now - self._started)
            loss = logs["rolling_training"]["total_loss"][-1]
            print(
                f"{self.label:<16} epoch {epoch_nr:2d}/{self.epochs}  loss {loss:.4f}  "
                f"{self.times[-1]:.3f} s",
                flush=True,
            )
        self._started = time.perf_counter()


class Premade(DataIterator):
    """Minibatches that lie ready: training on them takes the time of the steps."""

    def __init__(self, iterator: DataIterator) -> None:
        super().__init__(iterator.data_shapes, iterator.length)
        self.batches = [dict(batch) for batch in iterator(None)]

    def __call__(self, handler=None):
        return iter(self.batches)


def time_iterator(options: argparse.Namespace, data: dict) -> float:
    """Return the seconds of one pass over the iterator alone, the median of three."""
    iterator = augmented(options, data)
    times = []
    for _ in range(3):
        started = time.perf_counter()
        for _ in iterator(None):
            pass
        times.append(time.perf_counter() - started)
    return float(np.median(times))


def time_steps(options: argparse.Namespace, data: dict, handler) -> float:
    """Return the seconds of one epoch of steps alone, the median of three."""
    run = Run(options, data, handler)
    run.iterator = Premade(run.iterator)
    trainer = dbuf.Trainer(
        bs.training.MomentumStepper(0.1, 0.9), verbose=False, double_buffering=False
    )
    clock = EpochClock("steps alone", 3)
    trainer.add_hook(clock)
    trainer.add_hook(bs.hooks.StopAfterEpoch(3))
    trainer.train(run.net, run.iterator)
    return float(np.median(clock.times))


def score(net, data: dict) -> float:
    iterator = dbuf.Prefetch(Minibatches(100, shuffle=False, **data))
    with iterator:
        scores = bs.tools.evaluate(
            net,
            iterator,
            [bs.scorers.Accuracy(out_name="Output.outputs.predictions")],
        )
    return float(scores["Accuracy"])


def make_cuda_handler(seed: int):
    try:
        dbuf.CudaHandler(seed=seed)
    except (ImportError, RuntimeError) as error:
        raise SystemExit(f"--handler cuda: {error}") from None
    return lambda: dbuf.CudaHandler(seed=seed)


def make_pycuda_handler(seed: int):
    problem = dbuf.compat.pycuda_problem()
    if problem is not None:
        raise SystemExit(f"--handler pycuda: {problem}")
    from brainstorm.handlers import PyCudaHandler

    return lambda: PyCudaHandler(seed=seed)


if __name__ == "__main__":
    sys.exit(main())
