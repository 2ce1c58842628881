"""Networks on CudaHandler: gradients of every layer, whole trainings, and memory."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest

import brainstorm_dbuf as dbuf
import brainstorm as bs
from brainstorm.data_iterators import Minibatches
from brainstorm.handlers import NumpyHandler
from brainstorm_dbuf import _cuda
from conftest import KIND, live_objects
from networks import LAYERS, NETWORKS, data_for, minibatches
from parity import SEED, assert_same, make_handler, train

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("nothing_left")]

RECURRENT = ("Lstm", "Recurrent", "Clockwork", "ClockworkLstm")


class Float64(NumpyHandler):
    """The oracle of gradients; its masks are those that another handler has drawn."""

    def __init__(self):
        super().__init__(np.float64)
        self.masks = []

    def generate_probability_mask(self, mask, probability):
        mask[:] = self.masks.pop(0)


# Recurrent layers have passes of their own, unless the handler is told not to.
fused_and_not = pytest.mark.parametrize(
    "name, fused",
    [(name, True) for name in LAYERS]
    + [(n, False) for n in LAYERS if any(kind in n for kind in RECURRENT)],
)


def passes(net, handler, parameters, data, training=True, context=None):
    """Run both passes; return all that came of them, by path."""
    net.set_handler(handler)
    handler.set_from_numpy(net.buffer.parameters, parameters)
    net.provide_external_data(data)
    net.forward_pass(training_pass=training, context=context)
    found = {f"loss {k}": np.array(v) for k, v in net.get_loss_values().items()}
    if training:
        net.backward_pass()
    kinds = ["outputs", "parameters"]
    kinds += ["gradients", "input_deltas"] if training else []
    for layer, views in net.buffer.items():
        if layer in ("parameters", "gradients"):
            continue
        for kind in kinds:
            if kind in views:
                for name in views[kind].keys():
                    path = f"{layer}.{kind}.{name}"
                    found[path] = net.get(path)
    return found


def assert_near(found, expected, tolerance, what=""):
    """Compare relative to the largest element of each buffer."""
    assert found.keys() == expected.keys()
    for path, reference in expected.items():
        scale = np.abs(reference).max(initial=0)
        off = np.abs(found[path] - reference).max(initial=0)
        assert off <= tolerance * scale + 1e-6, (
            f"{what} {path} is off by {off:.3g} where its largest is {scale:.3g}"
        )


def both_ways(name, cuda, steps=5, samples=3, seed=0):
    """Return what CudaHandler and NumpyHandler in float64 make of a layer."""
    layer = LAYERS[name]
    data = layer.data(np.random.default_rng(seed), steps, samples)
    net = layer.make(seed)
    parameters = net.get("parameters").astype(np.float32)
    mine = passes(net, cuda, parameters, data)
    oracle = Float64()
    if "Dropout" in name:
        oracle.masks.append(net.get("Middle.internals.mask"))
    return mine, passes(layer.make(seed), oracle, parameters, data)


@fused_and_not
def test_the_gradients_of_each_layer_are_those_of_float64(name, fused, cuda):
    cuda.fused = fused
    for seed, (steps, samples) in enumerate([(5, 3), (1, 4), (3, 1), (1, 1), (2, 33)]):
        mine, expected = both_ways(name, cuda, steps, samples, seed)
        assert_near(mine, expected, 1e-4, f"T={steps}, B={samples}:")


SMOOTH = [
    name
    for name in LAYERS
    # brainstorm's own gradients are no derivatives there: on purpose, or by mistake.
    if name not in ("DeltasScaling", "Dropout") and "Clockwork" not in name
]


@pytest.mark.parametrize("name", SMOOTH)
def test_the_gradients_are_the_slopes_of_the_loss(name, cuda):
    """Central differences of the loss in float64, along random directions."""
    layer = LAYERS[name]
    data = layer.data(np.random.default_rng(1))
    net = layer.make(1)
    parameters = net.get("parameters").astype(np.float64)
    net.set_handler(cuda)
    cuda.set_from_numpy(net.buffer.parameters, parameters.astype(np.float32))
    net.provide_external_data(data)
    net.forward_pass(training_pass=True)
    net.backward_pass()
    gradients = net.get("gradients").astype(np.float64)

    oracle, reference = Float64(), layer.make(1)
    reference.set_handler(oracle)
    reference.provide_external_data(data)

    def loss(values):
        oracle.set_from_numpy(reference.buffer.parameters, values)
        reference.forward_pass(training_pass=True)
        return reference.get_loss_values()["total_loss"]

    rnd = np.random.default_rng(2)
    exact = parameters.astype(np.float32).astype(np.float64)
    step = 1e-6
    for _ in range(12):
        direction = rnd.standard_normal(len(exact))
        direction /= np.linalg.norm(direction)
        slope = loss(exact + step * direction) - loss(exact - step * direction)
        slope /= 2 * step
        assert abs(gradients @ direction - slope) <= 1e-4 * np.linalg.norm(gradients)


@fused_and_not
def test_outside_of_training_each_layer_computes_the_same(name, fused, cuda):
    cuda.fused = fused
    layer = LAYERS[name]
    data = layer.data(np.random.default_rng(3))
    parameters = np.abs(layer.make(3).get("parameters")).astype(np.float32)
    mine = passes(layer.make(3), cuda, parameters, data, training=False)
    expected = passes(layer.make(3), Float64(), parameters, data, training=False)
    assert_near(mine, expected, 1e-4)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", [n for n in LAYERS if n.startswith(RECURRENT)])
def test_a_sequence_goes_on_from_its_context(name, fused, cuda):
    cuda.fused = fused
    layer = LAYERS[name]
    data = layer.data(np.random.default_rng(4), steps=6)
    results = []
    for handler in (cuda, Float64()):
        net = layer.make(4)
        parameters = net.get("parameters").astype(np.float32)
        halves = [
            {k: v[part] for k, v in data.items()} for part in (np.s_[:3], np.s_[3:])
        ]
        passes(net, handler, parameters, halves[0], training=False)
        context = net.get_context()
        net.provide_external_data(halves[1])
        net.forward_pass(context=context)
        results.append({"out": net.get("Error.outputs.predictions")})
    assert_near(*results, 1e-4)


# ----------------------------------------------------------------- value modifiers etc.


def modified(make, handler, kind):
    bs.global_rnd.set_seed(SEED)
    net = NETWORKS["mlp with dropout"]()
    net.initialize(bs.initializers.Gaussian(0.8), seed=1)
    net.set_handler(handler)
    rnd = np.random.default_rng(0)
    getattr(net, f"set_{kind}_modifiers")({pick(net): {"W": make(net, rnd)}})
    net.provide_external_data(data_for("mlp with dropout", rnd))
    net.forward_pass(training_pass=False)
    net.backward_pass()
    net.apply_weight_modifiers()
    return net.get("parameters"), net.get("gradients")


def pick(net):
    """Return the name of a FullyConnected layer."""
    return next(n for n, layer in net.layers.items() if hasattr(layer, "size"))


def mask_of(net, rnd):
    shape = net.get(f"{pick(net)}.parameters.W").shape
    return bs.value_modifiers.MaskValues(rnd.integers(0, 2, shape).astype(float))


MODIFIERS = {
    "ClipValues": ("weight", lambda net, rnd: bs.value_modifiers.ClipValues(-0.3, 0.4)),
    "ConstrainL2Norm": (
        "weight",
        lambda net, rnd: bs.value_modifiers.ConstrainL2Norm(0.9),
    ),
    "MaskValues": ("weight", mask_of),
    "FreezeValues": ("weight", lambda net, rnd: bs.value_modifiers.FreezeValues()),
    "L1Decay": ("gradient", lambda net, rnd: bs.value_modifiers.L1Decay(0.1)),
    "L2Decay": ("gradient", lambda net, rnd: bs.value_modifiers.L2Decay(0.1)),
    "ClipValues of gradients": (
        "gradient",
        lambda net, rnd: bs.value_modifiers.ClipValues(-0.01, 0.01),
    ),
}


@pytest.mark.parametrize("name", MODIFIERS)
def test_each_value_modifier_works(name, cuda):
    kind, make = MODIFIERS[name]
    mine = modified(make, cuda, kind)
    expected = modified(make, NumpyHandler(np.float32), kind)
    for a, b in zip(mine, expected):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


STEPPERS = {
    "sgd": lambda: bs.training.SgdStepper(0.1),
    "momentum": lambda: bs.training.MomentumStepper(0.05, 0.9),
    "momentum unscaled": lambda: bs.training.MomentumStepper(
        0.01, 0.9, scale_learning_rate=False
    ),
    "nesterov": lambda: bs.training.NesterovStepper(0.05, 0.9),
}


@pytest.mark.parametrize("name", STEPPERS)
def test_each_stepper_goes_the_way_it_goes_on_numpy(name, cuda):
    ends = []
    for handler in (cuda, NumpyHandler(np.float32)):
        bs.global_rnd.set_seed(SEED)
        net = NETWORKS["recurrent"]()
        net.set_handler(handler)
        net.provide_external_data(data_for("recurrent", np.random.default_rng(0)))
        stepper = STEPPERS[name]()
        stepper.start(net)
        for _ in range(5):
            stepper.run()
        ends.append((net.get("parameters"), net.get_loss_values()["total_loss"]))
    np.testing.assert_allclose(ends[0][0], ends[1][0], rtol=1e-3, atol=1e-5)
    assert ends[0][1] == pytest.approx(ends[1][1], rel=1e-4)


def test_tools_evaluate_and_extract_work(cuda):
    results = []
    for handler in (cuda, NumpyHandler(np.float32)):
        bs.global_rnd.set_seed(SEED)
        net = NETWORKS["convolution"]()
        net.set_handler(handler)
        data = data_for("convolution", np.random.default_rng(0))
        scores = bs.tools.evaluate(
            net,
            Minibatches(5, shuffle=False, **data),
            scorers=[bs.scorers.Accuracy()],
            out_name="Output.outputs.predictions",
        )
        extracted = bs.tools.extract(
            net,
            Minibatches(5, shuffle=False, **data),
            ["Output.outputs.predictions", "Input.outputs.default"],
        )
        results.append((scores, extracted))
    (scores, extracted), (expected_scores, expected) = results
    assert scores.keys() == expected_scores.keys()
    for key in expected_scores:
        assert scores[key] == pytest.approx(expected_scores[key], rel=1e-4)
    for key in expected:
        np.testing.assert_allclose(extracted[key], expected[key], rtol=1e-3, atol=1e-5)


# --------------------------------------------------------------------- whole trainings

DETERMINISTIC = [name for name in NETWORKS if "dropout" not in name]


def one_training(name, handler, double_buffering=True, epochs=2):
    return train(
        NETWORKS[name],
        lambda: minibatches(name, np.random.default_rng(0), 5),
        handler,
        double_buffering,
        epochs=epochs,
    )


@pytest.mark.parametrize("name", NETWORKS)
def test_two_runs_with_one_seed_are_equal_to_the_bit(name, cuda, driver):
    first = one_training(name, cuda)
    again = one_training(name, make_handler("cuda", driver))
    assert_same(first, again)


def test_another_seed_draws_other_masks(cuda):
    name = "mlp with dropout"
    first = one_training(name, cuda)
    other = one_training(name, dbuf.CudaHandler(seed=SEED + 1))
    assert (first.weights != other.weights).any()


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_training_goes_as_on_numpy_within_rounding(name, cuda):
    mine = one_training(name, cuda)
    numpys = one_training(name, NumpyHandler(np.float32, seed=SEED))
    np.testing.assert_allclose(mine.weights, numpys.weights, rtol=1e-3, atol=1e-4)
    for a, b in zip(mine.losses, numpys.losses):
        assert a["total_loss"] == pytest.approx(b["total_loss"], rel=1e-3)


@pytest.mark.parametrize(
    "name", [n for n in NETWORKS if n in ("recurrent",) or n.startswith("lstm")]
)
def test_fused_passes_train_as_the_operations_do(name, cuda):
    mine = one_training(name, cuda)
    by_operations = dbuf.CudaHandler(seed=SEED)
    by_operations.fused = False
    other = one_training(name, by_operations)
    np.testing.assert_allclose(mine.weights, other.weights, rtol=1e-3, atol=1e-4)


def digits_accuracy(handler, epochs):
    """Train on scikit-learn's digits; return the share of right test answers."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.data / 16).astype(np.float32)[None]
    targets = digits.target[None, :, None]
    bs.global_rnd.set_seed(SEED)
    net = bs.tools.create_net_from_spec("classification", 64, 10, "F50")
    net.set_handler(handler)
    trainer = dbuf.Trainer(bs.training.MomentumStepper(0.1, 0.9), verbose=False)
    trainer.add_hook(bs.hooks.StopAfterEpoch(epochs))
    trainer.train(
        net, Minibatches(50, default=images[:, :1400], targets=targets[:, :1400])
    )
    scores = bs.tools.evaluate(
        net,
        Minibatches(
            100, shuffle=False, default=images[:, 1400:], targets=targets[:, 1400:]
        ),
        scorers=[bs.scorers.Accuracy()],
        out_name="Output.outputs.predictions",
    )
    return scores["Accuracy"]


def test_digits_are_learnt_as_well_as_on_numpy(cuda):
    epochs = 10 if KIND == "fake" else 40
    mine = digits_accuracy(cuda, epochs)
    numpys = digits_accuracy(NumpyHandler(np.float32, seed=SEED), epochs)
    assert mine > 0.85
    assert abs(mine - numpys) <= 0.005


# ------------------------------------------------------------------------------ memory


def updates(net, count):
    """Run updates with data of changing sizes, all of which have come before."""
    rnd = np.random.default_rng(0)
    batches = [
        data_for("mlp with dropout", rnd, steps=steps, samples=samples)
        for steps, samples in ((1, 4), (2, 3), (1, 7))
    ]
    stepper = bs.training.MomentumStepper(0.01, 0.9)
    stepper.start(net)
    for number in range(count):
        net.provide_external_data(batches[number // 10 % 3])
        stepper.run()
        assert np.isfinite(net.get_loss_values()["total_loss"])


@pytest.mark.slow
def test_a_thousand_updates_leave_the_pool_as_it_was(cuda, driver):
    bs.global_rnd.set_seed(SEED)
    net = NETWORKS["mlp with dropout"]()
    net.set_handler(cuda)
    updates(net, 60)
    held = live_objects()
    if driver.fake is not None:
        calls = driver.fake.calls()
    updates(net, 1000)
    assert live_objects() == held
    if driver.fake is not None:
        used = driver.fake.calls() - calls
        # The buffers were as large as they get before.
        assert [name for name in used if "Alloc" in name or "Free" in name] == []


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["mlp with dropout", "lstm with a mask", "convolution"]
)
def test_ten_thousand_updates_leave_the_devices_memory_as_it_was(name, cuda):
    bs.global_rnd.set_seed(SEED)
    net = NETWORKS[name]()
    net.set_handler(cuda)
    rnd = np.random.default_rng(0)
    trainer = dbuf.Trainer(bs.training.MomentumStepper(1e-3, 0.9), verbose=False)

    def epochs(count):
        trainer.hooks.clear()
        trainer.add_hook(bs.hooks.StopAfterEpoch(trainer.current_epoch_nr + count))
        trainer.train(net, iterator)

    iterator = Minibatches(2, **data_for(name, rnd, samples=200))  # 100 updates
    for _ in range(2):  # the second has both trainings' velocities for a moment
        epochs(5)
    gc.collect()
    cuda.stream.synchronize()
    free, held = _cuda.mem_get_info(cuda.context)[0], live_objects()
    epochs(100)
    gc.collect()
    cuda.stream.synchronize()
    assert live_objects() == held
    if "PYTEST_XDIST_WORKER" not in os.environ:  # which use the same device
        assert _cuda.mem_get_info(cuda.context)[0] >= free - (2 << 20)
