"""Every driver call of every operation fails once: nothing leaks, all still works."""

import gc

import numpy as np
import pytest

from binding_tools import (  # noqa: F401
    MIB,
    foreign_view,
    leak_check,
    pinned,
    unraisable_errors,
)
from brainstorm_dbuf import _cuda, errors

pytestmark = pytest.mark.usefixtures("leak_check")


class Bench:
    """What an operation may use; in a context that is not the thread's current one."""

    def __init__(self):
        self.context = context = _cuda.Context.primary(0)
        with context:
            self.memory = _cuda.mem_alloc(2 * MIB)
            self.other = _cuda.mem_alloc(2 * MIB)
            self.small = _cuda.pagelocked_zeros(16)
            self.large = _cuda.pagelocked_zeros(MIB // 2)
            self.plain = np.zeros(16, "f4")
            self.registered = _cuda.register_host_memory(np.zeros(4096, "u1"))
            self.stream = _cuda.Stream()
            self.event = _cuda.Event(timing=True)
            self.recorded = _cuda.Event(timing=True).record(self.stream)
            self.recorded.synchronize()

    def busy(self):
        """A stream with copies in flight: large ones, and small ones behind them."""
        stream = _cuda.Stream(self.context)
        for source in (self.large, self.large, self.small):
            _cuda.memcpy_htod_async(self.memory, source, stream)
        return stream

    def foreign(self):
        """The address of pinned memory in a view that our code cannot know."""
        return foreign_view(self.small)


# name: what to prepare from the Bench, and the operation
OPERATIONS = {
    "Device": lambda b: lambda: _cuda.Device(0),
    "Device.name": lambda b: lambda: _cuda.Device(0).name,
    "Device.total_memory": lambda b: lambda: _cuda.Device(0).total_memory,
    "Device.capability": lambda b: lambda: _cuda.Device(0).compute_capability,
    "Device.pci_bus_id": lambda b: lambda: _cuda.Device(0).pci_bus_id,
    "driver_version": lambda b: _cuda.driver_version,
    "device_count": lambda b: _cuda.device_count,
    "Context.current": lambda b: _cuda.Context.current,
    "Context.primary": lambda b: lambda: _cuda.Context.primary(0),
    "Context.device": lambda b: lambda: b.context.device,
    "Context.synchronize": lambda b: b.context.synchronize,
    "Stream": lambda b: lambda: _cuda.Stream(b.context),
    "Stream.legacy": lambda b: lambda: _cuda.Stream.legacy(),
    "Stream.from_handle": lambda b: lambda: _cuda.Stream.from_handle(b.stream.handle),
    "Stream.priority": lambda b: lambda: b.stream.priority,
    "Stream.query": lambda b: b.busy().query,
    "Stream.synchronize": lambda b: b.busy().synchronize,
    "Stream.record": lambda b: b.stream.record,
    "Stream.wait_event": lambda b: lambda: b.stream.wait_event(b.recorded),
    "Stream.close": lambda b: b.busy().close,
    "Event": lambda b: lambda: _cuda.Event(b.context),
    "Event.record": lambda b: lambda: b.event.record(b.stream),
    "Event.record NULL": lambda b: b.event.record,
    "Event.query": lambda b: b.recorded.query,
    "Event.synchronize": lambda b: b.recorded.synchronize,
    "Event.elapsed_time": lambda b: lambda: b.recorded.elapsed_time(b.recorded),
    "Event.close": lambda b: _cuda.Event(b.context).close,
    "mem_alloc": lambda b: lambda: _cuda.mem_alloc(64, b.context),
    "mem_get_info": lambda b: lambda: _cuda.mem_get_info(b.context),
    "DeviceMemory.free": lambda b: _cuda.mem_alloc(64, b.context).free,
    "pagelocked_empty": lambda b: lambda: _cuda.pagelocked_empty(4, context=b.context),
    "register": lambda b: (
        lambda: _cuda.register_host_memory(np.zeros(9), context=b.context)
    ),
    "unregister": lambda b: b.registered.base.unregister,
    "is_pagelocked": lambda b: lambda: _cuda.is_pagelocked(b.foreign()),
    "htod": lambda b: lambda: _cuda.memcpy_htod(b.memory, b.plain),
    "dtoh": lambda b: lambda: _cuda.memcpy_dtoh(b.plain, b.memory),
    "dtod": lambda b: lambda: _cuda.memcpy_dtod(b.memory, b.other),
    "htod_async small": lambda b: (
        lambda: _cuda.memcpy_htod_async(b.memory, b.small, b.stream)
    ),
    "htod_async large": lambda b: (
        lambda: _cuda.memcpy_htod_async(b.memory, b.large, b.stream)
    ),
    "htod_async foreign": lambda b: (
        lambda: _cuda.memcpy_htod_async(b.memory, b.foreign(), b.stream)
    ),
    "htod_async address": lambda b: (
        lambda: _cuda.memcpy_htod_async(b.memory.ptr, b.small, b.stream)
    ),
    "htod_async handle": lambda b: (
        lambda: _cuda.memcpy_htod_async(b.memory, b.small, b.stream.handle)
    ),
    "htod_async NULL": lambda b: lambda: _cuda.memcpy_htod_async(b.memory, b.large),
    "htod_async busy": lambda b: (
        lambda stream=b.busy(): _cuda.memcpy_htod_async(b.memory, b.large, stream)
    ),
    "dtoh_async": lambda b: lambda: _cuda.memcpy_dtoh_async(b.large, b.memory, b.stream),
    "dtod_async": lambda b: (
        lambda: _cuda.memcpy_dtod_async(b.memory, b.other, None, b.stream)
    ),
    "dtod_2d_async": lambda b: (
        lambda: _cuda.memcpy_dtod_2d_async(b.memory, 64, b.other, 32, 16, 4, b.stream)
    ),
    "memset_d8": lambda b: lambda: _cuda.memset_d8(b.memory, 1, 4),
    "memset_d16": lambda b: lambda: _cuda.memset_d16(b.memory, 1, 4),
    "memset_d32": lambda b: lambda: _cuda.memset_d32(b.memory, 1, 4),
    "memset_d8_async": lambda b: lambda: _cuda.memset_d8_async(b.memory, 1, 4, b.stream),
    "memset_d16_async": lambda b: (
        lambda: _cuda.memset_d16_async(b.memory, 1, 4, b.stream)
    ),
    "memset_d32_async": lambda b: (
        lambda: _cuda.memset_d32_async(b.memory, 1, MIB // 4, b.stream)
    ),
}

# A failure here is made up for, so that the operation itself succeeds.
SILENT = {
    "cuCtxPopCurrent",  # the caller's context is set instead
    "cuEventRecord",  # of a fence: the next one covers the copy as well
    "cuEventQuery",  # of a fence: asked again at the next copy
    "cuEventDestroy",  # of a spare fence event: tried again in dealloc
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("code", [2, 999])
def test_each_driver_call_may_fail_once(fake, name, code):
    prepare = OPERATIONS[name]
    bench = Bench()
    operation = prepare(bench)
    before = fake.calls()
    kept = operation()
    calls = fake.calls() - before
    del kept, operation, bench
    assert calls or name == "Stream.legacy"
    for call, count in sorted(calls.items()):
        said = [_fail_once(fake, prepare, call, nth, code) for nth in range(count)]
        assert any(said) or call in SILENT, f"{call} failed and nobody said so"


def _fail_once(fake, prepare, call, nth, code):
    """Return whether the operation raised; check that it left nothing behind."""
    gc.collect()
    ours, theirs = _cuda.live_objects(), fake.live()
    current = fake.current_context()
    bench = Bench()
    operation, kept = prepare(bench), None
    made = fake.calls(call)
    fake.fail(call, nth, code)
    with unraisable_errors() as reported:
        try:
            kept = operation()
            raised = False
        except errors.CudaError as error:
            assert error.code == code and error.call == call
            assert isinstance(error, MemoryError) == (code == 2)
            raised = True
        assert fake.calls(call) > made + nth, "the failure is still to come"
        assert fake.current_context() == current
        # Whatever it was, it can be used on, and goes in the end.
        bench.context.synchronize()
        bench.stream.synchronize()
        del operation, kept, bench
        gc.collect()
    assert fake.current_context() == current
    assert _cuda.live_objects() == ours
    assert fake.live() == theirs
    assert not reported
    return raised


@pytest.mark.parametrize(
    "call, make",
    [
        ("cuMemFreeHost", lambda: pinned([1, 2])),
        ("cuMemHostUnregister", lambda: _cuda.register_host_memory(np.zeros(4))),
        ("cuMemFree", lambda: _cuda.mem_alloc(4)),
        ("cuEventDestroy", lambda: _cuda.Event()),
        ("cuStreamDestroy", lambda: _cuda.Stream()),
        ("cuDevicePrimaryCtxRelease", lambda: _cuda.Context.primary(0)),
    ],
)
def test_a_failure_in_dealloc_is_reported_and_keeps_the_current_exception(
    fake, call, make
):
    before = _cuda.live_objects()
    with unraisable_errors() as reported:
        fake.fail(call, 0, 999)
        with pytest.raises(KeyError, match="mine"):
            things = [make()]
            try:
                raise KeyError("mine")
            finally:
                del things
    assert reported == [(call, "CUDA_ERROR_UNKNOWN")]
    assert _cuda.live_objects() == before


def test_what_went_with_its_context_is_dropped_in_silence(fake):
    context = fake.create_context()
    things = [
        _cuda.mem_alloc(4),
        _cuda.Stream(),
        _cuda.Event().record(),
        _cuda.pagelocked_empty(4),
        _cuda.register_host_memory(np.zeros(4)),
    ]
    _cuda.memcpy_htod_async(things[0], pinned([1]), things[1])
    _cuda.memcpy_htod_async(things[0], pinned([1]))
    fake.destroy_context(context)
    with unraisable_errors() as reported:
        things[0].free()
        things[1].close()
        things[2].close()
        del things
        gc.collect()
    assert reported == []


def test_using_what_went_with_its_context_is_an_error(fake):
    context = fake.create_context()
    memory, stream = _cuda.mem_alloc(4), _cuda.Stream()
    fake.destroy_context(context)
    for use in (
        lambda: _cuda.memcpy_htod(memory, b"1234"),
        stream.synchronize,
        stream.query,
        lambda: _cuda.memset_d8_async(memory, 0, 4, stream),
    ):
        with pytest.raises(errors.CudaError) as caught:
            use()
        assert caught.value.name in (
            "CUDA_ERROR_INVALID_CONTEXT", "CUDA_ERROR_CONTEXT_IS_DESTROYED"
        )
