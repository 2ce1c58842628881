"""The shims in fresh interpreters: order of imports, missing and broken parts."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import brainstorm_dbuf

PACKAGE_ROOT = str(Path(brainstorm_dbuf.__file__).parent.parent)


def run(script, *folders, warnings="error", status=0):
    """Run `script` in a fresh Python and return what it printed."""
    paths = [*map(str, folders), PACKAGE_ROOT, os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-W", warnings, "-c", textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


def write(folder, files):
    """Write modules, given as a dict of name and source, into `folder`."""
    for name, source in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
    return folder


HIDE = """
import sys
from importlib.machinery import PathFinder

class Hider:
    hidden = set()
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in cls.hidden:
            return None
        return PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Hider
"""


# --------------------------------------------------------------- order of imports
def test_importing_the_package_imports_no_brainstorm_and_no_skcuda():
    run(
        """
        import sys
        import brainstorm_dbuf
        for name in ("brainstorm", "skcuda", "pycuda", "h5py"):
            assert name not in sys.modules, name
        """
    )


def test_brainstorm_imports_after_the_package_and_leaves_numpy_as_it_was():
    run(
        """
        import sys
        sys.modules["pycuda"] = None  # it loads more of NumPy
        import numpy, ctypes, datetime
        import h5py, six
        before = {m.__name__: dict(vars(m)) for m in (numpy, ctypes, datetime, h5py)}
        import brainstorm_dbuf
        import brainstorm as bs
        assert bs.__version__ == "0.5" and bs.handlers._cpuop.im2col
        for module in (numpy, ctypes, datetime, h5py):
            for name, value in vars(module).items():
                if name != "random":  # NumPy itself loads this one when first used
                    assert before[module.__name__][name] is value, (module, name)
        """
    )


def test_an_import_of_brainstorm_that_failed_before_does_no_harm():
    run(
        """
        import sys
        sys.modules["brainstorm.handlers._cpuop"] = None
        try:
            import brainstorm
        except (ImportError, AttributeError):
            pass
        else:
            raise SystemExit("that should have failed")
        assert any(name.startswith("brainstorm.") for name in sys.modules)
        import brainstorm_dbuf
        import brainstorm as bs
        assert bs.structure.Network is bs.Network and bs.utils and bs.optional
        bs.tools.create_net_from_spec("classification", 4, 3, "F5").get_loss_values()
        """,
        warnings="default",
    )


# A PyCUDA that works would bring a context, of whichever thread imports it, and more of
# NumPy with it.
WITHOUT_PYCUDA = """
import sys
sys.modules["pycuda"] = None
"""

BRAINSTORM_FIRST = WITHOUT_PYCUDA + """
import sys, types, math, numpy
# What brainstorm would find on a machine of its time: its own compiled module, np.Inf.
own = types.ModuleType("brainstorm.handlers._cpuop")
own.im2col = own._crop_images = "their own"
sys.modules[own.__name__] = own
lent = not hasattr(numpy, "Inf")
if lent:
    numpy.Inf = math.inf
import brainstorm as bs
if lent:
    del numpy.Inf
"""


def test_a_brainstorm_imported_before_is_changed_in_place():
    run(
        BRAINSTORM_FIRST
        + textwrap.dedent(
            """
            net_class = bs.Network
            import brainstorm_dbuf
            from brainstorm_dbuf import compat, _cpuop
            assert compat.require_brainstorm() is bs and bs.Network is net_class
            assert bs.handlers._cpuop.im2col is _cpuop.im2col
            assert bs.data_iterators._crop_images is _cpuop._crop_images
            assert bs.tools.np.int is int and bs.scorers.np.float is float
            assert bs.training.schedules.np.Inf == math.inf
            assert bs.randomness.RandomState(1).random_integers(3, 3) == 3
            bs.utils.datetime.utcnow()
            net = bs.tools.create_net_from_spec("classification", 4, 3, "F5")
            assert type(net.get_loss_values()["total_loss"]) is float
            assert compat.pycuda_problem()
            """
        ),
        warnings="ignore",
    )


def test_a_callback_waits_for_its_module():
    out = run(
        """
        from brainstorm_dbuf import compat
        compat.when_imported("brainstorm.handlers", lambda m: print("got", m.__name__))
        print("armed")
        import brainstorm
        print("imported", brainstorm.handlers.__name__)
        """
    )
    assert out.split("\n")[:3] == [
        "armed",
        "got brainstorm.handlers",
        "imported brainstorm.handlers",
    ]


def test_a_reloaded_module_is_changed_again():
    run(
        """
        import importlib
        from brainstorm_dbuf import compat
        bs = compat.require_brainstorm()
        importlib.reload(bs.tools)
        assert bs.tools.np.int is int
        assert "brainstorm_dbuf" in bs.tools.extract.__code__.co_filename
        """
    )


def test_two_threads_may_import_brainstorm_at_once():
    run(
        WITHOUT_PYCUDA
        + textwrap.dedent(
            """
            import threading
            from brainstorm_dbuf import compat
            got = []
            threads = [
                threading.Thread(target=lambda: got.append(compat.require_brainstorm()))
                for _ in range(4)
            ]
            [t.start() for t in threads]
            [t.join() for t in threads]
            assert len(got) == 4 and len(set(map(id, got))) == 1
            assert got[0].tools.np.int is int
            """
        )
    )


# --------------------------------------------------- brainstorm missing or different
def test_without_brainstorm_the_package_imports_and_says_how_to_install_it():
    out = run(
        HIDE
        + textwrap.dedent(
            """
            Hider.hidden = {"brainstorm"}
            import brainstorm_dbuf
            from brainstorm_dbuf import compat
            assert compat.find_brainstorm() is None
            try:
                compat.require_brainstorm()
            except ImportError as error:
                print(error.name, error)
            """
        )
    )
    assert out.startswith("brainstorm brainstorm 0.5 is not installed")
    assert "python -m brainstorm_dbuf.install_brainstorm" in out


def test_a_folder_that_is_named_brainstorm_is_not_brainstorm(tmp_path):
    (tmp_path / "brainstorm").mkdir()
    run(
        HIDE
        + textwrap.dedent(
            f"""
            folder = [{str(tmp_path)!r}]
            Hider.find_spec = lambda name, path=None, target=None: (
                PathFinder.find_spec(name, folder if name == "brainstorm" else path)
            )
            assert PathFinder.find_spec("brainstorm", folder) is not None
            from brainstorm_dbuf import compat
            assert compat.find_brainstorm() is None
            """
        )
    )


def test_a_missing_requirement_of_brainstorm_is_named():
    out = run(
        HIDE
        + textwrap.dedent(
            """
            Hider.hidden = {"h5py"}
            from brainstorm_dbuf import compat
            try:
                compat.require_brainstorm()
            except ImportError as error:
                print(error)
            """
        )
    )
    assert "needs the package h5py" in out and "pip install h5py" in out


def test_another_version_is_named_and_left_alone(tmp_path):
    write(
        tmp_path,
        {
            "brainstorm/__init__.py": "import numpy as np",
            "brainstorm/__about__.py": "__version__ = '0.6'",
            "brainstorm/tools.py": "import numpy as np",
        },
    )
    out = run(
        """
        import brainstorm_dbuf
        from brainstorm_dbuf import compat
        assert compat.find_brainstorm().version == "0.6"
        try:
            compat.require_brainstorm()
        except ImportError as error:
            print(error)
        import brainstorm.tools, numpy
        assert brainstorm.tools.np is numpy
        compat.apply()
        assert brainstorm.tools.np is numpy
        """,
        tmp_path,
    )
    assert "version 0.6 was found in" in out and str(tmp_path) in out


# --------------------------------------------------------------- PyCUDA's problems
# A PyCUDA that works, as far as an import of brainstorm's handler goes.
PYCUDA = {
    "pycuda/__init__.py": "",
    "pycuda/autoinit.py": "",
    "pycuda/driver.py": "",
    "pycuda/cumath.py": "",
    "pycuda/gpuarray.py": """
        class GPUArray: pass
        def zeros(*args, **kwargs): return GPUArray()
        def to_gpu(array): return array
    """,
    "pycuda/elementwise.py": """
        class ElementwiseKernel:
            def __init__(self, *args): pass
    """,
    "pycuda/compiler.py": """
        class SourceModule:
            def __init__(self, source): pass
            def get_function(self, name): return None
    """,
    "pycuda/curandom.py": """
        class XORWOWRandomNumberGenerator:
            def __init__(self, seed_getter): self.seeds = seed_getter(3)
    """,
    "skcuda/__init__.py": "",
    "skcuda/linalg.py": "def init(): pass",
    "skcuda/misc.py": "_global_cublas_handle = 1",
}

ASK = """
import warnings
from brainstorm_dbuf import compat
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    bs = compat.require_brainstorm()
    compat.apply()
for warning in caught:
    print("warned", warning.category.__name__, warning.message)
print("problem", compat.pycuda_problem())
print("has_pycuda", bs.optional.has_pycuda)
try:
    bs.handlers.PyCudaHandler(seed=1)
except ImportError as error:
    print("raised", error)
net = bs.tools.create_net_from_spec("classification", 4, 3, "F5")
"""


def test_a_pycuda_that_works_is_used_without_a_word(tmp_path):
    out = run(ASK, write(tmp_path, PYCUDA))
    assert "problem None" in out and "has_pycuda True" in out
    assert "warned" not in out and "raised" not in out


def test_any_integer_is_a_seed_for_the_pycuda_handler(tmp_path):
    run(
        """
        import numpy
        from brainstorm_dbuf import compat
        handler_class = compat.require_brainstorm().handlers.PyCudaHandler
        for seed in (3, numpy.int64(3), numpy.uint8(3)):
            seeds = handler_class(seed=seed).rnd.seeds
            assert seeds.dtype == numpy.int32 and list(seeds) == [3, 3, 3]
            assert list(handler_class(seed).rnd.seeds) == [3, 3, 3]
        assert handler_class().rnd.seeds.dtype == numpy.int32
        try:
            handler_class(seed=1.5)
        except TypeError:
            pass
        else:
            raise SystemExit("a float was taken for a seed")
        """,
        write(tmp_path, PYCUDA),
    )


BROKEN = {
    "no driver library": (
        {"pycuda/driver.py": "raise ImportError('libcuda.so.1: cannot open')"},
        "PyCUDA is installed but does not work: ImportError: libcuda.so.1: cannot open",
    ),
    "no device": (
        {"pycuda/autoinit.py": "raise RuntimeError('cuInit failed: no device')"},
        "PyCUDA is installed but does not work: RuntimeError: cuInit failed: no device",
    ),
    "no scikit-cuda": (
        {"skcuda/linalg.py": "raise ModuleNotFoundError('No module named skcuda')"},
        "PyCUDA is installed but does not work: ModuleNotFoundError: No module named",
    ),
    "no cuBLAS": (
        {"skcuda/linalg.py": "raise OSError('cublas library not found')"},
        "PyCUDA is installed but does not work: OSError: cublas library not found",
    ),
    "no compiler": (
        {
            "pycuda/compiler.py": """
                class SourceModule:
                    def __init__(self, source): raise OSError("nvcc not found")
            """
        },
        "PyCUDA works, but brainstorm's PyCudaHandler does not: OSError: nvcc not",
    ),
}


@pytest.mark.parametrize("case", sorted(BROKEN))
def test_a_pycuda_that_does_not_work_is_kept_out_and_says_why(case, tmp_path):
    files, text = BROKEN[case]
    out = run(ASK, write(tmp_path, {**PYCUDA, **files}))
    lines = out.splitlines()
    warned = [line for line in lines if line.startswith("warned")]
    assert len(warned) == 1 and warned[0].startswith(
        f"warned RuntimeWarning brainstorm runs without PyCudaHandler. {text}"
    )
    assert any(line.startswith(f"problem {text}") for line in lines)
    assert any(line.startswith(f"raised {text}") for line in lines)
    assert "has_pycuda False" in lines


def test_the_module_of_a_handler_that_failed_can_be_imported_for_its_error(tmp_path):
    files, _ = BROKEN["no compiler"]
    run(
        """
        from brainstorm_dbuf import compat
        compat.require_brainstorm()
        try:
            import brainstorm.handlers.pycuda_handler
        except OSError as error:
            assert str(error) == "nvcc not found"
        else:
            raise SystemExit("imported")
        """,
        write(tmp_path, {**PYCUDA, **files}),
        warnings="ignore",
    )


def test_pycuda_itself_stays_importable_when_it_is_kept_out(tmp_path):
    files, _ = BROKEN["no cuBLAS"]
    run(
        """
        from brainstorm_dbuf import compat
        compat.require_brainstorm()
        import pycuda.autoinit, sys
        assert sys.modules["pycuda"] is pycuda
        """,
        write(tmp_path, {**PYCUDA, **files}),
        warnings="ignore",
    )


def test_without_pycuda_there_is_no_warning():
    out = run(HIDE + "Hider.hidden = {'pycuda', 'skcuda'}\n" + textwrap.dedent(ASK))
    assert "problem PyCUDA is not installed" in out and "warned" not in out
    assert "has_pycuda False" in out and "raised No module named 'pycuda'" in out


def test_a_warning_made_an_error_does_not_leave_half_a_brainstorm(tmp_path):
    files, _ = BROKEN["no device"]
    run(
        """
        import brainstorm_dbuf
        try:
            import brainstorm
        except RuntimeWarning:
            pass
        else:
            raise SystemExit("no warning")
        import brainstorm as bs
        assert bs.utils and bs.structure and bs.handlers.default_handler
        """,
        write(tmp_path, {**PYCUDA, **files}),
    )
