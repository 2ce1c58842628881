"""The binding's arguments, fuzzed: nothing that is given may crash or mislead.

The calls are made in a process of their own, by binding_fuzzer.py, so that one that
crashes is told with its last call. Below it what was found that way, one by one.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from binding_tools import SLOWER, Interface
from layouts import EXAMPLES

from brainstorm_dbuf import _cuda

FUZZER = Path(__file__).with_name("binding_fuzzer.py")


def run_fuzzer(*arguments):
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", FUZZER, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=55 * SLOWER,
    )


# The operations of HandlerCore are many, of one pattern.
@pytest.mark.parametrize(
    "names", ["_cpuop", "HandlerCore", "DeviceArray", "_cuda -HandlerCore -DeviceArray"]
)
@pytest.mark.parametrize("way, share", [("hypothesis", 5), ("random", 1)])
def test_no_argument_crashes_or_misleads(fake, kernels, way, share, names):
    ran = run_fuzzer(way, max(EXAMPLES // share, 1), 0, *names.split())
    said = ran.stderr.splitlines()[-40:]
    assert ran.returncode == 0, "\n".join([ran.stdout, *said])
    assert " 0 faults" in ran.stdout


class OwnError(Exception):
    pass


class Raises:
    def __index__(self):
        raise OwnError

    __float__ = __index__


class Clears:
    """An integer that empties a container when it is read."""

    def __init__(self, container, value):
        self.container, self.value = container, value

    def __index__(self):
        self.container.clear()
        return self.value


class Unseen:
    """An object of one reference, so that it is gone when that is."""

    def __index__(self):
        return 2


def test_a_shape_that_empties_its_own_list_is_read_as_it_was(cuda):
    shape = []
    shape += [Clears(shape, 3), Unseen(), Unseen()]
    assert cuda.zeros(shape).shape == (3, 2, 2)
    assert shape == []


def test_an_interface_that_empties_itself_is_read_as_it_was(driver, cuda):
    memory = _cuda.mem_alloc(24)
    end = Interface(memory, None)
    end.__cuda_array_interface__["shape"] = (
        Unseen(),
        Clears(end.__cuda_array_interface__, 3),
    )
    _cuda.memset_d8(end, 0, 24)
    assert end.__cuda_array_interface__ == {}

    taken = Interface(cuda.zeros((2, 3)).ptr, None)
    taken.__cuda_array_interface__["shape"] = (
        Unseen(),
        Clears(taken.__cuda_array_interface__, 3),
    )
    assert cuda.as_array(taken).shape == (2, 3)


def test_a_source_resized_while_the_stream_is_asked_for_is_copied_as_it_is(driver):
    array = np.zeros(4, "f4")
    memory = _cuda.mem_alloc(array.nbytes)

    class Resizes:
        def __cuda_stream__(self):
            array.resize(1 << 20, refcheck=False)
            return 0, 0

    with pytest.raises(ValueError, match="dest has 16 bytes, the copy needs 4194304"):
        _cuda.memcpy_htod_async(memory, array, Resizes())


def test_a_handler_stays_on_its_device(fake, kernels):
    fake.set_device_count(2)
    core = _cuda.HandlerCore(3)

    class Moves:
        def __index__(self):
            core.__init__(3, 1)
            return 2

    with pytest.raises(RuntimeError, match="was called already, for device 0"):
        core.zeros(Moves())
    core.__init__(4, 0)
    assert core.zeros(2).shape == (2,)


def test_an_error_of_an_arguments_own_code_comes_out(cuda):
    array, out = cuda.zeros((2, 3)), cuda.zeros((2, 3))
    for call in (
        lambda: cuda.fill(array, Raises()),
        lambda: cuda.fill_gaussian(0.0, Raises(), array),
        lambda: cuda.sum_t(array, Raises(), out),
        lambda: cuda.zeros((2, Raises())),
        lambda: _cuda.mem_alloc(Raises()),
    ):
        with pytest.raises(OwnError):
            call()

    class Asked:
        def __getattr__(self, name):
            raise OwnError

    with pytest.raises(OwnError):
        cuda.as_array(Asked())
    with pytest.raises(OwnError):
        cuda.from_dlpack(Asked())


@pytest.mark.parametrize("device", [2, (2,), [2, 0], ("2", 0), (2, 2**40)])
def test_a_dlpack_device_that_is_none_is_refused(cuda, device):
    class Given:
        def __dlpack__(self, stream):
            raise AssertionError("not asked for")

        def __dlpack_device__(self):
            return device

    with pytest.raises((TypeError, ValueError), match="^from_dlpack: .*device"):
        cuda.from_dlpack(Given())


@pytest.mark.parametrize(
    "call, name",
    [
        (lambda: _cuda.mem_alloc("x"), "nbytes"),
        (lambda: _cuda.Device(1.5), "ordinal"),
        (lambda: _cuda.Device(2**40), "ordinal"),
        (lambda: _cuda.Device(0).attribute(2**70), "number"),
        (lambda: _cuda.Context.primary({}), "ordinal"),
        (lambda: _cuda.Context.from_handle("x"), "handle"),
        (lambda: _cuda.Stream(priority=2**40), "priority"),
        (lambda: _cuda.StagingRing(np.zeros(64), "x"), "places"),
        (lambda: _cuda.pagelocked_empty((2, 1.5)), "shape"),
        (lambda: _cuda.HandlerCore("x"), "seed"),
        (lambda: _cuda.HandlerCore(0, "x"), "device"),
        (lambda: _cuda.memset_d8(0, "x", 1), "value"),
        (lambda: _cuda.has_signature({"x": np.zeros(2)}, (("x", ("2",), 0),)), "shape"),
    ],
)
def test_what_is_no_integer_is_named(driver, kernels, call, name):
    with pytest.raises((TypeError, ValueError), match=name):
        call()


def test_a_size_beyond_all_is_no_arrays_size():
    signature = (("x", (2**63,), np.dtype("f4")),)
    assert not _cuda.has_signature({"x": np.zeros(2, "f4")}, signature)
