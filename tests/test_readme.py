"""The README's examples run and print what the README says they print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from beyond import QUIET_RAY, mpiexec, needs_mpi, needs_ray
from conftest import SUBPROCESS_PATH

README = Path(__file__).resolve().parent.parent / "README.md"
BLOCK = r"((?:(?!```).)*)```"
EXAMPLE = re.compile(rf"```python\n{BLOCK}\n\n```\n{BLOCK}", re.DOTALL)

pytestmark = pytest.mark.timeout(120)


def example(number, folder):
    """Return a script of the README's code and the output shown below it."""
    code, shown = EXAMPLE.findall(README.read_text(encoding="utf-8"))[number]
    script = folder / "train.py"
    script.write_text(code, encoding="utf-8")
    return script, shown


def test_the_example_prints_the_output_shown_below_it(tmp_path):
    script, shown = example(0, tmp_path)
    run = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    # How many were prepared ahead depends on the machine's speed, the numbers do not.
    count = re.compile(r"^\d+ of", re.MULTILINE)
    assert count.sub("N of", run.stdout) == count.sub("N of", shown)
    assert int(run.stdout.rsplit("\n", 2)[1].split()[0]) > 0


@needs_mpi
def test_the_example_on_two_ranks_prints_the_output_shown_below_it(tmp_path):
    script, shown = example(1, tmp_path)
    command, shown = shown.split("\n", 1)
    assert command == "$ mpiexec -n 2 python train.py"
    run = mpiexec(script)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout == shown


@needs_ray
def test_the_example_with_ray_prints_the_output_shown_below_it(tmp_path):
    script, shown = example(2, tmp_path)
    run = subprocess.run(
        [sys.executable, script],
        env={**os.environ, **QUIET_RAY, "PYTHONPATH": SUBPROCESS_PATH},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == shown


def test_no_example_is_left_out():
    assert len(EXAMPLE.findall(README.read_text(encoding="utf-8"))) == 3
