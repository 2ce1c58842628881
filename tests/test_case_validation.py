"""Validation in mid-epoch: the minibatch fetched ahead survives it (29)."""

from __future__ import annotations

import numpy as np
import pytest

import brainstorm as bs
from brainstorm.data_iterators import Minibatches
from coded import From, Hook, Job, batch, coded, codes, the_value, workers
from parity import assert_same, make_handler, poison_back_buffers

pytestmark = [pytest.mark.timeout(10), pytest.mark.usefixtures("nothing_left")]

Monitor = bs.hooks.MonitorScores


class Mean(bs.scorers.MeanSquaredError):
    pass


def monitor(iter_name, scorers=None):
    scorers = [Mean("Out.outputs.default")] if scorers is None else scorers
    return Monitor(iter_name, scorers, name=iter_name, timescale="update", interval=1)


def validation(*shapes):
    """Return an iterator over minibatches coded 500+ with these (steps, samples)."""
    batches = [batch(500 + k, *shape) for k, shape in enumerate(shapes)]
    return From(lambda: iter(batches), len(batches))


def both(kind, driver, monkeypatch, make_hooks, **named):
    """Train on six coded minibatches (1, 4, 3), plain and double-buffered."""
    poison_back_buffers(monkeypatch)
    results = []
    for double_buffering in (False, True):
        job = Job(kind, driver, double_buffering, hooks=make_hooks())
        job.train(coded(6, samples=4), **named)
        assert job.seen == codes(0, 1, 2, 3, 4, 5)
        results.append(job.result())
    assert_same(*results)
    return results[1]


SHAPES = {
    "more samples, then one": [(1, 7), (1, 1)],
    "more steps": [(5, 4)],
    "more of both, then less": [(4, 9), (1, 1), (2, 6)],
    "the shape of training": [(1, 4), (1, 4)],
}


@pytest.mark.parametrize("name", SHAPES)
def test_validation_at_every_update_changes_nothing(
    name, kind, driver, way, monkeypatch
):
    if driver.fake is not None:
        driver.fake.mode("random", 7)
    run = both(
        kind,
        driver,
        monkeypatch,
        lambda: [monitor("valid")],
        valid=validation(*SHAPES[name]),
    )
    # Once before the first update, once after each.
    assert len(run.logs["valid"]["total_loss"]) == 7
    assert run.stats.batches == 6
    if way == "worker":
        assert run.stats.prefetched == 5


def test_evaluations_may_be_nested(kind, driver, way, monkeypatch):
    inner = validation((2, 5), (1, 1))

    class Nesting(Mean):
        """Evaluates something else while an evaluation is on its way."""

        net = None

        def __call__(self, true_labels, predicted, mask=None):
            # The outer minibatch has been read; the next one is handed over later.
            result = bs.tools.evaluate(self.net, inner)
            return super().__call__(true_labels, predicted, mask) + sum(result.values())

    def make_hooks():
        nesting = Nesting("Out.outputs.default")
        hook = monitor("valid", [nesting])
        start = hook.start

        def starting(net, *args):
            nesting.net = net
            start(net, *args)

        hook.start = starting
        return [hook]

    both(kind, driver, monkeypatch, make_hooks, valid=validation((1, 7), (3, 2)))


def test_hooks_may_look_at_what_was_trained_before_and_after_a_validation(
    kind, driver, way, monkeypatch
):
    """The front stays put until the hooks have run."""
    for double_buffering in (False, True):
        looks = []
        job = Job(kind, driver, double_buffering)
        job.trainer.add_hook(
            Hook(lambda n: looks.append(the_value(job.net.get_input("default"))))
        )
        job.trainer.add_hook(monitor("valid"))
        job.trainer.add_hook(
            Hook(lambda n: looks.append(the_value(job.net.get_input("default"))), "end")
        )
        job.train(coded(3), valid=validation((1, 7)))
        assert looks == [0, 500, 1, 500, 2, 500]


@pytest.mark.parametrize("at", [0, 1])
def test_a_validation_iterator_that_raises_ends_training_with_that_error(
    at, kind, driver, way, capsys
):
    error = OSError("no validation set")

    def make_pass():
        for k in range(at):
            yield batch(500 + k, 1, 7)
        raise error

    calls = []

    class Later(Monitor):
        def __call__(self, **kwargs):
            calls.append(None)
            return super().__call__(**kwargs) if len(calls) > 3 else None

    hook = Later("valid", [], name="valid", timescale="update")
    job = Job(kind, driver, hooks=[hook])
    with pytest.raises(OSError) as caught:
        job.train(coded(6), valid=From(make_pass))
    assert caught.value is error
    assert job.seen == codes(0, 1, 2)
    assert workers() == []
    assert "valid" in capsys.readouterr().err
    del caught
    job.train_again()


def test_a_hook_may_train_another_network_meanwhile(kind, driver, way):
    inner = []

    def train_another(update_nr):
        job = Job(kind, driver)
        job.train(coded(3, samples=update_nr))
        inner.append(job.seen)

    job = Job(kind, driver, hooks=[Hook(train_another)])
    assert job.train(coded(4)).seen == codes(0, 1, 2, 3)
    assert inner == [codes(0, 1, 2)] * 4


def test_a_hook_may_train_the_same_network_meanwhile(kind, driver, way):
    """Nothing says that it may not."""
    for double_buffering in (False, True):
        seen = []

        def also_train(update_nr):
            other = Job(kind, driver, double_buffering, net=lambda: job.net)
            other.train(coded(2, samples=5))
            seen.append(other.seen)

        job = Job(kind, driver, double_buffering)
        job.trainer.add_hook(Hook(also_train))
        job.train(coded(3))
        assert seen == [codes(0, 1)] * 3
        assert job.seen == codes(0, 1, 2)


def test_a_hook_may_give_the_network_another_kind_of_handler(kind, driver, way):
    if kind != "device":
        pytest.skip("from the device to NumPy")

    def change(update_nr):
        if update_nr == 2:
            job.net.set_handler(make_handler("numpy", driver))
            job.stepper.start(job.net)

    job = Job(kind, driver, hooks=[Hook(change)])
    assert job.train(coded(5)).seen == codes(0, 1, 2, 3, 4)


def test_a_monitor_of_the_iterator_that_trains_changes_nothing(
    kind, driver, way, monkeypatch
):
    """Minibatches draws at the start of a pass: each pass has its own."""

    def run(double_buffering):
        data = {
            "default": np.arange(12, dtype=float).repeat(3).reshape(1, 12, 3),
            "targets": 1000 + np.arange(12, dtype=float).repeat(3).reshape(1, 12, 3),
        }
        iterator = Minibatches(1, shuffle=True, **data)
        iterator.rnd.set_seed(3)
        hooks = [monitor("training_data_iter")]
        job = Job(kind, driver, double_buffering, epochs=2, hooks=hooks)
        job.train(iterator)
        assert sorted(job.seen) == sorted(codes(*range(12)) * 2)
        return job.result()

    plain, buffered = run(False), run(True)
    assert_same(plain, buffered)
    assert buffered.stats.fallbacks == []
