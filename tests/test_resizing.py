"""A quick change of T or B leaves the network as brainstorm's own leaves it."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import brainstorm_dbuf as dbuf
import brainstorm as bs
from brainstorm.structure.buffer_views import BufferView
from brainstorm_dbuf import resizing
from brainstorm_dbuf.resizing import quick_resizing
from networks import NETWORKS, data_for, minibatches
from parity import SEED, make_handler

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_left")]

# Growing, shrinking, coming back, and nothing at all.
SIZES = [(3, 4), (2, 4), (3, 4), (1, 1), (5, 7), (2, 4), (3, 4), (0, 0), (5, 7), (1, 9)]


def network(name, handler):
    bs.global_rnd.set_seed(SEED)
    net = NETWORKS[name]()
    net.set_handler(handler)
    return net


def numbered(net):
    """Set every element of the flat buffer to a number of its own."""
    manager = net._buffer_manager
    numbers = np.arange(manager.size, dtype=np.float32)
    manager.handler.set_from_numpy(manager.full_buffer, numbers)


def leaves(view, path=""):
    for name, child in view.items():
        if isinstance(child, BufferView):
            yield from leaves(child, f"{path}{name}.")
        else:
            yield path + name, child
    if view._full_buffer is not None:
        yield path + "full", view._full_buffer


def full_nodes(net):
    """The nodes of the views; brainstorm makes those without children anew each time."""
    return [node for node in resizing._nodes(net.buffer) if len(node)]


def assert_same(quick, plain):
    copied = quick._buffer_manager.handler.get_numpy_copy
    expected = plain._buffer_manager.handler.get_numpy_copy
    theirs = dict(leaves(plain.buffer))
    ours = dict(leaves(quick.buffer))
    assert ours.keys() == theirs.keys()
    for path, array in ours.items():
        np.testing.assert_array_equal(copied(array), expected(theirs[path]), path)
    for ours, theirs in zip(quick._buffer_manager.buffers, plain._buffer_manager.buffers):
        np.testing.assert_array_equal(copied(ours), expected(theirs))
    manager, other = quick._buffer_manager, plain._buffer_manager
    assert (manager.time_size, manager.batch_size, manager.size) == (
        other.time_size,
        other.batch_size,
        other.size,
    )


def resize(net, size):
    net.buffer = net._buffer_manager.resize(*size)


@pytest.mark.parametrize("name", NETWORKS)
def test_all_arrays_are_cut_as_brainstorm_cuts_them(name, kind, driver):
    quick = network(name, make_handler(kind, driver))
    plain = network(name, make_handler(kind, driver))
    nodes = full_nodes(quick)
    with quick_resizing(quick):
        for size in SIZES:
            resize(quick, size)
            resize(plain, size)
            assert_same(quick, plain)
            numbered(quick)
            numbered(plain)
            assert_same(quick, plain)
    assert all(a is b for a, b in zip(nodes, full_nodes(quick)))


def test_nothing_is_sent_to_the_host_where_the_buffer_stays(kind, driver, monkeypatch):
    handler = make_handler(kind, driver)
    net = network("recurrent", handler)
    resize(net, (5, 7))
    with quick_resizing(net), monkeypatch.context() as patch:
        for name in ("get_numpy_copy", "set_from_numpy"):
            patch.setattr(handler, name, None, raising=False)
        for size in [(2, 4), (5, 7), (2, 4), (1, 1)]:
            resize(net, size)
    plain = network("recurrent", handler)
    resize(plain, (5, 7))
    called = []
    with monkeypatch.context() as patch:
        own = handler.get_numpy_copy
        patch.setattr(
            handler,
            "get_numpy_copy",
            lambda a: called.append(a) or own(a),
            raising=False,
        )
        resize(plain, (2, 4))
    assert len(called) == 1  # as brainstorm does


def test_training_with_ragged_minibatches_sends_no_parameters(kind, driver, monkeypatch):
    handler = make_handler(kind, driver)
    net = network("lstm with a mask", handler)
    trainer = dbuf.Trainer(bs.training.SgdStepper(0.01), verbose=False)
    trainer.add_hook(bs.hooks.StopAfterEpoch(1))
    rnd = np.random.default_rng(0)
    data = data_for("lstm with a mask", rnd)
    net.provide_external_data(data)  # the largest there is
    sizes = []
    sent = []
    own = handler.get_numpy_copy

    def seen(array):
        sent.append(array.shape)
        return own(array)

    class Look(bs.hooks.Hook):
        def __call__(self, *args, **kwargs):
            manager = net._buffer_manager
            sizes.append((manager.time_size, manager.batch_size))

    trainer.add_hook(Look("look", "update", 1))
    monkeypatch.setattr(handler, "get_numpy_copy", seen, raising=False)
    trainer.train(net, minibatches("lstm with a mask", rnd))
    assert len(set(sizes)) > 1
    parameters = net.buffer.parameters.shape
    assert parameters not in sent
    monkeypatch.undo()
    del trainer.hooks["look"]


def test_after_training_brainstorms_own_method_is_back(kind, driver):
    net = network("recurrent", make_handler(kind, driver))
    trainer = dbuf.Trainer(bs.training.SgdStepper(0.01), verbose=False)
    trainer.add_hook(bs.hooks.StopAfterEpoch(1))

    class Fails(bs.hooks.Hook):
        def __call__(self, *args, **kwargs):
            assert "resize" in vars(net._buffer_manager)
            raise OSError("gone")

    trainer.train(net, minibatches("recurrent", np.random.default_rng(0)))
    assert "resize" not in vars(net._buffer_manager)
    trainer.add_hook(Fails("fails", "update", 1))
    with pytest.raises(OSError):
        trainer.train(net, minibatches("recurrent", np.random.default_rng(0)))
    assert "resize" not in vars(net._buffer_manager)
    for _ in dbuf.run_network(net, minibatches("recurrent", np.random.default_rng(0))()):
        assert "resize" in vars(net._buffer_manager)
    assert "resize" not in vars(net._buffer_manager)
    trainer.hooks.clear()


def test_one_within_another_changes_nothing(kind, driver):
    net = network("recurrent", make_handler(kind, driver))
    with quick_resizing(net):
        method = net._buffer_manager.resize
        with quick_resizing(net):
            assert net._buffer_manager.resize is method
        assert net._buffer_manager.resize is method
        del method


def test_another_handler_in_between_is_cut_anew(kind, driver):
    quick = network("recurrent", make_handler(kind, driver))
    plain = network("recurrent", make_handler(kind, driver))
    with quick_resizing(quick):
        for net in (quick, plain):
            resize(net, (2, 3))
            resize(net, (4, 5))
            net.set_handler(make_handler("numpy", driver))
            resize(net, (2, 3))
            numbered(net)
            resize(net, (2, 2))
        assert_same(quick, plain)


def test_sizes_that_were_not_used_for_long_are_let_go(monkeypatch):
    monkeypatch.setattr(resizing, "SIZES_KEPT", 3)
    net = network("recurrent", make_handler("numpy", None))
    with quick_resizing(net):
        resize(net, (9, 9))
        for batch in (1, 2, 3, 1, 4):
            resize(net, (2, batch))
        cuts = net._buffer_manager.resize._cuts
        assert list(cuts) == [(2, 3), (2, 1), (2, 4)]
        del cuts
    gc.collect()
