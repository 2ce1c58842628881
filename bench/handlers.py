"""The time of a training update: CudaHandler beside PyCudaHandler and PyTorch.

brainstorm's three example networks with synthetic minibatches of their shapes, which lie
on the device: brainstorm copies them to its input buffer there, PyTorch uses them where
they are. An update is forward pass, backward pass, one step of gradient descent with
momentum 0.9, and reading the loss on the host; PyTorch runs eagerly. Each contestant has
a process of its own, and works in turn while all others wait: PyTorch keeps the
convolution algorithms that it chose first and its TF32 switches for a whole process, and
PyCUDA's context would be current to everyone. A turn is some updates to warm up again,
then a burst of updates, timed as a whole; the order is reversed from round to round.
Figures are medians over the rounds, ratios the medians of the ratios of each round, to
that row of PyTorch with the same precision which is quickest. `tuned` is PyTorch with
cudnn.benchmark and SGD(fused=True), which are off by default; its LSTM has no peephole
connections.

Before that, the losses of small networks without dropout must agree with NumpyHandler's;
all losses must be finite.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import contestants
from contestants import CONTESTANTS, Unavailable
from example_networks import FULL, SMALL, ExampleNetwork
from op_profile import table

BURST_SECONDS = 0.25  # a burst of slow updates has fewer, but at least three
UNTIMED = 3  # updates before a burst: other processes have used the GPU since
COMPARED_UPDATES = 5
AGREEMENT = {"float32": 1e-4, "TF32": 1e-2}  # relative, of the losses


class Player:
    """A contestant in its process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.precision = "TF32" if name.endswith("tf32") else "float32"
        self._process = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        self.versions = self._process.submit(contestants.start, name)

    def ask(self, method: str, *arguments: Any) -> Future:
        try:
            return self._process.submit(contestants.ask, method, *arguments)
        except BrokenExecutor as error:
            future: Future = Future()
            future.set_exception(error)
            return future

    def close(self) -> None:
        self._process.shutdown()


class Failures(list):
    """What makes the program end with status 1; each is printed at once."""

    def add(self, text: str) -> None:
        print(f"FAILED: {text}", flush=True)
        self.append(text)


def main() -> int:
    options = parse_options()
    started = time.perf_counter()
    print(__doc__.strip())
    print(f"\n{machine()}")
    failures = Failures()
    networks = SMALL if options.small else FULL
    players = [Player(name) for name in options.handlers]
    results: dict[str, Any] = {}
    try:
        rehearsals = [
            player.ask("rehearse", networks[name])
            for player in players
            if player.name == "pycuda"
            for name in options.networks
        ]
        players = present(players, failures)
        wait(rehearsals)
        for name in options.networks:
            print()
            compare(players, SMALL[name], failures)
            results[name] = run(players, networks[name], options, failures)
            if options.profile:
                profile(players, networks[name], results[name], failures)
    finally:
        for player in players:
            player.close()
    print(f"\n{time.perf_counter() - started:.0f} s in all")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    for text in failures:
        print(f"FAILED: {text}", file=sys.stderr)
    return int(bool(failures))


def parse_options() -> argparse.Namespace:
    def names(known: Iterable[str]):
        def parse(text: str) -> list[str]:
            unknown = [name for name in text.split(",") if name not in known]
            if unknown:
                raise argparse.ArgumentTypeError(
                    f"{unknown[0]!r} is not one of {', '.join(known)}"
                )
            return text.split(",")

        return parse

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--networks",
        type=names(FULL),
        default=list(FULL),
        metavar="NAME,...",
        help=f"of {', '.join(FULL)} (default: all)",
    )
    parser.add_argument(
        "--handlers",
        type=names(CONTESTANTS),
        default=[name for name in CONTESTANTS if name != "numpy"],
        metavar="NAME,...",
        help=f"of {', '.join(CONTESTANTS)} (default: all but numpy)",
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--updates", type=int, default=100, help="a burst, at most")
    parser.add_argument(
        "--profile", action="store_true", help="CudaHandler's time by operation"
    )
    parser.add_argument(
        "--small", action="store_true", help="small networks, to try the program out"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def machine() -> str:
    cpu = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    text = f"{os.cpu_count()} cores of {cpu}, Python {platform.python_version()}"
    try:
        query = "--query-gpu=name,driver_version"
        gpu = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return f"no GPU seen by nvidia-smi, {text}"
    name, _, driver = gpu.partition(", ")
    return f"{name}, driver {driver}, {text}"


def present(players: list[Player], failures: Failures) -> list[Player]:
    """Return the players that can take part; say of each what it uses, or why not."""
    found = []
    for player in players:
        try:
            print(f"{player.name:<26}{player.versions.result()}")
        except Unavailable as reason:
            player.close()
            print(f"{player.name:<26}left out: {reason}")
            if player.name.startswith("cuda"):
                failures.add(f"{player.name} cannot be used")
        except Exception as error:
            player.close()
            failures.add(f"{player.name}: {text_of(error)}")
        else:
            found.append(player)
    return found


def compare(players: list[Player], network: ExampleNetwork, failures: Failures) -> None:
    """Check that CudaHandler learns what NumpyHandler learns."""
    for player in players:
        if not player.name.startswith("cuda"):
            continue
        try:
            ours, reference = player.ask("compare", network, COMPARED_UPDATES).result()
        except Exception as error:
            failures.add(f"{network.name}, {player.name}: {text_of(error)}")
            continue
        limit = AGREEMENT[player.precision]
        difference = max(
            abs(a - b) / abs(b) if math.isfinite(a) and b else math.inf
            for a, b in zip(ours, reference, strict=True)
        )
        text = (
            f"{network.name}, {player.name}: losses of {COMPARED_UPDATES} small updates "
            f"differ from NumpyHandler's by {difference:.1e} (at most {limit:.0e})"
        )
        if difference <= limit:
            print(text)
        else:
            failures.add(f"{text}: {ours}, expected {reference}")


def run(
    players: list[Player],
    network: ExampleNetwork,
    options: argparse.Namespace,
    failures: Failures,
) -> dict[str, Any]:
    """Time one network on all players and print the table."""
    bursts: dict[Player, int] = {}
    result: dict[str, Any] = {}
    # One after the other: PyTorch tries algorithms out here.
    for player in players:
        if options.small and player.name.startswith("torch"):
            continue
        try:
            answer = player.ask("set_up", network, min(options.updates, 5)).result()
        except Exception as error:
            failures.add(f"{network.name}, {player.name}: {text_of(error)}")
            continue
        if answer is not None:
            parameters, seconds = answer
            bursts[player] = min(options.updates, max(3, int(BURST_SECONDS / seconds)))
            result[player.name] = {"parameters": parameters, "ms": [], "losses": []}
    sizes = sorted({row["parameters"] for row in result.values()})
    print(
        f"{network.name}: {network.spec}, minibatches of {network.shape}, "
        f"{' or '.join(f'{size:,}' for size in sizes)} parameters"
    )
    for number in range(options.rounds):
        order = list(bursts)
        for player in order if number % 2 else reversed(order):
            row = result[player.name]
            try:
                seconds, losses = player.ask("turn", bursts[player], UNTIMED).result()
            except Exception as error:
                failures.add(f"{network.name}, {player.name}: {text_of(error)}")
                del bursts[player], result[player.name]
                continue
            row["ms"].append(seconds * 1e3)
            row["losses"] += losses
    for player, burst in bursts.items():
        result[player.name]["updates"] = burst
        if not all(math.isfinite(loss) for loss in result[player.name]["losses"]):
            failures.add(f"{network.name}, {player.name}: a loss is not finite")
    for precision in ("float32", "TF32"):
        rows = {
            player.name: result[player.name]
            for player in bursts
            if player.precision == precision
        }
        print_rows(rows, precision, network, failures)
    return result


def print_rows(
    rows: dict[str, Any], precision: str, network: ExampleNetwork, failures: Failures
) -> None:
    peers = [name for name in rows if name.startswith("torch")]
    peer = min(
        peers, key=lambda name: statistics.median(rows[name]["ms"]), default=None
    )
    for name, row in rows.items():
        times = row["ms"]
        text = (
            f"  {precision:<8}{name:<26}{statistics.median(times):9.3f} ms, "
            f"{min(times):.3f} to {max(times):.3f} in {len(times)} x {row['updates']}"
        )
        if peer is not None:
            pairs = zip(times, rows[peer]["ms"], strict=True)
            row["ratio"] = statistics.median(ours / theirs for ours, theirs in pairs)
            text += f"; {row['ratio']:.2f} of {peer}"
        if not name.startswith("cuda"):
            print(text)
            continue
        if peer is None:
            print(f"{text}; limit not checked, no PyTorch here")
            continue
        print(f"{text}, at most {network.limit:.2f}")
        if row["ratio"] > network.limit:
            failures.add(
                f"{network.name}, {name}: {row['ratio']:.2f} of PyTorch's time, at most "
                f"{network.limit:.2f}"
            )


def profile(
    players: list[Player],
    network: ExampleNetwork,
    result: dict[str, Any],
    failures: Failures,
) -> None:
    for player in players:
        if player.name not in result or not player.name.startswith("cuda"):
            continue
        try:
            answer = player.ask("profile", network, 20).result()
        except Exception as error:
            failures.add(f"profile of {network.name}, {player.name}: {text_of(error)}")
            continue
        print(f"\n{network.name}, {player.name}, by operation (means of an update; the")
        print(
            "host's time includes waiting for the loss, the device's does not read it)"
        )
        print(table(answer))
        result[player.name]["profile"] = {
            name: vars(op) for name, op in answer.ops.items()
        }


def text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    sys.exit(main())
