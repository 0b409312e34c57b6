"""Importing this package puts our components into TorchRL's Hydra groups, beside TorchRL's own.

TorchRL's groups are those of ``torchrl.trainers.algorithms.configs``, which is imported here: a config then selects,
say, ``sampler@replay_buffer.sampler: torchrl_lightning_minibatch``. Runs of ``torchrl-lightning-train`` do not need it
and never import it, for TorchRL also has groups such as ``logger`` and ``trainer``, which clash with files of those
names.
"""

from __future__ import annotations

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
from torchrl_lightning.configs.registry import COMPONENTS, register_configs
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

__all__ = [
    "COMPONENTS",
    "DiscountedReturnsConfig",
    "ExperienceBufferConfig",
    "GAEBufferConfig",
    "GeneralizedAdvantagesConfig",
    "IntrinsicReturnsConfig",
    "MinibatchSamplerConfig",
    "PPOBufferConfig",
    "PrioritizedSamplerConfig",
    "RecurrentReplayBufferConfig",
    "RingStorageConfig",
    "RingWriterConfig",
    "RolloutStorageConfig",
    "RolloutWriterConfig",
    "SequenceSamplerConfig",
    "SimpleReplayBufferConfig",
    "UniformSamplerConfig",
    "VTraceAdvantagesConfig",
    "VTraceBufferConfig",
    "VanillaOnPolicyBufferConfig",
    "register_configs",
]

register_configs()
