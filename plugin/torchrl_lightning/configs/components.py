"""Build configs of this package's components for TorchRL's groups, with all constructor arguments.

In a config, a key is a string or a list of strings, and a dtype is given by its name.
"""

from __future__ import annotations

from typing import Any

# This import also registers TorchRL's options of the groups below.
import torchrl.trainers.algorithms.configs  # noqa: F401
from hydra.core.config_store import ConfigStore
from torchrl.trainers.algorithms.configs.data import ReplayBufferBaseConfig, SamplerConfig, StorageConfig, WriterConfig
from torchrl.trainers.algorithms.configs.transforms import TransformConfig

from torchrl_lightning._hydra.schemas import TORCHRL_GROUPS, config_class, schema_data

PREFIX = "torchrl_lightning_"
PROVIDER = "torchrl-lightning"
# The config classes of TorchRL's groups.
_KINDS: dict[str, type[Any]] = {
    "storage": StorageConfig,
    "writer": WriterConfig,
    "sampler": SamplerConfig,
    "transform": TransformConfig,
    "replay_buffer": ReplayBufferBaseConfig,
}


def _components() -> dict[str, dict[str, type[Any]]]:
    found: dict[str, dict[str, type[Any]]] = {}
    for target, part in schema_data().items():
        if groups := TORCHRL_GROUPS.get(part["group"]):
            bases = (_KINDS[groups[0]],)
            config = config_class(target, f"{target.rpartition('.')[2]}Config", bases=bases, partial=False)
            for group in groups:
                found.setdefault(group, {})[part["name"]] = config
    return found


COMPONENTS = _components()


def register_configs() -> None:
    """Store every component under ``torchrl_lightning_NAME`` in its group; repeated calls are allowed.

    Examples:
        >>> register_configs()
        >>> node = ConfigStore.instance().load("sampler/torchrl_lightning_minibatch.yaml")
        >>> node.provider, node.node._target_
        ('torchrl-lightning', 'torchrl_lightning.MinibatchSampler')
    """
    store = ConfigStore.instance()
    for group, nodes in COMPONENTS.items():
        for name, node in nodes.items():
            store.store(group=group, name=PREFIX + name, node=node, provider=PROVIDER)
