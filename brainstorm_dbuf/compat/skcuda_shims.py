"""What scikit-cuda 0.5.3 (2019) needs with today's NumPy, setuptools and CUDA."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from . import cuda_libraries
from .importer import Recipe
from .stand_in import module_with


def is_supported() -> bool:
    """Return whether the scikit-cuda installed is of the releases known here.

    A copy without metadata counts: 0.5.3 is the last release.
    """
    version = _version()
    return version is None or version.startswith("0.5.")


def _version() -> str | None:
    try:
        return importlib.metadata.version("scikit-cuda")
    except importlib.metadata.PackageNotFoundError:
        return None


# ----------------------------------------------------------------- pkg_resources
def _run_without_pkg_resources(
    module: ModuleType, run_body: Callable[[], None]
) -> None:
    """Make skcuda/__init__ extend its path with pkgutil, as it does without setuptools.

    It calls `__import__('pkg_resources')`, which setuptools 82 no longer has and which
    older ones warn about. A global of that name in the module itself comes first.
    """

    def no_pkg_resources(name: str, *args: Any) -> Any:
        if name == "pkg_resources":
            raise ImportError("not needed", name=name)
        return __import__(name, *args)

    module.__dict__["__import__"] = no_pkg_resources
    try:
        run_body()
    finally:
        module.__dict__.pop("__import__", None)


def _fill_version(module: ModuleType) -> None:
    """Set what skcuda.version asks pkg_resources for."""
    module.__version__ = _version() or "unknown"


# ------------------------------------------------------------------------- numpy
def _numpy_stand_in(numpy: ModuleType) -> ModuleType:
    """Return NumPy with the tables of types that it had.

    `typeDict` was a second name of `sctypeDict`, which lost its one-letter codes in
    NumPy 2; `sctypes` listed the types of a kind.
    """
    codes = numpy.typecodes["AllInteger"] + numpy.typecodes["AllFloat"]
    types = {**numpy.sctypeDict, **{code: numpy.dtype(code).type for code in codes}}
    kinds = {
        "float": [numpy.float16, numpy.float32, numpy.float64, numpy.longdouble],
        "complex": [numpy.complex64, numpy.complex128, numpy.clongdouble],
    }
    return module_with(
        numpy, float=float, typeDict=types, sctypeDict=types, sctypes=kinds
    )


# -------------------------------------------------------------- library names
def _ctypes_stand_in(module: ModuleType) -> ModuleType:
    """Return ctypes whose `cdll.LoadLibrary` also knows where libraries are today."""
    cdll = SimpleNamespace(LoadLibrary=cuda_libraries.load)
    return module_with(module, cdll=cdll)


_LOADS_LIBRARIES = Recipe(
    substitutes={"ctypes": _ctypes_stand_in}, transient=frozenset({"ctypes"})
)


def _utils_stand_in(module: ModuleType) -> ModuleType:
    """Return skcuda.utils that knows the version of cuBLAS.

    skcuda.cublas reads it from the file's name with objdump and ldconfig. Today's
    names have the major version only, and it then warns and creates a cuBLAS context.
    """

    def find_lib_path(name: str) -> str | None:
        known = name == "cublas" and cuda_libraries.cublas_version() is not None
        return f"lib{name}.so" if known else module.find_lib_path(name)

    def get_soname(path: str) -> str:
        version = cuda_libraries.cublas_version()
        if path != "libcublas.so" or version is None:
            return module.get_soname(path)
        return "{}.{}.{}".format(path, *version)

    return module_with(module, find_lib_path=find_lib_path, get_soname=get_soname)


_CUBLAS = Recipe(
    substitutes={"ctypes": _ctypes_stand_in, "utils": _utils_stand_in},
    transient=frozenset({"ctypes", "utils"}),
)

RECIPES = {
    "skcuda": Recipe(run=_run_without_pkg_resources),
    "skcuda.cublas": _CUBLAS,
    "skcuda.cudadrv": _LOADS_LIBRARIES,
    "skcuda.cudart": _LOADS_LIBRARIES,
    "skcuda.cufft": _LOADS_LIBRARIES,
    "skcuda.cusolver": _LOADS_LIBRARIES,
    "skcuda.cusparse": _LOADS_LIBRARIES,
    "skcuda.fft": Recipe(substitutes={"np": _numpy_stand_in}),
    "skcuda.misc": Recipe(substitutes={"np": _numpy_stand_in}),
}

BUILT = {"skcuda.version": _fill_version}
