"""Constructors are read as far as a config can hold them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from torchrl_lightning._fields import checked_type, config_fields


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (int, int),
        (float | None, float | None),
        (Literal["sync", "async"], str),
        (str | Path | None, str | None),
        (torch.device | str, str),
        (Sequence[int] | None, list[int] | None),
        (tuple[int, ...], list[int]),
        (int | float, int | float),
        (Sequence[int] | str, Any),
        (Callable[[], int] | None, Any),
        (tuple[int, str], Any),
        (torch.dtype, Any),
    ],
)
def test_types_are_those_that_a_config_can_check(annotation, expected):
    assert checked_type(annotation) == expected


class Part:
    def __init__(
        self, size: int, keys: tuple[str, ...] = ("a",), kind: type = dict, dtype: torch.dtype = torch.float64
    ):
        pass


def test_defaults_are_written_as_a_config_writes_them():
    assert config_fields(Part, ["keys"]) == [("size", int, "???"), ("kind", Any, "???"), ("dtype", Any, "float64")]
    assert config_fields(Part)[1] == ("keys", list[str], ["a"])


def test_an_argument_that_does_not_exist_cannot_be_left_out():
    with pytest.raises(ValueError, match="Part takes no length, width"):
        config_fields(Part, ["width", "size", "length"])
