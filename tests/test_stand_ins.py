"""Modules whose places stand-ins take while others are imported are found as they are afterwards."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, new_class

import pytest

from torchrl_lightning.stand_ins import StandIn, standing_in

HEAVY = """
class Thing:
    size = 2

def made():
    return Thing()
"""
LIGHT = """
import heavy_one
import heavy_one.below
from heavy_one import Thing, made, tell

Given = Thing | None if isinstance(Thing, type) else Thing

@tell
def told():
    return 1

def fits(value):
    return isinstance(value, Thing)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "heavy_one").mkdir()
    (tmp_path / "heavy_one" / "__init__.py").write_text(HEAVY)
    (tmp_path / "heavy_one" / "below.py").write_text("value = 3")
    (tmp_path / "light_one.py").write_text(LIGHT)
    monkeypatch.syspath_prepend(tmp_path)
    before = list(sys.meta_path)
    yield tmp_path
    assert sys.meta_path == before
    for name in ("heavy_one", "heavy_one.below", "light_one"):
        sys.modules.pop(name, None)


@pytest.fixture
def light(folder: Path) -> ModuleType:
    with standing_in({"heavy_one": {"tell": lambda function: function}}):
        return import_module("light_one")


def heavy() -> list[str]:
    return [name for name in sys.modules if name.startswith("heavy_one")]


def test_nothing_is_imported_until_it_is_used_nor_left_behind(light: ModuleType) -> None:
    assert heavy() == []
    assert light.told() == 1
    assert not light.fits(1)
    assert heavy() == []


def test_what_was_bound_is_the_modules_once_it_is_used(light: ModuleType) -> None:
    thing = light.made()
    module = import_module("heavy_one")
    assert not isinstance(module, StandIn)
    assert type(thing) is module.Thing
    assert light.fits(thing)
    assert not light.fits(1)
    assert light.Thing.size == light.heavy_one.Thing.size == 2
    assert light.heavy_one.below.value == 3
    assert issubclass(new_class("Own", (light.Thing,)), module.Thing)


def test_a_module_that_is_needed_meanwhile_is_imported(folder: Path) -> None:
    with standing_in({"heavy_one": {"tell": lambda function: function}}):
        light = import_module("light_one")
        assert light.made().size == 2
        assert not isinstance(import_module("heavy_one"), StandIn)


def test_modules_that_are_not_there_or_imported_already_have_no_stand_in(folder: Path) -> None:
    module = import_module("heavy_one")
    with standing_in({"heavy_one": {}, "not_there_at_all": {}}):
        assert import_module("heavy_one") is module
        with pytest.raises(ModuleNotFoundError):
            import_module("not_there_at_all")
