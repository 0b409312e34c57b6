"""Store each config under its name in one of TorchRL's Hydra groups."""

from __future__ import annotations

from typing import Any

# Imported for its side effect: it stores TorchRL's own options of the groups below.
import torchrl.trainers.algorithms.configs  # noqa: F401
from hydra.core.config_store import ConfigStore

from torchrl_lightning.configs import components

PREFIX = "torchrl_lightning_"
PROVIDER = "torchrl-lightning"

# Each is a transform, and also the module of TorchRL's ModuleTransform, which the group ``value`` is for.
_ESTIMATORS: dict[str, type[Any]] = {
    "discounted_returns": components.DiscountedReturnsConfig,
    "generalized_advantages": components.GeneralizedAdvantagesConfig,
    "vtrace_advantages": components.VTraceAdvantagesConfig,
    "intrinsic_returns": components.IntrinsicReturnsConfig,
}

COMPONENTS: dict[str, dict[str, type[Any]]] = {
    "storage": {"rollout": components.RolloutStorageConfig, "ring": components.RingStorageConfig},
    "writer": {"rollout": components.RolloutWriterConfig, "ring": components.RingWriterConfig},
    "sampler": {
        "minibatch": components.MinibatchSamplerConfig,
        "uniform": components.UniformSamplerConfig,
        "prioritized": components.PrioritizedSamplerConfig,
        "sequence": components.SequenceSamplerConfig,
    },
    "transform": _ESTIMATORS,
    "value": _ESTIMATORS,
    "replay_buffer": {
        "vanilla": components.VanillaOnPolicyBufferConfig,
        "gae": components.GAEBufferConfig,
        "vtrace": components.VTraceBufferConfig,
        "ppo": components.PPOBufferConfig,
        "experience": components.ExperienceBufferConfig,
        "recurrent": components.RecurrentReplayBufferConfig,
        "simple": components.SimpleReplayBufferConfig,
    },
}


def register_configs() -> None:
    """Store every component under ``torchrl_lightning_NAME`` in its group; storing twice changes nothing.

    Example:
        >>> from hydra.core.config_store import ConfigStore
        >>> register_configs()
        >>> node = ConfigStore.instance().load("sampler/torchrl_lightning_minibatch.yaml")
        >>> node.provider, node.node._target_
        ('torchrl-lightning', 'torchrl_lightning.MinibatchSampler')
    """
    store = ConfigStore.instance()
    for group, nodes in COMPONENTS.items():
        for name, node in nodes.items():
            store.store(group=group, name=PREFIX + name, node=node, provider=PROVIDER)
