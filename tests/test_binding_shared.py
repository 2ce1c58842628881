"""Sixteen threads over the same few objects, which any of them may close or replace."""

from __future__ import annotations

import faulthandler
import gc
import random
import re
import sys
import threading
import time

import numpy as np
import pytest
from binding_tools import leak_check  # noqa: F401
from layouts import EXAMPLES

from brainstorm_dbuf import _cuda

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("leak_check")]

KIB = 1 << 10
THREADS, STEPS, HANGS_SECONDS = 16, 200, 30
COPY_MS = 0.05  # so that others come in while one waits
SIZE = 4 * KIB  # elements of each array
# What a call on an object that another thread has closed may say.
DOCUMENTED = re.compile(
    "(Stream|Event|DeviceMemory|StagingRing) is closed|memory was unregistered|"
    "src is not page-locked|"
    "cuEventElapsedTime failed: CUDA_ERROR_(NOT_READY|INVALID_HANDLE)"
)


@pytest.fixture(autouse=True)
def often_switching():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


class Shared:
    """Objects by kind, several of each; a thread may put a new one in place of one."""

    MAKERS = {
        "stream": lambda s: _cuda.Stream(s.context),
        "event": lambda s: _cuda.Event(s.context, timing=True),
        "memory": lambda s: _cuda.mem_alloc(4 * SIZE, s.context),
        "pinned": lambda s: _cuda.pagelocked_zeros(SIZE, context=s.context),
        "registered": lambda s: _cuda.register_host_memory(
            np.zeros(SIZE, "f4"), context=s.context
        ),
        "ring": lambda s: _cuda.StagingRing(
            _cuda.pagelocked_empty(2 * KIB, context=s.context), 4, s.context
        ),
        "handler": lambda s: _cuda.HandlerCore(random.randrange(9), s.device),
        "array": lambda s: s.objects["handler"][0].zeros((8, 8)),
    }

    def __init__(self, context, device=0):
        self.context, self.device = context, device
        self.objects = {}
        for kind, make in self.MAKERS.items():
            if kind in ("handler", "array") and device is None:
                continue
            self.objects[kind] = [make(self) for _ in range(2)]

    def get(self, rnd, kind):
        return rnd.choice(self.objects[kind])

    def replace(self, rnd, kind):
        self.objects[kind][rnd.randrange(2)] = self.MAKERS[kind](self)

    def any_stream(self, rnd):
        return self.get(rnd, "stream") if rnd.randrange(4) else None

    def settle(self):
        self.context.synchronize()
        for stream in self.objects["stream"]:
            if not stream.closed:
                stream.synchronize()


# ---- What a thread does, again and again ----


def copy_in(s, rnd):
    kind = rnd.choice(["pinned", "registered"])
    _cuda.memcpy_htod_async(s.get(rnd, "memory"), s.get(rnd, kind), s.any_stream(rnd))


def copy_in_now(s, rnd):
    _cuda.memcpy_htod(s.get(rnd, "memory"), np.ones(SIZE, "f4"))


def copy_out(s, rnd):
    _cuda.memcpy_dtoh_async(
        s.get(rnd, "pinned"), s.get(rnd, "memory"), s.any_stream(rnd)
    )


def copy_between(s, rnd):
    _cuda.memcpy_dtod_async(
        s.get(rnd, "memory"), s.get(rnd, "memory"), None, s.any_stream(rnd)
    )


def set_bytes(s, rnd):
    _cuda.memset_d8_async(s.get(rnd, "memory"), 1, 64, s.any_stream(rnd))


def stage(s, rnd):
    src = np.ones((rnd.randrange(1, 60), 50), rnd.choice(["f4", "f8", "i2"]))
    s.get(rnd, "ring").memcpy_htod_async(
        s.get(rnd, "memory"), src, "f4", s.any_stream(rnd), rnd.randrange(3)
    )


def stage_packed(s, rnd):
    sources = [np.ones(rnd.randrange(1, 100), rnd.choice(["f4", "f8"])) for _ in "123"]
    s.get(rnd, "ring").memcpy_htod_packed_async(
        s.get(rnd, "memory"), sources, [0, 512, 1024], ["f4"] * 3, s.any_stream(rnd)
    )


def order(s, rnd):
    stream, event = s.get(rnd, "stream"), s.get(rnd, "event")
    stream.record(event)
    s.get(rnd, "stream").wait_event(event)
    event.query()
    if rnd.randrange(4) == 0:
        event.synchronize()
    if event.recorded and rnd.randrange(4) == 0:
        other = _cuda.Event(s.context, timing=True).record(stream)
        other.synchronize()
        event.elapsed_time(other)


def wait(s, rnd):
    what = s.get(rnd, "stream") if rnd.randrange(3) else s.context
    what.synchronize()


def look(s, rnd):
    for kind in rnd.sample(sorted(s.objects), 3):
        thing = s.get(rnd, kind)
        if isinstance(thing, np.ndarray):
            thing = thing.base
        repr(thing), getattr(thing, "closed", None), getattr(thing, "context", None)


def close(s, rnd):
    kind = rnd.choice(["stream", "event", "memory", "ring", "registered"])
    thing = s.get(rnd, kind)
    if kind == "registered":
        thing.base.unregister()
    elif kind == "memory":
        thing.free()
    else:
        thing.close()
    s.replace(rnd, kind)


def replace(s, rnd):
    s.replace(rnd, rnd.choice(sorted(s.objects)))


def make_and_drop(s, rnd):
    kind = rnd.choice(sorted(s.objects))
    things = [s.MAKERS[kind](s) for _ in range(3)]
    if rnd.randrange(4) == 0:
        things.append(things)  # for the garbage collector
    elif rnd.randrange(8) == 0:
        gc.collect()


def compute(s, rnd):
    handler, a, b = (s.get(rnd, kind) for kind in ("handler", "array", "array"))
    what = rnd.randrange(8)
    if what == 0:
        handler.dot_add_mm(s.objects["array"][0], a, handler.zeros((8, 8)))
    elif what == 1:
        handler.add_tt(a, b, a)
    elif what == 2:
        handler.set_from_numpy(a, np.ones((8, 8), "f4"))
    elif what == 3:
        handler.fill_gaussian(0.0, 1.0, b)
    elif what == 4:
        handler.trim_pool()
    elif what == 5:
        handler.from_dlpack(a).get()
    elif what == 6:
        np.testing.assert_array_equal(handler.as_array(a[1:]).get().shape, (7, 8))
    else:
        (a + b).copy()[2:4] = 1.5


def carry_right(s, rnd):
    """What this thread sends through shared objects arrives, if it was told so."""
    values = np.full(rnd.randrange(1, SIZE), rnd.random(), "f4")
    memory = _cuda.mem_alloc(values.nbytes, s.context)
    _cuda.memset_d8(memory, 0, values.nbytes)
    s.context.synchronize()
    stream = s.get(rnd, "stream")
    if rnd.randrange(2):
        s.get(rnd, "ring").memcpy_htod_async(memory, values, None, stream)
        own = values
        if rnd.randrange(2):
            own, values = values, values.copy()
            own[...] = -1  # it was gathered
    else:
        source = _cuda.pagelocked_empty(values.shape, "f4", context=s.context)
        source[...] = values
        _cuda.memcpy_htod_async(memory, source, stream)
    s.context.synchronize()
    arrived = np.empty_like(values)
    _cuda.memcpy_dtoh(arrived, memory)
    assert np.array_equal(arrived, values)


def compute_right(s, rnd):
    """The same numbers whoever else uses the handler."""
    handler, n = s.get(rnd, "handler"), rnd.randrange(1, 20)
    values = np.full((n, n), rnd.randrange(9), "f4")
    a, out = handler.create_from_numpy(values), handler.zeros((n, n))
    handler.dot_mm(a, a, out)
    handler.add_tt(out, a, out)
    assert np.array_equal(out.get(), values @ values + values)


STEPS_OF_BINDING = [copy_in, copy_in_now, copy_out, copy_between, set_bytes, stage]
STEPS_OF_BINDING += [
    stage_packed,
    order,
    wait,
    look,
    close,
    replace,
    make_and_drop,
    carry_right,
]
ALL_STEPS = [*STEPS_OF_BINDING, compute, compute_right]


def run_threads(work):
    """Run work(number) in all threads at once; return the errors."""
    errors, barrier = [], threading.Barrier(THREADS)

    def target(number):
        barrier.wait()
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=target, args=(k,), daemon=True) for k in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    end = time.monotonic() + HANGS_SECONDS
    for thread in threads:
        thread.join(max(end - time.monotonic(), 0))
    if any(thread.is_alive() for thread in threads):
        faulthandler.dump_traceback()
        pytest.fail("a thread hangs")
    return errors


def use(shared, steps, seed):
    def work(number):
        rnd = random.Random(1000 * seed + number)
        # As a program has it: each thread makes the context current, for itself.
        with shared.context:
            for _ in range(STEPS):
                step = rnd.choice(steps)
                if rnd.randrange(2):
                    time.sleep(1e-6)  # else a thread takes many steps in a row
                try:
                    step(shared, rnd)
                except (ValueError, _cuda.CudaError) as error:
                    if not DOCUMENTED.search(str(error)):
                        raise

    return run_threads(work)


SEEDS = range(max(EXAMPLES // 6, 1))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", ["late", "random", "eager"])
def test_threads_share_all_objects_of_the_binding(fake, mode, seed):
    fake.mode(mode, seed)
    fake.hold(COPY_MS * (seed % 2))
    shared = Shared(_cuda.Context.current(), device=None)
    assert use(shared, STEPS_OF_BINDING, seed) == []
    shared.settle()
    assert _cuda.live_objects()["in_flight"] == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_threads_share_a_handler_and_what_it_is_made_of(fake, kernels, seed):
    fake.mode(["late", "random", "eager"][seed % 3], seed)
    fake.hold(COPY_MS * (seed % 2))
    shared = Shared(_cuda.HandlerCore().context)
    assert use(shared, ALL_STEPS, seed) == []
    shared.settle()


def test_threads_close_one_object_at_once(fake):
    for make in (_cuda.Stream, _cuda.Event, lambda: _cuda.mem_alloc(64)):
        for _ in range(20):
            thing = make()
            close = getattr(thing, "close", None) or thing.free
            assert run_threads(lambda number, close=close: close()) == []
            assert thing.closed


def test_products_of_threads_are_those_of_one_to_the_bit(cuda):
    rnd = np.random.default_rng(0)
    pairs = [
        [
            cuda.create_from_numpy(rnd.standard_normal(shape).astype("f4"))
            for shape in ((n, k), (k, m))
        ]
        for n, k, m in rnd.integers(1, 40, (12, 3))
    ]

    def products():
        results = []
        for a, b in pairs:
            out = cuda.zeros((a.shape[0], b.shape[1]))
            cuda.dot_mm(a, b, out)
            cuda.dot_add_mm(a, b, out)
            results.append(out)
        return [out.get().tobytes() for out in results]

    expected, found = products(), {}
    for _ in range(3):

        def work(number):
            found[number] = products()

        assert run_threads(work) == []
        assert all(found[number] == expected for number in range(THREADS))


def test_products_of_threads_do_not_come_between_each_other(fake, cuda):
    """Their kernels leave sums in one workspace. Nobody waits, so the queue gets deep
    and a product lets go of the interpreter."""
    out = [cuda.zeros((4, 4)) for _ in range(THREADS)]
    a = cuda.create_from_numpy(np.ones((4, 3), "f4"))
    b = cuda.create_from_numpy(np.ones((3, 4), "f4"))

    def work(number):
        for _ in range(150):
            cuda.dot_mm(a, b, out[number])

    assert run_threads(work) == []
    assert all((each.get() == 3).all() for each in out)
    assert fake.damage()["faults"] == 0


def test_a_handler_outlives_its_closed_stream_only_as_errors(fake, kernels):
    """Whoever closes it under the others: nothing but ValueError from then on."""
    handler = _cuda.HandlerCore()
    a, out = handler.ones((8, 8)), handler.zeros((8, 8))

    def work(number):
        for step in range(10**6):
            try:
                handler.dot_mm(a, a, out)
                handler.synchronize()
            except ValueError as error:
                assert str(error) == "Stream is closed"
                break
            if number == 3 and step == 5:
                handler.stream.close()
        with pytest.raises(ValueError, match="Stream is closed"):
            handler.add_tt(a, a, out)

    assert run_threads(work) == []


def new_registered(count):
    """Return page-locked memory of so many floats that begins where a ring may."""
    memory = np.zeros(count + 16, "f4")
    start = -memory.ctypes.data % 64 // 4
    return _cuda.register_host_memory(memory[start : start + count])


def test_memory_of_a_ring_is_unregistered_when_the_copy_through_it_has_been_queued(
    fake,
):
    """Not between two of its pieces, which the driver would then take from memory that
    may move: the stand-in looks at each copy that is still to run."""
    fake.mode("eager")
    fake.hold(0.1)
    stream, values = _cuda.Stream(), np.arange(32 * KIB, dtype="f4")
    memory = _cuda.mem_alloc(values.nbytes)
    for _ in range(20):
        registered = new_registered(KIB)
        ring = _cuda.StagingRing(registered, 1)
        args = (memory, values, None, stream, 1)
        copy = threading.Thread(target=ring.memcpy_htod_async, args=args)
        copy.start()
        time.sleep(1e-3)
        registered.base.unregister()
        copy.join()
        assert not registered.base.registered
        with pytest.raises(
            ValueError, match="the StagingRing's memory was unregistered"
        ):
            ring.memcpy_htod_async(*args)
        with pytest.raises(ValueError, match="memory was unregistered"):
            ring.memcpy_htod_packed_async(memory, [values[:99]], [0], ["f4"])
        arrived = np.empty_like(values)
        _cuda.memcpy_dtoh(arrived, memory)
        assert np.array_equal(arrived, values)


def test_memory_that_others_copy_from_is_unregistered_behind_them(fake, kernels):
    """None of their copies is still to run then: the stand-in driver looks at each."""
    fake.mode("eager")
    fake.hold(0.2)
    stream, memory = _cuda.Stream(), _cuda.mem_alloc(4 * KIB)
    array = _cuda.HandlerCore().zeros(KIB)
    for round in range(10):
        registered = new_registered(KIB)

        def work(number, registered=registered):
            for step in range(20):
                if number == 0 and step == 5:
                    registered.base.unregister()
                try:
                    if number % 3 == 1:
                        _cuda.memcpy_htod_async(memory, registered, stream)
                    elif number % 3 == 2:
                        array.set(registered)
                    else:
                        rows = registered.reshape(32, 32)[:, :16]
                        _cuda.memcpy_htod_rows_async(memory, rows, stream)
                except ValueError as error:
                    assert "src is not page-locked" in str(error)

        context = _cuda.Context.current()

        def in_context(number, work=work):
            with context:
                work(number)

        assert run_threads(in_context) == []
        assert not registered.base.registered
