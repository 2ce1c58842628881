"""CudaHandler's sums, operations on rows and random fills against NumpyHandler's."""

from __future__ import annotations

import gc
import inspect
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import brainstorm_dbuf as dbuf
from brainstorm.handlers import NumpyHandler
from conftest import KIND, live_objects
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

NUMPY = NumpyHandler(np.float32)
EXACT = NumpyHandler(np.float64)


@dataclass
class Placed:
    """An array argument: its values and where it lies in its buffer."""

    values: np.ndarray = field(repr=False)
    layout: Layout


@st.composite
def placed(draw, shape, elements=values):
    return Placed(draw(elements(shape)), draw(layouts(shape)))


def plain(array):
    array = np.asarray(array, np.float32)
    return Placed(array, whole(array.shape))


def run(handler, name, arguments, to_side=np.copy, dtype=np.float32):
    """Call an operation; return the buffers after it, by argument.

    Arguments that are one Placed object are one array.
    """
    buffers, views = {}, {}
    for argument in arguments.values():
        if isinstance(argument, Placed) and id(argument) not in buffers:
            buffer = to_side(
                buffer_of(argument.layout, argument.values).astype(dtype, copy=False)
            )
            buffers[id(argument)] = buffer
            views[id(argument)] = argument.layout.cut(buffer)
    with np.errstate(all="ignore"):
        getattr(handler, name)(**{n: views.get(id(a), a) for n, a in arguments.items()})
    return {n: buffers[id(a)] for n, a in arguments.items() if id(a) in buffers}


def outputs_of(cuda, name, arguments, written):
    """Run on the device; return the written arrays by name.

    Everything else, what lies around them included, must be as before.
    """
    after = {
        n: cuda.get_numpy_copy(buffer)
        for n, buffer in run(cuda, name, arguments, cuda.create_from_numpy).items()
    }
    changed = [id(arguments[n]) for n in written]
    for n, buffer in after.items():
        layout, before = arguments[n].layout, arguments[n].values
        outside = np.ones(layout.length, bool)
        if id(arguments[n]) in changed:
            outside = ~inside(layout)
        assert_same_bits(buffer[outside], buffer_of(layout, before)[outside], n)
    return {n: arguments[n].layout.cut(after[n]) for n in written}


def expected_of(handler, name, arguments, written, dtype=np.float32):
    """Run on arrays of their own: NumPy's reshape copies many a slice, and what
    NumpyHandler writes into the copy is lost."""
    own = {id(a): plain(a.values) for a in arguments.values() if isinstance(a, Placed)}
    arguments = {n: own.get(id(a), a) for n, a in arguments.items()}
    after = run(handler, name, arguments, dtype=dtype)
    return {n: arguments[n].layout.cut(after[n]) for n in written}


def check_exact(cuda, name, arguments, written, signed_zeros=True):
    actual = outputs_of(cuda, name, arguments, written)
    expected = expected_of(NUMPY, name, arguments, written)
    for n in written:
        assert_equal_numbers(actual[n], expected[n], signed_zeros)


# ------------------------------------------------------------------------------- sum_t


def sum_shape(shape, axis, keep):
    if axis is None:
        return ()
    axis %= len(shape)
    return shape[:axis] + ((1,) if keep else ()) + shape[axis + 1 :]


def check_sum(cuda, arguments):
    a, axis = arguments["a"].values, arguments["axis"]
    actual = outputs_of(cuda, "sum_t", arguments, ["out"])["out"]
    expected = expected_of(EXACT, "sum_t", arguments, ["out"], np.float64)["out"]
    with np.errstate(all="ignore"):
        arguments = {**arguments, "a": plain(np.abs(a))}
        size = expected_of(EXACT, "sum_t", arguments, ["out"], np.float64)["out"]
    count = a.size if axis is None else a.shape[axis]
    assert_within(actual, expected, (4 + np.log2(count + 1)) * EPS * size)


@st.composite
def sums(draw):
    shape = draw(shapes)
    axis = draw(st.sampled_from([None, *range(-len(shape), len(shape))]))
    out = sum_shape(shape, axis, draw(st.booleans()))
    return {"a": draw(placed(shape)), "axis": axis, "out": draw(placed(out))}


def test_a_sum_over_an_axis_is_numpys(cuda):
    @on_one_handler
    @given(sums())
    def run(arguments):
        check_sum(cuda, arguments)

    run()


LARGE = [
    ((100, 1200), 0),
    ((100, 1203), 0),
    ((3000, 64), 0),
    ((2, 3000), 0),
    ((7, 1001), 0),
    ((20000, 4), 0),
    ((20000, 1), 0),
    ((5000, 3), 0),
    ((5, 3000, 12), 1),
    ((3, 40, 700), 1),
    ((3, 70001), 1),
    ((2, 70000), 1),
    ((700, 784), 1),
    ((3000, 10), 1),
    ((3000, 16), 1),
    ((130000,), 0),
    ((130001,), None),
    ((40, 50, 61), None),
]
if KIND == "real":
    LARGE += [
        ((10000, 4000), 0),
        ((102400, 32), 0),
        ((102400, 33), 0),
        ((1 << 24,), None),
        ((3, (1 << 22) + 1), 1),
        ((1 << 20, 7), 1),
        ((70000, 3, 5), 1),
    ]


@pytest.mark.parametrize("place", ["whole", "shifted", "features", "aligned features"])
@pytest.mark.parametrize("shape, axis", LARGE, ids=str)
def test_large_sums_are_exact_in_each_layout(shape, axis, place, cuda):
    none = (0,) * (len(shape) - 1)
    around = {"features": (3, 2), "aligned features": (8, 4 - shape[-1] % 4)}
    before, after = around.get(place, (0, 0))
    layout = Layout(shape, (*none, before), (*none, after), int(place == "shifted"))
    rnd = np.random.default_rng(0)
    a = Placed(rnd.standard_normal(shape).astype(np.float32), layout)
    out = plain(np.full(sum_shape(shape, axis, False), 7))
    check_sum(cuda, {"a": a, "axis": axis, "out": out})


@pytest.mark.parametrize("strides", [(1, 64), (2, 128), (64, 2), (3, 0)])
@pytest.mark.parametrize("axis", [0, 1, None])
def test_a_matrix_of_any_strides_is_summed(axis, strides, cuda):
    """As other libraries hand them over: transposed, with gaps, repeated."""
    rnd = np.random.default_rng(0)
    buffer = rnd.standard_normal(64 * 64 * 3).astype(np.float32)
    a = np.lib.stride_tricks.as_strided(buffer, (60, 50), [4 * s for s in strides])
    memory = cuda.create_from_numpy(buffer)

    described = {**memory.__cuda_array_interface__, "shape": a.shape}
    described["strides"] = a.strides
    foreign = cuda.as_array(
        SimpleNamespace(__cuda_array_interface__=described, memory=memory)
    )
    out = cuda.allocate(sum_shape(a.shape, axis, False))
    cuda.sum_t(foreign, axis, out)
    expected = a.astype(np.float64).sum(axis)
    assert_within(out.get(), expected, 1e-5)


def test_a_total_is_as_exact_as_numpys(cuda):
    rnd = np.random.default_rng(0)
    a = rnd.random(1_000_000, np.float32)
    exact = a.astype(np.float64).sum()
    out = cuda.allocate(())
    cuda.sum_t(cuda.create_from_numpy(a), None, out)
    numpys = abs(float(a.sum()) - exact)
    assert abs(float(out.get()) - exact) <= numpys + EPS * exact


def test_the_same_sum_has_the_same_bits(cuda):
    rnd = np.random.default_rng(0)
    for shape, axis in LARGE:
        a = cuda.create_from_numpy(rnd.standard_normal(shape).astype(np.float32))
        seen = []
        for _ in range(2):
            out = cuda.allocate(sum_shape(shape, axis, True))
            cuda.sum_t(a, axis, out)
            seen.append(out.get())
        assert_same_bits(*seen)


def test_the_sum_of_nothing_is_zero(cuda):
    for shape, axis in (((0, 3), 0), ((0, 3), None), ((3, 0), 1), ((0,), 0)):
        out = cuda.ones(sum_shape(shape, axis, False))
        cuda.sum_t(cuda.allocate(shape), axis, out)
        assert not out.get().any()
    for shape, axis in (((0, 3), 1), ((3, 0), 0), ((0, 0), 1)):
        cuda.sum_t(cuda.allocate(shape), axis, cuda.ones(sum_shape(shape, axis, False)))


def test_a_scalar_is_summed_as_by_numpy(cuda):
    for axis in (None, 0, -1):
        out = cuda.allocate(())
        cuda.sum_t(cuda.create_from_numpy(np.array(3, np.float32)), axis, out)
        assert out.get() == 3
    with pytest.raises(ValueError, match="sum_t: axis 1 is out of bounds"):
        cuda.sum_t(cuda.allocate(()), 1, cuda.allocate(()))


def test_a_sum_may_go_where_its_terms_are(cuda):
    a = np.arange(12, dtype=np.float32).reshape(4, 3)
    on_device = cuda.create_from_numpy(a)
    cuda.sum_t(on_device, 0, on_device[1])
    expected = a.copy()
    expected[1] = a.sum(0)
    np.testing.assert_array_equal(on_device.get(), expected)


def small_shapes(most):
    return st.lists(st.integers(0, 3), max_size=most).map(tuple)


def test_the_shapes_and_axes_that_numpy_refuses_are_refused(cuda):
    @on_one_handler
    @given(small_shapes(3), st.sampled_from([None, *range(-4, 4)]), small_shapes(3))
    def run(shape, axis, out):
        try:
            NUMPY.sum_t(np.ones(shape, np.float32), axis, np.ones(out, np.float32))
        except ValueError:
            with pytest.raises(ValueError, match="^sum_t: (axis|out) "):
                cuda.sum_t(cuda.ones(shape), axis, cuda.ones(out))
        else:
            cuda.sum_t(cuda.ones(shape), axis, cuda.ones(out))

    run()


@pytest.mark.parametrize("axis", [0.0, "0", (0,), [0]])
def test_an_axis_that_is_no_integer_is_refused(axis, cuda):
    for name in ("sum_t", "broadcast_t"):
        with pytest.raises(TypeError, match=f"^{name}: axis must be an integer"):
            getattr(cuda, name)(cuda.ones((1, 3)), axis, cuda.ones((1, 3)))


# --------------------------------------------------------------------------- softmax_m


def check_softmax(cuda, arguments):
    m = arguments["m"].values.astype(np.float64)
    actual = outputs_of(cuda, "softmax_m", arguments, ["out"])["out"]
    if m.size == 0:
        return
    expected = expected_of(EXACT, "softmax_m", arguments, ["out"], np.float64)["out"]
    with np.errstate(all="ignore"):
        depth = np.abs(m - m.max(axis=1, keepdims=True)) + 8 + np.log2(m.shape[1] + 1)
        tolerance = 2 * EPS * depth * expected + 4 * TINY
    # Where the oracle has 0, so has float32: and `depth` may be infinite there.
    assert_within(actual, expected, np.where(expected == 0, 0, tolerance))


matrices = st.one_of(
    st.tuples(st.integers(0, 5), st.integers(0, 40)),
    st.sampled_from(
        [(300, 1), (67, 10), (9, 31), (9, 33), (5, 205), (3, 256), (3, 257), (2, 1025)]
        + [(2, 4095), (2, 5000), (70, 2), (1, 1), (33, 8)]
    ),
)


def logits(shape):
    """Some of the usual size, where softmax has more than one value that counts."""
    return st.builds(
        lambda array, scale: (array * np.float32(scale)).astype(np.float32),
        values(shape, extreme=True),
        st.sampled_from([1e-3, 1e-4, 1.0]),
    )


def test_softmax_is_numpys(cuda):
    @on_one_handler
    @given(st.data())
    def run(data):
        shape = data.draw(matrices)
        m = data.draw(placed(shape, logits))
        out = m if data.draw(st.booleans()) else data.draw(placed(shape))
        check_softmax(cuda, {"m": m, "out": out})

    with np.errstate(all="ignore"):
        run()


@pytest.mark.parametrize("columns", [1, 10, 32, 205, 256, 257, 1000, 4096, 9001])
def test_softmax_of_plain_rows(columns, cuda):
    rnd = np.random.default_rng(columns)
    m = plain(rnd.standard_normal((37 if columns < 1000 else 3, columns)) * 4)
    check_softmax(cuda, {"m": m, "out": plain(np.full_like(m.values, np.nan))})
    check_softmax(cuda, {"m": m, "out": m})


@pytest.mark.parametrize("columns", [3, 300])
def test_softmax_of_a_row_that_is_not_finite_is_numpys(columns, cuda):
    for special in ([np.nan], [np.inf], [-np.inf], [np.nan, -np.inf], [np.inf] * 2):
        m = np.zeros((3, columns), np.float32)
        m[1, : len(special)] = special
        arguments = {"m": plain(m), "out": plain(np.zeros_like(m))}
        check_softmax(cuda, arguments)
    m[1] = -np.inf
    check_softmax(cuda, arguments)


@pytest.mark.parametrize(
    "m, out, named",
    [((3,), (3,), "m"), ((2, 3, 1), (2, 3, 1), "m"), ((2, 3), (3, 2), "out")]
    + [((2, 3), (1, 3), "out"), ((1, 3), (2, 3), "out"), ((2, 3), (2, 3, 1), "out")],
)
def test_softmax_of_the_wrong_shape_is_refused(m, out, named, cuda):
    with pytest.raises(ValueError, match=f"^softmax_m: {named} has shape"):
        cuda.softmax_m(cuda.ones(m), cuda.ones(out))


def test_softmax_partly_over_its_input_is_refused(cuda):
    m = cuda.ones((4, 3))
    with pytest.raises(ValueError, match="^softmax_m: out shares memory with m"):
        cuda.softmax_m(m[:3], m[1:])


# --------------------------------------------------------------------- is_fully_finite


def test_is_fully_finite_is_numpys(cuda):
    @on_one_handler
    @given(st.data())
    def run(data):
        shape = data.draw(shapes)
        a = data.draw(placed(shape))
        if data.draw(st.booleans()):
            a.values[~np.isfinite(a.values)] = 1
        on_device = cuda.create_from_numpy(buffer_of(a.layout, a.values))
        result = cuda.is_fully_finite(a.layout.cut(on_device))
        assert result is bool(np.isfinite(a.values).all())

    run()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_bad_element_is_found_wherever_it_is(bad, cuda):
    for size, offset in ((1, 0), (4, 0), (5, 1), (1023, 0), (1030, 3), (40000, 0)):
        good = np.full(size + offset, 3e38, np.float32)
        for at in {0, 1, size // 2, size - 1} & set(range(size)):
            a = good.copy()
            a[offset + at] = bad
            assert not cuda.is_fully_finite(cuda.create_from_numpy(a)[offset:])
        assert cuda.is_fully_finite(cuda.create_from_numpy(good)[offset:])


# --------------------------------------------------------------- merge_tt, split_add_tt

leading = st.one_of(
    small_shapes(3), st.sampled_from([(33,), (5, 67), (300,), (2, 3, 4), (1000,)])
)
widths = st.one_of(
    st.integers(1, 9), st.sampled_from([4, 8, 12, 16, 31, 32, 33, 64, 100, 260])
)


@st.composite
def regrouped(draw, shape):
    """Return another way to write as many rows."""
    count = int(np.prod(shape))
    return draw(st.sampled_from([shape, (count,), (1, count), (count, 1)]))


@st.composite
def merges(draw):
    rows, a, b = draw(leading), draw(widths), draw(widths)
    parts = {"a": a, "b": b, "out": a + b}
    return {n: draw(placed((*draw(regrouped(rows)), k))) for n, k in parts.items()}


def test_merging_is_numpys(cuda):
    @on_one_handler
    @given(merges())
    def run(arguments):
        check_exact(cuda, "merge_tt", arguments, ["out"])

    run()


@st.composite
def splits(draw):
    rows, a, b = draw(leading), draw(widths), draw(widths)
    is_one = draw(st.booleans())
    b = a if is_one else b
    parts = {"x": a + b, "out_a": a, "out_b": b}
    given = {n: draw(placed((*draw(regrouped(rows)), k))) for n, k in parts.items()}
    if is_one:
        given["out_b"] = given["out_a"]
    return given


def test_splitting_adds_as_numpy_does(cuda):
    @on_one_handler
    @given(splits())
    def run(arguments):
        check_exact(cuda, "split_add_tt", arguments, ["out_a", "out_b"])

    run()


def test_parts_of_one_hub_are_split_into_and_merged_from(cuda):
    """The inputs of a layer may be features of one hub, side by side or the same."""
    rnd = np.random.default_rng(0)
    hub = rnd.standard_normal((4, 3, 10)).astype(np.float32)
    x = rnd.standard_normal((4, 3, 7)).astype(np.float32)
    for first, second in ((slice(0, 4), slice(4, 7)), (slice(5, 8), slice(4, 8))):
        expected, on_device = hub.copy(), cuda.create_from_numpy(hub)
        for handler, h, v in (
            (NUMPY, expected, x.copy()),
            (cuda, on_device, cuda.create_from_numpy(x)),
        ):
            handler.split_add_tt(v, h[:, :, first], h[:, :, second])
            handler.merge_tt(h[:, :, second], h[:, :, first], v)
            if handler is NUMPY:
                merged = v
        np.testing.assert_array_equal(on_device.get(), expected)
        np.testing.assert_array_equal(v.get(), merged)


MISFITS = [
    ((2, 3), (2, 4), (2, 8)),
    ((2, 3), (2, 4), (3, 7)),
    ((2, 3), (1, 4), (2, 7)),
    ((1, 3), (2, 4), (2, 7)),
    ((2, 3), (2, 1), (2, 7)),
    ((), (2, 3), (2, 3)),
    ((2, 3), (), (2, 3)),
    ((2, 3), (2, 4), ()),
]


@pytest.mark.parametrize("a, b, both", MISFITS)
def test_parts_that_do_not_fit_are_refused(a, b, both, cuda):
    a, b, both = cuda.ones(a), cuda.ones(b), cuda.ones(both)
    with pytest.raises(ValueError, match="^merge_tt: (a|b|out) has shape"):
        cuda.merge_tt(a, b, both)
    with pytest.raises(ValueError, match="^split_add_tt: (out_a|out_b|x) has shape"):
        cuda.split_add_tt(both, a, b)
    for array in (a, b, both):
        np.testing.assert_array_equal(array.get(), 1)


def test_parts_that_lie_over_the_whole_are_refused(cuda):
    both, part = cuda.ones((3, 4)), cuda.ones((3, 2))
    with pytest.raises(ValueError, match="^merge_tt: a shares memory with out"):
        cuda.merge_tt(both[:, :2], part, both)
    with pytest.raises(ValueError, match="^split_add_tt: out_b shares memory with x"):
        cuda.split_add_tt(both, part, both[:, 1:3])


# ------------------------------------------------------------ binarize_v, index_m_by_v


@st.composite
def choices(draw):
    """Return a shape and an index for each row, all within range."""
    rows = draw(st.one_of(st.integers(0, 5), st.sampled_from([31, 257, 1000])))
    columns = draw(st.one_of(st.integers(1, 9), st.sampled_from([31, 32, 33, 205])))
    rnd = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    v = rnd.integers(0, columns, rows)
    if draw(st.booleans()):
        v = rnd.integers(-columns, columns, rows)
    fraction = rnd.random(rows) * 0.99 * draw(st.sampled_from([0, 1]))
    v = np.where(v < 0, v - fraction, v + fraction).astype(np.float32)
    assume(((np.trunc(v) >= -columns) & (np.trunc(v) < columns)).all())
    v = v.reshape(draw(st.sampled_from([(rows, 1), (rows, 1), (rows,)])))
    return (rows, columns), Placed(v, draw(layouts(v.shape)))


def test_binarize_v_is_numpys(cuda):
    @on_one_handler
    @given(st.data())
    def run(data):
        shape, v = data.draw(choices())
        arguments = {"v": v, "out": data.draw(placed(shape))}
        check_exact(cuda, "binarize_v", arguments, ["out"])

    run()


def test_index_m_by_v_is_numpys(cuda):
    @on_one_handler
    @given(st.data())
    def run(data):
        shape, v = data.draw(choices())
        arguments = {
            "m": data.draw(placed(shape)),
            "v": v,
            "out": data.draw(placed((shape[0], 1))),
        }
        check_exact(cuda, "index_m_by_v", arguments, ["out"])

    run()


OUT_OF_RANGE = [4, -5, 1e9, -1e9, 3e38, np.inf, -np.inf, np.nan]


@pytest.mark.parametrize("bad", OUT_OF_RANGE)
def test_an_index_out_of_range_is_told_of_by_the_next_read(bad, cuda):
    m = np.arange(12, dtype=np.float32).reshape(3, 4)
    v = cuda.create_from_numpy(np.array([[1], [bad], [-4.5]], np.float32))
    one_hot, picked = cuda.ones((3, 4)), cuda.ones((3, 1))
    cuda.binarize_v(v, one_hot)
    with pytest.raises(IndexError, match="^binarize_v: "):
        one_hot.get()
    expected = [[0, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]
    np.testing.assert_array_equal(one_hot.get(), expected)
    cuda.index_m_by_v(cuda.create_from_numpy(m), v, picked)
    with pytest.raises(IndexError, match="^index_m_by_v: "):
        cuda.is_fully_finite(picked)
    np.testing.assert_array_equal(picked.get(), [[1], [1], [8]])


def test_a_matrix_without_columns_has_no_index(cuda):
    with pytest.raises(IndexError, match="^binarize_v: out has no columns"):
        cuda.binarize_v(cuda.zeros((2, 1)), cuda.zeros((2, 0)))
    with pytest.raises(IndexError, match="^index_m_by_v: m has no columns"):
        cuda.index_m_by_v(cuda.zeros((2, 0)), cuda.zeros((2, 1)), cuda.zeros((2, 1)))
    cuda.binarize_v(cuda.zeros((0, 1)), cuda.zeros((0, 0)))


@pytest.mark.parametrize(
    "v, out, named",
    [((2, 1), (3, 4), "v"), ((3, 2), (3, 4), "v"), ((), (1, 4), "v")]
    + [((1, 1), (3, 4), "v"), ((3, 1, 1), (3, 4), "v"), ((3, 1), (3,), "out")]
    + [((3, 1), (3, 4, 1), "out")],
)
def test_one_hot_rows_of_the_wrong_shape_are_refused(v, out, named, cuda):
    with pytest.raises(ValueError, match=f"^binarize_v: {named} has shape"):
        cuda.binarize_v(cuda.zeros(v), cuda.zeros(out))


@pytest.mark.parametrize(
    "m, v, out, named",
    [((3, 4), (2, 1), (3, 1), "v"), ((3, 4), (1, 1), (3, 1), "v")]
    + [((3, 4), (3, 1), (3, 2), "out"), ((3, 4), (3, 1), (3,), "out")]
    + [((3, 4), (3, 1), (1, 1), "out"), ((3,), (3, 1), (3, 1), "m")],
)
def test_a_choice_of_the_wrong_shape_is_refused(m, v, out, named, cuda):
    with pytest.raises(ValueError, match=f"^index_m_by_v: {named} has shape"):
        cuda.index_m_by_v(cuda.zeros(m), cuda.zeros(v), cuda.zeros(out))


def test_results_over_the_indices_are_refused(cuda):
    m = cuda.zeros((3, 1))
    with pytest.raises(ValueError, match="^binarize_v: out shares memory with v"):
        cuda.binarize_v(m, m)
    with pytest.raises(ValueError, match="^index_m_by_v: out shares memory with m"):
        cuda.index_m_by_v(m, cuda.zeros((3, 1)), m)


# ------------------------------------------------------------------------- broadcast_t


def test_broadcasting_is_numpys(cuda):
    @on_one_handler
    @given(st.data())
    def run(data):
        shape = data.draw(shapes)
        axis = data.draw(st.integers(0, len(shape) - 1))
        single = shape[:axis] + (1,) + shape[axis + 1 :]
        a, out = data.draw(placed(single)), data.draw(placed(shape))
        check_exact(cuda, "broadcast_t", {"a": a, "axis": axis, "out": out}, ["out"])

    run()


@pytest.mark.parametrize(
    "a, axis, out",
    [((2, 3), 0, (2, 3)), ((1, 1), 0, (2, 3)), ((3,), 0, (2, 3)), ((1, 3), 1, (2, 3))]
    + [((1, 3), 2, (2, 3)), ((1,), 0, ()), ((1, 2), 1, (2, 3))],
)
def test_what_numpy_does_not_broadcast_is_refused(a, axis, out, cuda):
    with pytest.raises((AssertionError, IndexError)):
        NUMPY.broadcast_t(np.ones(a), axis, np.ones(out))
    with pytest.raises(ValueError, match="^broadcast_t: (a has shape|axis )"):
        cuda.broadcast_t(cuda.ones(a), axis, cuda.ones(out))


# ------------------------------------------------------------------------------ random


def philox(draw, groups, seed):
    """Return the four 32-bit words of each group: Philox4x32-10, written out."""
    counter = np.zeros((groups, 4), np.uint64)
    counter[:, 0], counter[:, 2] = draw, np.arange(groups)
    key = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint64)
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        even = np.uint64(0xD2511F53) * counter[:, 0]
        odd = np.uint64(0xCD9E8D57) * counter[:, 2]
        counter = np.stack(
            [
                (odd >> np.uint64(32)) ^ counter[:, 1] ^ key[0],
                odd & low,
                (even >> np.uint64(32)) ^ counter[:, 3] ^ key[1],
                even & low,
            ],
            axis=1,
        )
        key = (key + np.array([0x9E3779B9, 0xBB67AE85], np.uint64)) & low
    return counter


@pytest.mark.parametrize("size", [1, 3, 4, 5, 1000, 5003])
def test_masks_are_the_generators_words_compared(size, driver, cuda):
    """On any device: a seed's masks are those of every run."""
    seed = 0x123456789ABCDEF0
    handler = dbuf.CudaHandler(seed=seed)
    for draw, probability in enumerate((0.5, 0.1, 1e-9, 0.7)):
        mask = handler.allocate((size,))
        handler.generate_probability_mask(mask, probability)
        words = philox(draw, -(-size // 4), seed).ravel()[:size]
        np.testing.assert_array_equal(mask.get(), words < probability * 2.0**32)


def test_gaussians_are_the_generators_words_transformed(cuda):
    handler = dbuf.CudaHandler(seed=7)
    out = handler.allocate((4099,))
    handler.fill_gaussian(0, 1, out)
    handler.fill_gaussian(3, 0.5, out)
    words = philox(1, 1025, 7).reshape(-1, 2) * 2.0**-32 + 2.0**-33
    radius, angle = np.sqrt(-2 * np.log(words[:, 0])), 2 * np.pi * words[:, 1]
    pairs = np.stack([radius * np.sin(angle), radius * np.cos(angle)], axis=1)
    expected = 3 + 0.5 * pairs.ravel()[:4099]
    np.testing.assert_allclose(out.get(), expected, rtol=0, atol=1e-4)


seeds = st.integers(0, (1 << 64) - 1)


def test_random_fills_reach_every_layout_in_the_same_order(cuda):
    @on_one_handler
    @given(st.data())
    def run(data):
        shape = data.draw(shapes)
        place, seed = data.draw(layouts(shape)), data.draw(seeds)
        for name, numbers in (
            ("fill_gaussian", {"mean": 1.5, "std": 2}),
            ("generate_probability_mask", {"probability": 0.5}),
        ):
            out = "mask" if "mask" in name else "out"
            filled = []
            for layout in (whole(shape), place):
                handler = dbuf.CudaHandler(seed=seed)
                target = Placed(np.full(shape, np.nan, np.float32), layout)
                filled.append(
                    outputs_of(handler, name, {out: target, **numbers}, [out])[out]
                )
            assert_same_bits(*map(np.ascontiguousarray, filled))
            assert np.isfinite(filled[0]).all()

    run()


def test_gaussians_have_the_mean_and_deviation_asked_for(cuda):
    size = 1 << (22 if KIND == "real" else 16)
    out = cuda.allocate((size,))
    for mean, std in ((0, 1), (3.5, 0.25), (-100, 10), (2, 0)):
        cuda.fill_gaussian(mean, std, out)
        values = out.get().astype(np.float64)
        off = 5 * std / np.sqrt(size)
        assert abs(values.mean() - mean) <= off + 1e-5 * abs(mean)
        assert abs(values.std() - std) <= off + 1e-5
        if std:
            normal = (values - mean) / std
            for limit, share in ((1, 0.6827), (2, 0.9545), (3, 0.9973)):
                assert abs((np.abs(normal) < limit).mean() - share) < 0.01


@pytest.mark.parametrize("probability", [0.0, 0.03, 0.5, 0.8, 1.0])
def test_masks_have_the_rate_asked_for(probability, cuda):
    size = 1 << (22 if KIND == "real" else 16)
    mask = cuda.create_from_numpy(np.full(size, np.nan, np.float32))
    cuda.generate_probability_mask(mask, probability)
    values = mask.get()
    assert set(np.unique(values)) <= {0, 1}
    off = 5 * np.sqrt(probability * (1 - probability) / size)
    assert abs(values.mean() - probability) <= off


@pytest.mark.parametrize(
    "probability, value",
    [(0, 0), (-1, 0), (-np.inf, 0), (np.nan, 0), (1, 1), (2, 1), (np.inf, 1)]
    + [(np.float32(1), 1), (True, 1)],
)
def test_a_probability_out_of_range_is_compared_as_by_numpy(probability, value, cuda):
    expected = np.ones(999, np.float32)
    NUMPY.generate_probability_mask(expected, probability)
    np.testing.assert_array_equal(expected, value)
    mask = cuda.create_from_numpy(np.full(999, np.nan, np.float32))
    cuda.generate_probability_mask(mask, probability)
    np.testing.assert_array_equal(mask.get(), value)


def test_no_two_fills_draw_the_same_numbers(cuda):
    seen, out = [], cuda.allocate((1000,))
    for _ in range(4):
        cuda.fill_gaussian(0, 1, out)
        seen.append(out.get())
    for i, a in enumerate(seen):
        assert all(np.intersect1d(a, b).size < 20 for b in seen[i + 1 :])
        assert all(abs(np.corrcoef(a, b)[0, 1]) < 0.2 for b in seen[i + 1 :])
    assert np.unique(seen[0]).size > 990


def test_random_fills_of_nothing_do_nothing(cuda):
    cuda.fill_gaussian(0, 1, cuda.allocate((0, 3)))
    cuda.generate_probability_mask(cuda.allocate((3, 0)), 0.5)


# --------------------------------------------------------------- arguments of all these

RIGHT = {
    "sum_t": {"a": (2, 3), "axis": 0, "out": (3,)},
    "softmax_m": {"m": (2, 3), "out": (2, 3)},
    "is_fully_finite": {"a": (2, 3)},
    "binarize_v": {"v": (2, 1), "out": (2, 3)},
    "index_m_by_v": {"m": (2, 3), "v": (2, 1), "out": (2, 1)},
    "merge_tt": {"a": (2, 3), "b": (2, 1), "out": (2, 4)},
    "split_add_tt": {"x": (2, 4), "out_a": (2, 3), "out_b": (2, 1)},
    "broadcast_t": {"a": (2, 1), "axis": 1, "out": (2, 3)},
    "fill_gaussian": {"mean": 0.0, "std": 1.0, "out": (2, 3)},
    "generate_probability_mask": {"mask": (2, 3), "probability": 0.5},
}


@pytest.mark.parametrize("name", RIGHT)
def test_arguments_are_named_as_brainstorm_names_them(name, cuda):
    operation = getattr(cuda, name)
    names = list(inspect.signature(getattr(NumpyHandler, name)).parameters)[1:]
    assert list(inspect.signature(operation).parameters) == names
    assert inspect.getdoc(operation)
    right = {
        n: cuda.ones(v) if isinstance(v, tuple) else v for n, v in RIGHT[name].items()
    }
    operation(**right)
    operation(*right.values())
    with pytest.raises(TypeError, match=name):
        operation()
    with pytest.raises(TypeError, match=f"{name}.*unknown"):
        operation(**right, unknown=1)


@pytest.mark.parametrize("name", RIGHT)
def test_a_wrong_kind_of_argument_is_refused_by_name(name, cuda):
    right = {
        n: cuda.ones(v) if isinstance(v, tuple) else v for n, v in RIGHT[name].items()
    }
    for argument, shape in RIGHT[name].items():
        operation = getattr(cuda, name)
        if not isinstance(shape, tuple):
            with pytest.raises(TypeError, match=f"^{name}: {argument} must be "):
                operation(**{**right, argument: "0.5"})
            continue
        for wrong in (np.ones(shape, np.float32), None, 1.0):
            with pytest.raises(TypeError, match=f"^{name}: {argument} must be "):
                operation(**{**right, argument: wrong})


def cut(handler, columns):
    """An array whose strides no kernel of rows takes: it goes by way of a copy."""
    return handler.ones((3, 4, columns))[:, :2]


BY_COPY = {
    "sum_t": lambda h: (cut(h, 3), None, h.allocate(())),
    "is_fully_finite": lambda h: (cut(h, 3),),
    "merge_tt": lambda h: (cut(h, 3), cut(h, 2), cut(h, 5)),
    "split_add_tt": lambda h: (cut(h, 5), cut(h, 3), cut(h, 2)),
    "fill_gaussian": lambda h: (0, 1, cut(h, 3)),
    "generate_probability_mask": lambda h: (cut(h, 3), 0.5),
}


@pytest.mark.parametrize("name", BY_COPY)
@pytest.mark.parametrize("call, times", [("cuMemAlloc", 2), ("cuLaunchKernel", 1)])
def test_a_failed_driver_call_comes_out_and_leaves_nothing(
    call, times, name, fake, cuda
):
    """Memory is asked for a second time once the pool has given back what it can."""
    gc.collect()
    cuda.trim_pool()
    before = live_objects()
    for nth in range(8):
        handler = dbuf.CudaHandler(seed=1)
        handler.trim_pool()
        arguments = BY_COPY[name](handler)
        fake.fail(call, nth=nth, code=2, times=times)
        try:
            getattr(handler, name)(*arguments)
        except dbuf.CudaError as error:
            assert call in str(error)
        else:
            break
        getattr(handler, name)(*arguments)
    assert 0 < nth < 7
    del handler, arguments
    gc.collect()
    cuda.trim_pool()
    assert live_objects() == before
