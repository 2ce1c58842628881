"""Make brainstorm 0.5, as the package index has it, run on today's Python and NumPy.

`apply()` arms the import system for brainstorm and scikit-cuda; it imports neither, and
a brainstorm that is imported later (or was before) works. Nothing is left in NumPy, in
h5py or in ctypes: each module of brainstorm gets what it lacks, see brainstorm_shims.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from types import ModuleType

from . import brainstorm_shims, pycuda_guard, skcuda_shims
from .importer import Finder
from .locate import (
    INSTALL_COMMAND,
    SUPPORTED_VERSION,
    Found,
    check_brainstorm,
    find_brainstorm,
)

__all__ = [
    "INSTALL_COMMAND",
    "SUPPORTED_VERSION",
    "Found",
    "apply",
    "check_brainstorm",
    "find_brainstorm",
    "pycuda_problem",
    "require_brainstorm",
    "when_imported",
]

_lock = threading.RLock()
_finder: Finder | None = None


def apply() -> None:
    """Arm the shims; harmless when called again, or without brainstorm.

    Installs one finder on `sys.meta_path`. A brainstorm that was imported before is
    changed in place; another version than 0.5 is left alone.
    """
    global _finder
    with _lock:
        if _finder is None:
            finder = Finder()
            finder.add_package(
                "brainstorm",
                brainstorm_shims.RECIPES,
                accepts=_brainstorm_is_supported,
                built=brainstorm_shims.BUILT,
            )
            finder.add_package(
                "skcuda",
                skcuda_shims.RECIPES,
                accepts=skcuda_shims.is_supported,
                built=skcuda_shims.BUILT,
            )
            _finder = finder
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
        if "brainstorm" in sys.modules:
            _finder.patch_loaded("brainstorm")
            if pycuda_guard.unknown():
                pycuda_guard.look_at_loaded()


def require_brainstorm() -> ModuleType:
    """Return brainstorm 0.5, imported with the shims in place.

    Raises ImportError that names what is missing and the command to install it.
    """
    found = check_brainstorm()
    apply()
    try:
        return importlib.import_module("brainstorm")
    except ModuleNotFoundError as error:
        if error.name in ("numpy", "h5py", "six"):
            raise ImportError(
                f"brainstorm (in {found.location}) needs the package {error.name}, "
                f"which is not installed: python -m pip install {error.name}",
                name=error.name,
            ) from error
        raise


def when_imported(name: str, callback: Callable[[ModuleType], None]) -> None:
    """Call `callback(module)` when brainstorm's module `name` has been imported.

    At once if it already has; never, if brainstorm is not 0.5. For additions such as
    further handler operations, without importing brainstorm for their sake.
    """
    apply()
    assert _finder is not None
    _finder.when_imported(name, callback)


def pycuda_problem() -> str | None:
    """Return why brainstorm's PyCudaHandler cannot be used, None if it can.

    Imports brainstorm, if that was not done yet; raises ImportError without it.
    """
    require_brainstorm()
    return pycuda_guard.problem()


def _brainstorm_is_supported() -> bool:
    found = find_brainstorm()
    return found is not None and found.supported
