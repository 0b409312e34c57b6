"""Which config is stored under which name in which of TorchRL's Hydra groups."""

from __future__ import annotations

from typing import Any

# Imported for what it does: TorchRL's own options of the groups below are stored with it.
import torchrl.trainers.algorithms.configs  # noqa: F401
from hydra.core.config_store import ConfigStore

from torchrl_lightning.configs.buffers import (
    GAEBufferConfig,
    PPOBufferConfig,
    VanillaOnPolicyBufferConfig,
    VTraceBufferConfig,
)
from torchrl_lightning.configs.parts import (
    MinibatchSamplerConfig,
    PrioritizedSamplerConfig,
    RingStorageConfig,
    RingWriterConfig,
    RolloutStorageConfig,
    RolloutWriterConfig,
    SequenceSamplerConfig,
    UniformSamplerConfig,
)
from torchrl_lightning.configs.replay_buffers import (
    ExperienceBufferConfig,
    RecurrentReplayBufferConfig,
    SimpleReplayBufferConfig,
)
from torchrl_lightning.configs.transforms import (
    DiscountedReturnsConfig,
    GeneralizedAdvantagesConfig,
    IntrinsicReturnsConfig,
    VTraceAdvantagesConfig,
)

PREFIX = "torchrl_lightning_"
PROVIDER = "torchrl-lightning"

# Each is a transform of its own, and the module of TorchRL's ModuleTransform, which is what the group `value` is for.
_ESTIMATORS: dict[str, type[Any]] = {
    "discounted_returns": DiscountedReturnsConfig,
    "generalized_advantages": GeneralizedAdvantagesConfig,
    "vtrace_advantages": VTraceAdvantagesConfig,
    "intrinsic_returns": IntrinsicReturnsConfig,
}

COMPONENTS: dict[str, dict[str, type[Any]]] = {
    "storage": {"rollout": RolloutStorageConfig, "ring": RingStorageConfig},
    "writer": {"rollout": RolloutWriterConfig, "ring": RingWriterConfig},
    "sampler": {
        "minibatch": MinibatchSamplerConfig,
        "uniform": UniformSamplerConfig,
        "prioritized": PrioritizedSamplerConfig,
        "sequence": SequenceSamplerConfig,
    },
    "transform": _ESTIMATORS,
    "value": _ESTIMATORS,
    "replay_buffer": {
        "vanilla": VanillaOnPolicyBufferConfig,
        "gae": GAEBufferConfig,
        "vtrace": VTraceBufferConfig,
        "ppo": PPOBufferConfig,
        "experience": ExperienceBufferConfig,
        "recurrent": RecurrentReplayBufferConfig,
        "simple": SimpleReplayBufferConfig,
    },
}


def register_configs() -> None:
    """Stores every component under ``torchrl_lightning_NAME`` in its group; storing twice changes nothing.

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
