from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from torchrl_lightning._core.moments import Moments

samples = arrays(np.float64, st.tuples(st.integers(1, 40), st.just(3)), elements=st.floats(-1e3, 1e3, width=32))


@given(samples, st.lists(st.integers(0, 40), max_size=4))
def test_merged_moments_equal_moments_of_all_samples(values, cuts):
    cuts = sorted(min(cut, len(values)) for cut in cuts)
    moments = Moments.empty(3)
    for part in np.split(values, cuts):
        if len(part):
            moments = moments.merged(Moments.from_samples(torch.from_numpy(part)))
    assert moments.count == len(values)
    np.testing.assert_allclose(moments.mean, values.mean(0), rtol=1e-12, atol=1e-9)
    np.testing.assert_allclose(moments.variance, values.var(0), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("value", [0.1, 1e9 + 0.1, -123456.789, 1e15 + 0.3, 1e-300, 5e-324, 3e300])
@pytest.mark.parametrize("count", [1, 2, 7, 256, 4099])
def test_constant_has_an_exact_mean_and_zero_spread(value, count):
    moments = Moments.empty()
    for _ in range(3):
        moments = moments.merged(Moments.from_samples(torch.full((count,), value, dtype=torch.float64)))
    assert (moments.mean.item(), moments.spread.item()) == (value, 0.0)


@pytest.mark.parametrize("offset", [0.0, 1.7e9, -5412345.678, 2.0**40])
def test_moments_of_small_differences_at_a_large_offset_are_exact(offset):
    values = (np.random.default_rng(0).normal(size=3000) * 4).round(2) + offset
    exact = [Fraction(value) for value in values.tolist()]
    mean = sum(exact) / len(exact)
    variance = float(sum((value - mean) ** 2 for value in exact) / len(exact))
    at_once, merged = Moments.from_samples(torch.from_numpy(values)), Moments.empty()
    for chunk in torch.from_numpy(values).split(7):
        merged = merged.merged(Moments.from_samples(chunk))
    assert abs(at_once.mean.item() - float(mean)) <= np.spacing(abs(offset) + 1.0)
    assert at_once.variance.item() == pytest.approx(variance, rel=1e-9)
    assert abs(merged.mean.item() - float(mean)) <= 40 * np.spacing(abs(offset) + 1.0)
    assert merged.variance.item() == pytest.approx(variance, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.float16])
def test_moments_of_other_dtypes_equal_moments_of_float64(dtype):
    offset = {torch.int32: 1_700_000_000, torch.int64: 2**52, torch.uint8: 200, torch.float16: 1000}[dtype]
    steps = torch.arange(9) % 3
    moments = Moments.from_samples((steps + offset).to(dtype))
    assert moments.mean.item() == offset + 1
    assert moments.variance.item() == pytest.approx(2 / 3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_moments_of_non_finite_values_are_not_finite(bad):
    values = torch.zeros(9, 2, dtype=torch.float64)
    values[4, 1] = bad
    assert Moments.from_samples(values).mean.isfinite().tolist() == [True, False]


def test_merging_keeps_differences_below_single_precision():
    values = torch.arange(20_000, dtype=torch.float64)[:, None] % 2 + 1e6
    moments = Moments.empty(1)
    for part in values.float().split(7):
        moments = moments.merged(Moments.from_samples(part))
    assert moments.variance.item() == pytest.approx(0.25, rel=1e-9)
