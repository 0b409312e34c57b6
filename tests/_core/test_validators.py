"""Validators of settings raise one message for each kind of invalid value."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrl_lightning._core.validators import (
    boolean,
    budget,
    exact_ratio,
    fraction,
    integer,
    non_negative,
    one_of,
    optional,
    positive,
)


@pytest.mark.parametrize(
    ("check", "invalid", "expected"),
    [
        (integer, [0, -1, True, 1.0, "1", None, math.nan], "a positive integer"),
        (partial(integer, minimum=2), [1], "an integer of at least 2"),
        (budget, [0, -2, 1.5, True, "1", None, math.inf], "a positive integer, or -1 for no limit"),
        (partial(one_of, options=(0.5, None)), [1], "one of 0.5, None"),
        (positive, [0, -1.0, math.nan, "1", None, [1]], "above 0"),
        (non_negative, [-1e-9, math.inf, math.nan, "1", None], "a finite number of at least 0"),
        (fraction, [-1e-9, 1.0001, math.nan, "1", None, torch.zeros(2)], "between 0 and 1"),
    ],
)
def test_validators_reject_invalid_values(check: Any, invalid: list[Any], expected: str) -> None:
    for value in invalid:
        with pytest.raises(ValueError, match=rf"^gamma.*{expected}"):
            check(value, "gamma")


def test_validators_return_valid_values() -> None:
    assert integer(np.int64(3), "size") == integer(torch.tensor(3), "size") == 3
    assert integer(0, "burn_in", 0) == 0
    assert [budget(1e5, "frames"), budget(-1, "frames")] == [100_000, -1]
    assert positive(math.inf, "clip") == math.inf
    assert non_negative(0, "eps") == fraction(torch.tensor(0.0), "gamma") == 0.0
    assert optional(fraction)(None, "gamma") is None
    assert boolean(False, "shuffle") is False
    assert one_of(None, "norm", ("batch", None)) is None


def test_boolean_is_not_a_number_and_a_hint_ends_the_message() -> None:
    with pytest.raises(TypeError, match=r"shuffle.*1\."):
        boolean(1, "shuffle")
    with pytest.raises(ValueError, match=r"0; float\('inf'\)"):
        positive(0, "clip", "float('inf') clips nothing")


@given(digits=st.integers(0, 10**15), exponent=st.integers(-18, 6))
def test_exact_ratio_of_a_decimal_literal(digits: int, exponent: int) -> None:
    literal = f"{digits}e{exponent}"
    exact = exact_ratio(float(literal))
    is_short = exact.denominator <= 1_000_000
    assert exact == Fraction(literal) or (
        is_short and abs(float(exact) - float(literal)) <= 4 * math.ulp(float(literal))
    )


@given(st.fractions(0, 1000, max_denominator=1000))
def test_exact_ratio_of_a_computed_fraction(fraction: Fraction) -> None:
    assert exact_ratio(float(fraction)) == exact_ratio(fraction) == fraction


def test_exact_ratio_accepts_any_kind_of_number() -> None:
    assert [exact_ratio(value) for value in (3, np.float64(0.1), np.int64(2), torch.tensor(0.5))] == [
        3,
        Fraction(1, 10),
        2,
        Fraction(1, 2),
    ]
    assert exact_ratio(1e-300) > 0
