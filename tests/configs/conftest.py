"""Fixtures that register TorchRL's Hydra groups and ours, and hide them from all other tests."""

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
    Plugins.instance()  # store the configs of Hydra's plugins, which happens only once, before the copy
    store = ConfigStore.instance()
    before = store.repo
    store.repo = copy.deepcopy(before)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchRL warns about its own deprecated functions
        from torchrl.trainers.algorithms.configs import _register_configs

        from torchrl_lightning.configs import register_configs

    _register_configs()
    register_configs()
    groups, store.repo = store.repo, before
    return groups


@pytest.fixture(autouse=True)
def torchrl_groups(registered_groups: dict[str, Any]) -> Iterator[None]:
    """Remove the groups after each test, because they conflict with runs that select ``logger: csv``."""
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
    """Return a function that composes one option of a group with its fields and instantiates it."""

    def build(group: str, name: str, *fields: str, **arguments: Any) -> Any:
        cfg = composed(f"+{group}@part=torchrl_lightning_{name}", *(f"part.{field}" for field in fields))
        return instantiate(cfg.part, **arguments)

    return build


@pytest.fixture
def rollout() -> TensorDict:
    """Return a rollout of two environments with values, as collectors yield it."""
    data, critic = make_rollout(3, 2), make_critic()
    for steps in (data, data["next"]):
        critic(steps)
    return data
