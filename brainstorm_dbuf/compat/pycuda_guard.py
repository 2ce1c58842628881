"""Keep PyCUDA out of brainstorm unless all that its handler needs really works.

brainstorm.optional takes an ImportError for "not installed" and lets every other
error through, so that a half-working PyCUDA, scikit-cuda, driver or nvcc kills
`import brainstorm` also for those who never use a GPU. Here such an error is kept:
brainstorm comes up without PyCudaHandler, one warning says why, `pycuda_problem()`
says it again, and using PyCudaHandler raises it.
"""

from __future__ import annotations

import functools
import importlib.util
import operator
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

_HANDLER = "brainstorm.handlers.pycuda_handler"
_NOT_INSTALLED = "PyCUDA is not installed"
_DOES_NOT_WORK = "PyCUDA is installed but does not work: "


class _State:
    known: bool = False
    problem: str | None = None
    warn: bool = False  # the problem is worth a warning
    warned: bool = False


_state = _State()


def unknown() -> bool:
    """Return whether brainstorm has not yet tried PyCUDA under our eyes."""
    return not _state.known


def problem() -> str | None:
    """Return why PyCudaHandler cannot be used, None if it can."""
    return _state.problem


def run_optional(module: ModuleType, run_body: Callable[[], None]) -> None:
    """Run the body of brainstorm.optional, without pycuda if that fails."""
    try:
        run_body()
    except Exception as error:
        cause: BaseException = error
        _run_without_pycuda(run_body)
    else:
        if module.has_pycuda:
            _note(None)
            return
        cause = object.__getattribute__(module.pycuda_mock, "error")[1]
    if _is_installed("pycuda"):
        _keep_out(module, _DOES_NOT_WORK + _text(cause), cause)
    else:
        _note(_NOT_INSTALLED)


def run_handler(module: ModuleType, run_body: Callable[[], None]) -> None:
    """Run the body of the PyCUDA handler's module, which compiles kernels.

    Where that fails, the module gets nothing but a `PyCudaHandler` that raises.
    """
    try:
        run_body()
    except Exception as error:
        handlers = sys.modules["brainstorm.handlers"]
        if not getattr(handlers.__spec__, "_initializing", False):
            raise  # not brainstorm's own import, but someone who wants this module
        optional = sys.modules["brainstorm.optional"]
        _keep_out(
            optional,
            f"PyCUDA works, but brainstorm's PyCudaHandler does not: {_text(error)}",
            error,
        )
        module.PyCudaHandler = optional.pycuda_mock


def forget_handler_stub(handlers: ModuleType) -> None:
    """Forget a handler module that failed: whoever imports it later gets its error."""
    stub = sys.modules.get(_HANDLER)
    if stub is not None and not _works(stub):
        del sys.modules[_HANDLER]
        vars(handlers).pop("pycuda_handler", None)


def accept_any_integer_seed(module: ModuleType) -> None:
    """PyCudaHandler multiplies an int32 array by its seed; NumPy integers widen it."""
    if not _works(module):
        return
    handler_class = module.PyCudaHandler
    own_init = handler_class.__init__

    @functools.wraps(own_init)
    def __init__(self: Any, seed: Any = None) -> None:
        own_init(self, seed=None if seed is None else operator.index(seed))

    handler_class.__init__ = __init__


def warn_once(brainstorm: ModuleType) -> None:
    """Warn why PyCUDA is kept out, if it is installed and was not warned about yet."""
    if _state.warn and not _state.warned:
        _state.warned = True
        # As from brainstorm itself: whoever imports it shall read why, not where in us.
        warnings.warn_explicit(
            f"brainstorm runs without PyCudaHandler. {_state.problem}",
            RuntimeWarning,
            filename=brainstorm.__file__ or "brainstorm",
            lineno=1,
            module="brainstorm",
        )


def look_at_loaded() -> None:
    """Take over what a brainstorm that was imported before us has found."""
    optional = sys.modules.get("brainstorm.optional")
    if optional is None or not hasattr(optional, "has_pycuda"):
        return
    if optional.has_pycuda:
        _note(None)
    elif not _is_installed("pycuda"):
        _note(_NOT_INSTALLED)
    else:
        cause = object.__getattribute__(optional.pycuda_mock, "error")[1]
        _note(_DOES_NOT_WORK + _text(cause))


def _note(problem: str | None) -> None:
    _state.known = True
    _state.problem = problem


def _keep_out(optional: ModuleType, text: str, cause: BaseException) -> None:
    """Make brainstorm.optional say that there is no PyCUDA, and why."""
    _note(text)
    _state.warn = True
    error = ImportError(text, name="pycuda")
    error.__cause__ = cause
    optional.has_pycuda = False
    optional.pycuda_mock = optional.MissingDependencyMock((ImportError, error, None))


def _run_without_pycuda(run_body: Callable[[], None]) -> None:
    """Run a body that imports pycuda as if pycuda were not installed."""
    missing = object()
    before = sys.modules.get("pycuda", missing)
    # None is Python's own way to say "not there": the import raises ImportError.
    sys.modules["pycuda"] = None  # type: ignore[assignment]
    try:
        run_body()
    finally:
        if before is missing:
            del sys.modules["pycuda"]
        else:
            sys.modules["pycuda"] = before  # type: ignore[assignment]


def _works(module: ModuleType) -> bool:
    return isinstance(vars(module).get("PyCudaHandler"), type)


def _is_installed(name: str) -> bool:
    try:
        return sys.modules.get(name) is not None or (
            importlib.util.find_spec(name) is not None
        )
    except (ImportError, ValueError):
        return False


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
