"""The README's examples run and print what the README says they print."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from beyond import QUIET_RAY, mpiexec, needs_mpi, needs_ray
from conftest import SUBPROCESS_PATH
from shown_code import ROOT, blocks_of, run_python

EXAMPLES = [block for block in blocks_of(ROOT / "README.md") if block.shown is not None]

pytestmark = pytest.mark.timeout(120)


def script_of(example, folder):
    script = folder / "train.py"
    script.write_text(example.code, encoding="utf-8")
    return script


def test_the_example_prints_the_output_shown_below_it(tmp_path):
    [printed] = run_python(EXAMPLES[:1], tmp_path, SUBPROCESS_PATH)
    # How many were prepared ahead depends on the machine's speed, the numbers do not.
    count = re.compile(r"^\d+ of", re.MULTILINE)
    assert count.sub("N of", printed) == count.sub("N of", EXAMPLES[0].shown)
    assert int(printed.rsplit("\n", 2)[1].split()[0]) > 0


@needs_mpi
def test_the_example_on_two_ranks_prints_the_output_shown_below_it(tmp_path):
    command, shown = EXAMPLES[1].shown.split("\n", 1)
    assert command == "$ mpiexec -n 2 python train.py"
    run = mpiexec(script_of(EXAMPLES[1], tmp_path))
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout == shown


@needs_ray
def test_the_example_with_ray_prints_the_output_shown_below_it(tmp_path):
    run = subprocess.run(
        [sys.executable, script_of(EXAMPLES[2], tmp_path)],
        env={**os.environ, **QUIET_RAY, "PYTHONPATH": SUBPROCESS_PATH},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == EXAMPLES[2].shown


def test_no_example_is_left_out():
    assert len(EXAMPLES) == 3
