"""Composes our configs and those of two made-up foreign applications, whatever other tests have put into Hydra."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from kit.store import only_our_schemas
from torchrl_lightning._conf import CONF_DIR


@pytest.fixture(autouse=True)
def without_torchrls_groups() -> Iterator[None]:
    with only_our_schemas():
        yield


@cache
def composed(folder: Path, name: str, overrides: tuple[str, ...], return_hydra_config: bool) -> DictConfig:
    with initialize_config_dir(str(folder), version_base="1.3"):
        return compose(name, list(overrides), return_hydra_config=return_hydra_config)


@pytest.fixture
def compose_in(tmp_path: Path) -> Callable[..., DictConfig]:
    def compose_config(folder: Path, name: str, *overrides: str, return_hydra_config: bool = False) -> DictConfig:
        # A folder of ours is composed once; what a test has written itself is its own.
        compose_once = composed if tmp_path not in (folder, *folder.parents) else composed.__wrapped__
        return copy.deepcopy(compose_once(folder, name, overrides, return_hydra_config))

    return compose_config


@pytest.fixture
def compose_train(compose_in: Callable[..., DictConfig], tmp_path: Path) -> Callable[..., DictConfig]:
    def compose_config(*overrides: str) -> DictConfig:
        # Both are known in a run alone.
        paths = ("paths.output_dir=here", f"paths.demonstrations={CONF_DIR / 'demonstrations'}")
        cfg = compose_in(CONF_DIR, "train", *paths, *overrides)
        cfg.paths.output_dir = str(tmp_path)
        return cfg

    return compose_config
