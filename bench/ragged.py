"""What a change of T costs: brainstorm's own, and the quick one of dbuf.Trainer.

An Lstm network whose T changes with every minibatch. The same sizes come again and again;
each change is timed by itself, and the device is waited for before and after, so that what
was queued counts for nothing. Medians over all changes after each size has come once.

    python bench/ragged.py [--handler numpy|cuda|pycuda] [--units 1500]
"""

from __future__ import annotations

import argparse
import statistics
import time

import brainstorm_dbuf as dbuf

import brainstorm as bs
import numpy as np
from brainstorm_dbuf.resizing import quick_resizing
from gpu_handlers import gpu_handler

FEATURES, CLASSES, BATCH = 100, 10, 4
STEPS = [20, 3, 17, 8, 12, 5, 19, 2]
CHANGES = 80


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--handler", choices=("numpy", "cuda", "pycuda"), default="numpy"
    )
    parser.add_argument("--units", type=int, default=1500)
    options = parser.parse_args()
    print(__doc__.split("\n\n")[1].replace("\n", " "))
    if options.handler == "numpy":
        handler = bs.handlers.NumpyHandler(np.float32, seed=1)
    else:
        handler = gpu_handler(options.handler)()
    net = bs.tools.create_net_from_spec(
        "classification", FEATURES, CLASSES, f"L{options.units}"
    )
    net.set_handler(handler)
    count = net.buffer.parameters.shape[0]
    print(f"{type(handler).__name__}, {count:,} parameters, T from {STEPS}, B {BATCH}")
    own = median_of_changes(net)
    with quick_resizing(net):
        quick = median_of_changes(net)
    print(f"brainstorm's own  {own * 1e3:8.3f} ms a change")
    print(f"quick             {quick * 1e3:8.3f} ms a change (at most 0.1)")


def median_of_changes(net: bs.Network) -> float:
    """Return the seconds that a change of T takes."""
    wait = getattr(net.handler, "synchronize", lambda: None)
    seconds = []
    for k in range(len(STEPS) + CHANGES):
        wait()
        started = time.perf_counter()
        net.buffer = net._buffer_manager.resize(STEPS[k % len(STEPS)], BATCH)
        wait()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[len(STEPS) :])


if __name__ == "__main__":
    main()
