"""Composes our configs and those of two made-up foreign applications, whatever other tests have put into Hydra."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig

from torchrl_lightning._conf import CONF_DIR
from torchrl_lightning._schemas import register_schemas


@pytest.fixture(autouse=True)
def only_our_schemas() -> Iterator[None]:
    """Take TorchRL's groups out of Hydra's store, as in a run of ours, where nothing ever imports them."""
    store = ConfigStore.instance()
    before = store.repo
    # Neither Hydra's groups nor ours clash; TorchRL stores its nodes without the name of a provider.
    store.repo = {group: nodes for group, nodes in before.items() if group in ("hydra", "_dummy_empty_config_.yaml")}
    register_schemas()
    yield
    store.repo = before


@pytest.fixture
def compose_in() -> Callable[..., DictConfig]:
    def compose_config(folder: Path, name: str, *overrides: str, **kwargs: Any) -> DictConfig:
        with initialize_config_dir(str(folder), version_base="1.3"):
            return compose(name, list(overrides), **kwargs)

    return compose_config


@pytest.fixture
def compose_train(compose_in: Callable[..., DictConfig], tmp_path: Path) -> Callable[..., DictConfig]:
    def compose_config(*overrides: str) -> DictConfig:
        return compose_in(CONF_DIR, "train", f"paths.output_dir={tmp_path}", *overrides)

    return compose_config
