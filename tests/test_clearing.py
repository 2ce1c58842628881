"""Gradients and deltas are cleared in one operation, to what brainstorm's own leaves."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

import brainstorm_dbuf as dbuf
import brainstorm as bs
import parity
from brainstorm.structure.buffers import BufferManager
from brainstorm_dbuf.clearing import quick_clearing
from brainstorm_dbuf.resizing import quick_resizing
from networks import NETWORKS, SAMPLES, STEPS, minibatches
from parity import make_handler
from test_resizing import SIZES, assert_same, network, numbered, resize

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_left")]


def count_fills(net, monkeypatch):
    """Count the fills of a network's handler from now on."""
    sizes = []
    own = net.handler.fill

    def fill(mem, value):
        sizes.append(int(np.prod(mem.shape)))
        own(mem, value)

    monkeypatch.setattr(net.handler, "fill", fill, raising=False)
    return sizes


@pytest.mark.parametrize("name", NETWORKS)
def test_what_brainstorm_clears_is_cleared_and_nothing_else(
    name, kind, driver, monkeypatch
):
    """Also after a change of T or B, by brainstorm's own way or by ours."""
    quick = network(name, make_handler(kind, driver))
    plain = network(name, make_handler(kind, driver))
    with quick_clearing(quick):
        fills = count_fills(quick, monkeypatch)
        for number, size in enumerate(SIZES):
            with parity.skip_what_pycuda_cannot(kind):
                resize(plain, size)
                if number < 5:
                    resize(quick, size)
            if number >= 5:
                with quick_resizing(quick):
                    resize(quick, size)
            numbered(quick)
            numbered(plain)
            fills.clear()
            quick._buffer_manager.clear_backward_buffers()
            assert len(fills) == 1
            with parity.skip_what_pycuda_cannot(kind):
                plain._buffer_manager.clear_backward_buffers()
            assert_same(quick, plain)


def test_another_handler_in_between_is_seen(kind, driver):
    net = network("recurrent", make_handler(kind, driver))
    with quick_clearing(net):
        resize(net, (2, 3))
        net._buffer_manager.clear_backward_buffers()
        net.set_handler(make_handler(kind, driver))
        resize(net, (2, 3))
        numbered(net)
        net._buffer_manager.clear_backward_buffers()
        gradients = net.handler.get_numpy_copy(net.buffer.gradients)
        assert not gradients.any()


def test_afterwards_the_method_is_brainstorms_and_nothing_stays(kind, driver):
    net = network("recurrent", make_handler(kind, driver))
    manager = net._buffer_manager
    keys = set(vars(manager))
    with quick_clearing(net):
        quick = weakref.ref(manager.clear_backward_buffers)
        manager.clear_backward_buffers()
        with quick_clearing(net):
            assert manager.clear_backward_buffers is quick()
        assert manager.clear_backward_buffers is quick()
    assert quick() is None and set(vars(manager)) == keys


def test_somebody_elses_method_stays():
    net = network("recurrent", make_handler("numpy", None))
    manager = net._buffer_manager
    called = []
    manager.clear_backward_buffers = theirs = lambda: called.append(1)
    with quick_clearing(net):
        manager.clear_backward_buffers()
    assert called == [1] and manager.clear_backward_buffers is theirs


def test_hubs_in_another_order_are_cleared_one_by_one(monkeypatch):
    net = network("recurrent", make_handler("numpy", None))
    net._buffer_manager.hubs.reverse()
    with quick_clearing(net):
        own = BufferManager.clear_backward_buffers
        assert net._buffer_manager.clear_backward_buffers.__func__ is own
    net._buffer_manager.hubs.reverse()


@pytest.mark.parametrize("double_buffering", [True, False])
def test_an_update_clears_once_where_double_buffering_is_on(
    double_buffering, kind, driver, monkeypatch
):
    name = "mlp with dropout"
    net = network(name, make_handler(kind, driver))
    hubs = [hub for hub in net._buffer_manager.hubs if hub.is_backward_only]
    assert len(hubs) > 1
    fills = count_fills(net, monkeypatch)
    stepper = bs.training.SgdStepper(0.1)
    trainer = dbuf.Trainer(stepper, verbose=False, double_buffering=double_buffering)
    trainer.add_hook(bs.hooks.StopAfterEpoch(3))
    trainer.train(net, minibatches(name, np.random.default_rng(0), size=SAMPLES))
    whole = sum(int(np.prod(hub.get_shape(STEPS, SAMPLES))) for hub in hubs)
    assert fills.count(whole) == (3 if double_buffering else 0)
    monkeypatch.undo()
