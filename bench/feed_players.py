"""A contestant in a process of its own, which may fail or hang without the others."""

from __future__ import annotations

import importlib
import multiprocessing
from multiprocessing.connection import Connection
from typing import Any


class Failed(Exception):
    """What a contestant has to say instead of an answer."""


class Player:
    """A process with one object in it, whose methods are called from here.

    Args:
        module, kind: where the object's class is.
        arguments: what it is made with.
    """

    def __init__(self, module: str, kind: str, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        # Not daemonic: it may have worker processes of its own.
        self._process = context.Process(
            target=_serve, args=(theirs, module, kind, arguments), daemon=False
        )
        self._process.start()
        theirs.close()

    def ask(self, method: str, *arguments: Any, timeout: float = 60) -> Any:
        """Return what the method returns.

        Raises:
            Failed: it raised, or did not answer; then the process is gone.
        """
        try:
            self._pipe.send((method, arguments))
            if not self._pipe.poll(timeout):
                self.close(at_once=True)
                raise Failed(f"no answer within {timeout:.0f} s")
            good, answer = self._pipe.recv()
        except (EOFError, OSError):
            raise Failed(
                f"the process has ended (exit code {self._process.exitcode})"
            ) from None
        if not good:
            raise Failed(answer)
        return answer

    def close(self, at_once: bool = False) -> None:
        """End the process: it sees that nobody asks any more."""
        self._pipe.close()
        if not at_once:
            self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(
    pipe: Connection, module: str, kind: str, arguments: tuple[Any, ...]
) -> None:
    # At once, so that all processes start side by side; an error waits to be asked.
    player, broken = None, ""
    try:
        player = getattr(importlib.import_module(module), kind)(*arguments)
    except Exception as error:
        broken = _text_of(error)
    while True:
        try:
            method, given = pipe.recv()
        except EOFError:
            return
        try:
            answer = False, broken
            if player is not None:
                answer = True, getattr(player, method)(*given)
        except Exception as error:
            answer = False, _text_of(error)
        pipe.send(answer)


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
