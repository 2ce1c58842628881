"""Build the library that listens to NVTX as a profiler does."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("nvtx_listener.c")


def build_listener(folder: Path) -> Path:
    """Compile it into ``folder`` and return its path."""
    library = folder / "libnvtx_listener.so"
    subprocess.run(
        [
            *shlex.split(os.environ.get("CC", "cc")),
            *"-std=gnu11 -O1 -Wall -Wextra -Werror -fPIC -shared".split(),
            *("-o", str(library), str(SOURCE)),
        ],
        check=True,
    )
    return library
