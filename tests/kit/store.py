"""Our configs as a command composes them, independent of other tests' changes to Hydra's store."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from hydra import compose
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig

from torchrl_lightning._hydra.compat import initialized
from torchrl_lightning._hydra.paths import CONF_DIR
from torchrl_lightning._hydra.schemas import register_schemas
from torchrl_lightning.cli.config.compose import cache_sources


@contextmanager
def only_our_schemas() -> Iterator[None]:
    """Remove TorchRL's groups from Hydra's store for a while, because no run of ours imports them."""
    store = ConfigStore.instance()
    before = store.repo
    # Select Hydra's groups by name, because TorchRL stores its nodes without the name of a provider.
    store.repo = {group: nodes for group, nodes in before.items() if group in ("hydra", "_dummy_empty_config_.yaml")}
    register_schemas()
    try:
        yield
    finally:
        store.repo = before


def composed(name: str, *overrides: str, folder: Path = CONF_DIR, hydra: bool = False) -> DictConfig:
    """Compose a config outside a run. Equal requests are composed only once."""
    return copy.deepcopy(_composed(name, overrides, folder, hydra))


def composed_run(*overrides: str, into: Path | str = "here") -> DictConfig:
    """Compose the config of a training run in a folder."""
    cfg = composed("train", "paths.output_dir=here", f"paths.demonstrations={CONF_DIR / 'demonstrations'}", *overrides)
    cfg.paths.output_dir = str(into)
    return cfg


@cache
def _composed(name: str, overrides: tuple[str, ...], folder: Path, hydra: bool) -> DictConfig:
    with only_our_schemas(), initialized(str(folder), "app") as hydra_app:
        cache_sources(hydra_app.config_loader.get_sources())
        return compose(name, list(overrides), return_hydra_config=hydra)
