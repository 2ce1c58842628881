"""How fast a minibatch is gathered and cast: np.copyto, and stage() by threads.

Method: for each kind of data one source and one float32 destination of `MEGABYTES` MiB,
both touched before; all ways take turns, `ROUNDS` rounds after one of warming up, the
destination compared with np.copyto's at the end. A figure is the destination's bytes
over the median time. Threads beyond the processors that the process may use are shown
as well: they should cost nothing.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np
from brainstorm_dbuf import _cuda

MEGABYTES = int(os.environ.get("STAGING_MEGABYTES", "64"))
ROUNDS = int(os.environ.get("STAGING_ROUNDS", "11"))
THREADS = (1, 2, 4, 8, 16)


def sources() -> dict[str, np.ndarray]:
    """Return arrays of about the same number of elements, by what they are like."""
    count = MEGABYTES << 18
    rng = np.random.default_rng(0)
    features, times = 784, 50
    batch = count // features // times
    data = rng.random((times, 2 * batch, features), np.float32)
    flat = data.reshape(-1)[:count]
    return {
        "float32": flat,
        "float64": flat.astype(np.float64),
        "uint8": (flat * 256).astype(np.uint8),
        "float16": flat.astype(np.float16),
        "int64": (flat * 256).astype(np.int64),
        "float32 swapped": flat.astype(">f4"),
        "float32, a batch of a sequence": data[:, :batch],
        "float32, half of each row": data[:, :, : features // 2],
        "float64, every other": np.repeat(flat[: count // 2], 2).astype("f8")[::2],
    }


def main() -> int:
    processors = len(os.sched_getaffinity(0))
    print(__doc__.splitlines()[0])
    print(f"{processors} processors by affinity, NumPy {np.__version__}, "
          f"{MEGABYTES} MiB, medians of {ROUNDS} rounds; GB/s of float32")
    heads = ["copyto", *(f"{n} thr." for n in THREADS)]
    print(f"{'':<32}" + "".join(f"{head:>9}" for head in heads))
    results = {}
    for name, source in sources().items():
        dest, expected = np.zeros(source.shape, "f4"), np.zeros(source.shape, "f4")
        ways = {"copyto": lambda: np.copyto(expected, source, casting="unsafe")}
        for threads in THREADS:
            ways[str(threads)] = lambda n=threads: _cuda.stage(dest, source, n)
        seconds = {way: [] for way in ways}
        for round_ in range(ROUNDS + 1):
            for way, call in ways.items():
                started = time.perf_counter()
                call()
                if round_:
                    seconds[way].append(time.perf_counter() - started)
        assert np.array_equal(dest, expected), name
        rates = {
            way: dest.nbytes / statistics.median(taken) / 1e9
            for way, taken in seconds.items()
        }
        results[name] = rates
        print(f"{name:<32}" + "".join(f"{rate:9.1f}" for rate in rates.values()))
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
