"""What benchmarks need to measure from C: a compiler, and the driver's entry points."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path


def build_c(name: str, functions: Iterable[str], *flags: str) -> ctypes.CDLL:
    """Compile a file of this folder; its `functions` return doubles."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "library.so"
        subprocess.run(
            [
                os.environ.get("CC", "cc"),
                *flags,
                "-std=c11",
                "-shared",
                "-fPIC",
                Path(__file__).with_name(name),
                "-o",
                library,
            ],
            check=True,
        )
        loaded = ctypes.CDLL(str(library))
    for function in functions:
        getattr(loaded, function).restype = ctypes.c_double
    return loaded


def driver_entry(name: str, version: int) -> int:
    """Return the address of an entry of the driver's, asked for as the binding asks."""
    cuda = ctypes.CDLL(os.environ.get("BRAINSTORM_DBUF_LIBCUDA", "libcuda.so.1"))
    found, status = ctypes.c_void_p(), ctypes.c_int()
    cuda.cuGetProcAddress_v2(
        name.encode(),
        ctypes.byref(found),
        version,
        ctypes.c_uint64(0),
        ctypes.byref(status),
    )
    if not found.value:
        raise RuntimeError(f"the driver has no {name}")
    return found.value
