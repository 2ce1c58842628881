"""Build the two C extensions; everything else about the package is in pyproject.toml."""

from __future__ import annotations

import importlib.metadata
import os
from glob import glob
from pathlib import Path

import numpy
from setuptools import Extension, setup

HEADERS = ("cuda.h", "cudaTypedefs.h")


def cuda_include_dir() -> str:
    """Return the folder with cuda.h: the index package's, else the toolkit's."""
    candidates = []
    try:
        files = importlib.metadata.files("nvidia-cuda-runtime") or []
        candidates += [Path(f.locate()).parent for f in files if f.name == "cuda.h"]
    except importlib.metadata.PackageNotFoundError:
        pass
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            candidates.append(Path(os.environ[variable]) / "include")
    candidates.append(Path("/usr/local/cuda/include"))
    for folder in candidates:
        if all((folder / header).is_file() for header in HEADERS):
            return str(folder)
    raise SystemExit(
        "brainstorm-dbuf: cuda.h and cudaTypedefs.h were not found in "
        + ", ".join(map(str, candidates))
        + ". Install the package nvidia-cuda-runtime, or set CUDA_HOME to a CUDA "
        "toolkit (12 or newer). Only headers are needed, no GPU and no driver."
    )


def extension(name: str, folder: str, include_dirs: list[str]) -> Extension:
    flags = ["-std=c11", "-O3", "-Wall", "-Wextra", "-fvisibility=hidden"]
    if os.environ.get("BRAINSTORM_DBUF_WERROR"):
        flags.append("-Werror")
    return Extension(
        f"brainstorm_dbuf.{name}",
        sources=sorted(glob(f"src/{folder}/*.c")),
        depends=sorted(glob(f"src/{folder}/*.h")),
        include_dirs=[f"src/{folder}", numpy.get_include(), *include_dirs],
        define_macros=[("NPY_NO_DEPRECATED_API", "NPY_1_24_API_VERSION"),
                       ("NPY_TARGET_VERSION", "NPY_1_24_API_VERSION")],
        extra_compile_args=flags,
        # dlopen and pthread_atfork live in libraries of their own before glibc 2.34.
        libraries=["dl", "pthread"],
    )


setup(
    ext_modules=[
        extension("_cuda", "cuda", [cuda_include_dir()]),
        extension("_cpuop", "cpuop", []),
    ]
)
