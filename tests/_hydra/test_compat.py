"""A newer Hydra is told exactly what a checked config names, but for what Hydra refuses by itself."""

from __future__ import annotations

from typing import Any

import hydra.utils
import pytest
from omegaconf import OmegaConf

from torchrl_lightning._hydra.compat import instantiate


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What a Hydra that asks for it is told."""
    lists: list[list[str]] = []
    monkeypatch.setattr(hydra.utils, "execution_whitelist", object(), raising=False)
    monkeypatch.setattr(
        hydra.utils, "instantiate", lambda config, *, _execution_whitelist_, **rest: lists.append(_execution_whitelist_)
    )
    return lists


def where(*places: str) -> set[str]:
    return {entry for place in places for entry in (place, f"{place}.<locals>.*")}


def test_what_is_named_anywhere_and_where_it_lies_is_told(told: Any) -> None:
    nested = {
        "_target_": "fractions.Fraction",
        "others": [{"_target_": "json.JSONDecoder", "by": {"_target_": "no.x"}}],
    }
    for config in (nested, OmegaConf.create({**nested, "word": "os.getcwd", "same": "${others}"})):
        instantiate(config)
    assert told[0] == told[1]
    assert set(told[0]) == {"json.JSONDecoder", "no.x"} | where("fractions.Fraction", "json.decoder.JSONDecoder")


def test_what_hydra_looks_up_is_told(told: Any) -> None:
    instantiate({"_target_": "hydra.utils.get_class", "path": "fractions.Fraction"})
    assert "fractions.Fraction" in told[0]


REFUSED = ["shutil.rmtree", "tempfile._shutil.rmtree", "os.remove", "posix.kill", "builtins.exit"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_hydra_refuses_is_not_told(name: str, told: Any) -> None:
    instantiate({"_target_": "fractions.Fraction", "numerator": {"_target_": name}})
    assert set(told[0]) == where("fractions.Fraction")
