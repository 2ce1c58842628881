"""The example scripts, run as a user runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

DIGITS = Path(__file__).resolve().parent.parent / "examples" / "digits.py"

pytestmark = pytest.mark.timeout(120)


def digits(*options):
    return subprocess.run(
        [sys.executable, DIGITS, *map(str, options)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_digits_trains_to_identical_weights_and_a_good_accuracy():
    run = digits()
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    assert "weights          identical" in run.stdout
    assert float(run.stdout.split("test accuracy")[1].split()[0]) >= 0.93
    assert "feed: bound by" in run.stdout


def test_digits_fails_where_the_accuracy_is_too_low():
    run = digits("--epochs", 1, "--min-accuracy", 0.99)
    assert run.returncode == 1
    assert "FAILED: test accuracy" in run.stderr


@pytest.mark.parametrize("shape", [(6, 5, 2), (7,)])
def test_digits_takes_a_data_set_in_brainstorms_hdf5_format(tmp_path, shape):
    path = tmp_path / "data.hdf5"
    rnd = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        for part, samples in (("training", 230), ("test", 40)):
            group = file.create_group(f"normalized_split/{part}")
            group["default"] = rnd.random((1, samples, *shape))
            group["targets"] = rnd.integers(0, 10, (1, samples, 1))
    run = digits("--data", path, "--epochs", 2, "--min-accuracy", 0)
    assert run.returncode == 0, run.stderr
    assert f"from {path}" in run.stdout
    assert "weights          identical" in run.stdout


def test_digits_says_what_a_data_set_lacks(tmp_path):
    path = tmp_path / "data.hdf5"
    with h5py.File(path, "w") as file:
        file["other"] = [1]
    run = digits("--data", path)
    assert run.returncode != 0
    assert "no group training and no group test" in run.stderr
    assert "Traceback" not in run.stderr
    run = digits("--data", tmp_path / "missing.hdf5")
    assert run.returncode != 0
    assert "missing.hdf5" in run.stderr
    assert "Traceback" not in run.stderr


def test_digits_says_why_pycuda_cannot_be_used():
    pytest.importorskip("brainstorm")
    from brainstorm_dbuf import compat

    if compat.pycuda_problem() is None:
        pytest.skip("PyCudaHandler works here")
    run = digits("--handler", "pycuda")
    assert run.returncode != 0
    assert "--handler pycuda:" in run.stderr
    assert "Traceback" not in run.stderr
