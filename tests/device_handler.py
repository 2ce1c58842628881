"""A handler that computes with NumPy in the memory of the stand-in driver.

Its arrays count as device memory, so minibatches come to it through page-locked memory,
streams and events as they would to a GPU. Its operations stand for kernels on the
legacy NULL stream: before one runs, all that was queued there before it has run.
"""

from __future__ import annotations

import ctypes

import numpy as np

import brainstorm_dbuf as dbuf
from brainstorm.handlers import NumpyHandler
from brainstorm_dbuf.access import CudaAccess, access_for

NOT_OPERATIONS = {"allocate", "pagelocked_empty", "create_from_numpy"}


class DeviceArray(np.ndarray):
    """An array that lies on the device, or a temporary that might as well."""


class DeviceHandler(NumpyHandler):
    array_type = DeviceArray
    __undescribed__ = {"drain", "context"}

    def __init__(self, drain, seed=None):
        self.drain = drain
        super().__init__(np.float32, seed=seed)
        self.context = dbuf.Context.current()

    def allocate(self, size):
        nbytes = int(np.prod(size)) * 4
        array = over_memory(dbuf.mem_alloc(nbytes), 0, tuple(size))
        array[...] = 0
        return array

    def zeros(self, shape):
        return np.zeros(shape, self.dtype).view(DeviceArray)

    def ones(self, shape):
        return np.ones(shape, self.dtype).view(DeviceArray)

    def create_from_numpy(self, arr):
        self.drain()
        return arr.astype(self.dtype).view(DeviceArray)

    def get_numpy_copy(self, arr):
        assert type(arr) is DeviceArray
        self.drain()
        return np.array(arr)


def over_memory(memory, offset, shape, dtype=np.float32):
    """Return an array over device memory, which it keeps alive."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if not nbytes:
        return np.zeros(shape, dtype).view(DeviceArray)
    buffer = (ctypes.c_char * nbytes).from_address(int(memory) + offset)
    buffer.owner = memory
    return np.frombuffer(buffer, dtype).reshape(shape).view(DeviceArray)


def _operation(name):
    plain = getattr(NumpyHandler, name)

    def operation(self, *args, **kwargs):
        self.drain()
        return plain(self, *args, **kwargs)

    operation.__name__ = name
    return operation


for _name, _value in list(vars(NumpyHandler).items()):
    if (
        callable(_value)
        and not _name.startswith("_")
        and _name not in NOT_OPERATIONS
        and _name not in vars(DeviceHandler)
        and _name != "array_type"
    ):
        setattr(DeviceHandler, _name, _operation(_name))


def device_access(handler):
    context = dbuf.Context.current()
    return CudaAccess(
        handler.dtype,
        context,
        dbuf.Stream.legacy(context),
        DeviceArray,
        lambda array: array.__array_interface__["data"][0],
        over_memory,
        handler.set_from_numpy,
        frees_on_any_thread=False,  # as PyCUDA's
    )


access_for.register(DeviceHandler, device_access)
