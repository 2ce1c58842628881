"""One-hot data that cross the link as indices and are expanded on the device."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np


class OneHotIndices:
    """An array of one-hot rows, known by its indices.

    Attributes:
        indices: int32 of shape ``(T, B, 1)``, each from 0 to below ``size``.
        shape: that of the array, ``(T, B, size)``.
    """

    __slots__ = ("indices", "shape")

    dtype = np.dtype(bool)

    def __init__(self, indices: np.ndarray, size: int) -> None:
        self.indices = indices
        self.shape = (*indices.shape[:2], size)

    def expand(self) -> np.ndarray:
        """Return the array itself, as brainstorm's OneHot makes it."""
        return np.eye(self.shape[2], dtype=bool)[self.indices[:, :, 0]]


def can_stay_indices(iterator: Any) -> bool:
    """Say whether ``iterator`` is a OneHot over one of its named arrays.

    With several brainstorm's yields each minibatch several times, half expanded.
    """
    from brainstorm.data_iterators import OneHot

    return type(iterator) is OneHot and len(iterator.vocab_size_dict) == 1


def unexpanded(iterator: Any, handler: Any) -> Iterator[dict[str, Any]]:
    """Run through ``iterator`` without expanding its one array.

    Minibatches with anything else than indices in their range are left to brainstorm.
    """
    [(name, size)] = iterator.vocab_size_dict.items()
    for data in iterator.iter(handler):
        indices = _checked(data.get(name), size)
        if indices is None:
            source = types.SimpleNamespace(
                iter=lambda handler, data=data: iter([data]),
                vocab_size_dict=iterator.vocab_size_dict,
            )
            yield from type(iterator).__call__(source, handler)
        else:
            # The dict may be the user's own.
            yield {**data, name: OneHotIndices(indices, size)}


def expanded(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a minibatch with ordinary arrays only."""
    return {
        name: array.expand() if isinstance(array, OneHotIndices) else array
        for name, array in data.items()
    }


def _checked(indices: Any, size: int) -> np.ndarray | None:
    """Return indices as int32 from 0 on, None where NumPy has to say what they mean."""
    if (
        type(indices) is not np.ndarray
        or indices.dtype.kind not in "iu"
        or indices.ndim != 3
        or indices.shape[2] != 1
        or indices.size == 0
    ):
        return None
    least, most = int(indices.min()), int(indices.max())
    if least < -size or most >= size:
        return None
    indices = indices.astype(np.int32)
    if least < 0:
        indices[indices < 0] += size
    return indices
