"""The trainer is brainstorm's in every other respect."""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import pickle
import re
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

import brainstorm_dbuf as dbuf
import brainstorm as bs
from brainstorm.data_iterators import (
    AddGaussianNoise,
    AddSaltNPepper,
    Minibatches,
    RandomCrop,
    Undivided,
)
from brainstorm.describable import create_from_description, get_description
from brainstorm_dbuf.input_layer import DoubleBufferedInput
from coded import From, Hook, Job, batch, coded, codes, stop_at, the_value, workers
from conftest import HANDLERS, KIND, SUBPROCESS_PATH
from networks import NETWORKS
from parity import assert_same, force_worker

pytestmark = [pytest.mark.timeout(10), pytest.mark.usefixtures("nothing_left")]



# --------------------------------------------------- brainstorm's own is untouched

MODULES = [
    "brainstorm",
    "brainstorm.data_iterators",
    "brainstorm.handlers.numpy_handler",
    "brainstorm.hooks",
    "brainstorm.structure.buffers",
    "brainstorm.structure.network",
    "brainstorm.tools",
    "brainstorm.training.trainer",
    "brainstorm.training.utils",
]


def everything_in_brainstorm():
    """Return all global names and class attributes of brainstorm's modules."""
    names = {}
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name, value in vars(module).items():
            names[module_name, name] = value
            if inspect.isclass(value) and value.__module__.startswith("brainstorm."):
                for attribute, item in vars(value).items():
                    names[module_name, name, attribute] = item
    return names


@pytest.mark.parametrize("double_buffering", [False, True])
def test_training_changes_nothing_in_brainstorm(double_buffering, kind, driver, way):
    before = everything_in_brainstorm()
    inside = []
    job = Job(kind, driver, double_buffering)
    job.trainer.add_hook(Hook(lambda n: inside.append(everything_in_brainstorm())))
    job.train(coded(2))
    for now in (inside[0], everything_in_brainstorm()):
        assert now.keys() == before.keys()
        changed = [key for key in before if now[key] is not before[key]]
        # What an attribute like __doc__ or __weakref__ gives is made anew each time.
        assert changed == []
    assert "provide_external_data" not in vars(job.net)


def test_without_double_buffering_it_is_brainstorms_trainer(
    kind, driver, way, monkeypatch
):
    called = []
    train = bs.Trainer.train

    def noting(self, net, training_data_iter, **named):
        called.append((self, net, training_data_iter, named))
        train(self, net, training_data_iter, **named)

    monkeypatch.setattr(bs.Trainer, "train", noting)
    job = Job(kind, driver, double_buffering=False)
    iterator, valid = dbuf.Prefetch(coded(3)), coded(1)
    job.train(iterator, valid=valid)
    # The iterator as it was given: one that prefetches does so in brainstorm's loop.
    ((_, net, given, named),) = called
    assert net is job.net and given is iterator and named["valid"] is valid
    assert job.seen == codes(0, 1, 2)
    assert iterator.stats.batches == 3
    assert job.stats is None


def test_the_trainer_is_brainstorms_in_what_it_takes_and_has():
    assert issubclass(dbuf.Trainer, bs.Trainer)
    own = inspect.signature(bs.Trainer).parameters
    ours = inspect.signature(dbuf.Trainer).parameters
    assert list(ours)[: len(own)] == list(own)
    assert ours["double_buffering"].default is True
    assert ours["depth"].default == 2
    trainer = dbuf.Trainer(bs.training.SgdStepper())
    assert vars(bs.Trainer(trainer.stepper)).items() <= vars(trainer).items()


def test_a_verbose_trainer_prints_what_brainstorms_prints(kind, driver, way, capsys):
    outputs = []
    for double_buffering in (False, True):
        job = Job(kind, driver, double_buffering, epochs=2)
        job.trainer.verbose = True
        job.train(coded(3))
        outputs.append(capsys.readouterr())
    assert outputs[0] == outputs[1]
    assert "Epoch 2" in outputs[0].out


def test_a_hook_that_stops_before_the_first_update_stops_it(kind, driver, way):
    class Stop(bs.hooks.Hook):
        def __call__(self, **kwargs):
            raise StopIteration

    job = Job(kind, driver, hooks=[Stop()])
    job.train(coded(3))
    assert job.seen == []
    assert job.stats.batches == job.stats.workers == 0


def test_training_goes_on_where_it_stopped(kind, driver, way):
    results = []
    for double_buffering in (False, True):
        job = Job(kind, driver, double_buffering, hooks=[stop_at(2)])
        job.train(coded(4))
        assert job.seen == codes(0, 1)
        assert job.trainer.current_epoch_nr == 1
        job.trainer.hooks.clear()
        job.trainer.add_hook(bs.hooks.StopAfterEpoch(3))
        job.train(coded(4))
        assert job.seen == codes(0, 1, *range(4), *range(4))
        results.append(job.result())
    assert_same(*results)


def test_a_prefetch_given_to_the_trainer_is_its_feed_at_that_depth(
    kind, driver, monkeypatch
):
    force_worker(monkeypatch)
    iterator = dbuf.Prefetch(coded(5), depth=4)
    job = Job(kind, driver, depth=2)
    seen = []
    job.trainer.add_hook(Hook(lambda n: seen.append(job.stats.prefetched)))
    job.train(iterator)
    assert job.seen == codes(*range(5))
    # One feed, not two one after another.
    assert job.stats.batches == 5
    assert job.stats.workers == 1
    assert iterator.stats.batches == 0


# ------------------------------------------------------------ random draws (rule 9)


def images(samples=6):
    rnd = np.random.default_rng(3)
    return {
        "default": rnd.standard_normal((1, samples, 4, 4, 2)),
        "targets": rnd.integers(0, 3, (1, samples, 1)),
    }


def noise():
    return AddGaussianNoise(Minibatches(1, **images()), {"default": 0.5})


def crop_of_noise():
    return RandomCrop(noise(), {"default": (4, 4)})


def monitored(make_hook, make_iterators, double_buffering, kind, driver):
    """Train; make_iterators gives the one to train on and the named others."""
    job = Job(
        kind,
        driver,
        double_buffering,
        epochs=2,
        net=NETWORKS["convolution"],
        hooks=[make_hook()],
    )
    job.stepper.look = lambda: job.net.get_input("default").sum(dtype=float)
    iterator, named = make_iterators()
    result = job.train(iterator, **named).result()
    del job.stepper.look
    return result


def at_update(name):
    return lambda: bs.hooks.MonitorLoss(name, name="watch", timescale="update")


def alone(make):
    return lambda: (make(), {})


def beside(make):
    """The monitor's iterator is another object over the same random one."""

    def iterators():
        inner = make()
        return inner, {"valid": AddSaltNPepper(inner, {"default": 0.3})}

    return iterators


def prefetched(make):
    return lambda: (dbuf.Prefetch(make()), {})


SHARED = {
    "noise": (at_update("training_data_iter"), alone(noise)),
    "noise under a crop": (at_update("training_data_iter"), alone(crop_of_noise)),
    "noise under another iterator": (at_update("valid"), beside(noise)),
    "a prefetch of noise": (at_update("training_data_iter"), prefetched(noise)),
}


@pytest.mark.parametrize("name", SHARED)
def test_a_monitor_that_shares_the_random_draws_is_found_and_named(
    name, kind, driver, way
):
    make_hook, make_iterators = SHARED[name]
    plain = monitored(make_hook, make_iterators, False, kind, driver)
    with pytest.warns(dbuf.FeedWarning, match="'watch' monitors") as warned:
        buffered = monitored(make_hook, make_iterators, True, kind, driver)
    assert len(warned) == 1
    assert "at every update" in str(warned[0].message)
    assert buffered.stats.fallbacks == [str(warned[0].message)]
    if name != "a prefetch of noise":  # brainstorm's loop runs that one ahead
        assert_same(plain, buffered)
    assert len(plain.losses[1]) == 12


def at_epoch(name):
    return lambda: bs.hooks.MonitorLoss(name, name="watch", timescale="epoch")


def apart():
    return noise(), {"valid": noise()}


def shuffled():
    return Minibatches(1, **images()), {}


def undivided():
    return Undivided(**images()), {}


NOT_SHARED = {
    "a monitor after each epoch": (at_epoch("training_data_iter"), alone(noise)),
    "an iterator of its own": (at_update("valid"), lambda: apart()),
    "shuffling alone": (at_update("training_data_iter"), shuffled),
    "nothing random": (at_update("training_data_iter"), undivided),
}


@pytest.mark.parametrize("name", NOT_SHARED)
def test_a_monitor_that_shares_no_draws_leaves_double_buffering_on(
    name, kind, driver, way
):
    make_hook, make_iterators = NOT_SHARED[name]
    plain = monitored(make_hook, make_iterators, False, kind, driver)
    buffered = monitored(make_hook, make_iterators, True, kind, driver)
    assert_same(plain, buffered)
    assert buffered.stats.fallbacks == []
    assert buffered.stats.batches == len(buffered.losses[1])


# ------------------------------------------- pickling, copying and describing (39)


def test_a_description_keeps_the_double_buffering(kind, driver):
    for kwargs in ({}, {"depth": 3}, {"double_buffering": False}):
        trainer = dbuf.Trainer(bs.training.SgdStepper(0.2), verbose=False, **kwargs)
        trainer.add_hook(bs.hooks.StopAfterEpoch(7))
        again = create_from_description(get_description(trainer))
        assert type(again) is dbuf.Trainer
        assert again.double_buffering is kwargs.get("double_buffering", True)
        assert again.depth == kwargs.get("depth", 2)
        assert again.stepper.learning_rate == 0.2
        assert again.hooks["StopAfterEpoch"].max_epochs == 7
        assert again.feed_stats is None
        assert get_description(again) == get_description(trainer)
        for name in ("depth", "double_buffering"):
            assert (name in get_description(trainer)) == (name in kwargs)


def test_descriptions_and_files_made_during_a_pass_hold_nothing_of_it(
    kind, driver, way, tmp_path
):
    filename = str(tmp_path / "net.hdf5")
    made = []

    def describe(update_nr):
        if update_nr == 2:
            made.append(get_description(job.trainer))
            made.append(get_description(job.net))
            job.net.save_as_hdf5(filename)
            made.append(job.net.get("parameters"))

    job = Job(kind, driver)
    job.trainer.depth = 3
    before = get_description(job.trainer), get_description(job.net)
    job.trainer.add_hook(Hook(describe))
    job.train(coded(5))
    trainer, net, parameters = made
    del trainer["hooks"]["test hook"]
    assert (trainer, net) == before
    assert trainer["depth"] == 3
    assert job.seen == codes(*range(5))
    # Anybody can load it: no device is named in it but as the handler's type.
    if kind == "numpy":
        loaded = bs.Network.from_hdf5(filename)
        assert np.array_equal(loaded.get("parameters"), parameters)


@pytest.mark.skipif(KIND != "fake", reason="hides the driver")
def test_a_file_and_a_description_load_where_there_is_no_gpu(driver, tmp_path):
    filename = str(tmp_path / "net.hdf5")
    job = Job("numpy", driver)
    job.trainer.depth = 3
    job.train(coded(3))
    job.net.save_as_hdf5(filename)
    description = get_description(
        dbuf.Trainer(bs.training.SgdStepper(), verbose=False, depth=3)
    )
    script = f"""
        import brainstorm_dbuf
        import brainstorm as bs
        net = bs.Network.from_hdf5({filename!r})
        print(net.get("parameters").sum(dtype=float))
        trainer = bs.create_from_description({description!r})
        print(type(trainer).__name__, trainer.depth)
        prefetch = bs.create_from_description(
            {{"@type": "Prefetch", "iter": None, "depth": 4,
              "data_shapes": {{}}, "length": 1}}
        )
        print(type(prefetch).__name__, prefetch.depth)
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        env={
            **os.environ,
            "PYTHONPATH": SUBPROCESS_PATH,
            "BRAINSTORM_DBUF_LIBCUDA": str(tmp_path / "no driver"),
        },
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        str(job.net.get("parameters").sum(dtype=float)),
        "DoubleBufferedTrainer 3",
        "Prefetch 4",
    ]


COPIES = {
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("how", COPIES)
def test_a_copied_trainer_trains(how, kind, driver, way):
    trainer = dbuf.Trainer(bs.training.SgdStepper(1e-7), verbose=False, depth=3)
    trainer.add_hook(bs.hooks.StopAfterEpoch(1))
    again = COPIES[how](trainer)
    assert (again.depth, again.double_buffering) == (3, True)
    net = Job(kind, driver).net
    again.train(net, coded(3))
    assert again.feed_stats.batches == 3


def outcome(how, thing):
    try:
        COPIES[how](thing)
    except Exception as error:
        return type(error), re.sub(r" at 0x[0-9a-f]+", "", str(error))
    return "copied"


@pytest.mark.parametrize("how", COPIES)
def test_a_trainer_and_a_network_are_copied_as_in_brainstorm_at_any_time(
    how, kind, driver, way
):
    """brainstorm's handlers hold a lambda, so not everything can be pickled there."""
    outcomes = []
    for double_buffering in (False, True):
        during = []

        def look(update_nr):
            if update_nr == 3:
                # The hook is no part of it: its function could not be pickled.
                hook = job.trainer.hooks.pop("test hook")
                job.stepper.also = None
                during.append(outcome(how, job.trainer))
                during.append(outcome(how, job.net))
                job.trainer.hooks["test hook"] = hook

        job = Job(kind, driver, double_buffering)
        during.append(outcome(how, job.trainer))
        job.trainer.add_hook(Hook(look))
        job.train(coded(5))
        del job.trainer.hooks["test hook"]
        during += [outcome(how, job.trainer), outcome(how, job.net)]
        outcomes.append(during)
        assert job.seen == codes(*range(5))
    assert outcomes[0] == outcomes[1]
    assert len(outcomes[0]) == 5


ERRORS = [
    dbuf.CudaError("cuMemAlloc", 1, "CUDA_ERROR_INVALID_VALUE", "size 0"),
    dbuf.CudaMemoryError("cuMemAlloc", 2, "CUDA_ERROR_OUT_OF_MEMORY", "4 bytes"),
    dbuf.DriverError("dlopen", 0, "DRIVER_NOT_FOUND", "no library"),
    dbuf.ForkError("cuMemAlloc", 0, "FORKED"),
    dbuf.FeedWarning("memory ran short"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("how", COPIES)
def test_our_errors_come_back_equal(how, error):
    again = COPIES[how](error)
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert again.args == error.args
    assert vars(again) == vars(error)
    if isinstance(error, dbuf.CudaError):
        assert again == error


# --------------------------------------------------------------- run_network alone


def look_at(net):
    return tuple(the_value(net.get_input(name)) for name in ("default", "targets"))


def test_run_network_is_a_drop_in_for_brainstorms(kind, driver, way):
    own = bs.training.utils.run_network
    signatures = [inspect.signature(f).parameters for f in (own, dbuf.run_network)]
    assert list(signatures[0]) == list(signatures[1])
    assert signatures[1]["all_inputs"].default is signatures[0]["all_inputs"].default
    for all_inputs in (True, False):
        results = []
        for run_network in (own, dbuf.run_network):
            job = Job(kind, driver)
            job.net.provide_external_data(batch(77, samples=2))

            def make_pass():
                for k in range(4):
                    data = batch(k)
                    if not all_inputs:
                        del data["targets"]
                    yield data

            seen = []
            for number in run_network(job.net, make_pass(), all_inputs=all_inputs):
                seen.append((number, look_at(job.net)))
            results.append(seen)
        assert results[0] == results[1]
        targets = [1000 + k for k in range(4)] if all_inputs else [1077] * 4
        assert results[0] == [(k, (k, targets[k])) for k in range(4)]


def test_run_network_takes_any_iterable_as_brainstorms_does(kind, driver, way):
    job = Job(kind, driver)
    assert list(dbuf.run_network(job.net, [batch(0), batch(1)])) == [0, 1]
    assert list(dbuf.run_network(job.net, [])) == []


def test_run_network_in_brainstorms_tools_is_possible(kind, driver, way, monkeypatch):
    """The module of the tools looks its feeder up by name."""
    plain = bs.tools.evaluate(Job(kind, driver).net, coded(5))
    monkeypatch.setattr(bs.tools, "run_network", dbuf.run_network)
    assert bs.tools.evaluate(Job(kind, driver).net, coded(5)) == plain


# ----------------------------------------------------------------- several at once


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind,
            marks=pytest.mark.skipif(
                kind == "pycuda", reason="PyCUDA's context is current in one thread"
            ),
        )
        for kind in HANDLERS
    ],
)
def test_two_trainers_train_in_two_threads(kind, driver, way):
    jobs = [Job(kind, driver, epochs=5, depth=depth) for depth in (2, 3)]
    alone = Job(kind, driver, False, epochs=5).train(coded(20)).result()
    errors = []

    def work(job):
        try:
            if kind == "numpy":
                job.train(coded(20))
            else:
                with dbuf.Context.from_handle(driver.context):
                    job.train(coded(20))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert workers() == []
    for job in jobs:
        assert job.seen == codes(*range(20)) * 5
        assert_same(alone, job.result())


def test_one_trainer_trains_two_networks_in_turn(kind, driver, way):
    job = Job(kind, driver)
    job.train(coded(2))
    first, job.net = job.net, Job(kind, driver).net
    job.train_again()
    assert first is not job.net


def test_one_iterator_object_may_be_trained_on_by_two_trainers(kind, driver, way):
    iterator = coded(4)
    inner = []

    def train_another(update_nr):
        if update_nr == 2:
            inner.append(Job(kind, driver).train(iterator).seen)

    job = Job(kind, driver, hooks=[Hook(train_another)])
    assert job.train(iterator).seen == codes(0, 1, 2, 3)
    assert inner == [codes(0, 1, 2, 3)]


def test_a_trainer_needs_no_driver_on_a_numpy_handler(driver, way):
    if driver.fake is None:
        pytest.skip("counts the stand-in driver's calls")
    before = driver.fake.calls()
    Job("numpy", driver, epochs=2).train(coded(4))
    assert driver.fake.calls() == before


def test_the_iterator_is_called_once_an_epoch_with_the_handler(kind, driver, way):
    handlers = []

    class Calls(From):
        def __call__(self, handler=None):
            handlers.append(handler)
            return self.make_pass()

    job = Job(kind, driver, epochs=2)
    job.train(Calls(lambda: iter([batch(0), batch(1)])))
    assert handlers == [job.net.handler] * 2


def test_the_worker_goes_on_once_the_trainer_has_what_it_waits_for(
    kind, driver, monkeypatch
):
    """Not when that is in the network; and it goes no further until then."""
    force_worker(monkeypatch)
    fetching = [threading.Event() for _ in range(7)]
    seen = []

    def make_pass():
        for k in range(6):
            fetching[k].set()
            time.sleep(0.05)  # the trainer waits
            yield batch(k)
        fetching[6].set()

    own = DoubleBufferedInput.hand_over

    def hand_over(self, minibatch, *arguments):
        k = len(seen)
        if k > 1:  # before, there was no worker, or nothing to wait for
            seen.append((fetching[k + 1].wait(5), fetching[min(k + 2, 6)].is_set()))
        else:
            seen.append(None)
        own(self, minibatch, *arguments)

    monkeypatch.setattr(DoubleBufferedInput, "hand_over", hand_over)
    job = Job(kind, driver).train(From(make_pass))
    assert job.seen == codes(*range(6))
    assert seen[2:5] == [(True, False)] * 3
