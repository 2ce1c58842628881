"""Two devices at once beside one alone: their links, and two kinds of training.

Method: each device has a process of its own, as the ranks of DataParallel have: two
trainings in threads of one process share Python's lock, and a network of short updates
would show that and not the devices. What is compared takes turns in `ROUNDS` rounds,
one device alone, the other alone, both at once, the order reversed each time. A turn
warms up, then works for some time; pieces of work are counted with the time when each
was done, and of both at once only the time counts in which both were working. Figures
are the medians over the rounds. Scaling is the rate of both at once over the mean of
the two alone.

* link: page-locked memory to the device, copied from C (feed_floor.c).
* link-bound: bench/feeds.py's network, which does next to nothing with a large input,
  trained with double buffering from data that are page-locked where they lie.
* compute-bound: three wide layers, whose products take far longer than the copy of
  their minibatch, trained the same way. It must scale by `--least` (1.9).

That a network has got the last minibatch, or that its loss is finite, is checked in
each turn.
"""

from __future__ import annotations

import argparse
import bisect
import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from feed_players import Failed, Player
from feeds import MIB, default_threads, readable

ROUNDS = 3
WAYS = {
    "link": "link",
    "fed": "link-bound training",
    "computing": "compute-bound training",
}
# Of the time asked for, what both must have worked at once.
LEAST_SHARE = 0.5


def rates(times: list[list[float]], seconds: float) -> list[float]:
    """Return pieces of work a second of each device, while all were working.

    Raises Failed where they were not, for too much of the time.
    """
    if not all(len(of_one) > 1 for of_one in times):
        raise Failed(f"fewer than two pieces of work within {seconds:g} s")
    begin, end = max(t[0] for t in times), min(t[-1] for t in times)
    if end - begin < LEAST_SHARE * seconds:
        raise Failed("the devices were not at work at the same time")
    found = []
    for of_one in times:
        first = bisect.bisect_left(of_one, begin)
        last = bisect.bisect_right(of_one, end) - 1
        if last <= first:
            raise Failed("fewer than two pieces of work at the same time")
        found.append((last - first) / (of_one[last] - of_one[first]))
    return found


class Benchmark:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        threads = max(1, default_threads() // 2)
        self.nbytes = int(options.batch_mib * MIB)
        self.players = [
            Player(
                "device_player",
                "OnDevice",
                device,
                self.nbytes,
                int(options.arena_mib * MIB),
                options.units,
                options.samples,
                threads,
            )
            for device in options.devices
        ]
        self.pool = ThreadPoolExecutor(len(self.players))

    def close(self) -> None:
        for player in self.players:
            player.close()
        self.pool.shutdown()

    def ask(self, players: list[Player], *asked: Any) -> list[Any]:
        """Ask several at the same time."""
        return list(self.pool.map(lambda p: p.ask(*asked, timeout=120), players))

    def open(self) -> list[dict[str, Any]]:
        about = self.ask(self.players, "prepare")
        # As many for both, so that a piece is the same.
        self.passes = max(self.ask(self.players, "burst"))
        self.ask(self.players, "set_burst", self.passes)
        return about

    def turn(self, way: str, players: list[Player]) -> list[float]:
        begin = time.monotonic() + self.options.warm_up
        end = begin + self.options.seconds
        times = self.ask(players, "run", way, begin, end)
        each = self.passes if way == "link" else 1
        return [rate * each for rate in rates(times, self.options.seconds)]

    def run(self, way: str) -> dict[str, Any]:
        """Return minibatches a second: of each alone, of both at once, by round."""
        first, second = self.players
        turns = {"alone 0": [first], "alone 1": [second], "together": self.players}
        rounds: dict[str, list[list[float]]] = {name: [] for name in turns}
        for number in range(self.options.rounds):
            order = list(turns)
            for name in order if number % 2 else reversed(order):
                rounds[name].append(self.turn(way, turns[name]))
        alone = [
            statistics.median(found[0] for found in rounds[f"alone {n}"])
            for n in (0, 1)
        ]
        together = [
            statistics.median(found[n] for found in rounds["together"]) for n in (0, 1)
        ]
        scaling = statistics.median(
            sum(both) / statistics.mean((one[0], other[0]))
            for one, other, both in zip(
                rounds["alone 0"], rounds["alone 1"], rounds["together"]
            )
        )
        return {
            "alone": alone,
            "together": together,
            "scaling": scaling,
            "rounds": rounds,
        }

    def report(self, way: str, result: dict[str, Any]) -> None:
        def text(rate: float) -> str:
            if way == "computing":
                return f"{1e3 / rate:.3f} ms an update"
            return f"{rate * self.nbytes / 1e9:.2f} GB/s"

        print(f"\n{WAYS[way]}: {result['scaling']:.2f} times one device")
        for n, device in enumerate(self.options.devices):
            alone, together = text(result["alone"][n]), text(result["together"][n])
            print(f"  device {device}: alone {alone}, together {together}")


def why_not(devices: list[int]) -> str | None:
    """Return why these devices cannot be measured, None if they can."""
    import brainstorm_dbuf as dbuf

    try:
        count = dbuf.device_count()
    except dbuf.DriverError as error:
        return f"needs two CUDA devices, and here is none: {error}"
    if count < 2:
        return f"needs two CUDA devices, the driver sees {count}"
    if missing := [device for device in devices if not 0 <= device < count]:
        return f"there is no CUDA device {missing[0]}: the driver sees {count}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, nargs=2, default=[0, 1])
    parser.add_argument("--batch-mib", type=float, default=64, help="bound by the link")
    parser.add_argument(
        "--arena-mib", type=float, default=1024, help="data of each process"
    )
    parser.add_argument("--units", type=int, default=4096, help="of each wide layer")
    parser.add_argument("--samples", type=int, default=2048, help="in its minibatch")
    parser.add_argument("--seconds", type=float, default=1.0, help="a turn")
    parser.add_argument("--warm-up", type=float, default=2.0, help="before it")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument(
        "--least", type=float, default=1.9, help="scaling where products are the bound"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    print(__doc__)
    if reason := why_not(options.devices):
        print(f"bench/two_devices.py {reason}", file=sys.stderr)
        return 1
    started = time.perf_counter()
    benchmark = Benchmark(options)
    try:
        about = benchmark.open()
        for device in about:
            print(", ".join(f"{key} {value}" for key, value in device.items()))
        print(
            f"minibatches of {readable(benchmark.nbytes)} for the link; of "
            f"{options.samples} samples, three layers of {options.units} units"
        )
        results = {}
        for way in WAYS:
            results[way] = benchmark.run(way)
            benchmark.report(way, results[way])
    except Failed as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    finally:
        benchmark.close()
    missed = []
    if results["computing"]["scaling"] < options.least:
        missed.append(
            f"compute-bound training: {results['computing']['scaling']:.2f} times one "
            f"device, at least {options.least:.2f} was to be"
        )
    for text in missed:
        print(f"FAILED: {text}", file=sys.stderr)
    print(f"\n{time.perf_counter() - started:.0f} s in all")
    if options.json:
        found = {
            "about": about,
            "minibatch_bytes": benchmark.nbytes,
            "units": options.units,
            "samples": options.samples,
            "results": results,
            "missed": missed,
        }
        options.json.write_text(json.dumps(found, indent=1))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
