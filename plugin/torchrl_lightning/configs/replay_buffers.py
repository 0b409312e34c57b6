"""Configs of the replay buffers, for TorchRL's group `replay_buffer`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING
from torchrl.trainers.algorithms.configs.data import ReplayBufferBaseConfig

_TARGETS = "torchrl_lightning.configs.targets"


@dataclass
class ReplayOptionsConfig(ReplayBufferBaseConfig):
    """What the configs of all replay buffers share: everything but the storage, which some make themselves."""

    _convert_: str = "all"
    writer: Any = None
    sampler: Any = None
    num_envs: int | None = None
    generator: Any = None
    priority_key: Any = "td_error"
    pin_memory: bool = False
    prefetch: int | None = None
    transform: Any = None
    batch_size: int | None = None
    shared: bool = False


@dataclass
class ExperienceBufferConfig(ReplayOptionsConfig):
    """Config of :class:`torchrl_lightning.ExperienceBuffer`."""

    _target_: str = f"{_TARGETS}.ExperienceBuffer"
    storage: Any = None
    sample_unit: Any = None
    collate_fn: Any = None
    transform_factory: Any = None
    dim_extend: int | None = None
    checkpointer: Any = None
    consume_after_n_samples: int | None = None
    compilable: bool | None = None
    delayed_init: bool | None = None
    transport: str = "auto"
    transport_options: Any = None


@dataclass
class RecurrentReplayBufferConfig(ReplayOptionsConfig):
    """Config of :class:`torchrl_lightning.RecurrentReplayBuffer`."""

    _target_: str = f"{_TARGETS}.RecurrentReplayBuffer"
    capacity: int = MISSING
    state_dim: int | None = MISSING
    action_dim: int | None = MISSING
    hidden_dim: int | None = MISSING
    device: Any = None
    scratch_dir: Any = None


@dataclass
class SimpleReplayBufferConfig(ReplayOptionsConfig):
    """Config of :class:`torchrl_lightning.SimpleReplayBuffer`."""

    _target_: str = f"{_TARGETS}.SimpleReplayBuffer"
    obs_dim: int | None = MISSING
    act_dim: int | None = MISSING
    size: int = MISSING
    batch_size: int = MISSING
    device: Any = "cpu"
    scratch_dir: Any = None
