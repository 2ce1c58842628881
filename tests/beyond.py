"""mpiexec and Ray for the tests, and why they are not there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from conftest import SUBPROCESS_PATH

_beside = Path(sys.executable).with_name("mpiexec")
MPIEXEC = str(_beside) if _beside.exists() else shutil.which("mpiexec")

needs_mpi = pytest.mark.skipif(
    MPIEXEC is None or find_spec("mpi4py") is None,
    reason="needs mpi4py and mpiexec (pip install 'brainstorm-dbuf[mpi]' mpich)",
)
needs_ray = pytest.mark.skipif(
    find_spec("ray") is None or find_spec("pyarrow") is None,
    reason="needs Ray Data (pip install 'brainstorm-dbuf[ray]')",
)

# No token in the home directory and no report to anybody.
QUIET_RAY = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}


def mpiexec(*command, ranks=2):
    """Run a Python script on some ranks of this machine, for 80 seconds at most."""
    return subprocess.run(
        [MPIEXEC, "-n", str(ranks), sys.executable, *map(str, command)],
        env={
            **os.environ,
            "PYTHONPATH": SUBPROCESS_PATH,
            # The ranks share the processors, and BLAS would take them all.
            "OPENBLAS_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=80,
        check=False,
    )
