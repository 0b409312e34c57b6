"""Every public name is exported, documented, and found in completion."""

from __future__ import annotations

import importlib
import inspect
import re

import pytest

import torchrl_lightning

PUBLIC = sorted(set(torchrl_lightning.__all__) - {"__version__"})
CLASSES = [name for name in PUBLIC if inspect.isclass(getattr(torchrl_lightning, name))]


@pytest.mark.parametrize("package", ["torchrl_lightning", "torchrl_lightning.collectors"])
def test_completion_knows_every_name(package: str) -> None:
    module = importlib.import_module(package)
    assert set(module.__all__) <= set(dir(module))
    for name in module.__all__:
        assert getattr(module, name) is not None


@pytest.mark.parametrize("name", PUBLIC)
def test_it_says_what_it_is(name: str) -> None:
    part = getattr(torchrl_lightning, name)
    if not (inspect.isclass(part) or inspect.isfunction(part)):
        return
    assert part.__module__.startswith("torchrl_lightning.")
    assert re.match(r"r?[A-Z`].*", part.__doc__ or "")


@pytest.mark.parametrize("name", CLASSES)
def test_every_argument_is_documented(name: str) -> None:
    part = getattr(torchrl_lightning, name)
    text = "\n".join(base.__doc__ or "" for base in part.__mro__)
    # "Further arguments as in :class:`...`"
    others = re.findall(r":class:`(?:\w+\.)*(\w+)`", text)
    text += "\n".join(getattr(torchrl_lightning, each, object).__doc__ or "" for each in others)
    arguments = set(inspect.signature(part).parameters)
    assert {each for each in arguments if not re.search(rf"\b{each}\b", text)} == set()
