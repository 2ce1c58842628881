"""The compiled ops against loops in plain Python that follow their definition."""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brainstorm_dbuf import _cpuop

DTYPES = ["float32", "float64"]

# ---- the reference: one element at a time, in the order that sums and ties follow ----


def out_length(length, kernel, before, after, stride):
    return max(0, (length + before + after - kernel) // stride + 1)


def pooled_shape(shape, kernel, padding, strides):
    n, h, w, c = shape
    return (
        n,
        out_length(h, kernel[0], padding, padding, strides[0]),
        out_length(w, kernel[1], padding, padding, strides[1]),
        c,
    )


def window(shape, kernel, padding, strides, y, x):
    """Yield the pixels of a window that lie inside the image, in reading order."""
    for in_y in range(y * strides[0] - padding, y * strides[0] - padding + kernel[0]):
        for in_x in range(
            x * strides[1] - padding, x * strides[1] - padding + kernel[1]
        ):
            if 0 <= in_y < shape[1] and 0 <= in_x < shape[2]:
                yield in_y, in_x


def ref_maxpool_forward(inputs, kernel, outputs, padding, strides, argmax):
    lowest = np.finfo(inputs.dtype).min
    for n, y, x, c in np.ndindex(outputs.shape):
        best, index = lowest, -1
        for in_y, in_x in window(inputs.shape, kernel, padding, strides, y, x):
            value = inputs[n, in_y, in_x, c]
            if value > best:
                best = value
                index = (in_y * inputs.shape[2] + in_x) * inputs.shape[3] + c
        outputs[n, y, x, c] = best if index >= 0 else 0
        argmax[n, y, x, c] = index


def ref_maxpool_backward(
    inputs, kernel, outputs, padding, strides, argmax, in_deltas, out_deltas
):
    _, _, width, channels = inputs.shape
    for n, y, x, c in np.ndindex(outputs.shape):
        if argmax[n, y, x, c] >= 0:
            pixel = int(argmax[n, y, x, c]) // channels
            in_deltas[n, pixel // width, pixel % width, c] += out_deltas[n, y, x, c]


def ref_avgpool_forward(inputs, kernel, outputs, padding, strides):
    real = inputs.dtype.type
    for n, y, x, c in np.ndindex(outputs.shape):
        pixels = list(window(inputs.shape, kernel, padding, strides, y, x))
        total = real(0)
        for in_y, in_x in pixels:
            total += inputs[n, in_y, in_x, c]
        outputs[n, y, x, c] = total / real(max(len(pixels), 1))


def ref_avgpool_backward(
    inputs, kernel, outputs, padding, strides, in_deltas, out_deltas
):
    real = inputs.dtype.type
    for n, y, x, c in np.ndindex(outputs.shape):
        pixels = list(window(inputs.shape, kernel, padding, strides, y, x))
        for in_y, in_x in pixels:
            in_deltas[n, in_y, in_x, c] += out_deltas[n, y, x, c] / real(len(pixels))


def patches(height, width, channels, kh, kw, pt, pl, pb, pr, sh, sw):
    """Yield (place in the patches, place in the image or None) for every element."""
    rows = out_length(height, kh, pt, pb, sh)
    columns = out_length(width, kw, pl, pr, sw)
    elements = itertools.product(
        range(rows), range(columns), range(kh), range(kw), range(channels)
    )
    for place, (row, column, i, j, c) in enumerate(elements):
        y, x = row * sh - pt + i, column * sw - pl + j
        inside = 0 <= y < height and 0 <= x < width
        yield place, (y * width + x) * channels + c if inside else None


def ref_im2col(flat_in, *layout_and_col):
    *layout, flat_col = layout_and_col
    for place, source in patches(*layout):
        flat_col[place] = 0 if source is None else flat_in[source]


def ref_col2im(flat_col, *layout_and_in):
    *layout, flat_in = layout_and_in
    for place, target in patches(*layout):
        if target is not None:
            flat_in[target] += flat_col[place]


def ref_crop_images(inputs, height, width, row_indices, col_indices, outputs):
    for n, (row, column) in enumerate(zip(row_indices, col_indices)):
        outputs[:, n] = inputs[:, n, row : row + height, column : column + width]


# ---- helpers ----


def same_bits(a, b):
    """Whether two arrays hold the same bytes, any NaN counting as any other."""
    assert a.dtype == b.dtype and a.shape == b.shape
    nan = np.isnan(a)
    integers = {4: np.uint32, 8: np.uint64}[a.itemsize]
    return np.array_equal(nan, np.isnan(b)) and np.array_equal(
        a.view(integers)[~nan], b.view(integers)[~nan]
    )


def assert_same_bits(ours, reference, what):
    assert same_bits(ours, reference), f"{what}:\n{ours}\nexpected:\n{reference}"


def junk(shape, dtype):
    """An output array whose every element is wrong until it is written."""
    return np.full(shape, 12345.5, dtype)


def values(rng, shape, dtype, kind):
    """Random contents: plain numbers, many ties, or all that is odd about floats."""
    if kind == "ties":
        return rng.integers(-1, 2, shape).astype(dtype)
    data = rng.standard_normal(shape).astype(dtype)
    if kind == "odd":
        low = np.finfo(dtype).min
        odd = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, low, -low], dtype)
        data = np.where(rng.random(shape) < 0.6, rng.choice(odd, shape), data)
    return np.ascontiguousarray(data, dtype)


@pytest.fixture(autouse=True)
def no_float_warnings():
    """Let the reference overflow and meet NaN in silence: the ops do."""
    with np.errstate(all="ignore"):
        yield


def check_maxpool(inputs, kernel, padding, strides, rng):
    shape = pooled_shape(inputs.shape, kernel, padding, strides)
    dtype = inputs.dtype
    ours, ours_at = junk(shape, dtype), junk(shape, dtype)
    expected, expected_at = junk(shape, dtype), junk(shape, dtype)
    kept = inputs.copy()
    _cpuop.maxpool_forward(inputs, kernel, ours, padding, strides, ours_at)
    ref_maxpool_forward(inputs, kernel, expected, padding, strides, expected_at)
    assert_same_bits(inputs, kept, "inputs")
    assert_same_bits(ours, expected, "outputs")
    assert_same_bits(ours_at, expected_at, "argmax")

    deltas = rng.standard_normal(shape).astype(dtype)
    ours_in = rng.standard_normal(inputs.shape).astype(dtype)
    expected_in = ours_in.copy()
    args = (inputs, kernel, ours, padding, strides, ours_at)
    _cpuop.maxpool_backward(*args, ours_in, deltas)
    ref_maxpool_backward(*args, expected_in, deltas)
    assert_same_bits(ours_in, expected_in, "in_deltas")


def check_avgpool(inputs, kernel, padding, strides, rng):
    shape = pooled_shape(inputs.shape, kernel, padding, strides)
    dtype = inputs.dtype
    ours, expected = junk(shape, dtype), junk(shape, dtype)
    kept = inputs.copy()
    _cpuop.avgpool_forward(inputs, kernel, ours, padding, strides)
    ref_avgpool_forward(inputs, kernel, expected, padding, strides)
    assert_same_bits(inputs, kept, "inputs")
    assert_same_bits(ours, expected, "outputs")

    deltas = rng.standard_normal(shape).astype(dtype)
    ours_in = rng.standard_normal(inputs.shape).astype(dtype)
    expected_in = ours_in.copy()
    args = (inputs, kernel, ours, padding, strides)
    _cpuop.avgpool_backward(*args, ours_in, deltas)
    ref_avgpool_backward(*args, expected_in, deltas)
    assert_same_bits(ours_in, expected_in, "in_deltas")


def col_size(layout):
    height, width, channels, kh, kw, pt, pl, pb, pr, sh, sw = layout
    rows = out_length(height, kh, pt, pb, sh)
    columns = out_length(width, kw, pl, pr, sw)
    return rows * columns * kh * kw * channels


def check_patches(layout, dtype, rng):
    image = rng.standard_normal(layout[0] * layout[1] * layout[2]).astype(dtype)
    ours, expected = junk(col_size(layout), dtype), junk(col_size(layout), dtype)
    _cpuop.im2col(image, *layout, ours)
    ref_im2col(image, *layout, expected)
    assert_same_bits(ours, expected, "flat_col")

    col = rng.standard_normal(col_size(layout)).astype(dtype)
    ours, expected = image.copy(), image.copy()
    _cpuop.col2im(col, *layout, ours)
    ref_col2im(col, *layout, expected)
    assert_same_bits(ours, expected, "flat_in")


POOLINGS = [
    pytest.param((2, 6, 6, 3), (2, 2), 0, (2, 2), id="plain"),
    pytest.param((2, 5, 7, 2), (3, 2), 1, (2, 3), id="uneven"),
    pytest.param((1, 4, 4, 1), (1, 1), 0, (1, 1), id="kernel-1"),
    pytest.param((1, 4, 4, 5), (1, 1), 2, (1, 1), id="kernel-1-padded"),
    pytest.param((3, 1, 1, 4), (1, 1), 0, (1, 1), id="one-pixel"),
    pytest.param((3, 1, 1, 4), (3, 3), 1, (1, 1), id="one-pixel-padded"),
    pytest.param((1, 3, 3, 2), (2, 2), 5, (1, 1), id="windows-of-padding-only"),
    pytest.param((1, 3, 3, 2), (2, 2), 5, (4, 3), id="padding-and-long-strides"),
    pytest.param((1, 4, 5, 2), (9, 9), 4, (1, 1), id="kernel-beyond-the-image"),
    pytest.param((1, 8, 8, 2), (2, 2), 0, (3, 3), id="strides-with-gaps"),
    pytest.param((1, 8, 8, 2), (2, 3), -2, (1, 1), id="negative-padding"),
    pytest.param((0, 4, 4, 2), (2, 2), 0, (2, 2), id="empty-batch"),
    pytest.param((2, 4, 4, 0), (2, 2), 0, (2, 2), id="no-channels"),
    pytest.param((2, 1, 4, 3), (2, 2), 0, (1, 1), id="no-output-rows"),
    pytest.param((2, 0, 0, 3), (1, 1), 1, (1, 1), id="no-input-pixels"),
    pytest.param((1, 5, 5, 23), (3, 3), 1, (2, 2), id="23-channels"),
    pytest.param((1, 4, 4, 64), (2, 2), 1, (1, 1), id="64-channels"),
]


@pytest.mark.parametrize("kind", ["plain", "ties", "odd"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape, kernel, padding, strides", POOLINGS)
def test_pooling_equals_the_reference_to_the_bit(
    shape, kernel, padding, strides, dtype, kind
):
    rng = np.random.default_rng(1)
    inputs = values(rng, shape, dtype, kind)
    check_maxpool(inputs, kernel, padding, strides, rng)
    check_avgpool(inputs, kernel, padding, strides, rng)


@pytest.mark.parametrize("channels", range(1, 41))
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_channels_gives_the_same_bits(channels, dtype):
    rng = np.random.default_rng(channels)
    inputs = values(rng, (1, 4, 3, channels), dtype, "odd")
    check_maxpool(inputs, (2, 2), 1, (2, 2), rng)
    check_avgpool(inputs, (2, 2), 1, (2, 2), rng)


@st.composite
def poolings(draw):
    small = st.integers(1, 4)
    shape = (
        draw(st.integers(0, 2)),
        draw(st.integers(0, 6)),
        draw(st.integers(0, 6)),
        draw(st.sampled_from([0, 1, 2, 3, 4, 5, 9, 17])),
    )
    return shape, (draw(small), draw(small)), draw(st.integers(-1, 4)), (
        draw(small),
        draw(small),
    )


@settings(max_examples=150, deadline=None)
@given(
    poolings(),
    st.sampled_from(DTYPES),
    st.sampled_from(["plain", "ties", "odd"]),
    st.integers(0, 2**32),
)
def test_pooling_equals_the_reference_whatever_the_geometry(case, dtype, kind, seed):
    shape, kernel, padding, strides = case
    rng = np.random.default_rng(seed)
    inputs = values(rng, shape, dtype, kind)
    with np.errstate(all="ignore"):
        check_maxpool(inputs, kernel, padding, strides, rng)
        check_avgpool(inputs, kernel, padding, strides, rng)


def pool_whole(rows, dtype="float32"):
    """Max-pool one image with one channel by one window that covers it."""
    inputs = np.array(rows, dtype)[None, :, :, None]
    output, argmax = junk((1, 1, 1, 1), dtype), junk((1, 1, 1, 1), dtype)
    _cpuop.maxpool_forward(inputs, inputs.shape[1:3], output, 0, (1, 1), argmax)
    return output.item(), argmax.item()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_of_equal_maxima_wins(dtype):
    assert pool_whole([[1, 7], [7, 7]], dtype) == (7, 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_before_minus_zero_and_the_other_way_keep_the_first(dtype):
    assert str(pool_whole([[0.0, -0.0]], dtype)) == "(0.0, 0.0)"
    assert str(pool_whole([[-0.0, 0.0]], dtype)) == "(-0.0, 0.0)"


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_is_never_the_maximum(dtype):
    assert pool_whole([[np.nan, 2], [np.nan, 1]], dtype) == (2, 1)
    assert pool_whole([[2, np.nan], [1, np.nan]], dtype) == (2, 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nothing", ["nan", "-inf", "lowest"])
def test_nothing_above_the_lowest_value_gives_zero_and_minus_one(nothing, dtype):
    value = np.finfo(dtype).min if nothing == "lowest" else float(nothing)
    assert pool_whole([[value, value], [value, value]], dtype) == (0, -1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinity_is_a_maximum_like_any_other(dtype):
    assert pool_whole([[1, np.inf], [np.inf, 2]], dtype) == (np.inf, 1)


@pytest.mark.parametrize("channels", [1, 4])
def test_float32_indices_above_two_to_the_24_are_rounded(channels):
    inputs = np.zeros((1, 1, 2**24 // channels + 8, channels), np.float32)
    spot = inputs.shape[2] - 3
    inputs[0, 0, spot, 0] = 1
    outputs = junk((1, 1, 1, channels), np.float32)
    argmax = outputs.copy()
    _cpuop.maxpool_forward(inputs, inputs.shape[1:3], outputs, 0, (1, 1), argmax)
    assert argmax[0, 0, 0, 0] == np.float32(spot * channels)
    if channels == 1:
        assert int(argmax[0, 0, 0, 0]) != spot


def test_a_delta_goes_to_its_own_channel_whatever_channel_argmax_names():
    inputs = np.zeros((1, 1, 2, 2), np.float32)
    outputs = np.zeros((1, 1, 1, 2), np.float32)
    argmax = np.array([3, 2], np.float32).reshape(outputs.shape)
    deltas = np.array([10, 20], np.float32).reshape(outputs.shape)
    in_deltas = np.zeros_like(inputs)
    _cpuop.maxpool_backward(
        inputs, (1, 2), outputs, 0, (1, 1), argmax, in_deltas, deltas
    )
    assert in_deltas.ravel().tolist() == [0, 0, 10, 20]


@pytest.mark.parametrize("dtype", DTYPES)
def test_negative_and_nan_indices_in_argmax_are_skipped(dtype):
    inputs = np.zeros((1, 2, 2, 1), dtype)
    outputs = np.zeros((1, 1, 4, 1), dtype)
    argmax = np.array([-1, -7, np.nan, -np.inf], dtype).reshape(outputs.shape)
    in_deltas = np.zeros_like(inputs)
    _cpuop.maxpool_backward(
        inputs, (1, 1), outputs, 0, (1, 1), argmax, in_deltas, np.ones_like(outputs)
    )
    assert not in_deltas.any()


PATCHES = [
    pytest.param((5, 4, 3, 2, 2, 0, 0, 0, 0, 1, 1), id="plain"),
    pytest.param((5, 6, 2, 3, 2, 1, 2, 0, 3, 2, 1), id="uneven"),
    pytest.param((4, 4, 2, 1, 1, 0, 0, 0, 0, 1, 1), id="kernel-1"),
    pytest.param((4, 4, 2, 1, 1, 0, 0, 0, 0, 3, 2), id="kernel-1-strides"),
    pytest.param((1, 1, 3, 1, 1, 0, 0, 0, 0, 1, 1), id="one-pixel"),
    pytest.param((1, 1, 3, 3, 3, 1, 1, 1, 1, 1, 1), id="one-pixel-padded"),
    pytest.param((2, 2, 1, 2, 2, 4, 4, 4, 4, 1, 1), id="patches-of-padding-only"),
    pytest.param((3, 3, 2, 5, 7, 2, 3, 2, 3, 1, 1), id="kernel-beyond-the-image"),
    pytest.param((6, 6, 2, 2, 2, -1, -2, -1, 0, 1, 1), id="negative-padding"),
    pytest.param((2, 2, 2, 3, 3, 0, 0, 0, 0, 2, 2), id="kernel-too-large"),
    pytest.param((0, 0, 2, 1, 1, 1, 1, 1, 1, 1, 1), id="no-pixels"),
    pytest.param((3, 3, 0, 2, 2, 0, 0, 0, 0, 1, 1), id="no-channels"),
    pytest.param((4, 4, 5, 2, 2, 1, 1, 1, 1, 5, 5), id="strides-with-gaps"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", PATCHES)
def test_patches_equal_the_reference_to_the_bit(layout, dtype):
    check_patches(layout, dtype, np.random.default_rng(2))


@settings(max_examples=150, deadline=None)
@given(
    st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 5)),
    st.tuples(*[st.integers(1, 4)] * 2),
    st.tuples(*[st.integers(-1, 5)] * 4),
    st.tuples(*[st.integers(1, 4)] * 2),
    st.sampled_from(DTYPES),
    st.integers(0, 2**32),
)
def test_patches_equal_the_reference_whatever_the_geometry(
    size, kernel, paddings, strides, dtype, seed
):
    layout = (*size, *kernel, *paddings, *strides)
    check_patches(layout, dtype, np.random.default_rng(seed))


def test_im2col_copies_odd_values_bit_for_bit():
    image = np.array([0x7FC12345, 0x80000000, 0x00000001, 0xFF800000], np.uint32)
    col = junk(4, np.float32)
    _cpuop.im2col(image.view(np.float32), 2, 2, 1, 1, 1, 0, 0, 0, 0, 1, 1, col)
    assert col.view(np.uint32).tolist() == image.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_longer_flat_arrays_are_left_alone_beyond_what_is_needed(dtype):
    image, col = np.ones(4 + 3, dtype), junk(4 + 2, dtype)
    layout = (2, 2, 1, 1, 1, 0, 0, 0, 0, 1, 1)
    _cpuop.im2col(image, *layout, col)
    assert col.tolist() == [1, 1, 1, 1, 12345.5, 12345.5]
    _cpuop.col2im(col, *layout, image)
    assert image.tolist() == [2, 2, 2, 2, 1, 1, 1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [1, 2, 3])
@pytest.mark.parametrize("steps, images", [(1, 1), (1, 5), (3, 2), (0, 2), (2, 0)])
@pytest.mark.parametrize(
    "crop", [(2, 3), (4, 5), (2, 5), (4, 1), (1, 1), (0, 2), (2, 0)]
)
def test_crops_equal_the_reference(crop, steps, images, channels, dtype):
    rng = np.random.default_rng(3)
    inputs = rng.standard_normal((steps, images, 4, 5, channels)).astype(dtype)
    rows = rng.integers(0, 4 - crop[0] + 1, images)
    columns = rng.integers(0, 5 - crop[1] + 1, images)
    ours = junk((steps, images, *crop, channels), dtype)
    expected = ours.copy()
    _cpuop._crop_images(inputs, *crop, rows, columns, ours)
    ref_crop_images(inputs, *crop, rows, columns, expected)
    assert_same_bits(ours, expected, "outputs")


@pytest.mark.parametrize("code", [*"bBhHiIlLqQ", ">i4", ">u2"])
def test_crop_takes_indices_of_every_integer_dtype_and_stride(code):
    inputs = np.arange(3 * 4 * 4, dtype=np.float64).reshape(1, 3, 4, 4, 1)
    rows = np.array([0, 9, 1, 9, 2], code)[::2]
    columns = np.array([2, 1, 0], code)[::-1]
    outputs = junk((1, 3, 2, 2, 1), np.float64)
    _cpuop._crop_images(inputs, 2, 2, rows, columns, outputs)
    assert outputs[0, :, 0, 0, 0].tolist() == [0, 16 + 4 + 1, 32 + 8 + 2]


# ---- how brainstorm calls them ----


def names_in_stub():
    stub = Path(_cpuop.__file__).with_name("_cpuop.pyi")
    return {
        node.name: [argument.arg for argument in node.args.args]
        for node in ast.parse(stub.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }


def test_the_stub_names_the_functions_and_arguments_of_the_module():
    functions = {
        name: list(inspect.signature(function).parameters)
        for name, function in vars(_cpuop).items()
        if inspect.isbuiltin(function)
    }
    assert functions == names_in_stub()


def test_every_function_says_what_it_does_in_its_docstring():
    for name in names_in_stub():
        assert inspect.getdoc(getattr(_cpuop, name)).splitlines()[0].endswith(".")


def good_calls(dtype="float32"):
    """Return valid keyword arguments for every function, by its name."""

    def real(*shape):
        return np.zeros(shape, dtype)

    pool = {
        "inputs": real(2, 4, 4, 3),
        "kernel": (2, 2),
        "outputs": real(2, 2, 2, 3),
        "padding": 0,
        "strides": (2, 2),
    }
    deltas = {"in_deltas": real(2, 4, 4, 3), "out_deltas": real(2, 2, 2, 3)}
    layout = {"height": 3, "width": 3, "channels": 2, "kernel_h": 2, "kernel_w": 2}
    layout |= {"pad_t": 0, "pad_l": 0, "pad_b": 0, "pad_r": 0}
    layout |= {"stride_h": 1, "stride_w": 1}
    return {
        "maxpool_forward": {**pool, "argmax": real(2, 2, 2, 3)},
        "maxpool_backward": {**pool, "argmax": real(2, 2, 2, 3), **deltas},
        "avgpool_forward": dict(pool),
        "avgpool_backward": {**pool, **deltas},
        "im2col": {"flat_in": real(18), **layout, "flat_col": real(32)},
        "col2im": {"flat_col": real(32), **layout, "flat_in": real(18)},
        "_crop_images": {
            "inputs": real(1, 2, 4, 4, 3),
            "height": 2,
            "width": 3,
            "row_indices": np.array([0, 2]),
            "col_indices": np.array([1, 0]),
            "outputs": real(1, 2, 2, 3, 3),
        },
    }


def call(name, **changes):
    """Call a function with valid arguments but for the given ones."""
    return getattr(_cpuop, name)(**{**good_calls()[name], **changes})


ALL = sorted(good_calls())
POOLS = [name for name in ALL if "pool" in name]
WRITTEN = [
    ("maxpool_forward", "outputs"),
    ("maxpool_forward", "argmax"),
    ("maxpool_backward", "in_deltas"),
    ("avgpool_forward", "outputs"),
    ("avgpool_backward", "in_deltas"),
    ("im2col", "flat_col"),
    ("col2im", "flat_in"),
    ("_crop_images", "outputs"),
]
ARRAYS = [
    (name, argument)
    for name, arguments in sorted(good_calls().items())
    for argument, value in arguments.items()
    if isinstance(value, np.ndarray) and not argument.endswith("_indices")
]
INTEGERS = [
    (name, argument)
    for name, arguments in sorted(good_calls().items())
    for argument, value in arguments.items()
    if isinstance(value, int)
]


@pytest.mark.parametrize("name", ALL)
def test_arguments_go_by_position_and_by_keyword_alike(name):
    arguments = good_calls()[name]
    assert list(arguments) == names_in_stub()[name]
    assert getattr(_cpuop, name)(*arguments.values()) is None
    assert getattr(_cpuop, name)(**arguments) is None


@pytest.mark.parametrize("name", ALL)
def test_a_missing_or_unknown_argument_is_refused(name):
    arguments = good_calls()[name]
    first = next(iter(arguments))
    with pytest.raises(TypeError, match="surplus|takes at most"):
        getattr(_cpuop, name)(**arguments, surplus=1)
    with pytest.raises(TypeError, match=first):
        getattr(_cpuop, name)(
            **{key: value for key, value in arguments.items() if key != first}
        )


@pytest.mark.parametrize("name", POOLS)
def test_kernel_and_strides_may_be_lists_and_hold_numpy_integers(name):
    assert call(name, kernel=[np.int64(2), 2], strides=[2, np.uint8(2)]) is None


def test_read_only_arrays_may_be_read():
    inputs = np.ones((2, 4, 4, 3), np.float32)
    inputs.flags.writeable = False
    outputs = np.zeros((2, 2, 2, 3), np.float32)
    call("avgpool_forward", inputs=inputs, outputs=outputs)
    assert (outputs == 1).all()


# ---- what is refused ----


@pytest.mark.parametrize("name, argument", ARRAYS)
@pytest.mark.parametrize("wrong", [None, 3, [1.0], b"x" * 128, "text"])
def test_what_is_not_an_array_is_refused(name, argument, wrong):
    given = type(wrong).__name__
    with pytest.raises(
        TypeError, match=rf"^{argument} must be a numpy.ndarray, not {given}"
    ):
        call(name, **{argument: wrong})


@pytest.mark.parametrize("name, argument", ARRAYS)
@pytest.mark.parametrize("dtype", ["int32", "float16", "complex64", "bool", "O", "S4"])
def test_an_array_of_another_kind_is_refused(name, argument, dtype):
    wrong = good_calls()[name][argument].astype(dtype)
    with pytest.raises(
        TypeError, match=rf"^{argument} must be float32 or float64, not {wrong.dtype}"
    ):
        call(name, **{argument: wrong})


@pytest.mark.parametrize("name, argument", ARRAYS)
def test_two_float_types_in_one_call_are_refused(name, argument):
    wrong = good_calls("float64")[name][argument]
    with pytest.raises(TypeError, match=r"must be float(32|64) as \w+ is, not float"):
        call(name, **{argument: wrong})


@pytest.mark.parametrize("name, argument", ARRAYS)
def test_foreign_byte_order_is_refused(name, argument):
    good = good_calls()[name][argument]
    with pytest.raises(TypeError, match=rf"^{argument} must be in native byte order"):
        call(name, **{argument: good.astype(good.dtype.newbyteorder())})


@pytest.mark.parametrize("name, argument", ARRAYS)
def test_a_wrong_number_of_dimensions_is_refused(name, argument):
    good = good_calls()[name][argument]
    expected = rf"^{argument} must have {good.ndim} dimensions?, not {good.ndim + 1}"
    with pytest.raises(ValueError, match=expected):
        call(name, **{argument: good[None]})


@pytest.mark.parametrize("name, argument", ARRAYS)
def test_an_array_with_gaps_is_refused_with_its_strides(name, argument):
    good = good_calls()[name][argument]
    wide = np.zeros((*good.shape[:-1], good.shape[-1] * 2), good.dtype)[..., ::2]
    with pytest.raises(
        ValueError, match=rf"^{argument} must be C-contiguous.*strides are .*bytes"
    ):
        call(name, **{argument: wide})


def test_fortran_order_is_refused():
    inputs = np.asfortranarray(good_calls()["avgpool_forward"]["inputs"])
    with pytest.raises(ValueError, match="^inputs must be C-contiguous"):
        call("avgpool_forward", inputs=inputs)


@pytest.mark.parametrize("name, argument", ARRAYS)
def test_unaligned_memory_is_refused(name, argument):
    good = good_calls()[name][argument]
    shifted = np.zeros(good.nbytes + 1, np.uint8)[1:].view(good.dtype)
    with pytest.raises(ValueError, match=rf"^{argument} must be aligned"):
        call(name, **{argument: shifted.reshape(good.shape)})


@pytest.mark.parametrize("name, argument", WRITTEN)
def test_a_read_only_array_is_not_written(name, argument):
    wrong = good_calls()[name][argument]
    wrong.flags.writeable = False
    with pytest.raises(ValueError, match=rf"^{argument} is written to, but it is read"):
        call(name, **{argument: wrong})


@pytest.mark.parametrize(
    "name, argument, axis",
    [
        (name, argument, axis)
        for name, argument in ARRAYS
        if "col" not in name and argument != "inputs"
        for axis in range(good_calls()[name][argument].ndim)
        # The size of the pooled image is the caller's choice.
        if not (argument == "outputs" and name != "_crop_images" and axis in (1, 2))
    ],
)
@pytest.mark.parametrize("change", [-1, 1])
def test_a_wrong_shape_is_refused_with_both_shapes(name, argument, axis, change):
    good = good_calls()[name][argument]
    shape = list(good.shape)
    shape[axis] += change
    wrong = np.zeros(shape, good.dtype)
    with pytest.raises(ValueError) as caught:
        call(name, **{argument: wrong})
    message = str(caught.value)
    assert message.startswith(f"{argument} must have shape ")
    assert str(good.shape) in message and str(wrong.shape) in message


@pytest.mark.parametrize("name", ["im2col", "col2im"])
@pytest.mark.parametrize("argument, needed", [("flat_in", 18), ("flat_col", 32)])
def test_a_flat_array_that_is_too_short_is_refused(name, argument, needed):
    shapes = rf"\({needed},\) or longer.*not \({needed - 1},\)"
    with pytest.raises(ValueError, match=rf"^{argument} must have shape {shapes}"):
        call(name, **{argument: np.zeros(needed - 1, np.float32)})


@pytest.mark.parametrize("name", ["im2col", "col2im"])
def test_sizes_beyond_every_array_are_refused(name):
    huge = {"height": 2**31 - 1, "width": 2**31 - 1, "channels": 2**31 - 1}
    with pytest.raises(ValueError, match="^flat_in cannot hold"):
        call(name, **huge)
    huge = {"pad_t": 2**31 - 1, "pad_l": 2**31 - 1, "channels": 2}
    with pytest.raises(ValueError, match="^flat_col (cannot hold|must have shape)"):
        call(name, **huge)


@pytest.mark.parametrize("name, argument", INTEGERS)
@pytest.mark.parametrize("wrong", [1.0, "1", None, np.float64(1), (1,)])
def test_what_is_not_an_integer_is_refused(name, argument, wrong):
    with pytest.raises(TypeError, match=rf"^{argument} must be an integer, not "):
        call(name, **{argument: wrong})


@pytest.mark.parametrize("name, argument", INTEGERS)
@pytest.mark.parametrize("wrong", [2**31, 2**70, -(2**31) - 1])
def test_an_integer_out_of_range_is_refused(name, argument, wrong):
    with pytest.raises(ValueError, match=rf"^{argument} must be between .*not {wrong}"):
        call(name, **{argument: wrong})


@pytest.mark.parametrize("name", ["im2col", "col2im"])
@pytest.mark.parametrize("argument", ["kernel_h", "kernel_w", "stride_h", "stride_w"])
def test_kernels_and_strides_of_patches_are_at_least_one(name, argument):
    with pytest.raises(ValueError, match=rf"^{argument} must be between 1 and"):
        call(name, **{argument: 0})


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("argument", ["kernel", "strides"])
def test_kernel_and_strides_of_pooling_are_pairs_of_at_least_one(name, argument):
    with pytest.raises(TypeError, match=rf"^{argument} must be a tuple of two"):
        call(name, **{argument: 2})
    with pytest.raises(ValueError, match=rf"^{argument} must hold two .*not 3"):
        call(name, **{argument: (2, 2, 2)})
    with pytest.raises(ValueError, match=rf"^{argument}\[1\] must be between 1 and"):
        call(name, **{argument: (1, 0)})
    with pytest.raises(TypeError, match=rf"^{argument}\[0\] must be an integer"):
        call(name, **{argument: ("2", 2)})


OVERLAPS = [
    ("maxpool_forward", "outputs", "argmax"),
    ("maxpool_backward", "in_deltas", "argmax"),
    ("maxpool_backward", "in_deltas", "out_deltas"),
    ("avgpool_backward", "in_deltas", "out_deltas"),
    ("maxpool_forward", "outputs", "inputs"),
    ("avgpool_forward", "outputs", "inputs"),
    ("im2col", "flat_col", "flat_in"),
    ("col2im", "flat_in", "flat_col"),
    ("_crop_images", "outputs", "inputs"),
]


@pytest.mark.parametrize("name, written, read", OVERLAPS)
def test_arrays_that_share_memory_are_refused(name, written, read):
    calls = good_calls()[name]
    shared = np.zeros(256, np.float32)

    def piece(argument, start):
        good = calls[argument]
        return shared[start : start + good.size].reshape(good.shape)

    size = calls[read].size
    with pytest.raises(ValueError, match="must not share memory"):
        call(name, **{read: piece(read, 0), written: piece(written, size - 1)})
    call(name, **{read: piece(read, 0), written: piece(written, size)})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", [48, 49, 1e9, np.inf])
def test_an_index_outside_the_image_is_refused_before_anything_is_added(index, dtype):
    arguments = good_calls(dtype)["maxpool_backward"]
    arguments["out_deltas"][:] = 1
    arguments["argmax"][1, 1, 1, 2] = index
    with pytest.raises(ValueError, match="^argmax must hold indices below 48.* not "):
        _cpuop.maxpool_backward(**arguments)
    assert not arguments["in_deltas"].any()


@pytest.mark.parametrize("axis, argument", [(0, "row_indices"), (1, "col_indices")])
@pytest.mark.parametrize("code", ["i1", "i8"])
def test_a_crop_that_leaves_its_image_is_refused(axis, argument, code):
    highest = (2, 1)[axis]
    for wrong in (-1, highest + 1):
        expected = rf"^{argument}\[1\] must be between 0 and {highest} .*not {wrong}"
        with pytest.raises(ValueError, match=expected):
            call("_crop_images", **{argument: np.array([0, wrong], code)})
    call("_crop_images", **{argument: np.array([0, highest], code)})


@pytest.mark.parametrize("argument", ["row_indices", "col_indices"])
def test_crop_indices_of_the_wrong_kind_are_refused(argument):
    for wrong in (np.array([0.0, 1.0]), np.array([True, False]), np.array([0, 1], "O")):
        with pytest.raises(TypeError, match=rf"^{argument} must be of an integer type"):
            call("_crop_images", **{argument: wrong})
    with pytest.raises(TypeError, match=rf"^{argument} must be a numpy.ndarray"):
        call("_crop_images", **{argument: [0, 1]})
    with pytest.raises(ValueError, match=rf"^{argument} must have 1 dimension, not 2"):
        call("_crop_images", **{argument: np.zeros((2, 1), int)})
    for count in (1, 3):
        with pytest.raises(
            ValueError, match=rf"^{argument} must have shape \(2,\) .*not \({count},\)"
        ):
            call("_crop_images", **{argument: np.zeros(count, int)})
    huge = np.array([0, 2**64 - 1], np.uint64)
    with pytest.raises(ValueError, match=rf"^{argument}\[1\] must be between"):
        call("_crop_images", **{argument: huge})


@pytest.mark.parametrize("argument", ["height", "width"])
def test_a_crop_larger_than_the_images_is_refused(argument):
    with pytest.raises(ValueError, match=rf"^{argument} must be at most 4, .* not 5"):
        call("_crop_images", **{argument: 5})
    with pytest.raises(ValueError, match=rf"^{argument} must be between 0 and"):
        call("_crop_images", **{argument: -1})


@pytest.mark.parametrize("name", ALL)
def test_refusals_leave_no_references_behind(name):
    arguments = good_calls()[name]
    for argument in arguments:
        broken = {**arguments, argument: object()}
        watched = [v for v in broken.values() if isinstance(v, np.ndarray)]
        before = [sys.getrefcount(array) for array in watched]
        for _ in range(50):
            with pytest.raises(TypeError):
                getattr(_cpuop, name)(**broken)
        assert [sys.getrefcount(array) for array in watched] == before


def test_crops_and_refused_crops_leave_no_memory_behind():
    arguments = good_calls()["_crop_images"]
    refused = {**arguments, "col_indices": np.array([0, 99])}

    def both():
        _cpuop._crop_images(**arguments)
        with pytest.raises(ValueError):
            _cpuop._crop_images(**refused)

    both()
    tracemalloc.start()
    try:
        both()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(500):
            both()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    # A leak of one index array of 16 bytes and its object would be over 50 kB.
    assert grown < 20_000


# ---- threads ----


def slow_call(name):
    """Return arguments for a call that takes a hundredth of a second at the least."""
    image, kernel, one = np.zeros((4, 96, 96, 16), np.float32), (19, 19), (1, 1)
    if name in ("im2col", "col2im"):
        layout = (96, 96, 16, 13, 13, 6, 6, 6, 6, 1, 1)
        flat, col = image[0].ravel(), np.zeros(col_size(layout), np.float32)
        return (flat, *layout, col) if name == "im2col" else (col, *layout, flat)
    if name == "_crop_images":
        images = np.zeros((32, 64, 40, 40, 8), np.float32)
        corner = np.zeros(64, int)
        return images, 32, 32, corner, corner, junk((32, 64, 32, 32, 8), np.float32)
    if name == "maxpool_backward":
        many = np.zeros((512, 64, 64, 8), np.float32)
        return many, one, many, 0, one, many, many.copy(), many
    pool = (image, kernel, np.zeros_like(image), 9, one)
    extra = {"maxpool_forward": 1, "avgpool_forward": 0, "avgpool_backward": 2}[name]
    return (*pool, *(np.zeros_like(image) for _ in range(extra)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_another_thread_runs_python_while_an_op_works(name):
    arguments = slow_call(name)
    ran = []
    go = threading.Lock()
    go.acquire()

    def wait_for_the_gil():
        with go:
            ran.append(True)

    interval = sys.getswitchinterval()
    other = threading.Thread(target=wait_for_the_gil)
    other.start()
    # From here on the other thread gets the GIL only where it is given up freely.
    sys.setswitchinterval(50)
    try:
        go.release()
        for _ in range(5):
            getattr(_cpuop, name)(*arguments)
        ran_meanwhile = bool(ran)
    finally:
        sys.setswitchinterval(interval)
        other.join()
    assert ran_meanwhile


@pytest.mark.parametrize("dtype", DTYPES)
def test_ops_in_many_threads_at_once_do_not_disturb_each_other(dtype):
    def work(seed):
        rng = np.random.default_rng(seed)
        x = values(rng, (8, 17, 19, 5 + seed), dtype, "odd")
        shape = pooled_shape(x.shape, (3, 2), 1, (2, 1))
        out, argmax, mean = (junk(shape, dtype) for _ in range(3))
        delta = np.ones(shape, dtype)
        back, back_mean = np.zeros_like(x), np.zeros_like(x)
        layout = (17, 19, x.shape[3], 3, 3, 1, 1, 1, 1, 1, 1)
        col, image = junk(col_size(layout), dtype), np.zeros_like(x[0]).ravel()
        _cpuop.maxpool_forward(x, (3, 2), out, 1, (2, 1), argmax)
        _cpuop.maxpool_backward(x, (3, 2), out, 1, (2, 1), argmax, back, delta)
        _cpuop.avgpool_forward(x, (3, 2), mean, 1, (2, 1))
        _cpuop.avgpool_backward(x, (3, 2), mean, 1, (2, 1), back_mean, delta)
        _cpuop.im2col(x[0].ravel(), *layout, col)
        _cpuop.col2im(col, *layout, image)
        return out, argmax, mean, back, back_mean, col, image

    alone = {seed: work(seed) for seed in range(4)}
    wrong = []
    start = threading.Barrier(4)

    def repeat(seed):
        start.wait()
        for _ in range(20):
            with np.errstate(all="ignore"):
                if not all(map(same_bits, work(seed), alone[seed])):
                    wrong.append(seed)

    threads = [threading.Thread(target=repeat, args=(seed,)) for seed in alone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_an_argmax_that_changes_under_way_cannot_make_the_op_leave_its_arrays():
    shape = (64, 32, 32, 4)
    argmax = np.zeros(shape, np.float32)
    guarded = np.zeros(3 * argmax.size, np.float32)
    in_deltas = guarded[argmax.size : 2 * argmax.size].reshape(shape)
    deltas = np.ones(shape, np.float32)
    done = threading.Event()

    def spoil():
        while not done.is_set():
            argmax.fill(argmax.size)
            argmax.fill(0)

    other = threading.Thread(target=spoil)
    other.start()
    try:
        for _ in range(50):
            try:
                _cpuop.maxpool_backward(
                    argmax, (1, 1), argmax, 0, (1, 1), argmax, in_deltas, deltas
                )
            except ValueError:
                pass
    finally:
        done.set()
        other.join()
    assert not guarded[: argmax.size].any() and not guarded[2 * argmax.size :].any()
