"""The interpreter's switch interval is short while a worker runs, and put back."""

from __future__ import annotations

import sys
import threading

import pytest

from brainstorm_dbuf import switching
from networks import NETWORKS, minibatches
from parity import force_worker, make_handler, train

import brainstorm as bs
import numpy as np


ONE, OTHER = threading.Thread(), threading.Thread()


@pytest.fixture
def interval():
    before = sys.getswitchinterval()
    yield before
    sys.setswitchinterval(before)


def test_the_interval_is_short_during_training_and_put_back(
    driver, monkeypatch, interval
):
    force_worker(monkeypatch)
    seen = []

    class Look(bs.hooks.Hook):
        def __init__(self):
            super().__init__(timescale="update")

        def __call__(self, epoch_nr, update_nr, net, stepper, logs):
            seen.append(sys.getswitchinterval())

    name = "mlp with dropout"
    train(
        NETWORKS[name],
        lambda: minibatches(name, np.random.default_rng(0)),
        make_handler("numpy", driver),
        True,
        hooks=[Look],
    )
    assert min(seen) == pytest.approx(switching.INTERVAL_SECONDS)
    assert sys.getswitchinterval() == interval


def test_a_shorter_interval_of_the_users_is_kept(interval):
    sys.setswitchinterval(2e-5)
    switching.begin(ONE)
    assert sys.getswitchinterval() == pytest.approx(2e-5)
    switching.end(ONE)
    assert sys.getswitchinterval() == pytest.approx(2e-5)


def test_the_last_of_several_workers_puts_the_interval_back(interval):
    switching.begin(ONE)
    switching.begin(OTHER)
    switching.end(ONE)
    assert sys.getswitchinterval() == pytest.approx(switching.INTERVAL_SECONDS)
    switching.end(OTHER)
    assert sys.getswitchinterval() == interval


def test_a_worker_that_was_interrupted_as_it_started_counts_for_nothing(interval):
    switching.end(ONE)
    switching.begin(OTHER)
    switching.end(ONE)
    assert sys.getswitchinterval() == pytest.approx(switching.INTERVAL_SECONDS)
    switching.end(OTHER)
    assert sys.getswitchinterval() == interval
