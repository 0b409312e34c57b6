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
class RingStorageConfig(StorageConfig):
    """Config of :class:`torchrl_lightning.RingStorage`, ``storage: torchrl_lightning_ring``."""

    _target_: str = "torchrl_lightning.RingStorage"
    _convert_: str = "all"
    max_size: int = MISSING
    device: Any = "cpu"
    scratch_dir: Any = None
    compilable: bool = False


@dataclass
class RolloutWriterConfig(WriterConfig):
    """Config of :class:`torchrl_lightning.RolloutWriter`, ``writer: torchrl_lightning_rollout``."""

    _target_: str = "torchrl_lightning.configs.targets.RolloutWriter"
    _convert_: str = "all"
    time_dim: int | None = None
    recurrent_keys: Any = field(default_factory=lambda: ["recurrent_state"])


@dataclass
class RingWriterConfig(WriterConfig):
    """Config of :class:`torchrl_lightning.RingWriter`, ``writer: torchrl_lightning_ring``."""

    _target_: str = "torchrl_lightning.configs.targets.RingWriter"
    _convert_: str = "all"
    num_envs: int = 1
    track_episodes: bool | None = None
    done_key: Any = field(default_factory=lambda: ["next", "done"])
    init_key: Any = "is_init"


@dataclass
class MinibatchSamplerConfig(SamplerConfig):
    """Config of :class:`torchrl_lightning.MinibatchSampler`, ``sampler: torchrl_lightning_minibatch``."""

    _target_: str = "torchrl_lightning.MinibatchSampler"
    _convert_: str = "all"
    drop_last: bool = False
    shuffle: bool = True
    by: str = "steps"
    generator: Any = None


@dataclass
class UniformSamplerConfig(SamplerConfig):
    """Config of :class:`torchrl_lightning.UniformSampler`, ``sampler: torchrl_lightning_uniform``."""

    _target_: str = "torchrl_lightning.UniformSampler"
    _convert_: str = "all"
    with_replacement: bool = True
    stratified: bool = False
    generator: Any = None


@dataclass
class PrioritizedSamplerConfig(SamplerConfig):
    """Config of :class:`torchrl_lightning.PrioritizedSampler`, ``sampler: torchrl_lightning_prioritized``."""

    _target_: str = "torchrl_lightning.configs.targets.PrioritizedSampler"
    _convert_: str = "all"
    max_capacity: int = MISSING
    alpha: float = MISSING
    beta: float = MISSING
    eps: float = 1e-8
    dtype: Any = "float64"
    reduction: str = "max"
    max_priority_within_buffer: bool = False
    device: Any = None
    priority_key: Any = "td_error"
    stratified: bool = True
    weight_norm: str | None = "batch"
    initial_priority: float = 1.0
    generator: Any = None


@dataclass
class SequenceSamplerConfig(SamplerConfig):
    """Config of :class:`torchrl_lightning.SequenceSampler`, ``sampler: torchrl_lightning_sequence``."""

    _target_: str = "torchrl_lightning.configs.targets.SequenceSampler"
    _convert_: str = "all"
    batch_length: int = MISSING
    episode_ends: str = "inside"
    burn_in: int = 0
    over: str = "steps"
    recurrent_keys: Any = field(default_factory=lambda: ["recurrent_state"])
    traj_key: Any = None
    end_key: Any = field(default_factory=lambda: ["next", "done"])
    generator: Any = None
