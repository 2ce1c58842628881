"""Small minibatches: double buffering must not cost what it cannot save.

Rows: 5,000 minibatches of shape (1, 1, 4) through a tiny network, and brainstorm's
mnist_pi network (784-1200-1200-10, dropout, minibatches of 100), on each handler that
can be used here (mnist_pi on GPU handlers only). Plain and double-buffered runs take
turns, the order swapped each time; the ratio is the median over the pairs. Weights must
be equal to the bit.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import time

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import brainstorm_dbuf as dbuf
from gpu_handlers import GPU_HANDLERS, gpu_handler

import brainstorm as bs
import numpy as np
from brainstorm.data_iterators import Minibatches
from brainstorm.handlers import NumpyHandler

AT_MOST = 1.02


def tiny(make_handler, double_buffering, epochs=1):
    rnd = np.random.RandomState(0)
    data = {
        "default": rnd.standard_normal((1, 5000, 4)).astype(np.float32),
        "targets": rnd.randint(0, 2, (1, 5000, 1)).astype(np.float32),
    }
    return train(
        lambda: bs.tools.create_net_from_spec("classification", 4, 2, "F3"),
        make_handler(),
        Minibatches(1, shuffle=True, **data),
        double_buffering,
        epochs,
    )


def mnist_pi(make_handler, double_buffering, epochs=5):
    rnd = np.random.RandomState(0)
    data = {
        "default": rnd.random_sample((1, 20000, 784)).astype(np.float32),
        "targets": rnd.randint(0, 10, (1, 20000, 1)).astype(np.float32),
    }
    return train(
        lambda: bs.tools.create_net_from_spec(
            "classification", 784, 10, "D.2 F1200 D F1200 D"
        ),
        make_handler(),
        Minibatches(100, shuffle=True, **data),
        double_buffering,
        epochs,
    )


def train(make_net, handler, iterator, double_buffering, epochs):
    """Return (seconds an update, weights, what the feed did)."""
    bs.global_rnd.set_seed(1)
    iterator.rnd.set_seed(1)
    net = make_net()
    net.set_handler(handler)
    trainer = dbuf.Trainer(
        bs.training.MomentumStepper(0.01, 0.9),
        verbose=False,
        double_buffering=double_buffering,
    )
    trainer.add_hook(bs.hooks.StopAfterEpoch(epochs))
    started = time.perf_counter()
    trainer.train(net, iterator)
    elapsed = time.perf_counter() - started
    return (
        elapsed / trainer.current_update_nr,
        net.get("parameters"),
        trainer.feed_stats,
    )


def rows(names):
    """Yield what can be run here as (name, function of double_buffering)."""
    yield (
        "tiny, NumpyHandler",
        functools.partial(tiny, lambda: NumpyHandler(np.float32, seed=1)),
    )
    for name in names:
        try:
            make_handler = gpu_handler(name)
        except (ImportError, RuntimeError) as error:
            print(f"{name} is left out: {error}")
            continue
        handler = type(make_handler()).__name__
        yield f"tiny, {handler}", functools.partial(tiny, make_handler)
        yield f"mnist_pi, {handler}", functools.partial(mnist_pi, make_handler)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--handlers",
        nargs="*",
        choices=sorted(GPU_HANDLERS),
        default=["pycuda", "cuda"],
    )
    parser.add_argument("--pairs", type=int, default=7)
    options = parser.parse_args()
    print(__doc__.strip())
    print()
    failed = False
    for name, run in rows(options.handlers):
        run(False), run(True)  # warm-up
        ratios, plain_times, identical, workers = [], [], True, 0
        for pair in range(options.pairs):
            seconds, weights = {}, {}
            for double_buffering in (False, True) if pair % 2 else (True, False):
                seconds[double_buffering], weights[double_buffering], stats = run(
                    double_buffering
                )
                workers += stats.workers if double_buffering else 0
            ratios.append(seconds[True] / seconds[False])
            plain_times.append(seconds[False])
            identical &= np.array_equal(weights[True], weights[False])
        ratio = statistics.median(ratios)
        print(
            f"{name:<26} plain {statistics.median(plain_times) * 1e6:8.1f} us an "
            f"update   double-buffered / plain = {ratio:.3f} ({min(ratios):.3f} to "
            f"{max(ratios):.3f}; at most {AT_MOST:.2f})   {workers} workers started   "
            f"weights {'identical' if identical else 'DIFFERENT'}"
        )
        failed |= ratio > AT_MOST or not identical
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
