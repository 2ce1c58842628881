"""Stand-ins for modules: the same names, and a few more."""

from __future__ import annotations

from types import ModuleType
from typing import Any


def module_with(module: ModuleType, **extra: Any) -> ModuleType:
    """Return a module with `module`'s names and `extra` ones; `module` stays as it is.

    The names are copied, so that a look-up costs what it costs on a real module;
    what `module` makes only when asked for (lazy names) is asked of it.
    """
    stand_in = ModuleType(module.__name__, module.__doc__)
    names = vars(stand_in)
    names.update(vars(module))
    names["__getattr__"] = lambda name: getattr(module, name)
    names["__dir__"] = lambda: sorted({*dir(module), *extra})
    names.update(extra)
    return stand_in
