"""What a change of T costs: brainstorm's own, and the quick one of dbuf.Trainer.

An Lstm network of 10 million parameters whose T changes with every minibatch. Each
change is timed by itself, with the device waited for before and after, so that what was
queued counts for nothing; medians after warming up. Rows: the same eight T again and
again; another T each time; a T that is larger than any before, for which the flat
buffer is allocated anew. On NumpyHandler, and on the GPU handlers where there are some.
The last row is a whole training of a small network by either trainer, per update.

    python bench/ragged.py [--units 1531]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import brainstorm_dbuf as dbuf
from gpu_handlers import GPU_HANDLERS, gpu_handler

import brainstorm as bs
import numpy as np
from brainstorm.data_iterators import DataIterator
from brainstorm.handlers import NumpyHandler
from brainstorm_dbuf.resizing import quick_resizing

FEATURES, CLASSES, BATCH = 100, 10, 4
LONGEST = 128
WARM_UP = 16
AT_MOST_MS = 0.1

RECURRING = [T for _ in range(12) for T in (20, 3, 17, 8, 12, 5, 19, 2)]
NEVER_SEEN = list(range(LONGEST - 1, 0, -1))
# name of the row: the sizes, and whether the bound holds for them
ROWS = {
    "T comes again": (RECURRING, True),
    "T never seen before": (NEVER_SEEN, False),
    "T larger than ever": (range(LONGEST + 1, LONGEST + 33), False),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--units", type=int, default=1531)
    options = parser.parse_args()
    print(__doc__.split("\n\n")[1])
    makers = {"NumpyHandler": lambda: NumpyHandler(np.float32, seed=1)}
    for name in sorted(GPU_HANDLERS):
        try:
            makers[name] = gpu_handler(name)
        except (ImportError, RuntimeError) as error:
            print(f"no {name}: {error}")
    # A list, so that no row is left out where one is over the bound.
    within = [changes(make, options.units) for make in makers.values()]
    training(makers["NumpyHandler"])
    return 0 if all(within) else 1


def changes(make_handler: Callable[[], object], units: int) -> bool:
    """Print the rows of one handler; return whether they are within the bound."""
    within = True
    for row, (sizes, is_bound) in ROWS.items():
        own, count = median_ms(make_handler, units, sizes, contextlib.nullcontext)
        quick, _ = median_ms(make_handler, units, sizes, quick_resizing)
        name = type(make_handler()).__name__
        print(
            f"{name:14}{count:11,} parameters  {row:20}"
            f"brainstorm {own:8.3f} ms   quick {quick:7.3f} ms a change"
            + f"  (at most {AT_MOST_MS:g})" * is_bound
        )
        within &= quick <= AT_MOST_MS or not is_bound
    return within


def median_ms(
    make_handler: Callable[[], object],
    units: int,
    sizes: Iterable[int],
    resizing: Callable[[bs.Network], contextlib.AbstractContextManager],
) -> tuple[float, int]:
    """Return the milliseconds of a change of T, and the number of parameters."""
    net = bs.tools.create_net_from_spec(
        "classification", FEATURES, CLASSES, f"L{units}"
    )
    net.set_handler(make_handler())
    net._buffer_manager.resize(LONGEST, BATCH)
    seconds = []
    with resizing(net):
        for steps in sizes:
            wait(net.handler)
            started = time.perf_counter()
            net.buffer = net._buffer_manager.resize(steps, BATCH)
            wait(net.handler)
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[WARM_UP:]) * 1e3, net.buffer.parameters.shape[0]


def wait(handler: object) -> None:
    if not isinstance(handler, NumpyHandler):
        dbuf.Context.current().synchronize()


class Ragged(DataIterator):
    """Minibatches whose T is drawn anew each time."""

    def __init__(self, count: int) -> None:
        rnd = np.random.default_rng(0)
        self.length = count
        self.data_shapes = {"default": ("T", "B", 4), "targets": ("T", "B", 1)}
        self._batches = [
            {
                "default": rnd.standard_normal((steps, 2, 4)).astype(np.float32),
                "targets": rnd.integers(0, 2, (steps, 2, 1)).astype(np.float32),
            }
            for steps in rnd.integers(1, 10, count)
        ]

    def __call__(self, handler: object = None) -> Iterable[dict[str, np.ndarray]]:
        return iter(self._batches)


def training(
    make_handler: Callable[[], object], count: int = 500, pairs: int = 5
) -> None:
    """Print the time of an update by either trainer; they take turns."""
    times: dict[bool, list[float]] = {False: [], True: []}
    weights = []
    for pair in range(pairs + 1):
        for double_buffering in (False, True) if pair % 2 else (True, False):
            bs.global_rnd.set_seed(1)
            net = bs.tools.create_net_from_spec("classification", 4, 2, "F3")
            net.set_handler(make_handler())
            trainer = dbuf.Trainer(
                bs.training.SgdStepper(0.1),
                verbose=False,
                double_buffering=double_buffering,
            )
            trainer.add_hook(bs.hooks.StopAfterEpoch(1))
            iterator = Ragged(count)
            started = time.perf_counter()
            trainer.train(net, iterator)
            seconds = time.perf_counter() - started
            times[double_buffering].append(seconds / count * 1e3)
            weights.append(net.get("parameters"))
    assert all(np.array_equal(weights[0], others) for others in weights)
    plain, ours = (statistics.median(times[key][2:]) for key in (False, True))
    print(
        f"{'NumpyHandler':14}{weights[0].size:11,} parameters  {'a whole training':20}"
        f"brainstorm {plain:8.3f} ms   ours  {ours:7.3f} ms an update"
    )


if __name__ == "__main__":
    sys.exit(main())
