"""Data sets of minibatches of a given size, as arrays that lie in ordinary memory.

Each element type has one arena, filled once; the data set of every size is a view of
it, so that no time goes into filling and no copy hits a cache. The values are integers
from 0 to 255, so they are the same in all types.
"""

from __future__ import annotations

import functools
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

# A prime, so that no minibatch begins where another one does.
PATTERN = 1_000_003
FEW, MANY = 3, 2000  # minibatches of an epoch, at least and at most
STEPS = 100  # T of the strided minibatches


@dataclass(frozen=True)
class Size:
    """Minibatches of (about) so many bytes of float32, as contiguous or strided ones.

    Strided ones are minibatches of sequences, (T, B, features) with T > 1, sliced from
    a data set with more B: T pieces, a long way apart.
    """

    asked: int
    strided: bool = False

    @functools.cached_property
    def shape(self) -> tuple[int, int, int]:
        elements = max(1, self.asked // 4)
        steps = min(STEPS, elements) if self.strided else 1
        samples = 256 if elements >= 1 << 18 else 1
        return steps, samples, max(1, elements // steps // samples)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return 4 * self.elements


class Arenas:
    """The memory of one process.

    Args:
        nbytes: of each arena, about.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._arenas: dict[np.dtype, np.ndarray] = {}

    def fill(self, largest: dict[str, int]) -> None:
        """Fill an arena a dtype, whose minibatches have so many elements at most."""
        pattern = np.random.default_rng(0).integers(0, 256, PATTERN, np.uint8)
        with ThreadPoolExecutor(8) as pool:
            for name, elements in largest.items():
                dtype = np.dtype(name)
                size = max(self._nbytes // dtype.itemsize, FEW * elements)
                arena = self._arenas[dtype] = np.empty(size, dtype)
                pieces = [arena[i : i + PATTERN] for i in range(0, size, PATTERN)]
                list(pool.map(functools.partial(_copy, pattern.astype(dtype)), pieces))

    def data_set(self, size: Size, dtype: str) -> np.ndarray:
        """Return an array (T, N, features) of whole minibatches."""
        arena = self._arenas[np.dtype(dtype)]
        count = min(max(arena.size // size.elements, 1), MANY)
        steps, samples, features = size.shape
        shape = steps, samples * count, features
        return arena[: math.prod(shape)].reshape(shape)

    def minibatches(self, size: Size, dtype: str) -> list[np.ndarray]:
        """Return its minibatches, (T, B, features) each."""
        data, samples = self.data_set(size, dtype), size.shape[1]
        return [data[:, i : i + samples] for i in range(0, data.shape[1], samples)]


def _copy(pattern: np.ndarray, piece: np.ndarray) -> None:
    piece[...] = pattern[: piece.size]
