"""Change single modules of somebody else's package while they are imported.

A `Recipe` says what one module gets: names replaced as its body binds them, a step
before and a step after the body. `Finder` sits first on `sys.meta_path` and looks
only at the packages it was given recipes for; `Loader` wraps the module's own loader.

Replacing a name "as the body binds it" is done by running the body with a mapping of
our own as its local names (`exec` allows any mapping there): the statement
`import numpy as np` in that module stores our stand-in into that module, and into
nothing else. So numpy, ctypes and the rest of the process stay as they are, also for
another thread that looks at them meanwhile.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from types import CodeType, ModuleType
from typing import Any

Step = Callable[[ModuleType], None]


@dataclass(frozen=True)
class Recipe:
    """What is done to one module.

    `substitutes` maps a global name to a function that gets the value the module
    means to bind and returns the one it shall have. `transient` names of these are
    given back their own value once the body has run. `run`, where given, takes the
    place of the body: it gets the module and a function that runs the body.
    """

    substitutes: dict[str, Callable[[Any], Any]] = field(default_factory=dict)
    transient: frozenset[str] = frozenset()
    run: Callable[[ModuleType, Callable[[], None]], None] | None = None
    after: Step | None = None


class BodyNames(MutableMapping):
    """The local names of a module body: the module's own, with substitutes put in."""

    def __init__(self, module: ModuleType, recipe: Recipe) -> None:
        self._names = vars(module)
        self._recipe = recipe
        self._own: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        return self._names[name]

    def __setitem__(self, name: str, value: Any) -> None:
        substitute = self._recipe.substitutes.get(name)
        if substitute is not None:
            self._own[name] = value
            value = substitute(value)
        self._names[name] = value

    def __delitem__(self, name: str) -> None:
        del self._names[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def give_back(self) -> None:
        """Bind the transient names to what the module itself had bound them to."""
        for name in self._recipe.transient & self._own.keys():
            self._names[name] = self._own[name]


class Loader(importlib.abc.Loader):
    """Run a module's body as its recipe says; everything else is the own loader's."""

    def __init__(self, own: Any, recipe: Recipe, finish: Step) -> None:
        self._own = own
        self._recipe = recipe
        self._finish = finish

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Later readers (inspect, pickle, reload) shall find the module's own loader.
        module.__loader__ = self._own
        if module.__spec__ is not None:
            module.__spec__.loader = self._own
        if self._recipe.run is not None:
            self._recipe.run(module, lambda: self._run_body(module))
        else:
            self._run_body(module)
        self._finish(module)

    def _run_body(self, module: ModuleType) -> None:
        code = self._code(module.__name__)
        if code is None:  # a compiled module: there is no body to put names into
            self._own.exec_module(module)
            return
        names = BodyNames(module, self._recipe)
        exec(code, vars(module), names)
        names.give_back()

    def _code(self, name: str) -> CodeType | None:
        """Return the module's code, compiled without warnings about its old escapes."""
        get_code = getattr(self._own, "get_code", None)
        if get_code is None:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            return get_code(name)


class Finder(importlib.abc.MetaPathFinder):
    """Find the modules of the packages that have recipes, and wrap their loaders."""

    def __init__(self) -> None:
        self._recipes: dict[str, Mapping[str, Recipe]] = {}
        self._accepts: dict[str, Callable[[], bool]] = {}
        self._accepted: dict[str, bool] = {}
        self._builders: dict[str, Step] = {}
        self._callbacks: dict[str, list[Step]] = {}
        self._done: weakref.WeakSet[ModuleType] = weakref.WeakSet()
        self._lock = threading.RLock()

    # ------------------------------------------------------------ what to change
    def add_package(
        self,
        name: str,
        recipes: Mapping[str, Recipe],
        accepts: Callable[[], bool],
        built: Mapping[str, Step] | None = None,
    ) -> None:
        """Take over the modules of package `name`.

        `accepts` is asked at each import of the package itself: False leaves that
        installation alone. `built` maps names of modules to functions that fill them:
        these replace any module of that name.
        """
        self._recipes[name] = recipes
        self._accepts[name] = accepts
        self._builders.update(built or {})

    def when_imported(self, name: str, callback: Step) -> None:
        """Call `callback(module)` when module `name` has been loaded, now if it is.

        For modules of the packages that were added; again when one is reloaded.
        """
        with self._lock:
            self._callbacks.setdefault(name, []).append(callback)
            module = sys.modules.get(name)
            if module is None or module not in self._done:
                return
        callback(module)

    def patch_loaded(self, package: str) -> None:
        """Do to the package's already loaded modules what can be done afterwards."""
        if not self._accepts[package]():
            return
        for name, fill in self._builders.items():
            if name.partition(".")[0] == package and name in sys.modules:
                fill(sys.modules[name])
                parent, _, child = name.rpartition(".")
                setattr(sys.modules[parent], child, sys.modules[name])
        for name, module in sorted(sys.modules.items()):
            if name.partition(".")[0] != package or module is None:
                continue
            if module in self._done:
                continue
            recipe = self._recipes[package].get(name, Recipe())
            for global_name, substitute in recipe.substitutes.items():
                if global_name in vars(module) and global_name not in recipe.transient:
                    setattr(module, global_name, substitute(vars(module)[global_name]))
            if _is_loaded(module):
                self._finish(module)

    # ------------------------------------------------------------ import protocol
    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        package = fullname.partition(".")[0]
        recipes = self._recipes.get(package)
        if recipes is None:
            return None
        if fullname == package or package not in self._accepted:
            self._accepted[package] = self._accepts[package]()
        if not self._accepted[package]:
            return None
        if fullname == package and package not in sys.modules:
            _forget_submodules(package)
        if fullname in self._builders:
            loader = BuiltLoader(self._builders[fullname], self._finish)
            return importlib.machinery.ModuleSpec(
                fullname, loader, origin="brainstorm_dbuf"
            )
        spec = self._own_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            recipe = recipes.get(fullname, Recipe())
            spec.loader = Loader(spec.loader, recipe, self._finish)
        return spec

    def _own_spec(
        self, fullname: str, path: Any, target: Any
    ) -> importlib.machinery.ModuleSpec | None:
        for finder in list(sys.meta_path):
            find_spec = getattr(finder, "find_spec", None)
            if finder is self or find_spec is None:
                continue
            spec = find_spec(fullname, path, target)
            if spec is not None:
                return spec
        return None

    def _finish(self, module: ModuleType) -> None:
        """Run what comes after a module's body: its recipe's step, then callbacks."""
        name = module.__name__
        recipe = self._recipes[name.partition(".")[0]].get(name)
        if recipe is not None and recipe.after is not None:
            recipe.after(module)
        with self._lock:  # a callback is called by us or by when_imported, never lost
            self._done.add(module)
            callbacks = list(self._callbacks.get(name, ()))
        for callback in callbacks:
            callback(module)


class BuiltLoader(importlib.abc.Loader):
    """Load a module that is made here rather than read from a file."""

    def __init__(self, fill: Step, finish: Step) -> None:
        self._fill = fill
        self._finish = finish

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        self._fill(module)
        self._finish(module)


def _forget_submodules(package: str) -> None:
    """Drop what an earlier, failed import of the package has left in sys.modules."""
    for name in [name for name in sys.modules if name.startswith(package + ".")]:
        del sys.modules[name]


def _is_loaded(module: ModuleType) -> bool:
    """Return False while the module's body is still running."""
    spec = getattr(module, "__spec__", None)
    return not getattr(spec, "_initializing", False)
