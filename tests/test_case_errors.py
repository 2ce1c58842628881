"""Errors come out of train() in the trainer's thread, and training can start again."""

from __future__ import annotations

import gc
import threading
import traceback
import weakref

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import brainstorm_dbuf as dbuf
import brainstorm as bs
from brainstorm.handlers.debug_handler import DebugHandler
from brainstorm_dbuf import back_buffers
from coded import From, Hook, Job, batch, coded, coded_net, codes, workers
from parity import assert_same, force_worker

pytestmark = [pytest.mark.timeout(10), pytest.mark.usefixtures("nothing_left")]


class NeedsAnArgument(Exception):
    def __init__(self, code):
        super().__init__()
        self.code = code


class Raising:
    """Yields coded minibatches; from the k-th on `next` raises, again and again."""

    def __init__(self, k, error):
        self.left = iter(range(k))
        self.error = error

    def __iter__(self):
        return self

    def __next__(self):
        for k in self.left:
            return batch(k)
        raise self.error


def raising_generator(k, error):
    yield from (batch(j) for j in range(k))
    raise error() if isinstance(error, type) else error


def raising_in_call(k, error):
    raise error


KINDS = [
    lambda: OSError(5, "disk gone"),
    lambda: ValueError("bad record"),
    lambda: KeyError("name"),
    lambda: MemoryError("no room"),
    lambda: RuntimeError("generator raised StopIteration"),
    lambda: AssertionError(),
    lambda: NeedsAnArgument(7),
    lambda: SystemExit(3),
    lambda: KeyboardInterrupt(),
    lambda: GeneratorExit(),
]
PLACES = [raising_generator, Raising, raising_in_call]


def frames(error):
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def check_error(job, make_pass, error, k):
    """Train and see exactly this error, in this thread, after k steps."""
    with pytest.raises(type(error)) as caught:
        job.train(From(make_pass))
    assert caught.value is error
    if isinstance(error, KeyboardInterrupt) and k and not job.stats.workers:
        # In the trainer's own thread it may be Ctrl-C, which waits for no step.
        assert job.seen in (codes(*range(k - 1)), codes(*range(k)))
    else:
        assert job.seen == codes(*range(k))
    assert workers() == []
    return frames(error)


# ------------------------------------------------- the iterator raises, anywhere (22)


@pytest.mark.parametrize("make_error", KINDS)
@pytest.mark.parametrize("place", [raising_generator, Raising])
def test_the_very_error_comes_out_after_the_steps_before_it(
    place, make_error, kind, driver, way
):
    error = make_error()
    job = Job(kind, driver)
    names = check_error(job, lambda: place(2, error), error, 2)
    assert names[-1] == ("__next__" if place is Raising else "raising_generator")
    assert "train" in names
    job.train_again()


@pytest.mark.parametrize("place", PLACES)
def test_an_error_before_the_first_minibatch_comes_out(place, kind, driver, way):
    error = OSError("cannot open")
    job = Job(kind, driver)
    names = check_error(job, lambda: place(0, error), error, 0)
    assert names[-1] == {Raising: "__next__"}.get(place, getattr(place, "__name__"))
    job.train_again()


@settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    k=st.integers(0, 6),
    make_error=st.sampled_from(KINDS),
    place=st.sampled_from(PLACES),
    depth=st.integers(1, 4),
    slow=st.booleans(),
)
@pytest.mark.timeout(30)
def test_an_iterator_may_raise_anything_anywhere(
    kind, driver, way, k, make_error, place, depth, slow
):
    error = make_error()
    step = threading.Event()
    job = Job(kind, driver, depth=depth, also=lambda n: step.wait(0.001 * slow))
    if place is raising_in_call:
        k = 0
    check_error(job, lambda: place(k, error), error, k)
    job.train_again()


def test_an_error_in_the_second_epoch_comes_out_then(kind, driver, way):
    passes = []

    def make_pass():
        passes.append(None)
        error = OSError("gone") if len(passes) == 2 else None
        return raising_generator(2, error) if error else iter([batch(0), batch(1)])

    job = Job(kind, driver, epochs=3)
    with pytest.raises(OSError, match="gone"):
        job.train(From(make_pass))
    assert job.seen == codes(0, 1, 0, 1)
    job.train_again()


@pytest.mark.parametrize("slot", ["HostSlot", "DeviceSlot"])
def test_an_error_while_a_minibatch_is_staged_comes_out(
    slot, kind, driver, monkeypatch
):
    force_worker(monkeypatch)
    error = RuntimeError("cannot stage")
    cls = getattr(back_buffers, slot)
    fill, filled = cls.fill, []

    def failing(self, *arguments):
        filled.append(threading.current_thread())
        if len(filled) == 3:
            raise error
        fill(self, *arguments)

    job = Job(kind, driver)
    with monkeypatch.context() as patch:
        patch.setattr(cls, "fill", failing)
        if (slot == "HostSlot") != (kind == "numpy"):
            assert job.train(coded(5)).seen == codes(*range(5))
            return
        with pytest.raises(RuntimeError) as caught:
            job.train(coded(5))
    # On a device the first minibatch, too, is staged: by the trainer's thread.
    steps = 3 if kind == "numpy" else 2
    assert caught.value is error
    assert job.seen == codes(*range(steps))
    assert filled[-1] is not threading.current_thread()
    assert filled[-1].name == "brainstorm-dbuf feed"
    job.train_again()


def test_an_error_leaves_no_reference_to_itself_behind(kind, driver, way):
    class Mark(Exception):
        pass

    job = Job(kind, driver)
    gc.collect()
    gc.disable()
    try:
        left = None
        try:
            job.train(From(lambda: raising_generator(3, Mark)))
        except Mark as error:
            left = weakref.ref(error)
        assert left() is None
    finally:
        gc.enable()


def test_an_error_in_a_step_ends_the_pass(kind, driver, way):
    finished = []

    def make_pass():
        try:
            yield from (batch(k) for k in range(10))
        finally:
            finished.append(threading.current_thread())

    error = FloatingPointError("loss")

    def also(step):
        if step == 3:
            raise error

    job = Job(kind, driver, also=also)
    with pytest.raises(FloatingPointError) as caught:
        job.train(From(make_pass))
    assert caught.value is error
    assert job.seen == codes(0, 1, 2)
    assert len(finished) == 1
    assert workers() == []
    del caught
    job.train_again()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_error_in_a_hook_ends_training_with_that_error(kind, driver, way, capsys):
    error = LookupError("hook")

    def fail(update_nr):
        if update_nr == 2:
            raise error

    job = Job(kind, driver, hooks=[Hook(fail)])
    with pytest.raises(LookupError) as caught:
        job.train(coded(6))
    assert caught.value is error
    assert job.seen == codes(0, 1)
    assert "test hook" in capsys.readouterr().err
    assert workers() == []
    del caught
    job.train_again()


# ----------------------------------------------------------- wrong shapes (34)


def with_targets(k, **shape):
    return {"default": batch(k)["default"], "targets": batch(k, **shape)["targets"]}


def reversed_names(data):
    return dict(reversed(data.items()))


WRONG = {
    # minibatch 2; the input named, expected and given shape
    "features": (batch(2, features=4), "default", (1, 2, 3), (1, 2, 4)),
    "samples": (with_targets(2, samples=3), "targets", (1, 2, 3), (1, 3, 3)),
    "fewer samples": (with_targets(2, samples=1), "targets", (1, 2, 3), (1, 1, 3)),
    "steps": (with_targets(2, steps=2), "targets", (1, 2, 3), (2, 2, 3)),
    "samples, targets first": (
        reversed_names(with_targets(2, samples=3)),
        "default",
        (1, 3, 3),
        (1, 2, 3),
    ),
    "two axes": (
        {**batch(2), "default": np.zeros((1, 2), np.float32)},
        "default",
        (1, 2, 3),
        (1, 2),
    ),
    "four axes": (
        {**batch(2), "default": np.zeros((1, 2, 3, 1), np.float32)},
        "default",
        (1, 2, 3),
        (1, 2, 3, 1),
    ),
    "a broadcast": (
        {**batch(2), "targets": np.zeros((1, 2, 1), np.float32)},
        "targets",
        (1, 2, 3),
        (1, 2, 1),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_shape_is_named_at_its_minibatch(name, kind, driver, way):
    bad, named, expected, given_shape = WRONG[name]
    job = Job(kind, driver)
    batches = [batch(0), batch(1), bad, batch(3)]
    with pytest.raises(ValueError) as caught:
        job.train(From(lambda: iter(batches)))
    for part in (f"'{named}'", str(expected), str(given_shape)):
        assert part in str(caught.value)
    assert job.seen == codes(0, 1)
    assert workers() == []
    del caught
    job.train_again()


@pytest.mark.parametrize("bad", [np.float32(1), np.zeros(3, np.float32)])
def test_a_minibatch_without_time_and_samples_is_named(bad, kind, driver, way):
    job = Job(kind, driver)
    batches = [batch(0), {"default": bad, "targets": bad}]
    with pytest.raises((TypeError, ValueError), match="input 'default'") as caught:
        job.train(From(lambda: iter(batches)))
    assert "(T, B, ...)" in str(caught.value)
    assert job.seen == codes(0)


@pytest.mark.parametrize("fault", ["smaller", "larger", "float64", "transposed"])
def test_a_wrong_array_on_the_device_is_not_copied(fault, kind, driver, way):
    if kind == "numpy":
        pytest.skip("no device")
    if kind == "cuda" and fault == "float64":
        pytest.skip("it has no such arrays")

    def on_device(k, features=3, dtype=np.float32):
        data = batch(k, features=features)
        handler = job.net.handler
        arrays = {n: handler.create_from_numpy(a) for n, a in data.items()}
        if dtype != np.float32:
            arrays["default"] = as_dtype(arrays["default"], data["default"], dtype)
        return arrays

    def as_dtype(array, values, dtype):
        if kind == "device":
            return array.astype(dtype).view(type(array))
        from pycuda import gpuarray

        return gpuarray.to_gpu(values.astype(dtype))

    job = Job(kind, driver)
    # Made here: PyCUDA makes no array in a thread without a context of PyCUDA's own.
    batches = [on_device(0), on_device(1)]
    if fault == "float64":
        batches.append(on_device(2, dtype=np.float64))
    elif fault == "transposed":
        data = on_device(2)
        if kind == "cuda":  # every other column, that is
            data["default"] = job.net.handler.zeros((3, 2, 2))[:, :, ::2]
        else:
            data["default"] = data["default"].transpose((2, 1, 0))
        batches.append(data)
    else:
        batches.append(on_device(2, features=2 if fault == "smaller" else 4))
    with pytest.raises(ValueError, match="input 'default'") as caught:
        job.train(From(lambda: iter(batches)))
    wrong = {"float64": "float64", "smaller": "(1, 2, 2)", "larger": "(1, 2, 4)"}
    assert wrong.get(fault, "(3, 2, 1)") in str(caught.value)
    assert job.seen == codes(0, 1)
    del caught
    job.train_again()


# ------------------------------------------- missing, extra and misnamed inputs


@pytest.mark.parametrize("missing", ["default", "targets"])
def test_a_missing_input_is_named_with_those_that_came(missing, kind, driver, way):
    data = batch(1)
    del data[missing]
    job = Job(kind, driver)
    with pytest.raises(KeyError, match=f"input '{missing}' is missing") as caught:
        job.train(From(lambda: iter([batch(0), data])))
    assert str(list(data)) in str(caught.value)
    assert job.seen == codes(0)
    del caught
    job.train_again()


def test_a_misnamed_input_is_named_with_those_that_came(kind, driver, way):
    data = {"Default": batch(1)["default"], "targets": batch(1)["targets"]}
    job = Job(kind, driver)
    with pytest.raises(KeyError, match="input 'default' is missing") as caught:
        job.train(From(lambda: iter([batch(0), data])))
    assert "'Default'" in str(caught.value)
    assert job.seen == codes(0)


def test_inputs_that_the_network_lacks_are_left_alone_as_in_brainstorm(
    kind, driver, way
):
    def make_pass():
        for k in range(3):
            yield {**batch(k), "weights": np.ones((7, 1)), "names": ["a", "b"]}

    for double_buffering in (False, True):
        job = Job(kind, driver, double_buffering)
        assert job.train(From(make_pass)).seen == codes(0, 1, 2)


def test_an_input_that_the_network_lacks_may_come_first(kind, driver, way):
    """T and B are those of the first entry, in brainstorm, whatever it is."""

    def make_pass():
        for k in range(3):
            yield {"ids": np.zeros((1, 2), int), **batch(k)}

    for double_buffering in (False, True):
        job = Job(kind, driver, double_buffering)
        assert job.train(From(make_pass)).seen == codes(0, 1, 2)


@pytest.mark.parametrize("names", [("default",), ("default", "targets", "mask")])
def test_an_iterator_with_other_inputs_than_the_network_is_refused_before_it_runs(
    names, kind, driver, way
):
    called = []
    job = Job(kind, driver)
    with pytest.raises(AssertionError, match="network input names"):
        job.train(From(lambda: called.append(None), names=names))
    assert called == []
    job.train_again()


@pytest.mark.parametrize("item", [None, 3, [1, 2], (batch(0), batch(1)), {}, "abc"])
def test_what_is_no_minibatch_is_an_error_that_says_so(item, kind, driver, way):
    job = Job(kind, driver)
    with pytest.raises((TypeError, ValueError), match="a data iterator") as caught:
        job.train(From(lambda: iter([batch(0), item])))
    assert "dict" in str(caught.value)
    assert job.seen == codes(0)
    assert workers() == []


@pytest.mark.parametrize("not_iterable", [None, 3])
def test_a_pass_that_is_no_iterator_is_an_error_as_in_brainstorm(
    not_iterable, kind, driver, way
):
    for double_buffering in (False, True):
        job = Job(kind, driver, double_buffering)
        with pytest.raises(TypeError, match="not iterable"):
            job.train(From(lambda: not_iterable))
    job.train_again()


# ------------------------------------------------------------- depth, handlers


@pytest.mark.parametrize("depth", [0, -1])
@pytest.mark.parametrize("make", ["Trainer", "Prefetch"])
def test_a_depth_below_one_is_refused(make, depth):
    argument = bs.training.SgdStepper() if make == "Trainer" else coded(1)
    with pytest.raises(ValueError, match="depth") as caught:
        getattr(dbuf, make)(argument, depth=depth)
    assert str(depth) in str(caught.value)


@pytest.mark.parametrize("depth", [True, "2", None, 2.0, [2]])
@pytest.mark.parametrize("make", ["Trainer", "Prefetch"])
def test_a_depth_that_is_no_integer_is_refused(make, depth):
    argument = bs.training.SgdStepper() if make == "Trainer" else coded(1)
    with pytest.raises(TypeError, match="depth") as caught:
        getattr(dbuf, make)(argument, depth=depth)
    assert repr(depth) in str(caught.value)


def debug_job(double_buffering):
    job = Job("numpy", None, double_buffering, epochs=2)
    job.net.set_handler(DebugHandler(job.net.handler))
    return job


def test_an_unknown_handler_is_named_in_one_warning_and_trains_the_same(monkeypatch):
    force_worker(monkeypatch)
    plain = debug_job(False).train(coded(4)).result()
    job = debug_job(True)
    with pytest.warns(dbuf.FeedWarning, match="DebugHandler") as warned:
        job.train(coded(4))
    assert len(warned) == 1
    assert_same(plain, job.result())
    assert job.stats.workers == 0
    assert ["DebugHandler" in reason for reason in job.stats.fallbacks] == [True]


def test_a_prefetch_on_an_unknown_handler_passes_minibatches_through(monkeypatch):
    force_worker(monkeypatch)
    job = debug_job(False)
    plain = job.train(coded(4)).result()
    job = debug_job(False)
    with pytest.warns(dbuf.FeedWarning, match="DebugHandler"):
        job.train(dbuf.Prefetch(coded(4)))
    assert_same(plain, job.result())


def test_a_network_that_was_never_given_data_trains(kind, driver, way):
    net = coded_net()
    job = Job(kind, driver, net=lambda: net)
    assert job.train(coded(1)).seen == codes(0)
