"""Floating-point bytes from one type to another, without torch: NumPy has no bfloat16, so its rounding is
here.

bfloat16 is the upper half of float32. It is rounded to the nearest, ties to even, as torch does: half a
unit less one is added to the lower half, and one more where the last bit that stays is odd. NaN stays NaN;
which of its many patterns it becomes differs among processors in torch too.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

NUMPY_TYPES: Final[Mapping[str, np.dtype[np.generic]]] = MappingProxyType(
    {
        "F64": np.dtype("<f8"),
        "F32": np.dtype("<f4"),
        "F16": np.dtype("<f2"),
        "BF16": np.dtype("<u2"),
    }
)
_QUIET_NAN: Final = 0x7FC0
_ROUND: Final = 0x7FFF


def cast(raw: NDArray[np.generic], source: str, target: str) -> NDArray[np.generic]:
    """The elements of `raw`, of type `source`, as elements of `target`. Shape [n], BF16 as uint16.

    What `target` cannot hold becomes infinite, as with torch.
    """
    if source == target:
        return raw
    with np.errstate(all="ignore"):
        wide = _to_float(raw, source)
        if target in ("BF16", "F16"):  # torch rounds a double to float32 first
            wide = wide.astype(np.float32, copy=False)
        if target == "BF16":
            return _to_bf16(wide)
        return wide.astype(NUMPY_TYPES[target])


def _to_float(raw: NDArray[np.generic], source: str) -> NDArray[Any]:
    if source != "BF16":
        return raw.view(NUMPY_TYPES[source])
    bits = raw.view(np.uint16).astype(np.uint32)
    np.left_shift(bits, 16, out=bits)
    return bits.view(np.float32)


def _to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = values.view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(_ROUND)
    rounded += bits
    rounded >>= np.uint32(16)
    result: NDArray[np.uint16] = rounded.astype(np.uint16)
    if np.isnan(values.max(initial=-np.inf)):  # NaN is the largest of all
        result[np.isnan(values)] = _QUIET_NAN
    return result


def not_finite(raw: NDArray[np.generic], dtype: str) -> int:
    """How many elements are infinite or NaN."""
    if dtype == "BF16":
        return int(np.count_nonzero((raw.view(np.uint16) & np.uint16(0x7F80)) == np.uint16(0x7F80)))
    return int(np.count_nonzero(~np.isfinite(raw.view(NUMPY_TYPES[dtype]))))
