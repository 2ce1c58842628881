"""Load the CUDA libraries that scikit-cuda asks for by names of before 2019.

It asks for `libcublas.so`, then for `libcublas.so.10.1` and older. The unversioned name
exists only where a toolkit for developers is installed; elsewhere the library is there
as `libcublas.so.12` or `.13`, from the toolkit's run-time package or from the nvidia-*
wheels. Where the asked name is found, that library is taken, as without us.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

# The version in the file's name by CUDA release; cuSOLVER and cuFFT have their own.
_VERSIONS = {
    "cublas": {13: "13", 12: "12", 11: "11"},
    "cudart": {13: "13", 12: "12", 11: "11.0"},
    "cufft": {13: "12", 12: "11", 11: "10"},
    "cusolver": {13: "12", 12: "11", 11: "11"},
    "cusparse": {13: "12", 12: "12", 11: "11"},
}
_NAME = re.compile(r"lib(\w+)\.so$")

_loaded: dict[str, ctypes.CDLL] = {}


def load(name: str) -> ctypes.CDLL:
    """Load the shared library `name`; for an unversioned CUDA name, today's as well.

    Raises OSError where none of the files is there, the loader's own for `name`.
    """
    match = _NAME.match(name)
    try:
        library = ctypes.cdll.LoadLibrary(name)
    except OSError:
        for candidate in candidates(match.group(1)) if match else ():
            try:
                library = ctypes.cdll.LoadLibrary(candidate)
            except OSError:
                continue
            break
        else:
            raise
    if match:
        _loaded[match.group(1)] = library
    return library


def cublas_version() -> tuple[int, int] | None:
    """Return major and minor version of the cuBLAS that was loaded, None if unknown.

    Asked of the library itself, which needs no CUDA context for it.
    """
    library = _loaded.get("cublas")
    numbers = []
    for part in (0, 1):  # MAJOR_VERSION, MINOR_VERSION
        value = ctypes.c_int(-1)
        try:
            status = library.cublasGetProperty(part, ctypes.byref(value))
        except AttributeError:
            return None
        if status != 0 or value.value < 0:
            return None
        numbers.append(value.value)
    return numbers[0], numbers[1]


def candidates(stem: str) -> Iterator[str]:
    """Yield file names to try for the library lib<stem>.so, best first.

    All names of one CUDA release come before those of the next, so that the libraries
    loaded fit together.
    """
    if stem == "cuda":
        yield "libcuda.so.1"
        return
    if stem not in _VERSIONS:
        return
    for release in _releases():
        name = f"lib{stem}.so.{_VERSIONS[stem][release]}"
        yield name
        for folder in _folders(stem, release):
            if (folder / name).is_file():
                yield str(folder / name)
    yield from _pathfinder(stem)


def _releases() -> list[int]:
    """Return the CUDA releases to look for, the one that PyCUDA was built for first."""
    releases = [13, 12, 11]
    driver = sys.modules.get("pycuda.driver")
    try:
        built_for = driver.get_version()[0]  # type: ignore[union-attr]
    except (AttributeError, TypeError, IndexError):
        return releases
    return sorted(releases, key=lambda release: release != built_for)


def _folders(stem: str, release: int) -> Iterator[Path]:
    """Yield folders that may hold the library: of wheels, then of toolkits."""
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        spec = None
    wheel_parts = {f"cu{release}", stem, {"cudart": "cuda_runtime"}.get(stem, stem)}
    for root in (spec.submodule_search_locations or ()) if spec else ():
        for part in sorted(wheel_parts):
            yield Path(root) / part / "lib"
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    for home in [*filter(None, homes), f"/usr/local/cuda-{release}", "/usr/local/cuda"]:
        yield Path(home) / "lib64"
        yield Path(home) / "lib"


def _pathfinder(stem: str) -> Iterator[str]:
    """Yield what NVIDIA's cuda-pathfinder finds, where that is installed."""
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib
    except ImportError:
        return
    try:
        found = load_nvidia_dynamic_lib(stem)
    except Exception:  # its own errors, one for each way of not finding
        return
    if found.abs_path:
        yield found.abs_path
