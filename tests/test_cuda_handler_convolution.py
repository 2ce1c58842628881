"""CudaHandler's convolution and pooling against NumpyHandler's.

Pooling gives NumpyHandler's bits, as each result is one choice, or one sum in a given
order. A convolution's sums are cuBLAS's: they are compared with float64, within what
float32 may be off for sums of such magnitudes.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import brainstorm_dbuf as dbuf  # noqa: F401  (before brainstorm)
from brainstorm.handlers import NumpyHandler
from layouts import (
    EPS,
    Layout,
    assert_equal_numbers,
    assert_same_bits,
    assert_within,
    buffer_of,
    inside,
    layouts,
    on_one_handler,
    values,
    whole,
)

pytestmark = [pytest.mark.timeout(600)]

# The arguments in the order of brainstorm's layers, and which are written.
ARGUMENTS = {
    "conv2d_forward_batch": "inputs weights bias outputs padding stride",
    "conv2d_backward_batch": "inputs weights padding stride in_deltas out_deltas "
    "weight_deltas bias_deltas",
    "maxpool2d_forward_batch": "inputs window outputs padding stride argmax",
    "maxpool2d_backward_batch": "inputs window outputs padding stride argmax in_deltas "
    "out_deltas",
    "avgpool2d_forward_batch": "inputs window outputs padding stride",
    "avgpool2d_backward_batch": "inputs window outputs padding stride in_deltas "
    "out_deltas",
}
WRITTEN = {
    "conv2d_forward_batch": ["outputs"],
    "conv2d_backward_batch": ["in_deltas", "weight_deltas", "bias_deltas"],
    "maxpool2d_forward_batch": ["outputs", "argmax"],
    "maxpool2d_backward_batch": ["in_deltas"],
    "avgpool2d_forward_batch": ["outputs"],
    "avgpool2d_backward_batch": ["in_deltas"],
}


def names_of(operation):
    return ARGUMENTS[operation].split()


def windows(length, window, padding, stride):
    return max(0, (length + 2 * padding - window) // stride + 1)


def run(cuda, operation, arrays, numbers, places=None):
    """Run on the device, the arrays in their places; return those that are written.

    What lies around them and what is not written must be as it was.
    """
    places = places or {}
    places = {a: places.get(a, whole(array.shape)) for a, array in arrays.items()}
    before = {a: buffer_of(places[a], array) for a, array in arrays.items()}
    buffers = {a: cuda.create_from_numpy(buffer) for a, buffer in before.items()}
    views = {a: places[a].cut(buffer) for a, buffer in buffers.items()}
    getattr(cuda, operation)(**views, **numbers)
    results = {}
    for a, buffer in buffers.items():
        after = cuda.get_numpy_copy(buffer)
        kept = np.ones(after.size, bool)
        if a in WRITTEN[operation]:
            kept = ~inside(places[a])
            results[a] = places[a].cut(after).copy()
        assert_same_bits(after[kept], before[a][kept], a)
    return results


def on_numpy(operation, arrays, numbers, dtype=np.float32):
    """Run on NumpyHandler; return the arrays that are written."""
    arrays = {a: array.astype(dtype) for a, array in arrays.items()}
    given = [{**arrays, **numbers}[name] for name in names_of(operation)]
    with np.errstate(all="ignore"):
        getattr(NumpyHandler(dtype), operation)(*given)
    return {a: arrays[a] for a in WRITTEN[operation]}


# ------------------------------------------------------------------------- convolution


def convolution_shapes(shape, filters, window, padding, stride):
    n, h, w, c = shape
    outputs = (
        n,
        windows(h, window[0], padding, stride[0]),
        windows(w, window[1], padding, stride[1]),
        filters,
    )
    weights = (filters, *window, c)
    return {
        "inputs": shape,
        "weights": weights,
        "bias": (filters,),
        "outputs": outputs,
        "in_deltas": shape,
        "out_deltas": outputs,
        "weight_deltas": weights,
        "bias_deltas": (filters,),
    }


def check_convolution(cuda, operation, arrays, numbers, places=None):
    """Compare with float64, and see that a second call gives the same bits."""
    results = run(cuda, operation, arrays, numbers, places)
    again = run(cuda, operation, arrays, numbers, places)
    expected = on_numpy(operation, arrays, numbers, np.float64)
    sizes = {a: np.abs(array) for a, array in arrays.items()}
    size = on_numpy(operation, sizes, numbers, np.float64)
    outputs = arrays["outputs" if "outputs" in arrays else "out_deltas"]
    addends = {
        "outputs": arrays["weights"][:1].size + 1,
        "in_deltas": arrays["weights"].size + 1,
        "weight_deltas": outputs[..., :1].size,
        "bias_deltas": outputs[..., :1].size,
    }
    for a, result in results.items():
        assert_same_bits(again[a], result, a)
        # Errors of a sum grow slowly, as they are of either sign; few addends may not.
        off = EPS * min(addends[a] + 1, 8 + 2 * addends[a] ** 0.5)
        with np.errstate(all="ignore"):
            assert_within(result, expected[a], off * size[a] + 1e-36)


sides = st.one_of(st.integers(0, 8), st.integers(3, 8))


@st.composite
def convolutions(draw, operation):
    """Return arrays, numbers and places for one of the two operations."""
    shape = (
        draw(st.integers(0, 3)),
        draw(sides),
        draw(sides),
        draw(st.sampled_from([0, 1, 1, 2, 3, 3, 4, 4, 5, 8, 12, 32])),
    )
    filters = draw(st.sampled_from([0, 1, 2, 3, 4, 5, 8, 9, 12, 33]))
    window = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    stride = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    padding = draw(st.integers(-1, 3))
    if draw(st.integers(0, 5)) == 0:
        window, stride, padding = (1, 1), (1, 1), 0
    sizes = convolution_shapes(shape, filters, window, padding, stride)
    names = [a for a in names_of(operation) if a in sizes]
    arrays = {a: draw(values(sizes[a])) for a in names}
    places = {a: draw(layouts(sizes[a])) for a in names}
    return arrays, {"padding": padding, "stride": stride}, places


@on_one_handler
@given(convolutions("conv2d_forward_batch"))
def test_a_convolution_is_numpys(cuda, case):
    check_convolution(cuda, "conv2d_forward_batch", *case)


@on_one_handler
@given(convolutions("conv2d_backward_batch"))
def test_the_deltas_of_a_convolution_are_numpys(cuda, case):
    check_convolution(cuda, "conv2d_backward_batch", *case)


CONVOLUTIONS = {
    "cifar, first layer": ((2, 32, 32, 3), 32, (5, 5), 2, (1, 1)),
    "cifar, second layer": ((2, 15, 15, 32), 32, (5, 5), 2, (1, 1)),
    "cifar, third layer": ((2, 7, 7, 32), 64, (5, 5), 2, (1, 1)),
    "digits": ((3, 28, 28, 1), 6, (5, 5), 0, (1, 1)),
    "rows of a prime number": ((1, 19, 19, 2), 3, (3, 3), 0, (1, 1)),
    "slices with a rest": ((1, 23, 21, 1), 2, (1, 1), 0, (1, 1)),
    "pointwise": ((5, 9, 11, 12), 7, (1, 1), 0, (1, 1)),
    "pointwise, one channel": ((3, 20, 9, 1), 4, (1, 1), 0, (1, 1)),
    "a pixel, every other": ((2, 9, 9, 4), 5, (1, 1), 0, (2, 2)),
    "a pixel, padded": ((2, 5, 5, 4), 5, (1, 1), 1, (1, 1)),
    "strides with gaps": ((2, 14, 17, 4), 3, (2, 3), 1, (4, 5)),
    "the whole image": ((4, 6, 7, 3), 9, (6, 7), 0, (1, 1)),
    "windows larger than the image": ((2, 3, 2, 4), 5, (6, 5), 2, (1, 1)),
    "windows of padding only": ((1, 2, 2, 3), 2, (2, 2), 5, (3, 3)),
    "images of no pixels": ((2, 0, 0, 3), 2, (1, 1), 1, (1, 1)),
    "cropped": ((2, 8, 9, 3), 4, (3, 3), -1, (1, 2)),
    "no channels": ((2, 5, 5, 0), 3, (3, 3), 0, (1, 1)),
    "no filters": ((2, 5, 5, 3), 0, (3, 3), 0, (1, 1)),
    "no images": ((0, 5, 5, 3), 3, (3, 3), 0, (1, 1)),
    "no window fits": ((2, 2, 2, 3), 3, (5, 5), 0, (1, 1)),
    "many filters": ((1, 4, 4, 3), 1030, (2, 2), 0, (1, 1)),
    "odd filters": ((1, 4, 4, 3), 257, (2, 2), 0, (1, 1)),
}


def convolution_case(operation, shape, filters, window, padding, stride):
    rnd = np.random.default_rng(1)
    sizes = convolution_shapes(shape, filters, window, padding, stride)
    arrays = {
        a: rnd.standard_normal(sizes[a]).astype(np.float32)
        for a in names_of(operation)
        if a in sizes
    }
    return arrays, {"padding": padding, "stride": stride}


@pytest.mark.parametrize("operation", ["conv2d_forward_batch", "conv2d_backward_batch"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_of_all_shapes(name, operation, cuda):
    arrays, numbers = convolution_case(operation, *CONVOLUTIONS[name])
    check_convolution(cuda, operation, arrays, numbers)


@pytest.mark.parametrize("operation", ["conv2d_forward_batch", "conv2d_backward_batch"])
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((1, 194, 189, 1), id="part of an image"),
        pytest.param((3, 130, 132, 1), id="whole images", marks=pytest.mark.gpu),
    ],
)
def test_patches_that_exceed_the_workspace_go_in_chunks(shape, operation, cuda):
    arrays, numbers = convolution_case(operation, shape, 2, (64, 64), 0, (1, 1))
    check_convolution(cuda, operation, arrays, numbers)


def test_gradients_are_set_and_deltas_added_to(cuda):
    arrays, numbers = convolution_case(
        "conv2d_backward_batch", (2, 5, 5, 3), 4, (3, 3), 1, (1, 1)
    )
    first = run(cuda, "conv2d_backward_batch", arrays, numbers)
    more = {**arrays, "in_deltas": arrays["in_deltas"] + 1}
    more["weight_deltas"] = np.full_like(arrays["weight_deltas"], np.nan)
    more["bias_deltas"] = np.full_like(arrays["bias_deltas"], np.nan)
    second = run(cuda, "conv2d_backward_batch", more, numbers)
    for a in ("weight_deltas", "bias_deltas"):
        assert_same_bits(first[a], second[a])
    np.testing.assert_allclose(second["in_deltas"], first["in_deltas"] + 1, atol=1e-5)


# ----------------------------------------------------------------------------- pooling


def pooling_case(rnd, kind, shape, window, padding, stride, outputs=None):
    """Return the arrays and numbers of all operations of a kind of pooling."""
    n, h, w, c = shape
    rows, columns = outputs or (
        windows(h, window[0], padding, stride[0]),
        windows(w, window[1], padding, stride[1]),
    )
    pooled = (n, rows, columns, c)
    inputs = rnd.standard_normal(shape).astype(np.float32)
    if kind == "ties":
        inputs = rnd.integers(-1, 2, shape).astype(np.float32)
    elif kind == "odd":
        low = np.finfo(np.float32).min
        odd = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, low, -low], np.float32)
        inputs = np.where(rnd.random(shape) < 0.6, rnd.choice(odd, shape), inputs)
    arrays = {
        "inputs": inputs,
        "outputs": rnd.standard_normal(pooled).astype(np.float32),
        "argmax": rnd.standard_normal(pooled).astype(np.float32),
        "in_deltas": rnd.standard_normal(shape).astype(np.float32),
        "out_deltas": rnd.standard_normal(pooled).astype(np.float32),
    }
    return arrays, {"window": window, "padding": padding, "stride": stride}


def arrays_of(operation, arrays):
    return {a: array for a, array in arrays.items() if a in names_of(operation)}


def check_pooling(cuda, arrays, numbers, places=None):
    """All four operations, on one set of arrays, give NumpyHandler's numbers."""
    for operation in list(ARGUMENTS)[2:]:
        own = arrays_of(operation, arrays)
        results = run(cuda, operation, own, numbers, places)
        expected = on_numpy(operation, own, numbers)
        for a, result in results.items():
            assert_equal_numbers(result, expected[a])
        if operation == "maxpool2d_forward_batch":
            arrays = {**arrays, **expected}  # the backward pass needs its argmax


@st.composite
def poolings(draw):
    small = st.integers(1, 4)
    shape = (
        draw(st.integers(0, 3)),
        draw(sides),
        draw(sides),
        draw(st.sampled_from([0, 1, 2, 3, 4, 5, 8, 9, 17, 32])),
    )
    outputs = None
    if draw(st.integers(0, 5)) == 0:  # more or fewer than fit
        outputs = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    rnd = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    arrays, numbers = pooling_case(
        rnd,
        draw(st.sampled_from(["plain", "ties", "odd"])),
        shape,
        draw(st.tuples(small, small)),
        draw(st.integers(-1, 4)),
        draw(st.tuples(small, small)),
        outputs,
    )
    return arrays, numbers, {a: draw(layouts(x.shape)) for a, x in arrays.items()}


@on_one_handler
@given(poolings())
def test_pooling_is_numpys_to_the_bit(cuda, case):
    check_pooling(cuda, *case)


POOLINGS = {
    "cifar": ((2, 32, 32, 32), (3, 3), 0, (2, 2)),
    "uneven": ((2, 15, 17, 2), (3, 2), 1, (2, 3)),
    "one pixel": ((3, 1, 1, 4), (3, 3), 1, (1, 1)),
    "windows of padding only": ((1, 3, 3, 2), (2, 2), 5, (1, 1)),
    "padding and long strides": ((1, 3, 3, 2), (2, 2), 5, (4, 3)),
    "windows larger than the image": ((1, 4, 5, 2), (9, 9), 4, (1, 1)),
    "strides with gaps": ((1, 8, 8, 2), (2, 2), 0, (3, 3)),
    "cropped": ((1, 8, 8, 4), (2, 3), -2, (1, 1)),
    "no images": ((0, 4, 4, 2), (2, 2), 0, (2, 2)),
    "no channels": ((2, 4, 4, 0), (2, 2), 0, (2, 2)),
    "no rows of outputs": ((2, 1, 4, 3), (2, 2), 0, (1, 1)),
    "images of no pixels": ((2, 0, 0, 3), (1, 1), 1, (1, 1)),
    "more than all threads hold": ((9, 65, 65, 67), (2, 2), 0, (2, 2)),
}


@pytest.mark.parametrize("kind", ["plain", "ties", "odd"])
@pytest.mark.parametrize("name", POOLINGS)
def test_poolings_of_all_shapes(name, kind, cuda):
    rnd = np.random.default_rng(2)
    check_pooling(cuda, *pooling_case(rnd, kind, *POOLINGS[name]))


def test_reads_windows_strides_and_paddings_as_numpyhandler_does(cuda):
    arrays, numbers = pooling_case(
        np.random.default_rng(3), "plain", (2, 6, 6, 3), (2, 2), 1, (2, 2)
    )
    numbers = {"window": [2, np.int64(2)], "padding": np.int32(1), "stride": [2, 2]}
    check_pooling(cuda, arrays, numbers)


def pool_whole(cuda, rows):
    """Max-pool one image with one channel by one window that covers it."""
    inputs = cuda.create_from_numpy(np.array(rows, np.float32)[None, :, :, None])
    outputs, argmax = cuda.ones((1, 1, 1, 1)), cuda.ones((1, 1, 1, 1))
    window = inputs.shape[1:3]
    cuda.maxpool2d_forward_batch(inputs, window, outputs, 0, (1, 1), argmax)
    return outputs.get().item(), argmax.get().item()


def test_the_first_of_equal_maxima_wins(cuda):
    assert pool_whole(cuda, [[1, 7], [7, 7]]) == (7, 1)
    assert str(pool_whole(cuda, [[0.0, -0.0]])) == "(0.0, 0.0)"
    assert str(pool_whole(cuda, [[-0.0, 0.0]])) == "(-0.0, 0.0)"


def test_nan_is_never_the_maximum(cuda):
    assert pool_whole(cuda, [[np.nan, 2], [np.nan, 1]]) == (2, 1)
    assert pool_whole(cuda, [[2, np.nan], [1, np.nan]]) == (2, 0)


@pytest.mark.parametrize("nothing", [np.nan, -np.inf, np.finfo(np.float32).min])
def test_nothing_above_the_lowest_value_gives_zero_and_minus_one(nothing, cuda):
    assert pool_whole(cuda, [[nothing, nothing], [nothing, nothing]]) == (0, -1)


MAX_BACKWARD = "maxpool2d_backward_batch"


def backward_case(rnd, shape, window, padding, stride):
    arrays, numbers = pooling_case(rnd, "plain", shape, window, padding, stride)
    return arrays_of(MAX_BACKWARD, arrays), numbers


@on_one_handler
@given(st.integers(0, 1 << 32), st.sampled_from([1, 3, 4, 8]), st.integers(0, 2))
def test_an_argmax_may_name_any_pixel_of_its_image(cuda, seed, channels, padding):
    """Also one outside its window, a fraction, and whatever counts as none."""
    rnd = np.random.default_rng(seed)
    shape = (3, 7, 5, channels)
    arrays, numbers = backward_case(rnd, shape, (2, 3), padding, (2, 1))
    size = 7 * 5 * channels
    argmax = rnd.integers(-1, size, arrays["argmax"].shape).astype(np.float32)
    odd = np.array([np.nan, -np.inf, -1, -2, -0.5, 0.5, size - 0.5, -1e30], np.float32)
    rare = rnd.random(argmax.shape) < 0.2
    arrays["argmax"] = np.where(rare, rnd.choice(odd, argmax.shape), argmax)
    result = run(cuda, MAX_BACKWARD, arrays, numbers)["in_deltas"]
    again = run(cuda, MAX_BACKWARD, arrays, numbers)["in_deltas"]
    assert_same_bits(again, result)
    expected = on_numpy(MAX_BACKWARD, arrays, numbers)["in_deltas"]
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("argmax", [60, 60.5, 2.0**31, 2.0**32, 1e30, np.inf])
@pytest.mark.parametrize("padding", [0, 3])
def test_an_argmax_beyond_the_image_is_found_when_values_are_asked_for(
    argmax, padding, cuda
):
    """Also that of a window without a pixel."""
    arrays, numbers = backward_case(
        np.random.default_rng(4), (2, 4, 5, 3), (2, 2), padding, (1, 1)
    )
    arrays["argmax"][:] = -1
    arrays["argmax"][1, 1, 1, 1] = 59
    expected = on_numpy(MAX_BACKWARD, arrays, numbers)["in_deltas"]
    arrays["argmax"][1, 0, 0, 2] = argmax
    device = {a: cuda.create_from_numpy(array) for a, array in arrays.items()}
    cuda.maxpool2d_backward_batch(**device, **numbers)
    with pytest.raises(IndexError, match="maxpool2d_backward_batch.*argmax"):
        cuda.get_numpy_copy(device["in_deltas"])
    assert_same_bits(cuda.get_numpy_copy(device["in_deltas"]), expected)


@pytest.mark.parametrize("channels", [1, 4])
def test_indices_above_two_to_the_24_are_rounded_as_numpys(channels, cuda):
    """What the index is rounded to may be another pixel: that gets the delta."""
    shape = (1, 1, (1 << 24) // channels + 40, channels)
    inputs = np.zeros(shape, np.float32)
    for channel in range(channels):
        inputs[0, 0, shape[2] - 3 - 2 * channel, channel] = 1
    for window, stride in (((1, shape[2]), (1, 1)), ((1, 1), (1, shape[2] - 3))):
        arrays, numbers = pooling_case(
            np.random.default_rng(5), "plain", (1, 1, 1, 1), window, 0, stride
        )
        pooled = (1, 1, windows(shape[2], window[1], 0, stride[1]), channels)
        arrays = {"inputs": inputs}
        arrays["outputs"] = arrays["argmax"] = np.ones(pooled, np.float32)
        arrays.update(on_numpy("maxpool2d_forward_batch", arrays, numbers))
        own = {a: arrays[a] for a in ("inputs", "outputs", "argmax")}
        results = run(cuda, "maxpool2d_forward_batch", own, numbers)
        assert_same_bits(results["argmax"], arrays["argmax"])
        arrays["in_deltas"] = np.zeros(shape, np.float32)
        arrays["out_deltas"] = 1 + np.arange(pooled[2] * channels, dtype=np.float32)
        arrays["out_deltas"] = arrays["out_deltas"].reshape(pooled)
        result = run(cuda, MAX_BACKWARD, arrays, numbers)["in_deltas"]
        expected = on_numpy(MAX_BACKWARD, arrays, numbers)["in_deltas"]
        np.testing.assert_array_equal(result, expected)


# ------------------------------------------------------------------------------ faults


def device_arguments(cuda, operation):
    """Return arguments of an operation, which fit."""
    if operation.startswith("conv2d"):
        arrays, numbers = convolution_case(
            operation, (2, 5, 6, 3), 4, (3, 2), 1, (2, 1)
        )
    else:
        arrays, numbers = pooling_case(
            np.random.default_rng(6), "plain", (2, 5, 6, 3), (3, 2), 1, (2, 1)
        )
        arrays = arrays_of(operation, arrays)
        if "argmax" in arrays:
            arrays["argmax"][:] = -1
    arrays = {a: cuda.create_from_numpy(array) for a, array in arrays.items()}
    return {**arrays, **numbers}


@pytest.mark.parametrize("operation", ARGUMENTS)
def test_arguments_have_brainstorms_names_and_order(operation, cuda):
    arguments = device_arguments(cuda, operation)
    assert sorted(arguments) == sorted(names_of(operation))
    assert getattr(cuda, operation)(**arguments) is None
    named = {a: arguments[a].get() for a in WRITTEN[operation]}
    arguments = device_arguments(cuda, operation)
    getattr(cuda, operation)(*(arguments[a] for a in names_of(operation)))
    for a, array in named.items():
        assert_same_bits(arguments[a].get(), array)


@pytest.mark.parametrize("operation", ARGUMENTS)
def test_an_array_of_another_shape_is_refused(operation, cuda):
    arguments = device_arguments(cuda, operation)
    # Strides leave a choice of pixels, and so does pooling, whose windows may lie
    # anywhere.
    free = {"inputs"} if "forward" in operation else set()
    free |= {"outputs"} if operation == "avgpool2d_forward_batch" else set()
    for name, array in arguments.items():
        if not hasattr(array, "get"):
            continue
        for axis in range(len(array.shape)):
            if name in free and axis in (1, 2):
                continue
            shape = list(array.shape)
            shape[axis] += 1
            others = [cuda.zeros(tuple(shape))]
            if axis == 0:
                others += [
                    array.reshape((array.size,)),
                    array.reshape((1, *array.shape)),
                ]
            for other in others:
                if other.shape == array.shape:
                    continue
                with pytest.raises(ValueError, match=f"^{operation}: ") as caught:
                    getattr(cuda, operation)(**{**arguments, name: other})
                assert "has shape (" in str(caught.value)


@pytest.mark.parametrize("operation", ARGUMENTS)
def test_something_else_than_an_array_is_refused(operation, cuda):
    arguments = device_arguments(cuda, operation)
    for name, array in arguments.items():
        if not hasattr(array, "get"):
            continue
        for other in (array.get(), None, 1.5):
            with pytest.raises(TypeError, match=f"^{operation}: {name} must be a Dev"):
                getattr(cuda, operation)(**{**arguments, name: other})


PAIRS = [
    (2, TypeError),
    ("22", TypeError),
    (np.array([2, 2]), TypeError),
    ((2,), ValueError),
    ((2, 2, 2), ValueError),
    ((2, 0), ValueError),
    ((-1, 2), ValueError),
    ((2, 1 << 30), ValueError),
    ((1 << 80, 2), ValueError),
    ((2.0, 2), TypeError),
    ((2, None), TypeError),
]


@pytest.mark.parametrize("operation", ARGUMENTS)
def test_numbers_that_make_no_sense_are_refused(operation, cuda):
    arguments = device_arguments(cuda, operation)
    bad = [
        ("padding", 1.0, TypeError),
        ("padding", None, TypeError),
        ("padding", (1, 1), TypeError),
        ("padding", 1 << 30, ValueError),
        ("padding", -(1 << 80), ValueError),
    ]
    bad += [(name, *pair) for name in ("window", "stride") for pair in PAIRS]
    for name, value, error in bad:
        if name not in arguments:
            continue
        with pytest.raises(error, match=f"^{operation}: {name}"):
            getattr(cuda, operation)(**{**arguments, name: value})


@pytest.mark.parametrize("operation", ARGUMENTS)
def test_an_output_that_shares_memory_is_refused(operation, cuda):
    arguments = device_arguments(cuda, operation)
    shapes_only = {"inputs", "outputs"} if "pool2d_backward" in operation else set()
    arrays = [a for a, array in arguments.items() if hasattr(array, "get")]
    for out in WRITTEN[operation]:
        for other in arrays:
            if other == out or other in shapes_only:
                continue
            a, b = arguments[out], arguments[other]
            hub = cuda.zeros((a.size + b.size,))
            views = {
                out: hub[: a.size].reshape(a.shape),
                other: hub[a.size - 1 : a.size - 1 + b.size].reshape(b.shape),
            }
            with pytest.raises(ValueError, match="shares memory") as caught:
                getattr(cuda, operation)(**{**arguments, **views})
            for name in (out, other):
                assert re.search(rf"\b{name}\b", str(caught.value))
            views[other] = hub[a.size :].reshape(b.shape)
            if "argmax" in views:
                cuda.fill(views["argmax"], -1)
            getattr(cuda, operation)(**{**arguments, **views})


@pytest.mark.parametrize("operation", ["conv2d_forward_batch", "conv2d_backward_batch"])
def test_outputs_must_have_the_pixels_that_fit(operation, cuda):
    arguments = device_arguments(cuda, operation)
    with pytest.raises(ValueError) as caught:
        getattr(cuda, operation)(**{**arguments, "stride": (1, 1)})
    name = "outputs" if "outputs" in arguments else "out_deltas"
    assert str(caught.value) == (
        f"{operation}: {name} has shape (2, 3, 7, 4), expected (2, 5, 7, 4)"
    )


@pytest.mark.parametrize("operation", ["conv2d_forward_batch", "conv2d_backward_batch"])
def test_weights_must_have_the_channels_of_the_inputs(operation, cuda):
    arguments = device_arguments(cuda, operation)
    for shape in ((4, 3, 2, 2), (4, 0, 2, 3), (4, 3, 6), (4, 3, 2, 3, 1)):
        weights = {"weights": cuda.zeros(shape)}
        with pytest.raises(ValueError, match=f"^{operation}: weights has shape"):
            getattr(cuda, operation)(**{**arguments, **weights})


def test_sources_side_by_side_in_one_hub(cuda):
    """A pitch between the images, and channels that do not come in aligned fours."""
    rnd = np.random.default_rng(7)
    for before, after in ((1, 0), (4, 4), (0, 3)):
        for operation in ARGUMENTS:
            if operation.startswith("conv2d"):
                arrays, numbers = convolution_case(
                    operation, (3, 5, 6, 4), 8, (3, 2), 1, (2, 1)
                )
            else:
                arrays, numbers = pooling_case(
                    rnd, "plain", (3, 5, 6, 4), (3, 2), 1, (2, 1)
                )
                arrays.update(
                    on_numpy(
                        "maxpool2d_forward_batch",
                        arrays_of("maxpool2d_forward_batch", arrays),
                        numbers,
                    )
                )
                arrays = arrays_of(operation, arrays)
            results = run(cuda, operation, arrays, numbers)
            places = {
                a: Layout(x.shape, (0, 0, 0, before), (0, 0, 0, after))
                for a, x in arrays.items()
                if x.ndim == 4
            }
            pitched = run(cuda, operation, arrays, numbers, places)
            for a, result in results.items():
                assert_same_bits(pitched[a], result)
