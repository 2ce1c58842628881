"""A stand-in for the CUDA driver library, to test the device path without a GPU.

``build_library`` compiles it, ``build_kernels`` the kernels that it runs, ``FakeCuda``
steers it. What it does with the work it is given, and why, is told at the top of
``fake_queue.c`` and ``fake_cuda.c``; how kernels are written, in ``cuda_on_cpu.h``.
"""

from .build import build_kernels, build_library, why_no_kernels
from .control import FakeCuda

__all__ = ["FakeCuda", "build_kernels", "build_library", "why_no_kernels"]
