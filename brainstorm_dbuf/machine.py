"""What this machine and this installation have for training, and what they lack.

:func:`survey` looks, and leaves nothing behind: it imports brainstorm, opens the CUDA
driver, and makes one CudaHandler to see whether that works.
"""

from __future__ import annotations

import os
import platform
import resource
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class DeviceFacts:
    """A CUDA device.

    Attributes:
        memory_bytes: all of it.
        link: the PCI Express link as it is now and at its best, in GT/s and lanes, such
            as ``"16.0 GT/s x16 of 32.0 GT/s x16"`` (idle links slow down); None where
            the system does not say.
    """

    ordinal: int
    name: str
    compute_capability: tuple[int, int]
    memory_bytes: int
    pci_bus_id: str
    link: str | None


@dataclass
class Survey:
    """What :func:`survey` found.

    Attributes:
        versions: of Python, NumPy, brainstorm and whatever else is there, by name.
        driver: the CUDA version that the driver has; None where there is none.
        processors: that the process may run on.
        memory_bytes: that the process may use.
        locked_limit_bytes: the most that the process itself may lock (``ulimit -l``),
            None for no limit. The CUDA driver's page-locking is not bound by it
            everywhere.
        missing: what is not there and how to get it, by name.
    """

    versions: dict[str, str] = field(default_factory=dict)
    driver: str | None = None
    devices: list[DeviceFacts] = field(default_factory=list)
    processors: int = 1
    memory_bytes: int = 0
    locked_limit_bytes: int | None = None
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def trains(self) -> bool:
        """Whether networks can be trained at all."""
        return "brainstorm" not in self.missing

    @property
    def trains_on_device(self) -> bool:
        """Whether they can be trained by CudaHandler."""
        return self.trains and bool(self.devices) and "CudaHandler" not in self.missing

    def as_dict(self) -> dict[str, Any]:
        """Return all of it for JSON."""
        return {
            **asdict(self),
            "trains": self.trains,
            "trains_on_device": self.trains_on_device,
        }


def survey() -> Survey:
    """Look at this machine and this installation."""
    import brainstorm_dbuf as dbuf
    import numpy as np

    from . import held_memory

    found = Survey()
    found.versions = {
        "brainstorm_dbuf": dbuf.__version__,
        "Python": platform.python_version(),
        "NumPy": np.__version__,
    }
    found.processors = len(os.sched_getaffinity(0))
    found.memory_bytes = held_memory.memory_size()
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    found.locked_limit_bytes = None if limit == resource.RLIM_INFINITY else limit
    _look_for_brainstorm(found)
    _look_for_devices(found)
    if found.trains:
        _look_for_handlers(found)
    return found


def _look_for_brainstorm(found: Survey) -> None:
    try:
        import brainstorm
    except ImportError as error:
        found.missing["brainstorm"] = (
            f"{error}; python -m brainstorm_dbuf.install_brainstorm installs it"
        )
    else:
        found.versions["brainstorm"] = getattr(brainstorm, "__version__", "unknown")


def _look_for_devices(found: Survey) -> None:
    from . import _cuda

    try:
        version = _cuda.driver_version()
        found.driver = f"{version // 1000}.{version % 1000 // 10}"
        count = _cuda.device_count()
    except _cuda.DriverError as error:
        found.missing["CUDA driver"] = str(error)
        return
    for ordinal in range(count):
        device = _cuda.Device(ordinal)
        found.devices.append(
            DeviceFacts(
                ordinal,
                device.name,
                device.compute_capability,
                device.total_memory,
                device.pci_bus_id,
                _link_of(device.pci_bus_id),
            )
        )
    if not found.devices:
        found.missing["CUDA device"] = "the driver finds none"


def _look_for_handlers(found: Survey) -> None:
    from . import compat
    from .cuda_handler import CudaHandler

    if found.devices:
        try:
            CudaHandler(seed=0)
        except (RuntimeError, OSError) as error:
            found.missing["CudaHandler"] = str(error)
    problem = compat.pycuda_problem()
    if problem is not None:
        found.missing["PyCudaHandler"] = (
            f"{problem}; only scripts that work on PyCUDA's arrays need it: "
            "pip install pycuda scikit-cuda"
        )


def _link_of(
    pci_bus_id: str, devices: Path = Path("/sys/bus/pci/devices")
) -> str | None:
    """Return the state of a device's link, as Linux tells it (sysfs-bus-pci)."""
    # The driver writes the domain with 8 digits, the system with 4.
    domain, rest = pci_bus_id.lower().split(":", 1)
    directory = devices / f"{domain[-4:]}:{rest}"
    try:
        speed, width, best_speed, best_width = (
            (directory / name).read_text().strip().removesuffix(" PCIe")
            for name in (
                "current_link_speed",
                "current_link_width",
                "max_link_speed",
                "max_link_width",
            )
        )
    except OSError:
        return None
    return f"{speed} x{width} of {best_speed} x{best_width}"
