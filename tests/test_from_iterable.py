"""Data iterators of anything that makes minibatches."""

from __future__ import annotations

import numpy as np
import pytest

import brainstorm_dbuf as dbuf
import brainstorm as bs
from brainstorm.data_iterators import AddGaussianNoise
from coded import FEATURES, Job, batch, codes

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_left")]

NAMES = ("default", "targets")


class Tensor:
    """What NumPy takes as an array, as a tensor of another library is."""

    def __init__(self, array):
        self.array = array
        self.shape = array.shape

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.array, dtype)


class Loader:
    """Re-iterable, with a length, of lists of tensors of shape (B, ...)."""

    def __init__(self, count):
        self.count = count
        self.passes = 0

    def __len__(self):
        return self.count

    def __iter__(self):
        self.passes += 1
        for k in range(self.count):
            yield [Tensor(batch(k)[name][0]) for name in NAMES]


def test_a_loader_of_lists_of_tensors_trains(kind, driver, way):
    loader = Loader(5)
    iterator = dbuf.FromIterable(loader, NAMES, has_time=False)
    assert iterator.length == 5
    assert iterator.data_shapes == dict.fromkeys(NAMES, (1, 2, FEATURES))
    job = Job(kind, driver, epochs=3).train(iterator)
    assert job.seen == codes(0, 1, 2, 3, 4) * 3
    # Looking at the first minibatch was the begin of the first pass.
    assert loader.passes == 3


def test_a_generator_function_trains(kind, driver, way):
    made = []

    def make_pass():
        made.append(1)
        for k in range(4):
            yield batch(k)

    iterator = dbuf.FromIterable(make_pass)
    assert iterator.length is None
    assert Job(kind, driver, epochs=2).train(iterator).seen == codes(0, 1, 2, 3) * 2
    assert len(made) == 2


def test_the_function_may_be_a_class():
    class Passes:
        def __len__(self):
            raise AssertionError("of an object, not of the class")

        def __iter__(self):
            return iter([batch(0), batch(1)])

    iterator = dbuf.FromIterable(Passes)
    assert iterator.length is None
    assert len([*iterator()]) == len([*iterator()]) == 2


def test_with_shapes_nothing_is_fetched_before_its_time():
    def never():
        raise AssertionError
        yield

    shapes = {"default": (1, 2, 3), "targets": (1, 2, 1)}
    iterator = dbuf.FromIterable(never, data_shapes=shapes, length=7)
    assert (iterator.data_shapes, iterator.length) == (shapes, 7)
    with pytest.raises(AssertionError):
        next(iterator())


def test_brainstorms_iterators_wrap_it():
    noisy = AddGaussianNoise(
        dbuf.FromIterable([batch(k) for k in range(3)]), {"default": 0.5}
    )
    seen = list(noisy(None))
    assert len(seen) == noisy.length == 3
    assert seen[1]["default"].std() > 0 and (seen[2]["targets"] == 1002).all()


def test_labels_and_single_arrays_get_their_axes():
    labels = np.arange(4)
    images = np.zeros((4, 5, 5, 1))
    iterator = dbuf.FromIterable([(images, labels)], NAMES, has_time=False)
    (made,) = iterator()
    assert made["default"].shape == (1, 4, 5, 5, 1)
    assert made["targets"].shape == (1, 4, 1)
    np.testing.assert_array_equal(made["targets"].ravel(), labels)
    (made,) = dbuf.FromIterable([images], ["default"], has_time=False)()
    assert made["default"].shape == (1, 4, 5, 5, 1)


def test_arrays_on_a_device_are_passed_on(cuda):
    arrays = {name: cuda.zeros((1, 2, FEATURES)) for name in NAMES}
    (made,) = dbuf.FromIterable([arrays])()
    assert all(made[name] is arrays[name] for name in NAMES)


def test_no_random_number_is_drawn():
    bs.global_rnd.set_seed(3)
    expected = bs.global_rnd.randint(1 << 30)
    bs.global_rnd.set_seed(3)
    dbuf.FromIterable([batch(0)])
    assert bs.global_rnd.randint(1 << 30) == expected


@pytest.mark.parametrize(
    "source, options, error, text",
    [
        (5, {}, TypeError, "source: expected an iterable or a function.*got int"),
        ((x for x in ()), {}, TypeError, "a generator can be gone through once only"),
        (iter([]), {}, TypeError, "list_iterator can be gone through once only"),
        ([], {}, ValueError, "no minibatch"),
        ([[1, 2]], {}, TypeError, "mappings of names to arrays, got a list; names="),
        ([batch(0)], {"names": NAMES}, TypeError, "leave out names="),
        ([(1,)], {"names": NAMES}, ValueError, "of 2 arrays, for .*, got one of 1"),
        ([1], {"names": "default"}, TypeError, "got the string 'default'"),
        (
            [[np.array([np.ones(1), np.ones(2)], object)]],
            {"names": ["a"]},
            TypeError,
            r"'a': expected an array of numbers, got one of shape \(2,\) and dtype obj",
        ),
        ([{"a": np.array(["b"])}], {}, TypeError, "'a': expected an array of numbers"),
        ([3.0], {"names": ["a"], "has_time": False}, ValueError, "'a'.*got a number"),
    ],
)
def test_what_is_no_source_is_refused(source, options, error, text):
    with pytest.raises(error, match=text):
        dbuf.FromIterable(source, **options)


def test_an_error_of_the_source_comes_out_of_training_and_it_trains_again(
    kind, driver, way
):
    fails = [False]

    def make_pass():
        for k in range(4):
            if fails[0] and k == 2:
                raise OSError("no such file")
            yield batch(k)

    iterator = dbuf.FromIterable(make_pass)
    job = Job(kind, driver)
    fails[0] = True
    with pytest.raises(OSError, match="no such file"):
        job.train(iterator)
    assert job.seen == codes(0, 1)
    fails[0] = False
    job.train_again()
    assert Job(kind, driver).train(iterator).seen == codes(0, 1, 2, 3)
