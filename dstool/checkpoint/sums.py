"""What an adapter makes of a weight: computed in fp32, some rows at a time, with NumPy alone.

Whatever the types of the parts, nothing is rounded before the sum is: by the caller, once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Matrix: TypeAlias = "NDArray[np.float32]"
OfRows = Callable[[Matrix, int], Matrix]
"""Takes rows of a weight [n, columns] and the number of the first, and gives those of the sum."""


def adding(left: Matrix, right: Matrix | None, scaling: float, lengths: Matrix | None) -> OfRows:
    """`scaling` times `left` [m, r] @ `right` [r, n] is added, or times `left` alone.

    Args:
        lengths: what each row of the sum is then stretched to. Shape [m].
    """

    def add(base: Matrix, start: int) -> Matrix:
        here = slice(start, start + len(base))
        product = left[here].reshape(len(base), -1) if right is None else left[here] @ right
        total: Matrix = product * np.float32(scaling) + base
        if lengths is not None:
            total *= (lengths[here] / np.linalg.norm(total, axis=1))[:, None]
        return total

    return add


def replacing(indices: tuple[int, ...], values: Matrix) -> OfRows:
    """`values` [n, columns] take the place of the rows at `indices`."""
    places: Any = np.array(indices)

    def put(base: Matrix, start: int) -> Matrix:
        here = (places >= start) & (places < start + len(base))
        base[places[here] - start] = values[here]
        return base

    return put
