"""Feeding a GPU from memory: our feed beside the bound, plain brainstorm and the peers.

Method: minibatches of several sizes, element types and layouts in ordinary memory, fed
to a network that does next to nothing (the large input is copied to its buffer, but no
layer reads it; the loss is read each update). Each library runs in a process of its own.
All contestants of a group take turns in `ROUNDS` rounds; a figure is the median over
them of the time of a minibatch, after some to warm up (page-locking the data in place is
among these). Beside them the bound of the same run, measured in C where it is not
Python's own: the longest of the link (page-locked memory to the device, the bytes that
have to cross), for data that have to be staged the same in pieces by as many threads
(feed_floor.c), the iterator alone, and the update alone. GB/s are of float32 bytes, as
the network gets them, whatever crossed the link.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from feed_data import Size
from feed_ours import Setup
from feed_players import Failed, Player

ROUNDS = 3
WARM_UP = 3
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


def readable(nbytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"


class Benchmark:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.groups = groups(options.sizes)
        largest: dict[str, int] = {}
        for group in self.groups:
            largest[group.dtype] = max(largest.get(group.dtype, 0), group.size.elements)
        self.setup = Setup(
            options.handler,
            min(len(os.sched_getaffinity(0)), 16),
            options.arena,
            tuple(options.sizes),
            options.seconds,
            largest,
        )
        self.players: dict[str, Player] = {}
        self.about: dict[str, str] = {}

    def open(self) -> None:
        kinds = {"ours": ("feed_ours", "Brainstorm")}
        if self.options.handler == "cuda" and not self.options.no_peers:
            kinds |= {name: kind[:2] for name, kind in PEERS.items()}
        for name, (module, kind) in kinds.items():
            player = Player(module, kind, self.setup)
            try:
                self.about |= player.ask("describe", timeout=120)
            except Failed as error:
                player.close(at_once=True)
                if name == "ours":
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

    def run(self, group: Group) -> dict[str, Any]:
        """Return the median seconds of a minibatch, and what failed, by contestant."""
        size = group.size
        # Three quick ones for each slow one; 10 GB/s and a millisecond are between.
        updates = int(self.options.seconds / (size.nbytes / 1e10 + 1e-3))
        updates = max(4, min(updates, 300))
        times: dict[str, list[float]] = {}
        failed: dict[str, str] = {}
        stats = None
        for _ in range(ROUNDS):
            for name, (player, way) in self.contestants(group).items():
                if name in failed:
                    continue
                slow = name in ("plain", "synchronous", "prefetcher", "loader_8")
                turn = max(4, updates // 4) if slow else updates
                try:
                    answer = self.players[player].ask(
                        "turn", way, group.source, size, group.dtype, turn, WARM_UP
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


def bound_of(group: Group, seconds: dict[str, float]) -> tuple[str, float]:
    """Return what bounds the feed, and the seconds of a minibatch that it takes."""
    bounds = {"iterator": seconds["iterator"], "update": seconds["step"]}
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
    if "feed" not in seconds:
        return
    name, bound = bound_of(group, seconds)
    result["bound"], result["bound_seconds"] = name, bound
    result["of_bound"] = {n: bound / s for n, s in seconds.items()}
    order = sorted(seconds, key=seconds.__getitem__)
    for contestant in order:
        s = seconds[contestant]
        print(
            f"  {label(contestant):<62} {s * 1e3:9.3f} ms {nbytes / s / 1e9:8.1f} GB/s "
            f"{bound / s:6.2f} of the bound"
        )
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
        if group.source == "generator" and group.dtype == "float32" and peers:
            theirs = max(n / s for n, s in peers if n == group.size.nbytes)
            want(group, "of the quickest peer", rate / theirs, 1.0)
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--handler", choices=["cuda", "pycuda", "numpy"], default="cuda"
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    parser.add_argument("--sizes", type=int, nargs="+", help="bytes of float32")
    parser.add_argument("--arena", type=int, default=2_000 * MB, help="bytes of data")
    parser.add_argument("--seconds", type=float, default=0.4, help="a turn, about")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    options.sizes = tuple(options.sizes or (QUICK_SIZES if options.quick else SIZES))
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
        for group in benchmark.groups:
            result = benchmark.run(group)
            report(group, result)
            results.append((group, result))
    finally:
        benchmark.close()
    print()
    # On the host there is no link, and nothing to be ahead of.
    missed = [] if options.handler == "numpy" else check(results)
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
