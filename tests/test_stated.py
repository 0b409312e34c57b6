"""A part with a declared state saves it, checks all of it before anything changes, and loads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from kit.states import check_mutants, differences
from torchrl_lightning.ranges import optional
from torchrl_lightning.state import Here, array, flag, number, tensor, whole, wrong
from torchrl_lightning.stated import Drawn, Filled, Fixed, Kept, Nested, Stated


class Ring(Stated):
    """A part of another."""

    OWNER = "ring"
    STATE = {"count": Kept(whole(0, "size")), "cells": Filled(tensor(torch.int64, "size", low=0))}

    def __init__(self, size: int) -> None:
        self.size, self.count, self.cells = size, 0, torch.zeros(size, dtype=torch.int64)


def texts(value: Any, name: str, here: Here) -> tuple[str, ...]:
    """Take as many texts as the state counts."""
    if not isinstance(value, list) or len(value) != here.state["count"] or not all(type(each) is str for each in value):
        raise wrong(value, name, f"{here.state['count']} texts of {here.part.ring.size}")
    return tuple(value)


class Box(Stated):
    """A part with all kinds of entries."""

    OWNER, VERSION = "box", 3
    STATE = {
        "size": Fixed("ring.size", "length"),
        "count": Kept(whole()),
        "texts": Kept(texts, form=list),
        "ring": Nested(),
        "spare": Nested(),
        "scale": Kept("read_scale", "inner.scale"),
        "ids": Kept(array(torch.int64, None, low=0, high=lambda box, state: state["count"])),
        "note": Kept(optional(flag), only="notes"),
        "rng": Drawn(),
    }

    def __init__(self, size: int = 3, spare: Ring | None = None, notes: bool = False) -> None:
        self.ring, self.spare, self.notes, self.note = Ring(size), spare, notes, None
        self.count, self.texts, self.ids = 0, (), np.zeros(0, np.int64)
        self.inner = type("Inner", (), {"scale": 1.0})()
        self.rng = torch.Generator().manual_seed(size)
        self.loads = 0

    def read_scale(self, value: Any, name: str) -> float:
        return number(0, 1)(value, name)

    def _check_together(self, values: Mapping[str, Any]) -> None:
        if len(values["ids"]) > values["count"]:
            raise ValueError("too many ids")

    def _loaded(self) -> None:
        self.loads += 1


def filled(**options: Any) -> Box:
    box = Box(**options)
    box.count, box.texts, box.ids, box.inner.scale = 2, ("a", "b"), np.array([1, 2]), 0.25
    box.ring.count, box.ring.cells[1] = 1, 9
    return box


def test_a_state_goes_into_another_and_is_a_copy() -> None:
    one, other = filled(), Box()
    state, cells = one.state_dict(), other.ring.cells
    other.load_state_dict(state)
    assert not differences(other.state_dict(), state)
    assert (other.loads, other.texts, other.inner.scale) == (1, ("a", "b"), 0.25)
    assert other.ring.cells is cells
    assert torch.rand(1, generator=one.rng) == torch.rand(1, generator=other.rng)
    state["ids"] += 1
    state["ring"]["cells"] += 1
    assert (one.ids.tolist(), other.ids.tolist(), one.ring.cells.tolist()) == ([1, 2], [1, 2], [0, 9, 0])
    view = one.state_dict(copy=False)
    one.ring.cells[0], one.ids[0] = 5, 0
    assert (view["ring"]["cells"].tolist(), view["ids"].tolist()) == ([5, 9, 0], [0, 2])


def test_nothing_changes_unless_all_fits() -> None:
    check_mutants(filled(size=3), Box().state_dict())
    one = Box(4)
    with pytest.raises(ValueError, match="The state has size=3, this box has length=4; build it with length=3"):
        one.load_state_dict(filled().state_dict())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"schema_version": 2}, "The box state has schema version 2, this release reads version 3"),
        ({"texts": ["a"]}, "The box state is foreign: 'texts' is a list, expected 2 texts of 3"),
        ({"ring": {"count": 4}}, "The ring state is foreign: it lacks cells"),
        ({"spare": {}}, "The state has spare=a dict, this box has spare=None"),
        ({"scale": 2.0}, "'scale' is 2.0, expected a finite number of at least 0, at most 1"),
        ({"ids": torch.tensor([3])}, "'ids' holds values from 3 to 3, expected 0 to 2"),
        ({"ids": torch.tensor([0, 0, 0])}, "too many ids"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Box().check_state({**filled().state_dict(), **changes})
    with pytest.raises(ValueError, match="The box state is foreign: it is a list, expected a dict"):
        Box().check_state([])


def test_an_entry_may_belong_to_some() -> None:
    state, other = filled().state_dict(), Box(notes=True)
    with pytest.raises(ValueError, match="it lacks note;"):
        other.load_state_dict(state)
    other.load_state_dict({**state, "note": True, "later": 1})
    assert other.note is True
    assert "note" not in state


@pytest.mark.parametrize("name", [name for name in Box.STATE if name != "note"])
def test_a_state_that_lacks_an_entry_is_refused_by_its_name(name: str) -> None:
    state, other = filled().state_dict(), Box()
    kept = other.state_dict()
    del state[name]
    with pytest.raises(ValueError, match=f"The box state is foreign: it lacks {name};"):
        other.load_state_dict(state)
    assert not differences(other.state_dict(), kept)
