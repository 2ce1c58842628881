"""A quick change of T or B leaves the network as brainstorm's own leaves it."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import brainstorm_dbuf as dbuf
import brainstorm as bs
from brainstorm.data_iterators import DataIterator
from brainstorm.describable import create_from_description, get_description
from brainstorm.structure.buffer_views import BufferView
from brainstorm.structure.buffers import BufferManager
from brainstorm_dbuf import resizing
from brainstorm_dbuf.resizing import quick_resizing
from networks import NETWORKS, data_for, minibatches
import parity
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


def nodes(view):
    yield view
    for child in view:
        if isinstance(child, BufferView):
            yield from nodes(child)


def copies_over_the_link(fake):
    """How many copies between host and device there were, of any kind."""
    return sum(
        count
        for name, count in fake.calls().items()
        if "HtoD" in name or "DtoH" in name or name.startswith("cuMemcpy2D")
    )


def assert_same(quick, plain):
    copied = quick._buffer_manager.handler.get_numpy_copy
    expected = plain._buffer_manager.handler.get_numpy_copy
    theirs = dict(leaves(plain.buffer))
    ours = dict(leaves(quick.buffer))
    assert ours.keys() == theirs.keys()
    for path, array in ours.items():
        np.testing.assert_array_equal(copied(array), expected(theirs[path]), path)
    for ours, theirs in zip(
        quick._buffer_manager.buffers, plain._buffer_manager.buffers
    ):
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
    before = list(nodes(quick.buffer))
    with quick_resizing(quick):
        for size in SIZES:
            with parity.skip_what_pycuda_cannot(kind):
                resize(plain, size)
            resize(quick, size)
            assert_same(quick, plain)
            numbered(quick)
            numbered(plain)
            assert_same(quick, plain)
    after = list(nodes(quick.buffer))
    assert all(a is b for a, b in zip(before, after, strict=True))


def test_a_network_without_parameters(kind, driver, monkeypatch):
    def make():
        inp = bs.layers.Input(
            out_shapes={"default": ("T", "B", 2), "targets": ("T", "B", 2)}
        )
        error = bs.layers.SquaredError(name="Error")
        inp - "default" >> "default" - error
        inp - "targets" >> "targets" - error
        error - "loss" >> bs.layers.Loss()
        net = bs.Network.from_layer(inp)
        net.set_handler(make_handler(kind, driver))
        return net

    quick, plain = make(), make()
    # PyCUDA copies no empty arrays.
    monkeypatch.setattr(quick.handler, "copy_to", None, raising=False)
    with quick_resizing(quick):
        for size in SIZES:
            resize(quick, size)
            with parity.skip_what_pycuda_cannot(kind):
                resize(plain, size)
            numbered(quick)
            numbered(plain)
            assert_same(quick, plain)


@pytest.mark.parametrize("what", ["parameters", "gradients"])
def test_a_node_that_has_a_buffer_of_its_own(what, kind, driver):
    # brainstorm provides for them; the layouts that it makes have none.
    def make():
        net = network("recurrent", make_handler("numpy", driver))
        layout = net._buffer_manager.layout
        layer = next(n for n in net.layers if len(net.buffer[n].parameters))
        for key in ("@hub", "@slice", "@shape"):
            layout[layer][what][key] = layout[what][key]
        net.set_handler(make_handler(kind, driver))
        assert net.buffer[layer][what]._full_buffer is not None
        return net

    quick, plain = make(), make()
    with quick_resizing(quick):
        for size in SIZES:
            resize(quick, size)
            resize(plain, size)
            numbered(quick)
            numbered(plain)
            assert_same(quick, plain)


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


def test_training_with_ragged_minibatches_sends_no_parameters(
    kind, driver, monkeypatch
):
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
    for _ in dbuf.run_network(
        net, minibatches("recurrent", np.random.default_rng(0))()
    ):
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


def test_another_handler_in_between_is_cut_anew(kind, driver, monkeypatch):
    quick = network("recurrent", make_handler(kind, driver))
    plain = network("recurrent", make_handler(kind, driver))
    with quick_resizing(quick):
        for net in (quick, plain):
            resize(net, (2, 3))
            resize(net, (4, 5))
            net.set_handler(make_handler("numpy", driver))
            resize(net, (2, 3))
            numbered(net)
            # The parameters stay where they are now.
            with monkeypatch.context() as patch:
                patch.setattr(net.handler, "copy_to", None, raising=False)
                resize(net, (2, 2))
        assert_same(quick, plain)


def test_what_belongs_to_another_handler_is_let_go():
    net = network("recurrent", make_handler("numpy", None))
    with quick_resizing(net):
        for size in [(2, 3), (1, 1)]:
            resize(net, size)
        former = weakref.ref(net._buffer_manager.full_buffer)
        net.set_handler(make_handler("numpy", None))
        assert former() is None


def test_a_buffer_that_brainstorm_has_allocated_in_between_is_cut_anew(
    kind, driver, monkeypatch
):
    quick = network("recurrent", make_handler(kind, driver))
    plain = network("recurrent", make_handler(kind, driver))
    with quick_resizing(quick):
        for net in (quick, plain):
            for size in [(2, 3), (3, 3), (1, 3)]:
                resize(net, size)
            BufferManager.resize(net._buffer_manager, 6, 6)
            numbered(net)
        # The parameters are there already; nothing is copied onto itself.
        monkeypatch.setattr(quick.handler, "copy_to", None, raising=False)
        for size in [(2, 3), (6, 6), (3, 3)]:
            resize(quick, size)
            resize(plain, size)
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


# ------------------------------------------------------------------------- growth


def test_a_larger_buffer_gets_the_parameters_on_the_device(kind, driver, monkeypatch):
    handler = make_handler(kind, driver)
    net = network("recurrent", handler)
    resize(net, (1, 2))
    before = net.get("parameters")
    assert before.any()
    allocated = []
    own = handler.allocate
    with quick_resizing(net), monkeypatch.context() as patch:
        for name in ("get_numpy_copy", "set_from_numpy"):
            patch.setattr(handler, name, None, raising=False)
        patch.setattr(
            handler,
            "allocate",
            lambda size: allocated.append(size) or own(size),
            raising=False,
        )
        for size in [(2, 3), (1, 2), (4, 5), (2, 3), (4, 5)]:
            resize(net, size)
    assert len(allocated) == 2
    np.testing.assert_array_equal(net.get("parameters"), before)


def test_no_size_makes_a_copy_over_the_link(kernels, fake, driver):
    net = network("lstm with a mask", make_handler("cuda", driver))
    with quick_resizing(net):
        for size in [(2, 3), (5, 7), (1, 1)]:
            resize(net, size)  # larger, larger, smaller
        copies = copies_over_the_link(fake)
        resize(net, (9, 9))
        resize(net, (3, 3))
        assert copies_over_the_link(fake) == copies
        calls = fake.calls()
        for size in [(9, 9), (3, 3), (4, 8)]:
            resize(net, size)
        assert fake.calls() == calls  # nothing at all where the buffer stays
    resize(net, (2, 2))
    assert copies_over_the_link(fake) > copies  # brainstorm's own


def test_a_buffer_that_was_too_small_is_let_go():
    net = network("recurrent", make_handler("numpy", None))
    with quick_resizing(net):
        for size in [(2, 3), (1, 1), (2, 3)]:
            resize(net, size)
        small = weakref.ref(net._buffer_manager.full_buffer)
        resize(net, (5, 5))
        assert small() is None


def test_arrays_held_from_before_lie_in_the_same_buffer():
    net = network("recurrent", make_handler("numpy", None))
    resize(net, (5, 5))
    held = net.buffer.parameters
    layer = net.buffer.Output.inputs.default
    with quick_resizing(net):
        for size in [(2, 3), (5, 5)]:
            resize(net, size)
            net.buffer.parameters[:] = size[0]
            assert (held == size[0]).all()
        net.buffer.Output.inputs.default[:] = 17
        assert (layer == 17).all()


# ------------------------------------------------------------------------- errors


def test_where_memory_runs_short_the_network_is_left_as_brainstorm_leaves_it(
    kind, driver, monkeypatch
):
    nets = (
        network("recurrent", make_handler(kind, driver)),
        network("recurrent", make_handler(kind, driver)),
    )

    def fails(size):
        raise MemoryError(size)

    quick, plain = nets
    with quick_resizing(quick):
        for net in nets:
            resize(net, (2, 3))
            resize(net, (1, 3))
            numbered(net)
            with monkeypatch.context() as patch:
                patch.setattr(net.handler, "allocate", fails, raising=False)
                with pytest.raises(MemoryError):
                    resize(net, (50, 50))
        assert_same(quick, plain)
        for size in [(50, 50), (1, 3), (2, 3), (60, 50)]:  # the first: nothing is done
            for net in nets:
                resize(net, size)
            assert_same(quick, plain)


@pytest.mark.parametrize("where", ["Plan.cut", "Places.cut"])
def test_parameters_outlive_an_error_after_the_larger_buffer_is_there(
    where, monkeypatch
):
    net = network("recurrent", make_handler("numpy", None))
    before = net.get("parameters")

    def fails(*args):
        raise MemoryError

    with quick_resizing(net):
        resize(net, (2, 3))
        with monkeypatch.context() as patch:
            patch.setattr(f"brainstorm_dbuf.resizing.{where}", fails)
            with pytest.raises(MemoryError):
                resize(net, (5, 5))
        np.testing.assert_array_equal(net.get("parameters"), before)
        resize(net, (3, 3))
        np.testing.assert_array_equal(net.get("parameters"), before)
        assert np.may_share_memory(
            net.buffer.parameters, net._buffer_manager.full_buffer
        )


# ------------------------------------------------------------------ nothing stays


def test_nothing_stays_on_the_network(kind, driver):
    net = network("recurrent", make_handler(kind, driver))
    keys = set(vars(net)), set(vars(net._buffer_manager))
    with quick_resizing(net):
        resize(net, (2, 3))
        quick = weakref.ref(net._buffer_manager.resize)
        cuts = weakref.ref(quick()._cuts)
        resize(net, (1, 1))
    assert quick() is None and cuts() is None
    assert keys == (set(vars(net)), set(vars(net._buffer_manager)))


def test_a_copy_made_in_between_is_an_ordinary_network():
    # From the description: brainstorm's networks are neither deep-copied nor pickled.
    net = network("recurrent", make_handler("numpy", None))
    with quick_resizing(net):
        resize(net, (2, 3))
        description = get_description(net)
        other = create_from_description(description)
        assert "resize" not in vars(other._buffer_manager)
        assert other.buffer.parameters.shape == net.buffer.parameters.shape
        resize(other, (5, 6))
        assert net._buffer_manager.time_size == 2
    assert get_description(net) == description


def test_a_network_saved_in_between_is_read_back(tmp_path):
    net = network("recurrent", make_handler("numpy", None))
    with quick_resizing(net):
        resize(net, (2, 3))
        net.save_as_hdf5(str(tmp_path / "net.hdf5"))
    other = bs.Network.from_hdf5(str(tmp_path / "net.hdf5"))
    np.testing.assert_array_equal(other.get("parameters"), net.get("parameters"))


def test_somebody_elses_resize_stays():
    net = network("recurrent", make_handler("numpy", None))
    manager = net._buffer_manager
    called = []
    own = manager.resize
    manager.resize = theirs = lambda t, b: called.append((t, b)) or own(t, b)
    with quick_resizing(net):
        resize(net, (2, 3))
    assert called == [(2, 3)] and manager.resize is theirs


def test_two_networks_know_nothing_of_each_other(kind, driver):
    handler = make_handler(kind, driver)
    nets = [network("recurrent", handler) for _ in range(4)]
    with quick_resizing(nets[0]), quick_resizing(nets[1]):
        for size in SIZES:
            for net in nets:
                resize(net, size)
                numbered(net)
                size = size[::-1]
            assert_same(nets[0], nets[2])
            assert_same(nets[1], nets[3])


# ------------------------------------------------------- whole trainings, any sequence


class Ragged(DataIterator):
    """Minibatches whose T and B are drawn anew each time, the same in each pass."""

    def __init__(self, name, seed):
        self.name, self.seed = name, seed
        self.length = 24
        some = data_for(name, np.random.default_rng(0))
        self.data_shapes = {name: array.shape for name, array in some.items()}

    def __call__(self, handler=None):
        rnd = np.random.default_rng(self.seed)
        for _ in range(self.length):
            steps, samples = rnd.integers(1, 5, 2)
            yield data_for(self.name, rnd, int(steps), int(samples))


@pytest.mark.parametrize("name", NETWORKS)
def test_training_on_minibatches_of_any_size_gives_the_same_weights(name, kind, driver):
    def monitor():
        return bs.hooks.MonitorScores(
            "other", [bs.scorers.Accuracy()], timescale="update", interval=5
        )

    def run(double_buffering):
        return parity.train(
            NETWORKS[name],
            lambda: Ragged(name, 1),
            make_handler(kind, driver),
            double_buffering,
            hooks=[monitor],
            named=lambda: {"other": Ragged(name, 2)},
        )

    with parity.skip_what_pycuda_cannot(kind):
        plain = run(False)
    parity.assert_same(plain, run(True))


def test_without_double_buffering_the_method_is_brainstorms():
    net = network("recurrent", make_handler("numpy", None))
    seen = []

    class Look(bs.hooks.Hook):
        def __call__(self, *args, **kwargs):
            seen.append("resize" in vars(net._buffer_manager))

    for double_buffering in (False, True):
        trainer = dbuf.Trainer(
            bs.training.SgdStepper(0.01),
            verbose=False,
            double_buffering=double_buffering,
        )
        trainer.add_hook(bs.hooks.StopAfterEpoch(1))
        trainer.add_hook(Look("look", "update", 1))
        trainer.train(net, Ragged("recurrent", 1))
        assert set(seen) == {double_buffering}
        seen.clear()


def test_on_brainstorms_own_path_the_method_is_quick_too():
    # The monitor draws from the state of the iterator that trains.
    net = network("recurrent", make_handler("numpy", None))
    iterator = bs.data_iterators.AddGaussianNoise(
        minibatches("recurrent", np.random.default_rng(0)), {"default": 1.0}
    )
    trainer = dbuf.Trainer(bs.training.SgdStepper(0.01), verbose=False)
    seen = []

    class Look(bs.hooks.MonitorScores):
        def __call__(self, *args, **kwargs):
            seen.append("resize" in vars(net._buffer_manager))

    trainer.add_hook(bs.hooks.StopAfterEpoch(1))
    trainer.add_hook(Look("monitored", [], timescale="update"))
    with pytest.warns(dbuf.FeedWarning, match="same random state"):
        trainer.train(net, iterator, monitored=iterator)
    assert seen and all(seen)
    assert "resize" not in vars(net._buffer_manager)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 5), st.integers(0, 5)),
        st.sampled_from(["number", "another handler", "leave and enter"]),
    ),
    max_size=20,
)


@settings(deadline=None, max_examples=40)
@given(name=st.sampled_from(list(NETWORKS)), actions=ACTIONS)
def test_any_sequence_of_changes(name, actions):
    quick, plain = (network(name, make_handler("numpy", None)) for _ in range(2))
    context = quick_resizing(quick)
    context.__enter__()
    for action in actions:
        if action == "leave and enter":
            context.__exit__(None, None, None)
            context = quick_resizing(quick)
            context.__enter__()
        for net in (quick, plain):
            if isinstance(action, tuple):
                resize(net, action)
            elif action == "number":
                numbered(net)
            elif action == "another handler":
                net.set_handler(make_handler("numpy", None))
        assert_same(quick, plain)
    context.__exit__(None, None, None)
