"""A soak: random trainings one after another, and whether anything grows.

    python tests/soak.py --handler device --minutes 2 --plot soak.png

Each round trains a network of a random kind on minibatches of random sizes, dtypes and
sources, with a random depth; it ends as it should, or early, or by an error in the
iterator or in the step. A round that takes half a minute is a hang: where its threads are
is printed, and the program ends. Another training, plain brainstorm from the same seeds, says
what the weights must be, to the bit. Between rounds everything is counted that could be
left behind. The first quarter is for warming up.

BRAINSTORM_DBUF_TEST_DRIVER=real is for a GPU (handlers pycuda and cuda).
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import os
import random
import sys
import threading
import time
import warnings
from dataclasses import dataclass, field

import numpy as np

import conftest  # first: it chooses the driver
import brainstorm_dbuf as dbuf
import brainstorm as bs
from brainstorm.data_iterators import AddGaussianNoise, Minibatches
from brainstorm_dbuf import access, feed, held_memory
from coded import stop_at
from networks import CASTS, NETWORKS, data_for
from parity import Recorder, Run, assert_same, make_handler
from test_memory import resident_mib

# The allocators' own caches come and go by so much.
RESIDENT_MIB = 12
# A round takes a tenth of a second.
HANGS_AFTER_SECONDS = 30
ENDS = ("whole", "whole", "stop", "next raises", "step raises")
CANNOT = "not by brainstorm's own trainer on PyCUDA"


class Planned(Exception):
    """The error that a round has planned."""


@dataclass
class Plan:
    """What one round does; the same again for the plain run."""

    seed: int
    network: str
    source: str
    cast: str | None
    samples: int
    size: int
    depth: int
    end: str
    after: int
    worker: bool
    puts: bool

    @classmethod
    def random(cls, rnd: random.Random) -> Plan:
        end = rnd.choice(ENDS)
        through = ["generator", "ragged"]
        return cls(
            seed=rnd.randrange(2**31),
            network=rnd.choice(sorted(NETWORKS)),
            source=rnd.choice(
                through if end == "next raises" else ["held", "noise", *through]
            ),
            cast=rnd.choice([None, *CASTS]),
            samples=rnd.randint(5, 60),
            size=rnd.randint(1, 20),
            depth=rnd.randint(1, 4),
            end=end,
            after=rnd.randint(1, 9),
            worker=rnd.random() < 0.5,
            puts=rnd.random() < 0.3,
        )

    def iterator(self):
        arrays = data_for(
            self.network, np.random.default_rng(self.seed), samples=self.samples
        )
        if self.cast is not None:
            arrays = {name: CASTS[self.cast](array) for name, array in arrays.items()}
        minibatches = Minibatches(self.size, shuffle=True, **arrays)
        if self.source == "held":
            return minibatches
        if self.source == "noise":
            return AddGaussianNoise(minibatches, {"default": 0.1})
        return Through(minibatches, self)


class Through(bs.data_iterators.DataIterator):
    """Hands copies on, in ragged sizes if so planned, and raises where planned."""

    def __init__(self, minibatches, plan):
        super().__init__(minibatches.data_shapes, minibatches.length)
        self.minibatches, self.plan = minibatches, plan
        self.taken = 0

    def __call__(self, handler=None):
        for number, data in enumerate(self.minibatches(handler)):
            self.taken += 1
            if self.plan.end == "next raises" and self.taken > self.plan.after:
                raise Planned
            keep = 1 + number % self.plan.size if self.plan.source == "ragged" else None
            yield {name: array[:, :keep].copy() for name, array in data.items()}


class Stepper(Recorder):
    """Notes the losses, and raises where planned."""

    def __init__(self, plan):
        super().__init__([])
        self.plan = plan

    def run(self):
        super().run()
        if self.plan.end == "step raises" and len(self.losses) == self.plan.after:
            raise Planned


def train(plan, kind, driver, double_buffering):
    bs.global_rnd.set_seed(plan.seed)
    net = NETWORKS[plan.network]()
    net.set_handler(make_handler(kind, driver))
    stepper = Stepper(plan)
    trainer = dbuf.Trainer(
        stepper,
        verbose=False,
        double_buffering=double_buffering,
        depth=plan.depth,
    )
    trainer.add_hook(bs.hooks.StopAfterEpoch(2))
    if plan.end == "stop":
        trainer.add_hook(stop_at(plan.after))
    with contextlib.suppress(Planned):
        trainer.train(net, plan.iterator())
    return Run(net.get("parameters"), trainer.logs, stepper.losses, trainer.feed_stats)


def train_plain(plan, kind, driver):
    """Train as brainstorm does; None for what it cannot do on PyCUDA.

    See parity.skip_what_pycuda_cannot.
    """
    try:
        return train(plan, kind, driver, False)
    except Exception:
        if kind != "pycuda":
            raise
        return None


@dataclass
class Samples:
    """What was counted after each round."""

    seconds: list[float] = field(default_factory=list)
    counts: dict[str, list[float]] = field(default_factory=dict)

    def take(self, started, driver):
        gc.collect()
        if conftest.KIND == "real":
            dbuf.Context.current().synchronize()
        counts = {
            "threads": threading.active_count(),
            "file handles": len(os.listdir("/proc/self/fd")),
            "resident MiB": resident_mib(),
            **conftest.live_objects(),
        }
        if driver.fake is not None:
            counts.update(driver.fake.live())
        self.seconds.append(time.monotonic() - started)
        for name, count in counts.items():
            self.counts.setdefault(name, []).append(count)

    def grown(self):
        """Return what is more at the end than it was after warming up."""
        grown = []
        for name, counts in self.counts.items():
            settled = counts[len(counts) // 4 :]
            more = settled[-1] - settled[0]
            if name == "resident MiB":
                # Its ups and downs are not a leak; a slope is.
                half = len(settled) // 2
                more = np.median(settled[half:]) - np.median(settled[:half])
                more = 0 if more <= RESIDENT_MIB else more
            if more > 0:
                grown.append(f"{name}: {settled[0]:g} to {settled[-1]:g}")
        return grown

    def plot(self, path):
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        moving = {n: c for n, c in self.counts.items() if any(c)}
        figure, axes = plt.subplots(
            len(moving), figsize=(8, 1.1 * len(moving)), sharex=True, squeeze=False
        )
        for (name, counts), axis in zip(moving.items(), axes[:, 0]):
            axis.plot(self.seconds, counts, lw=1)
            axis.set_ylim(0, 1.25 * max(counts))
            axis.set_ylabel(name, rotation=0, ha="right", fontsize=8)
        axes[-1, 0].set_xlabel("s")
        figure.tight_layout()
        figure.savefig(path, dpi=100)
        plt.close(figure)


def soak(kind, driver, minutes, seed=0, say=print):
    """Run rounds for so long; return the samples and how many rounds of each end.

    Raises:
        AssertionError: weights, losses or logs of a round are not the plain run's.
    """
    rnd = random.Random(seed)
    samples, ends = Samples(), dict.fromkeys([*ENDS, CANNOT], 0)
    started = said = time.monotonic()
    ways = [
        (access, "MOST_PUT_BYTES", 0, access.MOST_PUT_BYTES),
        (feed, "WORTH_A_WORKER_SECONDS", -1.0, feed.WORTH_A_WORKER_SECONDS),
        (feed, "SLOW_IN_A_ROW", 1, feed.SLOW_IN_A_ROW),
        (held_memory, "REGION_MIN_BYTES", 0, held_memory.REGION_MIN_BYTES),
    ]
    try:
        while time.monotonic() - started < 60 * minutes:
            plan = Plan.random(rnd)
            chosen = (not plan.puts, plan.worker, plan.worker, True)
            for is_chosen, (module, name, forced, usual) in zip(chosen, ways):
                setattr(module, name, forced if is_chosen else usual)
            if driver.fake is not None:
                driver.fake.mode(rnd.choice(["late", "random", "eager"]), plan.seed)
            faulthandler.dump_traceback_later(HANGS_AFTER_SECONDS, exit=True)
            try:
                plain = train_plain(plan, kind, driver)
                if plain is None:
                    ends[CANNOT] += 1
                    continue
                assert_same(plain, train(plan, kind, driver, True))
            except Exception as error:
                raise AssertionError(f"round {sum(ends.values())}: {plan}") from error
            ends[plan.end] += 1
            del plain
            samples.take(started, driver)
            if time.monotonic() - said > 20:
                said = time.monotonic()
                say(
                    f"{said - started:4.0f} s  {sum(ends.values())} rounds, weights equal"
                )
    finally:
        faulthandler.cancel_dump_traceback_later()
        for module, name, _, usual in ways:
            setattr(module, name, usual)
    assert ends[CANNOT] <= sum(ends.values()) / 2, ends
    return samples, ends


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--handler", choices=conftest.HANDLERS, default="numpy")
    parser.add_argument("--minutes", type=float, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", metavar="FILE")
    options = parser.parse_args()
    if options.handler == "cuda" and conftest.why_no_cuda_handler() is not None:
        print(f"no soak: {conftest.why_no_cuda_handler()}")
        return 0
    warnings.simplefilter("error")
    with conftest.a_driver() as driver:
        samples, ends = soak(options.handler, driver, options.minutes, options.seed)
    if options.plot:
        samples.plot(options.plot)
        print(f"{options.plot} shows what was counted")
    print(f"{sum(ends.values())} rounds on {options.handler}: {ends}")
    print("the weights, losses and logs of each are the plain run's")
    grown = samples.grown()
    print("\n".join(["GROWN", *grown]) if grown else "nothing has grown")
    return int(bool(grown))


if __name__ == "__main__":
    sys.exit(main())
