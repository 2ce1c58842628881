"""Find out where running an iterator ahead would change the random numbers it draws."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from brainstorm.data_iterators import (
    DataIterator,
    Minibatches,
    MultiHot,
    OneHot,
    Pad,
    Undivided,
)

from .iterators import chain_of

# These draw at the start of a pass or never, not from minibatch to minibatch. Exactly
# these: what a subclass draws is not known.
_DRAWS_NOTHING_PER_BATCH = {Minibatches, MultiHot, OneHot, Pad, Undivided}


def shared_random_draws(
    training: DataIterator, hooks: Iterable[Any], iterators: Mapping[str, Any]
) -> str | None:
    """Say why prefetching could not keep the numbers, None where it can.

    A monitor that runs within the epoch and looks at the iterator that trains (or one
    built on the same random iterator) draws from the same random state. brainstorm's
    own loop draws for the monitor after minibatch k and before k + 1; a look-ahead has
    drawn for k + 1 by then. Shuffling alone is drawn at the start of a pass: fine.

    Args:
        training: the iterator to train on.
        hooks: the trainer's hooks.
        iterators: all iterators the hooks can name.
    """
    drawn = {id(rnd): it for it in chain_of(training) if (rnd := _per_batch_rnd(it))}
    for hook in hooks:
        name = getattr(hook, "iter_name", None)
        if getattr(hook, "timescale", None) != "update" or name not in iterators:
            continue
        for iterator in chain_of(iterators[name]):
            rnd = _per_batch_rnd(iterator)
            if rnd is not None and id(rnd) in drawn:
                return (
                    f"the hook {hook.__name__!r} monitors {name!r} at every update, and "
                    f"its {type(iterator).__name__} draws from the same random state "
                    "as the one that trains: training takes brainstorm's own path, so "
                    "that the numbers stay the same (an iterator of its own for the "
                    "monitor brings double buffering back)"
                )
    return None


def _per_batch_rnd(iterator: Any) -> Any:
    if type(iterator) in _DRAWS_NOTHING_PER_BATCH:
        return None
    return getattr(iterator, "rnd", None)
