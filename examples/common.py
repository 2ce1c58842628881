"""What the examples share: the command line, data sets, handlers, last words."""

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
from brainstorm.handlers import NumpyHandler

SEED = 42
WRONG, CANNOT = 2, 3  # exit statuses, those of `brainstorm-dbuf train`


def parser(description: str, epochs: int = 5) -> argparse.ArgumentParser:
    """Return the options that all of them have."""
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--handler", choices=("numpy", "pycuda", "cuda"), default="numpy"
    )
    options.add_argument("--epochs", type=positive, default=epochs)
    options.add_argument(
        "--plain", action="store_true", help="brainstorm's own loop, to compare"
    )
    return options


def add_data_options(options: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add those of the examples that read a data set."""
    options.add_argument(
        "--data",
        metavar="FILE.hdf5",
        help="as brainstorm's data/create_*.py write it; synthetic data if left out",
    )
    options.add_argument(
        "--samples", type=positive, default=5000, help="of the synthetic training set"
    )
    options.add_argument(
        "--save", metavar="FILE.hdf5", help="keep the network of the best validation"
    )
    return options


def positive(text: str) -> int:
    """Convert an option that must be at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


def refuse(message: str, status: int) -> SystemExit:
    """Say on standard error what is wrong; raise what this returns."""
    print(message, file=sys.stderr)
    return SystemExit(status)


def make_handler(name: str):
    """Return a seeded handler; exit with status 3 where there can be none."""
    if name == "cuda":
        try:
            return dbuf.CudaHandler(seed=SEED)
        except (RuntimeError, OSError) as error:
            raise refuse(f"CudaHandler: {error}", CANNOT) from None
    if name == "pycuda":
        problem = dbuf.compat.pycuda_problem()
        if problem is not None:
            raise refuse(f"PyCudaHandler: {problem}", CANNOT)
        return bs.handlers.PyCudaHandler(seed=SEED)
    return NumpyHandler(np.float32, seed=SEED)


def load(path: str, group: str, dimensions: int) -> tuple[dict, dict]:
    """Return training and validation set: ``default`` and ``targets``, (T, N, ...).

    Args:
        path: an HDF5 file; exit with status 2 if it is not as it must be.
        group: that of the sets, such as ``"normalized_split"``.
        dimensions: how many ``default`` must have.
    """
    import h5py

    try:
        with h5py.File(path, "r") as file:
            sets = [
                {name: file[group][part][name][:] for name in ("default", "targets")}
                for part in ("training", "validation")
            ]
    except OSError as error:
        raise refuse(f"--data {path}: {error}", WRONG) from None
    except KeyError as error:
        raise refuse(
            f"--data {path}: expected default and targets in {group}/training and "
            f"{group}/validation: {error.args[0]}",
            WRONG,
        ) from None
    for arrays in sets:
        inputs, targets = arrays["default"].shape, arrays["targets"].shape
        if len(inputs) != dimensions or targets != (*inputs[:2], 1):
            raise refuse(
                f"--data {path}: expected default of {dimensions} dimensions (T, N, "
                f"...) and targets of (T, N, 1), got {inputs} and {targets}",
                WRONG,
            )
    print(f"{sets[0]['default'].shape[1]:,} training samples from {path}")
    return sets[0], sets[1]


def images(options: argparse.Namespace, shape: tuple[int, ...]) -> tuple[dict, dict]:
    """Return training and validation set: those of ``--data``, else synthetic ones."""
    if options.data:
        return load(options.data, "normalized_split", 5)
    return synthetic_images(shape, options.samples)


def synthetic_images(shape: tuple[int, ...], samples: int) -> tuple[dict, dict]:
    """Return training and validation set: 10 pictures, and noise over them."""
    rnd = np.random.default_rng(SEED)
    pictures = rnd.random((10, *shape), dtype=np.float32)

    def draw(count: int) -> dict:
        targets = rnd.integers(0, 10, count)
        noise = rnd.standard_normal((count, *shape), dtype=np.float32)
        return {
            "default": (pictures[targets] + noise)[None],
            "targets": targets[None, :, None],
        }

    print(f"{samples:,} synthetic training samples of {shape} (--data for real ones)")
    return draw(samples), draw(max(samples // 5, 1))


def train(net, trainer, training, validation, options: argparse.Namespace) -> None:
    """Add the hooks that brainstorm's examples have, train, and tell of it."""
    scorers = [bs.scorers.Accuracy(out_name=net.output_name)]
    trainer.add_hook(bs.hooks.MonitorScores("valid_getter", scorers, name="validation"))
    if options.save:
        best = bs.hooks.SaveBestNetwork(
            "validation.Accuracy", options.save, criterion="max"
        )
        trainer.add_hook(best)
    trainer.add_hook(bs.hooks.StopAfterEpoch(options.epochs))
    started = time.perf_counter()
    trainer.train(net, training, valid_getter=validation)
    seconds = time.perf_counter() - started
    accuracy = max(trainer.logs["validation"]["Accuracy"][1:])
    print(f"best validation accuracy {accuracy:.4f}")
    tell(trainer, seconds)


def tell(trainer, seconds: float) -> None:
    """Print what training took, and what held it back."""
    updates = trainer.current_update_nr
    print(f"{updates} updates, {seconds / updates * 1e3:.2f} ms each with all hooks")
    if trainer.feed_stats is None:
        print("feed: none, this was brainstorm's own loop")
    else:
        print(textwrap.fill(trainer.feed_stats.verdict, 88))
