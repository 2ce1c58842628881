"""setuptools' build backend, which asks for a CUDA compiler where there is none.

CudaHandler's kernels are compiled by nvcc. A machine with a CUDA toolkit uses its own;
any other gets the compiler's packages into the build environment (some 150 MB, which are
gone after the build). BRAINSTORM_DBUF_NO_KERNELS=1 builds without.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

COMPILER = "nvidia-cuda-nvcc>=13"
# The headers of cuRAND's device functions, which smaller toolkits leave out.
RANDOM_HEADERS = "nvidia-curand>=10.4"

# Where a toolkit is usually installed.
TOOLKIT = Path("/usr/local/cuda")


def toolkit_nvcc() -> Path | None:
    """Return the nvcc of a CUDA toolkit on this machine, None if there is none."""
    candidates = [
        Path(os.environ[variable]) / "bin" / "nvcc"
        for variable in ("CUDA_HOME", "CUDA_PATH")
        if os.environ.get(variable)
    ]
    candidates.append(TOOLKIT / "bin" / "nvcc")
    on_path = shutil.which("nvcc")
    candidates += [Path(on_path)] if on_path else []
    return next((path for path in candidates if path.is_file()), None)


def has_random_headers(nvcc: Path) -> bool:
    """Say whether the toolkit of ``nvcc`` has cuRAND's device headers."""
    return (nvcc.resolve().parent.parent / "include" / "curand_kernel.h").is_file()


def wants_kernels() -> bool:
    """Say whether CudaHandler's kernels are to be built."""
    return not os.environ.get("BRAINSTORM_DBUF_NO_KERNELS")


def kernels_need() -> list[str]:
    """Return the packages that the kernels need beside what is on this machine."""
    if not wants_kernels():
        return []
    nvcc = toolkit_nvcc()
    if nvcc is None:
        return [COMPILER, RANDOM_HEADERS]
    return [] if has_random_headers(nvcc) else [RANDOM_HEADERS]


def get_requires_for_build_wheel(config_settings=None) -> list[str]:
    return build_meta.get_requires_for_build_wheel(config_settings) + kernels_need()


def get_requires_for_build_editable(config_settings=None) -> list[str]:
    return build_meta.get_requires_for_build_editable(config_settings) + kernels_need()
