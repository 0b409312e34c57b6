"""A state is refused before anything is changed, and the message names the entry."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from torchrl_lightning.ranges import optional
from torchrl_lightning.state import (
    LARGEST,
    Check,
    anything,
    check_state,
    flag,
    generator,
    mapping,
    number,
    sequence,
    tensor,
    whole,
)

ROWS = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("check", "right", "wrong", "message"),
    [
        (whole(1, 9), 9, [0, 10, True, 1.0, torch.tensor(1), None], "an integer of at least 1, at most 9"),
        (whole(), LARGEST, [-1, LARGEST + 1], "an integer of at least 0"),
        (number(0), 0.5, [-0.1, math.nan, math.inf, "1", True], "a finite number of at least 0"),
        (flag, True, [1, None], "True or False"),
        (mapping, {"a": 1}, [[], {1: 2}, None], "a dict with strings as keys"),
        (sequence, (1,), [{}, "text"], "a list"),
        (optional(flag), None, [0], "True or False"),
        (tensor(torch.float32, 2, None), ROWS, [ROWS.double(), ROWS.T, ROWS[0], 1], r"a tensor \[2, any\] of float32"),
        (tensor(torch.float32, 2, 3, anywhere=True), ROWS, [ROWS.to("meta"), ROWS.to_sparse()], r"a tensor \[2, 3\]"),
        (tensor(torch.float32, 2, 3, low=0, high=1), ROWS, [ROWS - 1, ROWS + 2], "expected 0 to 1"),
        (generator("cpu"), torch.Generator().get_state(), [ROWS, None], "no state of a random generator on cpu"),
    ],
)
def test_checks(check: Check, right: Any, wrong: list[Any], message: str) -> None:
    check_state({"entry": right}, {"entry": check}, "toy")
    for value in wrong:
        with pytest.raises(ValueError, match=f"^The toy state is foreign: 'entry' .*{message}"):
            check_state({"entry": value}, {"entry": check}, "toy")


@pytest.mark.parametrize("version", [None, 0, 2, True, "1"])
def test_another_version_is_refused_first(version: Any) -> None:
    state = {} if version is None else {"schema_version": version}
    with pytest.raises(ValueError, match=r"The toy state has schema version .*, this release reads version 1"):
        check_state(state, {"entry": flag}, "toy", 1)


def test_missing_entries_are_named_and_further_ones_ignored() -> None:
    check_state({"a": 1, "later": 2}, {"a": anything}, "toy")
    with pytest.raises(ValueError, match=r"it lacks b, c; it has \['a'\]"):
        check_state({"a": 1}, {"a": anything, "b": flag, "c": flag}, "toy")
