"""Prefetch goes wherever brainstorm takes a data iterator."""

from __future__ import annotations

import copy
import gc
import pickle
import threading

import numpy as np
import pytest

import brainstorm_dbuf as dbuf
import brainstorm as bs
from brainstorm.data_iterators import AddGaussianNoise, DataIterator, Minibatches
from brainstorm.describable import create_from_description, get_description
from coded import FEATURES, From, Job, batch, coded, codes, the_value, workers
from conftest import HANDLERS, why_no_pycuda
from networks import NETWORKS, data_for, minibatches
from parity import (
    SEED,
    assert_same,
    force_worker,
    make_handler,
    poison_back_buffers,
    train,
)

pytestmark = [pytest.mark.timeout(10), pytest.mark.usefixtures("nothing_left")]


def values(handler, data):
    return {name: handler.get_numpy_copy(array) for name, array in data.items()}


# --------------------------------------------------------- with brainstorm's tools


@pytest.mark.parametrize("name", NETWORKS)
def test_brainstorms_trainer_trains_the_same(name, kind, driver, way, monkeypatch):
    if kind == "pycuda" and name in ("two inputs", "an input beside a layer"):
        pytest.skip("PyCUDA cannot reshape a slice of features: brainstorm's own limit")
    poison_back_buffers(monkeypatch)
    runs = []
    for wrap in (lambda iterator: iterator, dbuf.Prefetch):
        if driver.fake is not None:
            driver.fake.mode("random", 3)
        runs.append(
            train(
                NETWORKS[name],
                lambda: wrap(minibatches(name, np.random.default_rng(3))),
                make_handler(kind, driver),
                double_buffering=False,
            )
        )
    assert_same(*runs)


@pytest.mark.parametrize("depth", [1, 3])
def test_a_monitor_and_the_training_may_both_prefetch(
    depth, kind, driver, way, monkeypatch
):
    poison_back_buffers(monkeypatch)
    name = "lstm with a mask"

    def monitor():
        return bs.hooks.MonitorScores(
            "valid",
            [bs.scorers.Accuracy("Output.outputs.predictions")],
            timescale="update",
        )

    runs = []
    for wrap in (lambda it: it, lambda it: dbuf.Prefetch(it, depth)):
        for double_buffering in (False, True):
            rnd = np.random.default_rng(8)
            runs.append(
                train(
                    NETWORKS[name],
                    lambda: wrap(minibatches(name, rnd)),
                    make_handler(kind, driver),
                    double_buffering,
                    epochs=1,
                    hooks=[monitor],
                    named=lambda: {"valid": wrap(minibatches(name, rnd, 7, steps=7))},
                )
            )
    for run in runs[1:]:
        assert_same(runs[0], run)


def evaluated(kind, driver, wrap):
    bs.global_rnd.set_seed(SEED)
    net = NETWORKS["lstm with a mask"]()
    net.set_handler(make_handler(kind, driver))
    rnd = np.random.default_rng(5)
    data = data_for("lstm with a mask", rnd)
    iterator = wrap(Minibatches(4, shuffle=False, **data))
    scorers = [bs.scorers.Accuracy("Output.outputs.predictions", mask_name="mask")]
    return [
        bs.tools.evaluate(net, iterator, scorers),
        bs.tools.evaluate(net, iterator),
    ], net


def test_evaluate_gives_the_same_scores(kind, driver, way, monkeypatch):
    poison_back_buffers(monkeypatch)
    plain, _ = evaluated(kind, driver, lambda iterator: iterator)
    prefetched, _ = evaluated(kind, driver, dbuf.Prefetch)
    assert plain == prefetched
    assert set(plain[0]) == {"Accuracy", "total_loss"}


@pytest.mark.parametrize("inputs", [("default", "targets"), ("default",)])
def test_extract_gives_the_same_buffers(inputs, kind, driver, way, monkeypatch):
    """Inputs that are not given keep what they had."""
    poison_back_buffers(monkeypatch)
    rnd = np.random.default_rng(5)
    data = data_for("recurrent", rnd)
    given = {name: data[name] for name in inputs}
    names = ["Output.outputs.predictions", "Input.outputs.targets"]
    results = []
    for wrap in (lambda iterator: iterator, dbuf.Prefetch):
        bs.global_rnd.set_seed(SEED)
        net = NETWORKS["recurrent"]()
        net.set_handler(make_handler(kind, driver))
        net.provide_external_data({n: a[:, :4] for n, a in data.items()})
        iterator = wrap(Minibatches(4, shuffle=False, **given))
        results.append(bs.tools.extract(net, iterator, names))
    plain, prefetched = results
    for name in names:
        assert np.array_equal(plain[name], prefetched[name])
        assert plain[name].shape[:2] == data["default"].shape[:2]


def test_iterators_go_around_and_inside_it(kind, driver, way):
    """Where NumPy arrays are wanted, on a NumpyHandler, it gives those."""
    if kind != "numpy":
        pytest.skip("brainstorm's own iterators take NumPy arrays")
    results = []
    for wrap in (lambda iterator: iterator, dbuf.Prefetch):
        data = data_for("recurrent", np.random.default_rng(5))
        data = {name: array.astype(np.float32) for name, array in data.items()}
        inner = wrap(Minibatches(4, **data))
        outer = AddGaussianNoise(inner, {"default": 0.1})
        (inner.iter if wrap is dbuf.Prefetch else inner).rnd.set_seed(1)
        outer.rnd.set_seed(2)
        handler = make_handler(kind, driver)
        results.append([d["default"].tolist() for d in wrap(outer)(handler)])
    for plain, prefetched in zip(*results):
        assert np.allclose(plain, prefetched, rtol=1e-6, atol=1e-6)


def test_a_prefetch_of_a_prefetch_is_right(kind, driver, way):
    iterator = dbuf.Prefetch(dbuf.Prefetch(coded(5)))
    job = Job(kind, driver, double_buffering=False, epochs=2).train(iterator)
    assert job.seen == codes(*range(5)) * 2
    iterator.close()
    iterator.iter.close()


# -------------------------------------------------------------- what it hands out


def test_its_arrays_are_the_handlers_own_of_its_dtype(kind, driver, way):
    handler = make_handler(kind, driver)
    for data in dbuf.Prefetch(coded(3, dtype=np.float64))(handler):
        assert type(data) is dict
        assert list(data) == ["default", "targets"]
        for array in data.values():
            assert isinstance(array, handler.array_type)
            assert array.shape == (1, 2, FEATURES)
            # The trainer's own thread may hand on what it fetched on the host.
            if kind != "numpy" or way == "worker" and data["default"].flat[0]:
                assert array.dtype == np.float32


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_held_minibatches_stay_right(depth, kind, driver, way, monkeypatch):
    poison_back_buffers(monkeypatch)
    iterator = dbuf.Prefetch(coded(9), depth)
    for mode in ("late", "random", "eager"):
        if driver.fake is not None:
            driver.fake.mode(mode, depth)
        handler = make_handler(kind, driver)
        held = list(iterator(handler))
        assert len(held) == 9
        for k, data in enumerate(held):
            for name, array in values(handler, data).items():
                assert the_value(array) == k + 1000 * (name == "targets")
        del held, data, array


def test_single_arrays_that_are_held_stay_right(kind, driver, way, monkeypatch):
    """Every second minibatch's targets are kept, also across passes and the end."""
    poison_back_buffers(monkeypatch)
    handler = make_handler(kind, driver)
    iterator = dbuf.Prefetch(coded(6))
    held = []
    for _ in range(3):
        for k, data in enumerate(iterator(handler)):
            if k % 2:
                held.append((k + 1000, data["targets"]))
            del data
    iterator.close()
    del iterator
    assert len(held) == 9
    for expected, array in held:
        assert the_value(handler.get_numpy_copy(array)) == expected
    held.clear()


def test_back_buffers_are_kept_from_pass_to_pass_until_the_end(fake, way):
    handler = make_handler("device", type("", (), {"fake": fake, "context": None}))
    iterator = dbuf.Prefetch(coded(4))
    for _ in range(2):
        for data in iterator(handler):
            del data
    allocations = fake.calls("cuMemAlloc"), fake.calls("cuMemHostAlloc")
    for _ in range(3):
        for data in iterator(handler):
            del data
    assert (fake.calls("cuMemAlloc"), fake.calls("cuMemHostAlloc")) == allocations
    assert fake.live()["device_bytes"] and fake.live()["pinned_bytes"]
    iterator.close()
    assert not fake.live()["device_bytes"] and not fake.live()["pinned_bytes"]
    iterator.close()
    with iterator:
        kept = list(iterator(handler))
        assert fake.live()["device_bytes"]
        del kept
    assert not fake.live()["device_bytes"]


def test_an_abandoned_pass_ends_at_once_where_memory_left_one_back_buffer(
    fake, monkeypatch
):
    """The worker waits for the slot that is lent; leaving must not wait for both."""
    force_worker(monkeypatch)
    handler = make_handler("device", type("", (), {"fake": fake, "context": None}))
    fake.set_limits(pinned_bytes=600)
    iterator = dbuf.Prefetch(coded(5))
    with pytest.warns(dbuf.FeedWarning, match="ran short"):
        loop = iterator(handler)
        first, second = next(loop), next(loop)
        stopping = threading.Timer(5, lambda: None)
        stopping.start()
        loop.close()
        assert stopping.is_alive()
        stopping.cancel()
        stopping.join()
    assert workers() == []
    del first, second, loop


def test_the_network_takes_what_was_lent_brainstorms_way(kind, driver, way):
    job = Job(kind, driver)
    for k, data in enumerate(dbuf.Prefetch(coded(4))(job.net.handler)):
        job.net.provide_external_data(data)
        del data
        assert the_value(job.net.get_input("default")) == k
        assert the_value(job.net.get_input("targets")) == k + 1000


def test_without_a_handler_minibatches_come_as_they_are():
    """So DataIterators are called in the tests and by users who look at their data."""
    with pytest.warns(dbuf.FeedWarning, match="NoneType"):
        seen = [int(d["default"].flat[0]) for d in dbuf.Prefetch(coded(3))()]
    assert seen == [0, 1, 2]


# ------------------------------------------------------- several passes at one time


def test_two_passes_over_one_prefetch_do_not_mix(kind, driver, way):
    handler = make_handler(kind, driver)
    iterator = dbuf.Prefetch(coded(4))
    seen = []
    for outer in iterator(handler):
        for inner in iterator(handler):
            pair = [handler.get_numpy_copy(d["default"]) for d in (outer, inner)]
            seen.append(tuple(map(the_value, pair)))
    assert seen == [(i, j) for i in range(4) for j in range(4)]
    del outer, inner


def test_another_handler_gets_arrays_of_its_own(driver, way):
    if "pycuda" in HANDLERS and why_no_pycuda() is not None:
        pytest.skip(why_no_pycuda())
    iterator = dbuf.Prefetch(coded(3))
    for kind in HANDLERS * 2:
        handler = make_handler(kind, driver)
        for k, data in enumerate(iterator(handler)):
            assert isinstance(data["default"], handler.array_type)
            assert the_value(handler.get_numpy_copy(data["default"])) == k
        del data


# ----------------------------------------------------- random draws, shapes, copies


def test_it_draws_nothing_from_brainstorms_generator():
    bs.global_rnd.set_seed(1)
    before = bs.global_rnd.get_state()
    inner = coded(1)
    drawn = bs.global_rnd.get_state()
    assert drawn[2] != before[2]  # an ordinary iterator draws its seed
    dbuf.Prefetch(inner)
    for now, then in zip(bs.global_rnd.get_state(), drawn):
        assert np.array_equal(now, then)


def test_it_has_the_shapes_and_the_length_of_what_it_wraps():
    inner = Minibatches(2, default=np.zeros((1, 5, 3)), targets=np.zeros((1, 5, 1)))
    iterator = dbuf.Prefetch(inner)
    assert isinstance(iterator, DataIterator)
    assert iterator.data_shapes == inner.data_shapes
    assert iterator.length == 3
    assert iterator.iter is inner


class Numbers(DataIterator):
    """Describable, as it has nothing but numbers."""

    def __init__(self, count):
        super().__init__({"default": [1, 2, 3], "targets": [1, 2, 3]}, count)

    def __call__(self, handler=None):
        return (batch(k) for k in range(self.length))


def test_a_description_keeps_the_iterator_and_the_depth(kind, driver, way):
    iterator = dbuf.Prefetch(Numbers(4), depth=3)
    list(iterator(make_handler(kind, driver)))
    description = get_description(iterator)
    again = create_from_description(description)
    assert type(again) is dbuf.Prefetch
    assert type(again.iter) is Numbers
    assert (again.depth, again.length) == (3, 4)
    assert again.stats == dbuf.FeedStats()
    assert get_description(again) == description
    assert Job(kind, driver).train(again).seen == codes(0, 1, 2, 3)
    iterator.close()


@pytest.mark.parametrize(
    "how", [lambda it: pickle.loads(pickle.dumps(it)), copy.copy, copy.deepcopy]
)
def test_a_copy_has_back_buffers_of_its_own(how, kind, driver, way):
    handler = make_handler(kind, driver)
    iterator = dbuf.Prefetch(Numbers(4), depth=3)
    list(iterator(handler))
    loop = iterator(handler)
    next(loop)
    again = how(iterator)
    assert again.depth == 3 and again.stats == dbuf.FeedStats()
    seen = [the_value(handler.get_numpy_copy(d["default"])) for d in again(handler)]
    assert seen == [0, 1, 2, 3]
    assert len(list(loop)) == 3


@pytest.mark.parametrize("how", [list, tuple])
def test_an_empty_iterator_prefetches_nothing(how, kind, driver, way):
    assert not how(dbuf.Prefetch(coded(0))(make_handler(kind, driver)))
    assert workers() == []


@pytest.mark.parametrize("place", ["call", "first", "later"])
def test_an_error_of_the_iterator_comes_out_of_the_loop(place, kind, driver, way):
    error = OSError("gone")

    def make_pass():
        if place == "call":
            raise error
        return generator()

    def generator():
        if place == "later":
            yield from (batch(k) for k in range(3))
        raise error

    handler = make_handler(kind, driver)
    streams = dbuf.live_objects()["streams"]
    iterator = dbuf.Prefetch(From(make_pass))
    seen = []
    with pytest.raises(OSError) as caught:
        for data in iterator(handler):
            seen.append(the_value(handler.get_numpy_copy(data["default"])))
    assert caught.value is error
    # Nor does the error keep anything for as long as it is held.
    assert dbuf.live_objects()["streams"] == streams
    assert seen == ([0, 1, 2] if place == "later" else [])
    assert workers() == []


def test_an_error_in_the_loop_leaves_no_worker_once_it_is_dropped(kind, driver, way):
    handler = make_handler(kind, driver)

    def loop():
        for k, data in enumerate(dbuf.Prefetch(coded(9))(handler)):
            if k == 3:
                raise LookupError(k)

    with pytest.raises(LookupError):
        loop()
    # As long as somebody holds the traceback, it holds the half-used pass.
    gc.collect()
    assert workers() == []


class Reused:
    """Iterators over minibatches in one pair of arrays, which say when `next` comes."""

    def __init__(self):
        self.asked = threading.Event()

    def __call__(self):
        arrays = batch(0)
        for k in range(3):
            arrays["default"][...], arrays["targets"][...] = k, k + 1000
            yield arrays
            arrays["default"].fill(-1)
            self.asked.set()


def test_the_minibatch_before_the_worker_starts_is_safe_from_it(
    kind, driver, monkeypatch
):
    force_worker(monkeypatch)
    handler = make_handler(kind, driver)
    reused = Reused()
    with dbuf.Prefetch(From(reused)) as iterator:
        for k, data in enumerate(iterator(handler)):
            reused.asked.wait(0.1)
            assert the_value(handler.get_numpy_copy(data["default"])) == k
            reused.asked.clear()
            del data
