"""Say which brainstorm an import would bring, without importing it."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from typing import NamedTuple

SUPPORTED_VERSION = "0.5"
INSTALL_COMMAND = "python -m brainstorm_dbuf.install_brainstorm"


class Found(NamedTuple):
    """A brainstorm that can be imported: its version (None: unknown) and folder."""

    version: str | None
    location: str

    @property
    def supported(self) -> bool:
        return self.version == SUPPORTED_VERSION


def find_brainstorm() -> Found | None:
    """Return the brainstorm that `import brainstorm` would bring, None if none.

    Nothing is imported. A folder that merely happens to be named brainstorm (no
    `__init__.py`) does not count.
    """
    module = sys.modules.get("brainstorm")
    if module is not None and getattr(module, "__file__", None):
        folder = Path(module.__file__).parent
        return Found(
            getattr(module, "__version__", None) or _version(folder), str(folder)
        )
    try:
        spec = _path_spec("brainstorm")
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.has_location or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations)))
    return Found(_version(folder), str(folder))


def check_brainstorm() -> Found:
    """Return the brainstorm that an import would bring.

    Raises ImportError where there is none, or another version than 0.5: the message
    names the version found and the command that installs the right one.
    """
    found = find_brainstorm()
    if found is None:
        raise ImportError(
            f"brainstorm {SUPPORTED_VERSION} is not installed in this environment "
            f"({sys.prefix}). Install it with: {INSTALL_COMMAND}",
            name="brainstorm",
        )
    if not found.supported:
        raise ImportError(
            f"brainstorm_dbuf works with brainstorm {SUPPORTED_VERSION}, but version "
            f"{found.version or 'unknown'} was found in {found.location}. "
            f"Install {SUPPORTED_VERSION} with: {INSTALL_COMMAND}",
            name="brainstorm",
            path=found.location,
        )
    return found


def _path_spec(name: str) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of a top-level package as the finders of files give it."""
    for finder in list(sys.meta_path):
        # Our own finder asks here whether to act: it must not be asked in turn.
        if type(finder).__module__.startswith(__package__):
            continue
        find_spec = getattr(finder, "find_spec", None)
        spec = find_spec(name, None) if find_spec else None
        if spec is not None:
            return spec
    return None


def _version(folder: Path) -> str | None:
    """Return the version that the package itself states, else its metadata's."""
    try:
        tree = ast.parse((folder / "__about__.py").read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        tree = ast.Module(body=[], type_ignores=[])
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "__version__"
            for target in node.targets
        ):
            try:
                return str(ast.literal_eval(node.value))
            except ValueError:
                break
    try:
        return importlib.metadata.version("brainstorm")
    except importlib.metadata.PackageNotFoundError:
        return None
