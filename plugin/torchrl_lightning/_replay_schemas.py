"""Typed schemas of replay: its DataModule, and the storage, samplers and buffers below it. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class ReplayDataSchema:
    """Arguments of :class:`torchrl_lightning.ReplayDataModule`."""

    _target_: str = "torchrl_lightning.ReplayDataModule"
    _convert_: str = "all"
    env: Any = MISSING
    buffer: Any = MISSING
    num_envs: int = 1
    frames_per_batch: int | None = None
    total_frames: int = -1
    batch_size: int = 256
    updates_per_epoch: int = 1000
    frames_per_update: float = 1.0
    warmup_frames: int = 1000
    n_steps: int = 1
    gamma: float = 0.99
    write_back: Any = None
    checkpoint_buffer: str = "inside"
    buffer_dir: str | None = None
    collector: Any = None
    reset_at_each_batch: bool = False
    eval_env: Any = None
    eval_episodes: int = 10
    eval_num_envs: int = 10
    seed: int | None = None


@dataclass
class ReplayBufferSchema:
    """Arguments of every replay buffer that a DataModule does not fill in itself."""

    _partial_: bool = True
    _convert_: str = "all"
    writer: Any = None
    sampler: Any = None
    priority_key: str = "td_error"
    pin_memory: bool = False
    prefetch: int | None = None
    transform: Any = None


@dataclass
class ExperienceBufferSchema(ReplayBufferSchema):
    """Arguments of :class:`torchrl_lightning.ExperienceBuffer`."""

    _target_: str = "torchrl_lightning.ExperienceBuffer"
    storage: Any = None
    sample_unit: Any = None


@dataclass
class RecurrentReplayBufferSchema(ReplayBufferSchema):
    """Arguments of :class:`torchrl_lightning.RecurrentReplayBuffer`."""

    _target_: str = "torchrl_lightning.RecurrentReplayBuffer"
    capacity: int = MISSING
    state_dim: int | None = MISSING
    action_dim: int | None = MISSING
    hidden_dim: int | None = MISSING
    device: str | None = None
    scratch_dir: str | None = None


@dataclass
class SimpleReplayBufferSchema(ReplayBufferSchema):
    """Arguments of :class:`torchrl_lightning.SimpleReplayBuffer`."""

    _target_: str = "torchrl_lightning.SimpleReplayBuffer"
    obs_dim: int | None = MISSING
    act_dim: int | None = MISSING
    size: int = MISSING
    batch_size: int = MISSING
    device: str = "cpu"
    scratch_dir: str | None = None


@dataclass
class RingStorageSchema:
    """Arguments of :class:`torchrl_lightning.RingStorage`."""

    _target_: str = "torchrl_lightning.RingStorage"
    _convert_: str = "all"
    max_size: int = MISSING
    device: str = "cpu"
    scratch_dir: str | None = None


@dataclass
class UniformSamplerSchema:
    """Arguments of :class:`torchrl_lightning.UniformSampler`."""

    _target_: str = "torchrl_lightning.UniformSampler"
    _convert_: str = "all"
    with_replacement: bool = True
    stratified: bool = False


@dataclass
class PrioritizedSamplerSchema:
    """Arguments of :class:`torchrl_lightning.PrioritizedSampler`."""

    _target_: str = "torchrl_lightning.PrioritizedSampler"
    _convert_: str = "all"
    max_capacity: int = MISSING
    alpha: float = MISSING
    beta: float = MISSING
    eps: float = 1e-8
    reduction: str = "max"
    max_priority_within_buffer: bool = False
    device: str | None = None
    priority_key: Any = "td_error"
    stratified: bool = True
    weight_norm: str | None = "batch"
    initial_priority: float = 1.0


@dataclass
class SequenceSamplerSchema:
    """Arguments of :class:`torchrl_lightning.SequenceSampler`."""

    _target_: str = "torchrl_lightning.SequenceSampler"
    _convert_: str = "all"
    batch_length: int = MISSING
    episode_ends: str = "inside"
    burn_in: int = 0
    over: str = "steps"
    recurrent_keys: Any = field(default_factory=lambda: ["recurrent_state"])
    traj_key: Any = None
    end_key: Any = field(default_factory=lambda: ["next", "done"])
