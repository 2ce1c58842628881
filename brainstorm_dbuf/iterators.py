"""What is known of data iterators: what they wrap, hold and leave alone."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np


def chain_of(iterator: Any) -> Iterator[Any]:
    """Yield an iterator and those it is wrapped around."""
    while iterator is not None:
        yield iterator
        iterator = getattr(iterator, "iter", None)


@functools.singledispatch
def held_arrays(iterator: Any) -> list[np.ndarray]:
    """Return the arrays whose slices ``iterator`` yields; none for what is not known.

    Another package's iterator is made known by ``held_arrays.register(ItsIterator)``. A
    class, or a wrapper around others, that never writes into the arrays it passes on
    says so by an attribute of its own, ``leaves_arrays_alone = True``; else each copy out
    of them is waited for before ``next`` is called again.
    """
    return []


@functools.cache
def _brainstorms_iterators() -> frozenset[type]:
    """Make brainstorm's iterators known; return those that leave arrays alone.

    Exactly these never write into the arrays that they pass on (Flip does, and what a
    subclass does is not known).
    """
    from brainstorm import data_iterators as them

    for holder in (them.Minibatches, them.Undivided):
        held_arrays.register(holder, _arrays_of)
    return frozenset(
        {
            them.AddGaussianNoise,
            them.Minibatches,
            them.MultiHot,
            them.OneHot,
            them.Pad,
            them.RandomCrop,
            them.Undivided,
        }
    )


def data_of(iterator: Any) -> tuple[list[np.ndarray], bool]:
    """Return the arrays that ``iterator``, or what it is wrapped around, holds.

    And whether nobody writes into them while minibatches are fetched.
    """
    leave_arrays_alone = _brainstorms_iterators()
    chain = list(chain_of(iterator))
    held = [array for link in chain for array in held_arrays(link)]
    lie_still = all(
        type(link) in leave_arrays_alone
        or vars(type(link)).get("leaves_arrays_alone", False)
        for link in chain
    )
    return held, lie_still


def _arrays_of(iterator: Any) -> list[np.ndarray]:
    return [array for array in iterator.data.values() if isinstance(array, np.ndarray)]


def source_of(minibatches: Any) -> Any:
    """Return the data iterator whose pass this is, None where that cannot be told.

    A data iterator's own method makes a pass, mostly as a generator; one that has
    begun is not asked for.
    """
    from brainstorm.data_iterators import DataIterator

    if not inspect.isgenerator(minibatches):
        return None
    if inspect.getgeneratorstate(minibatches) != inspect.GEN_CREATED:
        return None
    source = inspect.getgeneratorlocals(minibatches).get("self")
    makes_passes = getattr(type(source).__call__, "__code__", None)
    is_its_pass = minibatches.gi_code is makes_passes
    return source if isinstance(source, DataIterator) and is_its_pass else None
