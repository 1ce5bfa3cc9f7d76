"""The casts against torch's own, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dstool.checkpoint.cast import cast, not_finite

TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
BITS = {"F32": torch.int32, "BF16": torch.int16, "F16": torch.int16, "F64": torch.int64}


def patterns(dtype: str) -> torch.Tensor:
    """Every 16-bit pattern; of the wider types many at random, and the special ones."""
    if dtype in ("BF16", "F16"):
        return torch.arange(-(2**15), 2**15).to(torch.int16).view(TYPES[dtype])
    bits = torch.randint(-(2**31), 2**31 - 1, (2**18,), dtype=torch.int64)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 3.4e38, 65504.0, 65520.0, 1.00390625, 1.01171875]
    values = bits.to(torch.int32).view(torch.float32)
    return torch.cat([values.to(TYPES[dtype]), torch.tensor(special, dtype=TYPES[dtype])])


@pytest.mark.parametrize("source", TYPES)
@pytest.mark.parametrize("target", ["F32", "BF16", "F16"])
def test_every_pattern_is_rounded_as_torch_does(source: str, target: str) -> None:
    values = patterns(source)
    raw = values.view(torch.uint8).numpy()
    found = torch.from_numpy(np.ascontiguousarray(cast(raw, source, target)).view(np.uint8).copy())
    expected = values.to(TYPES[target])
    same = found.view(BITS[target]) == expected.view(BITS[target])
    nan = values.isnan()
    assert same[~nan].all()
    assert found.view(TYPES[target])[nan].isnan().all()


@pytest.mark.parametrize("dtype", TYPES)
def test_infinite_and_nan_are_counted(dtype: str) -> None:
    values = patterns(dtype)
    assert not_finite(values.view(torch.uint8).numpy(), dtype) == int((~values.isfinite()).sum())
