"""Steer the stand-in driver library and look into it."""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from ctypes import c_char_p, c_int, c_size_t, c_uint64, c_void_p
from typing import Iterator

MODES = {"late": 0, "random": 1, "eager": 2}
OUT_OF_MEMORY = 2
ILLEGAL_ADDRESS = 700
CUBLAS_ALLOC_FAILED = 3
DEVICE_BYTES = 8 << 30  # the limit after a reset
NO_LIMIT = c_size_t(-1).value

LIVE_KINDS = (
    "contexts",
    "streams",
    "events",
    "device_blocks",
    "device_bytes",
    "pinned_blocks",
    "pinned_bytes",
    "registered",
    "registered_bytes",
    "modules",
    "blas_handles",
)
DEVICE_KINDS = ("retains", "contexts", "streams", "device_bytes", "pinned_bytes")
DAMAGE_KINDS = ("faults", "damaged_zones", "late_writes")

# name: (result, arguments) of the library's own functions
PROTOTYPES = {
    "fake_reset": (None, ()),
    "fake_set_mode": (None, (c_int, c_uint64)),
    "fake_set_driver_version": (None, (c_int,)),
    "fake_set_device_count": (c_int, (c_int,)),
    "fake_set_limits": (None, (c_size_t, c_size_t)),
    "fake_set_max_pitch": (None, (c_int,)),
    "fake_set_staged_htod": (None, (c_int,)),
    "fake_set_kernels": (None, (c_char_p,)),
    "fake_entry_name": (c_char_p, (c_int,)),
    "fake_calls": (c_uint64, (c_int,)),
    "fake_fail": (c_int, (c_int, c_uint64, c_uint64, c_int)),
    "fake_heal": (None, ()),
    "fake_lose_context": (None, (c_uint64, c_int)),
    "fake_delay": (c_int, (c_int, c_uint64, c_uint64)),
    "fake_end_delays": (None, (c_int,)),
    "fake_hide": (None, (c_int, c_int)),
    "fake_count": (c_uint64, (c_char_p,)),
    "fake_count_on": (c_uint64, (c_int, c_char_p)),
    "fake_spin": (c_int, (c_void_p, c_void_p, c_uint64)),
    "fake_hold": (c_int, (c_void_p, c_void_p, c_uint64)),
    "fake_hold_all": (None, (c_uint64,)),
    "fake_drain": (c_int, (c_void_p, c_void_p)),
    "fake_context_create": (c_int, (c_int, ctypes.POINTER(c_void_p))),
    "fake_context_destroy": (c_int, (c_void_p,)),
    "fake_context_push": (c_int, (c_void_p,)),
    "fake_context_pop": (c_int, (ctypes.POINTER(c_void_p),)),
    "fake_context_top": (c_void_p, ()),
}


def _check(what: str, code: int) -> None:
    if code != 0:
        raise RuntimeError(f"{what}: the stand-in driver says CUDA error {code}")


def _nanoseconds(ms: float) -> int:
    return round(ms * 1_000_000)


class FakeCuda:
    """The stand-in driver of one library file, the same one the code under test opens.

    Its methods are no driver calls: they are not counted, never made to fail, and let
    no work run but where they say so. Handles of contexts and streams are ints; where a
    method takes a default stream (0, 1 or 2) it is that of ``context``, or of the
    calling thread's current context if that is None. RuntimeError where the driver
    refuses.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = os.fspath(path)
        self.library = ctypes.CDLL(self.path)
        for name, (result, arguments) in PROTOTYPES.items():
            function = getattr(self.library, name)
            function.restype, function.argtypes = result, arguments
        self._entries = {name: i for i, name in enumerate(self._entry_names())}

    def _entry_names(self) -> Iterator[str]:
        number = 0
        while (name := self.library.fake_entry_name(number)) is not None:
            yield name.decode()
            number += 1

    def _entry(self, name: str) -> int:
        try:
            return self._entries[name]
        except KeyError:
            raise ValueError(f"the stand-in driver has no {name!r}") from None

    def _count(self, name: str) -> int:
        return self.library.fake_count(name.encode())

    @property
    def entries(self) -> tuple[str, ...]:
        """Base names of all driver entry points."""
        return tuple(name for name in self._entries if not name.startswith("cublas"))

    @property
    def cublas_entries(self) -> tuple[str, ...]:
        """Names of cuBLAS's functions, counted and failed like the driver's."""
        return tuple(name for name in self._entries if name.startswith("cublas"))

    def reset(self) -> None:
        """Start afresh: late mode, one device, no limits but the device's 8 GiB.

        FAKE_CUDA_DEVICES of the environment gives another number of devices.
        Drops pending work, frees all memory, makes all handles invalid and every
        thread's context stack empty, forgets counts, planned failures and damage.
        cuInit stays done. Collect garbage first: what is destroyed late may hit the
        next test.
        """
        self.library.fake_reset()

    def mode(self, mode: str, seed: int = 0) -> None:
        """Choose when work runs: "late", "random" (with that seed) or "eager".

        "eager" also runs all that is pending.
        """
        if mode not in MODES:
            raise ValueError(f"mode {mode!r} is none of {', '.join(MODES)}")
        self.library.fake_set_mode(MODES[mode], seed % 2**64)

    def calls(self, name: str | None = None) -> int | Counter:
        """Return how often an entry point was called, or a Counter of all that were.

        Calls that were made to fail count, those in a forked child do not.
        """
        if name is not None:
            return self.library.fake_calls(self._entry(name))
        counts = {n: self.library.fake_calls(i) for n, i in self._entries.items()}
        return Counter({n: count for n, count in counts.items() if count})

    def host_syncs(self) -> int:
        """Return how many calls made the host wait, or could have.

        These are the synchronize calls, copies that wait for their end, all that
        allocate, free, register or unregister memory, load or unload modules, make or
        destroy cuBLAS handles, and the end of a context.
        """
        return self._count("host_syncs")

    def child_calls(self) -> int:
        """Return how many driver calls were made in forked children since the reset."""
        return self._count("child_calls")

    def live(self) -> dict[str, int]:
        """Return the numbers of live objects and their bytes, by kind."""
        return {kind: self._count(kind) for kind in LIVE_KINDS}

    def live_on(self, device: int) -> dict[str, int]:
        """Return the same of one device; retains: of its primary context, ever.

        pinned_bytes: page-locked and registered, in contexts of this device.
        """
        count = self.library.fake_count_on
        return {kind: count(device, kind.encode()) for kind in DEVICE_KINDS}

    def pending(self) -> int:
        """Return how many work items have not run yet."""
        return self._count("pending")

    def damage(self) -> dict[str, int]:
        """Return what was done to memory that should not have been.

        faults: work that ran after its memory had been freed or unregistered;
        the same for kernels with pointers to nothing and launches whose module is gone;
        damaged_zones: red zones written to; late_writes: freed blocks written to.
        """
        return {kind: self._count(kind) for kind in DAMAGE_KINDS}

    def fail(
        self, name: str, nth: int = 0, code: int | None = None, times: int = 1
    ) -> None:
        """Let the nth next call of an entry point (0: the next) return that code.

        It does nothing else then. ``times`` calls in a row fail. Without a code memory
        is out: CUDA_ERROR_OUT_OF_MEMORY, or CUBLAS_STATUS_ALLOC_FAILED.
        """
        if code is None:
            cublas = name.startswith("cublas")
            code = CUBLAS_ALLOC_FAILED if cublas else OUT_OF_MEMORY
        if self.library.fake_fail(self._entry(name), nth, times, code):
            raise RuntimeError("too many planned failures")

    def heal(self) -> None:
        """Let no more calls fail: forget what fail(), lose_context() have planned."""
        self.library.fake_heal()

    def lose_context(self, after: int = 0, code: int = ILLEGAL_ADDRESS) -> None:
        """Lose the context after so many more calls, of whatever entry points.

        From then on each call returns that code and does nothing else; cuBLAS's return
        CUBLAS_STATUS_EXECUTION_FAILED. Only what needs no context still works: cuInit,
        the driver's version and the names of its errors.
        """
        self.library.fake_lose_context(after, code)

    def all_calls(self) -> int:
        """Return the number of calls as lose_context() counts them."""
        return self._count("all_calls")

    def lost_calls(self) -> int:
        """Return how many calls have failed since the context was lost."""
        return self._count("lost_calls")

    def delay(self, name: str, nth: int = 0, ms: float = 300) -> None:
        """Let the nth next call of an entry point wait so long before it does anything.

        end_delays() lets it go on earlier. The rest of the driver works meanwhile.
        """
        if self.library.fake_delay(self._entry(name), nth, _nanoseconds(ms)):
            raise RuntimeError("too many planned delays")

    def end_delays(self, forget: bool = False) -> None:
        """Let the calls that wait go on; those to come wait no more if ``forget``."""
        self.library.fake_end_delays(forget)

    def delays(self) -> dict[str, int]:
        """Return how many calls wait now, have waited, and were not let go earlier."""
        return {
            "now": self._count("delayed"),
            "begun": self._count("begun_delays"),
            "not let go": self._count("ended_delays"),
        }

    def hide(self, name: str, hidden: bool = True) -> None:
        """Let cuGetProcAddress not find an entry point, or find it again."""
        self.library.fake_hide(self._entry(name), hidden)

    def set_limits(
        self, device_bytes: int | None = None, pinned_bytes: int | None = None
    ) -> None:
        """Let allocations beyond these fail with out of memory; None: as after a reset.

        The first is of each device. Registered memory counts as pinned.
        """
        self.library.fake_set_limits(
            DEVICE_BYTES if device_bytes is None else device_bytes,
            NO_LIMIT if pinned_bytes is None else pinned_bytes,
        )

    def set_kernels(self, path: str | os.PathLike | None) -> None:
        """Choose the library of kernels (build_kernels) for modules loaded from now on.

        None, as after a reset: the one that FAKE_CUDA_KERNELS of the environment names.
        Without any, no module can be loaded.
        """
        self.library.fake_set_kernels(path if path is None else os.fsencode(path))

    def set_driver_version(self, version: int) -> None:
        """Set what cuDriverGetVersion says; entry points newer than that are gone."""
        self.library.fake_set_driver_version(version)

    def set_device_count(self, count: int) -> None:
        """Set the number of devices; with none, cuInit fails. ValueError over 16."""
        if self.library.fake_set_device_count(count):
            raise ValueError(f"{count} devices are not possible")

    def set_max_pitch(self, nbytes: int) -> None:
        """Set how far apart the rows of a copy may be; 2^31 - 1 after a reset."""
        self.library.fake_set_max_pitch(nbytes)

    def set_staged_htod(self, on: bool = True) -> None:
        """Let cuMemcpyHtoD from pageable memory return before the bytes arrive.

        It then waits for earlier work of the NULL stream, takes the bytes and queues
        the rest, which is as much as the driver's manual promises.
        """
        self.library.fake_set_staged_htod(on)

    def spin(self, stream: int, ms: float, context: int | None = None) -> None:
        """Queue work that keeps a stream busy for so many milliseconds."""
        _check("spin", self.library.fake_spin(stream, context, _nanoseconds(ms)))

    def hold(
        self, ms: float, stream: int | None = None, context: int | None = None
    ) -> None:
        """Let each copy and memset issued from now on take so long; 0 ends it.

        It holds for one stream, or for all where that is None.
        """
        if stream is None:
            self.library.fake_hold_all(_nanoseconds(ms))
        else:
            _check("hold", self.library.fake_hold(stream, context, _nanoseconds(ms)))

    def drain(self, stream: int = 0, context: int | None = None) -> None:
        """Run all work of a stream, as a synchronize call would, uncounted."""
        _check("drain", self.library.fake_drain(stream, context))

    def create_context(self, device: int = 0) -> int:
        """Make a context, make it this thread's current one, and return its handle."""
        handle = c_void_p()
        _check("create_context", self.library.fake_context_create(device, handle))
        return handle.value

    def destroy_context(self, context: int) -> None:
        """End a context; it leaves this thread's stack if it is on top."""
        _check("destroy_context", self.library.fake_context_destroy(context))

    def push_context(self, context: int) -> None:
        """Make a context this thread's current one."""
        _check("push_context", self.library.fake_context_push(context))

    def pop_context(self) -> int:
        """Take the current context off this thread's stack and return its handle."""
        handle = c_void_p()
        _check("pop_context", self.library.fake_context_pop(handle))
        return handle.value

    def current_context(self) -> int | None:
        """Return the handle of this thread's current context."""
        return self.library.fake_context_top()
