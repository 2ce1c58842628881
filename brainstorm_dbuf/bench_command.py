"""``brainstorm-dbuf bench``: what double buffering brings on this machine, measured."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import textwrap
from typing import TYPE_CHECKING, Any

from .commands import (
    Refused,
    make_handler,
    need_brainstorm,
    positive,
    size_as_text,
)
from .machine import Survey, survey

if TYPE_CHECKING:
    from .bench import Row, Workload

DESCRIPTION = """\
Measure what double buffering brings on this machine, and what would be the most.

A network of one FullyConnected layer trains on random numbers, its loss read after each
update, by brainstorm's own loop (plain) and by ours (buffered), in turns. --source says
where the minibatches come from:

  held   Minibatches of an array in memory; only their way to a device can be hidden
  noise  the same with AddGaussianNoise, which the processor computes each time

Printed are milliseconds of one minibatch, medians of the rounds. iterator, link and
step are those parts by themselves, the link (on a device only) from page-locked memory;
the longest is the bound, below which an update cannot be. gain is plain / buffered, and
`of bound` is bound / buffered: at 1.00 nothing is left to hide.

Without a device, iterator and step share the processors: where BLAS uses all of them
(OPENBLAS_NUM_THREADS says how many), the two get in each other's way.

    brainstorm-dbuf bench --quick
    brainstorm-dbuf bench --handler cuda --source held --batch-mib 16 147 --units 1024

Exit status: 0 once measured, 1 if a row could not be, or its weights were not those of
brainstorm's own loop, 2 for a wrong command line, 3 if networks (or with --handler
those of that handler) cannot be trained here. How quick it was is no part of it; that
is what `brainstorm-dbuf check` looks at.
"""

SEED = 1
SECONDS, QUICK_SECONDS = 0.5, 0.15
BATCH_MIB, QUICK_BATCH_MIB = (0.01, 1.0, 8.0), (0.01, 1.0)
# Rounds that differ by more than this factor are no measurement of a few percent.
STEADY = 1.25
# What says how many threads compute, and stage.
THREADS = (
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"),
    "BRAINSTORM_DBUF_STAGING_THREADS",
)
# On a device also a minibatch of the size of 256 images.
LARGE_BATCH_MIB = 147.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--handler",
        choices=("auto", "numpy", "cuda", "pycuda"),
        default="auto",
        help="auto: cuda where it can be used, else numpy",
    )
    parser.add_argument(
        "--source",
        nargs="+",
        choices=("held", "noise"),
        default=["held", "noise"],
        help="where minibatches come from (both)",
    )
    parser.add_argument(
        "--batch-mib",
        nargs="+",
        type=positive(float),
        metavar="MIB",
        help="sizes of a minibatch of float32 in MiB (0.01 1 8, on a device also 147)",
    )
    parser.add_argument(
        "--batch-size",
        type=positive(int),
        default=256,
        metavar="N",
        help="samples in a minibatch (256)",
    )
    parser.add_argument(
        "--units",
        type=positive(int),
        default=128,
        metavar="N",
        help="of the layer; more of them make the step longer (128)",
    )
    parser.add_argument(
        "--rounds", type=positive(int), default=3, metavar="N", help="turns (3)"
    )
    parser.add_argument(
        "--seconds",
        type=positive(float),
        metavar="S",
        help="each trains in a round, about; large minibatches take longer (0.5)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="0.01 and 1 MiB, 0.15 seconds"
    )


def run(options: argparse.Namespace) -> int:
    """Measure; return the exit status."""
    try:
        return _bench(options)
    except Refused as refused:
        print(f"brainstorm-dbuf bench: {refused}", file=sys.stderr)
        return refused.status


def _bench(options: argparse.Namespace) -> int:
    need_brainstorm()
    from .bench import link_of, measure

    handler = make_handler(options.handler, SEED)
    link = link_of(handler)
    loads = workloads(options, on_device=link is not None)
    found = survey()
    heading = headings(options, type(handler).__name__, link, found)
    if not options.json:
        print("\n".join(heading), flush=True)
    seconds = options.seconds or (QUICK_SECONDS if options.quick else SECONDS)
    rows = []
    for load in loads:
        row = measure(load, handler, link, seconds, options.rounds)
        rows.append(row)
        if not options.json:
            print(row_as_text(row), flush=True)
    if not options.json and (spread := max(row.spread for row in rows)) > STEADY:
        print(
            f"The rounds differ, in one row by a factor of {spread:.1f}: if other work "
            "runs on this\nmachine, measure again without it, or with more --rounds."
        )
    if options.json:
        about = {
            "handler": type(handler).__name__,
            "units": options.units,
            "batch_size": options.batch_size,
            "link_bytes_per_second": None if link is None or math.isnan(link) else link,
            "threads": {name: os.environ.get(name) for name in THREADS},
            "machine": found.as_dict(),
        }
        measured = [row.as_dict() for row in rows]
        print(json.dumps({**about, "rows": measured}, indent=1))
    return 0 if all(row.is_right for row in rows) else 1


def workloads(options: argparse.Namespace, on_device: bool) -> list[Workload]:
    """Return what is to be measured.

    Raises:
        Refused: one of them takes more memory than there is.
    """
    from .bench import Workload

    sizes = options.batch_mib
    if sizes is None:
        sizes = list(QUICK_BATCH_MIB if options.quick else BATCH_MIB)
        sizes += [LARGE_BATCH_MIB] * (on_device and not options.quick)
    loads = []
    for source in dict.fromkeys(options.source):
        for size in dict.fromkeys(sizes):
            features = max(1, round(size * (1 << 18) / options.batch_size))
            load = Workload(source, options.batch_size, features, options.units)
            if not load.fits():
                raise Refused(
                    f"--batch-mib {size:g} --batch-size {options.batch_size} --units "
                    f"{options.units}: takes some "
                    f"{load.memory_bytes / (1 << 30):,.1f} GiB of memory, more than "
                    "this process may use"
                )
            loads.append(load)
    return loads


def headings(
    options: argparse.Namespace, handler: str, link: float | None, found: Survey
) -> list[str]:
    where = f"{found.processors} processors"
    if link is not None:
        rate = "not measured" if math.isnan(link) else f"{link / 1e9:.1f} GB/s"
        where = f"{found.devices[0].name}, link {rate}, {where}"
    method = (
        f"{handler} on {where}; minibatches of {options.batch_size} samples, "
        f"{options.units} units; milliseconds a minibatch, medians of {options.rounds}"
    )
    return [
        textwrap.fill(method, 88),
        f"{'source':<6} {'minibatch':>10} {'iterator':>9} {'link':>8} {'step':>8} "
        f"{'plain':>8} {'buffered':>9} {'gain':>6}  of bound",
    ]


def row_as_text(row: Row) -> str:
    begin = f"{row.source:<6} {size_as_text(row.nbytes):>10} "
    if row.failed is not None:
        return _filled(begin, f"FAILED  {row.failed}")

    def cell(seconds: float | None, width: int) -> str:
        text = "-" if seconds is None else f"{seconds * 1e3:.3f}"
        return f"{text:>{width}} "

    line = begin + cell(row.alone["iterator"], 9) + cell(row.alone.get("link"), 8)
    line += cell(row.alone["step"], 8) + cell(row.plain, 8) + cell(row.buffered, 9)
    line += f"{row.gain:6.2f}  {row.of_bound:.2f} {row.bound}"
    notes = (
        [] if row.identical else ["WEIGHTS DIFFER from those of brainstorm's own loop"]
    )
    return "\n".join(
        [line, *(_filled(" " * 7, note) for note in notes + row.fallbacks)]
    )


def _filled(begin: str, text: Any) -> str:
    return textwrap.fill(
        f"{begin}{text}", width=88, subsequent_indent=" " * 7, break_on_hyphens=False
    )
