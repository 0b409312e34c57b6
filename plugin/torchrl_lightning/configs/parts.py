"""Configs of the storages, writers and samplers, for TorchRL's groups of these names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING
from torchrl.trainers.algorithms.configs.data import SamplerConfig, StorageConfig, WriterConfig


@dataclass
class RolloutStorageConfig(StorageConfig):
    """Config of :class:`torchrl_lightning.RolloutStorage`, ``storage: torchrl_lightning_rollout``."""

    _target_: str = "torchrl_lightning.RolloutStorage"
    _convert_: str = "all"
    size: int = MISSING
    num_envs: int | None = None
    device: Any = "cpu"


@dataclass
class RolloutWriterConfig(WriterConfig):
    """Config of :class:`torchrl_lightning.RolloutWriter`, ``writer: torchrl_lightning_rollout``."""

    _target_: str = "torchrl_lightning.configs.targets.RolloutWriter"
    _convert_: str = "all"
    time_dim: int | None = None
    recurrent_keys: Any = field(default_factory=lambda: ["recurrent_state"])


@dataclass
class MinibatchSamplerConfig(SamplerConfig):
    """Config of :class:`torchrl_lightning.MinibatchSampler`, ``sampler: torchrl_lightning_minibatch``."""

    _target_: str = "torchrl_lightning.MinibatchSampler"
    _convert_: str = "all"
    drop_last: bool = False
    shuffle: bool = True
    by: str = "steps"
    generator: Any = None
