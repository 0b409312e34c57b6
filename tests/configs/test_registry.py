from __future__ import annotations

import dataclasses
import doctest
import importlib
import inspect
import pkgutil
from typing import Any

import pytest
import torch
from hydra.core.config_store import ConfigStore
from hydra.utils import get_object
from omegaconf import OmegaConf

from configs.settings import GROUPS, NAMES, SETTINGS, node_of


def plain(value: Any) -> Any:
    """Return the value as a config writes it: lists for tuples, names for dtypes."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return [plain(part) for part in value] if isinstance(value, list | tuple) else value


def test_every_component_is_stored_beside_those_of_torchrl():
    from torchrl_lightning.configs import COMPONENTS

    assert {group: set(nodes) for group, nodes in COMPONENTS.items()} == GROUPS
    for group, names in GROUPS.items():
        stored = ConfigStore.instance().list(group)
        ours = {name.removesuffix(".yaml") for name in stored if name.startswith("torchrl_lightning")}
        assert ours == {f"torchrl_lightning_{name}" for name in names}
        assert len(stored) > len(ours)


def test_names_that_users_know_stay():
    assert set(SETTINGS) <= set(NAMES)


def test_registering_again_changes_nothing():
    from torchrl_lightning.configs import register_configs

    def stored():
        return {group: ConfigStore.instance().list(group) for group in GROUPS}

    names, nodes = stored(), [node_of(*name).node for name in NAMES]
    register_configs()
    assert stored() == names
    assert [node_of(*name).node for name in NAMES] == nodes


@pytest.mark.parametrize(("group", "name"), NAMES)
def test_node_has_the_constructors_arguments_with_the_same_defaults_and_is_of_torchrls_kind(group, name):
    from torchrl.trainers.algorithms.configs.common import ConfigBase

    stored = node_of(group, name)
    node = stored.node
    assert stored.provider == "torchrl-lightning"
    assert issubclass(OmegaConf.get_type(node), ConfigBase)
    assert node._target_.startswith("torchrl_lightning.")
    component = inspect.unwrap(get_object(node._target_))
    fields = {field.name for field in dataclasses.fields(OmegaConf.get_type(node)) if field.name[0] != "_"}
    arguments = inspect.signature(component).parameters
    assert fields == set(arguments)
    for field in fields:
        default = arguments[field].default
        if default is inspect.Parameter.empty:
            assert OmegaConf.is_missing(node, field), field
        else:
            assert plain(OmegaConf.to_container(node)[field]) == plain(default), field


def test_examples_in_docstrings():
    # pytest must not collect these examples, because it would import TorchRL's groups before the first test.
    package = importlib.import_module("torchrl_lightning.configs")
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        assert doctest.testmod(importlib.import_module(module.name)).failed == 0
