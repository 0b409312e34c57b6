"""Configs of the on-policy buffers, for TorchRL's group `replay_buffer`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING
from torchrl.trainers.algorithms.configs.data import ReplayBufferBaseConfig

_TARGETS = "torchrl_lightning.configs.targets"


@dataclass
class VanillaOnPolicyBufferConfig(ReplayBufferBaseConfig):
    """Config of :class:`torchrl_lightning.VanillaOnPolicyBuffer`; every key may be a string or a list of strings."""

    _target_: str = f"{_TARGETS}.VanillaOnPolicyBuffer"
    _convert_: str = "all"
    size: int = MISSING
    device: Any = "cpu"
    actor: Any = None
    algorithm: Any = None
    envs: Any = None
    gamma: float | None = None
    critic: Any = None
    intrinsic_critic: Any = None
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
    num_envs: int | None = None
    time_dim: int | None = None
    recurrent: bool | None = None
    recurrent_keys: Any = field(default_factory=lambda: ["recurrent_state"])
    batch_keys: Any = None
    batch_size: int | None = None
    generator: Any = None
    transform: Any = None


@dataclass
class GAEBufferConfig(VanillaOnPolicyBufferConfig):
    """Config of :class:`torchrl_lightning.GAEBuffer`."""

    _target_: str = f"{_TARGETS}.GAEBuffer"
    gae_lambda: float = 0.95


@dataclass
class VTraceBufferConfig(VanillaOnPolicyBufferConfig):
    """Config of :class:`torchrl_lightning.VTraceBuffer`."""

    _target_: str = f"{_TARGETS}.VTraceBuffer"
    lmbda: float = 1.0
    clip_rho_thres: float = 1.0
    clip_c_thres: float = 1.0
    clip_pg_rho_thres: float | None = None
    log_prob_key: Any = "action_log_prob"
    action_key: Any = "action"


@dataclass
class PPOBufferConfig(VanillaOnPolicyBufferConfig):
    """Config of :class:`torchrl_lightning.PPOBuffer`."""

    _target_: str = f"{_TARGETS}.PPOBuffer"
    obs_dim: int | None = MISSING
    act_dim: int | None = MISSING
    batch_size: int = MISSING
    gamma: float = 0.99
    lam: float = 0.95
    eps: float = 1e-3
