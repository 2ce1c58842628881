"""Fused passes of the recurrent layers leave the values that single operations leave.

Each pass runs on buffers full of random numbers, the context rows of all arrays and the
deltas that are accumulated included, and the whole buffer is compared afterwards.
"""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import numpy as np
import pytest

import brainstorm_dbuf as dbuf
import brainstorm as bs
from brainstorm.describable import get_description
from brainstorm.handlers import NumpyHandler
from brainstorm.layers.lstm_layer import LstmLayerImpl
from brainstorm_dbuf import fused_layers
from networks import minibatches
from parity import SEED, Oracle, train

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_left")]

LAYERS = {
    "Lstm": bs.layers.Lstm,
    "ClockworkLstm": bs.layers.ClockworkLstm,
    "Recurrent": bs.layers.Recurrent,
    "Clockwork": bs.layers.Clockwork,
}
PASSES = ("forward_pass", "backward_pass")
ACTIVATIONS = ["tanh", "sigmoid", "rel", "linear", "el"]


# ----------------------------------------------------------------------------- networks


def chain(kind, size, features, activation):
    """Input, the layer, a loss: all of its arrays are contiguous."""
    inp = bs.layers.Input(out_shapes={"default": ("T", "B", *features)})
    layer = LAYERS[kind](size, activation=activation, name="Layer")
    inp >> layer >> bs.layers.Loss()
    return bs.Network.from_layer(inp)


def beside(kind, size, features, activation):
    """Another layer takes input and output side by side: slices of one hub."""
    inp = bs.layers.Input(out_shapes={"default": ("T", "B", *features)})
    layer = LAYERS[kind](size, activation=activation, name="Layer")
    out = bs.layers.FullyConnected(3, name="Out")
    inp - "default" >> layer >> out
    inp - "default" >> out
    out >> bs.layers.Loss()
    return bs.Network.from_layer(inp)


def observed(kind, size, features, activation):
    """Another layer takes an internal array beside the output: it is a slice, too."""
    inp = bs.layers.Input(out_shapes={"default": ("T", "B", *features)})
    layer = LAYERS[kind](size, activation=activation, name="Layer")
    out = bs.layers.FullyConnected(3, name="Out")
    internal = "..internals.Ia" if "Lstm" in kind else "..internals.Ha"
    inp >> layer >> out
    layer - internal >> out
    out >> bs.layers.Loss()
    return bs.Network.from_layer(inp)


def filled(make, handler, steps, batch, kind, size, features=(7,), activation="tanh"):
    """Return a network on `handler` whose whole buffer has random content."""
    net = make(kind, size, features, activation)
    net.set_handler(handler)
    net.buffer = net._buffer_manager.resize(steps, batch)
    full = net._buffer_manager.full_buffer
    rnd = np.random.default_rng(steps * 100 + batch)
    values = rnd.standard_normal(full.shape).astype(np.float32)
    handler.set_from_numpy(full, 0.3 * values)
    parameters = net.buffer.Layer.parameters
    for name in parameters.keys():
        if name[0] in "WR":  # so that values neither grow nor vanish over the steps
            view = parameters[name]
            weights = rnd.standard_normal(view.shape) / np.sqrt(view.shape[1])
            handler.set_from_numpy(view, weights.astype(np.float32))
        if name == "timing":
            ticks = rnd.choice([1, 2, 3, 4, 0], parameters[name].shape)
            handler.set_from_numpy(parameters[name], ticks.astype(np.float32))
    return net


def run_passes(net, count=1):
    layer, views = net.layers["Layer"], net.buffer.Layer
    with np.errstate(invalid="ignore"):  # NumPy's fmod(t, 0)
        for _ in range(count):
            layer.forward_pass(views)
            layer.backward_pass(views)
    return net.handler.get_numpy_copy(net._buffer_manager.full_buffer)


def is_fused(net):
    return set(PASSES) <= vars(net.layers["Layer"]).keys()


def noted(handler, monkeypatch):
    """Return the list of what the handler's fused passes answer."""
    answers = []
    for operations in ("lstm", "recurrent"):
        for direction in ("forward", "backward"):
            name = f"{operations}_{direction}"

            def run(*args, plain=getattr(handler, name)):
                answers.append(plain(*args))
                return answers[-1]

            monkeypatch.setattr(handler, name, run, raising=False)
    return answers


def assert_close(net, result, expected):
    """Compare view by view, for messages that say which, and then all the rest."""
    manager = net._buffer_manager
    handler = NumpyHandler(np.float32)
    scale = 2e-5 * max(1.0, float(np.nanmax(np.abs(expected))) / 10)
    wrong = ~np.isclose(result, expected, rtol=1e-4, atol=scale, equal_nan=True)
    if not wrong.any():
        return
    named = net.__class__.from_architecture(net.architecture)
    named.set_handler(handler)
    named.buffer = named._buffer_manager.resize(manager.time_size, manager.batch_size)
    named._buffer_manager.full_buffer[:] = wrong
    names = [
        f"{group}.{name}: {np.argwhere(view)[:3].tolist()}"
        for group, views in named.buffer.Layer.items()
        for name, view in views.items()
        if view.any()
    ]
    worst = np.nanargmax(np.abs(result - expected))
    raise AssertionError(f"{names}; worst {result[worst]} for {expected[worst]}")


# --------------------------------------------------------------------------- the values


def check(make, monkeypatch, steps, batch, *layer, passes=1, **more):
    handler = dbuf.CudaHandler(seed=1)
    answers = noted(handler, monkeypatch)
    net = filled(make, handler, steps, batch, *layer, **more)
    assert is_fused(net)
    result = run_passes(net, passes)
    assert answers == [True] * (2 * passes)

    single = filled(
        make, dbuf.CudaHandler(1, fused=False), steps, batch, *layer, **more
    )
    assert not is_fused(single)
    assert_close(net, result, run_passes(single, passes))
    oracle = filled(make, Oracle(), steps, batch, *layer, **more)
    assert_close(net, result, run_passes(oracle, passes))


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("kind", LAYERS)
def test_all_buffers_have_the_same_values(kind, steps, batch, cuda, monkeypatch):
    check(chain, monkeypatch, steps, batch, kind, 33)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("kind", LAYERS)
def test_every_activation(kind, activation, cuda, monkeypatch):
    check(chain, monkeypatch, 3, 2, kind, 35, activation=activation)


@pytest.mark.parametrize("size", [1, 40, 257])
@pytest.mark.parametrize("kind", LAYERS)
def test_sizes(kind, size, cuda, monkeypatch):
    check(chain, monkeypatch, 3, 2, kind, size)


@pytest.mark.parametrize("features", [(1,), (3, 5), (2, 3, 4)])
@pytest.mark.parametrize("kind", LAYERS)
def test_inputs_of_any_number_of_axes(kind, features, cuda, monkeypatch):
    check(chain, monkeypatch, 3, 2, kind, 34, features)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("make", [beside, observed])
@pytest.mark.parametrize("kind", LAYERS)
def test_arrays_that_are_slices_of_a_hub(kind, make, steps, batch, cuda, monkeypatch):
    check(make, monkeypatch, steps, batch, kind, 33)


@pytest.mark.parametrize("kind", LAYERS)
def test_deltas_and_gradients_are_accumulated(kind, cuda, monkeypatch):
    check(chain, monkeypatch, 3, 2, kind, 33, passes=2)


@pytest.mark.parametrize("kind", LAYERS)
def test_many_rows_to_sum(kind, cuda, monkeypatch):
    check(chain, monkeypatch, 11, 70, kind, 36)


@pytest.mark.parametrize("size", [33, 36])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("make", [chain, beside])
@pytest.mark.parametrize("kind", ["Lstm", "ClockworkLstm"])
def test_tf32_is_near(kind, make, steps, size, cuda):
    """With sizes where operands go through aligned copies, and others."""
    net = filled(make, dbuf.CudaHandler(seed=1, tf32=True), steps, 5, kind, size)
    oracle = filled(make, Oracle(), steps, 5, kind, size)
    np.testing.assert_allclose(
        run_passes(net), run_passes(oracle), rtol=0.02, atol=0.02
    )


@pytest.mark.parametrize("kind", LAYERS)
def test_two_runs_are_equal_to_the_bit(kind, cuda):
    first = run_passes(filled(chain, dbuf.CudaHandler(seed=1), 4, 8, kind, 33))
    again = run_passes(filled(chain, dbuf.CudaHandler(seed=2), 4, 8, kind, 33))
    np.testing.assert_array_equal(first, again)


@pytest.mark.parametrize("kind", LAYERS)
def test_nan_in_the_input_spreads_as_op_by_op(kind, cuda):
    results = []
    for handler in (dbuf.CudaHandler(seed=1), dbuf.CudaHandler(seed=1, fused=False)):
        net = filled(chain, handler, 3, 2, kind, 33)
        x = np.zeros((3, 2, 7), np.float32)
        x[1, 0, 3] = np.nan
        handler.set_from_numpy(net.buffer.Layer.inputs.default, x)
        results.append(run_passes(net))
    np.testing.assert_array_equal(*map(np.isnan, results))


# ------------------------------------------------------------------------ when, and not


@pytest.mark.parametrize("steps, batch", [(0, 3), (3, 0)])
@pytest.mark.parametrize("kind", LAYERS)
def test_without_elements_the_layers_own_pass_runs(
    kind, steps, batch, cuda, monkeypatch
):
    handler = dbuf.CudaHandler(seed=1)
    answers = noted(handler, monkeypatch)
    net = filled(chain, handler, steps, batch, kind, 33)
    oracle = filled(chain, Oracle(), steps, batch, kind, 33)
    assert_close(net, run_passes(net), run_passes(oracle))
    assert answers == [False, False]


@pytest.mark.parametrize("kind", LAYERS)
def test_another_handler_brings_the_layers_own_passes_back(kind, cuda):
    net = chain(kind, 5, (7,), "tanh")
    layer = net.layers["Layer"]
    assert not is_fused(net)
    net.set_handler(dbuf.CudaHandler(seed=1))
    assert is_fused(net)
    assert layer.forward_pass.__self__ is layer
    net.set_handler(dbuf.CudaHandler(seed=1, fused=False))
    assert not is_fused(net)
    net.set_handler(dbuf.CudaHandler(seed=1))
    net.set_handler(NumpyHandler(np.float32))
    assert not set(PASSES) & vars(layer).keys()
    assert layer.forward_pass.__func__ is type(layer).forward_pass


def test_a_derived_layer_keeps_its_passes(cuda):
    class CountingLstmLayerImpl(LstmLayerImpl):
        calls = 0

        def forward_pass(self, buffers, training_pass=True):
            type(self).calls += 1
            super().forward_pass(buffers, training_pass)

    net = chain("Lstm", 5, (7,), "tanh")
    old = net.layers["Layer"]
    net.layers["Layer"] = CountingLstmLayerImpl(
        "Layer", old.in_shapes, old.incoming, old.outgoing, size=5
    )
    net.set_handler(dbuf.CudaHandler(seed=1))
    assert not is_fused(net)
    net.provide_external_data({"default": np.ones((2, 3, 7), np.float32)})
    net.forward_pass()
    assert CountingLstmLayerImpl.calls == 1


def test_passes_put_on_a_layer_by_hand_stay(cuda):
    net = chain("Lstm", 5, (7,), "tanh")
    layer = net.layers["Layer"]

    def by_hand(buffers, training_pass=True):
        pass

    layer.forward_pass = by_hand
    for handler in (dbuf.CudaHandler(seed=1), NumpyHandler(np.float32)):
        net.set_handler(handler)
        assert layer.forward_pass is by_hand


def test_other_layers_are_left_alone(cuda):
    net = beside("Lstm", 5, (7,), "tanh")
    net.set_handler(dbuf.CudaHandler(seed=1))
    fused = [n for n, layer in net.layers.items() if set(PASSES) & vars(layer).keys()]
    assert sorted(fused) == ["Layer", "Out"] and len(net.layers) == 4


def test_an_activation_of_the_users_runs_in_the_layers_own_pass(cuda, monkeypatch):
    handler = dbuf.CudaHandler(seed=1)
    answers = noted(handler, monkeypatch)
    net = filled(chain, handler, 2, 3, "Lstm", 5, activation="mine")
    with pytest.raises(KeyError, match="mine"):
        run_passes(net)
    handler.act_func["mine"] = handler.tanh
    handler.act_func_deriv["mine"] = handler.tanh_deriv
    like = filled(chain, dbuf.CudaHandler(seed=1), 2, 3, "Lstm", 5)
    assert_close(net, run_passes(net), run_passes(like))
    assert answers == []


def test_shared_weights_of_another_layout_run_op_by_op(cuda, monkeypatch):
    handler = dbuf.CudaHandler(seed=1)
    answers = noted(handler, monkeypatch)
    net = filled(chain, handler, 2, 3, "Lstm", 5)
    parameters = net.buffer.Layer.parameters
    parameters[1] = handler.create_from_numpy(handler.get_numpy_copy(parameters[1]))
    like = filled(chain, dbuf.CudaHandler(seed=1), 2, 3, "Lstm", 5)
    assert_close(net, run_passes(net), run_passes(like))
    assert answers == [False, False]


@pytest.mark.parametrize("kind", LAYERS)
def test_an_input_that_repeats_an_element_is_left_to_the_layers_own_pass(kind, cuda):
    """As other libraries hand it over: the features at a stride of 0."""
    memory = cuda.ones((2, 3, 7))
    described = dict(memory.__cuda_array_interface__, strides=(84, 28, 0))
    repeated = cuda.as_array(
        SimpleNamespace(__cuda_array_interface__=described, memory=memory)
    )
    right = views(filled(chain, cuda, 2, 3, kind, 5))
    for name in ("dx", "dy", "gradients"):
        del right[name]
    run = cuda.lstm_forward if "Lstm" in kind else cuda.recurrent_forward
    assert run(**right) is True
    assert run(**{**right, "x": repeated}) is False


# -------------------------------------------------------------- descriptions and copies


@pytest.mark.parametrize("kind", LAYERS)
def test_descriptions_and_saved_files_do_not_tell(kind, cuda, tmp_path):
    net = chain(kind, 5, (7,), "tanh")
    net.initialize(bs.initializers.Gaussian(0.3), seed=SEED)
    plain = get_description(net)
    net.set_handler(dbuf.CudaHandler(seed=1))
    described = get_description(net)
    described.pop("handler"), plain.pop("handler")
    assert described == plain

    net.save_as_hdf5(str(tmp_path / "net.hdf5"))
    loaded = bs.Network.from_hdf5(str(tmp_path / "net.hdf5"))
    assert is_fused(loaded)
    np.testing.assert_array_equal(loaded.get("parameters"), net.get("parameters"))


def pickled(layer):
    handler, layer.handler = layer.handler, None
    try:
        return pickle.loads(pickle.dumps(layer))
    finally:
        layer.handler = handler


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled])
def test_a_copied_layer_has_passes_of_its_own(duplicate, cuda):
    layer = chain("Lstm", 5, (7,), "tanh").layers["Layer"]
    fused_layers.fuse(layer, cuda)  # and the handler stays: it cannot be copied
    twin = duplicate(layer)
    assert twin.forward_pass.__self__ is twin
    fused_layers.fuse(twin, NumpyHandler(np.float32))
    assert not set(PASSES) & vars(twin).keys()


# ---------------------------------------------------------------------- wrong arguments


def views(net):
    buffers = net.buffer.Layer
    return {
        "activation": "tanh",
        "x": buffers.inputs.default,
        "y": buffers.outputs.default,
        "dx": buffers.input_deltas.default,
        "dy": buffers.output_deltas.default,
        "parameters": list(buffers.parameters),
        "gradients": list(buffers.gradients),
        "internals": list(buffers.internals),
    }


@pytest.mark.parametrize("kind", LAYERS)
def test_wrong_arrays_are_refused_by_name(kind, cuda):
    net = filled(chain, cuda, 3, 2, kind, 5)
    run = cuda.lstm_backward if "Lstm" in kind else cuda.recurrent_backward
    right = views(net)
    assert run(**right) is True

    def refused(error, text, **wrong):
        with pytest.raises(error, match=text):
            run(**{**right, **wrong})

    for name in ("x", "y", "dx", "dy"):
        wrong = cuda.allocate((3, 2, 4) if "x" in name else (3, 2, 5))
        if name != "x":
            refused(ValueError, rf"{name} has shape", **{name: wrong})
        refused(TypeError, rf"{name} must be a DeviceArray", **{name: np.zeros(3)})
    refused(ValueError, r"x has shape \(3, 2\)", x=cuda.allocate((3, 2)))
    refused(ValueError, r"y has shape \(3,\)", y=cuda.allocate((3,)))
    for name in ("parameters", "gradients", "internals"):
        few = right[name][:-2]
        refused(ValueError, rf"{name} has {len(few)} arrays", **{name: few})
        wrong = [cuda.allocate((1, 2)), *right[name][1:]]
        refused(ValueError, rf"{name}\.\w+ has shape \(1, 2\)", **{name: wrong})
        refused(TypeError, "not iterable", **{name: 3})
    refused(ValueError, "unknown activation 'cosine'", activation="cosine")
    refused(TypeError, "activation must be a str", activation=3)


# --------------------------------------------------------------------------- a training


def lstm_network():
    inp = bs.layers.Input(
        out_shapes={"default": ("T", "B", 6), "targets": ("T", "B", 1)}
    )
    net = inp - "default" >> bs.layers.Lstm(9, name="Lstm")
    net = net >> bs.layers.Recurrent(8, name="Recurrent")
    out = net >> bs.layers.FullyConnected(3, name="Out", activation="linear")
    loss = bs.layers.SoftmaxCE(name="Output")
    out >> "default" - loss
    inp - "targets" >> "targets" - loss
    loss - "loss" >> bs.layers.Loss()
    made = bs.Network.from_layer(inp)
    made.output_name = "Output.outputs.predictions"
    made.initialize(bs.initializers.Gaussian(0.3))
    return made


@pytest.mark.parametrize("double_buffering", [False, True])
def test_a_training_ends_where_numpys_does(double_buffering, cuda):
    def run(handler):
        rnd = np.random.default_rng(3)
        return train(
            lstm_network,
            lambda: minibatches("lstm", rnd),
            handler,
            double_buffering,
            epochs=2,
        )

    fused, oracle = run(cuda), run(NumpyHandler(np.float32, seed=SEED))
    assert [list(loss) for loss in fused.losses] == [
        list(loss) for loss in oracle.losses
    ]
    np.testing.assert_allclose(
        [loss["total_loss"] for loss in fused.losses],
        [loss["total_loss"] for loss in oracle.losses],
        rtol=1e-4,
    )
    np.testing.assert_allclose(fused.weights, oracle.weights, rtol=1e-3, atol=1e-4)
