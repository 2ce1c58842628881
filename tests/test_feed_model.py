"""Whatever is done in whatever order, it is what brainstorm does by itself.

Each example is a list of commands for two networks that are the same at the start: one
is fed by this package, its twin by brainstorm alone. After each command both have seen
the same minibatches, raised the same errors, have the same losses and parameters, bit
for bit; at the end nothing is left.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import time
import warnings

import numpy as np
import pytest
from hypothesis import Phase, event, given, settings
from hypothesis import strategies as st

import brainstorm_dbuf as dbuf
import brainstorm as bs
from brainstorm.data_iterators import AddGaussianNoise, Flip, Minibatches, OneHot
from brainstorm_dbuf import held_memory
from brainstorm_dbuf.back_buffers import DeviceSlot
from brainstorm_dbuf.input_layer import DoubleBufferedInput
from coded import FEATURES, From, Hook, workers
from conftest import live_objects
from layouts import EXAMPLES, on_one_handler
from parity import (
    SEED,
    assert_same_logs,
    make_handler,
    poison_back_buffers,
)

pytestmark = [
    pytest.mark.timeout(max(60, 4 * EXAMPLES)),
    pytest.mark.usefixtures("nothing_left"),
]

SHAPE = (4, 3, 2)  # of one sample of 'default'
MOST_STEPS, MOST_SAMPLES = 3, 6
ALLOCATIONS = ("cuMemAlloc", "cuMemHostAlloc", "cuMemHostRegister")


class Planned(Exception):
    """The iterator's own error, or the step's."""


# ----------------------------------------------------------------------- commands

sizes = st.lists(
    st.tuples(st.integers(1, MOST_STEPS), st.integers(1, MOST_SAMPLES)), max_size=6
)
faults = st.one_of(
    st.just(("none", 0)),
    st.tuples(
        st.sampled_from(
            [
                "stop",
                "next raises",
                "step raises",
                "interrupt",
                "handler",
                "monitor",
                "second feed",
                "close",
            ]
        ),
        st.integers(0, 6),
    ),
    st.tuples(st.sampled_from(ALLOCATIONS), st.integers(0, 12)),
)
commands = st.fixed_dictionaries(
    {
        "how": st.sampled_from(["train", "loop", "prefetch", "lent"]),
        "source": st.sampled_from(
            ["generator", "reused", "held", "noise", "flip", "one hot"]
        ),
        "sizes": sizes,
        "dtype": st.sampled_from(["f4", "f8", "i1"]),
        "shuffle": st.booleans(),
        "sleeps": st.booleans(),
        "epochs": st.integers(1, 2),
        "depth": st.integers(1, 4),
        "fault": faults,
    }
)


# ----------------------------------------------------------------------- sources


def numbers(rnd, shape, dtype):
    if dtype == "i1":
        return rnd.integers(-100, 100, shape).astype(dtype)
    return rnd.standard_normal(shape).astype(dtype)


def minibatch(rnd, size, dtype):
    return {
        "default": numbers(rnd, (*size, *SHAPE), dtype),
        "targets": numbers(rnd, (*size, FEATURES), "f4"),
    }


def on_pages(array):
    """Return a copy on pages of its own, which can be page-locked by themselves."""
    copy = np.frombuffer(mmap.mmap(-1, array.nbytes), array.dtype)
    copy = copy.reshape(array.shape)
    copy[...] = array
    return copy


def source(command, seed, on_device):
    """Return a data iterator: the same, over memory of its own, for the same seed."""
    rnd = np.random.default_rng(seed)
    name, sizes, dtype = command["source"], command["sizes"], command["dtype"]
    if name in ("generator", "reused"):
        given = [minibatch(rnd, size, dtype) for size in sizes]
        if name == "generator":
            return From(lambda: iter(given), len(given))
        return From(lambda: reusing(given, on_device), len(given))
    # As many sequences as the list has minibatches, and one over where T is odd.
    steps, samples = sizes[0] if sizes else (1, 2)
    total = samples * max(1, len(sizes)) + steps % 2
    data = minibatch(rnd, (steps, total), dtype)
    if name == "one hot":
        data["targets"] = rnd.integers(0, FEATURES, (steps, total, 1))
    data = {key: on_pages(array) for key, array in data.items()}
    held = Minibatches(samples, shuffle=command["shuffle"], **data)
    if name == "noise":
        return AddGaussianNoise(held, {"default": 0.5})
    if name == "flip":
        return Flip(held, {"default": 0.5})
    return OneHot(held, {"targets": FEATURES}) if name == "one hot" else held


def reusing(given, page_locked):
    """Yield minibatches in arrays that are written to again after each."""
    arrays = {}
    for data in given:
        for name, array in data.items():
            old = arrays.get(name)
            if old is None or (old.shape, old.dtype) != (array.shape, array.dtype):
                make = dbuf.pagelocked_empty if page_locked else np.empty
                arrays[name] = make(array.shape, array.dtype)
            arrays[name][...] = array
        yield dict(arrays)
        for array in arrays.values():
            array[...] = 77


class Disturbed(bs.data_iterators.DataIterator):
    """Another iterator, which raises before minibatch ``fails`` and may sleep."""

    leaves_arrays_alone = True

    def __init__(self, iterator, fails, sleeps):
        self.iter = iterator
        self.data_shapes, self.length = iterator.data_shapes, iterator.length
        self.fails, self.sleeps = fails, sleeps

    def __call__(self, handler=None):
        for number, data in enumerate(self.iter(handler)):
            if number == self.fails:
                raise Planned("next")
            if self.sleeps:
                time.sleep(1e-4 * (number % 3))
            yield data


# ------------------------------------------------------------------------- sides


class Stepper(bs.training.SgdStepper):
    """Notes what it was given and what came of it; may do something before."""

    __undescribed__ = {"seen", "losses", "before"}

    def __init__(self):
        super().__init__(learning_rate=0.01)
        self.seen, self.losses, self.before = [], [], None

    def run(self):
        if self.before is not None:
            self.before(len(self.losses))
        self.look()
        super().run()
        self.look()
        self.losses.append(self.net.get_loss_values()["total_loss"])

    def look(self):
        inputs = (self.net.get_input(name) for name in ("default", "targets"))
        self.seen.append([np.array(array) for array in inputs])


def make_net():
    inp = bs.layers.Input(
        out_shapes={
            "default": ("T", "B", *SHAPE),
            "targets": ("T", "B", FEATURES),
        }
    )
    hidden = bs.layers.FullyConnected(4, name="Hidden", activation="tanh")
    out = bs.layers.FullyConnected(FEATURES, name="Out", activation="linear")
    error = bs.layers.SquaredError(name="Error")
    inp - "default" >> hidden >> out
    out >> "default" - error
    inp - "targets" >> "targets" - error
    error - "loss" >> bs.layers.Loss()
    net = bs.Network.from_layer(inp)
    net.initialize(bs.initializers.Gaussian(0.2))
    return net


class Side:
    """A network and how it is fed: by this package, or by brainstorm alone."""

    def __init__(self, kind, driver, buffered):
        self.kind, self.driver, self.buffered = kind, driver, buffered
        bs.global_rnd.set_seed(SEED)
        self.net = make_net()
        self.net.set_handler(make_handler(kind, driver))
        # What memory runs short for is the feed's.
        self.net._buffer_manager.resize(MOST_STEPS, MOST_SAMPLES)

    def do(self, command, seed):
        """Run one command; return what can be compared."""
        bs.global_rnd.set_seed(seed)
        what, at = command["fault"]
        on_device = self.kind != "numpy"
        self.stepper = Stepper()
        self.count = 0
        iterator = source(command, seed, on_device)
        if what == "next raises" or command["sleeps"]:
            fails = at if what == "next raises" else None
            iterator = Disturbed(iterator, fails, command["sleeps"])
        self.valid = From(
            lambda: (
                minibatch(np.random.default_rng(k), (1 + k, 2), "f4") for k in (0, 1)
            )
        )
        self.prefetch = None
        how = command["how"]
        if self.buffered and how in ("prefetch", "lent"):
            self.prefetch = iterator = dbuf.Prefetch(iterator, command["depth"])
        if what in ("step raises", "interrupt"):
            self.stepper.before = lambda number: number == at and self.fail(what)
        error, logs = None, None
        try:
            if how in ("train", "prefetch"):
                logs = self.train(command, iterator)
            else:
                self.loop(command, iterator)
        except (Exception, KeyboardInterrupt) as caught:
            error = caught.with_traceback(None)
            error.__context__ = error.__cause__ = None
        if self.prefetch is not None:
            self.prefetch.close()
        stepper = self.stepper
        self.stepper = self.prefetch = self.valid = None
        parameters = self.net.get("parameters")
        return error, stepper.seen, stepper.losses, logs, parameters

    @staticmethod
    def fail(what):
        raise KeyboardInterrupt if what == "interrupt" else Planned("step")

    def after_update(self, command):
        """What a hook does, or the body of a loop."""
        (what, at), number = command["fault"], self.count
        self.count += 1
        if number != at:
            return
        if what == "stop":
            raise StopIteration
        if what == "handler" and command["how"] in ("train", "loop"):
            self.net.set_handler(make_handler(self.kind, self.driver))
        if what == "close" and self.prefetch is not None:
            self.prefetch.close()
        if what == "second feed":
            run = dbuf.run_network if self.buffered else plain_run_network
            for _ in run(self.net, self.valid(self.net.handler)):
                self.net.forward_pass()
                self.stepper.look()

    def train(self, command, iterator):
        buffered = self.buffered and command["how"] == "train"
        trainer = dbuf.Trainer(
            self.stepper,
            verbose=False,
            double_buffering=buffered,
            depth=command["depth"],
        )
        trainer.add_hook(bs.hooks.StopAfterEpoch(command["epochs"]))
        trainer.add_hook(Hook(lambda n: self.after_update(command)))
        named = {}
        what, at = command["fault"]
        if what == "monitor":
            named["valid"] = self.valid
            if self.buffered and at % 2:
                named["valid"] = dbuf.Prefetch(self.valid, command["depth"])
            timescale = "update" if at < 5 else "epoch"
            trainer.add_hook(
                bs.hooks.MonitorLoss("valid", name="watch", timescale=timescale)
            )
        try:
            trainer.train(self.net, iterator, **named)
        finally:
            if isinstance(named.get("valid"), dbuf.Prefetch):
                named["valid"].close()
        return trainer.logs

    def loop(self, command, iterator):
        lent = self.prefetch is not None
        run = dbuf.run_network if self.buffered and not lent else plain_run_network
        if command["sleeps"] and command["how"] == "lent":
            run = late_run_network
        self.stepper.start(self.net)
        for _ in range(command["epochs"]):
            for _ in run(self.net, iterator(self.net.handler)):
                self.stepper.run()
                try:
                    self.after_update(command)
                except StopIteration:
                    # What was fetched ahead may have drawn from the random state of
                    # the iterator, as it may have before an early stop of training.
                    return


def plain_run_network(net, iterator):
    return bs.training.utils.run_network(net, iterator)


def late_run_network(net, iterator):
    """Take each minibatch some time after it was lent, when more may be prepared."""
    for number, data in enumerate(iterator):
        time.sleep(5e-4)
        net.provide_external_data(data)
        yield number


# ------------------------------------------------------------------------- model


def spend(driver, entry):
    """Make a planned failure happen where it does not matter."""
    with contextlib.suppress(dbuf.CudaError):
        if entry == "cuMemAlloc":
            dbuf.mem_alloc(64)
        elif entry == "cuMemHostAlloc":
            dbuf.pagelocked_empty(64)
        else:
            dbuf.register_host_memory(on_pages(np.zeros(64, "f4")))


def same_arrays(a, b):
    return len(a) == len(b) and all(
        len(one) == len(other) and all(map(np.array_equal, one, other))
        for one, other in zip(a, b)
    )


class Model:
    def __init__(self, kind, driver):
        self.kind, self.driver = kind, driver
        self.begin()

    def begin(self):
        self.ours = Side(self.kind, self.driver, buffered=True)
        self.twin = Side(self.kind, self.driver, buffered=False)

    def do(self, command, seed):
        what, nth = command["fault"]
        fake, runs_short = self.driver.fake, what in ALLOCATIONS
        twin = self.twin.do(command, seed)
        if runs_short:
            made = fake.calls(what)
            fake.fail(what, nth)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            ours = self.ours.do(command, seed)
        gc.collect(0)
        if runs_short:
            while fake.calls(what) - made <= nth:
                spend(self.driver, what)
        assert workers() == []
        assert fake.current_context() == self.driver.context
        assert not any(fake.damage().values()), fake.damage()
        assert all(runs_short and w.category is dbuf.FeedWarning for w in said), [
            str(w.message) for w in said
        ]
        if runs_short and isinstance(ours[0], MemoryError):
            # Of the network's or the iterator's own memory: no feed can step down.
            event("memory of others ran short")
            seen = ours[1]
            assert same_arrays(seen, twin[1][: len(seen)])
            self.begin()
            return
        self.compare(ours, twin)

    def compare(self, ours, twin):
        error, seen, losses, logs, parameters = ours
        assert type(error) is type(twin[0]), (error, twin[0])
        if error is not None:
            event(type(error).__name__)
        if error is not None and not isinstance(error, AssertionError):
            assert str(error) == str(twin[0])
        assert same_arrays(seen, twin[1])
        assert losses == twin[2]
        assert np.array_equal(parameters, twin[4])
        if logs is not None:
            assert_same_logs(logs, twin[3])


@pytest.fixture
def strict(driver, kind, way, monkeypatch):
    """Everything may lie ready, is poisoned before it is filled; slots are counted."""
    monkeypatch.setattr(held_memory, "REGION_MIN_BYTES", 0)
    monkeypatch.setattr(held_memory, "DIRECT_COPY_MIN_BYTES", 64)
    monkeypatch.setattr(held_memory, "ROW_MIN_BYTES", 16)
    poison_back_buffers(monkeypatch)
    init, new_slot = DoubleBufferedInput.__init__, DoubleBufferedInput._new_slot

    def noting(self, handler, access, slots, *arguments):
        init(self, handler, access, slots, *arguments)
        self.most_slots = slots

    def counted(self):
        assert self._slots <= self.most_slots
        return new_slot(self)

    monkeypatch.setattr(DoubleBufferedInput, "__init__", noting)
    monkeypatch.setattr(DoubleBufferedInput, "_new_slot", counted)


# Left out: to explain a failure, which takes far longer than to find the shortest one.
@settings(
    on_one_handler,
    max_examples=max(1, EXAMPLES // 2),
    phases=[phase for phase in Phase if phase is not Phase.explain],
)
@given(
    commands=st.lists(commands, min_size=1, max_size=5),
    mode=st.sampled_from(["late", "random", "eager"]),
    seed=st.integers(0, 2**20),
)
def test_any_sequence_of_commands_is_brainstorms(
    commands, mode, seed, fake, kind, driver, way, strict
):
    gc.collect()
    before, theirs = live_objects(), fake.live()
    fake.mode(mode, seed)
    model = Model(kind, driver)
    for number, command in enumerate(commands):
        model.do(command, seed + number)
    del model
    gc.collect()
    assert live_objects() == before
    assert fake.live() == theirs


@pytest.mark.parametrize("depth", [1, 3])
def test_a_hand_over_that_does_not_wait_for_the_copy_is_found(
    depth, fake, driver, slot_way, monkeypatch
):
    hand_over = DeviceSlot.hand_over

    def too_early(self, fronts):
        copied, self._copied = self._copied, dbuf.Event()
        self._copied.record(self._access.compute_stream)
        try:
            hand_over(self, fronts)
        finally:
            self._copied = copied

    monkeypatch.setattr(DeviceSlot, "hand_over", too_early)
    command = {
        "how": "train",
        "source": "generator",
        "sizes": [(1, 2)] * 4,
        "dtype": "f4",
        "shuffle": False,
        "sleeps": False,
        "epochs": 1,
        "depth": depth,
        "fault": ("none", 0),
    }
    with pytest.raises(AssertionError, match="same_arrays") as caught:
        Model("device", driver).do(command, 0)
    del caught
