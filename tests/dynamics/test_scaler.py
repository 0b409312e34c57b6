"""Columns scaled to zero mean and unit deviation."""

from __future__ import annotations

import pytest
import torch

from kit.seeds import generator
from torchrl_lightning import StandardScaler


def test_mean_and_unbiased_deviation_in_float64():
    rows = torch.rand(1000, 3, generator=generator()) + torch.tensor([1e4, 0.0, -3.0])
    scaler = StandardScaler("abc").fit(rows)
    wide = rows.double()
    torch.testing.assert_close(scaler.mean, wide.mean(0), rtol=1e-14, atol=0.0)
    torch.testing.assert_close(scaler.std, wide.std(0), rtol=1e-12, atol=0.0)
    assert scaler(rows).dtype == torch.float32
    torch.testing.assert_close(scaler.inverse(scaler(wide)), wide, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("value", [0.1, 3e9, -7.0])
def test_constant_column_is_only_shifted(value):
    scaler = StandardScaler("a").fit(torch.full((100, 1), value))
    assert scaler.std.tolist() == [1.0]
    assert scaler(torch.full((2, 1), value)).abs().max() == 0.0


def test_single_row_has_no_deviation():
    scaler = StandardScaler("ab").fit(torch.tensor([[3.0, 4.0]]))
    assert scaler(torch.tensor([[4.0, 4.0]])).tolist() == [[1.0, 0.0]]


def test_values_are_unchanged_before_the_first_fit():
    scaler = StandardScaler("ab")
    assert scaler(torch.tensor([5.0, 6.0])).tolist() == [5.0, 6.0]
    assert int(scaler.count) == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_infinite_number_raises_with_its_column_and_changes_nothing(bad):
    rows = torch.zeros(4, 2)
    rows[2, 1] = bad
    scaler = StandardScaler(["height", "width"]).fit(torch.rand(3, 2))
    before = scaler.mean.clone()
    with pytest.raises(ValueError, match=r"Column width .*got (nan|inf) in 1 of 4 rows"):
        scaler.fit(rows)
    assert torch.equal(scaler.mean, before)


@pytest.mark.parametrize("shape", [(0, 2), (4, 3), (2,)])
def test_rows_of_another_shape_are_rejected(shape):
    with pytest.raises(ValueError, match=r"\[N, 2\] with the columns height, width"):
        StandardScaler(["height", "width"]).fit(torch.zeros(shape))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.int32])
@pytest.mark.parametrize("offset", [0, 1_700_000_037, -(2**30)])
def test_small_differences_at_a_large_offset_are_kept(dtype, offset):
    steps = torch.arange(60).remainder(5).sub(2)[:, None]
    rows = (steps + offset).to(dtype)
    scaler = StandardScaler("a").fit(rows)
    expected = steps / steps.double().std()
    torch.testing.assert_close(scaler(rows).double(), expected, atol=1e-6, rtol=0.0)
    torch.testing.assert_close(scaler.inverse(scaler(rows)).double(), rows.double(), atol=1e-6, rtol=0.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64])
@pytest.mark.parametrize("value", [0.1, 1e9 + 0.1, -1700000037.25])
def test_constant_becomes_exactly_zero(dtype, value):
    rows = torch.full((101, 1), value, dtype=torch.float64).to(dtype)
    scaler = StandardScaler("a").fit(rows)
    assert (scaler.mean.item(), scaler.std.item()) == (rows[0].item(), 1.0)
    assert (scaler(rows) == 0).all()
