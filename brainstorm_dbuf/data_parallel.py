"""DataParallel: any of brainstorm's steppers, with gradients averaged over ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import brainstorm
from brainstorm.training.steppers import TrainingStepper

from .gradient_message import place_in, world
from .lockstep import Lockstep, State


class DataParallel(TrainingStepper):
    """Train one network on several ranks, each with a part of every minibatch.

    >>> trainer = dbuf.Trainer(dbuf.DataParallel(bs.training.SgdStepper(0.1)))

    Each rank is a process that runs the same script (``mpiexec -n 4 python train.py``)
    with data of its own: ``Minibatches(100, **{name: array[:, rank::ranks] ...})``. The
    gradients of all ranks are averaged between the backward pass and the network's
    gradient modifiers, weighted by the samples in each rank's minibatch, which is the
    gradient of one minibatch of them all, within rounding. Batch normalisation alone
    sees its own rank's samples.

    Training starts with the weights of rank 0, and they stay equal on all ranks to the
    bit (a value modifier that draws random numbers must draw the same everywhere). Else
    random numbers are each rank's own: give handlers (dropout) and iterators different
    seeds. Losses in the logs are those of the rank's own samples.

    Every rank runs every hook. Where one stops or fails, or has fewer minibatches in an
    epoch than the others, they learn of it at their next update, and ``train`` raises
    on all of them. It must be called as often on each.

    Attributes of the stepper inside, such as ``learning_rate``, are this one's too.
    Made again from its description it takes ``MPI.COMM_WORLD``.

    Args:
        stepper: a ``brainstorm.training`` stepper.
        comm: a communicator of mpi4py; None for ``MPI.COMM_WORLD``. Or a
            ``cupy.cuda.nccl.NcclCommunicator``, for handlers on a CUDA device.
        cuda_aware: whether the MPI takes device memory. If not, gradients that lie on a
            device go through page-locked memory.

    Attributes:
        rank, ranks: which one of how many this process is.

    Raises:
        ImportError: ``comm`` is None and there is no mpi4py or no MPI.
        TypeError: ``stepper`` or ``comm`` is none.
        RuntimeError: by ``train``: the ranks are not in step, or another one failed.
        ValueError: by ``train``: the ranks' networks have not as many parameters.
    """

    __undescribed__ = {"comm", "rank", "ranks", "_lockstep", "_trainer"}
    __default_values__ = {"cuda_aware": False}

    def __init__(
        self, stepper: Any, comm: Any = None, cuda_aware: bool = False
    ) -> None:
        if not isinstance(stepper, TrainingStepper) or isinstance(
            stepper, DataParallel
        ):
            raise TypeError(
                "stepper: expected one of brainstorm's steppers, got "
                f"{type(stepper).__name__}"
            )
        self.stepper = stepper
        super().__init__()
        self.cuda_aware = cuda_aware
        self._join(world() if comm is None else comm)

    def __init_from_description__(self, description: dict[str, Any]) -> None:
        self._join(world())

    def _join(self, comm: Any) -> None:
        self.comm = comm
        self.rank, self.ranks = place_in(comm)
        self._lockstep: Lockstep | None = None
        self._trainer: Any = None

    def __getattr__(self, name: str) -> Any:
        if "stepper" not in vars(self):  # it is being copied or made
            raise AttributeError(name)
        return getattr(self.stepper, name)

    def __setattr__(self, name: str, value: Any) -> None:
        inner = vars(self).get("stepper")
        is_inner = name not in vars(self) and name != "net" and hasattr(inner, name)
        setattr(inner, name, value) if is_inner else super().__setattr__(name, value)

    def start(self, net: Any) -> None:
        """Start the stepper on ``net``, with the parameters of rank 0."""
        super().start(net)
        self.stepper.start(net)
        if self.ranks == 1:
            return
        if self._trainer is None:  # nobody told of the begin, nor will of the end
            self._end()
            self._lockstep = Lockstep(net.handler, self.comm, self.cuda_aware)
        self._lockstep.start(net.buffer.parameters)

    def run(self) -> Any:
        """Run the stepper on the minibatch that the network holds."""
        if self._lockstep is None:
            return self.stepper.run()
        # The backward pass ends with it, and what it does to a gradient is meant for
        # that of the whole minibatch.
        name, net = "apply_gradient_modifiers", self.net
        own, modify = vars(net).get(name), net.apply_gradient_modifiers

        def average_and_modify() -> None:
            epoch = getattr(self._trainer, "current_epoch_nr", 0)
            samples = net._buffer_manager.batch_size
            self._lockstep.average(net.buffer.gradients, epoch, samples)
            modify()

        net.apply_gradient_modifiers = average_and_modify
        try:
            return self.stepper.run()
        finally:
            del net.apply_gradient_modifiers
            if own is not None:
                net.apply_gradient_modifiers = own

    def _begin(self, trainer: Any, net: Any) -> None:
        self._end()
        if self.ranks > 1:
            self._lockstep = Lockstep(net.handler, self.comm, self.cuda_aware)
        self._trainer = trainer

    def _leave(self, state: State) -> None:
        if self._lockstep is not None:
            self._lockstep.leave(state, self._trainer.current_epoch_nr)

    def _end(self) -> None:
        if self._lockstep is not None:
            self._lockstep.close()
        self._lockstep = self._trainer = None


def in_lockstep(train: Callable[..., None]) -> Callable[..., None]:
    """Have a trainer's ``train`` tell a :class:`DataParallel` of its begin and end."""

    @functools.wraps(train)
    def train_in_lockstep(
        self: Any, net: Any, training_data_iter: Any, **named_data_iters: Any
    ) -> None:
        parallel = self.stepper
        if not isinstance(parallel, DataParallel) or parallel._trainer is not None:
            train(self, net, training_data_iter, **named_data_iters)
            return
        parallel._begin(self, net)
        try:
            try:
                train(self, net, training_data_iter, **named_data_iters)
            except BaseException:
                parallel._leave(State.FAILED)
                raise
            parallel._leave(State.ENDED)
        finally:
            parallel._end()

    return train_in_lockstep


# Without it the other ranks would wait for one that has left brainstorm's own loop.
brainstorm.Trainer.train = in_lockstep(brainstorm.Trainer.train)
