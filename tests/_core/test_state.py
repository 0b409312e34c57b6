"""An object with a declared state saves it, and validates all entries before it loads the first one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from kit.states import check_mutants, differences
from torchrl_lightning._core.mixins import GeneratorMixin
from torchrl_lightning._core.state import (
    GENERATOR,
    MAX_COUNT,
    Attribute,
    Child,
    InPlace,
    Stateful,
    any_value,
    bounded_integer,
    check_state,
    expect,
    fields,
    flag,
    generator,
    list_of,
    mapping,
    number,
    sequence,
    state_error,
    tensor,
)
from torchrl_lightning._core.validators import Check, optional

ROWS = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("check", "valid", "invalid", "message"),
    [
        (bounded_integer(1, 9), 9, [0, 10, True, 1.0, torch.tensor(1), None], "an integer of at least 1, at most 9"),
        (bounded_integer(), MAX_COUNT, [-1, MAX_COUNT + 1], "an integer of at least 0"),
        (number(0), 0.5, [-0.1, math.nan, math.inf, "1", True], "a finite number of at least 0"),
        (flag, True, [1, None], "True or False"),
        (mapping, {"a": 1}, [[], {1: 2}, None], "a dict with strings as keys"),
        (sequence, (1,), [{}, "text"], "a list"),
        (expect(lambda value: value > 2, "much"), 3, [1], "expected much"),
        (optional(flag), None, [0], "True or False"),
        (tensor(torch.float32, 2, None), ROWS, [ROWS.double(), ROWS.T, ROWS[0], 1], r"a tensor \[2, any\] of float32"),
        (tensor(torch.float32, 2, 3, anywhere=True), ROWS, [ROWS.to("meta"), ROWS.to_sparse()], r"a tensor \[2, 3\]"),
        (tensor(torch.float32, 2, 3, low=0, high=1), ROWS, [ROWS - 1, ROWS + 2], "expected 0 to 1"),
        (generator("cpu"), torch.Generator().get_state(), [ROWS, None], "not a state of a random generator on cpu"),
    ],
)
def test_checks_return_valid_and_reject_invalid_values(
    check: Check, valid: Any, invalid: list[Any], message: str
) -> None:
    check_state({"entry": valid}, {"entry": check}, "toy")
    for value in invalid:
        with pytest.raises(ValueError, match=f"^The toy state is foreign: 'entry' .*{message}"):
            check_state({"entry": value}, {"entry": check}, "toy")


@pytest.mark.parametrize("version", [None, 0, 2, True, "1"])
def test_unknown_schema_version_raises_before_other_errors(version: Any) -> None:
    state = {} if version is None else {"schema_version": version}
    with pytest.raises(ValueError, match=r"The toy state has schema version .*, this release reads version 1"):
        check_state(state, {"entry": flag}, "toy", 1)


def test_missing_entries_raise_and_unknown_ones_are_ignored() -> None:
    check_state({"a": 1, "later": 2}, {"a": any_value}, "toy")
    with pytest.raises(ValueError, match=r"it lacks b, c; it has \['a'\]"):
        check_state({"a": 1}, {"a": any_value, "b": flag, "c": flag}, "toy")


class Ring(Stateful):
    """A child of a stateful object."""

    OWNER = "ring"
    STATE = {"count": Attribute(check_for=lambda ring: bounded_integer(0, ring.size)), "cells": InPlace(low=0)}

    def __init__(self, size: int) -> None:
        self.size, self.count, self.cells = size, 0, torch.zeros(size, dtype=torch.int64)


class Box(GeneratorMixin, Stateful):
    """An object with all kinds of entries."""

    OWNER, VERSION = "box", 3
    STATE = {
        "size": Attribute(attribute="ring.size", argument="length"),
        "count": Attribute(bounded_integer()),
        "texts": Attribute(check_for=lambda box: box.read_texts, to_saved=list),
        "ring": Child(),
        "spare": Child(),
        "scale": Attribute(number(0, 1), "inner.scale"),
        "ids": Attribute(tensor(torch.int64, None, low=0)),
        "shares": Attribute(fields("shares", {"first": list_of(number(0, 1))})),
        "note": Attribute(optional(flag), exists_if="notes"),
        "rng": GENERATOR,
    }

    def __init__(self, size: int = 3, spare: Ring | None = None, notes: bool = False) -> None:
        self.ring, self.spare, self.notes, self.note = Ring(size), spare, notes, None
        self.count, self.texts, self.ids = 0, (), torch.zeros(0, dtype=torch.int64)
        self.shares: dict[str, list[float]] = {"first": []}
        self.inner = type("Inner", (), {"scale": 1.0})()
        self.generator = torch.Generator().manual_seed(size)
        self.loads = 0

    def read_texts(self, value: Any, name: str) -> tuple[str, ...]:
        if not isinstance(value, list) or len(value) >= self.ring.size or not all(type(text) is str for text in value):
            raise state_error(value, name, f"fewer texts than {self.ring.size}")
        return tuple(value)

    def _validate_consistency(self, values: Mapping[str, Any]) -> None:
        tensor(torch.int64, None, high=values["count"])(values["ids"], "'ids'")
        if len(values["ids"]) > values["count"]:
            raise ValueError("too many ids")

    def _post_load(self) -> None:
        self.loads += 1


def filled(**options: Any) -> Box:
    box = Box(**options)
    box.count, box.texts, box.ids, box.inner.scale = 2, ("a", "b"), torch.tensor([1, 2]), 0.25
    box.shares = {"first": [0.5]}
    box.ring.count, box.ring.cells[1] = 1, 9
    return box


def test_state_is_copied_when_saved_and_loaded() -> None:
    one, other = filled(), Box()
    state, cells = one.state_dict(), other.ring.cells
    other.load_state_dict(state)
    assert not differences(other.state_dict(), state)
    assert (other.loads, other.texts, other.inner.scale) == (1, ("a", "b"), 0.25)
    assert other.ring.cells is cells
    assert torch.rand(1, generator=one.generator) == torch.rand(1, generator=other.generator)
    state["ids"] += 1
    state["ring"]["cells"] += 1
    assert (one.ids.tolist(), other.ids.tolist(), one.ring.cells.tolist()) == ([1, 2], [1, 2], [0, 9, 0])
    view = one.state_dict(copy=False)
    one.ring.cells[0], one.ids[0] = 5, 0
    assert (view["ring"]["cells"].tolist(), view["ids"].tolist()) == ([5, 9, 0], [0, 2])


def test_invalid_state_changes_nothing() -> None:
    check_mutants(filled(size=3), Box().state_dict())
    one = Box(4)
    with pytest.raises(ValueError, match="The state has size=3, this box has length=4; build it with length=3"):
        one.load_state_dict(filled().state_dict())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema_version": 2}, "The box state has schema version 2, this release reads version 3"),
        ({"texts": ["a"] * 3}, "The box state is foreign: 'texts' is a list, expected fewer texts than 3"),
        ({"ring": {"count": 4}}, "The ring state is foreign: it lacks cells"),
        ({"spare": {}}, "The state has spare=a dict, this box has spare=None"),
        ({"scale": 2.0}, "'scale' is 2.0, expected a finite number of at least 0, at most 1"),
        (
            {"ids": torch.tensor([3])},
            "The box state is foreign: 'ids' holds values from 3 to 3, expected anything to 2",
        ),
        ({"shares": {}}, "The shares state is foreign: it lacks first"),
        ({"shares": {"first": [0.5, 2]}}, "an item of 'first' is 2, expected a finite number"),
        ({"ids": torch.tensor([0, 0, 0])}, "too many ids"),
    ],
)
def test_invalid_entry_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Box().check_state({**filled().state_dict(), **changes})
    with pytest.raises(ValueError, match="The box state must be a dict, got a list"):
        Box().check_state([])


def test_entry_may_exist_only_for_some_objects() -> None:
    state, other = filled().state_dict(), Box(notes=True)
    with pytest.raises(ValueError, match="it lacks note;"):
        other.load_state_dict(state)
    other.load_state_dict({**state, "note": True, "later": 1})
    assert other.note is True
    assert "note" not in state


@pytest.mark.parametrize("name", [name for name in Box.STATE if name != "note"])
def test_state_without_an_entry_raises_with_its_name(name: str) -> None:
    state, other = filled().state_dict(), Box()
    before = other.state_dict()
    del state[name]
    with pytest.raises(ValueError, match=f"The box state is foreign: it lacks {name};"):
        other.load_state_dict(state)
    assert not differences(other.state_dict(), before)
