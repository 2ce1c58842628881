"""FromIterable: a data iterator over minibatches that anything else makes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from brainstorm.data_iterators import DataIterator


class FromIterable(DataIterator):
    """Make a data iterator of a DataLoader, a data set of Ray's, a generator, a list.

    A minibatch is a mapping of names to arrays, or with ``names`` a sequence of arrays
    (or one array alone). Arrays are whatever NumPy takes as one, PyTorch's CPU tensors
    among them; arrays on a device are passed on as they are. Of a data set of Ray's it
    is ``FromIterable(dataset.iter_batches(batch_size=100), has_time=False)``, and each
    epoch executes it anew; its columns are the network's inputs.

    Args:
        source: what to go through once an epoch: an iterable that can be gone through
            again and again, or a function that returns a new one.
        names: the names of a minibatch's arrays, if it is a sequence.
        has_time: whether the arrays are of shape (T, B, ...) as brainstorm takes them.
            If not, they are of shape (B, ...) and get T = 1; of shape (B,), such as
            labels, they become (1, B, 1).
        data_shapes: the shape of each named array, as ``brainstorm.data_iterators`` has
            it. If None, the first minibatch is fetched now to see, and is the first of
            the first pass.
        length: minibatches an epoch; if None, ``len(source)`` where there is one.

    Raises:
        TypeError: ``source`` is neither; it can be gone through once only; or a
            minibatch is not what ``names`` says, or holds no numbers.
        ValueError: there is no minibatch, or it has another number of arrays than there
            are names.
    """

    __undescribed__ = {"source", "_begun"}

    def __init__(
        self,
        source: Iterable[Any] | Callable[[], Iterable[Any]],
        names: Sequence[str] | None = None,
        has_time: bool = True,
        data_shapes: Mapping[str, tuple[int, ...]] | None = None,
        length: int | None = None,
    ) -> None:
        # The base class would draw a seed from brainstorm's global random state, and
        # every later draw of the program would differ. This class draws nothing.
        if not callable(source) and not isinstance(source, Iterable):
            raise TypeError(
                "source: expected an iterable or a function that returns one, got "
                f"{type(source).__name__}"
            )
        if isinstance(source, Iterator):
            raise TypeError(
                f"source: a {type(source).__name__} can be gone through once only, and "
                "each epoch goes through it; give the function that makes it"
            )
        if isinstance(names, str):
            raise TypeError(f"names: expected several names, got the string {names!r}")
        self.source = source
        self.names = None if names is None else tuple(names)
        self.has_time = has_time
        if length is None and hasattr(source, "__len__") and not callable(source):
            length = len(source)
        self.length = length
        # What is left of the pass whose first minibatch was looked at.
        self._begun: Iterator[dict[str, Any]] | None = None
        if data_shapes is None:
            begun = self._pass()
            first = next(begun, None)
            if first is None:
                raise ValueError("source: there is no minibatch in it")
            data_shapes = {name: tuple(array.shape) for name, array in first.items()}
            self._begun = itertools.chain([first], begun)
        self.data_shapes = dict(data_shapes)

    def __call__(self, handler: Any = None) -> Iterator[dict[str, Any]]:
        begun, self._begun = self._begun, None
        return self._pass() if begun is None else begun

    def _pass(self) -> Iterator[dict[str, Any]]:
        source = self.source() if callable(self.source) else self.source
        for minibatch in source:
            yield {
                name: self._array(name, value)
                for name, value in self._named(minibatch).items()
            }

    def _named(self, minibatch: Any) -> Mapping[str, Any]:
        if self.names is None:
            if not isinstance(minibatch, Mapping):
                raise TypeError(
                    "source: expected minibatches that are mappings of names to "
                    f"arrays, got a {type(minibatch).__name__}; names= tells what its "
                    "arrays are"
                )
            return minibatch
        if isinstance(minibatch, Mapping):
            raise TypeError(
                "source: its minibatches are mappings, which have names already; leave "
                "out names="
            )
        values = minibatch if isinstance(minibatch, (tuple, list)) else [minibatch]
        if len(values) != len(self.names):
            raise ValueError(
                f"source: expected minibatches of {len(self.names)} arrays, for "
                f"{self.names}, got one of {len(values)}"
            )
        return dict(zip(self.names, values))

    def _array(self, name: str, value: Any) -> Any:
        if hasattr(value, "__cuda_array_interface__"):
            return value
        array = np.asarray(value)
        if array.dtype.kind in "OSUmM":
            raise TypeError(
                f"input {name!r}: expected an array of numbers, got one of shape "
                f"{array.shape} and dtype {array.dtype} (arrays of unlike shapes make "
                "one of objects)"
            )
        if self.has_time:
            return array
        if array.ndim == 0:
            raise ValueError(
                f"input {name!r}: expected an array of shape (B, ...), got a number"
            )
        return array.reshape(1, -1, 1) if array.ndim == 1 else array[None]
