"""A newer Hydra gets a whitelist of the names in a checked config, without the names that Hydra blocks."""

from __future__ import annotations

from typing import Any

import hydra.utils
import pytest
from omegaconf import OmegaConf

from torchrl_lightning._hydra.compat import instantiate


@pytest.fixture
def whitelists(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the list of whitelists that a simulated newer Hydra receives."""
    whitelists: list[list[str]] = []
    monkeypatch.setattr(hydra.utils, "execution_whitelist", object(), raising=False)
    monkeypatch.setattr(
        hydra.utils,
        "instantiate",
        lambda config, *, _execution_whitelist_, **arguments: whitelists.append(_execution_whitelist_),
    )
    return whitelists


def with_locals(*names: str) -> set[str]:
    return {entry for name in names for entry in (name, f"{name}.<locals>.*")}


def test_whitelist_contains_names_and_their_definitions(whitelists: Any) -> None:
    nested = {
        "_target_": "fractions.Fraction",
        "others": [{"_target_": "json.JSONDecoder", "by": {"_target_": "no.x"}}],
    }
    for config in (nested, OmegaConf.create({**nested, "word": "os.getcwd", "same": "${others}"})):
        instantiate(config)
    assert whitelists[0] == whitelists[1]
    assert set(whitelists[0]) == {"json.JSONDecoder", "no.x"} | with_locals(
        "fractions.Fraction", "json.decoder.JSONDecoder"
    )


def test_whitelist_contains_looked_up_names(whitelists: Any) -> None:
    instantiate({"_target_": "hydra.utils.get_class", "path": "fractions.Fraction"})
    assert "fractions.Fraction" in whitelists[0]


REFUSED = ["shutil.rmtree", "tempfile._shutil.rmtree", "os.remove", "posix.kill", "builtins.exit"]


@pytest.mark.parametrize("name", REFUSED)
def test_whitelist_excludes_blocked_names(name: str, whitelists: Any) -> None:
    instantiate({"_target_": "fractions.Fraction", "numerator": {"_target_": name}})
    assert set(whitelists[0]) == with_locals("fractions.Fraction")
