"""Train on real handwritten digits, on as many ranks as MPI has started.

    python examples/data_parallel.py                  # alone
    mpiexec -n 2 python examples/data_parallel.py     # two ranks, half the digits each

Each minibatch of 50 is shared out among the ranks, which shuffle their own digits.
Needs mpi4py, an MPI (or the package mpich) and scikit-learn.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the ranks share the processors

import brainstorm_dbuf as dbuf

import brainstorm as bs
import numpy as np
from brainstorm.data_iterators import Minibatches
from brainstorm.handlers import NumpyHandler
from mpi4py import MPI
from sklearn.datasets import load_digits

BATCH_SIZE, EPOCHS, CLASSES = 50, 10, 10


def load() -> tuple[dict, dict]:
    """Return training and test set, arrays of shape (T = 1, samples, ...)."""
    digits = load_digits()
    order = np.random.RandomState(0).permutation(len(digits.target))
    arrays = {"default": digits.images / 16.0, "targets": digits.target[:, None]}
    train, test = order[:1500], order[1500:]
    return tuple(
        {name: array[None, part] for name, array in arrays.items()}
        for part in (train, test)
    )


def main() -> int:
    comm = MPI.COMM_WORLD
    train_set, test_set = load()
    # Every rank has samples of its own, and as many minibatches as the others.
    samples = 1500 // comm.size * comm.size
    own = {
        name: array[:, comm.rank : samples : comm.size]
        for name, array in train_set.items()
    }
    bs.global_rnd.set_seed(1 + comm.rank)  # of the weights, those of rank 0 are taken
    net = bs.tools.create_net_from_spec("classification", (8, 8), CLASSES, "F128 F64")
    net.set_handler(NumpyHandler(np.float32))

    stepper = dbuf.DataParallel(bs.training.MomentumStepper(0.3, 0.9))
    trainer = dbuf.Trainer(stepper, verbose=False)
    trainer.add_hook(bs.hooks.StopAfterEpoch(EPOCHS))
    trainer.train(net, Minibatches(BATCH_SIZE // comm.size, **own))

    scorer = bs.scorers.Accuracy(out_name="Output.outputs.predictions")
    scores = bs.tools.evaluate(net, Minibatches(100, **test_set), [scorer])
    weights = net.get("parameters")
    equal = all(np.array_equal(weights, other) for other in comm.allgather(weights))
    if comm.rank == 0:
        losses = trainer.logs["rolling_training"]["total_loss"]
        print(f"{comm.size} rank(s) of {own['default'].shape[1]} digits")
        print("loss on rank 0", " ".join(f"{loss:.3f}" for loss in losses))
        print(f"weights equal on all ranks: {equal}")
        print(f"test accuracy {scores['Accuracy']:.4f}")
    return int(not equal)


if __name__ == "__main__":
    sys.exit(main())
