"""A self-test in some seconds: is double buffering at work on this machine, and right?

:func:`checkup` trains small networks of its own, and changes nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .machine import Survey
from .timings import BatchTimes

SEED = 20151017

# A link carries this share of what its lanes and speed allow, less the packets' headers;
# where it is less than this, something is wrong with it.
LINK_SHARE = 0.6
# How much of an update double buffering must save where iterator and step take the same
# time, and could save half.
OVERLAP_SAVES = 0.25
# How much of the copies must run during steps that take longer.
COPY_HIDDEN = 0.5

_WAIT_SECONDS = 0.004

# Of the network whose copies are to be hidden: 8 MB a minibatch, and a step that takes a
# GPU a few times as long as their copy.
SAMPLES, FEATURES, UNITS = 512, 4096, 2048


@dataclass
class Check:
    """One finding.

    Attributes:
        name: what was looked at.
        passed: whether it is as it should be; None where it could not be looked at.
        found: what was seen, in one line.
    """

    name: str
    passed: bool | None
    found: str


def checkup(found: Survey) -> Iterator[Check]:
    """Yield what is found, one check after another.

    Args:
        found: what :func:`brainstorm_dbuf.machine.survey` has returned; networks must be
            trainable.
    """
    import brainstorm_dbuf as dbuf
    from brainstorm.handlers import NumpyHandler

    handlers: dict[str, Callable[[], Any]] = {
        "NumpyHandler": lambda: NumpyHandler(np.float32, seed=SEED)
    }
    if found.trains_on_device:
        handlers["CudaHandler"] = lambda: dbuf.CudaHandler(seed=SEED)
    for name, make_handler in handlers.items():
        yield _attempt(f"parity, {name}", lambda make=make_handler: _parity(make))
    yield _attempt("overlap of iterator and step", _overlap)
    if found.trains_on_device:
        yield _attempt("overlap of copy and step", _hidden_copies)
        yield _attempt("link to device 0", lambda: _link(found.devices[0].link))
    else:
        why = found.missing.get("CudaHandler") or found.missing.get("CUDA driver")
        yield Check("on a device", None, why or "there is no CUDA device")


def _attempt(name: str, look: Callable[[], tuple[bool | None, str]]) -> Check:
    try:
        passed, found = look()
    except Exception as error:  # whatever it is, the user asked what does not work
        return Check(name, False, f"{type(error).__name__}: {error}")
    return Check(name, passed, found)


def _parity(make_handler: Callable[[], Any]) -> tuple[bool, str]:
    """The same weights, to the bit, by brainstorm's own loop and by ours."""
    import brainstorm as bs
    from brainstorm.data_iterators import AddGaussianNoise, Minibatches

    weights = []
    for double_buffering in (False, True):
        bs.global_rnd.set_seed(SEED)
        rnd = np.random.RandomState(SEED)
        data = {
            "default": rnd.standard_normal((1, 640, 64)).astype(np.float32),
            "targets": rnd.randint(0, 10, (1, 640, 1)).astype(np.float32),
        }
        iterator = AddGaussianNoise(Minibatches(32, **data), {"default": 0.1})
        net = bs.tools.create_net_from_spec("classification", 64, 10, "D F32 D F32")
        net.set_handler(make_handler())
        net.initialize(bs.initializers.Gaussian(0.1), seed=SEED)
        train(net, iterator, double_buffering, epochs=3)
        weights.append(net.get("parameters"))
    same = int(np.sum(weights[0].view(np.uint32) == weights[1].view(np.uint32)))
    return (
        same == weights[0].size,
        f"{same:,} of {weights[0].size:,} weights are those of brainstorm's own loop",
    )


def _overlap() -> tuple[bool, str]:
    """An iterator and a step that take the same time, neither of them the processor's."""
    import brainstorm as bs
    from brainstorm.data_iterators import DataIterator
    from brainstorm.handlers import NumpyHandler

    batch = {
        "default": np.zeros((1, 1, 4), np.float32),
        "targets": np.zeros((1, 1, 1), np.float32),
    }

    class Waits(DataIterator):
        def __call__(self, handler: Any = None) -> Iterator[dict[str, np.ndarray]]:
            for _ in range(50):
                time.sleep(_WAIT_SECONDS)
                yield batch

    class WaitsToo(bs.hooks.Hook):
        def __call__(self, **_: Any) -> None:
            time.sleep(_WAIT_SECONDS)

    seconds = {}
    for double_buffering in (False, True):
        net = bs.tools.create_net_from_spec("classification", 4, 2, "F3")
        net.set_handler(NumpyHandler(np.float32, seed=SEED))
        net.initialize(0.1, seed=SEED)
        iterator = Waits({name: array.shape for name, array in batch.items()}, 50)
        started = time.perf_counter()
        hook = WaitsToo(timescale="update")
        trainer = train(net, iterator, double_buffering, hook=hook)
        seconds[double_buffering] = (
            time.perf_counter() - started
        ) / trainer.current_update_nr
    saved = 1 - seconds[True] / seconds[False]
    return (
        saved >= OVERLAP_SAVES,
        f"an update takes {seconds[True] * 1e3:.2f} ms instead of "
        f"{seconds[False] * 1e3:.2f}, where iterator and step take the same time",
    )


def _share_within_steps(records: list[BatchTimes]) -> float | None:
    """Return how much of the time of the copies is that of steps; None without copies.

    Whichever steps: a copy may be queued several of them ahead. The first minibatch's
    has none.
    """
    hidden = copied = 0.0
    for times in records[1:]:
        if times.copy_end > times.copy_begin:
            copied += times.copy_end - times.copy_begin
            for step in records:
                end = min(times.copy_end, step.step_end)
                hidden += max(0.0, end - max(times.copy_begin, step.step_begin))
    return hidden / copied if copied else None


def _hidden_copies() -> tuple[bool | None, str]:
    """Of minibatches whose copy takes less time than the step."""
    import brainstorm as bs
    import brainstorm_dbuf as dbuf
    from brainstorm.data_iterators import Minibatches

    data = {
        "default": np.zeros((1, 12 * SAMPLES, FEATURES), np.float32),
        "targets": np.zeros((1, 12 * SAMPLES, 1), np.float32),
    }
    net = bs.tools.create_net_from_spec(
        "classification", FEATURES, 10, f"F{UNITS} F{UNITS}"
    )
    net.set_handler(dbuf.CudaHandler(seed=SEED))
    net.initialize(0.01, seed=SEED)
    trainer = train(net, Minibatches(SAMPLES, **data), True, epochs=4)
    timings = trainer.feed_stats.timings
    summary = timings.summary()
    hidden = _share_within_steps(list(timings.records))
    if hidden is None:
        return None, "the device did not tell when its copies ran"
    return (
        hidden >= COPY_HIDDEN,
        f"{hidden:.0%} of the time of the copies ({summary.copy * 1e3:.2f} ms a "
        f"minibatch) lies within steps ({summary.step * 1e3:.2f} ms)",
    )


def _link(state: str | None) -> tuple[bool | None, str]:
    import brainstorm_dbuf as dbuf

    from .copy_clock import link_rate

    with dbuf.Context.primary(0) as context, dbuf.Stream(context) as stream:
        rate = link_rate(context, stream)
    if math.isnan(rate):
        return None, "its rate could not be measured"
    ceiling = ceiling_of(state)
    found = f"{rate / 1e9:.1f} GB/s from page-locked memory"
    if ceiling is None:
        return None, f"{found}; the system does not say what the link could carry"
    return (
        rate >= LINK_SHARE * ceiling,
        f"{found}, {rate / ceiling:.0%} of the {ceiling / 1e9:.1f} that "
        f"{state.split(' of ')[1]} can carry at most",
    )


def ceiling_of(state: str | None) -> float | None:
    """Return the bytes/s that a link carries at its best, None where that is not known.

    Args:
        state: as :class:`brainstorm_dbuf.machine.DeviceFacts` has it, such as
            ``"2.5 GT/s x16 of 32.0 GT/s x16"``.

    PCI Express sends one bit a lane and transfer; up to 5 GT/s 8 of 10 are data, up to
    32 GT/s 128 of 130, beyond nearly all (PCI Express Base Specification).
    """
    try:
        speed, _, width = state.split(" of ")[1].split()
        gigatransfers, lanes = float(speed), int(width.removeprefix("x"))
    except (AttributeError, IndexError, ValueError):
        return None
    data = 0.8 if gigatransfers <= 5 else 128 / 130
    return gigatransfers * 1e9 * lanes * data / 8


def train(
    net: Any,
    iterator: Any,
    double_buffering: bool,
    epochs: int = 1,
    hook: Any = None,
    timed: bool = True,
) -> Any:
    """Train for some epochs, silently; return the trainer."""
    import brainstorm as bs
    import brainstorm_dbuf as dbuf

    trainer = dbuf.Trainer(
        bs.training.MomentumStepper(0.01, 0.9),
        verbose=False,
        double_buffering=double_buffering,
        timed=timed,
    )
    trainer.add_hook(bs.hooks.StopAfterEpoch(epochs))
    if hook is not None:
        trainer.add_hook(hook)
    trainer.train(net, iterator)
    return trainer
