"""Devices, contexts, streams and events."""

import copy
import gc
import pickle

import pytest

from binding_tools import device_array, in_thread, leak_check, pinned, read  # noqa: F401
from brainstorm_dbuf import _cuda, errors

pytestmark = pytest.mark.usefixtures("leak_check")


# ---- Devices ----


def test_a_device_describes_itself(driver):
    device = _cuda.Device(0)
    assert device.ordinal == 0
    assert device.name
    assert device.total_memory > 0
    assert all(isinstance(part, int) for part in device.compute_capability)
    assert device.pci_bus_id.count(":") == 2
    assert device.attribute(75) == device.compute_capability[0]
    assert repr(device) == "Device(0)"
    assert device == _cuda.Device() and hash(device) == hash(_cuda.Device())
    assert device != 0


def test_a_device_that_is_not_there_is_named(driver):
    with pytest.raises(ValueError, match="no CUDA device 99: the driver sees"):
        _cuda.Device(99)
    with pytest.raises(ValueError, match="no CUDA device -1"):
        _cuda.Context.primary(-1)


def test_an_attribute_that_is_not_there_is_an_error(driver):
    with pytest.raises(ValueError, match="attribute -1"):
        _cuda.Device(0).attribute(-1)
    with pytest.raises(TypeError):
        _cuda.Device(0).attribute("x")


def test_the_driver_says_its_version_and_the_number_of_devices(driver):
    assert _cuda.driver_version() >= 12000
    assert _cuda.device_count() >= 1
    info = _cuda.sysinfo()
    assert info["is_open"] is True
    assert info["driver_version"] == _cuda.driver_version()


# ---- Contexts ----


def test_the_current_context_is_the_threads(driver):
    context = _cuda.Context.current()
    assert context.handle == driver.context
    assert context.device == _cuda.Device(0)
    assert context == _cuda.Context.current()
    assert hash(context) == hash(_cuda.Context.current())
    assert context != 0
    assert "Context 0x" in repr(context)


def test_a_thread_without_a_context_is_told_how_to_set_one(driver):
    with pytest.raises(errors.CudaError, match="no context is current") as caught:
        in_thread(_cuda.Context.current)
    assert caught.value.name == "CUDA_ERROR_INVALID_CONTEXT"
    assert "with context:" in caught.value.detail
    for make in (
        _cuda.Stream,
        _cuda.Event,
        lambda: _cuda.mem_alloc(4),
        lambda: _cuda.pagelocked_empty(4),
        lambda: _cuda.memcpy_htod(1234, b"1234"),
    ):
        with pytest.raises(errors.CudaError, match="no context is current"):
            in_thread(make)


def test_with_makes_a_context_current_and_puts_the_other_back(driver):
    before = _cuda.Context.current()
    primary = _cuda.Context.primary(0)

    def inside():
        with primary as entered:
            assert entered is primary
            return _cuda.Context.current().handle

    assert in_thread(inside) == primary.handle
    with primary:
        assert _cuda.Context.current() is primary
    assert _cuda.Context.current() == before


def test_only_the_current_context_can_be_popped(fake):
    primary = _cuda.Context.primary(0)
    with pytest.raises(ValueError, match="not the one current"):
        primary.pop()
    primary.push()
    fake.push_context(other := fake.create_context())
    with pytest.raises(ValueError, match="not the one current"):
        primary.pop()
    assert fake.pop_context() == fake.pop_context() == other
    primary.pop()


def test_a_context_that_is_current_is_not_released(fake):
    _cuda.Context.primary(0).push()
    gc.collect()
    memory = device_array([1, 2, 3])
    assert read(memory).tolist() == [1, 2, 3]
    del memory
    _cuda.Context.current().pop()
    gc.collect()
    assert fake.live()["contexts"] == 1  # the fixture's


def test_the_primary_context_is_released_with_its_last_user(fake):
    before = fake.live()["contexts"]
    primary = _cuda.Context.primary(0)
    assert _cuda.Context.primary(0) is primary
    assert fake.live()["contexts"] == before + 1
    with primary:
        array = _cuda.pagelocked_empty(4)
        stream = _cuda.Stream()
    del primary
    gc.collect()
    array[:] = 1
    stream.synchronize()
    del array
    assert fake.live()["contexts"] == before + 1
    del stream
    assert fake.live()["contexts"] == before


def test_a_foreign_contexts_owner_lives_as_long_as_its_users(fake):
    class Owner:
        pass

    owner = Owner()
    owner.itself = owner
    alive = []
    import weakref

    reference = weakref.ref(owner, lambda _: alive.append("gone"))
    context = _cuda.Context.from_handle(_cuda.Context.current().handle, owner)
    memory = _cuda.mem_alloc(4)
    assert memory.context is context  # the one that has an owner is found
    owner.memory = memory  # a cycle through the owner
    del owner, context
    gc.collect()
    assert reference() is not None
    del memory
    gc.collect()
    assert alive == ["gone"]


def test_a_context_handle_must_be_one(driver):
    with pytest.raises(ValueError, match="no context"):
        _cuda.Context.from_handle(0)
    with pytest.raises(TypeError):
        _cuda.Context.from_handle("x")
    with pytest.raises(ValueError, match="not an address"):
        _cuda.Context.from_handle(-1)
    with pytest.raises(TypeError):
        _cuda.Context()
    with pytest.raises(TypeError, match="context must be a Context"):
        _cuda.Stream(0)


# ---- Streams ----


def test_a_stream_is_closed_once_and_named_when_used_after(driver):
    stream = _cuda.Stream()
    memory, array = _cuda.mem_alloc(16), pinned([1, 2, 3, 4])
    event = stream.record()
    stream.close()
    stream.close()
    assert stream.closed
    assert repr(stream) == "<Stream closed>"
    calls = driver.fake and driver.fake.calls()
    for use in (
        stream.synchronize,
        stream.query,
        stream.record,
        stream.__cuda_stream__,
        stream.__enter__,
        lambda: stream.handle,
        lambda: stream.priority,
        lambda: stream.wait_event(event),
        lambda: stream.record(event),
        lambda: event.record(stream),
        lambda: _cuda.memcpy_htod_async(memory, array, stream),
        lambda: _cuda.memcpy_dtoh_async(array, memory, stream),
        lambda: _cuda.memcpy_dtod_async(memory, memory, 4, stream),
        lambda: _cuda.memset_d8_async(memory, 0, 4, stream),
        lambda: _cuda.memcpy_htod_async(memory, array[:0], stream),
    ):
        with pytest.raises(ValueError, match="Stream is closed"):
            use()
    assert calls == (driver.fake and driver.fake.calls())


def test_with_closes_a_stream(driver):
    with _cuda.Stream() as stream:
        assert not stream.closed
        assert "Stream 0x" in repr(stream)
    assert stream.closed


def test_a_stream_has_a_context_a_priority_and_a_protocol(driver):
    stream = _cuda.Stream(_cuda.Context.current(), non_blocking=False, priority=0)
    assert stream.context == _cuda.Context.current()
    assert stream.priority == 0
    assert stream.__cuda_stream__() == (0, stream.handle)
    assert stream.handle


def test_the_legacy_stream_has_handle_0(driver):
    stream = _cuda.Stream.legacy()
    assert stream.handle == 0
    assert stream.__cuda_stream__() == (0, 0)
    memory = _cuda.mem_alloc(16)
    _cuda.memcpy_htod_async(memory, pinned([1, 2, 3, 4]), stream)
    stream.synchronize()
    assert read(memory).tolist() == [1, 2, 3, 4]
    stream.close()
    assert stream.closed


def test_a_foreign_stream_is_not_destroyed(driver):
    stream = _cuda.Stream()
    foreign = _cuda.Stream.from_handle(stream.handle, owner=stream)
    assert foreign.context == stream.context
    foreign.close()
    stream.synchronize()
    assert _cuda.Stream.from_handle(0).handle == 0
    assert _cuda.Stream.from_handle(1).handle == 0
    with pytest.raises(ValueError, match="per-thread"):
        _cuda.Stream.from_handle(2)


def test_a_foreign_stream_says_which_context_it_is_of(fake):
    stream = _cuda.Stream()
    with pytest.raises(ValueError, match="belongs to"):
        _cuda.Stream.from_handle(stream.handle, context=_cuda.Context.primary(0))


class Foreign:
    def __init__(self, *pair):
        self.pair = pair

    def __cuda_stream__(self):
        return self.pair


def test_stream_arguments_may_be_of_other_libraries(driver):
    stream = _cuda.Stream()
    event = _cuda.Event()
    for argument in (None, 0, 1, stream, stream.handle, Foreign(0, stream.handle)):
        assert event.record(argument) is event
        event.synchronize()
    for argument, error in (
        ("x", TypeError),
        (1.5, TypeError),
        (Foreign(0), TypeError),
        (Foreign(0, "x"), TypeError),
        (2, ValueError),
        (-1, ValueError),
        (1 << 64, ValueError),
    ):
        with pytest.raises(error):
            event.record(argument)


def test_an_error_inside_a_foreign_stream_comes_out(driver):
    class Broken:
        def __cuda_stream__(self):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        _cuda.Event().record(Broken())


# ---- Events ----


def test_a_never_recorded_event_is_neither_done_nor_waited_for(driver):
    event = _cuda.Event(timing=True)
    other = _cuda.Event(timing=True)
    assert not event.recorded
    assert "never recorded" in repr(event)
    other.record()
    for use in (
        event.query,
        event.synchronize,
        lambda: event.elapsed_time(other),
        lambda: other.elapsed_time(event),
        lambda: _cuda.Stream().wait_event(event),
    ):
        with pytest.raises(ValueError, match="never recorded"):
            use()


def test_an_event_is_done_when_its_work_is(driver):
    stream = _cuda.Stream()
    event = _cuda.Event().record(stream)
    assert event.recorded
    if driver.fake:
        assert event.query() is False
        assert stream.query() is False
    event.synchronize()
    assert event.query() is True
    stream.synchronize()
    assert stream.query() is True


def test_a_stream_makes_and_records_events(driver):
    stream = _cuda.Stream()
    event = stream.record()
    assert event.recorded and event.context == stream.context
    assert stream.record(event) is event
    assert stream.record(event=None) is not event
    with pytest.raises(TypeError, match="must be an Event"):
        stream.record(stream)
    with pytest.raises(TypeError, match="must be an Event"):
        stream.wait_event(None)


def test_a_stream_waits_for_an_event_of_another(driver):
    first, second = _cuda.Stream(), _cuda.Stream()
    memory, out = _cuda.mem_alloc(16), pinned([0, 0, 0, 0])
    _cuda.memcpy_htod_async(memory, pinned([1, 2, 3, 4]), first)
    second.wait_event(first.record())
    _cuda.memcpy_dtoh_async(out, memory, second)
    second.synchronize()
    assert out.tolist() == [1, 2, 3, 4]
    first.synchronize()


def test_elapsed_time_tells_its_three_faults_apart(driver):
    start, end = _cuda.Event(timing=True), _cuda.Event(timing=True)
    with pytest.raises(ValueError, match="never recorded"):
        start.elapsed_time(end)
    start.record()
    end.record()
    if driver.fake:
        with pytest.raises(errors.CudaError, match="not finished") as caught:
            start.elapsed_time(end)
        assert caught.value.name == "CUDA_ERROR_NOT_READY"
    end.synchronize()
    assert start.elapsed_time(end) >= 0
    with pytest.raises(ValueError, match="end event has timing off"):
        start.elapsed_time(_cuda.Event())
    with pytest.raises(ValueError, match="start event has timing off"):
        _cuda.Event().elapsed_time(end)
    with pytest.raises(TypeError, match="must be an Event"):
        start.elapsed_time(1)


def test_a_closed_event_is_named(driver):
    with _cuda.Event(timing=True) as event:
        event.record()
    event.close()
    assert event.closed and repr(event) == "<Event closed>"
    other = _cuda.Event(timing=True).record()
    for use in (
        event.record,
        event.query,
        event.synchronize,
        event.__enter__,
        lambda: event.handle,
        lambda: event.elapsed_time(other),
        lambda: other.elapsed_time(event),
        lambda: _cuda.Stream().wait_event(event),
        lambda: _cuda.Stream().record(event),
    ):
        with pytest.raises(ValueError, match="Event is closed"):
            use()


def test_an_event_and_a_stream_of_two_contexts_do_not_go_together(fake):
    event = _cuda.Event()
    stream = _cuda.Stream(_cuda.Context.primary(0))
    before = fake.calls("cuEventRecord")
    with pytest.raises(ValueError, match="the event is of <Context .* of <Context"):
        event.record(stream)
    with pytest.raises(ValueError, match="the event is of"):
        stream.record(event)
    assert fake.calls("cuEventRecord") == before
    stream.wait_event(event.record())  # the driver orders contexts with each other


# ---- All of them ----


@pytest.mark.parametrize("how", [pickle.dumps, copy.copy, copy.deepcopy])
@pytest.mark.parametrize(
    "make",
    [
        _cuda.Context.current,
        lambda: _cuda.Stream(),
        lambda: _cuda.Event(),
        lambda: _cuda.mem_alloc(4),
        lambda: _cuda.pagelocked_empty(4).base,
        lambda: _cuda.register_host_memory(pinned([1]).copy()).base,
    ],
)
def test_handles_are_neither_pickled_nor_copied(driver, make, how):
    handle = make()
    with pytest.raises(TypeError, match=type(handle).__name__):
        how(handle)


@pytest.mark.parametrize(
    "name", ["CudaError", "CudaMemoryError", "DriverError", "ForkError"]
)
def test_errors_come_back_equal_from_a_pickle(name):
    error = getattr(errors, name)("cuMemAlloc", 2, "CUDA_ERROR_OUT_OF_MEMORY", "8 bytes")
    assert getattr(_cuda, name) is type(error)
    assert pickle.loads(pickle.dumps(error)) == error


@pytest.mark.parametrize(
    "name", ["Device", "Context", "Stream", "Event", "DeviceMemory"]
)
def test_types_can_be_neither_subclassed_nor_changed(name):
    kind = getattr(_cuda, name)
    with pytest.raises(TypeError):
        type("Mine", (kind,), {})
    with pytest.raises(TypeError):
        kind.attribute = 1


def test_wrong_arguments_are_named(driver):
    for call, message in (
        (lambda: _cuda.memcpy_htod(), "missing required argument 'dest'"),
        (lambda: _cuda.memcpy_htod(1), "missing required argument 'src'"),
        (lambda: _cuda.memcpy_htod(1, 2, 3), "at most 2 positional"),
        (lambda: _cuda.memcpy_htod(1, dest=2), "multiple values for argument 'dest'"),
        (lambda: _cuda.memcpy_htod(1, 2, x=2), "unexpected keyword argument 'x'"),
        (lambda: _cuda.pagelocked_empty(1, "f4", "C", 0, None), "at most 4 positional"),
        (lambda: _cuda.Event().record(1, 2), "at most 1 positional"),
    ):
        with pytest.raises(TypeError, match=message):
            call()
