"""The extensions imported once more: by another interpreter, or again by this one."""

from __future__ import annotations

import gc
import importlib.util
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from binding_tools import leak_check  # noqa: F401
from conftest import SUBPROCESS_PATH

from brainstorm_dbuf import _cpuop, _cuda

MODULES = {"_cuda": _cuda, "_cpuop": _cpuop}

# Runs a text in a new interpreter, with a GIL of its own where Python has that.
PROGRAM = """
    import sys
    try:
        import _interpreters as interpreters
    except ImportError:
        import _xxsubinterpreters as interpreters

    def run(text, isolated):
        if hasattr(interpreters, "new_config"):
            made = interpreters.create("isolated" if isolated else "legacy")
        else:
            made = interpreters.create(isolated=isolated)
        failed = interpreters.run_string(made, text)
        if failed is not None:
            raise RuntimeError(failed)
        interpreters.destroy(made)

    IMPORT = '''
    import importlib.util, sys
    spec = importlib.util.spec_from_file_location({name!r}, {path!r})
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        assert "{name} does not support loading in subinterpreters" in str(error), error
    else:
        raise AssertionError("imported")
    '''
"""


def program(body, name):
    done = subprocess.run(
        [
            sys.executable,
            *("-X", "faulthandler", "-W", "error", "-c"),
            "\n".join(textwrap.dedent(part) for part in (PROGRAM, body)),
            MODULES[name].__name__,
            MODULES[name].__file__,
        ],
        env={**os.environ, "PYTHONPATH": SUBPROCESS_PATH},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr


@pytest.mark.parametrize("isolated", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_a_subinterpreter_is_refused_and_the_main_one_goes_on(name, isolated, driver):
    program(
        f"""
        text = IMPORT.format(name=sys.argv[1], path=sys.argv[2])
        import textwrap
        run(textwrap.dedent(text), {isolated})
        import numpy as np
        from brainstorm_dbuf import _cpuop, _cuda
        run(textwrap.dedent(text), {isolated})
        context = _cuda.Context.primary()
        context.push()
        array = _cuda.pagelocked_zeros(4)
        memory = _cuda.mem_alloc(16)
        run(textwrap.dedent(text), {isolated})
        _cuda.memcpy_htod(memory, array)
        context.pop()
        """,
        name,
    )


def again(module):
    """Import an extension once more, beside the module that is there."""
    spec = importlib.util.spec_from_file_location(module.__name__, module.__file__)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    assert made is not module
    return made


@pytest.mark.usefixtures("leak_check")
def test_a_second_import_has_types_and_engines_of_its_own(kernels):
    other = again(_cuda)
    ours, theirs = _cuda.HandlerCore(), other.HandlerCore()
    for module, handler in ((_cuda, ours), (other, theirs)):
        array = handler.ones((3, 3))
        assert type(array) is module.DeviceArray
        assert type(handler.context) is module.Context
        handler.dot_mm(array, array, out := handler.zeros((3, 3)))
        assert np.array_equal(out.get(), np.full((3, 3), 3, "f4"))
        assert (array + 1).get().sum() == 18
    with pytest.raises(TypeError, match="add_tt: b must be a DeviceArray"):
        ours.add_tt(ours.ones(3), theirs.ones(3), ours.ones(3))
    # As any other library's.
    assert ours.as_array(theirs.ones(3)).get().sum() == 3
    assert ours.from_dlpack(theirs.ones(3)).get().sum() == 3
    del array, out, handler, module


@pytest.mark.usefixtures("leak_check")
def test_objects_of_a_second_import_outlive_its_module(driver, kernels):
    other = again(_cuda)
    stream, event = other.Stream(), other.Event()
    memory, array = other.mem_alloc(64), other.pagelocked_zeros(16)
    handler = other.HandlerCore()
    values = handler.ones(3)
    del other
    gc.collect()
    context = memory.context
    assert type(context) is not _cuda.Context
    event.record(stream)
    stream.synchronize()
    assert values.get().sum() == 3
    del stream, event, memory, array, handler, values, context
    gc.collect()


def test_a_second_import_of_the_operations_computes_the_same():
    inputs, results = np.arange(16, dtype="f4").reshape(1, 4, 4, 1), []
    for module in (_cpuop, again(_cpuop)):
        outputs = np.zeros((1, 2, 2, 1), "f4")
        module.avgpool_forward(inputs, (2, 2), outputs, 0, (2, 2))
        results.append(outputs)
    assert np.array_equal(*results) and results[0].any()
