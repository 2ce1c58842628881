"""The iterator's contract: what it may yield, in which order and how often."""

from __future__ import annotations

import gc
import itertools
import weakref

import numpy as np
import pytest

import brainstorm_dbuf as dbuf
import brainstorm as bs
from brainstorm.data_iterators import (
    AddGaussianNoise,
    AddSaltNPepper,
    Minibatches,
)
from coded import FEATURES, From, Job, batch, coded_net, codes
from networks import NETWORKS
from parity import assert_same, poison_back_buffers, skip_what_pycuda_cannot

pytestmark = [pytest.mark.timeout(10), pytest.mark.usefixtures("nothing_left")]


def both(kind, driver, run):
    """Return what run gives for brainstorm's own training and for ours."""
    with skip_what_pycuda_cannot(kind):
        plain = run(double_buffering=False)
    buffered = run(double_buffering=True)
    assert_same(plain, buffered)
    return plain, buffered


# ------------------------------------------------------------- nothing to copy (18)


@pytest.mark.parametrize("shape", [0, (0, 3), (2, 0, 3)])
def test_a_page_locked_array_of_nothing_has_its_shape(driver, shape):
    array = dbuf.pagelocked_empty(shape)
    assert array.shape == ((shape,) if isinstance(shape, int) else shape)
    del array


def test_a_copy_of_nothing_returns_and_its_event_is_recorded(driver):
    with dbuf.Stream() as stream, dbuf.Event() as event:
        memory = dbuf.mem_alloc(16)
        dbuf.memcpy_htod_async(memory, dbuf.pagelocked_empty((0, 3)), stream)
        dbuf.memcpy_htod(memory, np.empty((0, 3), np.float32))
        event.record(stream)
        event.synchronize()
        assert event.query()


def test_a_minibatch_without_time_steps_is_trained_as_brainstorm_does(
    kind, driver, way
):
    batches = [batch(0), batch(1, steps=0), batch(2, steps=2)]

    def run(double_buffering):
        job = Job(kind, driver, double_buffering)
        return job.train(From(lambda: iter(batches))).result()

    _, buffered = both(kind, driver, run)
    assert buffered.losses[0] == [(0, 1000), (None, None), (2, 1002)]


def test_a_minibatch_without_samples_ends_as_in_brainstorm(kind, driver, way):
    if kind == "pycuda":
        pytest.skip("brainstorm launches kernels of no block")
    batches = [batch(0), batch(1, samples=0), batch(2)]
    errors = []
    for double_buffering in (False, True):
        job = Job(kind, driver, double_buffering)
        with pytest.raises(ZeroDivisionError) as caught:  # brainstorm's loss: 0 / B
            job.train(From(lambda: iter(batches)))
        errors.append(str(caught.value))
        assert job.seen == codes(0)
        del caught
        job.train_again()
    assert errors[0] == errors[1]


def test_minibatches_may_cut_a_batch_to_no_time_steps(kind, driver, way):
    mask = np.ones((3, 3, 1))
    mask[:, 1] = 0
    data = {
        "default": np.arange(27.0).reshape(3, 3, 3),
        "targets": np.ones((3, 3, 1)),
        "mask": mask,
    }
    shapes = [d["default"].shape for d in Minibatches(1, shuffle=False, **data)()]
    assert shapes == [(3, 1, 3), (0, 1, 3), (3, 1, 3)]

    def run(double_buffering):
        job = Job(kind, driver, double_buffering, net=masked_net)
        job.stepper.look = lambda: None
        return job.train(Minibatches(1, shuffle=False, **data)).result()

    both(kind, driver, run)


def masked_net():
    return bs.tools.create_net_from_spec(
        "classification", (3,), 2, "L4", mask_name="mask"
    )


# ------------------------------------------------------------- element types (19)

NUMBERS = {
    "float64": (np.array([0.1, 1e300]), [np.float32(0.1), np.inf]),
    "float16": (np.array([0.5, 2], np.float16), [0.5, 2]),
    "uint8": (np.array([0, 255], np.uint8), [0, 255]),
    "bool": (np.array([True, False]), [1, 0]),
    "int64": (np.array([2**24 + 1, -1]), [16777216, -1]),
    "objects": (np.array([1, 2.5], object), [1, 2.5]),
    "the other byte order": (np.array([1, 2.5], ">f4"), [1, 2.5]),
}
NO_NUMBERS = {
    "an object array with a list inside": (
        np.array([1, [2, 3]], object).reshape(1, 2, 1),
        "object array",
    ),
    "strings": (np.array(["a", "b"]).reshape(1, 2, 1), "<U1"),
    "complex": (np.array([1j, 2]).reshape(1, 2, 1), "complex128"),
    "dates": (np.array([0, 1], "M8[s]").reshape(1, 2, 1), "datetime64"),
    "a list": ([[[1.0], [2.0]]], "list"),
    "None": (None, "None"),
    "a string": ("abc", "str"),
}


def one_input(default):
    return {"default": default, "targets": np.zeros((1, 2, FEATURES), np.float32)}


def one_feature_net():
    return coded_net(1)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_every_type_become_float32(name, kind, driver, way):
    array, expected = NUMBERS[name]
    given = one_input(array.reshape(1, 2, 1))
    # brainstorm's NumpyHandler takes no object arrays.
    for double_buffering in (True,) if name == "objects" else (False, True):
        seen = []
        job = Job(kind, driver, double_buffering, net=one_feature_net)
        job.stepper.run = lambda: seen.append(job.net.get_input("default").ravel())
        # Twice: the first minibatch of a pass has no worker.
        job.trainer.train_scorers = []
        with np.errstate(all="ignore"):
            job.train(From(lambda: iter([given, given])))
        for values in seen:
            assert values.dtype == np.float32
            assert values.tolist() == [float(value) for value in expected]
        assert len(seen) == 2
        del job.stepper.run


@pytest.mark.parametrize("name", NO_NUMBERS)
def test_what_is_no_number_is_an_error_that_names_input_and_type(
    name, kind, driver, way
):
    array, named = NO_NUMBERS[name]
    for where in ("default", "targets"):
        check_is_refused(where, array, named, kind, driver)


def check_is_refused(where, array, named, kind, driver):
    good = one_input(np.ones((1, 2, 1)))
    job = Job(kind, driver, net=one_feature_net)
    with pytest.raises(TypeError) as caught:
        job.train(From(lambda: iter([good, {**good, where: array}])))
    assert f"input '{where}'" in str(caught.value)
    assert named in str(caught.value)
    assert len(job.seen) == 1
    del caught
    job.trainer.hooks.clear()
    job.trainer.add_hook(bs.hooks.StopAfterEpoch(5))
    job.trainer.current_epoch_nr = 4
    job.train(From(lambda: iter([good])))
    assert len(job.seen) == 2


def test_an_object_array_is_never_copied_as_bytes(driver):
    memory = dbuf.mem_alloc(64)
    with pytest.raises(TypeError, match="object"):
        dbuf.memcpy_htod(memory, np.array([1, 2.5], object))


# ------------------------------------------------------- ragged in B and in T (21)


@pytest.mark.parametrize("seed", [None, 0, 1, 2, 3, 4])
def test_minibatches_ragged_in_samples_and_steps_train_the_same(
    seed, kind, driver, way, monkeypatch
):
    poison_back_buffers(monkeypatch)
    if driver.fake is not None:
        driver.fake.mode("random", seed or 0)
    lengths = np.array([2, 2, 1, 1, 2])
    rnd = np.random.default_rng(1)
    data = {
        "default": rnd.standard_normal((3, 5, 6)),
        "targets": rnd.integers(0, 3, (3, 5, 1)),
        "mask": (np.arange(3)[:, None] < lengths)[:, :, None].astype(float),
    }
    shapes = []

    def run(double_buffering):
        job = Job(
            kind,
            driver,
            double_buffering,
            epochs=3,
            net=NETWORKS["lstm with a mask"],
        )
        seen = shapes if not double_buffering else []

        def look():
            arrays = [job.net.get_input(name) for name in sorted(data)]
            return [(array.shape, array.tolist()) for array in arrays]

        job.stepper.look = look
        job.stepper.also = lambda n: seen.append(job.net.get_input("default").shape)
        job.trainer.train_scorers = [
            bs.scorers.Accuracy("Output.outputs.predictions", mask_name="mask")
        ]
        iterator = Minibatches(2, shuffle=seed is not None, **data)
        iterator.rnd.set_seed(seed or 0)
        result = job.train(iterator).result()
        del job.stepper.look, job.stepper.also
        return result

    both(kind, driver, run)
    assert set(shapes) == {(2, 2, 6), (1, 2, 6), (2, 1, 6)}
    assert len(shapes) == 9


# ------------------------------------------- the iterator uses its array again (28)


def one_array():
    array = np.empty((1, 2, FEATURES), np.float32)
    targets = np.empty_like(array)
    for k in range(4):
        array[...], targets[...] = k, k + 1000
        yield {"default": array, "targets": targets}


def one_dict():
    data = {}
    for k in range(4):
        data.clear()
        data.update(batch(k))
        yield data
        assert list(data) == ["default", "targets"]


def ring_of_two():
    ring = np.empty((2, 2, 1, 2, FEATURES), np.float32)
    for k in range(4):
        default, targets = ring[k % 2]
        default[...], targets[...] = k, k + 1000
        yield {"default": default, "targets": targets}


def one_page_locked_array():
    # Large enough that it is copied from where it lies.
    shape = (1, 12000, FEATURES)
    array, targets = dbuf.pagelocked_empty(shape), dbuf.pagelocked_empty(shape)
    for k in range(4):
        array[...], targets[...] = k, k + 1000
        yield {"default": array, "targets": targets}
    array[...] = targets[...] = -1


def one_small_page_locked_array():
    shape = (1, 2, FEATURES)
    array, targets = dbuf.pagelocked_empty(shape), dbuf.pagelocked_empty(shape)
    for k in range(4):
        array[...], targets[...] = k, k + 1000
        yield {"default": array, "targets": targets}


REUSED = [
    one_array,
    one_dict,
    ring_of_two,
    one_page_locked_array,
    one_small_page_locked_array,
]


@pytest.mark.parametrize("make_pass", REUSED)
def test_an_iterator_may_use_its_arrays_again(make_pass, kind, driver, way):
    for depth, mode in itertools.product([1, 2, 4], ["late", "random", "eager"]):
        if driver.fake is not None:
            driver.fake.mode(mode)
        job = Job(kind, driver, epochs=2, depth=depth).train(From(make_pass))
        assert job.seen == codes(0, 1, 2, 3) * 2
        if way == "worker":
            assert job.stats.prefetched == 6
        if make_pass is one_page_locked_array and kind != "numpy":
            # One an epoch where the others are put straight into the network.
            assert job.stats.direct == (2 if way == "automatic" else 8)
        elif make_pass is not one_page_locked_array:
            assert job.stats.direct == 0


def test_nothing_of_a_minibatch_is_kept(kind, driver, way):
    class Dict(dict):
        pass

    alive = []

    def make_pass():
        previous = None
        for k in range(4):
            if previous is not None:
                gc.collect()
                alive.append([ref() is not None for ref in previous])
            data = Dict(batch(k))
            previous = [weakref.ref(data), *map(weakref.ref, data.values())]
            yield data
            del data

    job = Job(kind, driver).train(From(make_pass))
    assert job.seen == codes(0, 1, 2, 3)
    assert alive == [[False] * 3] * 3


# ------------------------------------------------------------ random streams (31)


def noisy(rnd):
    data = {
        "default": rnd.standard_normal((5, 22, 6)),
        "targets": rnd.integers(0, 3, (5, 22, 1)),
    }
    iterator = Minibatches(4, shuffle=True, **data)
    iterator = AddGaussianNoise(iterator, {"default": 0.1})
    return AddSaltNPepper(iterator, {"default": 0.2})


def dropout_net():
    net = NETWORKS["mlp with dropout"]()
    net.set_weight_modifiers(
        {"FC_1": {"W": bs.value_modifiers.ConstrainL2Norm(0.5)}}
        if "FC_1" in net.layers
        else bs.value_modifiers.ClipValues(-0.3, 0.3)
    )
    return net


def test_seeded_training_gives_the_same_numbers_each_time(kind, driver, way):
    def run(double_buffering):
        job = Job(kind, driver, double_buffering, epochs=3, net=dropout_net)
        job.stepper.look = lambda: the_sum(job.net)
        job.stepper.learning_rate = 0.1
        result = job.train(noisy(np.random.default_rng(5))).result()
        del job.stepper.look
        return result

    plain = run(False)
    assert len(plain.losses[1]) == 18
    assert len(set(plain.losses[1])) == 18
    for _ in range(10):
        assert_same(plain, run(True))


def the_sum(net):
    return net.get_input("default").sum(dtype=float)


def test_with_numpys_global_generator_the_order_of_minibatches_is_right(
    kind, driver, way
):
    def make_pass():
        for k in range(6):
            np.random.random()
            yield batch(k)

    job = Job(kind, driver, also=lambda step: np.random.random(3))
    assert job.train(From(make_pass)).seen == codes(*range(6))


def test_a_second_run_after_the_first_goes_on_with_the_same_draws(kind, driver, way):
    """Nothing of the next epoch is drawn before the epoch's hooks have run."""

    def run(double_buffering):
        job = Job(kind, driver, double_buffering, epochs=2, net=dropout_net)
        iterator = noisy(np.random.default_rng(5))
        states = []

        class Look(bs.hooks.Hook):
            def __call__(self, **kwargs):
                states.append(iterator.rnd.get_state()[1].tolist())

        job.trainer.add_hook(Look())
        job.stepper.look = lambda: the_sum(job.net)
        job.train(iterator)
        job.trainer.hooks["StopAfterEpoch"].max_epochs = 4
        result = job.train(iterator).result()
        result.losses.append(states)
        del job.stepper.look
        return result

    both(kind, driver, run)


@pytest.mark.parametrize("over", ["ignore", "raise"])
def test_numpys_error_state_of_the_trainer_holds_for_the_iterator(
    over, kind, driver, way
):
    def make_pass():
        for k in range(3):
            np.full(2, 3e38, np.float32) * np.float32(10 if k == 2 else 1)
            yield batch(k)

    job = Job(kind, driver)
    with np.errstate(over=over):
        if over == "ignore":
            job.train(From(make_pass))
            assert job.seen == codes(0, 1, 2)
        else:
            with pytest.raises(FloatingPointError):
                job.train(From(make_pass))
            assert job.seen == codes(0, 1)
