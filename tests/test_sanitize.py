"""The C under gcc's sanitizers: faults are reported, and the quick part has none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import sanitize
from conftest import KIND

HERE = Path(__file__).resolve().parent

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(KIND == "real", reason="runs on the stand-in driver"),
]


def skip_without(sanitizer):
    reason = sanitize.why_not(sanitizer)
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize(
    "sanitizer, harmless, call, words",
    [
        ("address", "read_beyond(3)", "read_beyond(4)", "heap-buffer-overflow"),
        ("address", "overflow(0)", "overflow(1)", "signed integer overflow"),
        ("address", "overflow(-1)", "leak(1234)", "1234 byte(s) in 1 object"),
        ("thread", "race(1)", "race(2)", "data race"),
    ],
)
def test_a_planted_fault_is_reported(sanitizer, harmless, call, words, tmp_path):
    skip_without(sanitizer)
    library = tmp_path / "planted.so"
    flags = ["-g", "-O1", "-fPIC", "-shared", "-pthread", "-fno-omit-frame-pointer"]
    flags.append(f"-fsanitize={sanitize.CHECKS[sanitizer]}")
    source = HERE / "planted_faults.c"
    subprocess.run(["gcc", *flags, "-o", library, source], check=True)
    report = tmp_path / "report"
    variables = sanitize.environment(sanitizer, report, tmp_path)
    script = f"import ctypes; ctypes.CDLL({str(library)!r})."
    command = [sys.executable, "-c", script + harmless]
    subprocess.run(command, env=variables, check=True)
    assert sanitize.our_reports(report) == []
    command[-1] = script + call
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    reports = sanitize.our_reports(report)
    assert reports or done.returncode  # either fails the run
    assert words in "\n".join([*reports, done.stderr])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_the_quick_part_is_clean(sanitizer):
    """`make sanitize` runs all that is checked."""
    skip_without(sanitizer)
    command = [sys.executable, str(HERE / "sanitize.py"), "--quick", sanitizer, "-q"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
