"""What the tests of DataParallel run on every rank: ``mpiexec -n 2 python ranks.py``.

Each rank writes what it saw as JSON to ``DIRECTORY/RANK.json``, where the test that
has started it looks, and what Python has to say to ``DIRECTORY/RANK.err``. Arguments:
DIRECTORY CASES KIND, with CASES the name of a function below and KIND of the handler.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

import numpy as np

import brainstorm_dbuf as dbuf
import brainstorm as bs
from brainstorm.data_iterators import DataIterator, Minibatches
from brainstorm.handlers import NumpyHandler
from mpi4py import MPI

COMM = MPI.COMM_WORLD
FEATURES, CLASSES, SIZE = 7, 3, 12
# Not a multiple: the last minibatch is of 5 samples, 3 and 2 of them each rank's.
SAMPLES = 5 * SIZE + 5


class Adam(bs.training.SgdStepper):
    """A stepper of somebody else's: two states, steps that depend on the gradient."""

    def start(self, net):
        super().start(net)
        self.mean = net.handler.zeros(net.buffer.parameters.shape)
        self.square = net.handler.zeros(net.buffer.parameters.shape)

    def run(self):
        net, handler = self.net, self.net.handler
        net.forward_pass(training_pass=True)
        net.backward_pass()
        gradients = net.buffer.gradients
        handler.mult_st(0.9, self.mean, out=self.mean)
        handler.mult_add_st(0.1, gradients, out=self.mean)
        handler.mult_tt(gradients, gradients, out=self.update)
        handler.mult_st(0.9, self.square, out=self.square)
        handler.mult_add_st(0.1, self.update, out=self.square)
        handler.sqrt_t(self.square, out=self.update)
        handler.add_st(0.1, self.update, out=self.update)
        handler.divide_tt(self.mean, self.update, out=self.update)
        handler.mult_add_st(-0.02, self.update, out=net.buffer.parameters)


STEPPERS = {
    "sgd": lambda: bs.training.SgdStepper(0.2),
    "momentum": lambda: bs.training.MomentumStepper(0.2, 0.9),
    "nesterov": lambda: bs.training.NesterovStepper(0.2, 0.9),
    "adam": Adam,
}
NETS = {"mlp": "F9 F8", "lstm": "L6", "clipped": "F9"}


def make_handler(kind, dtype=np.float32):
    if kind == "cuda":
        # A device of its own for each rank, as far as there are some.
        device = COMM.rank % dbuf.device_count()
        return dbuf.CudaHandler(seed=1, device=device)
    if kind == "pycuda":
        from brainstorm.handlers import PyCudaHandler

        return PyCudaHandler(seed=1)
    return NumpyHandler(np.dtype(dtype), seed=1)


def make_net(kind, spec="F9 F8", seed=3, dtype=np.float32):
    bs.global_rnd.set_seed(seed)
    net = bs.tools.create_net_from_spec("classification", FEATURES, CLASSES, spec)
    net.set_handler(make_handler(kind, dtype))
    return net


def make_data(samples=SAMPLES):
    rnd = np.random.default_rng(5)
    return {
        "default": rnd.standard_normal((4, samples, FEATURES)),
        "targets": rnd.integers(0, CLASSES, (4, samples, 1)),
    }


def train(net, stepper, iterator, epochs=3, trainer=dbuf.Trainer, hooks=()):
    trainer = trainer(stepper, verbose=False)
    trainer.add_hook(bs.hooks.StopAfterEpoch(epochs))
    for hook in hooks:
        trainer.add_hook(hook)
    trainer.train(net, iterator)
    return trainer


def of_this_rank(data, size=SIZE, comm=COMM):
    """Return every second sample, in minibatches of half the size."""
    part = {name: array[:, comm.rank :: comm.size] for name, array in data.items()}
    return Minibatches(size // comm.size, shuffle=False, **part)


def clip(net, name):
    # Of the whole minibatch's gradient: clipped before, the mean would be another.
    if name == "clipped":
        net.set_gradient_modifiers(bs.value_modifiers.ClipValues(-1e-3, 1e-3))


def parity(kind, make_comm=lambda: None, nets=NETS, steppers=STEPPERS, **options):
    """Two ranks with half of each minibatch, and this one alone with all of it."""
    seen = {}
    for name in nets:
        spec = NETS[name]
        for step in steppers:
            make_stepper = STEPPERS[step]
            # Different weights: training starts with those of rank 0.
            net = make_net(kind, spec, seed=3 + COMM.rank)
            clip(net, name)
            stepper = dbuf.DataParallel(make_stepper(), make_comm(), **options)
            trainer = train(net, stepper, of_this_rank(make_data()))
            alone = make_net(kind, spec)
            clip(alone, name)
            start = alone.get("parameters")
            train(
                alone, make_stepper(), Minibatches(SIZE, shuffle=False, **make_data())
            )
            seen[f"{step} {name}"] = {
                "device": getattr(net.handler, "device", None),
                "prefetched": trainer.feed_stats.prefetched,
                "weights": net.get("parameters").tolist(),
                "alone": alone.get("parameters").tolist(),
                "start": start.tolist(),
                "left": sorted(set(vars(net)) - set(vars(alone))),
            }
    return seen


def brainstorms_trainer(kind):
    """As parity, in brainstorm's own loop and in dbuf.Trainer without a feed."""
    seen = {}
    for name, trainer in {
        "bs": bs.Trainer,
        "plain": lambda stepper, verbose: dbuf.Trainer(
            stepper, verbose, double_buffering=False
        ),
        "feed": dbuf.Trainer,
    }.items():
        net = make_net(kind)
        stepper = dbuf.DataParallel(STEPPERS["momentum"]())
        train(net, stepper, of_this_rank(make_data()), trainer=trainer)
        seen[name] = net.get("parameters").tolist()
    net = make_net(kind)
    stepper = dbuf.DataParallel(STEPPERS["momentum"]())
    stepper.start(net)
    for _ in range(3):
        for data in of_this_rank(make_data())():
            net.provide_external_data(data)
            stepper.run()
    seen["by hand"] = net.get("parameters").tolist()
    return seen


def float64(kind):
    weights = []
    for stepper, iterator in (
        (dbuf.DataParallel(STEPPERS["sgd"]()), of_this_rank(make_data())),
        (STEPPERS["sgd"](), Minibatches(SIZE, shuffle=False, **make_data())),
    ):
        net = make_net(kind, dtype=np.float64)
        train(net, stepper, iterator)
        weights.append(net.get("parameters"))
    return float(np.abs(weights[0] - weights[1]).max())


def nccl(kind):
    """NCCL's communicator, its calls answered by an MPI that reads device memory."""
    return parity(kind, NcclOverMpi)


class NcclOverMpi:
    """What CuPy's NcclCommunicator has, for memory of the stand-in driver."""

    def rank_id(self):
        return COMM.rank

    def size(self):
        return COMM.size

    def allReduce(self, sendbuf, recvbuf, count, datatype, op, stream):
        assert (datatype, op) == (7, 0) and sendbuf == recvbuf
        # Work that was queued elsewhere is not seen.
        dbuf.Stream.from_handle(stream).synchronize()
        buffer = MPI.memory.fromaddress(recvbuf, count * 4)
        COMM.Allreduce(MPI.IN_PLACE, [buffer, count, MPI.FLOAT])


def cupys_nccl():
    """Return a communicator of CuPy's NCCL on this rank's device."""
    from cupy.cuda import nccl

    number = COMM.bcast(nccl.get_unique_id())
    with dbuf.Context.primary(COMM.rank):
        return nccl.NcclCommunicator(COMM.size, number, COMM.rank)


FEW = {"nets": ["mlp", "lstm"], "steppers": ["momentum"]}


def two_devices(kind):
    """As parity, but less of it: gradients go through page-locked memory."""
    return parity(kind, **FEW)


def two_devices_by_nccl(kind):
    """The same by NCCL, or what stands for it on the stand-in driver."""
    is_real = "BRAINSTORM_DBUF_LIBCUDA" not in os.environ
    return parity(kind, cupys_nccl if is_real else NcclOverMpi, **FEW)


def cuda_aware(kind):
    return parity(kind, cuda_aware=True)


# ------------------------------------------------------------------- not in step


class Faulty(DataIterator):
    """Fails at its third minibatch, on rank 1 in its second pass."""

    def __init__(self):
        self.inner = of_this_rank(make_data())
        self.data_shapes, self.length = self.inner.data_shapes, self.inner.length
        self.passes = 0

    def __call__(self, handler=None):
        self.passes += 1
        for number, data in enumerate(self.inner(handler)):
            if COMM.rank == 1 and self.passes == 2 and number == 2:
                raise OSError("no such file")
            yield data


class OnRank1(bs.hooks.Hook):
    """Raise an error on rank 1 at some update or epoch."""

    def __init__(self, error, timescale, at):
        super().__init__(timescale=timescale)
        self.error, self.at = error, at

    def __call__(self, epoch_nr, update_nr, net, stepper, logs):
        now = epoch_nr if self.timescale == "epoch" else update_nr
        if COMM.rank == 1 and now == self.at:
            raise self.error


def fewer(net, stepper, trainer):
    samples = SAMPLES - SIZE if COMM.rank == 1 else SAMPLES
    train(net, stepper, of_this_rank(make_data(samples)), trainer=trainer)


def fewer_at_the_end(net, stepper, trainer):
    samples = SAMPLES - SIZE if COMM.rank == 1 else SAMPLES
    train(net, stepper, of_this_rank(make_data(samples)), 1, trainer)


def stops(net, stepper, trainer):
    hook = OnRank1(StopIteration(), "update", 8)
    train(net, stepper, of_this_rank(make_data()), trainer=trainer, hooks=[hook])


def stops_after_an_epoch(net, stepper, trainer):
    train(net, stepper, of_this_rank(make_data()), 3 - COMM.rank, trainer)


def fails_in_a_hook(net, stepper, trainer):
    hook = OnRank1(OSError("no such file"), "epoch", 2)
    train(net, stepper, of_this_rank(make_data()), trainer=trainer, hooks=[hook])


def fails_in_the_iterator(net, stepper, trainer):
    train(net, stepper, Faulty(), trainer=trainer)


def fails_in_the_step(net, stepper, trainer):
    forward, passes = net.forward_pass, []

    def fail(*args, **kwargs):
        passes.append(1)
        if COMM.rank == 1 and len(passes) == 4:
            raise OSError("no such file")
        forward(*args, **kwargs)

    net.forward_pass = fail
    train(net, stepper, of_this_rank(make_data()), trainer=trainer)


def fails_before_the_start(net, stepper, trainer):
    data = make_data()
    if COMM.rank == 1:
        data["mask"] = data.pop("targets")
    train(net, stepper, of_this_rank(data), trainer=trainer)


def fails_at_the_very_end(net, stepper, trainer):
    hook = OnRank1(OSError("no such file"), "epoch", 3)
    train(net, stepper, of_this_rank(make_data()), trainer=trainer, hooks=[hook])


def interrupted(net, stepper, trainer):
    hook = OnRank1(KeyboardInterrupt(), "update", 5)
    train(net, stepper, of_this_rank(make_data()), trainer=trainer, hooks=[hook])


def other_network(net, stepper, trainer):
    net = make_net("numpy", f"F{9 + COMM.rank}")
    train(net, stepper, of_this_rank(make_data()), trainer=trainer)


NOT_IN_STEP = [
    fewer,
    fewer_at_the_end,
    stops,
    stops_after_an_epoch,
    fails_in_a_hook,
    fails_in_the_iterator,
    fails_in_the_step,
    fails_before_the_start,
    fails_at_the_very_end,
    interrupted,
    other_network,
]


def not_in_step(kind):
    """Each way to fall out of step; after each the ranks can train again."""
    seen = {}
    for case in NOT_IN_STEP:
        for name, trainer in {"dbuf": dbuf.Trainer, "bs": bs.Trainer}.items():
            net = make_net(kind)
            stepper = dbuf.DataParallel(STEPPERS["momentum"]())
            try:
                case(net, stepper, trainer)
            except BaseException as error:
                outcome = f"{type(error).__name__}: {error}"
            else:
                outcome = "nothing was raised"
            net = make_net(kind, seed=3 + COMM.rank)
            train(net, stepper, of_this_rank(make_data()), 1, trainer)
            seen[f"{case.__name__} {name}"] = [outcome, net.get("parameters").tolist()]
    seen["threads"] = [t.name for t in threading.enumerate() if "dbuf" in t.name]
    return seen


def ends_with_an_error(kind):
    """Rank 1's error is caught by nobody."""
    fails_in_a_hook(make_net(kind), dbuf.DataParallel(STEPPERS["sgd"]()), dbuf.Trainer)


class KilledOnRank1(bs.hooks.Hook):
    def __call__(self, epoch_nr, update_nr, net, stepper, logs):
        if COMM.rank == 1 and epoch_nr == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def is_killed(kind):
    """Rank 1 is gone without a word."""
    stepper = dbuf.DataParallel(STEPPERS["sgd"]())
    train(make_net(kind), stepper, of_this_rank(make_data()), hooks=[KilledOnRank1()])


if __name__ == "__main__":
    directory, cases, kind = sys.argv[1:]
    # mpiexec mixes what the ranks write.
    sys.stderr = open(Path(directory, f"{COMM.rank}.err"), "w", buffering=1)
    if cases != "brainstorms_trainer":
        # However small, each minibatch is prepared by a worker during the step before.
        from brainstorm_dbuf import feed

        feed.WORTH_A_WORKER_SECONDS, feed.SLOW_IN_A_ROW = -1.0, 1
    seen = globals()[cases](kind)
    Path(directory, f"{COMM.rank}.json").write_text(json.dumps(seen))
