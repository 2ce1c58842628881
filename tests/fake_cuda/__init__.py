"""A stand-in for the CUDA driver library, to test the device path without a GPU.

``build_library`` compiles it, ``FakeCuda`` steers it. What it does with the work it is
given, and why, is told at the top of ``fake_queue.c`` and ``fake_cuda.c``.
"""

from .build import build_library
from .control import FakeCuda

__all__ = ["FakeCuda", "build_library"]
