"""Typed schemas of the exported configs; Hydra checks names and types of every field against them.

They live on the lowest floor and import no torch, because the search-path plugin stores them in every Hydra
application of the environment. A test keeps each in step with the signature that it describes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from torchrl_lightning._replay_schemas import (
    ExperienceBufferSchema,
    PrioritizedSamplerSchema,
    RecurrentReplayBufferSchema,
    ReplayDataSchema,
    RingStorageSchema,
    SequenceSamplerSchema,
    SimpleReplayBufferSchema,
    UniformSamplerSchema,
)

GROUP = "torchrl_lightning/schema"


@dataclass
class OnPolicyDataSchema:
    """Arguments of :class:`torchrl_lightning.OnPolicyDataModule`."""

    _target_: str = "torchrl_lightning.OnPolicyDataModule"
    _convert_: str = "all"
    env: Any = MISSING
    buffer: Any = MISSING
    num_envs: int = 8
    frames_per_batch: int = 1024
    total_frames: int = -1
    num_epochs: int = 4
    mini_batch_size: int | None = None
    num_mini_batch: int | None = None
    shuffle: bool = True
    collector: Any = None
    reset_at_each_batch: bool = False
    eval_env: Any = None
    eval_episodes: int = 10
    eval_num_envs: int = 10
    seed: int | None = None


@dataclass
class VanillaOnPolicyBufferSchema:
    """Arguments of :class:`torchrl_lightning.VanillaOnPolicyBuffer` that a DataModule does not fill in itself."""

    _target_: str = "torchrl_lightning.VanillaOnPolicyBuffer"
    _partial_: bool = True
    _convert_: str = "all"
    device: str = "cpu"
    gamma: float | None = None
    gamma_intrinsic: float | None = None
    normalize_intrinsic: bool = True
    intrinsic_direction: str = "forward"
    standardize_advantages: bool = True
    recompute_values: bool = False
    bootstrap: bool = True
    value_key: Any = "state_value"
    advantage_key: Any = "advantage"
    value_target_key: Any = "value_target"
    frame_stack: int | None = None
    recurrent: bool | None = None
    recurrent_keys: Any = field(default_factory=lambda: ["recurrent_state"])
    batch_keys: Any = None
    transform: Any = None


@dataclass
class GAEBufferSchema(VanillaOnPolicyBufferSchema):
    """Arguments of :class:`torchrl_lightning.GAEBuffer`."""

    _target_: str = "torchrl_lightning.GAEBuffer"
    gae_lambda: float = 0.95


@dataclass
class VTraceBufferSchema(VanillaOnPolicyBufferSchema):
    """Arguments of :class:`torchrl_lightning.VTraceBuffer`."""

    _target_: str = "torchrl_lightning.VTraceBuffer"
    lmbda: float = 1.0
    clip_rho_thres: float = 1.0
    clip_c_thres: float = 1.0
    clip_pg_rho_thres: float | None = None
    log_prob_key: Any = "action_log_prob"
    action_key: Any = "action"


@dataclass
class PPOBufferSchema(VanillaOnPolicyBufferSchema):
    """Arguments of :class:`torchrl_lightning.PPOBuffer`."""

    _target_: str = "torchrl_lightning.PPOBuffer"
    obs_dim: int | None = MISSING
    act_dim: int | None = MISSING
    batch_size: int = MISSING
    gamma: float = 0.99
    lam: float = 0.95
    eps: float = 1e-3


SCHEMAS: dict[tuple[str, str], Any] = {
    ("data", "on_policy"): OnPolicyDataSchema,
    ("data", "replay"): ReplayDataSchema,
    ("buffer", "vanilla"): VanillaOnPolicyBufferSchema,
    ("buffer", "gae"): GAEBufferSchema,
    ("buffer", "vtrace"): VTraceBufferSchema,
    ("buffer", "ppo"): PPOBufferSchema,
    ("buffer", "experience"): ExperienceBufferSchema,
    ("buffer", "recurrent"): RecurrentReplayBufferSchema,
    ("buffer", "simple"): SimpleReplayBufferSchema,
    ("storage", "ring"): RingStorageSchema,
    ("sampler", "uniform"): UniformSamplerSchema,
    ("sampler", "prioritized"): PrioritizedSamplerSchema,
    ("sampler", "sequence"): SequenceSamplerSchema,
}


def register_schemas() -> None:
    """Stores every schema in Hydra's ConfigStore; storing twice changes nothing."""
    store = ConfigStore.instance()
    for (group, name), node in SCHEMAS.items():
        store.store(group=f"{GROUP}/{group}", name=name, node=node, provider="torchrl-lightning")
