"""FullyConnected and SoftmaxCE in one call each leave the very bits of single operations.

Each pass runs on buffers full of random numbers, the deltas that are accumulated
included, and the whole buffer is compared afterwards.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import brainstorm_dbuf as dbuf
import brainstorm as bs
from brainstorm.layers.fully_connected_layer import FullyConnectedLayerImpl
from conftest import KIND
from networks import NETWORKS, minibatches
from parity import SEED, Oracle, train

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_left")]

ACTIVATIONS = ["tanh", "sigmoid", "rel", "linear", "el"]
OPERATIONS = (
    "fully_connected_forward",
    "fully_connected_backward",
    "softmax_ce_forward",
    "softmax_ce_backward",
)


def not_fused():
    return dbuf.CudaHandler(seed=1, fused=False)


# ----------------------------------------------------------------------------- networks


def dense(size=5, features=(7,), activation="rel"):
    """Input, the layer, a loss: all of its arrays are contiguous."""
    inp = bs.layers.Input(out_shapes={"default": ("T", "B", *features)})
    layer = bs.layers.FullyConnected(size, activation=activation, name="Layer")
    inp >> layer >> bs.layers.Loss()
    return bs.Network.from_layer(inp)


def dense_beside(size=5, features=(7,), activation="rel"):
    """Another layer takes input and output side by side: slices of one hub."""
    inp = bs.layers.Input(out_shapes={"default": ("T", "B", *features)})
    layer = bs.layers.FullyConnected(size, activation=activation, name="Layer")
    out = bs.layers.FullyConnected(3, name="Out")
    inp - "default" >> layer >> out
    inp - "default" >> out
    out >> bs.layers.Loss()
    return bs.Network.from_layer(inp)


def classes(count=4, axes=(), is_beside=False):
    inp = bs.layers.Input(
        out_shapes={
            "default": ("T", "B", *axes, count),
            "targets": ("T", "B", *axes, 1),
        }
    )
    layer = bs.layers.SoftmaxCE(name="Layer")
    inp - "default" >> "default" - layer
    inp - "targets" >> "targets" - layer
    layer - "loss" >> bs.layers.Loss()
    if is_beside:
        out = bs.layers.FullyConnected(3, name="Out")
        layer - "predictions" >> out
        inp - "default" >> out
        out >> bs.layers.Loss(name="Other")
    return bs.Network.from_layer(inp)


def classes_beside():
    """Another layer takes input and predictions side by side: slices of one hub."""
    return classes(is_beside=True)


def filled(net, handler, steps, batch):
    """Put the network on `handler` and fill its whole buffer with random content."""
    net.set_handler(handler)
    net.buffer = net._buffer_manager.resize(steps, batch)
    full = net._buffer_manager.full_buffer
    rnd = np.random.default_rng(steps * 100 + batch)
    handler.set_from_numpy(full, rnd.standard_normal(full.shape).astype(np.float32))
    views = net.buffer.Layer
    if "targets" in views.inputs.keys():
        shape, count = views.inputs.targets.shape, views.inputs.default.shape[-1]
        targets = rnd.integers(0, count, shape).astype(np.float32)
        handler.set_from_numpy(views.inputs.targets, targets)
    return net


def run_passes(net, count=1):
    layer, views = net.layers["Layer"], net.buffer.Layer
    for _ in range(count):
        layer.forward_pass(views)
        layer.backward_pass(views)
    return net.handler.get_numpy_copy(net._buffer_manager.full_buffer)


@pytest.fixture
def answers(cuda, monkeypatch):
    """What the fused passes of the handler `cuda` answer, one after another."""
    found = []
    for name in OPERATIONS:

        def run(*args, plain=getattr(cuda, name)):
            found.append(plain(*args))
            return found[-1]

        monkeypatch.setattr(cuda, name, run, raising=False)
    return found


# --------------------------------------------------------------------------- the values


def check(make, cuda, answers, steps, batch, *layer, passes=1, **more):
    fused = run_passes(filled(make(*layer, **more), cuda, steps, batch), passes)
    assert answers == [True] * (2 * passes)
    net = filled(make(*layer, **more), not_fused(), steps, batch)
    single = run_passes(net, passes)
    assert not {"forward_pass", "backward_pass"} & vars(net.layers["Layer"]).keys()
    np.testing.assert_array_equal(fused, single)
    oracle = run_passes(filled(make(*layer, **more), Oracle(), steps, batch), passes)
    np.testing.assert_allclose(fused, oracle, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("make", [dense, dense_beside, classes, classes_beside])
def test_all_buffers_have_the_same_bits(make, steps, batch, cuda, answers):
    check(make, cuda, answers, steps, batch)


@pytest.mark.parametrize("make", [dense, dense_beside])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation, make, cuda, answers):
    check(make, cuda, answers, 3, 2, activation=activation)


@pytest.mark.parametrize("size", [1, 40, (2, 3)])
@pytest.mark.parametrize("features", [(1,), (3, 5), (64,)])
def test_sizes_of_a_dense_layer(features, size, cuda, answers):
    check(dense, cuda, answers, 3, 2, size, features)


@pytest.mark.parametrize("axes", [(), (3,), (2, 3)])
@pytest.mark.parametrize("count", [1, 2, 33, 300])
def test_numbers_of_classes(count, axes, cuda, answers):
    check(classes, cuda, answers, 3, 2, count, axes)


@pytest.mark.parametrize("make", [dense, classes])
def test_deltas_are_accumulated(make, cuda, answers):
    check(make, cuda, answers, 3, 2, passes=2)


def test_many_rows_to_sum(cuda, answers):
    """The bias's gradients are then summed in two launches."""
    check(dense, cuda, answers, 40, 500, 3, (2,))


def test_the_least_probability_counts_as_one_in_a_million(cuda, answers):
    net = filled(classes(), cuda, 1, 2)
    views = net.buffer.Layer
    x = np.array([[[0, 90, 0, 0], [0, -90, 0, 0]]], np.float32)
    cuda.set_from_numpy(views.inputs.default, x)
    cuda.set_from_numpy(views.inputs.targets, np.ones((1, 2, 1), np.float32))
    net.layers["Layer"].forward_pass(views)
    expected = -np.log(np.array([1, 1e-6], np.float32))
    loss = cuda.get_numpy_copy(views.outputs.loss).ravel()
    np.testing.assert_allclose(loss, expected, rtol=1e-6)


@pytest.mark.parametrize("make", [dense, classes])
def test_nan_spreads_as_op_by_op(make, cuda):
    results = []
    for handler in (cuda, not_fused()):
        net = filled(make(), handler, 3, 2)
        x = np.zeros(net.buffer.Layer.inputs.default.shape, np.float32)
        x[1, 0, 2] = np.nan
        handler.set_from_numpy(net.buffer.Layer.inputs.default, x)
        results.append(run_passes(net))
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_training_ends_with_the_same_bits(name, cuda):
    def run(handler):
        rnd = np.random.default_rng(3)
        return train(
            NETWORKS[name], lambda: minibatches(name, rnd), handler, True, epochs=2
        )

    for layer in ("lstm", "recurrent"):  # those are equal within rounding alone
        for direction in ("forward", "backward"):
            setattr(cuda, f"{layer}_{direction}", lambda *args: False)
    fused, single = run(cuda), run(dbuf.CudaHandler(seed=SEED, fused=False))
    np.testing.assert_array_equal(fused.weights, single.weights)
    assert fused.losses == single.losses and fused.losses


@pytest.mark.skipif(KIND == "real", reason="the stand-in driver counts calls")
def test_there_are_fewer_launches(cuda, fake):
    def launches(handler, make):
        net = filled(make(), handler, 2, 3)
        run_passes(net)
        before = fake.calls()
        run_passes(net)
        return (fake.calls() - before)["cuLaunchKernel"]

    # Single operations: bias, activation, its derivative, the bias's gradient; and
    # softmax, fill, choice, limits, logarithm, sign; one-hot, sign, sum, product, sum.
    assert launches(not_fused(), dense) == 4 and launches(cuda, dense) == 3
    assert launches(not_fused(), classes) == 11 and launches(cuda, classes) == 3


# ------------------------------------------------------------------------ when, and not


@pytest.mark.parametrize("steps, batch", [(0, 3), (3, 0)])
@pytest.mark.parametrize("make", [dense, classes])
def test_without_elements_the_layers_own_pass_runs(make, steps, batch, cuda, answers):
    net = filled(make(), cuda, steps, batch)
    oracle = filled(make(), Oracle(), steps, batch)
    np.testing.assert_allclose(run_passes(net), run_passes(oracle), atol=1e-4)
    assert answers == [False, False]


@pytest.mark.parametrize("make", [dense, classes])
def test_an_input_that_repeats_an_element_is_left_to_the_layers_own_pass(make, cuda):
    """As other libraries hand it over: the features at a stride of 0."""
    given = {dense: dense_arguments, classes: classes_arguments}[make]
    right = given(filled(make(), cuda, 3, 2))[0]
    shape = right["x"].shape
    memory = cuda.ones(shape)
    strides = (shape[1] * shape[2] * 4, shape[2] * 4, 0)
    described = dict(memory.__cuda_array_interface__, strides=strides)
    repeated = cuda.as_array(
        SimpleNamespace(__cuda_array_interface__=described, memory=memory)
    )
    run = getattr(cuda, OPERATIONS[0] if make is dense else OPERATIONS[2])
    assert run(**right) is True
    assert run(**{**right, "x": repeated}) is False


def test_shared_weights_of_another_layout_run_op_by_op(cuda, answers):
    net = filled(dense(), cuda, 2, 3)
    parameters = net.buffer.Layer.parameters
    W = cuda.get_numpy_copy(parameters[0])
    memory = cuda.create_from_numpy(np.ascontiguousarray(np.hstack([W, W])))
    parameters[0] = memory[:, : W.shape[1]]
    like = filled(dense(), not_fused(), 2, 3)
    np.testing.assert_array_equal(run_passes(net), run_passes(like))
    assert answers == [False, False]


def test_an_activation_of_the_users_runs_in_the_layers_own_pass(cuda, answers):
    cuda.inplace_act_func["mine"] = cuda.inplace_act_func["tanh"]
    cuda.inplace_act_func_deriv["mine"] = cuda.inplace_act_func_deriv["tanh"]
    net = filled(dense(activation="mine"), cuda, 2, 3)
    like = filled(dense(activation="tanh"), not_fused(), 2, 3)
    np.testing.assert_array_equal(run_passes(net), run_passes(like))
    assert answers == []


def test_a_derived_layer_keeps_its_passes(cuda, answers):
    class CountingLayerImpl(FullyConnectedLayerImpl):
        calls = 0

        def forward_pass(self, buffers, training_pass=True):
            type(self).calls += 1
            super().forward_pass(buffers, training_pass)

    net = dense()
    old = net.layers["Layer"]
    net.layers["Layer"] = CountingLayerImpl(
        "Layer", old.in_shapes, old.incoming, old.outgoing, size=5
    )
    run_passes(filled(net, cuda, 2, 3))
    assert CountingLayerImpl.calls == 1 and answers == []


# ---------------------------------------------------------------------- wrong arguments


@pytest.mark.parametrize("wrong", [4, -5, np.nan, np.inf, 1e30])
def test_a_target_that_is_no_class_is_an_error(wrong, cuda, answers):
    net = filled(classes(), cuda, 2, 3)
    layer, views = net.layers["Layer"], net.buffer.Layer
    targets = cuda.get_numpy_copy(views.inputs.targets)
    targets[1, 1] = wrong
    cuda.set_from_numpy(views.inputs.targets, targets)
    layer.forward_pass(views)
    with pytest.raises(IndexError, match="^index_m_by_v: "):
        cuda.get_numpy_copy(views.outputs.loss)
    loss = cuda.get_numpy_copy(views.outputs.loss)
    assert loss[1, 1] == -np.log(np.float32(1e-6))
    before = cuda.get_numpy_copy(views.input_deltas.default)
    layer.backward_pass(views)
    with pytest.raises(IndexError, match="^binarize_v: "):
        cuda.synchronize()
    after = cuda.get_numpy_copy(views.input_deltas.default)
    assert np.array_equal(after[1, 1], before[1, 1])
    assert not np.array_equal(after[1, 0], before[1, 0])
    assert answers == [True, True]


def dense_arguments(net):
    views = net.buffer.Layer
    forward = {
        "activation": "tanh",
        "x": views.inputs.default,
        "y": views.outputs.default,
        "parameters": list(views.parameters),
    }
    backward = {
        **forward,
        "dx": views.input_deltas.default,
        "dy": views.output_deltas.default,
        "gradients": list(views.gradients),
    }
    return forward, backward


def classes_arguments(net):
    views = net.buffer.Layer
    forward = {
        "x": views.inputs.default,
        "targets": views.inputs.targets,
        "predictions": views.outputs.predictions,
        "loss": views.outputs.loss,
    }
    backward = {
        "predictions": views.outputs.predictions,
        "targets": views.inputs.targets,
        "dx": views.input_deltas.default,
        "dloss": views.output_deltas.loss,
        "t_bin": views.internals.t_bin,
    }
    return forward, backward


@pytest.fixture
def refused(cuda):
    """A function that calls an operation with wrong arguments, and sees them refused."""

    def call(run, right, error, text, **wrong):
        with pytest.raises(error, match=text):
            run(**{**right, **wrong})

    return call


@pytest.mark.parametrize("direction", [0, 1])
def test_wrong_arrays_of_a_dense_layer_are_refused_by_name(direction, cuda, refused):
    right = dense_arguments(filled(dense(), cuda, 3, 2))[direction]
    run = getattr(cuda, OPERATIONS[direction])
    assert run(**right) is True
    for name, value in right.items():
        if name == "activation":
            continue
        if isinstance(value, list):
            text = rf"{name} has 1 arrays, expected 2 \(W, bias\)"
            refused(run, right, ValueError, text, **{name: value[:1]})
            wrong = [cuda.allocate((1, 2)), value[1]]
            text = rf"{name}\.W has shape \(1, 2\), expected \(5, 7\)"
            refused(run, right, ValueError, text, **{name: wrong})
            text = rf"{name}\.bias must be a DeviceArray, got int"
            refused(run, right, TypeError, text, **{name: [value[0], 3]})
            refused(run, right, TypeError, "not iterable", **{name: 3})
            continue
        wrong = cuda.allocate((3, 2))
        refused(run, right, ValueError, rf"{name} has shape \(3, 2\)", **{name: wrong})
        text = rf"{name} must be a DeviceArray"
        refused(run, right, TypeError, text, **{name: np.zeros((3, 2, 7))})
    other = cuda.allocate((2, 2, 5))
    refused(run, right, ValueError, r"y has shape \(2, 2, 5\), expected", y=other)
    text = "unknown activation 'cosine'"
    refused(run, right, ValueError, text, activation="cosine")
    refused(run, right, TypeError, "activation must be a str", activation=3)


@pytest.mark.parametrize("direction", [0, 1])
def test_wrong_arrays_of_classes_are_refused_by_name(direction, cuda, refused):
    right = classes_arguments(filled(classes(), cuda, 3, 2))[direction]
    run = getattr(cuda, OPERATIONS[2 + direction])
    assert run(**right) is True
    first = next(iter(right))
    for name in right:
        wrong = cuda.allocate((3, 2))
        refused(run, right, ValueError, rf"{name} has shape \(3, 2\)", **{name: wrong})
        text = rf"{name} must be a DeviceArray"
        refused(run, right, TypeError, text, **{name: np.zeros((3, 2, 4))})
        if name != first:
            width = 1 if name in ("targets", "loss", "dloss") else 4
            wrong = cuda.allocate((3, 2, 9))
            text = rf"{name} has shape \(3, 2, 9\), expected \(3, 2, {width}\)"
            refused(run, right, ValueError, text, **{name: wrong})
