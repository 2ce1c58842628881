"""The contestant in brainstorm: `dbuf.Trainer`, `bs.Trainer`, and the floor.

The network does next to nothing: what counts is an input that no layer reads, which
brainstorm copies to its buffer all the same, and the loss is that of a FullyConnected
layer of two units on one feature.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import os
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

from feed_data import Arenas, Size

THREADS = (1, 2, 4, 8, 16)
LINK_SIZES = (64 << 10, 1 << 20, 16 << 20, 256 << 20)
ROWS = (400, 4096, 64 << 10)


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a contestant needs to know from the start."""

    handler: str
    threads: int
    arena_bytes: int
    sizes: tuple[int, ...]
    seconds: float
    # The largest number of elements of a minibatch, for each dtype that is used.
    largest: dict[str, int] = dataclasses.field(default_factory=dict)


class Brainstorm:
    """See :meth:`turn`; the other methods measure what bounds it."""

    def __init__(self, setup: Setup) -> None:
        # The floor and the feed stage with the same number of threads.
        os.environ["BRAINSTORM_DBUF_STAGING_THREADS"] = str(setup.threads)
        if setup.handler != "pycuda":
            # brainstorm makes PyCUDA's context whenever it can import it.
            sys.modules["pycuda"] = None  # type: ignore[assignment]
        import brainstorm_dbuf as dbuf
        import numpy as np

        self.setup = setup
        context = None
        if setup.handler == "numpy":
            from brainstorm.handlers import NumpyHandler

            self.handler = NumpyHandler(np.float32, seed=1)
        else:
            from gpu_handlers import gpu_handler

            self.handler = gpu_handler(setup.handler)()
            context = dbuf.Context.current()
        from feed_floor import Floor

        self._checked: set[tuple[object, ...]] = set()
        self.arenas = Arenas(setup.arena_bytes)
        self.arenas.fill(setup.largest)
        self.floor = Floor(context, Size(max(setup.sizes)).nbytes, setup.threads)

    def describe(self) -> dict[str, str]:
        import brainstorm_dbuf as dbuf
        import numpy as np

        found = {
            "brainstorm_dbuf": dbuf.__version__,
            "NumPy": np.__version__,
            "handler": type(self.handler).__name__,
        }
        if self.setup.handler != "numpy":
            found["device"] = dbuf.Device(0).name
            found["driver"] = f"CUDA {dbuf.driver_version()}"
        return found

    # ----------------------------------- the floor ---------------------------------- #

    def floors(self) -> dict[str, Any]:
        """Return rates in GB/s of float32, by what is done, then by size or threads."""
        from feed_floor import LARGEST_COPY, median

        floor, threads = self.floor, self.setup.threads
        on_device = self.setup.handler != "numpy"
        size = Size(min(max(self.setup.sizes), LARGEST_COPY, floor.dest.nbytes))
        size = Size(min(size.asked, 154_140_672))
        some = [n for n in THREADS if n <= threads] or [threads]
        rates: dict[str, Any] = {}

        def rate(nbytes: int, measure: Any) -> float:
            return nbytes / median(measure) / 1e9

        if on_device:
            rates["pinned to device"] = {
                n: rate(n, functools.partial(floor.link, n))
                for n in LINK_SIZES
                if n <= floor.dest.nbytes
            }
            rates["pinned to device, every other row of"] = {}
            for row in ROWS:
                _, nbytes = floor.rows(row, 1)
                rates["pinned to device, every other row of"][row] = rate(
                    nbytes, lambda passes, row=row: floor.rows(row, passes)[0]
                )
        into = "pinned memory" if on_device else "memory"
        for dtype in ("float32", "float64"):
            if dtype not in self.setup.largest:
                continue
            batches = self.arenas.minibatches(size, dtype)
            rates[f"{dtype} into {into}, by threads"] = {
                n: rate(
                    size.nbytes,
                    lambda passes, n=n, b=batches: floor.stage(b, n, passes),
                )
                for n in some
            }
            if on_device:
                rates[f"{dtype} through pinned memory to device, by threads"] = {
                    n: rate(
                        size.nbytes,
                        lambda passes, n=n, b=batches: floor.pipeline(b, n, passes),
                    )
                    for n in some
                }
        return rates

    # ------------------------------------- turns ------------------------------------ #

    def turn(
        self, way: str, source: str, size: Size, dtype: str, updates: int, warm_up: int
    ) -> dict[str, Any]:
        """Return the seconds of a minibatch, timed over so many after warming up."""
        try:
            return getattr(self, f"_{way}")(source, size, dtype, updates, warm_up)
        finally:
            # Networks are cycles, and hold the device's memory.
            gc.collect()

    def _link(self, source, size, dtype, updates, warm_up) -> dict[str, Any]:
        self.floor.link(size.nbytes, warm_up)
        return {"seconds": self.floor.link(size.nbytes, updates)}

    def _pipeline(self, source, size, dtype, updates, warm_up) -> dict[str, Any]:
        from feed_floor import CHUNK

        batches = self.arenas.minibatches(size, dtype)
        run = self.floor.pipeline
        if self.setup.handler == "numpy":
            run = self.floor.stage
        # Nothing is split that is a single chunk.
        threads = self.setup.threads if size.nbytes > CHUNK else 1
        run(batches, threads, warm_up)
        return {"seconds": run(batches, threads, updates)}

    def _iterator(self, source, size, dtype, updates, warm_up) -> dict[str, Any]:
        iterator = self._data_iterator(source, size, dtype)
        rounds = itertools.chain.from_iterable(
            iterator(self.handler) for _ in itertools.count()
        )
        _exhaust(itertools.islice(rounds, warm_up))
        started = time.perf_counter()
        _exhaust(itertools.islice(rounds, updates))
        return {"seconds": (time.perf_counter() - started) / updates}

    def _step(self, source, size, dtype, updates, warm_up) -> dict[str, Any]:
        """The update alone: its inputs are there already."""
        from brainstorm.training import SgdStepper

        net = self._network(size)
        stepper = SgdStepper(0.1)
        stepper.start(net)
        net.provide_external_data(next(self._data_iterator(source, size, dtype)(None)))
        times = []
        for _ in range(warm_up + updates):
            started = time.perf_counter()
            stepper.run()
            net.get_loss_values()
            times.append(time.perf_counter() - started)
        return {"seconds": statistics.median(times[warm_up:])}

    def _feed(self, source, size, dtype, updates, warm_up) -> dict[str, Any]:
        return self._train(source, size, dtype, updates, warm_up, True)

    def _plain(self, source, size, dtype, updates, warm_up) -> dict[str, Any]:
        return self._train(source, size, dtype, updates, warm_up, False)

    def _train(
        self, source, size, dtype, updates, warm_up, double_buffering
    ) -> dict[str, Any]:
        import brainstorm_dbuf as dbuf
        import numpy as np
        from brainstorm_dbuf.bench import UpdateClock

        import brainstorm as bs

        class StoppingClock(UpdateClock):
            def __call__(self, epoch_nr, update_nr, **others):
                super().__call__(epoch_nr, update_nr, **others)
                if update_nr == warm_up + updates:
                    raise StopIteration

        iterator = self._data_iterator(source, size, dtype)
        batches = self.arenas.minibatches(size, dtype)
        self._check_is_ordinary(batches[0])
        net = self._network(size)
        trainer = dbuf.Trainer(
            bs.training.SgdStepper(0.1),
            verbose=False,
            double_buffering=double_buffering,
        )
        clock = StoppingClock()
        trainer.add_hook(clock)
        trainer.train(net, iterator)
        # The clock was also read once before the first update.
        seconds = (clock.ends[-1] - clock.ends[warm_up]) / updates
        stats = trainer.feed_stats
        if (key := (source, size, double_buffering)) not in self._checked:
            self._checked.add(key)
            last = batches[(warm_up + updates - 1) % iterator.length]
            if not np.array_equal(net.get("Input.outputs.images"), last):
                raise AssertionError("the network did not get the iterator's minibatch")
        return {
            "seconds": seconds,
            "stats": None if stats is None else dataclasses.asdict(stats),
        }

    def _check_is_ordinary(self, array: Any) -> None:
        import brainstorm_dbuf as dbuf

        if self.setup.handler != "numpy" and dbuf.is_pagelocked(array):
            raise AssertionError("the data are page-locked before training begins")

    def _network(self, size: Size) -> Any:
        import brainstorm as bs

        shapes = {
            "default": ("T", "B", 1),
            "targets": ("T", "B", 1),
            "images": ("T", "B", size.shape[2]),
        }
        inputs = bs.layers.Input(out_shapes=shapes)
        hidden = bs.layers.FullyConnected(2, name="hidden", activation="linear")
        output = bs.layers.SoftmaxCE(name="Output")
        loss = bs.layers.Loss()
        inputs - "default" >> hidden >> "default" - output
        inputs - "targets" >> "targets" - output
        output - "loss" >> loss
        net = bs.Network.from_layer(loss)
        net.set_handler(self.handler)
        net.initialize(0.0)
        return net

    def _data_iterator(self, source: str, size: Size, dtype: str) -> Any:
        import numpy as np
        from brainstorm.data_iterators import Minibatches

        if source == "generator":
            return self._generator(size, dtype)
        images = self.arenas.data_set(size, dtype)
        small = np.zeros((*images.shape[:2], 1), np.float32)
        return Minibatches(
            size.shape[1],
            shuffle=False,
            default=small,
            targets=small.copy(),
            images=images,
        )

    def _generator(self, size: Size, dtype: str) -> Any:
        """Return an iterator as a user writes one, of which nothing can be known."""
        import numpy as np
        from brainstorm.data_iterators import DataIterator

        batches = self.arenas.minibatches(size, dtype)

        class Rotating(DataIterator):
            def __init__(self) -> None:
                names = ("default", "targets", "images")
                super().__init__(dict.fromkeys(names, size.shape), len(batches))

            def __call__(self, handler: Any = None) -> Iterator[dict[str, np.ndarray]]:
                small = np.zeros((*size.shape[:2], 1), np.float32)
                for batch in batches:
                    yield {"default": small, "targets": small, "images": batch}

        return Rotating()


def _exhaust(iterator: Iterator[Any]) -> None:
    for _ in iterator:
        pass
