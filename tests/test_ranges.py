"""One wording for each kind of setting that makes no sense."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from torchrl_lightning.ranges import boolean, fraction, integer, not_negative, one_of, optional, positive


@pytest.mark.parametrize("wrong", [0, -1, True, 1.0, "1", None, math.nan])
def test_no_positive_integer(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"^size must be a positive integer, got "):
        integer(wrong, "size")


def test_integers_of_other_kinds_and_limits() -> None:
    assert integer(np.int64(3), "size") == integer(torch.tensor(3), "size") == 3
    assert integer(0, "burn_in", 0) == 0
    with pytest.raises(ValueError, match=r"^burn_in must be an integer of at least 2, got 1\.$"):
        integer(1, "burn_in", 2)


@pytest.mark.parametrize(
    ("check", "wrong", "expected"),
    [
        (positive, [0, -1.0, math.nan, "1", None, [1]], "above 0"),
        (not_negative, [-1e-9, math.inf, math.nan, "1", None], "a finite number of at least 0"),
        (fraction, [-1e-9, 1.0001, math.nan, "1", None, torch.zeros(2)], "between 0 and 1"),
    ],
)
def test_numbers_out_of_range(check: Any, wrong: list[Any], expected: str) -> None:
    for value in wrong:
        with pytest.raises(ValueError, match=f"^gamma must be {expected}, got "):
            check(value, "gamma")


def test_numbers_in_range_come_back_as_numbers() -> None:
    assert positive(math.inf, "clip") == math.inf
    assert not_negative(0, "eps") == fraction(torch.tensor(0.0), "gamma") == 0.0
    assert optional(fraction)(None, "gamma") is None


def test_a_hint_ends_the_message() -> None:
    with pytest.raises(ValueError, match=r"got 0; float\('inf'\) clips nothing\.$"):
        positive(0, "clip", "float('inf') clips nothing")


def test_flags_and_options() -> None:
    assert boolean(False, "shuffle") is False
    with pytest.raises(TypeError, match=r"shuffle must be True or False, got 1\."):
        boolean(1, "shuffle")
    assert one_of(None, "norm", ("batch", None)) is None
    with pytest.raises(ValueError, match=r"by must be one of 'steps', 'environments', got 'rows'\."):
        one_of("rows", "by", ("steps", "environments"))
