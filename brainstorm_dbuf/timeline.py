"""A few minibatches in lanes of time: as a picture, or as a trace for Perfetto."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from .timings import BatchTimes

# Each lane: when it was at work on a minibatch.
LANES: dict[str, Callable[[BatchTimes], tuple[float, float]]] = {
    "iterator": lambda t: (t.next_begin, t.next_end),
    "staging": lambda t: (t.next_end, t.staged),
    "copy": lambda t: (t.copy_begin, t.copy_end),
    "waiting": lambda t: (t.wait_end - t.wait_seconds, t.wait_end),
    "step": lambda t: (t.step_begin, t.step_end),
}

# Neighbours differ, and are told apart in grey as well.
_COLOURS = ("#2b6cb0", "#dd8a1f", "#4c9a6a")
_WIDTH, _HEIGHT = 10.0, 3.6  # inches
# A bar narrower than this share of the picture has no room for a number.
_NUMBERED = 0.02


class Bar(NamedTuple):
    """One stage of one minibatch, in seconds from the first bar's begin."""

    lane: str
    number: int
    begin: float
    length: float


def bars_of(records: Sequence[BatchTimes]) -> list[Bar]:
    """Return the bars of some minibatches; stages that took no time have none."""
    spans = [
        (lane, times.number, *span(times))
        for times in records
        for lane, span in LANES.items()
    ]
    spans = [span for span in spans if span[3] > span[2]]  # not NaN either
    origin = min((begin for _, _, begin, _ in spans), default=math.nan)
    return [
        Bar(lane, number, begin - origin, end - begin)
        for lane, number, begin, end in spans
    ]


def check_can_write(filename: str) -> None:
    """See that what is needed for this kind of file is there.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: matplotlib writes no such files.
    """
    if _is_trace(filename):
        return
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise ImportError(
            f"{filename}: a picture needs matplotlib ({error}); pip install "
            "'brainstorm-dbuf[plot]' brings it, and a .json file needs nothing"
        ) from error
    known = FigureCanvasAgg.get_supported_filetypes()
    ending = Path(filename).suffix[1:].lower()
    if ending not in known:
        raise ValueError(
            f"{filename}: expected an ending of {', '.join(sorted(known))} or json, "
            f"got {ending!r}"
        )


def write(filename: str, records: Sequence[BatchTimes], title: str) -> None:
    """Write the picture or the trace of some minibatches."""
    bars = bars_of(records)
    if _is_trace(filename):
        Path(filename).write_text(json.dumps(trace_of(bars), indent=1) + "\n")
    else:
        _draw(filename, bars, title)


def trace_of(bars: Sequence[Bar]) -> dict[str, object]:
    """Return the trace: complete events of the Trace Event Format, times in us."""
    lanes = {lane: number for number, lane in enumerate(LANES, 1)}
    events: list[dict[str, object]] = [
        {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "feed"}}
    ]
    for lane, tid in lanes.items():
        common = {"ph": "M", "pid": 1, "tid": tid}
        events += [
            {**common, "name": "thread_name", "args": {"name": lane}},
            {**common, "name": "thread_sort_index", "args": {"sort_index": tid}},
        ]
    events += [
        {
            "name": f"{bar.lane} {bar.number}",
            "ph": "X",
            "pid": 1,
            "tid": lanes[bar.lane],
            "ts": bar.begin * 1e6,
            "dur": bar.length * 1e6,
            "args": {"minibatch": bar.number},
        }
        for bar in bars
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _is_trace(filename: str) -> bool:
    return filename.lower().endswith(".json")


def _draw(filename: str, bars: Sequence[Bar], title: str) -> None:
    # Without pyplot: no window system, and no state that the user's own plots share.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, _HEIGHT), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    end = max(bar.begin + bar.length for bar in bars)
    # In milliseconds, or in microseconds where that reads better.
    unit, scale = ("ms", 1e3) if end >= 2e-3 else ("us", 1e6)
    rows = {lane: row for row, lane in enumerate(LANES)}
    for bar in bars:
        axes.broken_barh(
            [(bar.begin * scale, bar.length * scale)],
            (rows[bar.lane] - 0.38, 0.76),
            facecolors=_COLOURS[bar.number % len(_COLOURS)],
            edgecolor="white",
            linewidth=0.4,
        )
        if bar.length >= _NUMBERED * end:
            axes.text(
                (bar.begin + bar.length / 2) * scale,
                rows[bar.lane],
                str(bar.number),
                ha="center",
                va="center",
                color="white",
                fontsize=8,
            )
    axes.set_yticks(list(rows.values()), list(rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, end * scale)
    axes.set_xlabel(f"{unit}; the numbers are those of the minibatches")
    axes.set_title(textwrap.fill(title, 110), fontsize=9, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)
    figure.savefig(filename)
