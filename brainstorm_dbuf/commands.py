"""What the commands of the command line share: numbers, handlers, and how to refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


class Refused(Exception):
    """What the user has to change, and the exit status."""

    def __init__(self, message: str, status: int = 2) -> None:
        super().__init__(message)
        self.status = status


def positive(number: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return what makes a positive number of an argument of the command line."""

    def convert(text: str) -> Any:
        value = number(text)
        if not 0 < value < float("inf"):
            raise ValueError
        return value

    convert.__name__ = f"positive {number.__name__}"  # argparse names it
    return convert


def need_brainstorm() -> None:
    """Import brainstorm.

    Raises:
        Refused: it is not there; with how to get it.
    """
    from . import compat

    try:
        compat.require_brainstorm()
    except ImportError as error:
        message = str(error)
        if compat.INSTALL_COMMAND not in message:
            message += f"; {compat.INSTALL_COMMAND} installs it"
        raise Refused(message, 3) from None


def make_handler(name: str, seed: int) -> Any:
    """Return a handler by its name: numpy, cuda, pycuda, or auto for cuda, else numpy.

    Raises:
        Refused: there is none of that name here; with the reason.
    """
    from brainstorm.handlers import NumpyHandler

    import brainstorm_dbuf as dbuf

    from . import compat

    if name == "pycuda":
        problem = compat.pycuda_problem()
        if problem is not None:
            raise Refused(f"--handler pycuda: {problem}", 3)
        from brainstorm.handlers import PyCudaHandler

        return PyCudaHandler(seed=seed)
    if name != "numpy":
        try:
            return dbuf.CudaHandler(seed=seed)
        except (RuntimeError, OSError) as error:
            if name == "cuda":
                raise Refused(f"--handler cuda: {error}", 3) from None
    return NumpyHandler(np.float32, seed=seed)


def size_as_text(nbytes: int) -> str:
    if nbytes >= 1 << 30:
        return f"{nbytes / (1 << 30):.1f} GiB"
    return (
        f"{nbytes / (1 << 20):.1f} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"
    )
