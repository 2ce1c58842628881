"""A process with one device: its link, and two trainings, for bench/two_devices.py."""

from __future__ import annotations

import gc
import os
import sys
import time
from typing import Any

from feed_data import Arenas, Size
from feed_ours import Brainstorm, Setup

# A burst of copies between two looks at the clock.
BURST_SECONDS = 0.02


class OnDevice(Brainstorm):
    """Runs what is asked for from one time to another, those of ``time.monotonic``.

    Args:
        device: its ordinal.
        nbytes: of a minibatch of float32 that is bound by the link.
        arena: bytes of the data that such minibatches come from.
        units: of each of three layers of the network that is bound by its products.
        samples: in a minibatch of its.
        threads: that stage, where something has to be.
    """

    def __init__(
        self,
        device: int,
        nbytes: int,
        arena: int,
        units: int,
        samples: int,
        threads: int,
    ) -> None:
        os.environ["BRAINSTORM_DBUF_STAGING_THREADS"] = str(threads)
        sys.modules["pycuda"] = None  # type: ignore[assignment]  # it takes device 0
        import brainstorm_dbuf as dbuf
        from feed_floor import Floor

        self.size = Size(nbytes)
        self.setup = Setup("cuda", threads, arena, (nbytes,), 0.0)
        self.device = device
        self.handler = dbuf.CudaHandler(seed=1, device=device)
        self.handler.context.push()  # the floor's calls in C want it current
        self.floor = Floor(self.handler.context, self.size.nbytes, 1)
        self.arenas = Arenas(arena)
        self.arenas.fill({"float32": self.size.elements})
        self._units, self._samples = units, samples
        self._passes = self._updates = 0

    def prepare(self) -> dict[str, Any]:
        """Make what takes long, and tell about the device."""
        import brainstorm_dbuf as dbuf

        self._large = self._make_large()
        device = self.handler.context.device
        return {
            "device": device.ordinal,
            "name": device.name,
            "bus": device.pci_bus_id,
            "driver": f"CUDA {dbuf.driver_version()}",
        }

    def run(self, way: str, begin: float, end: float) -> list[float]:
        """Return when each piece of work was done, from ``begin`` to ``end``.

        It runs before as well, to warm up. What a piece is depends on the way: copies
        of a minibatch, or an update.
        """
        try:
            times = getattr(self, f"_run_{way}")(end)
        finally:
            gc.collect()  # networks are cycles, and hold the device's memory
        return [moment for moment in times if moment >= begin]

    def burst(self) -> int:
        """Return how many copies of a minibatch should be one piece of work."""
        self.floor.link(self.size.nbytes, 1)
        return max(1, int(BURST_SECONDS / self.floor.link(self.size.nbytes, 1)))

    def set_burst(self, passes: int) -> None:
        self._passes = passes

    def _run_link(self, end: float) -> list[float]:
        times = [time.monotonic()]
        while times[-1] < end:
            self.floor.link(self.size.nbytes, self._passes)
            times.append(time.monotonic())
        return times

    def _run_fed(self, end: float) -> list[float]:
        """The network of bench/feeds.py, with a large input that no layer reads."""
        import numpy as np

        iterator = self._data_iterator("minibatches", self.size, "float32")
        net = self._network(self.size)
        times = self._train_until(net, iterator, end)
        last = self.arenas.minibatches(self.size, "float32")[
            (self._updates - 1) % iterator.length
        ]
        if not np.array_equal(net.get("Input.outputs.images"), last):
            raise AssertionError("the network did not get the iterator's minibatch")
        return times

    def _run_computing(self, end: float) -> list[float]:
        """Three wide layers, whose products take far longer than their minibatch."""
        import numpy as np

        net, iterator = self._large
        times = self._train_until(net, iterator, end)
        if not np.isfinite(net.get_loss_values()["total_loss"]):
            raise AssertionError("the loss is not finite")
        return times

    def _make_large(self) -> tuple[Any, Any]:
        import brainstorm_dbuf  # noqa: F401  (before brainstorm)
        import brainstorm as bs
        import numpy as np

        rnd = np.random.default_rng(1)
        features, classes = min(self._units, 1024), 10
        shape = (1, 4 * self._samples, features)
        data = rnd.standard_normal(shape, np.float32)
        targets = rnd.integers(0, classes, (*shape[:2], 1))
        bs.global_rnd.set_seed(1)
        net = bs.tools.create_net_from_spec(
            "classification", features, classes, 3 * f"F{self._units} "
        )
        net.set_handler(self.handler)
        net.initialize(bs.initializers.Gaussian(0.01))
        iterator = bs.data_iterators.Minibatches(
            self._samples, shuffle=False, default=data, targets=targets
        )
        return net, iterator

    def _train_until(self, net: Any, iterator: Any, end: float) -> list[float]:
        import brainstorm_dbuf as dbuf
        import brainstorm as bs

        times: list[float] = []

        class Clock(bs.hooks.Hook):
            def __init__(self) -> None:
                super().__init__(timescale="update")

            def __call__(self, update_nr: int, **others: Any) -> None:
                if update_nr:  # brainstorm calls it once before the first
                    times.append(time.monotonic())
                    if times[-1] >= end:
                        raise StopIteration

        trainer = dbuf.Trainer(bs.training.SgdStepper(0.01), verbose=False)
        trainer.add_hook(Clock())
        trainer.train(net, iterator)
        self._updates = len(times)
        return times
