"""Arrays as brainstorm's buffer code cuts them, the same on the host and on the device.

A *placed* array lies somewhere in a flat buffer of its own: shifted by some elements,
as a range of steps, a slice of features or a piece out of the middle of a larger array.
The same slices and reshapes cut it out of a NumPy array and out of a DeviceArray, so an
operation can be run on both and the whole buffers compared, what lies around the array
included.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from conftest import KIND

EXAMPLES = int(os.environ.get("BRAINSTORM_DBUF_TEST_EXAMPLES", "25"))

# For property tests that run on a handler from a fixture, each example on the same one.
on_one_handler = settings(
    deadline=None,
    max_examples=EXAMPLES,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

EPS = float(np.finfo(np.float32).eps)
TINY = float(np.finfo(np.float32).smallest_subnormal)
LARGEST = float(np.finfo(np.float32).max)

SPECIAL = np.array(
    [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, TINY, -TINY, 1e-40], np.float32
)
EXTREME = np.array([LARGEST, -LARGEST, 1.2e-38, 88.8, -88.8, -104.0], np.float32)

# Around the sizes of a warp, a block and four elements to a thread.
SIZES = [
    (31,),
    (255,),
    (256,),
    (257,),
    (1023,),
    (1025,),
    (4099,),
    (33, 31),
    (129, 8),
    (1, 1000),
    (1000, 1),
    (5, 67, 3),
    (2, 3, 171),
    (7, 5, 3, 11),
    (3, 1, 1, 2, 67),
]
if KIND == "real":
    SIZES += [((1 << 20) + 3,), (1025, 1027), (17, 100, 1001), (3, 7, 11, 13, 129)]

shapes = st.one_of(
    st.lists(st.integers(0, 5), min_size=1, max_size=5).map(tuple),
    st.sampled_from(SIZES),
)


@dataclass(frozen=True)
class Layout:
    """Where an array lies in its flat buffer.

    It is cut out of a larger array, which has `before` and `after` more elements on
    each axis and starts `offset` elements into the buffer.
    """

    shape: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    offset: int = 0

    @property
    def outer(self):
        return tuple(map(sum, zip(self.before, self.shape, self.after)))

    @property
    def length(self):
        return self.offset + int(np.prod(self.outer)) + 3

    def cut(self, buffer):
        """Return the array's view of a flat buffer, NumPy's or a device's."""
        size = int(np.prod(self.outer))
        outer = buffer[self.offset : self.offset + size].reshape(self.outer)
        if self.outer == self.shape:
            return outer
        return outer[tuple(slice(b, b + n) for b, n in zip(self.before, self.shape))]


def whole(shape):
    none = (0,) * len(shape)
    return Layout(tuple(shape), none, none)


@st.composite
def layouts(draw, shape):
    """Return a Layout for an array of that shape."""
    rank = len(shape)
    before, after = [0] * rank, [0] * rank
    kinds = ["whole", "whole", "shifted", "features", "steps", "both", "anywhere"]
    kind = draw(st.sampled_from(kinds))
    axes = {"features": [-1], "steps": [0], "both": [0, -1], "anywhere": range(rank)}
    if rank:
        for axis in axes.get(kind, ()):
            before[axis], after[axis] = draw(st.integers(0, 5)), draw(st.integers(0, 4))
    offset = draw(st.integers(0, 4)) if kind != "whole" else 0
    return Layout(tuple(shape), tuple(before), tuple(after), offset)


@st.composite
def values(draw, shape, extreme=False):
    """Return a float32 array: ordinary numbers of all magnitudes, some special ones.

    Products of those that are not `extreme` stay finite.
    """
    rnd = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    array = rnd.standard_normal(shape) * 10.0 ** rnd.uniform(-4, 4, shape)
    share = draw(st.sampled_from([0.0, 0.0, 0.2]))
    special = np.concatenate([SPECIAL, EXTREME]) if extreme else SPECIAL
    return np.where(
        rnd.random(shape) < share, rnd.choice(special, shape), array
    ).astype(np.float32)


def buffer_of(layout, array):
    """Return a flat host buffer with the array in its place.

    What lies around it are different NaNs, whose bits would show what happened to them.
    """
    bits = np.arange(layout.length, dtype=np.uint32) + np.uint32(0x7FC00001)
    buffer = bits.view(np.float32)
    layout.cut(buffer)[...] = array
    return buffer


def inside(layout):
    """Return which elements of the flat buffer are the array's."""
    mask = np.zeros(layout.length, bool)
    layout.cut(mask)[...] = True
    return mask


def assert_same_bits(actual, expected, what=""):
    np.testing.assert_array_equal(
        actual.view(np.uint32), expected.view(np.uint32), err_msg=what
    )


def assert_equal_numbers(actual, expected, signed_zeros=True):
    """Compare as numbers: any NaN is a NaN, and a zero keeps its sign."""
    np.testing.assert_array_equal(actual, expected)
    if signed_zeros:
        zeros = expected == 0
        np.testing.assert_array_equal(
            np.signbit(actual[zeros]), np.signbit(expected[zeros]), "signs of zeros"
        )


def assert_within(actual, expected, tolerance):
    """Compare elements that are finite within their tolerance, the others exactly."""
    actual = np.asarray(actual, np.float64)
    expected = np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    tolerance = np.broadcast_to(tolerance, expected.shape)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(actual[~finite], expected[~finite])
    off = np.abs(actual[finite] - expected[finite])
    allowed = tolerance[finite]
    wrong = ~(off <= allowed)
    if wrong.any():
        k = int(np.argmax(np.where(wrong, off / np.maximum(allowed, 1e-300), 0)))
        raise AssertionError(
            f"{wrong.sum()} of {expected.size} elements are off; the worst is "
            f"{actual[finite][k]!r} instead of {expected[finite][k]!r}, "
            f"off by {off[k]:.3g} where {allowed[k]:.3g} is allowed"
        )
