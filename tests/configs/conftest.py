"""TorchRL's Hydra groups with ours among them, hidden from all other tests."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hydra import compose, initialize
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.utils import instantiate
from omegaconf import DictConfig
from tensordict import TensorDict

from kit.rollouts import make_critic, make_rollout


@pytest.fixture(scope="session")
def registered_groups() -> dict[str, Any]:
    Plugins.instance()  # Hydra's own plugins store their configs once: into what stays, and not into the copy
    store = ConfigStore.instance()
    before = store.repo
    store.repo = copy.deepcopy(before)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchRL's own, about what it deprecates in itself
        from torchrl.trainers.algorithms.configs import _register_configs

        from torchrl_lightning.configs import register_configs

    _register_configs()
    register_configs()
    groups, store.repo = store.repo, before
    return groups


@pytest.fixture(autouse=True)
def torchrl_groups(registered_groups: dict[str, Any]) -> Iterator[None]:
    """Take the groups away after each test: a run whose YAML says ``logger: csv`` cannot be composed beside them."""
    store = ConfigStore.instance()
    before, store.repo = store.repo, copy.copy(registered_groups)
    yield
    store.repo = before


@pytest.fixture
def composed() -> Callable[..., DictConfig]:
    def compose_overrides(*overrides: str) -> DictConfig:
        with initialize(version_base="1.3", config_path=None):
            return compose(None, list(overrides))

    return compose_overrides


@pytest.fixture
def built(composed: Callable[..., DictConfig]) -> Callable[..., Any]:
    """Composes one option of a group with its fields and instantiates it."""

    def build(group: str, name: str, *fields: str, **arguments: Any) -> Any:
        cfg = composed(f"+{group}@part=torchrl_lightning_{name}", *(f"part.{field}" for field in fields))
        return instantiate(cfg.part, **arguments)

    return build


@pytest.fixture
def rollout() -> TensorDict:
    """Of two environments, with values, as collectors yield it."""
    data, critic = make_rollout(3, 2), make_critic()
    for steps in (data, data["next"]):
        critic(steps)
    return data
