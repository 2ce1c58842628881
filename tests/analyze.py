"""Look for faults in the C without running it: gcc's analyzer, and cppcheck.

    python tests/analyze.py

Exits with 1 if either finds what is not in ACCEPTED, or no longer finds what is.
The list is that of gcc 12; another gcc may find other things.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy
from fake_cuda.build import cuda_include_dir

ROOT = Path(__file__).resolve().parent.parent
DEFINES = [
    "-DNPY_NO_DEPRECATED_API=NPY_1_24_API_VERSION",
    "-DNPY_TARGET_VERSION=NPY_1_24_API_VERSION",
]
NULL, UNSET = "null-dereference", "use-of-uninitialized-value"
UNPACKED = "unpack() has filled what the signature requires: required <= positional"
# (source, what gcc's analyzer says): why it is not so.
ACCEPTED = {
    ("src/cuda/device_memory.c", NULL): "of 0 bytes alone there is no context, and "
    "these return before the driver is called",
    ("src/cuda/pagelocked.c", NULL): UNPACKED,
    ("src/handler/elementwise.c", NULL): "the roles of each operation name one output",
    (
        "src/handler/elementwise.c",
        UNSET,
    ): "strides are set for each axis of the output, and no more are read",
    ("src/handler/exchange.c", NULL): UNPACKED,
    ("src/handler/memory.c", NULL): UNPACKED,
}
# What cppcheck's own description of Python's headers leaves out.
MACROS = [
    "-DPy_BEGIN_ALLOW_THREADS={",
    "-DPy_END_ALLOW_THREADS=}",
    "-DPy_RETURN_NONE=return Py_None",
    "-DPy_RETURN_TRUE=return Py_True",
    "-DPy_RETURN_FALSE=return Py_False",
    "-D__x86_64__",
    "-D__GNUC__=12",
]


def gcc_findings(source: Path) -> tuple[set[str], str]:
    """Return the names of what gcc's analyzer finds in a source, and its words."""
    include = [source.parent, source.parent.parent / "cuda", numpy.get_include()]
    include += [cuda_include_dir(), sysconfig.get_path("include")]
    command = ["gcc", "-std=c11", "-O1", "-fPIC", "-Wall", "-Wextra", "-fanalyzer"]
    command += [*DEFINES, *(f"-I{folder}" for folder in include)]
    command += ["-c", str(source.relative_to(ROOT)), "-o", "/dev/null"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    names = re.findall(r"warning: .*\[-W(?:analyzer-)?([\w-]+)", done.stderr)
    if done.returncode:
        names.append("does not compile")
    return set(names), done.stderr


def main() -> int:
    found = set()
    for source in sorted(ROOT.glob("src/*/*.c")):
        names, words = gcc_findings(source)
        mine = {(str(source.relative_to(ROOT)), name) for name in names}
        if mine - ACCEPTED.keys():
            print(words)
        found |= mine
    for source, name in sorted(found - ACCEPTED.keys()):
        print(f"{source}: {name}")
    for source, name in sorted(ACCEPTED.keys() - found):
        print(f"{source}: {name} is accepted, but no longer found")
    command = ["cppcheck", "-q", "--library=python", "--std=c11", "--error-exitcode=1"]
    command += ["--enable=warning,performance,portability", *DEFINES, *MACROS]
    command += ["--suppress=missingIncludeSystem", "-Isrc/cuda", "src"]
    status = subprocess.run(command, cwd=ROOT).returncode
    print(
        f"analyze: gcc {len(found)} kinds of finding, {len(ACCEPTED)} accepted; ",
        end="",
    )
    print(f"cppcheck ended with {status}")
    return 0 if found == ACCEPTED.keys() and status == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
