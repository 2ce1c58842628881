"""What brainstorm 0.5 needs on today's Python, NumPy and h5py, module by module.

Each function replaces or adds one thing and says which break it answers. Results are
the ones brainstorm's own code gives where that code still runs.
"""

from __future__ import annotations

import datetime as _datetime
import json
from collections import OrderedDict
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from . import pycuda_guard
from .importer import Recipe, Step
from .stand_in import module_with

if TYPE_CHECKING:  # the shims are armed without loading NumPy
    import numpy


def _put(
    owner: Any, function: Callable[..., Any], as_classmethod: bool = False
) -> None:
    """Make `function` a member of a module or class, as if written there."""
    in_class = isinstance(owner, type)
    function.__module__ = owner.__module__ if in_class else owner.__name__
    prefix = owner.__qualname__ + "." if in_class else ""
    function.__qualname__ = prefix + function.__name__
    member = classmethod(function) if as_classmethod else function
    setattr(owner, function.__name__, member)


def _numpy_with(after: Step | None = None, **names: Any) -> Recipe:
    """Give a module a `np` of its own with names that NumPy no longer has."""
    substitutes = {"np": lambda numpy: module_with(numpy, **names)}
    return Recipe(substitutes=substitutes, after=after)


# -------------------------------------------------------------- _cpuop, compiled
def fill_cpuop(module: ModuleType) -> None:
    """Serve `brainstorm.handlers._cpuop` from our own C: theirs needs NumPy 1 to build.

    Also where brainstorm's own was built, so that results are the same everywhere.
    """
    from .. import _cpuop

    for name, value in vars(_cpuop).items():
        if not name.startswith("__"):
            setattr(module, name, value)
    module.__doc__ = _cpuop.__doc__


def _rebind_crop_images(module: ModuleType) -> None:
    """Take the crop function from our module, where the iterators came in before us."""
    from .. import _cpuop

    module._crop_images = _cpuop._crop_images


# -------------------------------------------------------------------- randomness
def _add_random_integers(module: ModuleType) -> None:
    """RandomState.random_integers is deprecated in NumPy; RandomCrop draws with it."""

    def random_integers(
        self: Any, low: int, high: int | None = None, size: Any = None
    ) -> Any:
        """Draw integers `low` to `high`, both included (1 to `low` without `high`).

        The draws are those of NumPy's function of this name.
        """
        if high is None:
            low, high = 1, low
        return self.randint(low, int(high) + 1, size=size, dtype="l")

    _put(module.RandomState, random_integers)


# ------------------------------------------------------------------------- utils
class _DateTime(_datetime.datetime):
    """`datetime.datetime` whose `utcnow` does not warn (deprecated in Python 3.12)."""

    @classmethod
    def utcnow(cls) -> _DateTime:
        return cls.now(_datetime.timezone.utc).replace(tzinfo=None)


# ----------------------------------------------------------------------- network
def _replace_network_methods(module: ModuleType) -> None:
    """Read HDF5 data sets and (1,) losses in the ways that are left.

    h5py 3 has no `Dataset.value`; NumPy 2.4 and later refuses `float()` of an array
    with dimensions.
    """

    def from_hdf5(cls: type, filename: Any) -> Any:
        """Return the network that `save_as_hdf5` wrote to the file `filename`."""
        with module.h5py.File(filename, "r") as stored:
            text = stored["description"][()]
            parameters = stored["parameters"][()]
        if isinstance(text, bytes):
            text = text.decode()
        network = module.create_from_description(json.loads(text))
        network.handler.set_from_numpy(network.buffer.parameters, parameters)
        return network

    def get_loss_values(self: Any) -> OrderedDict[str, float]:
        """Return the losses of the last forward pass as floats, by name.

        A network with one Loss layer has the one entry 'total_loss'; with several,
        each layer has its own and their sum comes last.
        """
        values = [
            (name, float(self.get(name + ".outputs.loss").item()))
            for name in self.loss_layers
        ]
        if len(values) == 1:
            return OrderedDict(total_loss=values[0][1])
        losses = OrderedDict(values)
        losses["total_loss"] = sum((value for _, value in values), 0.0)
        return losses

    _put(module.Network, from_hdf5, as_classmethod=True)
    _put(module.Network, get_loss_values)


# ------------------------------------------------------------------------- tools
def _replace_extract(module: ModuleType) -> None:
    """tools.extract indexes the values of a dict, which Python 3 does not allow."""

    def extract(network: Any, iter: Any, buffer_names: Any) -> dict[str, numpy.ndarray]:
        """Run `network` over the data of `iter` and return the named buffers.

        Args:
            network: the network to apply; not trained.
            iter: a data iterator; inputs that it does not give keep their content.
            buffer_names: dotted names of buffers, or a single one.

        Returns:
            An array (T, N, ...) for each name, N being the iterator's number of
            examples, in the order in which they come. Batches may differ in T: the
            steps that a shorter one does not have are zero.
        """
        if isinstance(buffer_names, str):
            buffer_names = [buffer_names]
        examples = next(shape[1] for shape in iter.data_shapes.values())
        results: dict[str, numpy.ndarray] = {}
        start = 0
        # Looked up at each call: brainstorm_dbuf has a run_network of its own.
        for _ in module.run_network(
            network, iter(handler=network.handler), all_inputs=False
        ):
            network.forward_pass()
            stop = start
            for name in buffer_names:
                data = network.get(name)
                stop = start + data.shape[1]
                result = _with_steps(results.get(name), data, examples)
                result[: data.shape[0], start:stop] = data
                results[name] = result
            start = stop
        return results

    _put(module, extract)


def _with_steps(
    result: numpy.ndarray | None, data: numpy.ndarray, examples: int
) -> numpy.ndarray:
    """Return `result` with room for the time steps of the batch `data`."""
    if result is not None and result.shape[0] >= data.shape[0]:
        return result
    import numpy

    larger = numpy.zeros((data.shape[0], examples) + data.shape[2:], data.dtype)
    if result is not None:
        larger[: result.shape[0]] = result
    return larger


RECIPES = {
    "brainstorm": Recipe(after=pycuda_guard.warn_once),
    "brainstorm.data_iterators": _numpy_with(_rebind_crop_images, int=int, bool=bool),
    "brainstorm.handlers": Recipe(after=pycuda_guard.forget_handler_stub),
    "brainstorm.handlers.pycuda_handler": Recipe(
        run=pycuda_guard.run_handler, after=pycuda_guard.accept_any_integer_seed
    ),
    "brainstorm.initializers": _numpy_with(float=float),
    "brainstorm.optional": Recipe(run=pycuda_guard.run_optional),
    "brainstorm.randomness": Recipe(after=_add_random_integers),
    "brainstorm.scorers": _numpy_with(float=float),
    "brainstorm.structure.network": Recipe(after=_replace_network_methods),
    "brainstorm.tools": _numpy_with(_replace_extract, int=int),
    "brainstorm.training.schedules": _numpy_with(Inf=float("inf")),
    "brainstorm.utils": Recipe(substitutes={"datetime": lambda own: _DateTime}),
}

BUILT = {"brainstorm.handlers._cpuop": fill_cpuop}
