"""Build the stand-in driver library with the C compiler alone.

From a shell, ``python tests/fake_cuda/build.py [FOLDER]`` prints the library's path.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Sequence

HERE = Path(__file__).resolve().parent
DEFAULT_FOLDER = HERE.parent.parent / "build" / "fake_cuda"
HEADERS = ("cuda.h", "cudaTypedefs.h")
FLAGS = (
    "-std=c11 -D_GNU_SOURCE -O2 -g -Wall -Wextra -Werror -fPIC -fvisibility=hidden "
    "-shared -pthread"
).split()


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


def build_library(
    folder: str | os.PathLike | None = None,
    defines: Sequence[str] = (),
    extra_flags: Sequence[str] = (),
) -> Path:
    """Return the path of the library, compiled now if it is not there yet.

    ``folder`` (default: build/fake_cuda of this repository) keeps one file for each
    state of the sources, compiler and flags: calling again costs a few milliseconds.
    ``defines=["FAKE_CUDA_OLD_DRIVER"]`` gives a driver without cuGetProcAddress_v2.
    ``CC`` names the compiler. Raises CalledProcessError, with the compiler's words on
    stderr, where it fails.
    """
    folder = Path(folder) if folder is not None else DEFAULT_FOLDER
    include = cuda_include_dir()
    command = [
        *shlex.split(os.environ.get("CC", "cc")),
        *FLAGS,
        *extra_flags,
        f"-I{include}",
        *(f"-D{name}" for name in defines),
    ]
    sources = sorted(HERE.glob("*.c"))
    digest = hashlib.sha256("\0".join(command).encode())
    for path in [*sources, *sorted(HERE.glob("*.h")), include / HEADERS[0]]:
        digest.update(path.read_bytes())
    library = folder / digest.hexdigest()[:16] / "libfakecuda.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        # Written under another name first: several test processes may build at once.
        handle, scratch = tempfile.mkstemp(suffix=".so", dir=library.parent)
        os.close(handle)
        try:
            subprocess.run([*command, "-o", scratch, *map(str, sources)], check=True)
            os.replace(scratch, library)
        except BaseException:
            os.unlink(scratch)
            raise
    return library


if __name__ == "__main__":
    print(build_library(*sys.argv[1:2]))
