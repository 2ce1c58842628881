"""Two devices in one process: each by itself, and nothing of one with the other's.

On the stand-in driver, which can have two; on the real one where it sees two.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import brainstorm_dbuf as dbuf
import brainstorm as bs
from beyond import needs_mpi
from brainstorm_dbuf import _cuda, held_memory
from conftest import KIND, SUBPROCESS_PATH
from networks import NETWORKS, minibatches
from parity import (
    SEED,
    Delayed,
    Recorder,
    Run,
    assert_same,
    poison_back_buffers,
)
from test_data_parallel import assert_trained_as_one, on_two_ranks

pytestmark = pytest.mark.timeout(90)

# What may be asked of the driver before something is refused.
QUESTIONS = {
    "cuPointerGetAttribute",
    "cuCtxGetCurrent",
    "cuCtxPushCurrent",
    "cuCtxPopCurrent",
    "cuCtxGetDevice",
}


@pytest.fixture
def two(driver, kernels):
    """The driver, with two devices."""
    if driver.fake is not None:
        driver.fake.set_device_count(2)
    count = dbuf.device_count()
    if count < 2:
        pytest.skip(f"needs two CUDA devices, the driver sees {count}")
    return driver


ORDINARY = np.ones((2, 3), np.float32)


class Foreign:
    """An array as another library would hand it over."""

    def __init__(self, array):
        self.array = array
        described = {**array.__cuda_array_interface__}
        described.pop("stream", None)
        self.__cuda_array_interface__ = described


def mapped(array):
    """Return a copy in pages of its own, which can be page-locked by themselves."""
    memory = mmap.mmap(-1, max(array.nbytes, 1))
    copy = np.frombuffer(memory, array.dtype, array.size).reshape(array.shape)
    copy[...] = array
    return copy


def of_device(device):
    """Return one of everything that is of a device."""
    handler = dbuf.CudaHandler(seed=1, device=device)
    context = handler.context
    array = handler.create_from_numpy(np.arange(6).reshape(2, 3))
    places = dbuf.register_host_memory(
        mapped(np.zeros(1 << 12, np.uint8)), context=context
    )
    handler.synchronize()
    return SimpleNamespace(
        handler=handler,
        context=context,
        array=array,
        foreign=Foreign(array),
        memory=dbuf.mem_alloc(24, context),
        locked=dbuf.pagelocked_zeros((2, 3), context=context),
        registered=dbuf.register_host_memory(mapped(ORDINARY), context=context),
        stream=dbuf.Stream(context),
        event=dbuf.Event(context, timing=True),
        places=places,
        ring=_cuda.StagingRing(places, 4, context),
    )


# What is tried with things of device 0 and of device 1, by what meets there.
MIXTURES = {
    "memory and stream": lambda a, b: dbuf.memcpy_htod_async(
        a.memory, a.locked, b.stream
    ),
    "array and stream": lambda a, b: dbuf.memcpy_htod_async(
        a.array, a.locked, b.stream
    ),
    "address and stream": lambda a, b: dbuf.memcpy_htod_async(
        int(a.memory), b.locked, b.stream
    ),
    "foreign array and stream": lambda a, b: dbuf.memcpy_htod_async(
        a.foreign, b.locked, b.stream
    ),
    "foreign array and stream, back": lambda a, b: dbuf.memcpy_dtoh_async(
        b.locked, a.foreign, b.stream
    ),
    "registered memory": lambda a, b: dbuf.memcpy_htod_async(
        b.memory, a.registered, b.stream
    ),
    "registered memory, back": lambda a, b: dbuf.memcpy_dtoh_async(
        a.registered, b.memory, b.stream
    ),
    "registered rows": lambda a, b: dbuf.memcpy_htod_rows_async(
        b.memory, a.registered, b.stream
    ),
    "two memories": lambda a, b: dbuf.memcpy_dtod(a.memory, b.memory),
    "two arrays": lambda a, b: dbuf.memcpy_dtod(a.array, b.array),
    "a foreign array and an array": lambda a, b: dbuf.memcpy_dtod(a.foreign, b.array),
    "rows of two foreign arrays": lambda a, b: dbuf.memcpy_dtod_2d_async(
        a.foreign, 12, b.foreign, 12, 12, 2, b.stream
    ),
    "memset and stream": lambda a, b: dbuf.memset_d8_async(a.memory, 0, 24, b.stream),
    "memset of a foreign array": lambda a, b: dbuf.memset_d8_async(
        a.foreign, 0, 24, b.stream
    ),
    "event and stream": lambda a, b: a.event.record(b.stream),
    "stream and event": lambda a, b: a.stream.record(b.event),
    "time between events": lambda a, b: a.event.elapsed_time(b.event),
    "ring and memory": lambda a, b: a.ring.memcpy_htod_async(
        b.memory, ORDINARY, np.float32, b.stream
    ),
    "ring and foreign array": lambda a, b: a.ring.memcpy_htod_async(
        b.foreign, ORDINARY, np.float32, a.stream
    ),
    "ring's memory": lambda a, b: _cuda.StagingRing(a.places, 4, b.context),
    "operation": lambda a, b: a.handler.add_tt(a.array, b.array, a.array),
    "product": lambda a, b: a.handler.dot_mm(b.array, a.array, a.array),
    "arithmetic": lambda a, b: a.array + b.array,
    "assignment": lambda a, b: a.array.__setitem__(0, b.array[0]),
    "copy_to": lambda a, b: a.handler.copy_to(b.array, a.array),
    "get_numpy_copy": lambda a, b: a.handler.get_numpy_copy(b.array),
    "set_from_numpy": lambda a, b: a.handler.set_from_numpy(b.array, ORDINARY),
    "set_from_numpy_async": lambda a, b: a.handler.set_from_numpy_async(
        a.array, a.locked, b.stream
    ),
    "wrap": lambda a, b: a.handler.wrap(b.memory, int(b.memory), (2, 3)),
    "as_array": lambda a, b: a.handler.as_array(b.foreign),
    "from_dlpack": lambda a, b: a.handler.from_dlpack(b.array),
    "unpack's array": lambda a, b: a.handler.unpack(
        [b.array], [int(a.memory)], [np.float32]
    ),
    "unpack's source": lambda a, b: a.handler.unpack(
        [a.array], [int(b.memory)], [np.float32]
    ),
}


def refused(driver, mixture):
    """Return the text of the error, which comes before the driver is told anything."""
    fake = driver.fake
    before = fake and (fake.calls(), fake.pending())
    with pytest.raises(ValueError) as caught:
        mixture()
    if fake is not None:
        assert set(fake.calls() - before[0]) <= QUESTIONS
        assert fake.pending() == before[1]
    return str(caught.value)


@pytest.mark.parametrize("name", MIXTURES)
def test_what_is_of_two_devices_is_refused_and_both_are_named(name, two):
    a, b = of_device(0), of_device(1)
    for event, stream in ((a.event, a.stream), (b.event, b.stream)):
        stream.record(event)
        stream.synchronize()
    for first, second in ((a, b), (b, a)):
        text = refused(two, lambda: MIXTURES[name](first, second))
        if name == "from_dlpack":
            assert "(2, 0)" in text and "(2, 1)" in text
        else:
            assert "device 0" in text and "device 1" in text, text
    for part in (a, b):
        assert part.array.get().tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_context_that_is_nobodys_primary_one_is_named_by_its_device_too(two):
    b = of_device(1)
    here = dbuf.Context.current()  # PyCUDA's would be one
    memory = dbuf.mem_alloc(24)
    text = refused(two, lambda: dbuf.memset_d8_async(memory, 0, 24, b.stream))
    assert "device 0" in text and "device 1" in text, text
    assert repr(here).endswith("of device 0>")


def test_kernels_read_what_is_page_locked_for_every_device(two):
    a, b = of_device(0), of_device(1)
    array = portable("allocated", a.context)
    array[:] = 5
    b.handler.unpack([b.array], [array.ctypes.data], [np.float32])
    assert (b.array.get() == 5).all()


def test_a_stream_may_wait_for_another_devices_event(two):
    a, b = of_device(0), of_device(1)
    a.locked[:] = 7
    shared = dbuf.pagelocked_zeros((2, 3))
    with a.stream, b.stream:
        dbuf.memcpy_htod_async(a.memory, a.locked, a.stream)
        dbuf.memcpy_dtoh_async(shared, a.memory, a.stream)
        b.stream.wait_event(a.stream.record(a.event))
        dbuf.memcpy_htod_async(b.memory, shared, b.stream)
        dbuf.memcpy_dtoh_async(b.locked, b.memory, b.stream)
        b.stream.synchronize()
        assert (b.locked == 7).all()


def portable(kind, context):
    if kind == "allocated":
        return dbuf.pagelocked_empty((2, 3), context=context)
    return dbuf.register_host_memory(
        mapped(ORDINARY), dbuf.HOST_REGISTER_PORTABLE, context=context
    )


@pytest.mark.parametrize("kind", ["allocated", "registered"])
def test_portable_memory_is_page_locked_for_every_device(kind, two):
    parts = [of_device(0), of_device(1)]
    array = portable(kind, parts[0].context)
    array[:] = 5
    for part in parts:
        assert dbuf.is_pagelocked(array, context=part.context)
        dbuf.memcpy_htod_async(part.memory, array, part.stream)
        part.stream.synchronize()
        dbuf.memcpy_htod_rows_async(part.array, array)
        assert (part.array.get() == 5).all()


def test_is_pagelocked_tells_for_which_device(two):
    a, b = of_device(0), of_device(1)
    for array in (a.locked, a.registered):
        assert dbuf.is_pagelocked(array)
        assert dbuf.is_pagelocked(array, context=a.context)
    assert dbuf.is_pagelocked(a.locked, context=b.context)
    assert not dbuf.is_pagelocked(a.registered, context=b.context)
    assert not dbuf.is_pagelocked(ORDINARY, context=b.context)


@pytest.mark.skipif(KIND != "fake", reason="needs two contexts of one device")
def test_page_locked_memory_of_another_context_of_the_device_is_good(two):
    a = of_device(0)
    locked = dbuf.pagelocked_zeros((2, 3))  # in the context that is current
    assert dbuf.Context.current() != a.context
    assert dbuf.is_pagelocked(locked, context=a.context)
    dbuf.memcpy_htod_async(a.memory, locked, a.stream)
    a.stream.synchronize()


@pytest.mark.skipif(KIND != "fake", reason="what is in flight is known there")
def test_portable_memory_is_unregistered_after_the_copies_of_all_devices(two):
    a, b = of_device(0), of_device(1)
    array = portable("registered", a.context)
    array[:] = 3
    dbuf.memcpy_htod_async(b.memory, array, b.stream)
    array.base.unregister()
    assert not dbuf.is_pagelocked(array)
    result = np.zeros((2, 3), np.float32)
    dbuf.memcpy_dtoh(result, b.memory)
    assert (result == 3).all()  # and no fault: the stand-in would know


def test_a_device_that_is_not_there_is_refused_by_saying_which_are(two):
    count = dbuf.device_count()
    names = [f"{n} ({dbuf.Device(n).name})" for n in range(count)]
    for make in (dbuf.CudaHandler, dbuf.Device, dbuf.Context.primary):
        for ordinal in (count, -1):
            key = "device" if make is dbuf.CudaHandler else "ordinal"
            with pytest.raises(ValueError) as caught:
                make(**{key: ordinal})
            assert str(caught.value) == (
                f"there is no CUDA device {ordinal}: the driver sees {count} devices: "
                + ", ".join(names)
            )


@pytest.mark.skipif(KIND != "fake", reason="takes all memory of a device")
def test_a_device_without_memory_left_does_not_touch_the_other(two):
    two.fake.set_limits(device_bytes=1 << 20)
    a, b = (dbuf.CudaHandler(seed=1, device=device) for device in (0, 1))
    kept = a.allocate((200_000,))
    with pytest.raises(dbuf.CudaMemoryError, match="of the device's 1048576"):
        a.allocate((200_000,))
    assert b.allocate((200_000,)).get().sum() == kept.get().sum() == 0


# -------------------------------------------------------------------------- training


class Training:
    """A training on a device, made here and run on any thread.

    All that draws from brainstorm's one generator of random numbers is made at once, so
    two trainings at the same time get what each alone would.
    """

    def __init__(self, name, device, trainer=dbuf.Trainer, prefetch=False, **options):
        bs.global_rnd.set_seed(SEED)
        self.losses = []
        self.net = NETWORKS[name]()
        self.net.set_handler(dbuf.CudaHandler(seed=SEED, device=device))
        wrap = dbuf.Prefetch if prefetch else lambda iterator: iterator
        self.iterator = wrap(
            Delayed(minibatches(name, np.random.default_rng(3)), 5, 0.0005)
        )
        self.valid = wrap(minibatches(name, np.random.default_rng(4), cast="float32"))
        self.trainer = trainer(Recorder(self.losses), verbose=False, **options)
        scorer = bs.scorers.Accuracy(out_name="Output.outputs.predictions")
        self.trainer.train_scorers = [scorer]
        self.trainer.add_hook(bs.hooks.StopAfterEpoch(2))
        self.trainer.add_hook(
            bs.hooks.MonitorScores("valid", [scorer], timescale="update", interval=3)
        )

    def run(self):
        self.trainer.train(self.net, self.iterator, valid=self.valid)
        return self

    def result(self):
        assert self.losses
        return Run(self.net.get("parameters"), self.trainer.logs, self.losses)


def at_once(*trainings):
    """Run trainings at the same time, each in a thread of its own."""
    start, errors = threading.Barrier(len(trainings)), []

    def run(training):
        start.wait(10)
        try:
            training.run()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=[t]) for t in trainings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors, errors


def randomly(two, monkeypatch):
    """Let both the device's work and what the feed leaves behind do their worst."""
    poison_back_buffers(monkeypatch)
    if two.fake is not None:
        two.fake.mode("random", 3)


@pytest.mark.parametrize(
    "first, second", [("mlp with dropout", "lstm with a mask"), ("convolution",) * 2]
)
def test_two_trainers_in_two_threads_train_as_each_alone(
    first, second, two, slot_way, monkeypatch
):
    randomly(two, monkeypatch)
    alone = [Training(name, 0).run().result() for name in (first, second)]
    trainings = [Training(first, 0), Training(second, 1)]
    at_once(*trainings)
    for expected, training in zip(alone, trainings):
        assert_same(expected, training.result())
        assert training.trainer.feed_stats.prefetched > 0
        assert len(training.losses) == 2 * len(range(0, 22, 4))
        assert training.net.handler.device == trainings.index(training)


def test_a_trainer_and_a_prefetch_on_two_devices_at_once_change_nothing(
    two, slot_way, monkeypatch
):
    randomly(two, monkeypatch)
    name = "recurrent"
    expected = Training(name, 0, double_buffering=False).run().result()
    trainings = [
        Training(name, 0),
        Training(name, 1, bs.Trainer, prefetch=True),
    ]
    at_once(*trainings)
    for training in trainings:
        assert_same(expected, training.result())


def test_feeds_of_two_devices_share_data_that_are_page_locked_in_place(
    two, slot_way, monkeypatch
):
    for name in ("REGION_MIN_BYTES", "DIRECT_COPY_MIN_BYTES", "ROW_MIN_BYTES"):
        monkeypatch.setattr(held_memory, name, 0)
    randomly(two, monkeypatch)
    name = "mlp with dropout"

    def trainings(*devices):
        data = {
            name: mapped(array.astype(np.float32))
            for name, array in minibatches(name, np.random.default_rng(3)).data.items()
        }
        made = [Training(name, device) for device in devices]
        for training in made:
            training.iterator = bs.data_iterators.Minibatches(4, shuffle=False, **data)
        return made

    (alone,) = trainings(0)
    expected = alone.run().result()
    both = trainings(0, 1)
    at_once(*both)
    for training in both:
        assert_same(expected, training.result())
        assert training.trainer.feed_stats.page_locked_in_place > 0


def test_data_page_locked_for_the_other_device_are_staged(two, slot_way, monkeypatch):
    monkeypatch.setattr(held_memory, "DIRECT_COPY_MIN_BYTES", 0)
    monkeypatch.setattr(held_memory, "ROW_MIN_BYTES", 0)
    randomly(two, monkeypatch)
    name, other = "mlp with dropout", dbuf.Context.primary(0)

    def locked_for_the_other(shape):
        array = mapped(np.zeros(shape, np.float32))
        return dbuf.register_host_memory(array, context=other)

    results = []
    for lock in (np.empty, locked_for_the_other):
        training = Training(name, 1)
        data = {}
        for key, array in minibatches(name, np.random.default_rng(3)).data.items():
            data[key] = lock(array.shape)
            data[key][...] = array
        training.iterator = bs.data_iterators.Minibatches(4, shuffle=False, **data)
        results.append(training.run().result())
    assert_same(*results)


def test_a_network_moves_to_the_other_device_between_two_trainings(two, slot_way):
    results = []
    for second in (0, 1):
        training = Training("batch normalisation", 0).run()
        training.net.set_handler(dbuf.CudaHandler(seed=SEED, device=second))
        epoch = training.trainer.current_epoch_nr + 2
        training.trainer.hooks["StopAfterEpoch"].max_epochs = epoch
        training.run()
        results.append(training.result())
    assert_same(*results)


def test_minibatches_of_the_other_devices_handler_are_refused(two):
    training = Training("recurrent", 1, prefetch=True)
    batch = next(training.iterator(dbuf.CudaHandler(device=0)))
    with pytest.raises(ValueError, match="on device 0, this handler is on device 1"):
        training.net.provide_external_data(batch)


# ---------------------------------------------------------------------- DataParallel


@needs_mpi
@pytest.mark.parametrize("way", ["two_devices", "two_devices_by_nccl"])
def test_two_ranks_on_two_devices_train_as_one_with_the_whole_minibatch(
    way, two, tmp_path, monkeypatch
):
    if KIND == "real" and way == "two_devices_by_nccl":
        pytest.importorskip("cupy.cuda.nccl", reason="needs CuPy with NCCL")
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "2")
    first, second = on_two_ranks(tmp_path, way, "cuda")
    assert_trained_as_one(first, second, ["mlp", "lstm"], ["momentum"])
    for device, seen in enumerate((first, second)):
        assert {trained["device"] for trained in seen.values()} == {device}


# ------------------------------------------------------------ nothing on the other one

ALONE_ON_DEVICE_1 = """
import ctypes, json, os, sys
sys.modules["pycuda"] = None  # it makes a context on device 0
import numpy as np
import brainstorm_dbuf as dbuf
import brainstorm as bs
from brainstorm_dbuf import access, feed
from networks import NETWORKS, minibatches

access.MOST_PUT_BYTES, feed.WORTH_A_WORKER_SECONDS, feed.SLOW_IN_A_ROW = 0, -1.0, 1
fake = None
if "BRAINSTORM_DBUF_LIBCUDA" in os.environ:
    from fake_cuda.control import FakeCuda
    fake = FakeCuda(os.environ["BRAINSTORM_DBUF_LIBCUDA"])


def is_there(device):
    if fake is not None:
        return fake.live_on(device)
    flags, active = ctypes.c_uint(), ctypes.c_int()
    state = ctypes.CDLL("libcuda.so.1").cuDevicePrimaryCtxGetState
    assert state(device, ctypes.byref(flags), ctypes.byref(active)) == 0
    return {"active": active.value}


def train(make, wrap, **options):
    net = NETWORKS["lstm with a mask"]()
    net.set_handler(dbuf.CudaHandler(seed=1, device=1))
    trainer = make(bs.training.MomentumStepper(0.05, 0.9), verbose=False, **options)
    trainer.add_hook(bs.hooks.StopAfterEpoch(2))
    rnd = np.random.default_rng(3)
    trainer.train(net, wrap(minibatches("lstm with a mask", rnd)))
    return net, trainer


net, trainer = train(dbuf.Trainer, lambda it: it)
train(bs.Trainer, dbuf.Prefetch)
kept = [net, net.handler.pagelocked_empty(100), dbuf.Stream(net.handler.context)]
print(json.dumps({"devices": [is_there(0), is_there(1)],
                  "fed": trainer.feed_stats.prefetched,
                  "device": trainer.stepper.net.handler.context.device.ordinal}))
sys.stdout.flush()
sys.stdin.readline()
"""


def free_bytes(two):
    if two.fake is not None:
        return None
    with dbuf.Context.primary(0) as context:
        return dbuf.mem_get_info(context)[0]


def test_a_training_on_the_second_device_leaves_the_first_alone(two):
    context = None if two.fake is not None else dbuf.Context.primary(0)
    before = free_bytes(two)
    program = subprocess.Popen(
        [sys.executable, "-c", ALONE_ON_DEVICE_1],
        env={
            **os.environ,
            "PYTHONPATH": SUBPROCESS_PATH,
            "FAKE_CUDA_DEVICES": "2",
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with program:
        line = program.stdout.readline()
        if before is not None:  # a context takes some hundreds of MiB
            assert before - free_bytes(two) < 8 << 20
        program.communicate("\n")
    assert program.returncode == 0
    del context
    said = json.loads(line)
    first, second = said["devices"]
    assert not any(first.values()), first
    second.pop("retains", None)
    assert all(second.values()), second
    assert said["fed"] > 0 and said["device"] == 1


# ------------------------------------------------------------------------ the benchmark

BENCH = Path(__file__).resolve().parent.parent / "bench"


def benchmark(*options, devices):
    return subprocess.run(
        [sys.executable, BENCH / "two_devices.py", *map(str, options)],
        env={
            **os.environ,
            "PYTHONPATH": SUBPROCESS_PATH,
            "FAKE_CUDA_DEVICES": str(devices),
            "OPENBLAS_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_benchmark_measures_both_alone_and_at_once(two, tmp_path):
    sizes = ("--batch-mib", 0.25, "--arena-mib", 1, "--units", 8, "--samples", 16)
    turns = ("--seconds", 0.2, "--warm-up", 0.2, "--rounds", 1, "--least", 0)
    into = tmp_path / "two.json"
    run = benchmark(*sizes, *turns, "--json", into, devices=2)
    assert (run.returncode, run.stderr) == (0, ""), run.stdout + run.stderr
    assert run.stdout.startswith("Two devices at once beside one alone")
    found = json.loads(into.read_text())
    assert [device["device"] for device in found["about"]] == [0, 1]
    assert found["missed"] == []
    assert list(found["results"]) == ["link", "fed", "computing"]
    for result in found["results"].values():
        assert len(result["alone"]) == len(result["together"]) == 2
        scaling = sum(result["together"]) / (sum(result["alone"]) / 2)
        assert result["scaling"] == pytest.approx(scaling) and scaling > 0
        text = f"{result['scaling']:.2f} times one device"
        assert text in run.stdout


@pytest.mark.skipif(KIND != "fake", reason="hides a device")
def test_the_benchmark_says_that_it_needs_two_devices(kernels):
    run = benchmark(devices=1)
    assert run.returncode == 1
    assert run.stderr == (
        "bench/two_devices.py needs two CUDA devices, the driver sees 1\n"
    )
    run = benchmark("--devices", 0, 5, devices=2)
    assert run.returncode == 1
    assert "there is no CUDA device 5: the driver sees 2" in run.stderr


def test_rates_count_the_time_in_which_both_devices_work(monkeypatch):
    monkeypatch.syspath_prepend(BENCH)
    from feed_players import Failed
    from two_devices import rates

    quick, slow = np.arange(0, 1.01, 0.1), np.arange(0.4, 1.7, 0.2)
    # The quick one is quicker still while the other does not work.
    alone = np.concatenate([np.arange(0, 0.4, 0.01), quick[4:]])
    assert rates([list(alone), list(slow)], 1) == pytest.approx([10, 5])
    assert rates([list(quick)], 1) == pytest.approx([10])
    with pytest.raises(Failed, match="not at work at the same time"):
        rates([list(quick), list(slow + 0.6)], 1)
    with pytest.raises(Failed, match="fewer than two"):
        rates([list(quick), [0.5]], 1)
