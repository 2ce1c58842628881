"""The stub says what the extension has, and the source keeps its own rules."""

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import brainstorm_dbuf
from brainstorm_dbuf import _cuda
from conftest import SUBPROCESS_PATH

MODULES = ("brainstorm_dbuf._cuda", "brainstorm_dbuf._cpuop")
STUB = Path(brainstorm_dbuf.__file__).with_name("_cuda.pyi")
SOURCES = Path(__file__).parent.parent / "src"
TREE = ast.parse(STUB.read_text())
INHERITED = {"__new__", "__init__", "__eq__", "__hash__"}
INHERITED |= {"__getitem__", "__setitem__", "__len__"}
ANY_OBJECT = {"__doc__", "__module__", "__new__", "__getattribute__", "__repr__"}


def public(names):
    return {name for name in names if not name.startswith("_")}


def functions(body):
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef)}


def is_property(node):
    return any(getattr(d, "id", None) == "property" for d in node.decorator_list)


def stub_classes():
    return {
        node.name: node
        for node in TREE.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    }


def parameters(node):
    """(name, kind, default as text) of each parameter, self and cls left out."""
    found = []
    arguments = node.args
    positional = arguments.posonlyargs + arguments.args
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    for argument, default in zip(positional, defaults):
        only = argument in arguments.posonlyargs
        kind = "POSITIONAL_ONLY" if only else "POSITIONAL_OR_KEYWORD"
        found.append((argument.arg, kind, default and ast.literal_eval(default)))
    if arguments.vararg:
        found.append((arguments.vararg.arg, "VAR_POSITIONAL", None))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults):
        found.append((argument.arg, "KEYWORD_ONLY", default and ast.literal_eval(default)))
    return [p for p in found if p[0] not in ("self", "cls")]


def signature(function):
    return [
        (p.name, p.kind.name, None if p.default is p.empty else p.default)
        for p in inspect.signature(function).parameters.values()
        if p.name not in ("self", "type")
    ]


def test_the_stub_has_all_names_of_the_module():
    stubbed = set(functions(TREE.body)) | set(stub_classes())
    for node in TREE.body:
        if isinstance(node, ast.AnnAssign):
            stubbed.add(node.target.id)
        if isinstance(node, ast.ImportFrom) and node.module == "errors":
            stubbed.update(alias.asname for alias in node.names)
    assert public(stubbed) == public(vars(_cuda))


@pytest.mark.parametrize("name", sorted(functions(TREE.body)))
def test_functions_have_the_stubs_signature_and_a_docstring(name):
    function = getattr(_cuda, name)
    assert signature(function) == parameters(functions(TREE.body)[name])
    assert re.match(r"[A-Z].*[.]$", function.__doc__.splitlines()[0])


@pytest.mark.parametrize("name", sorted(stub_classes()))
def test_classes_have_the_stubs_attributes(name):
    stubbed = functions(stub_classes()[name].body)
    kind = getattr(_cuda, name)
    assert kind.__doc__
    special = {"__cuda_stream__", "__cuda_array_interface__", "__int__", "__index__"}
    special |= {"__enter__", "__exit__", "__array__", "__dlpack__", "__dlpack_device__"}
    real = {n for n in vars(kind) if not n.startswith("_") or n in special}
    assert real == {n for n in stubbed if n not in INHERITED}
    for attribute, node in stubbed.items():
        if is_property(node):
            assert inspect.isgetsetdescriptor(inspect.getattr_static(kind, attribute))
        elif attribute in ("__new__", "__init__"):
            assert signature(kind) == parameters(node)
        elif attribute not in INHERITED | {"__int__", "__index__"}:
            assert signature(getattr(kind, attribute)) == parameters(node)
            assert getattr(kind, attribute).__doc__


def test_every_type_but_the_handlers_base_is_documented_as_final():
    for name, node in stub_classes().items():
        final = [d.id for d in node.decorator_list]
        is_base = name == "HandlerCore"
        assert final == (["disjoint_base"] if is_base else ["final"])


# ---- Rules on the source text ----


def c_files():
    return sorted([*SOURCES.glob("cuda/*.c"), *SOURCES.glob("handler/*.c")])


def all_files():
    return sorted(path for path in SOURCES.glob("*/*") if path.is_file())


@pytest.mark.skipif(not SOURCES.is_dir(), reason="the C source is not here")
@pytest.mark.parametrize("path", c_files(), ids=lambda path: path.name)
def test_no_python_runs_where_the_gil_is_released(path):
    text = path.read_text()
    regions = re.findall(r"Py_BEGIN_ALLOW_THREADS(.*?)Py_END_ALLOW_THREADS", text, re.S)
    assert text.count("Py_BEGIN_ALLOW_THREADS") == len(regions)
    for region in regions:
        assert not re.search(r"\bPy[A-Z_]|\bPy_|\breturn\b|\bgoto\b|raise_", region), region


@pytest.mark.skipif(not SOURCES.is_dir(), reason="the C source is not here")
@pytest.mark.parametrize("path", all_files(), ids=lambda path: path.name)
def test_the_source_keeps_to_88_columns_and_opens_with_its_design(path):
    text = path.read_text()
    assert text.startswith("/* ")
    for number, line in enumerate(text.splitlines(), 1):
        assert len(line) <= 88, f"{path.name}:{number}"
        assert "\t" not in line and line == line.rstrip(), f"{path.name}:{number}"


@pytest.mark.skipif(not SOURCES.is_dir(), reason="the C source is not here")
def test_the_driver_is_called_through_the_table_only():
    for path in c_files():
        text = re.sub(r'"[^"\n]*"|/\*.*?\*/', "", path.read_text(), flags=re.S)
        assert not re.search(r"\bcu[A-Z]\w+\(", text), path.name


@pytest.mark.timeout(180)
def test_stubtest_finds_no_difference(tmp_path):
    """mypy's own look at the stub beside what the built modules have."""
    pytest.importorskip("mypy.stubtest", reason="mypy is not installed")
    where = str(Path(brainstorm_dbuf.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-m", "mypy.stubtest", "--concise", *MODULES],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": where, "PYTHONPATH": SUBPROCESS_PATH},
    )
    assert done.returncode == 0, done.stdout + done.stderr
