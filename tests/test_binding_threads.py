"""Objects used, closed and freed by several threads; the GIL released in waits."""

import gc
import threading
import time

import numpy as np
import pytest

from binding_tools import MIB, in_thread, leak_check, pinned, read  # noqa: F401
from brainstorm_dbuf import _cuda

pytestmark = pytest.mark.usefixtures("leak_check")

SPIN_MS = 200


def test_any_thread_may_use_an_object_and_keeps_its_own_context(fake):
    stream, event = _cuda.Stream(), _cuda.Event()
    memory, source = _cuda.mem_alloc(16), pinned([1, 2, 3, 4])

    def work():
        _cuda.memcpy_htod_async(memory, source, stream)
        event.record(stream)
        stream.wait_event(event)
        event.query()
        stream.query()
        event.synchronize()
        stream.synchronize()
        _cuda.memset_d8_async(_cuda.mem_alloc(4, memory.context), 0, 4, stream)
        return fake.current_context()

    here = fake.current_context()
    assert in_thread(work) is None
    other = _cuda.Context.primary(0)

    def work_in_another_context():
        with other:
            before = fake.current_context()
            work()
            return fake.current_context() == before == other.handle

    assert in_thread(work_in_another_context)
    assert fake.current_context() == here
    assert read(memory).tolist() == [1, 2, 3, 4]


def test_any_thread_may_drop_the_last_reference(fake):
    def make():
        stream, memory = _cuda.Stream(), _cuda.mem_alloc(16)
        registered = _cuda.register_host_memory(np.zeros(16, "u1"))
        _cuda.memcpy_htod_async(memory, registered, stream)
        return [stream, memory, registered, stream.record(), pinned([1])]

    things = make()
    before = fake.live()

    def drop():
        things.clear()
        gc.collect()
        return fake.current_context()

    assert in_thread(drop) is None
    after = fake.live()
    for kind in ("streams", "events", "device_blocks", "pinned_blocks", "registered"):
        assert after[kind] == 0 < before[kind]


def count_while(function):
    """Return (result, seconds, how far another thread counted meanwhile)."""
    counter, stop = [0], threading.Event()

    def count():
        while not stop.is_set():
            counter[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    started, first = time.perf_counter(), counter[0]
    try:
        result = function()
        return result, time.perf_counter() - started, counter[0] - first
    finally:
        stop.set()
        thread.join()


def busy_stream(fake):
    stream = _cuda.Stream()
    fake.spin(stream.handle, SPIN_MS)
    return stream


def _pending_close(fake):
    memory, source = _cuda.mem_alloc(4), pinned([1])  # which waits for the context
    stream = busy_stream(fake)
    _cuda.memcpy_htod_async(memory, source, stream)
    return stream.close


def _pageable_copy(fake):
    memory = _cuda.mem_alloc(4)
    fake.spin(0, SPIN_MS)
    return lambda: _cuda.memcpy_htod(memory, b"1234")


def _copy_to_host(fake):
    memory = _cuda.mem_alloc(4)
    fake.spin(0, SPIN_MS)
    return lambda: _cuda.memcpy_dtoh(bytearray(4), memory)


def _free(fake):
    memory = _cuda.mem_alloc(4)
    fake.spin(0, SPIN_MS)
    return memory.free


WAITS = {
    "Stream.synchronize": lambda fake: busy_stream(fake).synchronize,
    "Event.synchronize": lambda fake: busy_stream(fake).record().synchronize,
    "Context.synchronize": lambda fake: (
        busy_stream(fake).context.synchronize
    ),
    "Stream.close": _pending_close,
    "memcpy_htod": _pageable_copy,
    "memcpy_dtoh": _copy_to_host,
    "DeviceMemory.free": _free,
    "mem_alloc": lambda fake: (
        lambda stream=busy_stream(fake): _cuda.mem_alloc(4)
    ),
    "pagelocked_empty": lambda fake: (
        lambda stream=busy_stream(fake): _cuda.pagelocked_empty(4)
    ),
}


@pytest.mark.parametrize("name", WAITS)
def test_other_threads_run_while_one_waits(fake, name):
    wait = WAITS[name](fake)
    _, seconds, counted = count_while(wait)
    assert seconds > SPIN_MS / 1000 * 0.8, "it did not wait"
    free = count_while(lambda: time.sleep(SPIN_MS / 1000))
    rate, free_rate = counted / seconds, free[2] / free[1]
    assert rate > 0.25 * free_rate


@pytest.mark.parametrize("wait", ["synchronize", "copy", "event"])
def test_closing_a_stream_under_a_waiting_thread_leaves_that_thread_alone(fake, wait):
    memory, source = _cuda.mem_alloc(4), pinned([1])
    stream = busy_stream(fake)
    event = stream.record()
    _cuda.memcpy_htod_async(memory, source, stream)
    inside = threading.Event()
    outcome = []

    def work():
        inside.set()
        if wait == "synchronize":
            stream.synchronize()
        elif wait == "event":
            event.synchronize()
        else:
            for _ in range(300 * 16):  # too many: waits for the oldest
                _cuda.memcpy_htod_async(memory, source, stream)
        outcome.append(stream.closed)

    thread = threading.Thread(target=work)
    thread.start()
    inside.wait()
    time.sleep(0.05)
    stream.close()
    event.close()
    with pytest.raises(ValueError, match="Stream is closed"):
        stream.synchronize()
    if wait == "copy":
        # Refused in the middle, which is all right; or it was inside all the time.
        hook, threading.excepthook = threading.excepthook, lambda info: None
        thread.join()
        threading.excepthook = hook
    else:
        thread.join()
        assert outcome == [True]
    assert fake.live()["streams"] == 0
    assert fake.live()["events"] == 0
    assert _cuda.live_objects()["in_flight"] == 0


def test_freeing_memory_under_a_copy_waits_for_the_copy(fake):
    memory = _cuda.mem_alloc(4)
    fake.spin(0, SPIN_MS)
    thread = threading.Thread(target=_cuda.memcpy_htod, args=(memory, b"1234"))
    thread.start()
    time.sleep(0.05)
    memory.free()
    assert memory.closed
    thread.join()
    assert fake.live()["device_blocks"] == 0


def test_many_threads_share_a_stream(driver):
    stream, events = _cuda.Stream(), [_cuda.Event() for _ in range(4)]
    memories = [_cuda.mem_alloc(4096) for _ in range(4)]
    errors = []

    def work(number):
        try:
            for step in range(300):
                source = pinned(np.full(1024, number), "f4") if step % 50 == 0 else source
                _cuda.memcpy_htod_async(memories[number], source, stream)
                events[number].record(stream)
                if step % 7 == 0:
                    stream.synchronize()
                if step % 11 == 0:
                    stream.query()
        except BaseException as error:
            errors.append(error)

    context = _cuda.Context.current()

    def target(number):
        with context:
            work(number)

    threads = [threading.Thread(target=target, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    stream.synchronize()
    for number, memory in enumerate(memories):
        assert (read(memory) == number).all()
    assert _cuda.live_objects()["in_flight"] == 0


def test_many_threads_share_the_null_stream_and_the_context(fake):
    fake.mode("random", 3)
    memory = _cuda.mem_alloc(MIB)
    source = _cuda.pagelocked_zeros(MIB, "u1")
    context = _cuda.Context.current()
    errors = []

    def work():
        try:
            for step in range(100):
                _cuda.memcpy_htod_async(memory, source)
                _cuda.memset_d8_async(memory, 0, 16)
                if step % 10 == 0:
                    context.synchronize()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    context.synchronize()
    assert _cuda.live_objects()["in_flight"] == 0


def test_two_threads_open_and_drop_the_primary_context(fake):
    before = fake.live()["contexts"]

    def work():
        for _ in range(200):
            with _cuda.Context.primary(0):
                _cuda.Stream().synchronize()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert fake.live()["contexts"] == before
