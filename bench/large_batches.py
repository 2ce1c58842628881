"""Large images through a GPU handler: plain and double-buffered, beside the bound.

Network: FullyConnected 256 (--units) and 10 classes over 256 images of 224x224x3 float32
(154 MB a minibatch), 45 updates, the loss read after each; the first 5 are warm-up
(brainstorm and the feed allocate their buffers then), the time of the other 40 together
is divided by 40. Rows: the data set in ordinary memory (which the feed page-locks in
place, once) and in page-locked memory, each plain and double-buffered, in turn in one
process; medians over the repetitions. Beside them the bound of the same run: the step
alone (the inputs stay on the device) and the link alone (one page-locked minibatch copied
to the device and waited for), medians over 40. The weights of all rows must be equal to
the bit. With 256 units the link is the bound, with 1024 the step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import brainstorm_dbuf as dbuf
from gpu_handlers import GPU_HANDLERS, gpu_handler

import brainstorm as bs
import numpy as np
from brainstorm.data_iterators import DataIterator, Minibatches
from brainstorm_dbuf.bench import UpdateClock

CLASSES = 10
WARM_UP = 5
# Of the bound, which is the link's time or the step's.
AT_MOST_OF_LINK, AT_MOST_OF_STEP = 1.05, 1.02


class Cycle(DataIterator):
    """Pass over another iterator several times in one epoch."""

    leaves_arrays_alone = True

    def __init__(self, iterator: DataIterator, times: int) -> None:
        super().__init__(iterator.data_shapes, iterator.length * times)
        self.iter, self.times = iterator, times

    def __call__(self, handler=None):
        for _ in range(self.times):
            yield from self.iter(handler)


def make_net(options, handler):
    bs.global_rnd.set_seed(1)
    net = bs.tools.create_net_from_spec(
        "classification", options.shape, CLASSES, f"F{options.units}"
    )
    net.set_handler(handler)
    return net


def make_trainer(double_buffering):
    trainer = dbuf.Trainer(
        bs.training.MomentumStepper(0.001, 0.9),
        verbose=False,
        double_buffering=double_buffering,
    )
    trainer.add_hook(bs.hooks.StopAfterEpoch(1))
    return trainer


def time_training(data, options, make_handler, double_buffering):
    net = make_net(options, make_handler())
    iterator = Minibatches(options.batch_size, shuffle=False, **data)
    iterator = Cycle(iterator, (options.updates + WARM_UP) // options.distinct)
    trainer = make_trainer(double_buffering)
    clock = UpdateClock()
    trainer.add_hook(clock)
    trainer.train(net, iterator)
    # The hook is also called once before the first update.
    ends = clock.ends[1 + WARM_UP - 1 :]
    seconds = (ends[-1] - ends[0]) / (len(ends) - 1)
    return seconds, net.get("parameters"), trainer.feed_stats


def time_step(data, options, make_handler):
    """Return the seconds of an update whose inputs are there already."""
    net = make_net(options, make_handler())
    stepper = bs.training.MomentumStepper(0.001, 0.9)
    stepper.start(net)
    batch = {name: array[:, : options.batch_size] for name, array in data.items()}
    net.provide_external_data(batch)
    times = []
    for _ in range(options.updates):
        started = time.perf_counter()
        stepper.run()
        net.get_loss_values()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def time_link(locked, options):
    """Return the seconds of copying one page-locked minibatch to the device."""
    source = locked["default"][0, : options.batch_size]
    memory = dbuf.mem_alloc(source.nbytes)
    stream = dbuf.Stream()
    times = []
    for _ in range(options.updates):
        started = time.perf_counter()
        dbuf.memcpy_htod_async(memory, source, stream)
        stream.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--handler", choices=sorted(GPU_HANDLERS), default="pycuda")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--units", type=int, default=256)
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--distinct", type=int, default=9, help="minibatches held")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.shape = (options.side, options.side, 3)

    try:
        make_handler = gpu_handler(options.handler)
    except (ImportError, RuntimeError) as error:
        raise SystemExit(f"--handler {options.handler}: {error}") from None

    samples = options.batch_size * options.distinct
    rnd = np.random.default_rng(0)
    ordinary = {
        "default": rnd.random((1, samples, *options.shape), dtype=np.float32),
        "targets": rnd.integers(0, CLASSES, (1, samples, 1)).astype(np.float32),
    }
    locked = {}
    for name, array in ordinary.items():
        locked[name] = dbuf.pagelocked_empty(array.shape, array.dtype)
        locked[name][...] = array
    print(__doc__.strip())
    device = dbuf.Device(0)
    nbytes = ordinary["default"].nbytes // options.distinct
    print(f"\n{type(make_handler()).__name__} on {device.name}, driver CUDA "
          f"{dbuf.driver_version()}, NumPy {np.__version__}, {nbytes / 1e6:.0f} MB a "
          f"minibatch, median of {options.repeat}")

    rows = {
        "ordinary, plain": (ordinary, False),
        "ordinary, double-buffered": (ordinary, True),
        "page-locked, plain": (locked, False),
        "page-locked, double-buffered": (locked, True),
    }
    times = {name: [] for name in rows}
    weights = {}
    time_training(ordinary, options, make_handler, False)  # warm-up
    for _ in range(options.repeat):
        for name, (data, double_buffering) in rows.items():
            seconds, weights[name], stats = time_training(
                data, options, make_handler, double_buffering
            )
            times[name].append(seconds)
            if stats is not None and stats.fallbacks:
                print(f"{name}: {stats.fallbacks}")
    step, link = time_step(ordinary, options, make_handler), time_link(locked, options)
    bound = max(step, link)
    print(f"step alone {step * 1e3:.2f} ms, link {link * 1e3:.2f} ms "
          f"({nbytes / link / 1e9:.1f} GB/s), bound {bound * 1e3:.2f} ms")
    result = {"step_ms": step * 1e3, "link_ms": link * 1e3, "rows": {}}
    for name, seconds in times.items():
        median = statistics.median(seconds)
        result["rows"][name] = [s * 1e3 for s in seconds]
        print(f"{name:<30} {median * 1e3:8.2f} ms an update   {median / bound:6.2f} x bound")
    first = weights["ordinary, plain"]
    identical = all(np.array_equal(first, other) for other in weights.values())
    ratio = statistics.median(times["ordinary, double-buffered"]) / statistics.median(
        times["ordinary, plain"]
    )
    print(f"weights {'identical' if identical else 'DIFFERENT'}")
    failed = not identical
    at_most = AT_MOST_OF_STEP
    if link > step:
        at_most = AT_MOST_OF_LINK
        print(f"ordinary memory: double-buffered / plain = {ratio:.2f} (at most 0.50)")
        failed |= ratio > 0.50
    for memory in ("ordinary", "page-locked"):
        hidden = statistics.median(times[f"{memory}, double-buffered"]) / bound
        print(f"{memory} memory: double-buffered / bound = {hidden:.3f} (at most "
              f"{at_most:.2f})")
        failed |= hidden > at_most
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
