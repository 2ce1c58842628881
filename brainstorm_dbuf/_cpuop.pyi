"""Patches, pooling and cropping for brainstorm's NumpyHandler and iterators, in C."""

from typing import Any, Sequence, SupportsIndex, TypeVar

import numpy as np
from numpy.typing import NDArray

_Real = TypeVar("_Real", np.float32, np.float64)

def maxpool_forward(
    inputs: NDArray[_Real],
    kernel: Sequence[SupportsIndex],
    outputs: NDArray[_Real],
    padding: SupportsIndex,
    strides: Sequence[SupportsIndex],
    argmax: NDArray[_Real],
) -> None: ...
def maxpool_backward(
    inputs: NDArray[_Real],
    kernel: Sequence[SupportsIndex],
    outputs: NDArray[_Real],
    padding: SupportsIndex,
    strides: Sequence[SupportsIndex],
    argmax: NDArray[_Real],
    in_deltas: NDArray[_Real],
    out_deltas: NDArray[_Real],
) -> None: ...
def avgpool_forward(
    inputs: NDArray[_Real],
    kernel: Sequence[SupportsIndex],
    outputs: NDArray[_Real],
    padding: SupportsIndex,
    strides: Sequence[SupportsIndex],
) -> None: ...
def avgpool_backward(
    inputs: NDArray[_Real],
    kernel: Sequence[SupportsIndex],
    outputs: NDArray[_Real],
    padding: SupportsIndex,
    strides: Sequence[SupportsIndex],
    in_deltas: NDArray[_Real],
    out_deltas: NDArray[_Real],
) -> None: ...
def im2col(
    flat_in: NDArray[_Real],
    height: SupportsIndex,
    width: SupportsIndex,
    channels: SupportsIndex,
    kernel_h: SupportsIndex,
    kernel_w: SupportsIndex,
    pad_t: SupportsIndex,
    pad_l: SupportsIndex,
    pad_b: SupportsIndex,
    pad_r: SupportsIndex,
    stride_h: SupportsIndex,
    stride_w: SupportsIndex,
    flat_col: NDArray[_Real],
) -> None: ...
def col2im(
    flat_col: NDArray[_Real],
    height: SupportsIndex,
    width: SupportsIndex,
    channels: SupportsIndex,
    kernel_h: SupportsIndex,
    kernel_w: SupportsIndex,
    pad_t: SupportsIndex,
    pad_l: SupportsIndex,
    pad_b: SupportsIndex,
    pad_r: SupportsIndex,
    stride_h: SupportsIndex,
    stride_w: SupportsIndex,
    flat_in: NDArray[_Real],
) -> None: ...
def _crop_images(
    inputs: NDArray[_Real],
    height: SupportsIndex,
    width: SupportsIndex,
    row_indices: NDArray[np.integer[Any]],
    col_indices: NDArray[np.integer[Any]],
    outputs: NDArray[_Real],
) -> None: ...
