"""Who else feeds a GPU from ordinary memory: PyTorch and CuPy, as their users do it.

Each way is a generator of minibatches on the device, as float32; the next one is being
prepared and copied, as far as that way goes, while one is used. What is done with a
minibatch is next to nothing: its last element is read on the host, as brainstorm reads
the loss.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from feed_data import Arenas, Size
from feed_ours import Setup

RING = 3
LOADER_WORKERS = 8


class Peer:
    """The turns of one library; its ways are methods by the names of `turn`."""

    def __init__(self, setup: Setup) -> None:
        self.arenas = Arenas(setup.arena_bytes)
        self.arenas.fill(setup.largest)

    def last_element(self, minibatch: Any) -> float:
        """Wait for a minibatch on the device; return its last element."""
        raise NotImplementedError

    def turn(
        self, way: str, source: str, size: Size, dtype: str, updates: int, warm_up: int
    ) -> dict[str, float]:
        """Return the seconds of a minibatch, timed over so many after warming up."""
        arrays = self.arenas.minibatches(size, dtype)
        got, ends = [], []
        with contextlib.closing(getattr(self, way)(arrays, warm_up + updates)) as feed:
            for minibatch in feed:
                got.append(self.last_element(minibatch))
                ends.append(time.perf_counter())
                del minibatch
        expected = [array[-1, -1, -1] for array in arrays]
        if got != list(itertools.islice(itertools.cycle(expected), len(ends))):
            raise AssertionError("not the minibatches that were fed")
        return {"seconds": (ends[-1] - ends[warm_up - 1]) / updates}


class Torch(Peer):
    def __init__(self, setup: Setup) -> None:
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError("PyTorch sees no GPU")
        torch.zeros(1, device="cuda")
        self.torch = torch
        super().__init__(setup)

    def describe(self) -> dict[str, str]:
        return {"PyTorch": self.torch.__version__}

    def last_element(self, minibatch: Any) -> float:
        return minibatch[-1, -1, -1].item()

    # Each of these: all minibatches, again and again, `total` in all.

    def synchronous(self, arrays: list[np.ndarray], total: int) -> Iterator[Any]:
        for array in _cycle(arrays, total):
            yield self.torch.from_numpy(array).cuda().float()

    def prefetcher(self, arrays: list[np.ndarray], total: int) -> Iterator[Any]:
        """apex's and timm's way without page-locked memory."""
        return self._prefetch(map(self.torch.from_numpy, _cycle(arrays, total)))

    def loader_0(self, arrays: list[np.ndarray], total: int) -> Iterator[Any]:
        return self._prefetch(self._loader(arrays, total, num_workers=0))

    def loader_8(self, arrays: list[np.ndarray], total: int) -> Iterator[Any]:
        loader = self._loader(
            arrays,
            total,
            num_workers=LOADER_WORKERS,
            multiprocessing_context="fork",  # the data are not sent to the workers
            timeout=30,
        )
        return self._prefetch(loader)

    def pinning_thread(self, arrays: list[np.ndarray], total: int) -> Iterator[Any]:
        torch = self.torch
        shape = arrays[0].shape
        # A buffer comes back with the event behind the copy out of it.
        free: queue.Queue[Any] = queue.Queue()
        ready: queue.Queue[Any] = queue.Queue()
        for _ in range(RING):
            free.put((torch.empty(shape, dtype=torch.float32, pin_memory=True), None))

        def fill() -> None:
            try:
                for array in _cycle(arrays, total):
                    pinned, copied = free.get()
                    if pinned is None:
                        return
                    if copied is not None:
                        copied.synchronize()
                    pinned.copy_(torch.from_numpy(array))
                    ready.put(pinned)
            except Exception as error:
                ready.put(error)

        def filled() -> Iterator[Any]:
            for _ in range(total):
                if isinstance(item := ready.get(), Exception):
                    raise item
                yield item

        thread = threading.Thread(target=fill, daemon=True)
        thread.start()
        try:
            yield from self._prefetch(filled(), lambda *used: free.put(used))
        finally:
            free.put((None, None))
            thread.join()

    def registered(self, arrays: list[np.ndarray], total: int) -> Iterator[Any]:
        """The data page-locked where they lie, by hand, before and after the turn."""
        cudart = self.torch.cuda.cudart()
        first, last = arrays[0], arrays[-1]
        address = first.ctypes.data
        nbytes = last.ctypes.data + last.nbytes - address
        self.torch.cuda.check_error(int(cudart.cudaHostRegister(address, nbytes, 0)))
        try:
            yield from self._prefetch(map(self.torch.from_numpy, _cycle(arrays, total)))
        finally:
            self.torch.cuda.synchronize()
            self.torch.cuda.check_error(int(cudart.cudaHostUnregister(address)))

    def _loader(self, arrays: list[np.ndarray], total: int, **options: Any) -> Any:
        return self.torch.utils.data.DataLoader(
            _Dataset(arrays, total),
            batch_size=None,  # the items are minibatches
            shuffle=False,
            pin_memory=True,
            **options,
        )

    def _prefetch(
        self,
        minibatches: Iterable[Any],
        used: Callable[[Any, Any], None] = lambda host, copied: None,
    ) -> Iterator[Any]:
        """Copy on a stream of its own, one minibatch ahead, as apex and timm do."""
        torch = self.torch
        copies, compute = torch.cuda.Stream(), torch.cuda.current_stream()
        upcoming = None
        for host in itertools.chain(minibatches, [None]):
            current, upcoming = upcoming, None
            if host is not None:
                with torch.cuda.stream(copies):
                    device = host.to("cuda", non_blocking=True).float()
                copied = copies.record_event()
                used(host, copied)
                upcoming = device, copied
                del device
            if current is not None:
                device, copied = current
                del current
                compute.wait_event(copied)
                device.record_stream(compute)
                yield device
                del device


class _Dataset:
    """What a DataLoader loads from: item i is a whole minibatch."""

    def __init__(self, arrays: list[np.ndarray], total: int) -> None:
        self._arrays, self._total = arrays, total

    def __len__(self) -> int:
        return self._total

    def __getitem__(self, number: int) -> Any:
        import torch

        return torch.from_numpy(self._arrays[number % len(self._arrays)])


class CuPy(Peer):
    def __init__(self, setup: Setup) -> None:
        import cupy
        import cupyx

        cupy.zeros(1)
        self.cupy, self.cupyx = cupy, cupyx
        super().__init__(setup)

    def describe(self) -> dict[str, str]:
        return {"CuPy": self.cupy.__version__}

    def last_element(self, minibatch: Any) -> float:
        return float(minibatch[-1, -1, -1])

    def ring(self, arrays: list[np.ndarray], total: int) -> Iterator[Any]:
        """Page-locked buffers filled by NumPy, copied on a stream of their own."""
        cupy = self.cupy
        shape = arrays[0].shape
        copies = cupy.cuda.Stream(non_blocking=True)
        compute = cupy.cuda.get_current_stream()
        ring = [
            (
                self.cupyx.empty_pinned(shape, np.float32),
                cupy.empty(shape, np.float32),
                cupy.cuda.Event(disable_timing=True),
            )
            for _ in range(RING)
        ]
        upcoming = None
        for number, array in enumerate(itertools.chain(_cycle(arrays, total), [None])):
            current, upcoming = upcoming, None
            if array is not None:
                pinned, device, copied = ring[number % RING]
                copied.synchronize()  # the copy out of it, three minibatches ago
                np.copyto(pinned, array, casting="unsafe")
                device.set(pinned, stream=copies)
                copied.record(copies)
                upcoming = device, copied
            if current is not None:
                device, copied = current
                compute.wait_event(copied)
                yield device


def _cycle(arrays: list[np.ndarray], total: int) -> Iterator[np.ndarray]:
    return itertools.islice(itertools.cycle(arrays), total)
