"""brainstorm 0.5, unmodified, on this Python, NumPy and h5py, without a warning."""

from __future__ import annotations

import datetime
import inspect
import pickle
import sys
import warnings

import numpy as np
import pytest

from brainstorm_dbuf import compat

bs = compat.require_brainstorm()


@pytest.fixture(autouse=True)
def same_draws():
    bs.global_rnd.set_seed(7)
    bs.handlers.default_handler.rnd.set_seed(8)


# ------------------------------------------------------------------------ the shims
def test_h5py_gets_no_value_property():
    import h5py

    assert not hasattr(h5py.Dataset, "value")


def test_only_the_modules_that_need_old_names_have_a_numpy_of_their_own():
    own = {
        name
        for name, module in sys.modules.items()
        if name.startswith("brainstorm.") and vars(module).get("np", np) is not np
    }
    assert own == {
        "brainstorm.data_iterators",
        "brainstorm.initializers",
        "brainstorm.scorers",
        "brainstorm.tools",
        "brainstorm.training.schedules",
    }


def test_the_stand_in_for_numpy_has_numpys_own_objects():
    stand_in = bs.tools.np
    assert stand_in.zeros is np.zeros and stand_in.random is np.random
    assert stand_in.int is int and "int" in dir(stand_in)
    with pytest.raises(AttributeError, match="no_such_name"):
        getattr(stand_in, "no_such_name")


def test_apply_twice_changes_nothing():
    finders = list(sys.meta_path)
    loss_values, extract = bs.Network.get_loss_values, bs.tools.extract
    compat.apply()
    compat.apply()
    assert sys.meta_path == finders
    assert bs.Network.get_loss_values is loss_values and bs.tools.extract is extract


def test_brainstorms_modules_keep_their_own_loaders_and_sources():
    assert type(bs.tools.__loader__).__name__ == "SourceFileLoader"
    assert bs.tools.__spec__.loader is bs.tools.__loader__
    assert "class RandomCrop" in inspect.getsource(bs.data_iterators)


def test_what_was_replaced_can_be_pickled_by_name():
    assert pickle.loads(pickle.dumps(bs.tools.extract)) is bs.tools.extract
    for method in (
        bs.Network.get_loss_values,
        bs.randomness.RandomState.random_integers,
    ):
        assert pickle.loads(pickle.dumps(method)) is method
    assert bs.Network.from_hdf5.__qualname__ == "Network.from_hdf5"


def test_the_compiled_operations_are_ours():
    from brainstorm_dbuf import _cpuop

    served = sys.modules["brainstorm.handlers._cpuop"]
    assert bs.handlers._cpuop is served
    for name in ("im2col", "col2im", "maxpool_forward", "_crop_images"):
        assert getattr(served, name) is getattr(_cpuop, name)
    assert bs.data_iterators._crop_images is _cpuop._crop_images


def test_find_brainstorm_names_version_and_folder():
    found = compat.find_brainstorm()
    assert found.version == "0.5" and found.location in bs.__file__
    assert compat.check_brainstorm() == found


def test_a_callback_for_a_loaded_module_is_called_at_once():
    seen = []
    compat.when_imported("brainstorm.tools", seen.append)
    assert seen == [bs.tools]


@pytest.mark.parametrize(
    "arguments", [(0, 5, 40), (5,), (3, 3, (2, 4)), (0, 2**40, 9), (-4, 4, None)]
)
def test_random_integers_draws_what_numpys_own_drew(arguments):
    ours = bs.randomness.RandomState(3)
    theirs = np.random.RandomState(3)
    got = ours.random_integers(*arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        if hasattr(theirs, "random_integers"):
            expected = theirs.random_integers(*arguments)
        else:
            low, high = arguments[:2] if len(arguments) > 1 else (1, arguments[0])
            size = arguments[2] if len(arguments) > 2 else None
            expected = theirs.randint(low, high + 1, size, dtype="l")
    assert np.array_equal(got, expected) and type(got) is type(expected)
    assert ours.randint(1000) == theirs.randint(1000)  # the streams are at one place


def test_a_random_state_survives_pickling():
    state = pickle.loads(pickle.dumps(bs.randomness.RandomState(3)))
    assert state.random_integers(0, 9) == bs.randomness.RandomState(3).random_integers(
        0, 9
    )


def test_the_progress_bar_tells_the_time_without_a_warning():
    bar = bs.utils.progress_bar(3)
    assert next(bar) == "["
    bar.send(1)
    assert "Took: 0:00:0" in bar.send(3)
    now = bs.utils.datetime.utcnow()
    reference = datetime.datetime.now(datetime.timezone.utc).replace(tzinfo=None)
    assert now.tzinfo is None and abs((reference - now).total_seconds()) < 60


# ------------------------------------------------------------------------- networks
def small_data(shape=(4,), classes=3, steps=1, examples=12):
    rnd = np.random.RandomState(5)
    targets = rnd.randint(0, classes, (steps, examples, 1))
    inputs = rnd.rand(steps, examples, *shape) + targets.reshape(
        (steps, examples) + (1,) * len(shape)
    )
    return {"default": inputs, "targets": targets}


def train(net, data, epochs=4, batch_size=5, scorers=()):
    trainer = bs.Trainer(bs.training.MomentumStepper(0.1, 0.5), verbose=False)
    trainer.train_scorers = list(scorers)
    trainer.add_hook(bs.hooks.StopAfterEpoch(epochs))
    trainer.add_hook(bs.hooks.MonitorScores("valid", [bs.scorers.Accuracy()]))
    iterator = bs.data_iterators.Minibatches(batch_size, **data)
    trainer.train(net, iterator, valid=bs.data_iterators.Undivided(**data))
    return trainer.logs


@pytest.mark.parametrize(
    "shape, steps, spec",
    [
        ((4,), 1, "F6 D F5 B"),
        ((8, 8, 2), 1, "C4:3p1 Pm2s2 C3:3 Pa2 F5"),
        ((3,), 5, "L4"),
        ((3,), 5, "R4"),
    ],
    ids=["mlp", "cnn", "lstm", "recurrent"],
)
def test_a_network_learns(shape, steps, spec):
    data = small_data(shape, steps=steps)
    net = bs.tools.create_net_from_spec("classification", shape, 3, spec)
    logs = train(net, data, scorers=[bs.scorers.Accuracy()])
    losses = logs["rolling_training"]["total_loss"]
    assert all(type(loss) is np.float64 for loss in losses)
    assert np.all(np.isfinite(losses)) and losses[-1] < losses[0]
    assert len(logs["MonitorScores"]["Accuracy"]) == 5
    assert "parameters" in bs.tools.get_network_info(net)


def test_training_shows_a_progress_bar(capsys):
    trainer = bs.Trainer(bs.training.SgdStepper(0.1), verbose=False)
    trainer.add_hook(bs.hooks.ProgressBar())
    trainer.add_hook(bs.hooks.StopAfterEpoch(1))
    net = bs.tools.create_net_from_spec("classification", 4, 3, "F5")
    trainer.train(net, bs.data_iterators.Minibatches(2, **small_data()))
    assert "====5====" in capsys.readouterr().out


def two_loss_net():
    layers = bs.layers
    inputs = layers.Input(
        out_shapes={"default": ("T", "B", 4), "targets": ("T", "B", 3)}
    )
    hidden = inputs >> layers.FullyConnected(3, name="hidden")
    for number in "12":
        error = layers.SquaredError(name="error" + number)
        inputs - "targets" >> "targets" - error
        hidden >> "default" - error
        error - "loss" >> layers.Loss(name="loss" + number)
    net = bs.Network.from_layer(hidden)
    net.initialize(bs.initializers.Gaussian(0.1))
    return net


def test_one_loss_is_a_float_called_total_loss():
    net = bs.tools.create_net_from_spec("classification", 4, 3, "F5")
    net.provide_external_data(small_data())
    net.forward_pass()
    losses = net.get_loss_values()
    assert list(losses) == ["total_loss"] and type(losses["total_loss"]) is float
    (loss_layer,) = net.loss_layers
    assert losses["total_loss"] == net.get(loss_layer + ".outputs.loss")[0]


def test_several_losses_come_by_name_and_their_sum_last():
    net = two_loss_net()
    rnd = np.random.RandomState(1)
    net.provide_external_data(
        {"default": rnd.rand(1, 5, 4), "targets": rnd.rand(1, 5, 3)}
    )
    net.forward_pass()
    losses = net.get_loss_values()
    assert list(losses) == [*net.loss_layers, "total_loss"]
    assert sorted(net.loss_layers) == ["loss1", "loss2"]
    assert losses["total_loss"] == losses["loss1"] + losses["loss2"] > 0


def test_a_network_survives_a_file(tmp_path):
    data = small_data()
    net = bs.tools.create_net_from_spec("classification", 4, 3, "F5 B F4")
    train(net, data)
    path = str(tmp_path / "net.hdf5")
    net.save_as_hdf5(path, comment="a comment")
    again = bs.Network.from_hdf5(path)
    assert np.array_equal(net.get("parameters"), again.get("parameters"))
    assert again.output_name == net.output_name
    assert list(again.layers) == list(net.layers)
    for network in (net, again):
        network.provide_external_data(data)
        network.forward_pass()
    assert np.array_equal(net.get(net.output_name), again.get(net.output_name))


def test_a_subclass_of_network_loads_too(tmp_path):
    class MyNetwork(bs.Network):
        pass

    path = str(tmp_path / "net.hdf5")
    bs.tools.create_net_from_spec("classification", 4, 3, "F5").save_as_hdf5(path)
    assert isinstance(MyNetwork.from_hdf5(path), bs.Network)


def test_hooks_that_write_files_work(tmp_path):
    data = small_data()
    net = bs.tools.create_net_from_spec("classification", 4, 3, "F5")
    trainer = bs.Trainer(bs.training.SgdStepper(0.1), verbose=False)
    hooks = bs.hooks
    for hook in (
        hooks.SaveLogs(str(tmp_path / "logs.hdf5")),
        hooks.SaveNetwork(str(tmp_path / "net.hdf5")),
        hooks.MonitorLoss("valid"),
        hooks.SaveBestNetwork(
            "MonitorLoss.total_loss", str(tmp_path / "b.hdf5"), "min"
        ),
        hooks.MonitorLayerParameters("FullyConnected"),
        hooks.MonitorLayerGradients("FullyConnected"),
        hooks.MonitorLayerInOuts("FullyConnected"),
        hooks.ModifyStepperAttribute(bs.training.Exponential(1.0, 0.9)),
        hooks.EarlyStopper("MonitorLoss.total_loss", patience=30),
        hooks.StopOnNan(),
        hooks.StopAfterThresholdReached("MonitorLoss.total_loss", 1e-9, "min"),
        hooks.StopAfterEpoch(2),
    ):
        if "FullyConnected" in getattr(hook, "layer_name", ""):
            hook.layer_name = next(
                n for n in net.layers if n not in ("Input", "Output")
            )
        trainer.add_hook(hook)
    iterator = bs.data_iterators.Minibatches(4, **data)
    trainer.train(net, iterator, valid=bs.data_iterators.Undivided(**data))
    assert hooks.SaveNetwork(str(tmp_path / "net.hdf5")).load_network()
    description = bs.get_description(trainer)
    assert isinstance(bs.create_from_description(description), bs.Trainer)


# ------------------------------------------------------------------------- extract
def lstm_net():
    net = bs.tools.create_net_from_spec("classification", 3, 2, "L4")
    net.initialize(bs.initializers.Gaussian(0.3), seed=1)
    return net


def outputs_of(net, batch, name):
    net.provide_external_data(batch, all_inputs=False)
    net.forward_pass()
    return net.get(name)


@pytest.mark.parametrize("batch_size", [1, 4, 7, 20])
def test_extract_returns_every_example_in_order(batch_size):
    net, rnd = lstm_net(), np.random.RandomState(2)
    data = rnd.rand(3, 7, 3)
    names = ["Output.outputs.predictions", "Lstm.internals.Za"]
    iterator = bs.data_iterators.Minibatches(batch_size, shuffle=False, default=data)
    results = bs.tools.extract(net, iterator, names)
    assert list(results) == names
    for name in names:
        expected = outputs_of(net, {"default": data}, name)
        assert results[name].shape == expected.shape
        assert results[name].dtype == expected.dtype
        assert np.allclose(results[name], expected, rtol=1e-5, atol=1e-6)


def test_extract_takes_a_single_name_and_keywords():
    net = lstm_net()
    iterator = bs.data_iterators.Undivided(default=np.ones((2, 3, 3)))
    name = "Output.outputs.predictions"
    results = bs.tools.extract(network=net, iter=iterator, buffer_names=name)
    assert list(results) == [name] and results[name].shape == (2, 3, 2)


def test_extract_fills_up_shorter_sequences_with_zeros():
    net = lstm_net()
    data = np.random.RandomState(2).rand(5, 4, 3)
    lengths = [2, 1, 5, 4]
    mask = (np.arange(5)[:, None] < lengths).astype(float)[..., None]
    iterator = bs.data_iterators.Minibatches(2, shuffle=False, default=data, mask=mask)
    name = "Output.outputs.predictions"
    result = bs.tools.extract(net, iterator, name)[name]
    assert result.shape == (5, 4, 2) and np.all(result[2:, :2] == 0)
    short = outputs_of(net, {"default": data[:2, :2]}, name)
    assert np.array_equal(result[:2, :2], short) and np.all(short != 0)


def test_extract_runs_what_tools_run_network_is_at_that_time(monkeypatch):
    calls = []
    own = bs.tools.run_network

    def run_network(*args, **kwargs):
        calls.append(kwargs)
        return own(*args, **kwargs)

    monkeypatch.setattr(bs.tools, "run_network", run_network)
    iterator = bs.data_iterators.Undivided(default=np.ones((2, 3, 3)))
    bs.tools.extract(lstm_net(), iterator, "Lstm.outputs.default")
    assert calls == [{"all_inputs": False}]


def test_extract_and_save_writes_the_same(tmp_path):
    import h5py

    net = lstm_net()
    data = np.random.RandomState(2).rand(3, 7, 3)
    iterator = bs.data_iterators.Minibatches(3, shuffle=False, default=data)
    name = "Output.outputs.predictions"
    path = str(tmp_path / "features.hdf5")
    bs.tools.extract_and_save(net, iterator, name, path)
    with h5py.File(path, "r") as stored:
        assert np.array_equal(
            stored[name][()], bs.tools.extract(net, iterator, name)[name]
        )


# ---------------------------------------------------------- iterators, scorers, tools
IMAGES = np.random.RandomState(0).rand(1, 6, 8, 8, 3)
WORDS = np.arange(6).reshape(1, 6, 1) % 5


def base_iterator():
    return bs.data_iterators.Minibatches(
        4, shuffle=False, default=IMAGES, words=WORDS, targets=np.ones((1, 6, 1))
    )


ITERATORS = {
    "AddGaussianNoise": lambda i: i.AddGaussianNoise(
        base_iterator(), {"default": 0.1}, {"default": 1.0}
    ),
    "AddSaltNPepper": lambda i: i.AddSaltNPepper(base_iterator(), {"default": 0.3}),
    "Flip": lambda i: i.Flip(i.Pad(base_iterator(), {"default": 1})),
    "MultiHot": lambda i: i.MultiHot(base_iterator(), {"words": 5}),
    "OneHot": lambda i: i.OneHot(base_iterator(), {"words": 5}),
    "Pad": lambda i: i.Pad(base_iterator(), {"default": 2}, {"default": 3}),
    "RandomCrop": lambda i: i.RandomCrop(base_iterator(), {"default": (5, 6)}),
    "Minibatches": lambda i: i.Minibatches(4, default=IMAGES),
    "Undivided": lambda i: i.Undivided(default=IMAGES),
}


@pytest.mark.parametrize("name", sorted(ITERATORS))
def test_every_iterator_runs(name):
    iterator = ITERATORS[name](bs.data_iterators)
    batches = [dict(batch) for batch in iterator(handler=bs.handlers.default_handler)]
    assert sum(batch["default"].shape[1] for batch in batches) == 6
    if name in ("OneHot", "MultiHot"):
        hot = np.concatenate([batch["words"] for batch in batches], axis=1)
        assert hot.dtype == np.bool_ and hot.shape == (1, 6, 5)
        assert np.array_equal(hot.argmax(axis=2)[..., None], WORDS)


def test_this_file_tries_all_of_brainstorms_iterators():
    module = bs.data_iterators
    classes = {
        name
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, module.DataIterator)
    }
    assert classes - {"DataIterator"} == set(ITERATORS)


def test_random_crop_cuts_where_random_integers_says():
    iterator = bs.data_iterators.RandomCrop(base_iterator(), {"default": (5, 6)})
    iterator.rnd.set_seed(11)
    first = next(iter(iterator()))["default"]
    rnd = np.random.RandomState(11)
    rows, columns = rnd.randint(0, 4, 4), rnd.randint(0, 3, 4)
    for example, (row, column) in enumerate(zip(rows, columns)):
        expected = IMAGES[:, example, row : row + 5, column : column + 6]
        assert np.array_equal(first[:, example], expected)


def test_every_scorer_scores():
    truth = np.array([[0.0], [1.0], [2.0]])
    guess = np.eye(3)[[0, 1, 1]]
    mask = np.array([[1.0], [1.0], [0.0]])
    assert bs.scorers.Accuracy()(truth, guess) == 2
    assert bs.scorers.Accuracy()(truth, guess, mask) == 2
    assert bs.scorers.Hamming()(guess, guess) == 3
    assert bs.scorers.Hamming()(guess, guess, mask) == 2
    assert bs.scorers.MeanSquaredError()(truth, truth + 2) == 6
    assert bs.scorers.Scorer.aggregate([(2, 4.0), (2, 2.0)]) == 1.5


INITIALIZERS = {
    "ArrayInitializer": lambda i: i.ArrayInitializer(np.ones((16, 16))),
    "DenseSqrtFanIn": lambda i: i.DenseSqrtFanIn(),
    "DenseSqrtFanInOut": lambda i: i.DenseSqrtFanInOut("tanh"),
    "EchoState": lambda i: i.EchoState(0.7),
    "Gaussian": lambda i: i.Gaussian(),
    "Identity": lambda i: i.Identity(2.0),
    "LstmOptInit": lambda i: i.LstmOptInit(i.Gaussian(), 1, 2, 3.0),
    "Orthogonal": lambda i: i.Orthogonal(),
    "RandomWalk": lambda i: i.RandomWalk("rel"),
    "SparseInputs": lambda i: i.SparseInputs(i.Gaussian(), 3),
    "SparseOutputs": lambda i: i.SparseOutputs(i.Gaussian(), 3),
    "Uniform": lambda i: i.Uniform(),
}


@pytest.mark.parametrize("name", sorted(INITIALIZERS))
def test_every_initializer_fills_a_matrix(name):
    values = INITIALIZERS[name](bs.initializers)((16, 16))
    assert values.shape == (16, 16) and values.dtype == np.float64
    assert np.all(np.isfinite(values)) and np.any(values != 0)


def test_this_file_tries_all_of_brainstorms_initializers():
    assert set(bs.initializers.__all__) == set(INITIALIZERS)


def test_data_can_be_split_and_shuffled():
    data = np.arange(20).reshape(1, 20, 1)
    (first,), (second,) = bs.tools.split(data, ratios=(3, 1))
    assert first.shape == (1, 15, 1) and second.shape == (1, 5, 1)
    (shuffled,) = bs.tools.shuffle_data(data, seed=1)
    assert sorted(shuffled.ravel()) == list(range(20))


@pytest.mark.parametrize(
    "name", ["ConstrainL2Norm", "ClipValues", "L1Decay", "L2Decay"]
)
def test_value_modifiers_run_in_training(name):
    modifier = (
        getattr(bs.value_modifiers, name)(0.5)
        if name != "ClipValues"
        else (bs.value_modifiers.ClipValues(-0.5, 0.5))
    )
    net = bs.tools.create_net_from_spec("classification", 4, 3, "F5")
    if isinstance(modifier, bs.value_modifiers.GradientModifier):
        net.set_gradient_modifiers(modifier)
    else:
        net.set_weight_modifiers(modifier)
    train(net, small_data())
    assert np.all(np.isfinite(net.get("parameters")))


def test_schedules_have_infinity_as_their_default():
    schedule = bs.training.Exponential(1.0, 0.5)
    assert schedule.minimum == -np.inf and schedule.maximum == np.inf
    description = bs.get_description(schedule)
    assert bs.create_from_description(description).maximum == np.inf


def test_the_debug_handler_trains():
    net = bs.tools.create_net_from_spec("classification", (6, 6, 1), 3, "C3:3 P2 F5")
    net.set_handler(bs.handlers.DebugHandler(bs.handlers.NumpyHandler(np.float32)))
    data = {
        name: value.astype(np.float32) for name, value in small_data((6, 6, 1)).items()
    }
    net.provide_external_data(
        {name: net.handler.create_from_numpy(value) for name, value in data.items()}
    )
    net.forward_pass(training_pass=True)
    net.backward_pass()
    assert np.all(np.isfinite(net.get("gradients")))
