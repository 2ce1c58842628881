"""scikit-cuda 0.5.3's ways of 2019, written again in small, on today's machine.

The fake package does at import what the real one does: it asks pkg_resources for its
version, NumPy for `typeDict`, and the loader for libraries by their old names.
"""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import brainstorm_dbuf
from brainstorm_dbuf.compat import cuda_libraries

PACKAGE_ROOT = str(Path(brainstorm_dbuf.__file__).parent.parent)
COMPILER = shutil.which(os.environ.get("CC", "cc"))
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler")
# A toolkit's libraries would be found before the tests' own.
no_toolkit = pytest.mark.skipif(
    bool(ctypes.util.find_library("cublas"))
    or any(Path("/usr/local").glob("cuda*/lib*/libcublas.so*")),
    reason="a CUDA toolkit is installed here",
)

SKCUDA = {
    "scikit_cuda-0.5.3.dist-info/METADATA": """
        Metadata-Version: 2.1
        Name: scikit-cuda
        Version: 0.5.3
    """,
    "skcuda/__init__.py": """
        try:
            __import__("pkg_resources").declare_namespace(__name__)
        except ImportError:
            from pkgutil import extend_path
            __path__ = extend_path(__path__, __name__)
        from .version import __version__
    """,
    "skcuda/version.py": """
        import pkg_resources
        __version__ = pkg_resources.require("scikit-cuda")[0].version
    """,
    "skcuda/cudadrv.py": """
        import sys, ctypes
        library = ctypes.cdll.LoadLibrary("libcuda.so")
    """,
    "skcuda/cublas.py": r"""
        import ctypes
        import ctypes.util
        import warnings
        from . import utils
        for name in ["libcublas.so", "libcublas.so.10.1", "libcublas.so.9.0"]:
            try:
                library = ctypes.cdll.LoadLibrary(name)
            except OSError:
                pass
            else:
                break
        soname = utils.get_soname(utils.find_lib_path("cublas"))
        pattern = '^\\s+SONAME\s+(.+)$'
    """,
    "skcuda/utils.py": """
        def find_lib_path(name): return "/their/own/" + name
        def get_soname(path): return "their own: " + path
    """,
    "skcuda/misc.py": """
        import numpy as np
        from . import cublas
        num_types = [np.typeDict[t] for t in
                     np.typecodes["AllInteger"] + np.typecodes["AllFloat"]]
        def capability(numbers): return np.float(".".join(map(str, numbers)))
    """,
}


@pytest.fixture
def skcuda_folder(tmp_path):
    for name, source in SKCUDA.items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source).lstrip())
    return tmp_path / "site"


def build_library(path, source="int nothing;"):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = path.with_suffix(".c")
    text.write_text(source)
    flags = ["-shared", "-fPIC", f"-Wl,-soname,{path.name}"]
    subprocess.run([COMPILER, *flags, "-o", str(path), str(text)], check=True)


CUBLAS = """
int cublasGetProperty(int part, int *value) { *value = part ? 4 : 13; return 0; }
"""


def run(script, *folders, libraries=""):
    paths = [*map(str, folders), PACKAGE_ROOT, os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "LD_LIBRARY_PATH": str(libraries),
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


IMPORT = """
import ctypes, sys, numpy
cdll = ctypes.cdll
import brainstorm_dbuf
import skcuda.misc
assert skcuda.__version__ == "0.5.3"
assert "pkg_resources" not in sys.modules
assert skcuda.misc.capability((9, 0)) == 9.0
assert numpy.int8 in skcuda.misc.num_types and numpy.float64 in skcuda.misc.num_types
assert not hasattr(skcuda, "__import__")
assert skcuda.cublas.ctypes is ctypes and ctypes.cdll is cdll
assert "LoadLibrary" not in vars(cdll) and "typeDict" not in vars(numpy)
assert skcuda.cublas.utils is sys.modules["skcuda.utils"]
print(skcuda.cublas.library._name, skcuda.cublas.soname)
"""


@no_toolkit
@needs_compiler
@pytest.mark.skipif(
    "typeDict" in vars(__import__("numpy")), reason="this NumPy still has typeDict"
)
def test_skcuda_imports_with_a_library_of_today(skcuda_folder, tmp_path):
    build_library(tmp_path / "lib" / "libcublas.so.13", CUBLAS)
    out = run(IMPORT, skcuda_folder, libraries=tmp_path / "lib")
    assert out.split() == ["libcublas.so.13", "libcublas.so.13.4"]


@no_toolkit
@needs_compiler
@pytest.mark.parametrize("part", ["cu13", "cublas"])
def test_libraries_in_the_folders_of_wheels_are_found(skcuda_folder, tmp_path, part):
    path = skcuda_folder / "nvidia" / part / "lib" / "libcublas.so.13"
    build_library(path, CUBLAS)
    out = run(
        "import brainstorm_dbuf, skcuda.cublas as c; print(c.library._name)",
        skcuda_folder,
        libraries=tmp_path,
    )
    assert out.strip().endswith("libcublas.so.13")


@needs_compiler
def test_the_name_that_was_asked_for_comes_first(skcuda_folder, tmp_path):
    for name in ("libcublas.so", "libcublas.so.13"):
        build_library(tmp_path / "lib" / name, CUBLAS)
    out = run(
        "import brainstorm_dbuf, skcuda.cublas as c; print(c.library._name)",
        skcuda_folder,
        libraries=tmp_path / "lib",
    )
    assert out.strip() == "libcublas.so"


@no_toolkit
@needs_compiler
def test_a_cublas_without_a_version_is_left_to_skcudas_own_search(
    skcuda_folder, tmp_path
):
    build_library(tmp_path / "lib" / "libcublas.so.12")
    out = run(
        "import brainstorm_dbuf, skcuda.cublas as c; print(c.soname)",
        skcuda_folder,
        libraries=tmp_path / "lib",
    )
    assert out.strip() == "their own: /their/own/cublas"


def test_a_copy_without_metadata_is_taken_for_the_last_release(skcuda_folder):
    shutil.rmtree(skcuda_folder / "scikit_cuda-0.5.3.dist-info")
    out = run(
        "import brainstorm_dbuf, skcuda; print(skcuda.__version__)", skcuda_folder
    )
    assert out.strip() in ("unknown", "0.5.3")


def test_another_release_of_skcuda_is_left_alone(skcuda_folder):
    path = skcuda_folder / "scikit_cuda-0.5.3.dist-info" / "METADATA"
    path.write_text(path.read_text().replace("0.5.3", "1.0"))
    (skcuda_folder / "skcuda" / "version.py").write_text("__version__ = '1.0'")
    out = run(
        """
        import warnings
        warnings.simplefilter("ignore")
        import brainstorm_dbuf, skcuda
        print(skcuda.__version__, type(skcuda.__loader__).__name__)
        """,
        skcuda_folder,
    )
    assert out.split() == ["1.0", "SourceFileLoader"]


# ----------------------------------------------------------------- names to try
def test_the_names_of_one_cuda_release_come_together(monkeypatch):
    monkeypatch.setattr(cuda_libraries, "_folders", lambda stem, release: [])
    monkeypatch.setattr(cuda_libraries, "_pathfinder", lambda stem: [])
    monkeypatch.delitem(sys.modules, "pycuda.driver", raising=False)
    names = {
        stem: list(cuda_libraries.candidates(stem))
        for stem in ("cublas", "cusolver", "cudart", "cuda", "gomp")
    }
    assert names == {
        "cublas": ["libcublas.so.13", "libcublas.so.12", "libcublas.so.11"],
        "cusolver": ["libcusolver.so.12", "libcusolver.so.11", "libcusolver.so.11"],
        "cudart": ["libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0"],
        "cuda": ["libcuda.so.1"],
        "gomp": [],
    }


def test_the_release_that_pycuda_was_built_for_comes_first(monkeypatch):
    class Driver:
        @staticmethod
        def get_version():
            return (12, 4, 0)

    monkeypatch.setattr(cuda_libraries, "_folders", lambda stem, release: [])
    monkeypatch.setattr(cuda_libraries, "_pathfinder", lambda stem: [])
    monkeypatch.setitem(sys.modules, "pycuda.driver", Driver)
    assert list(cuda_libraries.candidates("cublas"))[0] == "libcublas.so.12"


def test_a_library_that_is_nowhere_gives_the_loaders_own_error(monkeypatch):
    monkeypatch.setattr(cuda_libraries, "candidates", lambda stem: ["libno.so.1"])
    with pytest.raises(OSError, match=r"libsurelynot\.so"):
        cuda_libraries.load("libsurelynot.so")


def test_pathfinder_is_asked_where_it_is_installed(monkeypatch):
    from types import ModuleType, SimpleNamespace

    def load_nvidia_dynamic_lib(stem):
        if stem != "cublas":
            raise RuntimeError("not found")
        return SimpleNamespace(abs_path="/some/where/libcublas.so.13")

    package, pathfinder = ModuleType("cuda"), ModuleType("cuda.pathfinder")
    pathfinder.load_nvidia_dynamic_lib = load_nvidia_dynamic_lib
    monkeypatch.setitem(sys.modules, "cuda", package)
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", pathfinder)
    monkeypatch.setattr(cuda_libraries, "_folders", lambda stem, release: [])
    assert (
        list(cuda_libraries.candidates("cublas"))[-1] == "/some/where/libcublas.so.13"
    )
    assert "/" not in "".join(cuda_libraries.candidates("cusolver"))


@pytest.mark.skipif(
    importlib.util.find_spec("skcuda") is None, reason="scikit-cuda is not installed"
)
@pytest.mark.skipif(
    importlib.util.find_spec("pycuda") is None, reason="PyCUDA is not installed"
)
def test_the_installed_skcuda_is_the_release_known_here():
    assert importlib.metadata.version("scikit-cuda").startswith("0.5.")
