"""What a build asks for: a CUDA compiler where there is none, and no more than that."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

import pytest

BACKEND = Path(__file__).resolve().parent.parent / "build_backend" / "with_nvcc.py"
COMPILER, HEADERS = "nvidia-cuda-nvcc", "nvidia-curand"


@pytest.fixture
def backend(monkeypatch, tmp_path):
    """The backend on a machine that has no toolkit but what a test makes.

    Over a stand-in for setuptools, which replaces this process's distutils when it is
    imported and asks for nothing here.
    """
    own = types.ModuleType("setuptools.build_meta")
    for kind in ("wheel", "editable"):
        setattr(own, f"get_requires_for_build_{kind}", lambda settings: [])
    package = types.ModuleType("setuptools")
    package.build_meta = own
    monkeypatch.setitem(sys.modules, "setuptools", package)
    monkeypatch.setitem(sys.modules, "setuptools.build_meta", own)
    spec = importlib.util.spec_from_file_location("with_nvcc", BACKEND)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for variable in ("CUDA_HOME", "CUDA_PATH", "BRAINSTORM_DBUF_NO_KERNELS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(module, "TOOLKIT", tmp_path / "none")
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    return module


@pytest.fixture
def toolkit(tmp_path):
    """A toolkit's folder with nvcc in it."""
    for folder in ("bin", "include"):
        (tmp_path / "cuda" / folder).mkdir(parents=True)
    (tmp_path / "cuda" / "bin" / "nvcc").touch()
    return tmp_path / "cuda"


def wanted(backend):
    asked = [
        backend.get_requires_for_build_wheel(),
        backend.get_requires_for_build_editable(),
    ]
    names = [[r.split(">")[0] for r in one if r.startswith("nvidia")] for one in asked]
    assert names[0] == names[1]
    return names[0]


def test_without_a_toolkit_the_compilers_packages_are_wanted(backend):
    assert backend.toolkit_nvcc() is None
    assert wanted(backend) == [COMPILER, HEADERS]


@pytest.mark.parametrize("found", ["CUDA_HOME", "CUDA_PATH", "path", "usual place"])
def test_a_toolkit_is_found(found, backend, toolkit, monkeypatch):
    (toolkit / "include" / "curand_kernel.h").touch()
    nvcc = toolkit / "bin" / "nvcc"
    if found == "path":
        monkeypatch.setattr(backend.shutil, "which", lambda name: str(nvcc))
    elif found == "usual place":
        monkeypatch.setattr(backend, "TOOLKIT", toolkit)
    else:
        monkeypatch.setenv(found, str(toolkit))
    assert backend.toolkit_nvcc() == nvcc
    assert wanted(backend) == []


def test_a_small_toolkit_lacks_only_the_headers(backend, toolkit, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(toolkit))
    assert wanted(backend) == [HEADERS]


def test_who_wants_no_kernels_needs_no_compiler(backend, monkeypatch):
    monkeypatch.setenv("BRAINSTORM_DBUF_NO_KERNELS", "1")
    assert wanted(backend) == []
