"""What double buffering brings on this machine: plain and double-buffered training.

:func:`measure` times one kind of minibatch; ``brainstorm-dbuf bench`` prints it. The
network is brainstorm's FullyConnected (relu) and a softmax layer on random numbers, its
loss read after each update. Plain and double-buffered training take turns, the order
swapped each round; a figure is the median over the rounds of the time of a minibatch,
after some to warm up. Beside them, in the same rounds, what bounds a feed: the iterator
alone, the step alone (its inputs are there already) and, for a device, the link.
"""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import brainstorm as bs
import numpy as np
from brainstorm.data_iterators import AddGaussianNoise, DataIterator, Minibatches

from .access import access_for
from .checkup import SEED, train
from .copy_clock import link_rate
from .held_memory import memory_size
from .stats import FeedWarning

CLASSES = 10

# So many minibatches show the feed that a worker pays; of slow ones fewer do.
WARM_UP, WARM_UP_IF_SLOW = 16, 4
SLOW_SECONDS = 10e-3
LEAST_UPDATES, MOST_UPDATES = 4, 2000
# Of the time of a turn that iterator and step get, each alone.
SHARE_ALONE = 0.25

# The data set: minibatches that are not the ones in the processor's caches, and enough
# of them to be page-locked where they lie.
DATA_BYTES = 64 << 20
LEAST_DISTINCT, MOST_DISTINCT = 4, 256
# What a network and a feed hold of minibatches beside the data set, about.
HELD_BESIDE = 8

SOURCES: dict[str, Callable[[DataIterator], DataIterator]] = {
    "held": lambda minibatches: minibatches,
    "noise": lambda minibatches: AddGaussianNoise(minibatches, {"default": 0.1}),
}


@dataclass(frozen=True)
class Workload:
    """Minibatches of one kind, and the network they train.

    Attributes:
        source: "held" (Minibatches of what lies in memory) or "noise" (AddGaussianNoise
            around them).
        samples: in a minibatch.
        features: float32 numbers in a sample.
        units: of the FullyConnected layer.
    """

    source: str
    samples: int
    features: int
    units: int

    @property
    def nbytes(self) -> int:
        """Bytes of a minibatch's features in float32."""
        return 4 * self.samples * self.features

    @property
    def distinct(self) -> int:
        """How many different minibatches there are."""
        fit = -(-DATA_BYTES // self.nbytes)
        return min(max(fit, LEAST_DISTINCT), MOST_DISTINCT)

    @property
    def memory_bytes(self) -> int:
        """The memory that it takes, about."""
        weights = 4 * self.units * (self.features + CLASSES)
        inner = 4 * self.samples * (self.units + 3 * CLASSES)
        minibatches = (self.distinct + HELD_BESIDE) * self.nbytes
        # Weights: values, gradients, momentum, a copy. What layers put out: with what
        # they were before the activation, forward and backward.
        return minibatches + 4 * weights + 4 * inner

    def fits(self) -> bool:
        """Whether this process may use so much memory."""
        return self.memory_bytes <= memory_size()

    def data_set(self) -> dict[str, np.ndarray]:
        count = self.samples * self.distinct
        rnd = np.random.default_rng(SEED)
        return {
            "default": rnd.random((1, count, self.features), dtype=np.float32),
            "targets": rnd.integers(0, CLASSES, (1, count, 1)).astype(np.float32),
        }

    def iterator(self, data: dict[str, np.ndarray], length: int) -> DataIterator:
        """Return an iterator of so many minibatches, each time the same."""
        bs.global_rnd.set_seed(SEED)
        minibatches = Minibatches(self.samples, shuffle=False, **data)
        return SOURCES[self.source](_Repeated(minibatches, length))

    def network(self, handler: Any) -> Any:
        net = bs.tools.create_net_from_spec(
            "classification", self.features, CLASSES, f"F{self.units}"
        )
        net.set_handler(handler)
        net.initialize(bs.initializers.Gaussian(0.01), seed=SEED)
        return net


@dataclass
class Row:
    """What was measured of a workload, in seconds a minibatch.

    Attributes:
        nbytes: of a minibatch's features in float32.
        alone: what bounds the feed, each by itself: "iterator", "step", and where there
            is a device "link", as long as the link takes at its rate of large copies.
        plain, buffered: an update of brainstorm's own loop, and of ours; NaN where it
            failed.
        updates: how many were timed in each round.
        rounds: the figures that the medians are of.
        identical: whether all of them ended with the same weights, to the bit.
        fallbacks: what the feed did instead of double buffering, and why.
        failed: the error that ended it; None where there was none.
    """

    source: str
    nbytes: int
    alone: dict[str, float] = field(default_factory=dict)
    plain: float = math.nan
    buffered: float = math.nan
    updates: int = 0
    rounds: dict[str, list[float]] = field(default_factory=dict)
    identical: bool = True
    fallbacks: list[str] = field(default_factory=list)
    failed: str | None = None

    @property
    def is_right(self) -> bool:
        """Whether it was measured, and training came to the same weights."""
        return self.failed is None and self.identical

    @property
    def bound(self) -> str:
        """What takes longest by itself."""
        return max(self.alone, key=self.alone.__getitem__)

    @property
    def gain(self) -> float:
        """How many times as quick as plain training."""
        return self.plain / self.buffered

    @property
    def of_bound(self) -> float:
        """The share of the quickest pace that the bound allows."""
        return self.alone[self.bound] / self.buffered

    @property
    def spread(self) -> float:
        """How many times as long the slowest round of training took as the quickest."""
        turns = (self.rounds.get(name) for name in ("plain", "buffered"))
        return max((max(taken) / min(taken) for taken in turns if taken), default=1.0)

    def as_dict(self) -> dict[str, Any]:
        """Return all of it for JSON."""
        found = asdict(self)
        if self.failed is not None:
            return found | {"plain": None, "buffered": None}
        return found | {
            name: getattr(self, name)
            for name in ("bound", "gain", "of_bound", "spread")
        }


def link_of(handler: Any) -> float | None:
    """Return the rate of the link to the handler's device in bytes/s, None without one.

    NaN where it could not be measured.
    """
    access = access_for(handler)
    if access is None:
        return None
    try:
        if not access.queues_copies:
            return None
        return link_rate(access.context, access.copy_stream)
    finally:
        access.close()


def measure(
    load: Workload, handler: Any, link: float | None, seconds: float, rounds: int
) -> Row:
    """Return what a workload takes; an error that it ends with is noted, not raised.

    Args:
        link: bytes/s, as :func:`link_of` returns it.
        seconds: that training is timed for in each turn, about.
        rounds: how often all take turns.
    """
    row = Row(load.source, load.nbytes)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FeedWarning)  # they are in `fallbacks`
            _measure(row, load, handler, seconds, rounds)
    except Exception as error:  # whatever it is, the other workloads may do
        row.failed = f"{type(error).__name__}: {error}"
    else:
        if link is not None and not math.isnan(link):
            row.alone["link"] = load.nbytes / link
    return row


def _measure(
    row: Row, load: Workload, handler: Any, seconds: float, rounds: int
) -> None:
    data = load.data_set()
    one = _time_training(load, data, handler, False, 1, LEAST_UPDATES)[0]
    warm_up = WARM_UP if one < SLOW_SECONDS else WARM_UP_IF_SLOW

    def updates_in(seconds: float) -> int:
        return min(max(int(seconds / one), LEAST_UPDATES), MOST_UPDATES)

    row.updates = updates_in(seconds)
    alone = updates_in(seconds * SHARE_ALONE)
    first: np.ndarray | None = None
    for number in range(rounds):
        for double_buffering in (False, True) if number % 2 else (True, False):
            taken, weights, stats = _time_training(
                load, data, handler, double_buffering, warm_up, row.updates
            )
            name = "buffered" if double_buffering else "plain"
            row.rounds.setdefault(name, []).append(taken)
            first = weights if first is None else first
            row.identical &= np.array_equal(first, weights)
            row.fallbacks = stats.fallbacks if stats is not None else row.fallbacks
        for name, time_alone in (("iterator", _time_iterator), ("step", _time_step)):
            taken = time_alone(load, data, handler, alone)
            row.rounds.setdefault(name, []).append(taken)
    medians = {name: statistics.median(taken) for name, taken in row.rounds.items()}
    row.plain, row.buffered = medians.pop("plain"), medians.pop("buffered")
    row.alone = medians


def _time_training(
    load: Workload,
    data: dict[str, np.ndarray],
    handler: Any,
    double_buffering: bool,
    warm_up: int,
    updates: int,
) -> tuple[float, np.ndarray, Any]:
    """Return (seconds of an update, the weights at the end, what the feed did)."""
    clock = UpdateClock()
    iterator = load.iterator(data, warm_up + updates)
    net = load.network(handler)
    try:
        trainer = train(net, iterator, double_buffering, hook=clock, timed=False)
        # The clock was also read once before the first update.
        seconds = (clock.ends[-1] - clock.ends[warm_up]) / updates
        return seconds, net.get("parameters"), trainer.feed_stats
    finally:
        del net
        gc.collect()  # networks are cycles, and hold the device's memory


def _time_iterator(
    load: Workload, data: dict[str, np.ndarray], handler: Any, updates: int
) -> float:
    minibatches = load.iterator(data, 1 + updates)(handler)
    next(minibatches)  # with what the iterator does once
    started = time.perf_counter()
    for _ in minibatches:
        pass
    return (time.perf_counter() - started) / updates


def _time_step(
    load: Workload, data: dict[str, np.ndarray], handler: Any, updates: int
) -> float:
    net = load.network(handler)
    try:
        stepper = bs.training.MomentumStepper(0.01, 0.9)
        stepper.start(net)
        net.provide_external_data(next(load.iterator(data, 1)(handler)))
        times = []
        for _ in range(1 + updates):
            started = time.perf_counter()
            stepper.run()
            net.get_loss_values()
            times.append(time.perf_counter() - started)
        return statistics.median(times[1:])
    finally:
        del net, stepper
        gc.collect()


class _Repeated(DataIterator):
    """So many minibatches of another iterator, which begins again where it ends."""

    leaves_arrays_alone = True

    def __init__(self, iterator: DataIterator, length: int) -> None:
        super().__init__(iterator.data_shapes, length)
        self.iter = iterator

    def __call__(self, handler: Any = None) -> Iterator[dict[str, np.ndarray]]:
        passes = (self.iter(handler) for _ in itertools.count())
        return itertools.islice(itertools.chain.from_iterable(passes), self.length)


class UpdateClock(bs.hooks.Hook):
    """Notes when each update ends."""

    def __init__(self) -> None:
        super().__init__(timescale="update")
        self.ends: list[float] = []

    def __call__(
        self, epoch_nr: int, update_nr: int, net: Any, stepper: Any, logs: Any
    ) -> None:
        self.ends.append(time.perf_counter())
