"""Schemas of the DataModules. Generated from the constructors by ``tests/conf/schema_source.py``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class OnPolicyDataSchema:
    """Arguments of :class:`torchrl_lightning.OnPolicyDataModule`."""

    _target_: str = "torchrl_lightning.OnPolicyDataModule"
    _convert_: str = "all"
    env: Any = MISSING
    buffer: Any = MISSING
    num_epochs: int = 4
    mini_batch_size: int | None = None
    num_mini_batch: int | None = None
    shuffle: bool = True
    num_envs: int = 8
    frames_per_batch: int = 1024
    total_frames: int = -1
    collector: Any = None
    reset_at_each_batch: bool = False
    eval_env: Any = None
    eval_episodes: int = 10
    eval_num_envs: int = 10
    normalize_observation: Any = False
    normalize_reward: bool = False
    normalize_clip: float = 10.0
    seed: int | None = None


@dataclass
class ReplayDataSchema:
    """Arguments of :class:`torchrl_lightning.ReplayDataModule`."""

    _target_: str = "torchrl_lightning.ReplayDataModule"
    _convert_: str = "all"
    env: Any = MISSING
    buffer: Any = MISSING
    source: Any = None
    dataset: Any = None
    batch_size: int = 256
    updates_per_epoch: int = 1000
    updates_per_step: int = 1
    frames_per_update: float | None = None
    warmup_frames: int | None = None
    write_back: Any = None
    checkpoint_buffer: str = "inside"
    buffer_dir: str | None = None
    frames_per_batch: int | None = None
    num_envs: int = 1
    total_frames: int = -1
    collector: Any = None
    reset_at_each_batch: bool = False
    eval_env: Any = None
    eval_episodes: int = 10
    eval_num_envs: int = 10
    normalize_observation: Any = False
    normalize_reward: bool = False
    normalize_clip: float = 10.0
    seed: int | None = None


@dataclass
class DynamicsDataSchema:
    """Arguments of :class:`torchrl_lightning.DynamicsDataModule`."""

    _target_: str = "torchrl_lightning.DynamicsDataModule"
    _convert_: str = "all"
    env: Any = MISSING
    buffer: Any = MISSING
    batch_size: int = 256
    num_members: int = 1
    frames_per_fit: int = 250
    warmup_frames: int = 1000
    max_epochs_per_fit: int = 100
    validation_fraction: float = 0.2
    max_validation: int = 5000
    observation_keys: Any = None
    reward: Any = None
    terminated: bool = False
    frames_per_batch: int | None = None
    num_envs: int = 1
    total_frames: int = -1
    collector: Any = None
    reset_at_each_batch: bool = False
    eval_env: Any = None
    eval_episodes: int = 10
    eval_num_envs: int = 10
    seed: int | None = None


@dataclass
class EnvironmentRecipeSchema:
    """Arguments of :class:`torchrl_lightning.EnvironmentRecipe`."""

    _target_: str = "torchrl_lightning.EnvironmentRecipe"
    _convert_: str = "all"
    _recursive_: bool = False
    id: Any = MISSING
    env_kwargs: Any = None
    time_limit: int | None = None
    action_repeat: int = 1
    wrappers: Any = field(default_factory=list)
    keep: list[str] | None = None
    drop: list[str] = field(default_factory=list)
    rename: Any = None
    observe: list[int] | None = None
    flatten: bool = False
    frame_stack: int = 1
    clip_reward: float | None = None
    vectorization: str = "sync"


SCHEMAS: dict[tuple[str, str], Any] = {
    ("data", "on_policy"): OnPolicyDataSchema,
    ("data", "replay"): ReplayDataSchema,
    ("data", "dynamics"): DynamicsDataSchema,
    ("env", "recipe"): EnvironmentRecipeSchema,
}
