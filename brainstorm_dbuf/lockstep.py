"""Lockstep: the ranks of a communicator train together, or learn that they do not.

Ranks only ever meet to add up one message, and every message says in its slots what
each rank is about: it starts, it has gradients of an epoch, it has ended or failed. So
a rank that leaves training, however it does, meets the others once more and says so.
All see the same slots: all go on or all raise, and nobody waits for who is gone.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any

import numpy as np

from .gradient_message import Message, message_for, place_in

# The numbers of a slot are exact up to here in float32.
_EXACT = 1 << 24


class State(enum.IntEnum):
    """What a rank is about; the two numbers beside it in its slot."""

    ABSENT = 0
    STARTS = 1  # bytes of its parameters, the high and the low part
    TRAINS = 2  # epoch, samples in the minibatch
    ENDED = 3  # epoch
    FAILED = 4  # epoch


class Lockstep:
    """One training on all ranks.

    Args:
        handler, comm, cuda_aware: as in :func:`gradient_message.message_for`.
    """

    def __init__(self, handler: Any, comm: Any, cuda_aware: bool) -> None:
        self._where = handler, comm, cuda_aware
        self._rank = place_in(comm)[0]
        self._message: Message | None = message_for(*self._where, 0)
        # The communicator itself has failed: there is no way to meet anybody.
        self._is_lost = False

    def start(self, parameters: Any) -> None:
        """Give all ranks the parameters of rank 0.

        Args:
            parameters: the network's, flat; set to those of rank 0.

        Raises:
            ValueError: the networks of the ranks have not the same number of them.
            RuntimeError: a rank has left training already.
        """
        size = int(np.prod(parameters.shape))
        nbytes = size * parameters.dtype.itemsize
        message = message_for(*self._where, size)
        try:
            self._meet(State.STARTS, *divmod(nbytes, _EXACT))
            sizes = self._message.slots[:, 1:].astype(np.int64) @ (_EXACT, 1)
            if len(set(sizes)) > 1:
                self.close()
                raise ValueError(
                    "DataParallel: all ranks must train the same network, but they "
                    "have: " + _listed(f"{n:,} bytes of parameters" for n in sizes)
                )
        except BaseException:
            message.close()
            raise
        self._message.close()
        self._message = message
        if self._rank == 0:
            message.load(parameters, 1.0)
        else:
            message.clear()
        self._meet(State.STARTS, 0, 0)
        message.unload(parameters, 1.0)

    def average(self, gradients: Any, epoch: int, samples: int) -> None:
        """Set ``gradients`` to the mean over all ranks, weighted by their samples.

        Raises:
            RuntimeError: another rank has no minibatch of this epoch.
        """
        self._message.load(gradients, samples)
        self._meet(State.TRAINS, epoch, samples)
        total = float(self._message.slots[:, 2].sum(dtype=np.float64))
        self._message.unload(gradients, 1.0 / total)

    def leave(self, state: State, epoch: int) -> None:
        """Tell the other ranks that this one has ended or failed. Twice is harmless.

        Raises:
            RuntimeError: it has ended, and another one has not.
        """
        message = self._message
        try:
            if message is None or self._is_lost or self._problem() is not None:
                return  # who disagrees has left
            try:
                self._meet(state, epoch, 0)
            except RuntimeError:
                if state is State.ENDED:
                    raise
        finally:
            self.close()

    def close(self) -> None:
        """Give the message back, and meet nobody any more."""
        message, self._message = self._message, None
        if message is not None:
            message.close()

    def _meet(self, state: State, first: int, second: int) -> None:
        """Add up the message that is loaded.

        Raises:
            RuntimeError: the ranks do not agree on what they are about.
        """
        slots = self._message.slots
        slots.fill(0)
        slots[self._rank] = state, first, second
        try:
            self._message.sum()
        except Exception:
            self._is_lost = True
            raise
        problem = self._problem()
        if problem is not None:
            raise RuntimeError(problem)

    def _problem(self) -> str | None:
        """Say how the ranks disagree by the last message, None where they do not.

        An interrupt may come before the slots are added up: then there is but our own.
        """
        slots = self._message.slots
        states = {int(state) for state in slots[:, 0]} - {State.ABSENT}
        if State.FAILED in states:
            rank = int(np.flatnonzero(slots[:, 0] == State.FAILED)[0])
            return (
                f"DataParallel: rank {rank} has left training in epoch "
                f"{int(slots[rank, 1])} with an error of its own, so rank {self._rank} "
                "stops too"
            )
        epochs = {int(epoch) for state, epoch, _ in slots if state == State.TRAINS}
        if len(states) <= 1 and len(epochs) <= 1:
            return None
        return (
            "DataParallel: the ranks are not in step: "
            + _listed(_about(*slot) for slot in slots)
            + ". Their iterators must have equal numbers of minibatches, and a hook "
            "that stops one must stop all"
        )


def _about(state: float, first: float, _: float) -> str:
    if state == State.STARTS:
        return "at the start"
    if state == State.TRAINS:
        return f"at a minibatch of epoch {int(first)}"
    return f"training ended in epoch {int(first)}"


def _listed(texts: Iterable[str]) -> str:
    """Say of each rank its text, of those together that have the same."""
    ranks: dict[str, list[str]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(str(rank))
    return "; ".join(
        f"rank{'s' * (len(who) > 1)} {', '.join(who[:8])}"
        f"{f' and {len(who) - 8} more' * (len(who) > 8)}: {text}"
        for text, who in ranks.items()
    )
