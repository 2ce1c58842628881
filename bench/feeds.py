"""Feeding a GPU from memory: our feed beside the bound, plain brainstorm and the peers.

Method: minibatches of several sizes, element types and layouts in ordinary memory, fed
to a network that does next to nothing (the large input is copied to its buffer, but no
layer reads it; the loss is read each update). Each library runs in a process of its
own. All contestants of a group take turns in `ROUNDS` rounds, the order reversed each
time; a figure is the median over them of the time of a minibatch, after some to warm up
(page-locking the data in place is among these, so is what a DataLoader's workers have
ready when asked first). Where time is short (--budget) there are fewer rounds. Beside
them the bound of the same run, measured in C where it is not Python's own: the longest
of the link (page-locked memory to the device, the bytes that have to cross), for data
that have to be staged the same in pieces by as many threads (feed_floor.c), the
iterator alone, and the update alone. GB/s are of float32 bytes, as the network gets
them, whatever crossed the link.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from feed_data import Size
from feed_ours import Setup
from feed_players import Failed, Player

ROUNDS = 3
# So many show that a worker thread pays; a DataLoader's workers are as many ahead.
WARM_UP, AHEAD = 16, 16
# Those who need no warming up, or would take too long for it.
SETTLED = {"plain", "synchronous", "prefetcher", "ring"}
BESIDE = {"link", "pipeline", "iterator", "step"}
# Its processes are started for each turn, and fetch ahead until it begins.
ONCE = "loader_8"
KB, MIB, MB = 1_000, 1 << 20, 1_000_000
SIZES = (3 * KB, 300 * KB, 16 * MIB, 154_140_672, 600 * MB)
QUICK_SIZES = (300 * KB, 16 * MIB, 154_140_672)
LARGE = 16 * MIB

PEERS = {
    "torch": (
        "feed_peers",
        "Torch",
        {
            "synchronous": "PyTorch, from_numpy(x).cuda()",
            "prefetcher": "PyTorch, apex/timm-style prefetcher",
            "loader_0": "PyTorch, DataLoader pin_memory, no workers, prefetch stream",
            "loader_8": "PyTorch, DataLoader pin_memory, 8 workers, prefetch stream",
            "pinning_thread": "PyTorch, pinning thread, prefetch stream",
            "registered": "PyTorch, page-locked by hand, prefetch stream",
        },
    ),
    "cupy": ("feed_peers", "CuPy", {"ring": "CuPy, ring of pinned buffers by hand"}),
}
# What a user gets without page-locking the data by hand.
BY_HAND = "registered"


@dataclasses.dataclass(frozen=True)
class Group:
    """Contestants that are fed the same."""

    source: str  # "minibatches" or "generator"
    dtype: str
    size: Size
    has_peers: bool = False

    @property
    def title(self) -> str:
        layout = "strided " if self.size.strided else ""
        return (
            f"{layout}{self.dtype}, {readable(self.size.nbytes)} of float32, from "
            f"{'Minibatches' if self.source == 'minibatches' else 'a generator'}"
        )

    @property
    def crosses_as(self) -> float:
        """The share of its float32 bytes that has to cross the link."""
        return {"uint8": 0.25}.get(self.dtype, 1.0)

    @property
    def is_staged(self) -> bool:
        return self.source == "generator" or self.dtype == "float64"


def groups(sizes: tuple[int, ...]) -> list[Group]:
    """Return the groups; the largest two sizes but one meet everybody."""
    large = [size for size in sizes if size >= LARGE] or [max(sizes)]
    middle = large[min(1, len(large) - 1)]
    found = [
        Group("minibatches", "float32", Size(size), size in (large[0], middle))
        for size in sizes
    ]
    found += [
        Group("minibatches", "float32", Size(size, strided=True))
        for size in dict.fromkeys((large[0], middle))
    ]
    found.append(Group("minibatches", "uint8", Size(middle), True))
    found.append(Group("minibatches", "float64", Size(middle)))
    found += [
        Group("generator", dtype, Size(middle)) for dtype in ("float32", "float64")
    ]
    return found


def largest_of(groups: Iterable[Group]) -> dict[str, int]:
    """Return the elements of the largest minibatch, by element type."""
    largest: dict[str, int] = {}
    for group in groups:
        largest[group.dtype] = max(largest.get(group.dtype, 0), group.size.elements)
    return largest


def readable(nbytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"


class Benchmark:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.groups = groups(options.sizes)
        self.setup = Setup(
            options.handler,
            default_threads(),
            options.arena,
            tuple(options.sizes),
            options.seconds,
            largest_of(self.groups),
        )
        self.players: dict[str, Player] = {}
        self.about: dict[str, str] = {}

    def open(self) -> None:
        kinds = {"ours": ("feed_ours", "Brainstorm")}
        if self.options.handler == "cuda" and not self.options.no_peers:
            kinds |= {name: kind[:2] for name, kind in PEERS.items()}
        # What the peers are fed is all that they need in memory.
        met = largest_of(group for group in self.groups if group.has_peers)
        setups = {"ours": self.setup}
        theirs = dataclasses.replace(self.setup, largest=met)
        players = {
            name: Player(module, kind, setups.get(name, theirs))
            for name, (module, kind) in kinds.items()
        }
        for name, player in players.items():
            try:
                self.about |= player.ask("describe", timeout=120)
            except Failed as error:
                player.close(at_once=True)
                if name == "ours":
                    for other in players.values():
                        other.close(at_once=True)
                    raise SystemExit(f"--handler {self.options.handler}: {error}")
                print(f"{name} is left out: {error}")
            else:
                self.players[name] = player

    def close(self) -> None:
        for player in self.players.values():
            player.close()

    def contestants(self, group: Group) -> dict[str, tuple[str, str]]:
        """Return what takes turns in a group: (player, way) by name."""
        found = {"feed": ("ours", "feed"), "plain": ("ours", "plain")}
        found["iterator"], found["step"] = ("ours", "iterator"), ("ours", "step")
        if self.options.handler != "numpy":
            found["link"] = ("ours", "link")
        if group.is_staged and group.dtype in ("float32", "float64"):
            found["pipeline"] = ("ours", "pipeline")
        if group.has_peers:
            for player, (_, _, ways) in PEERS.items():
                if player in self.players:
                    found |= {way: (player, way) for way in ways}
        return found

    def run(self, group: Group, until: float) -> dict[str, Any]:
        """Return the median seconds of a minibatch, and what failed, by contestant.

        No round but the first begins after `until` (of time.perf_counter).
        """
        size = group.size
        times: dict[str, list[float]] = {}
        failed: dict[str, str] = {}
        stats = None
        contestants = self.contestants(group)
        for number in range(ROUNDS):
            if number and time.perf_counter() > until:
                break
            order = list(contestants)
            for name in order if number % 2 else reversed(order):
                if name in failed or (number and name == ONCE):
                    continue
                player, way = contestants[name]
                updates, warm_up = self.turn_of(name, size, times.get(name))
                try:
                    answer = self.players[player].ask(
                        "turn", way, group.source, size, group.dtype, updates, warm_up
                    )
                except Failed as error:
                    failed[name] = str(error)
                else:
                    times.setdefault(name, []).append(answer["seconds"])
                    stats = answer.get("stats") or stats
        return {
            "group": dataclasses.asdict(group) | {"title": group.title},
            "nbytes": size.nbytes,
            "seconds": {n: statistics.median(t) for n, t in times.items()},
            "rounds": times,
            "failed": failed,
            "stats": stats,
        }

    def turn_of(
        self, name: str, size: Size, times: list[float] | None
    ) -> tuple[int, int]:
        """Return how many minibatches are timed, and how many come before."""
        if name == ONCE:
            return AHEAD, AHEAD
        # Not known yet: 10 GB/s and a millisecond are between the quick and the slow.
        one = times[0] if times else (size.nbytes / 1e10 + 1e-3) * 2
        seconds = self.options.seconds / 4 if name in BESIDE else self.options.seconds
        warm_up = 3 if name in SETTLED | BESIDE else WARM_UP
        return max(4, min(int(seconds / one), 2000)), warm_up


def bound_of(group: Group, seconds: dict[str, float]) -> tuple[str, float]:
    """Return what bounds the feed, and the seconds of a minibatch that it takes."""
    names = {"iterator": "iterator", "step": "update"}
    bounds = {names[n]: s for n, s in seconds.items() if n in names}
    if "link" in seconds:
        bounds["link"] = seconds["link"] * group.crosses_as
    if "pipeline" in seconds:
        bounds["staging"] = seconds["pipeline"]
    name = max(bounds, key=bounds.__getitem__)
    return name, bounds[name]


def report(group: Group, result: dict[str, Any]) -> None:
    """Print a group's table, and put bound and ratios into its result."""
    seconds, nbytes = result["seconds"], result["nbytes"]
    print(f"\n{group.title}")
    for name, error in result["failed"].items():
        print(f"  {label(name):<62} {error}")
    if "feed" not in seconds or not BESIDE & seconds.keys():
        return
    name, bound = bound_of(group, seconds)
    result["bound"], result["bound_seconds"] = name, bound
    result["of_bound"] = {n: bound / s for n, s in seconds.items()}
    order = sorted(seconds, key=seconds.__getitem__)
    for contestant in order:
        s = seconds[contestant]
        rate = f"{nbytes / s / 1e9:8.1f} GB/s {bound / s:6.2f} of the bound"
        if contestant in ("iterator", "step"):
            rate = ""  # they move nothing
        print(f"  {label(contestant):<62} {s * 1e3:9.3f} ms {rate}".rstrip())
    print(f"  bound: {name}")


def label(name: str) -> str:
    for _, _, ways in PEERS.values():
        if name in ways:
            return ways[name]
    return {
        "feed": "brainstorm_dbuf",
        "plain": "brainstorm alone",
        "iterator": "(the iterator alone)",
        "step": "(the update alone)",
        "link": "(the link: float32 from page-locked memory, in C)",
        "pipeline": "(staging beside the copy, in C)",
    }[name]


def failures(results: list[tuple[Group, dict[str, Any]]]) -> list[str]:
    """Return which turns in brainstorm raised; a peer's error is its own affair."""
    ours = {"feed", "plain", *BESIDE}
    return [
        f"{group.title}: {label(name)}: {error}"
        for group, result in results
        for name, error in result["failed"].items()
        if name in ours
    ]


def check(results: list[tuple[Group, dict[str, Any]]]) -> list[str]:
    """Return the limits that were missed."""
    missed = []
    rates = {}

    def want(group: Group, what: str, value: float, least: float) -> None:
        print(f"{group.title}: {what} {value:.2f} (at least {least:.2f})")
        if value < least:
            missed.append(f"{group.title}: {what}")

    peers = [s for _, result in results for s in peer_seconds(result)]
    for group, result in results:
        if "bound" not in result or group.size.nbytes < LARGE * 0.9:
            continue
        share = result["of_bound"]["feed"]
        rates[group] = group.size.nbytes / result["seconds"]["feed"]
        if group.is_staged:
            want(group, "of the bound", share, 0.90)
        elif group.dtype == "float32":
            want(group, "of the bound", share, 0.85 if group.size.strided else 0.95)
    for group, rate in rates.items():
        theirs = [n / s for n, s in peers if n == group.size.nbytes]
        if group.source == "generator" and group.dtype == "float32" and theirs:
            want(group, "of the quickest peer", rate / max(theirs), 1.0)
        wide = dataclasses.replace(group, dtype="float32")
        if group.dtype == "uint8" and wide in rates:
            want(group, "of the float32 rate", rate / rates[wide], 3.5)
    return missed


def peer_seconds(result: dict[str, Any]) -> list[tuple[int, float]]:
    """Return (bytes, seconds) of peers that were fed float32 without work by hand."""
    if result["group"]["dtype"] != "float32":
        return []
    ways = {way for _, _, named in PEERS.values() for way in named} - {BY_HAND}
    seconds = result["seconds"]
    return [(result["nbytes"], seconds[way]) for way in ways & seconds.keys()]


def default_threads() -> int:
    """Return how many threads the feed stages with by default."""
    if wish := os.environ.get("BRAINSTORM_DBUF_STAGING_THREADS"):
        return int(wish)
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        allowed = min(allowed, max(1, quota // period))
    except (OSError, ValueError):
        pass  # no such group, or no limit
    return min(allowed - (allowed > 4), 16)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--handler", choices=["cuda", "pycuda", "numpy"], default="cuda"
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    parser.add_argument("--sizes", type=int, nargs="+", help="bytes of float32")
    parser.add_argument(
        "--arena", type=int, help="bytes of data (default: 2 GB, for numpy 500 MB)"
    )
    parser.add_argument("--seconds", type=float, default=0.3, help="a turn, about")
    parser.add_argument(
        "--budget", type=float, default=100, help="seconds; then no further rounds"
    )
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    options.sizes = tuple(options.sizes or (QUICK_SIZES if options.quick else SIZES))
    options.arena = options.arena or (500 if options.handler == "numpy" else 2000) * MB
    print(__doc__)
    started = time.perf_counter()
    benchmark = Benchmark(options)
    benchmark.open()
    try:
        print(", ".join(f"{k} {v}" for k, v in benchmark.about.items()))
        print(f"staging by {benchmark.setup.threads} threads")
        floors = benchmark.players["ours"].ask("floors", timeout=120)
        for what, rates in floors.items():
            print(f"{what}: " + ", ".join(f"{k}: {v:.1f}" for k, v in rates.items()))
        results = []
        for number, group in enumerate(benchmark.groups):
            now = time.perf_counter()
            left = started + options.budget - now
            share = left / (len(benchmark.groups) - number)
            result = benchmark.run(group, now + share)
            report(group, result)
            results.append((group, result))
    finally:
        benchmark.close()
    print()
    # On the host there is no link, and nothing to be ahead of.
    missed = failures(results)
    missed += [] if options.handler == "numpy" else check(results)
    for text in missed:
        print(f"FAILED: {text}", file=sys.stderr)
    print(f"{time.perf_counter() - started:.0f} s in all")
    if options.json:
        found = {
            "about": benchmark.about,
            "threads": benchmark.setup.threads,
            "floors": floors,
            "groups": [result for _, result in results],
            "missed": missed,
        }
        options.json.write_text(json.dumps(found, indent=1))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
