"""Build the two C extensions; everything else about the package is in pyproject.toml.

The kernels of CudaHandler (src/kernels) are compiled by nvcc into one image, which the
extension _cuda embeds. Without nvcc all the rest is built, and CudaHandler says so.
BRAINSTORM_DBUF_CUDA_ARCH chooses the GPUs to build for (nvcc's -arch), default "all".

BRAINSTORM_DBUF_SANITIZE (gcc's -fsanitize, as address,undefined) builds what
tests/sanitize.py runs on the stand-in driver. That has the kernels itself, for the CPU:
the image is empty.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from glob import glob
from pathlib import Path

import numpy
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).parent / "build_backend"))
from with_nvcc import (  # noqa: E402
    has_random_headers,
    toolkit_nvcc,
    wants_kernels,
)

HEADERS = ("cuda.h", "cudaTypedefs.h")


def package_file(package: str, name: str) -> Path | None:
    """Return a file that an index package has installed, None if it has not."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    paths = (Path(file.locate()) for file in files if file.name == name)
    return next((path for path in paths if path.is_file()), None)


def cuda_include_dir() -> str:
    """Return the folder with cuda.h: the index package's, else the toolkit's."""
    header = package_file("nvidia-cuda-runtime", "cuda.h")
    candidates = [] if header is None else [header.parent]
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


def random_headers(folder: Path) -> list[str]:
    """Copy cuRAND's headers, and no others of that package's, to a folder of theirs."""
    header = package_file("nvidia-curand", "curand_kernel.h")
    if header is None:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    for path in header.parent.glob("curand*.h"):
        shutil.copy(path, folder)
    return [f"-I{folder}"]


def compile_kernels(image: Path) -> str | None:
    """Compile the kernels to ``image`` unless it is newer; return what went wrong."""
    nvcc = toolkit_nvcc() or package_file("nvidia-cuda-nvcc", "nvcc")
    if nvcc is None:
        return "nvcc was not found"
    newest = max(Path(path).stat().st_mtime for path in glob("src/kernels/*"))
    if image.is_file() and image.stat().st_mtime > newest:
        return None
    image.parent.mkdir(parents=True, exist_ok=True)
    command = [str(nvcc), "-fatbin", "--threads=0", "-O3", "-std=c++17"]
    command.append("-arch=" + os.environ.get("BRAINSTORM_DBUF_CUDA_ARCH", "all"))
    if os.environ.get("BRAINSTORM_DBUF_WERROR"):
        command.append("-Werror=all-warnings")
    if not has_random_headers(nvcc):
        command += random_headers(image.parent / "curand")
    command += ["-o", str(image), "src/kernels/kernels.cu"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        image.unlink(missing_ok=True)
        return f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return None


def sanitizers() -> str | None:
    """Return which of gcc's sanitizers to build with, None for none."""
    return os.environ.get("BRAINSTORM_DBUF_SANITIZE") or None


class BuildWithKernels(build_ext):
    """build_ext that makes the kernels' image first and hands it to _cuda."""

    def build_extension(self, ext: Extension) -> None:
        if ext.name.endswith("._cuda") and wants_kernels():
            image = Path(self.build_temp).resolve() / "kernels.fatbin"
            wrong = None if sanitizers() else compile_kernels(image)
            if sanitizers():
                image.parent.mkdir(parents=True, exist_ok=True)
                image.write_bytes(b"")
            if wrong is None:
                ext.define_macros.append(("BRAINSTORM_DBUF_KERNEL_IMAGE", f'"{image}"'))
                ext.depends.append(str(image))
            elif os.environ.get("BRAINSTORM_DBUF_WERROR"):
                raise SystemExit(f"brainstorm-dbuf: CudaHandler's kernels: {wrong}")
            else:
                print(
                    f"brainstorm-dbuf: built without CudaHandler: {wrong}",
                    file=sys.stderr,
                )
        super().build_extension(ext)


def extension(name: str, folders: list[str], include_dirs: list[str]) -> Extension:
    flags = ["-std=c11", "-O3", "-Wall", "-Wextra", "-fvisibility=hidden"]
    checks = [f"-fsanitize={sanitizers()}"] if sanitizers() else []
    if checks:
        # Among the checks gcc no longer sees what is initialized.
        flags += ["-O1", "-g", "-fno-omit-frame-pointer", "-Wno-maybe-uninitialized"]
        flags += checks
    if os.environ.get("BRAINSTORM_DBUF_WERROR"):
        flags.append("-Werror")
    return Extension(
        f"brainstorm_dbuf.{name}",
        sources=sorted(c for folder in folders for c in glob(f"src/{folder}/*.c")),
        depends=sorted(glob("src/*/*.h")),
        include_dirs=[f"src/{folders[0]}", numpy.get_include(), *include_dirs],
        define_macros=[
            ("NPY_NO_DEPRECATED_API", "NPY_1_24_API_VERSION"),
            ("NPY_TARGET_VERSION", "NPY_1_24_API_VERSION"),
        ],
        extra_compile_args=flags,
        extra_link_args=checks,
        # dlopen and pthread_atfork live in libraries of their own before glibc 2.34.
        libraries=["dl", "pthread"],
    )


setup(
    ext_modules=[
        extension("_cuda", ["cuda", "handler"], [cuda_include_dir()]),
        extension("_cpuop", ["cpuop"], []),
    ],
    cmdclass={"build_ext": BuildWithKernels},
)
