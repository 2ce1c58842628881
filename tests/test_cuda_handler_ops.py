"""CudaHandler's elementwise and matrix operations against NumpyHandler's.

The oracle is NumpyHandler on float32 where IEEE arithmetic leaves one result, and on
float64 where a function or a sum may be rounded differently.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import brainstorm_dbuf as dbuf
import parity
from brainstorm.handlers import NumpyHandler
from conftest import KIND
from layouts import (
    EPS,
    TINY,
    Layout,
    assert_equal_numbers,
    assert_same_bits,
    assert_within,
    buffer_of,
    inside,
    layouts,
    on_one_handler,
    shapes,
    values,
    whole,
)

pytestmark = [pytest.mark.timeout(600)]

finite_scalars = st.sampled_from([0, 1, -1, 2, -0.0, 0.5, 1 / 3, -2.7, 1e-30, 12345.6])
scalars = st.one_of(
    finite_scalars,
    st.sampled_from([np.inf, -np.inf, np.nan, np.float32(0.1), np.int64(3), True]),
)


# ----------------------------------------------------------------- the elementwise ones


class Oracle(parity.Oracle):
    def sigmoid(self, x, y):
        """A NaN stays one, where NumpyHandler leaves what was in y."""
        is_nan = np.isnan(x)
        super().sigmoid(x, y)
        y[is_nan] = np.nan


def fused(x, y, added):
    """One rounding more or less of x * y + added."""
    return 2 * EPS * (np.abs(x * y) + np.abs(added)) + 2 * TINY


def few_ulps(count):
    return lambda expected, **arrays: count * EPS * np.abs(expected) + count * TINY


@dataclass(frozen=True)
class Op:
    """An operation on arrays of one shape; `v` may be a row or a column of a matrix.

    `tolerance`, of the expected array and of the arrays and scalars before by name
    (as float64), says how far from the float64 oracle a result may be; without it the
    float32 oracle's result is the only right one.
    """

    inputs: tuple
    out: str
    numbers: dict = field(default_factory=dict)  # name: strategy
    in_place: tuple = ()  # inputs that may be `out` itself
    tolerance: object = None
    extreme: bool = True  # the largest numbers too
    signed_zeros: bool = True


EXACT_MV = Op(("m", "v"), "out", in_place=("m",))
EXACT_TT = Op(("a", "b"), "out", in_place=("a", "b"))
EXACT_T = Op(("a",), "out", in_place=("a",))
DERIVATIVE = Op(("x", "y", "dy"), "dx", in_place=("x", "y", "dy"))

OPS = {
    "abs_t": EXACT_T,
    "add_into_if": Op(("a", "cond"), "out", in_place=("a", "cond")),
    "add_mv": EXACT_MV,
    "add_st": Op(("t",), "out", {"s": scalars}, ("t",)),
    "add_tt": EXACT_TT,
    "clip_t": Op(
        ("a",),
        "out",
        {"a_min": finite_scalars, "a_max": finite_scalars},
        ("a",),
        signed_zeros=False,
    ),
    "copy_to": Op(("src",), "dest", in_place=("src",)),
    "copy_to_if": Op(("src", "cond"), "dest", in_place=("src", "cond")),
    "divide_mv": EXACT_MV,
    "divide_tt": EXACT_TT,
    "el": Op(("x",), "y", in_place=("x",), tolerance=few_ulps(4)),
    "el_deriv": DERIVATIVE,
    "fill": Op((), "mem", {"val": scalars}),
    "fill_if": Op(("cond",), "mem", {"val": scalars}, ("cond",)),
    "log_t": Op(("a",), "out", in_place=("a",), tolerance=few_ulps(4)),
    "modulo_tt": EXACT_TT,
    "mult_add_mv": Op(
        ("m", "v"),
        "out",
        in_place=("m",),
        tolerance=lambda expected, m, v, out: fused(m, v, out),
        extreme=False,
    ),
    "mult_add_st": Op(
        ("t",),
        "out",
        {"s": scalars},
        ("t",),
        tolerance=lambda expected, s, t, out: fused(s, t, out),
        extreme=False,
    ),
    "mult_add_tt": Op(
        ("a", "b"),
        "out",
        in_place=("a", "b"),
        tolerance=lambda expected, a, b, out: fused(a, b, out),
        extreme=False,
    ),
    "mult_mv": EXACT_MV,
    "mult_st": Op(("t",), "out", {"s": scalars}, ("t",)),
    "mult_tt": EXACT_TT,
    "rel": Op(("x",), "y", in_place=("x",)),
    "rel_deriv": DERIVATIVE,
    "sigmoid": Op(("x",), "y", in_place=("x",), tolerance=few_ulps(4)),
    "sigmoid_deriv": DERIVATIVE,
    "sign_t": EXACT_T,
    "sqrt_t": EXACT_T,
    "subtract_mv": EXACT_MV,
    "subtract_tt": EXACT_TT,
    "tanh": Op(("x",), "y", in_place=("x",), tolerance=few_ulps(4)),
    "tanh_deriv": Op(
        ("x", "y", "dy"),
        "dx",
        in_place=("x", "y", "dy"),
        tolerance=lambda expected, x, y, dy, dx: (
            4 * EPS * np.abs(dy) * (y * y + 1) + 4 * TINY
        ),
        extreme=False,
    ),
}


@dataclass
class Call:
    """One call of an operation: the arrays by argument, where they lie, the numbers.

    Arguments that are one array have the same Layout object and values.
    """

    name: str
    op: Op
    arrays: dict
    places: dict
    numbers: dict

    def distinct(self):
        """Return {id of a layout: the first argument that it is for}."""
        first = {}
        for argument, layout in self.places.items():
            first.setdefault(id(layout), argument)
        return first

    def on(self, handler, to_side, dtype=np.float32):
        """Make the call; return the buffers after it, by argument."""
        buffers = {}
        for key, argument in self.distinct().items():
            layout = self.places[argument]
            buffer = buffer_of(layout, self.arrays[argument])
            buffers[key] = to_side(buffer.astype(dtype, copy=False))
        views = {
            key: self.places[a].cut(buffers[key]) for key, a in self.distinct().items()
        }
        arguments = {a: views[id(layout)] for a, layout in self.places.items()}
        with np.errstate(all="ignore"):
            result = getattr(handler, self.name)(**arguments, **self.numbers)
        assert result is None
        return {a: buffers[id(layout)] for a, layout in self.places.items()}


def shape_of_v(draw, shape):
    rows, columns = shape
    return draw(st.sampled_from([(1, columns), (rows, 1), (1, 1), (rows, columns)]))


@st.composite
def calls(draw, name):
    op = OPS[name]
    shape = draw(shapes)
    if "v" in op.inputs:
        if len(shape) == 1:
            shape = (1, *shape) if draw(st.booleans()) else (*shape, 1)
        shape = (int(np.prod(shape[:-1])), shape[-1])
    arrays, places = {}, {}
    for argument in (op.out, *op.inputs):
        target = shape_of_v(draw, shape) if argument == "v" else shape
        arrays[argument] = draw(values(target, op.extreme))
        places[argument] = draw(layouts(target))
    if "cond" in op.inputs:
        zero = draw(values(shape)) > 0.5
        arrays["cond"] = np.where(zero, 0, arrays["cond"]).astype(np.float32)
    if op.in_place and draw(st.booleans()):
        some = st.lists(st.sampled_from(op.in_place), unique=True, max_size=2)
        for argument in draw(some):
            arrays[argument], places[argument] = arrays[op.out], places[op.out]
    numbers = {n: draw(strategy) for n, strategy in op.numbers.items()}
    return Call(name, op, arrays, places, numbers)


def check(call, handler):
    op = call.op
    with np.errstate(all="ignore"):
        dtype = np.float32 if op.tolerance is None else np.float64
        expected = call.on(Oracle(dtype), lambda b: b.copy(), dtype)
        before = call.on(NoOp(), lambda b: b.copy())
        actual = {
            argument: handler.get_numpy_copy(buffer)
            for argument, buffer in call.on(handler, handler.create_from_numpy).items()
        }
    written = call.places[op.out]
    for argument, layout in call.places.items():
        outside = np.ones(layout.length, bool)
        if layout is written:
            outside = ~inside(layout)
        assert_same_bits(actual[argument][outside], before[argument][outside], argument)
    result = written.cut(actual[op.out])
    should_be = written.cut(expected[op.out])
    if op.tolerance is None:
        assert_equal_numbers(result, should_be, op.signed_zeros)
    else:
        wide = {n: v.astype(np.float64) for n, v in call.arrays.items()}
        wide.update({n: float(v) for n, v in call.numbers.items()})
        with np.errstate(all="ignore"):
            tolerance = op.tolerance(expected=should_be, **wide)
            should_be = np.where(
                np.abs(should_be) > np.finfo(np.float32).max,
                np.copysign(np.inf, should_be),
                should_be,
            )
        assert_within(result, should_be, tolerance)


class NoOp:
    """Every operation does nothing: the buffers as they were."""

    def __getattr__(self, name):
        return lambda **arguments: None


@pytest.mark.parametrize("name", OPS)
def test_an_elementwise_operation_is_numpys(name, cuda):
    @on_one_handler
    @given(calls(name))
    def run(call):
        check(call, cuda)

    run()


def values_for(name, shape, seed=0):
    """Return plain arguments for an operation: the arrays by name, and the numbers."""
    rnd = np.random.default_rng(seed)
    op = OPS[name]
    arrays = {
        a: rnd.uniform(0.1, 2, (1, shape[-1]) if a == "v" else shape).astype(np.float32)
        for a in (*op.inputs, op.out)
    }
    return arrays, {n: 0.5 + k for k, n in enumerate(op.numbers)}


@pytest.mark.parametrize("name", OPS)
def test_slices_of_one_hub_side_by_side_do_not_overlap(name, cuda):
    """Sources of one hub lie next to each other, steps of one array after another."""
    op = OPS[name]
    if "v" in op.inputs:
        count, shape = 3, (4, 3)
    else:
        count, shape = 1 + len(op.inputs), (2, 4, 3)
    for axis in range(len(shape)) if count > 1 else ():
        outer = list(shape)
        outer[axis] *= count
        places = {}
        for k, argument in enumerate((*op.inputs, op.out)):
            length = 1 if argument == "v" and axis == 0 else shape[axis]
            before = [0] * len(shape)
            before[axis] = k * shape[axis]
            size = list(shape)
            size[axis] = length
            after = [o - b - s for o, b, s in zip(outer, before, size)]
            places[argument] = Layout(tuple(size), tuple(before), tuple(after))
        rnd = np.random.default_rng(axis)
        hub = rnd.uniform(0.1, 2, places[op.out].length).astype(np.float32)
        numbers = {n: 0.5 + k for k, n in enumerate(op.numbers)}
        expected, on_device = hub.copy(), cuda.create_from_numpy(hub)
        for handler, buffer in ((Oracle(np.float32), expected), (cuda, on_device)):
            views = {a: layout.cut(buffer) for a, layout in places.items()}
            getattr(handler, name)(**views, **numbers)
        assert_within(cuda.get_numpy_copy(on_device), expected, 1e-5)


@pytest.mark.parametrize("name", OPS)
def test_an_output_that_lies_partly_over_an_input_is_refused(name, cuda):
    op = OPS[name]
    if name == "clip_t":
        numbers = {"a_min": 0, "a_max": 1}
    else:
        numbers = {n: 0.5 for n in op.numbers}
    for argument in op.inputs:
        if argument == "x" and op.out == "dx":
            continue  # it is not read
        for pieces in (
            lambda hub: (hub[0:3], hub[1:4]),
            lambda hub: (hub[1:4], hub[0:3]),
            lambda hub: (hub[:3, 0:4], hub[:3, 1:5]),
            lambda hub: (hub[0:3].reshape((21,))[:12].reshape((3, 4)), hub[0:3, 0:4]),
        ):
            hub = cuda.create_from_numpy(np.ones((5, 7), np.float32))
            out, overlapping = pieces(hub)
            arrays = {a: cuda.ones(out.shape) for a in op.inputs}
            arrays[argument] = overlapping
            with pytest.raises(ValueError, match=f"^{name}: ") as caught:
                getattr(cuda, name)(**arrays, **{op.out: out}, **numbers)
            assert re.search(rf"\b{argument}\b", str(caught.value))
            assert re.search(rf"\b{op.out}\b", str(caught.value))
            assert (hub.get() == 1).all()


def test_a_row_beside_a_slice_of_all_rows_does_not_overlap_it(cuda):
    hub = np.arange(24, dtype=np.float32).reshape(4, 6)
    device = cuda.create_from_numpy(hub)
    cuda.dot_mm(cuda.ones((1, 4)), device[:, :3], device[1:2, 3:])
    hub[1, 3:] = hub[:, :3].sum(axis=0)
    np.testing.assert_array_equal(device.get(), hub)


@on_one_handler
@given(data=st.data())
def test_slices_of_one_hub_are_copied_right_or_refused_for_overlapping(cuda, data):
    """Ranges of steps and features, as brainstorm cuts them."""
    t, b, f = (data.draw(st.integers(1, 4)) for _ in "tbf")
    steps, features = t + data.draw(st.integers(0, 4)), f + data.draw(st.integers(0, 5))
    host = np.arange(steps * b * features, dtype=np.float32).reshape(steps, b, features)
    device = cuda.create_from_numpy(host)
    cuts = []
    for _ in range(2):
        at_t = data.draw(st.integers(0, steps - t))
        at_f = data.draw(st.integers(0, features - f))
        cuts.append(np.s_[at_t : at_t + t, :, at_f : at_f + f])
    shape = (t * b, f) if data.draw(st.booleans()) else (t, b, f)

    def pieces(hub):
        return (hub[cut].reshape(shape) for cut in cuts)

    source, target = (host[cut] for cut in cuts)
    same = cuts[0] == cuts[1]
    if np.shares_memory(source, target) and not same:
        with pytest.raises(ValueError, match="^copy_to: "):
            cuda.copy_to(*pieces(device))
    else:
        cuda.copy_to(*pieces(device))
        target[...] = source.copy()
    np.testing.assert_array_equal(device.get(), host)


MATCHING = ["add_tt", "mult_tt", "divide_tt", "subtract_tt", "add_mv", "mult_mv"]
MATCHING += ["divide_mv", "subtract_mv", "mult_add_tt", "mult_add_mv", "copy_to"]
MATCHING += ["abs_t", "mult_st", "sqrt_t", "tanh", "add_into_if", "copy_to_if"]
few = st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple)


@on_one_handler
@given(name=st.sampled_from(MATCHING), data=st.data())
def test_shapes_that_differ_are_as_in_numpy_or_refused(cuda, name, data):
    op = OPS[name]
    arrays = {a: np.full(data.draw(few), 2, np.float32) for a in (*op.inputs, op.out)}
    numbers = {n: 0.5 for n in op.numbers}
    device = {a: cuda.create_from_numpy(array) for a, array in arrays.items()}
    expected = {a: array.copy() for a, array in arrays.items()}
    try:
        with np.errstate(all="ignore"):
            getattr(Oracle(np.float32), name)(**expected, **numbers)
        allowed = True
    except (ValueError, IndexError, TypeError, AssertionError):
        allowed = False
    try:
        getattr(cuda, name)(**device, **numbers)
    except ValueError as error:
        assert str(error).startswith(f"{name}: ")
        assert len({array.shape for array in arrays.values()}) > 1
        same = arrays
    else:
        assert allowed, {a: array.shape for a, array in arrays.items()}
        same = expected
    for a, array in device.items():
        np.testing.assert_array_equal(array.get(), same[a])


@pytest.mark.parametrize("name", OPS)
def test_an_array_without_axes_is_one_element(name, cuda):
    if "v" in OPS[name].inputs:
        return
    arrays, numbers = values_for(name, (1,))
    device = {a: cuda.create_from_numpy(v) for a, v in arrays.items()}
    scalar = {a: v.reshape(()) for a, v in device.items()}
    getattr(cuda, name)(**scalar, **numbers)
    getattr(Oracle(np.float32), name)(**arrays, **numbers)
    assert_within(device[OPS[name].out].get(), arrays[OPS[name].out], 1e-6)


def test_more_elements_than_all_threads_hold_at_once(cuda):
    """The loops over the grid come round again."""
    n = ((1 if KIND == "fake" else 5) << 20) + 5
    a = np.arange(n, dtype=np.float32)
    for view in (lambda x: x, lambda x: x[:-1].reshape((4, -1))[:, 1:]):
        device = cuda.create_from_numpy(a)
        cuda.mult_st(2, view(device), view(device))
        expected = a.copy()
        view(expected)[...] *= 2
        np.testing.assert_array_equal(device.get(), expected)


# ---------------------------------------------------------------------------- products

sides = st.one_of(st.integers(0, 9), st.sampled_from([16, 17, 31, 33, 64, 100, 129]))


@st.composite
def products(draw):
    m, k, n = draw(sides), draw(sides), draw(sides)
    transa, transb = draw(st.booleans()), draw(st.booleans())
    named = {
        "a": (k, m) if transa else (m, k),
        "b": (n, k) if transb else (k, n),
        "out": (m, n),
    }
    arrays = {a: draw(values(shape)) for a, shape in named.items()}
    if draw(st.booleans()):
        arrays = {a: np.nan_to_num(v, posinf=1, neginf=2) for a, v in arrays.items()}
    places = {a: draw(layouts(shape)) for a, shape in named.items()}
    if named["a"] == named["b"] and draw(st.booleans()):
        arrays["b"], places["b"] = arrays["a"], places["a"]
    return Call(
        draw(st.sampled_from(["dot_mm", "dot_add_mm"])),
        None,
        arrays,
        places,
        {"transa": transa, "transb": transb},
    )


def check_product(call, handler, precision=EPS):
    before = call.on(NoOp(), lambda b: b.copy())
    expected = call.on(NumpyHandler(np.float64), lambda b: b.copy(), np.float64)
    actual = {
        a: handler.get_numpy_copy(buffer)
        for a, buffer in call.on(handler, handler.create_from_numpy).items()
    }
    out = call.places["out"]
    for a, layout in call.places.items():
        outside = ~inside(layout) if layout is out else np.ones(layout.length, bool)
        assert_same_bits(actual[a][outside], before[a][outside], a)
    a, b, c = (np.abs(call.arrays[n].astype(np.float64)) for n in ("a", "b", "out"))
    a = a.T if call.numbers["transa"] else a
    b = b.T if call.numbers["transb"] else b
    added = c if call.name == "dot_add_mm" else 0
    with np.errstate(all="ignore"):
        tolerance = precision * (a.shape[1] + 4) * (a @ b + added) + TINY
    assert_within(out.cut(actual["out"]), out.cut(expected["out"]), tolerance)


@on_one_handler
@given(call=products())
def test_a_product_is_numpys(cuda, call):
    with np.errstate(all="ignore"):
        check_product(call, cuda)


def test_a_product_does_not_read_what_it_overwrites(cuda):
    out = cuda.create_from_numpy(np.full((3, 2), np.nan))
    cuda.dot_mm(cuda.ones((3, 4)), cuda.ones((4, 2)), out)
    assert (out.get() == 4).all()
    cuda.fill(out, np.inf)
    cuda.dot_mm(cuda.ones((3, 0)), cuda.ones((0, 2)), out)
    assert (out.get() == 0).all()
    cuda.dot_add_mm(cuda.ones((3, 0)), cuda.ones((0, 2)), out)
    assert (out.get() == 0).all()


def test_tf32_is_an_option_and_its_products_are_near(cuda):
    rough = dbuf.CudaHandler(tf32=True)
    assert not cuda.tf32 and rough.tf32
    rnd = np.random.default_rng(0)
    for transa in (False, True):
        for transb in (False, True):
            named = {
                "a": (40, 60) if transa else (60, 40),
                "b": (50, 40) if transb else (40, 50),
                "out": (60, 50),
            }
            call = Call(
                "dot_mm",
                None,
                {
                    a: rnd.standard_normal(s).astype(np.float32)
                    for a, s in named.items()
                },
                {a: whole(s) for a, s in named.items()},
                {"transa": transa, "transb": transb},
            )
            check_product(call, rough, precision=2**-11)
            check_product(call, cuda)


def test_a_product_with_sources_of_one_hub(cuda):
    """A sink's input and a layer's output may be slices of one hub."""
    rnd = np.random.default_rng(0)
    hub = rnd.standard_normal((6, 9)).astype(np.float32)
    w = rnd.standard_normal((4, 5)).astype(np.float32)
    device = cuda.create_from_numpy(hub)
    cuda.dot_mm(device[:, :5], cuda.create_from_numpy(w), device[:, 5:], transb=True)
    np.testing.assert_allclose(device.get()[:, 5:], hub[:, :5] @ w.T, rtol=1e-5)
    assert_same_bits(device.get()[:, :5].copy(), hub[:, :5].copy())


@pytest.mark.parametrize("name", ["dot_mm", "dot_add_mm"])
def test_a_product_over_its_own_factor_is_right_or_refused(name, cuda):
    rnd = np.random.default_rng(0)
    a, b = rnd.standard_normal((2, 5, 5)).astype(np.float32)
    for which in ("a", "b"):
        arrays = {"a": a.copy(), "b": b.copy()}
        arrays["out"] = arrays[which]
        device = {n: cuda.create_from_numpy(v) for n, v in arrays.items()}
        device["out"] = device[which]
        try:
            getattr(cuda, name)(**device)
        except ValueError as error:
            assert str(error).startswith(f"{name}: ") and which in str(error)
        else:
            getattr(NumpyHandler(np.float32), name)(**arrays)
            np.testing.assert_allclose(device["out"].get(), arrays["out"], rtol=1e-5)
        hub = cuda.ones((6, 5))
        device = {"a": cuda.ones((5, 5)), "b": cuda.ones((5, 5)), "out": hub[1:]}
        device[which] = hub[:5]
        with pytest.raises(ValueError, match=f"^{name}: .*out.*"):
            getattr(cuda, name)(**device)


PRODUCT_SHAPES = {  # a, b, out, transa, transb; the shapes that do not match
    "inner": ((3, 4), (5, 2), (3, 2), False, False),
    "inner, a turned": ((3, 4), (4, 2), (4, 2), True, False),
    "inner, b turned": ((3, 4), (4, 2), (3, 4), False, True),
    "rows of out": ((3, 4), (4, 2), (4, 2), False, False),
    "columns of out": ((3, 4), (4, 2), (3, 4), False, False),
    "a has three axes": ((3, 4, 1), (4, 2), (3, 2), False, False),
    "b has one axis": ((3, 4), (4,), (3, 1), False, False),
    "out has three axes": ((3, 4), (4, 2), (3, 2, 1), False, False),
}


@pytest.mark.parametrize("name", ["dot_mm", "dot_add_mm"])
@pytest.mark.parametrize("wrong", PRODUCT_SHAPES)
def test_factors_that_do_not_match_are_refused(name, wrong, cuda):
    a, b, out, transa, transb = PRODUCT_SHAPES[wrong]
    arrays = [cuda.ones(shape) for shape in (a, b, out)]
    with pytest.raises(ValueError, match=rf"^{name}: .*\b(a|b|out)\b") as caught:
        getattr(cuda, name)(*arrays, transa=transa, transb=transb)
    assert any(str(shape) in str(caught.value) for shape in (a, b, out))
    assert (arrays[2].get() == 1).all()


# --------------------------------------------------------- to and from the host, memory


SOURCES = {
    "float64": lambda shape: np.arange(np.prod(shape), dtype=float).reshape(shape) / 3,
    "int64": lambda shape: np.arange(np.prod(shape)).reshape(shape) - 5,
    "bool": lambda shape: np.arange(np.prod(shape)).reshape(shape) % 3 == 0,
    "uint8": lambda shape: np.arange(np.prod(shape)).reshape(shape).astype(np.uint8),
    "float16": lambda shape: np.ones(shape, np.float16) * np.float16(0.1),
    "Fortran order": lambda shape: np.asfortranarray(
        np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    ),
    "transposed": lambda shape: (
        np.arange(np.prod(shape), dtype=np.float32).reshape(shape[::-1]).T
    ),
    "every second": lambda shape: np.arange(2.0 * np.prod(shape)).reshape(
        *shape[:-1], 2 * shape[-1]
    )[..., ::2],
    "backwards": lambda shape: np.arange(np.prod(shape), dtype=np.float32).reshape(
        shape
    )[::-1],
    "broadcast": lambda shape: np.broadcast_to(np.float32(7), shape),
    "big-endian": lambda shape: np.full(shape, 1.5, ">f4"),
    "read-only": lambda shape: np.frombuffer(
        np.ones(shape, np.float32).tobytes(), np.float32
    ).reshape(shape),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("shape", [(7,), (2, 3), (3, 1, 5), (0, 4), (2, 3, 4, 5)])
def test_any_numpy_array_comes_to_the_device(source, shape, cuda):
    array = SOURCES[source](shape)
    made = cuda.create_from_numpy(array)
    assert type(made) is cuda.array_type and made.shape == shape
    back = cuda.get_numpy_copy(made)
    assert back.dtype == np.float32 and back.flags.c_contiguous and back.flags.owndata
    np.testing.assert_array_equal(back, array.astype(np.float32))
    hub = cuda.zeros((*shape[:-1], shape[-1] + 3))
    cuda.set_from_numpy(hub[..., 1:-2], array)
    expected = np.zeros(hub.shape, np.float32)
    expected[..., 1:-2] = array
    np.testing.assert_array_equal(cuda.get_numpy_copy(hub), expected)


@on_one_handler
@given(data=st.data(), shape=shapes)
def test_a_placed_array_comes_to_the_host_and_back(cuda, data, shape):
    layout = data.draw(layouts(shape))
    first, second = data.draw(values(shape, True)), data.draw(values(shape, True))
    buffer = buffer_of(layout, first)
    device = cuda.create_from_numpy(buffer)
    view = layout.cut(device)
    assert_same_bits(cuda.get_numpy_copy(view), first)
    cuda.set_from_numpy(view, second)
    layout.cut(buffer)[...] = second
    assert_same_bits(cuda.get_numpy_copy(device), buffer)


def test_a_copy_for_the_host_is_not_the_device_array(cuda):
    array = cuda.ones((2, 3))
    copy = cuda.get_numpy_copy(array)
    copy[...] = 5
    assert (cuda.get_numpy_copy(array) == 1).all()
    source = np.zeros((2, 3), np.float32)
    cuda.set_from_numpy(array, source)
    source[...] = 7
    assert (cuda.get_numpy_copy(array) == 0).all()


@pytest.mark.parametrize("given_shape", [(2, 4), (3,), (6,), (3, 2), (1, 2, 3), ()])
def test_set_from_numpy_wants_the_right_shape(given_shape, cuda):
    """What NumPy would broadcast may be broadcast, but never anything else."""
    mem, arr = cuda.ones((2, 3)), np.full(given_shape, 2, np.float32)
    expected = np.ones((2, 3), np.float32)
    try:
        expected[:] = arr
    except ValueError:
        with pytest.raises(ValueError, match="set_from_numpy") as caught:
            cuda.set_from_numpy(mem, arr)
        assert "(2, 3)" in str(caught.value) and str(given_shape) in str(caught.value)
    else:
        try:
            cuda.set_from_numpy(mem, arr)
        except ValueError as error:
            assert str(given_shape) in str(error)
            return
    np.testing.assert_array_equal(cuda.get_numpy_copy(mem), expected)


@pytest.mark.parametrize("shape", [(), (1,), (3, 4), (0,), (2, 0, 3), (2, 1, 3, 1, 5)])
def test_new_arrays_have_their_values(shape, cuda):
    for name, value in (("zeros", 0), ("ones", 1), ("allocate", 0)):
        # What was in the memory before must not be seen.
        dirty = cuda.create_from_numpy(np.full(shape, 9.0))
        del dirty
        array = getattr(cuda, name)(shape)
        assert array.shape == shape and array.dtype == np.float32
        np.testing.assert_array_equal(cuda.get_numpy_copy(array), np.full(shape, value))


def test_new_arrays_take_lists_numpy_integers_and_one_number(cuda):
    for shape in ([2, 3], (np.int64(2), np.int32(3))):
        for name in ("zeros", "ones", "allocate"):
            assert getattr(cuda, name)(shape).shape == (2, 3)
    assert cuda.zeros(4).shape == (4,)
    assert cuda.zeros(shape=(4,)).shape == cuda.ones(shape=4).shape == (4,)


@pytest.mark.parametrize("name", ["zeros", "ones", "allocate"])
def test_impossible_shapes_are_refused(name, cuda):
    make = getattr(cuda, name)
    for shape in ((-1,), (2, -3), (1 << 40, 1 << 40), (1,) * 9):
        with pytest.raises((ValueError, MemoryError)):
            make(shape)
    for shape in ("ab", 1.5, (1.5,), None, ("a",)):
        with pytest.raises(TypeError):
            make(shape)


@on_one_handler
@given(data=st.data(), shape=shapes)
def test_is_fully_finite_looks_at_the_array_and_at_nothing_else(cuda, data, shape):
    layout = data.draw(layouts(shape))
    array = np.nan_to_num(data.draw(values(shape, True)))
    device = cuda.create_from_numpy(buffer_of(layout, array))  # NaNs around it
    answer = cuda.is_fully_finite(layout.cut(device))
    assert answer in (True, False) and bool(answer)
    if array.size:
        where = data.draw(st.integers(0, array.size - 1))
        array.flat[where] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
        device = cuda.create_from_numpy(buffer_of(layout, array))
        assert not cuda.is_fully_finite(layout.cut(device))


# ------------------------------------------------------------------------------- errors


def arguments_of(name, cuda, shape=(5, 7)):
    """Return right arguments for an operation, (arrays, numbers)."""
    if name in ("dot_mm", "dot_add_mm"):
        return {a: cuda.ones((5, 5)) for a in ("a", "b", "out")}, {}
    arrays, numbers = values_for(name, shape)
    return {a: cuda.create_from_numpy(v) for a, v in arrays.items()}, numbers


ALL = [*OPS, "dot_mm", "dot_add_mm"]


@pytest.mark.parametrize("name", ALL)
def test_what_is_no_device_array_is_refused_by_name(name, cuda):
    arrays, numbers = arguments_of(name, cuda)
    for argument in arrays:
        if argument == "x" and len(arrays) == 4:
            continue  # not read: anything will do
        for wrong, kind in (
            (np.ones((5, 7), np.float32), "numpy.ndarray"),
            (1.0, "float"),
            (None, "NoneType"),
            ([1.0], "list"),
        ):
            with pytest.raises(TypeError) as caught:
                getattr(cuda, name)(**{**arrays, argument: wrong}, **numbers)
            message = f"{name}: {argument} must be a DeviceArray, got {kind}"
            assert str(caught.value).startswith(message)


@pytest.mark.parametrize("name", ALL)
def test_handlers_of_one_device_take_each_others_arrays(name, cuda):
    arrays, numbers = arguments_of(name, cuda)
    other = dbuf.CudaHandler(seed=7)
    theirs = {n: other.create_from_numpy(a.get()) for n, a in arrays.items()}
    getattr(cuda, name)(**arrays, **numbers)
    getattr(cuda, name)(**theirs, **numbers)
    for argument, array in arrays.items():
        np.testing.assert_array_equal(theirs[argument].get(), array.get())


@pytest.mark.parametrize("name", [n for n in OPS if len(OPS[n].inputs) > 0])
def test_a_wrong_shape_names_the_operation_the_argument_and_the_shape(name, cuda):
    right, numbers = arguments_of(name, cuda)
    for argument in right:
        if argument == "x" and len(right) == 4:
            continue
        for shape in ((5, 8), (4, 7), (7, 5), (5, 8, 7), (35,)):
            arrays = {**right, argument: cuda.ones(shape)}
            before = arrays[OPS[name].out].get()
            with pytest.raises(ValueError, match=f"^{name}: ") as caught:
                getattr(cuda, name)(**arrays, **numbers)
            message = str(caught.value)
            assert str(shape) in message
            assert any(re.search(rf"\b{a}\b", message[len(name) :]) for a in right)
            np.testing.assert_array_equal(arrays[OPS[name].out].get(), before)


@pytest.mark.parametrize("name", ALL)
def test_a_number_that_is_none_is_refused_by_name(name, cuda):
    arrays, numbers = arguments_of(name, cuda)
    for argument in numbers:
        for wrong in ("1", None, [1], 1j):
            with pytest.raises(TypeError, match=rf"^{name}: .*\b{argument}\b"):
                getattr(cuda, name)(**arrays, **{**numbers, argument: wrong})


@pytest.mark.parametrize("name", ALL)
def test_arguments_are_given_as_to_any_python_function(name, cuda):
    arrays, numbers = arguments_of(name, cuda)
    given_arguments = {**arrays, **numbers}
    names = [n for n in argument_names(name) if n in given_arguments]
    assert sorted(names) == sorted(given_arguments)
    operation = getattr(cuda, name)
    for count in range(len(names) + 1):  # so many by position, the rest by name
        rest = {n: given_arguments[n] for n in names[count:]}
        operation(*(given_arguments[n] for n in names[:count]), **rest)
    for missing in names:
        rest = {n: v for n, v in given_arguments.items() if n != missing}
        with pytest.raises(TypeError, match=rf"{name}.*{missing}"):
            operation(**rest)
    with pytest.raises(TypeError, match=f"{name}.*unknown"):
        operation(**given_arguments, unknown=1)
    with pytest.raises(TypeError, match=f"{name}.*{names[0]}"):
        operation(given_arguments[names[0]], **given_arguments)
    with pytest.raises(TypeError, match=name):
        operation(*(given_arguments[n] for n in names), 0, 0, 0, 0)


def argument_names(name):
    return list(inspect.signature(getattr(Oracle, name)).parameters)[1:]
