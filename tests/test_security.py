"""What is loaded from where, and what a file from elsewhere can make us do."""

from __future__ import annotations

import ast
import os
import pickle
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

import brainstorm_dbuf as dbuf
from brainstorm_dbuf.__main__ import main
from conftest import KIND, NEEDS_FAKE, SUBPROCESS_PATH, skip_without

pytestmark = pytest.mark.timeout(60)

PACKAGE = Path(dbuf.__file__).parent
TRAP = """
#include <stdio.h>
__attribute__((constructor)) static void spring(void)
{
    FILE *file = fopen("sprung", "w");
    if (file != NULL) {
        fclose(file);
    }
}
"""


# ----------------------------------------------------------------- libraries and modules


@pytest.fixture
def trap(tmp_path):
    """A folder with libraries that tell when they are loaded, by the names we ask for."""
    source = tmp_path / "trap.c"
    source.write_text(TRAP)
    for name in ("libcuda.so.1", "libcublas.so.13", "libcublas.so.12"):
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-o", tmp_path / name, source], check=True
        )
    return tmp_path


def run(code, folder, **variables):
    own = ("BRAINSTORM_DBUF_LIBCUDA", "BRAINSTORM_DBUF_LIBCUBLAS", "LD_LIBRARY_PATH")
    env = {name: value for name, value in os.environ.items() if name not in own}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**env, "PYTHONPATH": SUBPROCESS_PATH, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


OPEN_DRIVER = (
    "import brainstorm_dbuf as dbuf\n"
    "try:\n"
    "    dbuf.device_count()\n"
    "except dbuf.CudaError as error:\n"
    "    print(error)\n"
)
MULTIPLY = (
    "import brainstorm_dbuf as dbuf, numpy as np\n"
    "handler = dbuf.CudaHandler()\n"
    "a = handler.create_from_numpy(np.ones((2, 2)))\n"
    "try:\n"
    "    handler.dot_mm(a, a, handler.zeros((2, 2)))\n"
    "except dbuf.CudaError as error:\n"
    "    print(error)\n"
)


def test_the_driver_is_not_looked_for_in_the_current_folder(trap):
    done = run(OPEN_DRIVER, trap)
    assert done.returncode == 0, done.stderr
    assert not (trap / "sprung").exists()


def test_the_trap_springs_where_the_variable_names_it(trap):
    """Else the test above would show nothing."""
    done = run(OPEN_DRIVER, trap, BRAINSTORM_DBUF_LIBCUDA=str(trap / "libcuda.so.1"))
    assert done.returncode == 0, done.stderr
    assert (trap / "sprung").exists()
    assert "libcuda.so.1" in done.stdout


@pytest.mark.skipif(KIND == "real", reason=NEEDS_FAKE)
def test_cublas_is_not_looked_for_in_the_current_folder(trap):
    skip_without("cuda")
    variables = {
        name: os.environ[name]
        for name in ("BRAINSTORM_DBUF_LIBCUDA", "FAKE_CUDA_KERNELS")
    }
    done = run(MULTIPLY, trap, **variables)
    assert done.returncode == 0, done.stderr
    assert not (trap / "sprung").exists()
    named = str(trap / "libcublas.so.12")
    done = run(MULTIPLY, trap, **variables, BRAINSTORM_DBUF_LIBCUBLAS=named)
    assert (trap / "sprung").exists()


# Modules that make objects of what they read.
UNPICKLERS = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
}


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.stem
)
def test_nothing_is_unpickled(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        assert not UNPICKLERS & {name.split(".")[0] for name in names}
        if isinstance(node, ast.keyword):
            assert node.arg != "allow_pickle"


# ------------------------------------------------------------------------- data sets


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def write(path, make):
    with h5py.File(path, "w") as file:
        group = file.create_group("training")
        group["targets"] = np.zeros((1, 4, 1), np.int64)
        make(file, group)
    return str(path)


def refused(capsys, path, *words):
    assert main(["train", "F2", "--data", path, "--epochs", "1"]) == 2
    said = capsys.readouterr().err
    for word in words:
        assert word in said, said


def test_a_pickle_in_a_data_set_is_not_loaded(tmp_path, capsys):
    sprung = tmp_path / "sprung"
    bomb = pickle.dumps(Bomb(str(sprung)))
    pickle.loads(bomb).close()
    sprung.unlink()

    def opaque(file, group):
        group["default"] = np.full((1, 4, 1), np.void(bomb))
        group.attrs["description"] = np.void(bomb)

    def text(file, group):
        group["default"] = np.full((1, 4, 1), bomb.hex().encode(), "S")

    for number, make in enumerate((opaque, text)):
        path = write(tmp_path / f"{number}.hdf5", make)
        refused(capsys, path, "/training/default", "expected numbers")
    assert not sprung.exists()


def test_a_small_file_that_claims_a_huge_array_is_refused(tmp_path, capsys):
    def make(file, group):
        group.create_dataset("default", (1, 4, 1 << 40), "f4", chunks=(1, 1, 1 << 20))

    path = write(tmp_path / "huge.hdf5", make)
    assert os.path.getsize(path) < 100_000
    refused(capsys, path, "17,592,186,044,416 bytes", "more than the memory")


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda file, group: group.create_group("default"), "expected a data set"),
        (
            lambda file, group: group.__setitem__("default", h5py.Empty("f4")),
            "expected a data set",
        ),
        (
            lambda file, group: group.__setitem__("default", h5py.SoftLink("/nowhere")),
            "a broken link",
        ),
        (
            lambda file, group: group.__setitem__(
                "default", h5py.ExternalLink("none.hdf5", "/x")
            ),
            "a broken link",
        ),
        (
            lambda file, group: (
                file.move("training", "elsewhere")
                or file.__setitem__("training", np.ones(3))
            ),
            "not a group",
        ),
        (
            lambda file, group: file.__setitem__("normalized_split", np.ones(3)),
            "not a group",
        ),
    ],
)
def test_what_is_not_what_it_should_be_is_refused(make, words, tmp_path, capsys):
    refused(capsys, write(tmp_path / "data.hdf5", make), words)


def test_a_data_set_cut_short_is_refused(tmp_path, capsys):
    def make(file, group):
        group["default"] = np.ones((1, 4, 50_000))

    path = write(tmp_path / "data.hdf5", make)
    whole = Path(path).read_bytes()
    for size in (0, 100, len(whole) // 2, len(whole) - 1):
        Path(path).write_bytes(whole[:size])
        refused(capsys, path, f"--data {path}")
