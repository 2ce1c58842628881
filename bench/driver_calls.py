"""What a driver call costs from Python, beside the same call from C, in one run.

Method: `rounds` rounds; in each, a burst of calls from C and one from Python in turn, the
stream drained between bursts (short ones: it is the cost of issuing a call, not the pace
at which the device works off a long queue). The figures are medians over the rounds of
the time of one call, loop included on both sides.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import sys
import timeit
from pathlib import Path

import brainstorm_dbuf as dbuf
import numpy as np
from in_c import build_c, driver_entry

ROUNDS, BURST = 2000, 20
COPY_BYTES = 64 * 1024
LIMITS = {"event record": 1.2, "wait event": 1.2, "memcpy_htod_async 64 KiB": 1.05}


def main() -> int:
    floor = build_c(
        "floor.c",
        ("floor_event_record", "floor_wait_event", "floor_memcpy_htod_async"),
        "-O2",
    )
    record, wait, copy = (
        ctypes.c_void_p(driver_entry(*entry))
        for entry in (
            ("cuEventRecord", 2000),
            ("cuStreamWaitEvent", 3020),
            ("cuMemcpyHtoDAsync", 3020),
        )
    )
    with dbuf.Context.primary(0) as context:
        stream = dbuf.Stream(context)
        event = dbuf.Event(context).record(stream)
        memory = dbuf.mem_alloc(COPY_BYTES, context)
        source = dbuf.pagelocked_empty(COPY_BYTES, np.uint8)
        handle = ctypes.c_void_p(stream.handle)
        event_handle = ctypes.c_void_p(event.handle)
        calls = {
            "event record": (
                lambda: floor.floor_event_record(
                    record, event_handle, handle, BURST
                ),
                "record(stream)",
            ),
            "wait event": (
                lambda: floor.floor_wait_event(
                    wait, handle, event_handle, BURST
                ),
                "wait_event(event)",
            ),
            "memcpy_htod_async 64 KiB": (
                lambda: floor.floor_memcpy_htod_async(
                    copy,
                    ctypes.c_ulonglong(int(memory)),
                    ctypes.c_void_p(source.ctypes.data),
                    ctypes.c_size_t(COPY_BYTES),
                    handle,
                    BURST,
                ),
                "memcpy_htod_async(memory, source, stream)",
            ),
        }
        print(__doc__.strip().splitlines()[0])
        print(f"{dbuf.Device(0).name}, driver CUDA {dbuf.driver_version()}, Python "
              f"{sys.version.split()[0]}, {ROUNDS} rounds of {BURST} calls")
        names = {
            "record": event.record,
            "wait_event": stream.wait_event,
            "memcpy_htod_async": dbuf.memcpy_htod_async,
            "event": event,
            "memory": memory,
            "source": source,
            "stream": stream,
        }
        results = {}
        for name, (in_c, statement) in calls.items():
            in_python = timeit.Timer(statement, globals=names)
            c_times, python_times = [], []
            for _ in range(ROUNDS):
                c_times.append(in_c())
                stream.synchronize()
                python_times.append(in_python.timeit(BURST) / BURST * 1e9)
                stream.synchronize()
            c, python = statistics.median(c_times), statistics.median(python_times)
            results[name] = {"c_ns": c, "python_ns": python, "ratio": python / c}
            print(
                f"{name:<26} C {c:8.1f} ns   Python {python:8.1f} ns   ratio "
                f"{python / c:5.2f}  (at most {LIMITS[name]:.2f})"
            )
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(results, indent=1))
    return int(any(results[name]["ratio"] > limit for name, limit in LIMITS.items()))


if __name__ == "__main__":
    sys.exit(main())
