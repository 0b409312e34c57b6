from __future__ import annotations

import dataclasses
import doctest
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from hydra.core.config_store import ConfigStore
from hydra.utils import get_object
from omegaconf import OmegaConf

from kit.processes import PROJECT, environment

GROUPS = {
    "storage": {"frame", "ring", "rollout"},
    "writer": {"ring", "rollout"},
    "sampler": {"minibatch", "prioritized", "recent", "sequence", "uniform"},
    "transform": {
        "discounted_returns",
        "dynamics_targets",
        "frame_stack",
        "generalized_advantages",
        "hindsight_relabel",
        "intrinsic_returns",
        "vtrace_advantages",
    },
    "value": {"discounted_returns", "generalized_advantages", "vtrace_advantages", "intrinsic_returns"},
    "replay_buffer": {
        "episodic",
        "experience",
        "gae",
        "model_based",
        "ppo",
        "ppod",
        "recurrent",
        "simple",
        "vanilla",
        "vtrace",
    },
}
NAMES = [(group, name) for group, names in GROUPS.items() for name in sorted(names)]


def node_of(group: str, name: str) -> Any:
    return ConfigStore.instance().load(f"{group}/torchrl_lightning_{name}.yaml")


def plain(value: Any) -> Any:
    """Values as a config writes them: keys are lists and no tuples, dtypes their names."""
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


def test_the_readme_lists_every_name():
    rows = re.findall(r"^\| (`[a-z_`, ]+) \| (`.*) \|$", (PROJECT / "README.md").read_text(), flags=re.MULTILINE)
    listed = {
        group: {name for name in re.findall(r"`(\w+)`", names) if name.islower()}
        for groups, names in rows
        for group in re.findall(r"`(\w+)`", groups)
    }
    assert {group: names for group, names in listed.items() if group in GROUPS} == GROUPS


@pytest.mark.parametrize(("group", "name"), NAMES)
def test_a_node_says_who_stored_it_and_is_of_torchrls_kind(group, name):
    from torchrl.trainers.algorithms.configs.common import ConfigBase

    node = node_of(group, name)
    assert node.provider == "torchrl-lightning"
    assert issubclass(OmegaConf.get_type(node.node), ConfigBase)
    assert node.node._target_.startswith("torchrl_lightning.")


def test_registering_again_changes_nothing():
    from torchrl_lightning.configs import register_configs

    def stored():
        return {group: ConfigStore.instance().list(group) for group in GROUPS}

    names, nodes = stored(), [node_of(*name).node for name in NAMES]
    register_configs()
    assert stored() == names
    assert [node_of(*name).node for name in NAMES] == nodes


@pytest.mark.parametrize(("group", "name"), NAMES)
def test_fields_are_the_constructors_arguments_with_the_same_defaults(group, name):
    node = node_of(group, name).node
    target = get_object(node._target_)
    component = inspect.unwrap(target)
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
    # Not collected with the other examples: pytest would import TorchRL's groups before any test has begun.
    package = importlib.import_module("torchrl_lightning.configs")
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        assert doctest.testmod(importlib.import_module(module.name)).failed == 0


def test_what_our_runs_do_not_need_is_never_imported():
    # TorchRL's configs clash with files of the same groups; the others take time and memory before they are needed.
    spared = (
        "torchrl.trainers",
        "torchrl_lightning.configs",
        "torchrl.collectors",
        "numba",
        "tensorboard",
        "hydra.main",
    )
    code = (
        "import sys\n"
        "import torchrl_lightning\n"
        "import torchrl_lightning.cli.train, torchrl_lightning.cli.evaluate\n"
        "from torchrl_lightning.cli.command import quiet\n"
        "for name in torchrl_lightning.__all__: getattr(torchrl_lightning, name)\n"
        f"print([name for name in {spared} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
