"""Build the stand-in driver library, and the kernels for the CPU, with compilers alone.

From a shell, ``python tests/fake_cuda/build.py [FOLDER]`` prints the paths of both.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Iterable, Sequence

HERE = Path(__file__).resolve().parent
DEFAULT_FOLDER = HERE.parent.parent / "build" / "fake_cuda"
DEFAULT_KERNELS = HERE.parent.parent / "src" / "kernels" / "kernels.cu"
HEADERS = ("cuda.h", "cudaTypedefs.h")
SHARED = "-g -fPIC -fvisibility=hidden -shared".split()
FLAGS = [*"-std=c11 -D_GNU_SOURCE -O2 -Wall -Wextra -Werror -pthread".split(), *SHARED]
# No -Werror: what nvcc warns about is for those who write the kernels. No fortified
# memset, as some distributions have it by default: static shared memory is a section,
# and the compiler takes the symbol at its start for all of it.
KERNEL_FLAGS = "-std=c++17 -O2 -U_FORTIFY_SOURCE -Wall -Wno-unknown-pragmas".split()
KERNEL_FLAGS += SHARED
KERNEL_SOURCES = ("kernel_table.cc", "cuda_on_cpu.cc")
KERNEL_HEADERS = ("cuda_on_cpu.h", "philox_on_cpu.h", "kernels_on_cpu.h")


def cuda_include_dir() -> Path:
    """Return the folder with the driver's headers: the package's, else a toolkit's.

    Raises FileNotFoundError that says where it looked.
    """
    candidates = []
    try:
        files = importlib.metadata.files("nvidia-cuda-runtime") or []
        candidates += [Path(f.locate()).parent for f in files if f.name == HEADERS[0]]
    except importlib.metadata.PackageNotFoundError:
        pass
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            candidates.append(Path(os.environ[variable]) / "include")
    candidates.append(Path("/usr/local/cuda/include"))
    for folder in candidates:
        if all((folder / header).is_file() for header in HEADERS):
            return folder
    raise FileNotFoundError(
        f"{' and '.join(HEADERS)} not found in {', '.join(map(str, candidates))}; "
        "install the package nvidia-cuda-runtime or set CUDA_HOME"
    )


def _compile(
    command: Sequence[str],
    sources: Iterable[Path],
    headers: Iterable[Path],
    folder: str | os.PathLike | None,
    name: str,
) -> Path:
    """Return the library of these sources, compiled now if it is not there yet."""
    sources = list(map(str, sources))
    digest = hashlib.sha256("\0".join(command).encode())
    for path in [*sources, *headers]:
        digest.update(Path(path).read_bytes())
    folder = Path(folder) if folder is not None else DEFAULT_FOLDER
    library = folder / digest.hexdigest()[:16] / name
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        # Written under another name first: several test processes may build at once.
        handle, scratch = tempfile.mkstemp(suffix=".so", dir=library.parent)
        os.close(handle)
        try:
            # A sanitizer that was loaded into these tests has no business in a compiler.
            environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
            command = [*command, "-o", scratch, *sources]
            subprocess.run(command, check=True, env=environment)
            os.replace(scratch, library)
        except BaseException:
            os.unlink(scratch)
            raise
    return library


def _checks() -> list[str]:
    """Return the flags for the sanitizers that FAKE_CUDA_SANITIZE names."""
    names = os.environ.get("FAKE_CUDA_SANITIZE")
    return [f"-fsanitize={names}", "-fno-omit-frame-pointer"] if names else []


def build_library(
    folder: str | os.PathLike | None = None,
    defines: Sequence[str] = (),
    extra_flags: Sequence[str] = (),
) -> Path:
    """Return the path of the library, compiled now if it is not there yet.

    It is both the driver and cuBLAS. ``folder`` (default: build/fake_cuda of this
    repository) keeps one file for each state of the sources, compiler and flags:
    calling again costs a few milliseconds. ``defines=["FAKE_CUDA_OLD_DRIVER"]`` gives a
    driver without cuGetProcAddress_v2. ``CC`` names the compiler. Raises
    CalledProcessError, with the compiler's words on stderr, where it fails.
    """
    include = cuda_include_dir()
    command = [
        *shlex.split(os.environ.get("CC", "cc")),
        *FLAGS,
        *_checks(),
        *extra_flags,
        f"-I{include}",
        *(f"-D{name}" for name in defines),
    ]
    headers = [*sorted(HERE.glob("*.h")), include / HEADERS[0]]
    sources = sorted(HERE.glob("*.c"))
    return _compile(command, sources, headers, folder, "libfakecuda.so")


def _cxx() -> list[str]:
    """Return the C++ compiler's command, [] if there is none."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    return next(([name] for name in ("g++", "c++") if shutil.which(name)), [])


def why_no_kernels(kernels: str | os.PathLike | None = None) -> str | None:
    """Return why the kernels cannot be built for the CPU here, None if they can."""
    kernels = Path(kernels) if kernels is not None else DEFAULT_KERNELS
    if not kernels.is_file():
        return f"there is no {kernels}"
    command = _cxx()
    if not command:
        return "there is no C++ compiler (g++ or c++; or set CXX)"
    if shutil.which(command[0]) is None:
        return f"the C++ compiler {command[0]} (from CXX) is not there"
    return None


def build_kernels(
    folder: str | os.PathLike | None = None,
    kernels: str | os.PathLike | None = None,
    names: str | os.PathLike | None = None,
    extra_flags: Sequence[str] = (),
) -> Path:
    """Return the path of the library of kernels, compiled now if it is not there yet.

    ``kernels`` (default: src/kernels/kernels.cu) includes all of them, ``names``
    (default: list.h beside it) defines their list, KERNELS(X). ``folder`` is as for
    build_library. ``CXX`` names the compiler; ``FAKE_CUDA_SANITIZE=address`` lets it
    add checks (see the top of fake_memory.c), ``thread`` does not. Raises FileNotFoundError with
    ``why_no_kernels``, CalledProcessError where the compiler fails.
    """
    reason = why_no_kernels(kernels)
    if reason is not None:
        raise FileNotFoundError(reason)
    kernels = Path(kernels if kernels is not None else DEFAULT_KERNELS).resolve()
    names = Path(names).resolve() if names is not None else kernels.parent / "list.h"
    # The thread sanitizer knows nothing of the stacks that kernels' threads run on.
    checks = [] if os.environ.get("FAKE_CUDA_SANITIZE") == "thread" else _checks()
    command = [
        *_cxx(),
        *KERNEL_FLAGS,
        *checks,
        *extra_flags,
        f'-DKERNELS_FILE="{kernels}"',
        f'-DKERNELS_LIST="{names}"',
        *("-x", "c++", "-include", str(HERE / KERNEL_HEADERS[0])),
    ]
    headers = [HERE / name for name in KERNEL_HEADERS]
    headers += sorted(kernels.parent.glob("*.cu*")) + sorted(kernels.parent.glob("*.h"))
    sources = [HERE / name for name in KERNEL_SOURCES]
    return _compile(command, sources, [*headers, names], folder, "libfakekernels.so")


if __name__ == "__main__":
    print(build_library(*sys.argv[1:2]))
    print(why_no_kernels() or build_kernels(*sys.argv[1:2]))
