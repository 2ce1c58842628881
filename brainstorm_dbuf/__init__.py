"""Double-buffered input for brainstorm: the next minibatch while the current one trains.

>>> import brainstorm_dbuf as dbuf      # also lets brainstorm 0.5 run on today's Python
>>> import brainstorm as bs
>>> trainer = dbuf.Trainer(bs.training.MomentumStepper(0.01, 0.9))

The CUDA driver is opened by the first call that needs it, never by the import, and
brainstorm is needed only by what works with it.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if importlib.util.find_spec("._cuda", __name__) is None:
    raise ImportError(
        f"{__path__[0]} is the source folder of brainstorm_dbuf and its C extensions are "
        "not built there. Python finds it before the installed package when it is "
        "started in the folder above: start it elsewhere, or build in place with "
        "`pip install -e .`"
    )

from . import compat, fused_layers, handler_ops
from ._cuda import (
    HOST_ALLOC_DEVICEMAP,
    HOST_ALLOC_PORTABLE,
    HOST_ALLOC_WRITECOMBINED,
    HOST_REGISTER_PORTABLE,
    Context,
    Device,
    DeviceArray,
    DeviceMemory,
    Event,
    Stream,
    device_count,
    driver_version,
    is_pagelocked,
    live_objects,
    mem_alloc,
    memcpy_dtod,
    memcpy_dtod_2d_async,
    memcpy_dtod_async,
    memcpy_dtoh,
    memcpy_dtoh_async,
    memcpy_htod,
    memcpy_htod_async,
    memcpy_htod_rows_async,
    memset_d8,
    memset_d8_async,
    memset_d16,
    memset_d16_async,
    memset_d32,
    memset_d32_async,
    pagelocked_empty,
    pagelocked_empty_like,
    pagelocked_zeros,
    register_host_memory,
    sysinfo,
)
from .errors import CudaError, CudaMemoryError, DriverError, ForkError
from .stats import FeedStats, FeedWarning
from .timings import BatchTimes, FeedSummary, FeedTimings

if TYPE_CHECKING:
    from . import hooks
    from .access import access_for
    from .cuda_handler import CudaHandler
    from .data_parallel import DataParallel
    from .from_iterable import FromIterable
    from .prefetch import Prefetch
    from .trainer import DoubleBufferedTrainer, run_network
    from .trainer import DoubleBufferedTrainer as Trainer

__version__ = "0.1.0"

_WITH_BRAINSTORM = {
    "CudaHandler": ("cuda_handler", "CudaHandler"),
    "DataParallel": ("data_parallel", "DataParallel"),
    "DoubleBufferedTrainer": ("trainer", "DoubleBufferedTrainer"),
    "FromIterable": ("from_iterable", "FromIterable"),
    "Prefetch": ("prefetch", "Prefetch"),
    "Trainer": ("trainer", "DoubleBufferedTrainer"),
    "access_for": ("access", "access_for"),
    "hooks": ("hooks", None),
    "run_network": ("trainer", "run_network"),
}

__all__ = [
    "BatchTimes",
    "Context",
    "CudaError",
    "CudaHandler",
    "CudaMemoryError",
    "DataParallel",
    "Device",
    "DeviceArray",
    "DeviceMemory",
    "DriverError",
    "Event",
    "FeedStats",
    "FeedSummary",
    "FeedTimings",
    "FeedWarning",
    "ForkError",
    "FromIterable",
    "HOST_ALLOC_DEVICEMAP",
    "HOST_ALLOC_PORTABLE",
    "HOST_ALLOC_WRITECOMBINED",
    "HOST_REGISTER_PORTABLE",
    "Prefetch",
    "Stream",
    "Trainer",
    "access_for",
    "device_count",
    "driver_version",
    "hooks",
    "is_pagelocked",
    "live_objects",
    "mem_alloc",
    "memcpy_dtod",
    "memcpy_dtod_2d_async",
    "memcpy_dtod_async",
    "memcpy_dtoh",
    "memcpy_dtoh_async",
    "memcpy_htod",
    "memcpy_htod_async",
    "memcpy_htod_rows_async",
    "memset_d16",
    "memset_d16_async",
    "memset_d32",
    "memset_d32_async",
    "memset_d8",
    "memset_d8_async",
    "pagelocked_empty",
    "pagelocked_empty_like",
    "pagelocked_zeros",
    "register_host_memory",
    "run_network",
    "sysinfo",
]

compat.apply()
compat.when_imported("brainstorm.handlers", handler_ops.install)
compat.when_imported("brainstorm.layers.base_layer", fused_layers.install)
# brainstorm looks for the class of a description among those that exist by then.
for _module in (".trainer", ".cuda_handler", ".hooks"):
    compat.when_imported(
        "brainstorm", lambda _, name=_module: importlib.import_module(name, __name__)
    )


def __getattr__(name: str) -> Any:
    """Import what works with brainstorm when it is first asked for.

    Raises ImportError that says how to install brainstorm 0.5 where it is missing.
    """
    if name not in _WITH_BRAINSTORM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    compat.require_brainstorm()
    module, attribute = _WITH_BRAINSTORM[name]
    value = importlib.import_module(f".{module}", __name__)
    if attribute is not None:
        value = getattr(value, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
