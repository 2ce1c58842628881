"""What an asynchronous copy holds, for how long, and what that costs."""

import gc
import sys

import numpy as np
import pytest

from binding_tools import (  # noqa: F401
    MIB,
    Interface,
    device_array,
    foreign_view,
    in_thread,
    leak_check,
    pinned,
    read,
)
from brainstorm_dbuf import _cuda

pytestmark = pytest.mark.usefixtures("leak_check")


def in_flight():
    return _cuda.live_objects()["in_flight"]


def test_a_dropped_source_is_held_until_its_copy_is_done(driver):
    count = 2 * MIB // 4
    stream = _cuda.Stream()
    memory = _cuda.mem_alloc(4 * count)
    source = pinned(np.full(count, 7))
    _cuda.memcpy_htod_async(memory, source, stream)
    del source
    gc.collect()
    others = [_cuda.register_host_memory(np.full(count, 9, "f4")) for _ in range(4)]
    others += [pinned(np.full(count, 9)) for _ in range(4)]
    stream.synchronize()
    assert (read(memory) == 7).all()
    assert in_flight() == 0
    assert _cuda.live_objects()["page_locked_blocks"] == 4


def test_nothing_is_freed_while_the_copy_is_pending(fake):
    stream = _cuda.Stream()
    memory = _cuda.mem_alloc(4 * MIB)
    for make in (
        lambda: pinned(np.full(MIB, 7)),
        lambda: pinned(np.full(2 * MIB, 7))[MIB:],
        lambda: pinned(np.full((2, MIB), 7))[1].reshape(2, -1),
        lambda: np.ndarray(MIB, "f4", memoryview(pinned(np.full(MIB, 7)))),
        lambda: foreign_view(pinned(np.full(MIB, 7))),
        lambda: memoryview(pinned(np.full(MIB, 7))),
        lambda: _cuda.register_host_memory(np.full(MIB, 7, "f4")),
    ):
        held = _cuda.live_objects()
        source = make()
        fake_live = fake.live()
        _cuda.memcpy_htod_async(memory, source, stream)
        del source
        gc.collect()
        assert fake.live() == fake_live | {"events": fake.live()["events"]}
        assert in_flight() == 1
        stream.synchronize()
        after = _cuda.live_objects()
        assert after | {"fences": 0} == held | {"fences": 0}
        assert (read(memory) == 7).all()


def test_device_ends_are_held_as_well(fake):
    class Owner:
        alive = 0

        def __init__(self):
            self.memory = device_array([1, 2, 3])
            Owner.alive += 1

        def __int__(self):
            return int(self.memory)

        def __del__(self):
            Owner.alive -= 1

    stream = _cuda.Stream()
    _cuda.memcpy_dtod_async(Interface(Owner(), (3,)), Owner(), 12, stream)
    _cuda.memset_d8_async(Owner(), 0, 12, stream)
    assert Owner.alive == 3
    assert in_flight() == 2
    stream.synchronize()
    assert Owner.alive == 0


@pytest.mark.parametrize("how", ["synchronize", "query", "close", "drop", "context"])
def test_finding_out_that_all_is_done_lets_go_of_all(driver, how):
    stream = _cuda.Stream()
    memory = _cuda.mem_alloc(16)
    for _ in range(5):
        _cuda.memcpy_htod_async(memory, pinned([1, 2, 3, 4]), stream)
    assert in_flight() == 5
    if how == "synchronize":
        stream.synchronize()
    elif how == "query":
        _cuda.Context.current().synchronize()
        assert stream.query()
    elif how == "close":
        stream.close()
    elif how == "drop":
        del stream
    else:
        stream.close()
        legacy = stream = None
        _cuda.memcpy_htod_async(memory, pinned([1, 2, 3, 4]))
        _cuda.memcpy_htod_async(memory, pinned([1, 2, 3, 4]), legacy)
        kept = _cuda.Context.current()
        kept.synchronize()
    assert in_flight() == 0
    assert read(memory).tolist() == [1, 2, 3, 4]


def test_large_copies_are_let_go_one_by_one(driver):
    stream = _cuda.Stream()
    memory, source = _cuda.mem_alloc(MIB), pinned(np.ones(MIB // 4))
    for _ in range(3):
        _cuda.memcpy_htod_async(memory, source, stream)
        stream.record().synchronize()
    assert in_flight() == 1  # each copy looked at the ones before it
    stream.synchronize()
    assert in_flight() == 0


def test_a_steady_state_creates_no_events(fake):
    stream = _cuda.Stream()
    large, small = pinned(np.ones(MIB // 4)), pinned([1])
    memory = _cuda.mem_alloc(MIB)
    event = _cuda.Event()
    before = fake.calls("cuEventCreate")
    for _ in range(200):
        _cuda.memcpy_htod_async(memory, large, stream)
        _cuda.memcpy_htod_async(memory, small, stream)
        event.record(stream)
        event.synchronize()
    assert fake.calls("cuEventCreate") - before <= 2
    assert in_flight() <= 3


def test_small_copies_share_a_fence(fake):
    stream = _cuda.Stream()
    source, memory = pinned([1]), _cuda.mem_alloc(4)
    names = ("cuEventRecord", "cuEventQuery", "cuEventCreate")
    before = [fake.calls(name) for name in names]
    for _ in range(640):
        _cuda.memcpy_htod_async(memory, source, stream)
    records, queries, creates = (fake.calls(n) - b for n, b in zip(names, before))
    assert records == 10
    assert queries <= 10
    assert creates <= 10
    assert in_flight() == 640
    stream.synchronize()
    assert in_flight() == 0


@pytest.mark.parametrize("nbytes", [4, MIB])
def test_too_many_copies_in_flight_wait_for_the_oldest(fake, nbytes):
    stream = _cuda.Stream()
    source, memory = _cuda.pagelocked_zeros(nbytes, "u1"), _cuda.mem_alloc(nbytes)
    copies = 300 if nbytes == MIB else 300 * 64
    for _ in range(copies):
        _cuda.memcpy_htod_async(memory, source, stream)
    assert fake.calls("cuEventSynchronize") > 0
    assert _cuda.live_objects()["fences"] <= 256
    assert in_flight() <= 257 * 64
    stream.synchronize()
    assert in_flight() == 0


def test_copies_on_the_null_stream_are_held_by_their_context(fake):
    memory = _cuda.mem_alloc(MIB)
    for _ in range(20):
        _cuda.memcpy_htod_async(memory, pinned(np.ones(MIB // 4)))
    fake.drain(0)
    _cuda.memcpy_htod_async(memory, pinned(np.ones(MIB // 4)))
    assert in_flight() <= 1


def test_foreign_streams_have_a_ledger_each(fake):
    memory, source = _cuda.mem_alloc(4), pinned([1])
    streams = [_cuda.Stream() for _ in range(5)]
    for _ in range(3):
        for stream in streams:
            _cuda.memcpy_htod_async(memory, source, stream.handle)
    assert in_flight() == 15
    _cuda.Context.current().synchronize()
    assert in_flight() == 0
    for stream in streams:
        stream.close()
    with _cuda.Stream() as another:  # the old ledgers are swept
        _cuda.memcpy_htod_async(memory, source, another.handle)
        another.synchronize()
        _cuda.Context.current().synchronize()


def test_a_forgotten_copy_is_found_by_the_garbage_collector(fake):
    before = fake.live()
    context = _cuda.Context.primary(0)
    with context:
        memory = _cuda.mem_alloc(16)
        _cuda.memcpy_htod_async(memory, pinned([1, 2, 3, 4]))
    del memory, context
    gc.collect()
    assert fake.live() == before


def test_a_cycle_through_a_copy_in_flight_is_collected(fake):
    class End:
        def __init__(self, stream):
            self.stream, self.memory = stream, _cuda.mem_alloc(16)

        def __int__(self):
            return int(self.memory)

    stream = _cuda.Stream()
    _cuda.memset_d8_async(End(stream), 0, 16, stream)
    del stream
    assert in_flight() == 1
    gc.collect()
    assert in_flight() == 0


def test_a_copy_that_fails_holds_nothing(fake):
    memory, source = _cuda.mem_alloc(MIB), pinned(np.ones(MIB // 4))
    stream = _cuda.Stream()
    references = sys.getrefcount(memory), sys.getrefcount(source.base)
    fake.fail("cuMemcpyHtoDAsync", 0, 700)
    with pytest.raises(_cuda.CudaError, match="cuMemcpyHtoDAsync failed"):
        _cuda.memcpy_htod_async(memory, source, stream)
    assert in_flight() == 0
    assert (sys.getrefcount(memory), sys.getrefcount(source.base)) == references


def test_a_fence_that_cannot_be_recorded_is_made_up_for(fake):
    memory, source = _cuda.mem_alloc(MIB), pinned(np.ones(MIB // 4))
    stream = _cuda.Stream()
    fake.fail("cuEventRecord", 0, 999)
    _cuda.memcpy_htod_async(memory, source, stream)
    assert in_flight() == 1
    _cuda.memcpy_htod_async(memory, source, stream)  # its fence covers both
    fake.drain(stream.handle)
    _cuda.memcpy_htod_async(memory, source, stream)
    assert in_flight() == 1


def test_an_unknown_answer_does_not_let_go(fake):
    memory, source = _cuda.mem_alloc(MIB), pinned(np.ones(MIB // 4))
    stream = _cuda.Stream()
    _cuda.memcpy_htod_async(memory, source, stream)
    fake.fail("cuEventQuery", 0, 999)
    _cuda.memcpy_htod_async(memory, source, stream)
    assert in_flight() == 2


def test_code_that_runs_when_a_source_goes_may_use_the_stream(fake):
    stream = _cuda.Stream()
    memory = _cuda.mem_alloc(4)
    seen = []

    class Source:
        def __init__(self):
            self.memory = device_array([1])

        def __int__(self):
            return int(self.memory)

        def __del__(self):
            if len(seen) < 20:
                seen.append(_cuda.Context.current().handle)
                _cuda.memcpy_dtod_async(memory, Source(), 4, stream)
                stream.query()
                stream.synchronize()

    _cuda.memcpy_dtod_async(memory, Source(), 4, stream)
    stream.synchronize()
    assert seen == [fake.current_context()] * 20
    assert in_flight() == 0


@pytest.mark.parametrize("seed", range(20))
def test_values_are_right_in_any_legal_order(fake, seed):
    fake.mode("random", seed)
    rng = np.random.default_rng(seed)
    streams = [_cuda.Stream(), _cuda.Stream()]
    slots = [_cuda.mem_alloc(64) for _ in range(2)]
    front = _cuda.mem_alloc(64)
    copied = [_cuda.Event() for _ in range(2)]
    consumed = [_cuda.Event() for _ in range(2)]
    results = []
    for k in range(30):
        slot = k % 2
        copy, compute = streams
        if consumed[slot].recorded:
            copy.wait_event(consumed[slot])
        _cuda.memcpy_htod_async(slots[slot], pinned(np.full(16, k)), copy)
        copied[slot].record(copy)
        compute.wait_event(copied[slot])
        _cuda.memcpy_dtod_async(front, slots[slot], 64, compute)
        consumed[slot].record(compute)
        out = pinned(np.full(16, -1))
        _cuda.memcpy_dtoh_async(out, front, compute)
        results.append(out)
        if rng.random() < 0.2:
            gc.collect()
    for stream in streams:
        stream.synchronize()
    assert [out.tolist() for out in results] == [[k] * 16 for k in range(30)]


def test_a_foreign_stream_may_go_before_its_copies_are_let_go(fake):
    context = _cuda.Context.from_handle(_cuda.Context.current().handle)
    others = [_cuda.Stream(context) for _ in range(3)]
    memory = _cuda.mem_alloc(4, context)
    for k, other in enumerate(others):
        _cuda.memcpy_htod_async(memory, pinned([k]), other.handle)
        other.close()
    wrapped = _cuda.Stream(context)
    foreign = _cuda.Stream.from_handle(wrapped.handle, context=context)
    _cuda.memcpy_htod_async(memory, pinned([7]), foreign)
    wrapped.close()
    before = fake.calls("cuStreamSynchronize")
    assert in_flight() > 0
    del foreign, wrapped, others, other, memory, context
    gc.collect()
    # Their handles are dangling by then: a call on one may crash the real driver.
    assert fake.calls("cuStreamSynchronize") == before
    assert in_flight() == 0
