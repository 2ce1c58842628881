"""Run the tests of what is in C under gcc's sanitizers, on the stand-in driver.

    python tests/sanitize.py [--quick] [address | thread | both] [PYTEST ARGUMENT ...]

Builds the extensions for each sanitizer in a folder of its own, build/sanitize/NAME, and
runs pytest with the sanitizer's runtime loaded first, as the interpreter is not built
with it. The stand-in driver is checked as well, and for addresses its kernels. Any
report of a sanitizer, also of a process that a test starts, is printed and fails.
"""

from __future__ import annotations

import argparse
import glob
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
BUILD = ROOT / "build" / "sanitize"
RUNTIMES = {"address": ["libasan.so", "libubsan.so"], "thread": ["libtsan.so"]}
CHECKS = {"address": "address,undefined", "thread": "thread"}
# Of a stack in a report: the source in which the code lies. Where the interpreter has no
# frame pointers stacks go on at random, with addresses that have no source.
OURS = re.compile(r" in \S+ \S*(?:src/(?:cpuop|cuda|handler|kernels)/|fake_cuda/|planted)")

TESTS = {
    "full": [
        *sorted(path.name for path in HERE.glob("test_binding_*.py")),
        *sorted(path.name for path in HERE.glob("test_cuda_handler*.py")),
        "test_staging_ring.py",
        "test_copy_rows.py",
        "test_stage.py",
        "test_back_buffers.py",
        "test_held_memory.py",
        "test_cpuop.py",
        "test_device_array.py",
        "test_fake_cuda.py",
        "test_handler_ops.py",
    ],
    # What `make test` has time for.
    "address": [
        "test_binding_in_flight.py",
        "test_binding_memory.py",
        "test_staging_ring.py",
        "test_copy_rows.py",
        "test_back_buffers.py",
        "test_held_memory.py",
    ],
    "thread": [
        "test_binding_threads.py",
        "test_staging_ring.py",
        "test_device_array.py::test_two_threads_share_a_handler",
        "test_device_array.py::test_threads_make_a_handlers_first_product_at_once",
    ],
}
DESELECTED = {
    # Kernels' threads have larger stacks here, and end the process on one that the
    # sanitizer does not know.
    "address": [
        "test_fake_cuda.py::test_a_kernel_with_a_mistake_ends_the_process_and_is_named"
    ],
    "thread": [
        # It says which way minibatches go, and at a tenth of the speed another way pays.
        "test_held_memory.py::test_data_of_minibatches_are_page_locked_once",
        # The sanitizer has a thread of its own.
        "test_stage.py::test_threads_are_made_once_and_a_small_copy_makes_none",
        "test_stage.py::test_the_environment_sets_the_number_of_threads",
        # It is.
        "test_fake_cuda.py::test_products_are_not_too_slow",
    ],
}
# Where the interpreter or the C library do what the thread sanitizer cannot see.
SUPPRESSIONS = HERE / "tsan.supp"


def runtime(name: str) -> Path | None:
    """Return the path of a runtime library of gcc's, None if it is not installed."""
    found = subprocess.run(
        ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    return Path(found).resolve() if os.path.isabs(found) else None


def why_not(sanitizer: str) -> str | None:
    """Return why this sanitizer cannot be used here, None if it can."""
    if shutil.which("gcc") is None:
        return "there is no gcc"
    missing = [name for name in RUNTIMES[sanitizer] if runtime(name) is None]
    return f"gcc has no {' and no '.join(missing)}" if missing else None


def environment(sanitizer: str, report: Path, packages: Path) -> dict[str, str]:
    """Return the environment of a Python whose C is checked.

    ``report`` is what reports' paths start with, ``packages`` a folder to import from.
    """
    # C++ comes later, with NumPy: what it throws is caught by the runtime only if the
    # runtime has found it at the start.
    preload = [runtime(name) for name in (*RUNTIMES[sanitizer], "libstdc++.so.6")]
    log = f"log_path={report}"
    settings = {
        "LD_PRELOAD": ":".join(str(path) for path in preload if path is not None),
        "PYTHONMALLOC": "malloc",  # Python's own arenas would hide blocks in each other
        "PYTHONPATH": str(packages),
        "PYTHONDONTWRITEBYTECODE": "1",
        "FAKE_CUDA_SANITIZE": CHECKS[sanitizer],
        "OPENBLAS_NUM_THREADS": "1",  # whose threads the sanitizer cannot see into
        # A leak is looked for when a process has ended well, and Python has some of its
        # own: see our_reports.
        "ASAN_OPTIONS": f"detect_leaks=1:exitcode=0:{log}",
        # Beside the other runtime this one writes to stderr only: it ends the process.
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "TSAN_OPTIONS": f"exitcode=0:die_after_fork=0:suppressions={SUPPRESSIONS}:{log}",
    }
    kept = {k: v for k, v in os.environ.items() if k != "BRAINSTORM_DBUF_TEST_DRIVER"}
    return kept | settings


def build(sanitizer: str) -> Path:
    """Build the package for a sanitizer; return the folder to import it from."""
    folder = BUILD / sanitizer
    command = [sys.executable, "setup.py", "-q", "build"]
    command += ["--build-base", str(folder), "--build-lib", str(folder / "lib")]
    variables = {
        "CC": "gcc",
        "BRAINSTORM_DBUF_SANITIZE": CHECKS[sanitizer],
        "BRAINSTORM_DBUF_WERROR": "1",
    }
    subprocess.run(command, cwd=ROOT, env=os.environ | variables, check=True)
    return folder / "lib"


def our_reports(report: Path) -> list[str]:
    """Return the reports, of leaks only those with code of ours in their stacks.

    An interpreter that ends leaves objects behind, and libraries keep what they have.
    """
    found = []
    for path in sorted(glob.glob(f"{report}.*")):
        text = Path(path).read_text(errors="replace")
        if "LeakSanitizer: detected memory leaks" in text:
            blocks = re.split(r"\n\n+", text)
            text = "\n\n".join(block for block in blocks if OURS.search(block))
        if text.strip():
            found.append(text)
    return found


def run(sanitizer: str, tests: list[str], arguments: list[str]) -> bool:
    """Run tests under a sanitizer; say whether they passed without a report."""
    start = time.monotonic()
    packages = build(sanitizer)
    report = BUILD / sanitizer / "report"
    for old in glob.glob(f"{report}.*"):
        os.unlink(old)
    # Not `python -m pytest`: that would import the package from the current folder.
    program = "import sys, pytest; sys.path.pop(0); sys.exit(pytest.main())"
    command = [sys.executable, "-c", program, "-p", "no:cacheprovider", "--capture=sys"]
    command += ["--timeout", "600", *[str(HERE / name) for name in tests], *arguments]
    command += [f"--deselect=tests/{name}" for name in DESELECTED[sanitizer]]
    seconds = time.monotonic() - start
    print(f"sanitize {sanitizer}: built in {seconds:.0f} s", flush=True)
    variables = environment(sanitizer, report, packages)
    # Not in the root: programs of the tests would import the package from there.
    status = subprocess.run(command, cwd=BUILD / sanitizer, env=variables).returncode
    reports = our_reports(report)
    print(*reports, sep="\n")
    seconds = time.monotonic() - start
    print(
        f"sanitize {sanitizer}: pytest ended with {status}, {len(reports)} reports, "
        f"{seconds:.0f} s in all",
        flush=True,
    )
    return status == 0 and not reports


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sanitizer", nargs="?", default="both")
    parser.add_argument("--quick", action="store_true", help="what make test runs")
    options, arguments = parser.parse_known_args()
    names = list(CHECKS) if options.sanitizer == "both" else [options.sanitizer]
    if not set(names) <= set(CHECKS):
        parser.error(f"expected address, thread or both, got {options.sanitizer!r}")
    passed = True
    for name in names:
        reason = why_not(name)
        if reason is not None:
            parser.error(f"{name}: {reason}")
        passed &= run(name, TESTS[name if options.quick else "full"], arguments)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
