"""What a minibatch may be: named arrays of shape ``(T, B, ...)`` that become floats.

brainstorm itself looks at a minibatch only while it copies it, so a wrong one shows as
an assertion, a broadcast or garbage. Here everything is looked at once, before anything
is copied, and the error names the input, what was expected and what came.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

# bool, signed, unsigned, float: NumPy casts these to float without loss of meaning.
NUMBER_KINDS = "biuf"


# Of each array its name, shape and dtype, in the order of the dict.
Signature = tuple[tuple[str, tuple[int, ...], np.dtype], ...]


class Kind:
    """What minibatches of the same names, shapes and dtypes have in common.

    Attributes:
        time_size, batch_size: T and B.
        given: all names that the iterator yielded.
        shapes: the shapes of those that are used.
        on_device: whether some are arrays of the handler's own, on the device.
        signature: what :func:`signature` returns of them.
    """

    __slots__ = (
        "time_size",
        "batch_size",
        "given",
        "shapes",
        "on_device",
        "signature",
    )

    def __init__(
        self,
        time_size: int,
        batch_size: int,
        given: tuple[str, ...],
        shapes: dict[str, tuple[int, ...]],
        on_device: bool,
        signature: Signature | None,
    ) -> None:
        self.time_size = time_size
        self.batch_size = batch_size
        self.given = given
        self.shapes = shapes
        self.on_device = on_device
        self.signature = signature

    def used(self, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the entries of a minibatch of this kind that are used."""
        if len(self.shapes) == len(data):
            return data
        return {name: data[name] for name in self.shapes}


def signature(data: Any) -> Signature | None:
    """Return what two minibatches of one :class:`Kind` agree in.

    None where that does not tell whether a minibatch is a right one: no dict, not all
    of its values plain NumPy arrays of numbers.
    """
    if type(data) is not dict:
        return None
    seen = []
    for name, array in data.items():
        if type(array) is not np.ndarray or array.dtype.kind not in NUMBER_KINDS:
            return None
        seen.append((name, array.shape, array.dtype))
    return tuple(seen)


def time_and_batch_size(data: Mapping[str, Any]) -> tuple[int, int]:
    """Return ``(T, B)`` as brainstorm takes them: from the first entry.

    Raises:
        TypeError: ``data`` is not a mapping, or its first entry is not an array.
        ValueError: ``data`` is empty or its first entry has fewer than 2 axes.
    """
    if not isinstance(data, Mapping):
        raise TypeError(
            "a data iterator must yield dicts of named arrays, but this one yielded "
            f"{_describe(data)}"
        )
    for name, array in data.items():
        shape = getattr(array, "shape", None)
        if shape is None:
            raise TypeError(
                f"input {name!r}: expected an array of shape (T, B, ...), got "
                f"{_describe(array)}"
            )
        if len(shape) < 2:
            raise ValueError(
                f"input {name!r}: expected an array of shape (T, B, ...), got shape "
                f"{tuple(shape)}"
            )
        return int(shape[0]), int(shape[1])
    raise ValueError("a data iterator yielded an empty dict: there is no input in it")


def as_numbers(name: str, array: Any, dtype: np.dtype) -> np.ndarray:
    """Return ``array``, or for an object array its values as ``dtype``.

    Raises:
        TypeError: it is no array, or holds what is not a real number.
    """
    if not isinstance(array, np.ndarray):
        raise TypeError(
            f"input {name!r}: expected a NumPy array of numbers, got {_describe(array)}"
        )
    if array.dtype.kind in NUMBER_KINDS:
        return array
    if array.dtype.kind == "O":
        try:
            return array.astype(dtype)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"input {name!r}: expected numbers, got an object array that holds "
                f"something else ({error})"
            ) from error
    raise TypeError(
        f"input {name!r}: expected numbers that convert to {dtype}, got dtype "
        f"{array.dtype}"
    )


def check_shapes(
    expected: Mapping[str, tuple[int, ...]],
    given: Mapping[str, tuple[int, ...]],
    names: Iterable[str],
    all_inputs: bool,
) -> None:
    """Compare the shapes of a minibatch with those of the network's inputs.

    ``names`` are all that came; those that the network lacks are left alone, as
    brainstorm does.

    Raises:
        KeyError: an input is missing and ``all_inputs`` is true.
        ValueError: a shape differs.
    """
    for name, shape in expected.items():
        if name not in given:
            if all_inputs:
                raise KeyError(
                    f"input {name!r} is missing from the minibatch, which has "
                    f"{list(names)}"
                )
        elif given[name] != shape:
            raise ValueError(
                f"input {name!r}: expected shape {shape}, got {given[name]}"
            )


def _describe(value: Any) -> str:
    return "None" if value is None else f"{type(value).__name__} {value!r:.60}"
