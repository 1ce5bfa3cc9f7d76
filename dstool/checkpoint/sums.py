"""What an adapter makes of a weight: computed in fp32, some rows at a time, with NumPy alone.

Whatever the types of the parts, nothing is rounded before the sum is: by the caller, once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from dstool.checkpoint.reader import Change, Entry, Rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Matrix = NDArray[np.float32]


def changing(change: Change, read: Callable[[Entry], Matrix]) -> Callable[[Matrix, int], Matrix]:
    """What makes of rows of a weight, [n, columns] in fp32, and the number of the first, those of the sum.

    Args:
        read: gives a small tensor, whole, in fp32.
    """
    if isinstance(change, Rows):
        return _replacing(np.array(change.indices), read(change.values))
    left, right = read(change.up), None if change.down is None else read(change.down)
    if change.transposed and right is not None:
        left, right = right.T, left.T
    lengths = None if change.magnitude is None else read(change.magnitude)
    scaling = np.float32(change.scaling)

    def add(base: Matrix, start: int) -> Matrix:
        here = slice(start, start + len(base))
        total: Matrix = (left[here].reshape(len(base), -1) if right is None else left[here] @ right) * scaling
        total += base
        if lengths is not None:
            total *= (lengths[here] / np.linalg.norm(total, axis=1))[:, None]
        return total

    return add


def _replacing(indices: Any, values: Matrix) -> Callable[[Matrix, int], Matrix]:
    def put(base: Matrix, start: int) -> Matrix:
        here = (indices >= start) & (indices < start + len(base))
        base[indices[here] - start] = values[here]
        return base

    return put
