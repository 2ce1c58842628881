"""The example scripts, run as a user runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import h5py
import numpy as np
import pytest

import brainstorm as bs
from conftest import skip_without

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

pytestmark = pytest.mark.timeout(120)


def digits(*options):
    return example("digits", *options)


def example(name, *options, **variables):
    return subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", *map(str, options)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **variables},
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


# ------------------------------------------------------------ brainstorm's own examples

# Of their networks, and as small as their options make them.
SMALL = {
    "mnist_pi": ("--samples", 1200, "--epochs", 1),
    "cifar10_cnn": ("--samples", 200, "--epochs", 1),
    "hutter_lstm": ("--samples", 200, "--epochs", 1, "--units", 4),
}


@pytest.mark.parametrize("name", SMALL)
def test_an_example_trains_double_buffered_as_it_trains_plain(name):
    runs = [example(name, *SMALL[name], *plain) for plain in ((), ("--plain",))]
    for run in runs:
        assert run.returncode == 0, run.stderr
        assert run.stderr == ""
        assert "synthetic" in run.stdout.splitlines()[0]
    buffered, plain = (re.split(r"\n\d+ updates, ", run.stdout) for run in runs)
    # All losses and accuracies.
    assert "rolling_training" in buffered[0] and buffered[0] == plain[0]
    assert "feed: " in buffered[1] and "brainstorm's own loop" not in buffered[1]
    assert "feed: none, this was brainstorm's own loop" in plain[1]


def write_set(path, group, shape, classes, steps=1, samples=120):
    rnd = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        for part in ("training", "validation", "test"):
            arrays = file.create_group(f"{group}/{part}")
            if shape == (1,):
                symbols = rnd.integers(0, classes, (steps, samples, 1))
                arrays["default"] = symbols.astype(np.uint8)
            else:
                arrays["default"] = rnd.random((steps, samples, *shape))
            arrays["targets"] = rnd.integers(0, classes, (steps, samples, 1))
    return path


@pytest.mark.parametrize(
    "name, group, shape, classes, steps, options",
    [
        ("mnist_pi", "normalized_split", (28, 28, 1), 10, 1, ()),
        ("cifar10_cnn", "normalized_split", (32, 32, 3), 10, 1, ()),
        ("hutter_lstm", "split", (1,), 205, 20, ("--units", 4)),
    ],
)
def test_an_example_trains_on_a_file_and_saves(
    name, group, shape, classes, steps, options, tmp_path
):
    data = write_set(tmp_path / "data.hdf5", group, shape, classes, steps)
    best = tmp_path / "best.hdf5"
    run = example(name, "--data", data, "--save", best, "--epochs", 1, *options)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(f"120 training samples from {data}\n")
    assert "best validation accuracy 0." in run.stdout
    assert bs.Network.from_hdf5(str(best)).buffer.parameters.size > 0


def test_an_example_trains_on_a_device(kernels):
    run = example("hutter_lstm", *SMALL["hutter_lstm"], "--handler", "cuda")
    assert run.returncode == 0, run.stderr
    assert "feed: " in run.stdout


@pytest.mark.parametrize("name", SMALL)
def test_an_example_says_what_is_wrong_with_its_data(name, tmp_path):
    group = "split" if name == "hutter_lstm" else "normalized_split"
    other = write_set(tmp_path / "other.hdf5", group, (2, 2), 3)
    no_group = write_set(tmp_path / "group.hdf5", "elsewhere", (2, 2), 3)
    for path, says in (
        (tmp_path / "missing.hdf5", "missing.hdf5"),
        (no_group, f"expected default and targets in {group}/training"),
        (other, "targets of (T, N, 1), got (1, 120, 2, 2) and (1, 120, 1)"),
    ):
        run = example(name, "--data", path)
        assert run.returncode == 2
        assert run.stdout == "" and run.stderr.startswith(f"--data {path}: ")
        assert says in run.stderr and run.stderr.count("\n") == 1


def test_an_example_says_why_a_device_cannot_be_used():
    nowhere = {"BRAINSTORM_DBUF_LIBCUDA": "/nowhere/libcuda.so.1"}
    for name in ("mnist_pi", "from_dataloader"):
        run = example(name, "--handler", "cuda", **nowhere)
        assert run.returncode == 3
        assert "CudaHandler: " in run.stderr and "/nowhere" in run.stderr
        assert "Traceback" not in run.stderr


# ------------------------------------------------------------------- other sources


def blocked(tmp_path, *modules):
    """Return a PYTHONPATH on which these modules cannot be imported."""
    for name in modules:
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('no {name} here')")
    return os.pathsep.join([str(tmp_path), *filter(None, sys.path)])


# PyTorch as far as the example needs it: a DataLoader of objects that have `numpy()`.
STAND_IN_FOR_TORCH = """
import sys
import types

import numpy as np


class Tensor:
    def __init__(self, array):
        self._array = array

    def numpy(self):
        return self._array

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.numpy(), dtype)


class TensorDataset:
    def __init__(self, *tensors):
        self.tensors = tensors


class DataLoader:
    def __init__(self, dataset, batch_size, shuffle):
        assert shuffle
        self.arrays = [tensor.numpy() for tensor in dataset.tensors]
        self.batch_size = batch_size

    def __len__(self):
        return len(self.arrays[0]) // self.batch_size

    def __iter__(self):
        order = np.random.permutation(len(self.arrays[0]))
        for part in np.split(order, len(self)):
            yield [Tensor(array[part]) for array in self.arrays]


from_numpy = Tensor
manual_seed = np.random.seed
utils = types.ModuleType("torch.utils")
utils.data = types.ModuleType("torch.utils.data")
utils.data.DataLoader, utils.data.TensorDataset = DataLoader, TensorDataset
sys.modules["torch.utils"], sys.modules["torch.utils.data"] = utils, utils.data
"""


def trained(name, said):
    """Return whether the loss of that source has fallen by half."""
    first, last = map(
        float, re.search(rf"^{name}: loss (\S+) to (\S+)$", said, re.M).groups()
    )
    return last < 0.5 * first


def test_a_generator_trains_where_there_is_no_pytorch(tmp_path):
    run = example(
        "from_dataloader", "--epochs", 12, PYTHONPATH=blocked(tmp_path, "torch")
    )
    assert run.returncode == 0, run.stderr
    assert trained("generator", run.stdout)
    assert "DataLoader: left out, PyTorch is not installed (no torch" in run.stdout


@pytest.mark.parametrize("plain", [(), ("--plain",)])
def test_a_loader_of_tensors_trains(plain, tmp_path):
    path = blocked(tmp_path)
    (tmp_path / "torch.py").write_text(textwrap.dedent(STAND_IN_FOR_TORCH))
    run = example("from_dataloader", "--epochs", 12, *plain, PYTHONPATH=path)
    assert run.returncode == 0, run.stderr
    assert trained("generator", run.stdout) and trained("DataLoader", run.stdout)
    assert run.stdout.count("feed: none" if plain else "feed: bound") == 2


def test_a_dataloader_of_pytorch_trains():
    pytest.importorskip(
        "torch", reason="PyTorch is not installed: its wheel is too large for CI"
    )
    run = example("from_dataloader", "--epochs", 12)
    assert run.returncode == 0, run.stderr
    assert trained("generator", run.stdout) and trained("DataLoader", run.stdout)


# ---------------------------------------------------------------------------- CuPy


@pytest.mark.gpu
def test_stream_and_arrays_are_shared_with_cupy():
    skip_without("cuda")
    pytest.importorskip("cupy", reason="CuPy is not installed")
    run = example("share_with_cupy")
    assert run.returncode == 0, run.stderr
    assert re.findall(r"(\w+) *ok$", run.stdout, re.M) == [
        *("CuPy", "calls", "CuPy", "handler")
    ]


def test_without_gpu_or_cupy_the_sharing_says_so(tmp_path, kernels):
    nowhere = {"BRAINSTORM_DBUF_LIBCUDA": "/nowhere/libcuda.so.1"}
    path = {"PYTHONPATH": blocked(tmp_path, "cupy")}
    for variables, says in (
        (nowhere, "CudaHandler: "),
        (path, "CuPy is missing (no cupy here): pip install"),
    ):
        run = example("share_with_cupy", **variables)
        assert run.returncode == 3, run.stdout
        assert run.stdout == "" and run.stderr.startswith(says)
        assert run.stderr.count("\n") == 1
    (tmp_path / "cupy.py").write_text(
        "class cuda:\n    class Stream: pass\n__version__ = '13.6.0'\n"
    )
    run = example("share_with_cupy", **path)
    assert run.returncode == 3
    assert run.stderr == "CuPy 14 or newer is needed, this is 13.6.0\n"
